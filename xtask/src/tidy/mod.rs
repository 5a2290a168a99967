//! `cargo xtask tidy`: checks that neither rustfmt nor clippy makes, so that documents and
//! layering do not drift from the code.
//!
//! - [`crates`]: the crate table of docs/architecture.md, import cycles, the size of the
//!   top level, unused dependencies, features that are shipped but not tested;
//! - [`docs`]: links, the index of decisions, the tests named in SPECIFICATION.md and the threat model, the
//!   filters of system calls;
//! - [`sources`]: length of files, `unsafe`, terms.

mod crates;
mod docs;
mod sources;

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, ensure};

use crate::cargo;

/// The text files of a checkout.
struct Tree(BTreeMap<String, String>);

/// A violation.
#[derive(Debug, PartialEq, Eq)]
struct Problem {
    /// Relative to the workspace.
    path: String,
    /// `None` if it concerns the whole file.
    line: Option<usize>,
    what: String,
}

/// Checks this workspace, and prints each violation as `path:line: what`.
pub(crate) fn run() -> Result<ExitCode> {
    let tree = Tree::read()?;
    let packages = crates::packages()?;
    let checks = [
        ("crate table", crates::table(&tree, &packages)),
        ("layers", crates::layers(&packages)),
        ("top level", crates::top_level(&tree)),
        ("dependencies", crates::unused(&tree, &packages)),
        ("features", crates::features()?),
        ("links", docs::links(&tree)),
        ("file names", docs::sources(&tree)),
        ("system calls", docs::system_calls(&tree)),
        ("decisions", docs::decisions(&tree)),
        ("specification", docs::specification(&tree)),
        ("threat model", docs::threat_model(&tree)),
        ("file length", sources::length(&tree)),
        ("unsafe", sources::unsafe_code(&tree, &packages)),
        ("words", sources::words(&tree)),
    ];
    let mut clean = true;
    for (name, problems) in checks {
        match problems.len() {
            0 => println!("{name}: ok"),
            count => println!("{name}: {count} to fix"),
        }
        for problem in &problems {
            println!("  {problem}");
            clean = false;
        }
    }
    Ok(match clean {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

impl Tree {
    fn read() -> Result<Self> {
        let root = cargo::workspace();
        // Deleted and uncommitted files, and binary files, are skipped.
        let files = names(&root)?.into_iter().filter_map(|name| {
            let text = fs::read_to_string(root.join(&name)).ok()?;
            Some((name, text))
        });
        Ok(Self(files.collect()))
    }

    fn text(&self, path: &str) -> Option<&str> {
        self.0.get(path).map(String::as_str)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Files whose names end in `suffix`.
    fn ending(&self, suffix: &str) -> impl Iterator<Item = (&str, &str)> {
        let files = self.0.iter().map(|(path, text)| (&**path, &**text));
        files.filter(move |(path, _)| path.ends_with(suffix))
    }

    /// Whether `path` is a tracked file, or a directory with one in it.
    fn exists(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let below = format!("{path}/");
        let mut from = self.0.range(path.to_owned()..);
        path.is_empty() || from.any(|(name, _)| name == path || name.starts_with(&below))
    }
}

/// The files that git tracks below `root`; all files in a source archive, or without git.
fn names(root: &Path) -> Result<Vec<String>> {
    if !root.join(".git").exists() {
        return walk(root);
    }
    let mut git = Command::new("git");
    match git.args(["ls-files", "-z"]).current_dir(root).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => walk(root),
        Err(error) => Err(error).context("running git"),
        Ok(output) => {
            ensure!(
                output.status.success(),
                "git ls-files failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
            let names = String::from_utf8(output.stdout).context("names of tracked files")?;
            Ok(names.split_terminator('\0').map(str::to_owned).collect())
        }
    }
}

/// The files below `root`, except cargo's output and git's directory.
fn walk(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        let entries = fs::read_dir(&directory)
            .with_context(|| format!("cannot list {}", directory.display()))?;
        for entry in entries {
            let entry = entry?;
            let path = entry.path();
            let name = entry.file_name();
            if entry.file_type()?.is_dir() {
                if name != "target" && name != ".git" {
                    directories.push(path);
                }
            } else if let Some(path) = path.strip_prefix(root)?.to_str() {
                files.push(path.to_owned());
            }
        }
    }
    Ok(files)
}

impl Problem {
    fn of_file(path: &str, what: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: None,
            what: what.into(),
        }
    }

    fn at(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self {
            line: Some(line),
            ..Self::of_file(path, what)
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, line, what } = self;
        match line {
            Some(line) => write!(f, "{path}:{line}: {what}"),
            None => write!(f, "{path}: {what}"),
        }
    }
}

#[cfg(test)]
fn tree(files: &[(&str, &str)]) -> Tree {
    let files = files.iter();
    Tree(
        files
            .map(|&(path, text)| (path.into(), text.into()))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_exist_by_their_files() {
        let tree = tree(&[("a/b.md", ""), ("ab.md", "")]);
        for path in ["a", "a/", "a/b.md", "ab.md", ""] {
            assert!(tree.exists(path), "{path}");
        }
        assert!(!tree.exists("b.md") && !tree.exists("a/b"));
    }
}
