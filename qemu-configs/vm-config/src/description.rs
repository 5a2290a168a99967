//! The VM configuration file.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    time::Duration,
};

use farside_daemon::{
    DeviceId, VmName,
    paths::{self, SocketLayout},
};
use farside_discovery::Discovery;
use farside_fabric::{Size, deserialize_size, parse_size, pin::PinPolicy};
use farside_irq_relay::Interrupts;
use farside_lender_protocol::Address;
use farside_qemu_configs::{Accel, Device, Firmware, HugePages, Machine, MonitorSocket, Vm};
use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};

use crate::{HostConfig, host::own_lender, places};

/// Default guest RAM, in bytes.
const DEFAULT_MEMORY: u64 = 2 << 30;

/// Minimum guest RAM, in bytes: a smaller number was probably meant in another unit.
const MIN_MEMORY: u64 = 1 << 20;

/// A VM that borrows devices. Consumers apply the defaults.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct VmConfig {
    /// The VM's name.
    pub name: Option<VmName>,
    /// The devices it borrows.
    pub devices: Vec<DeviceConfig>,
    /// Addresses of the lenders; default: this host's lender.
    pub lenders: Vec<Address>,
    /// How lenders are found, where the file names none: as the host's [`HostConfig`] says.
    #[serde(skip)]
    pub discovery: Option<Discovery>,
    /// This host's certificates, for lenders at `tls:HOST:PORT`.
    pub tls: TlsConfig,
    /// Whether it uses the NTB endpoint of its host, if the host's [`HostConfig`] names one.
    pub ntb: bool,
    /// How interrupts reach QEMU.
    pub interrupts: Option<Interrupts>,
    /// What to do when the memlock limit is too small.
    pub pin: Option<PinPolicy>,
    /// Time after which a device that is not DMA-ready is reported as late, seconds. QEMU's `x-msg-timeout` is derived
    /// from it if it exceeds what is derived from `memory`.
    pub open_timeout: Option<u64>,
    /// Time for which a device that is borrowed over the network waits for its lender when the
    /// connection is cut, seconds; then the guest is asked to release it.
    pub lost_after: Option<u64>,
    /// Group whose members may connect to the devices' sockets: QEMU's, if it runs as another user.
    pub socket_group: Option<String>,
    /// The names of the devices' sockets.
    pub layout: Option<SocketLayout>,
    /// Guest RAM, bytes; in the file also `"4 GiB"`.
    #[serde(deserialize_with = "memory")]
    pub memory: Option<u64>,
    /// Guest RAM with all that `qemu-args` can plug in (`-m maxmem=…`), bytes; default: `memory`.
    #[serde(deserialize_with = "memory")]
    pub max_memory: Option<u64>,
    /// Number of vCPUs.
    pub cpus: Option<u32>,
    /// Chipset.
    pub machine: Option<Machine>,
    /// What runs the guest's instructions.
    pub accel: Option<Accel>,
    /// Page size of guest RAM.
    pub hugepages: Option<HugePages>,
    /// OVMF instead of SeaBIOS.
    pub ovmf: Option<Flash>,
    /// Id of the device to boot from first.
    pub boot: Option<DeviceId>,
    /// Root ports to leave free for hot plug.
    pub spare_ports: Option<u16>,
    /// The manager of QEMU.
    pub manager: Option<Manager>,
    /// The QEMU binary.
    pub qemu: Option<PathBuf>,
    /// Extra arguments for QEMU: disks, networks, consoles.
    pub qemu_args: Vec<String>,
}

/// The certificates for TLS.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// Their directory; default: [`paths::pki_dir`].
    pub directory: Option<PathBuf>,
}

/// A device of a VM: its id, or a table with more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Cluster-wide id.
    pub id: DeviceId,
    /// Number of its root port (on the i440FX: of its place on the bus), which determines its
    /// address in the guest. Default: its position in the list.
    pub port: Option<u16>,
    /// Which function of the device at that port, 0 to 7: those at one port are one multifunction device.
    pub function: u8,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceTable {
    id: DeviceId,
    port: Option<u16>,
    #[serde(default)]
    function: u8,
}

impl<'de> Deserialize<'de> for DeviceConfig {
    /// Not derived: an untagged enum's errors do not name the key.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DeviceVisitor;

        impl<'de> Visitor<'de> for DeviceVisitor {
            type Value = DeviceConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a device's id, or a table such as { id = \"disk0\", port = 1 }")
            }

            fn visit_str<E: de::Error>(self, id: &str) -> Result<DeviceConfig, E> {
                Ok(id.parse::<DeviceId>().map_err(E::custom)?.into())
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DeviceConfig, A::Error> {
                let DeviceTable { id, port, function } =
                    Deserialize::deserialize(MapAccessDeserializer::new(map))?;
                if function > 0 && port.is_none() {
                    let error = format_args!(
                        "function {function} of which device: give device {id} the `port` of another"
                    );
                    return Err(de::Error::custom(error));
                }
                Ok(DeviceConfig { id, port, function })
            }
        }

        deserializer.deserialize_any(DeviceVisitor)
    }
}

impl From<DeviceId> for DeviceConfig {
    fn from(id: DeviceId) -> Self {
        Self {
            id,
            port: None,
            function: 0,
        }
    }
}

/// OVMF's two flash images.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flash {
    /// The firmware code, read-only.
    pub code: PathBuf,
    /// The VM's own copy of the variables.
    pub vars: PathBuf,
}

/// The manager of a VM's QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Manager {
    /// farside itself (`farside start`), or the user's own scripts.
    #[default]
    Qemu,
    /// libvirt: the VM is the domain of the same name.
    Libvirt,
}

/// The VM configuration cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum LoadError {
    /// The VM has no configuration.
    #[error(
        "VM {vm} has no configuration ({path} is missing): create it, or give another file with --config",
        path = path.display()
    )]
    Unknown { vm: VmName, path: PathBuf },
    /// The file cannot be read.
    #[error("cannot read {path}", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The file is not valid.
    #[error("{path} is invalid", path = path.display())]
    Parse {
        path: PathBuf,
        source: Box<toml::de::Error>,
    },
    /// The file names another VM.
    #[error("{path} describes VM {found}, not {wanted}", path = path.display())]
    OtherVm {
        path: PathBuf,
        found: VmName,
        wanted: VmName,
    },
}

impl VmConfig {
    /// Reads a file. Lenders that it does not name are those that this host [knows](HostConfig).
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let text = std::fs::read_to_string(path).map_err(|source| LoadError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// As [`VmConfig::load`], of a file's `text`; `path` is for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, LoadError> {
        let mut config: Self = toml::from_str(text).map_err(|source| LoadError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        if config.lenders.is_empty() {
            let host = HostConfig::read()?;
            config.discovery = host.discovery();
            config.lenders = host.lenders;
        }
        Ok(config)
    }

    /// Reads the configuration of a VM of this host ([`places::description`]).
    pub fn of_vm(vm: &VmName) -> Result<Self, LoadError> {
        let path = places::description(vm);
        if !path.exists() {
            let vm = vm.to_owned();
            return Err(LoadError::Unknown { vm, path });
        }
        let mut config = Self::load(&path)?;
        match config.name.replace(vm.to_owned()) {
            Some(found) if found != *vm => Err(LoadError::OtherVm {
                path,
                found,
                wanted: vm.to_owned(),
            }),
            _ => Ok(config),
        }
    }

    /// Guest RAM, bytes.
    pub fn memory(&self) -> u64 {
        self.memory.unwrap_or(DEFAULT_MEMORY)
    }

    /// The directory of this host's certificates.
    pub fn pki(&self) -> PathBuf {
        let named = self.tls.directory.clone();
        named.unwrap_or_else(paths::pki_dir)
    }

    /// The lenders that files name, or the one of this host.
    pub fn lenders(&self) -> Vec<Address> {
        match self.lenders.as_slice() {
            [] => own_lender(self.discovery.is_some()),
            some => some.to_vec(),
        }
    }

    /// As [`VmConfig::lenders`], and those that this host finds, which takes some seconds at most.
    pub fn all_lenders(&self) -> Vec<Address> {
        let mut all = self.lenders();
        if let Some(discovery) = &self.discovery {
            let found = discovery.lenders();
            all.extend(found.now);
            all.extend(found.before);
        }
        all
    }

    /// The ids of its devices.
    pub fn device_ids(&self) -> Vec<DeviceId> {
        self.devices
            .iter()
            .map(|device| device.id.clone())
            .collect()
    }

    /// The [`Vm`] with this name, for QEMU's command line.
    pub fn to_vm(&self, name: &VmName) -> Vm {
        let mut vm = Vm::new(name.clone(), self.memory());
        vm.vcpus = self.cpus.unwrap_or(1);
        vm.machine = self.machine.unwrap_or_default();
        vm.accel = self.accel.unwrap_or_default();
        vm.huge_pages = self.hugepages.unwrap_or_default();
        vm.open_timeout = self.open_timeout.map(Duration::from_secs);
        if let Some(Flash { code, vars }) = self.ovmf.clone() {
            vm.firmware = Firmware::Ovmf { code, vars };
        }
        vm.spare_ports = self.spare_ports.unwrap_or(DEFAULT_SPARE_PORTS);
        vm.devices = self
            .devices
            .iter()
            .map(|DeviceConfig { id, port, function }| Device {
                id: id.clone(),
                port: *port,
                function: *function,
                socket: paths::device_socket(name, id),
                bootindex: (self.boot.as_ref() == Some(id)).then_some(0),
            })
            .collect();
        vm.monitor = Some(MonitorSocket::Path(paths::monitor_socket(name)));
        vm.extra_args = self.qemu_args.clone();
        vm
    }
}

/// Default number of spare root ports.
const DEFAULT_SPARE_PORTS: u16 = 2;

fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    check_memory(deserialize_size(deserializer)?)
        .map(Some)
        .map_err(de::Error::custom)
}

/// Reads an amount of guest RAM, as a VM's configuration has it: `4G`, `512 MiB`.
///
/// # Errors
/// Fails if `text` is not a size, or less than a VM needs.
pub fn parse_memory(text: &str) -> Result<u64, String> {
    check_memory(parse_size(text)?)
}

fn check_memory(bytes: u64) -> Result<u64, String> {
    match bytes {
        MIN_MEMORY.. => Ok(bytes),
        _ => Err(format!(
            "{} is too little for a VM: a number without a unit is bytes, so write \"4 GiB\"",
            Size(bytes)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_are_errors() {
        for (text, words) in [
            ("memroy = \"4G\"", "unknown field `memroy`"),
            (
                "devices = [{ id = \"a\", prot = 1 }]",
                "unknown field `prot`, expected one of `id`, `port`, `function`",
            ),
            ("devices = [{ port = 1 }]", "missing field `id`"),
            (
                "devices = [{ id = \"a\", function = 1 }]",
                "give device a the `port` of another",
            ),
            ("devices = [3]", "expected a device's id, or a table"),
        ] {
            let error = toml::from_str::<VmConfig>(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn memory_has_a_unit_or_is_bytes() {
        let memory = |text: &str| toml::from_str::<VmConfig>(&format!("memory = {text}"));
        assert_eq!(memory("\"4 GiB\"").unwrap().memory(), 4 << 30);
        assert_eq!(memory("4294967296").unwrap().memory(), 4 << 30);
        for few in ["1024", "\"1024\""] {
            let error = memory(few).unwrap_err().to_string();
            assert!(error.contains("1 KiB is too little for a VM"), "{error}");
            assert!(error.contains("\"4 GiB\""), "{error}");
        }
    }

    #[test]
    fn the_example_parses() {
        let text = "name = \"web1\"\ndevices = [\"disk0\", { id = \"disk1\", port = 3 }]\n\
                    memory = \"4 GiB\"\ncpus = 2\nmachine = \"pc\"\nhugepages = \"2M\"";
        let config: VmConfig = toml::from_str(text).unwrap();
        assert_eq!(config.memory(), 4 << 30);
        let vm = config.to_vm(&"web1".parse().unwrap());
        assert_eq!(vm.machine, Machine::I440fx);
        assert_eq!(vm.huge_pages, HugePages::Of2MiB);
        let ports: Vec<_> = vm.devices.iter().map(|device| device.port).collect();
        assert_eq!(ports, [None, Some(3)]);
    }

    #[test]
    fn a_description_of_another_vm_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.toml");
        std::fs::write(&path, "name = [").unwrap();
        let error = VmConfig::load(&path).unwrap_err();
        assert!(error.to_string().contains("a.toml"), "{error}");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("line 1"), "{cause}");
        assert!(!error.to_string().contains("line 1"), "{error}");
    }
}
