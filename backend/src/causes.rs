//! An error with all its causes, on one line.

use std::{error::Error, fmt};

/// Displays as `error: its cause: the cause's cause`. For errors whose own
/// text leaves the cause to the reader.
pub(crate) struct Causes<'a>(pub(crate) &'a dyn Error);

impl fmt::Display for Causes<'_> {
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
    use super::Causes;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot serve")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn no_cause_is_left_out() {
        let error = Outer(std::io::Error::other("no socket"));
        assert_eq!(Causes(&error).to_string(), "cannot serve: no socket");
    }
}
