use farside_lender_protocol::Instance;

use super::*;
use crate::etcd::tests::Fake;

fn record(lender: &str) -> Record {
    let address = format!("tls:{lender}:7410").parse().unwrap();
    let instance = Instance::random().unwrap();
    Record::new(lender.parse().unwrap(), address, instance)
}

fn addresses(lenders: &[&str]) -> Vec<Address> {
    lenders.iter().map(|name| record(name).address).collect()
}

fn put(fake: &Fake, device: &str, value: &[u8]) {
    let key = format!("/farside/devices/{device}");
    fake.store().put(&key, value, 0);
}

#[test]
fn lenders_are_known_once_and_garbage_is_not() {
    let fake = Fake::new();
    let directory = tempfile::tempdir().unwrap();
    let discovery = Discovery {
        etcd: Some(fake.config()),
        mdns: false,
        pki: directory.path().into(),
        cache: directory.path().join("known/lenders.json"),
    };
    put(&fake, "disk0", &record("rack1-a").to_value());
    put(&fake, "disk1", &record("rack1-a").to_value());
    put(&fake, "disk2", &record("rack1-b").to_value());
    put(&fake, "../disk3", &record("rack1-c").to_value());
    put(&fake, "disk4", br#"{"format":1,"address":"/run/x"}"#);
    put(&fake, "disk5", b"x");
    let known = discovery.lenders();
    assert_eq!(known.now, addresses(&["rack1-a", "rack1-b"]));
    assert_eq!(known.before, []);

    // One does not reach etcd any more: it may still have its devices.
    fake.store().keys.remove("/farside/devices/disk2");
    let split = discovery.lenders();
    assert_eq!(split.now, addresses(&["rack1-a"]));
    assert_eq!(split.before, addresses(&["rack1-b"]));

    // etcd is gone.
    fake.silence(true);
    assert_eq!(discovery.lenders(), split);
    assert!(discovery.check().unwrap().is_err());
}

#[test]
fn no_more_lenders_are_asked_than_the_limit() {
    let fake = Fake::new();
    for n in 0..MAX_KNOWN + 50 {
        let lender = record(&format!("rack{n}"));
        put(&fake, &format!("disk{n}"), &lender.to_value());
    }
    let etcd = Etcd::new(&fake.config(), "/nonexistent".as_ref()).unwrap();
    let deadline = Instant::now() + ETCD;
    let answer = read(&etcd, &Keys::new("/farside"), deadline).unwrap();
    assert_eq!(answer.devices.len(), MAX_KNOWN + 50);
    assert_eq!(answer.lenders().len(), MAX_KNOWN);
}

#[test]
fn changes_name_the_device_and_both_lenders() {
    let of = |pairs: &[(&str, &str)]| -> BTreeMap<DeviceId, Record> {
        let pairs = pairs.iter();
        pairs
            .map(|(device, lender)| (device.parse().unwrap(), record(lender)))
            .collect()
    };
    let before = of(&[("disk0", "a"), ("disk1", "a"), ("disk2", "a")]);
    let after = of(&[("disk0", "a"), ("disk1", "b"), ("disk3", "b")]);
    let changes = changes(&before, &after);
    let lines: Vec<_> = changes.iter().map(Change::to_string).collect();
    assert_eq!(
        lines,
        [
            "disk1: no longer announced by lender a at tls:a:7410",
            "disk2: no longer announced by lender a at tls:a:7410",
            "disk1: announced by lender b at tls:b:7410",
            "disk3: announced by lender b at tls:b:7410",
        ]
    );
}
