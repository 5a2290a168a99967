//! Failures of the medium. Start and end of a failure are reported to the operator and
//! the guest, rather than each failed command.
//!
//! During a failure some I/O succeeds: a full file system still accepts writes to
//! allocated blocks. So a failure ends only after no command has failed for [`QUIET`] and
//! its cause is gone.

use std::{
    io,
    time::{Duration, Instant},
};

use farside_medium::Condition;

use super::BlockError;

/// Time without a failed command before a failure can end.
const QUIET: Duration = Duration::from_secs(10);

/// Critical warnings of the health log (NVM Express 1.4, 5.14.1.2), of which
/// Asynchronous Event Configuration has the same bits (5.21.1.11).
pub mod warning {
    /// The available spare is below its threshold.
    pub const SPARE: u8 = 1 << 0;
    /// The composite temperature is beyond a threshold.
    pub const TEMPERATURE: u8 = 1 << 1;
    /// Reliability is degraded by media errors.
    pub const RELIABILITY: u8 = 1 << 2;
    /// The medium is in read-only mode.
    pub const READ_ONLY: u8 = 1 << 3;
}

/// Whether a command reads or changes the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

/// Why commands fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    NoSpace,
    ReadOnly,
    Shrunk { to: u64 },
    Failing { errno: i32, direction: Direction },
}

impl Cause {
    fn warning(self) -> u8 {
        match self {
            // The namespace's spare capacity is the file system's free space.
            Self::NoSpace => warning::SPARE,
            Self::ReadOnly => warning::READ_ONLY,
            Self::Shrunk { .. } | Self::Failing { .. } => warning::RELIABILITY,
        }
    }

    /// Whether it is the same kind of failure.
    fn is_same(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }

    /// Whether it persists after a success in `direction`.
    fn persists(self, size: u64, direction: Direction, condition: Condition) -> bool {
        match self {
            Self::NoSpace => condition.full,
            Self::ReadOnly => condition.read_only,
            Self::Shrunk { .. } => condition.size < size,
            // No condition to check: a success in the same direction ends it.
            Self::Failing {
                direction: failed, ..
            } => failed != direction,
        }
    }

    fn text(self, size: u64) -> String {
        match self {
            Self::NoSpace => "writes fail: no space left on its file system".into(),
            Self::ReadOnly => "writes fail: it has become read-only".into(),
            Self::Shrunk { to } => {
                format!("it has shrunk from {size} to {to} bytes: I/O behind its end fails")
            }
            Self::Failing { errno, direction } => {
                let what = match direction {
                    Direction::Read => "reads",
                    Direction::Write => "writes",
                };
                format!("{what} fail: {}", io::Error::from_raw_os_error(errno))
            }
        }
    }
}

/// The medium's current failures.
#[derive(Debug)]
pub struct Medium {
    /// As in "image /srv/disk0.img".
    name: String,
    /// Bytes of the namespace.
    size: u64,
    /// Each cause once, with the time of the last failed command.
    causes: Vec<(Cause, Instant)>,
    problem: Option<String>,
}

impl Medium {
    pub fn new(name: String, size: u64) -> Self {
        Self {
            name,
            size,
            causes: Vec::new(),
            problem: None,
        }
    }

    /// It has grown to `size` bytes.
    pub fn grow(&mut self, size: u64) {
        self.size = size;
    }

    /// The problem, for the operator. The text does not change while the problem persists.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Critical warnings of the health log.
    pub fn warnings(&self) -> u8 {
        let causes = self.causes.iter();
        causes.fold(0, |bits, (cause, _)| bits | cause.warning())
    }

    /// A command has failed.
    pub fn failed(
        &mut self,
        error: BlockError,
        direction: Direction,
        condition: Condition,
        now: Instant,
    ) {
        let cause = match error {
            // Not failures of the medium.
            BlockError::GuestMemory
            | BlockError::Unsupported
            | BlockError::Unreachable
            | BlockError::Refused(_) => return,
            BlockError::ReadOnly => Cause::ReadOnly,
            // A block device returns ENOSPC past its end.
            _ if condition.size < self.size => Cause::Shrunk { to: condition.size },
            BlockError::NoSpace => Cause::NoSpace,
            // The image has grown again since.
            BlockError::EndsEarly => Cause::Shrunk { to: condition.size },
            BlockError::Medium(errno) => Cause::Failing { errno, direction },
        };
        match self.causes.iter_mut().find(|(old, _)| old.is_same(cause)) {
            Some((_, met)) => *met = now,
            None => {
                self.causes.push((cause, now));
                self.describe();
            }
        }
    }

    /// A command has succeeded while there was a problem.
    pub fn succeeded(
        &mut self,
        direction: Direction,
        condition: impl FnOnce() -> Condition,
        now: Instant,
    ) {
        let is_quiet = |met: Instant| now.saturating_duration_since(met) >= QUIET;
        if !self.causes.iter().any(|(_, met)| is_quiet(*met)) {
            return;
        }
        let condition = condition();
        let before = self.causes.len();
        self.causes.retain_mut(|(cause, met)| {
            if !is_quiet(*met) {
                return true;
            }
            // If it persists, check again after another period.
            *met = now;
            cause.persists(self.size, direction, condition)
        });
        if self.causes.len() != before {
            self.describe();
        }
    }

    fn describe(&mut self) {
        let causes = self.causes.iter();
        let texts: Vec<String> = causes.map(|(cause, _)| cause.text(self.size)).collect();
        self.problem = match texts.is_empty() {
            true => None,
            false => Some(format!("{}: {}", self.name, texts.join("; "))),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 20;
    const FINE: Condition = Condition {
        size: SIZE,
        full: false,
        read_only: false,
    };
    const FULL: Condition = Condition { full: true, ..FINE };

    fn medium() -> Medium {
        Medium::new("image /srv/disk0.img".to_owned(), SIZE)
    }

    #[test]
    fn many_failed_commands_are_one_failure() {
        let mut medium = medium();
        let start = Instant::now();
        for second in 0..100 {
            let now = start + Duration::from_secs(second);
            medium.failed(BlockError::NoSpace, Direction::Write, FULL, now);
            // A write to an allocated block.
            medium.succeeded(Direction::Write, || FULL, now);
            let expected = "image /srv/disk0.img: writes fail: no space left on its file system";
            assert_eq!(medium.problem(), Some(expected));
            assert_eq!(medium.warnings(), warning::SPARE);
        }
    }

    #[test]
    fn a_failure_ends_after_a_quiet_period_if_its_cause_is_gone() {
        let mut medium = medium();
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        medium.failed(BlockError::NoSpace, Direction::Write, FULL, start);
        medium.succeeded(Direction::Write, || FINE, after(9));
        assert!(medium.problem().is_some(), "too early to tell");
        medium.succeeded(Direction::Write, || FULL, after(10));
        assert!(medium.problem().is_some(), "still full");
        medium.succeeded(Direction::Read, || FINE, after(20));
        assert_eq!((medium.problem(), medium.warnings()), (None, 0));
    }

    #[test]
    fn an_error_of_writes_does_not_end_with_a_read() {
        let mut medium = medium();
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let error = BlockError::Medium(libc::EIO);
        medium.failed(error, Direction::Write, FINE, start);
        let expected = "image /srv/disk0.img: writes fail: Input/output error (os error 5)";
        assert_eq!(medium.problem(), Some(expected));
        assert_eq!(medium.warnings(), warning::RELIABILITY);
        medium.succeeded(Direction::Read, || FINE, after(10));
        assert!(medium.problem().is_some());
        medium.succeeded(Direction::Write, || FINE, after(20));
        assert_eq!(medium.problem(), None);
    }

    #[test]
    fn guest_errors_are_not_failures_of_the_medium() {
        let mut medium = medium();
        for error in [BlockError::GuestMemory, BlockError::Unsupported] {
            medium.failed(error, Direction::Write, FINE, Instant::now());
        }
        assert_eq!((medium.problem(), medium.warnings()), (None, 0));
    }

    #[test]
    fn an_image_that_shrinks_is_named_with_both_sizes_for_reads_and_writes_alike() {
        let mut medium = medium();
        let half = Condition {
            size: SIZE / 2,
            ..FINE
        };
        let now = Instant::now();
        medium.failed(BlockError::EndsEarly, Direction::Read, half, now);
        medium.failed(BlockError::NoSpace, Direction::Write, half, now);
        let expected = "image /srv/disk0.img: it has shrunk from 1048576 to 524288 bytes: I/O behind its end fails";
        assert_eq!(medium.problem(), Some(expected));
        assert_eq!(medium.warnings(), warning::RELIABILITY);
    }
}
