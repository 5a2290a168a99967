//! Version and capability negotiation ("`VFIO_USER_VERSION`").

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::refusal::Refusal;
use super::{
    Command, DMA_PAGE_SIZE, MAX_DATA_XFER_SIZE, MAX_DMA_MAPS, MAX_MSG_FDS, VERSION_MAJOR,
    VERSION_MINOR,
};
use farside_vfio_user_wire::{Cursor, Put};

/// Longest accepted version data, in bytes. QEMU's has about 200; the limit keeps a
/// client from feeding the JSON parser a megabyte.
pub const MAX_VERSION_DATA: usize = 16 << 10;

/// The negotiated version and capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Negotiated {
    /// Minor version; the major is 0.
    pub minor: u16,
    /// Most descriptors that the client accepts with one message. If 0, no mappable
    /// region may be offered.
    pub client_max_msg_fds: u64,
    /// Most bytes of one `DMA_READ` or `DMA_WRITE` that the client serves.
    pub client_max_data_xfer_size: u64,
    /// Whether `REGION_WRITE_MULTI` may be used: the client proposed it.
    pub write_multiple: bool,
}

/// The capabilities in use; others are ignored, so newer clients work.
#[derive(Deserialize)]
#[serde(default)]
struct Proposed {
    max_msg_fds: u64,
    max_data_xfer_size: u64,
    write_multiple: bool,
}

impl Default for Proposed {
    fn default() -> Self {
        Self {
            max_msg_fds: 1,
            max_data_xfer_size: MAX_DATA_XFER_SIZE.into(),
            write_multiple: false,
        }
    }
}

impl Proposed {
    /// Parses through maps: a derived `Deserialize` also accepts arrays as objects.
    fn parse(json: &[u8]) -> Result<Self, serde_json::Error> {
        let mut data: Map<String, Value> = serde_json::from_slice(json)?;
        let Some(capabilities) = data.remove("capabilities") else {
            return Ok(Self::default());
        };
        let capabilities: Map<String, Value> = serde_json::from_value(capabilities)?;
        serde_json::from_value(Value::Object(capabilities))
    }
}

#[derive(Serialize)]
struct Offer {
    capabilities: Offered,
}

#[derive(Serialize)]
struct Offered {
    max_msg_fds: usize,
    max_data_xfer_size: u32,
    max_dma_maps: u32,
    pgsizes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    write_multiple: Option<bool>,
}

impl Negotiated {
    pub(super) fn decode(payload: &[u8]) -> Result<Self, Refusal> {
        let mut cursor = Cursor::new(payload);
        let (Some(major), Some(minor)) = (cursor.u16(), cursor.u16()) else {
            return Err(Refusal::PayloadSize {
                command: Command::Version,
                actual: payload.len(),
                expected: 4,
            });
        };
        if major != VERSION_MAJOR {
            return Err(Refusal::Version { major, minor });
        }
        let data = cursor.rest();
        if data.len() > MAX_VERSION_DATA {
            return Err(Refusal::VersionDataTooLong(data.len()));
        }
        let proposed = match data.split_last() {
            None => Proposed::default(),
            Some((0, json)) => Proposed::parse(json).map_err(Refusal::VersionData)?,
            Some(_) => return Err(Refusal::VersionDataUnterminated),
        };
        Ok(Self {
            minor: minor.min(VERSION_MINOR),
            client_max_msg_fds: proposed.max_msg_fds,
            client_max_data_xfer_size: proposed.max_data_xfer_size,
            write_multiple: proposed.write_multiple,
        })
    }

    /// Appends the reply's payload. It always holds the server's limits, even if the
    /// client sent none: the default of `max_msg_fds` is 1. It holds a feature only if
    /// the client proposed it.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let offer = Offer {
            capabilities: Offered {
                max_msg_fds: MAX_MSG_FDS,
                max_data_xfer_size: MAX_DATA_XFER_SIZE,
                max_dma_maps: MAX_DMA_MAPS,
                pgsizes: DMA_PAGE_SIZE,
                write_multiple: self.write_multiple.then_some(true),
            },
        };
        out.put_u16(VERSION_MAJOR);
        out.put_u16(self.minor);
        serde_json::to_writer(&mut *out, &offer).expect("numbers and booleans go into a Vec");
        out.push(0);
    }
}
