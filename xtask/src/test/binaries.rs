//! Test binaries: how they are built, and their properties.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::die_with_us;
use serde::Deserialize;

use super::Request;
use crate::cargo::{PRODUCT, build_product, cargo, workspace};

/// The crate that boots VMs: packages whose integration tests do so depend on it.
const TESTBED: &str = "farside-testbed";

/// The binaries that take longest, in the order in which they are started: those of few long tests
/// before those of many short ones, so that both lanes end together.
const LONGEST: [&str; 12] = [
    "guests",
    "hosts",
    "package",
    "libvirt",
    "hardware_refusals",
    "migration",
    "bench",
    "host",
    "live_migration",
    "iommufd",
    "cloud_hypervisor",
    "guest",
];

/// Binaries that link the test bed, but mostly wait: run beside those that boot VMs.
const WAITING: [&str; 6] = [
    "control_socket",
    "bad_input",
    "canaries",
    "made_up_host",
    "outlive",
    "ports",
];

/// Tests that boot no VM and may take longer than the limit for those: binary, test,
/// reason.
pub(super) const LONG: [(&str, &str, &str); 23] = [
    (
        "crashes",
        "what_was_cut_off_twice_ends_at_one_host",
        "cuts a migration at every pair of calls",
    ),
    (
        "borrow",
        "late::a_bus_master_enable_answered_late_is_refused_and_the_next_one_works",
        "waits for the limit of a bus-master enable, three times",
    ),
    (
        "borrow",
        "late::memory_that_a_lender_never_gives_up_costs_the_lease",
        "waits for the limits of a bus-master enable and of an unmap",
    ),
    (
        "borrow",
        "interrupts::msix_with_2048_vectors_direct",
        "sets up 2048 eventfds, 16 a message, and raises each",
    ),
    (
        "borrow",
        "interrupts::msix_with_2048_vectors_relayed",
        "sets up 2048 eventfds, 16 a message, and raises each",
    ),
    (
        "farside_lender",
        "peer_tests::lease::a_borrower_that_does_not_read_is_given_up",
        "waits for the limit of a blocked send",
    ),
    (
        "farside_devices",
        "nvme::tests::recovery::a_controller_that_is_killed_at_any_store_completes_each_command_once",
        "lives through a controller's life once for each of its stores",
    ),
    (
        "farside_devices",
        "virtio::tests::recovery::a_device_that_is_killed_at_any_store_returns_each_request_once",
        "lives through a device's life once for each of its stores",
    ),
    (
        "outlive",
        "a_worker_that_is_killed_under_load_costs_a_pause",
        "kills 50 workers",
    ),
    (
        "outlive",
        "a_worker_that_is_killed_under_load_with_a_doorbell_buffer_costs_a_pause",
        "kills 50 workers",
    ),
    (
        "outlive",
        "a_lender_that_is_killed_alone_costs_no_pause",
        "kills 50 lenders",
    ),
    (
        "outlive",
        "a_dma_test_device_goes_on_while_its_lender_is_killed",
        "kills 20 lenders",
    ),
    (
        "outlive",
        "backend::a_backend_that_is_killed_under_load_costs_a_pause",
        "kills 50 backends",
    ),
    (
        "outlive",
        "backend::a_backend_that_is_killed_under_load_with_a_doorbell_buffer_costs_a_pause",
        "kills 50 backends",
    ),
    (
        "outlive",
        "backend::a_backend_and_its_worker_that_are_killed_at_once_cost_a_pause",
        "kills 50 backends with their workers",
    ),
    (
        "outlive",
        "backend::a_backend_and_its_worker_that_are_killed_at_once_with_a_doorbell_buffer_cost_a_pause",
        "kills 50 backends with their workers",
    ),
    (
        "outlive",
        "a_worker_of_a_virtio_blk_model_that_is_killed_under_load_costs_a_pause",
        "kills 50 workers",
    ),
    (
        "outlive",
        "a_worker_of_a_virtio_blk_model_with_event_indexes_that_is_killed_under_load_costs_a_pause",
        "kills 50 workers",
    ),
    (
        "outlive",
        "backend::a_backend_of_a_virtio_blk_model_that_is_killed_under_load_costs_a_pause",
        "kills 50 backends",
    ),
    (
        "outlive",
        "backend::a_backend_of_a_virtio_blk_model_with_event_indexes_that_is_killed_under_load_costs_a_pause",
        "kills 50 backends",
    ),
    (
        "outlive",
        "backend::a_backend_of_a_virtio_blk_model_and_its_worker_that_are_killed_at_once_cost_a_pause",
        "kills 50 backends with their workers",
    ),
    (
        "simulation",
        "leases_fences_and_rights_hold_in_any_order_of_steps",
        "FARSIDE_SIMULATIONS sets its length",
    ),
    (
        "simulation",
        "migrations_end_at_one_host_whatever_is_cut_off",
        "FARSIDE_SIMULATIONS sets its length",
    ),
];

/// A unit that runs tests.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Binary {
    /// Name in reports: `guests`.
    pub(super) name: String,
    /// Source file: `tests/guests/main.rs`.
    source: String,
    program: Program,
    /// Directory of its package.
    package: PathBuf,
    pub(super) has_vms: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Program {
    /// A binary of libtest, at this path.
    Libtest(PathBuf),
    /// A binary with its own `main`.
    Own(PathBuf),
    /// Cargo, for a crate's doc tests.
    Docs,
}

/// One of cargo's messages, with the fields used here.
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

/// A package's manifest, with the fields used here.
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

/// Binaries of the workspace that tests run, and the variables that name them. A separate
/// build would compile dependencies again: cargo would then unify only the features that
/// these packages enable.
const PROGRAMS: [(&str, &str); 3] = [
    (PRODUCT, "FARSIDE_BIN"),
    ("scripted-vmm", "FARSIDE_SCRIPTED_VMM"),
    ("vfio-probe", "FARSIDE_VFIO_PROBE"),
];

/// Cargo's output.
pub(super) struct Built {
    pub(super) binaries: Vec<Binary>,
    /// Environment of the tests.
    pub(super) programs: BTreeMap<&'static str, PathBuf>,
}

/// Builds the tests; cargo shows its progress. `None` if they do not compile.
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
        } else if (is("bin") || is("example"))
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
    if request.is_all() {
        let unknown = LONGEST
            .iter()
            .chain(&WAITING)
            .chain(LONG.iter().map(|(binary, ..)| binary))
            .find(|name| binaries.iter().all(|binary| binary.name != **name));
        ensure!(
            unknown.is_none(),
            "{} names a test binary that does not exist: {unknown:?}",
            file!()
        );
    }
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
    // It is not part of the selection.
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

    /// Whether it runs beside those that boot VMs.
    pub(super) fn is_beside_vms(&self) -> bool {
        !self.has_vms || self.waits()
    }

    /// Whether it mostly waits, though it links the test bed.
    pub(super) fn waits(&self) -> bool {
        WAITING.contains(&&*self.name)
    }

    /// Whether each of its tests has the limit of tests without VMs. Doc tests are
    /// silent while they compile.
    pub(super) fn has_test_limit(&self) -> bool {
        matches!(self.program, Program::Libtest(_))
            && !self.has_vms
            && LONG.iter().all(|(binary, ..)| *binary != self.name)
    }

    /// The order of execution; the lowest first.
    pub(super) fn rank(&self) -> usize {
        let listed = LONGEST.iter().position(|name| *name == self.name);
        listed.unwrap_or(LONGEST.len())
    }

    /// The line above its output, in cargo's format.
    pub(super) fn title(&self) -> String {
        match &self.program {
            Program::Libtest(path) | Program::Own(path) => {
                format!("     Running {} ({})", self.source, path.display())
            }
            Program::Docs => "   Doc-tests of all crates".to_owned(),
        }
    }

    /// The command that runs it as cargo would.
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
            Program::Own(path) => self.program(path),
            Program::Libtest(path) => {
                let mut command = self.program(path);
                // libtest reports times only with an unstable option.
                command.env("RUSTC_BOOTSTRAP", "1");
                command.args(["-Zunstable-options", "--report-time"]);
                command
            }
        };
        command
            .args(&request.harness)
            .envs(programs)
            .stdin(Stdio::null());
        die_with_us(&mut command);
        command
    }

    /// A program of the package, in the environment that cargo would give it.
    fn program(&self, path: &Path) -> Command {
        let mut command = Command::new(path);
        command
            .current_dir(&self.package)
            .env("CARGO_MANIFEST_DIR", &self.package)
            .env("CARGO", cargo().get_program());
        command
    }
}
