//! Requests of operators: revoking, adding and removing devices, and their availability.

use std::time::{Duration, Instant};

use farside_lender_protocol::{
    Availability, Client, DeviceEntry, ErrorKind, MAX_REVOKE_LIMIT, RemoteError, Request,
    Revocation, registers::Event,
};

use crate::{
    access::{ALICE, as_user},
    peer::{DEADLINE, DEVICE, Peer, Running, memory, until},
};

const HOUR: Duration = MAX_REVOKE_LIMIT;

fn operator(lender: &Running) -> Client {
    Client::connect(&lender.socket().into(), None).unwrap()
}

/// Revokes the device, and waits for the end.
fn revoke(lender: &Running, limit: Duration) -> Revocation {
    let mut client = operator(lender);
    loop {
        match client.revoke(&DEVICE.parse().unwrap(), limit).unwrap() {
            Revocation::Pending => {}
            ended => return ended,
        }
    }
}

fn set_available(lender: &Running, available: bool) -> Result<(), String> {
    let device = DEVICE.parse().unwrap();
    let set = operator(lender).set_available(&device, available);
    set.map_err(|error| error.to_string())
}

fn entry(lender: &Running) -> DeviceEntry {
    lender.status(DEVICE).entry
}

fn revoking(limit: Duration) -> Request {
    Request::Revoke {
        device: DEVICE.parse().unwrap(),
        limit_ms: limit.as_millis() as u64,
    }
}

/// The limit that the borrower is sent.
fn release_request(registers: &mut farside_lender_protocol::Channel) -> Duration {
    match registers.receive::<Event>(DEADLINE).unwrap().0 {
        Event::Release { limit_ms } => Duration::from_millis(limit_ms),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_borrower_that_releases_a_revoked_device_returns_it_in_order() {
    let lender = Running::new();
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    std::thread::scope(|scope| {
        let command = scope.spawn(|| revoke(&lender, HOUR));
        let limit = release_request(&mut registers);
        assert!(limit <= HOUR && limit > HOUR / 2, "{limit:?}");

        assert_eq!(entry(&lender).availability, Availability::Revoking);
        let error = lender.hello("b").borrow(DEVICE).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy);
        assert!(error.message.contains("is being revoked"), "{error}");
        let error = set_available(&lender, true).unwrap_err();
        assert!(error.contains("cannot be undone"), "{error}");
        // The lease is whole until its end.
        let ram = memory(4096);
        peer.open(&ram, 0, 1 << 40, 4096);

        peer.call(Request::Return, &[]).unwrap();
        assert_eq!(command.join().unwrap(), Revocation::Released);
    });
    let entry = entry(&lender);
    assert_eq!(entry.availability, Availability::Unavailable);
    assert_eq!(entry.borrowed_by, None);
}

#[test]
fn a_revoked_device_is_taken_after_the_limit_and_stays_unavailable() {
    let lender = Running::new();
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    let ram = memory(4096);
    peer.open(&ram, 0, 1 << 40, 4096);
    let limit = Duration::from_millis(200);
    let begin = Instant::now();
    assert_eq!(revoke(&lender, limit), Revocation::Ended);
    assert!(begin.elapsed() >= limit);
    assert!(release_request(&mut registers) <= limit);
    peer.expect_closed();
    lender.wait_until_free(DEVICE);

    let error = lender.hello("a").borrow(DEVICE).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Busy);
    for word in [DEVICE, "is unavailable", "farside devices --available dma0"] {
        assert!(error.message.contains(word), "no {word:?} in {error}");
    }
    // Asked again, as by an operator whose command was killed: the same answer.
    assert_eq!(revoke(&lender, HOUR), Revocation::Ended);
    set_available(&lender, true).unwrap();
    let (again, _registers) = lender.borrow(DEVICE, "b");
    assert!(again.generation > peer.generation);
}

#[test]
fn a_revocation_goes_on_without_its_requester_and_can_be_shortened() {
    let lender = Running::new();
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    let mut gone = lender.tool();
    gone.post(revoking(HOUR), &[]);
    release_request(&mut registers);
    drop(gone);
    assert_eq!(entry(&lender).availability, Availability::Revoking);
    assert_eq!(revoke(&lender, Duration::ZERO), Revocation::Ended);
    peer.expect_closed();
    // The borrower was asked once.
    assert!(registers.receive::<Event>(DEADLINE).is_err());
}

#[test]
fn a_lender_stops_during_a_revocation() {
    let mut lender = Running::new();
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    let mut command = lender.tool();
    command.post(revoking(HOUR), &[]);
    release_request(&mut registers);
    let begin = Instant::now();
    lender.stop();
    assert!(begin.elapsed() < Duration::from_secs(5));
    peer.expect_closed();
}

#[test]
fn a_device_that_is_not_lent_becomes_unavailable_at_once() {
    let lender = Running::new();
    assert_eq!(revoke(&lender, HOUR), Revocation::NotLent);
    lender.hello("a").borrow(DEVICE).unwrap_err();
    set_available(&lender, true).unwrap();
    // Without revoking it: the lease stays, and there is no next one.
    let (mut peer, _registers) = lender.borrow(DEVICE, "a");
    set_available(&lender, false).unwrap();
    peer.call(Request::EnableBusMaster, &[]).unwrap();
    peer.call(Request::Return, &[]).unwrap();
    let error = lender.hello("a").borrow(DEVICE).unwrap_err();
    assert!(error.message.contains("is unavailable"), "{error}");
    let too_long = revoking(HOUR + Duration::from_millis(1));
    lender.tool().refused(too_long, &[], &["3600s"]);
}

/// A table in the form of the configuration file.
fn table(id: &str, rest: &str) -> String {
    format!("id = {id:?}\n{rest}\n")
}

fn add(lender: &Running, table: String) -> Result<(), String> {
    let added = operator(lender).add_device(table);
    added.map_err(|error| error.to_string())
}

#[test]
fn devices_come_and_go_while_a_lender_runs() {
    let lender = Running::new();
    let (_peer, _registers) = lender.borrow(DEVICE, "a");
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let nvme = format!("model.nvme = {{ image = {:?} }}", image.path());
    let mut last = None;
    for _ in 0..2 {
        add(&lender, table("disk1", &nvme)).unwrap();
        add(&lender, table("dma1", "model.dma-test = {}")).unwrap();
        let ids = operator(&lender).devices().unwrap();
        let ids: Vec<_> = ids.iter().map(|entry| entry.id.as_str()).collect();
        assert_eq!(ids, ["disk1", "dma0", "dma1"]);

        let (mut peer, _registers) = lender.borrow("dma1", "b");
        let lent = operator(&lender).remove_device(&"dma1".parse().unwrap());
        let lent = lent.unwrap_err().to_string();
        for word in ["dma1", "VM b", "farside revoke dma1"] {
            assert!(lent.contains(word), "no {word:?} in {lent}");
        }
        peer.call(Request::Return, &[]).unwrap();
        // Never a generation that an earlier device of this id had.
        assert!(last < Some(peer.generation));
        last = Some(peer.generation);
        for id in ["dma1", "disk1"] {
            operator(&lender)
                .remove_device(&id.parse().unwrap())
                .unwrap();
            let error = lender.hello("b").borrow(id).unwrap_err();
            assert_eq!(error.kind, ErrorKind::UnknownDevice);
        }
    }
    assert_eq!(lender.holder(DEVICE).as_deref(), Some("a"));
}

#[test]
fn a_device_without_a_disk_is_not_resized() {
    let lender = Running::new();
    for (id, fault) in [(DEVICE, "cannot resize device dma0"), ("disk7", "disk7")] {
        let device = id.parse().unwrap();
        let error = operator(&lender).resize_device(&device).unwrap_err();
        assert!(error.to_string().contains(fault), "{error}");
    }
    // Nor while it is lent.
    let (_peer, _registers) = lender.borrow(DEVICE, "a");
    let device = DEVICE.parse().unwrap();
    let error = operator(&lender).resize_device(&device).unwrap_err();
    assert!(error.to_string().contains("cannot resize"), "{error}");
}

#[test]
fn a_device_that_cannot_be_added_is_refused_by_its_fault() {
    let lender = Running::new();
    for (added, fault) in [
        (table(DEVICE, "model.dma-test = {}"), "has one of that id"),
        (
            table("fn0", "vfio = { function = \"0000:03:00.0\" }"),
            "restart the lender",
        ),
        (
            table("disk1", "model.nvme = { image = \"/nowhere/disk1\" }"),
            "/nowhere/disk1",
        ),
        (
            table(
                "dma1",
                "model.dma-test = {}\nborrowers = [\"user=4242001\"]",
            ),
            "does not admit user 4242001",
        ),
        (table("dma1", "model.nvm = {}"), "`nvm`"),
        (table("../dma1", "model.dma-test = {}"), "../dma1"),
        ("disk1".into(), "invalid"),
    ] {
        let error = add(&lender, added).unwrap_err();
        assert!(error.contains(fault), "no {fault:?} in {error}");
    }
    assert_eq!(operator(&lender).devices().unwrap().len(), 1);
}

/// The refusals of all requests of operators.
fn attack(mut peer: Peer) -> Vec<RemoteError> {
    let device = || DEVICE.parse().unwrap();
    let requests = [
        revoking(Duration::ZERO),
        Request::SetAvailable {
            device: device(),
            available: false,
        },
        Request::AddDevice {
            table: table("dma1", "model.dma-test = {}"),
        },
        Request::RemoveDevice { device: device() },
        Request::ResizeDevice { device: device() },
    ];
    requests
        .map(|request| peer.call(request, &[]).unwrap_err())
        .into()
}

#[test]
fn borrowers_and_network_peers_operate_nothing() {
    let lender = Running::lending(&[&["user=4242001", "network"]]);
    let before = entry(&lender);
    let mut refusals = attack(Peer::connect(&lender.addresses[1]).greeted("a"));
    let socket = lender.socket().into();
    let of_user = as_user(ALICE, || attack(Peer::connect(&socket).greeted("a")));
    refusals.extend(of_user.into_iter().flatten());
    for error in refusals {
        assert_eq!(error.kind, ErrorKind::Denied, "{error}");
        assert!(
            error.message.contains("only root and its own user"),
            "{error}"
        );
    }
    assert_eq!(entry(&lender), before);
    assert_eq!(operator(&lender).devices().unwrap().len(), 1);
    let (_peer, _registers) = lender.borrow(DEVICE, "a");
    until("it is lent", || lender.holder(DEVICE).is_some());
}
