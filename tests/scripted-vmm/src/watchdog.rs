//! Ends a process whose client blocks on a reply that never arrives.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The current operation and its deadline.
#[derive(Default)]
struct Watched {
    now: Option<(String, Instant)>,
}

/// Watches the duration of operations.
pub struct Watchdog {
    limit: Duration,
    shared: Arc<(Mutex<Watched>, Condvar)>,
}

impl Watchdog {
    /// Calls `late`, once and on a dedicated thread, with the name of an operation that
    /// exceeds `limit`.
    pub fn start(limit: Duration, late: impl FnOnce(&str) + Send + 'static) -> Self {
        let shared: Arc<(Mutex<Watched>, Condvar)> = Arc::default();
        std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || late(&watch(&shared))
        });
        Self { limit, shared }
    }

    /// Starts operation `what`, and ends the one before.
    pub fn begin(&self, what: &str) {
        let until = Instant::now() + self.limit;
        self.set(Some((what.to_owned(), until)));
    }

    /// Ends the current operation.
    pub fn rest(&self) {
        self.set(None);
    }

    fn set(&self, now: Option<(String, Instant)>) {
        lock(&self.shared.0).now = now;
        self.shared.1.notify_one();
    }
}

fn lock(watched: &Mutex<Watched>) -> MutexGuard<'_, Watched> {
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for an operation that exceeds its limit, and returns its name.
fn watch((watched, changed): &(Mutex<Watched>, Condvar)) -> String {
    let mut watched = lock(watched);
    loop {
        watched = match &watched.now {
            None => changed
                .wait(watched)
                .unwrap_or_else(PoisonError::into_inner),
            Some((what, until)) => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return what.clone();
                }
                let woken = changed.wait_timeout(watched, left);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn only_what_is_late_is_named() {
        let (send, late) = mpsc::channel();
        let hour = Duration::from_secs(3600);
        let dog = Watchdog::start(hour, move |what| {
            send.send(what.to_owned()).unwrap();
        });
        dog.begin("in time");
        dog.rest();
        dog.begin("in time too");
        dog.set(Some(("late".into(), Instant::now())));
        let what = late.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(what, "late");
    }
}
