//! One thing that was looked at, and what came of it.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// The VM moves all the same; worth knowing.
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

/// What a check says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What was looked at, in a word or two.
    pub check: String,
    /// What was found.
    pub what: String,
    /// What to do about it. Empty where nothing is to be done, or where `what` says
    /// it.
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

    /// What would stop a live migration, and not one in which the VM boots anew.
    pub(super) fn if_live(live: bool, check: &str, what: impl Into<String>, advice: &str) -> Self {
        let level = if live { Level::Problem } else { Level::Note };
        Self::new(level, check, what, advice)
    }

    /// An error says itself what to do.
    pub(super) fn of(check: &str, error: &Error) -> Self {
        Self::problem(check, &error.message, "")
    }

    /// What a migration would be refused with, or that all is well.
    pub(super) fn either<T>(check: &str, result: &Result<T>, well: &str) -> Self {
        match result {
            Ok(_) => Self::ok(check, well),
            Err(error) => Self::of(check, error),
        }
    }
}
