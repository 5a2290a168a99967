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
//!     id = "dma0"
//!     model.dma-test = {}
//! "#).unwrap();
//! assert_eq!(config.device.len(), 2);
//! ```

use std::path::{Path, PathBuf};

use farside_control::{Address, NAME_RULE, check_name};
use farside_devices::nvme;
use farside_fabric::NtbLimits;
use serde::Deserialize;

/// What a lender lends, and through what.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The lender's name in messages. Default: the host name.
    #[serde(default = "host_name")]
    pub name: String,
    /// Where backends of this host connect. Default: `lender.sock` in the runtime folder.
    #[serde(default = "farside_control::paths::lender_socket")]
    pub socket: PathBuf,
    /// Where backends of other hosts connect: `tcp:HOST:PORT`.
    #[serde(default)]
    pub listen: Vec<Address>,
    /// Listen at addresses, too, that are neither the host's own nor private.
    /// Whoever reaches them can borrow every device.
    #[serde(default)]
    pub listen_plain: bool,
    /// How long at most a device's thread looks for work before it sleeps,
    /// microseconds; a guest that is not busy is not looked after that long.
    /// Zero always sleeps at once.
    #[serde(default = "default_poll_us")]
    pub poll_us: u64,
    /// The limits of the NTB adapter that the soft fabric enforces.
    #[serde(default)]
    pub fabric: NtbLimits,
    /// The devices.
    #[serde(default)]
    pub device: Vec<DeviceConfig>,
}

/// One device to lend.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeviceConfig {
    /// Cluster-wide id: letters, digits, `-`, `_` and `.`.
    pub id: String,
    /// A software model as the source of the device.
    pub model: Model,
}

/// The software models.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Model {
    /// An NVMe drive on an image file or block device.
    Nvme(nvme::Config),
    /// The DMA test device.
    DmaTest(DmaTestConfig),
}

impl Model {
    /// An NVMe drive on `image`, all else as by default.
    pub fn nvme(image: PathBuf) -> Self {
        Self::Nvme(nvme::Config::new(image))
    }

    /// The DMA test device.
    pub fn dma_test() -> Self {
        Self::DmaTest(DmaTestConfig {})
    }
}

/// The DMA test device has nothing to configure.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DmaTestConfig {}

/// Why a configuration is no good.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What reading said.
        source: std::io::Error,
    },
    /// The file is not valid.
    #[error("{path}: {source}", path = path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, column and cause.
        source: Box<toml::de::Error>,
    },
    /// A device id cannot be used.
    #[error("device id {id:?} {why}; {NAME_RULE}")]
    Id {
        /// The id.
        id: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Nothing to lend.
    #[error(
        "nothing to lend: name at least one device (`[[device]]` in lender.toml, or --nvme ID=IMAGE)"
    )]
    Empty,
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

    /// Checks what the types cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.device.is_empty() {
            return Err(ConfigError::Empty);
        }
        for (n, device) in self.device.iter().enumerate() {
            let wrong = |why| {
                Err(ConfigError::Id {
                    id: device.id.clone(),
                    why,
                })
            };
            if let Err(why) = check_name(&device.id) {
                return wrong(why);
            }
            if self.device[..n].iter().any(|other| other.id == device.id) {
                return wrong("is used twice");
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

fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

fn default_poll_us() -> u64 {
    250
}
