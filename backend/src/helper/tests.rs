//! A helper on a thread.

use std::{io::Read, net::TcpListener, os::unix::fs::symlink};

use farside_lender::{
    Lender,
    config::{DeviceConfig, Model},
};
use farside_lender_protocol::{
    Availability, Envelope, ErrorKind, Generation, Instance, Listener, RemoteError, Reply, Request,
    VERSION,
};

use super::*;

/// A helper on a thread, of a VM with these lenders and its sockets in `directory`.
fn helper(directory: &Path, lenders: Vec<Address>) -> Helper {
    let (ours, theirs) = Channel::pair().unwrap();
    std::thread::spawn(|| serve_backend(theirs.into_socket(), |_, _, _| ()).unwrap());
    let helper = Helper::new(ours).unwrap();
    let start = Start {
        vm: "web1".parse().unwrap(),
        lenders,
        directory: directory.to_owned(),
        socket_group: None,
        pki: directory.join("pki"),
        fences: None,
        discovery: None,
    };
    helper.configure(start).unwrap();
    helper
}

fn welcome() -> Reply {
    Reply::Welcome {
        lender: "test".into(),
        instance: Instance::random().unwrap(),
    }
}

/// Answers the Hello of one peer; the VM that it named.
fn answer_hello(lender: &Listener, reply: &Reply) -> Option<String> {
    let mut peer = loop {
        match lender.accept().unwrap() {
            Some(peer) => break peer,
            None => std::thread::yield_now(),
        }
    };
    let (envelope, _) = peer.receive::<Envelope>(Duration::from_secs(5)).unwrap();
    peer.send(reply, &[], Duration::from_secs(5)).unwrap();
    match envelope.request {
        Request::Hello { vm, .. } => vm,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_helper_connects_to_the_lenders_of_its_vm_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let lender = Listener::bind(&path("lender.sock")).unwrap();
    let _other = Listener::bind(&path("other.sock")).unwrap();
    let tcp = || TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, other_port) = (tcp(), tcp());
    let number = |port: &TcpListener| port.local_addr().unwrap().port();
    let named = format!("tcp:localhost:{}", number(&port));
    let lenders = vec![path("lender.sock").into(), named.parse().unwrap()];
    let helper = helper(directory.path(), lenders);
    let dial = |target| helper.dial(&target, Duration::from_secs(5));
    let refused = |target| {
        let error = dial(target).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    };

    let greet = |name| helper.greet(&path(name), Duration::from_secs(5));
    std::thread::scope(|scope| {
        let hello = scope.spawn(|| answer_hello(&lender, &welcome()));
        assert_eq!(greet("lender.sock").unwrap().lender, "test");
        assert_eq!(hello.join().unwrap().as_deref(), Some("web1"));
    });
    match greet("other.sock") {
        Err(CallError::Unreachable { source, .. }) => {
            assert_eq!(source.kind(), io::ErrorKind::PermissionDenied);
        }
        other => panic!("{other:?}"),
    }
    // Without Hello, by which the lender would know this user alone.
    for name in ["lender.sock", "other.sock"] {
        refused(Target::Unix(path(name)));
    }
    let host = |port: u16| Target::Tcp {
        host: "localhost".into(),
        port,
    };
    refused(host(number(&other_port)));
    let peer = port.local_addr().unwrap();
    // Not before it was reached by name.
    refused(Target::Peer(peer));
    dial(host(number(&port))).unwrap();
    dial(Target::Peer(peer)).unwrap();
    refused(Target::Peer(other_port.local_addr().unwrap()));
}

/// Landlock's rules are for inodes: a backend that opened them itself would not see the renewal.
#[test]
fn certificates_that_are_renewed_by_another_link_are_opened() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for year in ["2026", "2027"] {
        std::fs::create_dir(path(year)).unwrap();
        for name in ["client-cert.pem", "ca-key.pem"] {
            std::fs::write(path(year).join(name), year).unwrap();
        }
    }
    let helper = helper(directory.path(), Vec::new());
    for year in ["2026", "2027"] {
        symlink(year, path("new")).unwrap();
        std::fs::rename(path("new"), path("pki")).unwrap();
        let mut text = String::new();
        let mut file = helper.certificate("client-cert.pem").unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, year);
    }
    let refused = |name| helper.certificate(name).unwrap_err().kind();
    assert_eq!(refused("ca-crl.pem"), io::ErrorKind::NotFound);
    for name in ["ca-key.pem", "../pki/client-cert.pem", "server-key.pem"] {
        assert_eq!(refused(name), io::ErrorKind::PermissionDenied, "{name}");
    }
}

/// What a backend that its guest has taken over would send to a lender of its user.
#[test]
fn a_connection_from_the_helper_operates_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("lender.sock");
    let device: DeviceId = "dma0".parse().unwrap();
    let mut config = farside_lender::config::Config {
        name: "test".parse().unwrap(),
        socket: path.clone(),
        ..Default::default()
    };
    config.device.push(DeviceConfig {
        id: device.clone(),
        source: Model::dma_test().into(),
        borrowers: Vec::new(),
    });
    let lender = Lender::start(config).unwrap();
    let stop = lender.stop_handle();
    let thread = std::thread::spawn(|| lender.run().unwrap());

    let helper = helper(directory.path(), vec![path.clone().into()]);
    let greeted = helper.greet(&path, Duration::from_secs(5)).unwrap();
    let mut channel = Channel::from_socket(greeted.socket);
    let hello = |vm: Option<&str>| Request::Hello {
        version: VERSION,
        vm: vm.map(str::to_owned),
    };
    for (request, kind) in [
        (hello(None), ErrorKind::Invalid),
        (hello(Some("web2")), ErrorKind::Invalid),
        (
            Request::SetAvailable {
                device: device.clone(),
                available: false,
            },
            ErrorKind::Denied,
        ),
        (
            Request::RemoveDevice {
                device: device.clone(),
            },
            ErrorKind::Denied,
        ),
    ] {
        let envelope = Envelope {
            generation: Generation(0),
            accesses: 0,
            request,
        };
        channel
            .send(&envelope, &[], Duration::from_secs(5))
            .unwrap();
        match channel.receive(Duration::from_secs(5)).unwrap().0 {
            Reply::Refused(error) => assert_eq!(error.kind, kind, "{error}"),
            other => panic!("{other:?}"),
        }
    }
    let mut operator = Client::connect(&path.into(), None).unwrap();
    let devices = operator.devices().unwrap();
    assert_eq!(devices[0].id, device);
    assert_eq!(devices[0].availability, Availability::Available);
    stop.raise();
    thread.join().unwrap();
}

/// As one that was stopped (SIGSTOP).
#[test]
fn a_helper_that_reads_nothing_does_not_hold_up_the_event_loop() {
    let (ours, unread) = Channel::pair().unwrap();
    let helper = Helper::new(ours).unwrap();
    let device: DeviceId = "dma0".parse().unwrap();
    let order = || Order::Fence(device.clone());
    while helper.try_send(&order(), &[]).unwrap() {}
    // Another thread waits for room meanwhile.
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| helper.send(&order(), &[]));
        let begin = Instant::now();
        for _ in 0..10 {
            helper.release(&device, Duration::from_secs(60));
            let error = helper.post(&order(), &[]).unwrap_err().to_string();
            assert!(error.contains("stopped or slow"), "{error}");
        }
        assert!(begin.elapsed() < SEND_TIMEOUT, "{:?}", begin.elapsed());
        assert!(!waits.is_finished());
        drop(unread);
        waits.join().unwrap().unwrap_err();
    });
}

#[test]
fn an_error_keeps_its_kind() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("lender.sock");
    let helper = helper(directory.path(), vec![path.clone().into()]);
    match helper.greet(&path, Duration::from_secs(5)) {
        Err(CallError::Unreachable { address, source }) => {
            assert_eq!(address, path.clone().into());
            assert_eq!(source.kind(), io::ErrorKind::NotFound);
        }
        other => panic!("{other:?}"),
    }
    let lender = Listener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        let refusal = RemoteError {
            kind: ErrorKind::Version,
            message: "version 1".into(),
        };
        scope.spawn(|| answer_hello(&lender, &Reply::Refused(refusal)));
        match helper.greet(&path, Duration::from_secs(5)) {
            Err(CallError::Refused(error)) => assert_eq!(error.kind, ErrorKind::Version),
            other => panic!("{other:?}"),
        }
    });
    // A lender that is stopped.
    let late = helper.greet(&path, Duration::from_millis(50));
    assert!(matches!(late, Err(CallError::Late(_))), "{late:?}");
}
