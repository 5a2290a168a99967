//! How long to look for work before sleeping.
//!
//! Sleeping costs a busy guest a trapped doorbell, and the device's thread a
//! wake-up; looking costs a processor. So the thread looks for as long as work
//! has lately been worth waiting for: each sleep that ended early doubles the
//! time, each long one halves it. A drive that is idle, or used now and then,
//! costs nothing.

use std::time::Duration;

/// Where growing begins, and shrinking ends.
const LEAST: Duration = Duration::from_micros(16);

/// How long to look for work.
#[derive(Debug)]
pub(super) struct Spin {
    most: Duration,
    time: Duration,
}

impl Spin {
    /// Never looks for longer than `most`; zero sleeps at once.
    pub(super) fn new(most: Duration) -> Self {
        Self {
            most,
            time: Duration::ZERO,
        }
    }

    /// How long to look now.
    pub(super) fn time(&self) -> Duration {
        self.time
    }

    /// Work came after `slept`.
    pub(super) fn woke_after(&mut self, slept: Duration) {
        self.time = if slept < self.most {
            (self.time * 2).clamp(LEAST.min(self.most), self.most)
        } else if self.time > LEAST {
            self.time / 2
        } else {
            Duration::ZERO
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(200);

    fn after(sleeps: &[u64]) -> Duration {
        let mut spin = Spin::new(MOST);
        for slept in sleeps {
            spin.woke_after(Duration::from_micros(*slept));
        }
        spin.time()
    }

    #[test]
    fn a_busy_guest_is_looked_after_and_an_idle_one_costs_nothing() {
        assert_eq!(after(&[]), Duration::ZERO);
        assert_eq!(after(&[100; 8]), MOST);
        assert_eq!(after(&[100, 100]), LEAST * 2);
        let mut idle_again = vec![100; 8];
        idle_again.extend([1_000_000; 5]);
        assert_eq!(after(&idle_again), Duration::ZERO);
    }

    #[test]
    fn with_no_time_to_look_it_never_looks() {
        let mut spin = Spin::new(Duration::ZERO);
        for _ in 0..4 {
            spin.woke_after(Duration::ZERO);
        }
        assert_eq!(spin.time(), Duration::ZERO);
    }
}
