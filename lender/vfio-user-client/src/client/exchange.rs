//! Messages and their replies.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use farside_vfio_user_wire::{Cursor, HEADER_SIZE, Header, MessageType};
use rustix::{
    io::Errno,
    net::{Shutdown, shutdown},
};

use super::{Client, Memory};
use crate::{
    ClientError, Command, MAX_DATA, REQUEST_TIMEOUT,
    socket::{self, SocketError},
    wire::Message,
};

/// A message of which the header is known.
#[derive(Clone, Copy)]
pub(super) struct Begun {
    pub(super) header: Header,
    /// How many bytes of it were received.
    received: usize,
}

impl Client {
    pub(super) fn message(&mut self, command: Command) -> Message {
        self.next_id = self.next_id.wrapping_add(1);
        Message::command(command, self.next_id)
    }

    pub(super) fn check_size(&self, command: Command, bytes: usize) -> Result<(), ClientError> {
        let (value, limit) = (bytes as u64, self.limits.max_data_xfer_size);
        match value <= limit {
            true => Ok(()),
            false => Err(ClientError::Limit {
                command,
                what: "data",
                value,
                limit,
            }),
        }
    }

    pub(super) fn ask(
        &mut self,
        command: Command,
        message: Message,
        most: usize,
        memory: &mut dyn Memory,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), ClientError> {
        self.request(command, message, &[], most, REQUEST_TIMEOUT, memory)
    }

    /// Sends a request and waits for its reply, whose payload has `most` bytes or less.
    pub(super) fn request(
        &mut self,
        command: Command,
        message: Message,
        fds: &[BorrowedFd<'_>],
        most: usize,
        limit: Duration,
        memory: &mut dyn Memory,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), ClientError> {
        if self.ended {
            return Err(ClientError::Ended);
        }
        if fds.len() as u64 > self.limits.max_msg_fds.max(1) {
            return Err(ClientError::Limit {
                command,
                what: "a number of descriptors",
                value: fds.len() as u64,
                limit: self.limits.max_msg_fds,
            });
        }
        let id = self.next_id;
        let deadline = (Instant::now() + limit, limit);
        let sent = socket::send(&self.socket, &message.finish(), fds, deadline.0);
        sent.map_err(|error| self.broken(command, error, limit))?;
        loop {
            // A server may send more than it is asked for.
            if Instant::now() >= deadline.0 {
                return Err(self.broken(command, SocketError::TimedOut, limit));
            }
            let mut fds = Vec::new();
            let begun = self.receive_header(command, deadline, &mut fds)?;
            let header = begun.header;
            if header.message_type() != MessageType::Reply {
                self.answer(begun, command, deadline, memory)?;
                continue;
            }
            let bytes = header.size as usize - HEADER_SIZE;
            let expected = (id, command.number());
            let is_expected = (header.id, header.command) == expected;
            if !is_expected && self.adopted {
                self.receive_rest(begun, command, &mut fds, deadline)?;
                continue;
            }
            if !is_expected || bytes > most {
                let (id, of) = (header.id, header.command);
                let problem = format!(
                    "a reply with id {id} to command {of} of {bytes} bytes, where one with id {} and at most {most} is due",
                    expected.0
                );
                return self.checked(command, Err(problem));
            }
            self.adopted = false;
            let payload = self.receive_rest(begun, command, &mut fds, deadline)?;
            return match header.is_error() {
                false => Ok((payload, fds)),
                true => Err(ClientError::Refused {
                    command,
                    errno: header.error,
                }),
            };
        }
    }

    /// Looks at the next message. It stays in the socket until [`Client::receive_rest`] takes it as a whole, so that a process
    /// that is killed meanwhile leaves none of which it has a part; unless the server sends its header alone.
    pub(super) fn receive_header(
        &mut self,
        command: Command,
        deadline: (Instant, Duration),
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Begun, ClientError> {
        let mut bytes = [0; HEADER_SIZE];
        let peeked = socket::peek(&self.socket, &mut bytes, deadline.0);
        let peeked = peeked.map_err(|error| self.broken(command, error, deadline.1))?;
        let received = match peeked {
            HEADER_SIZE => 0,
            _ => {
                self.receive(command, &mut bytes, fds, deadline)?;
                HEADER_SIZE
            }
        };
        let header = Header::decode(&bytes);
        // Data, the fields before it, and the header.
        if !(HEADER_SIZE..=HEADER_SIZE + 16 + MAX_DATA).contains(&(header.size as usize)) {
            let problem = format!("a message of {} bytes", header.size);
            return self.checked(command, Err(problem));
        }
        Ok(Begun { header, received })
    }

    /// Receives a message, and returns its payload.
    pub(super) fn receive_rest(
        &mut self,
        begun: Begun,
        command: Command,
        fds: &mut Vec<OwnedFd>,
        deadline: (Instant, Duration),
    ) -> Result<Vec<u8>, ClientError> {
        let mut bytes = vec![0; begun.header.size as usize - begun.received];
        self.receive(command, &mut bytes, fds, deadline)?;
        Ok(bytes.split_off(HEADER_SIZE - begun.received))
    }

    /// Serves a command of the server's while `command` waits.
    pub(super) fn answer(
        &mut self,
        begun: Begun,
        command: Command,
        deadline: (Instant, Duration),
        memory: &mut dyn Memory,
    ) -> Result<(), ClientError> {
        let header = begun.header;
        let payload = self.receive_rest(begun, command, &mut Vec::new(), deadline)?;
        let to = header.reply_to();
        let refused = |errno: Errno| Message::reply(to, Some(errno.raw_os_error() as u32));
        let mut cursor = Cursor::new(&payload);
        let fields = (cursor.u64(), cursor.u64());
        let data = cursor.rest();
        let reply = match (Command::from_number(header.command), fields) {
            (Some(Command::DmaRead), (Some(address), Some(count)))
                if data.is_empty() && count <= MAX_DATA as u64 =>
            {
                let mut data = vec![0; count as usize];
                match memory.read(address, &mut data) {
                    true => Message::reply(to, None)
                        .u64(address)
                        .u64(count)
                        .bytes(&data),
                    false => refused(Errno::FAULT),
                }
            }
            (Some(Command::DmaWrite), (Some(address), Some(count)))
                if count == data.len() as u64 =>
            {
                match memory.write(address, data) {
                    true => Message::reply(to, None).u64(address).u64(count),
                    false => refused(Errno::FAULT),
                }
            }
            (Some(Command::DmaRead | Command::DmaWrite), _) => refused(Errno::INVAL),
            _ => refused(Errno::NOTSUP),
        };
        if !to.wanted() {
            return Ok(());
        }
        let sent = socket::send(&self.socket, &reply.finish(), &[], deadline.0);
        sent.map_err(|error| self.broken(command, error, deadline.1))
    }

    pub(super) fn receive(
        &mut self,
        command: Command,
        buf: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        (deadline, limit): (Instant, Duration),
    ) -> Result<(), ClientError> {
        let received = socket::receive(&self.socket, buf, fds, deadline);
        received.map_err(|error| self.broken(command, error, limit))
    }

    /// What a reply says, or the end of the connection.
    pub(super) fn checked<T>(
        &mut self,
        command: Command,
        decoded: Result<T, String>,
    ) -> Result<T, ClientError> {
        decoded.map_err(|problem| {
            self.end();
            ClientError::Invalid { command, problem }
        })
    }

    pub(super) fn broken(
        &mut self,
        command: Command,
        error: SocketError,
        limit: Duration,
    ) -> ClientError {
        self.end();
        match error {
            SocketError::Closed => ClientError::Ended,
            SocketError::TimedOut => ClientError::TimedOut { command, limit },
            SocketError::Other(source) => ClientError::Socket { command, source },
        }
    }

    /// Ends the connection: nothing that comes on it is received.
    pub fn end(&mut self) {
        self.ended = true;
        // Fails if the server has ended it. Who has a duplicate of the socket may wait for the server to close it.
        let _ = shutdown(&self.socket, Shutdown::Write);
    }
}
