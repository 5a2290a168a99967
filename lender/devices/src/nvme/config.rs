//! Configuration of an NVMe model.

use std::{fs::File, path::PathBuf};

use serde::{Deserialize, Serialize};

use farside_fabric::{Size, deserialize_optional_size};
use farside_pci::Description;

use super::{
    cmb, pci,
    registers::MAX_VECTORS,
    reservations::{FileError, ReservationFile},
};
use crate::block::{
    EngineChoice, Image, ImageAccess, ImageError, Limits, LimitsError, SERIAL_LEN,
    serial::{is_text, serial_for},
};

/// Bytes of the model number field of Identify (ASCII).
pub const MODEL_LEN: usize = 40;

/// An NVMe model: a controller with one namespace on an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The image file or block device that holds the namespace.
    pub image: PathBuf,
    /// Whether the namespace is write-protected. The image is then opened
    /// read-only and may be shared with other readers.
    #[serde(default)]
    pub read_only: bool,
    /// Bytes of a logical block: 512 or 4096.
    #[serde(default = "default_block_size")]
    pub block_size: u32,
    /// Serial number, 1 to 20 printable ASCII characters. By default derived from the
    /// device id. The namespace's UUID is derived from it, so it must be unique among
    /// the NVMe devices of a VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Model name, 1 to 40 printable ASCII characters.
    #[serde(default = "default_model")]
    pub model: String,
    /// Pairs of I/O queues, 1 to 255. There is one more interrupt vector than
    /// pairs.
    #[serde(default = "default_queues")]
    pub queues: u16,
    /// Bytes of the controller memory buffer, a power of two from 2 MiB to 1 GiB. None by default.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_optional_size"
    )]
    pub cmb: Option<u64>,
    /// A file with the reservations of the namespace, which is created if there is none: controllers whose image and file are
    /// the same share the namespace. None by default: the image is this controller's alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<PathBuf>,
    /// Whether the guest writes its doorbells to memory, which the controller looks at at intervals, instead of by a trap.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mapped_doorbells: bool,
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

fn default_model() -> String {
    "farside NVMe".to_owned()
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
    #[error("queues = {0}: it must be 1 to {max} pairs of I/O queues", max = MAX_VECTORS - 1)]
    Queues(u16),
    /// Invalid text for a field of Identify.
    #[error(
        "{field} = {value:?}: it must be 1 to {max} printable ASCII characters, no space at the ends"
    )]
    Text {
        field: &'static str,
        value: String,
        max: usize,
    },
    /// A limit of the I/O per second is too low.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The size of the controller memory buffer.
    #[error(transparent)]
    Cmb(#[from] cmb::SizeError),
    /// A read-only controller cannot reserve anything.
    #[error(
        "shared and read-only: a controller that shares its namespace writes to it; leave one of the two out"
    )]
    SharedReadOnly,
    /// The file with the reservations cannot be used.
    #[error("cannot use the file of reservations {path}")]
    Reservations { path: PathBuf, source: FileError },
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
            model: default_model(),
            queues: default_queues(),
            cmb: None,
            shared: None,
            mapped_doorbells: false,
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
        if self.shared.is_some() && self.read_only {
            return Err(ConfigError::SharedReadOnly);
        }
        self.cmb.map_or(Ok(()), cmb::check_size)?;
        if let Some(serial) = &self.serial {
            check_text("serial", serial, SERIAL_LEN)?;
        }
        check_text("model", &self.model, MODEL_LEN)
    }

    /// Checks all settings, then opens and locks the image.
    pub fn open_image(&self) -> Result<Image, ConfigError> {
        self.validate()?;
        let access = match (self.read_only, &self.shared) {
            (true, _) => ImageAccess::ReadOnly,
            (false, None) => ImageAccess::ReadWrite,
            (false, Some(_)) => ImageAccess::Shared,
        };
        Ok(Image::open(&self.image, access, self.block_size, "nvme")?)
    }

    /// Opens the file of reservations, if the namespace is shared, for a process of its own.
    ///
    /// # Errors
    /// [`ConfigError::Reservations`].
    pub fn open_reservations(&self) -> Result<Option<File>, ConfigError> {
        let open = |path: &PathBuf| {
            ReservationFile::open(path).map_err(|source| self.reservations_failed(source.into()))
        };
        self.shared.as_ref().map(open).transpose()
    }

    /// Checks the contents of such a `file`, and makes them if it is new, for the device `id`, of
    /// a host that was booted as `boot` says.
    ///
    /// # Errors
    /// [`ConfigError::Reservations`].
    pub fn prepare_reservations(
        &self,
        file: &File,
        id: &str,
        boot: [u8; 16],
    ) -> Result<(), ConfigError> {
        let image = format!("{} {}", self.image.display(), self.block_size);
        let prepared = ReservationFile::prepare(file, id, boot, &image);
        prepared.map_err(|source| self.reservations_failed(source))
    }

    /// Maps a file that was prepared.
    ///
    /// # Errors
    /// [`ConfigError::Reservations`].
    pub fn map_reservations(&self, file: File, id: &str) -> Result<ReservationFile, ConfigError> {
        ReservationFile::map(file, id).map_err(|source| self.reservations_failed(source))
    }

    /// The number of the device `id` in the NVM subsystem, and the UUID of the namespace, of a file that was prepared.
    ///
    /// # Errors
    /// [`ConfigError::Reservations`].
    pub fn reservations_identity(
        &self,
        file: &File,
        id: &str,
    ) -> Result<(u16, [u8; 16]), ConfigError> {
        let identity = ReservationFile::identity(file, id);
        identity.map_err(|source| self.reservations_failed(source))
    }

    /// The process that served the device `id` is gone; its lease may be `over`.
    ///
    /// # Errors
    /// [`ConfigError::Reservations`].
    pub fn leave_reservations(&self, id: &str, over: bool) -> Result<(), ConfigError> {
        let Some(file) = self.open_reservations()? else {
            return Ok(());
        };
        let left = ReservationFile::leave(&file, id, over);
        left.map_err(|source| self.reservations_failed(source))
    }

    pub(super) fn reservations_failed(&self, source: FileError) -> ConfigError {
        let path = self.shared.clone().unwrap_or_default();
        ConfigError::Reservations { path, source }
    }

    /// The function on an image of `size` bytes.
    pub fn description(&self, size: u64) -> Description {
        let summary = format!("{}, {}", self.model, Size(size));
        pci::description(self.vectors(), self.cmb, self.mapped_doorbells, summary)
    }

    pub(super) fn vectors(&self) -> u16 {
        self.queues + 1
    }

    /// The serial number of the device `id`.
    pub(super) fn serial_for(&self, id: &str) -> String {
        serial_for(self.serial.as_deref(), id)
    }
}

fn check_text(field: &'static str, value: &str, max: usize) -> Result<(), ConfigError> {
    match is_text(value, max) {
        true => Ok(()),
        false => Err(ConfigError::Text {
            field,
            value: value.to_owned(),
            max,
        }),
    }
}
