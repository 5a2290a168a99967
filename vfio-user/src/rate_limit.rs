//! Log lines that a guest or client can cause at will, kept from filling the
//! disk.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// At most this many lines in each [`PERIOD`], for each call site.
const BURST: u32 = 10;

/// How often a call site gets a fresh allowance.
const PERIOD: Duration = Duration::from_secs(5);

/// A call site's allowance. Make it a `static` next to the log line:
///
/// ```
/// # use farside_vfio_user::RateLimit;
/// static LIMIT: RateLimit = RateLimit::new();
/// if let Some(held_back) = LIMIT.allow() {
///     log::warn!("refused a request{held_back}");
/// }
/// ```
#[derive(Debug)]
pub struct RateLimit(Mutex<Option<Window>>);

#[derive(Debug)]
struct Window {
    began: Instant,
    allowed: u32,
    held_back: u64,
}

/// How many lines were not written since the last one that was. Displays as
/// nothing when there are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldBack(pub u64);

impl RateLimit {
    /// A full allowance.
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Whether a line may be written now.
    pub fn allow(&self) -> Option<HeldBack> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<HeldBack> {
        // Counters stay usable whatever panicked while they were held.
        let mut window = self
            .0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let window = window.get_or_insert(Window {
            began: now,
            allowed: 0,
            held_back: 0,
        });
        if now.saturating_duration_since(window.began) >= PERIOD {
            window.began = now;
            window.allowed = 0;
        }
        if window.allowed == BURST {
            window.held_back += 1;
            return None;
        }
        window.allowed += 1;
        Some(HeldBack(std::mem::take(&mut window.held_back)))
    }
}

impl Default for RateLimit {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Display for HeldBack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} more like this were not logged)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_cut_and_counted() {
        let limit = RateLimit::new();
        let start = Instant::now();
        let written = (0..100).filter(|_| limit.allow_at(start).is_some()).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(limit.allow_at(start + PERIOD), Some(HeldBack(90)));
        assert_eq!(limit.allow_at(start + PERIOD), Some(HeldBack(0)));
    }
}
