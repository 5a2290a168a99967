//! `farside serve` confines itself, and has a helper process for the rest.

use std::{
    fs,
    io::{BufRead, BufReader, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::AsFd,
        unix::net::{UnixDatagram, UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, Stdio},
    time::{Duration, Instant},
};

use farside_lender_protocol::{Envelope, Instance, Listener, Reply};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg, sockopt::set_socket_passcred,
    },
    process::{Pid, PidfdFlags, Resource, Signal, getrlimit, kill_process, pidfd_open},
    thread::{CapabilitySet, capabilities},
};

const DEADLINE: Duration = Duration::from_secs(20);

/// Maximum resident memory of a process that serves no guest, without what it shares: the program
/// and libraries.
const MAX_OWN_KIB: u32 = 4 << 10;

/// The service manager's socket, in a test's directory.
const NOTIFY: &str = "notify";

/// A process with a log.
struct Process {
    child: Child,
    log: BufReader<ChildStderr>,
}

impl Process {
    fn start(dir: &tempfile::TempDir, args: &[&str], ready: &str) -> Self {
        Self::start_of(env!("CARGO_BIN_EXE_farside").as_ref(), dir, args, ready)
    }

    fn start_of(program: &Path, dir: &tempfile::TempDir, args: &[&str], ready: &str) -> Self {
        let mut process = Self::spawn(program, dir, args);
        process.logs(ready);
        process
    }

    fn spawn(program: &Path, dir: &tempfile::TempDir, args: &[&str]) -> Self {
        let mut command = Command::new(program);
        let notify = dir.path().join(NOTIFY);
        if notify.exists() {
            command.env("NOTIFY_SOCKET", notify);
        }
        let mut child = command
            .args(args)
            .env("FARSIDE_RUNTIME_DIR", dir.path())
            .env("FARSIDE_STATE_DIR", dir.path())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let log = BufReader::new(child.stderr.take().expect("a pipe"));
        Self { child, log }
    }

    /// Waits for a line of its log.
    fn logs(&mut self, words: &str) {
        loop {
            let mut line = String::new();
            let read = self.log.read_line(&mut line).expect("UTF-8");
            assert!(read > 0, "it ended before {words:?}");
            if line.contains(words) {
                return;
            }
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Its only child process.
    fn helper(&self) -> Pid {
        let pid = self.child.id();
        let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
        let children = threads.flatten().map(|thread| {
            fs::read_to_string(thread.path().join("children")).expect("its children")
        });
        let children: String = children.collect();
        let pid = children.trim().parse().expect("one child");
        Pid::from_raw(pid).expect("a process")
    }

    /// Waits for its end; the rest of its log.
    fn end(mut self) -> String {
        let mut log = String::new();
        self.log.read_to_string(&mut log).expect("UTF-8");
        let status = self.child.wait().expect("a child");
        assert!(status.success(), "{status}: {log}");
        log
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // If it has ended, only the wait is needed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends a backend with a keeper, of which each process goes on without the others.
struct WithKeeper(PathBuf);

impl Drop for WithKeeper {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = farside_keeper::end(&self.0);
    }
}

/// A lender of two devices, and a backend of one of them.
fn start() -> (tempfile::TempDir, Process, Process) {
    let dir = tempfile::tempdir().expect("a directory");
    let (lender, backend) = start_in(&dir);
    (dir, lender, backend)
}

fn start_in(dir: &tempfile::TempDir) -> (Process, Process) {
    let devices = ["--dma-test", "dma0", "--dma-test", "dma1"];
    let lender = Process::start(dir, &[&["lend"], &devices[..]].concat(), "listens at");
    let args = ["serve", "--vm", "web1", "--device", "dma0"];
    let backend = Process::start(dir, &args, "served at");
    (lender, backend)
}

/// The answer to a request at the control socket.
fn request(dir: &tempfile::TempDir, command: &str) -> String {
    let control = dir.path().join("vm/web1/control");
    // The backend has logged its device's socket before it creates this one, the last.
    let mut stream = loop {
        if let Ok(stream) = UnixStream::connect(&control) {
            break stream;
        }
    };
    stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    let line = format!("{{\"version\":1,\"command\":{command}}}\n");
    stream.write_all(line.as_bytes()).expect("a backend");
    let mut answer = String::new();
    BufReader::new(stream)
        .read_line(&mut answer)
        .expect("an answer");
    answer
}

/// A field of a thread's status.
fn field<'a>(status: &'a str, field: &str) -> &'a str {
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.expect("the kernel's fields").trim()
}

fn wait(pid: Pid) {
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else {
        return;
    };
    let limit = Timespec::try_from(DEADLINE).expect("seconds");
    let ready = poll(
        &mut [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)],
        Some(&limit),
    );
    assert_eq!(ready, Ok(1), "not within {DEADLINE:?}");
}

#[test]
fn every_thread_of_a_backend_has_no_privileges_and_a_filter() {
    let (dir, _lender, backend) = start();
    // It answers when it runs.
    request(&dir, "\"status\"");
    // With CAP_IPC_LOCK and a limit that it may not raise, it would lock no memory without.
    let held = capabilities(None).expect("its own").effective;
    let is_limited = getrlimit(Resource::Memlock).maximum.is_some();
    let kept = match is_limited && !held.contains(CapabilitySet::SYS_RESOURCE) {
        true => (held & CapabilitySet::IPC_LOCK).bits(),
        false => 0,
    };
    let pid = backend.child.id();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let threads: Vec<String> = threads
        .flatten()
        .map(|thread| fs::read_to_string(thread.path().join("status")).expect("a thread"))
        .collect();
    // The event loop, signals, and the device's.
    assert!(threads.len() >= 3, "{threads:?}");
    for thread in threads {
        assert_eq!(field(&thread, "NoNewPrivs"), "1");
        // SECCOMP_MODE_FILTER: against clone3(2), against most others.
        assert_eq!(field(&thread, "Seccomp"), "2");
        assert_eq!(field(&thread, "Seccomp_filters"), "2");
        for (set, kept) in [
            ("CapInh", 0),
            ("CapPrm", kept),
            ("CapEff", kept),
            ("CapAmb", 0),
        ] {
            assert_eq!(
                u64::from_str_radix(field(&thread, set), 16),
                Ok(kept),
                "{set}"
            );
        }
    }
}

#[test]
fn a_confined_backend_attaches_a_device_and_leaves_nothing() {
    let (dir, _lender, backend) = start();
    let vm: PathBuf = dir.path().join("vm/web1");
    // Of a backend that was killed.
    drop(UnixListener::bind(vm.join("dma1.sock")).expect("a socket"));
    let answer = request(&dir, "{\"attach\":{\"device\":\"dma1\"}}");
    assert!(answer.contains("dma1.sock"), "{answer}");
    let answer = request(&dir, "{\"detach\":{\"device\":\"dma1\",\"force\":false}}");
    assert!(answer.contains("detached"), "{answer}");
    assert!(!vm.join("dma1.sock").exists());
    let answer = request(&dir, "{\"attach\":{\"device\":\"no-such\"}}");
    assert!(answer.contains("no lender has device"), "{answer}");
    let helper = backend.helper();
    kill_process(backend.pid(), Signal::TERM).expect("a process");
    let log = backend.end();
    assert!(log.contains("backend of VM web1 stopped"), "{log}");
    assert!(!log.contains("WARN"), "{log}");
    assert!(!vm.exists());
    wait(helper);
}

#[test]
fn a_helper_that_ends_is_noticed() {
    let (dir, _lender, mut backend) = start();
    // It answers when it runs, until when it needs its helper.
    request(&dir, "\"status\"");
    kill_process(backend.helper(), Signal::KILL).expect("a process");
    backend.logs("its helper process has ended");
    let mut status = String::new();
    let stream = UnixStream::connect(dir.path().join("vm/web1/status"));
    stream
        .and_then(|mut stream| stream.read_to_string(&mut status))
        .expect("a status");
    assert!(status.contains("restart the backend"), "{status}");
    // The rest goes on.
    let answer = request(&dir, "\"status\"");
    assert!(answer.contains("dma0.sock"), "{answer}");
    let answer = request(&dir, "{\"attach\":{\"device\":\"dma1\"}}");
    assert!(
        answer.contains("helper process does not answer"),
        "{answer}"
    );
    kill_process(backend.pid(), Signal::TERM).expect("a process");
    let log = backend.end();
    assert!(!log.contains("its helper process has ended"), "{log}");
}

/// The status of the backend, when it has been started again once.
fn status_after_restart(dir: &tempfile::TempDir) -> serde_json::Value {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let mut status = String::new();
        let stream = UnixStream::connect(dir.path().join("vm/web1/status"));
        let read = stream.and_then(|mut stream| stream.read_to_string(&mut status));
        let json = serde_json::from_str::<serde_json::Value>(&status);
        match (read, json) {
            (Ok(_), Ok(json)) if json["restarts"] == 1 => return json,
            _ => assert!(Instant::now() < deadline, "{status}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// An upgrade replaces the binary. What a crash starts is what has crashed.
#[test]
fn a_backend_that_is_killed_after_an_upgrade_is_started_again_as_it_was() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("farside");
    fs::copy(env!("CARGO_BIN_EXE_farside"), &program).expect("a copy");
    let _lender = Process::start(&dir, &["lend", "--dma-test", "dma0"], "listens at");
    let args = ["serve", "--keeper", "--vm", "web1", "--device", "dma0"];
    let keeper = Process::start_of(&program, &dir, &args, "served at");
    let _backend = WithKeeper(dir.path().join("keepers/web1"));
    let other = dir.path().join("other");
    fs::write(&other, "not a program").expect("a file");
    fs::rename(&other, &program).expect("a name");
    kill_process(keeper.helper(), Signal::KILL).expect("a process");
    let status = status_after_restart(&dir);
    assert_eq!(status["farside"], env!("CARGO_PKG_VERSION"));
    assert_eq!(status["records_version"], 2);
    let answer = request(&dir, "\"status\"");
    assert!(answer.contains("dma0.sock"), "{answer}");
    // It needs its helper, which is the same program, too.
    let answer = request(&dir, "{\"detach\":{\"device\":\"dma0\"}}");
    assert!(answer.contains("detached"), "{answer}");
    let answer = request(&dir, "{\"attach\":{\"device\":\"dma0\"}}");
    assert!(answer.contains("dma0.sock"), "{answer}");
    let check = Command::new(env!("CARGO_BIN_EXE_farside"))
        .args(["upgrade", "--check", "--json"])
        .env("FARSIDE_RUNTIME_DIR", dir.path())
        .env("FARSIDE_CONFIG_DIR", dir.path())
        .output()
        .expect("the program starts");
    assert!(check.status.success(), "{check:?}");
    let check: serde_json::Value = serde_json::from_slice(&check.stdout).expect("JSON");
    assert_eq!(check["goes_on"], true);
    assert_eq!(check["vms"][0]["vm"], "web1");
    assert_eq!(check["vms"][0]["farside"], env!("CARGO_PKG_VERSION"));
    assert_eq!(check["vms"][0]["devices"][0]["device"], "dma0");
    assert!(check["vms"][0]["devices"][0]["obstacle"].is_null());
}

/// Not even while it waits for the helper on behalf of a client: to connect to the lender.
#[test]
fn a_backend_ends_in_time_although_its_helper_is_stopped() {
    let (dir, _lender, mut backend) = start();
    request(&dir, "\"status\"");
    let helper = backend.helper();
    kill_process(helper, Signal::STOP).expect("a process");
    let socket = dir.path().join("vm/web1/dma0.sock");
    let mut client = UnixStream::connect(socket).expect("a backend");
    // VFIO_USER_VERSION, of 0.1 without capabilities.
    let version = [&[1, 0, 1, 0, 23, 0, 0, 0], &[0; 8][..], b"\0\0\x01\0{}\0"].concat();
    client.write_all(&version).expect("a backend");
    let begin = Instant::now();
    while !request(&dir, "\"status\"").contains("\"in_use\":true") {
        assert!(begin.elapsed() < DEADLINE, "the client is not seen");
    }
    kill_process(backend.pid(), Signal::TERM).expect("a process");
    backend.logs("not stopping yet");
    let begin = Instant::now();
    kill_process(backend.pid(), Signal::TERM).expect("a process");
    wait(backend.pid());
    let took = begin.elapsed();
    // It has the log open, too.
    kill_process(helper, Signal::CONT).expect("a process");
    let log = backend.end();
    assert!(took < Duration::from_secs(5), "{took:?}: {log}");
    assert!(log.contains("vm/web1 is left"), "{log}");
    wait(helper);
}

/// What a backend that starts waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silent {
    /// Its helper, which waits for a lender to answer Hello.
    Lender,
    /// Its helper, which is stopped.
    Helper,
    /// A lender that has answered Hello.
    LenderAfterHello,
}

#[test]
fn a_backend_that_starts_ends_in_time_whatever_it_waits_for() {
    for silent in [Silent::Lender, Silent::Helper, Silent::LenderAfterHello] {
        let dir = tempfile::tempdir().expect("a directory");
        let address = dir.path().join("silent.sock");
        let lender = Listener::bind(&address).expect("a socket");
        let args = ["serve", "--vm", "web1", "--device", "dma0", "--lender"];
        let args = [&args[..], &[address.to_str().expect("UTF-8")]].concat();
        let mut backend = Process::spawn(env!("CARGO_BIN_EXE_farside").as_ref(), &dir, &args);
        let begin = Instant::now();
        let mut peer = loop {
            if let Some(peer) = lender.accept().expect("a socket") {
                break peer;
            }
            assert!(begin.elapsed() < DEADLINE, "the helper does not connect");
            std::thread::yield_now();
        };
        let helper = backend.helper();
        if silent == Silent::Helper {
            kill_process(helper, Signal::STOP).expect("a process");
        }
        if silent == Silent::LenderAfterHello {
            peer.receive::<Envelope>(DEADLINE).expect("Hello");
            let welcome = Reply::Welcome {
                lender: "silent".into(),
                instance: Instance::random().expect("random bytes"),
            };
            peer.send(&welcome, &[], DEADLINE).expect("a peer");
            peer.receive::<Envelope>(DEADLINE)
                .expect("the backend's request");
        }
        let begin = Instant::now();
        kill_process(backend.pid(), Signal::TERM).expect("a process");
        wait(backend.pid());
        let took = begin.elapsed();
        if silent == Silent::Helper {
            // It has the log open, too.
            kill_process(helper, Signal::CONT).expect("a process");
        }
        backend.logs("SIGTERM received");
        let log = backend.end();
        let (limit, words) = match silent {
            Silent::Lender | Silent::Helper => (3, "stopped before it served"),
            Silent::LenderAfterHello => (5, "has not ended within 3s: exiting"),
        };
        assert!(
            took < Duration::from_secs(limit),
            "{silent:?}: {took:?}: {log}"
        );
        assert!(log.contains(words), "{silent:?}: {log}");
        wait(helper);
    }
}

#[test]
fn lender_backend_and_helper_are_small() {
    let (dir, lender, backend) = start();
    request(&dir, "\"status\"");
    for (process, pid) in [
        ("lender", lender.pid()),
        ("backend", backend.pid()),
        ("helper", backend.helper()),
    ] {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
        let own = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = own.and_then(|own| own.trim().strip_suffix(" kB"));
        let kib: u32 = kib.expect("a size").parse().expect("KiB");
        assert!(kib <= MAX_OWN_KIB, "{process}: {kib} KiB");
    }
}

/// The next message for the service manager, and its sender.
fn notice(socket: &UnixDatagram) -> (Option<Pid>, String) {
    let mut text = [0; 1024];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut text)];
    let received = recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::empty());
    let bytes = received.expect("a message").bytes;
    let sender = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmCredentials(sender) => Some(sender.pid),
        _ => None,
    });
    (sender, String::from_utf8_lossy(&text[..bytes]).into_owned())
}

/// The inodes of all datagram sockets of this network namespace.
fn datagram_sockets() -> Vec<String> {
    let sockets = fs::read_to_string("/proc/net/unix").expect("a list");
    let fields = sockets.lines().map(|line| line.split_whitespace());
    let inode = |mut fields: std::str::SplitWhitespace<'_>| {
        let is_datagram = fields.nth(4) == Some("0002");
        fields.nth(1).filter(|_| is_datagram).map(str::to_owned)
    };
    fields.filter_map(inode).collect()
}

/// By a datagram socket it could reach the journal's, and those of others.
#[test]
fn a_confined_backend_has_no_datagram_socket() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = UnixDatagram::bind(dir.path().join(NOTIFY)).expect("a socket");
    set_socket_passcred(&socket, true).expect("an option");
    socket.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    let (_lender, backend) = start_in(&dir);
    let pid = backend.pid();
    loop {
        let (sender, text) = notice(&socket);
        if sender == Some(pid) {
            assert_eq!(text, "READY=1\nSTATUS=serving dma0 to VM web1\n");
            break;
        }
        // Of the lender.
        assert!(text.contains("lend"), "{text}");
    }
    // Now it is confined.
    request(&dir, "\"status\"");
    match fs::read_dir(format!("/proc/{pid}/fd", pid = pid.as_raw_nonzero())) {
        Ok(open) => {
            let datagrams = datagram_sockets();
            assert!(!datagrams.is_empty(), "the test's own");
            let links = open.flatten().flat_map(|fd| fs::read_link(fd.path()));
            for link in links.map(|link| link.to_string_lossy().into_owned()) {
                let inode = link.strip_prefix("socket:[");
                let inode = inode.and_then(|rest| rest.strip_suffix(']'));
                let is_datagram = datagrams.iter().any(|one| Some(&**one) == inode);
                assert!(!is_datagram, "{link}");
            }
        }
        Err(error) => println!("skipped in part: only root sees its descriptors: {error}"),
    }
    kill_process(pid, Signal::TERM).expect("a process");
    backend.end();
    socket.set_nonblocking(true).expect("an option");
    // The filter lets it send nothing more, and its helper has no part in this.
    let rest = socket.recv(&mut [0; 1]).expect_err("a message");
    assert_eq!(rest.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_helper_outlives_a_signal_and_ends_with_its_backend() {
    let (dir, _lender, backend) = start();
    let helper = backend.helper();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        kill_process(helper, signal).expect("a process");
    }
    let answer = request(&dir, "{\"attach\":{\"device\":\"dma1\"}}");
    assert!(answer.contains("dma1.sock"), "{answer}");
    kill_process(backend.pid(), Signal::KILL).expect("a process");
    wait(helper);
}
