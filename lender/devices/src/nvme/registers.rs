//! Controller registers (NVM Express 1.4, 3.1) and the layout of BAR 0.
//!
//! ```text
//! 0x0000  controller registers
//! 0x1000  doorbells, stride 4 bytes (CAP.DSTRD = 0)
//! 0x2000  MSI-X table
//! 0x3000  MSI-X pending bit array
//! ```

/// Bytes of BAR 0. Windows refuses a controller with less than 16 KiB.
pub const BAR_SIZE: u64 = 0x4000;
/// Offset of the first doorbell.
pub const DOORBELLS: u64 = 0x1000;
/// Offset of the MSI-X table.
pub const MSIX_TABLE: u64 = 0x2000;
/// Offset of the MSI-X pending bit array.
pub const MSIX_PBA: u64 = 0x3000;
/// Most MSI-X vectors that fit between table and pending bit array.
pub const MAX_VECTORS: u16 = 256;

/// Largest queue, in entries.
pub const MAX_QUEUE_ENTRIES: u32 = 1024;
/// log2 of the largest memory page over the smallest, 4 KiB (CAP.MPSMAX).
pub const MAX_PAGE_SHIFT: u32 = 4;

/// Offsets of registers (figure 68).
pub mod offset {
    pub const CAP: u64 = 0x00;
    pub const CAP_HIGH: u64 = 0x04;
    pub const VS: u64 = 0x08;
    pub const INTMS: u64 = 0x0c;
    pub const INTMC: u64 = 0x10;
    pub const CC: u64 = 0x14;
    pub const CSTS: u64 = 0x1c;
    pub const AQA: u64 = 0x24;
    pub const ASQ: u64 = 0x28;
    pub const ASQ_HIGH: u64 = 0x2c;
    pub const ACQ: u64 = 0x30;
    pub const ACQ_HIGH: u64 = 0x34;
}

/// Version 1.4.0 (3.1.2).
pub const VERSION: u32 = 0x0001_0400;

/// Controller capabilities (3.1.1), but for that of a memory buffer.
fn capabilities() -> u64 {
    const CONTIGUOUS_QUEUES_REQUIRED: u64 = 1 << 16;
    // Worst case of a disable, which waits for all I/O in flight. In units of 500 ms.
    const TIMEOUT: u64 = 60 << 24;
    const NVM_COMMAND_SET: u64 = 1 << 37;
    u64::from(MAX_QUEUE_ENTRIES - 1)
        | CONTIGUOUS_QUEUES_REQUIRED
        | TIMEOUT
        | NVM_COMMAND_SET
        | u64::from(MAX_PAGE_SHIFT) << 52
}

/// Controller configuration (3.1.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Configuration(pub u32);

impl Configuration {
    /// Writable bits.
    pub const WRITABLE: u32 = 0x00ff_fff1;

    pub fn enabled(self) -> bool {
        self.0 & 1 != 0
    }

    /// I/O command set selected; 0 is NVM.
    pub fn command_set(self) -> u32 {
        self.0 >> 4 & 7
    }

    /// log2 of the memory page size over 4 KiB.
    pub fn page_shift(self) -> u32 {
        self.0 >> 7 & 0xf
    }

    /// Bytes of a memory page. Only for checked values.
    pub fn page_size(self) -> u64 {
        4096 << self.page_shift()
    }

    /// Arbitration mechanism; 0 is round robin.
    pub fn arbitration(self) -> u32 {
        self.0 >> 11 & 7
    }

    /// Whether a shutdown is requested, normal or abrupt.
    pub fn shutdown(self) -> bool {
        matches!(self.0 >> 14 & 3, 1 | 2)
    }

    /// log2 of the size of a submission queue entry.
    pub fn sqe_shift(self) -> u32 {
        self.0 >> 16 & 0xf
    }

    /// log2 of the size of a completion queue entry.
    pub fn cqe_shift(self) -> u32 {
        self.0 >> 20 & 0xf
    }
}

/// Shutdown status (CSTS.SHST).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shutdown {
    /// No shutdown requested.
    #[default]
    None,
    /// Commands in flight complete, then the cache is flushed.
    Occurring,
    /// All writes are on the medium.
    Complete,
}

/// CAP.CMBS in the upper doubleword: there is a controller memory buffer.
pub const CMB_SUPPORTED: u32 = 1 << 25;

/// Controller status (3.1.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerStatus {
    pub ready: bool,
    pub fatal: bool,
    pub shutdown: Shutdown,
}

impl ControllerStatus {
    pub fn bits(self) -> u32 {
        let shutdown = match self.shutdown {
            Shutdown::None => 0,
            Shutdown::Occurring => 1,
            Shutdown::Complete => 2,
        };
        u32::from(self.ready) | u32::from(self.fatal) << 1 | shutdown << 2
    }
}

/// The storage registers and CSTS.
#[derive(Debug, Default)]
pub struct Registers {
    pub cc: Configuration,
    pub csts: ControllerStatus,
    /// Admin queue attributes.
    pub aqa: u32,
    /// Address of the admin submission queue.
    pub asq: u64,
    /// Address of the admin completion queue.
    pub acq: u64,
    /// Vectors masked by INTMS (pin-based interrupts only).
    pub interrupt_mask: u32,
}

impl Registers {
    /// Entries of the admin submission queue.
    pub fn admin_sq_entries(&self) -> u32 {
        (self.aqa & 0xfff) + 1
    }

    /// Entries of the admin completion queue.
    pub fn admin_cq_entries(&self) -> u32 {
        (self.aqa >> 16 & 0xfff) + 1
    }

    /// The doubleword at `at`, a multiple of 4; reserved ones read as zero.
    pub fn read(&self, at: u64) -> u32 {
        match at {
            offset::CAP => capabilities() as u32,
            offset::CAP_HIGH => (capabilities() >> 32) as u32,
            offset::VS => VERSION,
            offset::INTMS | offset::INTMC => self.interrupt_mask,
            offset::CC => self.cc.0,
            offset::CSTS => self.csts.bits(),
            offset::AQA => self.aqa,
            offset::ASQ => self.asq as u32,
            offset::ASQ_HIGH => (self.asq >> 32) as u32,
            offset::ACQ => self.acq as u32,
            offset::ACQ_HIGH => (self.acq >> 32) as u32,
            _ => 0,
        }
    }

    /// Writes a register without side effects.
    pub fn write_plain(&mut self, at: u64, value: u32) {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value & !0xfff);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match at {
            offset::AQA => self.aqa = value & 0x0fff_0fff,
            offset::ASQ => self.asq = low(self.asq),
            offset::ASQ_HIGH => self.asq = high(self.asq),
            offset::ACQ => self.acq = low(self.acq),
            offset::ACQ_HIGH => self.acq = high(self.acq),
            _ => {}
        }
    }
}
