//! A contiguous structure in guest memory with repeated accesses: a queue, or a page of
//! doorbells.
//!
//! It is translated once, and the slice is kept until the device is quiesced, as
//! [`Dma::translate`] allows. If it is not contiguous in host memory, each access is
//! translated.

use std::sync::atomic::Ordering;

use farside_fabric::{Access, Fault, Iova, memory::HostSlice};

use crate::Dma;

#[derive(Debug)]
pub struct GuestRange {
    base: Iova,
    len: usize,
    access: Access,
    whole: Option<HostSlice>,
}

impl GuestRange {
    /// The range `[base, base + len)` of IOVA.
    pub fn new(base: Iova, len: usize, access: Access) -> Self {
        Self {
            base,
            len,
            access,
            whole: None,
        }
    }

    /// Drops the translation, as a quiesce requires.
    pub fn forget(&mut self) {
        self.whole = None;
    }

    fn whole(&mut self, dma: &mut dyn Dma) -> Result<Option<&HostSlice>, Fault> {
        // Taken away while the device could not be quiesced.
        let is_gone = |slice: &HostSlice| slice.memory().is_gone();
        if self.whole.as_ref().is_some_and(is_gone) {
            self.whole = None;
        }
        if self.whole.is_none() {
            let slice = dma.translate(self.base, self.len, self.access)?;
            if slice.len() < self.len {
                return Ok(None);
            }
            self.whole = Some(slice);
        }
        Ok(self.whole.as_ref())
    }

    /// Copies the bytes at `offset`.
    pub fn read(
        &mut self,
        dma: &mut dyn Dma,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), Fault> {
        match self.whole(dma)?.and_then(|s| s.slice(offset, bytes.len())) {
            Some(part) => {
                part.read(bytes);
                Ok(())
            }
            None => dma.read(self.base.wrapping_add(offset as u64), bytes),
        }
    }

    /// Writes `front` at `offset` and then `last` behind it, with release ordering.
    pub fn publish(
        &mut self,
        dma: &mut dyn Dma,
        offset: usize,
        front: &[u8],
        last: u32,
    ) -> Result<(), Fault> {
        if let Some(slice) = self.whole(dma)?
            && let Some(part) = slice.slice(offset, front.len())
        {
            part.write(front);
            if slice
                .store_u32(offset + front.len(), last, Ordering::Release)
                .is_some()
            {
                return Ok(());
            }
        }
        let at = self.base.wrapping_add(offset as u64);
        dma.write(at, front)?;
        store(dma, at.wrapping_add(front.len() as u64), last)
    }

    /// Loads the word at `offset`, a multiple of 4, with acquire ordering.
    pub fn load(&mut self, dma: &mut dyn Dma, offset: usize) -> Result<u32, Fault> {
        let kept = self
            .whole(dma)?
            .and_then(|slice| slice.load_u32(offset, Ordering::Acquire));
        match kept {
            Some(value) => Ok(value),
            None => {
                let at = self.base.wrapping_add(offset as u64);
                let slice = dma.translate(at, 4, self.access)?;
                match slice.load_u32(0, Ordering::Acquire) {
                    Some(value) => Ok(value),
                    None => {
                        let mut bytes = [0; 4];
                        dma.read(at, &mut bytes)?;
                        Ok(u32::from_le_bytes(bytes))
                    }
                }
            }
        }
    }

    /// Stores a word at `offset`, a multiple of 4, with release ordering.
    pub fn store(&mut self, dma: &mut dyn Dma, offset: usize, value: u32) -> Result<(), Fault> {
        let kept = self
            .whole(dma)?
            .and_then(|slice| slice.store_u32(offset, value, Ordering::Release));
        match kept {
            Some(()) => Ok(()),
            None => store(dma, self.base.wrapping_add(offset as u64), value),
        }
    }
}

fn store(dma: &mut dyn Dma, at: Iova, value: u32) -> Result<(), Fault> {
    let slice = dma.translate(at, 4, Access::Write)?;
    match slice.store_u32(0, value, Ordering::Release) {
        Some(()) => Ok(()),
        None => dma.write(at, &value.to_le_bytes()),
    }
}
