//! A sequence of operations on a vfio-user connection: whole messages, fragments, noise,
//! descriptors at any point, a client that may not read.
//!
//! Input: a list of operations, each encoded as one byte, see [`run`].
//!
//! Invariants: no panic; every reply is well formed and matches a request; while the client
//! sends whole messages only, its last one is answered; no descriptor leaks.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};

use farside_vfio_user::serve::{Pumped, pump};
use farside_vfio_user::{Connection, ConnectionError, Errno, MAX_MSG_FDS, Reply, Session};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::device::TestDevice;
use crate::input::Input;

/// Most descriptors sent with one message: more than the server accepts.
const MOST_FDS: usize = 20;

const VERSION: u16 = 1;
const GET_INFO: u16 = 4;

/// Runs the operations of `input`: each a byte with the kind in the three low bits and a number of
/// descriptors in the others. By kind:
///
/// 0. A whole message: command, flags, two bytes of length, payload.
/// 1. Bytes: two bytes of length, the bytes.
/// 2. A whole message in two parts, with the server run in between: one byte for the split point,
///    then as kind 0.
/// 3. Version negotiation.
/// 4. The server processes as many messages as the next byte gives.
/// 5. The client reads.
/// 6. From now on, resets are answered later, or again at once.
/// 7. The client closes its sending side.
pub fn run(input: &[u8]) {
    static RUNS: AtomicU64 = AtomicU64::new(0);
    let name = format!("passed-{}", RUNS.fetch_add(1, Ordering::Relaxed));
    let passed = memfd_create(&name, MemfdFlags::CLOEXEC).expect("a file");
    Peer::new(passed).run(Input(input));
    assert_eq!(descriptors_of(&name), 0, "descriptors were left open");
}

struct Peer {
    client: UnixStream,
    server: Connection,
    session: Session,
    device: TestDevice,
    passed: OwnedFd,
    received: VecDeque<u8>,
    /// Only whole messages have been sent so far.
    framed: bool,
    closed: bool,
}

impl Peer {
    fn new(passed: OwnedFd) -> Self {
        let (client, server) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        Self {
            client,
            server: Connection::new(server).unwrap(),
            session: Session::new(),
            device: TestDevice::new(),
            passed,
            received: VecDeque::new(),
            framed: true,
            closed: false,
        }
    }

    fn run(mut self, mut input: Input<'_>) {
        while !input.is_empty() && !self.closed {
            let op = input.u8();
            let fds = usize::from(op >> 3).min(MOST_FDS);
            match op & 7 {
                0 => {
                    let message = message(&mut input);
                    self.send(&message, fds);
                }
                1 => {
                    let length = input.u16();
                    let bytes = input.bytes(length.into()).to_vec();
                    self.framed &= bytes.is_empty();
                    self.send(&bytes, fds);
                }
                2 => {
                    let cut = usize::from(input.u8());
                    let message = message(&mut input);
                    let (first, second) = message.split_at(cut.min(message.len()));
                    self.send(first, fds);
                    self.pump(usize::MAX);
                    self.send(second, fds / 2);
                }
                3 => self.send(&version(), 0),
                4 => {
                    let budget = input.u8();
                    self.pump(budget.into());
                }
                5 => self.read(),
                6 => {
                    self.answer_deferred();
                    self.device.defer_reset = match self.device.defer_reset {
                        Some(_) => None,
                        None => Some(None),
                    };
                }
                _ => {
                    self.client.shutdown(std::net::Shutdown::Write).unwrap();
                    self.pump(usize::MAX);
                    self.read();
                    return;
                }
            }
        }
        if self.framed && !self.closed {
            self.last_is_answered();
        }
    }

    /// Checks that the last message of a client that sent only whole messages is answered.
    fn last_is_answered(&mut self) {
        self.device.defer_reset = self.device.defer_reset.map(|_| None);
        self.flush();
        self.device.defer_reset = None;
        self.received.clear();
        let command = if self.session.negotiated().is_some() {
            GET_INFO
        } else {
            VERSION
        };
        let last = if command == GET_INFO {
            get_info()
        } else {
            version()
        };
        self.send(&last, 0);
        self.flush();
        if self.closed {
            return;
        }
        assert!(!self.received.is_empty(), "no answer to the last message");
    }

    /// Runs both ends until neither makes progress.
    fn flush(&mut self) {
        for _ in 0..10_000 {
            self.answer_deferred();
            self.pump(usize::MAX);
            let had = self.received.len();
            self.read();
            if self.closed || (!self.server.wants_write() && self.received.len() == had) {
                return;
            }
        }
        panic!("no end to it");
    }

    fn send(&mut self, mut bytes: &[u8], fds: usize) {
        let mut fds = fds;
        for _ in 0..10_000 {
            if bytes.is_empty() || self.closed {
                return;
            }
            match send_some(&self.client, bytes, self.passed.as_fd(), fds) {
                Ok(sent) => {
                    bytes = &bytes[sent..];
                    fds = 0;
                }
                Err(Errno::AGAIN) => {
                    self.answer_deferred();
                    self.pump(usize::MAX);
                    self.read();
                }
                Err(Errno::PIPE) => self.closed = true,
                Err(errno) => panic!("{errno}"),
            }
        }
        panic!("the server does not take it");
    }

    fn pump(&mut self, budget: usize) {
        // Requests are not read while a reply is pending.
        if self.closed || matches!(self.device.defer_reset, Some(Some(_))) {
            return;
        }
        let budget = budget.min(100_000);
        match pump(
            &mut self.server,
            &mut self.session,
            &mut self.device,
            budget,
        ) {
            Ok(Pumped::Idle | Pumped::Full | Pumped::Budget | Pumped::Later) => {}
            Err(ConnectionError::Receive(errno) | ConnectionError::Send(errno)) => {
                panic!("{errno}")
            }
            Err(_) => self.closed = true,
        }
    }

    fn answer_deferred(&mut self) {
        if let Some(to) = self.device.defer_reset.as_mut().and_then(Option::take)
            && !self.closed
            && self.server.send(to, Ok(Reply::Done)).is_err()
        {
            self.closed = true;
        }
    }

    /// Reads all available replies and checks the complete ones.
    fn read(&mut self) {
        let mut bytes = [0; 4096];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut iov = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let Ok(got) = rustix::net::recvmsg(&self.client, &mut iov, &mut control, flags) else {
                break;
            };
            let fds: usize = control
                .drain()
                .map(|message| match message {
                    RecvAncillaryMessage::ScmRights(fds) => fds.count(),
                    _ => 0,
                })
                .sum();
            assert!(fds <= 1, "a reply has one descriptor at most");
            if got.bytes == 0 {
                self.closed = true;
                break;
            }
            self.received.extend(&bytes[..got.bytes]);
        }
        // Keeps the last whole message, so that the caller can see that a reply arrived.
        while let Some(size) = self.check_first() {
            if self.received.len() == size {
                break;
            }
            self.received.drain(..size);
        }
    }

    /// Size of the first message, if it is complete and well formed.
    fn check_first(&mut self) -> Option<usize> {
        let bytes = self.received.make_contiguous();
        let word = |at: usize| {
            Some(u32::from_ne_bytes(
                bytes.get(at..at + 4)?.try_into().unwrap(),
            ))
        };
        let (size, flags, error) = (word(4)? as usize, word(8)?, word(12)?);
        assert!((16..=16 + 16 + (1 << 20)).contains(&size));
        assert_eq!(flags & !0x20, 1, "a reply, or an error reply");
        if flags & 0x20 != 0 {
            assert_eq!(size, 16, "an error reply is a header");
            assert!((1..134).contains(&error), "an errno");
        } else {
            assert_eq!(error, 0);
        }
        (bytes.len() >= size).then_some(size)
    }
}

/// A whole message from command, flags, length and payload.
fn message(input: &mut Input<'_>) -> Vec<u8> {
    let command = input.u8();
    let flags = input.u8();
    let length = input.u16();
    framed(command.into(), flags.into(), input.bytes(length.into()))
}

fn framed(command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(7_u16.to_ne_bytes());
    bytes.extend(command.to_ne_bytes());
    bytes.extend((16 + payload.len() as u32).to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend(payload);
    bytes
}

fn version() -> Vec<u8> {
    framed(
        VERSION,
        0,
        b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":16}}\0",
    )
}

fn get_info() -> Vec<u8> {
    framed(
        GET_INFO,
        0,
        &[[16, 0, 0, 0], [0; 4], [0; 4], [0; 4]].concat(),
    )
}

fn send_some(
    socket: &UnixStream,
    bytes: &[u8],
    fd: BorrowedFd<'_>,
    fds: usize,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd; MOST_FDS].into_iter().take(fds).collect::<Vec<_>>();
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}

/// How many of this process's descriptors are of the memory file `name`.
fn descriptors_of(name: &str) -> usize {
    let link = format!("/memfd:{name} (deleted)");
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("a mounted /proc");
    let files = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    files.filter(|file| file.as_os_str() == &*link).count()
}
