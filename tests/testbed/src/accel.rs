//! Chooses between KVM and emulation by a trial boot: a machine may have `/dev/kvm` and yet
//! a KVM on which stock kernels do not run.

use std::fs::{self, OpenOptions};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::progress::Progress;
use crate::{Testbed, cache};

/// With KVM, the guest replies within two seconds.
const TRIAL: Duration = Duration::from_secs(20);

/// The accelerator of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// Hardware virtualization.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

impl Accel {
    /// QEMU's options for it.
    pub fn args(self) -> [&'static str; 4] {
        match self {
            Accel::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Accel::Tcg => ["-accel", "tcg,thread=multi", "-cpu", TCG_CPU],
        }
    }
}

/// The CPU of an emulated guest: all features of TCG, except those that cost time. Five-level
/// page tables lengthen each page walk. Where `rep movsb` and `rep stosb` are said to be fast
/// (ERMS, FSRM), Linux copies and clears memory with them, which TCG does byte by byte.
pub const TCG_CPU: &str = "max,la57=off,erms=off,fsrm=off";

/// The same as one of AMD's since Zen (family 17h), between whose root ports Linux allows peer to peer.
pub const TCG_ZEN_CPU: &str = "max,la57=off,erms=off,fsrm=off,family=25";

/// The CPU of an emulated machine with guests of its own. With [`TCG_CPU`] three of some eighty of
/// these, which had 2 CPUs then, hung idle.
pub(crate) const TCG_HOST_CPU: &str = "max,la57=off";

/// The CPU of a guest whose KVM may be that of an emulated VM.
///
/// QEMU's emulated SVM keeps the vector of an interrupt that VMRUN injects in `exception_index`.
/// If another thread makes the CPU leave its loop before the next #VMEXIT or exception, and not for an
/// interrupt, which is a #VMEXIT, the guest gets that vector again, as an exception. It does so with interrupts
/// disabled, too, and hangs, or KVM gives up. Such threads are those of other CPUs, for an exclusive operation, and that of
/// QEMU's RCU, after the host has changed BARs or bus mastering of a device, as each reset does.
///
/// Hence a host has one CPU. Its guests have no paravirtual EOI, so that the first step of Linux's interrupt handlers is a
/// #VMEXIT, and no PIT ([`NESTED_KVM_MACHINE`]). Guests of cloud-hypervisor keep paravirtual EOI, and may still hang.
/// `cargo run -p farside-testbed --example nested` measures it.
///
/// After an exception that the guest handles itself, such as a page fault, emulated SVM leaves its type in
/// EVENTINJ, without the valid bit, and reports it with the next #VMEXIT. If that is an access of MMIO, Linux 7.3's KVM
/// stops the guest (`KVM internal error. Suberror: 3`). So no process of a guest is to start, or to
/// touch new memory, again and again while devices are plugged in.
pub const NESTED_KVM_CPU: &str = "host,kvm-pv-eoi=off";

/// The timer of such a guest's firmware is the ACPI PM timer: SeaBIOS's handler of the PIT's interrupts, which
/// it needs for the time of day alone, does not begin with a #VMEXIT, and crashes where an interrupt comes twice.
pub const NESTED_KVM_MACHINE: &str = "pit=off";

/// The same as [`TCG_ZEN_CPU`].
pub(crate) const NESTED_KVM_ZEN_CPU: &str = "host,kvm-pv-eoi=off,family=25";

/// Tries KVM once per boot of the machine and per version of QEMU and guest.
pub(crate) fn choose(testbed: &Testbed, progress: &Progress) -> Result<Accel> {
    let usable = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if let Err(error) = usable {
        log::info!("no KVM: /dev/kvm: {error}");
        return Ok(Accel::Tcg);
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .context("reading this machine's boot id")?;
    let key = cache::key([boot.trim(), testbed.qemu_version(), &testbed.0.debian.key]);
    let path = testbed.0.cache.join("accel.json");
    let known = fs::read(&path)
        .ok()
        .and_then(|text| serde_json::from_slice::<Verdict>(&text).ok())
        .filter(|verdict| verdict.key == key);
    if let Some(verdict) = known {
        return Ok(verdict.accel);
    }
    let task = progress.spinner("Trying KVM");
    let accel = match trial(testbed) {
        Ok(()) => Accel::Kvm,
        Err(error) => {
            log::info!("KVM does not run the guest kernel: {error:#}");
            Accel::Tcg
        }
    };
    task.done();
    let verdict = serde_json::to_vec(&Verdict { key, accel }).context("encoding the verdict")?;
    fs::write(&path, verdict).with_context(|| format!("writing {}", path.display()))?;
    Ok(accel)
}

#[derive(Serialize, Deserialize)]
struct Verdict {
    key: String,
    accel: Accel,
}

fn trial(testbed: &Testbed) -> Result<()> {
    let vm = testbed
        .vm("kvm-trial")
        .memory(512 << 20)
        .accel(Accel::Kvm)
        // The compressed image, which requires more of KVM than the ELF image does.
        .kernel(testbed.kernel())
        .launch()?;
    vm.wait_agent(TRIAL)
}
