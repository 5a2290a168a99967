//! Serial numbers of disks.
#![deny(unsafe_code)]

/// Bytes of a disk's serial number (ASCII): of Identify's field, and of virtio-blk's id.
pub const SERIAL_LEN: usize = 20;

/// The serial number of the device `id`, unless one is configured.
pub(crate) fn serial_for(configured: Option<&str>, id: &str) -> String {
    match configured {
        Some(serial) => serial.to_owned(),
        None if is_text(id, SERIAL_LEN) => id.to_owned(),
        // Too long or not ASCII: a part of the id, and a hash for uniqueness.
        None => {
            let front: String = id
                .chars()
                .filter(char::is_ascii_alphanumeric)
                .take(SERIAL_LEN - 9)
                .collect();
            format!("{front}-{:08x}", fnv(id.as_bytes()) as u32)
        }
    }
}

/// Whether a disk's serial number or model may be so: 1 to `max` printable ASCII characters, no space at the ends.
pub(crate) fn is_text(value: &str, max: usize) -> bool {
    let printable = value.chars().all(|c| c.is_ascii_graphic() || c == ' ');
    !value.is_empty() && value.len() <= max && printable && value.trim() == value
}

/// FNV-1a with 128 bits, for unique identifiers. Not cryptographic.
pub(crate) fn fnv(bytes: &[u8]) -> u128 {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(BASIS, |hash, &byte| {
        (hash ^ u128::from(byte)).wrapping_mul(PRIME)
    })
}
