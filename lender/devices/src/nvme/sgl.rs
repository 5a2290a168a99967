//! Scatter gather lists (NVM Express 1.4, 4.4): data block, segment and last
//! segment descriptors, byte aligned (Identify, SGLS).

use farside_fabric::{Access, Iova, memory::HostSlice};

use super::status::Status;
use crate::Dma;

/// Most descriptors of one command, including segment descriptors. Bounds the walk and a
/// command's memory. Linux uses at most 256.
pub const MAX_DESCRIPTORS: usize = 1024;

const DESCRIPTOR_SIZE: usize = 16;
/// Descriptors copied from a segment at a time.
const CHUNK: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    DataBlock,
    Segment,
    LastSegment,
}

struct Descriptor {
    kind: Kind,
    address: Iova,
    len: u32,
}

impl Descriptor {
    /// Figure 112. Only the sub type "address" (0) exists over PCIe without a
    /// controller memory buffer.
    fn parse(raw: &[u8]) -> Result<Self, Status> {
        let kind = match raw[15] {
            0x00 => Kind::DataBlock,
            0x20 => Kind::Segment,
            0x30 => Kind::LastSegment,
            _ => return Err(Status::SGL_TYPE_INVALID),
        };
        let mut address = [0; 8];
        address.copy_from_slice(&raw[..8]);
        Ok(Self {
            kind,
            address: Iova::new(u64::from_le_bytes(address)),
            len: u32::from_le_bytes([raw[8], raw[9], raw[10], raw[11]]),
        })
    }
}

/// Appends the host memory of the first `len` bytes behind the SGL that starts with `first`, which
/// may describe more (SGLS bit 18): the rest is not accessed, but its descriptors have to be valid.
pub fn gather(
    dma: &mut dyn Dma,
    first: &[u8; 16],
    len: usize,
    access: Access,
    out: &mut Vec<HostSlice>,
) -> Result<(), Status> {
    let mut walk = Walk {
        dma,
        access,
        out,
        left: len as u64,
    };
    let first = Descriptor::parse(first)?;
    if first.kind == Kind::DataBlock {
        walk.data(&first)?;
    } else {
        walk.segments(first)?;
    }
    match walk.left {
        0 => Ok(()),
        _ => Err(Status::SGL_LENGTH_INVALID),
    }
}

struct Walk<'a> {
    dma: &'a mut dyn Dma,
    access: Access,
    out: &'a mut Vec<HostSlice>,
    /// Bytes still to be described.
    left: u64,
}

impl Walk<'_> {
    fn segments(&mut self, mut segment: Descriptor) -> Result<(), Status> {
        let mut budget = MAX_DESCRIPTORS;
        loop {
            let bytes = segment.len as usize;
            if bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_SIZE) {
                return Err(Status::INVALID_SGL_SEGMENT);
            }
            let count = bytes / DESCRIPTOR_SIZE;
            budget = budget.checked_sub(count).ok_or(Status::INVALID_SGL_COUNT)?;
            match self.segment(&segment, count)? {
                Some(next) => segment = next,
                None => return Ok(()),
            }
        }
    }

    /// Walks one segment; returns the descriptor of the next.
    fn segment(
        &mut self,
        segment: &Descriptor,
        count: usize,
    ) -> Result<Option<Descriptor>, Status> {
        let mut done = 0;
        while done < count {
            let mut bytes = [0; CHUNK * DESCRIPTOR_SIZE];
            let take = (count - done).min(CHUNK);
            let bytes = &mut bytes[..take * DESCRIPTOR_SIZE];
            let at = segment
                .address
                .wrapping_add((done * DESCRIPTOR_SIZE) as u64);
            self.dma
                .read(at, bytes)
                .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            for (index, raw) in bytes.chunks_exact(DESCRIPTOR_SIZE).enumerate() {
                let descriptor = Descriptor::parse(raw)?;
                if descriptor.kind == Kind::DataBlock {
                    self.data(&descriptor)?;
                    continue;
                }
                let last = done + index + 1 == count;
                if !last || segment.kind == Kind::LastSegment {
                    return Err(Status::INVALID_SGL_SEGMENT);
                }
                return Ok(Some(descriptor));
            }
            done += take;
        }
        match segment.kind {
            Kind::LastSegment => Ok(None),
            // A segment that is not the last must end with a segment descriptor.
            _ => Err(Status::INVALID_SGL_SEGMENT),
        }
    }

    fn data(&mut self, block: &Descriptor) -> Result<(), Status> {
        let len = u64::from(block.len).min(self.left);
        self.left -= len;
        if len == 0 {
            return Ok(());
        }
        // `Dma` has counted and logged the fault.
        self.dma
            .gather(block.address, len as usize, self.access, self.out)
            .map_err(|_| Status::DATA_TRANSFER_ERROR)
    }
}
