//! The workspace's crates: the imports listed in docs/architecture.md, and unused
//! dependencies.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use serde::Deserialize;

use super::{Problem, Tree, docs::resolve};
use crate::cargo;

const ARCHITECTURE: &str = "docs/architecture.md";

/// Rows whose imports are described, not listed.
const UNLISTED: [&str; 5] = ["cli", "tests", "tests/fuzz", "tests/testbed", "xtask"];

/// How many entries the top-level directory may have, dotfiles aside.
const MOST_ENTRIES: usize = 18;

/// A package of the workspace.
pub(super) struct Package {
    /// Its directory, relative to the workspace.
    pub(super) dir: String,
    /// Directories of the workspace's packages that it depends on.
    imports: BTreeSet<String>,
    /// Names of its dependencies, as in source code.
    dependencies: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<RawPackage>,
    workspace_root: String,
}

#[derive(Deserialize)]
struct RawPackage {
    manifest_path: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    rename: Option<String>,
    kind: Option<String>,
    /// Path of a dependency in this workspace.
    path: Option<String>,
}

/// The workspace's packages, by `cargo metadata`.
pub(super) fn packages() -> Result<Vec<Package>> {
    let output = cargo::cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .context("running cargo metadata")?;
    ensure!(
        output.status.success(),
        "cargo metadata failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let metadata = serde_json::from_slice(&output.stdout).context("output of cargo metadata")?;
    Ok(from_metadata(metadata))
}

fn from_metadata(metadata: Metadata) -> Vec<Package> {
    let root = format!("{}/", metadata.workspace_root);
    let relative = |path: &str| path.strip_prefix(&root).unwrap_or(path).to_owned();
    let packages = metadata.packages.into_iter().map(|package| {
        let dir = relative(package.manifest_path.trim_end_matches("/Cargo.toml"));
        // Tests may import any crate.
        let of_product = |dependency: &&Dependency| dependency.kind.as_deref() != Some("dev");
        let imports = package.dependencies.iter().filter(of_product);
        let imports = imports.filter_map(|dependency| Some(relative(dependency.path.as_deref()?)));
        let names = package.dependencies.iter().map(|dependency| {
            let name = dependency.rename.as_ref().unwrap_or(&dependency.name);
            name.replace('-', "_")
        });
        Package {
            dir,
            imports: imports.collect(),
            dependencies: names.collect(),
        }
    });
    packages.collect()
}

/// Compares the crate table of docs/architecture.md with the manifests.
pub(super) fn table(tree: &Tree, packages: &[Package]) -> Vec<Problem> {
    let rows = rows(tree.text(ARCHITECTURE).unwrap_or_default());
    let mut problems = Vec::new();
    for package in packages {
        let dir = &package.dir;
        let Some(listed) = rows.get(dir) else {
            // A nested crate is part of the crate whose directory contains it.
            if dir.matches('/').count() < 2 {
                let what = format!("the crate table lacks {dir}");
                problems.push(Problem::of_file(ARCHITECTURE, what));
            }
            continue;
        };
        if UNLISTED.contains(&&**dir) {
            continue;
        }
        let differs = |what: &str, crates: Vec<&String>| {
            let crates: Vec<_> = crates.iter().map(|name| name.as_str()).collect();
            let what = format!("crate {dir} {what} {}", crates.join(", "));
            (!crates.is_empty()).then(|| Problem::of_file(ARCHITECTURE, what))
        };
        let missing = package.imports.difference(listed).collect();
        problems.extend(differs("imports, and the table does not list,", missing));
        let stale = listed.difference(&package.imports).collect();
        problems.extend(differs("does not import, and the table lists,", stale));
    }
    let is_package = |row: &&String| packages.iter().any(|package| package.dir == **row);
    for row in rows.keys().filter(|row| !is_package(row)) {
        let what = format!("the crate table has {row}, which is no crate");
        problems.push(Problem::of_file(ARCHITECTURE, what));
    }
    problems
}

/// The crates of each row of the table under "The crates", and their imports.
fn rows(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut rows = BTreeMap::new();
    let mut is_section = false;
    let (mut column, mut names, mut imports) = (0, Vec::new(), BTreeSet::new());
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Heading { .. }) => is_section = false,
            Event::Text(text) if *text == *"The crates" => is_section = true,
            Event::Start(Tag::TableRow) => {
                (column, names, imports) = (0, Vec::new(), BTreeSet::new());
            }
            Event::End(TagEnd::TableCell) => column += 1,
            Event::Code(code) if column == 0 => names.push(code.to_string()),
            Event::Code(code) if column == 2 => {
                imports.insert(code.to_string());
            }
            Event::End(TagEnd::TableRow) if is_section => {
                for name in names.drain(..) {
                    rows.insert(name, imports.clone());
                }
            }
            _ => {}
        }
    }
    rows
}

/// Cyclic imports between top-level directories.
pub(super) fn layers(packages: &[Package]) -> Vec<Problem> {
    let top = |dir: &str| dir.split('/').next().unwrap_or(dir).to_owned();
    let mut arrows: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for package in packages {
        for import in &package.imports {
            let (from, to) = (top(&package.dir), top(import));
            if from != to {
                let what = format!("{} imports {import}", package.dir);
                arrows.entry((from, to)).or_default().push(what);
            }
        }
    }
    // An edge is in no cycle if its end has no outgoing edge, or its start no incoming one.
    loop {
        let starts: BTreeSet<_> = arrows.keys().map(|(from, _)| from.clone()).collect();
        let ends: BTreeSet<_> = arrows.keys().map(|(_, to)| to.clone()).collect();
        let before = arrows.len();
        arrows.retain(|(from, to), _| starts.contains(to) && ends.contains(from));
        if arrows.len() == before {
            break;
        }
    }
    let problems = arrows.into_iter().map(|((from, to), imports)| {
        let what = format!(
            "{from} and {to} are in a circle of imports: {}",
            imports.join(", ")
        );
        Problem::of_file("Cargo.toml", what)
    });
    problems.collect()
}

/// Checks the number of top-level entries.
pub(super) fn top_level(tree: &Tree) -> Vec<Problem> {
    let entries = tree
        .paths()
        .map(|path| path.split('/').next().unwrap_or(path));
    let visible: BTreeSet<_> = entries.filter(|name| !name.starts_with('.')).collect();
    let what = format!(
        "{} entries at the top, and {MOST_ENTRIES} is the most: put a crate under the one that owns it",
        visible.len()
    );
    let too_many = visible.len() > MOST_ENTRIES;
    too_many
        .then(|| Problem::of_file(".", what))
        .into_iter()
        .collect()
}

/// Dependencies that no source file of their package names.
pub(super) fn unused(tree: &Tree, packages: &[Package]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for Package {
        dir, dependencies, ..
    } in packages
    {
        let own = tree.ending(".rs");
        let own: Vec<_> = own
            .filter(|(path, _)| owner(packages, path) == dir)
            .collect();
        let included = own.iter().flat_map(|(path, text)| included(path, text));
        let included: Vec<_> = included.collect();
        let is_included = |of: &str| {
            let mut paths = included.iter();
            paths.any(|path| Path::new(of).starts_with(path))
        };
        let included = tree.ending(".rs").filter(|(path, _)| is_included(path));
        let included: Vec<_> = included.map(|(_, text)| text).collect();
        let sources = || own.iter().map(|(_, text)| text).chain(&included);
        for name in dependencies {
            if !sources().any(|text| has_word(text, name)) {
                let manifest = format!("{dir}/Cargo.toml");
                let what = format!("no source file names the dependency {name}");
                problems.push(Problem::of_file(&manifest, what));
            }
        }
    }
    problems
}

/// Crates that the product is built with other features than the tests: they run with code that
/// is not shipped, or without some that is.
pub(super) fn features() -> Result<Vec<Problem>> {
    // What procedural macros are made of runs in the compiler, not in the product.
    let shipped = [
        "--package",
        cargo::PRODUCT,
        "--edges",
        "normal,build,no-proc-macro",
    ];
    let tested = ["--workspace", "--edges", "all,no-proc-macro"];
    let (shipped, tested) = (resolved(&shipped)?, resolved(&tested)?);
    Ok(untested(&shipped, &tested))
}

fn untested(shipped: &BTreeSet<Resolved>, tested: &BTreeSet<Resolved>) -> Vec<Problem> {
    let differ = shipped.difference(tested);
    let problem = |it: &Resolved| {
        let what = format!(
            "the product has {} with features {:?}, tests have it with others; \
             name all in [workspace.dependencies]",
            it.package, it.features
        );
        Problem::of_file("Cargo.toml", what)
    };
    differ.map(problem).collect()
}

/// A crate as cargo builds it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Resolved {
    /// `getrandom v0.4.3`.
    package: String,
    /// Without `default`, which only enables others.
    features: BTreeSet<String>,
}

/// The crates that cargo builds for these options of `cargo tree`.
fn resolved(options: &[&str]) -> Result<BTreeSet<Resolved>> {
    let output = cargo::cargo()
        .args(["tree", "--prefix", "none", "--format", "{p}|{f}"])
        .args(options)
        .output()
        .context("running cargo tree")?;
    ensure!(
        output.status.success(),
        "cargo tree failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).context("cargo tree's output")?;
    Ok(text.lines().filter_map(Resolved::read).collect())
}

impl Resolved {
    /// Reads a line such as `farside v0.1.0 (/path)|default (*)`.
    fn read(line: &str) -> Option<Self> {
        let (package, features) = line.split_once('|')?;
        let package: Vec<_> = package.split(' ').take(2).collect();
        let features = features.trim_end_matches(" (*)").split(',');
        let features = features.filter(|feature| !["", "default"].contains(feature));
        Some(Self {
            package: package.join(" "),
            features: features.map(str::to_owned).collect(),
        })
    }
}

/// The directory of the package that contains the file `path`: the innermost.
fn owner<'a>(packages: &'a [Package], path: &str) -> &'a str {
    let around = packages.iter().filter(|package| {
        let inside = path.strip_prefix(&*package.dir);
        inside.is_some_and(|rest| rest.starts_with('/'))
    });
    let innermost = around.max_by_key(|package| package.dir.len());
    innermost.map_or("", |package| &package.dir)
}

/// The files and directories that `text`, the contents of file `from`, includes by
/// `#[path = "…"]`.
fn included(from: &str, text: &str) -> impl Iterator<Item = String> {
    let paths = text.split("#[path = \"").skip(1);
    let paths = paths.filter_map(|rest| rest.split_once('"'));
    paths.map(move |(path, _)| resolve(from, path))
}

/// Whether `text` contains `word` as a whole word.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let behind = text[at + word.len()..].chars().next();
        !before.is_some_and(is_part) && !behind.is_some_and(is_part)
    })
}

#[cfg(test)]
mod tests {
    use super::{super::tree, *};

    const TABLE: &str = "# A\n## The crates\n\n| directory | in one line | imports |\n\
                         | --- | --- | --- |\n| `a` | `x` | `b` (types) |\n| `b`, `c` | y | none |\n";

    fn package(dir: &str, imports: &[&str], dependencies: &[&str]) -> Package {
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Package {
            dir: dir.to_owned(),
            imports: set(imports),
            dependencies: set(dependencies),
        }
    }

    fn told(problems: Vec<Problem>) -> Vec<String> {
        problems.into_iter().map(|problem| problem.what).collect()
    }

    #[test]
    fn a_crate_with_other_features_than_tested_is_named() {
        let set = |text: &str| text.lines().filter_map(Resolved::read).collect();
        let tested = set("memchr v2.8.3|default,std\nfarside v0.1.0 (/x)|");
        assert_eq!(untested(&set("memchr v2.8.3|std (*)\n\n"), &tested), []);
        let problems = untested(&set("memchr v2.8.3|alloc,std"), &tested);
        let [problem] = &problems[..] else {
            panic!("{problems:?}");
        };
        assert!(problem.what.contains("memchr v2.8.3"), "{problem}");
    }

    #[test]
    fn the_table_lists_each_crate_with_its_imports() {
        let tree = tree(&[(ARCHITECTURE, TABLE)]);
        let right = [
            package("a", &["b"], &[]),
            package("b", &[], &[]),
            package("c", &[], &[]),
            package("c/d/inner", &["a"], &[]),
        ];
        assert_eq!(table(&tree, &right), []);
        let wrong = [
            package("a", &["d"], &[]),
            package("b", &[], &[]),
            package("a/d", &[], &[]),
        ];
        assert_eq!(
            told(table(&tree, &wrong)),
            [
                "crate a imports, and the table does not list, d",
                "crate a does not import, and the table lists, b",
                "the crate table lacks a/d",
                "the crate table has c, which is no crate",
            ]
        );
    }

    #[test]
    fn imports_between_top_level_directories_run_one_way() {
        let one_way = [
            package("a", &["a/inner", "b/inner"], &[]),
            package("a/inner", &["c"], &[]),
            package("b/inner", &["b", "c"], &[]),
            package("b", &[], &[]),
            package("c", &[], &[]),
        ];
        assert_eq!(layers(&one_way), []);
        let circle = [
            package("a", &["b/inner"], &[]),
            package("b", &["a", "c"], &[]),
            package("d", &["a"], &[]),
        ];
        assert_eq!(
            told(layers(&circle)),
            [
                "a and b are in a circle of imports: a imports b/inner",
                "b and a are in a circle of imports: b imports a",
            ]
        );
    }

    #[test]
    fn the_top_level_stays_small() {
        let files: Vec<_> = (0..=MOST_ENTRIES).map(|n| format!("{n}/a.rs")).collect();
        let files: Vec<_> = files.iter().map(|path| (&**path, "")).collect();
        let few = [&files[1..], &[(".ci/run", ""), ("1/b.rs", "")]].concat();
        assert_eq!(top_level(&tree(&few)), []);
        assert_eq!(top_level(&tree(&files)).len(), 1);
    }

    #[test]
    fn a_dependency_is_used_where_a_source_names_it() {
        let tree = tree(&[
            ("a/src/lib.rs", "use log::info;\n// serde_json\n"),
            (
                "a/tests/t.rs",
                "#[path = \"../../ab/tests/common.rs\"]\nmod common;\n",
            ),
            (
                "a/tests/u.rs",
                "#[path = \"../../ab/deep\"]\nmod deep {\n    mod one;\n}\n",
            ),
            // Files of other packages, one of them in a subdirectory of this package.
            ("ab/src/lib.rs", "use serde::Serialize;\n"),
            ("a/inner/src/lib.rs", "use serde::Serialize;\n"),
            ("ab/tests/common.rs", "use tempfile::tempdir;\n"),
            ("ab/deep/one.rs", "use toml::Value;\n"),
        ]);
        let packages = [
            package(
                "a",
                &[],
                &["log", "serde", "serde_json", "tempfile", "toml"],
            ),
            package("a/inner", &[], &[]),
        ];
        assert_eq!(
            told(unused(&tree, &packages)),
            ["no source file names the dependency serde"]
        );
    }

    #[test]
    fn metadata_is_read_by_directories() {
        let metadata = r#"{"workspace_root": "/w", "packages": [{
            "manifest_path": "/w/a/Cargo.toml",
            "dependencies": [
                {"name": "farside-b", "rename": null, "kind": null, "path": "/w/b"},
                {"name": "farside-c", "rename": null, "kind": "dev", "path": "/w/c"},
                {"name": "vm-memory", "rename": "memory", "kind": null, "path": null}
            ]}]}"#;
        let packages = from_metadata(serde_json::from_str(metadata).unwrap());
        let [package] = &packages[..] else {
            panic!("one package")
        };
        assert_eq!(package.dir, "a");
        assert_eq!(package.imports, BTreeSet::from(["b".to_owned()]));
        let names = ["farside_b", "farside_c", "memory"].map(str::to_owned);
        assert_eq!(package.dependencies, BTreeSet::from(names));
    }
}
