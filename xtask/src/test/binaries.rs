//! Test binaries: building them, and what one is.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::die_with_us;
use serde::Deserialize;

use super::Request;
use crate::cargo::{PRODUCT, build_product, cargo, workspace};

/// What boots VMs: packages whose integration tests do so name it.
const TESTBED: &str = "farside-testbed";

/// Those that take longest, in this order: run first, so that both lanes end together.
const LONGEST: [&str; 9] = [
    "guests",
    "hosts",
    "libvirt",
    "migration",
    "hardware_refusals",
    "bench",
    "live_migration",
    "package",
    "host",
];

/// Something that runs tests.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Binary {
    /// As reports have it: `guests`.
    pub(super) name: String,
    /// Where it is from: `tests/guests/main.rs`.
    source: String,
    program: Program,
    /// Directory of its package.
    package: PathBuf,
    pub(super) has_vms: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Program {
    /// libtest's, at this path.
    Libtest(PathBuf),
    /// One with a `main` of its own.
    Own(PathBuf),
    /// Cargo, with a crate's examples.
    Docs,
}

/// One of cargo's messages, as far as it matters here.
#[derive(Deserialize)]
struct Artifact {
    target: Target,
    profile: Profile,
    executable: Option<PathBuf>,
    manifest_path: PathBuf,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
    src_path: PathBuf,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// A package's manifest, as far as it matters here.
#[derive(Deserialize)]
struct Manifest {
    package: Package,
    #[serde(default)]
    test: Vec<TestTarget>,
    #[serde(default)]
    dependencies: BTreeMap<String, toml::Value>,
    #[serde(default, rename = "dev-dependencies")]
    dev_dependencies: BTreeMap<String, toml::Value>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
}

#[derive(Deserialize)]
struct TestTarget {
    name: String,
    #[serde(default = "yes")]
    harness: bool,
}

fn yes() -> bool {
    true
}

/// Programs of the workspace that tests run, and the variables that name them. Built for
/// themselves, they would have dependencies compiled again: of the features of those, only
/// what their own packages turn on is unified then.
const PROGRAMS: [(&str, &str); 2] = [
    (PRODUCT, "FARSIDE_BIN"),
    ("scripted-vmm", "FARSIDE_SCRIPTED_VMM"),
];

/// What cargo has built.
pub(super) struct Built {
    pub(super) binaries: Vec<Binary>,
    /// For the environment of tests.
    pub(super) programs: BTreeMap<&'static str, PathBuf>,
}

/// Builds the tests; cargo shows its progress. None if they don't compile.
pub(super) fn build(request: &Request) -> Result<Option<Built>> {
    let mut command = cargo();
    command
        .args(["test", "--no-run"])
        .args(["--message-format", "json-render-diagnostics"])
        .args(&request.selection)
        .stdout(Stdio::piped());
    die_with_us(&mut command);
    let output = command
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .context("running cargo test --no-run")?;
    if !output.status.success() {
        return Ok(None);
    }
    let messages = String::from_utf8(output.stdout).context("cargo's messages")?;
    let mut binaries = Vec::new();
    let mut programs = BTreeMap::new();
    let mut has_library = false;
    for line in messages.lines() {
        let message: serde_json::Value =
            serde_json::from_str(line).context("one of cargo's messages")?;
        if message["reason"] != "compiler-artifact" {
            continue;
        }
        let artifact: Artifact = serde_json::from_value(message).context("cargo's artifact")?;
        let is = |kind: &str| artifact.target.kind.iter().any(|of| of == kind);
        let Some(path) = artifact.executable.clone() else {
            continue;
        };
        if artifact.profile.test {
            binaries.push(Binary::read(
                &artifact.target,
                path,
                &artifact.manifest_path,
            )?);
            has_library |= is("lib");
        } else if is("bin")
            && let Some((_, variable)) = PROGRAMS
                .iter()
                .find(|(name, _)| *name == artifact.target.name)
        {
            programs.insert(*variable, path);
        }
    }
    ensure!(
        !binaries.is_empty(),
        "cargo built no test binary for {:?}",
        request.selection
    );
    binaries.sort_by(|a, b| (&a.package, &a.source).cmp(&(&b.package, &b.source)));
    if request.docs && has_library {
        binaries.push(Binary {
            name: "examples of the documentation".to_owned(),
            source: "cargo test --doc".to_owned(),
            program: Program::Docs,
            package: workspace(),
            has_vms: false,
        });
    }
    // Not part of the selection.
    if let Entry::Vacant(product) = programs.entry(PROGRAMS[0].1) {
        product.insert(build_product(crate::cargo::Profile::Dev)?);
    }
    Ok(Some(Built { binaries, programs }))
}

impl Binary {
    fn read(target: &Target, path: PathBuf, manifest: &Path) -> Result<Self> {
        let about = || format!("cannot read {}", manifest.display());
        let text = fs::read_to_string(manifest).with_context(about)?;
        let read: Manifest = toml::from_str(&text).with_context(about)?;
        let package = manifest.parent().with_context(about)?;
        let source = target.src_path.strip_prefix(package);
        let own = |test: &TestTarget| test.name == target.name && !test.harness;
        Ok(Self {
            name: target.name.clone(),
            source: source.unwrap_or(&target.src_path).display().to_string(),
            program: match read.test.iter().any(own) {
                true => Program::Own(path),
                false => Program::Libtest(path),
            },
            has_vms: target.kind.iter().any(|kind| kind == "test")
                && (read.package.name == TESTBED
                    || read.dependencies.contains_key(TESTBED)
                    || read.dev_dependencies.contains_key(TESTBED)),
            package: package.to_owned(),
        })
    }

    /// How early it is to be run; the lowest first.
    pub(super) fn rank(&self) -> usize {
        let listed = LONGEST.iter().position(|name| *name == self.name);
        listed.unwrap_or(LONGEST.len())
    }

    /// The line above its output, in cargo's form.
    pub(super) fn title(&self) -> String {
        match &self.program {
            Program::Libtest(path) | Program::Own(path) => {
                format!("     Running {} ({})", self.source, path.display())
            }
            Program::Docs => "   Doc-tests of all crates".to_owned(),
        }
    }

    /// What runs it as cargo would.
    pub(super) fn command(
        &self,
        request: &Request,
        programs: &BTreeMap<&'static str, PathBuf>,
    ) -> Command {
        let mut command = match &self.program {
            Program::Docs => {
                let mut command = cargo();
                command.args(["test", "--doc", "--no-fail-fast"]);
                command.args(&request.selection).arg("--");
                command
            }
            Program::Own(path) => Command::new(path),
            Program::Libtest(path) => {
                let mut command = Command::new(path);
                // libtest reports times only with an unstable option.
                command.env("RUSTC_BOOTSTRAP", "1");
                command.args(["-Zunstable-options", "--report-time"]);
                command
            }
        };
        command
            .args(&request.harness)
            .current_dir(&self.package)
            .env("CARGO_MANIFEST_DIR", &self.package)
            .env("CARGO", cargo_program())
            .envs(programs)
            .stdin(Stdio::null());
        die_with_us(&mut command);
        command
    }
}

fn cargo_program() -> OsString {
    cargo().get_program().to_owned()
}
