//! Interrupt types and `DEVICE_SET_IRQS` ("`VFIO_USER_DEVICE_SET_IRQS`").

use std::os::fd::OwnedFd;

use farside_irq_relay as relay;

use super::refusal::Refusal;
use super::wire::Cursor;
use super::{Command, MAX_MSG_FDS};

/// Number of interrupt types of a PCI device, as in `linux/vfio.h`
/// (`VFIO_PCI_NUM_IRQS`).
pub const NUM_IRQS: u32 = 5;

const FIXED_SIZE: usize = 20;

const DATA_NONE: u32 = 1 << 0;
const DATA_BOOL: u32 = 1 << 1;
const DATA_EVENTFD: u32 = 1 << 2;
const ACTION_MASK: u32 = 1 << 3;
const ACTION_UNMASK: u32 = 1 << 4;
const ACTION_TRIGGER: u32 = 1 << 5;
const DATA_BITS: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
const ACTION_BITS: u32 = ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER;

/// An interrupt type of a PCI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IrqIndex {
    /// The INTx pin.
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
    /// Unrecoverable device errors.
    Error,
    /// The server asks the client to give the device back.
    Request,
}

impl IrqIndex {
    /// The type's index on the wire.
    pub fn index(self) -> u32 {
        self as u32
    }
}

impl TryFrom<u32> for IrqIndex {
    type Error = Refusal;

    fn try_from(index: u32) -> Result<Self, Refusal> {
        match index {
            0 => Ok(Self::Intx),
            1 => Ok(Self::Msi),
            2 => Ok(Self::Msix),
            3 => Ok(Self::Error),
            4 => Ok(Self::Request),
            _ => Err(Refusal::IrqIndex(index)),
        }
    }
}

bitflags::bitflags! {
    /// What can be done with an interrupt type ("`VFIO_USER_DEVICE_GET_IRQ_INFO`").
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct IrqFlags: u32 {
        /// Can be signalled through an eventfd.
        const EVENTFD = 1 << 0;
        /// Can be masked and unmasked by `DEVICE_SET_IRQS`.
        const MASKABLE = 1 << 1;
        /// Masks itself when it is signalled.
        const AUTOMASKED = 1 << 2;
        /// Vectors are set up as a set; to add one, all are torn down first.
        const NORESIZE = 1 << 3;
    }
}

/// What `DEVICE_SET_IRQS` does to the vectors it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Masks, or with eventfds: signals them when the guest masks.
    Mask,
    /// Unmasks, or with eventfds: unmasks when the client signals them.
    Unmask,
    /// Triggers, or with eventfds: sets what is signalled on a trigger.
    Trigger,
}

/// Which vectors of the range the action is for, and with what.
#[derive(Debug)]
pub enum IrqData<'a> {
    /// Every vector of the range. With [`IrqAction::Trigger`] and a count of
    /// 0: disables the whole interrupt type.
    None,
    /// The vectors whose byte is not zero; as many bytes as vectors.
    Bool(&'a [u8]),
    /// Every vector, with an eventfd each; or none at all: the eventfds of the
    /// range are taken away.
    Eventfds(Vec<OwnedFd>),
}

/// A checked `DEVICE_SET_IRQS`. Whether the device has the vectors is for the
/// device to say (`EINVAL`).
#[derive(Debug)]
pub struct SetIrqs<'a> {
    /// Interrupt type.
    pub index: IrqIndex,
    /// First vector.
    pub start: u32,
    /// Number of vectors; `start + count` does not overflow.
    pub count: u32,
    /// What to do.
    pub action: IrqAction,
    /// To which, with what.
    pub data: IrqData<'a>,
}

impl<'a> SetIrqs<'a> {
    /// Whether this disables the whole interrupt type.
    pub fn disables_all(&self) -> bool {
        self.count == 0
    }

    /// The request for a function that has `counts`.
    ///
    /// # Errors
    /// What such a function refuses; the errno is the client's.
    pub fn for_function(
        self,
        counts: &relay::IrqCounts,
    ) -> Result<relay::SetIrqs, relay::SetIrqsError> {
        let action = match self.action {
            IrqAction::Mask => ACTION_MASK,
            IrqAction::Unmask => ACTION_UNMASK,
            IrqAction::Trigger => ACTION_TRIGGER,
        };
        let (data, payload, fds) = match self.data {
            IrqData::None => (DATA_NONE, &[][..], Vec::new()),
            IrqData::Bool(chosen) => (DATA_BOOL, chosen, Vec::new()),
            IrqData::Eventfds(fds) => (DATA_EVENTFD, &[][..], fds),
        };
        let header = relay::WireHeader {
            flags: action | data,
            index: self.index.index(),
            start: self.start,
            count: self.count,
        };
        relay::SetIrqs::from_wire(counts, header, payload, fds)
    }

    pub(super) fn decode(payload: &'a [u8], fds: Vec<OwnedFd>) -> Result<Self, Refusal> {
        let command = Command::DeviceSetIrqs;
        let size = |expected| Refusal::PayloadSize {
            command,
            actual: payload.len(),
            expected,
        };

        let mut cursor = Cursor::new(payload);
        let fields = (
            cursor.u32(),
            cursor.u32(),
            cursor.u32(),
            cursor.u32(),
            cursor.u32(),
        );
        let (Some(argsz), Some(flags), Some(index), Some(start), Some(count)) = fields else {
            return Err(size(FIXED_SIZE));
        };
        let data = cursor.rest();

        let index = IrqIndex::try_from(index)?;
        if flags & !(DATA_BITS | ACTION_BITS) != 0 {
            return Err(Refusal::Flags { command, flags });
        }
        // Exactly one of each set.
        let action = match flags & ACTION_BITS {
            ACTION_MASK => IrqAction::Mask,
            ACTION_UNMASK => IrqAction::Unmask,
            ACTION_TRIGGER => IrqAction::Trigger,
            _ => return Err(Refusal::Flags { command, flags }),
        };
        let data_type = flags & DATA_BITS;
        if data_type.count_ones() != 1 {
            return Err(Refusal::Flags { command, flags });
        }

        start
            .checked_add(count)
            .ok_or(Refusal::IrqRange { start, count })?;
        // "a count (and start) of 0, with data flags of DATA_NONE disables all
        // interrupts of the index"; the kernel wants the trigger action too.
        if count == 0 && (start != 0 || flags != DATA_NONE | ACTION_TRIGGER) {
            return Err(Refusal::IrqRange { start, count });
        }

        // A count that is large by a lie is caught here: nothing is allocated
        // by it, it must be matched by bytes that have been received.
        let expected = if data_type == DATA_BOOL {
            count as usize
        } else {
            0
        };
        if data.len() != expected {
            return Err(size(FIXED_SIZE.saturating_add(expected)));
        }
        let needed = payload.len() as u32; // bounded by the message size
        if argsz < needed {
            return Err(Refusal::Argsz {
                command,
                argsz,
                needed,
            });
        }

        let fd_count = |expected| Refusal::FdCount {
            command,
            actual: fds.len(),
            expected,
        };
        let data = match data_type {
            DATA_EVENTFD => {
                if !fds.is_empty() && fds.len() != count as usize {
                    return Err(fd_count((count as usize).min(MAX_MSG_FDS)));
                }
                IrqData::Eventfds(fds)
            }
            _ if !fds.is_empty() => return Err(fd_count(0)),
            DATA_BOOL => IrqData::Bool(data),
            _ => IrqData::None,
        };
        Ok(Self {
            index,
            start,
            count,
            action,
            data,
        })
    }
}
