//! Backends with a keeper are killed.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use farside_backend_api::{BackendReport, ConnectionState};
use farside_scripted_vmm::{
    device::Device,
    machine::Machine,
    nvme::{Controller, Doorbells},
    pci,
    ram::{Layout, Ram},
    vectors::Vectors,
};
use farside_tests::{
    Cluster, Daemon, Keepers, MIB,
    load::{Disk, Random, TIMEOUT},
};
use rustix::process::{Pid, Signal, kill_process};

use super::{NVME, Story, disturbed, kills, lend, print, under_load};

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

fn kill_backends(disk: Disk, count: u64) {
    let cluster = Cluster::in_memory().unwrap();
    let medium = disk.medium(&cluster).unwrap();
    let _lender = disk.lend(&cluster, &medium).unwrap();
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let keeper = serve.start().unwrap();
    let pauses = under_load(&cluster, disk, |mut random, progress| {
        let mut kills = Vec::new();
        for round in 1..=count {
            progress
                .wait(&mut random, Duration::from_millis(50))
                .unwrap();
            let backend = keeper.backend().unwrap();
            let killed = Instant::now();
            kills.push(killed);
            kill_process(backend, Signal::KILL).unwrap();
            wait_next(&cluster, &keeper, round);
            std::thread::sleep(Keepers::INTERVAL.saturating_sub(killed.elapsed()));
        }
        kills
    });
    print(&format!("backend, {disk:?}"), pauses);
}

#[test]
fn a_backend_that_is_killed_under_load_costs_a_pause() {
    kill_backends(Disk::Nvme(Doorbells::Registers), kills() as u64);
}

#[test]
fn a_backend_that_is_killed_under_load_with_a_doorbell_buffer_costs_a_pause() {
    kill_backends(Disk::Nvme(Doorbells::Buffer), kills() as u64);
}

#[test]
fn a_backend_of_a_virtio_blk_model_that_is_killed_under_load_costs_a_pause() {
    kill_backends(Disk::VirtioBlk { event_idx: false }, kills() as u64);
}

#[test]
fn a_backend_of_a_virtio_blk_model_with_event_indexes_that_is_killed_under_load_costs_a_pause() {
    kill_backends(Disk::VirtioBlk { event_idx: true }, kills() as u64);
}

#[test]
fn a_backend_of_a_servers_device_that_is_killed_under_load_costs_a_pause() {
    kill_backends(Disk::OfServer(Doorbells::Registers), kills() as u64);
}

/// What tells a message that is processed again from another one is a number that comes again.
#[test]
fn no_register_write_is_lost_however_many_reads_are_between_two() {
    /// Admin queue attributes (NVM Express 1.4, 3.1.8), whose bits are plain while the controller is disabled.
    const AQA: u64 = 0x24;
    let cluster = Cluster::in_memory().unwrap();
    let _story = Story(&cluster);
    let medium = NVME.medium(&cluster).unwrap();
    let _lender = lend(&cluster, &medium);
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let _keeper = serve.start().unwrap();
    let socket = cluster.directory().join("vm/a/disk0.sock");
    let mut device = Device::connect(&socket, TIMEOUT).unwrap();
    device.reset().unwrap();
    pci::place_bars(&mut device).unwrap();
    pci::set_command(&mut device, pci::MEMORY).unwrap();
    for reads in (100..140).chain(240..270) {
        device.store(0, AQA, reads).unwrap();
        for read in 0..reads {
            let found = device.load(0, AQA).unwrap();
            assert_eq!(found, reads, "read {read} after the write");
        }
    }
}

/// Backend and worker, in either order and with a pause between them or without one.
fn kill_both(disk: Disk, count: u64) {
    let cluster = Cluster::in_memory().unwrap();
    let _story = Story(&cluster);
    let medium = disk.medium(&cluster).unwrap();
    let lender = disk.lend(&cluster, &medium).unwrap();
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let keeper = serve.start().unwrap();
    let pauses = under_load(&cluster, disk, |mut random, progress| {
        let mut kills = Vec::new();
        for round in 1..=count {
            progress
                .wait(&mut random, Duration::from_millis(50))
                .unwrap();
            let backend = keeper.backend().unwrap();
            let [worker] = lender.workers()[..] else {
                panic!("one worker does the I/O");
            };
            let mut both = [backend, worker];
            if random.below(2) == 0 {
                both.reverse();
            }
            let killed = Instant::now();
            kills.push(killed);
            kill_process(both[0], Signal::KILL).unwrap();
            if random.below(2) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(30_000)));
            }
            // A worker whose backend is gone ends.
            let _ = kill_process(both[1], Signal::KILL);
            wait_next(&cluster, &keeper, round);
            std::thread::sleep(Keepers::INTERVAL.saturating_sub(killed.elapsed()));
        }
        kills
    });
    print(&format!("backend and worker, {disk:?}"), pauses);
}

#[test]
fn a_backend_and_its_worker_that_are_killed_at_once_cost_a_pause() {
    kill_both(Disk::Nvme(Doorbells::Registers), kills() as u64);
}

#[test]
fn a_backend_and_its_worker_that_are_killed_at_once_with_a_doorbell_buffer_cost_a_pause() {
    kill_both(Disk::Nvme(Doorbells::Buffer), kills() as u64);
}

#[test]
fn a_backend_of_a_virtio_blk_model_and_its_worker_that_are_killed_at_once_cost_a_pause() {
    kill_both(Disk::VirtioBlk { event_idx: true }, kills() as u64);
}

#[test]
fn a_backend_of_a_servers_device_and_its_worker_that_are_killed_at_once_cost_a_pause() {
    kill_both(Disk::OfServer(Doorbells::Registers), kills() as u64);
}

fn backend_report(cluster: &Cluster) -> BackendReport {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        // While a backend starts, there is no status.
        let status = cluster.status().ok();
        if let Some(report) = status.and_then(|it| it.0.backend("a").cloned()) {
            return report;
        }
        assert!(Instant::now() < deadline, "{}", cluster.story());
    }
}

#[test]
fn keepers_that_are_killed_cost_no_pause() {
    let cluster = Cluster::in_memory().unwrap();
    let medium = NVME.medium(&cluster).unwrap();
    let _lender = lend(&cluster, &medium);
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let first = serve.start().unwrap();
    let before = backend_report(&cluster);
    let (vm, [kills, nothing]) = disturbed(
        &cluster,
        Disk::Nvme(Doorbells::Registers),
        |mut random, progress| {
            let mut times = [(); 2].map(|()| Vec::new());
            let mut replaced = 0;
            for _ in 0..kills() {
                progress
                    .wait(&mut random, Duration::from_millis(20))
                    .unwrap();
                times[1].push(Instant::now());
                progress
                    .wait(&mut random, Duration::from_millis(20))
                    .unwrap();
                let keepers = Keepers::find(&cluster, before.pid).unwrap();
                times[0].push(Instant::now());
                match random.below(3) {
                    0 => kill_process(keepers.spare, Signal::KILL).unwrap(),
                    _ => {
                        replaced += 1;
                        kill_process(keepers.keeper, Signal::KILL).unwrap();
                    }
                }
                let deadline = Instant::now() + TIMEOUT;
                while backend_report(&cluster).keeper_restarts != Some(replaced) {
                    assert!(Instant::now() < deadline, "{}", first.log());
                }
            }
            times
        },
    );
    print("keepers", vm.pauses(&kills));
    print("keepers, no kill", vm.pauses(&nothing));
    let report = backend_report(&cluster);
    assert_eq!((report.pid, report.restarts), (before.pid, Some(0)));
    assert_eq!(report.problem, None);
    // The last one has the backend, too.
    let keepers = Keepers::find(&cluster, report.pid).unwrap();
    kill_process(backend(&report), Signal::KILL).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while backend_report(&cluster).restarts != Some(1) {
        assert!(Instant::now() < deadline, "{}", first.log());
    }
    // Without either it goes on alone.
    kill_process(keepers.spare, Signal::STOP).unwrap();
    for pid in [keepers.keeper, keepers.spare] {
        kill_process(pid, Signal::KILL).unwrap();
    }
    while backend_report(&cluster).problem.is_none() {
        assert!(Instant::now() < deadline, "{}", first.log());
    }
    drop(vm);
    kill_process(backend(&backend_report(&cluster)), Signal::KILL).unwrap();
}

fn backend(report: &BackendReport) -> Pid {
    Pid::from_raw(report.pid.cast_signed()).unwrap()
}

#[test]
fn a_backend_goes_on_in_the_next_service_at_the_cost_of_a_pause() {
    let cluster = Cluster::in_memory().unwrap();
    let medium = NVME.medium(&cluster).unwrap();
    let _lender = lend(&cluster, &medium);
    let serve = || cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let mut service = serve().start().unwrap();
    let (vm, [ends, nexts, nothing]) = disturbed(
        &cluster,
        Disk::Nvme(Doorbells::Registers),
        |mut random, progress| {
            let mut times = [(); 3].map(|()| Vec::new());
            for round in 1..=kills() as u64 / 2 {
                let began = Instant::now();
                progress
                    .wait(&mut random, Duration::from_millis(20))
                    .unwrap();
                let ended = Instant::now();
                times[2].push((began, ended));
                service.signal(Signal::USR1).unwrap();
                assert!(service.wait_end(TIMEOUT).unwrap().success());
                // I/O goes on while there is none.
                progress
                    .wait(&mut random, Duration::from_millis(20))
                    .unwrap();
                let next = Instant::now();
                times[0].push((ended, next));
                let started = serve().start().unwrap();
                std::mem::replace(&mut service, started).leave_to_the_next();
                wait_for_restart(&cluster, round);
                times[1].push((next, Instant::now()));
            }
            times
        },
    );
    print("service, SIGUSR1", vm.longest(&ends));
    print("next service", vm.longest(&nexts));
    print("no end, longest batch", vm.longest(&nothing));
    // While it lives, there is no other one.
    let ended = cluster.run(&["serve", "--keeper", "--vm", "a", "--device", "disk0"]);
    let ended = ended.unwrap();
    assert!(
        !ended.status.success() && ended.stderr.contains("runs already"),
        "{ended:?}"
    );
}

#[test]
fn everything_of_a_host_that_is_restarted_at_once_costs_a_pause() {
    let cluster = Cluster::in_memory().unwrap();
    let medium = NVME.medium(&cluster).unwrap();
    let mut lender = lend(&cluster, &medium);
    let serve = || cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let mut service = serve().start().unwrap();
    let (vm, [restarts, nothing]) = disturbed(
        &cluster,
        Disk::Nvme(Doorbells::Buffer),
        |mut random, progress| {
            let mut times = [(); 2].map(|()| Vec::new());
            for round in 1..=kills() as u64 / 2 {
                let before = Instant::now();
                progress
                    .wait(&mut random, Duration::from_millis(50))
                    .unwrap();
                let began = Instant::now();
                times[1].push((before, began));
                lender.signal(Signal::USR1).unwrap();
                service.signal(Signal::USR1).unwrap();
                assert!(service.wait_end(TIMEOUT).unwrap().success());
                assert!(lender.wait_end(TIMEOUT).unwrap().success());
                std::thread::scope(|scope| {
                    let started = scope.spawn(|| lend(&cluster, &medium));
                    let next = serve().start().unwrap();
                    std::mem::replace(&mut service, next).leave_to_the_next();
                    lender = started.join().unwrap();
                });
                wait_for_restart(&cluster, round);
                times[0].push((began, Instant::now()));
            }
            times
        },
    );
    print("everything at once", vm.longest(&restarts));
    print("no end, longest batch", vm.longest(&nothing));
}

/// Waits until the backend has been started so often, and has its device.
fn wait_for_restart(cluster: &Cluster, restarts: u64) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let report = backend_report(cluster);
        let connection = report.devices.first().and_then(|it| it.connection.as_ref());
        let connected = connection.is_some_and(|it| it.state == ConnectionState::Connected);
        if report.restarts == Some(restarts) && connected {
            return;
        }
        assert!(Instant::now() < deadline, "{}", cluster.story());
    }
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
    let cluster = Cluster::in_memory().unwrap();
    let medium = NVME.medium(&cluster).unwrap();
    let _lender = lend(&cluster, &medium);
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let keeper = serve.start().unwrap();
    let mut random = Random::from_environment();
    live(&cluster, &mut random);
    cluster.wait_free("disk0").unwrap();
    let before = descriptors(keeper.pid());
    let over = AtomicBool::new(false);
    let mut others = random.fork();
    let mut lives = 0;
    let kills = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let (most, mut kills) = (2 * kills() as u64, 0);
            let (mut since, mut early) = (0, 0);
            while !over.load(Ordering::Acquire) && kills < most {
                // Once in a while when it has hardly begun; less than 100 times in 10 s.
                let time = match others.below(4) {
                    0 => others.below(60_000),
                    _ => 100_000 + others.below(150_000),
                };
                std::thread::sleep(Duration::from_micros(time));
                // A keeper gives up after five in a row that it has not seen ready; they are once their sockets are there.
                let patience = if early < 3 { Duration::ZERO } else { TIMEOUT };
                match keeper.wait_log_since(since, "/control", patience) {
                    Ok(_) => early = 0,
                    Err(_) => early += 1,
                }
                since = keeper.log_lines();
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
