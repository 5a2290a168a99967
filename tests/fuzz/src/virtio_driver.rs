//! A virtio-blk device under a driver that writes any register, puts any descriptor into its tables and any
//! index into its rings, and changes them while requests are in flight. The fake memory translates nothing
//! but the guest's; a model that dereferenced an address of its own would crash.
//!
//! Input: a byte with the engine and the memory's form, then steps; see [`run`].

use crate::{
    Device,
    block::EngineChoice,
    input::Input,
    virtio_tests::world::{
        BASE, Buffer, DATA, Driver, F_EVENT_IDX, INDIRECT, OK, READ, REQUESTS, SIZE, writable,
    },
};

const KINDS: [u32; 8] = [0, 1, 4, 8, 11, 13, 0, 1];

/// Most steps of a run.
const MAX_STEPS: usize = 256;

/// After all, a reset makes the device usable.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let form = input.u8();
    let mut driver = Driver::off(|config| {
        config.engine = match form & 1 {
            0 => EngineChoice::IoUring,
            _ => EngineChoice::Threads,
        };
        config.read_only = form & 0xf0 == 0xf0;
    });
    if form & 2 != 0 {
        driver.memory.run = 4096;
    }
    driver.start_without(match form & 4 {
        0 => 0,
        _ => 1 << F_EVENT_IDX,
    });
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        step(&mut driver, &mut input);
    }
    reset(&mut driver);
    let (status, _) = driver.execute(READ, 0, &[writable(DATA, 512)]);
    assert_eq!(status, OK);
    assert_eq!(driver.device.in_flight().map(|(used, _)| used), Some(0));
}

fn step(driver: &mut Driver, input: &mut Input<'_>) {
    let kind = input.u8();
    let len = 1 << (kind >> 4 & 3);
    match kind % 16 {
        0 => {
            let at = register(input) & !(len as u64 - 1);
            driver.write(at, len, input.number());
        }
        1 => {
            let at = register(input) & !(len as u64 - 1);
            driver.read(at, len);
        }
        2..=5 => request(driver, input),
        // Any descriptor, in a queue's table or an indirect one.
        6 | 7 => {
            let queue = usize::from(kind >> 4 & 1);
            let table = match kind & 0x20 {
                0 => driver.queues[queue].descriptors,
                _ => indirect(input),
            };
            let index = u16::from(input.u8() % 64);
            let (buffer, form) = (buffer(input), input.u8());
            let flags = u16::from(form & 7);
            let next = match form & 0x40 {
                0 => u16::from(input.u8() % 70),
                _ => input.u16(),
            };
            driver.describe(table, index, buffer, flags, next);
        }
        8 => {
            let queue = usize::from(kind >> 4 & 1);
            let head = match kind & 0x20 {
                0 => u16::from(input.u8() % 64),
                _ => input.u16(),
            };
            driver.offer(queue, head);
        }
        9 => {
            let (at, value) = (address(input), input.number());
            put(driver, at, &value.to_le_bytes());
        }
        10 => {
            let (at, len) = (address(input), input.u8());
            put(driver, at, input.bytes(len.into()));
        }
        11 => {
            driver.poll();
        }
        12 => {
            driver.enable_notifications();
        }
        13 => match kind >> 4 & 3 {
            0 => driver.memory.bus_master ^= true,
            1 => driver.irq.intx ^= true,
            2 => driver.irq.pending = vec![u16::from(input.u8() & 3)],
            _ => drop(driver.device.stats()),
        },
        14 => {
            quiesce(driver);
            driver.with(|device, bus| device.resume(bus));
        }
        _ => match kind & 0x10 {
            0 => driver.start(),
            _ => reset(driver),
        },
    }
}

/// A request of up to six buffers, direct or indirect, of which some are the header and the status.
fn request(driver: &mut Driver, input: &mut Input<'_>) {
    let form = input.u8();
    let queue = usize::from(form & 1);
    let head = u16::from(input.u8() % 64);
    let at = driver.memory_of(queue, head);
    let kind = match form {
        0xf8.. => input.u32(),
        _ => KINDS[usize::from(input.u8()) % KINDS.len()],
    };
    driver.memory.put_qwords(at, [kind.into(), input.number()]);
    let mut buffers = vec![Buffer {
        at,
        len: 16,
        writable: false,
    }];
    for _ in 0..form >> 1 & 3 {
        buffers.push(buffer(input));
    }
    buffers.push(writable(at + 16, 1));
    let table = driver.queues[queue].descriptors;
    let (to, first) = match form & 8 {
        0 => (table, head),
        _ => (at + 64, 0),
    };
    let count = buffers.len();
    for (n, buffer) in (0u16..).zip(&buffers) {
        let more = usize::from(n) + 1 < count;
        // Of a table of 64.
        let (index, next) = ((first + n) % 64, (first + n + 1) % 64);
        driver.describe(to, index, *buffer, u16::from(more), next);
    }
    if form & 8 != 0 {
        let all = Buffer {
            at: to,
            len: count as u32 * 16,
            writable: false,
        };
        driver.describe(table, head, all, INDIRECT, 0);
    }
    driver.offer(queue, head);
}

fn buffer(input: &mut Input<'_>) -> Buffer {
    let form = input.u8();
    let at = address(input);
    let len = match form & 6 {
        0 => 512,
        2 => 16,
        4 => u32::from(input.u8()) * 256,
        _ => input.number() as u32,
    };
    let writable = form & 1 != 0;
    Buffer { at, len, writable }
}

fn quiesce(driver: &mut Driver) {
    while !driver.with(|device, bus| device.quiesce(bus)) {
        std::thread::yield_now();
    }
}

fn reset(driver: &mut Driver) {
    quiesce(driver);
    driver.device.reset();
    driver.memory.bus_master = true;
    driver.irq.line = false;
    driver.start();
}

/// Writes what is in the guest's memory.
fn put(driver: &Driver, at: u64, bytes: &[u8]) {
    let end = BASE + SIZE as u64;
    if (BASE..end).contains(&at) && bytes.len() as u64 <= end - at {
        driver.memory.put(at, bytes);
    }
}

/// An indirect table of a request.
fn indirect(input: &mut Input<'_>) -> u64 {
    REQUESTS + u64::from(input.u8()) * 0x2000 + 64
}

/// Common configuration, other structures, or anything in the BAR.
fn register(input: &mut Input<'_>) -> u64 {
    let choice = u64::from(input.u8());
    match choice {
        0..=0x9f => choice % 64,
        0xa0..=0xbf => 0x1000 * (1 + choice % 5),
        0xc0..=0xcf => 0x2000 + 32,
        _ => u64::from(input.u16()) % 0x7ff8,
    }
}

/// In the structures in use, at the end of memory, or anywhere.
fn address(input: &mut Input<'_>) -> u64 {
    let choice = u64::from(input.u8());
    let within = u64::from(input.u8()) * 16;
    match choice {
        0..=0x8f => DATA + choice * 4096 + within,
        0x90..=0xa7 => BASE + (choice % 2) * 0x1_0000 + within,
        0xa8..=0xbf => BASE + (choice % 2) * 0x1_0000 + 0x8000 + within,
        0xc0..=0xd7 => BASE + (choice % 2) * 0x1_0000 + 0xc000 + within,
        0xd8..=0xe7 => REQUESTS + (choice % 16) * 0x2000 + within,
        0xe8..=0xef => BASE + SIZE as u64 - 4096 + within,
        _ => input.number(),
    }
}
