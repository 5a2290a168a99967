use farside_vfio_user::Errno;

use crate::harness::*;

const NONE: u32 = 1;
const BOOL: u32 = 2;
const EVENTFD: u32 = 4;
const MASK: u32 = 8;
const UNMASK: u32 = 16;
const TRIGGER: u32 = 32;

const INTX: u32 = 0;
const MSIX: u32 = 2;

fn set(flags: u32, index: u32, start: u32, count: u32) -> Vec<u8> {
    words(&[20, flags, index, start, count])
}

fn set_bool(flags: u32, start: u32, count: u32, data: &[u8]) -> Vec<u8> {
    let argsz = 20 + data.len() as u32;
    [words(&[argsz, flags, MSIX, start, count]), data.to_vec()].concat()
}

#[test]
fn eventfds_are_set_and_taken_away() {
    let mut wire = Wire::negotiated();
    let canaries = [TriggerCanary::new(), TriggerCanary::new()];
    let fds = [canaries[0].fd(), canaries[1].fd()];
    wire.call_fds(SET_IRQS, &set(EVENTFD | TRIGGER, MSIX, 2, 2), &fds)
        .unwrap();
    let present: Vec<bool> = wire.device.eventfds.iter().map(Option::is_some).collect();
    assert_eq!(
        present,
        [false, false, true, true, false, false, false, false]
    );

    // QEMU removes eventfds with a message without descriptors.
    wire.call(SET_IRQS, &set(EVENTFD | TRIGGER, MSIX, 2, 1))
        .unwrap();
    assert!(wire.device.eventfds[2].is_none() && wire.device.eventfds[3].is_some());

    wire.call(SET_IRQS, &set(NONE | TRIGGER, MSIX, 0, 0))
        .unwrap();
    assert!(wire.device.eventfds.iter().all(Option::is_none));
    assert!(canaries.iter().all(TriggerCanary::closed_elsewhere));
}

#[test]
fn triggers_by_none_and_by_bool() {
    let mut wire = Wire::negotiated();
    wire.call(SET_IRQS, &set(NONE | TRIGGER, MSIX, 6, 2))
        .unwrap();
    wire.call(SET_IRQS, &set_bool(BOOL | TRIGGER, 0, 3, &[1, 0, 255]))
        .unwrap();
    assert_eq!(wire.device.triggered, [6, 7, 0, 2]);
}

#[test]
fn masks_and_unmasks() {
    let mut wire = Wire::negotiated();
    wire.call(SET_IRQS, &set(NONE | MASK, INTX, 0, 1)).unwrap();
    wire.call(SET_IRQS, &set(NONE | UNMASK, INTX, 0, 1))
        .unwrap();
}

#[test]
fn short_requests_are_refused() {
    let mut wire = Wire::negotiated();
    wire.refused(SET_IRQS, &[], Errno::INVAL);
    wire.refused(SET_IRQS, &[0; 8], Errno::INVAL);
    wire.refused(
        SET_IRQS,
        &set(NONE | TRIGGER, MSIX, 0, 1)[..19],
        Errno::INVAL,
    );
    wire.refused(
        SET_IRQS,
        &words(&[3, NONE | TRIGGER, MSIX, 0, 1]),
        Errno::INVAL,
    );
    wire.refused(
        SET_IRQS,
        &words(&[19, NONE | TRIGGER, MSIX, 0, 1]),
        Errno::INVAL,
    );
}

#[test]
fn long_requests_are_refused() {
    let mut wire = Wire::negotiated();
    let long = [set(NONE | TRIGGER, MSIX, 0, 1), vec![0]].concat();
    wire.refused(SET_IRQS, &long, Errno::INVAL);
    assert!(wire.device.triggered.is_empty());
}

#[test]
fn unknown_types_are_refused() {
    let mut wire = Wire::negotiated();
    wire.refused(SET_IRQS, &set(NONE | TRIGGER, 5, 0, 1), Errno::INVAL);
    wire.refused(SET_IRQS, &set(NONE | TRIGGER, u32::MAX, 0, 1), Errno::INVAL);
}

#[test]
fn flags_that_contradict_themselves_are_refused() {
    let mut wire = Wire::negotiated();
    let bad = [
        0,
        NONE,
        TRIGGER,
        NONE | MASK | UNMASK,
        NONE | BOOL | MASK,
        NONE | EVENTFD | TRIGGER,
        NONE | TRIGGER | 1 << 6,
        NONE | TRIGGER | 1 << 31,
    ];
    for flags in bad {
        wire.refused(SET_IRQS, &set(flags, MSIX, 0, 1), Errno::INVAL);
    }
}

#[test]
fn ranges_outside_are_refused() {
    let mut wire = Wire::negotiated();
    for (start, count) in [(7, 2), (8, 1), (9, 1), (0, 9), (u32::MAX, 1), (1, u32::MAX)] {
        wire.refused(
            SET_IRQS,
            &set(NONE | TRIGGER, MSIX, start, count),
            Errno::INVAL,
        );
    }
    assert!(wire.device.triggered.is_empty());
}

#[test]
fn a_count_of_zero_only_disables_all() {
    let mut wire = Wire::negotiated();
    wire.refused(SET_IRQS, &set(NONE | TRIGGER, MSIX, 1, 0), Errno::INVAL);
    wire.refused(SET_IRQS, &set(NONE | MASK, MSIX, 0, 0), Errno::INVAL);
    wire.refused(SET_IRQS, &set(BOOL | TRIGGER, MSIX, 0, 0), Errno::INVAL);
    wire.refused(SET_IRQS, &set(EVENTFD | TRIGGER, MSIX, 0, 0), Errno::INVAL);
}

#[test]
fn booleans_must_be_as_many_as_vectors() {
    let mut wire = Wire::negotiated();
    wire.refused(
        SET_IRQS,
        &set_bool(BOOL | TRIGGER, 0, 2, &[1]),
        Errno::INVAL,
    );
    wire.refused(
        SET_IRQS,
        &set_bool(BOOL | TRIGGER, 0, 2, &[1; 3]),
        Errno::INVAL,
    );
    wire.refused(
        SET_IRQS,
        &set_bool(BOOL | TRIGGER, 0, u32::MAX, &[1]),
        Errno::INVAL,
    );
    // An argsz that does not cover them.
    let short = [words(&[20, BOOL | TRIGGER, MSIX, 0, 1]), vec![1]].concat();
    wire.refused(SET_IRQS, &short, Errno::INVAL);
    assert!(wire.device.triggered.is_empty());
}

#[test]
fn eventfds_must_be_as_many_as_vectors_or_none() {
    let mut wire = Wire::negotiated();
    for (count, sent) in [(2, 1), (1, 2), (8, 7)] {
        let canary = TriggerCanary::new();
        let fds = vec![canary.fd(); sent];
        let errno = wire
            .call_fds(SET_IRQS, &set(EVENTFD | TRIGGER, MSIX, 0, count), &fds)
            .unwrap_err();
        assert_eq!(errno, Errno::INVAL);
        assert!(canary.closed_elsewhere());
        wire.still_framed();
    }
}

#[test]
fn eventfds_come_beside_the_message_alone() {
    let mut wire = Wire::negotiated();
    let canary = TriggerCanary::new();
    // With the kernel's array of descriptor numbers.
    let payload = set_bool(EVENTFD | TRIGGER, 0, 1, &[0; 4]);
    let errno = wire
        .call_fds(SET_IRQS, &payload, &[canary.fd()])
        .unwrap_err();
    assert_eq!(errno, Errno::INVAL);
    assert!(canary.closed_elsewhere());
    assert!(wire.device.eventfds.iter().all(Option::is_none));
    wire.still_framed();
}

#[test]
fn what_is_not_an_eventfd_is_refused() {
    let mut wire = Wire::negotiated();
    let canary = Canary::new();
    let errno = wire
        .call_fds(
            SET_IRQS,
            &set(EVENTFD | TRIGGER, MSIX, 0, 1),
            &[canary.fd()],
        )
        .unwrap_err();
    assert_eq!(errno, Errno::INVAL);
    assert!(canary.closed_elsewhere());
    wire.still_framed();
}

#[test]
fn descriptors_without_the_eventfd_flag_are_refused() {
    let mut wire = Wire::negotiated();
    for payload in [
        set(NONE | TRIGGER, MSIX, 0, 1),
        set_bool(BOOL | TRIGGER, 0, 1, &[1]),
    ] {
        let canary = Canary::new();
        let errno = wire
            .call_fds(SET_IRQS, &payload, &[canary.fd()])
            .unwrap_err();
        assert_eq!(errno, Errno::INVAL);
        assert!(canary.closed_elsewhere());
        wire.still_framed();
    }
    assert!(wire.device.triggered.is_empty());
}
