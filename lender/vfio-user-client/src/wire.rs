//! Messages, as they are made.

use farside_vfio_user_wire::{Command, Put, ReplyTo, begin_command, finish};

/// A message to send.
#[derive(Debug)]
pub(crate) struct Message(Vec<u8>);

impl Message {
    pub(crate) fn command(command: Command, id: u16) -> Self {
        let mut message = Vec::with_capacity(64);
        begin_command(id, command, &mut message);
        Self(message)
    }

    /// The reply to a command of the server, or an error reply.
    pub(crate) fn reply(to: ReplyTo, errno: Option<u32>) -> Self {
        let mut message = Vec::with_capacity(64);
        to.begin(errno, &mut message);
        Self(message)
    }

    pub(crate) fn u16(mut self, value: u16) -> Self {
        self.0.put_u16(value);
        self
    }

    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.0.put_u32(value);
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.0.put_u64(value);
        self
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// The bytes of the message, of a length that its header states.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        finish(&mut self.0);
        self.0
    }
}
