//! Random guests: no panic, and no write outside the guest's memory (the fake memory
//! translates nothing else).

use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::world::{BASE, DATA, Driver, SIZE, Sqe};
use crate::{Device, block::EngineChoice};

#[derive(Clone, Debug)]
enum Act {
    Write {
        at: u64,
        value: u64,
        wide: bool,
    },
    Read {
        at: u64,
        len: usize,
    },
    Admin(Sqe),
    Io(Sqe),
    Memory {
        at: u64,
        value: u64,
    },
    /// To the page of the doorbells, of a controller that has them mapped.
    Mapped {
        index: usize,
        value: u64,
    },
    Poll,
    Arm,
    Quiesce,
    Reset,
    Consume,
}

/// Addresses near the structures in use, some of them unmapped or misaligned.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => (0u64..0x40).prop_map(|page| DATA + page * 4096),
        4 => (0u64..0x8_0000).prop_map(|at| BASE + at),
        1 => Just(BASE + SIZE as u64 - 4096),
        1 => any::<u64>(),
    ]
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..8, any::<u32>(), any::<u16>().prop_map(u32::from)]
}

fn command(opcodes: &'static [u8]) -> impl Strategy<Value = Sqe> {
    (
        prop_oneof![9 => prop::sample::select(opcodes), 1 => any::<u8>()],
        prop_oneof![9 => Just(0u32), 1 => 0u32..256],
        prop_oneof![Just(1u32), Just(0), Just(0xffff_ffff), any::<u32>()],
        (address(), address()),
        prop::array::uniform6(small()),
    )
        .prop_map(|(opcode, flags, nsid, (prp1, prp2), dwords)| {
            let mut sqe = Sqe::new(opcode).nsid(nsid).prp(prp1, prp2);
            sqe.0[0] |= flags << 8;
            sqe.0[10..].copy_from_slice(&dwords);
            sqe
        })
}

const ADMIN: &[u8] = &[0, 1, 2, 4, 5, 6, 8, 9, 0x0a, 0x0c, 0x7c, 0x80];
const IO: &[u8] = &[0, 1, 2, 5, 8, 9, 0x0c];

fn act() -> impl Strategy<Value = Act> {
    let register = prop_oneof![
        4 => (0u64..16).prop_map(|index| 0x1000 + index * 4),
        2 => prop::sample::select(vec![0x0c, 0x10, 0x14, 0x24, 0x28, 0x30u64]),
        1 => (0u64..0x1000).prop_map(|index| index * 4),
    ];
    let value = prop_oneof![
        3 => 0u64..70,
        1 => any::<u64>(),
        1 => Just(0x0046_0001u64),
        1 => Just(0x0046_4001u64),
    ];
    prop_oneof![
        4 => (register, value.clone(), any::<bool>()).prop_map(|(at, value, wide)| {
            let wide = wide && at % 8 == 0;
            Act::Write { at, value, wide }
        }),
        1 => (0u64..0x1000, prop::sample::select(vec![1usize, 2, 4, 8]))
            .prop_map(|(at, len)| Act::Read { at: at * 4 / len as u64 * len as u64, len }),
        4 => command(ADMIN).prop_map(Act::Admin),
        8 => command(IO).prop_map(Act::Io),
        4 => (0u64..0x1_0000, value.clone()).prop_map(|(index, value)| Act::Memory {
            at: BASE + index * 8,
            value,
        }),
        4 => (0usize..16, value).prop_map(|(index, value)| Act::Mapped { index, value }),
        6 => Just(Act::Poll),
        1 => Just(Act::Arm),
        1 => Just(Act::Quiesce),
        1 => Just(Act::Reset),
        4 => Just(Act::Consume),
    ]
}

fn perform(driver: &mut Driver, act: &Act) {
    match *act {
        Act::Write { at, value, wide } => {
            if wide {
                driver.write64(at, value);
            } else {
                driver.write32(at, value as u32);
            }
        }
        Act::Read { at, len } => {
            let mut data = [0; 8];
            driver.with(|nvme, bus| nvme.bar_read(0, at, &mut data[..len], bus));
        }
        Act::Admin(sqe) => {
            driver.submit(0, sqe);
        }
        Act::Io(sqe) => {
            driver.submit(1, sqe);
        }
        Act::Memory { at, value } => driver.memory.put(at, &value.to_le_bytes()),
        Act::Mapped { index, value } => {
            if let Some(page) = &driver.mapped {
                let stored = page.store_u32(index * 4, value as u32, Ordering::Relaxed);
                stored.unwrap();
            }
        }
        Act::Poll => {
            driver.poll();
        }
        Act::Arm => {
            driver.enable_notifications();
        }
        Act::Quiesce => {
            while !driver.with(|nvme, bus| nvme.quiesce(bus)) {
                std::thread::yield_now();
            }
            driver.with(|nvme, bus| nvme.resume(bus));
        }
        Act::Reset => {
            while !driver.with(|nvme, bus| nvme.quiesce(bus)) {
                std::thread::yield_now();
            }
            driver.nvme.reset();
            driver.irq.line = false;
            driver.enable();
            driver.create_pair(1, 64);
        }
        Act::Consume => {
            driver.take(0);
            driver.take(1);
        }
    }
}

proptest! {
    #[test]
    fn random_guests_are_survived(
        threads in any::<bool>(),
        mapped in any::<bool>(),
        acts in prop::collection::vec(act(), 1..200),
    ) {
        let engine = if threads { EngineChoice::Threads } else { EngineChoice::IoUring };
        let mut driver = match mapped {
            true => Driver::with_mapped_doorbells(engine),
            false => Driver::off(|config| config.engine = engine),
        };
        driver.enable();
        driver.create_pair(1, 64);
        for act in &acts {
            perform(&mut driver, act);
        }
        // A reset always recovers the controller.
        perform(&mut driver, &Act::Reset);
        let cqe = driver.io(Sqe::new(0).nsid(1));
        prop_assert_eq!(cqe.status, (0, 0));
    }

    /// Commands of 64 arbitrary bytes.
    #[test]
    fn random_bytes_are_survived(
        commands in prop::collection::vec(prop::array::uniform16(any::<u32>()), 1..40),
    ) {
        let mut driver = Driver::ready(EngineChoice::IoUring);
        for (index, dwords) in commands.into_iter().enumerate() {
            driver.submit(index % 2, Sqe(dwords));
            driver.poll();
            driver.take(0);
            driver.take(1);
        }
        perform(&mut driver, &Act::Reset);
    }
}
