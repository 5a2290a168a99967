//! Commands to the client: `DMA_READ` and `DMA_WRITE`.
//!
//! They reach what a client has not given a descriptor for: memory that it does
//! not share, and registers of its other devices.
//!
//! # Two layouts
//!
//! The specification gives the count 64 bits, and so does QEMU 11.1.3. The
//! source with which QEMU began declares 32 and lets the data begin right behind
//! them, four bytes early, but counts four bytes more for the size of the
//! message. Which of the two a client takes is asked for before the first
//! command, by a `DMA_WRITE` of 2³² bytes that has none: a reader of 32 bits
//! sees a write of nothing, which succeeds; to one of 64 it is longer than its
//! message, an error.
//!
//! # A client that is busy
//!
//! QEMU serves commands on its main loop under its big lock, which a virtual
//! processor holds while it waits for the answer to a region read. So a server
//! that waits for a command's answer before it answers a read of the *same*
//! client waits until the command's time is up.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::Command;
use super::connection::{Connection, ConnectionError};
use super::header::{self, Header};
use super::wire::Put;

/// Bytes of address and count, in either layout.
const FIXED: usize = 16;

/// Where the data begins in a payload of the early layout.
const EARLY: usize = 12;

/// Commands that wait for their replies, each with a tag of the server's.
#[derive(Debug)]
pub struct DmaCommands<T> {
    /// Sent, oldest first.
    sent: VecDeque<Sent<T>>,
    /// To be sent when the layout is known, oldest first.
    waiting: VecDeque<Waiting<T>>,
    layout: Layout,
    next_id: u16,
    timeout: Duration,
    most: usize,
    /// Encoded and not yet given to the connection.
    output: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Unknown,
    /// Asked for by the command with this id, which must be answered by then.
    Asked(u16, Instant),
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

/// Too many commands are under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} DMA commands wait for the client's answer")]
pub struct TooMany(usize);

/// What a reply of the client's was.
#[derive(Debug)]
pub enum Matched<'a, T> {
    /// To none of the commands: they have other ids, or their time was up.
    Nothing,
    /// To a question of our own.
    Settled,
    /// To the command with this tag.
    Command {
        /// The tag.
        tag: T,
        /// What was read, or nothing; or why it was refused.
        result: Result<&'a [u8], Errno>,
    },
}

impl<T> DmaCommands<T> {
    /// No commands. Each may take `timeout`; at most `most` may be under way.
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

    /// Writes client memory, likewise.
    ///
    /// # Errors
    ///
    /// [`TooMany`].
    pub fn write(&mut self, address: u64, data: &[u8], tag: T) -> Result<(), TooMany> {
        // Bounded by the negotiated size, far below 4 GiB.
        let count = data.len() as u32;
        self.start(Command::DmaWrite, address, count, data, tag)
    }

    /// Whether no command is under way.
    pub fn is_idle(&self) -> bool {
        self.sent.is_empty() && self.waiting.is_empty()
    }

    /// Gives the connection what there is to send.
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

    /// Takes a reply of the client's.
    pub fn on_reply<'a>(&mut self, header: &Header, payload: &'a [u8]) -> Matched<'a, T> {
        if matches!(self.layout, Layout::Asked(id, _) if id == header.id) {
            self.layout = match header.is_error() {
                true => Layout::Specified,
                false => Layout::Early,
            };
            log::debug!(
                "the client takes DMA commands in this layout: {:?}",
                self.layout
            );
            self.send_waiting();
            return Matched::Settled;
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

    /// When the oldest command's time is up.
    pub fn deadline(&self) -> Option<Instant> {
        let waiting = self.waiting.front().map(|waiting| waiting.due);
        self.sent.front().map(|sent| sent.due).or(waiting)
    }

    /// A command whose time is up: the oldest first. A reply that comes yet is
    /// to none.
    pub fn expire(&mut self, now: Instant) -> Option<T> {
        if matches!(self.layout, Layout::Asked(_, due) if due <= now) {
            self.layout = Layout::Unknown;
        }
        // All have the same time, so they are in order, and what waits was
        // asked for after what was sent.
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

    /// Forgets everything: the client is gone. Returns the tags of what was
    /// under way.
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
        let under_way = self.sent.len() + self.waiting.len();
        if under_way >= self.most {
            return Err(TooMany(under_way));
        }
        let due = Instant::now() + self.timeout;
        let access = Access {
            command,
            address,
            count,
        };
        match self.layout {
            Layout::Specified | Layout::Early => self.send(access, data, due, tag),
            Layout::Unknown | Layout::Asked(..) => {
                if self.layout == Layout::Unknown {
                    self.ask(due);
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

    fn ask(&mut self, due: Instant) {
        let id = self.id();
        let start = header::begin_command(id, Command::DmaWrite, &mut self.output);
        self.output.put_u64(0);
        self.output.put_u64(1 << 32);
        header::finish(&mut self.output[start..]);
        self.layout = Layout::Asked(id, due);
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
        let start = header::begin_command(id, access.command, out);
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
        header::finish(&mut out[start..]);
        self.sent.push_back(Sent {
            id,
            access,
            due,
            tag,
        });
    }

    /// What a reply to `access` brought; `None` when it is not all there.
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
