//! In the steady state, neither a store nor a load through a window onto shared memory
//! allocates.

#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "ports/vmm.rs"]
mod vmm;
#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "ports/world.rs"]
mod world;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

use farside_ntb::regs::WINDOW_BAR;

use world::{RAM, World, lead};

/// The system's allocator, with a counter.
struct Counting;

/// Of all threads but the first: the test harness allocates there at any time.
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds
// the contract; counting touches no allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if rustix::thread::gettid() != rustix::process::getpid() {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller upholds the same contract as `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above; `alloc` got `memory` from `System`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A region access of eight bytes at the start of the window.
fn access(command: u16, flags: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = [[0, 0], command.to_ne_bytes()].concat();
    bytes.extend((32 + data.len() as u32).to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 4 + 8]);
    bytes.extend(u32::from(WINDOW_BAR).to_ne_bytes());
    bytes.extend(8u32.to_ne_bytes());
    bytes.extend(data);
    bytes
}

#[test]
fn accesses_to_memory_allocate_nothing() {
    const NO_REPLY: u32 = 1 << 4;
    let mut world = World::new();
    lead(&mut world.a, 0, RAM);
    let mut socket = &world.a.socket;
    let (store, load) = (access(10, NO_REPLY, &[0x5a; 8]), access(9, 0, &[]));
    let mut round = || {
        for _ in 0..10 {
            socket.write_all(&store).unwrap();
        }
        socket.write_all(&load).unwrap();
        let mut reply = [0; 40];
        socket.read_exact(&mut reply).unwrap();
        assert_eq!(reply[32..], [0x5a; 8]);
    };
    round();
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..100 {
        round();
    }
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before);
    assert_eq!(world.ram_b.read(0, 8), [0x5a; 8]);
}
