//! Rate limits for log lines that a guest, client or peer can cause at will, so that
//! they do not fill the disk.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Most lines in each [`PERIOD`].
const BURST: u32 = 10;

/// The period after which a limit is replenished.
const PERIOD: Duration = Duration::from_secs(5);

/// The limit of one kind of line. Keep it in the object that the line is about, so that
/// one noisy device or listener does not suppress another's lines:
///
/// ```
/// # use farside_daemon::RateLimit;
/// struct Listener {
///     refused: RateLimit,
/// }
/// # let listener = Listener { refused: RateLimit::new() };
/// if let Some(held_back) = listener.refused.allow() {
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

/// Number of lines suppressed since the last written one. Displays as an empty string if
/// zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldBack(pub u64);

impl RateLimit {
    /// An unused limit.
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Whether a line may be written now.
    pub fn allow(&self) -> Option<HeldBack> {
        self.allow_in(PERIOD, Instant::now())
    }

    #[cfg(test)]
    fn allow_at(&self, now: Instant) -> Option<HeldBack> {
        self.allow_in(PERIOD, now)
    }

    fn allow_in(&self, period: Duration, now: Instant) -> Option<HeldBack> {
        // Counters have no invariant that a panic could break.
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let window = window.get_or_insert(Window {
            began: now,
            allowed: 0,
            held_back: 0,
        });
        if now.saturating_duration_since(window.began) >= period {
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

/// Log lines on the state of one object. Each kind of line has a [limit of its
/// own](RateLimit). If lines are suppressed, the last of them is written after the
/// period, so that the log's last line on the object reports its current state.
#[derive(Clone, Debug)]
pub struct StateLog(Arc<Mutex<Lines>>);

#[derive(Debug)]
struct Lines {
    write: fn(&str),
    period: Duration,
    /// The limit of each kind.
    kinds: Vec<(&'static str, RateLimit)>,
    /// The last line, if it was suppressed.
    last: Option<String>,
    /// A thread is waiting to write `last`.
    waits: bool,
}

impl StateLog {
    /// A log that writes whole lines with `write`.
    pub fn new(write: fn(&str)) -> Self {
        Self::with_period(write, PERIOD)
    }

    fn with_period(write: fn(&str), period: Duration) -> Self {
        Self(Arc::new(Mutex::new(Lines {
            write,
            period,
            kinds: Vec::new(),
            last: None,
            waits: false,
        })))
    }

    /// Writes a line of a kind. Above the limit, writes it after the period unless
    /// another line follows before.
    pub fn line(&self, kind: &'static str, line: &str) {
        let mut lines = self.lines();
        if lines.kinds.iter().all(|(known, _)| *known != kind) {
            let limit = RateLimit::new();
            lines.kinds.push((kind, limit));
        }
        let now = Instant::now();
        let period = lines.period;
        let mut kinds = lines.kinds.iter();
        let allowed = kinds
            .find(|(known, _)| *known == kind)
            .and_then(|(_, limit)| limit.allow_in(period, now));
        match allowed {
            Some(held_back) => {
                lines.last = None;
                (lines.write)(&format!("{line}{held_back}"));
            }
            None => {
                lines.last = Some(line.to_owned());
                if !lines.waits {
                    lines.waits = self.write_last_after(period);
                }
            }
        }
    }

    /// Starts a thread that writes the last line, so that the callers need no timer.
    /// Returns whether it was started.
    fn write_last_after(&self, period: Duration) -> bool {
        let log = self.clone();
        let thread = std::thread::Builder::new().name("log".into());
        let started = thread.spawn(move || {
            std::thread::sleep(period);
            let mut lines = log.lines();
            lines.waits = false;
            if let Some(last) = lines.last.take() {
                (lines.write)(&format!("{last} (lines before it were not logged)"));
            }
        });
        started.is_ok()
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        // No update of `Lines` can be interrupted half-way by a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// The lines of one log. `write` is a plain function, so each test needs a static of
    /// its own.
    macro_rules! written {
        ($name:ident, $log:ident) => {
            static $name: Mutex<Vec<String>> = Mutex::new(Vec::new());
            fn $log(line: &str) {
                $name.lock().unwrap().push(line.to_owned());
            }
        };
    }

    #[test]
    fn kinds_of_lines_do_not_silence_each_other() {
        written!(LINES, write);
        let log = StateLog::new(write);
        for _ in 0..100 {
            log.line("reset", "reset");
        }
        log.line("returned", "returned");
        let lines = LINES.lock().unwrap();
        assert_eq!(lines.len(), BURST as usize + 1);
        assert_eq!(lines.last().map(String::as_str), Some("returned"));
    }

    #[test]
    fn the_last_line_is_written_though_others_used_up_the_room() {
        written!(LINES, write);
        // Time for 200 lines on a loaded host.
        let log = StateLog::with_period(write, Duration::from_secs(2));
        for _ in 0..100 {
            log.line("ready", "ready");
            log.line("stopped", "stopped");
        }
        log.line("ready", "ready");
        let held_back = "ready (lines before it were not logged)";
        let deadline = Instant::now() + Duration::from_secs(20);
        while LINES
            .lock()
            .unwrap()
            .last()
            .is_none_or(|last| last != held_back)
        {
            assert!(Instant::now() < deadline, "{:?}", LINES.lock().unwrap());
            std::thread::yield_now();
        }
        assert_eq!(LINES.lock().unwrap().len(), 2 * BURST as usize + 1);
    }
}
