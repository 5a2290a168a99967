//! Backends with a keeper are killed.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use farside_backend_api::ConnectionState;
use farside_scripted_vmm::{
    device::Device,
    machine::Machine,
    nvme::{Controller, Doorbells},
    pci,
    ram::{Layout, Ram},
    vectors::Vectors,
};
use farside_tests::{Cluster, Daemon, MIB};
use rustix::process::{Signal, kill_process};

use super::{Random, Story, TIMEOUT, kills, lend, print, under_load, workers};

/// Waits until the backend after `kills` of them has its device.
fn wait_next(cluster: &Cluster, keeper: &Daemon, kills: u64) {
    // It may not have its sockets yet.
    let deadline = Instant::now() + TIMEOUT;
    let goes_on = || {
        let status = cluster.status().ok()?;
        let restarts = status.0.backend("a")?.restarts?;
        let connection = status.borrow("a", "disk0").ok()?.connection?;
        Some(restarts >= kills && connection.state == ConnectionState::Connected)
    };
    while goes_on() != Some(true) {
        assert!(Instant::now() < deadline, "{}", keeper.log());
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn kill_backends(doorbells: Doorbells, count: u64) {
    let cluster = Cluster::new().unwrap();
    let image = cluster.image("disk0", 16 * MIB).unwrap();
    let _lender = lend(&cluster, &image);
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let keeper = serve.start().unwrap();
    let pauses = under_load(&cluster, doorbells, |mut random, progress| {
        let mut kills = Vec::new();
        for round in 1..=count {
            progress.wait(&mut random, Duration::from_millis(50));
            let [backend] = keeper.children()[..] else {
                panic!("the keeper has one child");
            };
            kills.push(Instant::now());
            kill_process(backend, Signal::KILL).unwrap();
            wait_next(&cluster, &keeper, round);
        }
        kills
    });
    print(&format!("backend, {doorbells:?}"), pauses);
}

#[test]
fn a_backend_that_is_killed_under_load_costs_a_pause() {
    kill_backends(Doorbells::Registers, kills() as u64);
}

#[test]
fn a_backend_that_is_killed_under_load_with_a_doorbell_buffer_costs_a_pause() {
    kill_backends(Doorbells::Buffer, kills() as u64);
}

/// Backend and worker, in either order and with a pause between them or without one.
fn kill_both(doorbells: Doorbells, count: u64) {
    let cluster = Cluster::new().unwrap();
    let _story = Story(&cluster);
    let image = cluster.image("disk0", 16 * MIB).unwrap();
    let lender = lend(&cluster, &image);
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let keeper = serve.start().unwrap();
    let pauses = under_load(&cluster, doorbells, |mut random, progress| {
        let mut kills = Vec::new();
        for round in 1..=count {
            progress.wait(&mut random, Duration::from_millis(50));
            let [backend] = keeper.children()[..] else {
                panic!("the keeper has one child");
            };
            let [worker] = workers(&lender)[..] else {
                panic!("one worker does the I/O");
            };
            let mut both = [backend, worker];
            if random.below(2) == 0 {
                both.reverse();
            }
            kills.push(Instant::now());
            kill_process(both[0], Signal::KILL).unwrap();
            if random.below(2) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(30_000)));
            }
            // A worker whose backend is gone ends.
            let _ = kill_process(both[1], Signal::KILL);
            wait_next(&cluster, &keeper, round);
        }
        kills
    });
    print(&format!("backend and worker, {doorbells:?}"), pauses);
}

#[test]
fn a_backend_and_its_worker_that_are_killed_at_once_cost_a_pause() {
    kill_both(Doorbells::Registers, kills() as u64);
}

#[test]
fn a_backend_and_its_worker_that_are_killed_at_once_with_a_doorbell_buffer_cost_a_pause() {
    kill_both(Doorbells::Buffer, kills() as u64);
}

/// Descriptors of a process.
fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// One life of a VM: each request is answered as if no backend was killed.
fn live(cluster: &Cluster, random: &mut Random) {
    let socket = cluster.directory().join("vm/a/disk0.sock");
    let deadline = Instant::now() + TIMEOUT;
    let device = loop {
        // A client whose backend is killed before it is recorded is not served.
        match Device::connect(&socket, TIMEOUT) {
            Ok(device) => break device,
            Err(error) => assert!(Instant::now() < deadline, "{error:#}"),
        }
    };
    let mut machine = Machine {
        vectors: Vectors::new(device.vectors()).unwrap(),
        ram: Ram::new(Layout::new(64 * MIB, None, false).unwrap()).unwrap(),
        device,
        timeout: TIMEOUT,
        early_interrupts: 0,
    };
    let blocks = machine.ram.layout().blocks();
    for _ in 0..1 + random.below(3) {
        let device = &mut machine.device;
        for block in &blocks {
            device.map(&machine.ram, *block).unwrap();
        }
        device.reset().unwrap();
        pci::place_bars(device).unwrap();
        for _ in 0..1 + random.below(3) {
            pci::set_command(device, pci::MEMORY).unwrap();
            pci::set_command(device, pci::MEMORY | pci::BUS_MASTER).unwrap();
            let command = pci::command(device).unwrap();
            assert_eq!(command, pci::MEMORY | pci::BUS_MASTER);
        }
        device.enable_vectors(&machine.vectors).unwrap();
        pci::enable_msix(device, true).unwrap();
        let mut controller = Controller::bring_up(&mut machine, 1, 1).unwrap();
        controller.flush(&mut machine).unwrap();
        let device = &mut machine.device;
        for block in &blocks {
            if random.below(2) == 0 {
                device.unmap(*block).unwrap();
                device.map(&machine.ram, *block).unwrap();
            }
        }
        controller.flush(&mut machine).unwrap();
        let device = &mut machine.device;
        device.disable_vectors().unwrap();
        pci::set_command(device, pci::MEMORY).unwrap();
        for block in &blocks {
            device.unmap(*block).unwrap();
        }
    }
    machine.device.close();
}

#[test]
fn a_backend_that_is_killed_in_any_state_goes_on_there() {
    let cluster = Cluster::new().unwrap();
    let image = cluster.image("disk0", 16 * MIB).unwrap();
    let _lender = lend(&cluster, &image);
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let keeper = serve.start().unwrap();
    let mut random = Random::new();
    live(&cluster, &mut random);
    cluster.wait_free("disk0").unwrap();
    let before = descriptors(keeper.pid());
    let over = AtomicBool::new(false);
    let mut others = Random(random.below(u64::MAX));
    let mut lives = 0;
    let kills = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let (most, mut kills) = (2 * kills() as u64, 0);
            while !over.load(Ordering::Acquire) && kills < most {
                // Once in a while when it has hardly begun; less than 100 times in 10 s.
                let time = match others.below(4) {
                    0 => others.below(60_000),
                    _ => 100_000 + others.below(150_000),
                };
                std::thread::sleep(Duration::from_micros(time));
                for backend in keeper.children() {
                    // It may have ended.
                    kills += u64::from(kill_process(backend, Signal::KILL).is_ok());
                }
            }
            kills
        });
        // Also if a request fails.
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let _over = Over(&over);
        while !killer.is_finished() {
            let lived = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                live(&cluster, &mut random);
            }));
            assert!(lived.is_ok(), "life {lives}: {}", keeper.log());
            lives += 1;
        }
        killer.join().unwrap()
    });
    live(&cluster, &mut random);
    cluster.wait_free("disk0").unwrap();
    println!("{kills} kills in {lives} lives");
    let deadline = Instant::now() + TIMEOUT;
    // The helper of the last backend may be about to close one.
    while descriptors(keeper.pid()) > before {
        assert!(
            Instant::now() < deadline,
            "{} descriptors, and {before} before",
            descriptors(keeper.pid())
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}
