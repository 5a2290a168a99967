//! Command numbers.

use std::fmt;

/// A command of the protocol ("Commands").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Command {
    /// Negotiates version and capabilities; the first command.
    Version = 1,
    /// Maps a range of client memory.
    DmaMap = 2,
    /// Unmaps a range of client memory.
    DmaUnmap = 3,
    /// Queries the number of regions and interrupt types.
    DeviceGetInfo = 4,
    /// Queries one region's size and access flags.
    DeviceGetRegionInfo = 5,
    /// Queries a region's ioeventfds. Not supported.
    DeviceGetRegionIoFds = 6,
    /// Queries one interrupt type's count and flags.
    DeviceGetIrqInfo = 7,
    /// Sets up, masks or triggers interrupts.
    DeviceSetIrqs = 8,
    /// Reads from a region.
    RegionRead = 9,
    /// Writes to a region.
    RegionWrite = 10,
    /// Server to client: reads client memory.
    DmaRead = 11,
    /// Server to client: writes client memory.
    DmaWrite = 12,
    /// Resets the device.
    DeviceReset = 13,
    /// Dirty page tracking of older protocol drafts. Not supported.
    DirtyPages = 14,
    /// Several small region writes in one message.
    RegionWriteMulti = 15,
    /// Gets, sets or probes a device feature. Not supported.
    DeviceFeature = 16,
    /// Reads migration data. Not supported.
    MigDataRead = 17,
    /// Writes migration data. Not supported.
    MigDataWrite = 18,
}

impl Command {
    /// The command with this number; `None` if the protocol defines none.
    pub fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Version,
            2 => Self::DmaMap,
            3 => Self::DmaUnmap,
            4 => Self::DeviceGetInfo,
            5 => Self::DeviceGetRegionInfo,
            6 => Self::DeviceGetRegionIoFds,
            7 => Self::DeviceGetIrqInfo,
            8 => Self::DeviceSetIrqs,
            9 => Self::RegionRead,
            10 => Self::RegionWrite,
            11 => Self::DmaRead,
            12 => Self::DmaWrite,
            13 => Self::DeviceReset,
            14 => Self::DirtyPages,
            15 => Self::RegionWriteMulti,
            16 => Self::DeviceFeature,
            17 => Self::MigDataRead,
            18 => Self::MigDataWrite,
            _ => return None,
        })
    }

    /// The command's number on the wire.
    pub fn number(self) -> u16 {
        self as u16
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "VERSION",
            Self::DmaMap => "DMA_MAP",
            Self::DmaUnmap => "DMA_UNMAP",
            Self::DeviceGetInfo => "DEVICE_GET_INFO",
            Self::DeviceGetRegionInfo => "DEVICE_GET_REGION_INFO",
            Self::DeviceGetRegionIoFds => "DEVICE_GET_REGION_IO_FDS",
            Self::DeviceGetIrqInfo => "DEVICE_GET_IRQ_INFO",
            Self::DeviceSetIrqs => "DEVICE_SET_IRQS",
            Self::RegionRead => "REGION_READ",
            Self::RegionWrite => "REGION_WRITE",
            Self::DmaRead => "DMA_READ",
            Self::DmaWrite => "DMA_WRITE",
            Self::DeviceReset => "DEVICE_RESET",
            Self::DirtyPages => "DIRTY_PAGES",
            Self::RegionWriteMulti => "REGION_WRITE_MULTI",
            Self::DeviceFeature => "DEVICE_FEATURE",
            Self::MigDataRead => "MIG_DATA_READ",
            Self::MigDataWrite => "MIG_DATA_WRITE",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_maps_to_itself() {
        for number in 0..=u16::MAX {
            if let Some(command) = Command::from_number(number) {
                assert_eq!(command.number(), number);
            }
        }
        assert_eq!(Command::from_number(0), None);
        assert_eq!(Command::from_number(19), None);
    }
}
