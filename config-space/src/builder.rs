//! Power-on values and masks, register by register.

use super::ConfigSpaceError;

/// Bytes of a conventional configuration space.
pub const CONVENTIONAL: usize = 256;
/// Bytes of an extended configuration space.
pub const EXTENDED: usize = 4096;

/// A configuration space in the making: the device's image, all of it
/// read-only until said otherwise.
///
/// Offsets come from structures that have been checked to lie inside.
pub struct Builder {
    bytes: Vec<u8>,
    writable: Vec<u8>,
    clearable: Vec<u8>,
}

impl Builder {
    pub fn new(image: &[u8]) -> Result<Self, ConfigSpaceError> {
        let size = image.len();
        if size != CONVENTIONAL && size != EXTENDED {
            return Err(ConfigSpaceError::Size(size));
        }
        Ok(Self {
            bytes: image.to_vec(),
            writable: vec![0; size],
            clearable: vec![0; size],
        })
    }

    /// The values as they are now.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn u8(&self, at: usize) -> u8 {
        self.bytes[at]
    }

    pub fn u16(&self, at: usize) -> u16 {
        get_u16(&self.bytes, at)
    }

    pub fn u32(&self, at: usize) -> u32 {
        get_u32(&self.bytes, at)
    }

    pub fn set_u8(&mut self, at: usize, value: u8) -> &mut Self {
        self.bytes[at] = value;
        self
    }

    pub fn set_u16(&mut self, at: usize, value: u16) -> &mut Self {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        self
    }

    pub fn set_u32(&mut self, at: usize, value: u32) -> &mut Self {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    /// Makes bytes read as zero.
    pub fn zero(&mut self, range: std::ops::Range<usize>) -> &mut Self {
        self.bytes[range].fill(0);
        self
    }

    pub fn writable_u8(&mut self, at: usize, mask: u8) -> &mut Self {
        self.writable[at] |= mask;
        self
    }

    pub fn writable_u16(&mut self, at: usize, mask: u16) -> &mut Self {
        or(&mut self.writable, at, &mask.to_le_bytes());
        self
    }

    pub fn writable_u32(&mut self, at: usize, mask: u32) -> &mut Self {
        or(&mut self.writable, at, &mask.to_le_bytes());
        self
    }

    pub fn clearable_u16(&mut self, at: usize, mask: u16) -> &mut Self {
        or(&mut self.clearable, at, &mask.to_le_bytes());
        self
    }

    pub fn clearable_u32(&mut self, at: usize, mask: u32) -> &mut Self {
        or(&mut self.clearable, at, &mask.to_le_bytes());
        self
    }

    /// Values, writable bits, clearable bits.
    pub fn finish(self) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        (self.bytes, self.writable, self.clearable)
    }
}

fn or(mask: &mut [u8], at: usize, bits: &[u8]) {
    for (mask, bits) in mask[at..].iter_mut().zip(bits) {
        *mask |= bits;
    }
}

/// A 16-bit register.
pub fn get_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// A 32-bit register.
pub fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from(get_u16(bytes, at)) | u32::from(get_u16(bytes, at + 2)) << 16
}
