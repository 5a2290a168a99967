//! Huge pages for the VMs that use them.

use std::collections::BTreeMap;

use farside_fabric::{Size, host_memory::HugePool};
use farside_qemu_configs::HugePages;
use farside_vm_config::Manager;

use crate::{Facts, Finding};

const CHECK: &str = "hugepages";

/// Number of pages of one size that VMs need.
#[derive(Default)]
struct Wanted {
    by_all: u64,
    /// By those that do not run yet.
    to_come: u64,
    by_libvirt: bool,
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut sizes: BTreeMap<u64, Wanted> = BTreeMap::new();
    for (vm, config) in facts.good_vms() {
        let size = config.hugepages.unwrap_or_default();
        if size == HugePages::None {
            continue;
        }
        let wanted = sizes.entry(size.granule()).or_default();
        let pages = config.memory().div_ceil(size.granule());
        wanted.by_all += pages;
        wanted.to_come += if vm.running { 0 } else { pages };
        wanted.by_libvirt |= config.manager == Some(Manager::Libvirt);
    }
    let each = sizes.into_iter().flat_map(|(size, wanted)| {
        let mut findings = vec![pool(facts, size, &wanted)];
        findings.extend(mount(facts, size).filter(|_| wanted.by_libvirt));
        findings
    });
    each.collect()
}

fn pool(facts: &Facts, size: u64, wanted: &Wanted) -> Finding {
    let why = "a VM whose RAM is made of huge pages does not start when too few are free";
    let Some(&HugePool { total, free, .. }) = facts.memory.pools.get(&size) else {
        let what = format!("this host has no huge pages of {}", Size(size));
        return Finding::problem(CHECK, what, why).fix(format!(
            "sed -i 's/^GRUB_CMDLINE_LINUX=\"/&hugepagesz={}M hugepages={} /' /etc/default/grub && update-grub && reboot",
            size >> 20,
            wanted.by_all
        ));
    };
    let missing = wanted.by_all.saturating_sub(total);
    let missing = missing.max(wanted.to_come.saturating_sub(free));
    let of_size = format!("{total} pages of {}, {free} of them free", Size(size));
    if missing == 0 {
        return Finding::ok(CHECK, format!("{of_size}: enough"));
    }
    let needs = format!(
        "VMs need {}, {} of them yet to come",
        wanted.by_all, wanted.to_come
    );
    Finding::problem(CHECK, format!("{of_size}; {needs}"), why).fix(format!(
        "echo {} > /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
        total + missing,
        size >> 10
    ))
}

/// QEMU allocates huge pages without hugetlbfs; libvirt requires it.
fn mount(facts: &Facts, size: u64) -> Option<Finding> {
    if facts.memory.mounts.iter().any(|mount| mount.page == size) {
        return None;
    }
    let what = format!("no hugetlbfs with pages of {} is mounted", Size(size));
    let why = "libvirt refuses domains with huge pages of a size that has no mount";
    let directory = format!("/dev/hugepages{}M", size >> 20);
    Some(Finding::problem(CHECK, what, why).fix(format!(
        "mkdir -p {directory} && mount -t hugetlbfs -o pagesize={}M hugetlbfs {directory} && systemctl restart libvirtd",
        size >> 20
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
        facts::{Mount, huge_pool},
    };

    #[test]
    fn both_ways() {
        assert_eq!(judge(&host_of("memory = \"4G\"")), []);
        let mut facts = host_of("memory = \"1G\"\nhugepages = \"2M\"");
        says(judge(&facts), Level::Problem, "no huge pages of 2 MiB");
        facts.memory.pools.insert(2 << 20, huge_pool(600, 500));
        let said = says(judge(&facts), Level::Problem, "VMs need 512");
        assert_eq!(
            said.fix,
            ["echo 612 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"]
        );
        // It has them already.
        facts.vms[0].running = true;
        says(judge(&facts), Level::Ok, "enough");
        facts.vms[0].running = false;
        facts.memory.pools.insert(2 << 20, huge_pool(512, 512));
        says(judge(&facts), Level::Ok, "enough");
    }

    #[test]
    fn libvirt_wants_a_mount() {
        let mut facts = host_of("memory = \"1G\"\nhugepages = \"1G\"\nmanager = \"libvirt\"");
        facts.memory.pools.insert(1 << 30, huge_pool(1, 1));
        let found = judge(&facts);
        assert_eq!(found[1].level, Level::Problem);
        assert!(found[1].fix[0].contains("pagesize=1024M"), "{found:?}");
        let at = "/dev/hugepages".into();
        facts.memory.mounts = vec![Mount { at, page: 1 << 30 }];
        says(judge(&facts), Level::Ok, "enough");
    }
}
