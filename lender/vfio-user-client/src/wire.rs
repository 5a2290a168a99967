//! Headers and integers ("Header", "Commands"). All data is in the host's byte order.

use std::fmt;

/// Bytes of a header.
pub(crate) const HEADER: usize = 16;

const TYPE_MASK: u32 = 0xf;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// A command that a client sends or serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Negotiates version and capabilities.
    Version = 1,
    /// Maps client memory.
    DmaMap = 2,
    /// Unmaps client memory.
    DmaUnmap = 3,
    /// Queries the number of regions and interrupt types.
    DeviceGetInfo = 4,
    /// Queries a region.
    DeviceGetRegionInfo = 5,
    /// Queries an interrupt type.
    DeviceGetIrqInfo = 7,
    /// Sets up, masks or triggers interrupts.
    DeviceSetIrqs = 8,
    /// Reads from a region.
    RegionRead = 9,
    /// Writes to a region.
    RegionWrite = 10,
    /// The server reads client memory.
    DmaRead = 11,
    /// The server writes client memory.
    DmaWrite = 12,
    /// Resets the device.
    DeviceReset = 13,
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "VERSION",
            Self::DmaMap => "DMA_MAP",
            Self::DmaUnmap => "DMA_UNMAP",
            Self::DeviceGetInfo => "DEVICE_GET_INFO",
            Self::DeviceGetRegionInfo => "DEVICE_GET_REGION_INFO",
            Self::DeviceGetIrqInfo => "DEVICE_GET_IRQ_INFO",
            Self::DeviceSetIrqs => "DEVICE_SET_IRQS",
            Self::RegionRead => "REGION_READ",
            Self::RegionWrite => "REGION_WRITE",
            Self::DmaRead => "DMA_READ",
            Self::DmaWrite => "DMA_WRITE",
            Self::DeviceReset => "DEVICE_RESET",
        })
    }
}

/// A received header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) id: u16,
    pub(crate) command: u16,
    /// Bytes of the message with its header.
    pub(crate) size: u32,
    flags: u32,
    error: u32,
}

impl Header {
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Self {
        let u16_at = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Self {
            id: u16_at(0),
            command: u16_at(2),
            size: u32_at(4),
            flags: u32_at(8),
            error: u32_at(12),
        }
    }

    pub(crate) fn is_reply(&self) -> bool {
        self.flags & TYPE_MASK == TYPE_REPLY
    }

    /// Whether the sender of a command waits for a reply.
    pub(crate) fn wants_reply(&self) -> bool {
        self.flags & NO_REPLY == 0
    }

    /// The errno of an error reply.
    pub(crate) fn errno(&self) -> Option<u32> {
        (self.flags & ERROR != 0).then_some(self.error)
    }
}

/// A message to send.
#[derive(Debug)]
pub(crate) struct Message(Vec<u8>);

impl Message {
    pub(crate) fn command(command: Command, id: u16) -> Self {
        Self::new(id, command as u16, 0, 0)
    }

    /// The reply to a command of the server, or an error reply.
    pub(crate) fn reply(to: &Header, errno: Option<u32>) -> Self {
        let error = errno.map_or(0, |_| ERROR);
        Self::new(to.id, to.command, TYPE_REPLY | error, errno.unwrap_or(0))
    }

    fn new(id: u16, command: u16, flags: u32, errno: u32) -> Self {
        let message = Self(Vec::with_capacity(64));
        message
            .u16(id)
            .u16(command)
            .u32(HEADER as u32)
            .u32(flags)
            .u32(errno)
    }

    pub(crate) fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// The bytes of the message, of a length that its header states.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        // Far below 4 GiB: the data is limited.
        let size = self.0.len() as u32;
        self.0[4..8].copy_from_slice(&size.to_ne_bytes());
        self.0
    }
}

/// Decodes integers from the front of a payload; `None` at its end.
pub(crate) struct Cursor<'a>(pub(crate) &'a [u8]);

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}
