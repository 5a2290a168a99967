use std::sync::{Arc, Mutex};

use super::*;
use crate::etcd::tests::Fake;

const DISK0: &str = "/farside/devices/disk0";

fn announcing(fake: &Fake, lender: &str) -> Announcing {
    Announcing {
        etcd: fake.config(),
        pki: "/nonexistent".into(),
        lender: lender.parse().unwrap(),
        address: format!("tls:{lender}:7410").parse().unwrap(),
        instance: Instance::random().unwrap(),
    }
}

fn ids(names: &[&str]) -> Vec<DeviceId> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn worker(announcing: &Announcing, devices: &[&str]) -> Worker {
    Worker::new(announcing, ids(devices), Box::new(|_, _| {})).unwrap()
}

fn start(announcing: &Announcing, devices: &[&str]) -> Result<Announcer, AnnounceError> {
    Announcer::start(announcing, ids(devices), Box::new(|_, _| {}))
}

fn refusal(announcing: &Announcing, devices: &[&str]) -> String {
    start(announcing, devices).unwrap_err().to_string()
}

/// The lender that a key names.
fn holder(fake: &Fake, key: &str) -> Option<String> {
    let store = fake.store();
    let (value, ..) = store.keys.get(key)?;
    Some(Record::parse(value)?.lender.to_string())
}

#[test]
fn a_second_lender_of_an_id_is_refused_with_the_name_of_the_first() {
    let fake = Fake::new();
    let first = start(&announcing(&fake, "rack1-a"), &["disk0"]).unwrap();
    let second = announcing(&fake, "rack1-b");
    let error = refusal(&second, &["disk1", "disk0"]);
    assert!(
        error.starts_with(
            "device disk0 is announced in etcd by lender rack1-a at tls:rack1-a:7410: "
        ),
        "{error}"
    );
    // It has announced nothing else either.
    assert_eq!(fake.store().keys.len(), 1);
    // One device more, at a lender that runs.
    let second = start(&second, &["disk1"]).unwrap();
    let error = second.add(&"disk0".parse().unwrap()).unwrap_err();
    assert!(error.contains("by lender rack1-a"), "{error}");
    first.remove(&"disk0".parse().unwrap());
    drop(first);
    second.add(&"disk0".parse().unwrap()).unwrap();
    assert_eq!(holder(&fake, DISK0).unwrap(), "rack1-b");
    drop(second);
    assert!(fake.store().keys.is_empty());
}

#[test]
fn a_lender_that_was_killed_takes_its_ids_over_when_it_starts_again() {
    let fake = Fake::new();
    let mut killed = worker(&announcing(&fake, "rack1-a"), &["disk0"]);
    killed.round(ROUND);
    let lease = fake.store().keys[DISK0].2;
    let again = start(&announcing(&fake, "rack1-a"), &["disk0"]).unwrap();
    assert_ne!(fake.store().keys[DISK0].2, lease);
    // The first one runs after all: it does not take the id back, and names its rival.
    killed.round(ROUND);
    let conflict = killed.conflict().unwrap();
    assert!(
        conflict.contains("by another run of lender rack1-a at tls:rack1-a:7410"),
        "{conflict}"
    );
    drop(again);
}

#[test]
fn ids_come_back_with_a_new_lease_unless_another_lender_has_taken_them() {
    let fake = Fake::new();
    let reports = Arc::new(Mutex::new(Vec::new()));
    let reported = Arc::clone(&reports);
    let mut first = Worker::new(
        &announcing(&fake, "rack1-a"),
        ids(&["disk0", "disk1"]),
        Box::new(move |device, problem| {
            reported.lock().unwrap().push((device.to_string(), problem));
        }),
    )
    .unwrap();
    first.round(ROUND);
    let lease = first.lease;
    // etcd has lost it for longer than the lease, and disk1 has gone to another.
    fake.silence(true);
    first.round(ROUND);
    assert_eq!(first.answers, Some(false));
    fake.silence(false);
    fake.store().expire();
    let mut second = worker(&announcing(&fake, "rack1-b"), &["disk1"]);
    second.round(ROUND);
    assert_eq!(second.conflict(), None);
    first.round(ROUND);
    assert_eq!(first.answers, Some(true));
    assert_ne!(first.lease, lease);
    assert_eq!(holder(&fake, DISK0).unwrap(), "rack1-a");
    assert_eq!(holder(&fake, "/farside/devices/disk1").unwrap(), "rack1-b");
    let conflict = first.conflict().unwrap();
    assert!(
        conflict.starts_with("device disk1 is announced in etcd by lender rack1-b"),
        "{conflict}"
    );
    // Each round tries again, and reports changes alone.
    first.round(ROUND);
    second.leave();
    first.round(ROUND);
    assert_eq!(first.conflict(), None);
    let expected = [
        ("disk1".to_owned(), Some(conflict)),
        ("disk1".to_owned(), None),
    ];
    assert_eq!(*reports.lock().unwrap(), expected);
}

#[test]
fn a_key_that_somebody_deletes_or_overwrites_is_noticed() {
    let fake = Fake::new();
    let mut lender = worker(&announcing(&fake, "rack1-a"), &["disk0"]);
    lender.round(ROUND);
    fake.store().keys.clear();
    lender.round(ROUND);
    assert_eq!(holder(&fake, DISK0).unwrap(), "rack1-a");
    for garbage in [&b"x"[..], b"", &[0xff; 100_000]] {
        let text = String::from_utf8_lossy(garbage).into_owned();
        fake.store().put(DISK0, text.as_bytes(), 0);
        lender.round(ROUND);
        let conflict = lender.conflict().unwrap();
        assert!(
            conflict.contains("something else than a lender at /farside/devices/disk0"),
            "{conflict}"
        );
        assert!(conflict.len() < 600);
        // It is not ours to overwrite.
        assert_eq!(fake.store().keys[DISK0].0, text.as_bytes());
    }
}

#[test]
fn without_etcd_a_lender_starts_and_announces_later() {
    let fake = Fake::new();
    fake.silence(true);
    let mut lender = worker(&announcing(&fake, "rack1-a"), &["disk0"]);
    lender.round(ROUND);
    assert_eq!((lender.answers, lender.conflict()), (Some(false), None));
    lender.add("disk1".parse().unwrap()).unwrap();
    fake.silence(false);
    lender.round(ROUND);
    assert_eq!(fake.store().keys.len(), 2);
}

#[test]
fn an_etcd_that_refuses_everything_costs_nothing_but_log_lines() {
    let fake = Fake::new();
    fake.say(401, br#"{"message":"etcdserver: user name is empty"}"#);
    let lender = start(&announcing(&fake, "rack1-a"), &["disk0"]).unwrap();
    lender.add(&"disk1".parse().unwrap()).unwrap();
}
