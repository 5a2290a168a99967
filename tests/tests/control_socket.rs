//! A backend's control socket and QEMU's monitor, with misbehaving peers at either end. No
//! guest is booted.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    net::Shutdown,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use farside_tests::{Cluster, Daemon, MIB, SHORT, Status};
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
    process::{Pid, Signal, kill_process},
};
use serde_json::{Value, json};

/// As in `backend/src/admin.rs`.
const MAX_PEERS: usize = 8;

struct Stage {
    cluster: Cluster,
    _lender: Daemon,
    backend: Daemon,
}

impl Stage {
    /// A lender of `disk0` and `dma0`, and a backend of VM `a` that serves `disk0`.
    fn new() -> Self {
        let cluster = Cluster::new().unwrap();
        let (lender, _) = cluster.lend_disk(64 * MIB).unwrap();
        let backend = cluster.serve("a", &["disk0"]).start().unwrap();
        Self {
            cluster,
            _lender: lender,
            backend,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.cluster.directory().join("vm/a").join(name)
    }

    fn connect(&self) -> BufReader<UnixStream> {
        let socket = UnixStream::connect(self.path("control")).unwrap();
        socket.set_read_timeout(Some(SHORT)).unwrap();
        BufReader::new(socket)
    }

    /// Checks that the backend answers, and serves these devices.
    #[track_caller]
    fn serves(&mut self, devices: &[&str]) {
        let answer = ask(&mut self.connect(), &request(json!("status")));
        let served = answer["status"]["devices"].as_array().unwrap();
        let served: Vec<_> = served.iter().map(|device| &device["device"]).collect();
        assert_eq!(served, devices);
        assert!(self.backend.is_running().unwrap());
    }
}

fn request(command: Value) -> String {
    json!({ "version": 1, "command": command }).to_string()
}

#[track_caller]
fn ask(socket: &mut BufReader<UnixStream>, line: &str) -> Value {
    socket
        .get_mut()
        .write_all(format!("{line}\n").as_bytes())
        .unwrap();
    answer(socket)
}

#[track_caller]
fn answer(socket: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    socket.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

fn mode(path: &Path) -> u32 {
    let meta = std::fs::symlink_metadata(path).unwrap();
    meta.permissions().mode() & 0o777
}

#[test]
fn only_its_user_may_connect() {
    let stage = Stage::new();
    assert_eq!(mode(&stage.path("control")), 0o600);
    assert_eq!(mode(&stage.path("status")), 0o600);
    assert_eq!(mode(&stage.path("disk0.sock")), 0o600);
    assert_eq!(mode(&stage.path("")), 0o700);
}

#[test]
fn garbage_is_refused_and_hurts_nobody() {
    let mut stage = Stage::new();
    let mut socket = stage.connect();
    let deep = "[".repeat(4000);
    for line in [
        "",
        "hello",
        "{}",
        "null",
        "\u{0}\u{1}",
        &deep,
        r#"{"version":1,"command":"attach"}"#,
        r#"{"version":1,"command":{"attach":{}}}"#,
        r#"{"version":1,"command":{"attach":{"device":7}}}"#,
        r#"{"version":1,"command":{"detach":{"device":"disk0","force":"yes"}}}"#,
        r#"{"version":1,"command":{"erase":{"device":"disk0"}}}"#,
        r#"{"version":1,"command":"status","more":1}"#,
        r#"{"version":-1,"command":"status"}"#,
        r#"{"version":2,"command":"status"}"#,
    ] {
        let refused = ask(&mut socket, line);
        assert_eq!(refused["refused"]["kind"], "malformed", "{line}: {refused}");
    }
    socket.get_mut().write_all(b"\xff\xfe\n").unwrap();
    assert_eq!(answer(&mut socket)["refused"]["kind"], "malformed");

    // Names that are paths.
    for device in [
        "../../etc/passwd",
        "",
        ".",
        "a/b",
        "x\u{0}y",
        &"a".repeat(300),
    ] {
        let attach = json!({ "attach": { "device": device } });
        let refused = ask(&mut socket, &request(attach));
        let message = refused["refused"]["message"].as_str().unwrap();
        assert!(message.contains("device id"), "{device:?}: {message}");
    }
    let unknown = json!({ "detach": { "device": "disk7", "force": true } });
    let refused = ask(&mut socket, &request(unknown));
    assert_eq!(refused["refused"]["kind"], "unknown-device", "{refused}");

    // An endless request is answered once, and the connection closed.
    let mut endless = stage.connect();
    let _ = endless.get_mut().write_all(&[b'x'; 4096]);
    assert_eq!(answer(&mut endless)["refused"]["kind"], "malformed");
    assert_eq!(endless.read(&mut [0]).unwrap_or(0), 0);
    // Half a request, then a disconnect.
    let half = stage.connect();
    half.get_ref().write_all(b"{\"version\":1,").unwrap();
    half.get_ref().shutdown(Shutdown::Both).unwrap();
    stage.serves(&["disk0"]);
}

#[test]
fn requests_in_one_piece_are_answered_in_order_and_one_by_one() {
    let mut stage = Stage::new();
    let mut socket = stage.connect();
    let attach = request(json!({ "attach": { "device": "dma0" } }));
    let detach = request(json!({ "detach": { "device": "dma0" } }));
    let lines = format!("{attach}\n{attach}\n{detach}\n{detach}\n");
    socket.get_mut().write_all(lines.as_bytes()).unwrap();
    // Replies arrive although the sending half is shut.
    socket.get_ref().shutdown(Shutdown::Write).unwrap();
    assert_eq!(answer(&mut socket)["attached"]["already"], false);
    assert_eq!(answer(&mut socket)["attached"]["already"], true);
    assert_eq!(answer(&mut socket), "detached");
    let refused = answer(&mut socket);
    assert_eq!(refused["refused"]["kind"], "unknown-device", "{refused}");
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    stage.serves(&["disk0"]);
}

#[test]
fn many_clients_keep_nobody_out() {
    let mut stage = Stage::new();
    // Peers that send nothing, and peers that do not read.
    let _silent: Vec<_> = (0..MAX_PEERS).map(|_| stage.connect()).collect();
    stage.serves(&["disk0"]);
    let _deaf: Vec<_> = (0..3 * MAX_PEERS)
        .map(|_| {
            let mut socket = stage.connect();
            let line = format!("{}\n", request(json!("status")));
            let _ = socket.get_mut().write_all(line.repeat(40).as_bytes());
            socket
        })
        .collect();
    stage.serves(&["disk0"]);

    // Peers that send a request and disconnect.
    for n in 0..50 {
        let socket = stage.connect();
        let attach = json!({ "attach": { "device": format!("none{n}") } });
        let line = format!("{}\n", request(attach));
        socket.get_ref().write_all(line.as_bytes()).unwrap();
    }
    stage.serves(&["disk0"]);

    // Many concurrent equal requests: one device, one socket.
    let attach = request(json!({ "attach": { "device": "dma0" } }));
    let answers: Vec<Value> = thread::scope(|scope| {
        let ask = || ask(&mut stage.connect(), &attach);
        let asked: Vec<_> = (0..MAX_PEERS).map(|_| scope.spawn(ask)).collect();
        asked.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let attached = answers
        .iter()
        .filter(|answer| answer["attached"].is_object());
    assert!(attached.count() >= 1, "{answers:?}");
    let first = |answer: &&Value| answer["attached"]["already"] == false;
    assert_eq!(answers.iter().filter(first).count(), 1, "{answers:?}");
    stage.serves(&["disk0", "dma0"]);
    let status = stage.cluster.status().unwrap();
    for device in ["disk0", "dma0"] {
        assert_eq!(status.lent(device).unwrap().borrowed_by, None);
    }
}

/// A process that answers each connection to `<vm directory>/name` with `text`.
fn pretend(cluster: &Cluster, vm: &str, name: &str, text: &'static [u8]) {
    let directory = cluster.directory().join("vm").join(vm);
    std::fs::create_dir_all(&directory).unwrap();
    let listener = UnixListener::bind(directory.join(name)).unwrap();
    thread::spawn(move || {
        let mut met = Vec::new();
        while let Ok((mut socket, _)) = listener.accept() {
            let _ = socket.write_all(text);
            met.push(socket);
        }
    });
}

#[test]
fn who_is_not_qemu_or_not_the_backend_is_told_so() {
    let cluster = Cluster::new().unwrap();
    pretend(&cluster, "noise", "qmp", b"\x80garbage\r\n\r\n");
    pretend(&cluster, "other", "qmp", b"{\"hello\":1}\n");
    pretend(
        &cluster,
        "odd",
        "qmp",
        b"{\"QMP\":{}}\n{\"return\":[],\"id\":0}\nno\n",
    );
    for (vm, words) in [
        (
            "noise",
            "lost the monitor of VM noise: it sent invalid JSON",
        ),
        (
            "other",
            "lost the monitor of VM other: this is no QEMU's monitor",
        ),
        ("odd", "lost the monitor of VM odd: it sent invalid JSON"),
    ] {
        for verb in ["attach", "detach"] {
            let ended = cluster.run(&[verb, vm, "disk0"]).unwrap();
            assert!(!ended.status.success());
            assert!(ended.stderr.contains(words), "{ended:?}");
            assert!(!ended.stderr.contains("panicked"), "{ended:?}");
        }
    }
    pretend(&cluster, "fake", "control", b"{\"attached\":{}}\n");
    cluster
        .describe("fake", "devices = [\"disk0\"]\nmemory = \"512M\"\n")
        .unwrap();
    let ended = cluster.run(&["stop", "fake"]).unwrap();
    assert!(!ended.status.success());
    let words = "lost the backend of VM fake at";
    assert!(ended.stderr.contains(words), "{ended:?}");
}

/// A VMM that farside did not start: connects to a device and resets it, which borrows it.
/// Disconnects on drop.
struct Vmm(UnixStream);

impl Vmm {
    fn borrow(stage: &Stage) -> Self {
        const VERSION: u16 = 1;
        const RESET: u16 = 13;
        let vmm = Self(UnixStream::connect(stage.path("disk0.sock")).unwrap());
        vmm.0.set_read_timeout(Some(SHORT)).unwrap();
        vmm.call(VERSION, b"\0\0\x01\0{}\0");
        vmm.call(RESET, b"");
        assert!(stage.is_borrowed());
        vmm
    }

    fn call(&self, command: u16, payload: &[u8]) {
        const HEADER: usize = 16;
        let mut message = vec![0; HEADER];
        message[2..4].copy_from_slice(&command.to_le_bytes());
        let len = (HEADER + payload.len()) as u32;
        message[4..8].copy_from_slice(&len.to_le_bytes());
        message.extend(payload);
        (&self.0).write_all(&message).unwrap();
        let mut header = [0; HEADER];
        (&self.0).read_exact(&mut header).unwrap();
        let error = u32::from_le_bytes(header[12..16].try_into().unwrap());
        assert_eq!(error, 0, "command {command}");
        let len = u32::from_le_bytes(header[4..8].try_into().unwrap());
        let mut rest = vec![0; len as usize - HEADER];
        (&self.0).read_exact(&mut rest).unwrap();
    }
}

impl Stage {
    fn is_borrowed(&self) -> bool {
        let status = self.cluster.status().unwrap();
        status.lent("disk0").unwrap().borrowed_by.is_some()
    }

    /// Writes a configuration for `farside stop a`.
    fn describe(&self) {
        let text = "devices = [\"disk0\"]\nmemory = \"512M\"\n";
        self.cluster.describe("a", text).unwrap();
    }
}

const WAITS: &str = "not stopping yet: VM a is connected to disk0";

#[test]
fn a_signal_does_not_take_a_device_from_a_vmm_that_uses_it() {
    let mut stage = Stage::new();
    let vmm = Vmm::borrow(&stage);
    stage.backend.terminate().unwrap();
    stage.backend.wait_log(WAITS, SHORT).unwrap();
    stage.serves(&["disk0"]);
    assert!(stage.is_borrowed());
    // The backend exits after the VMM.
    drop(vmm);
    assert!(stage.backend.wait_exit(SHORT).unwrap().success());
    assert!(!stage.is_borrowed());
}

/// A terminal that closes sends SIGHUP twice: from the kernel and from the shell.
#[test]
fn a_second_sighup_does_not_take_it() {
    let mut stage = Stage::new();
    let vmm = Vmm::borrow(&stage);
    let pid = Pid::from_raw(stage.backend.pid().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    stage.backend.wait_log(WAITS, SHORT).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    stage.backend.wait_log("SIGHUP ignored", SHORT).unwrap();
    stage.serves(&["disk0"]);
    assert!(stage.is_borrowed());
    drop(vmm);
    assert!(stage.backend.wait_exit(SHORT).unwrap().success());
}

#[test]
fn a_second_signal_takes_it() {
    let mut stage = Stage::new();
    let _vmm = Vmm::borrow(&stage);
    stage.backend.terminate().unwrap();
    stage.backend.wait_log(WAITS, SHORT).unwrap();
    stage.backend.terminate().unwrap();
    assert!(stage.backend.wait_exit(SHORT).unwrap().success());
    assert!(!stage.is_borrowed());
}

#[test]
fn a_backend_that_no_vmm_uses_ends_at_the_first_signal() {
    let mut stage = Stage::new();
    drop(Vmm::borrow(&stage));
    stage.backend.terminate().unwrap();
    assert!(stage.backend.wait_exit(SHORT).unwrap().success());
    assert!(!stage.backend.log().contains("not stopping yet"));
}

#[test]
fn stop_waits_for_another_command_on_the_vm() {
    let mut stage = Stage::new();
    stage.describe();
    let state = stage.cluster.directory().join("state/vm/a");
    std::fs::create_dir_all(&state).unwrap();
    let other = File::create(state.join("command.lock")).unwrap();
    other.lock().unwrap();
    let mut stop = stage.cluster.start("farside stop", &["stop", "a"]).unwrap();
    // A line of a process that waits for a lock: `1: -> FLOCK  ADVISORY  WRITE 42 …`.
    let waiter = stop.pid().to_string();
    let waits = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        words.next() == Some("->") && words.nth(3) == Some(&waiter)
    };
    let look = |_: &Status| {
        let locks = std::fs::read_to_string("/proc/locks")?;
        Ok(locks.lines().any(waits).then_some(()))
    };
    stage
        .cluster
        .wait_status("stop waits", SHORT, look)
        .unwrap();
    drop(other);
    let ended = stop.wait_exit(SHORT).unwrap();
    assert!(ended.success(), "{}", stop.log());
    assert!(stage.backend.wait_exit(SHORT).unwrap().success());
}

#[test]
fn stop_takes_a_device_from_a_vmm_that_is_not_ours_by_force_only() {
    let mut stage = Stage::new();
    stage.describe();
    let _vmm = Vmm::borrow(&stage);
    let ended = stage.cluster.run(&["stop", "a"]).unwrap();
    assert!(!ended.status.success());
    for words in ["uses disk0", "--force"] {
        assert!(ended.stderr.contains(words), "{ended:?}");
    }
    assert!(!stage.backend.log().contains("not stopping yet"));
    stage.serves(&["disk0"]);

    let ended = stage.cluster.run(&["stop", "a", "--force"]).unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert!(stage.backend.wait_exit(SHORT).unwrap().success());
    assert!(!stage.is_borrowed());
}

#[test]
fn stop_by_force_kills_a_backend_that_hangs() {
    let mut stage = Stage::new();
    stage.describe();
    let vmm = Vmm::borrow(&stage);
    stage.backend.stop().unwrap();
    drop(vmm);
    let began = Instant::now();
    let ended = stage.cluster.run(&["stop", "a", "--limit", "0"]).unwrap();
    assert!(!ended.status.success());
    for words in ["does not answer at", "within 10s", "--force"] {
        assert!(ended.stderr.contains(words), "{ended:?}");
    }
    let ended = stage.cluster.run(&["status"]).unwrap();
    assert!(!ended.status.success());
    assert!(
        ended.stderr.contains("VM a: the backend does not answer"),
        "{ended:?}"
    );
    assert!(!ended.stderr.contains("os error"), "{ended:?}");
    assert!(!ended.stdout.contains("no backend runs"), "{ended:?}");
    let ended = stage.cluster.run(&["stop", "a", "--limit", "0", "--force"]);
    let ended = ended.unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert!(began.elapsed() < SHORT, "{:?}", began.elapsed());
    assert!(stage.backend.wait_exit(SHORT).unwrap().signal() == Some(9));
    stage.cluster.wait_free("disk0").unwrap();
}

impl Stage {
    /// Connects to a socket of a stopped backend until its backlog is full.
    fn fill_backlog(&self, name: &str) {
        let address = SocketAddrUnix::new(self.path(name)).unwrap();
        loop {
            // A closed connection remains in the backlog.
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let socket = socket_with(family, kind, SocketFlags::NONBLOCK, None).unwrap();
            match connect(&socket, &address) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return,
                Err(errno) => panic!("{name}: {errno}"),
            }
        }
    }
}

#[test]
fn a_backend_that_hangs_is_found_and_killed_when_its_backlogs_are_full() {
    let mut stage = Stage::new();
    stage.describe();
    stage.backend.stop().unwrap();
    stage.fill_backlog("status");
    stage.fill_backlog("control");
    let began = Instant::now();
    for args in [&["status"][..], &["status", "--vm", "a"]] {
        let ended = stage.cluster.run(args).unwrap();
        assert!(!ended.status.success());
        assert!(ended.stderr.contains("does not answer at"), "{ended:?}");
        assert!(!ended.stderr.contains("os error"), "{ended:?}");
    }
    // The configuration names the devices; only a check needs the backend.
    let ended = stage.cluster.run(&["qemu", "--vm", "a"]).unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let ended = stage.cluster.run(&["stop", "a", "--limit", "0"]).unwrap();
    assert!(!ended.status.success());
    let process = format!("(process {}) does not answer at", stage.backend.pid());
    for words in [&process, "within 10s", "--force"] {
        assert!(ended.stderr.contains(words), "{ended:?}");
    }
    let ended = stage.cluster.run(&["stop", "a", "--limit", "0", "--force"]);
    let ended = ended.unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert!(began.elapsed() < 2 * SHORT, "{:?}", began.elapsed());
    assert!(stage.backend.wait_exit(SHORT).unwrap().signal() == Some(9));
}
