//! From framed messages to typed requests.

use super::connection::Message;
use super::refusal::Refusal;
use super::request::Request;
use super::version::Negotiated;
use super::{Command, MAX_MESSAGE_SIZE};
use farside_vfio_user_wire::{HEADER_SIZE, MessageType};

/// A connection's negotiated state. Does no I/O.
#[derive(Debug, Default)]
pub struct Session {
    negotiated: Option<Negotiated>,
}

impl Session {
    /// A session before `VERSION`.
    pub fn new() -> Self {
        Self::default()
    }

    /// That of a client which another process has negotiated with.
    pub fn resumed(negotiated: Option<Negotiated>) -> Self {
        Self { negotiated }
    }

    /// The negotiated capabilities; `None` before `VERSION`.
    pub fn negotiated(&self) -> Option<&Negotiated> {
        self.negotiated.as_ref()
    }

    /// Decodes and checks a message. Descriptors that the request does not
    /// take are closed.
    ///
    /// # Errors
    ///
    /// A [`Refusal`], with the errno to send and the connection's fate.
    pub fn decode<'a>(&mut self, message: Message<'a>) -> Result<Request<'a>, Refusal> {
        let Message {
            header,
            payload,
            fds,
            fds_refused,
        } = message;
        if (header.size as usize) < HEADER_SIZE {
            return Err(Refusal::ShorterThanHeader(header.size));
        }
        match header.message_type() {
            MessageType::Command => {}
            MessageType::Reply => return Err(Refusal::UnsolicitedReply { id: header.id }),
            MessageType::Unknown(value) => return Err(Refusal::UnknownType(value)),
        }
        if header.size > MAX_MESSAGE_SIZE {
            return Err(Refusal::TooLarge(header.size));
        }
        let command =
            Command::from_number(header.command).ok_or(Refusal::UnknownCommand(header.command))?;
        match (command, &self.negotiated) {
            (Command::Version, Some(_)) => return Err(Refusal::AlreadyNegotiated),
            (Command::Version, None) | (_, Some(_)) => {}
            (_, None) => return Err(Refusal::NotNegotiated(command)),
        }
        let request = Request::decode(command, payload, fds, fds_refused)?;
        if let Request::Version(negotiated) = &request {
            self.negotiated = Some(*negotiated);
        }
        Ok(request)
    }
}
