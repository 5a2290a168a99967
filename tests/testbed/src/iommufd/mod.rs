//! VFIO with iommufd for the guest's kernel, which Debian builds without it: Debian's source
//! of those drivers, built as modules for exactly that kernel.
//!
//! Nothing in the kernel image depends on these settings: it exports what iommufd needs, and
//! the structures that they change (`struct vfio_device`) are those of the modules built
//! here. Only the interval tree's span iterator is missing from the image; iommufd.ko gets a
//! copy.

mod compiler;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result};

use crate::apt::{self, Wanted};
use crate::cache::{self, Cache};
use crate::command::output;
use crate::debian::{self, Debian};
use crate::host::Host;
use crate::progress::Progress;
use crate::{archive, recipe};

/// Incremented when the code below changes the result of the same inputs.
const MAKER: &str = "1";

/// Settings that differ from Debian's: for `make`, and for the compiler.
const SETTINGS: &[(&str, &str)] = &[
    ("CONFIG_INTERVAL_TREE_SPAN_ITER", "y"),
    ("CONFIG_IOMMUFD", "m"),
    ("CONFIG_VFIO_DEVICE_CDEV", "y"),
];

/// Parts of the build that are left out. The compiler's settings stay: they change the
/// layout of `struct module`.
const LEFT_OUT: &[&str] = &[
    "CONFIG_DEBUG_INFO",
    "CONFIG_DEBUG_INFO_BTF_MODULES",
    "CONFIG_VFIO_MDEV",
];

/// The directories and files of the source that are compiled.
const SOURCE: &[&str] = &[
    "drivers/iommu/iommufd",
    "drivers/iommu/iommu-priv.h",
    "drivers/vfio",
    "lib/interval_tree.c",
];

/// What is added to the source, in `drivers`.
const KBUILD: &str = "obj-m := iommu/iommufd/ vfio/\n";
const SPAN_ITERATOR: &str = r#"#include <linux/export.h>
/* The kernel exports the rest of that file. */
#undef EXPORT_SYMBOL_GPL
#define EXPORT_SYMBOL_GPL(symbol)
#include "../../../lib/interval_tree.c"
"#;
const SPAN_ITERATOR_OBJECT: &str = "iommufd-y += span_iterator.o\n";

/// The module that the others depend on, unlike Debian's: init loads it.
const LOADED_AT_BOOT: &str = "iommu/iommufd/iommufd.ko";

/// The other modules, which replace Debian's. All paths are relative to `drivers`.
const REPLACED: &[&str] = &[
    "vfio/vfio.ko",
    "vfio/vfio_iommu_type1.ko",
    "vfio/pci/vfio-pci-core.ko",
    "vfio/pci/vfio-pci.ko",
];

/// The packages cannot be had on this machine, or not any more.
#[derive(Debug)]
pub struct PackagesUnavailable {
    release: String,
}

impl std::fmt::Display for PackagesUnavailable {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "cannot get the packages for modules of the guest's kernel {}; if Debian has a newer \
             kernel by now, remove debian-* in the test bed's cache",
            self.release
        )
    }
}

/// Modules of the guest's kernel with iommufd; see [`crate::VmBuilder::iommufd`].
#[derive(Debug, Clone)]
pub struct IommufdModules {
    /// Each with its path in the guest.
    pub(crate) files: Vec<(PathBuf, Vec<u8>)>,
}

impl IommufdModules {
    /// Builds them, unless they are in `cache`.
    pub(crate) fn prepare(
        cache: &Cache,
        debian: &Debian,
        host: &Host,
        progress: &Progress,
    ) -> Result<Self> {
        let userland = debian.userland();
        let boot_list = fs::read(&userland)
            .map_err(anyhow::Error::from)
            .and_then(|bytes| archive::read(&bytes, debian::MODULE_LIST))
            .with_context(|| format!("reading {}", userland.display()))?;
        let boot_list = String::from_utf8(boot_list).context("the list of modules")?;
        let release = release(&boot_list).context("the list of modules names no kernel")?;
        let key = cache::key(
            [release, MAKER, KBUILD, SPAN_ITERATOR, SPAN_ITERATOR_OBJECT]
                .into_iter()
                .chain(SETTINGS.iter().flat_map(|(name, value)| [*name, *value]))
                .chain(LEFT_OUT.iter().copied()),
        );
        let directory = cache.entry("modules", &key, |directory| {
            let downloads = cache.root().join("apt");
            let work = directory.join("work");
            let packages = download(&downloads, release, progress)?;
            let drivers = build(&work, &packages, release, host, progress)?;
            for module in REPLACED.iter().chain([&LOADED_AT_BOOT]) {
                let to = directory.join(module);
                fs::create_dir_all(to.parent().unwrap_or(directory))
                    .and_then(|()| fs::copy(drivers.join(module), &to))
                    .with_context(|| format!("copying {module} to {}", to.display()))?;
            }
            // A gigabyte that is not read any more.
            for unused in [work, downloads] {
                fs::remove_dir_all(&unused)
                    .with_context(|| format!("removing {}", unused.display()))?;
            }
            Ok(())
        })?;
        let installed = Path::new("usr/lib/modules")
            .join(release)
            .join("kernel/drivers");
        let boot_list = format!("{boot_list}/{}\n", installed.join(LOADED_AT_BOOT).display());
        let mut files = vec![(debian::MODULE_LIST.into(), boot_list.into_bytes())];
        for module in REPLACED.iter().chain([&LOADED_AT_BOOT]) {
            let from = directory.join(module);
            let bytes = fs::read(&from).with_context(|| format!("reading {}", from.display()))?;
            files.push((installed.join(module), bytes));
        }
        Ok(Self { files })
    }
}

/// The kernel's release, from the paths of its modules.
fn release(boot_list: &str) -> Option<&str> {
    let (release, _) = boot_list
        .strip_prefix("/usr/lib/modules/")?
        .split_once('/')?;
    Some(release)
}

/// The package with the source of a kernel.
fn source_package(release: &str) -> Option<String> {
    let mut numbers = release.split('.');
    Some(format!(
        "linux-source-{}.{}",
        numbers.next()?,
        numbers.next()?
    ))
}

fn download(directory: &Path, release: &str, progress: &Progress) -> Result<Vec<PathBuf>> {
    let source = source_package(release).context("the kernel's release has no version")?;
    let headers = format!("linux-headers-{release}");
    let wanted = Wanted {
        suites: &recipe::suites(),
        packages: &[&headers, &source, "make"],
        installed: compiler::NOT_NEEDED,
    };
    apt::download(directory, &wanted, progress).with_context(|| PackagesUnavailable {
        release: release.to_owned(),
    })
}

/// Builds the modules in `work`; returns the directory `drivers`.
fn build(
    work: &Path,
    packages: &[PathBuf],
    release: &str,
    host: &Host,
    progress: &Progress,
) -> Result<PathBuf> {
    let root = work.join("root");
    fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
    apt::unpack(packages, &root, progress)?;
    compiler::make_runnable(&root)?;

    let task = progress.spinner("Unpacking the source of VFIO and iommufd");
    let package = source_package(release).context("the kernel's release has no version")?;
    let source = work.join("linux");
    fs::create_dir_all(&source).with_context(|| format!("creating {}", source.display()))?;
    output(
        Command::new("tar")
            .args(["--strip-components=1", "-C"])
            .arg(&source)
            .arg("-xJf")
            .arg(root.join(format!("usr/src/{package}.tar.xz")))
            .args(SOURCE.iter().map(|path| format!("{package}/{path}")))
            .env("PATH", compiler::search_path(&host.bin)),
        "unpacking the kernel's source needs it",
    )
    .context("unpacking the kernel's source")?;
    let drivers = source.join("drivers");
    let iommufd = drivers.join("iommu/iommufd");
    let makefile = iommufd.join("Makefile");
    let makefile_text =
        fs::read_to_string(&makefile).with_context(|| format!("reading {}", makefile.display()))?;
    for (path, text) in [
        (drivers.join("Kbuild"), KBUILD),
        (iommufd.join("span_iterator.c"), SPAN_ITERATOR),
        (makefile, &(makefile_text + SPAN_ITERATOR_OBJECT)),
    ] {
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    task.done();

    let task = progress.spinner(format!("Building VFIO with iommufd for Linux {release}"));
    let jobs = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut make = compiler::make(&root, release)?;
    make.arg(format!("M={}", drivers.display()))
        .args(
            SETTINGS
                .iter()
                .map(|(name, value)| format!("{name}={value}")),
        )
        .args(LEFT_OUT.iter().map(|name| format!("{name}=")))
        .arg(format!("KCFLAGS={}", macros()))
        .arg(format!("-j{jobs}"))
        .arg("modules");
    output(&mut make, "it is in the package make of the test bed").with_context(|| {
        format!(
            "building VFIO with iommufd for Linux {release} failed: its source may want other \
             settings than {}",
            file!()
        )
    })?;
    task.done();
    Ok(drivers)
}

/// The settings as the compiler's macros: the headers are Debian's.
fn macros() -> String {
    let macros: Vec<String> = SETTINGS
        .iter()
        .map(|(name, value)| match *value {
            "m" => format!("-D{name}_MODULE=1"),
            _ => format!("-D{name}=1"),
        })
        .collect();
    macros.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_modules_names_the_kernel() {
        let list = "/usr/lib/modules/7.3.4+deb13-amd64/kernel/a.ko\n/usr/lib/modules/x\n";
        assert_eq!(release(list), Some("7.3.4+deb13-amd64"));
        assert_eq!(release(""), None);
        let package = source_package("7.3.4+deb13-amd64");
        assert_eq!(package.as_deref(), Some("linux-source-7.3"));
        assert_eq!(source_package("7"), None);
    }

    #[test]
    fn settings_are_macros_as_the_kernel_names_them() {
        let macros = macros();
        for expected in ["-DCONFIG_IOMMUFD_MODULE=1", "-DCONFIG_VFIO_DEVICE_CDEV=1"] {
            assert!(macros.split(' ').any(|word| word == expected), "{macros}");
        }
    }
}
