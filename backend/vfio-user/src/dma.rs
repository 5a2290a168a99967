//! Commands to the client: `DMA_READ` and `DMA_WRITE`.
//!
//! They access ranges that the client maps without a descriptor: memory that it does
//! not share, and registers of its other devices.
//!
//! # Two layouts
//!
//! The specification's count field has 64 bits, as has QEMU 11.1.3's. Early QEMU
//! declares 32 bits with the data right behind them, four bytes early, but includes
//! the four bytes in the message's size. Before the first command the server probes
//! the client's layout with a `DMA_WRITE` whose count is 2³² and which has no data:
//! a client with a 32-bit count sees a write of 0 bytes, which succeeds; a client
//! with a 64-bit count sees a count above the message's size, an error.
//!
//! # Deadlock
//!
//! QEMU serves commands on its main loop under its big lock, which a vCPU thread
//! holds while it waits for the reply to a region read. A server that waits for a
//! command's reply before it answers a read of the *same* client therefore waits
//! until the command times out.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::Command;
use super::connection::{Connection, ConnectionError};
use farside_vfio_user_wire::Put;
use farside_vfio_user_wire::{Header, begin_command, finish};

/// Bytes of a payload besides its data, in either layout.
const FIXED: usize = 16;

/// Offset of the data in a payload of the early layout.
const EARLY: usize = 12;

/// Outstanding commands, each with a tag of the server's.
#[derive(Debug)]
pub struct DmaCommands<T> {
    /// Sent, oldest first.
    sent: VecDeque<Sent<T>>,
    /// Not sent before the layout is known, oldest first.
    waiting: VecDeque<Waiting<T>>,
    layout: Layout,
    next_id: u16,
    timeout: Duration,
    most: usize,
    /// Encoded and not yet passed to the connection.
    output: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Unknown,
    /// Probed by the command with this id; the reply is due by then.
    Probing(u16, Instant),
    Specified,
    Early,
}

#[derive(Debug)]
struct Sent<T> {
    id: u16,
    access: Access,
    due: Instant,
    tag: T,
}

#[derive(Debug)]
struct Waiting<T> {
    access: Access,
    data: Vec<u8>,
    due: Instant,
    tag: T,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Access {
    command: Command,
    address: u64,
    count: u32,
}

/// Too many commands are outstanding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} DMA commands are outstanding, the limit")]
pub struct TooMany(usize);

/// The command that a reply matches.
#[derive(Debug)]
pub enum Matched<'a, T> {
    /// No outstanding command: the id is unknown, or the command timed out.
    Nothing,
    /// The layout probe.
    Probe,
    /// A command of the server's.
    Command {
        /// The command's tag.
        tag: T,
        /// The data of a read, empty for a write; or the client's error.
        result: Result<&'a [u8], Errno>,
    },
}

impl<T> DmaCommands<T> {
    /// No commands. Each times out after `timeout`; at most `most` may be outstanding.
    pub fn new(timeout: Duration, most: usize) -> Self {
        Self {
            sent: VecDeque::new(),
            waiting: VecDeque::new(),
            layout: Layout::Unknown,
            next_id: 0,
            timeout,
            most,
            output: Vec::new(),
        }
    }

    /// Reads `count` bytes of client memory, at most what the client
    /// negotiated.
    ///
    /// # Errors
    ///
    /// [`TooMany`].
    pub fn read(&mut self, address: u64, count: u32, tag: T) -> Result<(), TooMany> {
        self.start(Command::DmaRead, address, count, &[], tag)
    }

    /// Writes client memory, at most as many bytes as the client negotiated.
    ///
    /// # Errors
    ///
    /// [`TooMany`].
    pub fn write(&mut self, address: u64, data: &[u8], tag: T) -> Result<(), TooMany> {
        // Bounded by the negotiated size, far below 4 GiB.
        let count = data.len() as u32;
        self.start(Command::DmaWrite, address, count, data, tag)
    }

    /// How many commands are outstanding.
    pub fn outstanding(&self) -> usize {
        self.sent.len() + self.waiting.len()
    }

    /// Whether no command is outstanding.
    pub fn is_idle(&self) -> bool {
        self.outstanding() == 0
    }

    /// Passes encoded commands to the connection.
    ///
    /// # Errors
    ///
    /// As [`Connection::send`].
    pub fn flush(&mut self, connection: &mut Connection) -> Result<(), ConnectionError> {
        if self.output.is_empty() {
            return Ok(());
        }
        let sent = connection.send_encoded(&self.output);
        self.output.clear();
        sent
    }

    /// Matches a reply of the client's to its command.
    pub fn on_reply<'a>(&mut self, header: &Header, payload: &'a [u8]) -> Matched<'a, T> {
        if matches!(self.layout, Layout::Probing(id, _) if id == header.id) {
            self.layout = match header.is_error() {
                true => Layout::Specified,
                false => Layout::Early,
            };
            log::debug!("the client's layout of DMA commands: {:?}", self.layout);
            self.send_waiting();
            return Matched::Probe;
        }
        let command = Command::from_number(header.command);
        let found = self
            .sent
            .iter()
            .position(|sent| sent.id == header.id && Some(sent.access.command) == command);
        let Some(Sent { access, tag, .. }) = found.and_then(|at| self.sent.remove(at)) else {
            return Matched::Nothing;
        };
        let result = if header.is_error() {
            Err(Errno::from_raw_os_error(header.error.min(4095) as i32))
        } else {
            self.data(access, payload).ok_or(Errno::PROTO)
        };
        Matched::Command { tag, result }
    }

    /// When the oldest command times out.
    pub fn deadline(&self) -> Option<Instant> {
        let waiting = self.waiting.front().map(|waiting| waiting.due);
        self.sent.front().map(|sent| sent.due).or(waiting)
    }

    /// Removes a command that has timed out, the oldest first. A late reply to it
    /// matches nothing.
    pub fn expire(&mut self, now: Instant) -> Option<T> {
        if matches!(self.layout, Layout::Probing(_, due) if due <= now) {
            self.layout = Layout::Unknown;
        }
        // All have the same timeout, so both queues are in order of `due`, and those
        // in `waiting` are later than those in `sent`.
        if self.sent.front().is_some_and(|sent| sent.due <= now) {
            return self.sent.pop_front().map(|sent| sent.tag);
        }
        if self
            .waiting
            .front()
            .is_some_and(|waiting| waiting.due <= now)
        {
            return self.waiting.pop_front().map(|waiting| waiting.tag);
        }
        None
    }

    /// Resets to the initial state after the client has disconnected. Returns the tags
    /// of the outstanding commands.
    pub fn clear(&mut self) -> Vec<T> {
        let sent = self.sent.drain(..).map(|sent| sent.tag);
        let waiting = self.waiting.drain(..).map(|waiting| waiting.tag);
        let tags = sent.chain(waiting).collect();
        self.layout = Layout::Unknown;
        self.output.clear();
        tags
    }

    fn start(
        &mut self,
        command: Command,
        address: u64,
        count: u32,
        data: &[u8],
        tag: T,
    ) -> Result<(), TooMany> {
        if self.outstanding() >= self.most {
            return Err(TooMany(self.most));
        }
        let due = Instant::now() + self.timeout;
        let access = Access {
            command,
            address,
            count,
        };
        match self.layout {
            Layout::Specified | Layout::Early => self.send(access, data, due, tag),
            Layout::Unknown | Layout::Probing(..) => {
                if self.layout == Layout::Unknown {
                    self.probe(due);
                }
                self.waiting.push_back(Waiting {
                    access,
                    data: data.to_vec(),
                    due,
                    tag,
                });
            }
        }
        Ok(())
    }

    fn probe(&mut self, due: Instant) {
        let id = self.id();
        let start = begin_command(id, Command::DmaWrite, &mut self.output);
        self.output.put_u64(0);
        self.output.put_u64(1 << 32);
        finish(&mut self.output[start..]);
        self.layout = Layout::Probing(id, due);
    }

    fn send_waiting(&mut self) {
        while let Some(Waiting {
            access,
            data,
            due,
            tag,
        }) = self.waiting.pop_front()
        {
            self.send(access, &data, due, tag);
        }
    }

    fn send(&mut self, access: Access, data: &[u8], due: Instant, tag: T) {
        let id = self.id();
        let out = &mut self.output;
        let start = begin_command(id, access.command, out);
        out.put_u64(access.address);
        out.put_u32(access.count);
        match self.layout {
            Layout::Early => {
                out.extend_from_slice(data);
                out.put_u32(0);
            }
            _ => {
                out.put_u32(0); // upper half of the count
                out.extend_from_slice(data);
            }
        }
        finish(&mut out[start..]);
        self.sent.push_back(Sent {
            id,
            access,
            due,
            tag,
        });
    }

    /// The data of a reply to `access`; `None` if the payload has the wrong length.
    fn data<'a>(&self, access: Access, payload: &'a [u8]) -> Option<&'a [u8]> {
        if access.command == Command::DmaWrite {
            return Some(&[]);
        }
        let count = access.count as usize;
        if payload.len() != FIXED + count {
            return None;
        }
        let at = match self.layout {
            Layout::Early => EARLY,
            _ => FIXED,
        };
        payload.get(at..at + count)
    }

    fn id(&mut self) -> u16 {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        id
    }
}
