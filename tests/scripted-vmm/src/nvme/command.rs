//! Commands and completions (NVM Express 1.4, 4.2 and 4.6), and the lists of
//! pages that commands carry (4.3).

use anyhow::{Result, ensure};

use crate::ram::PAGE;

/// Most bytes of a transfer: the PRP list is limited to one page, without chaining.
pub const MAX_TRANSFER: u64 = 1 << 20;

/// Opcodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// Creates a submission queue.
    CreateSq,
    /// Creates a completion queue.
    CreateCq,
    /// Reads the identify data of the controller or a namespace.
    Identify,
    /// Sets a feature.
    SetFeatures,
    /// Configures the doorbell buffer in memory.
    DoorbellBufferConfig,
    /// Makes data durable.
    Flush,
    /// Memory to namespace.
    Write,
    /// Namespace to memory.
    Read,
}

impl Opcode {
    fn code(self) -> u8 {
        match self {
            Opcode::Flush => 0x00,
            // Admin and I/O opcodes overlap; the queue distinguishes them.
            Opcode::CreateSq | Opcode::Write => 0x01,
            Opcode::Read => 0x02,
            Opcode::CreateCq => 0x05,
            Opcode::Identify => 0x06,
            Opcode::SetFeatures => 0x09,
            Opcode::DoorbellBufferConfig => 0x7c,
        }
    }
}

/// A command before it is assigned a command identifier.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// Opcode.
    pub opcode: Opcode,
    /// Namespace identifier; 0 if unused.
    pub namespace: u32,
    /// Data pointer.
    pub prp: [u64; 2],
    /// Words 10 to 12.
    pub words: [u32; 3],
}

impl Command {
    /// A command without data.
    pub fn new(opcode: Opcode, namespace: u32) -> Self {
        Self {
            opcode,
            namespace,
            prp: [0; 2],
            words: [0; 3],
        }
    }

    /// A read or write of `count` blocks from `block` on.
    pub fn transfer(opcode: Opcode, namespace: u32, block: u64, count: u64, prp: [u64; 2]) -> Self {
        Self {
            opcode,
            namespace,
            prp,
            words: [block as u32, (block >> 32) as u32, count as u32 - 1],
        }
    }

    /// The 64 bytes of its submission-queue entry.
    pub fn entry(&self, id: u16) -> [u8; 64] {
        let mut words = [0; 16];
        words[0] = u32::from(self.opcode.code()) | u32::from(id) << 16;
        words[1] = self.namespace;
        for (at, prp) in [6, 8].into_iter().zip(self.prp) {
            words[at] = prp as u32;
            words[at + 1] = (prp >> 32) as u32;
        }
        words[10..13].copy_from_slice(&self.words);
        let mut bytes = [0; 64];
        for (bytes, word) in bytes.chunks_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// The data pointer for `bytes` at `address`, and the PRP list to write to the page at
/// `list`.
///
/// # Errors
/// If `bytes` is 0 or exceeds [`MAX_TRANSFER`], or `address` is not page-aligned.
pub fn data_pointer(address: u64, bytes: u64, list: u64) -> Result<([u64; 2], Vec<u8>)> {
    ensure!(
        address.is_multiple_of(PAGE) && bytes > 0 && bytes <= MAX_TRANSFER,
        "a transfer of {bytes:#x} bytes at {address:#x}: this driver moves up to \
         {MAX_TRANSFER:#x} bytes from a page's beginning on"
    );
    let rest: Vec<u64> = (1..bytes.div_ceil(PAGE))
        .map(|page| address.wrapping_add(page * PAGE))
        .collect();
    Ok(match rest.as_slice() {
        [] => ([address, 0], Vec::new()),
        &[second] => ([address, second], Vec::new()),
        many => {
            let bytes = many.iter().flat_map(|page| page.to_le_bytes()).collect();
            ([address, list], bytes)
        }
    })
}

/// A command's completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The command-specific result (dword 0).
    pub result: u32,
    /// Status code, with its type from bit 8 on; 0 is success.
    pub status: u16,
}

impl Completion {
    /// # Errors
    /// If the command failed; the message has its status.
    pub fn success(self, what: &str) -> Result<Self> {
        ensure!(
            self.status == 0,
            "{what}: the device answers with status type {:#x} code {:#x}",
            self.status >> 8,
            self.status & 0xff
        );
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_its_fields_where_the_drive_looks() {
        let command = Command::transfer(Opcode::Read, 1, 0x1_0000_0002, 8, [0x1000, 0x1_0000_2000]);
        let entry = command.entry(0xabcd);
        assert_eq!(entry[..8], [2, 0, 0xcd, 0xab, 1, 0, 0, 0]);
        assert_eq!(entry[24..32], 0x1000u64.to_le_bytes());
        assert_eq!(entry[32..40], 0x1_0000_2000u64.to_le_bytes());
        assert_eq!(entry[40..48], 0x1_0000_0002u64.to_le_bytes());
        assert_eq!(entry[48..52], 7u32.to_le_bytes());
    }

    #[test]
    fn pages_beyond_the_second_are_in_a_list() {
        let list = 0x9000;
        assert_eq!(
            data_pointer(0x4000, 512, list).unwrap(),
            ([0x4000, 0], vec![])
        );
        assert_eq!(
            data_pointer(0x4000, 0x2000, list).unwrap(),
            ([0x4000, 0x5000], vec![])
        );
        let (prp, entries) = data_pointer(0x4000, MAX_TRANSFER, list).unwrap();
        assert_eq!(prp, [0x4000, list]);
        assert_eq!(entries.len(), 255 * 8);
        assert_eq!(entries[..8], 0x5000u64.to_le_bytes());
        for (address, bytes) in [(0x4001, 512), (0x4000, 0), (0x4000, MAX_TRANSFER + 1)] {
            assert!(data_pointer(address, bytes, list).is_err());
        }
    }
}
