//! Compares two hosts.

use farside_fabric::Size;
use farside_vm_config::Manager;

use super::{Accelerator, Facts, Finding, Qemu};
use crate::{Journal, Result, local::config_of};

/// Requirements of the VM.
pub(super) struct Wanted {
    pub(super) live: bool,
    /// Guest RAM, bytes. None for a domain of libvirt.
    pub(super) memory: Option<u64>,
    /// The guest sees the CPU of the host.
    pub(super) host_cpu: bool,
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
            // The default of farside's command line is `max`.
            host_cpu: matches!(model, None | Some("host" | "max")),
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
    findings.push(cpu(wanted, there, here));
    if let Some(memory) = wanted.memory {
        findings.push(room(memory, here));
    }
    findings
}

fn version(qemu: &Qemu) -> String {
    let (major, minor) = qemu.version;
    format!("{} is QEMU {major}.{minor}", qemu.binary.display())
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
        std::cmp::Ordering::Less => Finding::problem_if(
            live,
            "QEMU",
            text,
            "a running guest goes to the same QEMU or a newer one: upgrade this host, or move the VM without --live",
        ),
    };
    let (machine, wanted) = (&here.machine, &there.machine);
    let pin = format!(
        "set qemu-args = [\"-machine\", \"{wanted}\"] in the configuration on the host where the VM is"
    );
    let machine = if machine == wanted {
        Finding::ok("machine", format!("it is {wanted} on both hosts"))
    } else if here.machines.contains(wanted) {
        let what = format!("it is {wanted}, and would be {machine} here");
        Finding::problem_if(live, "machine", what, &pin)
    } else {
        Finding::problem_if(
            live,
            "machine",
            format!("it is {wanted}, which QEMU here does not support"),
            "install the QEMU that the other host has",
        )
    };
    vec![release, machine]
}

fn cpu(wanted: &Wanted, there: &Facts, here: &Facts) -> Finding {
    const CHECK: &str = "CPU";
    use Accelerator::{Kvm, Missing, Tcg};
    let one = "set accel = \"tcg\" or accel = \"kvm\" in the configuration, and start the VM again";
    match (there.accelerator, here.accelerator) {
        (_, Missing) => Finding::problem(
            CHECK,
            "the VM requires KVM, and /dev/kvm cannot be used here",
            "load kvm_intel or kvm_amd, and give this user access to /dev/kvm; see `farside doctor`",
        ),
        (Kvm, Tcg) => Finding::problem_if(
            wanted.live,
            CHECK,
            "the VM runs under KVM, and would be emulated here, without /dev/kvm",
            one,
        ),
        (Tcg | Missing, Kvm) => Finding::problem_if(
            wanted.live,
            CHECK,
            "the VM is emulated, and would run under KVM here",
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
                [] => Finding::ok(CHECK, format!("{} has all features of the other", here.cpu)),
                missing if wanted.host_cpu => Finding::problem_if(
                    wanted.live,
                    CHECK,
                    format!(
                        "{} lacks what the guest has seen of {}: {}",
                        here.cpu,
                        there.cpu,
                        missing.join(" ")
                    ),
                    "choose a CPU model that both have, with qemu-args = [\"-cpu\", MODEL], and start the VM again",
                ),
                missing => Finding::note(
                    CHECK,
                    format!("{} lacks {}", here.cpu, missing.join(" ")),
                    "QEMU refuses to start if the VM's CPU model has one of these",
                ),
            }
        }
    }
}

fn room(memory: u64, here: &Facts) -> Finding {
    const CHECK: &str = "memory";
    let free = here.memory.free;
    // MiB suffice.
    let whole = free >> 20 << 20;
    let what = format!(
        "the VM has {}, and {} are free here",
        Size(memory),
        Size(whole)
    );
    match here.memory.huge_page {
        _ if free >= memory => Finding::ok(CHECK, what),
        None => Finding::problem(CHECK, what, "stop another VM, or give this one less"),
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
