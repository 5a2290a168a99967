//! A client's end of a socket pair, and a server at the other that the test runs step
//! by step: no threads, no clock.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use farside_vfio_user::serve::{Pumped, pump};
use farside_vfio_user::{Connection, ConnectionError, Errno, Session};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::device::TestDevice;

pub const VERSION: u16 = 1;
pub const DMA_MAP: u16 = 2;
pub const DMA_UNMAP: u16 = 3;
pub const GET_INFO: u16 = 4;
pub const GET_REGION_INFO: u16 = 5;
pub const GET_IRQ_INFO: u16 = 7;
pub const SET_IRQS: u16 = 8;
pub const REGION_READ: u16 = 9;
pub const REGION_WRITE: u16 = 10;
pub const RESET: u16 = 13;
pub const WRITE_MULTI: u16 = 15;

pub const NO_REPLY: u32 = 1 << 4;

/// A client and its server.
pub struct Wire {
    pub client: UnixStream,
    pub server: Connection,
    pub session: Session,
    pub device: TestDevice,
    /// Reports each edge of the server's socket, once (EPOLLET).
    edges: OwnedFd,
    /// The server stopped for another reason than missing input.
    unfinished: bool,
}

/// A received reply.
#[derive(Debug)]
pub struct Received {
    pub id: u16,
    pub command: u16,
    pub flags: u32,
    pub error: u32,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Wire {
    /// Connected; no message sent.
    pub fn new() -> Self {
        let (client, server) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let server = Connection::new(server).unwrap();
        let edges = epoll::create(CreateFlags::CLOEXEC).unwrap();
        let input = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&edges, &server, EventData::new_u64(0), input).unwrap();
        Self {
            client,
            server,
            session: Session::new(),
            device: TestDevice::new(),
            edges,
            unfinished: false,
        }
    }

    /// Connected, version negotiated.
    pub fn negotiated() -> Self {
        let mut wire = Self::new();
        let caps = br#"{"capabilities":{"max_msg_fds":16,"write_multiple":true}}"#;
        wire.call(VERSION, &version_payload(0, 1, caps)).unwrap();
        wire
    }

    /// Sends bytes, with descriptors on the first of them.
    pub fn send_fds(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let iov = [IoSlice::new(bytes)];
        let sent =
            rustix::net::sendmsg(&self.client, &iov, &mut control, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, bytes.len());
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.client.write_all(bytes).unwrap();
    }

    /// Runs the server as an EPOLLET event loop does: data that it leaves unread
    /// without another edge stays unread.
    pub fn run(&mut self) -> Result<Pumped, ConnectionError> {
        loop {
            let mut events = [Event {
                flags: EventFlags::empty(),
                data: EventData::new_u64(0),
            }];
            let told = epoll::wait(&self.edges, &mut events, Some(&Timespec::default())).unwrap();
            if told == 0 && !self.unfinished {
                return Ok(Pumped::Idle);
            }
            let hung_up = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
            let told_of = events[0].flags;
            if told_of.intersects(hung_up) {
                self.server.on_peer_shutdown();
            }
            let pumped = pump(
                &mut self.server,
                &mut self.session,
                &mut self.device,
                10_000,
            )?;
            self.unfinished = pumped != Pumped::Idle;
            if self.unfinished {
                return Ok(pumped);
            }
        }
    }

    /// The next reply that has arrived.
    pub fn received(&mut self) -> Option<Received> {
        let mut header = [0; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [std::io::IoSliceMut::new(&mut header)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(&self.client, &mut iov, &mut control, flags) {
            Ok(received) if received.bytes == 16 => {}
            Ok(received) if received.bytes == 0 => return None,
            Err(Errno::AGAIN) => return None,
            other => panic!("half a header: {other:?}"),
        }
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let size = get_u32(&header, 4) as usize;
        let mut payload = vec![0; size.checked_sub(16).expect("reply of less than a header")];
        self.client.read_exact(&mut payload).unwrap();
        Some(Received {
            id: get_u16(&header, 0),
            command: get_u16(&header, 2),
            flags: get_u32(&header, 8),
            error: get_u32(&header, 12),
            payload,
            fds,
        })
    }

    /// Sends a message, runs the server and returns the reply: its payload, or
    /// the errno. There must be exactly one.
    pub fn call(&mut self, command: u16, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        self.call_fds(command, payload, &[])
            .map(|reply| reply.payload)
    }

    pub fn call_fds(
        &mut self,
        command: u16,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Received, Errno> {
        self.send_fds(&message(0x1234, command, 0, payload), fds);
        self.run().unwrap();
        let reply = self.received().expect("a reply");
        assert!(self.received().is_none(), "more than one reply");
        assert_eq!((reply.id, reply.command), (0x1234, command));
        assert_eq!(reply.flags & 0xf, 1, "not a reply");
        if reply.flags & (1 << 5) != 0 {
            assert!(reply.payload.is_empty(), "an error reply is a header only");
            assert_ne!(reply.error, 0, "an error without an errno");
            return Err(Errno::from_raw_os_error(reply.error as i32));
        }
        assert_eq!(reply.error, 0);
        Ok(reply)
    }

    /// Checks that a message is refused with `errno`, that the descriptors with
    /// it are closed, and that the next message is served.
    #[track_caller]
    pub fn refused(&mut self, command: u16, payload: &[u8], errno: Errno) {
        assert_eq!(self.call(command, payload).unwrap_err(), errno);
        self.still_framed();
    }

    /// Checks that the stream is still framed: the next message is served.
    #[track_caller]
    pub fn still_framed(&mut self) {
        if self.session.negotiated().is_some() {
            let info = self.call(GET_INFO, &words(&[16, 0, 0, 0])).unwrap();
            assert_eq!(info, words(&[16, 3, 9, 5]));
        } else {
            self.call(VERSION, &version_payload(0, 1, b"{}")).unwrap();
        }
    }
}

/// A whole message.
pub fn message(id: u16, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    raw_message(id, command, 16 + payload.len() as u32, flags, payload)
}

/// A message with any size in its header.
pub fn raw_message(id: u16, command: u16, size: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(id.to_ne_bytes());
    bytes.extend(command.to_ne_bytes());
    bytes.extend(words(&[size, flags, 0]));
    bytes.extend(payload);
    bytes
}

pub fn version_payload(major: u16, minor: u16, json: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(major.to_ne_bytes());
    bytes.extend(minor.to_ne_bytes());
    bytes.extend(json);
    bytes.push(0);
    bytes
}

/// 32-bit fields.
pub fn words(values: &[u32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

/// 64-bit fields.
pub fn longs(values: &[u64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

/// The head of a region read or write.
pub fn access(offset: u64, region: u32, count: u32) -> Vec<u8> {
    [longs(&[offset]), words(&[region, count])].concat()
}

pub fn get_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(bytes[at..at + 2].try_into().unwrap())
}

pub fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// An eventfd that reveals whether the server still holds it.
pub struct TriggerCanary {
    eventfd: OwnedFd,
}

impl TriggerCanary {
    pub fn new() -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let eventfd = rustix::event::eventfd(0, flags).unwrap();
        Self { eventfd }
    }

    /// The descriptor to send.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Whether no other descriptor of this process is the same eventfd.
    pub fn closed_elsewhere(&self) -> bool {
        let id = |info: &str| {
            let line = info.lines().find(|line| line.starts_with("eventfd-id:"));
            line.map(str::to_owned)
        };
        let ours = format!("/proc/self/fdinfo/{}", self.eventfd.as_raw_fd());
        let ours = id(&std::fs::read_to_string(ours).unwrap()).expect("an eventfd has an id");
        let holders = std::fs::read_dir("/proc/self/fdinfo").unwrap();
        // Other tests open and close descriptors meanwhile.
        let infos = holders.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
        infos
            .filter(|info| id(info).as_ref() == Some(&ours))
            .count()
            == 1
    }
}

/// A descriptor that reveals whether all duplicates of it are closed.
pub struct Canary {
    reader: std::io::PipeReader,
    writer: std::io::PipeWriter,
}

impl Canary {
    pub fn new() -> Self {
        let (reader, writer) = std::io::pipe().unwrap();
        Self { reader, writer }
    }

    /// The descriptor to send.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.writer.as_fd()
    }

    /// Whether all duplicates are closed. What the kernel has not delivered, it may close a moment later.
    pub fn closed_elsewhere(self) -> bool {
        let Self { mut reader, writer } = self;
        drop(writer);
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        let limit = Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        let mut closed = [PollFd::new(&reader, PollFlags::IN)];
        poll(&mut closed, Some(&limit)).unwrap();
        matches!(reader.read(&mut [0]), Ok(0))
    }
}
