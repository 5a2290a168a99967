//! The memory behind BAR 2.

use farside_fabric::memory::HostSlice;

/// Memory of a fixed size: the device's own, or shared memory that the borrower's CPU
/// accesses, too. Switching copies the contents.
pub(super) struct Sram {
    own: Vec<u8>,
    shared: Option<HostSlice>,
}

impl Sram {
    pub(super) fn new(size: usize) -> Self {
        Self {
            own: vec![0; size],
            shared: None,
        }
    }

    /// Whether `[offset, offset + len)` is inside `size` bytes.
    pub(super) fn contains(size: u64, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= size)
    }

    /// The range must be inside.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let offset = offset as usize;
        match &self.shared {
            None => data.copy_from_slice(&self.own[offset..offset + data.len()]),
            Some(shared) => {
                let part = shared.slice(offset, data.len());
                part.expect("as long as our own memory").read(data);
            }
        }
    }

    /// The range must be inside.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        let offset = offset as usize;
        match &self.shared {
            None => self.own[offset..offset + data.len()].copy_from_slice(data),
            Some(shared) => {
                let part = shared.slice(offset, data.len());
                part.expect("as long as our own memory").write(data);
            }
        }
    }

    pub(super) fn set_memory(&mut self, memory: Option<HostSlice>) {
        if let Some(short) = memory.as_ref().filter(|m| m.len() < self.own.len()) {
            log::error!(
                "DMA test device: shared memory of {} bytes is too small for BAR 2 ({} bytes): not used",
                short.len(),
                self.own.len()
            );
            return;
        }
        if let Some(shared) = self.shared.take() {
            shared.read(&mut self.own);
        }
        if let Some(memory) = &memory {
            memory.write(&self.own);
        }
        self.shared = memory;
    }

    pub(super) fn clear(&mut self) {
        self.own.fill(0);
        if let Some(shared) = &self.shared {
            shared.write(&self.own);
        }
    }
}
