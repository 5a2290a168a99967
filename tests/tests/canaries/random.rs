//! Pseudo-random numbers, addresses, commands and lists.

use std::ops::Range;

use farside_scripted_vmm::{nvme::DRIVER_RAM, ram::PAGE};

/// Pseudo-random numbers (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number from 0 to `end`, exclusive.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 16) % end
    }

    pub fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// A length: of a few bytes, of pages, and sometimes any.
    pub fn length(&mut self) -> u32 {
        match self.below(8) {
            0 => 1 << self.below(4),
            1 => self.below(64) as u32,
            2 => (PAGE * (1 + self.below(16))) as u32,
            3 => self.below(2 << 20) as u32,
            4 if self.below(8) == 0 => self.next() as u32,
            _ => self.below(3 * PAGE) as u32,
        }
    }

    /// An address for `len` bytes that are none of the NVMe driver's: inside the RAM `mapped`,
    /// over its edges, near other edges, or anywhere.
    pub fn address(&mut self, mapped: &[Range<u64>], len: u64) -> u64 {
        loop {
            let ram = mapped[self.below(mapped.len() as u64) as usize].clone();
            let address = match self.below(12) {
                0..4 => ram.start + self.below(ram.end - ram.start),
                4 | 5 => (ram.start + self.below(ram.end - ram.start)) & !(PAGE - 1),
                6 => self.near(ram.start),
                7 => self.near(ram.end),
                8 => {
                    let end = 0u64.wrapping_sub(len);
                    self.near(end)
                }
                // The local APIC, where the adapter's BAR is at the lender, and the largest
                // address of a CPU.
                9 => {
                    let edge = self.one_of(&[0xfee0_0000, 1 << 32, 1 << 52, 1 << 47]);
                    self.near(edge)
                }
                10 => ram.end + self.below(1 << 30),
                _ => self.next(),
            };
            let wraps = address.checked_add(len).is_none();
            if wraps || address >= DRIVER_RAM.end || address + len <= DRIVER_RAM.start {
                return address;
            }
        }
    }

    fn near(&mut self, edge: u64) -> u64 {
        edge.wrapping_sub(2 * PAGE)
            .wrapping_add(self.below(4 * PAGE))
    }

    /// A PRP entry.
    pub fn prp(&mut self, mapped: &[Range<u64>]) -> u64 {
        // An entry reaches to the end of its page.
        let address = self.address(mapped, PAGE);
        match self.below(8) {
            0 => address,
            _ => address & !(PAGE - 1),
        }
    }

    /// An SGL descriptor; `list` is where segments may be.
    pub fn sgl(&mut self, mapped: &[Range<u64>], list: Range<u64>) -> [u8; 16] {
        let kind = match self.below(8) {
            0 => 0x20,
            1 => 0x30,
            2 => self.next() as u8,
            _ => 0,
        };
        let len = match self.below(4) {
            0 => self.length(),
            _ => 512 << self.below(4),
        };
        let address = match kind {
            0x20 | 0x30 if self.below(4) > 0 => self.inside(list),
            _ => self.address(mapped, len.into()),
        };
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&len.to_le_bytes());
        descriptor[15] = kind;
        descriptor
    }

    /// An address in `range`, mostly aligned as PRP lists and SGL segments are.
    pub fn inside(&mut self, range: Range<u64>) -> u64 {
        let align = self.one_of(&[PAGE, PAGE, 16, 8, 1]);
        (range.start + self.below(range.end - range.start)) / align * align
    }

    /// An entry of an NVMe I/O submission queue (NVM Express 1.4, 4.2).
    pub fn nvme(&mut self, mapped: &[Range<u64>], list: Range<u64>) -> [u8; 64] {
        const IO: [u8; 10] = [1, 1, 1, 2, 2, 2, 2, 5, 8, 9];
        let mut dwords = [0u32; 16];
        let opcode = match self.below(16) {
            0 => self.next() as u8,
            _ => self.one_of(&IO),
        };
        // PSDT: PRPs, SGLs, or reserved.
        let pointer = self.one_of(&[0, 0, 0, 1, 2, 3]);
        dwords[0] = u32::from(opcode) | pointer << 14;
        dwords[1] = if self.below(32) == 0 {
            self.next() as u32
        } else {
            1
        };
        let data = match pointer {
            0 => {
                let second = match self.below(2) {
                    0 => self.inside(list),
                    _ => self.prp(mapped),
                };
                let first = self.address(mapped, PAGE);
                u128::from(first) | u128::from(second) << 64
            }
            _ => u128::from_le_bytes(self.sgl(mapped, list)),
        };
        for (n, dword) in dwords[6..10].iter_mut().enumerate() {
            *dword = (data >> (32 * n)) as u32;
        }
        // The first blocks, so that reads find what writes wrote.
        dwords[10] = self.below(1024) as u32;
        dwords[12] = match self.below(16) {
            0 => self.next() as u32,
            _ => self.below(64) as u32,
        };
        if opcode == 9 {
            // Dataset management: few ranges, deallocated.
            (dwords[10], dwords[11]) = (self.below(8) as u32, 1 << 2);
        }
        let mut entry = [0; 64];
        for (bytes, dword) in entry.chunks_mut(4).zip(dwords) {
            bytes.copy_from_slice(&dword.to_le_bytes());
        }
        entry
    }
}
