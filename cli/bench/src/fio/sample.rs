//! Counters of disk and CPUs have done so far.

use std::time::Duration;

use crate::Error;

/// The kernel shows CPU time in hundredths of a second to everybody (`USER_HZ`),
/// whatever its own tick is.
const TICK: Duration = Duration::from_millis(10);

/// A sample of the counters of a disk and of all CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    read: u64,
    written: u64,
    busy: Duration,
}

/// The difference of two samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Bytes read and written by the disk.
    pub bytes: u64,
    /// Time that CPUs were busy, all of them together.
    pub cpu: Duration,
}

impl Sample {
    /// Parses the output of [`sample_command`](super::sample_command).
    ///
    /// # Errors
    /// When it is something else; the error quotes it.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let parsed = || {
            // Sectors of 512 bytes, whatever the disk's own are.
            let disk = numbers(text.lines().next()?)?;
            let busy = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
            let busy = numbers(busy)?;
            // user nice system idle iowait irq softirq steal; guest time is in
            // user time already.
            let busy: u64 = [0, 1, 2, 5, 6, 7].iter().filter_map(|i| busy.get(*i)).sum();
            Some(Self {
                read: disk.get(2)?.checked_mul(512)?,
                written: disk.get(6)?.checked_mul(512)?,
                busy: TICK.checked_mul(u32::try_from(busy).ok()?)?,
            })
        };
        parsed().ok_or_else(|| Error::Sample(text.chars().take(200).collect()))
    }

    /// The difference from `before`.
    pub fn since(&self, before: &Self) -> Work {
        let moved = |now: u64, then: u64| now.saturating_sub(then);
        Work {
            bytes: moved(self.read, before.read) + moved(self.written, before.written),
            cpu: self.busy.saturating_sub(before.busy),
        }
    }
}

impl Work {
    /// Seconds of CPU time for each request of `block` bytes; `None` when there was
    /// none.
    pub fn cpu_per_io(&self, cpu: Duration, block: u64) -> Option<f64> {
        let ios = self.bytes as f64 / block as f64;
        (ios > 0.0).then(|| cpu.as_secs_f64() / ios)
    }
}

fn numbers(line: &str) -> Option<Vec<u64>> {
    line.split_whitespace().map(|n| n.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "  10 1 80 5 20 2 160 7 0 3 12 0 0 0 0 1 1\n\
                          cpu  100 1 50 1000 20 3 4 5 7 0\ncpu0 100 1 50 1000 20 3 4 5 7 0\n";

    #[test]
    fn work_is_what_came_between() {
        let after = "  10 1 96 5 20 2 168 7 0 3 12 0 0 0 0 1 1\n\
                     cpu  150 1 70 2000 90 3 4 5 7 0\n";
        let work = Sample::parse(after)
            .unwrap()
            .since(&Sample::parse(BEFORE).unwrap());
        // 50 of user and 20 of system time; idle time and waiting do not count.
        let expected = Work {
            bytes: (16 + 8) * 512,
            cpu: Duration::from_millis(700),
        };
        assert_eq!(work, expected);
        assert_eq!(work.cpu_per_io(work.cpu, 4096), Some(0.7 / 3.0));
    }

    #[test]
    fn without_requests_nothing_is_said_of_them() {
        let sample = Sample::parse(BEFORE).unwrap();
        let work = sample.since(&sample);
        assert_eq!(work.cpu_per_io(TICK, 4096), None);
    }

    #[test]
    fn other_text_is_an_error_that_quotes() {
        for text in ["", "1 2 3\ncpu 1 2 3", "cpu 1 2 3 4 5 6 7 8", "a b\ncpu 1"] {
            let error = Sample::parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
