//! A round trip of a region access of at most eight bytes does not allocate.

#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "support/device.rs"]
mod device;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use farside_vfio_user::serve::pump;
use farside_vfio_user::{Connection, Session};

/// The system's allocator, with a counter.
struct Counting;

thread_local! {
    /// Of this thread: the test harness's threads allocate at any time.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds
// the contract; the counter needs no memory and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
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

fn message(command: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    bytes[2..4].copy_from_slice(&command.to_ne_bytes());
    bytes[4..8].copy_from_slice(&(16 + payload.len() as u32).to_ne_bytes());
    bytes.extend(payload);
    bytes
}

#[test]
fn small_region_accesses_allocate_nothing() {
    let (mut client, server) = UnixStream::pair().unwrap();
    let mut connection = Connection::new(server).unwrap();
    let mut session = Session::new();
    let mut device = device::TestDevice::new();

    let mut exchange = |request: &[u8], reply: &mut [u8]| {
        client.write_all(request).unwrap();
        pump(&mut connection, &mut session, &mut device, 8).unwrap();
        client.read_exact(reply).unwrap();
    };
    let mut reply = [0; 256];
    exchange(&message(1, &[0, 0, 1, 0]), &mut reply[..16]);
    let rest = u32::from_ne_bytes(reply[4..8].try_into().unwrap()) as usize - 16;
    exchange(&[], &mut reply[..rest]);

    // Offset 0, BAR 0, count.
    let access = |count: u8| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, count, 0, 0, 0];
    let reads = [1, 2, 4, 8].map(|count| (message(9, &access(count)), 32 + usize::from(count)));
    let writes = [1, 2, 4, 8].map(|count| {
        let payload = [&access(count)[..], &vec![0x5a; count.into()]].concat();
        (message(10, &payload), 32)
    });
    let mut round = || {
        for (request, length) in reads.iter().chain(&writes) {
            exchange(request, &mut reply[..*length]);
        }
    };
    // The device's own record.
    round();
    let before = ALLOCATIONS.get();
    for _ in 0..100 {
        round();
    }
    assert_eq!(ALLOCATIONS.get(), before);
}
