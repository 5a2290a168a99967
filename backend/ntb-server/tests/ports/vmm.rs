//! A VMM's end of a vfio-user socket: sends requests, serves the server's DMA commands
//! in QEMU's or in the specification's layout. A timeout fails the test.

use std::{
    collections::VecDeque,
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use farside_fabric::memory::create_sealed;
use farside_ntb::regs::{REGISTERS_BAR, WINDOW_BAR};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    io::Errno,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    time::Timespec,
};

/// Ample even on a loaded host.
pub const DEADLINE: Duration = Duration::from_secs(30);

const VERSION: u16 = 1;
const DMA_MAP: u16 = 2;
const DMA_UNMAP: u16 = 3;
const SET_IRQS: u16 = 8;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;
pub const DMA_READ: u16 = 11;
pub const DMA_WRITE: u16 = 12;
const RESET: u16 = 13;
const WRITE_MULTI: u16 = 15;

pub const NO_REPLY: u32 = 1 << 4;
const CONFIG_REGION: u32 = 7;

/// A VMM's layout of DMA commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Specified,
    Qemu,
}

pub struct Vmm {
    pub socket: UnixStream,
    layout: Layout,
    id: u16,
    messages: VecDeque<Message>,
    replies: VecDeque<Message>,
}

/// A message from the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub id: u16,
    pub command: u16,
    pub flags: u32,
    pub error: u32,
    pub payload: Vec<u8>,
}

/// A DMA command, in either layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dma {
    pub id: u16,
    pub command: u16,
    pub address: u64,
    pub count: u32,
    pub data: Vec<u8>,
}

impl Vmm {
    /// Connected; no message sent.
    pub fn connect(path: &Path, layout: Layout) -> Self {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        Self {
            socket,
            layout,
            id: 0,
            messages: VecDeque::new(),
            replies: VecDeque::new(),
        }
    }

    /// Connected, version negotiated.
    pub fn negotiated(path: &Path, layout: Layout) -> Self {
        let mut vmm = Self::connect(path, layout);
        let caps = b"{\"capabilities\":{\"max_msg_fds\":16,\"write_multiple\":true}}\0";
        vmm.call(VERSION, &[&[0, 0, 1, 0], &caps[..]].concat(), &[])
            .unwrap();
        vmm
    }

    /// Sends a request and does not wait.
    pub fn post(&mut self, command: u16, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.id = self.id.wrapping_add(1);
        let bytes = message(self.id, command, flags, payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::NOSIGNAL;
        let sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags).unwrap();
        self.socket.write_all(&bytes[sent..]).unwrap();
    }

    /// The reply to the last request.
    pub fn reply(&mut self) -> Result<Vec<u8>, Errno> {
        self.reply_to(self.id)
    }

    /// The data of a read before the last request; the later requests were posted.
    pub fn read_reply_before(&mut self, later: u16) -> Vec<u8> {
        self.reply_to(self.id.wrapping_sub(later)).unwrap()[16..].to_vec()
    }

    fn reply_to(&mut self, id: u16) -> Result<Vec<u8>, Errno> {
        let reply = loop {
            match self.replies.pop_front() {
                Some(reply) => break reply,
                None => self.receive(),
            }
        };
        assert_eq!(reply.id, id, "a reply to another request");
        match reply.flags {
            1 => Ok(reply.payload),
            0x21 => Err(Errno::from_raw_os_error(reply.error as i32)),
            flags => panic!("flags {flags:#x} in a reply"),
        }
    }

    pub fn call(
        &mut self,
        command: u16,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>, Errno> {
        self.post(command, 0, payload, fds);
        self.reply()
    }

    fn receive(&mut self) {
        let mut header = [0; 16];
        self.socket.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        let mut payload = vec![0; word(4) as usize - 16];
        self.socket.read_exact(&mut payload).unwrap();
        let message = Message {
            id: word(0) as u16,
            command: (word(0) >> 16) as u16,
            flags: word(8),
            error: word(12),
            payload,
        };
        match message.flags & 0xf {
            0 => self.messages.push_back(message),
            _ => self.replies.push_back(message),
        }
    }

    /// Whether an unread message has arrived.
    pub fn has_heard(&mut self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&Timespec::default())).unwrap();
        ready != 0 || !self.messages.is_empty() || !self.replies.is_empty()
    }

    /// The next DMA command. Answers the layout probe.
    pub fn next_dma(&mut self) -> Dma {
        loop {
            let Some(message) = self.messages.pop_front() else {
                self.receive();
                continue;
            };
            let long =
                |at: usize| u64::from_ne_bytes(message.payload[at..at + 8].try_into().unwrap());
            let (id, command, address) = (message.id, message.command, long(0));
            // With a 32-bit count this is a write of 0 bytes.
            let (count, data) = match self.layout {
                Layout::Specified => (long(8), &message.payload[16..]),
                Layout::Qemu => (long(8) & 0xffff_ffff, &message.payload[12..]),
            };
            let has = message.payload.len() as u64 - 16;
            if command == DMA_WRITE && count > has {
                self.answer(id, command, Err(Errno::TOOBIG));
            } else if command == DMA_WRITE && count == 0 {
                self.answer(id, command, Ok(&[]));
            } else {
                let data = match command {
                    DMA_WRITE => data[..count as usize].to_vec(),
                    _ => Vec::new(),
                };
                return Dma {
                    id,
                    command,
                    address,
                    count: count as u32,
                    data,
                };
            }
        }
    }

    /// Expects a DMA read.
    #[track_caller]
    pub fn expect_read(&mut self, address: u64, count: u32) -> Dma {
        let dma = self.next_dma();
        assert_eq!((dma.command, dma.address), (DMA_READ, address));
        assert_eq!(dma.count, count);
        dma
    }

    /// Expects a DMA write.
    #[track_caller]
    pub fn expect_write(&mut self, address: u64, data: &[u8]) -> Dma {
        let dma = self.next_dma();
        assert_eq!((dma.command, dma.address), (DMA_WRITE, address));
        assert_eq!(dma.data, data);
        dma
    }

    /// Answers a DMA read with data, or either with an error.
    pub fn answer_read(&mut self, read: &Dma, data: Result<&[u8], Errno>) {
        let payload = data.map(|data| match self.layout {
            Layout::Specified => [&longs(&[read.address, data.len() as u64]), data].concat(),
            Layout::Qemu => {
                let count = (data.len() as u32).to_ne_bytes();
                [&longs(&[read.address])[..], &count, data, &[0; 4]].concat()
            }
        });
        self.answer(
            read.id,
            read.command,
            payload.as_deref().map_err(|errno| *errno),
        );
    }

    /// Answers a DMA write.
    pub fn answer_write(&mut self, write: &Dma, result: Result<(), Errno>) {
        let payload = match self.layout {
            Layout::Specified => longs(&[write.address, write.count.into()]),
            Layout::Qemu => Vec::new(),
        };
        self.answer(write.id, write.command, result.map(|()| &payload[..]));
    }

    fn answer(&mut self, id: u16, command: u16, payload: Result<&[u8], Errno>) {
        let bytes = match payload {
            Ok(payload) => message(id, command, 1, payload),
            Err(errno) => {
                let mut bytes = message(id, command, 0x21, &[]);
                let errno = errno.raw_os_error().unsigned_abs();
                bytes[12..].copy_from_slice(&errno.to_ne_bytes());
                bytes
            }
        };
        self.socket.write_all(&bytes).unwrap();
    }

    pub fn map(&mut self, address: u64, size: u64, fd: Option<(&OwnedFd, u64)>) {
        self.map_as(address, size, fd, 3).unwrap();
    }

    /// With flags: 1 readable, 2 writable.
    pub fn map_as(
        &mut self,
        address: u64,
        size: u64,
        fd: Option<(&OwnedFd, u64)>,
        flags: u32,
    ) -> Result<(), Errno> {
        let offset = fd.map_or(0, |(_, offset)| offset);
        let payload = [words(&[32, flags]), longs(&[offset, address, size])].concat();
        let fds: Vec<_> = fd.iter().map(|(fd, _)| fd.as_fd()).collect();
        self.call(DMA_MAP, &payload, &fds).map(|_| ())
    }

    pub fn unmap(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        let payload = [words(&[24, 0]), longs(&[address, size])].concat();
        self.call(DMA_UNMAP, &payload, &[]).map(|_| ())
    }

    pub fn reset(&mut self) {
        self.call(RESET, &[], &[]).unwrap();
    }

    /// Sends a read and does not wait.
    pub fn post_read(&mut self, bar: u8, offset: u64, len: u32) {
        self.post(REGION_READ, 0, &access(offset, bar.into(), len), &[]);
    }

    /// The data of the last read.
    pub fn read_reply(&mut self) -> Vec<u8> {
        self.reply().unwrap()[16..].to_vec()
    }

    pub fn read(&mut self, region: u32, offset: u64, len: u32) -> Vec<u8> {
        let payload = access(offset, region, len);
        self.call(REGION_READ, &payload, &[]).unwrap()[16..].to_vec()
    }

    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let payload = [&access(offset, region, data.len() as u32), data].concat();
        self.call(REGION_WRITE, &payload, &[]).unwrap();
    }

    /// A posted write.
    pub fn post_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        let payload = [&access(offset, bar.into(), data.len() as u32), data].concat();
        self.post(REGION_WRITE, NO_REPLY, &payload, &[]);
    }

    /// Writes of eight bytes each, in one message.
    pub fn write_multi(&mut self, bar: u8, writes: &[(u64, u64)]) {
        self.post_multi(bar, 0, writes);
        self.reply().unwrap();
    }

    /// The same without waiting, and without a reply if `flags` say so.
    pub fn post_multi(&mut self, bar: u8, flags: u32, writes: &[(u64, u64)]) {
        let mut payload = longs(&[writes.len() as u64]);
        for (offset, value) in writes {
            payload.extend(access(*offset, bar.into(), 8));
            payload.extend(value.to_le_bytes());
        }
        self.post(WRITE_MULTI, flags, &payload, &[]);
    }

    pub fn get32(&mut self, offset: u64) -> u32 {
        let data = self.read(REGISTERS_BAR.into(), offset, 4);
        u32::from_le_bytes(data.try_into().unwrap())
    }

    pub fn get64(&mut self, offset: u64) -> u64 {
        let data = self.read(REGISTERS_BAR.into(), offset, 8);
        u64::from_le_bytes(data.try_into().unwrap())
    }

    pub fn put32(&mut self, offset: u64, value: u32) {
        self.write(REGISTERS_BAR.into(), offset, &value.to_le_bytes());
    }

    pub fn put64(&mut self, offset: u64, value: u64) {
        self.write(REGISTERS_BAR.into(), offset, &value.to_le_bytes());
    }

    pub fn load(&mut self, offset: u64, len: u32) -> Vec<u8> {
        self.read(WINDOW_BAR.into(), offset, len)
    }

    pub fn store(&mut self, offset: u64, data: &[u8]) {
        self.write(WINDOW_BAR.into(), offset, data);
    }

    pub fn config_write(&mut self, offset: u64, data: &[u8]) {
        self.write(CONFIG_REGION, offset, data);
    }

    pub fn config_read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        self.read(CONFIG_REGION, offset, len)
    }

    /// Memory space and bus mastering on or only memory space on.
    pub fn set_bus_master(&mut self, on: bool) {
        self.config_write(4, &[if on { 6 } else { 2 }, 0]);
    }

    /// Gives an MSI-X vector an eventfd.
    pub fn set_eventfd(&mut self, vector: u16) -> Eventfd {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = eventfd(0, flags).unwrap();
        let payload = words(&[20, 1 << 2 | 1 << 5, 2, vector.into(), 1]);
        self.call(SET_IRQS, &payload, &[fd.as_fd()]).unwrap();
        Eventfd(fd)
    }

    /// Removes the error interrupt's eventfd.
    pub fn take_error_trigger(&mut self) {
        let payload = words(&[20, 1 << 2 | 1 << 5, 3, 0, 1]);
        self.call(SET_IRQS, &payload, &[]).unwrap();
    }
}

/// A vector's eventfd.
pub struct Eventfd(OwnedFd);

impl Eventfd {
    /// Number of signals since the last call; waits for the first.
    pub fn wait(&self) -> u64 {
        let deadline = Timespec {
            tv_sec: DEADLINE.as_secs() as i64,
            tv_nsec: 0,
        };
        let ready = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&deadline));
        assert_eq!(ready, Ok(1), "no interrupt");
        let mut count = [0; 8];
        rustix::io::read(&self.0, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    /// Whether it was not signalled.
    pub fn is_quiet(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]) == Err(Errno::AGAIN)
    }
}

/// Memory of a VM.
pub struct Ram(pub OwnedFd);

impl Ram {
    pub fn new(len: u64) -> Self {
        Self(create_sealed("ram", len).unwrap())
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        let read = rustix::io::pread(&self.0, &mut data, offset).unwrap();
        assert_eq!(read, len);
        data
    }

    pub fn write(&self, offset: u64, data: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.0, data, offset), Ok(data.len()));
    }
}

fn message(id: u16, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = 16 + payload.len() as u32;
    let mut bytes = [id.to_ne_bytes(), command.to_ne_bytes()].concat();
    bytes.extend(words(&[size, flags, 0]));
    bytes.extend(payload);
    bytes
}

fn access(offset: u64, region: u32, count: u32) -> Vec<u8> {
    [longs(&[offset]), words(&[region, count])].concat()
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

fn longs(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}
