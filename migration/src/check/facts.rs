//! Facts about a host that a guest depends on.

use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use farside_daemon::{VmName, output_within};
use farside_error_chain::Chain;
use farside_fabric::host_memory::{HostMemory, meminfo_bytes};
use farside_qemu_configs::{Accel, HugePages, QemuBinary};
use farside_vm_config::{Manager, VmConfig};
use farside_vm_control::Monitor;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::disks;
use crate::{
    Configuration, Error, ErrorKind, Result,
    live::GREETING,
    local::{config_of, requirements::qemu_of},
};

/// For QEMU's list of machines.
const ANSWER: Duration = Duration::from_secs(60);

/// Facts about a host, for one VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// The QEMU binary of the VM, or why it cannot be used. `None` if libvirt chooses it.
    pub qemu: Option<std::result::Result<Qemu, String>>,
    /// The accelerator.
    pub accelerator: Accelerator,
    /// The CPU's model name.
    pub cpu: String,
    /// The CPU's feature flags, from /proc/cpuinfo.
    pub flags: BTreeSet<String>,
    /// Memory for guest RAM.
    pub memory: Memory,
    /// The files of the VM's own disks; none if it does not run.
    pub disks: Option<Vec<Disk>>,
    /// QEMU's migration blockers, without those of borrowed devices.
    pub blockers: Vec<String>,
}

/// A QEMU binary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Qemu {
    /// Its path.
    pub binary: PathBuf,
    /// Major and minor number of its version.
    pub version: (u64, u64),
    /// The VM's versioned machine type: `pc-q35-10.1`.
    pub machine: String,
    /// All machine types that it has.
    pub machines: BTreeSet<String>,
}

/// An accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accelerator {
    /// KVM.
    Kvm,
    /// Emulation by QEMU.
    Tcg,
    /// KVM is required, and not usable.
    Missing,
}

/// Memory for guest RAM, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Size of the VM's huge pages, if it uses them.
    pub huge_page: Option<u64>,
    /// Free memory: of those huge pages, or MemAvailable.
    pub free: u64,
}

/// The file of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Its path.
    pub path: PathBuf,
    /// Its length, bytes.
    pub len: u64,
}

/// Collects the facts. If the VM `runs`, its QEMU is queried.
pub(crate) fn look(vm: &VmName, configuration: &Configuration, runs: bool) -> Result<Facts> {
    let config = config_of(vm, configuration)?;
    let ours = config.manager != Some(Manager::Libvirt);
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let line = |name: &str| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let found = lines.find(|(key, _)| key.trim() == name);
        found.map_or("", |(_, value)| value.trim())
    };
    let mut facts = Facts {
        qemu: ours.then(|| qemu(&config).map_err(|error| error.message)),
        accelerator: accelerator(config.accel.unwrap_or_default()),
        cpu: line("model name").to_owned(),
        flags: line("flags").split(' ').map(str::to_owned).collect(),
        memory: memory(config.hugepages.unwrap_or_default())?,
        disks: None,
        blockers: Vec::new(),
    };
    if runs && ours {
        ask_running(vm, &mut facts)?;
    }
    Ok(facts)
}

/// Replaces the properties of a new QEMU by those of the running one.
fn ask_running(vm: &VmName, facts: &mut Facts) -> Result<()> {
    let mut monitor = Monitor::connect(vm, Manager::Qemu, GREETING)?;
    let mut ask = |command: &str, arguments: Value| monitor.run(command, arguments);
    let kvm = ask("query-kvm", json!({}))?;
    facts.accelerator = match kvm["enabled"] == true {
        true => Accelerator::Kvm,
        false => Accelerator::Tcg,
    };
    let version = ask("query-version", json!({}))?;
    let number = |name: &str| version["qemu"][name].as_u64();
    let machine = ask("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    if let (Some(Ok(qemu)), Some(major), Some(minor), Some(machine)) = (
        &mut facts.qemu,
        number("major"),
        number("minor"),
        machine.as_str(),
    ) {
        qemu.version = (major, minor);
        qemu.machine = machine.trim_end_matches("-machine").to_owned();
    }
    let migration = ask("query-migrate", json!({}))?;
    let reasons = migration["blocked-reasons"].as_array();
    // Borrowed devices are unplugged before the transfer.
    let ours = |reason: &str| reason.contains("vfio-user:") || reason.contains("VFIO");
    let reasons = reasons.into_iter().flatten().filter_map(Value::as_str);
    facts.blockers = reasons
        .filter(|reason| !ours(reason))
        .map(str::to_owned)
        .collect();
    facts.disks = Some(disks::of(&ask("query-named-block-nodes", json!({}))?));
    Ok(())
}

fn qemu(config: &VmConfig) -> Result<Qemu> {
    let program = qemu_of(config);
    let probed =
        QemuBinary::probe(&program).map_err(|error| Error::refused(Chain(&error).to_string()))?;
    let help = machine_help(&program)?;
    let wanted = machine_of(config);
    let mut machines = BTreeSet::new();
    let mut machine = wanted.clone();
    for line in help.lines() {
        let Some((name, about)) = line.split_once(' ') else {
            continue;
        };
        if name == wanted
            && let Some((_, alias)) = about.split_once("(alias of ")
        {
            machine = alias.trim_end_matches(')').to_owned();
        }
        machines.insert(name.to_owned());
    }
    let version = probed.version();
    Ok(Qemu {
        binary: program,
        version: (version.major.into(), version.minor.into()),
        machine,
        machines,
    })
}

/// The machine type of QEMU's last such argument, or of the configuration.
fn machine_of(config: &VmConfig) -> String {
    let args = config.qemu_args.iter().zip(config.qemu_args.iter().skip(1));
    let mut named = args
        .filter(|(name, _)| matches!(name.as_str(), "-machine" | "-M" | "--machine"))
        .filter_map(|(_, value)| {
            let first = value.split(',').next()?;
            match first.split_once('=') {
                None => Some(first),
                Some(("type", value)) => Some(value),
                Some(_) => None,
            }
        });
    let ours = config.machine.unwrap_or_default().name();
    named.next_back().unwrap_or(ours).to_owned()
}

fn machine_help(program: &Path) -> Result<String> {
    let mut command = Command::new(program);
    let asked = output_within(command.args(["-machine", "help"]), ANSWER).map_err(|error| {
        Error::new(
            ErrorKind::Host,
            format!("{} -machine help: {}", program.display(), Chain(&error)),
        )
    })?;
    match asked.status.success() {
        true => Ok(String::from_utf8_lossy(&asked.stdout).into_owned()),
        false => Err(Error::new(
            ErrorKind::Host,
            format!("{} -machine help: {}", program.display(), asked.status),
        )),
    }
}

fn accelerator(wanted: Accel) -> Accelerator {
    let usable = || {
        let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm");
        kvm.is_ok()
    };
    match wanted {
        Accel::Tcg => Accelerator::Tcg,
        Accel::Kvm | Accel::Auto if usable() => Accelerator::Kvm,
        Accel::Kvm => Accelerator::Missing,
        Accel::Auto => Accelerator::Tcg,
    }
}

fn memory(pages: HugePages) -> Result<Memory> {
    let huge_page = (pages != HugePages::None).then(|| pages.granule());
    let free = match huge_page {
        Some(page) => {
            let host = HostMemory::read();
            let pool = host.pools().get(&page);
            pool.map_or(0, |pool| pool.free.saturating_mul(page))
        }
        None => {
            let meminfo = fs::read_to_string("/proc/meminfo")?;
            meminfo_bytes(&meminfo, "MemAvailable").unwrap_or(0)
        }
    };
    Ok(Memory { huge_page, free })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_that_of_the_last_argument() {
        let config = |text: &str| -> VmConfig { toml::from_str(text).unwrap() };
        assert_eq!(machine_of(&config("")), "q35");
        assert_eq!(machine_of(&config("machine = \"pc\"")), "pc");
        let pinned = r#"qemu-args = ["-M", "pc", "-machine", "type=pc-q35-10.1,hpet=off", "-machine", "vmport=off"]"#;
        assert_eq!(machine_of(&config(pinned)), "pc-q35-10.1");
    }

    #[test]
    fn this_host_has_memory() {
        let memory = memory(HugePages::None).unwrap();
        assert!(memory.free > 1 << 20, "{memory:?}");
    }
}
