//! Adaptive busy-polling of a device thread, and its fairness to other threads.
//!
//! Blocking costs a busy guest a trapped doorbell, and the device thread a wake-up; polling costs a
//! CPU. So the poll time adapts: each block that ended early doubles it, each long one halves it.
//! An idle or rarely used device costs nothing, unless nothing notifies it: then it is polled every millisecond.
//!
//! Other threads may need the CPU meanwhile. A thread that soon sleeps again, such as a vCPU or the
//! backend, gets it by sched_yield(2) after each round: it may be the one that produces the work. A
//! CPU-bound thread runs for a whole scheduler slice at each yield, milliseconds for each round of
//! the device. So after a yield of that length there are no yields for a while. The device thread
//! then has its fair share, polls without a yield while work comes soon, and naps otherwise, which
//! costs no slice: the scheduler favours threads that sleep.

use std::time::{Duration, Instant};

pub(super) use farside_devices::Waiting;

/// The smallest non-zero poll time.
const LEAST: Duration = Duration::from_micros(16);

/// A yield of this length met a CPU-bound thread: well above the time of a vCPU or the backend for
/// a request, below a slice (some ms).
const LONG_YIELD: Duration = Duration::from_micros(500);

/// Time without yields after a long one; doubles while further yields are long. At its maximum,
/// yields cost a few per cent of the time.
const BACKOFF: Duration = Duration::from_millis(10);
const MOST_BACKOFF: Duration = Duration::from_millis(160);

/// Without yields, the thread naps after polling for this long: longer than a guest takes from a
/// completion to its next request, and short compared with the CPU share of the waiting threads.
const POLL_ALONE: Duration = Duration::from_micros(50);

/// A nap. The kernel adds its timer slack, 50 µs.
const NAP: Duration = Duration::from_micros(20);

/// Longest interval at which an idle device is polled that nothing notifies.
const LONGEST_INTERVAL: Duration = Duration::from_millis(1);

/// The time until the next poll of a device that nothing notifies, after `idle` without work: its first command after a
/// pause is late by a part of that pause.
pub(crate) fn interval(idle: Duration) -> Duration {
    (idle / 8).clamp(NAP, LONGEST_INTERVAL)
}

/// The next action when there is no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Poll again at once.
    Poll,
    /// Yield, then poll again.
    Yield,
    /// Block for this long or until an event, then poll again.
    Nap(Duration),
    /// Block until an event.
    Block,
}

/// Decides how to wait for work.
#[derive(Debug)]
pub(crate) struct BusyPoll {
    most: Duration,
    time: Duration,
    /// Since when it blocks, or naps in place of that.
    blocked: Option<Instant>,
    /// No yields before this time.
    yield_from: Instant,
    backoff: Duration,
}

impl BusyPoll {
    /// Never polls for longer than `most`; zero blocks at once.
    pub(crate) fn new(most: Duration, now: Instant) -> Self {
        Self {
            most,
            time: Duration::ZERO,
            blocked: None,
            yield_from: now,
            backoff: BACKOFF,
        }
    }

    /// The next action after `idle` without work.
    pub(crate) fn step(&self, idle: Duration, now: Instant) -> Step {
        if idle >= self.time {
            Step::Block
        } else if now >= self.yield_from {
            Step::Yield
        } else if idle < POLL_ALONE {
            Step::Poll
        } else {
            Step::Nap(NAP)
        }
    }

    /// [`step`](Self::step), overridden by the device's [`Waiting`].
    pub(crate) fn step_of(&self, waiting: Waiting, idle: Duration, now: Instant) -> Step {
        match (waiting, self.step(idle, now)) {
            (_, Step::Block) | (Waiting::Block, _) => Step::Block,
            (Waiting::Nap, _) => Step::Nap(NAP),
            (Waiting::BusyPoll, step) => step,
        }
    }

    /// Records that a yield took `took`.
    pub(crate) fn yielded(&mut self, took: Duration, now: Instant) {
        if took < LONG_YIELD {
            return;
        }
        // Short yields do not reset the back-off: next to a busy thread some return at once.
        let quiet = now.saturating_duration_since(self.yield_from + took);
        self.backoff = match quiet < self.backoff {
            true => (self.backoff * 2).min(MOST_BACKOFF),
            false => BACKOFF,
        };
        self.yield_from = now + self.backoff;
    }

    /// Records that the thread blocks from now on.
    pub(crate) fn blocks(&mut self, now: Instant) {
        self.blocked.get_or_insert(now);
    }

    /// Whether it does, and has found no work since.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.is_some()
    }

    /// Records that there has been work since `now`.
    pub(crate) fn woke(&mut self, now: Instant) {
        if let Some(since) = self.blocked.take() {
            self.woke_after(now - since);
        }
    }

    /// Records that a block lasted `slept`, and adapts the poll time.
    fn woke_after(&mut self, slept: Duration) {
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

    fn after(sleeps: &[u64]) -> BusyPoll {
        let mut poll = BusyPoll::new(MOST, Instant::now());
        for slept in sleeps {
            poll.woke_after(Duration::from_micros(*slept));
        }
        poll
    }

    #[test]
    fn a_busy_guest_is_polled_for_and_an_idle_one_costs_nothing() {
        assert_eq!(after(&[]).time, Duration::ZERO);
        assert_eq!(after(&[100; 8]).time, MOST);
        assert_eq!(after(&[100, 100]).time, LEAST * 2);
        let mut idle_again = vec![100; 8];
        idle_again.extend([1_000_000; 5]);
        assert_eq!(after(&idle_again).time, Duration::ZERO);
    }

    /// As a device has it that is polled while it is idle.
    #[test]
    fn several_naps_are_one_block() {
        let began = Instant::now();
        let mut poll = after(&[100; 8]);
        poll.blocks(began);
        poll.blocks(began + MOST);
        assert!(poll.is_blocked());
        poll.woke(began + MOST * 2);
        assert_eq!(poll.time, MOST / 2, "it was a long one");
        poll.woke(began + MOST * 3);
        assert_eq!(poll.time, MOST / 2, "it was not blocked");
    }

    #[test]
    fn a_device_without_notifications_is_polled_less_the_longer_it_is_idle() {
        assert_eq!(interval(Duration::ZERO), NAP);
        assert_eq!(
            interval(Duration::from_millis(4)),
            Duration::from_micros(500)
        );
        assert_eq!(interval(Duration::from_secs(60)), LONGEST_INTERVAL);
    }

    #[test]
    fn with_no_time_to_poll_it_blocks() {
        let now = Instant::now();
        let mut poll = BusyPoll::new(Duration::ZERO, now);
        for _ in 0..4 {
            poll.woke_after(Duration::ZERO);
        }
        assert_eq!(poll.step(Duration::ZERO, now), Step::Block);
    }

    #[test]
    fn a_device_that_knows_how_to_wait_is_not_busy_polled() {
        let poll = after(&[100; 8]);
        let now = Instant::now();
        let step = |waiting, idle| poll.step_of(waiting, idle, now);
        assert_eq!(step(Waiting::BusyPoll, Duration::ZERO), Step::Yield);
        assert_eq!(step(Waiting::Nap, Duration::ZERO), Step::Nap(NAP));
        assert_eq!(step(Waiting::Nap, MOST), Step::Block);
        assert_eq!(step(Waiting::Block, Duration::ZERO), Step::Block);
    }

    #[test]
    fn a_long_yield_ends_yielding_for_a_while() {
        let micros = Duration::from_micros;
        let mut poll = after(&[100; 8]);
        let start = Instant::now();
        // Idle time in microseconds; then with or without yields.
        let steps =
            |poll: &BusyPoll, now| [0, 49, 50, 199, 200].map(|idle| poll.step(micros(idle), now));
        use Step::{Block, Poll, Yield};
        let nap = Step::Nap(NAP);
        let yields = [Yield, Yield, Yield, Yield, Block];
        let naps = [Poll, Poll, nap, nap, Block];
        assert_eq!(steps(&poll, start), yields);
        // Short yields.
        poll.yielded(LONG_YIELD - micros(1), start);
        assert_eq!(steps(&poll, start), yields);
        poll.yielded(LONG_YIELD, start);
        assert_eq!(steps(&poll, start), naps);
        assert_eq!(steps(&poll, start + MOST_BACKOFF), yields);
    }

    #[test]
    fn yields_that_stay_long_become_rare_and_one_that_is_long_by_chance_does_not() {
        let took = Duration::from_millis(4);
        let mut poll = after(&[]);
        let mut now = Instant::now() + Duration::from_secs(1);
        let mut backoffs = Vec::new();
        for quiet in [1000, 0, 1, 1, 1, 1, 1, 1000, 0] {
            // A short yield in between does not count.
            poll.yielded(Duration::from_micros(2), now);
            now = now.max(poll.yield_from) + Duration::from_millis(quiet) + took;
            poll.yielded(took, now);
            backoffs.push((poll.yield_from - now).as_millis());
        }
        assert_eq!(backoffs, [10, 20, 40, 80, 160, 160, 160, 10, 20]);
    }
}
