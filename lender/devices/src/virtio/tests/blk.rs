//! Requests.

use std::{
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use super::world::{
    BASE, DATA, DEVICE, DISCARD, Driver, F_CONFIG_WCE, F_FLUSH, FLUSH, GET_ID, IMAGE, IOERR, OK,
    READ, SIZE, UNSUPP, WRITE, WRITE_ZEROES, on_each_form, pattern, readable, writable,
};
use crate::{
    Device, Waiting,
    block::ImageError,
    virtio::{Config, ConfigError, VirtioBlk},
};

const SECTORS: u64 = IMAGE / 512;

#[test]
fn what_is_written_is_read() {
    on_each_form(|driver| {
        let data = pattern(64 << 10, 1);
        driver.memory.put(DATA, &data);
        let (status, len) = driver.execute(WRITE, 8, &[readable(DATA, 64 << 10)]);
        assert_eq!((status, len), (OK, 1));
        assert_eq!(driver.disk(4096, 64 << 10), data);
        let to = DATA + (1 << 20);
        let (status, len) = driver.execute(READ, 8, &[writable(to, 64 << 10)]);
        assert_eq!((status, len), (OK, (64 << 10) + 1));
        assert_eq!(driver.memory.get(to, 64 << 10), data);
        assert!(driver.memory.faults.is_empty());
        assert_eq!(driver.stat("bytes_written"), 64 << 10);
        assert_eq!(driver.stat("bytes_read"), 64 << 10);
    });
}

#[test]
fn a_driver_that_puts_in_several_requests_at_a_time_is_polled_at_intervals() {
    let mut driver = Driver::ready(|_| {});
    let mut after = |count| {
        // A cached write is over when the poll is.
        std::thread::sleep(Duration::from_millis(1));
        for _ in 0..count {
            driver.request(0, WRITE, 0, &[readable(DATA, 512)]);
        }
        assert!(driver.poll());
        for _ in 0..count {
            driver.wait(0);
        }
        driver.device.waiting()
    };
    assert_eq!(after(1), Waiting::BusyPoll);
    assert_eq!(after(1), Waiting::BusyPoll);
    assert_eq!(after(2), Waiting::Nap);
    for _ in 1..16 {
        assert_eq!(after(1), Waiting::Nap);
    }
    assert_eq!(after(1), Waiting::BusyPoll);
}

#[test]
fn buffers_may_be_anywhere() {
    on_each_form(|driver| {
        // Guest memory that is contiguous by pages, and buffers of odd sizes.
        driver.memory.run = 4096;
        let data = pattern(8192, 2);
        driver.set_disk(512, &data);
        let lens = [1u32, 511, 3000, 96, 4584];
        let mut buffers = Vec::new();
        let mut at = DATA + 4095;
        for len in lens {
            buffers.push(writable(at, len));
            at += u64::from(len) + 77;
        }
        let (status, len) = driver.execute(READ, 1, &buffers);
        assert_eq!((status, len), (OK, 8193));
        let read: Vec<u8> = buffers
            .iter()
            .flat_map(|buffer| driver.memory.get(buffer.at, buffer.len as usize))
            .collect();
        assert_eq!(read, data);
    });
}

/// "The device MUST NOT make assumptions about the particular arrangement of descriptors" (2.7.4.1).
#[test]
fn header_and_status_may_be_in_any_buffer() {
    on_each_form(|driver| {
        let data = pattern(512, 3);
        let at = DATA + 0x1_0000;
        driver.memory.put_qwords(at, [WRITE.into(), 5]);
        driver.memory.put(at + 16, &data);
        // Header and data in one, cut elsewhere.
        let buffers = [
            readable(at, 10),
            readable(at + 10, 100),
            readable(at + 110, 418),
            writable(at + 1024, 1),
        ];
        driver.submit(0, &buffers);
        assert_eq!(driver.wait(0).1, 1);
        assert_eq!(driver.memory.get(at + 1024, 1), [OK]);
        assert_eq!(driver.disk(5 * 512, 512), data);
        // Data and status in one.
        driver.memory.put_qwords(at, [READ.into(), 5]);
        driver.submit(0, &[readable(at, 16), writable(at + 1024, 513)]);
        assert_eq!(driver.wait(0).1, 513);
        assert_eq!(driver.memory.get(at + 1024, 512), data);
        assert_eq!(driver.memory.get(at + 1024 + 512, 1), [OK]);
    });
}

#[test]
fn long_requests_are_moved_in_parts() {
    on_each_form(|driver| {
        const LEN: usize = 10 << 20;
        let data = pattern(LEN, 4);
        driver.memory.put(DATA, &data);
        let buffers = [
            readable(DATA, 512),
            readable(DATA + 512, (LEN - 512) as u32),
        ];
        let (status, _) = driver.execute(WRITE, 16, &buffers);
        assert_eq!(status, OK);
        assert!(driver.disk(16 * 512, LEN) == data);
        driver.memory.put(DATA, &vec![0; LEN]);
        let (status, len) = driver.execute(READ, 16, &[writable(DATA, LEN as u32)]);
        assert_eq!((status, len), (OK, LEN as u32 + 1));
        assert!(driver.memory.get(DATA, LEN) == data);
        assert_eq!((driver.stat("reads"), driver.stat("writes")), (1, 1));
    });
}

#[test]
fn requests_outside_of_the_disk_fail() {
    let mut driver = Driver::ready(|_| {});
    for (sector, len, expected) in [
        (SECTORS - 1, 512, OK),
        (SECTORS, 512, IOERR),
        (SECTORS - 1, 1024, IOERR),
        (u64::MAX, 512, IOERR),
        (u64::MAX / 512, 512, IOERR),
        (u64::MAX / 2, 0, IOERR),
        (0, 511, IOERR),
        (0, 0, OK),
    ] {
        for kind in [READ, WRITE] {
            let buffer = match kind {
                READ => writable(DATA, len),
                _ => readable(DATA, len),
            };
            let (status, written) = driver.execute(kind, sector, &[buffer]);
            assert_eq!(status, expected, "{kind} {sector} {len}");
            // Data that was not written is not counted.
            let whole = if kind == READ { len + 1 } else { 1 };
            let failed = if kind == READ && len > 0 { 0 } else { 1 };
            let expected = if status == OK { whole } else { failed };
            assert_eq!(written, expected, "{kind} {sector} {len}");
        }
    }
    assert_eq!(driver.stat("errors"), 12);
}

#[test]
fn a_buffer_outside_of_memory_fails_its_request_alone() {
    let mut driver = Driver::ready(|_| {});
    let end = BASE + SIZE as u64;
    for buffer in [writable(end - 256, 512), writable(0, 512)] {
        assert_eq!(driver.execute(READ, 0, &[buffer]).0, IOERR);
    }
    assert_eq!(driver.memory.faults.len(), 2);
    assert_eq!(driver.status(), 0xf);
    let (status, _) = driver.execute(READ, 0, &[writable(DATA, 512)]);
    assert_eq!(status, OK);
}

#[test]
fn the_cache_mode_is_the_drivers() {
    for (without, writeback, flushes) in [
        // By the field, by the flush request, without either.
        (0, 1, false),
        (0, 0, true),
        (1 << F_CONFIG_WCE, 1, false),
        (1 << F_CONFIG_WCE | 1 << F_FLUSH, 1, true),
    ] {
        let mut driver = Driver::off(|_| {});
        driver.start_without(without);
        assert_eq!(driver.read(DEVICE + 32, 1), 1);
        driver.write(DEVICE + 32, 1, writeback);
        let is_field = without & 1 << F_CONFIG_WCE == 0;
        let expected = if is_field { writeback } else { 1 };
        assert_eq!(driver.read(DEVICE + 32, 1), expected);
        let (status, _) = driver.execute(WRITE, 0, &[readable(DATA, 512)]);
        assert_eq!(status, OK);
        let durable = driver.device.is_durable();
        assert_eq!(durable, flushes, "{without:#x} {writeback}");
        let (status, len) = driver.execute(FLUSH, 0, &[]);
        assert_eq!((status, len, driver.stat("flushes")), (OK, 1, 1));
        driver.reset_device();
        assert_eq!(driver.read(DEVICE + 32, 1), 1);
    }
}

#[test]
fn the_serial_number_is_the_devices_id() {
    on_each_form(|driver| {
        let (status, len) = driver.execute(GET_ID, 0, &[writable(DATA, 20)]);
        assert_eq!((status, len), (OK, 21));
        assert_eq!(driver.memory.get(DATA, 6), b"disk0\0");
        // A buffer that is shorter, and one that is longer.
        let (status, len) = driver.execute(GET_ID, 0, &[writable(DATA, 3), writable(DATA, 1)]);
        assert_eq!((status, len), (OK, 5));
        driver.memory.put(DATA, &[1; 64]);
        let (status, len) = driver.execute(GET_ID, 0, &[writable(DATA, 64)]);
        assert_eq!((status, len), (OK, 20));
        assert_eq!(driver.memory.get(DATA + 20, 1), [1]);
    });
}

fn range(sector: u64, sectors: u32, flags: u32) -> [u64; 2] {
    [sector, u64::from(sectors) | u64::from(flags) << 32]
}

#[test]
fn ranges_are_discarded_and_zeroed() {
    on_each_form(|driver| {
        let data = vec![7; IMAGE as usize];
        driver.set_disk(0, &data);
        let ranges = [range(8, 8, 0), range(32, 16, 0), range(64, 0, 0)];
        driver.memory.put_qwords(DATA, ranges.concat());
        let (status, len) = driver.execute(DISCARD, 0, &[readable(DATA, 48)]);
        assert_eq!((status, len), (OK, 1));
        let zeroes = |driver: &Driver, sector: u64, sectors: usize| {
            let bytes = driver.disk(sector * 512, sectors * 512);
            bytes.iter().all(|&byte| byte == 0)
        };
        // tempfile's file systems punch holes.
        assert!(zeroes(driver, 8, 8) && zeroes(driver, 32, 16));
        assert!(!zeroes(driver, 16, 1));
        for flags in [0, 1] {
            driver.set_disk(0, &data);
            driver.memory.put_qwords(DATA, range(3, 100, flags));
            // In two buffers.
            let buffers = [readable(DATA, 5), readable(DATA + 5, 11)];
            assert_eq!(driver.execute(WRITE_ZEROES, 0, &buffers).0, OK);
            assert!(zeroes(driver, 3, 100));
            assert!(!zeroes(driver, 2, 1) && !zeroes(driver, 103, 1));
        }
        // In write-through mode they are flushed.
        driver.write(DEVICE + 32, 1, 0);
        driver.memory.put_qwords(DATA, range(0, 8, 0));
        let (status, _) = driver.execute(WRITE_ZEROES, 0, &[readable(DATA, 16)]);
        assert_eq!(status, OK);
        assert!(zeroes(driver, 0, 8));
    });
}

#[test]
fn invalid_ranges_are_refused_before_any_has_an_effect() {
    let mut driver = Driver::ready(|_| {});
    let data = vec![7; IMAGE as usize];
    driver.set_disk(0, &data);
    let good = range(0, 8, 0);
    for (kind, ranges, len, expected) in [
        (DISCARD, [good, range(8, 8, 1)], 32, UNSUPP),
        (DISCARD, [good, range(8, 8, 2)], 32, UNSUPP),
        (DISCARD, [good, range(SECTORS, 1, 0)], 32, IOERR),
        (DISCARD, [good, range(8, u32::MAX, 0)], 32, IOERR),
        (DISCARD, [good, good], 24, IOERR),
        (DISCARD, [good, good], 0, IOERR),
        (DISCARD, [good, good], 65 * 16, IOERR),
        (WRITE_ZEROES, [good, good], 32, IOERR),
        (WRITE_ZEROES, [range(0, 8, 2), good], 16, UNSUPP),
        (WRITE_ZEROES, [range(0, (1 << 19) + 1, 0), good], 16, IOERR),
    ] {
        driver.memory.put_qwords(DATA, ranges.concat());
        let buffers = [readable(DATA, len)];
        let (status, _) = driver.execute(kind, 0, &buffers);
        assert_eq!(status, expected, "{kind} {ranges:?} {len}");
    }
    assert!(driver.disk(0, IMAGE as usize) == data);
}

#[test]
fn other_requests_are_not_supported() {
    let mut driver = Driver::ready(|_| {});
    for kind in [2, 14, 15, 0x8000_0000, u32::MAX] {
        let (status, len) = driver.execute(kind, 0, &[writable(DATA, 512)]);
        assert_eq!((status, len), (UNSUPP, 0), "{kind}");
    }
}

#[test]
fn a_read_only_disk_is_not_changed() {
    let mut driver = Driver::ready(|config| config.read_only = true);
    driver.memory.put_qwords(DATA, range(0, 8, 0));
    for kind in [WRITE, DISCARD, WRITE_ZEROES] {
        let len = if kind == WRITE { 512 } else { 16 };
        let (status, _) = driver.execute(kind, 0, &[readable(DATA, len)]);
        assert_eq!(status, IOERR, "{kind}");
    }
    assert_eq!(driver.execute(FLUSH, 0, &[]).0, OK);
    assert_eq!(driver.execute(READ, 0, &[writable(DATA, 512)]).0, OK);
}

#[test]
fn many_requests_of_several_queues_are_in_flight() {
    on_each_form(|driver| {
        driver.reset_device();
        driver.set_status(3);
        let features = driver.features;
        driver.accept(features);
        driver.set_status(0xb);
        driver.queues.clear();
        for queue in 0..4 {
            driver.create_queue(queue, 256);
        }
        driver.set_status(0xf);
        let data = pattern(1 << 20, 5);
        driver.set_disk(0, &data);
        for round in 0..3 {
            let mut expected = Vec::new();
            for n in 0..80u64 {
                for queue in 0..4 {
                    let sector = (n * 4 + queue as u64 + round) % 2048;
                    let to = DATA + (n * 4 + queue as u64) * 512;
                    driver.request(queue, READ, sector, &[writable(to, 512)]);
                    expected.push((to, sector));
                }
            }
            for queue in 0..4 {
                for _ in 0..80 {
                    let (head, _) = driver.wait(queue);
                    assert_eq!(driver.status_of(queue, head), OK);
                }
            }
            for (to, sector) in expected {
                let at = sector as usize * 512;
                assert_eq!(driver.memory.get(to, 512), data[at..at + 512]);
            }
        }
    });
}

#[test]
fn a_reset_waits_for_io_and_forgets_requests() {
    on_each_form(|driver| {
        for n in 0..20 {
            driver.request(0, READ, n, &[writable(DATA, 512)]);
        }
        driver.poll();
        driver.start();
        assert_eq!(driver.take(0), None);
        assert_eq!(driver.execute(READ, 0, &[writable(DATA, 512)]).0, OK);
    });
}

#[test]
fn a_device_beyond_its_limits_sleeps_and_is_reset_at_once() {
    let mut driver = Driver::ready(|config| config.limits.iops = Some(100));
    let start = Instant::now();
    for n in 0..20 {
        driver.request(0, READ, n, &[writable(DATA, 512)]);
    }
    let mut rounds = 0;
    driver.until("5 reads", |driver| {
        rounds += 1;
        driver.stat("reads") >= 5
    });
    // It sleeps until the next may be taken.
    assert!(rounds < 1000, "{rounds} rounds");
    let most = 100.0 * start.elapsed().as_secs_f64() + 1.0;
    let reads = driver.stat("reads");
    assert!(reads as f64 <= most, "{reads} reads, not {most}");
    // The others are never started.
    driver.reset_device();
    assert_eq!(driver.stat("reads"), reads);
}

#[test]
fn a_quiesced_device_takes_nothing() {
    on_each_form(|driver| {
        driver.request(0, READ, 0, &[writable(DATA, 512)]);
        driver.poll();
        while !driver.with(|device, bus| device.quiesce(bus)) {
            std::thread::yield_now();
        }
        assert!(driver.take(0).is_some());
        driver.request(0, READ, 0, &[writable(DATA, 512)]);
        driver.poll();
        assert_eq!(driver.stat("requests"), 1);
        driver.with(|device, bus| device.resume(bus));
        driver.wait(0);
    });
}

#[test]
fn without_bus_mastering_memory_is_not_touched() {
    let mut driver = Driver::off(|_| {});
    driver.memory.bus_master = false;
    driver.start();
    driver.request(0, READ, 0, &[writable(DATA, 512)]);
    driver.poll();
    assert!(driver.enable_notifications());
    assert_eq!((driver.memory.translations, driver.status()), (0, 0xf));
    driver.memory.bus_master = true;
    driver.wait(0);
}

#[test]
fn interrupts_are_raised_again_when_bus_mastering_is_enabled_again() {
    on_each_form(|driver| {
        driver.request(0, READ, 0, &[writable(DATA, 512)]);
        driver.poll();
        while !driver.with(|device, bus| device.quiesce(bus)) {
            std::thread::yield_now();
        }
        driver.memory.bus_master = false;
        driver.with(|device, bus| device.resume(bus));
        // These have not reached the guest.
        driver.irq.raised.clear();
        driver.poll();
        assert!(driver.irq.raised.is_empty(), "{:?}", driver.irq.raised);
        driver.memory.bus_master = true;
        driver.poll();
        assert_eq!(driver.irq.raised, [1u16, 2, 0], "queues, configuration");
        driver.poll();
        assert_eq!(driver.irq.raised, [1u16, 2, 0]);
        assert!(driver.take(0).is_some());
    });
}

#[test]
fn a_medium_that_fails_is_a_problem() {
    let mut driver = Driver::ready(|_| {});
    let file = std::fs::File::options().write(true).open(&driver.image);
    file.unwrap().set_len(IMAGE / 2).unwrap();
    let (status, _) = driver.execute(READ, SECTORS - 1, &[writable(DATA, 512)]);
    assert_eq!(status, IOERR);
    let problem = driver.device.problem().unwrap();
    assert!(problem.contains("has shrunk"), "{problem}");
}

#[test]
fn wrong_settings_are_named() {
    let fault = |configure: fn(&mut Config)| {
        let mut config = Config::new("/nonexistent");
        configure(&mut config);
        VirtioBlk::open("disk0", &config).err().unwrap().to_string()
    };
    let size = fault(|config| config.block_size = 1024);
    assert!(size.contains("block-size = 1024"), "{size}");
    for queues in [0, 256] {
        let mut config = Config::new("/nonexistent");
        config.queues = queues;
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains("1 to 255"), "{error}");
    }
    let serial = fault(|config| config.serial = Some("x".repeat(21)));
    assert!(serial.contains("1 to 20"), "{serial}");
    let missing = fault(|_| {});
    assert!(missing.contains("no such file"), "{missing}");
}

#[test]
fn the_hint_for_a_write_protected_image_names_the_model() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    std::fs::set_permissions(file.path(), PermissionsExt::from_mode(0o444)).unwrap();
    let error = Config::new(file.path()).open_image().unwrap_err();
    assert!(matches!(
        error,
        ConfigError::Image(ImageError::WriteProtected { .. })
    ));
    let text = error.to_string();
    assert!(text.contains("model.virtio-blk = {"), "{text}");
    assert!(text.contains("--virtio-blk ID=IMAGE,read-only"), "{text}");
}
