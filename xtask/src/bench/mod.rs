//! The borrowed NVMe drive against QEMU's own `nvme` device: one guest has both,
//! on equal images, and fio runs on them in turns.
//!
//! [`job`] says what fio does, [`measure`] does it once, [`ratio`] makes one
//! figure of many, [`report`] shows them.

mod images;
mod job;
mod measure;
mod ratio;
mod report;

use std::{fs, time::Instant};

use anyhow::{Context, Result, ensure};
use farside_testbed::{Progress, Testbed, Vm};

use crate::{
    args::Bench,
    cargo::{self, Profile},
    interrupt,
    scene::{self, BOOT, DEVICE, SHORT, Scene, Size},
};
use images::Images;
pub(crate) use job::NAMES as JOB_NAMES;
use job::{JOBS, Job};
use measure::{Measurement, Run};
use report::{About, Compared};

/// Name of the VM.
const VM: &str = "bench";
/// The machine of both drives.
const SIZE: Size = Size {
    memory_mib: 1024,
    cpus: 2,
};
/// Serial number of QEMU's own device, by which the guest tells it apart.
const OWN_SERIAL: &str = "qemu-own";

pub(crate) fn run(args: &Bench) -> Result<()> {
    let start = Instant::now();
    let program = cargo::build_product(Profile::Release)?;
    let progress = Progress::auto();
    let testbed = Testbed::prepare(&progress)?;
    interrupt::watch()?;

    let images = Images::make(args.images.as_deref(), &progress)?;
    let scene = Scene::start(program, scene::folder(VM)?, &images.borrowed, VM)?;
    let jobs: Vec<&Job> = JOBS
        .iter()
        .filter(|job| args.jobs.is_empty() || args.jobs.iter().any(|name| name == job.name))
        .collect();
    let mut about = About {
        qemu: testbed.qemu_version().to_owned(),
        accel: format!("{:?}", testbed.accel()).to_uppercase(),
        own_aio: args.own_aio.clone(),
        images: images.folder().to_owned(),
        repeats: args.repeats,
        seconds: args.seconds,
        ..About::default()
    };
    let compared = play(
        args, &scene, &testbed, &images, &jobs, &progress, &mut about,
    )
    .map_err(|error| error.context(format!("the bench failed{}", scene.last_words())))?;
    let left = scene.stop()?;
    ensure!(left.is_empty(), "sockets were left behind: {left:?}");
    about.wall = start.elapsed();

    print!("{}", report::text(&about, &compared));
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report::json(&about, &compared))?;
        fs::write(path, json + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// From the VM's start to its end.
fn play(
    args: &Bench,
    scene: &Scene,
    testbed: &Testbed,
    images: &Images,
    jobs: &[&Job],
    progress: &Progress,
    about: &mut About,
) -> Result<Vec<Compared>> {
    let task = progress.spinner("Booting the guest");
    let drive = format!(
        "if=none,id=own,file={},format=raw,cache=writeback,aio={}",
        // A comma in a value is doubled.
        images.own.display().to_string().replace(',', ",,"),
        args.own_aio
    );
    let device = format!("nvme,drive=own,serial={OWN_SERIAL}");
    let more = ["-drive", &drive, "-device", &device].map(Into::into);
    let guest = scene.launch(testbed, &SIZE, &more)?;
    guest.vm.qmp().execute("cont", serde_json::json!({}))?;
    guest.vm.wait_agent(BOOT)?;
    about.kernel = guest.vm.kernel_release();
    let drives = find_drives(&guest.vm)?;
    task.done();

    let pids = [guest.vm.pid(), scene.backend_pid(), scene.lender_pid()];
    let compared = compare(args, &guest.vm, &drives, &pids, jobs, progress)?;

    let (borrow, lent) = scene.device()?;
    ensure!(
        lent.faults.total == 0 && borrow.last_error.is_none(),
        "the borrowed drive met {} DMA faults, last error {:?}: the figures mean nothing",
        lent.faults.total,
        borrow.last_error
    );
    guest.shutdown()?;
    scene.wait_for("the drive's return to the lender", |scene| {
        Ok(scene.device()?.1.is_free())
    })?;
    Ok(compared)
}

/// Block devices of the guest.
struct Drives {
    borrowed: String,
    own: String,
}

fn find_drives(vm: &Vm) -> Result<Drives> {
    for path in ["/dev/nvme0n1", "/dev/nvme1n1"] {
        vm.wait_path(path, SHORT)?;
    }
    let serials = vm.exec_ok("cat /sys/block/nvme[01]n1/device/serial", SHORT)?;
    let serials: Vec<&str> = serials.lines().map(str::trim).collect();
    let own = serials.iter().position(|serial| *serial == OWN_SERIAL);
    let own = own.with_context(|| format!("no drive {OWN_SERIAL} among {serials:?}"))?;
    ensure!(serials.len() == 2, "not two drives: {serials:?}");
    Ok(Drives {
        borrowed: format!("nvme{}n1", 1 - own),
        own: format!("nvme{own}n1"),
    })
}

/// Measures all jobs on both drives, in turns: borrowed, own, borrowed, own.
fn compare(
    args: &Bench,
    vm: &Vm,
    drives: &Drives,
    pids: &[u32],
    jobs: &[&Job],
    progress: &Progress,
) -> Result<Vec<Compared>> {
    let measure = |job, drive: &String, seconds| -> Result<Measurement> {
        interrupt::check()?;
        let run = Run {
            vm,
            drive,
            pids,
            seconds,
        };
        run.measure(job)
            .with_context(|| format!("{} on {drive} of {DEVICE} and {OWN_SERIAL}", job.name))
    };
    // Each job once per drive unmeasured: QEMU's translator has then seen the
    // code, and the images are in the page cache.
    let each = 2 * (u64::from(args.repeats) + 1);
    let task = progress.bar("Measuring", jobs.len() as u64 * each);
    let mut done = 0;
    let mut compared = Vec::new();
    for &job in jobs {
        let mut pairs = Vec::new();
        for repeat in 0..=args.repeats {
            let mut pair = Vec::new();
            let seconds = if repeat == 0 { 1 } else { args.seconds };
            for (name, drive) in [("borrowed", &drives.borrowed), ("own", &drives.own)] {
                task.detail(&match repeat {
                    0 => format!("{}, {name}, warm-up", job.name),
                    _ => format!("{}, {name}, {repeat} of {}", job.name, args.repeats),
                });
                pair.push(measure(job, drive, seconds)?);
                done += 1;
                task.set(done);
            }
            if let (1.., [borrowed, own]) = (repeat, &pair[..]) {
                pairs.push((borrowed.clone(), own.clone()));
            }
        }
        progress.note(&report::line(job, &pairs));
        compared.push(Compared { job: *job, pairs });
    }
    task.done();
    Ok(compared)
}
