//! Two hosts beside each other.

use farside_fabric::Size;
use farside_vm_config::Manager;

use super::{Accelerator, Facts, Finding, Qemu};
use crate::{Journal, Result, local::config_of};

/// What the VM asks of the host that it goes to.
pub(super) struct Wanted {
    pub(super) live: bool,
    /// Guest RAM, bytes. None where libvirt knows.
    pub(super) memory: Option<u64>,
    /// The guest sees the processor of the host.
    pub(super) host_processor: bool,
}

impl Wanted {
    /// Of the VM in a manifest.
    pub(super) fn of(journal: &Journal) -> Result<Self> {
        let config = config_of(&journal.vm, &journal.configuration)?;
        let libvirt = config.manager == Some(Manager::Libvirt);
        let args = config.qemu_args.iter().zip(config.qemu_args.iter().skip(1));
        let model = args
            .filter(|(name, _)| *name == "-cpu")
            .filter_map(|(_, value)| value.split(',').next())
            .next_back();
        Ok(Self {
            live: journal.strategy.is_live(),
            memory: (!libvirt).then(|| config.memory()),
            // What farside's own command line says is `max`.
            host_processor: matches!(model, None | Some("host" | "max")),
        })
    }
}

/// Whether a VM that is on `there` can go to `here`.
pub(super) fn compare(wanted: &Wanted, there: &Facts, here: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    match (&there.qemu, &here.qemu) {
        (_, None) => {}
        (_, Some(Err(why))) => findings.push(Finding::problem("QEMU", why, "")),
        (Some(Ok(there)), Some(Ok(here))) => findings.extend(qemu(wanted.live, there, here)),
        (_, Some(Ok(here))) => findings.push(Finding::ok("QEMU", version(here))),
    }
    findings.push(processor(wanted, there, here));
    if let Some(memory) = wanted.memory {
        findings.push(room(memory, here));
    }
    findings
}

fn version(qemu: &Qemu) -> String {
    let (major, minor) = qemu.version;
    format!("{} is QEMU {major}.{minor}", qemu.program.display())
}

fn qemu(live: bool, there: &Qemu, here: &Qemu) -> Vec<Finding> {
    let (major, minor) = there.version;
    let text = format!(
        "{}, and QEMU {major}.{minor} where the VM is",
        version(here)
    );
    let release = match here.version.cmp(&there.version) {
        std::cmp::Ordering::Equal => Finding::ok("QEMU", version(here)),
        std::cmp::Ordering::Greater => Finding::note("QEMU", text, ""),
        std::cmp::Ordering::Less => Finding::if_live(
            live,
            "QEMU",
            text,
            "a running guest goes to the same QEMU or a newer one: upgrade this host, or move the VM without --live",
        ),
    };
    let (machine, wanted) = (&here.machine, &there.machine);
    let pin = format!(
        "describe the VM with qemu-args = [\"-machine\", \"{wanted}\"] on the host where it is, so that it has that machine everywhere"
    );
    let machine = if machine == wanted {
        Finding::ok("machine", format!("it is {wanted} on both hosts"))
    } else if here.machines.contains(wanted) {
        let what = format!("it is {wanted}, and would be {machine} here");
        Finding::if_live(live, "machine", what, &pin)
    } else {
        Finding::if_live(
            live,
            "machine",
            format!("it is {wanted}, which QEMU here does not know"),
            "install the QEMU that the other host has",
        )
    };
    vec![release, machine]
}

fn processor(wanted: &Wanted, there: &Facts, here: &Facts) -> Finding {
    const CHECK: &str = "processor";
    use Accelerator::{Kvm, Missing, Tcg};
    let one = "say accel = \"tcg\" or accel = \"kvm\" in the configuration, and start the VM anew";
    match (there.accelerator, here.accelerator) {
        (_, Missing) => Finding::problem(
            CHECK,
            "the VM is to run by KVM, and /dev/kvm cannot be used here",
            "load kvm_intel or kvm_amd, and let this user use /dev/kvm; `farside doctor` says more",
        ),
        (Kvm, Tcg) => Finding::if_live(
            wanted.live,
            CHECK,
            "the VM runs by KVM, and would be emulated here, which has no /dev/kvm",
            one,
        ),
        (Tcg | Missing, Kvm) => Finding::if_live(
            wanted.live,
            CHECK,
            "the VM is emulated, and would run by KVM here",
            one,
        ),
        (_, Tcg) => Finding::ok(CHECK, "it is emulated on both hosts"),
        (Kvm, Kvm) => {
            let missing: Vec<&str> = there
                .flags
                .difference(&here.flags)
                .map(String::as_str)
                .collect();
            match missing.as_slice() {
                [] => Finding::ok(
                    CHECK,
                    format!("{} can all that the other can", here.processor),
                ),
                missing if wanted.host_processor => Finding::if_live(
                    wanted.live,
                    CHECK,
                    format!(
                        "{} lacks what the guest has seen of {}: {}",
                        here.processor,
                        there.processor,
                        missing.join(" ")
                    ),
                    "give the VM a processor that both have, with qemu-args = [\"-cpu\", MODEL], and start it anew",
                ),
                missing => Finding::note(
                    CHECK,
                    format!("{} lacks {}", here.processor, missing.join(" ")),
                    "QEMU refuses to start if the VM's processor has one of these",
                ),
            }
        }
    }
}

fn room(memory: u64, here: &Facts) -> Finding {
    const CHECK: &str = "memory";
    let free = here.memory.free;
    // Nobody counts kilobytes here.
    let whole = free >> 20 << 20;
    let what = format!(
        "the VM has {}, and {} are free here",
        Size(memory),
        Size(whole)
    );
    match here.memory.huge_page {
        _ if free >= memory => Finding::ok(CHECK, what),
        None => Finding::problem(CHECK, what, "end something else, or give the VM less"),
        Some(page) => Finding::problem(
            CHECK,
            format!("{what} in pages of {}", Size(page)),
            &format!(
                "reserve more: write {} to /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
                memory.div_ceil(page),
                page >> 10
            ),
        ),
    }
}

#[cfg(test)]
mod tests;
