//! A lender's records of leases, fences and rights, under hosts that borrow, migrate, repeat
//! themselves and lie, connections that break, media that fail or are exchanged, and a lender that crashes
//! between any two steps.
//!
//! Drives the lender's own `requests`, `registry`, `fences` and `access`, with its messages over
//! real sockets; the devices' threads take their messages in an order that the input chooses.
//! `check` has the invariants. Input: a list of steps, see [`run`].

mod chains;
mod check;
mod device;
mod host;
mod operate;
mod world;

use crate::input::Input;
use world::World;

/// Longest run, in steps.
const MAX_STEPS: usize = 2000;

/// Takes the steps of `input`, then ends all leases and lets each VM borrow each device where it
/// was moved to.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let mut world = World::new();
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        match input.u8() % 32 {
            0..=2 => world.connect(&mut input),
            3..=8 => world.request(&mut input),
            9..=15 => world.serve(&mut input),
            16..=19 => world.read(&mut input),
            20..=24 => world.step_device(&mut input),
            25 => world.disconnect(&mut input),
            26 | 27 => world.tell_destination(&mut input),
            28 => world.repeat(&mut input),
            29 if input.u8() < 64 => world.fail_flush(&mut input),
            29 => world.jam_device(&mut input),
            30 => world.raw_request(&mut input),
            // Seldom: all connections end with it.
            _ if input.u8() < 24 => world.crash(&mut input),
            _ => world.come_back(&mut input),
        }
        world.check();
    }
    world.flush();
}
