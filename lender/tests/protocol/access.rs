//! Rights of other users and of network peers.

use std::os::unix::fs::PermissionsExt;

use farside_daemon::raise_open_files;
use farside_lender_protocol::{
    Address, CallError, Client, ErrorKind, Generation, RemoteError, Request, Route, VERSION,
};
use rustix::process::Uid;

use crate::peer::{DEVICE, Peer, Running, interrupt_status, until};

/// Maximum number of connections of a user other than root and the lender's own.
const MAX_PEERS_OF_USER: usize = 64;

const ALICE: u32 = 4_242_001;
const MALLORY: u32 = 4_242_002;

/// Runs `peer` as another user. Only root can: otherwise returns `None`.
fn as_user<T: Send>(uid: u32, peer: impl FnOnce() -> T + Send) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not run: only root can connect as another user");
        return None;
    }
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // Of this thread alone.
            let uid = Some(Uid::from_raw(uid));
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            peer()
        });
        Some(thread.join().unwrap())
    })
}

/// Requests that take a device from its borrower or read it, with their refusals.
fn attack(address: &Address) -> Vec<RemoteError> {
    let device = || DEVICE.parse().unwrap();
    let route = match address.is_tcp() {
        true => Route::Ntb,
        false => Route::Memory,
    };
    let mut peer = Peer::connect(address).greeted("a");
    let refusals = [
        Request::Describe { device: device() },
        Request::Status { device: device() },
        Request::Check {
            device: device(),
            route,
            ram: Vec::new(),
        },
        Request::Handover {
            device: device(),
            vm: "a".into(),
            migration: "m1".into(),
            supersedes: None,
        },
        Request::EndReservation { device: device() },
        Request::Borrow {
            device: device(),
            route,
            fence: None,
        },
    ]
    .map(|request| peer.call(request, &[]).unwrap_err());
    let devices = Client::connect(address, None).unwrap().devices().unwrap();
    assert_eq!(devices, []);
    refusals.into()
}

fn denied(refusals: &[RemoteError], who: &str) {
    for error in refusals {
        assert_eq!(error.kind, ErrorKind::Denied, "{error}");
        let (device, who) = (error.message.contains(DEVICE), error.message.contains(who));
        assert!(device && who, "{error}");
    }
}

/// With two messages a peer that named the victim's VM ended its lease, fenced its host off and
/// read its disk.
#[test]
fn a_peer_without_rights_cannot_take_a_device_from_its_borrower() {
    let lender = Running::lending(&[&["user=4242001"]]);
    let (mut victim, mut registers) = lender.borrow(DEVICE, "a");
    let before = lender.status(DEVICE).entry;

    denied(&attack(&lender.addresses[1]), "network peer 127.0.0.1:");
    let socket = lender.socket().into();
    if let Some(refusals) = as_user(MALLORY, || attack(&socket)) {
        denied(&refusals, "uid 4242002");
    }

    let after = lender.status(DEVICE).entry;
    let holder = |entry: &farside_lender_protocol::DeviceEntry| {
        let by = entry.borrowed_by.clone().unwrap();
        (by.vm, by.generation, entry.fences.clone())
    };
    assert_eq!(holder(&before), holder(&after));
    assert_eq!(after.fences, []);
    interrupt_status(&mut registers);
    victim.call(Request::EnableBusMaster, &[]).unwrap();
    let generation = victim.generation;
    drop(victim);
    lender.wait_until_free(DEVICE);
    let (again, _registers) = lender.borrow(DEVICE, "a");
    assert_eq!(again.generation, Generation(generation.0 + 1));
}

#[test]
fn a_borrower_gets_what_the_rules_name_and_operates_nothing() {
    let lender = Running::lending(&[&["user=4242001,vm=a"], &["user=4242001"], &[]]);
    let socket = lender.socket().into();
    as_user(ALICE, || {
        let devices = Client::connect(&socket, None).unwrap().devices().unwrap();
        let ids: Vec<_> = devices.iter().map(|entry| entry.id.as_str()).collect();
        assert_eq!(ids, ["dma0", "dma1"]);

        let mut other = Peer::connect(&socket).greeted("b");
        let error = other.borrow("dma0").unwrap_err();
        assert_eq!(error.kind, ErrorKind::Denied);
        assert!(error.message.contains("user=4242001,vm=b"), "{error}");
        other.borrow("dma1").unwrap();
        let mut own = Peer::connect(&socket).greeted("a");
        own.borrow("dma0").unwrap();
        let mut tool = Client::connect(&socket, None).unwrap();
        let (device, vm) = ("dma1".parse().unwrap(), "b".parse().unwrap());
        for refused in [
            tool.hand_over(&device, &vm, "m1", None).map(drop),
            tool.end_reservation(&device),
        ] {
            let Err(CallError::Refused(error)) = refused else {
                panic!("{refused:?}");
            };
            assert_eq!(error.kind, ErrorKind::Denied, "{error}");
            assert!(error.message.contains("only root"), "{error}");
        }
    });
}

#[test]
fn a_borrower_sees_the_fences_of_its_own_vm() {
    let lender = Running::lending(&[&["user=4242001", "network"]]);
    let socket: Address = lender.socket().into();
    let mut operator = Client::connect(&socket, None).unwrap();
    let device = DEVICE.parse().unwrap();
    for vm in ["a", "b"] {
        operator
            .hand_over(&device, &vm.parse().unwrap(), "m1", None)
            .unwrap();
        operator.end_reservation(&device).unwrap();
    }
    let fences = |address: &Address, vm: Option<&str>| {
        let vm = vm.map(|vm| vm.parse().unwrap());
        let mut client = Client::connect(address, vm.as_ref()).unwrap();
        let listed = client.devices().unwrap().remove(0);
        assert_eq!(client.status(&device).unwrap().entry.fences, listed.fences);
        let vms = listed.fences.into_iter().map(|fence| fence.vm.to_string());
        vms.collect::<Vec<_>>()
    };
    assert_eq!(fences(&socket, None), ["a", "b"]);
    let port = &lender.addresses[1];
    assert_eq!(fences(port, None), [""; 0]);
    assert_eq!(fences(port, Some("b")), ["b"]);
    as_user(ALICE, || {
        assert_eq!(fences(&socket, None), [""; 0]);
        assert_eq!(fences(&socket, Some("a")), ["a"]);
    });
}

#[test]
fn other_users_reach_the_socket_only_if_a_rule_names_one() {
    let mode = |lender: &Running| {
        let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
        let socket = lender.socket();
        (mode(&socket), mode(socket.parent().unwrap()))
    };
    for rules in [&[][..], &["network"], &["user=root"]] {
        let lender = Running::lending(&[rules]);
        assert_eq!(mode(&lender), (0o600, 0o700), "{rules:?}");
        let socket = lender.socket().into();
        as_user(ALICE, || {
            let error = Client::connect(&socket, None).unwrap_err();
            assert!(matches!(error, CallError::Unreachable { .. }), "{error}");
        });
    }
    assert_eq!(
        mode(&Running::lending(&[&["user=4242001"]])),
        (0o666, 0o711)
    );
}

#[test]
fn a_crowd_of_one_user_locks_no_other_user_out() {
    raise_open_files();
    let lender = Running::lending(&[&["user=4242001"]]);
    let socket = lender.socket().into();
    let crowd = as_user(MALLORY, || {
        let greet = |_| Peer::connect(&socket).greeted("a");
        let crowd: Vec<Peer> = (0..MAX_PEERS_OF_USER).map(greet).collect();
        // One connection too many.
        Peer::connect(&socket).expect_closed();
        crowd
    });
    as_user(ALICE, || {
        Peer::connect(&socket).greeted("a").borrow(DEVICE).unwrap();
    });
    drop(crowd);
    as_user(MALLORY, || {
        until("there is room", || {
            let mut peer = Peer::connect(&socket);
            peer.try_hello(VERSION).is_ok()
        });
    });
}
