//! Documents: links, the index of decisions, the tests named in SPECIFICATION.md and the threat model, and
//! the filters of system calls.

use std::collections::BTreeSet;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use super::{Problem, Tree};

const SYSTEM_CALLS: &str = "docs/system-calls.md";
const SPECIFICATION: &str = "SPECIFICATION.md";
const THREAT_MODEL: &str = "docs/threat-model.md";
/// The list of fuzz targets, which are named by themselves.
const FUZZ_TARGETS: &str = "tests/fuzz/src/lib.rs";
/// Sections of the threat model whose paragraphs and rows name tests.
const TESTED: [&str; 2] = [
    "Guarantees, and how they are enforced",
    "The audit of f6291c4",
];
const DECISIONS: &str = "docs/decisions/";
const INDEX: &str = "docs/decisions/README.md";

/// Links to files and headings that do not exist.
pub(super) fn links(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.ending(".md") {
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            let Event::Start(Tag::Link { dest_url, .. }) = event else {
                continue;
            };
            if dest_url.contains("://") {
                continue;
            }
            let (file, heading) = dest_url.split_once('#').unwrap_or((&dest_url, ""));
            let target = match file {
                "" => path.to_owned(),
                file => resolve(path, file),
            };
            let exists = match tree.text(&target) {
                Some(document) => heading.is_empty() || headings(document).any(|h| h == heading),
                None => heading.is_empty() && tree.exists(&target),
            };
            if !exists {
                let line = line_of(text, range.start);
                let what = format!("dead link {dest_url}");
                problems.push(Problem::at(path, line, what));
            }
        }
    }
    problems
}

/// Source files named in documents that do not exist: a name may leave out leading directories.
pub(super) fn sources(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.ending(".md") {
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            let Event::Code(code) = event else {
                continue;
            };
            let named = code.ends_with(".rs") && !code.contains([' ', '*', '{', '<']);
            let is_named = |path: &str| {
                let before = path.strip_suffix(&*code);
                before.is_some_and(|before| before.is_empty() || before.ends_with('/'))
            };
            if named && !tree.paths().any(is_named) {
                let line = line_of(text, range.start);
                problems.push(Problem::at(path, line, format!("there is no {code}")));
            }
        }
    }
    problems
}

/// Differences between the page of system calls and the filters in the source. A heading of the page
/// names the source, and the first column of its table the calls.
pub(super) fn system_calls(tree: &Tree) -> Vec<Problem> {
    let page = tree.text(SYSTEM_CALLS).unwrap_or_default();
    let mut problems = Vec::new();
    let mut sections = page.split("\n## ").skip(1).peekable();
    if sections.peek().is_none() {
        problems.push(Problem::of_file(SYSTEM_CALLS, "lists no filter"));
    }
    for section in sections {
        let (heading, table) = section.split_once('\n').unwrap_or((section, ""));
        let source = heading.split('`').nth(1).unwrap_or_default();
        let code = tree.text(source).unwrap_or_default();
        let code = code.split("\nmod tests {").next().unwrap_or_default();
        let used: BTreeSet<&str> = code.split("libc::SYS_").skip(1).map(word).collect();
        let rows = table.lines().filter(|line| line.starts_with("| `"));
        let columns = rows.filter_map(|row| row.split('|').nth(1));
        let listed: BTreeSet<&str> = columns
            .flat_map(|column| column.split('`').skip(1).step_by(2))
            .collect();
        let unlisted = used
            .difference(&listed)
            .map(|call| format!("has no {call}, which {source} allows"));
        let unused = listed
            .difference(&used)
            .map(|call| format!("has {call}, which {source} has not"));
        problems.extend(
            unlisted
                .chain(unused)
                .map(|what| Problem::of_file(SYSTEM_CALLS, what)),
        );
    }
    problems
}

/// The identifier at the beginning of `text`.
fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// The number of the line at byte `offset`.
fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

/// A `link` in the file `from`, resolved relative to the workspace.
pub(super) fn resolve(from: &str, link: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The anchors of a document's headings, as code hosts generate them.
fn headings(text: &str) -> impl Iterator<Item = String> {
    let mut heading: Option<String> = None;
    Parser::new_ext(text, Options::ENABLE_TABLES).filter_map(move |event| {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(text) | Event::Code(text) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&text);
                }
            }
            Event::End(TagEnd::Heading(_)) => return heading.take().map(|text| anchor(&text)),
            _ => {}
        }
        None
    })
}

fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

/// Decisions that the index does not list by number and title.
pub(super) fn decisions(tree: &Tree) -> Vec<Problem> {
    let index = tree.text(INDEX).unwrap_or_default();
    let mut problems = Vec::new();
    for (path, text) in tree.ending(".md") {
        let Some(name) = path.strip_prefix(DECISIONS).filter(|_| path != INDEX) else {
            continue;
        };
        // "# 7. Title"
        let title = text.lines().next().unwrap_or_default();
        let entry = title
            .strip_prefix("# ")
            .and_then(|title| title.split_once(". "));
        let listed = entry.is_some_and(|(number, title)| {
            let file = format!("{number:0>4}-");
            let line = format!("{number}. [{title}]({name})");
            name.starts_with(&file) && index.lines().any(|listed| listed == line)
        });
        if !listed {
            let what = format!("{INDEX} lacks this decision, or has another number or title");
            problems.push(Problem::of_file(path, what));
        }
    }
    problems
}

/// The file or directory that a document has named last, to which the functions belong that it names then.
#[derive(Default)]
struct Named {
    file: Option<String>,
}

impl Named {
    /// What is wrong with the name in a code span.
    fn look(&mut self, tree: &Tree, code: &str) -> Option<String> {
        let is_path = code.contains('/') && !code.starts_with('/') && !code.contains([' ', '=']);
        let is_function = code.contains('_')
            && code
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        if is_path {
            self.file = Some(code.to_owned());
            return (!tree.exists(code)).then(|| format!("there is no {code}"));
        }
        let file = self.file.as_ref().filter(|_| is_function)?;
        let function = format!("fn {code}(");
        let below = format!("{}/", file.trim_end_matches('/'));
        let mut files = tree.ending(".rs");
        let exists = files.any(|(path, text)| {
            (path == file || path.starts_with(&below)) && text.contains(&function)
        });
        let targets = tree.text(FUZZ_TARGETS).unwrap_or_default();
        let is_target = targets.contains(&format!("(\"{code}\", "));
        (!exists && !is_target).then(|| format!("{file} has no test {code}"))
    }
}

/// Guarantees of the threat model, and findings of its audit, without a test, and tests there that do not exist.
pub(super) fn threat_model(tree: &Tree) -> Vec<Problem> {
    let text = tree.text(THREAT_MODEL).unwrap_or_default();
    let mut problems = Vec::new();
    let (mut named, mut heading) = (Named::default(), None::<String>);
    let (mut is_tested, mut is_claim) = (false, false);
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        let line = line_of(text, range.start);
        let at = |what: String| Problem::at(THREAT_MODEL, line, what);
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(part) => heading.iter_mut().for_each(|it| it.push_str(&part)),
            Event::End(TagEnd::Heading(_)) => {
                is_tested = heading.take().is_some_and(|it| TESTED.contains(&&*it));
            }
            Event::Start(Tag::Paragraph | Tag::TableRow) => {
                named = Named::default();
                is_claim =
                    text[range].starts_with("**") || matches!(event, Event::Start(Tag::TableRow));
            }
            Event::Code(code) if is_tested => problems.extend(named.look(tree, &code).map(at)),
            Event::End(TagEnd::Paragraph | TagEnd::TableRow)
                if is_tested && is_claim && named.file.is_none() =>
            {
                problems.push(at("names no test".into()));
            }
            _ => {}
        }
    }
    problems
}

/// Tests named in SPECIFICATION.md that do not exist, and promises without a test. A cell
/// names a file or directory, and then functions in it.
pub(super) fn specification(tree: &Tree) -> Vec<Problem> {
    let text = tree.text(SPECIFICATION).unwrap_or_default();
    let mut problems = Vec::new();
    let (mut named, mut is_body, mut last_cell) = (Named::default(), false, String::new());
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        let line = line_of(text, range.start);
        match event {
            Event::End(TagEnd::TableHead) => is_body = true,
            Event::End(TagEnd::Table) => is_body = false,
            Event::Start(Tag::Paragraph) if text[range].starts_with('|') => {
                problems.push(Problem::at(SPECIFICATION, line, "a row outside its table"));
            }
            Event::Start(Tag::TableCell) => (named, last_cell) = Default::default(),
            Event::Text(said) => last_cell.push_str(&said),
            Event::Code(code) if is_body => {
                last_cell.push_str(&code);
                let what = named.look(tree, &code);
                problems.extend(what.map(|what| Problem::at(SPECIFICATION, line, what)));
            }
            Event::End(TagEnd::TableRow) => {
                let enforced = named.file.is_some()
                    || last_cell.contains("test pending")
                    || last_cell.contains("cargo xtask");
                if !enforced {
                    let what = "neither a test nor \"test pending\"";
                    problems.push(Problem::at(SPECIFICATION, line, what));
                }
            }
            _ => {}
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::{super::tree, *};

    fn told(problems: Vec<Problem>) -> Vec<String> {
        problems.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn a_link_leads_to_a_file_a_directory_or_a_heading() {
        let tree = tree(&[
            (
                "README.md",
                "[a](docs/a.md#what-it-is-now) [d](docs) [w](https://x.y/z)\n",
            ),
            (
                "docs/a.md",
                "# What `it` is, now!\n\n[up](../README.md) [here](#what-it-is-now)\n\
                 [gone](b.md) [none](../README.md#none)\n",
            ),
        ]);
        assert_eq!(
            told(links(&tree)),
            [
                "docs/a.md:4: dead link b.md",
                "docs/a.md:4: dead link ../README.md#none",
            ]
        );
    }

    #[test]
    fn the_index_has_each_decision() {
        let tree = tree(&[
            (
                INDEX,
                "# Decisions\n\n1. [One](0001-one.md)\n2. [Too](0002-two.md)\n",
            ),
            ("docs/decisions/0001-one.md", "# 1. One\n"),
            ("docs/decisions/0002-two.md", "# 2. Two\n"),
            ("docs/decisions/0003-three.md", "# 3. Three\n"),
        ]);
        let problems = decisions(&tree);
        let paths: Vec<_> = problems.iter().map(|problem| &*problem.path).collect();
        assert_eq!(
            paths,
            ["docs/decisions/0002-two.md", "docs/decisions/0003-three.md"]
        );
    }

    #[test]
    fn a_promise_has_a_test_that_exists() {
        let table = "| promise | enforced by |\n| --- | --- |\n\
                     | a `b_c` | `a/t.rs`: `is_so`, `is_not` |\n| b | test pending |\n\
                     | c | `a/u.rs` |\n| d | trust |\n| e | `cargo xtask bench` |\n\n\
                     | f | `a/t.rs` |\n";
        let tree = tree(&[(SPECIFICATION, table), ("a/t.rs", "fn is_so() {}\n")]);
        assert_eq!(
            told(specification(&tree)),
            [
                "SPECIFICATION.md:3: a/t.rs has no test is_not",
                "SPECIFICATION.md:5: there is no a/u.rs",
                "SPECIFICATION.md:6: neither a test nor \"test pending\"",
                "SPECIFICATION.md:9: a row outside its table",
            ]
        );
    }

    #[test]
    fn a_guarantee_and_a_finding_have_a_test_that_exists() {
        let page = "# Threats\n\nNo test.\n\n## Guarantees, and how they are enforced\n\n\
                    **A.** By `/run/x` and `vm.a_b`. Tests: `a/t.rs`: `is_so`,\n`is_not`.\n\n**B.** Trust `it_is`.\n\n\
                    **C.** In `a`: `a/`: `is_so`, the target `is_fuzzed`.\n\nMore.\n\n\
                    ## The audit of f6291c4\n\n| n | refused | test |\n| --- | --- | --- |\n\
                    | 1 | x | `a/t.rs`: `is_so` |\n| 2 | y | `a/u.rs` |\n| 3 | z | none |\n\n## Rest\n\nNo test.\n";
        let targets = "[(\"is_fuzzed\", is_fuzzed::run)]";
        let tree = tree(&[
            (THREAT_MODEL, page),
            ("a/t.rs", "fn is_so() {}\n"),
            (FUZZ_TARGETS, targets),
        ]);
        assert_eq!(
            told(threat_model(&tree)),
            [
                "docs/threat-model.md:8: a/t.rs has no test is_not",
                "docs/threat-model.md:10: names no test",
                "docs/threat-model.md:21: there is no a/u.rs",
                "docs/threat-model.md:22: names no test",
            ]
        );
    }

    #[test]
    fn a_source_file_that_is_named_exists() {
        let tree = tree(&[
            (
                "docs/a.md",
                "`a/src/b.rs`, `b.rs`, `src/b.rs`\n`rc/b.rs` `src/c.rs`; `x <b.rs`, `*.rs`\n",
            ),
            ("a/src/b.rs", ""),
        ]);
        let missing = |name| format!("docs/a.md:2: there is no {name}");
        assert_eq!(
            told(sources(&tree)),
            [missing("rc/b.rs"), missing("src/c.rs")]
        );
    }

    #[test]
    fn system_calls_are_those_of_the_filter() {
        let page = "# Calls\n\n## Of it: `a.rs`\n\n| calls | for |\n| --- | --- |\n| `read`, `open` | `x` |\n";
        let code = |calls: &str| format!("{calls}\nmod tests {{ libc::SYS_kill }}");
        let found = |calls: &str| {
            let files = [(SYSTEM_CALLS, page), ("a.rs", &code(calls))];
            let problems = system_calls(&tree(&files));
            problems.into_iter().map(|it| it.what).collect::<Vec<_>>()
        };
        assert_eq!(found("libc::SYS_read,\nlibc::SYS_open,"), [""; 0]);
        assert_eq!(
            found("libc::SYS_read, libc::SYS_openat"),
            [
                "has no openat, which a.rs allows",
                "has open, which a.rs has not"
            ]
        );
        assert_eq!(system_calls(&tree(&[])).len(), 1);
    }
}
