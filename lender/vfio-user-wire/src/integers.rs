//! Integers in and out of byte slices.
//!
//! All data is in the host's byte order ("Protocol Specification"): both ends of a
//! UNIX socket are on one host.

/// Decodes integers from the front of a payload; `None` at its end.
#[derive(Clone, Copy, Debug)]
pub struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    /// Of a payload.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    /// 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    /// 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    /// 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// The bytes that have not been decoded.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}

/// Appends integers to a message.
pub trait Put {
    /// 16 bits.
    fn put_u16(&mut self, value: u16);
    /// 32 bits.
    fn put_u32(&mut self, value: u32);
    /// 64 bits.
    fn put_u64(&mut self, value: u64);
}

impl Put for Vec<u8> {
    fn put_u16(&mut self, value: u16) {
        self.extend_from_slice(&value.to_ne_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_ne_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_ne_bytes());
    }
}
