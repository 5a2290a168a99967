//! Recognisable data.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// `len` pseudo-random bytes, the same for the same `seed`.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    // splitmix64
    let mut state = seed;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// As `sha256sum` prints it.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The checksum of `len` bytes of a file.
pub fn sha256_of(path: &Path, offset: u64, len: u64) -> Result<String> {
    let context = || format!("reading {}", path.display());
    let mut file = File::open(path).with_context(context)?;
    file.seek(SeekFrom::Start(offset)).with_context(context)?;
    let mut bytes = Vec::new();
    file.take(len)
        .read_to_end(&mut bytes)
        .with_context(context)?;
    anyhow::ensure!(bytes.len() as u64 == len, "{} is too short", path.display());
    Ok(sha256(&bytes))
}
