//! How many files may be open: each interrupt vector of each device is one.

use crate::{Facts, Finding, finding::quoted};

const CHECK: &str = "open-files";

/// Descriptors of a process, apart from vectors.
const BASE: u64 = 256;
/// Most MSI-X vectors of a function (PCIe 6.0, 7.7.2), and its other interrupts.
const PER_DEVICE: u64 = 2048 + 64;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    // The units set their own limit.
    if facts.by_units() || facts.vms.is_empty() {
        return Vec::new();
    }
    let Some(limit) = facts.memory.open_files else {
        return vec![Finding::ok(CHECK, "no limit")];
    };
    let devices = facts.good_vms().map(|(_, config)| config.devices.len());
    let devices = devices.max().unwrap_or(0) as u64;
    let needed = BASE + devices * PER_DEVICE;
    if limit >= needed {
        return vec![Finding::ok(CHECK, format!("{limit}: enough"))];
    }
    let what =
        format!("a process may have {limit} files open; {devices} devices may take {needed}");
    let why = "each interrupt vector of a device is an open file: with too few, a guest's driver fails to start";
    // Few devices have that many vectors.
    let line = format!("{} - nofile {}", facts.users.me.name, needed.max(65536));
    vec![
        Finding::problem_if(limit < BASE, CHECK, what, why).fix(format!(
            "echo {} > /etc/security/limits.d/farside-files.conf   # as root; then log in anew",
            quoted(&line)
        )),
    ]
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
        let mut facts = host_of("devices = [\"a\", \"b\"]");
        says(judge(&facts), Level::Ok, "no limit");
        facts.memory.open_files = Some(1024);
        says(judge(&facts), Level::Note, "1024 files");
        facts.memory.open_files = Some(64);
        says(judge(&facts), Level::Problem, "64 files");
        facts.memory.open_files = Some(20_000);
        says(judge(&facts), Level::Ok, "enough");
        facts.vms.clear();
        assert_eq!(judge(&facts), []);
    }
}
