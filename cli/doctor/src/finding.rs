//! Words and commands of findings.

use std::path::Path;

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
}
