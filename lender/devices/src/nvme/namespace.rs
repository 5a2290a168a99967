//! The namespace: its size, its identifiers and its medium's capabilities.

use super::{command::NSID_ALL, status::Status};
use crate::block::serial::fnv;

/// The only namespace.
pub const NSID: u32 = 1;

#[derive(Debug)]
pub struct Namespace {
    /// log2 of the bytes of a logical block.
    pub block_shift: u32,
    /// Logical blocks.
    pub blocks: u64,
    pub read_only: bool,
    /// Whether deallocated blocks read as zeroes.
    pub punches_holes: bool,
    pub uuid: [u8; 16],
}

/// Bytes `[offset, offset + len)` of the image, inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub offset: u64,
    pub len: u64,
}

impl Namespace {
    /// Bytes of the image behind `count` blocks from `first`.
    pub fn extent(&self, first: u64, count: u64) -> Result<Extent, Status> {
        match first.checked_add(count) {
            Some(end) if end <= self.blocks => Ok(Extent {
                offset: first << self.block_shift,
                len: count << self.block_shift,
            }),
            _ => Err(Status::LBA_OUT_OF_RANGE),
        }
    }

    /// The whole namespace.
    pub fn whole(&self) -> Extent {
        Extent {
            offset: 0,
            len: self.size(),
        }
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.blocks << self.block_shift
    }

    /// Checks the namespace identifier of a command for one namespace.
    pub fn check_id(&self, nsid: u32) -> Result<(), Status> {
        match nsid {
            NSID => Ok(()),
            _ => Err(Status::INVALID_NAMESPACE),
        }
    }

    /// Checks the identifier of a command that also accepts the broadcast value.
    pub fn check_id_or_all(&self, nsid: u32) -> Result<(), Status> {
        match nsid {
            NSID_ALL => Ok(()),
            _ => self.check_id(nsid),
        }
    }

    pub fn check_writable(&self) -> Result<(), Status> {
        match self.read_only {
            true => Err(Status::WRITE_PROTECTED),
            false => Ok(()),
        }
    }
}

/// The namespace's UUID: derived from the serial number, so that it is the same for each
/// borrow. Version 8 (RFC 9562, 5.8).
pub fn uuid_from(serial: &str) -> [u8; 16] {
    let mut uuid = fnv(serial.as_bytes()).to_be_bytes();
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}
