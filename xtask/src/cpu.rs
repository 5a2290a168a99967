//! Processor time of processes.

use std::{fs, time::Duration};

use anyhow::{Context, Result};

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
    // The program's name, in parentheses, may contain anything.
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
