//! The transport: capabilities, common configuration, status machine, interrupts.

use farside_pci::{ConfigImage, regs};

use super::world::{
    DATA, DEVICE, Driver, F_ACCESS_PLATFORM, F_EVENT_IDX, F_FLUSH, F_MQ, F_RO, F_VERSION_1, ISR,
    NOTIFY, OK, PENDING, READ, TABLE, writable,
};
use crate::Device;

#[test]
fn the_capabilities_lead_to_the_registers() {
    let driver = Driver::off(|_| {});
    let description = driver.device.description();
    let image = ConfigImage::from(description.config.clone());
    assert_eq!(image.u16(regs::VENDOR_ID), 0x1af4);
    assert_eq!(image.u16(regs::DEVICE_ID), 0x1042);
    assert_eq!(image.u32(regs::CLASS_REVISION), 0x0100_0001);
    let mut found = Vec::new();
    let mut at = usize::from(image.u8(regs::CAPABILITY_LIST));
    while at != 0 {
        if image.u8(at) == 0x09 {
            let (bar, offset, len) = (image.u8(at + 4), image.u32(at + 8), image.u32(at + 12));
            assert_eq!(bar, 0);
            found.push((image.u8(at + 3), u64::from(offset), len));
        }
        at = usize::from(image.u8(at + 1));
    }
    let expected = [(1, 0, 56), (3, ISR, 1), (4, DEVICE, 60), (2, NOTIFY, 4 * 4)];
    assert_eq!(found, expected);
    assert_eq!(image.u32(0xd0 + 16), 4, "the multiplier");
    assert_eq!(description.msix_vectors, 5);
}

#[test]
fn features_are_negotiated() {
    let mut driver = Driver::off(|_| {});
    let offered = driver.offered();
    let has = |bit: u32| offered >> bit & 1 != 0;
    assert!(has(F_VERSION_1) && has(F_ACCESS_PLATFORM) && has(F_MQ) && !has(F_RO));
    for (features, accepted) in [
        (1 << F_VERSION_1, true),
        (offered, true),
        // Without version 1, and what is not offered.
        (offered & !(1 << F_VERSION_1), false),
        (1 << F_VERSION_1 | 1 << F_RO, false),
        (1 << F_VERSION_1 | 1 << 34, false),
    ] {
        driver.reset_device();
        driver.set_status(3);
        driver.accept(features);
        driver.set_status(0xb);
        let expected = if accepted { 0xb } else { 3 };
        assert_eq!(driver.status(), expected, "{features:#x}");
    }
    // Of features behind bit 63 none is offered.
    driver.reset_device();
    driver.write(0, 4, 2);
    assert_eq!(driver.read(4, 4), 0);
    driver.accept(1 << F_VERSION_1);
    driver.write(8, 4, 2);
    driver.write(12, 4, 1);
    driver.set_status(0xb);
    assert_eq!(driver.status(), 3);
    // They do not change once they are accepted.
    driver.reset_device();
    driver.accept(1 << F_VERSION_1);
    driver.set_status(0xb);
    driver.accept(1 << F_VERSION_1 | 1 << F_FLUSH);
    driver.write(8, 4, 0);
    assert_eq!(driver.read(12, 4), 0);
}

#[test]
fn the_status_is_only_cleared_by_a_reset() {
    let mut driver = Driver::ready(|_| {});
    driver.set_status(1);
    assert_eq!(driver.status(), 0xf);
    driver.set_status(0x80);
    assert_eq!(driver.status(), 0x8f);
    driver.set_status(0x40);
    assert_eq!(driver.status(), 0x8f, "only the device sets it");
    driver.reset_device();
    // Nothing of the session is left.
    driver.write(22, 2, 0);
    assert_eq!((driver.read(24, 2), driver.read(28, 2)), (256, 0));
    assert_eq!(driver.read(32, 8), 0);
    assert_eq!(driver.read(26, 2), 0xffff);
    // Nothing runs without features.
    driver.set_status(7);
    assert_eq!(driver.status(), 3);
}

#[test]
fn queues_are_configured_until_they_are_enabled() {
    let mut driver = Driver::off(|_| {});
    assert_eq!(driver.read(18, 2), 4);
    driver.write(22, 2, 3);
    assert_eq!((driver.read(24, 2), driver.read(30, 2)), (256, 3));
    driver.write(22, 2, 4);
    assert_eq!(driver.read(24, 2), 0, "no such queue");
    driver.write(28, 2, 1);
    assert_eq!(driver.read(28, 2), 0);
    driver.start();
    driver.write(22, 2, 1);
    assert_eq!(driver.read(28, 2), 1);
    let before = (driver.read(24, 2), driver.read(32, 8));
    driver.write(24, 2, 8);
    driver.write(32, 8, DATA);
    driver.write(28, 2, 0);
    assert_eq!((driver.read(24, 2), driver.read(32, 8)), before);
    assert_eq!(driver.read(28, 2), 1);
    // A vector that does not exist is none.
    driver.write(26, 2, 4);
    assert_eq!(driver.read(26, 2), 4);
    driver.write(26, 2, 5);
    assert_eq!(driver.read(26, 2), 0xffff);
    driver.write(16, 2, 0x1234);
    assert_eq!(driver.read(16, 2), 0xffff);
}

#[test]
fn registers_ignore_accesses_of_other_widths() {
    let mut driver = Driver::off(|_| {});
    driver.write(20, 2, 0x0101);
    driver.write(20, 4, 0x0101);
    assert_eq!(driver.status(), 0);
    driver.write(21, 1, 1);
    driver.write(56, 8, !0);
    driver.write(0xffc, 4, !0);
    driver.write(ISR, 1, 0xff);
    driver.write(DEVICE, 8, !0);
    assert_eq!(driver.read(56, 8), 0);
    assert_eq!(driver.read(ISR, 1), 0);
    assert_eq!(driver.read(DEVICE, 8), (16 << 20) / 512);
    assert_eq!(driver.read(DEVICE + 60, 4), 0);
    assert_eq!(driver.read(NOTIFY, 4), 0);
}

#[test]
fn msix_table_is_storage_and_pending_bits_are_live() {
    let mut driver = Driver::off(|_| {});
    assert_eq!(driver.read(TABLE + 12, 4), 1, "masked at power-on");
    driver.write(TABLE + 16, 4, 0xfee0_0000);
    driver.write(TABLE + 24, 8, 0x4041);
    assert_eq!(driver.read(TABLE + 16, 4), 0xfee0_0000);
    assert_eq!(driver.read(TABLE + 24, 8), 0x4041);
    driver.write(TABLE + 5 * 16, 4, 1);
    assert_eq!(driver.read(TABLE + 5 * 16, 4), 0, "behind the table");
    driver.irq.pending = vec![1, 3];
    assert_eq!(driver.read(PENDING, 8), 0b1010);
    // A reset of the device leaves the table, one of the function does not.
    driver.reset_device();
    assert_eq!(driver.read(TABLE + 16, 4), 0xfee0_0000);
    driver.device.reset();
    assert_eq!(driver.read(TABLE + 16, 4), 0);
}

#[test]
fn intx_is_asserted_until_the_cause_is_read() {
    let mut driver = Driver::ready(|_| {});
    driver.irq.intx = true;
    let (status, _) = driver.execute(READ, 0, &[writable(DATA, 512)]);
    assert_eq!(status, OK);
    driver.poll();
    assert!(driver.irq.line);
    assert_eq!(driver.read(ISR, 1), 1);
    assert!(!driver.irq.line);
    assert_eq!(driver.read(ISR, 1), 0);
    // A configuration change interrupt, with its own cause.
    let queue = driver.queues[0].clone();
    driver.memory.put(queue.available + 2, &[0xff, 0x7f]);
    driver.wait_for_failure();
    assert!(driver.irq.line);
    assert_eq!(driver.read(ISR, 1), 2);
    // A reset deasserts it, too.
    driver.start();
    driver.execute(READ, 0, &[writable(DATA, 512)]);
    driver.poll();
    assert!(driver.irq.line);
    driver.reset_device();
    assert!(!driver.irq.line);
}

#[test]
fn a_queue_interrupts_by_its_vector_and_the_device_by_its_own() {
    let mut driver = Driver::ready(|_| {});
    driver.execute(READ, 0, &[writable(DATA, 512)]);
    driver.poll();
    assert_eq!(driver.irq.raised, [1]);
    driver.request(1, READ, 0, &[writable(DATA, 512)]);
    driver.wait(1);
    driver.poll();
    assert_eq!(driver.irq.raised, [1, 2]);
    let queue = driver.queues[0].clone();
    driver.memory.put(queue.available + 2, &[0xff, 0x7f]);
    driver.wait_for_failure();
    assert_eq!(driver.irq.raised, [1, 2, 0]);
    // A queue without a vector is polled.
    driver.start();
    driver.irq.raised.clear();
    driver.write(22, 2, 0);
    driver.write(26, 2, 0xffff);
    driver.execute(READ, 0, &[writable(DATA, 512)]);
    driver.poll();
    assert!(driver.irq.raised.is_empty());
}

#[test]
fn drivers_that_poll_are_not_interrupted() {
    // By the event index.
    let mut driver = Driver::ready(|_| {});
    let queue = driver.queues[0].clone();
    let event = queue.available + 4 + u64::from(queue.size) * 2;
    driver.memory.put(event, &100u16.to_le_bytes());
    driver.request(0, READ, 0, &[writable(DATA, 512)]);
    driver.until("completion", |driver| driver.stat("reads") == 1);
    assert!(driver.irq.raised.is_empty());
    // By the flag.
    driver.start_without(1 << F_EVENT_IDX);
    driver.memory.put(queue.available, &[1, 0]);
    driver.execute(READ, 0, &[writable(DATA, 512)]);
    driver.poll();
    assert!(driver.irq.raised.is_empty());
    driver.memory.put(queue.available, &[0, 0]);
    driver.execute(READ, 0, &[writable(DATA, 512)]);
    driver.poll();
    assert_eq!(driver.irq.raised, [1]);
}

#[test]
fn a_busy_device_is_not_notified() {
    for without in [0, 1 << F_EVENT_IDX] {
        let mut driver = Driver::off(|_| {});
        driver.start_without(without);
        driver.request(0, READ, 0, &[writable(DATA, 512)]);
        assert_eq!(driver.kicks, 1, "a device that has not looked yet");
        driver.poll();
        for _ in 0..10 {
            driver.request(0, READ, 0, &[writable(DATA, 512)]);
        }
        assert_eq!(driver.kicks, 1);
        // Before it sleeps, it looks again.
        assert!(!driver.enable_notifications());
        driver.until("requests", |driver| driver.stat("reads") == 11);
        while !driver.enable_notifications() {
            driver.poll();
        }
        driver.request(0, READ, 0, &[writable(DATA, 512)]);
        assert_eq!(driver.kicks, 2);
        driver.until("request", |driver| driver.stat("reads") == 12);
        assert_eq!(
            driver.stat("notifications") - 4,
            2 + u64::from(driver.kicks > 2)
        );
    }
}
