//! How long a disk's I/O waits when a process of it is killed, or its services are restarted.
//!
//! A scripted VM takes the guest's place ([`farside_tests::load`]): it keeps commands in flight and
//! checks their data. A pause is the longest batch of commands that was in flight from the kill until
//! the VM has done a whole round of I/O after it, of two batches.

use std::{
    panic::resume_unwind,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use farside_bench::{Better, Data, Quantiles, Section, Series, Target, Unit};
use farside_scripted_vmm::nvme::Doorbells;
use farside_testbed::Progress;
use farside_tests::{
    Cluster, Daemon, Keepers,
    load::{self, Disk, Medium, Random, TIMEOUT},
};
use rustix::process::{Pid, Signal, kill_process};

use crate::interrupt;

/// The VM's name.
const VM: &str = "a";
/// The VM goes on for a random time of up to this before each kill.
const BETWEEN: Duration = Duration::from_millis(50);
/// What happens to the processes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    Nothing,
    Keeper,
    /// The lender alone; another one is started.
    Lender,
    Worker,
    Backend,
    BackendAndWorker,
    /// With its keeper and workers; another one is started.
    LenderAndAll,
    /// The services of lender and backend are restarted at once.
    Restart,
}

impl Event {
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "no kill",
            Self::Keeper => "the backend's keeper",
            Self::Lender => "lender",
            Self::Worker => "worker",
            Self::Backend => "backend",
            Self::BackendAndWorker => "backend and worker",
            Self::LenderAndAll => "lender, its keeper, its workers",
            Self::Restart => "all services restarted",
        }
    }

    /// The goal, of the median.
    fn target(self) -> Option<Duration> {
        match self {
            Self::Worker | Self::Backend => Some(Duration::from_millis(50)),
            Self::Restart => Some(Duration::from_secs(1)),
            Self::Nothing
            | Self::Keeper
            | Self::Lender
            | Self::BackendAndWorker
            | Self::LenderAndAll => None,
        }
    }
}

const EVENTS: [Event; 8] = [
    Event::Nothing,
    Event::Lender,
    Event::Keeper,
    Event::Worker,
    Event::Backend,
    Event::BackendAndWorker,
    Event::LenderAndAll,
    Event::Restart,
];

/// What happens to a disk of each kind. (That of another server is lost with the lender and all
/// workers.)
const CASES: [(&str, Disk, &[Event]); 3] = [
    ("NVMe", Disk::Nvme(Doorbells::Buffer), &EVENTS),
    (
        "virtio-blk",
        Disk::VirtioBlk { event_idx: true },
        &[Event::Nothing, Event::Worker, Event::Backend],
    ),
    (
        "of another server",
        Disk::OfServer(Doorbells::Registers),
        &[Event::Nothing, Event::Worker, Event::Backend],
    ),
];

/// Measures `kills` of each process, `repeats` times, in turns.
pub(super) fn measure(
    program: &Path,
    kills: u32,
    repeats: u32,
    progress: &Progress,
) -> Result<Section> {
    let cases: Vec<_> = CASES
        .iter()
        .flat_map(|(name, disk, events)| events.iter().map(move |event| (*name, *disk, *event)))
        .collect();
    let task = progress.bar("Killing processes", u64::from(repeats) * cases.len() as u64);
    let mut runs = vec![Vec::new(); cases.len()];
    let mut done = 0;
    for repeat in 0..repeats {
        for ((name, disk, event), runs) in cases.iter().zip(&mut runs) {
            interrupt::check()?;
            task.detail(&format!("{name}: {}", event.name()));
            runs.push(run(program, *disk, *event, kills, repeat.into())?);
            done += 1;
            task.set(done);
        }
    }
    task.done();
    let series = cases
        .iter()
        .zip(runs)
        .map(|((name, _, event), runs)| Series {
            name: format!("{name}: {}", event.name()),
            unit: Unit::Nanoseconds,
            better: Better::Less,
            data: Data::Quantiles(runs),
            against: None,
            target: event
                .target()
                .map(|most| Target::AtMost(most.as_nanos() as f64)),
        });
    Ok(Section {
        name: "pauses".into(),
        title: "Pauses of I/O when processes are killed".into(),
        about: format!(
            "A driver without a guest keeps commands in flight and checks their data, while a process gets SIGKILL at \
             a random time, {kills} times a repeat; a lender is started again at once, all else starts by itself. The \
             pause is the longest batch of commands that was in flight from the kill until a whole round of I/O (two batches) after it: \
             \"no kill\" is the longest batch of as many in any case. No command may fail. Every repeat has processes of its own; \
             all cases take turns. Goals, of the median: 50 ms for worker and backend, 1 s for a restart of \
             all services."
        ),
        series: series.collect(),
    })
}

/// The pauses of one VM.
fn run(program: &Path, disk: Disk, event: Event, kills: u32, seed: u64) -> Result<Quantiles> {
    let cluster = Cluster::in_memory()?.with_program(program);
    let of_this = || -> Result<_> {
        let medium = disk.medium(&cluster)?;
        let mut processes = Processes::start(&cluster, disk, &medium)?;
        let mut random = Random::seeded(seed);
        let (vm, spans) = load::disturbed(&cluster, disk, &mut random, |mut random, progress| {
            let mut spans = Vec::new();
            for _ in 0..kills {
                interrupt::check()?;
                progress.wait(&mut random, BETWEEN)?;
                let began = Instant::now();
                processes.disturb(event)?;
                progress.wait(&mut random, Duration::from_micros(1))?;
                spans.push((began, Instant::now()));
                std::thread::sleep(Keepers::INTERVAL.saturating_sub(began.elapsed()));
            }
            Ok(spans)
        })?;
        let pauses = vm.longest(&spans);
        ensure!(
            pauses.len() == kills as usize,
            "{} pauses of {kills} kills",
            pauses.len()
        );
        Quantiles::of(pauses.iter().map(|pause| pause.as_nanos() as f64)).context("no kills")
    };
    of_this().map_err(|error| {
        let story = cluster.story();
        error.context(format!(
            "{event}: the bench failed\n{story}",
            event = event.name()
        ))
    })
}

fn serve(cluster: &Cluster) -> Result<Daemon> {
    cluster.serve(VM, &["disk0"]).args(&["--keeper"]).start()
}

struct Processes<'a> {
    cluster: &'a Cluster,
    disk: Disk,
    medium: &'a Medium,
    lender: Daemon,
    /// The keeper, whose child is the backend.
    service: Daemon,
    /// The first backend.
    backend: Pid,
}

impl<'a> Processes<'a> {
    fn start(cluster: &'a Cluster, disk: Disk, medium: &'a Medium) -> Result<Self> {
        let lender = disk.lend(cluster, medium)?;
        let service = serve(cluster)?;
        Ok(Self {
            cluster,
            disk,
            medium,
            lender,
            backend: service.backend()?,
            service,
        })
    }

    fn disturb(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Nothing => Ok(()),
            Event::Keeper => {
                let backend = self.backend.as_raw_nonzero().get().cast_unsigned();
                kill(Keepers::find(self.cluster, backend)?.keeper)
            }
            Event::Lender => {
                self.lender.kill()?;
                self.lend()
            }
            Event::Worker => kill(worker(&self.lender)?),
            Event::Backend => kill(self.service.backend()?),
            Event::BackendAndWorker => {
                let worker = worker(&self.lender)?;
                kill(self.service.backend()?)?;
                // It ends with its backend, too.
                let _ = kill_process(worker, Signal::KILL);
                Ok(())
            }
            Event::LenderAndAll => {
                self.lender.kill_all()?;
                self.lend()
            }
            Event::Restart => self.restart(),
        }
    }

    fn lend(&mut self) -> Result<()> {
        self.lender = self.disk.lend(self.cluster, self.medium)?;
        Ok(())
    }

    /// As `systemctl restart farside.target`: SIGUSR1, then new services.
    fn restart(&mut self) -> Result<()> {
        for service in [&mut self.lender, &mut self.service] {
            service.signal(Signal::USR1)?;
        }
        for service in [&mut self.service, &mut self.lender] {
            let status = service.wait_end(TIMEOUT)?;
            ensure!(status.success(), "a service that was restarted: {status}");
        }
        let (cluster, disk, medium) = (self.cluster, self.disk, self.medium);
        std::thread::scope(|scope| {
            let lender = scope.spawn(|| disk.lend(cluster, medium));
            std::mem::replace(&mut self.service, serve(cluster)?).leave_to_the_next();
            self.lender = lender.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            Ok(())
        })
    }
}

fn kill(pid: Pid) -> Result<()> {
    kill_process(pid, Signal::KILL).with_context(|| format!("killing process {pid}"))
}

/// The only worker of a lender.
fn worker(lender: &Daemon) -> Result<Pid> {
    match lender.workers()[..] {
        [worker] => Ok(worker),
        ref workers => bail!("not one worker: {workers:?}"),
    }
}
