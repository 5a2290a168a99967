//! Configuration of a virtio-blk model.

use std::path::PathBuf;

use farside_fabric::Size;
use farside_pci::Description;
use serde::{Deserialize, Serialize};

use super::KIND;
use crate::{
    block::{
        EngineChoice, Image, ImageAccess, ImageError, Limits, LimitsError, SERIAL_LEN,
        serial::{is_text, serial_for},
    },
    virtio::pci::{self, MAX_VECTORS},
};

/// A virtio-blk model: a disk on an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The image file or block device.
    pub image: PathBuf,
    /// Whether the disk is write-protected. The image is then opened read-only and may be shared with
    /// other readers.
    #[serde(default)]
    pub read_only: bool,
    /// Bytes of a logical block: 512 or 4096.
    #[serde(default = "default_block_size")]
    pub block_size: u32,
    /// Serial number, 1 to 20 printable ASCII characters. By default derived from the device id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Request queues, 1 to 255. There is one more interrupt vector than queues.
    #[serde(default = "default_queues")]
    pub queues: u16,
    /// The I/O engine.
    #[serde(default)]
    pub engine: EngineChoice,
    /// Most I/O per second.
    #[serde(default, skip_serializing_if = "Limits::is_none")]
    pub limits: Limits,
}

fn default_block_size() -> u32 {
    512
}

fn default_queues() -> u16 {
    64
}

/// Why a model cannot be created.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum ConfigError {
    /// Unsupported block size.
    #[error("block-size = {0}: it must be 512 or 4096 bytes")]
    BlockSize(u32),
    /// The number of queues is out of range.
    #[error("queues = {0}: it must be 1 to {max} request queues", max = MAX_VECTORS - 1)]
    Queues(u16),
    /// An invalid serial number.
    #[error(
        "serial = {0:?}: it must be 1 to {SERIAL_LEN} printable ASCII characters, no space at the ends"
    )]
    Serial(String),
    /// A limit of the I/O per second is too low.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The image cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// No engine could be started.
    #[error("cannot start I/O on image {image}")]
    Engine {
        image: PathBuf,
        source: std::io::Error,
    },
}

impl Config {
    /// A configuration with the defaults for all but the image.
    pub fn new(image: impl Into<PathBuf>) -> Self {
        Self {
            image: image.into(),
            read_only: false,
            block_size: default_block_size(),
            serial: None,
            queues: default_queues(),
            engine: EngineChoice::default(),
            limits: Limits::default(),
        }
    }

    /// Checks all settings except the image.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !matches!(self.block_size, 512 | 4096) {
            return Err(ConfigError::BlockSize(self.block_size));
        }
        if !(1..MAX_VECTORS).contains(&self.queues) {
            return Err(ConfigError::Queues(self.queues));
        }
        self.limits.validate()?;
        match &self.serial {
            Some(serial) if !is_text(serial, SERIAL_LEN) => {
                Err(ConfigError::Serial(serial.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Checks all settings, then opens and locks the image.
    pub fn open_image(&self) -> Result<Image, ConfigError> {
        self.validate()?;
        let access = match self.read_only {
            true => ImageAccess::ReadOnly,
            false => ImageAccess::ReadWrite,
        };
        let image = Image::open(&self.image, access, self.block_size, "virtio-blk");
        Ok(image?)
    }

    /// The function on an image of `size` bytes.
    pub fn description(&self, size: u64) -> Description {
        pci::description(KIND, self.queues, Size(size))
    }

    /// The serial number of the device `id`.
    pub(super) fn serial_for(&self, id: &str) -> String {
        serial_for(self.serial.as_deref(), id)
    }
}
