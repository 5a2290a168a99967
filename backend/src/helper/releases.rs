//! The orders to unplug a device. A backend that its guest has taken over can send any number of them,
//! and each holds the VM's command lock and writes to the log: they take turns, with pauses.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, RateLimit};

/// Maximum number of orders that run or wait: more than a VM has devices.
const MAX_QUEUED: usize = 32;

/// Limits of the pause after an order, which is as long as the order took: operators' commands for
/// the VM have the lock meanwhile.
const MIN_PAUSE: Duration = Duration::from_millis(500);
const MAX_PAUSE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Releases {
    queued: AtomicUsize,
    /// The end of the last pause. Locked by the order that runs.
    next: Mutex<Option<Instant>>,
    refused: RateLimit,
}

impl Releases {
    /// Runs `release` when it is this order's turn, with what is left of `limit`. Returns whether it
    /// ran: not if that is nothing, or if too many orders wait.
    pub(super) fn run(
        &self,
        device: &DeviceId,
        limit: Duration,
        release: impl FnOnce(Duration),
    ) -> bool {
        let deadline = Instant::now() + limit;
        let has_place = self.queued.fetch_add(1, Ordering::Relaxed) < MAX_QUEUED;
        let ran = has_place && self.run_in_turn(deadline, release);
        self.queued.fetch_sub(1, Ordering::Relaxed);
        if !ran && let Some(held_back) = self.refused.allow() {
            log::warn!(
                "device {device}: the guest is not asked to release it: other devices were to be released for {limit:?}, or more than {MAX_QUEUED} at a time{held_back}"
            );
        }
        ran
    }

    fn run_in_turn(&self, deadline: Instant, release: impl FnOnce(Duration)) -> bool {
        // One assignment.
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = next.unwrap_or_else(Instant::now);
        if turn.max(Instant::now()) >= deadline {
            return false;
        }
        std::thread::sleep(turn.saturating_duration_since(Instant::now()));
        let began = Instant::now();
        release(deadline.saturating_duration_since(began));
        let took = began.elapsed();
        *next = Some(began + took + took.clamp(MIN_PAUSE, MAX_PAUSE));
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn orders_take_turns_with_pauses() {
        let releases = Releases::default();
        let device = "disk0".parse().unwrap();
        let run = |limit| {
            let mut ran = None;
            releases.run(&device, limit, |left| ran = Some((Instant::now(), left)));
            ran
        };
        let (first, _) = run(LONG).unwrap();
        assert_eq!(run(MIN_PAUSE / 100), None, "its turn is too late");
        let (second, left) = run(LONG).unwrap();
        assert!(second - first >= MIN_PAUSE);
        assert!(left < LONG, "the pause counts");
    }

    #[test]
    fn a_flood_of_orders_is_refused() {
        let releases = &Releases::default();
        let device = &"disk0".parse().unwrap();
        let (begun, begins) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                assert!(releases.run(device, LONG, |_| {
                    begun.send(()).unwrap();
                    ends.recv().unwrap();
                }));
            });
            begins.recv().unwrap();
            for _ in 1..MAX_QUEUED {
                scope.spawn(move || {
                    let limit = Duration::from_millis(1);
                    assert!(!releases.run(device, limit, |_| panic!("too late")));
                });
            }
            while releases.queued.load(Ordering::Relaxed) < MAX_QUEUED {
                std::thread::yield_now();
            }
            assert!(!releases.run(device, LONG, |_| panic!("too many")));
            end.send(()).unwrap();
        });
        assert_eq!(releases.queued.load(Ordering::Relaxed), 0);
    }
}
