//! A disk that grows.

use farside_medium::{Frame, Link, Memory};

use super::{
    crash,
    world::{
        DATA, DEVICE, Driver, IMAGE, IOERR, ISR, OK, READ, WRITE, pattern, readable, writable,
    },
};
use crate::{
    Device, ResizeError,
    block::{Image, MAX_SIZE, MediumKeeper, SizeError, remote_medium},
    test_links::links,
    virtio::{Config, VirtioBlk},
};

const MIB: u64 = 1 << 20;

/// The vector of the configuration.
const CONFIG: u16 = 0;

fn ready() -> Driver {
    let mut driver = Driver::ready(|_| {});
    driver.irq.raised.clear();
    driver
}

fn ready_with_state() -> Driver {
    let mut driver = Driver::off(|_| {});
    driver.keep_state();
    driver.start();
    driver.irq.raised.clear();
    driver
}

/// As the lender's process does it.
fn grow(driver: &mut Driver, to: u64) {
    driver.lent.file.set_len(to).unwrap();
    driver.lent.grow(512).unwrap();
    let resized = driver.with(|device, _| device.resize(to));
    assert_eq!(resized, Ok(()));
}

/// The capacity, in bytes.
fn size(driver: &mut Driver) -> u64 {
    driver.read(DEVICE, 8) * 512
}

fn generation(driver: &mut Driver) -> u64 {
    driver.read(21, 1)
}

/// How often the configuration's vector was raised since the last call.
fn changes(driver: &mut Driver) -> usize {
    for _ in 0..3 {
        driver.poll();
    }
    let raised = std::mem::take(&mut driver.irq.raised);
    raised.iter().filter(|&&vector| vector == CONFIG).count()
}

/// Writes and reads 4 KiB at byte `at`.
fn transfer(driver: &mut Driver, at: u64) -> u8 {
    let data = pattern(4096, at);
    driver.memory.put(DATA, &data);
    let (status, _) = driver.execute(WRITE, at / 512, &[readable(DATA, 4096)]);
    if status == OK {
        driver.memory.put(DATA, &[0; 4096]);
        assert_eq!(
            driver.execute(READ, at / 512, &[writable(DATA, 4096)]).0,
            OK
        );
        assert_eq!(driver.memory.get(DATA, 4096), data);
        assert_eq!(driver.disk(at, 4096), data);
    }
    status
}

#[test]
fn the_driver_is_notified_and_reads_the_capacity() {
    let mut driver = ready();
    assert_eq!((size(&mut driver), generation(&mut driver)), (IMAGE, 0));
    assert_eq!(transfer(&mut driver, IMAGE), IOERR);
    assert_eq!(changes(&mut driver), 0);
    grow(&mut driver, IMAGE + MIB);
    assert_eq!(changes(&mut driver), 1);
    assert_eq!(size(&mut driver), IMAGE + MIB);
    assert_eq!(generation(&mut driver), 1);
    assert_eq!(transfer(&mut driver, IMAGE), OK);
    assert_eq!(transfer(&mut driver, IMAGE + MIB - 4096), OK);
    assert_eq!(transfer(&mut driver, IMAGE + MIB), IOERR);
    // A repeated order notifies the driver again: it may have missed the interrupt.
    driver.irq.raised.clear();
    grow(&mut driver, IMAGE + MIB);
    assert_eq!((changes(&mut driver), generation(&mut driver)), (1, 1));
    // By the line, with its cause.
    driver.irq.intx = true;
    grow(&mut driver, IMAGE + 2 * MIB);
    driver.poll();
    assert!(driver.irq.line);
    assert_eq!(driver.read(ISR, 1), 2);
    assert!(!driver.irq.line);
}

#[test]
fn a_driver_is_notified_once_it_runs() {
    let mut driver = Driver::off(|_| {});
    driver.start();
    driver.memory.bus_master = false;
    driver.irq.raised.clear();
    grow(&mut driver, IMAGE + MIB);
    assert_eq!(changes(&mut driver), 0);
    driver.memory.bus_master = true;
    assert_eq!(changes(&mut driver), 1);
    // A reset is followed by a look at the configuration.
    driver.memory.bus_master = false;
    grow(&mut driver, IMAGE + 2 * MIB);
    driver.reset_device();
    driver.memory.bus_master = true;
    driver.start();
    assert_eq!(changes(&mut driver), 0);
    assert_eq!(size(&mut driver), IMAGE + 2 * MIB);
}

#[test]
fn sizes_that_a_disk_cannot_have_change_nothing() {
    let mut driver = Driver::ready(|config| config.block_size = 4096);
    driver.irq.raised.clear();
    let from = IMAGE;
    for (to, fault) in [
        (0, SizeError::Shrinks { from, to: 0 }),
        (
            IMAGE + 512,
            SizeError::NotMultiple {
                from,
                to: IMAGE + 512,
                block_size: 4096,
            },
        ),
        (u64::MAX, SizeError::TooLarge { from, to: u64::MAX }),
    ] {
        let resized = driver.with(|device, _| device.resize(to));
        assert_eq!(resized, Err(ResizeError::Size(fault)));
    }
    assert_eq!(changes(&mut driver), 0);
    assert_eq!((size(&mut driver), generation(&mut driver)), (IMAGE, 0));
}

#[test]
fn a_device_that_is_killed_at_any_store_reports_its_growth() {
    let mut kills = 0;
    for point in 0.. {
        let mut driver = ready_with_state();
        crash::after(Some(point));
        // The lender has the size before its worker.
        grow(&mut driver, IMAGE + MIB);
        let changes = changes(&mut driver);
        assert!((1..=2).contains(&changes), "{changes} at point {point}");
        assert_eq!(size(&mut driver), IMAGE + MIB);
        assert_ne!(generation(&mut driver), 0);
        assert_eq!(transfer(&mut driver, IMAGE), OK);
        let missed = crash::is_due();
        crash::after(None);
        kills += driver.kills;
        if missed {
            break;
        }
        assert_eq!(driver.kills, 1, "at point {point}");
    }
    assert!(kills > 10, "{kills} points");
}

#[test]
fn the_next_process_has_no_smaller_disk() {
    let mut driver = ready_with_state();
    grow(&mut driver, IMAGE + MIB);
    assert_eq!(changes(&mut driver), 1);
    for _ in 0..2 {
        driver.device.detach_state();
        driver.restart();
        // The interrupt of the former process may have been lost.
        assert_eq!(changes(&mut driver), 1);
        assert_eq!(size(&mut driver), IMAGE + MIB);
    }
    driver.device.detach_state();
    let smaller = Image {
        file: driver.lent.file.try_clone().unwrap(),
        size: IMAGE,
        ..driver.lent
    };
    let mut next = VirtioBlk::with_image("disk0", &driver.config, smaller).unwrap();
    let error = next.set_state(driver.state.clone().unwrap(), true);
    let error = error.unwrap_err();
    let sizes = [IMAGE, IMAGE + MIB].map(|size| size.to_string());
    assert!(sizes.iter().all(|size| error.contains(size)), "{error}");
}

/// A device whose lender is the test.
fn remote() -> (Driver, Link, MediumKeeper) {
    let (near, far) = links();
    let mut driver = Driver::off(|_| {});
    let (medium, keeper) = remote_medium(IMAGE, near).unwrap();
    let config = Config::new("disk0");
    driver.device = VirtioBlk::with_remote("disk0", &config, medium, (IMAGE, true)).unwrap();
    driver.start();
    driver.irq.raised.clear();
    (driver, far, keeper)
}

#[test]
fn a_lender_in_another_host_grows_a_disk_and_nothing_else() {
    let (mut driver, mut far, _keeper) = remote();
    let mut report = |driver: &mut Driver, size| {
        far.post(Frame::Size { size }, Memory::NONE);
        far.flush().unwrap();
        // As its owner does when it is woken.
        driver.enable_notifications();
        changes(driver)
    };
    for bytes in [0, 512, IMAGE - 512, IMAGE, IMAGE + 1, u64::MAX, MAX_SIZE] {
        assert_eq!(report(&mut driver, bytes), 0, "{bytes}");
        assert_eq!(size(&mut driver), IMAGE);
    }
    assert_eq!(report(&mut driver, IMAGE + MIB), 1);
    assert_eq!(size(&mut driver), IMAGE + MIB);
    assert_eq!(report(&mut driver, IMAGE), 0);
    assert_eq!(size(&mut driver), IMAGE + MIB);
}
