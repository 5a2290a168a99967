//! The limit of locked memory, against guest RAM.

use farside_fabric::{Size, pin::PinPolicy};
use farside_qemu_configs::{HugePages, has_viommu};
use farside_vm_config::VmConfig;

use crate::{
    Facts, Finding,
    facts::{Limit, UNIT_USER, Unit},
    finding::quoted,
};

const CHECK: &str = "memlock";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let vms = facts.good_vms().map(|(vm, config)| {
        let needed = needed(config);
        let who = Locker::of_backend(facts);
        let required = config.pin == Some(PinPolicy::Require) || config.ntb;
        let why = match required {
            true => "guest RAM has to be locked while a device may reach it: this VM's devices are refused",
            false => "guest RAM is not locked: it may be swapped out under a device's DMA, which then waits",
        };
        who.judge(needed, required, why).of_vm(&vm.name)
    });
    let mut findings: Vec<_> = vms.collect();
    if facts.lends_hardware() {
        let why = "the kernel counts guest RAM as the lender's, once for each physical device that \
                   reaches it, and all VMs and devices together";
        let who = Locker::of_lender(facts);
        findings.push(match pinned_by_lender(facts) {
            0 => Finding::ok(
                CHECK,
                "no VM of this host borrows a physical device of this lender",
            ),
            needed => who.judge(needed, true, why),
        });
    }
    findings
}

/// Bytes that the lender pins for the VMs of this host: all of a VM's RAM, huge
/// pages too, for each of its physical devices, summed up as the kernel does it.
/// VMs of other hosts are reached through the NTB's BAR, which is not counted.
fn pinned_by_lender(facts: &Facts) -> u64 {
    let of_vm = |config: &VmConfig| {
        let devices = config.device_ids();
        let physical = devices.iter().filter(|id| facts.lends_physical(id));
        config.memory().saturating_mul(physical.count() as u64)
    };
    facts
        .good_vms()
        .map(|(_, config)| of_vm(config))
        .fold(0, u64::saturating_add)
}

/// Bytes that the backend of a VM locks, which the kernel counts once for each mapping. It maps RAM
/// once for all devices; behind a vIOMMU, pages that are mapped read-only and writable, twice. Huge
/// pages are never swapped and not counted. The NTB endpoint's IOMMU domain locks all of RAM again.
fn needed(config: &VmConfig) -> u64 {
    let mapped = match config.hugepages.unwrap_or_default() {
        HugePages::None if has_viommu(&config.qemu_args) => 2,
        HugePages::None => 1,
        _ => 0,
    };
    let endpoint = u64::from(config.ntb);
    config.memory().saturating_mul(mapped + endpoint)
}

/// A process that locks memory.
struct Locker<'a> {
    limit: Option<u64>,
    unit: Option<&'a str>,
    user: &'a str,
}

impl<'a> Locker<'a> {
    fn of_backend(facts: &'a Facts) -> Self {
        let unit = facts.systemd.backend.as_ref();
        Self::new(facts, "farside@.service", unit)
    }

    fn of_lender(facts: &'a Facts) -> Self {
        let unit = facts.systemd.lender.as_ref();
        Self::new(facts, "farside-lender.service", unit)
    }

    fn new(facts: &'a Facts, name: &'a str, unit: Option<&Unit>) -> Self {
        match unit.filter(|_| facts.by_units()) {
            Some(unit) => Self {
                limit: match unit.memlock {
                    Limit::None => None,
                    Limit::Of(bytes) => Some(bytes),
                },
                unit: Some(name),
                user: UNIT_USER,
            },
            None => Self {
                limit: facts.memory.memlock.filter(|_| !facts.users.may_lock),
                unit: None,
                user: &facts.users.me.name,
            },
        }
    }

    fn judge(&self, needed: u64, required: bool, why: &str) -> Finding {
        if needed == 0 {
            return Finding::ok(CHECK, "guest RAM of huge pages needs no lock");
        }
        let whose = match self.unit {
            Some(unit) => format!("the unit {unit}"),
            None => format!("user {}", self.user),
        };
        let Some(limit) = self.limit.filter(|limit| *limit < needed) else {
            return Finding::ok(
                CHECK,
                format!("{whose} may lock {} of guest RAM", Size(needed)),
            );
        };
        let what = format!(
            "{whose} may lock {}, and guest RAM to lock is {}",
            Size(limit),
            Size(needed)
        );
        Finding::problem_if(required, CHECK, what, why).fix(self.remedy(needed))
    }

    fn remedy(&self, needed: u64) -> String {
        if let Some(unit) = self.unit {
            let directory = format!("/etc/systemd/system/{unit}.d");
            return format!(
                "mkdir -p {directory} && printf '[Service]\\nLimitMEMLOCK=infinity\\n' > {directory}/memlock.conf && systemctl daemon-reload"
            );
        }
        // Other locked memory of the process is small.
        let kib = needed.div_ceil(1024).saturating_add(64 << 10);
        format!(
            "echo {} > /etc/security/limits.d/farside.conf   # as root; then log in anew",
            quoted(&format!("{} - memlock {kib}", self.user))
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says, vm},
    };

    fn host(description: &str, memlock: Option<u64>) -> Facts {
        let mut facts = host_of(description);
        facts.memory.memlock = memlock;
        facts.users.me.name = "web".into();
        facts
    }

    #[test]
    fn a_user_with_a_limit() {
        let of = |description, memlock| judge(&host(description, memlock));
        says(
            of("memory = \"1G\"", Some(1 << 30)),
            Level::Ok,
            "user web may lock 1 GiB",
        );
        says(of("memory = \"64G\"", None), Level::Ok, "64 GiB");
        says(
            of("memory = \"1G\"", Some((1 << 30) - 1)),
            Level::Note,
            "1 GiB",
        );
        let said = says(
            of("memory = \"1G\"\npin = \"require\"", Some(8 << 20)),
            Level::Problem,
            "8 MiB",
        );
        assert_eq!(
            said.fix,
            [
                "echo 'web - memlock 1114112' > /etc/security/limits.d/farside.conf   # as root; then log in anew"
            ]
        );
        // Devices share what is locked.
        let two = "memory = \"1G\"\ndevices = [\"a\", \"b\"]";
        says(of(two, Some(1 << 30)), Level::Ok, "may lock 1 GiB");
        says(
            of(
                "memory = \"4G\"\nhugepages = \"2M\"\npin = \"require\"",
                Some(0),
            ),
            Level::Ok,
            "needs no lock",
        );

        // Pages with other rights, and the NTB endpoint's domain, count again.
        let viommu = "qemu-args = [\"-device\", \"intel-iommu,caching-mode=on\"]";
        let ntb = "ntb = true";
        for (more, needed) in [
            (viommu.to_owned(), 2),
            (ntb.to_owned(), 2),
            (format!("{viommu}\n{ntb}"), 3),
            (format!("{viommu}\n{ntb}\nhugepages = \"2M\""), 1),
        ] {
            let vm = format!("memory = \"1G\"\npin = \"require\"\n{more}");
            let limit = needed << 30;
            let judged = |limit| judge(&host(&vm, Some(limit)));
            let enough = format!("may lock {needed} GiB");
            says(judged(limit), Level::Ok, &enough);
            says(judged(limit - 1), Level::Problem, "guest RAM to lock is");
        }

        let mut facts = host("pin = \"require\"", Some(0));
        facts.users.may_lock = true;
        says(judge(&facts), Level::Ok, "2 GiB");
    }

    #[test]
    fn a_unit_with_a_limit() {
        let mut facts = host("pin = \"require\"", None);
        let unit = |memlock| {
            Some(Unit {
                path: "/u".into(),
                memlock,
                user: UNIT_USER.into(),
                binds: false,
            })
        };
        facts.systemd.runs = true;
        facts.systemd.backend = unit(Limit::Of(8 << 20));
        let said = says(
            judge(&facts),
            Level::Problem,
            "unit farside@.service may lock 8 MiB",
        );
        assert!(said.fix[0].contains("/etc/systemd/system/farside@.service.d/memlock.conf"));
        facts.systemd.backend = unit(Limit::None);
        says(judge(&facts), Level::Ok, "unit farside@.service");

        let lends = "[[device]]\nid = \"a\"\nvfio = { function = \"0000:03:00.0\" }\n\
                     [[device]]\nid = \"b\"\nvfio = { function = \"vfs-of:0000:04:00.0\" }\n\
                     [[device]]\nid = \"c\"\nmodel.dma-test = {}";
        facts.lender = Some(Ok(toml::from_str(lends).unwrap()));
        facts.systemd.lender = unit(Limit::Of(4 << 30));
        let of_lender = |descriptions: &[&str], facts: &mut Facts| {
            let vms = descriptions.iter().map(|text| vm("web", text));
            facts.vms = vms.collect();
            judge(facts).pop().unwrap()
        };
        let none = of_lender(&["memory = \"8G\"\ndevices = [\"c\"]"], &mut facts);
        assert_eq!(none.level, Level::Ok, "{none:?}");
        // Each device counts, of each VM; the model does not.
        let one = "memory = \"2G\"\ndevices = [\"a\", \"c\"]";
        let two = "memory = \"1G\"\nhugepages = \"2M\"\ndevices = [\"b-0\", \"b-1\"]";
        let fits = of_lender(&[one, two], &mut facts);
        assert_eq!(fits.level, Level::Ok, "{fits:?}");
        assert!(
            fits.what.contains("farside-lender.service may lock 4 GiB"),
            "{fits:?}"
        );
        let sum = of_lender(&[one, two, one], &mut facts);
        assert_eq!(sum.level, Level::Problem, "{sum:?}");
        assert!(
            sum.what
                .contains("may lock 4 GiB, and guest RAM to lock is 6 GiB"),
            "{sum:?}"
        );
        assert!(sum.why.contains("all VMs and devices together"), "{sum:?}");
    }
}
