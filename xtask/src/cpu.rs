//! CPU time of processes, and CPU affinity of threads.

use std::{fs, time::Duration};

use anyhow::{Context, Result, ensure};
use rustix::{
    io::Errno,
    thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity},
};

/// The CPUs of this thread's affinity mask, at least one.
pub(crate) fn available() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("reading this thread's CPU affinity")?;
    let cpus: Vec<_> = (0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .collect();
    ensure!(!cpus.is_empty(), "this thread's CPU affinity is empty");
    Ok(cpus)
}

/// Pins a thread to one CPU. A thread that has ended since it was found needs none.
pub(crate) fn pin(thread: Pid, cpu: usize) -> Result<()> {
    match set(Some(thread), cpu) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(errno) => Err(errno).with_context(|| format!("pinning thread {thread:?} to CPU {cpu}")),
    }
}

fn set(thread: Option<Pid>, cpu: usize) -> rustix::io::Result<()> {
    let mut one = CpuSet::new();
    one.set(cpu);
    sched_setaffinity(thread, &one)
}

/// Pins this thread, and the processes that it starts, to one CPU. Restores the affinity on
/// drop.
#[derive(Debug)]
pub(crate) struct Pinned {
    before: CpuSet,
}

impl Pinned {
    pub(crate) fn to(cpu: usize) -> Result<Self> {
        let before = sched_getaffinity(None).context("reading this thread's CPU affinity")?;
        set(None, cpu).with_context(|| format!("pinning this thread to CPU {cpu}"))?;
        Ok(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Err(errno) = sched_setaffinity(None, &self.before) {
            log::warn!("this thread stays on one CPU: {errno}");
        }
    }
}

/// User and system time of all threads of these processes so far.
pub(crate) fn time(pids: &[u32]) -> Result<Duration> {
    let tick = Duration::from_secs(1) / u32::try_from(rustix::param::clock_ticks_per_second())?;
    pids.iter()
        .map(|pid| {
            let path = format!("/proc/{pid}/stat");
            let stat = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
            let ticks = ticks(&stat).with_context(|| format!("malformed {path}: {stat}"))?;
            Ok(tick * u32::try_from(ticks)?)
        })
        .sum()
}

/// `utime` and `stime`, fields 14 and 15, of a line of `/proc/PID/stat`.
fn ticks(stat: &str) -> Option<u64> {
    // The process name, in parentheses, may contain any character.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ').skip(14 - 3);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_program_names_do_not_move_the_fields() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 1 2 3 4 500 23 0 0 20 0 1 0";
        assert_eq!(ticks(stat), Some(523));
        assert_eq!(ticks("7 (a) S 1"), None);
    }

    #[test]
    fn work_takes_time() {
        let pids = [std::process::id()];
        let before = time(&pids).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while time(&pids).unwrap() == before {
            assert!(std::time::Instant::now() < deadline, "no time is counted");
        }
    }
}
