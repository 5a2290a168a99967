//! A namespace that grows.

use farside_medium::{Frame, Link, Memory};

use super::{
    crash,
    entries::Cqe,
    world::{DATA, Driver, IMAGE, OK, Sqe, pattern},
};
use crate::{
    Device, ResizeError,
    block::{MAX_SIZE, MediumKeeper, SizeError, remote_medium},
    nvme::{Config, Nvme},
    test_links::links,
};

const MIB: u64 = 1 << 20;
const LBA_OUT_OF_RANGE: (u16, u16) = (0, 0x80);

/// Bits of Asynchronous Event Configuration.
const NOTICES: u32 = 1 << 8;

/// Notice, namespace attribute changed, log page 4.
const CHANGED: u32 = 0x04_00_02;

/// Id of the first event request.
const EVENT: u16 = 50;

/// With the events of Linux, and two requests for them.
fn listen(driver: &mut Driver) {
    assert_eq!(driver.set_feature(0x0b, NOTICES).status, OK);
    for id in [EVENT, EVENT + 1] {
        driver.submit_as(0, Sqe::new(0x0c), id);
    }
    driver.poll();
}

fn listening() -> Driver {
    let mut driver = Driver::ready_with(|_| {});
    listen(&mut driver);
    driver
}

/// As the lender's process does it.
fn grow(driver: &mut Driver, to: u64) {
    driver.lent.file.set_len(to).unwrap();
    driver.lent.grow(driver.config.block_size).unwrap();
    let resized = driver.with(|nvme, _| nvme.resize(to));
    assert_eq!(resized, Ok(()));
}

/// NSZE, NCAP and NUSE.
fn sizes(driver: &mut Driver) -> [u64; 3] {
    let data = driver.identify(0, 1);
    [0, 8, 16].map(|at| u64::from_le_bytes(data[at..at + 8].try_into().unwrap()) * 512)
}

/// The changed namespace list.
fn changed(driver: &mut Driver) -> u32 {
    let log = driver.log(4, 4096);
    assert_eq!(log[4..], [0; 4092]);
    u32::from_le_bytes(log[..4].try_into().unwrap())
}

#[track_caller]
fn expect_event(driver: &mut Driver, id: u16) {
    let Cqe {
        id: found,
        status,
        result,
        ..
    } = driver.wait(0);
    assert_eq!((found, status, result), (id, OK, CHANGED));
}

#[track_caller]
fn expect_no_event(driver: &mut Driver) {
    for _ in 0..3 {
        driver.poll();
    }
    assert_eq!(driver.take(0), None);
}

/// Writes and reads 4 KiB at byte `at`.
fn transfer(driver: &mut Driver, at: u64) -> (u16, u16) {
    let data = pattern(4096, at);
    driver.memory.put(DATA, &data);
    let write = driver.io(Sqe::new(1).nsid(1).prp(DATA, 0).blocks(at / 512, 8));
    if write.status == OK {
        driver.memory.put(DATA, &[0; 4096]);
        let read = driver.io(Sqe::new(2).nsid(1).prp(DATA, 0).blocks(at / 512, 8));
        assert_eq!(read.status, OK);
        assert_eq!(driver.memory.get(DATA, 4096), data);
        assert_eq!(driver.disk(at, 4096), data);
    }
    write.status
}

#[test]
fn the_driver_is_notified_and_finds_the_new_size() {
    let mut driver = listening();
    let offered = driver.identify(1, 0);
    assert_eq!(offered[92..96], NOTICES.to_le_bytes(), "OAES");
    assert_eq!(sizes(&mut driver), [IMAGE; 3]);
    assert_eq!(changed(&mut driver), 0);
    assert_eq!(transfer(&mut driver, IMAGE), LBA_OUT_OF_RANGE);
    expect_no_event(&mut driver);

    grow(&mut driver, IMAGE + MIB);
    expect_event(&mut driver, EVENT);
    assert_eq!(changed(&mut driver), 1);
    assert_eq!(changed(&mut driver), 0, "it was read");
    assert_eq!(sizes(&mut driver), [IMAGE + MIB; 3]);
    assert_eq!(transfer(&mut driver, IMAGE), OK);
    assert_eq!(transfer(&mut driver, IMAGE + MIB - 4096), OK);
    assert_eq!(transfer(&mut driver, IMAGE + MIB), LBA_OUT_OF_RANGE);
    expect_no_event(&mut driver);

    grow(&mut driver, IMAGE + 2 * MIB);
    expect_event(&mut driver, EVENT + 1);
    // The size that it has already is no change.
    assert_eq!(changed(&mut driver), 1);
    grow(&mut driver, IMAGE + 2 * MIB);
    driver.submit_as(0, Sqe::new(0x0c), EVENT);
    expect_no_event(&mut driver);
    assert_eq!(changed(&mut driver), 0);
}

#[test]
fn events_are_masked_until_the_list_is_read() {
    let mut driver = listening();
    grow(&mut driver, IMAGE + MIB);
    expect_event(&mut driver, EVENT);
    grow(&mut driver, IMAGE + 2 * MIB);
    expect_no_event(&mut driver);
    // With Retain Asynchronous Event it stays, and so does the list.
    let retaining = Sqe::new(2).prp(DATA, 0).cdw(10, 4 | 1 << 15 | 1023 << 16);
    assert_eq!(driver.admin(retaining).status, OK);
    assert_eq!(driver.memory.get_u32(DATA), 1);
    grow(&mut driver, IMAGE + 3 * MIB);
    expect_no_event(&mut driver);
    // A read that fails has no effect.
    let failing = Sqe::new(2).prp(8, 0).cdw(10, 4 | 1023 << 16);
    assert_ne!(driver.admin(failing).status, OK);
    expect_no_event(&mut driver);
    assert_eq!(changed(&mut driver), 1);
    expect_no_event(&mut driver);
    assert_eq!(sizes(&mut driver), [IMAGE + 3 * MIB; 3]);
    grow(&mut driver, IMAGE + 4 * MIB);
    expect_event(&mut driver, EVENT + 1);
}

#[test]
fn reading_the_list_drops_the_event_that_no_request_has_taken() {
    let mut driver = Driver::ready_with(|_| {});
    assert_eq!(driver.set_feature(0x0b, NOTICES).status, OK);
    grow(&mut driver, IMAGE + MIB);
    assert_eq!(changed(&mut driver), 1);
    driver.submit_as(0, Sqe::new(0x0c), EVENT);
    expect_no_event(&mut driver);
    grow(&mut driver, IMAGE + 2 * MIB);
    expect_event(&mut driver, EVENT);
    assert_eq!(changed(&mut driver), 1);
}

#[test]
fn a_change_before_the_event_is_enabled_is_reported() {
    let mut driver = Driver::ready_with(|_| {});
    grow(&mut driver, IMAGE + MIB);
    listen(&mut driver);
    expect_event(&mut driver, EVENT);
    // Once, until the list is read.
    assert_eq!(driver.set_feature(0x0b, NOTICES).status, OK);
    expect_no_event(&mut driver);
    assert_eq!(changed(&mut driver), 1);
    assert_eq!(driver.set_feature(0x0b, 0).status, OK);
    assert_eq!(driver.set_feature(0x0b, NOTICES).status, OK);
    expect_no_event(&mut driver);
}

#[test]
fn a_driver_that_does_not_want_the_event_finds_the_size() {
    let mut driver = Driver::ready_with(|_| {});
    assert_eq!(driver.set_feature(0x0b, 0xff).status, OK);
    driver.submit_as(0, Sqe::new(0x0c), EVENT);
    grow(&mut driver, IMAGE + MIB);
    expect_no_event(&mut driver);
    assert_eq!(sizes(&mut driver), [IMAGE + MIB; 3]);
    assert_eq!(changed(&mut driver), 1);
    // A reset is followed by Identify.
    grow(&mut driver, IMAGE + 2 * MIB);
    driver.enable();
    listen(&mut driver);
    expect_no_event(&mut driver);
    assert_eq!(changed(&mut driver), 0);
    assert_eq!(sizes(&mut driver), [IMAGE + 2 * MIB; 3]);
    assert_eq!(driver.feature(0x0b, 0).result, NOTICES);
}

#[test]
fn sizes_that_a_disk_cannot_have_change_nothing() {
    let mut driver = Driver::ready_with(|config| config.block_size = 4096);
    assert_eq!(driver.set_feature(0x0b, NOTICES).status, OK);
    driver.submit_as(0, Sqe::new(0x0c), EVENT);
    let from = IMAGE;
    for (to, fault) in [
        (
            IMAGE - 4096,
            SizeError::Shrinks {
                from,
                to: IMAGE - 4096,
            },
        ),
        (0, SizeError::Shrinks { from, to: 0 }),
        (
            IMAGE + 512,
            SizeError::NotMultiple {
                from,
                to: IMAGE + 512,
                block_size: 4096,
            },
        ),
        (
            MAX_SIZE + 1,
            SizeError::TooLarge {
                from,
                to: MAX_SIZE + 1,
            },
        ),
    ] {
        let resized = driver.with(|nvme, _| nvme.resize(to));
        assert_eq!(resized, Err(ResizeError::Size(fault)));
    }
    expect_no_event(&mut driver);
    assert_eq!(changed(&mut driver), 0);
    let data = driver.identify(0, 1);
    assert_eq!(data[..8], (IMAGE / 4096).to_le_bytes());
}

/// Restarts as if SIGKILL had come in between two polls.
fn restart(driver: &mut Driver) {
    driver.nvme.detach_state();
    driver.restart();
}

#[test]
fn a_disk_that_grows_while_its_process_is_killed_has_grown_for_the_next_one() {
    let mut driver = listening_with_state();
    driver.lent.file.set_len(IMAGE + MIB).unwrap();
    restart(&mut driver);
    expect_no_event(&mut driver);
    assert_eq!(sizes(&mut driver), [IMAGE; 3], "the lender has not looked");
    driver.lent.grow(512).unwrap();
    restart(&mut driver);
    expect_event(&mut driver, EVENT);
    // Masked, and in the list, for the next ones, too.
    for _ in 0..2 {
        restart(&mut driver);
        expect_no_event(&mut driver);
    }
    assert_eq!(changed(&mut driver), 1);
    restart(&mut driver);
    expect_no_event(&mut driver);
    assert_eq!(changed(&mut driver), 0);
    assert_eq!(transfer(&mut driver, IMAGE), OK);
    grow(&mut driver, IMAGE + 2 * MIB);
    expect_event(&mut driver, EVENT + 1);
}

fn listening_with_state() -> Driver {
    let mut driver = Driver::off(|_| {});
    driver.keep_state();
    driver.enable();
    driver.create_pair(1, 64);
    listen(&mut driver);
    driver
}

#[test]
fn a_process_that_has_less_than_the_guest_has_seen_does_not_go_on() {
    let mut driver = listening_with_state();
    grow(&mut driver, IMAGE + MIB);
    driver.nvme.detach_state();
    let state = driver.state.clone().unwrap();
    let image = super::world::clone(&driver.lent);
    let smaller = crate::block::Image {
        size: IMAGE,
        ..image
    };
    let mut next = Nvme::with_image("disk0", &driver.config, smaller).unwrap();
    next.reset();
    let error = next.set_state(state, true).unwrap_err();
    let sizes = [IMAGE, IMAGE + MIB].map(|size| size.to_string());
    assert!(sizes.iter().all(|size| error.contains(size)), "{error}");
}

/// Whatever of it is done when the process is killed, the guest gets the event once, and sees the size.
#[test]
fn a_controller_that_is_killed_at_any_store_reports_its_growth() {
    let mut kills = 0;
    for point in 0.. {
        let mut driver = listening_with_state();
        crash::after(Some(point));
        // The lender has the size before its worker.
        grow(&mut driver, IMAGE + MIB);
        expect_event(&mut driver, EVENT);
        assert_eq!(changed(&mut driver), 1);
        assert_eq!(sizes(&mut driver), [IMAGE + MIB; 3]);
        assert_eq!(transfer(&mut driver, IMAGE), OK);
        let missed = crash::is_due();
        crash::after(None);
        expect_no_event(&mut driver);
        kills += driver.kills;
        if missed {
            break;
        }
        assert_eq!(driver.kills, 1, "at point {point}");
    }
    assert!(kills > 20, "{kills} points");
}

/// A controller whose lender is the test.
fn remote() -> (Driver, Link, MediumKeeper) {
    let (near, far) = links();
    let mut driver = Driver::off(|_| {});
    let (medium, keeper) = remote_medium(IMAGE, near).unwrap();
    let config = Config::new("disk0");
    driver.nvme = Nvme::with_remote("disk0", &config, medium, (IMAGE, true)).unwrap();
    driver.enable();
    driver.create_pair(1, 64);
    listen(&mut driver);
    (driver, far, keeper)
}

#[test]
fn a_lender_in_another_host_reports_a_size() {
    let (mut driver, mut far, _keeper) = remote();
    let mut report = |driver: &mut Driver, size| {
        far.post(Frame::Size { size }, Memory::NONE);
        far.flush().unwrap();
        // As its owner does when it is woken.
        driver.enable_notifications();
        driver.poll();
    };
    // None of these is a size that the disk can have.
    for size in [0, 512, IMAGE - 512, IMAGE, IMAGE + 1, u64::MAX, MAX_SIZE] {
        report(&mut driver, size);
        assert_eq!(sizes(&mut driver), [IMAGE; 3], "{size}");
    }
    expect_no_event(&mut driver);
    assert_eq!(changed(&mut driver), 0);
    report(&mut driver, IMAGE + MIB);
    expect_event(&mut driver, EVENT);
    assert_eq!(sizes(&mut driver), [IMAGE + MIB; 3]);
    report(&mut driver, IMAGE);
    assert_eq!(sizes(&mut driver), [IMAGE + MIB; 3], "it does not shrink");
}

#[test]
fn a_lender_in_another_host_grows_a_disk() {
    let (mut driver, mut far, _keeper) = remote();
    for _ in 0..100 {
        far.post(Frame::Size { size: IMAGE + MIB }, Memory::NONE);
    }
    far.flush().unwrap();
    expect_event(&mut driver, EVENT);
    assert_eq!(sizes(&mut driver), [IMAGE + MIB; 3]);
    expect_no_event(&mut driver);
    assert_eq!(changed(&mut driver), 1);
    // A namespace that grows all the time raises the next event when the driver has read the list.
    for size in 2..100 {
        let size = IMAGE + size * MIB;
        far.post(Frame::Size { size }, Memory::NONE);
    }
    far.flush().unwrap();
    expect_event(&mut driver, EVENT + 1);
    driver.submit_as(0, Sqe::new(0x0c), EVENT);
    for _ in 0..10 {
        driver.enable_notifications();
        expect_no_event(&mut driver);
    }
    assert_eq!(sizes(&mut driver), [IMAGE + 99 * MIB; 3]);
}
