//! Ends a program whose client waits for an answer that never comes.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What is under way, and until when.
#[derive(Default)]
struct Watched {
    now: Option<(String, Instant)>,
}

/// Knows how long things may take.
pub struct Watchdog {
    limit: Duration,
    shared: Arc<(Mutex<Watched>, Condvar)>,
}

impl Watchdog {
    /// Calls `late` with what has taken longer than `limit`, on a thread of
    /// its own, once.
    pub fn start(limit: Duration, late: impl FnOnce(&str) + Send + 'static) -> Self {
        let shared: Arc<(Mutex<Watched>, Condvar)> = Arc::default();
        std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || late(&watch(&shared))
        });
        Self { limit, shared }
    }

    /// `what` begins; what was before it has ended.
    pub fn begin(&self, what: &str) {
        let until = Instant::now() + self.limit;
        self.set(Some((what.to_owned(), until)));
    }

    /// Nothing is under way.
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

/// Returns what is late.
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
