//! Text that a terminal or a log shows. Parts of it come from lenders, other hosts and QEMU, so
//! control characters, with which a terminal could be controlled, are escaped: in log lines, in
//! errors and in tables.

use std::fmt::{self, Display, Write};

use log::{Log, Metadata, Record};

/// Displays text with its control characters escaped, except newlines.
pub(crate) struct Plain<T>(pub(crate) T);

impl<T: Display> Display for Plain<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(f), "{}", self.0)
    }
}

struct Escaping<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.split_inclusive(is_control) {
            match part.char_indices().next_back() {
                Some((at, last)) if is_control(last) => {
                    self.0.write_str(&part[..at])?;
                    write!(self.0, "{}", last.escape_default())?;
                }
                _ => self.0.write_str(part)?,
            }
        }
        Ok(())
    }
}

fn is_control(c: char) -> bool {
    c.is_control() && c != '\n'
}

/// A logger whose lines are [`Plain`].
pub(crate) struct PlainLog(pub(crate) env_logger::Logger);

impl Log for PlainLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.0.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        let mut plain = Record::builder();
        plain.metadata(record.metadata().clone());
        plain.module_path(record.module_path());
        plain.file(record.file()).line(record.line());
        self.0
            .log(&plain.args(format_args!("{}", Plain(record.args()))).build());
    }

    fn flush(&self) {
        self.0.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_text_cannot_control_the_terminal() {
        for (text, shown) in [
            ("disk0: ünïcode\n  next", "disk0: ünïcode\n  next"),
            ("\u{1b}]0;title\u{7}x", "\\u{1b}]0;title\\u{7}x"),
            ("a\rb\tc\u{9b}2J", "a\\rb\\tc\\u{9b}2J"),
            ("", ""),
        ] {
            assert_eq!(Plain(text).to_string(), shown);
        }
    }
}
