//! The duration of a trapped 4-byte read: of configuration space, which the backend answers
//! itself, and of a BAR, which requires a request to the lender.
//!
//! The client is the same for both servers and independent of both: the crate `vfio_user`.
//! libvfio-user's sample answers both reads itself.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_bench::{Section, Series};
use farside_scripted_vmm::device::{CONFIG, Device};

use super::{
    figures::{against, at_most, series},
    stage::{Stage, boot},
};
use crate::{
    child::Child,
    cpu::{self, Pinned},
    scene::{SHORT, await_socket},
};

/// Reads per turn.
const READS: usize = 5_000;
/// Unmeasured reads before the first turn.
const WARM_UP: usize = 2_000;
/// Target ratio of a configuration space read to libvfio-user's.
const TARGET: f64 = 0.8;

/// The register to read.
#[derive(Clone, Copy)]
enum What {
    Config,
    Bar,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            Self::Config => "configuration space",
            Self::Bar => "BAR",
        }
    }
}

/// A server.
struct Server {
    device: Device,
    /// A BAR with four bytes at 0.
    bar: u32,
}

impl Server {
    /// p50 and p99 of one turn, microseconds.
    fn turn(&mut self, what: What, reads: usize) -> Result<[f64; 2]> {
        let region = match what {
            What::Config => CONFIG,
            What::Bar => self.bar,
        };
        let mut times = Vec::with_capacity(reads);
        let mut data = [0; 4];
        for _ in 0..reads {
            let start = Instant::now();
            self.device.read(region, 0, &mut data)?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        let at = |percent: usize| micros(times[(reads * percent / 100).min(reads - 1)]);
        Ok([at(50), at(99)])
    }
}

/// Microseconds.
pub(super) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Measures in turns, against `libvfio_user` if given.
pub(super) fn measure(program: &Path, libvfio_user: Option<&Path>, turns: u32) -> Result<Section> {
    let anywhere = Place::Anywhere.series(program, libvfio_user, turns)?;
    let first = cpu::available()?[0];
    let bound = Pinned::to(first)?;
    let mut series = Place::OneProcessor.series(program, libvfio_user, turns)?;
    drop(bound);
    series.extend(anywhere);
    let beside = match libvfio_user {
        None => "Nothing stands beside them: --libvfio-user was not given.",
        Some(_) => {
            "Beside them the same reads of libvfio-user's sample server, which has its BAR in the \
             process that answers; a turn of one, a turn of the other."
        }
    };
    Ok(Section {
        name: "register-reads".into(),
        title: "Reads that are trapped".into(),
        about: format!(
            "Reads of 4 bytes by vfio-user, one after another, by the client of the crate \
             vfio_user: of configuration space, which the backend answers by itself, and of a \
             BAR, for which it asks the lender. {READS} reads a turn. With client and servers on \
             one processor, where the servers make the difference; and where the kernel puts \
             them, which from turn to turn is one processor or two. {beside}"
        ),
        series,
    })
}

/// The CPUs of client and servers.
#[derive(Clone, Copy)]
enum Place {
    OneProcessor,
    Anywhere,
}

impl Place {
    /// The reads to measure there. A BAR read involves the lender's device thread, which
    /// needs a separate CPU.
    fn reads(self) -> &'static [What] {
        match self {
            Self::OneProcessor => &[What::Config],
            Self::Anywhere => &[What::Config, What::Bar],
        }
    }

    fn name(self, what: What) -> String {
        match self {
            Self::OneProcessor => format!("{}, one processor", what.name()),
            Self::Anywhere => what.name().to_owned(),
        }
    }

    /// All figures, with newly started servers: these inherit this thread's CPU affinity.
    fn series(
        self,
        program: &Path,
        libvfio_user: Option<&Path>,
        turns: u32,
    ) -> Result<Vec<Series>> {
        let mut stage = Stage::start(program)?;
        let socket = stage.serve("a", &[])?;
        let ours = Server {
            device: boot(&socket).with_context(|| stage.last_words())?,
            bar: 0,
        };
        let mut servers = vec![ours];
        let mut sample = None;
        if let Some(program) = libvfio_user {
            let socket = stage.directory().join("sample.sock");
            let mut command = Command::new(program);
            command.arg(&socket);
            let log = stage.directory().join("sample.log");
            let child = sample.insert(Child::spawn("libvfio-user's sample", command, &log)?);
            await_socket(&socket, child)?;
            let device = Device::connect(&socket, SHORT)
                .with_context(|| format!("connecting to the sample{}", child.last_words()))?;
            let bar = device.areas().first().map(|area| area.bar);
            let bar = bar.context("libvfio-user's sample has no BAR")?;
            servers.push(Server { device, bar });
        }

        let mut all = Vec::new();
        for &what in self.reads() {
            all.extend(in_turns(&mut servers, what, &self.name(what), turns)?);
        }
        let mut id = [0; 4];
        servers[0].device.read(CONFIG, 0, &mut id)?;
        ensure!(
            id != [0xff; 4],
            "the borrowed device was not there{}",
            stage.last_words()
        );
        Ok(all)
    }
}

/// Alternates one turn of each server.
fn in_turns(servers: &mut [Server], what: What, name: &str, turns: u32) -> Result<Vec<Series>> {
    for server in &mut *servers {
        server.turn(what, WARM_UP)?;
    }
    let mut figures = Vec::new();
    for _ in 0..turns {
        let turn = servers.iter_mut();
        let turn: Result<Vec<_>> = turn.map(|server| server.turn(what, READS)).collect();
        figures.push(turn?);
    }
    let mut all = Vec::new();
    for (n, percentile) in ["p50", "p99"].into_iter().enumerate() {
        let of = |server: usize| figures.iter().map(move |turn| turn[server][n]);
        let name = format!("{name}, {percentile}");
        let ours = series(&name, of(0));
        if servers.len() == 1 {
            all.push(ours);
            continue;
        }
        let other = series(format!("{name}, libvfio-user"), of(1));
        let ours = against(ours, &other.name);
        all.push(match (what, percentile) {
            (What::Config, "p50") => at_most(ours, TARGET),
            _ => ours,
        });
        all.push(other);
    }
    Ok(all)
}
