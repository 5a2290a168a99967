//! The borrowed NVMe device compared with QEMU's own `nvme` device: one guest has both, on
//! equal images, and fio runs on them in turns. Likewise a borrowed virtio-blk disk and QEMU's own.
//!
//! [`drives`] measures both, [`measure`] runs fio once, [`ping_pong`] measures the latency
//! of a device of [`testers`]. [`micro`], [`neighbour`] and [`pauses`] need no guest.
//! [`network`] compares a disk of another host with NVMe over TCP, [`nic`] a network device with QEMU's own,
//! [`passthrough`] physical devices with themselves. `farside_bench` makes figures, tables, plots and the report.

mod about;
mod drives;
mod guest;
mod images;
mod measure;
mod micro;
mod neighbour;
mod nested;
mod network;
mod nic;
mod passthrough;
mod pauses;
mod peer;
mod ping_pong;
mod testers;

use std::{ffi::OsString, path::Path, time::Instant};

use anyhow::{Result, ensure};
use farside_bench::{
    Results,
    job::{JOBS, Job, Pattern},
    tables,
};
use farside_testbed::{Progress, Testbed, Vm};

use crate::{
    args::{Bench, Chapter, Hosts},
    cargo::{self, Profile},
    cpu, interrupt,
    scene::{self, Model, Scene},
};
use drives::Both;
use guest::Drives;
use images::Images;
use micro::Micro;
pub(crate) use network::wire;
use testers::Testers;

/// Name of the VM.
const VM: &str = "bench";
/// Names of the disks.
const BORROWED: &str = "borrowed";
const OWN: &str = "QEMU's own";

/// Amount of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    /// Measurements of each job on each disk.
    repeats: u32,
    /// Length of one.
    seconds: u32,
    /// Whether an unmeasured run precedes.
    warm_up: bool,
    /// Ratio of adjacent sizes of a sweep.
    sweep_step: u64,
    /// Measurements of each size on each disk: there are many sizes.
    sweep_repeats: u32,
    /// Rounds of ping-pong in each repeat.
    rounds: u32,
    /// Turns of short measurements.
    turns: u32,
    /// Kills of each process in a repeat.
    kills: u32,
    /// The largest guest whose memory is locked, GiB.
    largest_gib: u64,
}

impl Settings {
    fn of(args: &Bench) -> Self {
        let (repeats, seconds, sweep_step, rounds, turns, kills, largest_gib) = match args.quick {
            true => (2, 1, 32, 500, 3, 3, 1),
            false => (5, 3, 2, 3000, 21, 20, 16),
        };
        Self {
            repeats: args.repeats.unwrap_or(repeats),
            sweep_repeats: args.repeats.unwrap_or(2),
            seconds: args.seconds.unwrap_or(seconds),
            warm_up: !args.quick,
            sweep_step,
            rounds,
            turns,
            kills,
            largest_gib,
        }
    }
}

pub(crate) fn run(args: &Bench) -> Result<()> {
    let start = Instant::now();
    let in_guest = [Chapter::Fio, Chapter::Sweep, Chapter::PingPong];
    let with_nvme = in_guest.into_iter().any(|chapter| args.wants(chapter));
    let with_virtio = args.wants(Chapter::Virtio);
    ensure!(
        !(with_nvme && with_virtio),
        "--only virtio has the jobs of --only fio, in another guest: measure the two one after the other"
    );
    let program = match &args.program {
        Some(program) => std::path::absolute(program)?,
        None => cargo::build_product(Profile::Release)?,
    };
    ensure!(
        program.is_file(),
        "there is no program {}: give one, or leave --program out to have it built",
        program.display()
    );
    let progress = Progress::auto();
    let testbed = Testbed::prepare(&progress)?;
    interrupt::watch()?;

    let settings = Settings::of(args);
    // Before there are images, which may be in memory: this uses much memory.
    let without_guest = match args.wants(Chapter::Micro) {
        true => micro::measure(
            &Micro {
                program: &program,
                libvfio_user: args.libvfio_user.as_deref(),
                turns: settings.turns,
                slow_turns: settings.repeats,
                largest_gib: settings.largest_gib,
            },
            &progress,
        )?,
        false => Vec::new(),
    };
    let images = Images::make(args.images.as_deref(), &progress)?;
    let environment = about::environment(&testbed, args, &settings, images.directory());
    let mut results = Results::new(environment, [BORROWED, OWN]);
    for section in without_guest {
        results.add(section)?;
    }
    // Without a second CPU, the other chapters can still be measured.
    let alone = args.only.is_empty() && cpu::available()?.len() < 2;
    if args.wants(Chapter::Neighbour) && !alone {
        let turns = args.repeats.unwrap_or(settings.turns);
        let section = neighbour::measure(&program, &images.borrowed, turns, &progress)?;
        results.add(section)?;
    }
    if args.wants(Chapter::Pauses) {
        let Settings { kills, repeats, .. } = settings;
        results.add(pauses::measure(&program, kills, repeats, &progress)?)?;
    }
    let parameters = Parameters {
        program: &program,
        testbed: &testbed,
        images: &images,
        args,
        settings: &settings,
        progress: &progress,
    };
    if args.wants(Chapter::Passthrough) {
        let (jobs, section) = passthrough::measure(&parameters)?;
        results.jobs.extend(jobs);
        results.add(section)?;
    }
    if args.wants(Chapter::VirtioNet) {
        results.add(nic::measure(&parameters)?)?;
    }
    if args.wants(Chapter::PeerToPeer) {
        results.add(peer::measure(&parameters)?)?;
    }
    if args.wants(Chapter::Network) {
        if args.hosts != Some(Hosts::Vms) {
            results.jobs.extend(network::in_namespaces(&parameters)?);
        }
        if args.hosts != Some(Hosts::Namespaces) {
            results.jobs.extend(network::in_vms(&parameters)?);
        }
    }
    if with_nvme || with_virtio {
        in_a_guest(
            args,
            &settings,
            &program,
            &testbed,
            &images,
            &progress,
            &mut results,
        )?;
    }
    let seconds = format!("{:.0}", start.elapsed().as_secs_f64());
    results
        .environment
        .options
        .insert("took, s".into(), seconds);

    print!("{}", tables::text(&results));
    if let Some(path) = &args.json {
        farside_bench::output::write_json(&results, path)?;
    }
    if let Some(directory) = &args.out {
        let report = farside_bench::output::write_all(&results, directory)?;
        println!("report: {}", report.display());
    }
    Ok(())
}

/// All measurements in one guest.
fn in_a_guest(
    args: &Bench,
    settings: &Settings,
    program: &Path,
    testbed: &Testbed,
    images: &Images,
    progress: &Progress,
    results: &mut Results,
) -> Result<()> {
    let model = match args.wants(Chapter::Virtio) {
        true => Model::VirtioBlk,
        false => Model::Nvme,
    };
    let scene = Scene::start_as(
        model,
        program.to_owned(),
        scene::directory(VM)?,
        &images.borrowed,
        VM,
        &[],
    )?;
    let testers = match args.wants(Chapter::PingPong) {
        true => Some(Testers::start(program)?),
        false => None,
    };
    let stage = Stage {
        args,
        settings,
        scene: &scene,
        model,
        testbed,
        images,
        progress,
    };
    stage.play(testers.as_ref(), results).map_err(|error| {
        let testers = testers.as_ref().map(Testers::last_words);
        let words = scene.last_words() + &testers.unwrap_or_default();
        error.context(format!("the bench failed{words}"))
    })?;
    if let Some(testers) = testers {
        testers.stop()?;
    }
    let left = scene.stop()?;
    ensure!(left.is_empty(), "sockets were left behind: {left:?}");
    Ok(())
}

/// The parameters of the chapters that make hosts.
struct Parameters<'a> {
    program: &'a Path,
    testbed: &'a Testbed,
    images: &'a Images,
    args: &'a Bench,
    settings: &'a Settings,
    progress: &'a Progress,
}

impl Parameters<'_> {
    fn jobs(&self) -> Vec<&'static Job> {
        let wanted = |job: &&Job| match self.args.jobs.as_slice() {
            [] => job.pattern != Pattern::Mixed,
            jobs => jobs.iter().any(|name| *name == job.name),
        };
        JOBS.iter().filter(wanted).collect()
    }
}

struct Stage<'a> {
    args: &'a Bench,
    settings: &'a Settings,
    scene: &'a Scene,
    model: Model,
    testbed: &'a Testbed,
    images: &'a Images,
    progress: &'a Progress,
}

impl Stage<'_> {
    /// From the VM's start to its end.
    fn play(&self, testers: Option<&Testers>, results: &mut Results) -> Result<()> {
        let Self { args, scene, .. } = self;
        let task = self.progress.spinner("Booting the guest");
        let more: Vec<OsString> = testers.map(Testers::qemu_args).unwrap_or_default();
        let (guest, drives) = guest::boot(
            scene,
            self.testbed,
            self.model,
            &self.images.own,
            &args.own_aio,
            args.viommu,
            &more,
        )?;
        results.environment.guest_kernel = Some(guest.vm.kernel_release());
        task.done();

        self.measure(&guest.vm, &drives, results)?;

        let (borrow, lent) = scene.device()?;
        ensure!(
            lent.faults.total == 0 && borrow.last_error.is_none(),
            "the borrowed disk met {} DMA faults, last error {:?}: the figures mean nothing",
            lent.faults.total,
            borrow.last_error
        );
        guest.shutdown()?;
        scene.wait_for("the disk's return to the lender", |scene| {
            Ok(scene.device()?.1.is_free())
        })
    }

    fn measure(&self, vm: &Vm, drives: &Drives, results: &mut Results) -> Result<()> {
        let Self { args, settings, .. } = self;
        let both = Both {
            vm,
            drives,
            pids: &[vm.pid(), self.scene.backend_pid(), self.scene.lender_pid()],
            repeats: settings.repeats,
            warm_up: settings.warm_up,
            progress: self.progress,
        };
        if args.wants(Chapter::PingPong) {
            results.add(ping_pong::measure(
                vm,
                self.testbed.accel(),
                settings.rounds,
                settings.repeats,
                self.progress,
            )?)?;
        }
        if args.wants(Chapter::Fio) || args.wants(Chapter::Virtio) {
            let wanted =
                |name: &str| args.jobs.is_empty() || args.jobs.iter().any(|job| job == name);
            let jobs: Vec<_> = JOBS.iter().filter(|job| wanted(&job.name)).collect();
            results.jobs.extend(both.jobs(&jobs, settings.seconds)?);
        }
        if args.wants(Chapter::Sweep) {
            results.add(both.sweep(settings.sweep_step, settings.sweep_repeats)?)?;
        }
        Ok(())
    }
}
