//! The guest's part: RAM in a memfd, and a driver for the DMA test device.

use std::{
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::FileExt,
    },
};

use farside_devices::dma_test::{Command, control, reg, status};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fs::{MemfdFlags, ftruncate, memfd_create},
};

use crate::{host::until, vmm::Vmm};

/// Region of configuration space.
pub const CONFIG: u32 = 7;

// Own constants, not `farside-pci`'s: a test must not share the product's errors.
pub const COMMAND: u64 = 0x04;
pub const STATUS: u64 = 0x06;
pub const MEMORY: u16 = 1 << 1;
pub const BUS_MASTER: u16 = 1 << 2;
pub const INTX_DISABLE: u16 = 1 << 10;

/// A page.
pub const PAGE: u64 = 4096;

/// Access to a device's regions by a guest.
pub trait Port {
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]);
    fn write(&mut self, region: u32, offset: u64, data: &[u8]);
}

impl Port for vfio_user::Client {
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        self.region_read(region, offset, data).unwrap();
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        self.region_write(region, offset, data).unwrap();
    }
}

pub fn read_u16(port: &mut impl Port, region: u32, offset: u64) -> u16 {
    let mut data = [0; 2];
    port.read(region, offset, &mut data);
    u16::from_le_bytes(data)
}

pub fn read_u32(port: &mut impl Port, region: u32, offset: u64) -> u32 {
    let mut data = [0; 4];
    port.read(region, offset, &mut data);
    u32::from_le_bytes(data)
}

pub fn read_u64(port: &mut impl Port, region: u32, offset: u64) -> u64 {
    let mut data = [0; 8];
    port.read(region, offset, &mut data);
    u64::from_le_bytes(data)
}

pub fn command(port: &mut impl Port) -> u16 {
    read_u16(port, CONFIG, COMMAND)
}

pub fn set_command(port: &mut impl Port, command: u16) {
    port.write(CONFIG, COMMAND, &command.to_le_bytes());
}

/// Sets bus-master enable. Returns whether it reads as set.
pub fn enable(port: &mut impl Port) -> bool {
    set_command(port, MEMORY | BUS_MASTER);
    command(port) == MEMORY | BUS_MASTER
}

/// The offset of a capability.
pub fn capability(port: &mut impl Port, id: u8) -> u64 {
    let mut at = u64::from(read_u16(port, CONFIG, 0x34) & 0xff);
    while at != 0 {
        let header = read_u16(port, CONFIG, at);
        if header as u8 == id {
            return at;
        }
        at = u64::from(header >> 8);
    }
    panic!("no capability {id:#x}");
}

/// Sizes the memory BARs as firmware does, and assigns addresses from `base` on. Returns
/// (BAR, size).
pub fn place_bars(port: &mut impl Port, base: u64) -> Vec<(u8, u64)> {
    let mut found = Vec::new();
    let mut next = base;
    let mut bar = 0;
    while bar < 6 {
        let at = 0x10 + 4 * u64::from(bar);
        port.write(CONFIG, at, &[0xff; 4]);
        let mask = read_u32(port, CONFIG, at);
        let wide = mask & 0b110 == 0b100;
        if mask != 0 {
            let size = u64::from(!(mask & !0xf)) + 1;
            next = next.next_multiple_of(size);
            port.write(CONFIG, at, &(next as u32).to_le_bytes());
            if wide {
                port.write(CONFIG, at + 4, &((next >> 32) as u32).to_le_bytes());
            }
            found.push((bar, size));
            next += size;
        }
        bar += if wide { 2 } else { 1 };
    }
    found
}

/// Guest RAM.
pub struct Ram {
    pub file: File,
}

impl Ram {
    pub fn new(size: u64) -> Self {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, size).unwrap();
        Self { file: fd.into() }
    }

    /// The descriptor with a file offset, to map.
    pub fn fd(&self, offset: u64) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.file.as_fd(), offset))
    }

    pub fn write(&self, offset: u64, data: &[u8]) {
        self.file.write_all_at(data, offset).unwrap();
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.file.read_exact_at(&mut data, offset).unwrap();
        data
    }

    pub fn fill(&self, offset: u64, len: usize, byte: u8) {
        self.write(offset, &vec![byte; len]);
    }

    #[track_caller]
    pub fn assert_filled(&self, offset: u64, len: usize, byte: u8) {
        let data = self.read(offset, len);
        let wrong = data.iter().position(|found| *found != byte);
        assert_eq!(wrong, None, "first wrong byte of {len:#x} at {offset:#x}");
    }
}

/// Bytes of the RAM of [`small`].
pub const SMALL: u64 = 4 << 20;

/// A guest with [`SMALL`] bytes of RAM at 0, mapped at `vmm`.
pub fn small(vmm: &mut Vmm) -> Ram {
    let ram = Ram::new(SMALL);
    vmm.map(0, SMALL, ram.fd(0)).unwrap();
    ram
}

/// A command for the DMA test device, written through its registers.
#[derive(Clone, Copy, Default)]
pub struct Job {
    pub src: u64,
    pub dst: u64,
    pub length: u32,
    pub pattern: u32,
    pub vector: u32,
    pub control: u32,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub status: u32,
    pub moved: u32,
    pub result: u32,
    pub fault_iova: u64,
    pub fault_info: u32,
}

impl Ended {
    pub fn faulted(&self) -> bool {
        self.status & status::FAULT != 0
    }
}

/// Starts a command without waiting for its end.
pub fn start(port: &mut impl Port, command: Command, job: Job) {
    let clear = !0u32;
    port.write(0, reg::STATUS, &clear.to_le_bytes());
    port.write(0, reg::CONTROL, &job.control.to_le_bytes());
    port.write(0, reg::SRC, &job.src.to_le_bytes());
    port.write(0, reg::DST, &job.dst.to_le_bytes());
    port.write(0, reg::LENGTH, &job.length.to_le_bytes());
    port.write(0, reg::PATTERN, &job.pattern.to_le_bytes());
    port.write(0, reg::VECTOR, &job.vector.to_le_bytes());
    port.write(0, reg::COMMAND, &(command as u32).to_le_bytes());
}

/// Waits for the end of the command.
pub fn finish(port: &mut impl Port) -> Ended {
    until("the DMA test device is done", || {
        let status = read_u32(port, 0, reg::STATUS);
        assert_eq!(status & status::REJECTED, 0, "the command is invalid");
        status & (status::BUSY | status::DONE) == status::DONE
    });
    Ended {
        status: read_u32(port, 0, reg::STATUS),
        moved: read_u32(port, 0, reg::MOVED),
        result: read_u32(port, 0, reg::RESULT),
        fault_iova: read_u64(port, 0, reg::FAULT_IOVA),
        fault_info: read_u32(port, 0, reg::FAULT_INFO),
    }
}

pub fn run(port: &mut impl Port, command: Command, job: Job) -> Ended {
    start(port, command, job);
    finish(port)
}

/// Fills `length` bytes at `dst` with `byte`.
pub fn fill(port: &mut impl Port, dst: u64, length: u32, byte: u8) -> Ended {
    let job = Job {
        dst,
        length,
        pattern: u32::from_le_bytes([byte; 4]),
        ..Job::default()
    };
    run(port, Command::Fill, job)
}

/// Raises MSI-X vector `vector`, and INTx.
pub fn raise(port: &mut impl Port, vector: u32) {
    let job = Job {
        vector,
        ..Job::default()
    };
    assert!(!run(port, Command::Raise, job).faulted());
}

/// Interrupt on completion of a command.
pub const INTERRUPT: u32 = control::INTERRUPT_WHEN_DONE;

/// An eventfd with QEMU's flags.
pub struct Event(File);

impl Event {
    pub fn new() -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Self(File::from(eventfd(0, flags).unwrap()))
    }

    pub fn many(count: usize) -> Vec<Self> {
        (0..count).map(|_| Self::new()).collect()
    }

    /// Number of signals since the last call.
    pub fn count(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(rustix::io::Errno::AGAIN) => 0,
            Err(errno) => panic!("{errno}"),
        }
    }

    /// Waits for a signal, and returns the count.
    #[track_caller]
    pub fn wait(&self) -> u64 {
        let timeout = Timespec::try_from(crate::host::DEADLINE).unwrap();
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&timeout)).unwrap();
        assert_eq!(ready, 1, "no interrupt");
        self.count()
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
