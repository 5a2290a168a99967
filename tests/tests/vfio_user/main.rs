//! Lends the device of another vfio-user server: here, another farside.
//!
//! The inner cluster has the device and serves it; the lender of the outer one lends its socket, and the outer backend
//! serves it to a VM. They share the socket's path, as a server and the lender beside it do.

mod quirks;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use farside_scripted_vmm::{
    device::Device,
    machine::Machine,
    nvme::{Controller, DRIVER_RAM, Doorbells, Polled},
    pci,
    ram::{Layout, PAGE, Ram},
    vectors::Vectors,
};
use farside_tests::{BorrowState, Cluster, Daemon, MIB};
use rustix::process::{Signal, kill_process, test_kill_process};

/// A part of the name of the VM's memory file.
const RAM_NAME: &str = "memfd:guest-ram";

/// A register that is never all ones.
const VERSION: u64 = 8;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A server with an NVMe device, and a lender and a backend that lend it on.
struct Stage {
    inner: Cluster,
    outer: Cluster,
    _lender: Daemon,
    server: Daemon,
    outer_lender: Daemon,
    backend: Daemon,
}

impl Stage {
    fn new() -> Self {
        let inner = Cluster::new().unwrap();
        let (lender, _) = inner.lend_disk(16 * MIB).unwrap();
        let server = serve_inner(&inner);
        let outer = Cluster::new().unwrap();
        let socket = inner.directory().join("vm/inner/disk0.sock");
        let server_arg = format!("disk1={}", socket.display());
        let outer_lender = outer.lend(&["--vfio-user", &server_arg]).unwrap();
        let backend = outer.serve("a", &["disk1"]).start().unwrap();
        Self {
            inner,
            outer,
            _lender: lender,
            server,
            outer_lender,
            backend,
        }
    }
}

impl Stage {
    /// The VM's files that the server has open, and the bytes of them that its device can reach.
    fn memory_of_server(&self) -> (usize, u64) {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.server.pid())).unwrap();
        let files = fds
            .flatten()
            .filter_map(|fd| std::fs::read_link(fd.path()).ok());
        let is_ram = |file: &std::path::PathBuf| file.to_string_lossy().contains(RAM_NAME);
        let status = self.inner.status().unwrap();
        let borrow = status.borrow("inner", "disk0").unwrap();
        (files.filter(is_ram).count(), borrow.bytes_pinned)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "inner:\n{}\nouter:\n{}",
                self.inner.story(),
                self.outer.story()
            );
        }
    }
}

fn serve_inner(cluster: &Cluster) -> Daemon {
    cluster.serve("inner", &["disk0"]).start().unwrap()
}

/// A VM with the device.
struct Vm {
    machine: Machine,
    controller: Controller,
    queue: Polled,
}

fn connect(socket: &Path) -> (Device, Ram) {
    let mut device = Device::connect(socket, TIMEOUT).unwrap();
    let ram = Ram::new(Layout::new(64 * MIB, None, false).unwrap()).unwrap();
    for block in ram.layout().blocks() {
        device.map(&ram, block).unwrap();
    }
    device.reset().unwrap();
    pci::place_bars(&mut device).unwrap();
    (device, ram)
}

impl Vm {
    fn start((mut device, ram): (Device, Ram)) -> Self {
        pci::set_command(&mut device, pci::MEMORY | pci::BUS_MASTER).unwrap();
        let vectors = Vectors::new(device.vectors()).unwrap();
        let mut machine = Machine {
            ram,
            device,
            vectors,
            timeout: TIMEOUT,
            early_interrupts: 0,
        };
        machine.device.enable_vectors(&machine.vectors).unwrap();
        pci::enable_msix(&mut machine.device, true).unwrap();
        // Its admin commands are completed by interrupts.
        let mut controller = Controller::bring_up(&mut machine, 1, 1).unwrap();
        let queue = controller
            .polled(&mut machine, Doorbells::Registers)
            .unwrap();
        Self {
            machine,
            controller,
            queue,
        }
    }

    /// Moves a page between the disk and memory.
    fn transfer(&mut self, opcode: u8, page: u64, address: u64) -> usize {
        const BLOCKS: u64 = PAGE / 512;
        let mut entry = [0; 64];
        entry[0] = opcode;
        entry[4] = 1;
        entry[24..32].copy_from_slice(&address.to_le_bytes());
        entry[40..48].copy_from_slice(&(page * BLOCKS).to_le_bytes());
        entry[48] = BLOCKS as u8 - 1;
        self.queue.run_raw(&mut self.machine, &[entry]).unwrap()
    }
}

#[test]
fn a_device_that_another_farside_serves_is_lent_on() {
    const WRITE: u8 = 1;
    const READ: u8 = 2;
    let stage = Stage::new();
    let socket = stage.outer.directory().join("vm/a/disk1.sock");
    let parts = connect(&socket);
    // Before bus mastering, the server has none of the VM's memory.
    assert_eq!(stage.memory_of_server(), (0, 0));
    let mut vm = Vm::start(parts);
    assert_eq!(stage.memory_of_server(), (1, 64 * MIB));
    assert!(vm.controller.identity().blocks > 0);
    let (from, to) = (DRIVER_RAM.end, DRIVER_RAM.end + PAGE);
    let data: Vec<u8> = (0..PAGE).map(|n| (n * 7 % 251) as u8).collect();
    vm.machine.ram.write(from, &data).unwrap();
    assert_eq!(vm.transfer(WRITE, 5, from), 1);
    assert_eq!(vm.transfer(READ, 5, to), 1);
    let mut read = vec![0; PAGE as usize];
    vm.machine.ram.read(to, &mut read).unwrap();
    assert_eq!(read, data);
    let image = std::fs::read(stage.inner.directory().join("disk0.img")).unwrap();
    assert_eq!(image[5 * PAGE as usize..][..PAGE as usize], data);

    // A reset of the device in its lease: it answers again.
    let device = &mut vm.machine.device;
    device.reset().unwrap();
    pci::place_bars(device).unwrap();
    pci::set_command(device, pci::MEMORY | pci::BUS_MASTER).unwrap();
    assert_ne!(device.load(0, VERSION).unwrap(), u32::MAX);

    // Bus mastering off: it has none again.
    pci::set_command(&mut vm.machine.device, pci::MEMORY).unwrap();
    assert_eq!(stage.memory_of_server(), (0, 0));
    drop(vm);
    stage.outer.wait_free("disk1").unwrap();

    // The next VM has a device that was reset.
    let vm = Vm::start(connect(&socket));
    drop(vm);
}

#[test]
fn a_server_that_is_killed_is_surprise_removal() {
    let mut stage = Stage::new();
    let socket = stage.outer.directory().join("vm/a/disk1.sock");
    let mut vm = Vm::start(connect(&socket));
    stage.server.kill().unwrap();
    // CSTS, of a device that is not there.
    let deadline = Instant::now() + TIMEOUT;
    while vm.machine.device.load(0, 0x1c).unwrap() != u32::MAX {
        assert!(Instant::now() < deadline);
    }
    stage.outer.wait_free("disk1").unwrap();
    // Another server at the same place is borrowed at the VM's next reset.
    stage.server = serve_inner(&stage.inner);
    drop(vm);
    stage
        .outer
        .wait_state("a", "disk1", BorrowState::Unleased)
        .unwrap();
    Vm::start(connect(&socket));
}

#[test]
fn a_server_lets_the_memory_go_when_worker_and_backend_are_killed() {
    let mut stage = Stage::new();
    let socket = stage.outer.directory().join("vm/a/disk1.sock");
    let vm = Vm::start(connect(&socket));
    assert_eq!(stage.memory_of_server(), (1, 64 * MIB));
    let [worker] = stage.outer_lender.workers()[..] else {
        panic!("not one worker");
    };
    kill_process(worker, Signal::KILL).unwrap();
    stage.backend.kill().unwrap();
    stage.outer.wait_free("disk1").unwrap();
    // Another farside closes its connection first.
    let deadline = Instant::now() + TIMEOUT;
    while stage.memory_of_server() != (0, 0) {
        assert!(Instant::now() < deadline);
    }
    drop(vm);
    stage.backend = stage.outer.serve("a", &["disk1"]).start().unwrap();
    Vm::start(connect(&socket));
}

#[test]
fn a_server_that_is_killed_with_its_worker_is_surprise_removal() {
    let mut stage = Stage::new();
    let socket = stage.outer.directory().join("vm/a/disk1.sock");
    let mut vm = Vm::start(connect(&socket));
    let [worker] = stage.outer_lender.workers()[..] else {
        panic!("not one worker");
    };
    // It would notice, and end by itself.
    kill_process(worker, Signal::STOP).unwrap();
    stage.server.kill().unwrap();
    kill_process(worker, Signal::KILL).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while vm.machine.device.load(0, 0x1c).unwrap() != u32::MAX {
        assert!(Instant::now() < deadline);
    }
    stage.outer.wait_free("disk1").unwrap();
}

/// Its keeper ends, too: no other lender would find it.
#[test]
fn a_lender_stops_in_time_whatever_a_server_does() {
    const LIMIT: Duration = Duration::from_secs(5);
    let mut stage = Stage::new();
    let socket = stage.outer.directory().join("vm/a/disk1.sock");
    let vm = Vm::start(connect(&socket));
    let mut processes = stage.outer_lender.children();
    assert_eq!(processes.len(), 2, "a worker and a keeper");
    stage.server.signal(Signal::STOP).unwrap();
    let began = Instant::now();
    stage.outer_lender.terminate().unwrap();
    stage.outer_lender.wait_exit(LIMIT).unwrap();
    let deadline = Instant::now() + LIMIT;
    while !processes.is_empty() {
        assert!(Instant::now() < deadline, "{processes:?} stay");
        processes.retain(|pid| test_kill_process(*pid).is_ok());
    }
    println!("stopped after {:?}", began.elapsed());
    stage.server.signal(Signal::CONT).unwrap();
    drop(vm);
}

#[test]
fn a_socket_without_a_server_is_refused_by_name() {
    let cluster = Cluster::new().unwrap();
    let socket = cluster.directory().join("none.sock");
    let argument = format!("disk1={}", socket.display());
    let ended = cluster.run(&["lend", "--vfio-user", &argument]).unwrap();
    assert!(!ended.status.success());
    for named in ["disk1", "none.sock", "No such file"] {
        assert!(ended.stderr.contains(named), "{}", ended.stderr);
    }
}
