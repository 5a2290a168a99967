//! A device whose DMA cannot be stopped at the end of a lease.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use farside_lender_protocol::{Request, Secret};

use super::{
    device::Done,
    host::{DEVICE, DEVICES, Host, until},
};
use crate::device_loop::Stopped;

const FOR_EVER: u32 = u32::MAX;

/// Lends [`DEVICE`] to a VM that disappears, while closing fails `times` times.
fn abandon(host: &Host, times: u32) {
    let (peer, token) = host.borrow("a");
    let registers = host.registers(token).unwrap();
    host.failing_closes.store(times, Ordering::Relaxed);
    drop((peer, registers));
    until("a close has failed", || {
        host.log().contains(&Done::CloseFailed)
    });
}

fn failed_closes(host: &Host) -> usize {
    let log = host.log();
    log.iter()
        .filter(|done| **done == Done::CloseFailed)
        .count()
}

#[test]
fn a_close_that_fails_is_tried_again_with_pauses_and_the_lease_stays() {
    let host = Host::new();
    abandon(&host, FOR_EVER);
    // The thread handles requests between two attempts, and the device is not lent to
    // others.
    assert_eq!(host.holder().as_deref(), Some("a"));
    let entry = host
        .client("b")
        .status(&DEVICE.parse().unwrap())
        .unwrap()
        .entry;
    let problem = entry.problem.unwrap_or_default();
    assert!(problem.contains("cannot be written"), "{problem}");
    host.client("b")
        .describe(&DEVICES[1].parse().unwrap())
        .unwrap();
    let failed = failed_closes(&host);
    let began = Instant::now();
    host.failing_closes.store(3, Ordering::Relaxed);
    host.wait_until_free();
    // The pauses after three failed closes that were not the first: 200, 400 and 800 ms, or
    // longer.
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(1400), "{took:?}");
    let log = host.log();
    assert!(failed_closes(&host) >= failed + 3, "{log:?}");
    let (first, rest) = log.split_first().unwrap();
    assert_eq!(*first, Done::Begin, "{log:?}");
    let rest: Vec<_> = rest
        .iter()
        .skip_while(|done| **done == Done::CloseFailed)
        .collect();
    assert_eq!(rest, [&Done::Close, &Done::Settle, &Done::End], "{log:?}");
    host.borrow("b");
}

#[test]
fn a_handover_is_refused_while_the_lease_cannot_be_ended_and_works_afterwards() {
    let host = Host::new();
    abandon(&host, FOR_EVER);
    let secret = Secret::random().unwrap();
    let handover = || {
        let request = Request::Handover {
            device: DEVICE.parse().unwrap(),
            vm: "a".into(),
            migration: "m1".into(),
            supersedes: None,
            secret,
        };
        host.operator().call(request, 0)
    };
    let error = handover().unwrap_err();
    assert!(error.message.contains("cannot be ended yet"), "{error}");
    assert!(error.message.contains("cannot be written"), "{error}");
    host.failing_closes.store(0, Ordering::Relaxed);
    host.wait_until_free();
    handover().unwrap();
}

#[test]
fn a_lender_stops_although_a_device_never_closes_and_keeps_the_device_open() {
    let mut host = Host::new();
    abandon(&host, FOR_EVER);
    let began = Instant::now();
    assert_eq!(host.stop(), Stopped::Unclosed);
    assert!(began.elapsed() < Duration::from_secs(5));
    // The first attempts pause for at least 100 ms: none is made without a pause.
    assert!(failed_closes(&host) < 50, "{:?}", host.log());
    let log = host.log();
    assert!(!log.contains(&Done::End), "{log:?}");
    assert!(!log.contains(&Done::Drop), "{log:?}");
}

#[test]
fn a_lender_that_stops_drops_a_device_that_closes() {
    let mut host = Host::new();
    assert_eq!(host.stop(), Stopped::Closed);
    assert_eq!(host.log(), [Done::Drop]);
}
