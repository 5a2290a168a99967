//! CPU time of processes, and CPU affinity of threads.

use std::{collections::BTreeMap, fs, time::Duration};

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

/// User and system time so far of all threads of these processes and of the processes that they have
/// started, such as a lender's workers.
pub(crate) fn time(pids: &[u32]) -> Result<Duration> {
    let tick = Duration::from_secs(1) / u32::try_from(rustix::param::clock_ticks_per_second())?;
    let processes = processes()?;
    for pid in pids {
        ensure!(processes.contains_key(pid), "process {pid} has ended");
    }
    let counts = |pid: &u32| {
        let parent = |pid: &u32| processes.get(pid).map(|process| process.parent);
        std::iter::successors(Some(*pid), parent).any(|ancestor| pids.contains(&ancestor))
    };
    let counted = processes.iter().filter(|(pid, _)| counts(pid));
    let ticks: u64 = counted.map(|(_, process)| process.ticks).sum();
    Ok(tick * u32::try_from(ticks)?)
}

struct Process {
    parent: u32,
    /// User and system time.
    ticks: u64,
}

/// All processes of this host, by number.
fn processes() -> Result<BTreeMap<u32, Process>> {
    let mut processes = BTreeMap::new();
    for entry in fs::read_dir("/proc").context("reading /proc")? {
        let entry = entry.context("reading /proc")?;
        let Some(pid) = entry.file_name().to_str().and_then(|it| it.parse().ok()) else {
            continue;
        };
        // It may have ended since.
        if let Ok(stat) = fs::read_to_string(entry.path().join("stat")) {
            let process = process(&stat);
            processes.insert(pid, process.with_context(|| format!("malformed {stat:?}"))?);
        }
    }
    Ok(processes)
}

/// `ppid`, `utime` and `stime`, fields 4, 14 and 15, of a line of `/proc/PID/stat`.
fn process(stat: &str) -> Option<Process> {
    // The process name, in parentheses, may contain any character.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let parent = fields.nth(4 - 3)?.parse().ok()?;
    let user: u64 = fields.nth(14 - 5)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(Process {
        parent,
        ticks: user + system,
    })
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::CommandExt, process::Command};

    use rustix::process::{Signal, kill_process_group};

    use super::*;

    #[test]
    fn odd_process_names_do_not_move_the_fields() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 1 2 3 4 500 23 0 0 20 0 1 0";
        let process = |stat| process(stat).map(|it| (it.parent, it.ticks));
        assert_eq!(process(stat), Some((1, 523)));
        assert_eq!(process("7 (a) S 1"), None);
    }

    #[test]
    fn work_of_a_process_and_of_those_that_it_starts_takes_time() {
        let takes_time = |pid| {
            let before = time(&[pid]).unwrap();
            let deadline = std::time::Instant::now() + Duration::from_secs(60);
            while time(&[pid]).unwrap() == before {
                assert!(std::time::Instant::now() < deadline, "no time is counted");
            }
        };
        takes_time(std::process::id());
        // It waits for one that works.
        let mut parent = Command::new("sh")
            .args(["-c", "(while :; do :; done) & wait"])
            .process_group(0)
            .spawn()
            .unwrap();
        takes_time(parent.id());
        kill_process_group(Pid::from_child(&parent), Signal::KILL).unwrap();
        parent.wait().unwrap();
    }
}
