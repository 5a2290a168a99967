//! What the server says about its device, checked.

use std::{collections::BTreeSet, os::fd::OwnedFd};

use farside_vfio_user_wire::Cursor;

/// Bytes of the region info structure without capabilities.
pub(crate) const REGION_INFO: usize = 32;

/// Most bytes of it with its capabilities.
pub(crate) const MAX_REGION_INFO: usize = 4096;

/// Most areas of a region.
const MAX_AREAS: usize = 64;

const CAP_SPARSE_MMAP: u16 = 1;

const FLAG_MMAP: u32 = 1 << 2;
const FLAG_CAPS: u32 = 1 << 3;

const DEVICE_RESET: u32 = 1 << 0;
const DEVICE_PCI: u32 = 1 << 1;

/// `DEVICE_GET_INFO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Whether it can be reset.
    pub can_reset: bool,
    /// Number of regions.
    pub regions: u32,
    /// Number of interrupt types.
    pub irqs: u32,
}

impl DeviceInfo {
    pub(crate) fn decode(payload: &[u8]) -> Result<Self, String> {
        let mut cursor = Cursor::new(payload);
        let fields = (cursor.u32(), cursor.u32(), cursor.u32(), cursor.u32());
        let (Some(_), Some(flags), Some(regions), Some(irqs)) = fields else {
            return Err(format!("{} bytes", payload.len()));
        };
        if flags & DEVICE_PCI == 0 {
            return Err(format!("its device is no PCI device (flags {flags:#x})"));
        }
        Ok(Self {
            can_reset: flags & DEVICE_RESET != 0,
            regions,
            irqs,
        })
    }
}

/// `DEVICE_GET_REGION_INFO`.
#[derive(Debug)]
pub struct RegionInfo {
    /// Bytes; 0 of a region that the device does not have.
    pub size: u64,
    /// The file to map it from, and the offset of the region's start there.
    pub file: Option<(OwnedFd, u64)>,
    /// The areas that may be mapped, if not all of it may.
    pub areas: Option<Vec<SparseArea>>,
}

/// An area of a region that may be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SparseArea {
    /// Offset in the region, bytes.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// A decoded structure, or the bytes that it takes.
pub(crate) enum Region {
    Info(RegionInfo),
    Longer(u32),
}

impl Region {
    pub(crate) fn decode(payload: &[u8], index: u32, fd: Option<OwnedFd>) -> Result<Self, String> {
        let mut cursor = Cursor::new(payload);
        let fields = (
            (cursor.u32(), cursor.u32(), cursor.u32()),
            (cursor.u32(), cursor.u64(), cursor.u64()),
        );
        let ((Some(argsz), Some(flags), Some(of)), (Some(at), Some(size), Some(offset))) = fields
        else {
            return Err(format!("{} bytes for a region", payload.len()));
        };
        if of != index {
            return Err(format!("it is about region {of}, not {index}"));
        }
        if argsz as usize > payload.len() {
            return match argsz as usize <= MAX_REGION_INFO {
                true => Ok(Self::Longer(argsz)),
                false => Err(format!(
                    "the description of region {index} takes {argsz} bytes, over the limit of {MAX_REGION_INFO}"
                )),
            };
        }
        let areas = match flags & (FLAG_CAPS | FLAG_MMAP) == FLAG_CAPS | FLAG_MMAP {
            true => sparse_areas(payload, at, size)
                .map_err(|problem| format!("region {index}: {problem}"))?,
            false => None,
        };
        let file = fd.filter(|_| flags & FLAG_MMAP != 0);
        if let Some(end) = file.as_ref().map(|_| offset.checked_add(size))
            && end.is_none_or(|end| end > i64::MAX as u64)
        {
            return Err(format!(
                "region {index} of {size:#x} bytes is at {offset:#x} of its file"
            ));
        }
        Ok(Self::Info(RegionInfo {
            size,
            file: file.map(|file| (file, offset)),
            areas,
        }))
    }
}

/// The areas of the sparse mmap capability, whose list begins at `at`. Others are ignored.
fn sparse_areas(payload: &[u8], at: u32, size: u64) -> Result<Option<Vec<SparseArea>>, String> {
    let (mut at, mut seen) = (at, BTreeSet::new());
    while at != 0 {
        if !seen.insert(at) {
            return Err(format!("its capabilities loop at offset {at}"));
        }
        let rest = payload.get(at as usize..).unwrap_or_default();
        let mut cursor = Cursor::new(rest);
        let (Some(id), Some(_), Some(next)) = (cursor.u16(), cursor.u16(), cursor.u32()) else {
            return Err(format!("a capability at offset {at} is beyond its end"));
        };
        if id != CAP_SPARSE_MMAP {
            at = next;
            continue;
        }
        let count = cursor.u32().ok_or("its sparse areas are cut off")? as usize;
        if count > MAX_AREAS {
            return Err(format!(
                "{count} sparse areas, over the limit of {MAX_AREAS}"
            ));
        }
        // Reserved.
        let _ = cursor.u32();
        let mut areas = Vec::with_capacity(count);
        for _ in 0..count {
            let (Some(offset), Some(len)) = (cursor.u64(), cursor.u64()) else {
                return Err("its sparse areas are cut off".into());
            };
            if offset.checked_add(len).is_none_or(|end| end > size) {
                return Err(format!(
                    "an area of {len:#x} bytes at {offset:#x} is not in its {size:#x} bytes"
                ));
            }
            areas.push(SparseArea { offset, size: len });
        }
        areas.sort_unstable();
        if areas
            .windows(2)
            .any(|two| two[0].offset + two[0].size > two[1].offset)
        {
            return Err("its sparse areas overlap".into());
        }
        return Ok(Some(areas));
    }
    Ok(None)
}

/// The number of vectors of `DEVICE_GET_IRQ_INFO`.
pub(crate) fn irq_count(payload: &[u8], index: u32) -> Result<u32, String> {
    let mut cursor = Cursor::new(payload);
    let fields = (cursor.u32(), cursor.u32(), cursor.u32(), cursor.u32());
    let (Some(_), Some(_), Some(of), Some(count)) = fields else {
        return Err(format!("{} bytes", payload.len()));
    };
    match of == index {
        true => Ok(count),
        false => Err(format!("it is about interrupt type {of}, not {index}")),
    }
}
