//! `lender.toml`.
//!
//! ```
//! let config: farside_lender::config::Config = toml::from_str(r#"
//!     name = "rack1-a"
//!
//!     [[device]]
//!     id = "disk0"
//!     model.nvme = { image = "/var/lib/farside/disk0.img" }
//!
//!     [[device]]
//!     id = "disk2"
//!     model.virtio-blk = { image = "/var/lib/farside/disk2.img", queues = 4 }
//!
//!     [[device]]
//!     id = "nic0"
//!     model.virtio-net = { tap = "tap0", mac = "52:54:00:12:34:56" }
//!
//!     [[device]]
//!     id = "dma0"
//!     model.dma-test = {}
//!     borrowers = ["user=1000,vm=web1", "host=rack1-b"]
//!
//!     [[device]]
//!     id = "disk1"
//!     vfio = { function = "0000:03:00.0" }
//!
//!     [[device]]
//!     id = "gpio0"
//!     vfio-user = { socket = "/run/gpio/socket" }
//! "#).unwrap();
//! assert_eq!(config.device.len(), 6);
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use farside_daemon::{DeviceId, LenderName};
use farside_devices::{block::EngineChoice, nvme, virtio};
pub use farside_devices::{block::Limits, virtio::net::Mac};
use farside_discovery::Discovery;
use farside_fabric::{NtbLimits, VmShare, deserialize_optional_size};
use farside_host_pci::Filter;
use farside_lender_protocol::{Address, MAX_DEVICES};
use farside_pci::Bdf;
use farside_vfio::Api;
use serde::Deserialize;

pub use crate::{
    access::{Borrower, BorrowerError},
    worker::Program,
};
use crate::{
    registry::DEFAULT_KEEP_AT_MOST,
    volumes::{LockedVolumes, VolumeError, Volumes},
};

/// A lender's devices, listeners and fabric.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The lender's name in messages. Default: the host name.
    #[serde(default = "host_name")]
    pub name: LenderName,
    /// The socket for backends of this host. Default: `lender.sock` in the runtime directory.
    #[serde(default = "farside_daemon::paths::lender_socket")]
    pub socket: PathBuf,
    /// Addresses to listen at for backends of other hosts: `tls:HOST:PORT`, or `tcp:HOST:PORT` without
    /// encryption.
    #[serde(default)]
    pub listen: Vec<Address>,
    /// Also listen without TLS at addresses that are not loopback. Any peer that can reach them
    /// can borrow the devices of [`Borrower::Network`].
    #[serde(default)]
    pub listen_plain: bool,
    /// The address at which other hosts reach this lender, `tls:HOST:PORT`, where it is announced.
    /// Default: the first of `listen` with TLS.
    #[serde(default)]
    pub announce: Option<Address>,
    /// Where the lender is announced; nowhere without.
    #[serde(skip)]
    pub discovery: Option<Discovery>,
    /// TLS. With it, TCP sockets of a service manager use TLS unless `listen` has them as `tcp:`.
    #[serde(default)]
    pub tls: Option<TlsConfig>,
    /// Maximum busy-poll time before a device thread blocks, in microseconds. It is reached only
    /// while the guest is busy. 0 disables polling.
    #[serde(default = "default_poll_us")]
    pub poll_us: u64,
    /// The limits of the NTB adapter that the soft fabric enforces.
    #[serde(default)]
    pub fabric: NtbLimits,
    /// The state file, which records the VMs that moved to another host. Without it the lender
    /// refuses handovers. `farside lend` uses `lender-NAME.json` in the state directory.
    #[serde(default)]
    pub state: Option<PathBuf>,
    /// Longest time for which a device stays reserved for a VM whose connection was cut, seconds. A VM
    /// asks for the time after which it gives up, its `lost-after`.
    #[serde(default = "default_keep_at_most")]
    pub keep_at_most: u64,
    /// Most memory of a worker process, bytes, with what a device's DMA is the first to touch of its
    /// borrower's. It takes a control group that the service manager has delegated.
    #[serde(default, deserialize_with = "deserialize_optional_size")]
    pub worker_memory_max: Option<u64>,
    /// The devices.
    #[serde(default)]
    pub device: Vec<DeviceConfig>,
    /// The directory of [volumes](crate::volumes), which are lent, too. Made if it is missing.
    #[serde(default)]
    pub volumes: Option<PathBuf>,
    /// Virtual functions to create before devices are looked up; removed at the end. Those of an NVMe
    /// controller are set online.
    #[serde(default)]
    pub vfs: Vec<VfsConfig>,
    /// The VFIO API. Default: iommufd if available, else type1.
    #[serde(default)]
    pub vfio_api: Option<Api>,
    /// The program that serves each lease of a software model in a process of its own. Without it,
    /// threads of this process do.
    #[serde(skip)]
    pub worker: Option<Program>,
    /// This host's NTB endpoint. Without it, physical devices are lent only to VMs of this host.
    #[serde(default)]
    pub ntb: Option<NtbConfig>,
}

/// The certificates for TLS.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// The directory with this host's certificates, in the layout of [`farside_pki`]. Default:
    /// [`pki_dir`](farside_daemon::paths::pki_dir).
    #[serde(default)]
    pub directory: Option<PathBuf>,
}

/// One device to lend.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "RawDevice")]
pub struct DeviceConfig {
    /// Cluster-wide id.
    pub id: DeviceId,
    /// The device source.
    pub source: Source,
    /// Who may borrow it, beside the lender's own user and root, and who of these may claim it.
    pub borrowers: Vec<Borrower>,
}

/// A device source.
#[derive(Clone, Debug)]
pub enum Source {
    /// A software model.
    Model(Model),
    /// A function of this host, through Linux VFIO.
    Vfio(VfioConfig),
    /// The device of another vfio-user server of this host.
    VfioUser(VfioUserConfig),
}

impl From<Model> for Source {
    fn from(model: Model) -> Self {
        Self::Model(model)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawDevice {
    id: DeviceId,
    model: Option<Model>,
    vfio: Option<VfioConfig>,
    vfio_user: Option<VfioUserConfig>,
    #[serde(default)]
    borrowers: Vec<Borrower>,
}

impl TryFrom<RawDevice> for DeviceConfig {
    type Error = String;

    fn try_from(raw: RawDevice) -> Result<Self, String> {
        let RawDevice {
            id,
            model,
            vfio,
            vfio_user,
            borrowers,
        } = raw;
        let source = match (model, vfio, vfio_user) {
            (Some(model), None, None) => Source::Model(model),
            (None, Some(vfio), None) => Source::Vfio(vfio),
            (None, None, Some(server)) => Source::VfioUser(server),
            _ => {
                return Err(format!(
                    "device {id:?} must have one source, `model`, `vfio` or `vfio-user`"
                ));
            }
        };
        Ok(Self {
            id,
            source,
            borrowers,
        })
    }
}

/// One or several functions of this host.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct VfioConfig {
    /// Selects by address (`0000:03:00.0`), `vendor=…,device=…`, `class=…`, or
    /// `vfs-of:0000:03:00.0`. If several match, `-0`, `-1` and so on are appended to the device id.
    pub function: Filter,
    /// Take the function even if the host uses it.
    #[serde(default)]
    pub force: bool,
    /// Lend it again even if it cannot be reset: the next VM can read state that the previous one
    /// left in it.
    #[serde(default)]
    pub allow_dirty: bool,
    /// The expansion ROM that guests see: the function's own, none (`false`), or a file.
    #[serde(default)]
    pub rom: RomConfig,
}

/// See [`VfioConfig::rom`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "RawRom")]
pub enum RomConfig {
    /// The function's own, if it has one.
    #[default]
    Own,
    /// None.
    Hidden,
    /// This file.
    File(PathBuf),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "`rom` is true, false or a path")]
enum RawRom {
    Shown(bool),
    File(PathBuf),
}

impl From<RawRom> for RomConfig {
    fn from(raw: RawRom) -> Self {
        match raw {
            RawRom::Shown(true) => Self::Own,
            RawRom::Shown(false) => Self::Hidden,
            RawRom::File(path) => Self::File(path),
        }
    }
}

/// Another vfio-user server of this host.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VfioUserConfig {
    /// Its socket. The server runs before the lender does.
    pub socket: PathBuf,
}

/// Virtual functions to create.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct VfsConfig {
    /// The physical function.
    pub of: Bdf,
    /// Their number.
    pub count: u32,
}

/// An NTB endpoint of this host.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NtbConfig {
    /// Its address.
    pub function: Bdf,
    /// The share of one VM of its tables. Default: whatever is free.
    #[serde(default)]
    pub per_vm: VmShare,
}

/// The software models.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "RawModel")]
pub enum Model {
    /// An NVMe controller backed by an image file or block device.
    Nvme(nvme::Config),
    /// A virtio-blk device backed by an image file or block device.
    VirtioBlk(virtio::Config),
    /// A virtio-net device on a tap interface.
    VirtioNet(virtio::net::Config),
    /// The DMA test device.
    DmaTest(DmaTestConfig),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawModel {
    nvme: Option<nvme::Config>,
    virtio_blk: Option<virtio::Config>,
    virtio_net: Option<virtio::net::Config>,
    dma_test: Option<DmaTestConfig>,
}

impl TryFrom<RawModel> for Model {
    type Error = &'static str;

    fn try_from(raw: RawModel) -> Result<Self, Self::Error> {
        let RawModel {
            nvme,
            virtio_blk,
            virtio_net,
            dma_test,
        } = raw;
        let given = [
            nvme.map(Self::Nvme),
            virtio_blk.map(Self::VirtioBlk),
            virtio_net.map(Self::VirtioNet),
            dma_test.map(Self::DmaTest),
        ];
        let mut given = given.into_iter().flatten();
        match (given.next(), given.next()) {
            (Some(model), None) => Ok(model),
            (None, _) => Err("a model is `nvme`, `virtio-blk`, `virtio-net` or `dma-test`"),
            _ => Err("a device has one model: `nvme`, `virtio-blk`, `virtio-net` or `dma-test`"),
        }
    }
}

impl Model {
    /// An NVMe controller backed by `image`, with defaults otherwise.
    pub fn nvme(image: PathBuf, read_only: bool) -> Self {
        Self::Nvme(nvme::Config {
            read_only,
            ..nvme::Config::new(image)
        })
    }

    /// A virtio-blk device backed by `image`, with defaults otherwise.
    pub fn virtio_blk(image: PathBuf, read_only: bool) -> Self {
        Self::VirtioBlk(virtio::Config {
            read_only,
            ..virtio::Config::new(image)
        })
    }

    /// A virtio-net device on the tap interface `tap`, with defaults otherwise.
    pub fn virtio_net(tap: String) -> Self {
        Self::VirtioNet(virtio::net::Config::new(tap))
    }

    /// The DMA test device.
    pub fn dma_test() -> Self {
        Self::DmaTest(DmaTestConfig {})
    }

    /// Its key in a `[[device]]` table.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Nvme(_) => "nvme",
            Self::VirtioBlk(_) => "virtio-blk",
            Self::VirtioNet(_) => "virtio-net",
            Self::DmaTest(_) => "dma-test",
        }
    }

    /// How its medium is accessed: engine, limits, and whether it is read only.
    pub(crate) fn medium(&self) -> (EngineChoice, Limits, bool) {
        match self {
            Self::Nvme(config) => (config.engine, config.limits, config.read_only),
            Self::VirtioBlk(config) => (config.engine, config.limits, config.read_only),
            Self::VirtioNet(_) => (EngineChoice::Threads, Limits::default(), false),
            Self::DmaTest(_) => (EngineChoice::Threads, Limits::default(), true),
        }
    }
}

/// The DMA test device has no options.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DmaTestConfig {}

/// An invalid configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// The file is not valid.
    #[error("{path} is invalid", path = path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, column and cause.
        source: Box<toml::de::Error>,
    },
    /// Two devices have the same id.
    #[error("device id {id:?} is used twice: give each device its own")]
    Twice {
        /// The id.
        id: DeviceId,
    },
    /// No devices are configured.
    #[error(
        "nothing to lend: name at least one device (`[[device]]` in lender.toml, or --nvme ID=IMAGE), or a directory of volumes (`volumes`, or --volumes)"
    )]
    Empty,
    /// A volume cannot be lent.
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

/// The volumes of a lender that starts. One that is not usable costs other VMs nothing.
#[derive(Debug, Default)]
pub(crate) struct AddedVolumes {
    /// Those among the devices.
    pub(crate) lent: BTreeSet<DeviceId>,
    /// Those that cannot be read.
    pub(crate) unusable: BTreeMap<DeviceId, VolumeError>,
    _unchanged: Option<LockedVolumes>,
}

impl Config {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        toml::from_str(&text).map_err(|source| ConfigError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    /// Adds the devices of the volumes that there are, as many as there may be, which do not change until the result is
    /// dropped.
    pub(crate) fn add_volumes(&mut self) -> Result<AddedVolumes, ConfigError> {
        let Some(directory) = &self.volumes else {
            return Ok(AddedVolumes::default());
        };
        let volumes = Volumes::new(directory.clone())?;
        volumes.make_directory()?;
        let locked = volumes.lock()?;
        locked.set_socket(&self.socket)?;
        let (volumes, unusable) = volumes.list()?;
        let mut added = AddedVolumes {
            unusable: unusable.into_iter().collect(),
            _unchanged: Some(locked),
            ..AddedVolumes::default()
        };
        for volume in volumes {
            let is_taken = self.device.iter().any(|device| device.id == volume.id);
            if is_taken || self.device.len() >= MAX_DEVICES {
                let why = match is_taken {
                    true => "lender.toml has a device of that id",
                    false => "the lender has as many devices as it can lend",
                };
                log::error!("volume {} is not lent: {why}", volume.id);
                continue;
            }
            added.lent.insert(volume.id.clone());
            self.device.push(DeviceConfig {
                id: volume.id,
                source: volume.model.into(),
                borrowers: volume.borrowers,
            });
        }
        Ok(added)
    }

    /// Checks the constraints that the types do not express.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.device.is_empty() && self.volumes.is_none() {
            return Err(ConfigError::Empty);
        }
        for (n, device) in self.device.iter().enumerate() {
            if self.device[..n].iter().any(|other| other.id == device.id) {
                let id = device.id.clone();
                return Err(ConfigError::Twice { id });
            }
        }
        Ok(())
    }
}

impl Default for Config {
    fn default() -> Self {
        toml::from_str("").expect("every key has a default")
    }
}

fn host_name() -> LenderName {
    let name = rustix::system::uname();
    lender_name(name.nodename().to_str().unwrap_or_default())
}

/// The default lender name on the host `nodename`: Linux uses "(none)" until the host name is set,
/// and a fully qualified name may exceed the limit of a lender's name.
fn lender_name(nodename: &str) -> LenderName {
    let label = nodename.split('.').next().unwrap_or_default();
    let usable = [nodename, label, "lender"].into_iter();
    let mut usable = usable.filter_map(|name| name.parse().ok());
    usable.next().expect("the last is a valid name")
}

fn default_keep_at_most() -> u64 {
    DEFAULT_KEEP_AT_MOST.as_secs()
}

/// See [`Config::poll_us`].
pub(crate) const DEFAULT_POLL_US: u64 = 500;

fn default_poll_us() -> u64 {
    DEFAULT_POLL_US
}

#[cfg(test)]
mod tests;
