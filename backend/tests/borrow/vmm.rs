//! A vfio-user client that exposes every errno. A timeout fails the test.

use std::{
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use rustix::{
    io::Errno,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};

use crate::{
    guest::Port,
    host::{DEADLINE, Served},
};

pub const VERSION: u16 = 1;
pub const DMA_MAP: u16 = 2;
pub const DMA_UNMAP: u16 = 3;
pub const SET_IRQS: u16 = 8;
pub const REGION_READ: u16 = 9;
pub const REGION_WRITE: u16 = 10;
pub const RESET: u16 = 13;

pub const DATA_NONE: u32 = 1 << 0;
pub const DATA_BOOL: u32 = 1 << 1;
pub const DATA_EVENTFD: u32 = 1 << 2;
pub const MASK: u32 = 1 << 3;
pub const UNMASK: u32 = 1 << 4;
pub const TRIGGER: u32 = 1 << 5;

/// Bytes of a header.
const HEADER: usize = 16;

pub struct Vmm {
    pub socket: UnixStream,
    id: u16,
}

impl Vmm {
    pub fn connect(path: &Path) -> Self {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        Self { socket, id: 0 }
    }

    /// The bytes of a command.
    pub fn command(&mut self, command: u16, payload: &[u8]) -> Vec<u8> {
        self.id = self.id.wrapping_add(1);
        let mut bytes = Vec::new();
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(command.to_le_bytes());
        bytes.extend(((HEADER + payload.len()) as u32).to_le_bytes());
        bytes.extend([0; 8]);
        bytes.extend(payload);
        bytes
    }

    /// Sends a command without waiting for the reply.
    pub fn post(&mut self, command: u16, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let bytes = self.command(command, payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::NOSIGNAL;
        let sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags).unwrap();
        self.socket.write_all(&bytes[sent..]).unwrap();
    }

    /// The payload of the next reply, which must be to the last command.
    pub fn reply(&mut self) -> Result<Vec<u8>, Errno> {
        let mut header = [0; HEADER];
        self.socket.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!(header[..2], self.id.to_le_bytes(), "a reply to another");
        let mut payload = vec![0; word(4) as usize - HEADER];
        self.socket.read_exact(&mut payload).unwrap();
        match word(8) {
            1 => Ok(payload),
            0x21 => Err(Errno::from_raw_os_error(word(12) as i32)),
            flags => panic!("flags {flags:#x} in a reply"),
        }
    }

    pub fn call(
        &mut self,
        command: u16,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>, Errno> {
        self.post(command, payload, fds);
        self.reply()
    }

    pub fn negotiate(&mut self) -> Result<(), Errno> {
        self.call(VERSION, &version(), &[]).map(|_| ())
    }

    /// Waits for the server to close the connection.
    pub fn expect_closed(&mut self) {
        let mut rest = Vec::new();
        self.socket.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty(), "{rest:?}");
    }

    pub fn map(
        &mut self,
        address: u64,
        size: u64,
        fd: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), Errno> {
        let offset = fd.map_or(0, |(_, offset)| offset);
        let mut payload = words(&[32, 3]);
        for value in [offset, address, size] {
            payload.extend(value.to_le_bytes());
        }
        let fds: Vec<_> = fd.iter().map(|(fd, _)| *fd).collect();
        self.call(DMA_MAP, &payload, &fds).map(|_| ())
    }

    pub fn unmap(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        self.call(DMA_UNMAP, &unmap(address, size), &[]).map(|_| ())
    }

    pub fn unmap_all(&mut self) -> Result<(), Errno> {
        let mut payload = words(&[24, 1 << 1]);
        payload.extend([0; 16]);
        self.call(DMA_UNMAP, &payload, &[]).map(|_| ())
    }

    pub fn reset(&mut self) -> Result<(), Errno> {
        self.call(RESET, &[], &[]).map(|_| ())
    }

    pub fn set_irqs<F: AsFd>(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: &[F],
    ) -> Result<(), Errno> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let payload = words(&[20, flags, index, start, count]);
        self.call(SET_IRQS, &payload, &fds).map(|_| ())
    }

    pub fn set_irqs_bool(
        &mut self,
        index: u32,
        action: u32,
        start: u32,
        chosen: &[bool],
    ) -> Result<(), Errno> {
        let count = chosen.len() as u32;
        let mut payload = words(&[20 + count, DATA_BOOL | action, index, start, count]);
        payload.extend(chosen.iter().map(|&chosen| u8::from(chosen)));
        self.call(SET_IRQS, &payload, &[]).map(|_| ())
    }

    pub fn try_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        let reply = self.call(REGION_READ, &access(region, offset, data.len()), &[])?;
        data.copy_from_slice(&reply[16..]);
        Ok(())
    }

    pub fn try_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.call(REGION_WRITE, &write(region, offset, data), &[])
            .map(|_| ())
    }
}

impl Served {
    /// A client that has not sent any message.
    pub fn connect(&self, device: &str) -> Vmm {
        Vmm::connect(&self.socket(device))
    }

    /// A client that has negotiated the version.
    pub fn client(&self, device: &str) -> Vmm {
        let mut vmm = self.connect(device);
        vmm.negotiate().unwrap();
        vmm
    }
}

impl Port for Vmm {
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        self.try_read(region, offset, data).unwrap();
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        self.try_write(region, offset, data).unwrap();
    }
}

/// The payload of `VERSION`.
pub fn version() -> Vec<u8> {
    let mut payload = vec![0, 0, 1, 0];
    payload.extend(br#"{"capabilities":{"max_msg_fds":16}}"#);
    payload.push(0);
    payload
}

/// The payload of `DMA_UNMAP`.
pub fn unmap(address: u64, size: u64) -> Vec<u8> {
    let mut payload = words(&[24, 0]);
    payload.extend(address.to_le_bytes());
    payload.extend(size.to_le_bytes());
    payload
}

/// The payload of `REGION_READ`.
pub fn access(region: u32, offset: u64, count: usize) -> Vec<u8> {
    let mut payload = offset.to_le_bytes().to_vec();
    payload.extend(words(&[region, count as u32]));
    payload
}

/// The payload of `REGION_WRITE`.
pub fn write(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut payload = access(region, offset, data.len());
    payload.extend(data);
    payload
}

pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
