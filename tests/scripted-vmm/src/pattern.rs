//! Recognisable data: a stream of 64-bit words generated from a seed, and its checksum.

use sha2::{Digest, Sha256};

/// The seed of the guard pattern, which fills RAM that the device must not write.
pub const GUARD: u64 = 0x6661_7273_6964_6501;

/// The stream of a seed: `SplitMix64`, each word little endian.
#[derive(Clone, Debug)]
pub struct Pattern {
    state: u64,
}

impl Pattern {
    /// The stream of `seed`, from its beginning.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Fills `bytes`, whose length is a multiple of 8, with the next words.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes()[..word.len()]);
        }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }
}

/// SHA-256 over successive pieces.
#[derive(Default)]
pub struct Checksum(Sha256);

impl Checksum {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// In hexadecimal, as `sha256sum` prints it.
    pub fn finish(self) -> String {
        let digest = self.0.finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first words of SplitMix64 for seed 1234567, as published with it.
    #[test]
    fn the_stream_is_splitmix64() {
        let mut bytes = [0; 16];
        Pattern::new(1_234_567).fill(&mut bytes);
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(word(0), 6_457_827_717_110_365_317);
        assert_eq!(word(8), 3_203_168_211_198_807_973);
    }

    #[test]
    fn the_checksum_is_sha256() {
        let mut checksum = Checksum::default();
        checksum.update(b"a");
        checksum.update(b"bc");
        assert_eq!(
            checksum.finish(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
