//! A guest's memory and interrupts, for tests.

use farside_fabric::{
    Access, Fault, FaultReason, Iova,
    memory::{HostSlice, SharedMemory},
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{Dma, Interrupts};

/// First IOVA of the guest's memory.
pub const BASE: u64 = 0x4000_0000;
/// Bytes of the guest's memory.
pub const SIZE: usize = 48 << 20;

/// Guest memory: one mapped range, and faults elsewhere.
pub struct Memory {
    pub all: HostSlice,
    /// The same memory, mapped read-only: a write through a translation for reading
    /// crashes the test.
    readable: HostSlice,
    /// Longest run that is contiguous in host memory.
    pub run: usize,
    pub faults: Vec<Fault>,
    pub translations: u64,
    /// Bus-master enable.
    pub bus_master: bool,
    /// Called before each translation.
    pub on_translate: Option<Box<dyn Fn(Iova)>>,
    /// Nothing is mapped, as while firmware remaps RAM.
    pub unmapped: bool,
}

impl Memory {
    pub fn new() -> Self {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, SIZE as u64).unwrap();
        let readable = SharedMemory::map(file.try_clone().unwrap(), 0, SIZE, false).unwrap();
        let memory = SharedMemory::map(file, 0, SIZE, true).unwrap();
        Self {
            all: memory.slice(0, SIZE).unwrap(),
            readable: readable.slice(0, SIZE).unwrap(),
            run: usize::MAX,
            faults: Vec::new(),
            translations: 0,
            bus_master: true,
            on_translate: None,
            unmapped: false,
        }
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        let offset = (at - BASE) as usize;
        self.all.slice(offset, bytes.len()).unwrap().write(bytes);
    }

    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let offset = (at - BASE) as usize;
        self.all.slice(offset, len).unwrap().read(&mut bytes);
        bytes
    }

    pub fn get_u32(&self, at: u64) -> u32 {
        u32::from_le_bytes(self.get(at, 4).try_into().unwrap())
    }

    pub fn put_qwords(&self, at: u64, qwords: impl IntoIterator<Item = u64>) {
        for (index, qword) in qwords.into_iter().enumerate() {
            self.put(at + index as u64 * 8, &qword.to_le_bytes());
        }
    }
}

impl Dma for Memory {
    fn is_bus_master(&self) -> bool {
        self.bus_master
    }

    fn reaches(&mut self, iova: Iova, len: usize, access: Access) -> bool {
        let faults = self.faults.len();
        let found = self.gather(iova, len, access, &mut Vec::new());
        self.faults.truncate(faults);
        found.is_ok()
    }

    fn translate(&mut self, iova: Iova, len: usize, access: Access) -> Result<HostSlice, Fault> {
        self.translations += 1;
        if let Some(on_translate) = &self.on_translate {
            on_translate(iova);
        }
        let inside = iova
            .offset_from(Iova::new(BASE))
            .filter(|&offset| offset < SIZE as u64 && !self.unmapped)
            .map(|offset| {
                let offset = offset as usize;
                let run = self.run - offset % self.run;
                (offset, len.min(run).min(SIZE - offset))
            });
        match inside {
            Some((offset, len)) => {
                let memory = match access {
                    Access::Read => &self.readable,
                    Access::Write => &self.all,
                };
                Ok(memory.slice(offset, len).unwrap())
            }
            None => {
                let fault = Fault {
                    iova,
                    len: len as u64,
                    access,
                    reason: FaultReason::LenderDomain,
                };
                self.faults.push(fault);
                Err(fault)
            }
        }
    }
}

/// Interrupts that were raised.
#[derive(Default)]
pub struct Irq {
    pub raised: Vec<u16>,
    pub line: bool,
    pub pending: Vec<u16>,
    pub intx: bool,
}

impl Interrupts for Irq {
    fn raise(&mut self, vector: u16) {
        self.raised.push(vector);
    }

    fn set_intx(&mut self, asserted: bool) {
        assert_ne!(self.line, asserted, "the line is set when it changes");
        self.line = asserted;
    }

    fn is_pending(&self, vector: u16) -> bool {
        self.pending.contains(&vector)
    }

    fn intx_in_use(&self) -> bool {
        self.intx
    }
}
