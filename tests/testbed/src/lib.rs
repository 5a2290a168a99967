//! Real QEMU, a real guest kernel and a small guest userland, for tests and demos.
//!
//! [`Testbed::prepare`] makes everything in the user's cache directory, from Debian
//! packages, without root. [`Testbed::vm`] then starts virtual machines, and a [`Vm`] is
//! controlled from Rust: shell commands, device registers and physical memory through an
//! agent in the guest ([`Guest::exec`] and others), QEMU through QMP ([`Vm::qmp`]).
//!
//! A VM may play a host ([`Testbed::host_vm`]): it has an emulated VT-d, and runs nested
//! VMs ([`HostVm::guest`]), which are controlled in the same way.
//!
//! A [`DebianRoot`] is an installed Debian, for software that consists of more than a
//! binary; it alone requires root: the machine's, or a user namespace's ([`become_root`]).
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use std::time::Duration;
//! use farside_testbed::{Progress, Testbed};
//!
//! let testbed = Testbed::prepare(&Progress::auto())?;
//! let vm = testbed.vm("example").memory(512 << 20).launch()?;
//! vm.wait_agent(Duration::from_secs(60))?;
//! println!("{}", vm.exec_ok("lspci", Duration::from_secs(10))?);
//! vm.shutdown(Duration::from_secs(30))?;
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

mod accel;
mod agent_build;
mod apt;
mod archive;
mod boot_image;
mod cache;
mod command;
mod debian;
mod debian_root;
mod elf;
mod etcd;
mod host;
mod host_vm;
mod iommufd;
pub mod kernel_view;
mod lean;
mod modules;
mod process;
mod progress;
mod recipe;
mod root_user;
mod tools_disk;
mod vm;
mod vmlinux;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};

pub use accel::{Accel, NESTED_KVM_CPU, NESTED_KVM_MACHINE, TCG_CPU, TCG_ZEN_CPU};
pub use debian_root::{DebianRoot, Inside};
pub use farside_guest_agent::{BarAddress, Width};
pub use host_vm::{Expected, HostVm, Nested, NestedBuilder, acquaint};
pub use iommufd::{IommufdModules, PackagesUnavailable};
pub use process::{Process, die_with_us};
pub use progress::{Progress, Task};
pub use root_user::{become_root, lacks_root};
pub use vm::{
    AgentPort, Boot, Event, Firmware, Guest, GuestPage, Machine, Output, Pending, Qmp, Staged, Vm,
    VmBuilder,
};

use archive::Archive;
use cache::Cache;
use debian::Debian;
use host::Host;
use lean::Lean;

/// QEMU, a guest kernel and a guest userland, ready for use. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Testbed(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    cache: PathBuf,
    debian: Debian,
    host: Host,
    initramfs: PathBuf,
    lean: Lean,
    tools_disk: PathBuf,
    accel: OnceLock<Accel>,
}

impl Testbed {
    /// Makes all parts, or finds them in the cache. Two processes may do so concurrently:
    /// one waits for the other.
    ///
    /// The cache is in `$FARSIDE_CACHE`, else in `farside` in `$XDG_CACHE_HOME`
    /// or `~/.cache`.
    pub fn prepare(progress: &Progress) -> Result<Self> {
        Self::prepare_in(cache::default_root()?, progress)
    }

    /// As [`Testbed::prepare`], with the cache in that directory.
    pub fn prepare_in(directory: PathBuf, progress: &Progress) -> Result<Self> {
        let cache = Cache::open(directory, || {
            progress.note("Waiting for another process that prepares the test bed");
        })?;
        let debian = Debian::prepare(&cache, progress)
            .context("cannot prepare the test bed's Debian packages")?;
        let host = Host::prepare(&cache, &debian)?;
        let (agent, agent_key) = agent_build::prepare(&cache, progress)?;
        let key = cache::key([&debian.key, &agent_key]);
        let guest = cache.entry("guest", &key, |directory| {
            make_initramfs(
                &debian.userland(),
                &agent,
                &directory.join("initramfs.cpio"),
            )?;
            make_initramfs(
                &debian.nested_userland(),
                &agent,
                &directory.join("nested.cpio"),
            )
        })?;
        let lean = lean::prepare(&cache, &debian, &host, &agent, &agent_key)?;
        let tools_disk = tools_disk::prepare(&cache, &debian, &host, &guest, &key, progress)?;
        let testbed = Testbed(Arc::new(Parts {
            cache: cache.root().to_owned(),
            debian,
            host,
            initramfs: guest.join("initramfs.cpio"),
            lean,
            tools_disk,
            accel: OnceLock::new(),
        }));
        // While the cache is still locked: one process tries, the others read the result.
        let accel = accel::choose(&testbed, progress)?;
        testbed.0.accel.get_or_init(|| accel);
        Ok(testbed)
    }

    /// The `qemu-system-x86_64` binary, version 10.1 or later.
    pub fn qemu(&self) -> &Path {
        &self.0.host.qemu
    }

    /// The version that QEMU prints.
    pub fn qemu_version(&self) -> &str {
        &self.0.host.qemu_version
    }

    /// The accelerator: KVM if it runs the guest kernel, else TCG.
    pub fn accel(&self) -> Accel {
        self.0.accel.get().copied().unwrap_or(Accel::Tcg)
    }

    /// The guest's kernel image, which is also an EFI binary.
    pub fn kernel(&self) -> &Path {
        &self.0.debian.kernel
    }

    /// The configuration that the guest's kernel was built with, as in `/boot/config-RELEASE`.
    pub fn kernel_config(&self) -> &Path {
        &self.0.debian.kernel_config
    }

    /// The same kernel's ELF image, which a machine with a BIOS starts without
    /// decompression: on an emulated CPU decompression takes as long as the rest of the
    /// boot until init.
    pub fn elf_kernel(&self) -> &Path {
        &self.0.lean.kernel
    }

    /// Modules of [`Testbed::kernel`] with iommufd, for [`VmBuilder::iommufd`]: built if they
    /// are not in the cache, which takes half a minute and 240 MB of packages. The error is a
    /// [`PackagesUnavailable`] if this machine cannot get these.
    pub fn iommufd_modules(&self, progress: &Progress) -> Result<IommufdModules> {
        // Under a separate lock: other processes can prepare their test beds meanwhile.
        let cache = Cache::open(self.0.cache.join("iommufd"), || {
            progress.note("Waiting for another process that builds VFIO with iommufd");
        })?;
        IommufdModules::prepare(&cache, &self.0.debian, &self.0.host, progress)
    }

    /// etcd's server, to run on the host: fetched if it is not in the cache (10 MB).
    pub fn etcd(&self, progress: &Progress) -> Result<PathBuf> {
        // Under a separate lock: other processes can prepare their test beds meanwhile.
        let cache = Cache::open(self.0.cache.join("etcd"), || {
            progress.note("Waiting for another process that fetches etcd");
        })?;
        etcd::prepare(&cache, &self.0.debian.root(), progress).context("cannot prepare etcd")
    }

    /// The guest's initramfs: userland, modules and agent.
    pub fn initramfs(&self) -> &Path {
        &self.0.initramfs
    }

    /// [`Testbed::initramfs`] without most binaries and modules; see [`VmBuilder::lean`].
    pub fn lean_initramfs(&self) -> &Path {
        &self.0.lean.initramfs
    }

    /// The kernel command line for a guest on [`Testbed::accel`]: console on the serial
    /// port, and timers without calibration in an emulated guest.
    pub fn kernel_args(&self) -> String {
        vm::kernel_args(self.accel())
    }

    /// OVMF's code, for a read-only mapping.
    pub fn ovmf_code(&self) -> PathBuf {
        self.0.debian.root().join("usr/share/OVMF/OVMF_CODE_4M.fd")
    }

    /// OVMF's initial variables; each VM needs a separate copy.
    pub fn ovmf_vars(&self) -> PathBuf {
        self.0.debian.root().join("usr/share/OVMF/OVMF_VARS_4M.fd")
    }

    /// U-Boot in place of a BIOS, with drivers of its own.
    pub fn u_boot(&self) -> PathBuf {
        let path = "usr/lib/u-boot/qemu-x86/u-boot.rom";
        self.0.debian.root().join(path)
    }

    /// systemd-boot, an EFI boot loader.
    pub fn systemd_boot(&self) -> PathBuf {
        self.0
            .debian
            .root()
            .join("usr/lib/systemd/boot/efi/systemd-bootx64.efi")
    }

    /// A tool to run on the host: `qemu-img`, `qemu-io`, `mcopy`, `mformat`, `mmd`,
    /// `debugfs`, `fsck.ext4`, `xfs_repair`, `ip`, `xz`, `dpkg-shlibdeps`.
    pub fn tool(&self, name: &str) -> Command {
        Command::new(self.0.host.bin.join(name))
    }

    /// The directory of [`Testbed::tool`]'s tools, for a `PATH`.
    pub fn tools(&self) -> &Path {
        &self.0.host.bin
    }

    /// Writes a disk image of `len` bytes from which OVMF boots the guest, as small as
    /// [`VmBuilder::lean`] makes it, with `append` added to the kernel command line.
    pub fn make_boot_image(&self, image: &Path, len: u64, append: &str) -> Result<()> {
        boot_image::make(self, image, len, append)
    }

    /// Makes a sparse ext4 image of `len`, such as `4G`, with the contents of a directory.
    pub fn make_disk(&self, content: &Path, image: &Path, len: &str) -> Result<()> {
        tools_disk::ext4(self.tool("mke2fs"), content, image, len)
    }

    /// An ext4 image with QEMU, the guest's kernel, a small initramfs and OpenSSH, for VMs
    /// that run nested VMs.
    pub fn tools_disk(&self) -> &Path {
        &self.0.tools_disk
    }

    /// A new virtual machine that plays a host: with an IOMMU, channels for two nested
    /// guests and 1.5 GiB of memory. Start it with [`VmBuilder::launch_host`].
    pub fn host_vm(&self, name: &str) -> VmBuilder {
        self.vm(name).memory(1536 << 20).iommu().nested_guests(2)
    }

    /// A new virtual machine. The name shows in messages and in `ps`.
    pub fn vm(&self, name: &str) -> VmBuilder {
        VmBuilder::new(self.clone(), name)
    }
}

/// The cache's directory; see [`Testbed::prepare`].
pub fn cache_directory() -> Result<PathBuf> {
    cache::default_root()
}

/// Appends the agent to the userland: the kernel unpacks both.
fn make_initramfs(userland: &Path, agent: &Path, to: &Path) -> Result<()> {
    let context = || format!("writing {}", to.display());
    let mut file = File::create(to).with_context(context)?;
    let mut userland_file =
        File::open(userland).with_context(|| format!("opening {}", userland.display()))?;
    io::copy(&mut userland_file, &mut file).with_context(context)?;
    let mut archive = Archive::new(file);
    let program = fs::read(agent).with_context(|| format!("reading {}", agent.display()))?;
    archive.file("init", 0o755, &program)?;
    archive.symlink("usr/bin/guest-agent", "/init")?;
    archive.finish()?;
    Ok(())
}
