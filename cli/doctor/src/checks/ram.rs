//! Guest RAM, compared with the host's free memory.

use farside_fabric::{Size, host_memory::Pages};
use farside_qemu_configs::HugePages;

use crate::{Facts, Finding, finding::edit};

const CHECK: &str = "ram";
const WHY: &str = "the kernel lets it start, and kills a process once the guest uses its RAM: \
                   `farside start` refuses it";

/// Huge pages have a separate check.
pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let vms = facts.good_vms().filter(|(vm, config)| {
        !vm.running && config.hugepages.unwrap_or_default() == HugePages::None
    });
    vms.map(|(vm, config)| {
        let ram = config.memory();
        let finding = match facts.memory.host.room_for(ram, Pages::Base) {
            Ok(()) => Finding::ok(
                CHECK,
                format!("this host has room for {} of RAM", Size(ram)),
            ),
            Err(error) => Finding::problem(CHECK, error.to_string(), WHY).fix(edit(&vm.path)),
        };
        finding.of_vm(&vm.name)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use farside_fabric::host_memory::HostMemory;

    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
    };

    #[test]
    fn both_ways() {
        let of = |description| {
            let mut facts = host_of(description);
            facts.memory.host = HostMemory::read_with(|path| {
                let text = "MemTotal: 25165824 kB\nMemAvailable: 20971520 kB\nSwapFree: 0 kB\n";
                (path == "proc/meminfo").then(|| text.to_owned())
            });
            facts
        };
        let mut large = of("memory = \"30 GiB\"");
        let said = says(
            judge(&large),
            Level::Problem,
            "30720 MiB of guest RAM do not fit",
        );
        assert_eq!(said.fix, ["${EDITOR:-vi} /etc/farside/vm/web1.toml"]);
        says(
            judge(&of("memory = \"16 GiB\"")),
            Level::Ok,
            "room for 16 GiB",
        );
        // It has its RAM already.
        large.vms[0].running = true;
        assert_eq!(judge(&large), []);
        assert_eq!(judge(&of("memory = \"30 GiB\"\nhugepages = \"1G\"")), []);
    }
}
