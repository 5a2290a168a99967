//! Submission and completion queue entries (NVM Express 1.4, 4.2 and 4.6).

use farside_fabric::Iova;

use super::status::Status;

/// Bytes of a submission queue entry.
pub const SQE_SIZE: usize = 64;
/// Bytes of a completion queue entry.
pub const CQE_SIZE: usize = 16;
/// The namespace identifier that means all namespaces.
pub const NSID_ALL: u32 = 0xffff_ffff;

/// A submission queue entry (figure 105), copied out of guest memory once.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    dwords: [u32; 16],
}

/// A command's data pointer (PSDT, figure 104).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPointer {
    /// Physical region pages: PRP entries 1 and 2.
    Prp(Iova, Iova),
    /// The scatter gather list descriptor in the command.
    Sgl([u8; 16]),
}

impl Command {
    pub fn from_bytes(bytes: &[u8; SQE_SIZE]) -> Self {
        let mut dwords = [0; 16];
        for (dword, chunk) in dwords.iter_mut().zip(bytes.chunks_exact(4)) {
            *dword = u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
        }
        Self { dwords }
    }

    pub fn opcode(&self) -> u8 {
        self.dwords[0] as u8
    }

    /// Whether the command is half of a fused operation.
    pub fn is_fused(&self) -> bool {
        self.dwords[0] >> 8 & 3 != 0
    }

    pub fn id(&self) -> u16 {
        (self.dwords[0] >> 16) as u16
    }

    pub fn nsid(&self) -> u32 {
        self.dwords[1]
    }

    /// Command dword `index`, 10 to 15.
    pub fn cdw(&self, index: usize) -> u32 {
        self.dwords[index]
    }

    fn qword(&self, low: usize) -> u64 {
        u64::from(self.dwords[low]) | u64::from(self.dwords[low + 1]) << 32
    }

    pub fn prp1(&self) -> Iova {
        Iova::new(self.qword(6))
    }

    pub fn prp2(&self) -> Iova {
        Iova::new(self.qword(8))
    }

    /// The data pointer of an I/O command. The value 11b of PSDT is reserved.
    pub fn data_pointer(&self) -> Result<DataPointer, Status> {
        match self.dwords[0] >> 14 & 3 {
            0 => Ok(DataPointer::Prp(self.prp1(), self.prp2())),
            1 | 2 => {
                let mut descriptor = [0; 16];
                descriptor[..8].copy_from_slice(&self.qword(6).to_le_bytes());
                descriptor[8..].copy_from_slice(&self.qword(8).to_le_bytes());
                Ok(DataPointer::Sgl(descriptor))
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// The data pointer of an admin command: over PCIe these shall not use
    /// SGLs (4.2, PSDT).
    pub fn admin_data_pointer(&self) -> Result<DataPointer, Status> {
        match self.data_pointer()? {
            prp @ DataPointer::Prp(..) => Ok(prp),
            DataPointer::Sgl(_) => Err(Status::INVALID_FIELD),
        }
    }

    /// Starting LBA: command dwords 10 and 11.
    pub fn starting_lba(&self) -> u64 {
        self.qword(10)
    }

    /// Number of logical blocks, made one-based: 1 to 65,536.
    pub fn block_count(&self) -> u64 {
        u64::from(self.dwords[12] as u16) + 1
    }

    /// Force unit access: bit 30 of dword 12.
    pub fn is_fua(&self) -> bool {
        self.dwords[12] >> 30 & 1 != 0
    }
}

/// A completion queue entry (figure 121) without the phase tag, which is the queue's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Command specific result.
    pub result: u32,
    pub sq_head: u16,
    pub sq_id: u16,
    pub command_id: u16,
    pub status: Status,
}

impl Completion {
    /// Dwords 0 to 2, written before the phase tag.
    pub fn front(&self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&self.result.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.sq_head.to_le_bytes());
        bytes[10..].copy_from_slice(&self.sq_id.to_le_bytes());
        bytes
    }

    /// Dword 3, whose phase tag makes the entry valid.
    pub fn last(&self, phase: bool) -> u32 {
        u32::from(self.command_id) | u32::from(phase) << 16 | u32::from(self.status.bits()) << 17
    }
}

/// Admin command opcodes (figure 139) that the model implements.
pub mod admin {
    pub const DELETE_SQ: u8 = 0x00;
    pub const CREATE_SQ: u8 = 0x01;
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const DELETE_CQ: u8 = 0x04;
    pub const CREATE_CQ: u8 = 0x05;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0a;
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0c;
    pub const DOORBELL_BUFFER_CONFIG: u8 = 0x7c;
    pub const FORMAT_NVM: u8 = 0x80;
}

/// NVM command opcodes (figure 346) that the model implements.
pub mod io {
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const COMPARE: u8 = 0x05;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    pub const VERIFY: u8 = 0x0c;
    pub const RESERVATION_REGISTER: u8 = 0x0d;
    pub const RESERVATION_REPORT: u8 = 0x0e;
    pub const RESERVATION_ACQUIRE: u8 = 0x11;
    pub const RESERVATION_RELEASE: u8 = 0x15;

    pub fn is_of_reservations(opcode: u8) -> bool {
        matches!(
            opcode,
            RESERVATION_REGISTER | RESERVATION_REPORT | RESERVATION_ACQUIRE | RESERVATION_RELEASE
        )
    }
}
