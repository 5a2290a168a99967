//! Asynchronous events (NVM Express 1.4, 5.2): open requests, and one pending event of
//! each type. A reported type is masked until the guest has read its log page.

use crate::block::medium::warning;
use crate::state::Entry;

/// Most requests that may be open.
pub const MAX_EVENT_REQUESTS: usize = 4;

/// Events (figures 147 to 149).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Write to the doorbell of a queue that does not exist.
    InvalidDoorbellRegister,
    /// Write of an invalid value to a doorbell.
    InvalidDoorbellValue,
    /// Reliability is compromised: media errors, or a medium in read-only mode.
    Reliability,
    /// The composite temperature crossed a threshold.
    TemperatureThreshold,
    /// The available spare fell below its threshold.
    SpareBelowThreshold,
    /// The data of Identify Namespace has changed.
    NamespaceChanged,
    /// Log pages of reservation notifications are available.
    ReservationLog,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Error,
    Health,
    Notice,
    /// Specific to the I/O command set.
    CommandSet,
}

const KINDS: [Kind; 4] = [Kind::Error, Kind::Health, Kind::Notice, Kind::CommandSet];

impl Kind {
    /// Asynchronous Event Type.
    fn number(self) -> u32 {
        match self {
            Self::Error => 0,
            Self::Health => 1,
            Self::Notice => 2,
            Self::CommandSet => 6,
        }
    }
}

impl Event {
    /// The event of the most severe of some critical warnings.
    pub fn of_warnings(warnings: u8) -> Option<Self> {
        if warnings & (warning::RELIABILITY | warning::READ_ONLY) != 0 {
            Some(Self::Reliability)
        } else if warnings & warning::SPARE != 0 {
            Some(Self::SpareBelowThreshold)
        } else if warnings & warning::TEMPERATURE != 0 {
            Some(Self::TemperatureThreshold)
        } else {
            None
        }
    }

    fn kind(self) -> Kind {
        match self {
            Self::InvalidDoorbellRegister | Self::InvalidDoorbellValue => Kind::Error,
            Self::Reliability | Self::TemperatureThreshold | Self::SpareBelowThreshold => {
                Kind::Health
            }
            Self::NamespaceChanged => Kind::Notice,
            Self::ReservationLog => Kind::CommandSet,
        }
    }

    fn information(self) -> u32 {
        match self {
            Self::InvalidDoorbellRegister => 0,
            Self::InvalidDoorbellValue => 1,
            Self::Reliability => 0,
            Self::TemperatureThreshold => 1,
            Self::SpareBelowThreshold => 2,
            Self::NamespaceChanged => 0,
            Self::ReservationLog => 0,
        }
    }

    /// Dword 0 of the completion: type, information, log page.
    fn result(self) -> u32 {
        let log = match self.kind() {
            Kind::Error => u32::from(super::logs::ERROR_INFORMATION),
            Kind::Health => u32::from(super::logs::HEALTH),
            Kind::Notice => u32::from(super::logs::CHANGED_NAMESPACES),
            Kind::CommandSet => u32::from(super::logs::RESERVATION_NOTIFICATION),
        };
        self.kind().number() | self.information() << 8 | log << 16
    }
}

#[derive(Debug, Default)]
pub struct Events {
    /// Command identifiers of open requests, and their entries.
    open: Vec<(u16, Entry)>,
    pending: [Option<Event>; KINDS.len()],
    masked: [bool; KINDS.len()],
}

impl Events {
    /// Opens a request. Returns whether it is within the limit.
    pub fn open(&mut self, command_id: u16, entry: Entry) -> bool {
        let free = self.open.len() < MAX_EVENT_REQUESTS;
        if free {
            self.open.push((command_id, entry));
        }
        free
    }

    /// Closes a request, to abort it.
    pub fn close(&mut self, command_id: u16) -> Option<Entry> {
        let index = self.open.iter().position(|&(id, _)| id == command_id)?;
        Some(self.open.remove(index).1)
    }

    /// Whether a request is open.
    pub fn is_open(&self, command_id: u16) -> bool {
        self.open.iter().any(|&(id, _)| id == command_id)
    }

    /// Raises an event. It is dropped if one of its type is pending or masked.
    pub fn raise(&mut self, event: Event) {
        let kind = event.kind() as usize;
        if !self.masked[kind] && self.pending[kind].is_none() {
            self.pending[kind] = Some(event);
        }
    }

    /// Whether [`Events::take`] would return an event.
    pub fn is_due(&self) -> bool {
        !self.open.is_empty() && self.pending.iter().any(Option::is_some)
    }

    /// Takes a request, its entry and its result.
    pub fn take(&mut self) -> Option<((u16, Entry), u32)> {
        if self.open.is_empty() {
            return None;
        }
        for kind in KINDS.map(|kind| kind as usize) {
            if let Some(event) = self.pending[kind].take() {
                self.masked[kind] = true;
                return Some((self.open.remove(0), event.result()));
            }
        }
        None
    }

    /// The guest has read log `page` without Retain Asynchronous Event. `is_empty`: nothing is left to be reported.
    pub fn unmask(&mut self, page: u8, is_empty: bool) {
        match page {
            super::logs::ERROR_INFORMATION => self.masked[Kind::Error as usize] = false,
            super::logs::HEALTH => self.masked[Kind::Health as usize] = false,
            super::logs::CHANGED_NAMESPACES => {
                // A pending event has the change that was in the list, which is empty from now on.
                self.pending[Kind::Notice as usize] = None;
                self.masked[Kind::Notice as usize] = false;
            }
            super::logs::RESERVATION_NOTIFICATION => {
                if is_empty {
                    self.pending[Kind::CommandSet as usize] = None;
                }
                self.masked[Kind::CommandSet as usize] = false;
            }
            _ => {}
        }
    }

    /// The types of events whose log the guest has to read.
    pub fn masked(&self) -> [bool; KINDS.len()] {
        self.masked
    }

    /// Sets the types whose log the guest has to read.
    pub fn set_masked(&mut self, masked: [bool; KINDS.len()]) {
        self.masked = masked;
    }

    /// Whether an event waits for a request.
    pub fn is_pending(&self, event: Event) -> bool {
        self.pending[event.kind() as usize] == Some(event)
    }

    /// Clears all state, as a reset does.
    pub fn clear(&mut self) {
        self.open.clear();
        self.pending = [None; KINDS.len()];
        self.masked = [false; KINDS.len()];
    }
}
