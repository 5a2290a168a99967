//! The environment of the measurements: machine, versions and sources.

use std::{path::Path, process::Command};

use farside_bench::{Environment, environment};
use farside_testbed::Testbed;

use super::Settings;
use crate::args::{Bench, Chapter};

/// The environment, except what only the guest can report.
pub(super) fn environment(
    testbed: &Testbed,
    args: &Bench,
    settings: &Settings,
    images: &Path,
) -> Environment {
    let kernel = rustix::system::uname();
    let program = args.program.as_deref().map(Path::display);
    let disks = match args.wants(Chapter::Virtio) {
        true => "virtio-blk",
        false => "NVMe",
    };
    let options = [
        (
            "program",
            program.map_or("release build".into(), |p| p.to_string()),
        ),
        ("repeats", settings.repeats.to_string()),
        ("seconds", settings.seconds.to_string()),
        ("images", images.display().to_string()),
        ("vIOMMU", if args.viommu { "on" } else { "off" }.to_owned()),
        ("disks", disks.to_owned()),
        ("own disk", format!("cache=writeback,aio={}", args.own_aio)),
    ];
    let commit = git(&["rev-parse", "--short=12", "HEAD"]);
    Environment {
        host_kernel: Some(kernel.release().to_string_lossy().into_owned()),
        qemu: Some(testbed.qemu_version().to_owned()),
        accel: Some(format!("{:?}", testbed.accel()).to_lowercase()),
        farside: commit.unwrap_or_else(|| env!("CARGO_PKG_VERSION").to_owned()),
        // Untracked files are not in the product either.
        changed_sources: git(&["status", "--porcelain", "--untracked-files=no"])
            .is_some_and(|changes| !changes.is_empty()),
        options: options
            .map(|(option, value)| (option.to_owned(), value))
            .into(),
        ..environment::here()
    }
}

/// The output of a git command in this checkout; `None` without git or a checkout.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(args)
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
