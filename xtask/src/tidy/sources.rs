//! Source files: length, `unsafe`, and terms.

use super::{
    Problem, Tree,
    crates::{Package, has_word},
};

/// Maximum number of lines of a source file.
const LONGEST: usize = 600;

const CONTRIBUTING: &str = "CONTRIBUTING.md";

/// Former terms and their replacements. The list grows as files are rewritten.
const WORDS: [(&str, &str); 24] = [
    ("folder", "directory"),
    ("makes no sense", "is invalid, or malformed"),
    ("no good", "invalid"),
    ("in vain", "dropped before …"),
    ("farewell", "unplug notification"),
    ("mend", "fix"),
    ("doors", "listeners"),
    ("mends", "fixes"),
    ("at rest", "idle"),
    ("favoured", "prioritised"),
    ("goes before", "overrides"),
    ("let in", "allowed to connect"),
    ("turns away", "refuses"),
    ("tombstone", "moved marker"),
    ("whereabouts", "transfer status"),
    ("vector fires", "vector is raised, or signalled"),
    ("mappable area", "sparse mmap area"),
    ("mappable areas", "sparse mmap areas"),
    ("far address", "peer address"),
    ("stands still", "is paused, or does not run"),
    ("NVMe drive", "NVMe device"),
    ("NVMe drives", "NVMe devices"),
    ("the drive", "the disk, or the device"),
    ("both drives", "both disks"),
];

/// The file of [`WORDS`], which is exempt.
const ITSELF: &str = "xtask/src/tidy/sources.rs";

/// Source files that exceed the maximum length.
pub(super) fn length(tree: &Tree) -> Vec<Problem> {
    let lines = tree
        .ending(".rs")
        .map(|(path, text)| (path, text.lines().count()));
    let long = lines.filter(|(_, lines)| *lines > LONGEST);
    long.map(|(path, lines)| {
        let what = format!("{lines} lines; split it, {LONGEST} are the most");
        Problem::of_file(path, what)
    })
    .collect()
}

/// Crates that neither forbid `unsafe` nor deny it, and files that allow it without being
/// listed in CONTRIBUTING.md.
pub(super) fn unsafe_code(tree: &Tree, packages: &[Package]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for package in packages {
        let root = |name: &str| format!("{}/src/{name}.rs", package.dir);
        for path in ["lib", "main"].map(root) {
            let guards = ["#![forbid(unsafe_code)]", "#![deny(unsafe_code)]"];
            let is_guarded = |text: &str| guards.iter().any(|guard| text.contains(guard));
            if tree.text(&path).is_some_and(|text| !is_guarded(text)) {
                let what = "neither forbids nor denies unsafe code";
                problems.push(Problem::of_file(&path, what));
            }
        }
    }
    let listed = listed(tree.text(CONTRIBUTING).unwrap_or_default());
    for (path, text) in tree.ending(".rs").filter(|(path, _)| *path != ITSELF) {
        let in_tests = path.contains("/tests/") || path.ends_with("/tests.rs");
        let allows = ["allow(unsafe_code", "expect(unsafe_code"];
        let allows = allows.iter().any(|allow| text.contains(allow));
        let is_listed = listed
            .iter()
            .any(|listed| path.starts_with(listed.as_str()));
        if allows && !in_tests && !is_listed {
            let what = format!("has unsafe code, and {CONTRIBUTING} does not list it");
            problems.push(Problem::of_file(path, what));
        }
    }
    problems
}

/// The files and directories in code spans; `a/{b,c}.rs` are two.
fn listed(text: &str) -> Vec<String> {
    let spans = text.split('`').skip(1).step_by(2);
    let paths = spans.flat_map(|span| match (span.split_once('{'), span.split_once('}')) {
        (Some((start, _)), Some((middle, end))) => middle[(start.len() + 1).min(middle.len())..]
            .split(',')
            .map(|name| format!("{start}{name}{end}"))
            .collect(),
        _ => vec![span.to_owned()],
    });
    paths.filter(|path| path.contains('/')).collect()
}

/// Terms that this project no longer uses.
pub(super) fn words(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    let files = tree.ending(".rs").chain(tree.ending(".md"));
    for (path, text) in files.filter(|(path, _)| *path != ITSELF) {
        for (index, line) in text.lines().enumerate() {
            for (word, better) in WORDS.iter().filter(|(word, _)| has_word(line, word)) {
                let what = format!("\"{word}\": write {better}");
                problems.push(Problem::at(path, index + 1, what));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::{super::tree, *};

    fn paths(problems: Vec<Problem>) -> Vec<String> {
        problems.into_iter().map(|problem| problem.path).collect()
    }

    #[test]
    fn a_long_file_is_a_problem() {
        let tree = tree(&[("a.rs", &"\n".repeat(600)), ("b.rs", &"\n".repeat(601))]);
        assert_eq!(paths(length(&tree)), ["b.rs"]);
    }

    #[test]
    fn unsafe_code_is_listed() {
        let allow = "#![allow(unsafe_code)]\n";
        let tree = tree(&[
            (CONTRIBUTING, "In `a/src/{one,two}.rs` and `b/src/deep/`.\n"),
            ("a/src/one.rs", allow),
            ("a/src/two.rs", allow),
            ("a/src/three.rs", allow),
            ("a/tests/four.rs", allow),
            (
                "b/src/deep/mod.rs",
                "#[expect(unsafe_code, reason = \"\")]\n",
            ),
        ]);
        assert_eq!(paths(unsafe_code(&tree, &[])), ["a/src/three.rs"]);
    }

    #[test]
    fn former_words_are_found_with_their_line() {
        let tree = tree(&[("a.md", "fine\nthis makes no sense\n")]);
        assert_eq!(
            words(&tree),
            [Problem::at(
                "a.md",
                2,
                "\"makes no sense\": write is invalid, or malformed"
            )]
        );
    }
}
