//! The result of one check.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing; it works, or works for now.
    Note,
    /// Something does not work; it would stop a migration.
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

/// The result of one check, of `farside migrate --check` or `farside doctor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// The severity.
    pub level: Level,
    /// The checked subject, in a word or two.
    pub check: String,
    /// The VM that it is about; `None` for the host, or if there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The finding.
    pub what: String,
    /// The consequence, or a remedy other than a command. May be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Commands that fix it, one after the other.
    pub fix: Vec<String>,
}

impl Finding {
    fn new(level: Level, check: &str, what: impl Into<String>, why: &str) -> Self {
        Self {
            level,
            check: check.to_owned(),
            vm: None,
            what: what.into(),
            why: why.to_owned(),
            fix: Vec::new(),
        }
    }

    /// As it should be.
    pub fn ok(check: &str, what: impl Into<String>) -> Self {
        Self::new(Level::Ok, check, what, "")
    }

    /// Worth knowing.
    pub fn note(check: &str, what: impl Into<String>, why: &str) -> Self {
        Self::new(Level::Note, check, what, why)
    }

    /// Does not work.
    pub fn problem(check: &str, what: impl Into<String>, why: &str) -> Self {
        Self::new(Level::Problem, check, what, why)
    }

    /// A problem, or only a note.
    pub fn problem_if(bad: bool, check: &str, what: impl Into<String>, why: &str) -> Self {
        let level = if bad { Level::Problem } else { Level::Note };
        Self::new(level, check, what, why)
    }

    /// About one VM.
    #[must_use]
    pub fn of_vm(mut self, vm: &str) -> Self {
        self.vm = Some(vm.to_owned());
        self
    }

    /// With one command more that fixes it.
    #[must_use]
    pub fn fix(mut self, command: impl Into<String>) -> Self {
        self.fix.push(command.into());
        self
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_is_the_greatest() {
        assert!(Level::Problem > Level::Note && Level::Note > Level::Ok);
    }
}
