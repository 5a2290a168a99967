//! Clients that are refused a device.

use std::time::Duration;

use farside_backend::{Backend, StartError};
use farside_devices::dma_test::{self, reg};
use farside_fabric::{NtbLimits, VmShare};
use farside_lender_protocol::{Client, Fences, HeldFence, Secret};
use rustix::io::Errno;

use crate::{
    guest::{CONFIG, Ram, enable, read_u32, small},
    host::{DMA, Host, Served, assert_closed, disk, dma_test, until},
    vmm::Vmm,
};

#[test]
fn a_taken_device_is_refused_at_the_version_by_its_holders_name() {
    let host = Host::new();
    let first = host.serve(DMA);
    let mut vmm = first.client(DMA);
    vmm.reset().unwrap();
    let second = Served::start(host.config("b", &[DMA]));
    let mut refused = second.connect(DMA);
    assert_eq!(refused.negotiate(), Err(Errno::BUSY));
    refused.expect_closed();
    let error = second.last_error();
    assert!(error.contains("borrowed by VM a"), "{error}");
    // The first is not disturbed, and the second can borrow it afterwards.
    assert_eq!(read_u32(&mut vmm, 0, reg::ID), dma_test::ID);
    drop(vmm);
    until("the device is returned", || first.state() == "described");
    let mut vmm = second.client(DMA);
    vmm.reset().unwrap();
    assert_eq!(second.state(), "leased");
}

/// As after an upgrade of a host to which a VM was moved. Otherwise it would boot without its device.
#[test]
fn a_fence_without_a_secret_is_refused_at_the_version_with_the_remedy() {
    let host = Host::new();
    let device = DMA.parse().unwrap();
    let secret = Secret::random().unwrap();
    let mut operator = Client::connect(&host.lender(), None).unwrap();
    let hand_over = operator.hand_over(&device, &"a".parse().unwrap(), "m1", None, secret);
    let generation = hand_over.unwrap();
    let fences = host.directory("fences.json");
    std::fs::write(&fences, format!("{{\"{DMA}\":{generation}}}")).unwrap();
    let served = Served::start(farside_backend::Config {
        fences: Some(fences.clone()),
        ..host.config("a", &[DMA])
    });
    let mut refused = served.connect(DMA);
    assert!(refused.negotiate().is_err());
    refused.expect_closed();
    let error = served.last_error();
    for words in ["had no secret", "`farside migration claim a`"] {
        assert!(error.contains(words), "no {words:?} in {error}");
    }
    let secret = Some(secret);
    let held = HeldFence { generation, secret };
    Fences([(device, held)].into()).save(&fences).unwrap();
    served.client(DMA).reset().unwrap();
}

/// Both have connected; the first reset borrows it.
#[test]
fn a_device_that_was_taken_in_between_reads_as_absent() {
    let host = Host::new();
    let (first, second) = (host.serve(DMA), Served::start(host.config("b", &[DMA])));
    let mut winner = first.client(DMA);
    let mut loser = second.client(DMA);
    winner.reset().unwrap();
    assert_eq!(loser.reset(), Err(Errno::BUSY));
    assert_eq!(read_u32(&mut loser, CONFIG, 0), !0);
    assert_eq!(read_u32(&mut loser, 0, reg::ID), !0);
    loser.try_write(0, reg::SCRATCH, &[1; 4]).unwrap();
    let _ram = small(&mut loser);
    loser.try_write(CONFIG, 4, &4u16.to_le_bytes()).unwrap();
    assert_eq!(second.state(), "described");
    assert_eq!(second.status().bytes_pinned, 0);
    drop(winner);
    until("the device is returned", || first.state() == "described");
    // After a reset, the guest finds it.
    loser.reset().unwrap();
    assert_eq!(read_u32(&mut loser, 0, reg::ID), dma_test::ID);
    assert!(enable(&mut loser));
}

#[test]
fn a_lender_that_is_away_refuses_the_version() {
    let mut host = Host::new();
    let served = host.serve(DMA);
    host.stop_lender();
    let mut vmm = served.connect(DMA);
    assert_eq!(vmm.negotiate(), Err(Errno::NODEV));
    vmm.expect_closed();
    let error = served.last_error();
    assert!(error.contains("is `farside lend` running?"), "{error}");
    host.start_lender();
    served.client(DMA).reset().unwrap();
}

#[test]
fn a_device_that_is_another_one_now_is_refused() {
    let mut host = Host::new();
    let served = host.serve(DMA);
    host.stop_lender();
    let dir = tempfile::tempdir().unwrap();
    host.lend_instead(vec![disk(DMA, dir.path())]);
    host.start_lender();
    let mut vmm = served.connect(DMA);
    assert_eq!(vmm.negotiate(), Err(Errno::IO));
    assert!(served.last_error().contains("restart the backend"));
}

#[test]
fn an_adapter_without_requester_entries_refuses_by_the_limits_name() {
    let limits = NtbLimits {
        requester_entries: 3,
        reserved_requesters: 1,
        ..NtbLimits::default()
    };
    let ids = ["dma0", "dma1", "dma2"];
    let host = Host::lending(limits, |_| ids.iter().map(|id| dma_test(id)).collect());
    let served = Served::start(host.config("a", &ids));
    let mut clients: Vec<Vmm> = ids.iter().map(|id| served.client(id)).collect();
    clients[0].reset().unwrap();
    clients[1].reset().unwrap();
    assert_eq!(clients[2].reset(), Err(Errno::NOSPC));
    let error = served.full_status().devices[2].last_error.clone();
    let error = error.expect("an error is reported");
    assert!(error.contains("requester-entries = 3"), "{error}");
    assert_eq!(host.lender_status("dma2").entry.borrowed_by, None);
    // One device is returned: its entry is free at once.
    drop(clients.remove(0));
    until("the device is returned", || served.state() == "described");
    clients[1].reset().unwrap();
}

#[test]
fn a_vm_that_wants_more_than_its_share_is_refused_by_the_limits_name() {
    let limits = NtbLimits {
        bar_size: 64 << 20,
        lut_entries: 64,
        per_vm: VmShare {
            lut_entries: Some(4),
            requester_entries: Some(1),
        },
        ..NtbLimits::default()
    };
    let ids = ["dma0", "dma1", "dma2"];
    let host = Host::lending(limits, |_| ids.iter().map(|id| dma_test(id)).collect());
    let served = Served::start(host.config("a", &ids[..2]));
    let mut first = served.client("dma0");
    first.reset().unwrap();
    let mut second = served.client("dma1");
    assert_eq!(second.reset(), Err(Errno::NOSPC));
    let error = served.full_status().devices[1].last_error.clone();
    let error = error.expect("an error is reported");
    assert!(error.contains("per-vm.requester-entries"), "{error}");
    // Another VM notices nothing.
    let other = Served::start(host.config("b", &ids[2..]));
    let mut third = other.client("dma2");
    let _ram = small(&mut third);
    third.reset().unwrap();
    assert!(enable(&mut third));
    // More RAM than four entries translate.
    let ram = Ram::new(5 << 20);
    first.map(0, 5 << 20, ram.fd(0)).unwrap();
    assert!(!enable(&mut first));
    let error = served.full_status().devices[0].last_error.clone();
    let error = error.expect("an error is reported");
    assert!(error.contains("per-vm.lut-entries"), "{error}");
}

#[test]
fn a_bus_master_enable_that_takes_too_long_is_refused() {
    let host = Host::new();
    let served = Served::start(farside_backend::Config {
        open_timeout: Duration::ZERO,
        message_timeout: Duration::ZERO,
        lost_after: Duration::from_secs(300),
        ..host.config("a", &[DMA])
    });
    let mut vmm = served.client(DMA);
    let _ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert!(!enable(&mut vmm));
    assert_closed(&host, &served, DMA, "leased");
    let error = served.last_error();
    assert!(error.contains("longer message timeout"), "{error}");
}

fn start_error(config: farside_backend::Config) -> StartError {
    match Backend::start(&config) {
        Err(error) => error,
        Ok(_) => panic!("it starts"),
    }
}

#[test]
fn a_backend_that_cannot_start_says_why() {
    let mut host = Host::new();
    let message = |config| start_error(config).to_string();
    assert!(message(host.config("a", &[DMA, DMA])).contains("named twice"));
    assert!(message(host.config("a", &["dma7"])).contains("no lender has device \"dma7\""));
    let other = Host::new();
    let mut at_both = host.config("b", &[DMA]);
    at_both.lenders.push(other.lender());
    let both = format!("at two lenders, {} and {}", host.lender(), other.lender());
    let refused = message(at_both);
    assert!(refused.contains(&both), "{refused}");
    let _served = host.serve(DMA);
    assert!(message(host.config("a", &[DMA])).contains("VM a has a backend already"));
    host.stop_lender();
    assert!(message(host.config("b", &[DMA])).contains("cannot reach the lender"));
}
