//! Leases of a former lender of another version.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use farside_daemon::{OwnedListener, SocketKind};
use farside_lender_protocol::{Channel, ChannelError};

use super::{DEADLINE, DEVICES, Host, Lender, open_window, register};

/// An upgrade replaces the binary. Until the lender is restarted, its processes are what it is.
#[test]
fn a_lender_that_runs_starts_its_own_version_after_an_upgrade() {
    let host = Host::new();
    let program = host.path("farside");
    fs::copy(env!("CARGO_BIN_EXE_farside"), &program).expect("a copy");
    let lender = Lender::start(host.command_of(&program, DEVICES));
    fs::write(host.path("other"), "not a program").expect("a file");
    fs::rename(host.path("other"), &program).expect("a name");
    // A worker and what keeps its lease.
    let (mut client, mut lease) = host.borrow("dma0", "web1");
    let worker = lender.kill("dma0");
    // The version that is installed now is another.
    let _lender = host.lend();
    worker.assert_lives();
    assert_eq!(host.holder("dma0").as_deref(), Some("web1"));
    register(&mut lease);
    client.reset().expect("an answer of the worker");
}

/// The log of a lender that `greet` greets as what keeps the former lender's leases does.
fn refused_keeper(host: &Host, greet: impl FnOnce(&mut Channel) + Send) -> String {
    host.make_keeper(0o700);
    let keeper = OwnedListener::bind(&host.keeper().join("socket"), SocketKind::SeqPacket, 4)
        .expect("a path");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let deadline = Instant::now() + DEADLINE;
            let socket = loop {
                match keeper.accept().expect("a listener") {
                    Some(socket) => break socket,
                    None => assert!(Instant::now() < deadline, "nobody connects"),
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            let mut lender = Channel::from_socket(socket);
            greet(&mut lender);
            // It is asked for nothing: above all not to end the leases.
            match lender.receive::<u32>(DEADLINE) {
                Err(ChannelError::Closed) => {}
                other => panic!("{other:?}"),
            }
        });
        let output = host.command(DEVICES).output().expect("the program starts");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    })
}

#[test]
fn a_keeper_of_a_later_version_is_left_as_it_is() {
    let said = refused_keeper(&Host::new(), |lender| {
        let hello = (999u32, false, "9.1.0");
        lender.send(&hello, &[], DEADLINE).expect("a lender");
    });
    for part in [
        "the leases of the former lender go on without one",
        "has version 999 (of farside 9.1.0)",
        "reads versions 1 and 2",
        "install farside 9.1.0",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    // One of before, which says less.
    let said = refused_keeper(&Host::new(), |lender| {
        lender
            .send(&(0u32, false), &[], DEADLINE)
            .expect("a lender");
    });
    assert!(said.contains("install the earlier farside"), "{said}");
}

/// The leases of a host without a lender, in the hands of a test.
struct Taken {
    channel: Channel,
    leases: Vec<(u64, Vec<u8>)>,
}

impl Taken {
    fn take(host: &Host) -> Self {
        let address = host.keeper().join("socket").into();
        let connected = Channel::connect(&address, &host.path("pki"), DEADLINE);
        let mut channel = connected.expect("a keeper").appendable();
        let ((version, busy, farside), _) = channel
            .receive::<(u32, bool, String)>(DEADLINE)
            .expect("a greeting");
        assert_eq!((version, busy), (2, false));
        assert_eq!(farside, env!("CARGO_PKG_VERSION"));
        channel.send(&1u32, &[], DEADLINE).expect("a keeper");
        let mut leases = Vec::new();
        loop {
            let received = channel.receive::<(u32, u64, Vec<u8>)>(DEADLINE);
            match received.expect("a message").0 {
                (0, id, lease) => leases.push((id, lease)),
                _ => return Self { channel, leases },
            }
        }
    }

    /// Has the keeper keep the leases as `change` has them.
    fn put(mut self, change: impl Fn(String) -> String) {
        for (id, lease) in self.leases {
            let lease = change(String::from_utf8(lease).expect("JSON"));
            let update = (4u32, id, lease.into_bytes());
            self.channel.send(&update, &[], DEADLINE).expect("a keeper");
        }
    }
}

fn check(host: &Host, args: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_farside"))
        .args(["upgrade", "--check", "--socket"])
        .arg(host.path("lender.sock"))
        .args(args)
        .env("FARSIDE_RUNTIME_DIR", host.path("run"))
        .output()
        .expect("the program starts");
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    (output.status.success(), said)
}

#[test]
fn leases_of_a_later_version_go_on_and_wait_for_a_lender_that_reads_them() {
    let host = Host::new();
    let (goes_on, said) = check(&host, &[]);
    assert!(
        goes_on && said.contains("goes on, without leases"),
        "{said}"
    );
    let lender = host.lend();
    let (mut tester, mut lease) = host.borrow("dma0", "web1");
    let (_disk, mut disk_lease) = host.borrow_and_keep("web1");
    // While the lender lives, too.
    let (goes_on, said) = check(&host, &[]);
    assert!(goes_on, "{said}");
    for device in ["dma0", "disk0"] {
        let part = format!("device {device} of VM web1: goes on");
        assert!(said.contains(&part), "{said}");
    }
    let worker = lender.kill("dma0");
    let later = |lease: String| {
        let version = format!("\"farside\":\"{}\"", env!("CARGO_PKG_VERSION"));
        let lease = lease.replace("{\"version\":2,", "{\"version\":3,");
        lease.replace(&version, "\"farside\":\"9.1.0\"")
    };
    Taken::take(&host).put(later);
    let (goes_on, said) = check(&host, &[]);
    assert!(!goes_on);
    for part in [
        "would lose device dma0 of VM web1: its lease has version 3 (of farside 9.1.0)",
        "reads versions 1 and 2; remedy: install farside 9.1.0, or stop the VM",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    let (goes_on, said) = check(&host, &["--json"]);
    assert!(!goes_on);
    let json: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(json["goes_on"], false);
    assert_eq!(json["lenders"][0]["leases"][0]["version"], 3);
    // The lender of this version does not start, and leaves them as they are.
    let refused = host.command(DEVICES).output().expect("the program starts");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    assert!(
        said.contains("(VM web1): its lease has version 3"),
        "{said}"
    );
    assert!(said.contains("go on without one"), "{said}");
    worker.assert_lives();
    register(&mut lease);
    register(&mut disk_lease);
    tester.reset().expect("an answer of the worker");
    // One that reads them goes on.
    let now = |lease: String| lease.replace("{\"version\":3,", "{\"version\":2,");
    Taken::take(&host).put(now);
    let _lender = host.lend();
    assert_eq!(host.holder("dma0").as_deref(), Some("web1"));
    assert_eq!(host.holder("disk0").as_deref(), Some("web1"));
    register(&mut lease);
}

#[test]
fn leases_of_the_version_before_go_on() {
    let host = Host::new();
    let lender = host.lend();
    let (mut tester, mut lease) = host.borrow("dma0", "web1");
    let (_disk, mut disk_lease) = host.borrow_and_keep("web1");
    let entries = open_window(&mut tester, 0);
    let worker = lender.kill("dma0");
    // Version 1 has the lease alone, without the versions of the worker.
    let before = |lease: String| {
        let json: serde_json::Value = serde_json::from_str(&lease).expect("JSON");
        let mut lease = json["lease"].clone();
        let keys = lease.as_object_mut().expect("an object");
        assert_eq!(keys.remove("worker"), Some(2.into()));
        assert!(keys.remove("state").is_some());
        lease.to_string()
    };
    Taken::take(&host).put(before);
    let (goes_on, said) = check(&host, &["--json"]);
    assert!(goes_on, "{said}");
    let json: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let leases = json["lenders"][0]["leases"].as_array().expect("leases");
    let versions = |device: &str| {
        let lease = leases.iter().find(|lease| lease["device"] == device);
        let lease = lease.expect("a lease");
        ["version", "worker_version", "state_version"].map(|key| lease[key].as_u64())
    };
    assert_eq!(versions("dma0"), [Some(1), Some(1), None]);
    assert_eq!(versions("disk0"), [Some(1), Some(1), Some(1)]);
    let lender = host.lend();
    lender.wait_log("its lease goes on");
    worker.assert_lives();
    assert_eq!(host.holder("disk0").as_deref(), Some("web1"));
    assert_eq!(host.lut_entries(), entries);
    assert_eq!(open_window(&mut tester, 1), entries);
    register(&mut lease);
    register(&mut disk_lease);
    // What the worker is of stays in the record of this version.
    let (_, said) = check(&host, &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    for lease in json["lenders"][0]["leases"].as_array().expect("leases") {
        assert_eq!(
            (&lease["version"], &lease["worker_version"]),
            (&2.into(), &1.into())
        );
    }
}
