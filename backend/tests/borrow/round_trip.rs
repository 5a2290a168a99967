//! Not a test: prints the duration of register accesses through backend and lender.
//!
//! `cargo test --release -p farside-backend --test borrow -- --ignored --nocapture round_trip`

use std::time::{Duration, Instant};

use crate::{
    guest::CONFIG,
    host::{DMA, Host},
    vmm::{REGION_READ, REGION_WRITE, Vmm, access, write},
};

fn measure(what: &str, rounds: usize, mut once: impl FnMut()) {
    for _ in 0..1000 {
        once();
    }
    let mut times: Vec<Duration> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            once();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!(
        "{what}: p50 {:?}, p99 {:?} ({rounds} times)",
        times[rounds / 2],
        times[rounds * 99 / 100]
    );
}

#[test]
#[ignore = "a measurement"]
fn round_trip_times() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    vmm.reset().unwrap();
    let call = |vmm: &mut Vmm, command, payload: &[u8]| {
        vmm.call(command, payload, &[]).unwrap();
    };
    let read = access(CONFIG, 0, 4);
    measure("4-byte read of configuration space", 100_000, || {
        call(&mut vmm, REGION_READ, &read)
    });
    let read = access(CONFIG, 4, 4);
    measure("the same of Status, from the device", 20_000, || {
        call(&mut vmm, REGION_READ, &read)
    });
    let read = access(0, 0, 4);
    measure("4-byte read of a BAR", 20_000, || {
        call(&mut vmm, REGION_READ, &read)
    });
    let write = write(0, 0x80, &[0; 4]);
    measure("4-byte write of a BAR", 20_000, || {
        call(&mut vmm, REGION_WRITE, &write)
    });
}
