//! The NVMe device, with a driver in the test: the kernel does its DMA, asynchronously.

use std::{fs::File, io::Seek};

use farside_lender::config::{Model, Source};
use farside_lender_protocol::Client;
use rustix::fs::{Advice, fadvise};

use crate::{
    guest::{Event, MEMORY, Port, Ram, enable, place_bars, read_u32, read_u64, set_command},
    host::{DISK, DISK_SIZE, Host, assert_closed, assert_open, disk, until},
    vmm::{DATA_EVENTFD, TRIGGER, Vmm},
};

const RAM: u64 = 32 << 20;
const ADMIN_SQ: u64 = 0x1_0000;
const ADMIN_CQ: u64 = 0x1_1000;
const IO_SQ: u64 = 0x1_2000;
const IO_CQ: u64 = 0x1_4000;
const IDENTIFY: u64 = 0x1_8000;
const LISTS: u64 = 0x2_0000;
const DATA: u64 = 0x100_0000;
const ENTRIES: u32 = 64;
/// Bytes of one read.
const READ: u64 = 1 << 20;

/// How often reads in flight are interrupted.
const ROUNDS: usize = 12;

/// An NVMe submission queue entry.
#[derive(Default)]
struct Entry {
    opcode: u8,
    id: u16,
    namespace: u32,
    prp: [u64; 2],
    words: [u32; 6],
}

impl Entry {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.opcode, 0];
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(self.namespace.to_le_bytes());
        bytes.resize(24, 0);
        bytes.extend(self.prp.iter().flat_map(|prp| prp.to_le_bytes()));
        bytes.extend(self.words.iter().flat_map(|word| word.to_le_bytes()));
        assert_eq!(bytes.len(), 64);
        bytes
    }
}

/// The admin queue's tail; it has a separate phase tag.
struct Admin {
    tail: u16,
}

impl Admin {
    fn run(&mut self, vmm: &mut Vmm, ram: &Ram, entry: &Entry) {
        let slot = u64::from(self.tail);
        ram.write(ADMIN_SQ + 64 * slot, &entry.bytes());
        self.tail += 1;
        vmm.write(0, 0x1000, &u32::from(self.tail).to_le_bytes());
        until("the admin command is done", || {
            // The guest polls; a register read lets the other threads run.
            read_u32(vmm, 0, 0x1c);
            ram.read(ADMIN_CQ + 16 * slot + 14, 1)[0] & 1 == 1
        });
        let status = ram.read(ADMIN_CQ + 16 * slot + 14, 2);
        assert_eq!(u16::from_le_bytes([status[0], status[1]]) >> 1, 0);
        vmm.write(0, 0x1004, &u32::from(self.tail).to_le_bytes());
    }
}

fn boot(vmm: &mut Vmm, ram: &Ram) -> Admin {
    ram.fill(ADMIN_SQ, 0x8000, 0);
    vmm.reset().unwrap();
    place_bars(vmm, 0xe000_0000);
    assert!(enable(vmm));
    vmm.write(0, 0x24, &(63u32 << 16 | 63).to_le_bytes());
    vmm.write(0, 0x28, &ADMIN_SQ.to_le_bytes());
    vmm.write(0, 0x30, &ADMIN_CQ.to_le_bytes());
    vmm.write(0, 0x14, &(4u32 << 20 | 6 << 16 | 1).to_le_bytes());
    until("the controller is ready", || {
        read_u32(vmm, 0, 0x1c) & 1 == 1
    });
    Admin { tail: 0 }
}

/// One pair of queues, with vector 1.
fn io_queues(vmm: &mut Vmm, ram: &Ram, admin: &mut Admin) {
    let size = (ENTRIES - 1) << 16 | 1;
    let queue = |opcode, prp, word11| Entry {
        opcode,
        prp: [prp, 0],
        words: [size, word11, 0, 0, 0, 0],
        ..Entry::default()
    };
    admin.run(vmm, ram, &queue(5, IO_CQ, 1 << 16 | 0b11));
    admin.run(vmm, ram, &queue(1, IO_SQ, 1 << 16 | 0b01));
}

/// Submits reads that fill all of the memory, with one doorbell write.
fn read_all(vmm: &mut Vmm, ram: &Ram, count: u32) {
    for n in 0..u64::from(count) {
        let data = DATA + n * READ % (16 << 20);
        let list = LISTS + n * 0x1000;
        let pages: Vec<u8> = (1..READ / 0x1000)
            .flat_map(|page| (data + page * 0x1000).to_le_bytes())
            .collect();
        ram.write(list, &pages);
        let lba = n * READ / 512 % (16 << 20 >> 9);
        let entry = Entry {
            opcode: 2,
            id: n as u16,
            namespace: 1,
            prp: [data, list],
            words: [lba as u32, 0, (READ / 512) as u32 - 1, 0, 0, 0],
        };
        ram.write(IO_SQ + 64 * n, &entry.bytes());
    }
    vmm.write(0, 0x1008, &count.to_le_bytes());
}

fn guest(served: &crate::host::Served) -> (Vmm, Ram) {
    let mut vmm = served.client(DISK);
    let ram = Ram::new(RAM);
    vmm.map(0, RAM, ram.fd(0)).unwrap();
    (vmm, ram)
}

#[test]
fn identifies_reads_and_interrupts() {
    let host = Host::with_disk();
    let served = host.serve(DISK);
    let (mut vmm, ram) = guest(&served);
    let events = Event::many(2);
    vmm.set_irqs(2, DATA_EVENTFD | TRIGGER, 0, 2, &events)
        .unwrap();
    let mut admin = boot(&mut vmm, &ram);
    assert_open(&host, &served, DISK, RAM, 1);
    assert_eq!(read_u64(&mut vmm, 0, 0) & 0xffff, 1023);

    let identify = Entry {
        opcode: 6,
        prp: [IDENTIFY, 0],
        words: [1, 0, 0, 0, 0, 0],
        ..Entry::default()
    };
    admin.run(&mut vmm, &ram, &identify);
    assert!(events[0].wait() > 0);
    let serial = ram.read(IDENTIFY + 4, 20);
    assert!(serial.iter().any(|byte| *byte != 0 && *byte != b' '));

    io_queues(&mut vmm, &ram, &mut admin);
    ram.fill(DATA, READ as usize, 0xee);
    read_all(&mut vmm, &ram, 1);
    assert_eq!(events[1].wait(), 1);
    // The image is empty.
    ram.assert_filled(DATA, READ as usize, 0);
    ram.assert_filled(DATA + READ, READ as usize, 0);
    set_command(&mut vmm, MEMORY);
    assert_closed(&host, &served, DISK, "leased");
}

/// However a borrow closes, reads of the kernel into guest memory have completed before the
/// guest continues. (On a file system without a droppable cache, such as tmpfs, nothing is
/// ever in flight.)
#[test]
fn reads_in_flight_are_drained_before_memory_is_let_go() {
    let mut image = None;
    let host = Host::lending(Default::default(), |dir| {
        let disk = disk(DISK, dir);
        if let Source::Model(Model::Nvme(nvme)) = &disk.source {
            std::fs::write(&nvme.image, vec![0xc3; DISK_SIZE as usize]).unwrap();
            image = Some(File::open(&nvme.image).unwrap());
        }
        vec![disk]
    });
    let image = image.expect("an NVMe device has an image");
    image.sync_all().unwrap();
    let served = host.serve(DISK);
    let (mut vmm, ram) = guest(&served);
    type Close = fn(&mut Vmm);
    let closes: [(&str, Close); 3] = [
        ("bus-master disable", |vmm| set_command(vmm, MEMORY)),
        ("reset", |vmm| vmm.reset().unwrap()),
        ("unmap", |vmm| vmm.unmap(0, RAM).unwrap()),
    ];
    let size = DISK_SIZE as usize;
    let mut slow = 0;
    for (how, close) in closes.iter().cycle().take(ROUNDS) {
        ram.fill(DATA, size, 0xee);
        let mut admin = boot(&mut vmm, &ram);
        io_queues(&mut vmm, &ram, &mut admin);
        // Cached data would be copied synchronously.
        fadvise(&image, 0, None, Advice::DontNeed).unwrap();
        read_all(&mut vmm, &ram, ENTRIES - 1);
        close(&mut vmm);
        if served.state() == "lost" {
            // A disk under load can take longer than the timeout.
            slow += 1;
            until("the reads are done", || {
                let mut client = Client::connect(&host.lender(), None).unwrap();
                let status = client.status(&DISK.parse().unwrap());
                status.is_ok_and(|status| status.entry.borrowed_by.is_none())
            });
        } else {
            // From here on the device must not write this memory. The last reads, which
            // would complete late, are into its end.
            let piece = 64 << 10;
            for at in (0..size).step_by(piece).rev() {
                ram.fill(DATA + at as u64, piece, 0x5a);
            }
            let status = host.lender_status(DISK);
            assert_eq!(status.usage.bytes_mapped, 0, "{how}");
            // Reads in flight would have completed by now, as this read of the whole image
            // has.
            std::io::copy(&mut &image, &mut std::io::sink()).unwrap();
            (&image).rewind().unwrap();
            ram.assert_filled(DATA, size, 0x5a);
        }
        if *how == "unmap" {
            vmm.map(0, RAM, ram.fd(0)).unwrap();
        }
    }
    if slow > 0 {
        eprintln!("skipped {slow} rounds: the disk took seconds to read 16 MiB");
    }
    assert!(slow < ROUNDS, "a drain never ends");
}
