//! Queue entries, as a driver writes and reads them.

/// Builder of a submission queue entry.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sqe(pub [u32; 16]);

impl Sqe {
    pub fn new(opcode: u8) -> Self {
        let mut sqe = Self::default();
        sqe.0[0] = opcode.into();
        sqe
    }

    pub fn nsid(mut self, nsid: u32) -> Self {
        self.0[1] = nsid;
        self
    }

    pub fn prp(mut self, prp1: u64, prp2: u64) -> Self {
        self.0[6] = prp1 as u32;
        self.0[7] = (prp1 >> 32) as u32;
        self.0[8] = prp2 as u32;
        self.0[9] = (prp2 >> 32) as u32;
        self
    }

    pub fn sgl(mut self, address: u64, len: u32, kind: u8) -> Self {
        self.0[0] |= 1 << 14;
        self.prp(address, u64::from(len) | u64::from(kind) << 56)
    }

    pub fn cdw(mut self, index: usize, value: u32) -> Self {
        self.0[index] = value;
        self
    }

    pub fn blocks(self, first: u64, count: u32) -> Self {
        let control = self.0[12] & 0xffff_0000;
        self.cdw(10, first as u32)
            .cdw(11, (first >> 32) as u32)
            .cdw(12, control | (count - 1))
    }

    pub fn id(mut self, id: u16) -> Self {
        self.0[0] = self.0[0] & 0xffff | u32::from(id) << 16;
        self
    }

    pub fn bytes(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        for (chunk, dword) in bytes.chunks_exact_mut(4).zip(self.0) {
            chunk.copy_from_slice(&dword.to_le_bytes());
        }
        bytes
    }
}

/// A decoded completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    pub result: u32,
    pub sq_head: u16,
    pub sq_id: u16,
    pub id: u16,
    /// Status code type and status code.
    pub status: (u16, u16),
}

pub const OK: (u16, u16) = (0, 0);
