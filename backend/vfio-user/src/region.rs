//! Regions of a PCI device ("`VFIO_USER_DEVICE_GET_REGION_INFO`").

use std::os::fd::BorrowedFd;

use super::refusal::Refusal;
use farside_vfio_user_wire::Put;

/// Number of regions of a PCI device, as in `linux/vfio.h`
/// (`VFIO_PCI_NUM_REGIONS`).
pub const NUM_REGIONS: u32 = 9;

/// Bytes of the region info structure without capabilities.
pub const REGION_INFO_SIZE: u32 = 32;

const SPARSE_CAP_SIZE: u32 = 16;
const SPARSE_AREA_SIZE: u32 = 16;
const CAP_SPARSE_MMAP: u16 = 1;

const FLAG_READ: u32 = 1 << 0;
const FLAG_WRITE: u32 = 1 << 1;
const FLAG_MMAP: u32 = 1 << 2;
const FLAG_CAPS: u32 = 1 << 3;

/// A region of a PCI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// BAR 0 to 5.
    Bar(u8),
    /// Expansion ROM.
    Rom,
    /// Configuration space.
    Config,
    /// Legacy VGA ranges.
    Vga,
}

impl Region {
    /// The region's index on the wire.
    pub fn index(self) -> u32 {
        match self {
            Self::Bar(n) => n.into(),
            Self::Rom => 6,
            Self::Config => 7,
            Self::Vga => 8,
        }
    }
}

impl TryFrom<u32> for Region {
    type Error = Refusal;

    fn try_from(index: u32) -> Result<Self, Refusal> {
        match index {
            // At most 5, so it fits.
            0..=5 => Ok(Self::Bar(index as u8)),
            6 => Ok(Self::Rom),
            7 => Ok(Self::Config),
            8 => Ok(Self::Vga),
            _ => Err(Refusal::Region(index)),
        }
    }
}

/// A region's properties. A region that the device does not have has size 0 and
/// cannot be accessed.
#[derive(Clone, Copy, Debug)]
pub struct RegionInfo<'a> {
    /// Which region.
    pub region: Region,
    /// Bytes.
    pub size: u64,
    /// Whether region reads are served.
    pub readable: bool,
    /// Whether region writes are served.
    pub writable: bool,
    /// The part that the client may map.
    pub mappable: Option<Mappable<'a>>,
}

/// The part of a region that the client may map instead of sending accesses.
#[derive(Clone, Copy, Debug)]
pub struct Mappable<'a> {
    /// The file to map. The client receives a duplicate.
    pub fd: BorrowedFd<'a>,
    /// File offset of the region's start: an area at region offset `o` is at file
    /// offset `offset + o`.
    pub offset: u64,
    /// The page-aligned areas that may be mapped. Empty: the whole region.
    pub areas: &'a [SparseArea],
}

/// A page-aligned area of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseArea {
    /// Offset in the region, bytes.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

impl<'a> RegionInfo<'a> {
    /// A region that the device does not have.
    pub fn absent(region: Region) -> Self {
        Self {
            region,
            size: 0,
            readable: false,
            writable: false,
            mappable: None,
        }
    }

    /// Bytes of the complete structure with its capabilities.
    pub(super) fn full_size(&self) -> u32 {
        match self.mappable {
            // A device has a handful of areas: saturation is never reached.
            Some(Mappable { areas, .. }) if !areas.is_empty() => u32::try_from(areas.len())
                .unwrap_or(u32::MAX)
                .saturating_mul(SPARSE_AREA_SIZE)
                .saturating_add(REGION_INFO_SIZE + SPARSE_CAP_SIZE),
            _ => REGION_INFO_SIZE,
        }
    }

    /// Appends the structure, with its capabilities if `argsz` has room for
    /// them, and returns the descriptor that goes with it.
    ///
    /// If `argsz` is too small, the reply is the plain structure with the required
    /// `argsz` ("Message sizes"), so the client can repeat the request. The plain
    /// structure has neither the caps flag (QEMU treats it with a zero `cap_offset`
    /// as an error) nor the mmap flag and a descriptor (a client that does not
    /// repeat the request would map the whole region and bypass the traps).
    pub(super) fn encode(&self, argsz: u32, out: &mut Vec<u8>) -> Option<BorrowedFd<'a>> {
        let full_size = self.full_size();
        let mappable = self.mappable.filter(|_| argsz >= full_size);
        let areas = mappable.map_or(&[][..], |m| m.areas);

        let mut flags = 0;
        if self.readable {
            flags |= FLAG_READ;
        }
        if self.writable {
            flags |= FLAG_WRITE;
        }
        if mappable.is_some() {
            flags |= FLAG_MMAP;
        }
        if !areas.is_empty() {
            flags |= FLAG_CAPS;
        }

        out.put_u32(full_size);
        out.put_u32(flags);
        out.put_u32(self.region.index());
        out.put_u32(if areas.is_empty() {
            0
        } else {
            REGION_INFO_SIZE
        });
        out.put_u64(self.size);
        out.put_u64(mappable.map_or(0, |m| m.offset));

        if !areas.is_empty() {
            out.put_u16(CAP_SPARSE_MMAP);
            out.put_u16(1); // version
            out.put_u32(0); // last capability
            out.put_u32(areas.len() as u32); // full_size() fit in 32 bits
            out.put_u32(0);
            for area in areas {
                out.put_u64(area.offset);
                out.put_u64(area.size);
            }
        }
        mappable.map(|m| m.fd)
    }
}
