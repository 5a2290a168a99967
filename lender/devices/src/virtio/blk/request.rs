//! Requests (virtio 1.2, 5.2.6): where header, data and status are in a chain's buffers.

use farside_fabric::{Fault, Iova};

use super::layout::SECTOR;
use crate::{Dma, virtio::queue::Segment};

/// Bytes of a request's header.
pub(super) const HEADER: usize = 16;
/// Bytes of a range to discard or to zero.
pub(super) const RANGE: usize = 16;

/// A part of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) at: Iova,
    pub(super) len: u32,
}

/// A request without its data: that is in the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) kind: u32,
    pub(super) sector: u64,
}

/// Where the parts of a request are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// The status byte.
    pub(super) status: Iova,
    /// Bytes of what the device reads, without the header.
    pub(super) out_len: u64,
    /// Bytes of what the device writes, without the status.
    pub(super) in_len: u64,
}

/// Why a chain is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("a request has no header of {HEADER} bytes")]
    NoHeader,
    #[error("a request has no byte for its status")]
    NoStatus,
    #[error("a request has a buffer to read from behind one to write to")]
    Order,
}

/// Finds the parts of a chain, whatever its buffers are (2.7.4): the first 16 bytes are the header, the
/// last is the status.
pub(super) fn frame(chain: &[Segment]) -> Result<Frame, Malformed> {
    let readable = chain.iter().take_while(|segment| !segment.writable).count();
    let (from, to) = chain.split_at(readable);
    if to.iter().any(|segment| !segment.writable) {
        return Err(Malformed::Order);
    }
    let len = |segments: &[Segment]| segments.iter().map(|s| u64::from(s.len)).sum::<u64>();
    let out_len = len(from).checked_sub(HEADER as u64);
    let last = to.iter().rfind(|segment| segment.len > 0);
    let last = last.ok_or(Malformed::NoStatus)?;
    Ok(Frame {
        status: last.at.wrapping_add(u64::from(last.len) - 1),
        out_len: out_len.ok_or(Malformed::NoHeader)?,
        in_len: len(to) - 1,
    })
}

/// Copies the header, of a chain that has one.
pub(super) fn header(chain: &[Segment], dma: &mut dyn Dma) -> Result<Request, Fault> {
    let mut bytes = [0; HEADER];
    let mut done = 0;
    for segment in chain {
        let len = (segment.len as usize).min(HEADER - done);
        dma.read(segment.at, &mut bytes[done..done + len])?;
        done += len;
        if done == HEADER {
            break;
        }
    }
    let (kind, sector) = (word(&bytes, 0), word(&bytes, 8));
    Ok(Request {
        kind: kind as u32,
        sector,
    })
}

/// Puts the data of a chain into `data`: `len` bytes behind the first `skip` of those that are `writable`.
pub(super) fn data(chain: &[Segment], writable: bool, skip: usize, len: u64, data: &mut Vec<Part>) {
    data.clear();
    let (mut skip, mut left) = (skip as u64, len);
    for segment in chain.iter().filter(|segment| segment.writable == writable) {
        let before = skip.min(segment.len.into());
        skip -= before;
        let len = left.min(u64::from(segment.len) - before);
        left -= len;
        if len > 0 {
            data.push(Part {
                at: segment.at.wrapping_add(before),
                // Of a segment.
                len: len as u32,
            });
        }
    }
}

/// A range to discard or to zero (5.2.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) sector: u64,
    pub(super) sectors: u32,
    pub(super) flags: u32,
}

impl Range {
    pub(super) fn from_bytes(bytes: &[u8; RANGE]) -> Self {
        let second = word(bytes, 8);
        Self {
            sector: word(bytes, 0),
            sectors: second as u32,
            flags: (second >> 32) as u32,
        }
    }
}

fn word(bytes: &[u8; 16], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Bytes `[offset, offset + len)` of the image, inside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Extent {
    /// `len` bytes from `sector` on, of a disk of `sectors`; `None` if they are not all of it, or no whole
    /// sectors.
    pub(super) fn new(sector: u64, len: u64, sectors: u64) -> Option<Self> {
        let count = len / SECTOR;
        let is_inside = sector.checked_add(count)? <= sectors && len.is_multiple_of(SECTOR);
        is_inside.then(|| Self {
            // Of an image.
            offset: sector * SECTOR,
            len,
        })
    }
}
