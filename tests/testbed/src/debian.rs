//! The unpacked Debian packages, and the guest's kernel and userland made from them.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::apt::{self, Wanted};
use crate::archive::Archive;
use crate::cache::{self, Cache};
use crate::progress::Progress;
use crate::{elf, modules, recipe};

/// Incremented when the code below changes the result of the same recipe.
const MAKER: &str = "4";

/// The list of modules that init loads, in the guest: one file per line.
pub(crate) const MODULE_LIST: &str = "etc/farside/modules";

/// The results; all are in one cache entry.
#[derive(Debug, Clone)]
pub(crate) struct Debian {
    pub(crate) key: String,
    directory: PathBuf,
    /// The guest's kernel.
    pub(crate) kernel: PathBuf,
    /// The configuration that it was built with.
    pub(crate) kernel_config: PathBuf,
}

impl Debian {
    /// The root directory of the unpacked packages.
    pub(crate) fn root(&self) -> PathBuf {
        self.directory.join("root")
    }

    /// The guest's userland, without the agent.
    pub(crate) fn userland(&self) -> PathBuf {
        self.directory.join("userland.cpio")
    }

    /// The userland of a nested guest, without the agent.
    pub(crate) fn nested_userland(&self) -> PathBuf {
        self.directory.join("nested.cpio")
    }

    /// Fetches and makes everything that is not in the cache.
    pub(crate) fn prepare(cache: &Cache, progress: &Progress) -> Result<Self> {
        let key = cache::key(recipe::parts().into_iter().chain([MAKER]));
        let directory = cache.entry("debian", &key, |directory| {
            let wanted = Wanted {
                suites: &recipe::suites(),
                packages: recipe::PACKAGES,
                installed: recipe::NOT_NEEDED,
            };
            let packages = apt::download(&cache.root().join("apt"), &wanted, progress)?;
            let root = directory.join("root");
            apt::unpack(&packages, &root, progress)?;
            let task = progress.spinner("Making the guest's userland");
            for unused in recipe::UNUSED_DIRECTORIES {
                remove(&root.join(unused))?;
            }
            make_guest(&root, directory)?;
            task.done();
            Ok(())
        })?;
        Ok(Debian {
            key,
            kernel: directory.join("vmlinuz"),
            kernel_config: directory.join("config"),
            directory,
        })
    }
}

fn make_guest(root: &Path, directory: &Path) -> Result<()> {
    let release = kernel_release(root)?;
    for part in ["vmlinuz", "config"] {
        let from = kernel_file(root, &release, part)?;
        fs::copy(&from, directory.join(part))
            .with_context(|| format!("copying {}", from.display()))?;
    }
    let modules = root.join("usr/lib/modules").join(&release);

    write_archive(&directory.join("userland.cpio"), |archive| {
        add_base(archive, root)?;
        for program in recipe::GUEST_PROGRAMS.iter().chain(recipe::GUEST_FILES) {
            archive.copy(program, &root.join(program))?;
        }
        archive.copy(elf::LOADER, &root.join(elf::LOADER))?;
        for library in elf::library_closure(root, recipe::GUEST_PROGRAMS)? {
            archive.copy(&library, &root.join(&library))?;
        }
        add_modules(archive, &modules, recipe::BOOT_MODULES, recipe::MODULES)
    })?;
    // Small: a nested guest has little memory and slow CPUs.
    write_archive(&directory.join("nested.cpio"), |archive| {
        add_base(archive, root)?;
        add_modules(
            archive,
            &modules,
            recipe::NESTED_BOOT_MODULES,
            recipe::NESTED_MODULES,
        )
    })?;
    // 150 MB that are not read any more.
    remove(&root.join("usr/lib/modules"))
}

fn write_archive(
    path: &Path,
    add: impl FnOnce(&mut Archive<BufWriter<File>>) -> Result<()>,
) -> Result<()> {
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let mut archive = Archive::new(BufWriter::new(file));
    add(&mut archive)?;
    archive
        .finish()?
        .flush()
        .with_context(|| format!("writing {}", path.display()))
}

/// Directories and busybox.
fn add_base<W: Write>(archive: &mut Archive<W>, root: &Path) -> Result<()> {
    for (link, target) in [
        ("bin", "usr/bin"),
        ("sbin", "usr/sbin"),
        ("lib", "usr/lib"),
        ("lib64", "usr/lib64"),
    ] {
        archive.symlink(link, target)?;
    }
    for directory in [
        "dev", "etc", "mnt", "proc", "root", "run", "sys", "tmp", "var/tmp",
    ] {
        archive.directory(directory)?;
    }
    archive.copy(recipe::BUSYBOX, &root.join(recipe::BUSYBOX))?;
    for name in recipe::BUSYBOX_NAMES {
        archive.symlink(format!("usr/bin/{name}"), "busybox")?;
    }
    // The path at which the kernel looks for modprobe.
    archive.symlink("usr/sbin/modprobe", "../bin/busybox")
}

/// The modules `boot`, which init loads, and `more`, which can be loaded later.
fn add_modules<W: Write>(
    archive: &mut Archive<W>,
    source: &Path,
    boot: &[&str],
    more: &[&str],
) -> Result<()> {
    let release = source
        .file_name()
        .context("the kernel has no release")?
        .to_string_lossy();
    let directory = format!("usr/lib/modules/{release}");
    let at_boot = modules::collect(source, boot)?;
    let list: String = at_boot
        .iter()
        .map(|module| format!("/{directory}/{}\n", module.path.display()))
        .collect();
    archive.file(MODULE_LIST, 0o644, list.as_bytes())?;

    let wanted = [boot, more].concat();
    let all = modules::collect(source, &wanted)?;
    for module in &all {
        let path = Path::new(&directory).join(&module.path);
        archive.file(path, 0o644, &module.bytes)?;
    }
    for (name, text) in [
        ("modules.dep", modules::modules_dep(&all)),
        ("modules.alias", modules::modules_alias(&all)),
        // busybox reports an error if it is missing.
        ("modules.symbols", String::new()),
    ] {
        archive.file(format!("{directory}/{name}"), 0o644, text.as_bytes())?;
    }
    let builtin = source.join("modules.builtin");
    archive.copy(format!("{directory}/modules.builtin"), &builtin)
}

/// The release of the kernel in the packages.
fn kernel_release(root: &Path) -> Result<String> {
    let directory = root.join("usr/lib/modules");
    fs::read_dir(&directory)
        .with_context(|| format!("listing {}", directory.display()))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .max()
        .with_context(|| format!("no kernel in {}", directory.display()))
}

/// The kernel's `vmlinuz` or `config`: the path differs between Debian's releases.
fn kernel_file(root: &Path, release: &str, name: &str) -> Result<PathBuf> {
    [
        root.join("usr/lib/modules").join(release).join(name),
        root.join("boot").join(format!("{name}-{release}")),
    ]
    .into_iter()
    .find(|path| path.exists())
    .with_context(|| format!("the packages brought no {name} of the kernel {release}"))
}

fn remove(directory: &Path) -> Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", directory.display()))
        }
        _ => Ok(()),
    }
}
