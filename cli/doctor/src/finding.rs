//! One thing that was looked at, and what came of it.

use std::path::Path;

use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, or works for now; worth knowing.
    Note,
    /// Something does not work.
    Problem,
}

impl Level {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }
}

/// What a check says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// The check, one word.
    pub check: &'static str,
    /// The VM that it is about; `None` for the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// What was found.
    pub what: String,
    /// Why that matters. Empty when all is well.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// What to type, one command after the other.
    pub fix: Vec<String>,
}

impl Finding {
    fn new(level: Level, check: &'static str, what: impl Into<String>, why: &str) -> Self {
        Self {
            level,
            check,
            vm: None,
            what: what.into(),
            why: why.to_owned(),
            fix: Vec::new(),
        }
    }

    pub(crate) fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self::new(Level::Ok, check, what, "")
    }

    pub(crate) fn note(check: &'static str, what: impl Into<String>, why: &str) -> Self {
        Self::new(Level::Note, check, what, why)
    }

    pub(crate) fn problem(check: &'static str, what: impl Into<String>, why: &str) -> Self {
        Self::new(Level::Problem, check, what, why)
    }

    /// A problem, or only a note.
    pub(crate) fn problem_if(
        bad: bool,
        check: &'static str,
        what: impl Into<String>,
        why: &str,
    ) -> Self {
        let level = if bad { Level::Problem } else { Level::Note };
        Self::new(level, check, what, why)
    }

    pub(crate) fn of_vm(mut self, vm: &str) -> Self {
        self.vm = Some(vm.to_owned());
        self
    }

    pub(crate) fn fix(mut self, command: impl Into<String>) -> Self {
        self.fix.push(command.into());
        self
    }
}

/// "1 device", "2 devices".
pub(crate) fn devices(count: usize) -> String {
    match count {
        1 => "1 device".to_owned(),
        count => format!("{count} devices"),
    }
}

/// A word as a shell reads it.
pub(crate) fn quoted(word: &str) -> String {
    shlex::try_quote(word).map_or_else(|_| word.escape_default().to_string(), Into::into)
}

/// A path as a shell reads it.
pub(crate) fn quoted_path(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

/// Opens a file in the user's editor.
pub(crate) fn edit(path: &Path) -> String {
    format!("${{EDITOR:-vi}} {}", quoted_path(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_can_be_pasted() {
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(
            edit(Path::new("/a/b c.toml")),
            "${EDITOR:-vi} '/a/b c.toml'"
        );
    }

    #[test]
    fn the_worst_is_the_greatest() {
        assert!(Level::Problem > Level::Note && Level::Note > Level::Ok);
    }
}
