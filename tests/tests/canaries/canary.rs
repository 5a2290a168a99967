//! Memory with known contents.

use std::{fs::File, ops::Range, os::unix::fs::FileExt};

const PIECE: u64 = 64 << 10;

/// Ranges of a file, filled with one word.
pub struct Canary {
    name: &'static str,
    file: File,
    ranges: Vec<Range<u64>>,
    word: [u8; 8],
}

impl Canary {
    /// Fills `ranges` of `file`. The word is the name's, and unlike any pattern of four bytes.
    pub fn new(name: &'static str, file: &File, ranges: Vec<Range<u64>>) -> Self {
        let hash = |seed: u64, byte: u8| (seed ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let word = name.bytes().fold(0xcbf2_9ce4_8422_2325, hash).to_le_bytes();
        assert_ne!(word[..4], word[4..]);
        let canary = Self {
            name,
            file: file.try_clone().unwrap(),
            ranges,
            word,
        };
        let bytes = canary.word.repeat(PIECE as usize / 8);
        for (at, len) in canary.pieces() {
            canary.file.write_all_at(&bytes[..len], at).unwrap();
        }
        canary
    }

    /// The offset and length of each piece.
    fn pieces(&self) -> impl Iterator<Item = (u64, usize)> {
        self.ranges.iter().flat_map(|range| {
            let end = range.end;
            (range.start..end)
                .step_by(PIECE as usize)
                .map(move |at| (at, PIECE.min(end - at) as usize))
        })
    }

    /// Fails with the first byte that has changed.
    pub fn check(&self) -> Result<(), String> {
        let expected = self.word.repeat(PIECE as usize / 8);
        let mut found = vec![0; PIECE as usize];
        for (at, len) in self.pieces() {
            self.file.read_exact_at(&mut found[..len], at).unwrap();
            if found[..len] != expected[..len] {
                let differs = (0..len).find(|&n| found[n] != expected[n]).unwrap();
                let from = at + differs as u64;
                return Err(format!(
                    "the canary {} has changed at {from:#x} of its file: {:02x?}",
                    self.name,
                    &found[differs..len.min(differs + 16)]
                ));
            }
        }
        Ok(())
    }

    /// Fails if `memory` has the canary's word: it was read. `what` names the memory.
    pub fn check_unread(&self, what: &str, memory: &[u8]) -> Result<(), String> {
        match memchr::memmem::find(memory, &self.word) {
            None => Ok(()),
            Some(at) => Err(format!(
                "the canary {} was copied to {what}, at {at:#x}",
                self.name
            )),
        }
    }
}
