//! Leases whose lender is killed, and that go on with the next one, as unlucky and hostile parties have it.

mod versions;

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    os::{
        fd::AsFd,
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use farside_daemon::{OwnedListener, SocketKind};
use farside_fabric::{Iova, PeerAddress, memory::create_sealed};
use farside_lender_protocol::{
    ChannelError, Client, Keeping, Lease, Resource, Revocation, Transport,
    registers::{Access, Event},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};

const DEADLINE: Duration = Duration::from_secs(20);

/// Bytes of the DMA test device's mappable BAR.
const BAR_MEMORY: u64 = 64 << 10;

const WINDOW: u64 = 256 << 20;

/// What a lender lends.
const DEVICES: &[&str] = &["dma0", "dma1"];

/// The runtime directory of lenders that follow each other.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let image = File::create(dir.path().join("disk.img")).expect("a file");
        image.set_len(16 << 20).expect("a size");
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The keeper's directory.
    fn keeper(&self) -> PathBuf {
        self.path("lender.keeper")
    }

    fn make_keeper(&self, mode: u32) {
        let mut directory = fs::DirBuilder::new();
        directory.mode(mode);
        directory.create(self.keeper()).expect("a directory");
    }

    fn command(&self, devices: &[&str]) -> Command {
        self.command_of(env!("CARGO_BIN_EXE_farside").as_ref(), devices)
    }

    fn command_of(&self, program: &Path, devices: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .arg("lend")
            .arg("--socket")
            .arg(self.path("lender.sock"))
            .args(devices.iter().flat_map(|id| ["--dma-test", id]))
            .arg("--nvme")
            .arg(format!("disk0={}", self.path("disk.img").display()))
            .env("FARSIDE_STATE_DIR", self.0.path())
            .stderr(Stdio::piped());
        command
    }

    fn lend(&self) -> Lender {
        Lender::start(self.command(DEVICES))
    }

    fn client(&self, vm: Option<&str>) -> Client {
        let vm = vm.map(|vm| vm.parse().expect("a name"));
        Client::connect(&self.path("lender.sock").into(), vm.as_ref()).expect("a lender")
    }

    fn borrow(&self, device: &str, vm: &str) -> (Client, Lease) {
        let memory = create_sealed("bar", BAR_MEMORY).expect("memory");
        let memory = device.starts_with("dma").then_some(memory.as_fd());
        let mut client = self.client(Some(vm));
        let device = device.parse().expect("an id");
        let lease = client.borrow_device(&device, Transport::SharedMemory, memory.as_slice());
        (client, lease.expect("a free device"))
    }

    /// Borrows the NVMe device as a lease that may go on.
    fn borrow_and_keep(&self, vm: &str) -> (Client, Lease) {
        let mut client = self.client(Some(vm));
        let id = "disk0".parse().expect("an id");
        let bytes = client.describe(&id).expect("a description").state;
        let state = create_sealed("state", bytes).expect("memory");
        let keeping = Keeping {
            keep: Duration::from_secs(100),
            resumes: None,
        };
        let lease = client.borrow_and_keep(&id, keeping, &[state.as_fd()]);
        (client, lease.expect("a free device"))
    }

    fn holder(&self, device: &str) -> Option<String> {
        let status = self
            .client(None)
            .status(&device.parse().expect("an id"))
            .expect("a status");
        assert_eq!(status.entry.kept, None, "{device}");
        status.entry.borrowed_by.map(|holder| holder.vm.to_string())
    }

    fn lut_entries(&self) -> u64 {
        let limits = self.client(None).limits_in_use().expect("an operator");
        let mut limits = limits.into_iter();
        let found = limits.find(|limit| limit.resource == Resource::LutEntries);
        found.expect("an adapter").used
    }

    /// Waits for a status of a device.
    fn until_free(&self, device: &str) {
        let deadline = Instant::now() + DEADLINE;
        while self.holder(device).is_some() {
            assert!(Instant::now() < deadline, "{device} is still lent");
        }
    }
}

struct Lender {
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Lender {
    fn start(mut command: Command) -> Self {
        let mut child = command.spawn().expect("the program starts");
        let mut log = BufReader::new(child.stderr.take().expect("a pipe"));
        let lines = Arc::new(Mutex::new(String::new()));
        let mut line = String::new();
        while !line.contains("listens at") {
            line.clear();
            let read = log.read_line(&mut line).expect("UTF-8");
            lines.lock().expect("lines").push_str(&line);
            assert!(read > 0, "it ended: {}", lines.lock().expect("lines"));
        }
        let written = Arc::clone(&lines);
        std::thread::spawn(move || {
            while log.read_line(&mut line).is_ok_and(|read| read > 0) {
                written.lock().expect("lines").push_str(&line);
                line.clear();
            }
        });
        Self { child, log: lines }
    }

    fn log(&self) -> String {
        self.log.lock().expect("lines").clone()
    }

    /// Waits until it has logged `text`: its log is read by a thread.
    fn wait_log(&self, text: &str) {
        let deadline = Instant::now() + DEADLINE;
        while !self.log().contains(text) {
            assert!(Instant::now() < deadline, "no {text:?} in: {}", self.log());
        }
    }

    fn end(&mut self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a process");
        self.child.wait().expect("a child");
    }

    /// Kills it, and returns a descriptor of its worker of a device.
    fn kill(mut self, device: &str) -> Worker {
        let worker = Worker(self.worker(device));
        self.end(Signal::KILL);
        worker
    }

    fn worker(&self, device: &str) -> Pid {
        let of_device = |pid: &i32| {
            let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline"));
            let words = ["lease-worker", device];
            arguments.is_ok_and(|it| {
                words
                    .iter()
                    .all(|word| it.split('\0').any(|it| it == *word))
            })
        };
        let found = self.children().into_iter().find(of_device);
        Pid::from_raw(found.expect("a worker")).expect("a number")
    }

    fn children(&self) -> Vec<i32> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let threads = threads.expect("threads").flatten();
        let children = threads.map(|thread| fs::read_to_string(thread.path().join("children")));
        let pids: String = children.map(Result::unwrap_or_default).collect();
        pids.split_whitespace().flat_map(str::parse).collect()
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A worker without its lender.
struct Worker(Pid);

impl Worker {
    fn kill(&self) {
        kill_process(self.0, Signal::KILL).expect("a process");
    }

    fn assert_lives(&self) {
        rustix::process::test_kill_process(self.0).expect("a process");
    }

    fn wait(&self) {
        let Ok(pidfd) = pidfd_open(self.0, PidfdFlags::empty()) else {
            return;
        };
        let limit = Timespec::try_from(DEADLINE).expect("seconds");
        let ready = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit));
        assert_eq!(ready, Ok(1), "not within {DEADLINE:?}");
    }
}

/// A register of the device, read over the register channel.
fn register(lease: &mut Lease) -> u64 {
    let read = Access::Read {
        bar: 0,
        offset: 0,
        len: 4,
    };
    assert!(lease.registers.try_send(&read, &[]).expect("a channel"));
    let received = lease.registers.receive::<Event>(DEADLINE);
    match received.expect("an answer").0 {
        Event::Data { value } => value & 0xffff_ffff,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_closed(lease: &mut Lease) {
    match lease.registers.receive::<Event>(DEADLINE) {
        Err(ChannelError::Closed) => {}
        other => panic!("{other:?}"),
    }
}

fn open_window(client: &mut Client, at: u64) -> u64 {
    let taken = client.open_window(
        Iova::new(at * WINDOW),
        PeerAddress::new((1 << 40) + at * WINDOW),
        WINDOW,
    );
    u64::from(taken.expect("room"))
}

#[test]
fn leases_go_on_without_a_lender_and_with_the_next_ones() {
    let host = Host::new();
    let lender = host.lend();
    let (mut tester, mut tester_lease) = host.borrow("dma0", "web1");
    let (mut disk, mut disk_lease) = host.borrow_and_keep("web1");
    let generation = tester.generation();
    let entries = open_window(&mut tester, 0);
    let id = register(&mut tester_lease);
    let version = register(&mut disk_lease);
    let worker = lender.kill("dma0");
    for round in 1..4 {
        assert_eq!(register(&mut tester_lease), id);
        assert_eq!(register(&mut disk_lease), version);
        disk.reset().expect("an answer of the worker");
        let lender = host.lend();
        worker.assert_lives();
        assert_eq!(host.holder("dma0").as_deref(), Some("web1"));
        assert_eq!(host.holder("disk0").as_deref(), Some("web1"));
        // What the next lender gives out is what the former ones have not.
        assert_eq!(host.lut_entries(), round * entries);
        assert_eq!(open_window(&mut tester, round), entries);
        assert_eq!(host.lut_entries(), (round + 1) * entries);
        let (mut other, other_lease) = host.borrow("dma1", "web2");
        assert!(other.generation() > generation);
        open_window(&mut other, 0);
        assert_eq!(host.lut_entries(), (round + 2) * entries);
        drop((other, other_lease));
        host.until_free("dma1");
        drop(lender);
    }
    let mut last = host.lend();
    last.wait_log("its lease goes on");
    tester.return_device().expect("an answer");
    disk.return_device().expect("an answer");
    host.until_free("dma0");
    host.until_free("disk0");
    assert_eq!(host.lut_entries(), 0);
    last.end(Signal::TERM);
    assert!(!host.keeper().exists());
}

#[test]
fn what_needs_a_lender_waits_for_the_next_one() {
    let host = Host::new();
    let lender = host.lend();
    let (mut client, _lease) = host.borrow("dma0", "web1");
    open_window(&mut client, 0);
    let _worker = lender.kill("dma0");
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| open_window(&mut client, 1));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!opened.is_finished(), "nobody can have answered");
        let _lender = host.lend();
        let entries = opened.join().expect("no panic");
        assert_eq!(host.lut_entries(), 2 * entries);
    });
}

#[test]
fn devices_that_are_returned_while_there_is_no_lender_are_free() {
    let host = Host::new();
    let lender = host.lend();
    let (mut tester, mut tester_lease) = host.borrow("dma0", "web1");
    let (mut disk, mut disk_lease) = host.borrow_and_keep("web1");
    // The backend of this one ends.
    let gone = host.borrow("dma1", "web2");
    let worker = lender.kill("disk0");
    tester.return_device().expect("an answer");
    disk.return_device().expect("an answer");
    drop(gone);
    worker.wait();
    assert_closed(&mut tester_lease);
    assert_closed(&mut disk_lease);
    let _lender = host.lend();
    for device in ["dma0", "dma1", "disk0"] {
        host.until_free(device);
        host.borrow(device, "web3");
    }
}

#[test]
fn a_worker_that_is_killed_while_there_is_no_lender_ends_its_lease() {
    let host = Host::new();
    let lender = host.lend();
    let (_client, mut lease) = host.borrow("dma0", "web1");
    let (_other, mut others) = host.borrow("dma1", "web2");
    let worker = lender.kill("dma0");
    worker.kill();
    assert_closed(&mut lease);
    register(&mut others);
    let lender = host.lend();
    host.until_free("dma0");
    lender.wait_log("revoked: its worker process");
    assert_eq!(host.holder("dma1").as_deref(), Some("web2"));
    host.borrow("dma0", "web3");
}

#[test]
fn an_adopted_lease_is_revoked_and_its_worker_killed_if_it_hangs() {
    let host = Host::new();
    let lender = host.lend();
    let (_client, mut lease) = host.borrow("dma0", "web1");
    let (_other, mut others) = host.borrow("dma1", "web2");
    let hangs = lender.worker("dma1");
    let worker = lender.kill("dma0");
    let mut lender = host.lend();
    let id = "dma0".parse().expect("an id");
    let revoked = host.client(None).revoke(&id, Duration::ZERO);
    assert_ne!(revoked.expect("an operator"), Revocation::NotLent);
    worker.wait();
    // The VM is asked first.
    while !matches!(
        lease.registers.receive::<Event>(DEADLINE),
        Err(ChannelError::Closed)
    ) {}
    host.until_free("dma0");
    kill_process(hangs, Signal::STOP).expect("a process");
    lender.end(Signal::TERM);
    assert_closed(&mut others);
    Worker(hangs).wait();
}

#[test]
fn sigusr1_leaves_the_leases_to_the_next_lender_and_sigterm_ends_them() {
    let host = Host::new();
    let mut lender = host.lend();
    let (mut client, mut lease) = host.borrow("dma0", "web1");
    let worker = Worker(lender.worker("dma0"));
    kill_process(Pid::from_child(&lender.child), Signal::USR1).expect("a process");
    assert!(lender.child.wait().expect("a child").success());
    lender.wait_log("stopping at SIGUSR1");
    client.reset().expect("an answer of the worker");
    let mut lender = host.lend();
    assert_eq!(host.holder("dma0").as_deref(), Some("web1"));
    lender.end(Signal::TERM);
    assert_closed(&mut lease);
    worker.wait();
}

#[test]
fn a_second_lender_is_refused_while_the_first_lives() {
    let host = Host::new();
    let _lender = host.lend();
    let (mut client, _lease) = host.borrow("dma0", "web1");
    let second = host.command(DEVICES).output().expect("the program starts");
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success());
    assert!(said.contains("another lender"), "{said}");
    client.reset().expect("the first is as it was");
    assert_eq!(host.holder("dma0").as_deref(), Some("web1"));
}

#[test]
fn a_lease_ends_in_order_if_the_configuration_has_its_device_no_more() {
    let host = Host::new();
    let lender = host.lend();
    let (_client, mut lease) = host.borrow("dma0", "web1");
    let (_disk, mut disk_lease) = host.borrow_and_keep("web1");
    let (_other, mut others) = host.borrow("dma1", "web2");
    let worker = lender.kill("dma0");
    // Another file at the same path.
    fs::rename(host.path("disk.img"), host.path("former.img")).expect("a file");
    let image = File::create(host.path("disk.img")).expect("a file");
    image.set_len(16 << 20).expect("a size");
    let lender = Lender::start(host.command(&["dma1"]));
    worker.wait();
    assert_closed(&mut lease);
    assert_closed(&mut disk_lease);
    register(&mut others);
    lender.wait_log("is not configured any more");
    lender.wait_log("is another file now");
    assert_eq!(host.holder("disk0"), None);
    assert_eq!(host.holder("dma1").as_deref(), Some("web2"));
}

#[test]
fn a_guest_that_floods_its_log_does_not_hold_itself_up_without_a_lender() {
    let host = Host::new();
    let lender = host.lend();
    let (mut client, mut lease) = host.borrow("dma0", "web1");
    let _worker = lender.kill("dma0");
    let began = Instant::now();
    for _ in 0..2000 {
        // Refused, with a log line.
        client
            .close_window(Iova::new(0x7000))
            .expect_err("none is open");
    }
    assert!(began.elapsed() < DEADLINE, "{:?}", began.elapsed());
    register(&mut lease);
    let _lender = host.lend();
    assert_eq!(open_window(&mut client, 0), host.lut_entries());
    client.return_device().expect("an answer");
    host.until_free("dma0");
}

/// A process of the same user, which nothing keeps from anything.
#[test]
fn what_is_no_keeper_holds_no_lender_up() {
    let host = Host::new();
    host.make_keeper(0o700);
    let _impostor = OwnedListener::bind(&host.keeper().join("socket"), SocketKind::SeqPacket, 4)
        .expect("a path");
    let lender = host.lend();
    lender.wait_log("no lease is adopted");
    // Its leases end with it.
    let (_client, mut lease) = host.borrow("dma0", "web1");
    let worker = lender.kill("dma0");
    assert_closed(&mut lease);
    worker.wait();
}

#[test]
fn a_keeper_where_others_can_put_one_is_not_asked() {
    let host = Host::new();
    host.make_keeper(0o755);
    let socket = host.keeper().join("socket");
    let impostor = OwnedListener::bind(&socket, SocketKind::SeqPacket, 4).expect("a path");
    let lender = host.lend();
    lender.wait_log("no lease is adopted");
    assert!(impostor.accept().expect("a listener").is_none());
    host.borrow("dma0", "web1");
}

#[test]
fn nobody_else_reaches_the_keeper() {
    let host = Host::new();
    let lender = host.lend();
    let _lease = host.borrow("dma0", "web1");
    let mode = |path: PathBuf| fs::metadata(path).expect("a path").permissions().mode() & 0o777;
    assert_eq!(mode(host.keeper()), 0o700);
    assert_eq!(mode(host.keeper().join("socket")), 0o600);
    // Neither has the keeper other rights than to keep.
    let path = format!("/proc/{}/status", keeper_of(&lender).as_raw_nonzero());
    let fields = ["CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"];
    // It may be about to confine itself.
    let deadline = Instant::now() + DEADLINE;
    loop {
        let status = fs::read_to_string(&path).expect("a status");
        if fields.iter().all(|field| status.contains(field)) {
            break;
        }
        assert!(Instant::now() < deadline, "{fields:?}: {status}");
    }
}

fn keeper_of(lender: &Lender) -> Pid {
    let is_keeper = |pid: &i32| {
        let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline"));
        arguments.is_ok_and(|it| it.contains("lease-keeper"))
    };
    let deadline = Instant::now() + DEADLINE;
    loop {
        // The list may lack one while others end.
        if let Some(keeper) = lender.children().into_iter().find(is_keeper) {
            return Pid::from_raw(keeper).expect("a number");
        }
        assert!(Instant::now() < deadline, "no keeper: {}", lender.log());
    }
}

#[test]
fn leases_whose_keeper_is_killed_have_another_one() {
    let host = Host::new();
    let lender = host.lend();
    let (_client, mut lease) = host.borrow("dma0", "web1");
    let (_other, mut others) = host.borrow("dma1", "web2");
    let (_disk, mut disk_lease) = host.borrow_and_keep("web2");
    let worker = lender.worker("dma0");
    for round in 1..=3 {
        let keeper = keeper_of(&lender);
        kill_process(keeper, Signal::KILL).expect("a process");
        let deadline = Instant::now() + DEADLINE;
        while lender
            .log()
            .matches("another process keeps 3 leases")
            .count()
            < round
        {
            assert!(Instant::now() < deadline, "{}", lender.log());
        }
    }
    let keeper = keeper_of(&lender);
    let _ = lender.kill("dma0");
    register(&mut lease);
    let lender = host.lend();
    for (device, vm) in [("dma0", "web1"), ("dma1", "web2"), ("disk0", "web2")] {
        assert_eq!(host.holder(device).as_deref(), Some(vm));
    }
    register(&mut lease);
    register(&mut others);
    register(&mut disk_lease);
    Worker(worker).assert_lives();
    // Of a keeper that a former lender has started.
    kill_process(keeper, Signal::KILL).expect("a process");
    lender.wait_log("another process keeps 3 leases");
    drop(lender);
    let _lender = host.lend();
    assert_eq!(host.holder("dma0").as_deref(), Some("web1"));
    register(&mut lease);
}
