//! A lender takes a device back while a client uses it.

use std::{
    sync::mpsc,
    thread::{JoinHandle, spawn},
    time::Duration,
};

use farside_backend::{Config, Interrupts, ReleaseHook};
use farside_backend_api::BorrowState;
use farside_devices::dma_test::{self, reg};
use farside_lender_protocol::{Availability, Client, Revocation};
use rustix::io::Errno;

use crate::{
    guest::{CONFIG, Event, enable, read_u32, small},
    host::{DEADLINE, DMA, Host, Served, assert_closed, until},
    vmm::{DATA_EVENTFD, TRIGGER, Vmm},
};

const ERR: u32 = 3;
const REQ: u32 = 4;

const HOUR: Duration = Duration::from_secs(3600);

/// A backend, and what its hook was called with.
fn serve(host: &Host, interrupts: Interrupts) -> (Served, mpsc::Receiver<(String, Duration)>) {
    let (sender, requests) = mpsc::channel();
    let release = ReleaseHook::new(move |device, limit| {
        sender.send((device.to_string(), limit)).unwrap();
    });
    let served = Served::start(Config {
        interrupts,
        release: Some(release),
        ..host.config("a", &[DMA])
    });
    (served, requests)
}

/// `farside revoke`, until it ends.
fn revoke(host: &Host, limit: Duration) -> JoinHandle<Revocation> {
    let mut client = Client::connect(&host.lender(), None).unwrap();
    spawn(move || {
        loop {
            match client.revoke(&DMA.parse().unwrap(), limit).unwrap() {
                Revocation::Pending => {}
                ended => return ended,
            }
        }
    })
}

/// Takes the trigger of the error interrupt away, as QEMU does at an unplug.
fn unplug(vmm: &mut Vmm) {
    vmm.set_irqs::<Event>(ERR, DATA_EVENTFD | TRIGGER, 0, 1, &[])
        .unwrap();
}

#[test]
fn a_client_with_a_request_interrupt_is_asked_by_it_and_returns_the_device() {
    for interrupts in [Interrupts::Direct, Interrupts::Relayed] {
        let host = Host::new();
        let (served, hook) = serve(&host, interrupts);
        let mut vmm = served.client(DMA);
        let _ram = small(&mut vmm);
        vmm.reset().unwrap();
        let (request, error) = (Event::new(), Event::new());
        vmm.set_irqs(REQ, DATA_EVENTFD | TRIGGER, 0, 1, &[&request])
            .unwrap();
        vmm.set_irqs(ERR, DATA_EVENTFD | TRIGGER, 0, 1, &[&error])
            .unwrap();
        assert!(enable(&mut vmm));

        let revoke = revoke(&host, HOUR);
        assert_eq!(request.wait(), 1);
        // It works until the guest has released it.
        assert_eq!(read_u32(&mut vmm, 0, reg::ID), dma_test::ID);
        unplug(&mut vmm);
        assert_eq!(revoke.join().unwrap(), Revocation::Released);
        assert_eq!(request.count(), 0, "asked once");
        assert!(hook.try_recv().is_err());
        assert_closed(&host, &served, DMA, "described");
        let status = host.lender_status(DMA);
        assert_eq!(status.entry.availability, Availability::Unavailable);
    }
}

#[test]
fn a_guest_that_does_not_release_it_finds_it_gone_until_it_is_available() {
    let host = Host::new();
    let (served, hook) = serve(&host, Interrupts::Direct);
    let mut vmm = served.client(DMA);
    let _ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));

    let limit = Duration::from_millis(300);
    let revoke = revoke(&host, limit);
    let (device, left) = hook.recv_timeout(DEADLINE).unwrap();
    assert_eq!(device, DMA);
    assert!(left <= limit);
    assert_eq!(revoke.join().unwrap(), Revocation::Ended);
    until("the loss is seen", || {
        served.status().state == BorrowState::Lost
    });
    assert_eq!(read_u32(&mut vmm, 0, reg::ID), !0);
    assert_eq!(read_u32(&mut vmm, CONFIG, 0), !0);
    let status = served.status();
    assert_eq!((status.bytes_pinned, status.dma_windows), (0, 0));

    assert_eq!(vmm.reset(), Err(Errno::BUSY));
    let last = served.status().last_error.unwrap();
    assert!(last.contains("is unavailable"), "{last}");
    let mut operator = Client::connect(&host.lender(), None).unwrap();
    operator.set_available(&DMA.parse().unwrap(), true).unwrap();
    vmm.reset().unwrap();
    assert_closed(&host, &served, DMA, "leased");
    assert!(enable(&mut vmm));
}
