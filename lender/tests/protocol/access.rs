//! Rights of other users and of network peers.

use std::os::unix::fs::PermissionsExt;

use farside_daemon::raise_open_files;
use farside_error_chain::Chain;
use farside_lender::{
    Lender,
    config::{Config, DeviceConfig, Model},
};
use farside_lender_protocol::{
    Address, CallError, Client, ErrorKind, Generation, HeldFence, RemoteError, Reply, Request,
    Secret, Transport, VERSION,
};
use rustix::process::Uid;

use crate::peer::{DEVICE, Peer, Running, held, interrupt_status, pki, secret, until};

/// Maximum number of connections of a user other than root and the lender's own.
const MAX_PEERS_OF_USER: usize = 64;

pub const ALICE: u32 = 4_242_001;
const MALLORY: u32 = 4_242_002;

/// Runs `peer` as another user. Only root can: otherwise returns `None`.
pub fn as_user<T: Send>(uid: u32, peer: impl FnOnce() -> T + Send) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        let thread = std::thread::current();
        let test = thread.name().unwrap_or_default();
        println!("skipped: {test}: only root can connect as another user");
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
pub fn attack(address: &Address) -> Vec<RemoteError> {
    let device = || DEVICE.parse().unwrap();
    let transport = match address.is_tcp() {
        true => Transport::Ntb,
        false => Transport::SharedMemory,
    };
    let mut peer = Peer::connect(address).greeted("a");
    let refusals = [
        Request::Describe { device: device() },
        Request::Status { device: device() },
        Request::Check {
            device: device(),
            transport,
            ram: Vec::new(),
        },
        Request::Handover {
            device: device(),
            vm: "a".into(),
            migration: "m1".into(),
            supersedes: None,
            secret: secret("m1"),
        },
        Request::EndReservation {
            device: device(),
            secret: None,
        },
        Request::Borrow {
            device: device(),
            transport,
            fence: None,
        },
    ]
    .map(|request| peer.call(request, &[]).unwrap_err());
    let devices = Client::connect_by(address, None, pki(), None);
    assert_eq!(devices.unwrap().devices().unwrap(), []);
    refusals.into()
}

pub fn denied(refusals: &[RemoteError], who: &str) {
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
        let _registers = other.borrow("dma1").unwrap();
        let mut own = Peer::connect(&socket).greeted("a");
        own.borrow("dma0").unwrap();
        let mut tool = Client::connect(&socket, None).unwrap();
        let (device, vm) = ("dma1".parse().unwrap(), "b".parse().unwrap());
        let error = tool.hand_over(&device, &vm, "m1", None, secret("m1"));
        let error = error.unwrap_err();
        assert!(error.to_string().contains("only root"), "{error}");
        other.call(Request::EnableBusMaster, &[]).unwrap();
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
            .hand_over(&device, &vm.parse().unwrap(), "m1", None, secret("m1"))
            .unwrap();
        operator.end_reservation(&device, None).unwrap();
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
            let error = error.to_string();
            assert!(
                error.contains("if `borrowers` in lender.toml names one"),
                "{error}"
            );
        });
    }
    assert_eq!(
        mode(&Running::lending(&[&["user=4242001"]])),
        (0o666, 0o711)
    );
}

#[test]
fn a_directory_that_the_lender_did_not_create_stays_closed() {
    let home = tempfile::tempdir().unwrap();
    let private = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(home.path(), private).unwrap();
    let lend = |rule: &str| {
        let mut config = Config {
            name: "test".parse().unwrap(),
            state: Some(home.path().join("lender.json")),
            socket: home.path().join("lender.sock"),
            ..Config::default()
        };
        config.device.push(DeviceConfig {
            id: DEVICE.parse().unwrap(),
            source: Model::dma_test().into(),
            borrowers: vec![rule.parse().unwrap()],
        });
        Lender::start(config)
    };
    let error = lend("user=4242001").err().unwrap().to_string();
    let remedy = format!("has mode 0700; `chmod go+x {}`", home.path().display());
    assert!(error.contains(&remedy), "{error}");
    let mode = home.path().metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    lend("user=root").unwrap();
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

#[test]
fn a_crowd_of_uids_locks_nobody_out_whom_a_rule_names() {
    raise_open_files();
    let lender = Running::lending(&[&["user=4242001"]]);
    let socket = lender.socket().into();
    let first = as_user(MALLORY, || {
        let greet = |_| Peer::connect(&socket).greeted("a");
        (0..MAX_PEERS_OF_USER).map(greet).collect::<Vec<_>>()
    });
    // Every other uid without a rule shares the places of the first.
    as_user(MALLORY + 1, || Peer::connect(&socket).expect_closed());
    for uid in [ALICE, 0] {
        as_user(uid, || drop(Peer::connect(&socket).greeted("a")));
    }
    drop(first);
}

/// A backend that its guest has taken over has the uid of the lender's operator.
#[test]
fn a_crowd_of_one_vm_locks_neither_operators_nor_other_vms_out() {
    raise_open_files();
    let lender = Running::lending(&[&[]]);
    let socket = lender.socket().into();
    let greet = |_| Peer::connect(&socket).greeted("a");
    let crowd: Vec<Peer> = (0..MAX_PEERS_OF_USER).map(greet).collect();
    let vm = "a".parse().unwrap();
    let refused = Client::connect(&socket, Some(&vm)).unwrap_err();
    let refused = Chain(&refused).to_string();
    assert!(
        refused.contains("64 peers of VM a are connected already"),
        "{refused}"
    );
    Client::connect(&socket, None).unwrap().devices().unwrap();
    Peer::connect(&socket).greeted("b").borrow(DEVICE).unwrap();
    drop(crowd);
    until("there is room", || {
        Client::connect(&socket, Some(&vm)).is_ok()
    });
}

/// A backend that its guest has taken over has the uid of the lender's operator.
#[test]
fn a_connection_of_a_vm_has_no_rights_of_its_user() {
    let lender = Running::lending(&[&[], &[]]);
    let (mut victim, mut registers) = lender.borrow(DEVICE, "a");
    let mut operator = Client::connect(&lender.socket().into(), None).unwrap();
    let (a, mine) = ("a".parse().unwrap(), "mine".parse().unwrap());
    let device = |id: &str| id.parse().unwrap();
    // Both VMs have moved with the other device.
    for vm in [&mine, &a] {
        operator
            .hand_over(&device("dma1"), vm, "m1", None, secret("m1"))
            .unwrap();
        operator.end_reservation(&device("dma1"), None).unwrap();
    }
    let before = operator.devices().unwrap();
    let fence = |vm| before[1].fence(vm).unwrap().generation.0;

    let mut taken_over = lender.hello("mine");
    let handover = |id, vm: &str, supersedes| Request::Handover {
        device: device(id),
        vm: vm.into(),
        migration: "m2".into(),
        supersedes,
        secret: secret("m2"),
    };
    let table = "id = \"dma2\"\nmodel.dma-test = {}\n";
    for (request, remedy) in [
        (
            Request::Revoke {
                device: device(DEVICE),
                limit_ms: 0,
            },
            "`farside revoke`",
        ),
        (
            Request::SetAvailable {
                device: device("dma1"),
                available: false,
            },
            "`farside devices`",
        ),
        (
            Request::AddDevice {
                table: table.into(),
            },
            "`farside lend`",
        ),
        (
            Request::RemoveDevice {
                device: device("dma1"),
            },
            "`farside lend`",
        ),
        (handover(DEVICE, "a", None), "`farside migration`"),
        (
            handover("dma1", "a", Some(held(fence("a"), "guess"))),
            "`farside migration`",
        ),
        // Of its own VM, with proof.
        (
            handover("dma1", "mine", Some(held(fence("mine"), "m1"))),
            "`farside migration`",
        ),
        (
            Request::EndReservation {
                device: device("dma1"),
                secret: None,
            },
            "`farside migration`",
        ),
    ] {
        let words = ["Hello named VM mine", remedy];
        let kind = taken_over.refused(request, &[], &words);
        assert_eq!(kind, ErrorKind::Denied);
    }
    // Neither another VM, nor none.
    for vm in [Some("a"), None] {
        taken_over.hello(VERSION, vm).unwrap_err();
    }
    // A generation that was issued after its fence, as if the lender's file were older than that.
    let made_up = Some(held(fence("a"), "guess"));
    let error = taken_over.borrow_under("dma1", made_up).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Denied, "{error}");
    match taken_over.call(Request::LimitsInUse, &[]).unwrap() {
        Reply::LimitsInUse(limits) => assert_eq!(limits, []),
        other => panic!("{other:?}"),
    }
    match taken_over.call(Request::Devices { after: None }, &[]) {
        Ok(Reply::Devices(entries)) => {
            let seen: Vec<_> = entries.iter().flat_map(|entry| &entry.fences).collect();
            let vms: Vec<_> = seen.iter().map(|fence| fence.vm.as_str()).collect();
            assert_eq!(vms, ["mine"]);
        }
        other => panic!("{other:?}"),
    }

    let state = |entries: Vec<farside_lender_protocol::DeviceEntry>| {
        let state = |entry: farside_lender_protocol::DeviceEntry| {
            let holder = entry.borrowed_by.map(|by| (by.vm, by.generation));
            (entry.id, holder, entry.fences, entry.availability)
        };
        entries.into_iter().map(state).collect::<Vec<_>>()
    };
    assert_eq!(state(operator.devices().unwrap()), state(before.clone()));
    interrupt_status(&mut registers);
    victim.call(Request::EnableBusMaster, &[]).unwrap();
    // What it is for.
    let own = Some(held(fence("mine"), "m1"));
    taken_over.borrow_under("dma1", own).unwrap();
}

/// A network peer's handover of the device from VM `a`.
pub fn take(
    address: &Address,
    migration: &str,
    supersedes: Option<HeldFence>,
    secret: Secret,
) -> Result<Generation, ErrorKind> {
    let (device, vm) = (DEVICE.parse().unwrap(), "a".parse().unwrap());
    let mut tool = Client::connect_by(address, None, pki(), None).unwrap();
    match tool.hand_over(&device, &vm, migration, supersedes, secret) {
        Ok(generation) => Ok(generation),
        Err(CallError::Refused(error)) => Err(error.kind),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_network_peer_cannot_take_a_device_from_a_vm_that_runs() {
    let lender = Running::new();
    let (mut victim, mut registers) = lender.borrow(DEVICE, "a");
    let port = &lender.addresses[1];
    let generation = victim.generation.0;
    for supersedes in [None, Some(held(generation, "m1"))] {
        let taken = take(port, "m1", supersedes, secret("m1"));
        assert_eq!(taken, Err(ErrorKind::Denied));
    }
    let entry = lender.status(DEVICE).entry;
    assert_eq!(entry.borrowed_by.unwrap().generation, victim.generation);
    assert_eq!(entry.fences, []);
    assert!(!lender.state().exists());
    interrupt_status(&mut registers);
    victim.call(Request::EnableBusMaster, &[]).unwrap();
}

/// Generations and ids of migrations are listed.
#[test]
fn what_a_list_shows_is_no_proof() {
    let lender = Running::new();
    let port = &lender.addresses[1];
    // As the host that the VM leaves: nobody has the device, and the VM has not moved before.
    let fence = take(port, "m1", None, secret("m1")).unwrap();
    let state = || std::fs::read(lender.state()).unwrap();
    let before = state();

    let device = || DEVICE.parse().unwrap();
    let listed = Client::connect(port, Some(&"a".parse().unwrap()))
        .unwrap()
        .devices()
        .unwrap();
    assert_eq!(listed[0].fences[0].generation, fence);
    assert!(!format!("{listed:?}").contains("ecret"));
    let known = HeldFence {
        generation: fence,
        secret: None,
    };
    let guessed = held(fence.0, "guess");
    for shown in [known, guessed] {
        assert_eq!(
            take(port, "m1", Some(shown), secret("guess")),
            Err(ErrorKind::Denied)
        );
        assert_eq!(
            take(port, "m2", Some(shown), secret("m2")),
            Err(ErrorKind::Denied)
        );
        let mut peer = Peer::connect(port).greeted("a");
        let borrow = Request::Borrow {
            device: device(),
            transport: Transport::Ntb,
            fence: Some(shown),
        };
        assert_eq!(peer.refused(borrow, &[], &["secret"]), ErrorKind::Denied);
        let end = Request::EndReservation {
            device: device(),
            secret: shown.secret,
        };
        let mut tool = Peer::connect(port).of_tool();
        assert_eq!(tool.refused(end, &[], &["secret"]), ErrorKind::Denied);
        // Nor on this host.
        let error = lender
            .hello("a")
            .borrow_under(DEVICE, Some(shown))
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Denied);
    }
    assert_eq!(state(), before);

    // The host that the VM went to.
    let own = held(fence.0, "m1");
    assert_eq!(take(port, "m1", None, secret("m1")), Ok(fence));
    let mut peer = lender.hello("a");
    peer.borrow_under(DEVICE, Some(own)).unwrap();
    let next = take(port, "m2", Some(own), secret("m2")).unwrap();
    peer.expect_closed();
    let mut tool = Client::connect(port, None).unwrap();
    tool.end_reservation(&device(), Some(secret("m2"))).unwrap();
    lender.hello("b").borrow(DEVICE).unwrap();
    lender.wait_until_free(DEVICE);
    lender
        .hello("a")
        .borrow_under(DEVICE, Some(held(next.0, "m2")))
        .unwrap();
}

#[test]
fn a_fence_that_is_made_up_leaves_no_trace() {
    let lender = Running::new();
    let (victim, _registers) = lender.borrow(DEVICE, "a");
    let issued = victim.generation.0;
    drop(victim);
    lender.wait_until_free(DEVICE);
    let mut peer = Peer::connect(&lender.addresses[1]).greeted("a");
    // A model is not lent through an NTB, which is found after the fence was looked at.
    let borrow = Request::Borrow {
        device: DEVICE.parse().unwrap(),
        transport: Transport::Ntb,
        fence: Some(held(issued, "guess")),
    };
    peer.refused(borrow, &[], &[]);
    lender.wait_until_free(DEVICE);
    assert_eq!(lender.status(DEVICE).entry.fences, []);
    lender.borrow(DEVICE, "a");
}
