//! Identify data structures (NVM Express 1.4, 5.15.2).

use super::{
    config::MODEL_LEN,
    events::MAX_EVENT_REQUESTS,
    logs::ERROR_LOG_ENTRIES,
    namespace::{NSID, Namespace},
    pci::{DEVICE_ID, VENDOR_ID},
    registers::VERSION,
    sgl,
};
use crate::block::SERIAL_LEN;

/// Bytes of every Identify data structure.
pub const SIZE: usize = 4096;

/// log2 of the largest transfer in pages of 4 KiB (MDTS): 1 MiB.
pub const MDTS: u8 = 8;
/// Bytes of the largest transfer.
pub const MAX_TRANSFER: u64 = 4096 << MDTS;

/// Constant composite temperature of the model, in kelvins.
pub const TEMPERATURE: u16 = 313;
/// Warning composite temperature threshold (WCTEMP), in kelvins.
pub const WARNING_TEMPERATURE: u16 = 343;
const CRITICAL_TEMPERATURE: u16 = 353;

/// Firmware revision: the version of this crate.
pub const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

/// Texts of Identify Controller, as checked by [`Config::validate`](super::Config::validate).
#[derive(Debug)]
pub struct Names {
    pub serial: String,
    pub model: String,
}

/// Builder of a data structure.
struct Data(Box<[u8; SIZE]>);

impl Data {
    fn new() -> Self {
        Self(Box::new([0; SIZE]))
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put8(&mut self, at: usize, value: u8) {
        self.0[at] = value;
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.put(at, &value.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_le_bytes());
    }

    fn put64(&mut self, at: usize, value: u64) {
        self.put(at, &value.to_le_bytes());
    }

    /// ASCII, padded with spaces or truncated.
    fn put_text(&mut self, at: usize, len: usize, text: &str) {
        let field = &mut self.0[at..at + len];
        field.fill(b' ');
        for (to, from) in field.iter_mut().zip(text.bytes()) {
            *to = from;
        }
    }
}

/// Identify Controller (CNS 01h, figure 247).
///
/// `shared` is the number of a controller that shares its namespace with others of its subsystem.
pub fn controller(names: &Names, doorbell_buffer: bool, shared: Option<u16>) -> Box<[u8; SIZE]> {
    let mut data = Data::new();
    data.put16(0, VENDOR_ID); // VID
    data.put16(2, VENDOR_ID); // SSVID
    data.put_text(4, SERIAL_LEN, &names.serial); // SN
    data.put_text(24, MODEL_LEN, &names.model); // MN
    data.put_text(64, 8, FIRMWARE); // FR
    data.put8(72, 6); // RAB: bursts of 64 commands
    if shared.is_some() {
        const SEVERAL_CONTROLLERS: u8 = 1 << 1;
        data.put8(76, SEVERAL_CONTROLLERS); // CMIC
    }
    data.put8(77, MDTS);
    data.put16(78, shared.unwrap_or(0)); // CNTLID
    data.put32(80, VERSION); // VER
    const NAMESPACE_NOTICES: u32 = 1 << 8;
    data.put32(92, NAMESPACE_NOTICES); // OAES
    if shared.is_some() {
        data.put32(96, 1); // CTRATT: identifiers of 128 bits
    }
    data.put8(111, 1); // CNTRLTYPE: I/O controller

    const FORMAT: u16 = 1 << 1;
    const DOORBELL_BUFFER: u16 = 1 << 8;
    let doorbell_buffer = if doorbell_buffer { DOORBELL_BUFFER } else { 0 };
    data.put16(256, FORMAT | doorbell_buffer); // OACS
    data.put8(258, 3); // ACL, zero-based
    data.put8(259, (MAX_EVENT_REQUESTS - 1) as u8); // AERL, zero-based
    data.put8(260, 1 | 1 << 1); // FRMW: one slot, read-only
    const EFFECTS_LOG: u8 = 1 << 1;
    const EXTENDED_LOG_DATA: u8 = 1 << 2;
    data.put8(261, EFFECTS_LOG | EXTENDED_LOG_DATA); // LPA
    data.put8(262, (ERROR_LOG_ENTRIES - 1) as u8); // ELPE, zero-based
    data.put16(266, WARNING_TEMPERATURE);
    data.put16(268, CRITICAL_TEMPERATURE);

    data.put8(512, 0x66); // SQES: 64 bytes
    data.put8(513, 0x44); // CQES: 16 bytes
    data.put32(516, 1); // NN
    const COMPARE: u16 = 1 << 0;
    const DATASET_MANAGEMENT: u16 = 1 << 2;
    const WRITE_ZEROES: u16 = 1 << 3;
    const SELECT_FEATURES: u16 = 1 << 4;
    const RESERVATIONS: u16 = 1 << 5;
    const TIMESTAMP: u16 = 1 << 6;
    const VERIFY: u16 = 1 << 7;
    let reservations = if shared.is_some() { RESERVATIONS } else { 0 };
    data.put16(
        520,
        COMPARE
            | DATASET_MANAGEMENT
            | WRITE_ZEROES
            | SELECT_FEATURES
            | reservations
            | TIMESTAMP
            | VERIFY,
    ); // ONCS
    const CACHE_PRESENT: u8 = 1;
    const FLUSH_ALL: u8 = 0b11 << 1;
    data.put8(525, CACHE_PRESENT | FLUSH_ALL); // VWC
    // AWUN, AWUPF: 0, one block.
    const SGL_BYTE_ALIGNED: u32 = 1;
    // Linux describes a user's buffer by an SGL as a whole, however little the command transfers.
    const SGL_MAY_BE_LONGER: u32 = 1 << 18;
    data.put32(536, SGL_BYTE_ALIGNED | SGL_MAY_BE_LONGER); // SGLS
    let nqn = format!(
        "nqn.2014-08.org.nvmexpress:{VENDOR_ID:04x}{DEVICE_ID:04x}:farside:{}",
        names.serial
    );
    data.put(768, nqn.as_bytes()); // SUBNQN, ends in zeroes
    data.put16(2048, 2500); // PSD0: 25 W, in centiwatts
    data.0
}

/// Identify Namespace (CNS 00h, figure 245).
pub fn namespace(namespace: &Namespace, shared: bool) -> Box<[u8; SIZE]> {
    let mut data = Data::new();
    data.put64(0, namespace.blocks); // NSZE
    data.put64(8, namespace.blocks); // NCAP
    data.put64(16, namespace.blocks); // NUSE
    const OPTIMAL_SIZES: u8 = 1 << 4;
    data.put8(24, OPTIMAL_SIZES); // NSFEAT: NPWG to NOWS are valid
    // NLBAF 0, FLBAS 0: one format.
    if shared {
        data.put8(30, 1); // NMIC: of several controllers
        data.put8(31, 0xff); // RESCAP: all kinds, IEKEY of 1.3, through power loss
    }
    const READS_ZEROES: u8 = 1;
    const DEALLOCATE_IN_WRITE_ZEROES: u8 = 1 << 3;
    if namespace.punches_holes {
        data.put8(33, READS_ZEROES | DEALLOCATE_IN_WRITE_ZEROES); // DLFEAT
    }
    // The image's file system and page cache use blocks of 4 KiB.
    let page = (4096 >> namespace.block_shift) as u16 - 1;
    for field in [64, 66, 68, 70] {
        data.put16(field, page); // NPWG, NPWA, NPDG, NPDA: zero-based
    }
    data.put16(72, (128 << 10 >> namespace.block_shift) as u16 - 1); // NOWS
    data.put8(99, u8::from(namespace.read_only)); // NSATTR
    data.put8(128 + 2, namespace.block_shift as u8); // LBAF0: LBADS
    data.0
}

/// A list of the namespaces above `above` (CNS 02h and 10h, 5.15.2.3).
pub fn namespace_list(above: u32) -> Box<[u8; SIZE]> {
    let mut data = Data::new();
    if above < NSID {
        data.put32(0, NSID);
    }
    data.0
}

/// Namespace identification descriptors (CNS 03h, figure 246): the UUID.
pub fn descriptors(namespace: &Namespace) -> Box<[u8; SIZE]> {
    let mut data = Data::new();
    data.put8(0, 3); // NIDT: UUID
    data.put8(1, 16); // NIDL
    data.put(4, &namespace.uuid);
    data.0
}

/// Limits of the NVM command set (CNS 06h of TP 4056, which drivers query regardless of
/// the version): write zeroes up to 32 MiB, no limit on ranges.
pub fn command_set_controller() -> Box<[u8; SIZE]> {
    let mut data = Data::new();
    data.put8(1, 13); // WZSL: log2 of 4 KiB pages
    data.0
}

/// Those of `controllers`, which ascend, from number `from` on (CNS 12h and 13h, figure 242).
pub fn controller_list(from: u16, controllers: &[u16]) -> Box<[u8; SIZE]> {
    let mut data = Data::new();
    let listed = controllers.iter().filter(|&&number| number >= from);
    let mut count = 0;
    for &number in listed {
        count += 1;
        data.put16(2 * count, number);
    }
    data.put16(0, count as u16);
    data.0
}

const _: () = assert!(sgl::MAX_DESCRIPTORS >= 256);
