//! Features (NVM Express 1.4, 5.21.1). No feature is saveable, so the saved value is the
//! default.

use std::time::{Duration, Instant, SystemTime};

use super::{
    identify::{TEMPERATURE, WARNING_TEMPERATURE},
    saved::SavedFeatures,
    status::Status,
};
use crate::block::medium::warning;

const ARBITRATION: u8 = 0x01;
const POWER_MANAGEMENT: u8 = 0x02;
const TEMPERATURE_THRESHOLD: u8 = 0x04;
const ERROR_RECOVERY: u8 = 0x05;
/// Volatile write cache.
pub const WRITE_CACHE: u8 = 0x06;
/// Number of I/O queues.
pub const QUEUE_COUNT: u8 = 0x07;
const INTERRUPT_COALESCING: u8 = 0x08;
const VECTOR_CONFIG: u8 = 0x09;
const WRITE_ATOMICITY: u8 = 0x0a;
const EVENT_CONFIG: u8 = 0x0b;
/// Bits of [`EVENT_CONFIG`]: critical warnings, and namespace attribute notices.
const EVENTS: u32 = 0xff | NAMESPACE_NOTICES;
const NAMESPACE_NOTICES: u32 = 1 << 8;
/// Timestamp.
pub const TIMESTAMP: u8 = 0x0e;

/// Host identifier, of a controller that shares its namespace.
pub const HOST_IDENTIFIER: u8 = 0x81;
/// Which reservation notifications are not wanted.
pub const RESERVATION_MASK: u8 = 0x82;
/// All bits of that.
pub const RESERVATIONS_MASKED: u32 = 0b1110;
/// Whether reservations persist through power loss.
pub const RESERVATION_PERSISTENCE: u8 = 0x83;

/// The selected value of a Get Features (SEL, figure 173).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    Current,
    /// Also the saved value.
    Default,
    Capabilities,
}

impl Select {
    pub fn from_bits(bits: u32) -> Result<Self, Status> {
        match bits & 7 {
            0 => Ok(Self::Current),
            1 | 2 => Ok(Self::Default),
            3 => Ok(Self::Capabilities),
            _ => Err(Status::INVALID_FIELD),
        }
    }
}

/// Over- and under-temperature threshold (THSEL).
#[derive(Clone, Copy, Debug)]
struct Thresholds {
    over: u16,
    under: u16,
}

/// Milliseconds since 1970 as set by the host, and the time of setting.
#[derive(Clone, Copy, Debug)]
struct Timestamp {
    set_to: u64,
    at: Instant,
    by_host: bool,
}

/// Current values; [`Features::new`] returns the defaults.
#[derive(Debug)]
pub struct Features {
    queue_pairs: u16,
    arbitration: u32,
    thresholds: Thresholds,
    error_recovery: u32,
    /// Whether a write is complete once it is in the page cache.
    pub write_cache: bool,
    coalescing: u32,
    /// Bit n: coalescing is disabled for vector n (CD).
    vectors_without_coalescing: [u64; 4],
    write_atomicity: u32,
    event_config: u32,
    timestamp: Timestamp,
    /// And whether it was given as one of 128 bits.
    host_identifier: (u128, bool),
    /// [`RESERVATION_MASK`].
    pub reservation_mask: u32,
}

impl Features {
    pub fn new(queue_pairs: u16) -> Self {
        Self {
            queue_pairs,
            arbitration: 0,
            thresholds: Thresholds {
                over: WARNING_TEMPERATURE,
                under: 0,
            },
            error_recovery: 0,
            write_cache: true,
            coalescing: 0,
            vectors_without_coalescing: [0; 4],
            write_atomicity: 0,
            event_config: 0,
            timestamp: Timestamp {
                set_to: 0,
                at: Instant::now(),
                by_host: false,
            },
            host_identifier: (0, false),
            reservation_mask: 0,
        }
    }

    /// As they are saved.
    pub fn saved(&self) -> SavedFeatures {
        let Timestamp {
            set_to,
            at,
            by_host,
        } = self.timestamp;
        SavedFeatures {
            arbitration: self.arbitration,
            over: self.thresholds.over,
            under: self.thresholds.under,
            error_recovery: self.error_recovery,
            write_cache: self.write_cache,
            coalescing: self.coalescing,
            vectors_without_coalescing: self.vectors_without_coalescing,
            write_atomicity: self.write_atomicity,
            event_config: self.event_config,
            timestamp: by_host.then(|| (set_to, since_1970().saturating_sub(millis(at.elapsed())))),
        }
    }

    /// What was [saved](Self::saved), within what [`Features::set`] sets.
    pub fn restored(queue_pairs: u16, saved: &SavedFeatures) -> Self {
        let mut features = Self::new(queue_pairs);
        features.arbitration = saved.arbitration & 0xffff_ff07;
        features.thresholds = Thresholds {
            over: saved.over,
            under: saved.under,
        };
        features.error_recovery = saved.error_recovery & 0xffff;
        features.write_cache = saved.write_cache;
        features.coalescing = saved.coalescing & 0xffff;
        features.vectors_without_coalescing = saved.vectors_without_coalescing;
        features.write_atomicity = saved.write_atomicity & 1;
        features.event_config = saved.event_config & EVENTS;
        if let Some((set_to, at)) = saved.timestamp {
            let passed = since_1970().saturating_sub(at);
            features.timestamp = Timestamp {
                set_to: set_to.wrapping_add(passed) & 0xffff_ffff_ffff,
                at: Instant::now(),
                by_host: true,
            };
        }
        features
    }

    /// The host's identifier, 0 if it has given none, and whether that has 128 bits.
    pub fn host_identifier(&self) -> (u128, bool) {
        self.host_identifier
    }

    /// Sets it, once (5.21.1.25).
    pub fn set_host_identifier(&mut self, id: u128, is_extended: bool) -> Result<(), Status> {
        match self.host_identifier {
            (0, _) => {}
            before if before == (id, is_extended) => {}
            _ => return Err(Status::COMMAND_SEQUENCE_ERROR),
        }
        self.host_identifier = (id, is_extended);
        Ok(())
    }

    /// Critical warnings of the health log.
    pub fn warnings(&self) -> u8 {
        let Thresholds { over, under } = self.thresholds;
        if TEMPERATURE >= over || TEMPERATURE <= under {
            warning::TEMPERATURE
        } else {
            0
        }
    }

    /// The critical warnings that are enabled as events.
    pub fn enabled_events(&self, warnings: u8) -> u8 {
        warnings & self.event_config as u8
    }

    /// Whether a change of the namespace is an event.
    pub fn notices_namespaces(&self) -> bool {
        self.event_config & NAMESPACE_NOTICES != 0
    }

    /// Numbers of submission and completion queues, zero-based.
    pub fn queue_counts(&self) -> u32 {
        let count = u32::from(self.queue_pairs) - 1;
        count | count << 16
    }

    /// Dword 0 of the completion of a Get Features (5.13); the timestamp's
    /// value is [`Features::timestamp`].
    pub fn get(&self, feature: u8, select: Select, cdw11: u32) -> Result<u32, Status> {
        let defaults;
        let from = match select {
            Select::Current => self,
            Select::Default => {
                defaults = Self::new(self.queue_pairs);
                &defaults
            }
            Select::Capabilities => return Self::capabilities(feature),
        };
        Ok(match feature {
            ARBITRATION => from.arbitration,
            POWER_MANAGEMENT => 0,
            TEMPERATURE_THRESHOLD => from.threshold(cdw11)?,
            ERROR_RECOVERY => from.error_recovery,
            WRITE_CACHE => from.write_cache.into(),
            QUEUE_COUNT => from.queue_counts(),
            INTERRUPT_COALESCING => from.coalescing,
            VECTOR_CONFIG => from.vector_config(cdw11)?,
            WRITE_ATOMICITY => from.write_atomicity,
            EVENT_CONFIG => from.event_config,
            TIMESTAMP => 0,
            _ => return Err(Status::INVALID_FIELD),
        })
    }

    /// Capabilities of a feature: changeable, namespace specific (figure 175).
    fn capabilities(feature: u8) -> Result<u32, Status> {
        const OF_NAMESPACE: u32 = 1 << 1;
        const CHANGEABLE: u32 = 1 << 2;
        Ok(match feature {
            ERROR_RECOVERY => OF_NAMESPACE | CHANGEABLE,
            ARBITRATION
            | POWER_MANAGEMENT
            | TEMPERATURE_THRESHOLD
            | WRITE_CACHE
            | QUEUE_COUNT
            | INTERRUPT_COALESCING
            | VECTOR_CONFIG
            | WRITE_ATOMICITY
            | EVENT_CONFIG
            | TIMESTAMP => CHANGEABLE,
            _ => return Err(Status::INVALID_FIELD),
        })
    }

    /// Whether a feature is namespace specific.
    pub fn is_of_namespace(feature: u8) -> bool {
        matches!(
            feature,
            ERROR_RECOVERY | RESERVATION_MASK | RESERVATION_PERSISTENCE
        )
    }

    /// Sets a feature whose value is in the command (5.21). Returns dword 0
    /// of the completion.
    pub fn set(&mut self, feature: u8, cdw11: u32) -> Result<u32, Status> {
        match feature {
            ARBITRATION => self.arbitration = cdw11 & 0xffff_ff07,
            POWER_MANAGEMENT => {
                // There is one power state.
                if cdw11 & 0x1f != 0 {
                    return Err(Status::INVALID_FIELD);
                }
            }
            TEMPERATURE_THRESHOLD => self.set_threshold(cdw11)?,
            ERROR_RECOVERY => {
                // DULBE: not supported (Identify, NSFEAT).
                if cdw11 >> 16 & 1 != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.error_recovery = cdw11 & 0xffff;
            }
            WRITE_CACHE => self.write_cache = cdw11 & 1 != 0,
            QUEUE_COUNT => {
                if cdw11 & 0xffff == 0xffff || cdw11 >> 16 == 0xffff {
                    return Err(Status::INVALID_FIELD);
                }
                return Ok(self.queue_counts());
            }
            // Only the "desired" aggregation (5.21.1.8): completions are always signalled
            // at the end of their batch.
            INTERRUPT_COALESCING => self.coalescing = cdw11 & 0xffff,
            VECTOR_CONFIG => self.set_vector_config(cdw11)?,
            WRITE_ATOMICITY => self.write_atomicity = cdw11 & 1,
            EVENT_CONFIG => self.event_config = cdw11 & EVENTS,
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(0)
    }

    /// The threshold that dword 11 selects: only the composite temperature has any
    /// (TMPSEL 0; Fh selects all when setting).
    fn threshold(&self, cdw11: u32) -> Result<u32, Status> {
        match (cdw11 >> 16 & 0xf, cdw11 >> 20 & 3) {
            (0, 0) => Ok(self.thresholds.over.into()),
            (0, 1) => Ok(self.thresholds.under.into()),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    fn set_threshold(&mut self, cdw11: u32) -> Result<(), Status> {
        let kelvins = cdw11 as u16;
        match (cdw11 >> 16 & 0xf, cdw11 >> 20 & 3) {
            (0 | 0xf, 0) => self.thresholds.over = kelvins,
            (0 | 0xf, 1) => self.thresholds.under = kelvins,
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(())
    }

    fn vector_bit(&self, cdw11: u32) -> Result<(usize, u64), Status> {
        let vector = cdw11 & 0xffff;
        if vector > u32::from(self.queue_pairs) {
            return Err(Status::INVALID_FIELD);
        }
        Ok(((vector / 64) as usize, 1 << (vector % 64)))
    }

    fn vector_config(&self, cdw11: u32) -> Result<u32, Status> {
        let (word, bit) = self.vector_bit(cdw11)?;
        let without = self.vectors_without_coalescing[word] & bit != 0;
        Ok(cdw11 & 0xffff | u32::from(without) << 16)
    }

    fn set_vector_config(&mut self, cdw11: u32) -> Result<(), Status> {
        let (word, bit) = self.vector_bit(cdw11)?;
        if cdw11 >> 16 & 1 != 0 {
            self.vectors_without_coalescing[word] |= bit;
        } else {
            self.vectors_without_coalescing[word] &= !bit;
        }
        Ok(())
    }

    /// The timestamp data structure (figure 293).
    pub fn timestamp(&self, select: Select) -> [u8; 8] {
        let Timestamp {
            set_to,
            at,
            by_host,
        } = match select {
            Select::Current => self.timestamp,
            _ => return [0; 8],
        };
        let now = set_to.wrapping_add(at.elapsed().as_millis() as u64);
        let mut data = (now & 0xffff_ffff_ffff).to_le_bytes();
        data[6] = u8::from(by_host) << 1;
        data
    }

    pub fn set_timestamp(&mut self, data: [u8; 8]) {
        self.timestamp = Timestamp {
            set_to: u64::from_le_bytes(data) & 0xffff_ffff_ffff,
            at: Instant::now(),
            by_host: true,
        };
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}

/// Milliseconds of this host's clock.
fn since_1970() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    time.map_or(0, millis)
}
