//! `VFIO_DEVICE_SET_IRQS` as a value that is right by construction.

use std::{io, os::fd::OwnedFd};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::{IrqCounts, IrqEventFd, IrqIndex, IrqRange, IrqTarget};

/// Flag bits of `linux/vfio.h`.
pub mod wire {
    /// `VFIO_IRQ_INFO_EVENTFD`: the index can signal eventfds.
    pub const INFO_EVENTFD: u32 = 1 << 0;
    /// `VFIO_IRQ_INFO_MASKABLE`: vectors can be masked and unmasked.
    pub const INFO_MASKABLE: u32 = 1 << 1;
    /// `VFIO_IRQ_INFO_AUTOMASKED`: a vector is masked whenever it fires.
    pub const INFO_AUTOMASKED: u32 = 1 << 2;
    /// `VFIO_IRQ_INFO_NORESIZE`: vectors come and go all at once.
    pub const INFO_NORESIZE: u32 = 1 << 3;

    /// `VFIO_IRQ_SET_DATA_NONE`: all vectors of the range.
    pub const SET_DATA_NONE: u32 = 1 << 0;
    /// `VFIO_IRQ_SET_DATA_BOOL`: one byte a vector chooses.
    pub const SET_DATA_BOOL: u32 = 1 << 1;
    /// `VFIO_IRQ_SET_DATA_EVENTFD`: one descriptor a vector.
    pub const SET_DATA_EVENTFD: u32 = 1 << 2;
    /// `VFIO_IRQ_SET_ACTION_MASK`.
    pub const SET_ACTION_MASK: u32 = 1 << 3;
    /// `VFIO_IRQ_SET_ACTION_UNMASK`.
    pub const SET_ACTION_UNMASK: u32 = 1 << 4;
    /// `VFIO_IRQ_SET_ACTION_TRIGGER`.
    pub const SET_ACTION_TRIGGER: u32 = 1 << 5;
}

/// What to do with the vectors of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Mask the vectors.
    Mask,
    /// Unmask them, and signal those pending.
    Unmask,
    /// Set their IRQ targets, or signal them.
    Trigger,
}

/// The vectors of a request's range that are meant, or their IRQ targets.
#[derive(Clone, Debug)]
pub enum IrqData {
    /// All of them. With [`Action::Trigger`] and an empty range: disable the
    /// index.
    None,
    /// Those that are true; one entry a vector.
    Bool(Vec<bool>),
    /// Where each of them goes, or `None` for nowhere; one entry a vector.
    Targets(Vec<Option<IrqTarget>>),
}

/// A `SET_IRQS` message as it came: nothing but its framing has been checked.
#[derive(Debug)]
pub struct SetIrqsMessage<'a> {
    /// `VFIO_IRQ_SET_*`.
    pub flags: u32,
    /// Number of the [`IrqIndex`].
    pub index: u32,
    /// First vector.
    pub start: u32,
    /// Number of vectors.
    pub count: u32,
    /// What follows these fields.
    pub data: &'a [u8],
    /// Descriptors that came with the message.
    pub fds: Vec<OwnedFd>,
}

/// A request that is valid for the function it was checked against.
#[derive(Clone, Debug)]
pub struct SetIrqs {
    range: IrqRange,
    action: Action,
    data: IrqData,
}

impl SetIrqs {
    /// Checks that `action` and `data` fit the range.
    pub fn new(range: IrqRange, action: Action, data: IrqData) -> Result<Self, SetIrqsError> {
        let index = range.index();
        // vfio-user, "VFIO_USER_DEVICE_SET_IRQS": start and count of 0 with no
        // data disable the index; Linux wants the trigger action, too.
        let disables = matches!((action, &data), (Action::Trigger, IrqData::None));
        if range.count() == 0 && !(disables && range.start() == 0) {
            return Err(SetIrqsError::EmptyRange { index });
        }
        let entries = match &data {
            IrqData::None => range.count().into(),
            IrqData::Bool(chosen) => chosen.len(),
            IrqData::Targets(targets) => targets.len(),
        };
        if entries != usize::from(range.count()) {
            return Err(SetIrqsError::WrongCount {
                index,
                vectors: range.count(),
                entries,
            });
        }
        if action != Action::Trigger {
            if matches!(index, IrqIndex::Err | IrqIndex::Req) {
                return Err(SetIrqsError::NotMaskable { index });
            }
            // Taking an eventfd away that was never there is no error.
            if let IrqData::Targets(targets) = &data
                && targets.iter().any(Option::is_some)
            {
                return Err(SetIrqsError::MaskByEventFd { index });
            }
        }
        Ok(Self {
            range,
            action,
            data,
        })
    }

    /// Decodes and checks a request as vfio-user carries it. One descriptor for
    /// each vector or none: none takes the triggers of the range away (the
    /// protocol cannot send VFIO's -1).
    pub fn decode(counts: &IrqCounts, message: SetIrqsMessage<'_>) -> Result<Self, SetIrqsError> {
        let SetIrqsMessage {
            flags,
            index,
            start,
            count,
            data: payload,
            fds,
        } = message;
        let bad_flags = SetIrqsError::BadFlags { flags };
        let data_flags = wire::SET_DATA_NONE | wire::SET_DATA_BOOL | wire::SET_DATA_EVENTFD;
        let action = match flags & !data_flags {
            wire::SET_ACTION_MASK => Action::Mask,
            wire::SET_ACTION_UNMASK => Action::Unmask,
            wire::SET_ACTION_TRIGGER => Action::Trigger,
            _ => return Err(bad_flags),
        };
        // First the range: it bounds what is allocated below.
        let range = IrqRange::new(counts, index, start, count)?;
        let vectors = usize::from(range.count());
        let wrong_count = |entries| SetIrqsError::WrongCount {
            index: range.index(),
            vectors: range.count(),
            entries,
        };
        let data_flags = flags & data_flags;
        if data_flags != wire::SET_DATA_EVENTFD && !fds.is_empty() {
            return Err(SetIrqsError::UnexpectedFds { count: fds.len() });
        }
        let data = match data_flags {
            wire::SET_DATA_NONE => {
                if !payload.is_empty() {
                    return Err(SetIrqsError::UnexpectedData {
                        bytes: payload.len(),
                    });
                }
                IrqData::None
            }
            wire::SET_DATA_BOOL => {
                if payload.len() != vectors {
                    return Err(wrong_count(payload.len()));
                }
                IrqData::Bool(payload.iter().map(|byte| *byte != 0).collect())
            }
            wire::SET_DATA_EVENTFD => {
                // The kernel's array of descriptor numbers: no client sends it,
                // and it means nothing in another process.
                if !payload.is_empty() {
                    return Err(SetIrqsError::UnexpectedData {
                        bytes: payload.len(),
                    });
                }
                if fds.is_empty() {
                    IrqData::Targets(vec![None; vectors])
                } else if fds.len() == vectors {
                    let targets = fds.into_iter().map(|fd| {
                        IrqEventFd::try_from(fd).map(|trigger| Some(IrqTarget::EventFd(trigger)))
                    });
                    IrqData::Targets(targets.collect::<Result<_, _>>()?)
                } else {
                    return Err(wrong_count(fds.len()));
                }
            }
            _ => return Err(bad_flags),
        };
        Self::new(range, action, data)
    }

    /// The vectors.
    pub fn range(&self) -> IrqRange {
        self.range
    }

    /// What to do with them.
    pub fn action(&self) -> Action {
        self.action
    }

    /// Which of them, or where they go.
    pub fn data(&self) -> &IrqData {
        &self.data
    }

    /// Whether the request takes the trigger of the error interrupt away. QEMU does
    /// that when the device is unplugged, and then, up to 11.1 at least, keeps the
    /// connection of a device with MSI-X until it ends: this is all that shows that
    /// no driver will clear bus-master enable.
    pub fn is_unplug_notification(&self) -> bool {
        self.range.index() == IrqIndex::Err
            && self.range.count() != 0
            && matches!(&self.data, IrqData::Targets(targets) if targets.iter().all(Option::is_none))
    }

    /// The parts, for sending the request on.
    pub fn into_parts(self) -> (IrqRange, Action, IrqData) {
        (self.range, self.action, self.data)
    }
}

/// Why a `SET_IRQS` request is refused.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum SetIrqsError {
    /// There is no such index.
    #[error("interrupt index {index} does not exist: 0 (INTx) to 4 (request) do")]
    UnknownIndex { index: u32 },
    /// The function has no such interrupt.
    #[error("this function has no {index} interrupt")]
    NoVectors { index: IrqIndex },
    /// The range goes beyond what the function has.
    #[error("{count} {index} vectors from {start}: this function has {available}")]
    OutOfRange {
        index: IrqIndex,
        start: u32,
        count: u32,
        available: u16,
    },
    /// Not exactly one action and one kind of data.
    #[error("SET_IRQS flags {flags:#x}: need exactly one action and one kind of data")]
    BadFlags { flags: u32 },
    /// No vectors, and not the request that disables an index.
    #[error(
        "a request for no {index} vectors: only trigger without data, from vector 0 (disable), may be empty"
    )]
    EmptyRange { index: IrqIndex },
    /// Bytes behind the fixed part of a request whose data are none or
    /// descriptors.
    #[error("{bytes} bytes of data in a request that takes none")]
    UnexpectedData { bytes: usize },
    /// The data is not one entry a vector.
    #[error("data for {entries} vectors in a request for {vectors} {index} vectors")]
    WrongCount {
        index: IrqIndex,
        vectors: u16,
        entries: usize,
    },
    /// Descriptors with a request that uses none.
    #[error("{count} file descriptors with a request that takes none")]
    UnexpectedFds { count: usize },
    /// The index cannot be masked.
    #[error("the {index} interrupt cannot be masked")]
    NotMaskable { index: IrqIndex },
    /// Masking by eventfd is not offered.
    #[error("masking {index} by eventfd is not supported: send the requests")]
    MaskByEventFd { index: IrqIndex },
    /// What should be an eventfd is something else.
    #[error("the file descriptor given as a trigger is not an eventfd")]
    NotAnEventFd,
    /// The descriptor could not be looked at.
    #[error("the file descriptor given as a trigger cannot be checked")]
    Descriptor(#[source] io::Error),
    /// INTx, MSI and MSI-X exclude each other.
    #[error("{index} cannot be enabled while {enabled} is: disable that first")]
    Conflict { index: IrqIndex, enabled: IrqIndex },
    /// Firing a vector of an index that is not enabled.
    #[error("{index} is not enabled: set its triggers first")]
    NotEnabled { index: IrqIndex },
}

impl SetIrqsError {
    /// The errno that Linux gives in this case, for the error reply.
    pub fn errno(&self) -> Errno {
        match self {
            Self::NotMaskable { .. } | Self::MaskByEventFd { .. } => Errno::NOTTY,
            Self::Descriptor(error) => Errno::from_io_error(error).unwrap_or(Errno::BADF),
            Self::UnknownIndex { .. }
            | Self::NoVectors { .. }
            | Self::OutOfRange { .. }
            | Self::BadFlags { .. }
            | Self::EmptyRange { .. }
            | Self::UnexpectedData { .. }
            | Self::WrongCount { .. }
            | Self::UnexpectedFds { .. }
            | Self::NotAnEventFd
            | Self::Conflict { .. }
            | Self::NotEnabled { .. } => Errno::INVAL,
        }
    }
}
