//! Workers of `farside lend`: what one of them may do, and what its end costs.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write, stdout},
    os::fd::AsFd,
    path::PathBuf,
    process::{Child, ChildStderr, Command, Stdio},
    time::{Duration, Instant},
};

use farside_fabric::{Iova, PeerAddress, memory::create_sealed};
use farside_lender_protocol::{
    Channel, ChannelError, Client, Resource, Secret, Transport, registers::Event,
};
use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};

const DEADLINE: Duration = Duration::from_secs(20);

/// Bytes of the DMA test device's mappable BAR.
const BAR_MEMORY: u64 = 64 << 10;

/// A lender of two DMA test devices and an NVMe device.
struct Lender {
    child: Child,
    log: BufReader<ChildStderr>,
    dir: tempfile::TempDir,
}

impl Lender {
    fn start() -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_farside")))
    }

    /// By a command that executes `farside`.
    fn start_by(mut farside: Command) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let image = fs::File::create(dir.path().join("disk.img")).expect("a file");
        image.set_len(16 << 20).expect("a size");
        let mut child = farside
            .arg("lend")
            .arg("--socket")
            .arg(dir.path().join("lender.sock"))
            .args(["--dma-test", "dma0", "--dma-test", "dma1", "--nvme"])
            .arg(format!("disk0={}", dir.path().join("disk.img").display()))
            .env("FARSIDE_STATE_DIR", dir.path())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let log = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut lender = Self { child, log, dir };
        lender.wait_for_line("listens at");
        lender
    }

    /// Reads the log up to a line with `words`.
    fn wait_for_line(&mut self, words: &str) -> String {
        loop {
            let mut line = String::new();
            let read = self.log.read_line(&mut line).expect("UTF-8");
            assert!(read > 0, "the lender ended before {words:?}");
            if line.contains(words) {
                return line;
            }
        }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("lender.sock")
    }

    fn client(&self, vm: Option<&str>) -> Client {
        let vm = vm.map(|vm| vm.parse().expect("a name"));
        Client::connect(&self.socket().into(), vm.as_ref()).expect("a lender")
    }

    /// The holder of a device.
    fn holder(&self, device: &str) -> Option<String> {
        let status = self.client(None).status(&device.parse().expect("an id"));
        let holder = status.expect("a status").entry.borrowed_by;
        holder.map(|holder| holder.vm.to_string())
    }

    /// The worker processes, by their arguments.
    fn workers(&self) -> Vec<Worker> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let threads = threads.expect("threads").flatten();
        let children = threads.map(|thread| fs::read_to_string(thread.path().join("children")));
        let pids: String = children.map(Result::unwrap_or_default).collect();
        let pids = pids.split_whitespace().flat_map(str::parse);
        let workers = pids.map(Worker::new);
        let is_worker = |worker: &Worker| worker.arguments.iter().any(|it| it == "lease-worker");
        workers.filter(is_worker).collect()
    }

    /// The worker of a device.
    fn worker(&self, device: &str) -> Worker {
        let mut workers = self.workers().into_iter();
        let found = workers.find(|worker| worker.arguments.contains(&device.to_owned()));
        found.unwrap_or_else(|| panic!("no worker of {device}"))
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // If it has ended, only the wait is needed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Worker {
    pid: Pid,
    arguments: Vec<String>,
}

impl Worker {
    fn new(pid: i32) -> Self {
        let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        Self {
            pid: Pid::from_raw(pid).expect("a process"),
            arguments: arguments.split('\0').map(str::to_owned).collect(),
        }
    }

    /// The status of each thread.
    fn threads(&self) -> Vec<String> {
        let path = format!("/proc/{}/task", self.pid.as_raw_nonzero());
        let threads = fs::read_dir(path).expect("a process").flatten();
        let status = threads.map(|thread| fs::read_to_string(thread.path().join("status")));
        status.map(|status| status.expect("a thread")).collect()
    }

    /// The files of its descriptors, without those that it closes meanwhile.
    fn files(&self) -> Vec<PathBuf> {
        let path = format!("/proc/{}/fd", self.pid.as_raw_nonzero());
        let links = fs::read_dir(path).expect("a process").flatten();
        let files = links.filter_map(|link| match fs::read_link(link.path()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            file => Some(file.expect("a link")),
        });
        files.collect()
    }

    /// A field of a thread's status.
    fn field(status: &str, field: &str) -> String {
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.expect("the kernel's fields").trim().to_owned()
    }

    fn kill(&self, signal: Signal) {
        kill_process(self.pid, signal).expect("a process");
    }

    /// Waits until the process is gone.
    fn wait(&self) {
        let Ok(pidfd) = pidfd_open(self.pid, PidfdFlags::empty()) else {
            return;
        };
        wait_for(&pidfd);
    }
}

fn wait_for(fd: impl AsFd) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec::try_from(DEADLINE).expect("seconds");
    let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit));
    assert_eq!(ready, Ok(1), "not within {DEADLINE:?}");
}

/// A lease, of which the borrower keeps both connections open.
fn borrow(lender: &Lender, device: &str, vm: &str) -> (Client, Channel) {
    let memory = create_sealed("bar", BAR_MEMORY).expect("memory");
    let memory = device.starts_with("dma").then_some(memory.as_fd());
    let mut client = lender.client(Some(vm));
    let device = device.parse().expect("an id");
    let lease = client.borrow_device(&device, Transport::SharedMemory, memory.as_slice());
    (client, lease.expect("a free device").registers)
}

#[track_caller]
fn assert_closed(registers: &mut Channel) {
    match registers.receive::<Event>(DEADLINE) {
        Err(ChannelError::Closed) => {}
        other => panic!("{other:?}"),
    }
}

/// A control group with the mark of a service manager that has delegated it.
struct Delegated(PathBuf);

impl Delegated {
    fn new() -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/mounts").expect("mounts");
        let mut mounts = mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>());
        let mount = mounts.rfind(|fields| fields[2] == "cgroup2");
        let mount = mount.ok_or("no control groups of version 2")?[1].to_owned();
        let path = PathBuf::from(mount).join(format!("farside-test-{}", std::process::id()));
        let refused = |what| move |error: io::Error| format!("{what}: {error}");
        fs::create_dir(&path).map_err(refused("cannot create a control group"))?;
        let group = Self(path);
        let flags = rustix::fs::XattrFlags::empty();
        let marked = rustix::fs::setxattr(&group.0, "user.delegate", b"1", flags);
        marked
            .map_err(io::Error::from)
            .map_err(refused("cannot mark a control group"))?;
        Ok(group)
    }

    /// `farside`, started in it.
    fn command(&self) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""])
            .arg(&self.0)
            .arg(env!("CARGO_BIN_EXE_farside"));
        command
    }

    /// The groups in it with their processes.
    fn groups(&self) -> Vec<(String, String)> {
        let entries = fs::read_dir(&self.0).expect("a group").flatten();
        let groups = entries.filter(|entry| entry.path().is_dir());
        let mut groups: Vec<_> = groups
            .map(|group| {
                let processes = fs::read_to_string(group.path().join("cgroup.procs"));
                let name = group.file_name().to_string_lossy().into_owned();
                (name, processes.unwrap_or_default().trim().to_owned())
            })
            .collect();
        groups.sort();
        groups
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        for (name, _) in self.groups() {
            // What is in use shows in the assertions.
            let _ = fs::remove_dir(self.0.join(name));
        }
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_worker_has_a_control_group_of_its_own_where_one_is_delegated() {
    let test = "a_worker_has_a_control_group_of_its_own_where_one_is_delegated";
    let delegated = match Delegated::new() {
        Ok(delegated) => delegated,
        Err(reason) => {
            return writeln!(stdout().lock(), "skipped: {test}: {reason}").expect("stdout");
        }
    };
    let lender = Lender::start_by(delegated.command());
    let leases = ["dma0", "dma1"].map(|device| borrow(&lender, device, "web1"));
    // With the process that keeps its leases.
    let broker = delegated.groups().swap_remove(0);
    let mut processes = broker.1.lines();
    assert_eq!(broker.0, "broker");
    assert_eq!(processes.next(), Some(&*lender.child.id().to_string()));
    assert_eq!(processes.count(), 1);
    let mut expected = vec![broker.clone()];
    for device in ["dma0", "dma1"] {
        let pid = lender.worker(device).pid.as_raw_nonzero();
        expected.push((format!("worker-{device}-{pid}"), pid.to_string()));
    }
    assert_eq!(delegated.groups(), expected);
    // However a worker ends, its group goes.
    lender.worker("dma0").kill(Signal::KILL);
    let [(_, mut killed), returned] = leases;
    assert_closed(&mut killed);
    drop(returned);
    let deadline = Instant::now() + DEADLINE;
    while delegated.groups() != std::slice::from_ref(&broker) {
        assert!(Instant::now() < deadline, "{:?}", delegated.groups());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_limit_of_memory_that_cannot_be_enforced_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = dir.path().join("lender.toml");
    let text = "worker-memory-max = \"64 MiB\"\n[[device]]\nid = \"dma0\"\nmodel.dma-test = {}\n";
    fs::write(&config, text).expect("a file");
    // The tests' own group is not delegated.
    let lend = Command::new(env!("CARGO_BIN_EXE_farside"))
        .arg("lend")
        .arg("--config")
        .arg(&config)
        .env("FARSIDE_RUNTIME_DIR", dir.path())
        .env("FARSIDE_STATE_DIR", dir.path())
        .env("FARSIDE_CONFIG_DIR", dir.path())
        .output()
        .expect("the program starts");
    let said = String::from_utf8_lossy(&lend.stderr);
    assert!(!lend.status.success(), "{said}");
    assert!(
        said.contains("worker-memory-max") && said.contains("Delegate=memory"),
        "{said}"
    );
}

#[test]
fn a_worker_has_no_privileges_and_its_own_user() {
    let lender = Lender::start();
    let (mut client, _registers) = borrow(&lender, "dma0", "web1");
    client
        .reset()
        .expect("an answer, so that the lease is served");
    let worker = lender.worker("dma0");
    assert!(worker.arguments.contains(&"web1".to_owned()));
    let is_root = rustix::process::geteuid().is_root();
    let uid = (2_000_000_000 + worker.pid.as_raw_nonzero().get()).to_string();
    let limits = fs::read_to_string(format!("/proc/{}/limits", worker.pid.as_raw_nonzero()));
    let limits = limits.expect("a process");
    let files = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"));
    let files = files.expect("the kernel's limits").split_whitespace();
    let most = |limit: &str| limit.parse::<u64>().is_ok_and(|limit| limit <= 32 << 10);
    assert!(files.take(2).all(most), "{limits}");
    let threads = worker.threads();
    assert!(threads.len() >= 3, "{threads:?}");
    for thread in threads {
        let field = |name| Worker::field(&thread, name);
        assert_eq!(field("NoNewPrivs"), "1");
        // SECCOMP_MODE_FILTER: against open(2), against most others, against sent descriptors.
        assert_eq!((&*field("Seccomp"), &*field("Seccomp_filters")), ("2", "3"));
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(u64::from_str_radix(&field(set), 16), Ok(0), "{set}");
        }
        if is_root {
            assert_eq!(field("Uid"), [&*uid; 4].join("\t"));
            assert_eq!(field("Gid"), [&*uid; 4].join("\t"));
            assert_eq!(field("Groups"), "");
        }
    }
}

#[test]
fn a_worker_has_the_descriptors_of_its_lease_only() {
    if !rustix::process::geteuid().is_root() {
        // For `cargo xtask test`: libtest captures `eprintln!`.
        let reason = "descriptors of a process that cannot be traced are visible to root";
        let test = "a_worker_has_the_descriptors_of_its_lease_only";
        return writeln!(stdout().lock(), "skipped: {test}: {reason}").expect("stdout");
    }
    // A descriptor without close-on-exec, as a shell's redirection is one.
    let inherited = tempfile::NamedTempFile::new().expect("a file");
    fcntl_setfd(inherited.as_file(), FdFlags::empty()).expect("a flag");
    let lender = Lender::start();
    let _other = borrow(&lender, "disk0", "web1");
    let _lease = borrow(&lender, "dma0", "web2");
    let image = lender.dir.path().join("disk.img");
    let images = |worker: &Worker| worker.files().iter().filter(|file| **file == image).count();
    let (other, worker) = (lender.worker("disk0"), lender.worker("dma0"));
    assert_eq!((images(&other), images(&worker)), (1, 0));
    let common = |a: &Worker, b: &Worker| {
        let of_b = b.files();
        let is_socket = |file: &PathBuf| file.to_string_lossy().starts_with("socket:");
        let files = a.files().into_iter();
        let common = files.filter(|file| is_socket(file) && of_b.contains(file));
        common.count()
    };
    let lender = Worker::new(lender.child.id() as i32);
    let has = |process: &Worker| process.files().iter().any(|file| file == inherited.path());
    assert_eq!(
        (has(&lender), has(&worker), has(&other)),
        (true, false, false)
    );
    // The connection, which the lender closes when the lease has ended.
    assert_eq!(common(&worker, &lender), 1);
    assert_eq!(common(&worker, &other), 0);
}

#[test]
fn the_end_of_a_worker_costs_its_own_lease_only() {
    let mut lender = Lender::start();
    let (mut victim, mut registers) = borrow(&lender, "dma0", "web1");
    let (mut other, mut others) = borrow(&lender, "dma1", "web2");
    let worker = lender.worker("dma0");
    // Ignored: the service manager sends it to all processes of the lender.
    worker.kill(Signal::TERM);
    victim.status(&"dma0".parse().unwrap()).expect("an answer");
    worker.kill(Signal::KILL);
    assert_closed(&mut registers);
    assert!(victim.status(&"dma0".parse().unwrap()).is_err());
    let line = lender.wait_for_line("its worker process");
    assert!(line.contains("was ended by signal 9"), "{line}");
    let line = lender.wait_for_line("revoked");
    assert!(line.contains("VM web1"), "{line}");
    until(|| lender.holder("dma0").is_none());
    other.reset().expect("the other lease is as it was");
    assert_eq!(lender.holder("dma1").as_deref(), Some("web2"));
    let _again = borrow(&lender, "dma0", "web3");
    assert_eq!(lender.holder("dma0").as_deref(), Some("web3"));
    drop(other);
    assert_closed(&mut others);
    until(|| lender.holder("dma1").is_none());
}

/// The device's thread makes them, which has its guest's accesses to serve.
#[test]
fn a_flood_of_requests_for_a_status_costs_a_worker_a_report_in_10_ms() {
    let lender = Lender::start();
    let (mut client, _registers) = borrow(&lender, "dma0", "web1");
    client.reset().expect("an answer");
    let (mut other, device) = (lender.client(Some("web2")), "dma0".parse().expect("an id"));
    let begin = Instant::now();
    for _ in 0..=50 {
        other.status(&device).expect("a status");
    }
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(500), "{took:?}");
    client.reset().expect("the lease is as it was");
}

#[test]
fn workers_of_one_vm_share_lut_entries_until_the_last_is_gone() {
    let lender = Lender::start();
    let lut_entries = || {
        let limits = lender.client(None).limits_in_use().expect("an operator");
        let mut limits = limits.into_iter();
        let found = limits.find(|limit| limit.resource == Resource::LutEntries);
        found.expect("an adapter").used
    };
    // Two entries, at the same peer address for all.
    let open = |device, vm| {
        let (mut client, registers) = borrow(&lender, device, vm);
        let taken = client.open_window(Iova::new(0), PeerAddress::new(1 << 40), 256 << 20);
        assert_eq!(taken.expect("room"), 2);
        (client, registers)
    };
    let _first = open("dma0", "web1");
    let (mut second, _registers) = open("dma1", "web1");
    assert_eq!(lut_entries(), 2);
    let _other = open("disk0", "web2");
    assert_eq!(lut_entries(), 4);
    lender.worker("dma0").kill(Signal::KILL);
    until(|| lender.holder("dma0").is_none());
    assert_eq!(lut_entries(), 4);
    second.close_window(Iova::new(0)).expect("it is open");
    // The worker has told the lender, and waits for no answer.
    until(|| lut_entries() == 2);
}

#[test]
fn a_returned_device_has_no_process() {
    let mut lender = Lender::start();
    for device in ["dma0", "disk0", "dma0", "disk0"] {
        let (mut client, _registers) = borrow(&lender, device, "web1");
        let worker = lender.worker(device);
        client.return_device().expect("an answer");
        assert_eq!(lender.holder(device), None);
        worker.wait();
    }
    kill_process(Pid::from_child(&lender.child), Signal::TERM).expect("a process");
    let mut log = String::new();
    lender.log.read_to_string(&mut log).expect("UTF-8");
    assert!(log.contains("stopping at SIGTERM"), "{log}");
    // It ended by itself.
    assert!(!log.contains("its worker process"), "{log}");
}

#[test]
fn a_status_that_is_asked_for_as_a_lease_ends_is_answered() {
    let lender = Lender::start();
    let id = "dma0".parse().expect("an id");
    for _ in 0..50 {
        let lease = borrow(&lender, "dma0", "web1");
        let mut tool = lender.client(None);
        drop(lease);
        while tool
            .status(&id)
            .expect("an answer")
            .entry
            .borrowed_by
            .is_some()
        {}
    }
}

#[test]
fn workers_end_with_their_lender() {
    let mut lender = Lender::start();
    let (_client, mut registers) = borrow(&lender, "dma0", "web1");
    let worker = lender.worker("dma0");
    let pid = Pid::from_child(&lender.child);
    let began = Instant::now();
    kill_process(pid, Signal::TERM).expect("a process");
    assert_closed(&mut registers);
    worker.wait();
    lender.child.wait().expect("a child");
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn a_worker_that_hangs_is_killed() {
    let mut lender = Lender::start();
    let (_client, mut registers) = borrow(&lender, "dma0", "web1");
    let (mut other, _others) = borrow(&lender, "dma1", "web2");
    let worker = lender.worker("dma0");
    worker.kill(Signal::STOP);
    // It holds up nobody else.
    let id = "dma0".parse().expect("an id");
    assert!(lender.client(None).status(&id).is_err());
    other.reset().expect("an answer");
    let began = Instant::now();
    kill_process(Pid::from_child(&lender.child), Signal::TERM).expect("a process");
    assert_closed(&mut registers);
    worker.wait();
    lender.child.wait().expect("a child");
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn a_device_is_handed_over_by_its_worker() {
    let lender = Lender::start();
    let (client, mut registers) = borrow(&lender, "disk0", "web1");
    let worker = lender.worker("disk0");
    let (id, vm) = (
        "disk0".parse().expect("an id"),
        "web1".parse().expect("a name"),
    );
    let secret = Secret::random().expect("random bits");
    let mut tool = lender.client(None);
    let fence = tool.hand_over(&id, &vm, "migration-1", None, secret);
    assert!(fence.expect("a fence") > client.generation());
    assert_closed(&mut registers);
    worker.wait();
    until(|| lender.holder("disk0").is_none());
}

/// Polls until `done`, whose request to a server keeps this from busy-waiting.
fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}");
    }
}
