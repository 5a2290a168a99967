//! Pins shared by the mappings of a guest with a vIOMMU.
//!
//! Such a guest maps each page of a buffer before an I/O and unmaps it after. Pinning page by page
//! would cost more than the I/O, so the first mapping in a chunk of the file ([`CHUNK`] bytes or
//! more) pins the whole chunk until the path closes: guests reuse their buffers. The total never
//! exceeds guest RAM, all of which is pinned for a guest without a vIOMMU.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs::File,
    sync::Arc,
};

use farside_fabric::{
    MemoryRange,
    pin::{PinOptions, PinReport},
};

use super::{
    error::PathError,
    vm_memory::{SharedPins, VmMemory},
};

/// Minimum chunk size: a huge page, which is pinned in one step.
const CHUNK: u64 = 2 << 20;

/// Maximum number of chunks of a file. Each is a mapping of this process, which the kernel limits
/// to 65,530 (`vm.max_map_count`).
const MAX_CHUNKS: u64 = 4096;

/// Pinned chunks, by the address of their `File`.
#[derive(Default)]
pub(crate) struct PagePins {
    files: BTreeMap<usize, Chunks>,
    report: PinReport,
}

/// The pinned chunks of one file, by number.
struct Chunks {
    /// Bytes per chunk.
    size: u64,
    pins: BTreeMap<u64, Arc<SharedPins>>,
    /// Keeps the address, which is the key, from being reused.
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
    /// Whether memory of `len` bytes is pinned in chunks.
    pub(crate) fn fits(len: u64) -> bool {
        len < CHUNK
    }

    /// Pins the chunks that contain `memory`, unless already pinned.
    pub(crate) fn pin(
        &mut self,
        memory: &MemoryRange,
        pinning: &PinOptions<'_>,
        vm: &VmMemory,
    ) -> Result<(), PathError> {
        let end = memory.offset + memory.len;
        let file_size = || memory.file.metadata().map_or(end, |file| file.len());
        let address = Arc::as_ptr(&memory.file) as usize;
        let chunks = match self.files.entry(address) {
            Entry::Occupied(chunks) => chunks.into_mut(),
            Entry::Vacant(place) => place.insert(Chunks::new(&memory.file, file_size())),
        };
        let size = chunks.size;
        for number in memory.offset / size..end.div_ceil(size) {
            if chunks.pins.contains_key(&number) {
                continue;
            }
            let offset = number * size;
            let chunk = MemoryRange {
                offset,
                // The last chunk may be short.
                len: size.min(file_size().saturating_sub(offset)),
                ..memory.clone()
            };
            let pins = vm.lock().pin(&chunk, pinning)?;
            self.report.bytes_pinned += pins.report().bytes_pinned;
            self.report.bytes_locked += pins.report().bytes_locked;
            chunks.pins.insert(number, pins);
        }
        Ok(())
    }

    /// Bytes pinned and locked.
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
        let vm = VmMemory::default();
        let mut pins = PagePins::default();
        let page = |offset, len| MemoryRange {
            file: Arc::clone(&file),
            offset,
            len,
            writable: true,
        };
        let pinned = |pins: &PagePins| pins.report().bytes_pinned;
        for offset in [0, PAGE, CHUNK - PAGE, 0] {
            pins.pin(&page(offset, PAGE), &options, &vm).unwrap();
            assert_eq!(pinned(&pins), CHUNK);
        }
        // Across the chunk boundary, into the file's last, short chunk.
        pins.pin(&page(CHUNK - PAGE, 2 * PAGE), &options, &vm)
            .unwrap();
        assert_eq!(pinned(&pins), CHUNK + 3 * PAGE);
        // Beyond the end of the file: refused without side effects.
        assert!(pins.pin(&page(2 * CHUNK, PAGE), &options, &vm).is_err());
        assert_eq!(pinned(&pins), CHUNK + 3 * PAGE);
        assert!(PagePins::fits(PAGE) && !PagePins::fits(CHUNK));
    }
}
