//! Log pages (NVM Express 1.4, 5.14.1).

use std::{collections::VecDeque, time::Instant};

use super::{
    command::{admin, io},
    identify::{FIRMWARE, TEMPERATURE},
    namespace::NSID,
    reservation_log::ReservationLog,
    stats::Stats,
    status::Status,
};
use crate::block::medium::warning;

/// Error information.
pub const ERROR_INFORMATION: u8 = 0x01;
/// SMART and health information.
pub const HEALTH: u8 = 0x02;
const FIRMWARE_SLOT: u8 = 0x03;
/// Changed namespace list.
pub const CHANGED_NAMESPACES: u8 = 0x04;
const COMMAND_EFFECTS: u8 = 0x05;
/// Reservation notifications.
pub const RESERVATION_NOTIFICATION: u8 = 0x80;

/// Entries of the error log; older ones are dropped.
pub const ERROR_LOG_ENTRIES: usize = 64;
const ERROR_ENTRY_SIZE: usize = 64;

/// A failed command (figure 196).
#[derive(Clone, Copy, Debug)]
pub struct ErrorEntry {
    pub sq_id: u16,
    pub command_id: u16,
    pub status: Status,
    pub lba: u64,
    pub nsid: u32,
}

/// State of the logs besides the statistics.
#[derive(Debug)]
pub struct Logs {
    /// Newest first, with the number of the error.
    errors: VecDeque<(u64, ErrorEntry)>,
    error_count: u64,
    media_errors: u64,
    started: Instant,
    /// The namespace has changed since the guest has read the list of those that have.
    pub namespace_changed: bool,
    pub reservations: ReservationLog,
}

/// Inputs of the health log.
#[derive(Clone, Copy, Debug)]
pub struct Health {
    /// Critical warning bits.
    pub warnings: u8,
    /// Whether the medium is read-only.
    pub read_only: bool,
}

impl Logs {
    pub fn new() -> Self {
        Self {
            errors: VecDeque::with_capacity(ERROR_LOG_ENTRIES),
            error_count: 0,
            media_errors: 0,
            started: Instant::now(),
            namespace_changed: false,
            reservations: ReservationLog::default(),
        }
    }

    pub fn record(&mut self, entry: ErrorEntry) {
        self.error_count += 1;
        if entry.status.is_media_error() {
            self.media_errors += 1;
        }
        self.errors.truncate(ERROR_LOG_ENTRIES - 1);
        self.errors.push_front((self.error_count, entry));
    }

    /// The log page, or `None` if it is not supported.
    pub fn page(
        &self,
        page: u8,
        stats: &Stats,
        health: Health,
        (doorbell_buffer, reservations): (bool, bool),
    ) -> Option<Vec<u8>> {
        Some(match page {
            ERROR_INFORMATION => self.error_information(),
            HEALTH => self.health(stats, health),
            FIRMWARE_SLOT => firmware_slot(),
            CHANGED_NAMESPACES => self.changed_namespaces(),
            RESERVATION_NOTIFICATION if reservations => self.reservations.page(),
            COMMAND_EFFECTS => command_effects(doorbell_buffer, reservations),
            _ => return None,
        })
    }

    /// 5.14.1.4: the only namespace, or none.
    fn changed_namespaces(&self) -> Vec<u8> {
        let mut log = vec![0; 4096];
        if self.namespace_changed {
            log[..4].copy_from_slice(&NSID.to_le_bytes());
        }
        log
    }

    fn error_information(&self) -> Vec<u8> {
        let mut log = vec![0; ERROR_LOG_ENTRIES * ERROR_ENTRY_SIZE];
        for ((number, entry), raw) in self
            .errors
            .iter()
            .zip(log.chunks_exact_mut(ERROR_ENTRY_SIZE))
        {
            raw[..8].copy_from_slice(&number.to_le_bytes());
            raw[8..10].copy_from_slice(&entry.sq_id.to_le_bytes());
            raw[10..12].copy_from_slice(&entry.command_id.to_le_bytes());
            raw[12..14].copy_from_slice(&(entry.status.bits() << 1).to_le_bytes());
            // Parameter error location: unknown.
            raw[14..16].copy_from_slice(&0xffffu16.to_le_bytes());
            raw[16..24].copy_from_slice(&entry.lba.to_le_bytes());
            raw[24..28].copy_from_slice(&entry.nsid.to_le_bytes());
        }
        log
    }

    /// Number of Media and Data Integrity Errors.
    pub fn media_errors(&self) -> u64 {
        self.media_errors
    }

    /// Figure 197.
    fn health(&self, stats: &Stats, health: Health) -> Vec<u8> {
        let mut log = vec![0; 512];
        log[0] = health.warnings;
        if health.read_only {
            log[0] |= warning::READ_ONLY;
        }
        log[1..3].copy_from_slice(&TEMPERATURE.to_le_bytes());
        // Available spare, in percent: whether the image's file system has free space.
        log[3] = match health.warnings & warning::SPARE {
            0 => 100,
            _ => 0,
        };
        log[4] = 10; // its threshold
        let mut counter = |at: usize, value: u64| {
            log[at..at + 8].copy_from_slice(&value.to_le_bytes());
        };
        // Thousands of 512 bytes, rounded up.
        counter(32, stats.bytes_read.div_ceil(512_000));
        counter(48, stats.bytes_written.div_ceil(512_000));
        counter(64, stats.reads);
        counter(80, stats.writes);
        counter(112, 1); // power cycles
        counter(128, self.started.elapsed().as_secs() / 3600);
        counter(160, self.media_errors);
        counter(176, self.error_count);
        log
    }
}

/// Figure 199: one slot, active.
fn firmware_slot() -> Vec<u8> {
    let mut log = vec![0; 512];
    log[0] = 1;
    log[8..16].fill(b' ');
    for (to, from) in log[8..16].iter_mut().zip(FIRMWARE.bytes()) {
        *to = from;
    }
    log
}

/// Figure 201: supported commands, and whether they change logical block content.
fn command_effects(doorbell_buffer: bool, reservations: bool) -> Vec<u8> {
    const SUPPORTED: u32 = 1;
    const CHANGES_CONTENT: u32 = 1 << 1;
    const ALONE: u32 = 1 << 16;
    let mut log = vec![0; 4096];
    let mut put = |index: usize, effects: u32| {
        log[index * 4..index * 4 + 4].copy_from_slice(&effects.to_le_bytes());
    };
    for opcode in [
        admin::DELETE_SQ,
        admin::CREATE_SQ,
        admin::GET_LOG_PAGE,
        admin::DELETE_CQ,
        admin::CREATE_CQ,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
    ] {
        put(opcode.into(), SUPPORTED);
    }
    if doorbell_buffer {
        put(admin::DOORBELL_BUFFER_CONFIG.into(), SUPPORTED);
    }
    put(
        admin::FORMAT_NVM.into(),
        SUPPORTED | CHANGES_CONTENT | ALONE,
    );
    for opcode in [io::FLUSH, io::READ, io::COMPARE, io::VERIFY] {
        put(256 + usize::from(opcode), SUPPORTED);
    }
    let of_reservations = [
        io::RESERVATION_REGISTER,
        io::RESERVATION_REPORT,
        io::RESERVATION_ACQUIRE,
        io::RESERVATION_RELEASE,
    ];
    for opcode in of_reservations.into_iter().filter(|_| reservations) {
        put(256 + usize::from(opcode), SUPPORTED);
    }
    for opcode in [io::WRITE, io::WRITE_ZEROES, io::DATASET_MANAGEMENT] {
        put(256 + usize::from(opcode), SUPPORTED | CHANGES_CONTENT);
    }
    log
}
