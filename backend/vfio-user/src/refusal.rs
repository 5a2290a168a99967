//! Refused messages: the reason, the errno for the client, and the connection's fate.

use rustix::io::Errno;

use super::{Command, MAX_DATA_XFER_SIZE, MAX_MESSAGE_SIZE, MAX_MSG_FDS};

/// A message that violates the protocol or requests an unsupported function.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the variants and fields")]
pub enum Refusal {
    #[error("message size {0} is shorter than the 16-byte header")]
    ShorterThanHeader(u32),
    #[error("message size {0} is above the limit of {MAX_MESSAGE_SIZE} bytes")]
    TooLarge(u32),
    #[error("message type {0} is neither command nor reply")]
    UnknownType(u8),
    #[error("reply with id {id} matches no outstanding command")]
    UnsolicitedReply { id: u16 },
    #[error("unknown command {0}")]
    UnknownCommand(u16),
    #[error("{0} is not supported")]
    Unsupported(Command),
    #[error("{0} before the version was negotiated")]
    NotNegotiated(Command),
    #[error("VERSION after the version was negotiated")]
    AlreadyNegotiated,
    #[error("protocol version {major}.{minor} is not supported; this server supports 0.1")]
    Version { major: u16, minor: u16 },
    #[error("version data does not end in NUL")]
    VersionDataUnterminated,
    #[error("version data has {0} bytes; the limit is {limit}", limit = super::version::MAX_VERSION_DATA)]
    VersionDataTooLong(usize),
    #[error("malformed version data")]
    VersionData(#[source] serde_json::Error),
    #[error("{command} has a payload of {actual} bytes; expected {expected}")]
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
        "{0} has more than {MAX_MSG_FDS} file descriptors, or this process has reached its limit of open files"
    )]
    TooManyFds(Command),
    #[error("invalid flags {flags:#x} of {command}")]
    Flags { command: Command, flags: u32 },
    #[error("flags {flags:#x} of {command} are not supported")]
    UnsupportedFlags { command: Command, flags: u32 },
    #[error("DMA range of {size:#x} bytes at {address:#x} is empty, unaligned or wraps")]
    DmaRange { address: u64, size: u64 },
    #[error("file offset {offset:#x} of a DMA range of {size:#x} bytes is unaligned or wraps")]
    DmaOffset { offset: u64, size: u64 },
    #[error("invalid region index {0}")]
    Region(u32),
    #[error("region access of {count} bytes at {offset:#x} wraps")]
    RegionRange { offset: u64, count: u32 },
    #[error("region access of {0} bytes is above the limit of {MAX_DATA_XFER_SIZE}")]
    TransferTooLarge(u32),
    #[error("write of {0} bytes in REGION_WRITE_MULTI is above the limit of 8")]
    MultiWriteTooLarge(u32),
    #[error("invalid interrupt index {0}")]
    IrqIndex(u32),
}

/// What to do after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Send the errno, unless the command has the no-reply flag.
    Reply,
    /// Send the errno, unless the command has the no-reply flag, and close the
    /// connection.
    ReplyThenClose,
    /// Send nothing.
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

    /// The connection's fate.
    pub fn fate(&self) -> Fate {
        match self {
            Self::ShorterThanHeader(_) | Self::Version { .. } => Fate::ReplyThenClose,
            Self::UnsolicitedReply { .. } => Fate::Ignore,
            _ => Fate::Reply,
        }
    }
}
