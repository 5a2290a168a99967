//! The borrowed disk beside a busy neighbour: the cost of a thread that computes
//! continuously on the CPU of the device thread, and the mutual cost of backend and device
//! on one CPU.
//!
//! A polling driver, with the client of the scripted VMM, takes the guest's place: it needs
//! no CPU time of QEMU or a guest, so the device is measured. Every case alternates with
//! the same one on dedicated CPUs.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use farside_bench::{Better, Data, Section, Series, Target, Unit};
use farside_scripted_vmm::{
    nvme::{Doorbells, Load, Polled},
    ram::Layout,
    session::{Options, Session},
};
use farside_testbed::Progress;
use rustix::thread::Pid;

use crate::{
    cpu::{self, Pinned},
    interrupt,
    scene::{self, DEVICE, SHORT, Scene},
};

/// The VM's name.
const VM: &str = "neighbour";
/// Guest RAM.
const RAM: u64 = 32 << 20;
/// Length of a measurement: dozens of scheduler time slices.
const TURN: Duration = Duration::from_millis(250);
/// Reads in flight.
const DEPTHS: [u16; 2] = [1, 32];
/// Target with half of a CPU: 0.9 of the throughput that half of the CPU time is worth.
const SHARE: f64 = 0.45;
/// Target on one CPU with the backend, relative to two. Each doorbell is a message there.
const ONE_CPU: f64 = 0.2;

/// The other load of the device's CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nobody,
    /// A computing thread.
    Neighbour,
    /// The backend.
    Backend,
}

impl Beside {
    fn name(self) -> &'static str {
        match self {
            Self::Nobody => "a CPU to itself",
            Self::Neighbour => "busy neighbour",
            Self::Backend => "backend on its CPU",
        }
    }

    /// The target, relative to [`Beside::Nobody`].
    fn target(self) -> Option<f64> {
        match self {
            Self::Nobody => None,
            Self::Neighbour => Some(SHARE),
            Self::Backend => Some(ONE_CPU),
        }
    }
}

/// The cases to measure in each mode.
const MODES: [(Doorbells, &[Beside]); 2] = [
    (Doorbells::Buffer, &[Beside::Nobody, Beside::Neighbour]),
    (Doorbells::Registers, &[Beside::Nobody, Beside::Backend]),
];

fn name(doorbells: Doorbells, depth: u16, beside: Beside) -> String {
    let doorbells = match doorbells {
        Doorbells::Buffer => "doorbell buffer",
        Doorbells::Registers => "trapped doorbells",
    };
    format!("depth {depth}, {doorbells}, {}", beside.name())
}

/// Measures on the first two CPUs of this process.
pub(super) fn measure(
    program: &Path,
    image: &Path,
    turns: u32,
    progress: &Progress,
) -> Result<Section> {
    let cpus = cpu::available()?;
    let &[device, driver, ..] = cpus.as_slice() else {
        anyhow::bail!(
            "the neighbour's section needs 2 CPUs, one of them for the driver, and this process \
             may use {cpus:?}: leave it out, or change the affinity (taskset)"
        );
    };
    let task = progress.spinner("Reading beside a busy neighbour");
    let mut series = Vec::new();
    for (doorbells, all) in MODES {
        let scene = Scene::start(program.to_owned(), scene::directory(VM)?, image, VM, &[])?;
        let measured = Stage::new(&scene, doorbells, [device, driver])
            .and_then(|mut stage| stage.measure(all, turns))
            .map_err(|error| error.context(format!("the bench failed{}", scene.last_words())))?;
        scene.stop()?;
        series.extend(measured);
    }
    task.done();
    Ok(Section {
        name: "neighbour".into(),
        title: "Random reads beside a busy neighbour".into(),
        about: format!(
            "Random reads of 4 KiB by a driver that polls, without a guest. The device's thread \
             has a CPU of its own; or shares it with a thread that computes all the time and has \
             nothing to do with it, which leaves it half of the CPU: at least {SHARE} of the reads \
             are wanted then; or shares it with the backend, through which every trapped doorbell \
             comes: {ONE_CPU}. Driver and, where it is not said, backend are on another CPU. \
             {} ms a turn; all cases of a mode take turns.",
            TURN.as_millis()
        ),
        series,
    })
}

/// A disk that is read.
struct Stage {
    session: Session,
    queue: Polled,
    doorbells: Doorbells,
    /// Threads of the backend.
    backend: Vec<Pid>,
    /// CPUs of device and driver.
    cpus: [usize; 2],
}

impl Stage {
    fn new(scene: &Scene, doorbells: Doorbells, cpus: [usize; 2]) -> Result<Self> {
        let options = Options {
            socket: scene.socket(),
            layout: Layout::new(RAM, None, false)?,
            vectors: None,
            queues: 1,
            namespace: 1,
            seed: 1,
            patience: SHORT,
            timeout: SHORT,
        };
        let mut session = Session::connect(options)?;
        let (machine, drive) = session.drive()?;
        let queue = drive.polled(machine, doorbells)?;
        let name = format!("dev-{DEVICE}");
        let device = threads(scene.lender_pid(), |comm| comm == name)?;
        ensure!(
            device.len() == 1,
            "the lender has {} threads {name}",
            device.len()
        );
        cpu::pin(device[0], cpus[0])?;
        Ok(Self {
            session,
            queue,
            doorbells,
            backend: threads(scene.backend_pid(), |_| true)?,
            cpus,
        })
    }

    /// All cases at all depths, in turns.
    fn measure(&mut self, all: &[Beside], turns: u32) -> Result<Vec<Series>> {
        let cases: Vec<_> = DEPTHS
            .iter()
            .flat_map(|depth| all.iter().map(move |beside| (*depth, *beside)))
            .collect();
        let mut figures = vec![Vec::new(); cases.len()];
        // The first turn is not counted: it touches memory and trains the adaptive polling.
        for turn in 0..=turns {
            for ((depth, beside), figures) in cases.iter().zip(&mut figures) {
                interrupt::check()?;
                let rate = self.turn(*depth, *beside)?;
                if turn > 0 {
                    figures.push(rate);
                }
            }
        }
        let series = cases.iter().zip(figures).map(|((depth, beside), figures)| {
            let target = beside.target();
            Series {
                name: name(self.doorbells, *depth, *beside),
                unit: Unit::PerSecond,
                better: Better::More,
                data: Data::Repeats(figures),
                against: target.map(|_| name(self.doorbells, *depth, Beside::Nobody)),
                target: target.map(Target::AtLeast),
            }
        });
        Ok(series.collect())
    }

    /// Reads per second.
    fn turn(&mut self, depth: u16, beside: Beside) -> Result<f64> {
        let [device, driver] = self.cpus;
        let backend = match beside {
            Beside::Backend => device,
            Beside::Nobody | Beside::Neighbour => driver,
        };
        for thread in &self.backend {
            cpu::pin(*thread, backend)?;
        }
        let _pinned = Pinned::to(driver)?;
        let _neighbour = match beside {
            Beside::Neighbour => Some(Neighbour::on(device)?),
            Beside::Nobody | Beside::Backend => None,
        };
        let (machine, _) = self.session.drive()?;
        let reads = self.queue.run(machine, Load::random_reads(depth), TURN)?;
        Ok(reads.len() as f64 / TURN.as_secs_f64())
    }
}

/// The threads of a process whose name is `wanted`.
fn threads(pid: u32, wanted: impl Fn(&str) -> bool) -> Result<Vec<Pid>> {
    let path = format!("/proc/{pid}/task");
    let mut found = Vec::new();
    for entry in fs::read_dir(&path).with_context(|| format!("reading {path}"))? {
        let entry = entry.with_context(|| format!("reading {path}"))?;
        let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let id = entry.file_name().to_string_lossy().parse().ok();
        if let Some(thread) = id.and_then(Pid::from_raw)
            && wanted(comm.trim_end())
        {
            found.push(thread);
        }
    }
    Ok(found)
}

/// A thread that computes until it is dropped.
struct Neighbour {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Neighbour {
    fn on(cpu: usize) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("neighbour".into())
            .spawn(move || {
                let pinned = Pinned::to(cpu);
                let failed = pinned.is_err();
                // The receiver waits.
                let _ = ready.send(pinned.as_ref().err().map(ToString::to_string));
                while !failed && !stopped.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
            .context("starting the neighbour")?;
        let neighbour = Self {
            stop,
            thread: Some(thread),
        };
        match is_ready.recv().context("the neighbour has ended")? {
            None => Ok(neighbour),
            Some(error) => anyhow::bail!("the neighbour: {error}"),
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic has been printed.
            let _ = thread.join();
        }
    }
}
