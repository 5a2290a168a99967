//! Text of a worker, which its guest may have taken over.

use std::io::Read;

use farside_daemon::RateLimit;
use farside_lender_protocol::RemoteError;

/// Maximum length of a line, in bytes.
const MAX_LINE: usize = 1000;

/// `text` as one line of visible characters.
pub(crate) fn printable(text: &str) -> String {
    let is_control = |c: char| {
        c.is_control()
            // Line and paragraph separators, and those that change the direction of writing
            // (Unicode 16, table 4-10 and UAX #9).
            || matches!(c, '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let printable = text.chars().filter(|c| !is_control(*c));
    printable.take(MAX_LINE).collect()
}

/// As [`printable`], for an error.
pub(crate) fn printable_error(error: RemoteError) -> RemoteError {
    RemoteError {
        message: printable(&error.message),
        ..error
    }
}

/// Reads the standard error of a worker, which logs `LEVEL text` by line; a panic has no level.
pub(crate) struct LogReader {
    /// Names the worker.
    prefix: String,
    line: Vec<u8>,
    limit: RateLimit,
}

impl LogReader {
    pub(crate) fn new(prefix: String) -> Self {
        Self {
            prefix,
            line: Vec::new(),
            limit: RateLimit::new(),
        }
    }

    /// Logs what has been written, up to some length. Returns false at the end.
    pub(crate) fn read(&mut self, mut pipe: impl Read) -> bool {
        let mut bytes = [0; 4096];
        let Ok(count) = pipe.read(&mut bytes) else {
            // Nothing has been written.
            return true;
        };
        for &byte in &bytes[..count] {
            if byte == b'\n' || self.line.len() == MAX_LINE {
                self.log();
            }
            if byte != b'\n' {
                self.line.push(byte);
            }
        }
        if count == 0 && !self.line.is_empty() {
            self.log();
        }
        count != 0
    }

    fn log(&mut self) {
        let (level, text) = parse(&self.line);
        if let Some(held_back) = self.limit.allow() {
            log::log!(level, "{}: {text}{held_back}", self.prefix);
        }
        self.line.clear();
    }
}

fn parse(line: &[u8]) -> (log::Level, String) {
    let text = printable(&String::from_utf8_lossy(line));
    match text.split_once(' ') {
        Some((level, rest)) if let Ok(level) = level.parse() => (level, rest.to_owned()),
        _ => (log::Level::Error, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_cannot_pass_for_another() {
        let hostile = "\u{1b}[2Kdevice disk1: revoked\n<0>\u{202e}x\u{2028}y\r";
        assert_eq!(printable(hostile), "[2Kdevice disk1: revoked<0>xy");
        assert_eq!(printable(&"x".repeat(5000)).len(), MAX_LINE);
    }

    #[test]
    fn lines_have_levels_and_panics_have_none() {
        assert_eq!(parse(b"WARN a b"), (log::Level::Warn, "a b".into()));
        let panic = "thread 'lease' panicked";
        assert_eq!(parse(panic.as_bytes()), (log::Level::Error, panic.into()));
        assert_eq!(parse(b"\xff"), (log::Level::Error, "\u{fffd}".into()));
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let mut reader = LogReader::new("device dma0".into());
        let endless = [b'x'; 4096];
        for _ in 0..10 {
            assert!(reader.read(&endless[..]));
            assert!(reader.line.len() <= MAX_LINE);
        }
        assert!(!reader.read(&[][..]));
    }
}
