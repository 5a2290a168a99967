//! An NVMe or virtio-blk model whose processes are killed under load: its VM sees pauses, and nothing else.
//!
//! A scripted VM ([`load`]) does I/O while workers, or the lender with its workers, get SIGKILL at random times. The seed is printed;
//! `FARSIDE_SEED` repeats the choice of commands and times. `FARSIDE_KILLS` is how often each process is killed, 50 if it is
//! not set.

mod backend;
mod many;

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use farside_devices::dma_test::{self, control, reg, status};
use farside_lender_protocol::Client;
use farside_scripted_vmm::{
    device::Device,
    nvme::{DRIVER_RAM, Doorbells},
    pci,
    ram::{Layout, Ram},
    vectors::Vectors,
};
use farside_tests::{
    Cluster, Daemon, MIB, from_env,
    load::{self, Disk, Medium, Progress, Random, TIMEOUT, Vm},
};
use rustix::process::{Signal, kill_process, test_kill_process};

const NVME: Disk = Disk::Nvme(Doorbells::Registers);

fn lend(cluster: &Cluster, medium: &Medium) -> Daemon {
    NVME.lend(cluster, medium).unwrap()
}

fn print(what: &str, mut pauses: Vec<Duration>) {
    pauses.sort();
    let at = |percent: usize| pauses[(pauses.len() - 1) * percent / 100];
    println!(
        "{what}: {} kills, pauses: least {:.1?}, median {:.1?}, 90 % {:.1?}, most {:.1?}",
        pauses.len(),
        at(0),
        at(50),
        at(90),
        at(100)
    );
}

/// Has a VM do I/O while `kill` does its work on another thread; that returns the times.
fn under_load(
    cluster: &Cluster,
    disk: Disk,
    kill: impl FnOnce(Random, &Progress) -> Vec<Instant> + Send,
) -> Vec<Duration> {
    let (vm, kills) = disturbed(cluster, disk, kill);
    vm.pauses(&kills)
}

/// As [`under_load`], with what `kill` returns, and the VM.
fn disturbed<T: Send>(
    cluster: &Cluster,
    disk: Disk,
    kill: impl FnOnce(Random, &Progress) -> T + Send,
) -> (Vm, T) {
    let mut random = Random::from_environment();
    let disturb = |random, progress: &_| Ok(kill(random, progress));
    load::disturbed(cluster, disk, &mut random, disturb).unwrap()
}

/// How often a process is killed.
fn kills() -> usize {
    from_env("FARSIDE_KILLS").unwrap().unwrap_or(50) as usize
}

/// Prints the log of a test that fails.
struct Story<'a>(&'a Cluster);

impl Drop for Story<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0.story());
        }
    }
}

fn kill_workers(disk: Disk, count: usize) {
    let cluster = Cluster::in_memory().unwrap();
    let _story = Story(&cluster);
    let medium = disk.medium(&cluster).unwrap();
    let lender = disk.lend(&cluster, &medium).unwrap();
    let _backend = cluster.serve("a", &["disk0"]).start().unwrap();
    let pauses = under_load(&cluster, disk, |mut random, progress| {
        let mut kills = Vec::new();
        for round in 1.. {
            assert!(
                round <= 4 * count,
                "{} kills in {round} rounds",
                kills.len()
            );
            if kills.len() == count {
                break;
            }
            progress
                .wait(&mut random, Duration::from_millis(50))
                .unwrap();
            let status = cluster.status().unwrap();
            let connection = status.borrow("a", "disk0").unwrap().connection.unwrap();
            assert!(connection.restarts >= kills.len() as u64, "{connection}");
            if let [worker] = lender.workers()[..] {
                kills.push(Instant::now());
                kill_process(worker, Signal::KILL).unwrap();
            }
            // Some again while they start and take up what was in flight.
            while random.below(8) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(30_000)));
                for worker in lender.workers() {
                    let _ = kill_process(worker, Signal::KILL);
                }
            }
        }
        kills
    });
    print(&format!("workers, {disk:?}"), pauses);
}

#[test]
fn a_worker_that_is_killed_under_load_costs_a_pause() {
    kill_workers(Disk::Nvme(Doorbells::Registers), kills());
}

#[test]
fn a_worker_that_is_killed_under_load_with_a_doorbell_buffer_costs_a_pause() {
    kill_workers(Disk::Nvme(Doorbells::Buffer), kills());
}

#[test]
fn a_worker_of_a_virtio_blk_model_that_is_killed_under_load_costs_a_pause() {
    kill_workers(Disk::VirtioBlk { event_idx: false }, kills());
}

#[test]
fn a_worker_of_a_virtio_blk_model_with_event_indexes_that_is_killed_under_load_costs_a_pause() {
    kill_workers(Disk::VirtioBlk { event_idx: true }, kills());
}

#[test]
fn a_worker_of_a_servers_device_that_is_killed_under_load_costs_a_pause() {
    kill_workers(Disk::OfServer(Doorbells::Registers), kills());
}

#[test]
fn a_lender_that_is_killed_under_load_and_started_anew_costs_a_pause() {
    start_lender_anew(Disk::Nvme(Doorbells::Buffer));
}

#[test]
fn a_lender_of_a_virtio_blk_model_that_is_killed_and_started_anew_costs_a_pause() {
    start_lender_anew(Disk::VirtioBlk { event_idx: true });
}

fn start_lender_anew(disk: Disk) {
    let cluster = Cluster::in_memory().unwrap();
    let medium = disk.medium(&cluster).unwrap();
    let mut lender = disk.lend(&cluster, &medium).unwrap();
    let _backend = cluster.serve("a", &["disk0"]).start().unwrap();
    let pauses = under_load(&cluster, disk, |mut random, progress| {
        let mut killed = Vec::new();
        for round in 0..kills() {
            progress
                .wait(&mut random, Duration::from_millis(100))
                .unwrap();
            killed.push(Instant::now());
            match round % 2 {
                0 => lender.kill_all().unwrap(),
                _ => lender.kill().unwrap(),
            }
            lender = disk.lend(&cluster, &medium).unwrap();
        }
        killed
    });
    print(&format!("lender, {disk:?}"), pauses);
}

#[test]
fn a_lender_that_is_restarted_in_order_under_load_costs_a_pause() {
    let cluster = Cluster::in_memory().unwrap();
    let medium = NVME.medium(&cluster).unwrap();
    let mut lender = lend(&cluster, &medium);
    let _backend = cluster.serve("a", &["disk0"]).start().unwrap();
    let pauses = under_load(
        &cluster,
        Disk::Nvme(Doorbells::Registers),
        |mut random, progress| {
            let mut kills = Vec::new();
            for _ in 0..5 {
                progress
                    .wait(&mut random, Duration::from_millis(100))
                    .unwrap();
                kills.push(Instant::now());
                lender.terminate().unwrap();
                assert!(lender.wait_exit(TIMEOUT).unwrap().success());
                lender = lend(&cluster, &medium);
            }
            kills
        },
    );
    print("lender, SIGTERM", pauses);
}

/// Has a process of [`a_killed_vmm_frees_its_device_in_under_100_ms`] be a VM at the socket in this directory.
const VMM: &str = "FARSIDE_TEST_VMM";

/// Not a test, but the VM of the next one.
#[test]
fn a_vmm_in_a_process_of_its_own() {
    let Some(directory) = std::env::var_os(VMM) else {
        return;
    };
    let mut vm = Vm::at(Path::new(&directory), NVME).unwrap();
    let mut random = Random::from_environment();
    vm.clear().unwrap();
    loop {
        vm.round(&mut random).unwrap();
        println!("\nround");
    }
}

#[test]
fn a_killed_vmm_frees_its_device_in_under_100_ms() {
    let cluster = Cluster::in_memory().unwrap();
    let _story = Story(&cluster);
    let medium = NVME.medium(&cluster).unwrap();
    let _lender = lend(&cluster, &medium);
    let _backend = cluster.serve("a", &["disk0"]).start().unwrap();
    let socket = cluster.directory().join("lender.sock");
    let mut client = Client::connect(&socket.into(), None).unwrap();
    let disk = "disk0".parse().unwrap();
    let mut random = Random::from_environment();
    let mut times = Vec::new();
    for _ in 0..kills() {
        let mut vmm = Command::new(std::env::current_exe().unwrap());
        vmm.args(["a_vmm_in_a_process_of_its_own", "--exact", "--nocapture"]);
        vmm.env(VMM, cluster.directory()).stdout(Stdio::piped());
        let mut vmm = vmm.spawn().unwrap();
        let lines = BufReader::new(vmm.stdout.take().unwrap()).lines();
        let mut rounds = lines.map_while(Result::ok).filter(|line| line == "round");
        rounds.nth(1).expect("I/O");
        std::thread::sleep(Duration::from_micros(random.below(20_000)));
        let killed = Instant::now();
        vmm.kill().unwrap();
        while client.status(&disk).unwrap().entry.borrowed_by.is_some() {
            assert!(killed.elapsed() < TIMEOUT);
            std::thread::sleep(Duration::from_micros(200));
        }
        times.push(killed.elapsed());
        vmm.wait().unwrap();
    }
    times.sort();
    print("VMM, until its device is free", times.clone());
    let median = times[times.len() / 2];
    assert!(median < Duration::from_millis(100), "{times:?}");
}

/// Ends the lender alone by a signal, `count` times: its worker does not notice.
fn end_lender(disk: Disk, signal: Signal, count: usize) {
    let cluster = Cluster::in_memory().unwrap();
    let medium = disk.medium(&cluster).unwrap();
    let mut lender = disk.lend(&cluster, &medium).unwrap();
    let _backend = cluster.serve("a", &["disk0"]).start().unwrap();
    let (vm, [ends, starts, nothing]) = disturbed(&cluster, disk, |mut random, progress| {
        let [worker] = lender.workers()[..] else {
            panic!("no worker, or several")
        };
        let mut times = [(); 3].map(|()| Vec::new());
        let mut wait = |times: &mut Vec<Instant>| {
            progress
                .wait(&mut random, Duration::from_millis(50))
                .unwrap();
            times.push(Instant::now());
        };
        for _ in 0..count {
            wait(&mut times[2]);
            wait(&mut times[0]);
            lender.signal(signal).unwrap();
            lender.wait_exit(TIMEOUT).unwrap();
            // I/O goes on while there is none.
            wait(&mut times[1]);
            lender = disk.lend(&cluster, &medium).unwrap();
            let status = cluster.status().unwrap();
            let lent = status.lent("disk0").unwrap();
            assert_eq!(lent.borrowed_by.as_deref(), Some("a"));
            let connection = status.borrow("a", "disk0").unwrap().connection.unwrap();
            assert_eq!(connection.restarts, 0, "{connection}");
            test_kill_process(worker).expect("the same worker");
        }
        times
    });
    let name = |what| format!("{what}, {disk:?}");
    print(&name("lender alone ends"), vm.pauses(&ends));
    print(&name("the next lender starts"), vm.pauses(&starts));
    print(&name("nothing happens"), vm.pauses(&nothing));
}

#[test]
fn a_lender_that_is_killed_alone_costs_no_pause() {
    end_lender(Disk::Nvme(Doorbells::Registers), Signal::KILL, kills());
}

#[test]
fn a_lender_of_a_servers_device_that_is_killed_alone_costs_no_pause() {
    end_lender(Disk::OfServer(Doorbells::Registers), Signal::KILL, 10);
}

#[test]
fn a_lender_of_a_servers_device_that_is_killed_with_its_worker_costs_a_pause() {
    let disk = Disk::OfServer(Doorbells::Registers);
    let cluster = Cluster::in_memory().unwrap();
    let _story = Story(&cluster);
    let medium = disk.medium(&cluster).unwrap();
    let mut lender = disk.lend(&cluster, &medium).unwrap();
    let _backend = cluster.serve("a", &["disk0"]).start().unwrap();
    let pauses = under_load(&cluster, disk, |mut random, progress| {
        let mut kills = Vec::new();
        for _ in 0..10 {
            progress
                .wait(&mut random, Duration::from_millis(50))
                .unwrap();
            let [worker] = lender.workers()[..] else {
                panic!("no worker, or several")
            };
            kills.push(Instant::now());
            lender.kill().unwrap();
            kill_process(worker, Signal::KILL).unwrap();
            lender = disk.lend(&cluster, &medium).unwrap();
        }
        kills
    });
    print("lender and worker, device of a server", pauses);
}

#[test]
fn a_lender_that_is_upgraded_costs_no_pause() {
    end_lender(Disk::Nvme(Doorbells::Buffer), Signal::USR1, 5);
}

/// A DMA test device that writes to RAM and raises interrupts all the time.
#[test]
fn a_dma_test_device_goes_on_while_its_lender_is_killed() {
    const VECTOR: u16 = 1;
    const BYTES: u64 = 64 << 10;
    let cluster = Cluster::in_memory().unwrap();
    let mut lender = cluster.lend(&["--dma-test", "dma0"]).unwrap();
    let _backend = cluster.serve("a", &["dma0"]).start().unwrap();
    let socket = cluster.directory().join("vm/a/dma0.sock");
    let mut device = Device::connect(&socket, TIMEOUT).unwrap();
    let ram = Ram::new(Layout::new(64 * MIB, None, false).unwrap()).unwrap();
    for block in ram.layout().blocks() {
        device.map(&ram, block).unwrap();
    }
    device.reset().unwrap();
    pci::place_bars(&mut device).unwrap();
    pci::set_command(&mut device, pci::MEMORY | pci::BUS_MASTER).unwrap();
    let mut vectors = Vectors::new(device.vectors()).unwrap();
    device.enable_vectors(&vectors).unwrap();
    pci::enable_msix(&mut device, true).unwrap();
    let mut fill = |pattern: u32| {
        let began = Instant::now();
        for (at, value) in [
            (reg::CONTROL, control::INTERRUPT_WHEN_DONE),
            (reg::VECTOR, VECTOR.into()),
            (reg::DST, DRIVER_RAM.end as u32),
            (reg::DST + 4, 0),
            (reg::LENGTH, BYTES as u32),
            (reg::PATTERN, pattern),
            (reg::COMMAND, dma_test::Command::Fill as u32),
        ] {
            device.store(0, at, value).unwrap();
        }
        let raised = vectors.wait(VECTOR, Instant::now() + TIMEOUT).unwrap();
        assert_eq!(raised, 1, "interrupts of command {pattern}");
        assert_eq!(device.load(0, reg::STATUS).unwrap() & status::FAULT, 0);
        assert_eq!(device.load(0, reg::MOVED).unwrap(), BYTES as u32);
        let took = began.elapsed();
        let mut data = vec![0; BYTES as usize];
        ram.read(DRIVER_RAM.end, &mut data).unwrap();
        assert!(data.chunks(4).all(|word| word == pattern.to_le_bytes()));
        took
    };
    let (mut pattern, mut longest) = (0, [Duration::ZERO; 2]);
    let mut run_for = |time: Duration, longest: &mut Duration| {
        let began = Instant::now();
        while began.elapsed() < time {
            pattern += 1;
            *longest = fill(pattern).max(*longest);
        }
    };
    let long = Duration::from_secs(1);
    run_for(long, &mut longest[0]);
    for _ in 0..20 {
        lender.kill().unwrap();
        run_for(long / 20, &mut longest[1]);
        let over = AtomicBool::new(false);
        lender = std::thread::scope(|scope| {
            let started = scope.spawn(|| {
                let lender = cluster.lend(&["--dma-test", "dma0"]).unwrap();
                over.store(true, Ordering::Release);
                lender
            });
            while !(over.load(Ordering::Acquire) || started.is_finished()) {
                run_for(Duration::ZERO + long / 100, &mut longest[1]);
            }
            started.join().unwrap()
        });
        let lent = cluster.status().unwrap().lent("dma0").unwrap();
        assert_eq!(lent.borrowed_by.as_deref(), Some("a"));
    }
    println!(
        "DMA test device: {pattern} commands; longest without a kill {:.1?}, with 20 kills {:.1?}",
        longest[0], longest[1]
    );
}
