//! Not tests: prints the rate of accesses through a window.
//!
//! `cargo test --release -p farside-ntb-server --test ports -- --ignored --nocapture --test-threads 1`

use std::time::Instant;

use farside_ntb::regs::WINDOW_BAR;

use crate::world::{RAM, World, lead};

/// Prints the rate per second.
fn measure(what: &str, count: u64, work: impl FnOnce()) {
    let start = Instant::now();
    work();
    let rate = count as f64 / start.elapsed().as_secs_f64();
    println!("{what}: {rate:.0} a second");
}

#[test]
#[ignore = "a measurement"]
fn rates() {
    const COUNT: u64 = 200_000;
    const DEVICE: u64 = 0xfe00_0000;
    let mut world = World::new();
    lead(&mut world.a, 0, RAM);
    lead(&mut world.a, 1, DEVICE);
    let offset = |n: u64| 8 * n % 0x10_0000;

    measure("posted stores of 8 bytes to memory", COUNT, || {
        for n in 0..COUNT {
            world.a.post_write(WINDOW_BAR, offset(n), &n.to_le_bytes());
        }
        world.a.load(0, 8);
    });
    measure("the same, 200 in a message", COUNT, || {
        for n in (0..COUNT).step_by(200) {
            let writes: Vec<_> = (n..n + 200).map(|n| (offset(n), n)).collect();
            world.a.write_multi(WINDOW_BAR, &writes);
        }
    });
    measure("loads of 8 bytes from memory", COUNT / 4, || {
        for n in 0..COUNT / 4 {
            world.a.load(offset(n), 8);
        }
    });
    measure("loads of 4 bytes from a device", COUNT / 10, || {
        for _ in 0..COUNT / 10 {
            world.a.post_read(WINDOW_BAR, 2 << 20, 4);
            let read = world.b.expect_read(DEVICE, 4);
            world.b.answer_read(&read, Ok(&[1; 4]));
            world.a.read_reply();
        }
    });
}
