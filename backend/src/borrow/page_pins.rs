//! Pins that the mappings of a guest behind a vIOMMU share.
//!
//! Such a guest maps each page of a buffer before an I/O and unmaps it after. To
//! pin page by page would cost more than the I/O, so the chunk of the file that a
//! page is in ([`CHUNK`] or more) is pinned when a page of it is first mapped, and stays
//! pinned until the path closes: the guest's buffers come back. It is never more
//! than guest RAM, which a guest without a vIOMMU has pinned from the start.

use std::{collections::BTreeMap, fs::File, sync::Arc};

use farside_fabric::{
    MemoryRange,
    pin::{PinError, PinOptions, PinReport, Pins},
};

/// Fewest bytes pinned at a time: a huge page, whose pages are pinned in one step.
const CHUNK: u64 = 2 << 20;

/// Most chunks of a file. Each is a mapping of this process, of which the kernel
/// allows it 65,530 (`vm.max_map_count`).
const MAX_CHUNKS: u64 = 4096;

/// Pinned chunks, by the address of their file.
#[derive(Default)]
pub(crate) struct PagePins {
    files: BTreeMap<usize, Chunks>,
    report: PinReport,
}

/// The pinned chunks of one file, by number.
struct Chunks {
    /// Bytes of each.
    size: u64,
    pins: BTreeMap<u64, Pins>,
    /// Nobody else has its address while this lives.
    _file: Arc<File>,
}

impl Chunks {
    fn new(file: &Arc<File>, file_size: u64) -> Self {
        let least = (file_size / MAX_CHUNKS).checked_next_power_of_two();
        Self {
            size: least.unwrap_or(1 << 63).max(CHUNK),
            pins: BTreeMap::new(),
            _file: Arc::clone(file),
        }
    }
}

impl PagePins {
    /// Whether memory of `len` bytes is pinned by the chunk.
    pub(crate) fn fits(len: u64) -> bool {
        len < CHUNK
    }

    /// Pins the chunks that `memory` is in, unless they are.
    pub(crate) fn pin(
        &mut self,
        memory: &MemoryRange,
        pinning: &PinOptions<'_>,
    ) -> Result<(), PinError> {
        let end = memory.offset + memory.len;
        let file_size = || memory.file.metadata().map_or(end, |file| file.len());
        let address = Arc::as_ptr(&memory.file) as usize;
        let chunks = self
            .files
            .entry(address)
            .or_insert_with(|| Chunks::new(&memory.file, file_size()));
        let size = chunks.size;
        for number in memory.offset / size..end.div_ceil(size) {
            if chunks.pins.contains_key(&number) {
                continue;
            }
            let offset = number * size;
            let chunk = MemoryRange {
                offset,
                // A file need not end with a chunk.
                len: size.min(file_size().saturating_sub(offset)),
                ..memory.clone()
            };
            let pins = Pins::new(std::slice::from_ref(&chunk), pinning)?;
            self.report.bytes_pinned += pins.report().bytes_pinned;
            self.report.bytes_locked += pins.report().bytes_locked;
            chunks.pins.insert(number, pins);
        }
        Ok(())
    }

    /// Bytes that are pinned and locked.
    pub(crate) fn report(&self) -> PinReport {
        self.report
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::{memory::create_sealed, pin::PinPolicy};

    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn a_large_file_has_no_more_chunks_than_a_process_may_map() {
        let file = Arc::new(File::from(create_sealed("guest", PAGE).unwrap()));
        for shift in 12..=62 {
            let size = 1 << shift;
            let chunk = Chunks::new(&file, size).size;
            assert!(chunk >= CHUNK && size / chunk <= MAX_CHUNKS, "{size}");
        }
        assert_eq!(Chunks::new(&file, 8 << 30).size, CHUNK);
        assert_eq!(Chunks::new(&file, 64 << 30).size, 16 << 20);
    }

    #[test]
    fn pages_of_one_chunk_are_pinned_once_and_until_the_end() {
        let file = create_sealed("guest", CHUNK + 3 * PAGE).unwrap();
        let file = Arc::new(File::from(file));
        let options = PinOptions::new(PinPolicy::Prefer);
        let mut pins = PagePins::default();
        let page = |offset, len| MemoryRange {
            file: Arc::clone(&file),
            offset,
            len,
            writable: true,
        };
        let pinned = |pins: &PagePins| pins.report().bytes_pinned;
        for offset in [0, PAGE, CHUNK - PAGE, 0] {
            pins.pin(&page(offset, PAGE), &options).unwrap();
            assert_eq!(pinned(&pins), CHUNK);
        }
        // Across the border, and into the file's last, short chunk.
        pins.pin(&page(CHUNK - PAGE, 2 * PAGE), &options).unwrap();
        assert_eq!(pinned(&pins), CHUNK + 3 * PAGE);
        // Beyond the file: refused, and nothing else is lost by it.
        assert!(pins.pin(&page(2 * CHUNK, PAGE), &options).is_err());
        assert_eq!(pinned(&pins), CHUNK + 3 * PAGE);
        assert!(PagePins::fits(PAGE) && !PagePins::fits(CHUNK));
    }
}
