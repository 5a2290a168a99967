//! Requests of a peer without a lease.

use std::os::fd::AsFd;

use farside_daemon::DeviceId;
use farside_devices::dma_test::SRAM_SIZE;
use farside_fabric::{Iova, PeerAddress};
use farside_lender_protocol::{
    Address, Client, ErrorKind, Generation, MAX_FDS, Reply, Request, Transport, VERSION,
};

use crate::peer::{DEVICE, Peer, Running, memory, pki};

fn named(device: &str) -> DeviceId {
    device.parse().unwrap()
}

#[test]
fn tools_see_everything_and_cannot_borrow() {
    let lender = Running::new();
    for address in &lender.addresses {
        tool_sees_everything_and_cannot_borrow(address);
    }
}

fn tool_sees_everything_and_cannot_borrow(address: &Address) {
    let mut client = Client::connect_by(address, None, pki(), None).unwrap();
    assert_eq!(client.lender(), "test");
    let devices = client.devices().unwrap();
    assert_eq!(devices.len(), 1);
    assert_eq!(
        (devices[0].id.as_str(), &devices[0].borrowed_by),
        (DEVICE, &None)
    );
    assert_eq!(
        client
            .describe(&DEVICE.parse().unwrap())
            .unwrap()
            .description
            .msix_vectors,
        2048
    );
    assert!(client.status(&DEVICE.parse().unwrap()).unwrap().usage == Default::default());
    client.limits().unwrap();
    let transport = match address.is_tcp() {
        true => Transport::Ntb,
        false => Transport::SharedMemory,
    };
    let error = client
        .borrow_device(&DEVICE.parse().unwrap(), transport, &[])
        .unwrap_err();
    assert!(error.to_string().contains("only a VM can borrow"));
    // A refusal does not close the connection.
    client.devices().unwrap();
}

#[test]
fn nothing_is_answered_before_hello() {
    let lender = Running::new();
    for peer in lender.peers() {
        nothing_before_hello(peer);
    }
}

fn nothing_before_hello(mut peer: Peer) {
    for request in [
        Request::Devices { after: None },
        Request::Limits,
        Request::Describe {
            device: named(DEVICE),
        },
        Request::Borrow {
            device: named(DEVICE),
            transport: Transport::SharedMemory,
            fence: None,
        },
        Request::Return,
        Request::EnableBusMaster,
    ] {
        let kind = peer.refused(request, &[], &["first message must be Hello"]);
        assert_eq!(kind, ErrorKind::Invalid);
    }
    peer.hello(VERSION, Some("a")).unwrap();
    let error = peer.hello(VERSION, Some("b")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
}

#[test]
fn another_version_is_refused_by_both_numbers() {
    let lender = Running::new();
    // An older release, the next, and a later one.
    for other in [VERSION - 1, VERSION + 1, VERSION + 6] {
        for peer in lender.peers() {
            refuses_another_version(peer, other);
        }
    }
}

fn refuses_another_version(mut peer: Peer, other: u32) {
    let error = peer.hello(other, Some("a")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Version);
    let said = error.message;
    assert!(
        said.contains(&format!("version {VERSION}")) && said.contains(&format!("not {other}")),
        "{said}"
    );
    // This does not count as Hello.
    assert_eq!(
        peer.refused(Request::Devices { after: None }, &[], &["Hello"]),
        ErrorKind::Invalid
    );
}

#[test]
fn names_that_could_pass_for_something_else_are_refused() {
    let lender = Running::new();
    let long = "x".repeat(49);
    for name in ["", "a b", "a\nerror: all is lost", "../../etc", &long] {
        for mut peer in lender.peers() {
            let error = peer.hello(VERSION, Some(name)).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid, "{name:?}");
            assert!(error.message.contains("letters"), "{error}");
        }
    }
}

#[test]
fn unknown_devices_are_unknown() {
    let lender = Running::new();
    let mut peer = lender.hello("a");
    let device = || named("disk9");
    for request in [
        Request::Describe { device: device() },
        Request::Status { device: device() },
        Request::Borrow {
            device: device(),
            transport: Transport::SharedMemory,
            fence: None,
        },
    ] {
        assert_eq!(
            peer.refused(request, &[], &["disk9", "farside devices"]),
            ErrorKind::UnknownDevice
        );
    }
}

#[test]
fn requests_of_a_lease_need_one() {
    let lender = Running::new();
    for peer in lender.peers() {
        needs_a_lease(peer.greeted("a"));
    }
}

fn needs_a_lease(mut peer: Peer) {
    peer.generation = Generation(1);
    let window = Request::OpenWindow {
        iova: Iova::new(0),
        peer_address: PeerAddress::new(0),
        len: 4096,
    };
    for request in [
        Request::Reset,
        Request::EnableBusMaster,
        Request::Close,
        window,
    ] {
        assert_eq!(
            peer.refused(request, &[], &["Borrow first"]),
            ErrorKind::Invalid
        );
    }
}

#[test]
fn garbage_ends_the_connection_and_nothing_else() {
    let lender = Running::new();
    for bytes in [&[0xff; 40][..], &[0], &[0x80; 60_000]] {
        for peer in lender.peers() {
            let mut peer = peer.greeted("a");
            peer.send_raw(bytes, &[]);
            peer.expect_closed();
        }
    }
    // Longer than any message.
    for peer in lender.peers() {
        let mut peer = peer.greeted("a");
        peer.send_raw(&[0; 70_000], &[]);
        peer.expect_closed();
    }
    // More descriptors than a message may carry.
    let mut peer = lender.hello("a");
    let file = memory(4096);
    peer.send_raw(&[0; 8], &[file.as_fd(); MAX_FDS + 8]);
    peer.expect_closed();
    assert_eq!(lender.holder(DEVICE), None);
}

#[test]
fn bar_memory_that_does_not_fit_the_device_is_refused() {
    let lender = Running::new();
    let (short, right) = (memory(SRAM_SIZE / 2), memory(SRAM_SIZE));
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let right = right.as_fd();
    for fds in [&[][..], &[right, right], &[short.as_fd()], &[pipe.as_fd()]] {
        let mut peer = lender.hello("a");
        let device = named(DEVICE);
        peer.call(
            Request::Borrow {
                device,
                transport: Transport::SharedMemory,
                fence: None,
            },
            fds,
        )
        .unwrap_err();
        // After a refusal, a peer can try again at once.
        lender.borrow(DEVICE, "a");
        lender.wait_until_free(DEVICE);
    }
}

#[test]
fn a_device_is_lent_once_and_the_holder_is_named() {
    let lender = Running::new();
    let (mut first, _registers) = lender.borrow(DEVICE, "a");
    let mut second = lender.hello("b");
    let error = second.borrow(DEVICE).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Busy);
    assert!(error.message.contains("borrowed by VM a"), "{error}");
    let generation = first.generation;
    assert!(matches!(first.call(Request::Return, &[]), Ok(Reply::Done)));
    // The same connection may borrow now, with a larger lease generation.
    let _registers = second.borrow(DEVICE).unwrap();
    assert!(second.generation > generation);
    assert_eq!(lender.holder(DEVICE).as_deref(), Some("b"));
}
