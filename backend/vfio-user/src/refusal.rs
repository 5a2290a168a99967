//! Why a message is not served, what the client is told, and what becomes of
//! the connection.

use rustix::io::Errno;

use super::{Command, MAX_DATA_XFER_SIZE, MAX_MESSAGE_SIZE, MAX_MSG_FDS};

/// A message that breaks the rules, or asks for what is not served.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it; the fields are in them")]
pub enum Refusal {
    #[error("message size {0} is shorter than the 16-byte header")]
    ShorterThanHeader(u32),
    #[error("message size {0} is above the limit of {MAX_MESSAGE_SIZE} bytes")]
    TooLarge(u32),
    #[error("message type {0} is neither command nor reply")]
    UnknownType(u8),
    #[error("a reply with id {id} to a command that was never sent")]
    UnsolicitedReply { id: u16 },
    #[error("unknown command {0}")]
    UnknownCommand(u16),
    #[error("{0} is not supported")]
    Unsupported(Command),
    #[error("{0} before the version was negotiated")]
    NotNegotiated(Command),
    #[error("VERSION after the version was negotiated")]
    AlreadyNegotiated,
    #[error("protocol version {major}.{minor} is not supported; this server speaks 0.1")]
    Version { major: u16, minor: u16 },
    #[error("version data does not end in NUL")]
    VersionDataUnterminated,
    #[error("version data has {0} bytes; the limit is {limit}", limit = super::version::MAX_VERSION_DATA)]
    VersionDataTooLong(usize),
    #[error("version data is not understood")]
    VersionData(#[source] serde_json::Error),
    #[error("{command} has a payload of {actual} bytes where {expected} are expected")]
    PayloadSize {
        command: Command,
        actual: usize,
        expected: usize,
    },
    #[error("argsz {argsz} of {command} is below {needed}")]
    Argsz {
        command: Command,
        argsz: u32,
        needed: u32,
    },
    #[error(
        "{0} came with more than {MAX_MSG_FDS} file descriptors, or this process is out of them"
    )]
    TooManyFds(Command),
    #[error("flags {flags:#x} of {command} are not valid")]
    Flags { command: Command, flags: u32 },
    #[error("flags {flags:#x} of {command} ask for what is not supported")]
    UnsupportedFlags { command: Command, flags: u32 },
    #[error("DMA range of {size:#x} bytes at {address:#x} is empty, unaligned or wraps")]
    DmaRange { address: u64, size: u64 },
    #[error("file offset {offset:#x} of a DMA range of {size:#x} bytes is unaligned or wraps")]
    DmaOffset { offset: u64, size: u64 },
    #[error("there is no region {0}")]
    Region(u32),
    #[error("region access of {count} bytes at {offset:#x} wraps")]
    RegionRange { offset: u64, count: u32 },
    #[error("region access of {0} bytes is above the limit of {MAX_DATA_XFER_SIZE}")]
    TransferTooLarge(u32),
    #[error("a write of {0} bytes in REGION_WRITE_MULTI; the format holds 8")]
    MultiWriteTooLarge(u32),
    #[error("there is no interrupt type {0}")]
    IrqIndex(u32),
}

/// What to do after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Send the errno, unless no reply is wanted; the stream is still framed.
    Reply,
    /// Send the errno, unless no reply is wanted, and close the connection.
    ReplyThenClose,
    /// Send nothing and go on.
    Ignore,
}

impl Refusal {
    /// The error number for the reply.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Unsupported(_) | Self::UnsupportedFlags { .. } => Errno::NOTSUP,
            Self::TooLarge(_) | Self::TransferTooLarge(_) | Self::VersionDataTooLong(_) => {
                Errno::TOOBIG
            }
            _ => Errno::INVAL,
        }
    }

    /// What becomes of the connection.
    pub fn fate(&self) -> Fate {
        match self {
            Self::ShorterThanHeader(_) | Self::Version { .. } => Fate::ReplyThenClose,
            Self::UnsolicitedReply { .. } => Fate::Ignore,
            _ => Fate::Reply,
        }
    }
}
