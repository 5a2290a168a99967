//! Status codes (NVM Express 1.4, 4.6.1, figures 124 to 131).

/// The 15-bit status field of a completion, without the phase tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(u16);

const DO_NOT_RETRY: u16 = 1 << 14;
const MORE: u16 = 1 << 13;

/// An error that a retry of the command would get again (DNR).
const fn fatal(status_type: u16, code: u16) -> Status {
    Status(status_type << 8 | code | DO_NOT_RETRY)
}

/// An error for which a retry may succeed.
const fn transient(status_type: u16, code: u16) -> Status {
    Status(status_type << 8 | code)
}

const GENERIC: u16 = 0;
const SPECIFIC: u16 = 1;
const MEDIA: u16 = 2;

impl Status {
    /// The status of these [bits](Self::bits).
    pub fn restored(bits: u16) -> Self {
        Self(bits & 0x7fff)
    }

    pub const SUCCESS: Self = Self(0);

    // Generic command status (figure 127).
    pub const INVALID_OPCODE: Self = fatal(GENERIC, 0x01);
    pub const INVALID_FIELD: Self = fatal(GENERIC, 0x02);
    pub const DATA_TRANSFER_ERROR: Self = transient(GENERIC, 0x04);
    pub const INTERNAL_ERROR: Self = transient(GENERIC, 0x06);
    pub const ABORT_REQUESTED: Self = transient(GENERIC, 0x07);
    pub const INVALID_NAMESPACE: Self = fatal(GENERIC, 0x0b);
    pub const COMMAND_SEQUENCE_ERROR: Self = fatal(GENERIC, 0x0c);
    pub const INVALID_SGL_SEGMENT: Self = fatal(GENERIC, 0x0d);
    pub const INVALID_SGL_COUNT: Self = fatal(GENERIC, 0x0e);
    pub const SGL_LENGTH_INVALID: Self = fatal(GENERIC, 0x0f);
    pub const SGL_TYPE_INVALID: Self = fatal(GENERIC, 0x11);
    pub const PRP_OFFSET_INVALID: Self = fatal(GENERIC, 0x13);
    pub const HOST_IDENTIFIER_INCONSISTENT: Self = fatal(GENERIC, 0x18);
    pub const ABORTED_BY_PREEMPTING: Self = fatal(GENERIC, 0x1b);
    pub const COMMAND_INTERRUPTED: Self = transient(GENERIC, 0x21);
    pub const WRITE_PROTECTED: Self = fatal(GENERIC, 0x20);
    pub const LBA_OUT_OF_RANGE: Self = fatal(GENERIC, 0x80);
    pub const CAPACITY_EXCEEDED: Self = fatal(GENERIC, 0x81);
    pub const NAMESPACE_NOT_READY: Self = transient(GENERIC, 0x82);
    pub const RESERVATION_CONFLICT: Self = fatal(GENERIC, 0x83);

    // Command specific status (figure 128).
    pub const INVALID_CQ: Self = fatal(SPECIFIC, 0x00);
    pub const INVALID_QUEUE_ID: Self = fatal(SPECIFIC, 0x01);
    pub const INVALID_QUEUE_SIZE: Self = fatal(SPECIFIC, 0x02);
    pub const TOO_MANY_EVENT_REQUESTS: Self = fatal(SPECIFIC, 0x05);
    pub const INVALID_VECTOR: Self = fatal(SPECIFIC, 0x08);
    pub const INVALID_LOG_PAGE: Self = fatal(SPECIFIC, 0x09);
    pub const INVALID_FORMAT: Self = fatal(SPECIFIC, 0x0a);
    pub const INVALID_QUEUE_DELETION: Self = fatal(SPECIFIC, 0x0c);
    pub const NOT_SAVEABLE: Self = fatal(SPECIFIC, 0x0d);
    pub const NOT_NAMESPACE_SPECIFIC: Self = fatal(SPECIFIC, 0x0f);

    // Media and data integrity errors (figure 130).
    pub const WRITE_FAULT: Self = transient(MEDIA, 0x80);
    pub const UNRECOVERED_READ: Self = transient(MEDIA, 0x81);
    pub const COMPARE_FAILURE: Self = fatal(MEDIA, 0x85);

    /// The same status with More: the error log has an entry on it.
    pub fn with_more(self) -> Self {
        Self(self.0 | MORE)
    }

    /// The status field of a completion, without the phase tag.
    pub fn bits(self) -> u16 {
        self.0
    }

    /// Whether the medium has failed, rather than the command (SMART counts these).
    /// Includes an image that cannot grow: it loses data as a failing medium does.
    pub fn is_media_error(self) -> bool {
        let is_of_medium = self.0 >> 8 & 7 == MEDIA && self != Self::COMPARE_FAILURE;
        is_of_medium || self == Self::CAPACITY_EXCEEDED
    }
}
