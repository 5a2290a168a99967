//! Notes on slow pinning, and on memory savings that pinning defeats.

use farside_fabric::Size;
use farside_qemu_configs::HugePages;

use crate::{Facts, Finding};

const THP: &str = "thp";
const KSM: &str = "ksm";

/// Guest RAM from which on pinning in 4 KiB pages takes seconds, bytes.
const LARGE: u64 = 16 << 30;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    let ordinary = facts
        .good_vms()
        .filter(|(_, config)| config.hugepages.unwrap_or_default() == HugePages::None);
    let largest = ordinary
        .map(|(_, config)| config.memory())
        .max()
        .unwrap_or(0);
    let off = ["never", "deny"];
    let setting = facts.memory.shmem_huge.as_deref().unwrap_or("advise");
    if largest >= LARGE && off.contains(&setting) {
        let what = format!(
            "shared memory has no transparent huge pages ({setting}), and a VM has {}",
            Size(largest)
        );
        findings.push(
            Finding::note(
                THP,
                what,
                "pinning is done page by page, while the guest's vCPU waits: `advise` makes it several times faster",
            )
            .fix("echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        );
    }
    if facts.memory.ksm && facts.good_vms().next().is_some() {
        findings.push(Finding::note(
            KSM,
            "the kernel merges equal pages of VMs (KSM)",
            "it cannot merge the RAM of VMs that borrow, which is shared: plan memory without it",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
    };

    #[test]
    fn both_ways() {
        let mut facts = host_of("memory = \"32G\"");
        facts.memory.shmem_huge = Some("advise".into());
        assert_eq!(judge(&facts), []);
        facts.memory.shmem_huge = Some("never".into());
        says(judge(&facts), Level::Note, "32 GiB");
        for description in ["memory = \"1G\"", "memory = \"32G\"\nhugepages = \"1G\""] {
            facts.vms = host_of(description).vms;
            assert_eq!(judge(&facts), []);
        }
        facts.memory.ksm = true;
        says(judge(&facts), Level::Note, "KSM");
        facts.vms.clear();
        assert_eq!(judge(&facts), []);
    }
}
