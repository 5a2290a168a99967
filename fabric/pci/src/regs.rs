//! Registers of configuration space, by their names in Linux's `pci_regs.h`
//! without `PCI_`.
//!
//! Offsets are in bytes: header registers from the start of the space, a
//! capability's registers from the start of the capability. Section numbers are
//! those of the PCI Express Base Specification 6.0.

/// Bytes of a conventional configuration space (7.2.1).
pub const CFG_SPACE_SIZE: usize = 256;
/// Bytes of a PCI Express configuration space; extended capabilities begin at
/// [`CFG_SPACE_SIZE`] (7.2.2).
pub const CFG_SPACE_EXP_SIZE: usize = 4096;
/// Bytes of the header, and so the first offset that a capability can have
/// (7.5.1).
pub const STD_HEADER_SIZEOF: usize = 0x40;

/// Vendor ID, 16 bits (7.5.1.1.1).
pub const VENDOR_ID: usize = 0x00;
/// Device ID, 16 bits (7.5.1.1.2).
pub const DEVICE_ID: usize = 0x02;
/// Command, 16 bits (7.5.1.1.3).
pub const COMMAND: usize = 0x04;
/// Command: I/O Space Enable.
pub const COMMAND_IO: u16 = 1 << 0;
/// Command: Memory Space Enable.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: Bus Master Enable.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Command: Parity Error Response.
pub const COMMAND_PARITY: u16 = 1 << 6;
/// Command: SERR# Enable.
pub const COMMAND_SERR: u16 = 1 << 8;
/// Command: Interrupt Disable, which is for INTx only.
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Status, 16 bits (7.5.1.1.4).
pub const STATUS: usize = 0x06;
/// Status: an INTx interrupt is pending, whatever [`COMMAND_INTX_DISABLE`].
pub const STATUS_INTERRUPT: u16 = 1 << 3;
/// Status: [`CAPABILITY_LIST`] holds a pointer.
pub const STATUS_CAP_LIST: u16 = 1 << 4;
/// Revision ID in bits 7:0, Class Code in 31:8 (7.5.1.1.5, 7.5.1.1.6).
pub const CLASS_REVISION: usize = 0x08;
/// Cache Line Size, 8 bits (7.5.1.1.7).
pub const CACHE_LINE_SIZE: usize = 0x0c;
/// Latency Timer, 8 bits (7.5.1.1.8).
pub const LATENCY_TIMER: usize = 0x0d;
/// Header Type, 8 bits (7.5.1.1.9).
pub const HEADER_TYPE: usize = 0x0e;
/// Header Type: the layout, 0 for endpoints. Bit 7 is Multi-Function Device.
pub const HEADER_TYPE_MASK: u8 = 0x7f;
/// Built-in self test, 8 bits (7.5.1.1.10).
pub const BIST: usize = 0x0f;
/// BAR 0, the first of six of 32 bits each (7.5.1.2.1).
pub const BASE_ADDRESS_0: usize = 0x10;
// Type and address bits of a BAR.
pub(crate) const BASE_ADDRESS_SPACE_IO: u32 = 1 << 0;
pub(crate) const BASE_ADDRESS_MEM_TYPE_MASK: u32 = 0b11 << 1;
pub(crate) const BASE_ADDRESS_MEM_TYPE_64: u32 = 0b10 << 1;
pub(crate) const BASE_ADDRESS_MEM_PREFETCH: u32 = 1 << 3;
pub(crate) const BASE_ADDRESS_IO_MASK: u32 = !0b11;
pub(crate) const BASE_ADDRESS_MEM_MASK: u32 = !0b1111;
/// Cardbus CIS Pointer, 32 bits (7.5.1.2.2).
pub const CARDBUS_CIS: usize = 0x28;
pub(crate) const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
pub(crate) const SUBSYSTEM_ID: usize = 0x2e;
/// Expansion ROM Base Address, 32 bits (7.5.1.2.4).
pub const ROM_ADDRESS: usize = 0x30;
/// Expansion ROM Base Address: enable.
pub const ROM_ADDRESS_ENABLE: u32 = 1 << 0;
/// Offset of the first capability, 8 bits (7.5.1.1.11).
pub const CAPABILITY_LIST: usize = 0x34;
/// Interrupt Line, 8 bits (7.5.1.1.12).
pub const INTERRUPT_LINE: usize = 0x3c;
/// Interrupt Pin, 8 bits: 0 for none, 1 for INTA (7.5.1.1.13).
pub const INTERRUPT_PIN: usize = 0x3d;

/// Offset of the next capability, 8 bits; the capability ID is at 0
/// (7.5.1.1.11).
pub const CAP_LIST_NEXT: usize = 1;
/// Capability ID of power management.
pub const CAP_ID_PM: u8 = 0x01;
/// Capability ID of MSI.
pub const CAP_ID_MSI: u8 = 0x05;
/// Capability ID of a vendor-specific capability.
pub const CAP_ID_VNDR: u8 = 0x09;
/// Capability ID of PCI Express.
pub const CAP_ID_EXP: u8 = 0x10;
/// Capability ID of MSI-X.
pub const CAP_ID_MSIX: u8 = 0x11;

/// Power Management Capabilities, 16 bits (7.5.2.1).
pub const PM_PMC: usize = 2;
/// Power Management Control/Status, 16 bits (7.5.2.2).
pub const PM_CTRL: usize = 4;
/// Power management: the state, 0 for D0 to 3 for D3hot.
pub const PM_CTRL_STATE_MASK: u16 = 0b11;
/// Power management: the function keeps its state from D3hot to D0.
pub const PM_CTRL_NO_SOFT_RESET: u16 = 1 << 3;
/// Bytes of the power management capability.
pub const PM_SIZEOF: usize = 8;

/// MSI Message Control, 16 bits (7.7.1.2).
pub const MSI_FLAGS: usize = 2;
/// MSI: enable.
pub const MSI_FLAGS_ENABLE: u16 = 1 << 0;
/// MSI: log2 of the vectors that the function requests.
pub const MSI_FLAGS_QMASK: u16 = 0b111 << 1;
/// MSI: log2 of the vectors that software enables.
pub const MSI_FLAGS_QSIZE: u16 = 0b111 << 4;
/// MSI: 64-bit addresses.
pub const MSI_FLAGS_64BIT: u16 = 1 << 7;
/// MSI: a mask bit for each vector.
pub const MSI_FLAGS_MASKBIT: u16 = 1 << 8;
/// MSI Message Address, 32 bits (7.7.1.3).
pub const MSI_ADDRESS_LO: usize = 4;
/// MSI Message Upper Address, 32 bits, with [`MSI_FLAGS_64BIT`] (7.7.1.4).
pub const MSI_ADDRESS_HI: usize = 8;

/// MSI-X Message Control, 16 bits (7.7.2.2).
pub const MSIX_FLAGS: usize = 2;
/// MSI-X: table size, less one.
pub const MSIX_FLAGS_QSIZE: u16 = 0x7ff;
/// MSI-X: all vectors are masked.
pub const MSIX_FLAGS_MASKALL: u16 = 1 << 14;
/// MSI-X: enable.
pub const MSIX_FLAGS_ENABLE: u16 = 1 << 15;
// Both hold a BAR number and an offset in that BAR (7.7.2.3, 7.7.2.4).
pub(crate) const MSIX_TABLE: usize = 4;
pub(crate) const MSIX_PBA: usize = 8;
pub(crate) const MSIX_BIR: u32 = 0b111;
/// Bytes of the MSI-X capability.
pub const MSIX_SIZEOF: usize = 12;
pub(crate) const MSIX_ENTRY_SIZE: u64 = 16;

/// PCI Express Capabilities, 16 bits (7.5.3.2).
pub const EXP_FLAGS: usize = 0x02;
/// Device Capabilities, 32 bits (7.5.3.3).
pub const EXP_DEVCAP: usize = 0x04;
pub(crate) const EXP_DEVCAP_RBER: u32 = 1 << 15;
/// Device Capabilities: Function Level Reset.
pub const EXP_DEVCAP_FLR: u32 = 1 << 28;
/// Device Control, 16 bits (7.5.3.4).
pub const EXP_DEVCTL: usize = 0x08;
/// Device Control after a reset: relaxed ordering, no snoop, 512-byte read
/// requests.
pub const EXP_DEVCTL_DEFAULT: u16 = 0x2810;
/// Device Control: Enable Relaxed Ordering.
pub const EXP_DEVCTL_RELAX_EN: u32 = 1 << 4;
/// Device Control: Max_Read_Request_Size.
pub const EXP_DEVCTL_READRQ: u32 = 0b111 << 12;
/// Device Status, 16 bits (7.5.3.5).
pub const EXP_DEVSTA: usize = 0x0a;
/// Link Capabilities, 32 bits (7.5.3.6).
pub const EXP_LNKCAP: usize = 0x0c;
/// Link Control, 16 bits (7.5.3.7).
pub const EXP_LNKCTL: usize = 0x10;
/// Link Status, 16 bits (7.5.3.8).
pub const EXP_LNKSTA: usize = 0x12;
/// Device Capabilities 2, 32 bits (7.5.3.15).
pub const EXP_DEVCAP2: usize = 0x24;
/// Device Control 2, 16 bits (7.5.3.16).
pub const EXP_DEVCTL2: usize = 0x28;
/// Device Status 2, 16 bits (7.5.3.17).
pub const EXP_DEVSTA2: usize = 0x2a;
pub(crate) const EXP_LNKCAP2: usize = 0x2c;
pub(crate) const EXP_LNKCTL2: usize = 0x30;
