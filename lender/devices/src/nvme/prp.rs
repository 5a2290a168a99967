//! Physical region pages (NVM Express 1.4, 4.3).
//!
//! The guest's lists are copied once, as needed, and at most one entry for each page of
//! the transfer; so the walk ends even for a circular chain of lists.

use farside_fabric::{Access, Iova, memory::HostSlice};

use super::status::Status;
use crate::Dma;

/// Entries copied from a list at a time.
const CHUNK: usize = 64;

/// Appends the host memory behind `len` bytes at the two PRP entries.
///
/// `page_size` is CC.MPS in bytes. Adjacent pages are translated together.
pub fn gather(
    dma: &mut dyn Dma,
    (prp1, prp2): (Iova, Iova),
    len: usize,
    page_size: u64,
    access: Access,
    out: &mut Vec<HostSlice>,
) -> Result<(), Status> {
    let mut pages = Pages {
        dma,
        access,
        out,
        start: Iova::new(0),
        pending: 0,
    };
    if !prp1.is_aligned_to(4) {
        return Err(Status::PRP_OFFSET_INVALID);
    }
    let first = (page_size - prp1.offset_in(page_size)).min(len as u64);
    pages.add(prp1, first)?;
    let left = len as u64 - first;
    if left == 0 {
        return pages.finish();
    }
    if left <= page_size {
        if !prp2.is_aligned_to(page_size) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        pages.add(prp2, left)?;
        return pages.finish();
    }
    walk_list(&mut pages, prp2, left, page_size)?;
    pages.finish()
}

fn walk_list(pages: &mut Pages, list: Iova, mut left: u64, page_size: u64) -> Result<(), Status> {
    // The first list may have an offset in its page; later ones must not.
    if !list.is_aligned_to(8) {
        return Err(Status::PRP_OFFSET_INVALID);
    }
    let mut at = list;
    loop {
        let wanted = left.div_ceil(page_size);
        let room = (page_size - at.offset_in(page_size)) / 8;
        // The last entry of a page points to the next list unless the transfer ends in
        // this list.
        let (entries, chained) = if wanted > room {
            (room - 1, true)
        } else {
            (wanted, false)
        };
        let mut done = 0;
        while done < entries {
            let mut bytes = [0; CHUNK * 8];
            let take = (entries - done).min(CHUNK as u64);
            let bytes = &mut bytes[..take as usize * 8];
            pages.read(at.wrapping_add(done * 8), bytes)?;
            for entry in bytes.chunks_exact(8) {
                let page = address(entry);
                if !page.is_aligned_to(page_size) {
                    return Err(Status::PRP_OFFSET_INVALID);
                }
                let part = left.min(page_size);
                pages.add(page, part)?;
                left -= part;
            }
            done += take;
        }
        if !chained {
            return Ok(());
        }
        let mut next = [0; 8];
        pages.read(at.wrapping_add(entries * 8), &mut next)?;
        at = address(&next);
        if !at.is_aligned_to(page_size) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        // Terminates: a page holds at least 512 entries, so each list reduces `left`,
        // except perhaps the first, which may hold only the chain pointer.
    }
}

fn address(entry: &[u8]) -> Iova {
    let mut raw = [0; 8];
    raw.copy_from_slice(entry);
    Iova::new(u64::from_le_bytes(raw))
}

/// Merges adjacent pages before they are translated.
struct Pages<'a> {
    dma: &'a mut dyn Dma,
    access: Access,
    out: &'a mut Vec<HostSlice>,
    start: Iova,
    pending: u64,
}

impl Pages<'_> {
    fn add(&mut self, page: Iova, len: u64) -> Result<(), Status> {
        if self.pending > 0 && self.start.checked_add(self.pending) == Some(page) {
            self.pending += len;
            return Ok(());
        }
        self.flush()?;
        self.start = page;
        self.pending = len;
        Ok(())
    }

    fn read(&mut self, at: Iova, bytes: &mut [u8]) -> Result<(), Status> {
        self.dma
            .read(at, bytes)
            .map_err(|_| Status::DATA_TRANSFER_ERROR)
    }

    fn flush(&mut self) -> Result<(), Status> {
        if self.pending > 0 {
            // `Dma` has counted and logged the fault.
            self.dma
                .gather(self.start, self.pending as usize, self.access, self.out)
                .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            self.pending = 0;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), Status> {
        self.flush()
    }
}
