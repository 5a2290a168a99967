//! A VM moves from this host to another, with its device.

use std::os::{fd::AsFd, unix::fs::FileExt};

use farside_devices::dma_test::{Command, MAX_LENGTH, reg};
use farside_fabric::PeerAddress;
use farside_lender_protocol::{Client, ErrorKind, HeldFence, MAX_FENCES, Request, VERSION};

use crate::peer::{DEVICE, Peer, Running, held, memory, secret, write};

const FAR: u64 = 64 << 30;

fn tool(lender: &Running) -> Client {
    Client::connect(&lender.socket().into(), None).unwrap()
}

fn hand_over(lender: &Running, migration: &str, supersedes: Option<HeldFence>) -> HeldFence {
    let generation = tool(lender)
        .hand_over(
            &DEVICE.parse().unwrap(),
            &"a".parse().unwrap(),
            migration,
            supersedes,
            secret(migration),
        )
        .unwrap();
    held(generation.0, migration)
}

/// The reason why the device is not lent to `vm` with this `fence`.
fn refusal(lender: &Running, vm: &str, fence: Option<HeldFence>) -> (ErrorKind, String) {
    let error = lender
        .hello(vm)
        .borrow_under(DEVICE, fence)
        .expect_err("it is lent");
    (error.kind, error.message)
}

fn borrow(lender: &Running, fence: Option<HeldFence>) -> (Peer, farside_lender_protocol::Channel) {
    let mut peer = lender.hello("a");
    let registers = peer.borrow_under(DEVICE, fence).unwrap();
    (peer, registers)
}

#[test]
fn the_old_host_loses_the_device_and_all_its_ways_to_it() {
    let lender = Running::new();
    let ram = memory(MAX_LENGTH.into());
    let (mut old, mut registers) = lender.borrow(DEVICE, "a");
    let old_generation = old.generation;
    old.open(&ram, 0, FAR, MAX_LENGTH.into());
    for (at, len, value) in [
        (reg::DST, 8, 0),
        (reg::LENGTH, 4, MAX_LENGTH.into()),
        (reg::PATTERN, 4, 0xffff_ffff),
        (reg::COMMAND, 4, Command::Fill as u64),
    ] {
        write(&mut registers, 0, at, len, value);
    }
    let fence = hand_over(&lender, "m1", None);
    assert!(fence.generation > old_generation);
    // DMA has ended by now.
    let marks = vec![0x5a; MAX_LENGTH as usize];
    ram.write_all_at(&marks, 0).unwrap();
    old.expect_closed();
    assert!(
        registers
            .receive::<farside_lender_protocol::registers::Event>(crate::peer::DEADLINE)
            .is_err()
    );
    lender.wait_until_free(DEVICE);

    // A new connection, with the old lease or a new one.
    let mut again = lender.hello("a");
    again.generation = old_generation;
    let map = Request::MapPeer {
        peer_address: PeerAddress::new(FAR),
        len: 4096,
        offset: 0,
        writable: true,
    };
    assert!(again.call(map, &[ram.as_fd()]).is_err());
    let older = [old_generation.0, fence.generation.0 - 1].map(|old| Some(held(old, "m1")));
    for shown in [&[None], &older[..]].concat() {
        let (kind, message) = refusal(&lender, "a", shown);
        assert_eq!(kind, ErrorKind::Fenced);
        for word in [DEVICE, "VM a", "moved", "m1", &fence.generation.to_string()] {
            assert!(message.contains(word), "no {word:?} in {message}");
        }
    }
    let mut found = vec![0; MAX_LENGTH as usize];
    ram.read_exact_at(&mut found, 0).unwrap();
    assert!(found == marks, "the old lease writes on");

    let (new, _registers) = borrow(&lender, Some(fence));
    assert!(new.generation > fence.generation);
}

#[test]
fn the_device_is_kept_for_the_vm_until_it_comes_or_gives_it_up() {
    let lender = Running::new();
    let fence = hand_over(&lender, "m1", None);
    let (kind, message) = refusal(&lender, "b", None);
    assert_eq!(kind, ErrorKind::Busy);
    for word in [
        "reserved for VM a",
        "migration resume a",
        "migration release dma0",
    ] {
        assert!(message.contains(word), "no {word:?} in {message}");
    }
    let entry = lender.status(DEVICE).entry;
    let reservation = entry.reservation().expect("it is shown");
    assert_eq!(
        (&*reservation.vm, reservation.generation),
        ("a", fence.generation)
    );
    let (mut new, _registers) = borrow(&lender, Some(fence));
    new.call(Request::Return, &[]).unwrap();
    assert!(lender.hello("b").borrow(DEVICE).is_ok());
    lender.wait_until_free(DEVICE);

    let fence = hand_over(&lender, "m2", Some(fence));
    assert_eq!(refusal(&lender, "b", None).0, ErrorKind::Busy);
    tool(&lender)
        .end_reservation(&DEVICE.parse().unwrap(), None)
        .unwrap();
    assert!(lender.hello("b").borrow(DEVICE).is_ok());
    lender.wait_until_free(DEVICE);
    assert_eq!(refusal(&lender, "a", None).0, ErrorKind::Fenced);
    borrow(&lender, Some(fence));
}

#[test]
fn asking_again_changes_nothing_and_a_rival_is_refused() {
    let lender = Running::new();
    let fence = hand_over(&lender, "m1", None);
    let (mut new, _registers) = borrow(&lender, Some(fence));
    assert_eq!(hand_over(&lender, "m1", None), fence);
    new.call(Request::EnableBusMaster, &[])
        .expect("the new lease is left alone");
    for supersedes in [None, Some(held(fence.generation.0 - 1, "m1"))] {
        let rival = tool(&lender)
            .hand_over(
                &DEVICE.parse().unwrap(),
                &"a".parse().unwrap(),
                "m2",
                supersedes,
                secret("m2"),
            )
            .unwrap_err()
            .to_string();
        assert!(rival.contains("m1") && rival.contains("m2"), "{rival}");
    }
    new.call(Request::EnableBusMaster, &[]).unwrap();
    // A subsequent handover takes it over.
    let next = hand_over(&lender, "m2", Some(fence));
    assert!(next.generation > new.generation);
    new.expect_closed();
    // The first cannot take it back.
    assert!(
        tool(&lender)
            .hand_over(
                &DEVICE.parse().unwrap(),
                &"a".parse().unwrap(),
                "m1",
                None,
                secret("m1")
            )
            .is_err()
    );
}

#[test]
fn a_device_that_another_vm_has_is_not_handed_over() {
    let lender = Running::new();
    let (mut other, _registers) = lender.borrow(DEVICE, "b");
    let error = tool(&lender)
        .hand_over(
            &DEVICE.parse().unwrap(),
            &"a".parse().unwrap(),
            "m1",
            None,
            secret("m1"),
        )
        .unwrap_err()
        .to_string();
    assert!(error.contains("borrowed by VM b"), "{error}");
    other.call(Request::EnableBusMaster, &[]).unwrap();
    drop(other);
    lender.wait_until_free(DEVICE);
    // No trace of it is left.
    borrow(&lender, None);
}

#[test]
fn a_restarted_lender_knows_of_it() {
    let mut lender = Running::new();
    let fence = hand_over(&lender, "m1", None);
    lender.restart();
    assert_eq!(refusal(&lender, "a", None).0, ErrorKind::Fenced);
    assert_eq!(refusal(&lender, "b", None).0, ErrorKind::Busy);
    assert_eq!(hand_over(&lender, "m1", None), fence);
    let (peer, _registers) = borrow(&lender, Some(fence));
    assert!(peer.generation > fence.generation);
}

#[test]
fn ids_that_make_no_sense_are_refused() {
    let lender = Running::new();
    let long = "x".repeat(65);
    let request = |device: &str, vm: &str, migration: &str| Request::Handover {
        device: device.parse().unwrap(),
        vm: vm.to_owned(),
        migration: migration.to_owned(),
        supersedes: None,
        secret: secret("m1"),
    };
    let name = "VM name \"../a\"";
    let mut peer = lender.tool();
    for (device, vm, migration, word) in [
        (DEVICE, "a", "", "migration's id"),
        (DEVICE, "a", "a b", "migration's id"),
        (DEVICE, "a", &*long, "migration's id"),
        (DEVICE, "../a", "m1", name),
        ("dma9", "a", "m1", "no device \"dma9\""),
    ] {
        peer.refused(request(device, vm, migration), &[], &[word]);
    }
    let error = lender.peer().hello(VERSION, Some("../a")).unwrap_err();
    assert!(error.message.contains(name), "{error}");
    borrow(&lender, None);
}

/// Recorded as a fence, the largest number would lock the VM out for ever, or wrap to 0 and let its
/// old host in.
#[test]
fn a_generation_that_was_never_issued_is_refused_and_leaves_nothing() {
    let lender = Running::new();
    let never = Some(held(u64::MAX, "m1"));
    let (kind, message) = refusal(&lender, "a", never);
    assert_eq!(kind, ErrorKind::Fenced, "{message}");
    assert!(
        message.contains("not issued generation 18446744073709551615"),
        "{message}"
    );
    let error = tool(&lender)
        .hand_over(
            &DEVICE.parse().unwrap(),
            &"b".parse().unwrap(),
            "m1",
            never,
            secret("m1"),
        )
        .unwrap_err();
    assert!(error.to_string().contains("not issued"), "{error}");

    assert_eq!(lender.status(DEVICE).entry.fences, []);
    let (first, _registers) = borrow(&lender, None);
    let ahead = Some(held(first.generation.0 + 1, "m1"));
    let (_, message) = refusal(&lender, "b", ahead);
    assert!(message.contains("not issued"), "{message}");
    let generation = first.generation;
    drop(first);
    lender.wait_until_free(DEVICE);
    let (second, _registers) = borrow(&lender, Some(held(generation.0, "m1")));
    assert_eq!(second.generation.0, generation.0 + 1);
}

#[test]
fn a_state_file_that_names_the_last_generation_costs_that_device_alone() {
    let mut lender = Running::with(2, Default::default());
    hand_over(&lender, "m1", None);
    lender.stop();
    let state = lender.state();
    let text = std::fs::read_to_string(&state).unwrap();
    let start = text.find("\"epoch\":").unwrap() + "\"epoch\":".len();
    let end = start + text[start..].find(',').unwrap();
    let text = format!("{}{}{}", &text[..start], u64::MAX, &text[end..]);
    std::fs::write(&state, text).unwrap();
    lender.restart();
    let (kind, message) = refusal(&lender, "a", Some(held(u64::MAX, "m1")));
    assert_eq!(kind, ErrorKind::Internal);
    assert!(message.contains("no generation is left"), "{message}");
    let _other = lender.borrow("dma1", "b");
}

/// With a thousand fences neither status nor list fitted in a message, and no VM could borrow the
/// device.
#[test]
fn fences_are_bounded_and_all_devices_stay_listed() {
    let mut lender = Running::with(3, Default::default());
    let mut tool = tool(&lender);
    let mut move_away = |n: usize| {
        let device = DEVICE.parse().unwrap();
        // The longest names.
        let vm = format!("vm{n:046}").parse().unwrap();
        let migration = format!("m{n:063}");
        let fence = tool.hand_over(&device, &vm, &migration, None, secret(&migration));
        tool.end_reservation(&device, None).unwrap();
        fence
    };
    for n in 0..MAX_FENCES {
        move_away(n).unwrap();
    }
    let error = move_away(MAX_FENCES).unwrap_err().to_string();
    assert!(error.contains("192 different VMs"), "{error}");

    // As many of two other devices: more than one message.
    lender.stop();
    let text = std::fs::read(lender.state()).unwrap();
    let mut state: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let fences = state["devices"][DEVICE].clone();
    for device in ["dma1", "dma2"] {
        state["devices"][device] = fences.clone();
    }
    std::fs::write(lender.state(), state.to_string()).unwrap();
    lender.restart();
    let listed = Client::connect(&lender.socket().into(), None)
        .unwrap()
        .devices()
        .unwrap();
    let ids: Vec<_> = listed.iter().map(|entry| entry.id.as_str()).collect();
    assert_eq!(ids, [DEVICE, "dma1", "dma2"]);
    assert_eq!(listed[0].fences.len(), MAX_FENCES);
    assert_eq!(lender.status(DEVICE).entry, listed[0]);
    let _lent = lender.borrow(DEVICE, "a");
}
