//! The result of one check.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing; the VM can be moved.
    Note,
    /// It would stop the migration.
    Problem,
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        })
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// The severity.
    pub level: Level,
    /// What was checked, in a word or two.
    pub check: String,
    /// What was found.
    pub what: String,
    /// The remedy. Empty if none is needed, or if `what` includes it.
    pub advice: String,
}

impl Finding {
    fn new(level: Level, check: &str, what: impl Into<String>, advice: &str) -> Self {
        Self {
            level,
            check: check.to_owned(),
            what: what.into(),
            advice: advice.to_owned(),
        }
    }

    pub(super) fn ok(check: &str, what: impl Into<String>) -> Self {
        Self::new(Level::Ok, check, what, "")
    }

    pub(super) fn note(check: &str, what: impl Into<String>, advice: &str) -> Self {
        Self::new(Level::Note, check, what, advice)
    }

    pub(super) fn problem(check: &str, what: impl Into<String>, advice: &str) -> Self {
        Self::new(Level::Problem, check, what, advice)
    }

    /// A problem for a live migration, a note for a cold one.
    pub(super) fn if_live(live: bool, check: &str, what: impl Into<String>, advice: &str) -> Self {
        let level = if live { Level::Problem } else { Level::Note };
        Self::new(level, check, what, advice)
    }

    /// A problem; the error's message includes the remedy.
    pub(super) fn of(check: &str, error: &Error) -> Self {
        Self::problem(check, &error.message, "")
    }

    /// A problem if the check failed, else `well`.
    pub(super) fn either<T>(check: &str, result: &Result<T>, well: &str) -> Self {
        match result {
            Ok(_) => Self::ok(check, well),
            Err(error) => Self::of(check, error),
        }
    }
}
