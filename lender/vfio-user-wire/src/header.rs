//! The 16 bytes before every message ("Header").

use crate::{Command, Cursor, Put};

/// Bytes of a header.
pub const HEADER_SIZE: usize = 16;

const TYPE_MASK: u32 = 0xf;
const TYPE_COMMAND: u32 = 0;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// A message header as received, unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Chosen by the sender, echoed in the reply.
    pub id: u16,
    /// Command number; may be undefined.
    pub command: u16,
    /// Bytes of the message including this header, as sent by the peer.
    pub size: u32,
    /// Type and flag bits.
    pub flags: u32,
    /// Errno of an error reply; reserved in a command.
    pub error: u32,
}

/// The type bits of a message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageType {
    /// A command. Expects a reply unless it has the no-reply flag.
    Command,
    /// A reply to a command.
    Reply,
    /// A value that the protocol does not define.
    Unknown(u8),
}

/// The parts of a command's header that its reply needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a command without a reply hangs the client"]
pub struct ReplyTo {
    id: u16,
    command: u16,
    wanted: bool,
}

impl Header {
    /// Decodes a header.
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Self {
        // The array has exactly the five fields' bytes: the defaults are unused.
        let mut cursor = Cursor::new(bytes);
        Self {
            id: cursor.u16().unwrap_or_default(),
            command: cursor.u16().unwrap_or_default(),
            size: cursor.u32().unwrap_or_default(),
            flags: cursor.u32().unwrap_or_default(),
            error: cursor.u32().unwrap_or_default(),
        }
    }

    /// The message's type.
    pub fn message_type(&self) -> MessageType {
        match self.flags & TYPE_MASK {
            TYPE_COMMAND => MessageType::Command,
            TYPE_REPLY => MessageType::Reply,
            // Four bits fit in a byte.
            other => MessageType::Unknown(other as u8),
        }
    }

    /// Whether the sender expects no reply.
    pub fn no_reply(&self) -> bool {
        self.flags & NO_REPLY != 0
    }

    /// Whether this is an error reply, whose errno is `error`.
    pub fn is_error(&self) -> bool {
        self.flags & ERROR != 0
    }

    /// Where to send the reply to this message.
    pub fn reply_to(&self) -> ReplyTo {
        ReplyTo {
            id: self.id,
            command: self.command,
            wanted: !self.no_reply() && self.message_type() != MessageType::Reply,
        }
    }
}

impl ReplyTo {
    /// Whether the client expects a reply. Sending an unexpected one does nothing.
    pub fn wanted(&self) -> bool {
        self.wanted
    }

    /// Starts a reply in `out`: a header whose size [`finish`] fills in.
    pub fn begin(&self, error: Option<u32>, out: &mut Vec<u8>) {
        out.put_u16(self.id);
        out.put_u16(self.command);
        out.put_u32(HEADER_SIZE as u32);
        out.put_u32(TYPE_REPLY | if error.is_some() { ERROR } else { 0 });
        out.put_u32(error.unwrap_or(0));
    }
}

/// Appends the header of a server command, whose size [`finish`] fills in. Returns the
/// header's offset in `out`.
pub fn begin_command(id: u16, command: Command, out: &mut Vec<u8>) -> usize {
    let start = out.len();
    out.put_u16(id);
    out.put_u16(command.number());
    out.put_u32(HEADER_SIZE as u32);
    out.put_u32(TYPE_COMMAND);
    out.put_u32(0);
    start
}

/// Writes the size of the message in `out`, which starts with its header.
pub fn finish(out: &mut [u8]) {
    // Bounded by the limit of data transfers, far below 4 GiB.
    let size = out.len() as u32;
    out[4..8].copy_from_slice(&size.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_echoes_id_and_command() {
        let mut bytes = [0; HEADER_SIZE];
        bytes[..2].copy_from_slice(&0xbeef_u16.to_ne_bytes());
        bytes[2..4].copy_from_slice(&9_u16.to_ne_bytes());
        bytes[4..8].copy_from_slice(&32_u32.to_ne_bytes());
        let header = Header::decode(&bytes);
        assert_eq!(header.message_type(), MessageType::Command);
        assert!(!header.no_reply());

        let mut out = Vec::new();
        header.reply_to().begin(Some(22), &mut out);
        finish(&mut out);
        let reply = Header::decode(out.first_chunk().unwrap());
        assert_eq!((reply.id, reply.command, reply.size), (0xbeef, 9, 16));
        assert_eq!(reply.message_type(), MessageType::Reply);
        assert_eq!((reply.flags, reply.error), (TYPE_REPLY | ERROR, 22));
    }

    #[test]
    fn no_reply_commands_and_replies_expect_no_reply() {
        let mut header = Header {
            id: 0,
            command: 1,
            size: 16,
            flags: NO_REPLY,
            error: 0,
        };
        assert!(!header.reply_to().wanted());
        header.flags = TYPE_REPLY;
        assert!(!header.reply_to().wanted());
        header.flags = 7;
        assert!(header.reply_to().wanted());
        assert_eq!(header.message_type(), MessageType::Unknown(7));
    }
}
