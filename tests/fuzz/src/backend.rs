//! A backend and a lender, whole, under a VMM with real memory and eventfds.
//!
//! Both run on threads for the life of the process; each run is one connection. Input: a byte that
//! selects the device, then steps; see [`Vmm::step`].
//!
//! Invariants: every message is answered, or the connection is closed; when it is, nothing is
//! pinned, no window is open, no memory is mapped, and the lease is free.

use std::{
    io::{ErrorKind, IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{LazyLock, Mutex, PoisonError},
};

use farside_fabric::Usage;
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, ftruncate, memfd_create},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};

use crate::{
    host::{DEADLINE, DISK, DMA, Host, Served, disk, dma_test, until},
    input::Input,
    vmm::{
        DMA_MAP, DMA_UNMAP, REGION_READ, REGION_WRITE, RESET, SET_IRQS, VERSION, access, unmap,
        version, words, write,
    },
};

/// Bytes of a memory file.
const MEMORY: u64 = 1 << 20;
const CONFIG: u32 = 7;
/// Most steps of a run.
const MAX_STEPS: usize = 128;

struct Machine {
    host: Host,
    served: Served,
}

static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| {
    let host = Host::lending(Default::default(), |dir| {
        vec![dma_test(DMA), disk(DISK, dir)]
    });
    let served = Served::start(host.config("a", &[DMA, DISK]));
    Mutex::new(Machine { host, served })
});

pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let Machine { host, served } = &*machine;
    let device = match input.u8() & 1 {
        0 => DMA,
        _ => DISK,
    };
    let mut vmm = Vmm::connect(&served.socket(device));
    for _ in 0..MAX_STEPS {
        if input.is_empty() || vmm.step(&mut input).is_none() {
            break;
        }
    }
    drop(vmm);
    let report = || {
        let status = served.full_status();
        let report = status.device(device);
        report.expect("it is served").clone()
    };
    until("the lease is free", || {
        host.lender_status(device).entry.borrowed_by.is_none()
    });
    until("the device is available", || report().is_closed());
    let report = report();
    assert_eq!((report.bytes_pinned, report.bytes_locked), (0, 0));
    assert_eq!((report.dma_windows, report.lut_entries), (0, 0));
    let status = host.lender_status(device);
    assert!(!status.bus_master);
    assert_eq!(status.usage, Usage::default());
}

struct Vmm {
    socket: UnixStream,
    memory: [OwnedFd; 2],
    eventfds: Vec<OwnedFd>,
    /// Requests without a reply.
    waiting: usize,
}

impl Vmm {
    fn connect(path: &std::path::Path) -> Self {
        let socket = UnixStream::connect(path).expect("the backend listens");
        socket.set_read_timeout(Some(DEADLINE)).expect("a socket");
        let memory = || {
            let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a file");
            ftruncate(&file, MEMORY).expect("room");
            file
        };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let mut vmm = Self {
            socket,
            memory: [memory(), memory()],
            eventfds: (0..4)
                .map(|_| eventfd(0, flags).expect("an eventfd"))
                .collect(),
            waiting: 0,
        };
        vmm.call(VERSION, &version(), &[]);
        vmm
    }

    /// Sends a message, or changes the memory. `None` once the connection is closed.
    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let kind = input.u8();
        match kind % 16 {
            0 | 1 => {
                let (at, choice) = (u64::from(input.u8()) << 12, input.u8());
                let size = match choice & 0x0f {
                    0 => input.number(),
                    pages => u64::from(pages) << 12,
                };
                let offset = u64::from(choice >> 4 & 3) << 12;
                // High memory, too.
                let at = at | u64::from(kind >> 4 & 1) << 32;
                let mut payload = words(&[32, 3 - u32::from(kind >> 6)]);
                for value in [offset, at, size] {
                    payload.extend(value.to_le_bytes());
                }
                let memory = self.memory[usize::from(kind >> 5 & 1)].try_clone();
                let memory = [memory.expect("a descriptor")];
                let fds = match choice {
                    0xf0.. => &[],
                    _ => &memory[..],
                };
                self.call(DMA_MAP, &payload, fds)
            }
            2 => {
                let (at, size) = (u64::from(input.u8()) << 12, u64::from(input.u8()) << 12);
                let at = at | u64::from(kind >> 4 & 1) << 32;
                self.call(DMA_UNMAP, &unmap(at, size), &[])
            }
            3 => match kind >> 4 & 3 {
                0 => {
                    let mut payload = words(&[24, 1 << 1]);
                    payload.extend([0; 16]);
                    self.call(DMA_UNMAP, &payload, &[])
                }
                _ => self.call(RESET, &[], &[]),
            },
            // Bus-master enable and disable.
            4 => self.call(REGION_WRITE, &write(CONFIG, 4, &[6 & kind >> 4, 4]), &[]),
            5 | 6 => {
                let (offset, len) = (input.u16(), input.u8() & 7);
                let data = input.bytes(usize::from(len) + 1).to_vec();
                let offset = u64::from(offset % 0x1002);
                self.call(REGION_WRITE, &write(CONFIG, offset, &data), &[])
            }
            7 | 8 => {
                let (offset, value) = (u64::from(input.u16()), input.number());
                let data = &value.to_le_bytes()[..1 << (kind >> 4 & 3)];
                self.call(REGION_WRITE, &write(0, offset % 0x4008, data), &[])
            }
            9 => {
                let (region, offset) = (u32::from(kind >> 4), input.number());
                let len = usize::from(input.u8());
                self.call(REGION_READ, &access(region, offset, len), &[])
            }
            10 | 11 => {
                let (flags, index) = (u32::from(input.u8()), u32::from(kind >> 4));
                let (start, count) = (u32::from(input.u8()), u32::from(input.u8()));
                let mut payload = words(&[20, flags, index % 6, start, count]);
                let len = input.u8();
                payload.extend(input.bytes((len & 31).into()));
                let fds = usize::from(len >> 5) % (self.eventfds.len() + 1);
                let fds: Vec<OwnedFd> = self.eventfds[..fds]
                    .iter()
                    .map(|fd| fd.try_clone().expect("a descriptor"))
                    .collect();
                self.call(SET_IRQS, &payload, &fds)
            }
            12 => {
                let (command, len) = (u16::from(input.u8() % 20), input.u8());
                let fds = match kind & 0x10 {
                    0 => Vec::new(),
                    _ => vec![self.eventfds[0].try_clone().expect("a descriptor")],
                };
                let payload = input.bytes(len.into()).to_vec();
                self.call(command, &payload, &fds)
            }
            // Bytes of any kind: what follows may not be framed.
            13 => {
                let len = input.u8();
                self.socket.write_all(input.bytes(len.into())).ok()?;
                None
            }
            // The memory shrinks under a device that may use it.
            14 => {
                let pages = u64::from(input.u8());
                let memory = &self.memory[usize::from(kind >> 4 & 1)];
                ftruncate(memory, pages << 12).expect("a file");
                Some(())
            }
            // The next message goes out before the reply to this one.
            _ => {
                let payload = access(CONFIG, u64::from(input.u8()), 4);
                self.send(REGION_READ, &payload, &[])
            }
        }
    }

    /// Sends a message and waits for the reply to it.
    fn call(&mut self, command: u16, payload: &[u8], fds: &[OwnedFd]) -> Option<()> {
        self.send(command, payload, fds)?;
        while self.waiting > 0 {
            self.read_reply()?;
        }
        Some(())
    }

    fn send(&mut self, command: u16, payload: &[u8], fds: &[OwnedFd]) -> Option<()> {
        let mut bytes = vec![0; 16];
        bytes[2..4].copy_from_slice(&command.to_le_bytes());
        bytes[4..8].copy_from_slice(&(16 + payload.len() as u32).to_le_bytes());
        bytes.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let iov = [IoSlice::new(&bytes)];
        let sent = sendmsg(&self.socket, &iov, &mut control, SendFlags::NOSIGNAL).ok()?;
        self.socket.write_all(&bytes[sent..]).ok()?;
        self.waiting += 1;
        Some(())
    }

    fn read_reply(&mut self) -> Option<()> {
        let mut header = [0; 16];
        match self.socket.read_exact(&mut header) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("no reply"),
            Err(_) => return None,
        }
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let mut payload = vec![0; (word(4) as usize).checked_sub(16).expect("a header")];
        self.socket.read_exact(&mut payload).ok()?;
        assert_eq!(word(8) & 0xf, 1, "not a reply");
        self.waiting -= 1;
        Some(())
    }
}
