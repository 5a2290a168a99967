//! The one reporter of errors.
//!
//! An error's `Display` has its own fact only, and its cause is its `source()`. So
//! all code that reports an error, in a log line or a message to a peer, uses
//! [`Chain`].

#![forbid(unsafe_code)]

use std::{error::Error, fmt};

/// Displays an error as `error: its cause: the cause's cause`.
pub struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Outer(std::io::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("cannot serve")
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn each_cause_is_shown_once() {
        let error = Outer(std::io::Error::other("no socket"));
        assert_eq!(Chain(&error).to_string(), "cannot serve: no socket");
    }
}
