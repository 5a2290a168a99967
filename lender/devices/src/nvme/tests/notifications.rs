//! Notifications of other hosts' changes to registrations and reservation.

mod remote;

use std::time::{Duration, Instant};

use farside_medium::{Frame, HostIdentity, Link, Memory, Notifications};
use rustix::net::{Shutdown, shutdown};

use super::{
    crash,
    preempting::Wire,
    reservations::{
        ACQUIRE, PLACES, PREEMPT, PREEMPT_AND_ABORT, RELEASE, acquire, borrow, command, eventually,
        lend, register, report, set_host, sharing, two,
    },
    world::{
        Place::{Here, Lent},
        *,
    },
};
use crate::{
    Device,
    block::{MediumKeeper, Notice},
    nvme::{features::RESERVATIONS_MASKED, reservation_log::MOST_PAGES},
    test_links::links,
};

/// I/O command set specific, reservation log page available, log page 80h.
const AVAILABLE: u32 = 0x80_00_06;

/// Types of pages.
const REGISTRATION_PREEMPTED: u8 = 1;
const RESERVATION_RELEASED: u8 = 2;
const RESERVATION_PREEMPTED: u8 = 3;

/// Write exclusive, registrants only.
const REGISTRANTS_ONLY: u32 = 3;

/// Id of the first event request.
const EVENT: u16 = 5000;

const MASK: u32 = 0x82;
const INVALID_NAMESPACE: (u16, u16) = (0, 0xb);

fn listen(driver: &mut Driver, id: u16) {
    driver.submit_as(0, Sqe::new(0x0c), id);
    driver.poll();
}

/// Has the notifications come that were made before.
fn catch_up(driver: &mut Driver) {
    // A lender sends them behind the answer to the first.
    for _ in 0..2 {
        report(driver);
    }
    driver.enable_notifications();
    driver.poll();
}

#[track_caller]
fn expect_event(driver: &mut Driver, id: u16) {
    let Cqe {
        id: found,
        status,
        result,
        ..
    } = driver.wait(0);
    assert_eq!((found, status, result), (id, OK, AVAILABLE));
}

#[track_caller]
fn expect_no_event(driver: &mut Driver) {
    catch_up(driver);
    assert_eq!(driver.take(0), None);
}

/// Reads a page, and with `retains` keeps it and its event. Count, type and number of others.
fn page(driver: &mut Driver, retains: bool) -> (u64, u8, u8) {
    let dwords = 15 << 16;
    let sqe = Sqe::new(2).nsid(0xffff_ffff).prp(DATA, 0);
    driver.memory.put(DATA, &[0xff; 64]);
    let sqe = sqe.cdw(10, 0x80 | u32::from(retains) << 15 | dwords);
    assert_eq!(driver.admin(sqe).status, OK);
    let log = driver.memory.get(DATA, 64);
    let count = u64::from_le_bytes(log[..8].try_into().unwrap());
    let (kind, others) = (log[8], log[9]);
    let mut expected = vec![0; 64];
    if kind != 0 {
        expected[..8].copy_from_slice(&count.to_le_bytes());
        expected[8..16].copy_from_slice(&[kind, others, 0, 0, 1, 0, 0, 0]);
        assert_ne!(count, 0);
    }
    assert_eq!(log, expected);
    (count, kind, others)
}

/// Reads all pages: the count and type of each.
fn pages(driver: &mut Driver) -> Vec<(u64, u8)> {
    let mut pages = Vec::new();
    loop {
        match page(driver, false) {
            (0, 0, 0) => return pages,
            (count, kind, _) => pages.push((count, kind)),
        }
    }
}

fn set_mask(driver: &mut Driver, nsid: u32, mask: u32) -> (u16, u16) {
    let sqe = Sqe::new(0x09).nsid(nsid).cdw(10, MASK).cdw(11, mask);
    driver.admin(sqe).status
}

fn take(driver: &mut Driver, kind: u32, key: u64) {
    let status = command(driver, ACQUIRE, kind << 8, [key, 0]).status;
    assert_eq!(status, OK);
}

fn release(driver: &mut Driver, kind: u32, key: u64) {
    assert_eq!(command(driver, RELEASE, kind << 8, [key, 0]).status, OK);
}

fn clear(driver: &mut Driver, key: u64) {
    assert_eq!(command(driver, RELEASE, 1, [key, 0]).status, OK);
}

fn begin(driver: &mut Driver, id: u128) {
    driver.enable();
    driver.create_pair(1, 64);
    assert_eq!(set_host(driver, id).status, OK);
}

/// Registered with keys 10, 11 and so on, as processes that can be killed.
fn registered<const N: usize>(places: [Place; N]) -> [Driver; N] {
    let mut all = sharing(places);
    for ((driver, id), key) in all.iter_mut().zip(100..).zip(10..) {
        // As a lease begins.
        driver.nvme.reset();
        driver.keep_state();
        begin(driver, id);
        assert_eq!(register(driver, key).status, OK);
    }
    all
}

/// With an event request each.
fn ready<const N: usize>(places: [Place; N]) -> [Driver; N] {
    let mut all = registered(places);
    for driver in &mut all {
        listen(driver, EVENT);
    }
    all
}

#[test]
fn each_type_arrives_at_the_other_hosts_that_it_concerns() {
    for places in [[Here; 3], [Lent; 3], [Here, Lent, Here], [Lent, Here, Lent]] {
        let mut all = ready(places);
        let expect = |all: &mut [Driver; 3], types: [u8; 3], id: u16| {
            for (driver, kind) in all.iter_mut().zip(types) {
                catch_up(driver);
                if kind == 0 {
                    expect_no_event(driver);
                    assert_eq!(pages(driver), []);
                } else {
                    expect_event(driver, id);
                    listen(driver, id + 1);
                    let (count, found, others) = page(driver, false);
                    assert_eq!((found, others), (kind, 0), "{places:?}");
                    assert!(count > 0);
                    expect_no_event(driver);
                    assert_eq!(pages(driver), []);
                }
            }
        };
        let [first, ..] = &mut all;
        take(first, REGISTRANTS_ONLY, 10);
        release(first, REGISTRANTS_ONLY, 10);
        let released = [0, RESERVATION_RELEASED, RESERVATION_RELEASED];
        expect(&mut all, released, EVENT);

        let [first, second, _] = &mut all;
        take(first, 1, 10);
        // The holder.
        assert_eq!(acquire(second, PREEMPT, 11, 10).status, OK);
        expect(&mut all, [REGISTRATION_PREEMPTED, 0, 0], EVENT);

        let [first, second, _] = &mut all;
        assert_eq!(register(first, 10).status, OK);
        // Another registrant.
        assert_eq!(acquire(second, PREEMPT_AND_ABORT, 11, 10).status, OK);
        expect(&mut all, [REGISTRATION_PREEMPTED, 0, 0], EVENT + 1);

        let [_, _, third] = &mut all;
        clear(third, 12);
        expect(&mut all, [0, RESERVATION_PREEMPTED, 0], EVENT + 1);
    }
}

#[test]
fn an_idle_host_is_notified_within_about_a_second() {
    for place in [Here, Lent] {
        let [mut first, mut second] = ready([Here, place]);
        catch_up(&mut second);
        second.until("rest", |driver| {
            !driver.poll() && driver.enable_notifications()
        });
        let looks_again = (place == Here).then_some(Duration::from_secs(1));
        assert_eq!(second.nvme.looks_again(), looks_again);
        assert!(!second.nvme.is_polled());
        let start = Instant::now();
        assert_eq!(acquire(&mut first, PREEMPT, 10, 11).status, OK);
        // Its driver does nothing.
        expect_event(&mut second, EVENT);
        assert!(start.elapsed() < Duration::from_secs(3), "{place:?}");
        assert_eq!(pages(&mut second), [(1, REGISTRATION_PREEMPTED)]);
        // Nor is it looked for if it is not wanted, or the controller is off.
        assert_eq!(set_mask(&mut second, 1, RESERVATIONS_MASKED), OK);
        assert_eq!(second.nvme.looks_again(), None);
        assert_eq!(set_mask(&mut second, 1, 0), OK);
        second.write32(0x14, 0);
        second.until("disabled state", |driver| driver.read32(0x1c) & 1 == 0);
        assert_eq!(second.nvme.looks_again(), None);
    }
    let alone = Driver::ready(ENGINES[0]);
    assert_eq!(alone.nvme.looks_again(), None);
}

#[test]
fn masked_types_make_no_pages() {
    for places in PLACES {
        for nsid in [1, 0xffff_ffff] {
            for kind in 1..=3 {
                let [mut first, mut second] = registered(places);
                assert_eq!(set_mask(&mut second, nsid, 1 << kind), OK);
                for key in [11, 12] {
                    take(&mut first, REGISTRANTS_ONLY, 10);
                    release(&mut first, REGISTRANTS_ONLY, 10);
                    assert_eq!(acquire(&mut first, PREEMPT, 10, key).status, OK);
                    assert_eq!(register(&mut second, 12).status, OK);
                }
                clear(&mut first, 10);
                catch_up(&mut second);
                let all = [2, 1, 2, 1, 3];
                let left = all.into_iter().filter(|it| *it != kind);
                let left: Vec<_> = (1..).zip(left).collect();
                assert_eq!(pages(&mut second), left);
            }
        }
    }
}

#[test]
fn a_mask_takes_effect_when_it_is_set() {
    for places in PLACES {
        let [mut first, mut second] = registered(places);
        assert_eq!(set_mask(&mut second, 1, RESERVATIONS_MASKED), OK);
        take(&mut first, REGISTRANTS_ONLY, 10);
        release(&mut first, REGISTRANTS_ONLY, 10);
        catch_up(&mut second);
        // Not made of what came before.
        assert_eq!(set_mask(&mut second, 1, 0), OK);
        listen(&mut second, EVENT);
        expect_no_event(&mut second);
        assert_eq!(pages(&mut second), []);
        clear(&mut first, 10);
        catch_up(&mut second);
        expect_event(&mut second, EVENT);
        // Made, and stays.
        assert_eq!(set_mask(&mut second, 1, RESERVATIONS_MASKED), OK);
        assert_eq!(pages(&mut second), [(1, RESERVATION_PREEMPTED)]);
    }
}

#[test]
fn a_mask_is_of_a_namespace() {
    let [mut first, _second] = two([Here, Here]);
    let get = |driver: &mut Driver, nsid: u32, select: u32| {
        let cqe = driver.admin(Sqe::new(0x0a).nsid(nsid).cdw(10, MASK | select << 8));
        (cqe.status, cqe.result)
    };
    for nsid in [0, 2, 0xffff_fffe] {
        assert_eq!(
            set_mask(&mut first, nsid, 2),
            INVALID_NAMESPACE,
            "{nsid:#x}"
        );
    }
    for nsid in [0, 2, 0xffff_ffff] {
        assert_eq!(get(&mut first, nsid, 0).0, INVALID_NAMESPACE, "{nsid:#x}");
    }
    assert_eq!(get(&mut first, 1, 0), (OK, 0));
    // Reserved bits are not kept.
    for (mask, kept) in [(2, 2), (4, 4), (8, 8), (u32::MAX, 0xe), (0x11, 0)] {
        for nsid in [1, 0xffff_ffff] {
            assert_eq!(set_mask(&mut first, nsid, mask), OK);
            assert_eq!(get(&mut first, 1, 0), (OK, kept));
        }
    }
    // Default, saved, capabilities: of a namespace, and changeable.
    assert_eq!(set_mask(&mut first, 1, 2), OK);
    let selected = [1, 2, 3].map(|select| get(&mut first, 1, select));
    assert_eq!(selected, [(OK, 0), (OK, 0), (OK, 6)]);
    let save = Sqe::new(0x09).nsid(1).cdw(10, MASK | 1 << 31);
    assert_eq!(first.admin(save).status, (1, 0xd));
    // One alone has no such feature, nor log.
    let mut alone = Driver::ready(ENGINES[0]);
    assert_eq!(set_mask(&mut alone, 1, 2), (0, 2));
    let log = Sqe::new(2).nsid(1).prp(DATA, 0).cdw(10, 0x80 | 15 << 16);
    assert_eq!(alone.admin(log).status, (1, 9));
}

#[test]
fn a_page_is_read_once_unless_it_is_retained() {
    for places in PLACES {
        let [mut first, mut second] = ready(places);
        for kind in [REGISTRANTS_ONLY, 5] {
            take(&mut first, kind, 10);
            release(&mut first, kind, 10);
        }
        clear(&mut first, 10);
        catch_up(&mut second);
        expect_event(&mut second, EVENT);
        listen(&mut second, EVENT + 1);
        let oldest = (1, RESERVATION_RELEASED, 2);
        for _ in 0..2 {
            assert_eq!(page(&mut second, true), oldest);
        }
        // In parts, of which the last one drops it.
        let part = |offset: u32, retains: u32| {
            let sqe = Sqe::new(2).nsid(1).prp(DATA, 0).cdw(12, offset);
            sqe.cdw(10, 0x80 | retains << 15 | 3 << 16)
        };
        assert_eq!(second.admin(part(0, 1)).status, OK);
        let bytes = second.memory.get(DATA, 16);
        assert_eq!(bytes, [1, 0, 0, 0, 0, 0, 0, 0, 2, 2, 0, 0, 1, 0, 0, 0]);
        // A read that fails has no effect.
        let failing = part(0, 0).prp(8, 0);
        assert_ne!(second.admin(failing).status, OK);
        assert_ne!(second.admin(part(68, 0)).status, OK);
        // Nor has one of nothing.
        assert_eq!(second.admin(part(64, 0)).status, OK);
        expect_no_event(&mut second);
        assert_eq!(second.admin(part(48, 0)).status, OK);
        assert_eq!(second.memory.get(DATA, 16), [0; 16]);
        assert_eq!(page(&mut second, false), (2, RESERVATION_RELEASED, 1));
        assert_eq!(page(&mut second, false), (3, RESERVATION_PREEMPTED, 0));
        assert_eq!(page(&mut second, false), (0, 0, 0));
        expect_no_event(&mut second);
    }
}

#[test]
fn events_are_masked_until_a_page_is_read() {
    for places in PLACES {
        let [mut first, mut second] = ready(places);
        let release = |first: &mut Driver, second: &mut Driver| {
            take(first, REGISTRANTS_ONLY, 10);
            self::release(first, REGISTRANTS_ONLY, 10);
            catch_up(second);
        };
        release(&mut first, &mut second);
        expect_event(&mut second, EVENT);
        listen(&mut second, EVENT + 1);
        release(&mut first, &mut second);
        expect_no_event(&mut second);
        assert_eq!(page(&mut second, true), (1, RESERVATION_RELEASED, 1));
        release(&mut first, &mut second);
        expect_no_event(&mut second);
        // What is left was in the number of others.
        assert_eq!(page(&mut second, false), (1, RESERVATION_RELEASED, 2));
        expect_no_event(&mut second);
        release(&mut first, &mut second);
        expect_event(&mut second, EVENT + 1);
        let released = [2, 3, 4].map(|count| (count, RESERVATION_RELEASED));
        assert_eq!(pages(&mut second), released);
        // Without a request: the event waits for one, as long as pages are left.
        release(&mut first, &mut second);
        release(&mut first, &mut second);
        assert_eq!(page(&mut second, false), (5, RESERVATION_RELEASED, 1));
        listen(&mut second, EVENT);
        expect_event(&mut second, EVENT);
        assert_eq!(pages(&mut second), [(6, RESERVATION_RELEASED)]);
        release(&mut first, &mut second);
        assert_eq!(pages(&mut second), [(7, RESERVATION_RELEASED)]);
        listen(&mut second, EVENT);
        expect_no_event(&mut second);
    }
}

#[test]
fn a_reset_drops_all() {
    for places in PLACES {
        let [mut first, mut second] = ready(places);
        assert_eq!(acquire(&mut first, PREEMPT, 10, 11).status, OK);
        catch_up(&mut second);
        // This one is on its way, or is not even sent.
        assert_eq!(register(&mut second, 11).status, OK);
        assert_eq!(acquire(&mut first, PREEMPT, 10, 11).status, OK);
        begin(&mut second, 101);
        listen(&mut second, EVENT);
        expect_no_event(&mut second);
        assert_eq!(pages(&mut second), []);
        let cqe = second.admin(Sqe::new(0x0a).nsid(1).cdw(10, MASK));
        assert_eq!((cqe.status, cqe.result), (OK, 0));
        assert_eq!(register(&mut second, 11).status, OK);
        clear(&mut first, 10);
        catch_up(&mut second);
        expect_event(&mut second, EVENT);
        assert_eq!(pages(&mut second), [(1, RESERVATION_PREEMPTED)]);
    }
}

/// Restarts as if SIGKILL had come in between two polls.
fn restart(driver: &mut Driver) {
    driver.nvme.detach_state();
    driver.restart();
}

#[test]
fn what_a_host_has_not_read_outlives_the_process() {
    for places in PLACES {
        let [mut first, mut second] = ready(places);
        catch_up(&mut second);
        assert_eq!(set_mask(&mut second, 1, 1 << REGISTRATION_PREEMPTED), OK);
        take(&mut first, REGISTRANTS_ONLY, 10);
        release(&mut first, REGISTRANTS_ONLY, 10);
        catch_up(&mut second);
        expect_event(&mut second, EVENT);
        listen(&mut second, EVENT);
        // While there is no process.
        second.nvme.detach_state();
        assert_eq!(acquire(&mut first, PREEMPT, 10, 11).status, OK);
        second.restart();
        assert_eq!(register(&mut second, 11).status, OK);
        clear(&mut first, 10);
        for _ in 0..2 {
            // Masked, by its type and until a page is read.
            expect_no_event(&mut second);
            restart(&mut second);
        }
        assert_eq!(page(&mut second, false), (1, RESERVATION_RELEASED, 1));
        restart(&mut second);
        // It was read, and is not reported anew.
        expect_no_event(&mut second);
        assert_eq!(page(&mut second, false), (2, RESERVATION_PREEMPTED, 0));
        // An event that waits for a request.
        second.submit(0, Sqe::new(8).cdw(10, u32::from(EVENT) << 16));
        let aborted = second.wait(0);
        assert_eq!((aborted.id, aborted.status), (EVENT, (0, 7)));
        assert_eq!(second.wait(0).status, OK);
        for driver in [&mut first, &mut second] {
            assert_eq!(register(driver, 10).status, OK);
        }
        clear(&mut first, 10);
        catch_up(&mut second);
        restart(&mut second);
        listen(&mut second, EVENT);
        expect_event(&mut second, EVENT);
        assert_eq!(pages(&mut second), [(3, RESERVATION_PREEMPTED)]);
    }
}

/// Whatever of it is done when the process is killed, the guest gets the event and the page once.
fn kill_at_stores(place: Place, step: usize) -> u32 {
    let mut kills = 0;
    for point in (0..).step_by(step) {
        let [mut first, mut second] = ready([Here, place]);
        catch_up(&mut second);
        take(&mut first, REGISTRANTS_ONLY, 10);
        release(&mut first, REGISTRANTS_ONLY, 10);
        clear(&mut first, 10);
        crash::after(Some(point));
        catch_up(&mut second);
        expect_event(&mut second, EVENT);
        assert_eq!(page(&mut second, true), (1, RESERVATION_RELEASED, 1));
        assert_eq!(page(&mut second, false), (1, RESERVATION_RELEASED, 1));
        assert_eq!(page(&mut second, false), (2, RESERVATION_PREEMPTED, 0));
        let missed = crash::is_due();
        crash::after(None);
        listen(&mut second, EVENT);
        expect_no_event(&mut second);
        assert_eq!(page(&mut second, true), (0, 0, 0));
        kills += second.kills;
        if missed {
            break;
        }
        assert_eq!(second.kills, 1, "at point {point}");
    }
    println!("killed at {kills} points");
    kills
}

#[test]
fn a_controller_that_is_killed_at_any_store_reports_each_notification_once() {
    let kills = kill_at_stores(Here, 1);
    assert!(kills > 50, "{kills} points");
}

#[test]
fn a_controller_of_a_lender_that_is_killed_at_some_store_reports_each_notification_once() {
    let kills = kill_at_stores(Lent, 5);
    assert!(kills > 10, "{kills} points");
}

#[test]
fn a_change_whose_process_is_killed_notifies_once() {
    for places in PLACES {
        for point in 0..12 {
            let [mut first, mut second] = registered(places);
            crash::after(Some(point));
            let preempted = acquire(&mut first, PREEMPT, 10, 11);
            crash::after(None);
            assert_eq!(preempted.status, OK, "killed at point {point}");
            catch_up(&mut second);
            assert_eq!(pages(&mut second), [(1, REGISTRATION_PREEMPTED)]);
            catch_up(&mut first);
            assert_eq!(pages(&mut first), []);
        }
    }
}

#[test]
fn a_flood_uses_bounded_memory_and_its_losses_are_counted() {
    for places in PLACES {
        let [mut first, mut second] = ready(places);
        catch_up(&mut second);
        for _ in 0..150 {
            assert_eq!(acquire(&mut first, PREEMPT, 10, 11).status, OK);
            assert_eq!(register(&mut second, 11).status, OK);
        }
        catch_up(&mut second);
        expect_event(&mut second, EVENT);
        let left: Vec<_> = (0..MOST_PAGES as u64)
            .map(|n| (150 - MOST_PAGES as u64 + n + 1, REGISTRATION_PREEMPTED))
            .collect();
        restart(&mut second);
        assert_eq!(page(&mut second, true), (left[0].0, 1, 63));
        assert_eq!(pages(&mut second), left);
        if places[1] == Lent {
            continue;
        }
        // More than the file keeps, while it does not look.
        for _ in 0..100 {
            take(&mut first, REGISTRANTS_ONLY, 10);
            release(&mut first, REGISTRANTS_ONLY, 10);
        }
        catch_up(&mut second);
        let left: Vec<_> = (152..152 + 64).map(|n| (n, RESERVATION_RELEASED)).collect();
        assert_eq!(pages(&mut second), left, "151 is lost");
        clear(&mut first, 10);
        catch_up(&mut second);
        assert_eq!(pages(&mut second), [(216, RESERVATION_PREEMPTED)]);
    }
}
