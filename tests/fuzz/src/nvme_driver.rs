//! An NVMe controller under a driver that writes any register, puts any command into its queues, and
//! changes lists, doorbells and data while commands are in flight. The fake memory translates nothing
//! but the guest's; a model that dereferenced an address of its own would crash.
//!
//! Input: a byte with the engine and the memory's form, then steps; see [`run`].

use crate::{
    Device,
    block::EngineChoice,
    input::Input,
    nvme_tests::world::{ACQ, ASQ, BASE, DATA, Driver, OK, Pair, SHADOWS, SIZE, Sqe},
};

const ADMIN: [u8; 12] = [0, 1, 2, 4, 5, 6, 8, 9, 0x0a, 0x0c, 0x7c, 0x80];
const IO: [u8; 8] = [0, 1, 2, 2, 1, 5, 8, 9];

/// Most steps of a run.
const MAX_STEPS: usize = 256;

// The model's tests have these in a file of their own.
impl Driver {
    pub(crate) fn put(&mut self, at: usize, sqe: Sqe, id: u16) {
        let pair = &mut self.pairs[at];
        let slot = pair.sq + u64::from(pair.tail) * 64;
        pair.tail = (pair.tail + 1) % pair.entries;
        self.memory.put(slot, &sqe.id(id).bytes());
    }

    pub(crate) fn ring_tail(&mut self, at: usize) {
        let Pair { id, tail, .. } = self.pairs[at];
        self.doorbell(u64::from(id) * 2, tail);
    }
}

/// After all, a reset makes the controller usable.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let form = input.u8();
    let engine = match form & 1 {
        0 => EngineChoice::IoUring,
        _ => EngineChoice::Threads,
    };
    let mut driver = Driver::ready(engine);
    if form & 2 != 0 {
        driver.memory.run = 4096;
    }
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        step(&mut driver, &mut input);
    }
    reset(&mut driver);
    assert_eq!(driver.io(Sqe::new(0).nsid(1)).status, OK);
}

fn step(driver: &mut Driver, input: &mut Input<'_>) {
    let kind = input.u8();
    match kind % 16 {
        0 => {
            let (at, value) = (register(input), input.number());
            match kind & 0x10 {
                0 => driver.write32(at & !3, value as u32),
                _ => driver.write64(at & !7, value),
            }
        }
        1 => {
            let len = 1 << (kind >> 4 & 3);
            let at = register(input) & !(len as u64 - 1);
            let mut data = [0; 8];
            driver.with(|nvme, bus| nvme.bar_read(0, at, &mut data[..len], bus));
        }
        2 | 3 => {
            let sqe = command(input, &ADMIN);
            driver.submit(0, sqe);
        }
        4..=6 => {
            let sqe = command(input, &IO);
            driver.submit(1, sqe);
        }
        7 => {
            let (at, value) = (address(input), input.number());
            put(driver, at, &value.to_le_bytes());
        }
        8 => {
            let (at, len) = (address(input), input.u8());
            put(driver, at, input.bytes(len.into()));
        }
        // A list of pages, each of any address.
        9 => {
            let at = address(input) & !7;
            for entry in 0..u64::from(input.u8() % 16) {
                let page = address(input);
                put(driver, at.wrapping_add(entry * 8), &page.to_le_bytes());
            }
        }
        // Descriptors of a scatter-gather list.
        10 => {
            let at = address(input) & !15;
            for entry in 0..u64::from(input.u8() % 8) {
                let (to, len, kind) = (address(input), input.number() as u32, input.u8());
                let mut descriptor = [0; 16];
                descriptor[..8].copy_from_slice(&to.to_le_bytes());
                descriptor[8..12].copy_from_slice(&len.to_le_bytes());
                descriptor[15] = kind;
                put(driver, at.wrapping_add(entry * 16), &descriptor);
            }
        }
        11 => {
            driver.poll();
        }
        12 => {
            driver.enable_notifications();
        }
        13 => {
            driver.take(0);
            driver.take(1);
        }
        14 => match kind >> 4 & 3 {
            0 => driver.memory.bus_master ^= true,
            1 => driver.irq.intx ^= true,
            2 => driver.irq.pending = vec![u16::from(input.u8() & 3)],
            _ => drop(driver.nvme.stats()),
        },
        _ => match kind & 0x10 {
            0 => {
                quiesce(driver);
                driver.with(|nvme, bus| nvme.resume(bus));
            }
            _ => reset(driver),
        },
    }
}

fn quiesce(driver: &mut Driver) {
    while !driver.with(|nvme, bus| nvme.quiesce(bus)) {
        std::thread::yield_now();
    }
}

fn reset(driver: &mut Driver) {
    quiesce(driver);
    driver.nvme.reset();
    driver.memory.bus_master = true;
    driver.irq.line = false;
    driver.enable();
    driver.create_pair(1, 64);
}

/// Writes what is in the guest's memory.
fn put(driver: &Driver, at: u64, bytes: &[u8]) {
    let end = BASE + SIZE as u64;
    if (BASE..end).contains(&at) && bytes.len() as u64 <= end - at {
        driver.memory.put(at, bytes);
    }
}

/// Doorbells, controller registers, or anything in the BAR.
fn register(input: &mut Input<'_>) -> u64 {
    let choice = u64::from(input.u8());
    match choice {
        0..=0x7f => 0x1000 + choice % 16 * 4,
        0x80..=0xdf => [0x0c, 0x10, 0x14, 0x24, 0x28, 0x2c, 0x30, 0x34][choice as usize % 8],
        _ => u64::from(input.u16()) % 0x3ff8,
    }
}

/// In the structures in use, at the end of memory, or anywhere.
fn address(input: &mut Input<'_>) -> u64 {
    let choice = u64::from(input.u8());
    let within = u64::from(input.u8()) * 16;
    match choice {
        0..=0x9f => DATA + choice * 4096 + (within & 0xff0 & (choice << 4)),
        0xa0..=0xaf => ASQ + within,
        0xb0..=0xb7 => ACQ + within,
        0xb8..=0xcf => SHADOWS + within * 2,
        0xd0..=0xdf => BASE + 0x12_0000 + within,
        0xe0..=0xef => BASE + SIZE as u64 - 4096 + within,
        _ => input.number(),
    }
}

fn command(input: &mut Input<'_>, opcodes: &[u8]) -> Sqe {
    let choice = input.u8();
    let opcode = match choice {
        0..=0xf7 => opcodes[usize::from(choice) % opcodes.len()],
        _ => input.u8(),
    };
    let flags = input.u8();
    let nsid = match flags & 0x30 {
        0 | 0x10 => 1,
        0x20 => u32::MAX,
        _ => input.u32(),
    };
    let mut sqe = Sqe::new(opcode)
        .nsid(nsid)
        .prp(address(input), address(input));
    if flags & 1 != 0 {
        sqe = sqe.sgl(address(input), input.number() as u32, input.u8());
    }
    for dword in &mut sqe.0[10..if flags & 2 != 0 { 16 } else { 13 }] {
        *dword = input.number() as u32;
    }
    // Fused commands and reserved data pointers.
    if flags >= 0xf0 {
        sqe.0[0] |= u32::from(flags) << 8;
    }
    sqe
}
