//! Expansion ROMs (PCI Firmware Specification 3.3, 5.1).

/// Largest ROM, bytes: what a ROM BAR can have (PCIe 7.5.1.2.4).
pub const MAX: usize = 16 << 20;

/// Smallest ROM BAR, bytes.
const MIN_BAR: u64 = 2 << 10;

/// Offset of the 16-bit pointer to the data structure.
const POINTER: usize = 0x18;
/// Of the data structure: its signature, and the image's length in units of 512 bytes.
const SIGNATURE: &[u8] = b"PCIR";
const LENGTH: usize = 0x10;

/// Why bytes are not an expansion ROM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the variants and fields")]
pub enum RomError {
    #[error("it has {0} bytes; an expansion ROM has at most {MAX}")]
    TooLarge(usize),
    #[error("it is not an expansion ROM: it does not begin with 0x55 0xaa")]
    Header,
    #[error("it is not a PCI expansion ROM: there is no PCIR at {0:#x}, where its header points")]
    Structure(usize),
    #[error("its first image has {image} bytes, and it has {len}: it is cut off")]
    CutOff { image: usize, len: usize },
}

/// Checks the header of the first image. The code in it is the guest's to check.
///
/// # Errors
/// [`RomError`].
pub fn check(rom: &[u8]) -> Result<(), RomError> {
    if rom.len() > MAX {
        return Err(RomError::TooLarge(rom.len()));
    }
    if !rom.starts_with(&[0x55, 0xaa]) {
        return Err(RomError::Header);
    }
    let u16 = |at: usize| {
        let bytes = rom.get(at..at + 2)?;
        Some(usize::from(bytes[0]) | usize::from(bytes[1]) << 8)
    };
    let at = u16(POINTER).ok_or(RomError::Header)?;
    let found = rom.get(at..at + SIGNATURE.len());
    if found != Some(SIGNATURE) {
        return Err(RomError::Structure(at));
    }
    let image = 512 * u16(at + LENGTH).ok_or(RomError::Structure(at))?;
    match image == 0 || image > rom.len() {
        true => Err(RomError::CutOff {
            image,
            len: rom.len(),
        }),
        false => Ok(()),
    }
}

/// Bytes of the BAR for a ROM of `len` bytes; 0 for none.
pub fn bar_size(len: usize) -> u64 {
    match len {
        0 => 0,
        len => (len as u64).next_power_of_two().max(MIN_BAR),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rom(len: usize) -> Vec<u8> {
        let mut rom = vec![0; len];
        rom[..2].copy_from_slice(&[0x55, 0xaa]);
        rom[POINTER] = 0x20;
        rom[0x20..0x24].copy_from_slice(SIGNATURE);
        rom[0x20 + LENGTH] = 4;
        rom
    }

    #[test]
    fn a_rom_has_a_header_and_all_of_its_image() {
        assert_eq!(check(&rom(2048)), Ok(()));
        assert_eq!(check(&rom(4096)), Ok(()), "with room behind it");
        let cut = RomError::CutOff {
            image: 2048,
            len: 2047,
        };
        assert_eq!(check(&rom(2047)), Err(cut));
        assert_eq!(check(b""), Err(RomError::Header));
        assert_eq!(check(b"#!/bin/sh"), Err(RomError::Header));
        assert_eq!(check(&[0x55, 0xaa]), Err(RomError::Header));
        let mut old = rom(2048);
        old[0x20] = b'I';
        assert_eq!(check(&old), Err(RomError::Structure(0x20)));
        old[POINTER + 1] = 0xff;
        assert_eq!(check(&old), Err(RomError::Structure(0xff20)));
        let large = vec![0; MAX + 1];
        assert_eq!(check(&large), Err(RomError::TooLarge(MAX + 1)));
    }

    #[test]
    fn bars_are_powers_of_two() {
        let sizes = [0, 1, 2048, 2049, MAX].map(bar_size);
        assert_eq!(sizes, [0, 2048, 2048, 4096, MAX as u64]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_fine(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            for (at, byte) in [0x55, 0xaa].into_iter().enumerate().take(bytes.len()) {
                bytes[at] = byte;
            }
            let _ = check(&bytes);
        }
    }
}
