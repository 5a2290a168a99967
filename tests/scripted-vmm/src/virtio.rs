//! A minimal driver for virtio-blk disks (Virtual I/O Device 1.2): one split queue, polled, without interrupts.

use std::{
    sync::atomic::{Ordering, fence},
    time::Instant,
};

use anyhow::{Context, Result, ensure};

use crate::{
    device::{CONFIG, Device},
    machine::Machine,
    nvme::DRIVER_RAM,
    pci,
};

/// Entries of the queue, of which a request takes three.
const ENTRIES: u16 = 256;
/// Most requests in flight.
const MOST: usize = ENTRIES as usize / 3;

const DESCRIPTORS: u64 = DRIVER_RAM.start;
const AVAILABLE: u64 = DRIVER_RAM.start + 0x1000;
const USED: u64 = DRIVER_RAM.start + 0x2000;
/// 16 bytes for each request, as all below.
const HEADERS: u64 = DRIVER_RAM.start + 0x3000;
const STATUSES: u64 = DRIVER_RAM.start + 0x4000;
const RANGES: u64 = DRIVER_RAM.start + 0x5000;

const NEXT: u16 = 1;
const WRITABLE: u16 = 2;

/// Types of configuration structures (4.1.4), and the feature bits that this driver accepts.
const COMMON: usize = 1;
const NOTIFY: usize = 2;
const FLUSH: u64 = 1 << 9;
const WRITE_ZEROES: u64 = 1 << 14;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;
const ACCESS_PLATFORM: u64 = 1 << 33;

/// A request of whole sectors of 512 bytes.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// Reads into memory at `address`.
    Read {
        /// The first sector.
        sector: u64,
        /// Where the data goes.
        address: u64,
        /// Bytes.
        bytes: u32,
    },
    /// Writes memory at `address`.
    Write {
        /// The first sector.
        sector: u64,
        /// Where the data is.
        address: u64,
        /// Bytes.
        bytes: u32,
    },
    /// Writes zeroes.
    Zero {
        /// The first sector.
        sector: u64,
        /// How many.
        sectors: u32,
    },
    /// Flushes what was written.
    Flush,
}

/// Where a structure is in a BAR.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    bar: u32,
    offset: u64,
    /// Of notifications (4.1.4.4).
    multiplier: u32,
}

/// A running disk.
#[derive(Debug)]
pub struct Disk {
    /// The notification register of queue 0.
    notify: Place,
    event_idx: bool,
    /// Requests that were made available, and that were returned.
    available: u16,
    used: u16,
}

impl Disk {
    /// Resets and starts the disk (3.1.1), with notifications suppressed by event indexes or by a flag.
    ///
    /// # Errors
    /// If the device refuses it.
    pub fn bring_up(machine: &mut Machine, event_idx: bool) -> Result<Self> {
        let places = places(&mut machine.device)?;
        let [Some(common), Some(notify)] = [places[COMMON], places[NOTIFY]] else {
            anyhow::bail!("no common configuration or no notifications");
        };
        let Place { bar, offset, .. } = common;
        let mut put = |at: u64, value: &[u8]| machine.device.write(bar, offset + at, value);
        put(20, &[0])?;
        let deadline = Instant::now() + machine.timeout;
        loop {
            let mut status = [0];
            machine.device.read(bar, offset + 20, &mut status)?;
            if status == [0] {
                break;
            }
            ensure!(Instant::now() < deadline, "the reset takes too long");
        }
        let mut put = |at: u64, value: &[u8]| machine.device.write(bar, offset + at, value);
        put(20, &[1])?;
        put(20, &[3])?;
        let mut features = FLUSH | WRITE_ZEROES | VERSION_1 | ACCESS_PLATFORM;
        if event_idx {
            features |= EVENT_IDX;
        }
        for half in 0..2u32 {
            put(8, &half.to_le_bytes())?;
            put(12, &((features >> (32 * half)) as u32).to_le_bytes())?;
        }
        put(20, &[0xb])?;
        machine.ram.write(AVAILABLE, &[0; 0x2000])?;
        put(22, &0u16.to_le_bytes())?;
        put(24, &ENTRIES.to_le_bytes())?;
        for (at, address) in [(32, DESCRIPTORS), (40, AVAILABLE), (48, USED)] {
            put(at, &(address as u32).to_le_bytes())?;
            put(at + 4, &((address >> 32) as u32).to_le_bytes())?;
        }
        put(28, &1u16.to_le_bytes())?;
        put(20, &[0xf])?;
        let (mut status, mut at) = ([0], [0; 2]);
        machine.device.read(bar, offset + 20, &mut status)?;
        ensure!(status == [0xf], "the status is {:#x}", status[0]);
        machine.device.read(bar, offset + 30, &mut at)?;
        let at = u64::from(u16::from_le_bytes(at)) * u64::from(notify.multiplier);
        Ok(Self {
            notify: Place {
                offset: notify.offset + at,
                ..notify
            },
            event_idx,
            available: 0,
            used: 0,
        })
    }

    /// Submits requests, and waits until each is returned. Returns the number of those that succeeded.
    ///
    /// # Errors
    /// If there are more than the queue holds, or one is not returned in time, or twice.
    pub fn run(&mut self, machine: &mut Machine, requests: &[Request]) -> Result<usize> {
        ensure!(
            requests.len() <= MOST,
            "{} requests do not fit the queue",
            requests.len()
        );
        let old = self.available;
        for (n, request) in (0..).zip(requests) {
            self.put(machine, n, request)?;
        }
        // Behind the requests (2.7.13.3). The flags are 0.
        fence(Ordering::SeqCst);
        let index = u32::from(self.available) << 16;
        machine.ram.store_u32(AVAILABLE, index)?;
        fence(Ordering::SeqCst);
        let is_wanted = match self.event_idx {
            true => {
                let at = USED + 4 + 8 * u64::from(ENTRIES);
                let event = machine.ram.load_u32(at)? as u16;
                let new = self.available.wrapping_sub(event).wrapping_sub(1);
                new < self.available.wrapping_sub(old)
            }
            false => machine.ram.load_u32(USED)? & 1 == 0,
        };
        if is_wanted {
            let Place { bar, offset, .. } = self.notify;
            machine.device.write(bar, offset, &[0; 2])?;
        }
        let deadline = machine.deadline();
        let mut open = vec![true; requests.len()];
        let mut succeeded = 0;
        while self.used != self.available {
            if (machine.ram.load_u32(USED)? >> 16) as u16 == self.used {
                ensure!(
                    Instant::now() < deadline,
                    "requests {open:?} are not returned within {:?}",
                    machine.timeout
                );
                std::thread::yield_now();
                continue;
            }
            fence(Ordering::Acquire);
            let at = USED + 4 + 8 * u64::from(self.used % ENTRIES);
            let n = machine.ram.load_u32(at)? as usize / 3;
            let open = open.get_mut(n).context("the head of another request")?;
            ensure!(std::mem::take(open), "request {n} is returned twice");
            let mut status = [0];
            machine.ram.read(STATUSES + 16 * n as u64, &mut status)?;
            succeeded += usize::from(status == [0]);
            self.used = self.used.wrapping_add(1);
        }
        Ok(succeeded)
    }

    /// Makes request `n` available: its index comes later.
    fn put(&mut self, machine: &mut Machine, n: u16, request: &Request) -> Result<()> {
        let at = 16 * u64::from(n);
        let (kind, sector, data) = match *request {
            Request::Read {
                sector,
                address,
                bytes,
            } => (0u32, sector, Some((address, bytes, WRITABLE))),
            Request::Write {
                sector,
                address,
                bytes,
            } => (1, sector, Some((address, bytes, 0))),
            Request::Zero { sector, sectors } => {
                let mut range = sector.to_le_bytes().to_vec();
                range.extend(u64::from(sectors).to_le_bytes());
                machine.ram.write(RANGES + at, &range)?;
                (13, 0, Some((RANGES + at, 16, 0)))
            }
            Request::Flush => (4, 0, None),
        };
        let mut header = u64::from(kind).to_le_bytes().to_vec();
        header.extend(sector.to_le_bytes());
        machine.ram.write(HEADERS + at, &header)?;
        machine.ram.write(STATUSES + at, &[0xff])?;
        let mut chain = vec![(HEADERS + at, 16, 0)];
        chain.extend(data);
        chain.push((STATUSES + at, 1, WRITABLE));
        let head = 3 * n;
        for (index, (address, len, flags)) in (head..).zip(&chain) {
            let is_last = usize::from(index - head) + 1 == chain.len();
            let flags = if is_last { *flags } else { flags | NEXT };
            let mut descriptor = address.to_le_bytes().to_vec();
            descriptor.extend(u32::to_le_bytes(*len));
            descriptor.extend(flags.to_le_bytes());
            descriptor.extend((index + 1).to_le_bytes());
            let at = DESCRIPTORS + 16 * u64::from(index);
            machine.ram.write(at, &descriptor)?;
        }
        let entry = AVAILABLE + 4 + 2 * u64::from(self.available % ENTRIES);
        machine.ram.write(entry, &head.to_le_bytes())?;
        self.available = self.available.wrapping_add(1);
        Ok(())
    }
}

/// The structures of the device, by their type: the first of each (4.1.4).
fn places(device: &mut Device) -> Result<[Option<Place>; 8]> {
    const VENDOR: u8 = 0x09;
    let mut places = [None; 8];
    for at in pci::capabilities(device)? {
        let mut bytes = [0; 4];
        device.read(CONFIG, at, &mut bytes)?;
        let [id, _, len, kind] = bytes;
        let (mut bar, mut offset, mut multiplier) = ([0], [0; 4], [0; 4]);
        device.read(CONFIG, at + 4, &mut bar)?;
        device.read(CONFIG, at + 8, &mut offset)?;
        if len >= 20 {
            device.read(CONFIG, at + 16, &mut multiplier)?;
        }
        let Some(place) = places.get_mut(usize::from(kind)).filter(|_| id == VENDOR) else {
            continue;
        };
        place.get_or_insert(Place {
            bar: bar[0].into(),
            offset: u32::from_le_bytes(offset).into(),
            multiplier: u32::from_le_bytes(multiplier),
        });
    }
    Ok(places)
}
