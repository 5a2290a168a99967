//! Decodes values from the fuzzer's input.

/// Takes values off the front; returns zeros at the end of the input.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn u8(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub fn u16(&mut self) -> u16 {
        u16::from(self.u8()) | u16::from(self.u8()) << 8
    }

    /// The next `len` bytes, or fewer at the end of the input.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head
    }
}

impl Input<'_> {
    pub fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    pub fn u64(&mut self) -> u64 {
        u64::from(self.u32()) | u64::from(self.u32()) << 32
    }

    /// A number of any magnitude: a byte that selects it, then one byte or eight.
    pub fn number(&mut self) -> u64 {
        match self.u8() {
            short @ 0..=0x7f => short.into(),
            0x80..=0xbf => self.u8().into(),
            0xc0..=0xdf => u64::from(self.u8()) << 12,
            0xe0..=0xef => self.u32().into(),
            0xf0..=0xf7 => u64::MAX - u64::from(self.u8()),
            _ => self.u64(),
        }
    }
}
