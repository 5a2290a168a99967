//! Hosts with certificates: their rights, and what they cost the lender before they are known.

use std::{io::Write, net::TcpStream};

use farside_lender_protocol::{Address, Client, ErrorKind, HeldFence, Request};

use crate::{
    access::{attack, denied, take},
    peer::{DEVICE, HOST, Peer, Running, held, interrupt_status, pki, secret},
};

#[test]
fn a_host_without_rights_cannot_take_a_device_from_its_borrower() {
    for rules in [
        &[][..],
        &["network"],
        &["host=rack1-b"],
        &["host=rack1-a,vm=b"],
    ] {
        let lender = Running::lending(&[rules]);
        let (mut victim, mut registers) = lender.borrow(DEVICE, "a");
        let tls = &lender.addresses[2];
        let sees_it = rules.iter().any(|rule| rule.contains(HOST));
        if !sees_it {
            denied(&attack(tls), "host rack1-a (127.0.0.1:");
        }
        let taken = take(tls, "m1", None, secret("m1"));
        assert_eq!(taken, Err(ErrorKind::Denied), "{rules:?}");
        interrupt_status(&mut registers);
        victim.call(Request::EnableBusMaster, &[]).unwrap();
    }
}

#[test]
fn a_host_that_a_rule_names_moves_a_device() {
    let lender = Running::lending(&[&["host=rack1-a,vm=a"]]);
    let tls = &lender.addresses[2];
    // The same peer without its certificate is nobody.
    denied(&attack(&lender.addresses[1]), "network peer");
    let fence = take(tls, "m1", None, secret("m1")).unwrap();
    let mut tool = Client::connect_by(tls, None, pki(), None).unwrap();
    assert_eq!(tool.devices().unwrap().len(), 1);
    let mut owner = lender.hello("a");
    owner
        .borrow_under(DEVICE, Some(held(fence.0, "m1")))
        .unwrap();
    // It has no right to end a lease of a VM that runs, nor to act for another VM.
    assert_eq!(take(tls, "m2", None, secret("m2")), Err(ErrorKind::Fenced));
    let mut peer = Peer::connect(tls).greeted("b");
    let describe = Request::Describe {
        device: DEVICE.parse().unwrap(),
    };
    let rule = "host=rack1-a,vm=b";
    assert_eq!(peer.refused(describe, &[], &[rule]), ErrorKind::Denied);
}

/// Its host is lost, and with it the secret of the VM's fence.
#[test]
fn a_host_claims_the_devices_of_a_vm_whose_host_is_lost_if_a_rule_allows_it() {
    for (rule, may_claim) in [
        ("host=rack1-a,vm=a", false),
        ("host=rack1-a,vm=b,claim", false),
        ("host=rack1-a,vm=a,claim", true),
    ] {
        let lender = Running::lending(&[&[rule, "host=rack1-a"]]);
        let tls = &lender.addresses[2];
        let fence = take(&lender.addresses[0], "m0", None, secret("m0")).unwrap();
        let former = Some(held(fence.0, "m0"));
        let mut lost = lender.hello("a");
        let _registers = lost.borrow_under(DEVICE, former).unwrap();
        // What lists show is an order, and no proof.
        let listed = Some(HeldFence {
            generation: fence,
            secret: None,
        });
        let claimed = take(tls, "m1", listed, secret("m1"));
        // Peers without certificates have no such right.
        let network = take(&lender.addresses[1], "m2", listed, secret("m2"));
        assert_eq!(network, Err(ErrorKind::Denied));
        if !may_claim {
            assert_eq!(claimed, Err(ErrorKind::Denied), "{rule}");
            lost.call(Request::Reset, &[]).unwrap();
            continue;
        }
        lost.expect_closed();
        let next = claimed.unwrap();
        // The lost host may come back: it has the former fence.
        let error = lender.hello("a").borrow_under(DEVICE, former).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Fenced);
        let known = Some(held(next.0, "m1"));
        lender.hello("a").borrow_under(DEVICE, known).unwrap();
    }
}

#[test]
fn a_reservation_is_ended_by_a_host_that_may_claim_for_every_vm() {
    for (rule, may_end) in [
        ("host=rack1-a,vm=a,claim", false),
        ("host=rack1-a,claim", true),
    ] {
        let lender = Running::lending(&[&[rule]]);
        take(&lender.addresses[0], "m0", None, secret("m0")).unwrap();
        let mut tool = Client::connect_by(&lender.addresses[2], None, pki(), None).unwrap();
        let ended = tool.end_reservation(&DEVICE.parse().unwrap(), None);
        assert_eq!(ended.is_ok(), may_end, "{rule}: {ended:?}");
        assert_eq!(lender.hello("b").borrow(DEVICE).is_ok(), may_end);
    }
}

#[test]
fn peers_that_stall_in_the_handshake_hold_nobody_up() {
    let lender = Running::lending(&[&["host=rack1-a"]]);
    let Address::Tls { host, port } = &lender.addresses[2] else {
        panic!("{:?}", lender.addresses);
    };
    let mut stalled = Vec::new();
    for bytes in [&b""[..], &[22, 3, 1], &[22, 3, 1, 2, 0, 1]] {
        let mut socket = TcpStream::connect((host.as_str(), *port)).unwrap();
        socket.write_all(bytes).unwrap();
        stalled.push(socket);
    }
    let mut peer = Peer::connect(&lender.addresses[2]).greeted("a");
    peer.call(Request::Devices { after: None }, &[]).unwrap();
    lender.hello("a").borrow(DEVICE).unwrap();
}
