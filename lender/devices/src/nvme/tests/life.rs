//! Enable, disable, shutdown, resets, quiesce, fatal status.

use std::time::{Duration, Instant};

use super::world::{ACQ, ASQ, BASE, DATA, Driver, ENGINES, OK, SIZE, Sqe, on_each_engine, pattern};
use crate::Device;

#[test]
fn registers_say_what_drivers_need() {
    let mut driver = Driver::off(|_| {});
    let cap = driver.read64(0);
    assert_eq!(cap & 0xffff, 1023, "MQES");
    assert_eq!(cap >> 16 & 1, 1, "CQR");
    assert_eq!(cap >> 32 & 0xf, 0, "DSTRD");
    assert_eq!(cap >> 37 & 0xff, 1, "CSS: NVM");
    assert_eq!(cap >> 48 & 0xf, 0, "MPSMIN: 4 KiB");
    assert_eq!(driver.read32(4), (cap >> 32) as u32);
    assert_eq!(driver.read32(8), 0x0001_0400);
    assert_eq!(driver.read32(0x1c), 0);
    driver.write32(0x28, 0xffff_ffff);
    assert_eq!(driver.read64(0x28), 0xffff_f000);
    // Reserved and beyond.
    assert_eq!(driver.read32(0x38), 0);
    assert_eq!(driver.read64(0x800), 0);
}

#[test]
fn msix_table_is_storage_and_pending_bits_are_live() {
    let mut driver = Driver::off(|_| {});
    assert_eq!(driver.read32(0x200c), 1, "masked at power-on");
    driver.write32(0x2010, 0xfee0_0000);
    driver.write64(0x2018, 0x0000_0000_0000_4041);
    assert_eq!(driver.read32(0x2010), 0xfee0_0000);
    assert_eq!(driver.read64(0x2018), 0x4041);
    assert_eq!(driver.read32(0x2000 + 65 * 16), 0, "behind the table");
    driver.irq.pending = vec![1, 33, 64];
    assert_eq!(driver.read64(0x3000), 1 << 33 | 1 << 1);
    assert_eq!(driver.read64(0x3008), 1);
    driver.write32(0x3000, 0);
    assert_eq!(driver.read32(0x3000), 2);
    driver.nvme.reset();
    assert_eq!(driver.read32(0x2010), 0);
}

#[test]
fn a_configuration_that_cannot_work_is_fatal_until_disabled() {
    let mut driver = Driver::off(|_| {});
    for cc in [1 | 5 << 7, 1 | 1 << 4, 1 | 1 << 11] {
        driver.write32(0x24, 0x001f_001f);
        driver.write32(0x14, cc);
        assert_eq!(driver.read32(0x1c), 2, "{cc:#x}");
        driver.write32(0x14, 0);
        assert_eq!(driver.read32(0x1c), 0);
    }
    driver.write32(0x24, 0);
    driver.write32(0x14, 1);
    assert_eq!(driver.read32(0x1c), 2, "one entry");
    driver.enable();
}

#[test]
fn disable_waits_for_io_and_forgets_the_session() {
    on_each_engine(|driver| {
        driver.set_feature(0x0b, 0x2);
        for block in 0..20 {
            driver.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(block * 8, 8));
        }
        driver.poll();
        driver.write32(0x14, 4 << 20 | 6 << 16);
        driver.until("disabled state", |driver| driver.read32(0x1c) == 0);
        assert!(!driver.irq.line);
        // AQA, ASQ and ACQ outlive a controller reset (7.3.2).
        assert_eq!(driver.read64(0x28), ASQ);
        assert_eq!(driver.read64(0x30), ACQ);
        driver.enable();
        assert_eq!(driver.feature(0x0b, 0).result, 0);
        driver.create_pair(1, 64);
        let cqe = driver.io(Sqe::new(2).nsid(1).prp(DATA, 0).blocks(0, 8));
        assert_eq!(cqe.status, OK);
    });
}

#[test]
fn a_controller_beyond_its_limits_sleeps_and_is_quiet_and_reset_at_once() {
    for engine in ENGINES {
        let mut driver = Driver::ready_with(|config| {
            config.engine = engine;
            config.limits.iops = Some(100);
        });
        let start = Instant::now();
        for block in 0..60 {
            driver.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(block * 8, 8));
        }
        let mut rounds = 0;
        driver.until("20 writes", |driver| {
            rounds += 1;
            driver.stat("writes") >= 20
        });
        // It sleeps until the next may be taken.
        assert!(rounds < 1000, "{rounds} rounds");
        let most = 100.0 * start.elapsed().as_secs_f64() + 1.0;
        let writes = driver.stat("writes");
        assert!(writes as f64 <= most, "{writes} writes, not {most}");
        let start = Instant::now();
        driver.until("quiescence", |driver| {
            driver.with(|nvme, bus| nvme.quiesce(bus))
        });
        driver.with(|nvme, bus| nvme.resume(bus));
        driver.write32(0x14, 4 << 20 | 6 << 16);
        driver.until("disabled state", |driver| driver.read32(0x1c) == 0);
        // The other 40 take 0.4 s, and are never started.
        assert!(start.elapsed() < Duration::from_millis(300));
        assert_eq!(driver.stat("writes"), writes);
        // Admin commands have no limits.
        driver.enable();
        for _ in 0..200 {
            driver.identify(1, 0);
        }
        assert!(start.elapsed() < Duration::from_secs(1));
    }
}

#[test]
fn queues_of_a_controller_beyond_its_limits_have_equal_shares() {
    const QUEUES: u16 = 4;
    for engine in ENGINES {
        let mut driver = Driver::ready_with(|config| {
            config.engine = engine;
            config.limits.iops = Some(100);
        });
        let others = (2..=QUEUES).map(|id| driver.create_pair(id, 64));
        let queues: Vec<usize> = std::iter::once(1).chain(others).collect();
        for &queue in &queues {
            for block in 0..30 {
                driver.submit(queue, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(block * 8, 8));
            }
        }
        driver.until("40 writes", |driver| driver.stat("writes") >= 40);
        let mut done = Vec::new();
        for queue in queues {
            let taken = std::iter::from_fn(|| driver.take(queue));
            done.push(taken.count());
        }
        assert!(done.iter().all(|done| (8..=12).contains(done)), "{done:?}");
    }
}

/// As many as the limit takes.
#[test]
fn shutdowns_have_limits() {
    let mut driver = Driver::ready_with(|config| config.limits.iops = Some(100));
    let (start, before) = (Instant::now(), driver.stat("flushes"));
    for _ in 0..30 {
        driver.write32(0x14, 4 << 20 | 6 << 16 | 1 << 14 | 1);
        driver.until("shutdown", |driver| driver.read32(0x1c) >> 2 & 3 == 2);
        driver.enable();
    }
    assert_eq!(driver.stat("flushes"), before + 30);
    assert!(start.elapsed() > Duration::from_millis(190));
}

#[test]
fn shutdown_flushes_and_ends_with_a_reset() {
    on_each_engine(|driver| {
        let flushes = driver.stat("flushes");
        driver.write32(0x14, 4 << 20 | 6 << 16 | 1 << 14 | 1);
        driver.until("shutdown", |driver| driver.read32(0x1c) >> 2 & 3 == 2);
        assert_eq!(driver.stat("flushes"), flushes + 1);
        driver.enable();
        assert_eq!(driver.read32(0x1c), 1);
        // Abrupt, and straight to disabled.
        driver.write32(0x14, 4 << 20 | 6 << 16 | 2 << 14 | 1);
        driver.write32(0x14, 0);
        driver.until("disabled state", |driver| driver.read32(0x1c) == 0);
    });
}

#[test]
fn shutdown_of_a_disabled_controller_completes() {
    let mut driver = Driver::off(|_| {});
    driver.write32(0x14, 1 << 14);
    driver.until("shutdown", |driver| driver.read32(0x1c) >> 2 & 3 == 2);
}

#[test]
fn quiesce_drains_then_holds_then_resumes() {
    on_each_engine(|driver| {
        let data = pattern(4096, 5);
        driver.memory.put(DATA, &data);
        for block in 0..10 {
            driver.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(block * 8, 8));
        }
        driver.poll();
        let (in_flight, most) = driver.with(|nvme, _| nvme.in_flight()).unwrap();
        let mut done = 0;
        while let Some(finished) = driver.take(1) {
            assert_eq!(finished.status, OK);
            done += 1;
        }
        assert!(in_flight + done == 10 && most > 10, "{in_flight}, {done}");
        while !driver.with(|nvme, bus| nvme.quiesce(bus)) {
            std::thread::yield_now();
        }
        assert_eq!(driver.with(|nvme, _| nvme.in_flight()), Some((0, most)));
        for _ in done..10 {
            assert_eq!(driver.take(1).expect("finished in flight").status, OK);
        }
        driver.submit(1, Sqe::new(0).nsid(1));
        let translations = driver.memory.translations;
        driver.poll();
        assert!(driver.enable_notifications(), "nothing to do");
        assert_eq!(driver.memory.translations, translations, "no DMA");
        driver.with(|nvme, bus| nvme.resume(bus));
        assert_eq!(driver.wait(1).status, OK);
        assert!(driver.memory.translations > translations, "translated anew");
    });
}

#[test]
fn without_bus_master_enable_an_enabled_controller_waits() {
    on_each_engine(|driver| {
        driver.configure_doorbells();
        driver.memory.bus_master = false;
        driver.submit(1, Sqe::new(0).nsid(1));
        let translations = driver.memory.translations;
        driver.poll();
        assert!(driver.enable_notifications(), "nothing to do");
        assert_eq!(driver.memory.translations, translations, "no DMA");
        driver.memory.bus_master = true;
        assert_eq!(driver.wait(1).status, OK);
        assert_eq!(driver.read32(0x1c) & 2, 0, "no fatal status");
    });
}

#[test]
fn interrupts_are_raised_again_when_bus_mastering_is_enabled_again() {
    on_each_engine(|driver| {
        driver.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 8));
        driver.poll();
        let stop = |driver: &mut Driver, bus_master| {
            while !driver.with(|nvme, bus| nvme.quiesce(bus)) {
                std::thread::yield_now();
            }
            driver.memory.bus_master = bus_master;
            driver.with(|nvme, bus| nvme.resume(bus));
            // These have not reached the guest.
            driver.irq.raised.clear();
            driver.poll();
            assert!(driver.irq.raised.is_empty(), "{:?}", driver.irq.raised);
        };
        stop(driver, false);
        driver.memory.bus_master = true;
        driver.poll();
        assert_eq!(driver.irq.raised, [0u16, 1], "once for each queue");
        driver.poll();
        assert_eq!(driver.irq.raised, [0u16, 1]);
        assert_eq!(driver.take(1).expect("a completion").status, OK);
        // While memory is unmapped it stays bus master, and no interrupt is lost.
        stop(driver, true);
    });
}

#[test]
fn function_reset_is_power_on() {
    on_each_engine(|driver| {
        driver.configure_doorbells();
        driver.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 8));
        driver.poll();
        while !driver.with(|nvme, bus| nvme.quiesce(bus)) {
            std::thread::yield_now();
        }
        driver.nvme.reset();
        driver.irq.line = false;
        assert_eq!(driver.read32(0x14), 0);
        assert_eq!(driver.read32(0x1c), 0);
        assert_eq!(driver.read64(0x28), 0);
        driver.enable();
        driver.create_pair(1, 64);
        assert_eq!(driver.io(Sqe::new(0).nsid(1)).status, OK);
    });
}

#[test]
fn a_reset_without_quiesce_waits_for_the_kernel() {
    on_each_engine(|driver| {
        for block in 0..30 {
            driver.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(block, 1));
        }
        driver.poll();
        driver.nvme.reset();
        driver.irq.line = false;
        driver.enable();
    });
}

#[test]
fn an_unreachable_queue_is_a_fatal_status() {
    let mut driver = Driver::off(|_| {});
    driver.write32(0x24, 0x001f_001f);
    driver.write64(0x28, BASE + SIZE as u64);
    driver.write64(0x30, ACQ);
    driver.write32(0x14, 4 << 20 | 6 << 16 | 1);
    driver.write32(0x1000, 1);
    driver.poll();
    assert_eq!(driver.read32(0x1c), 3);
    assert_eq!(driver.memory.faults.len(), 1, "no retry");
    driver.poll();
    assert_eq!(driver.memory.faults.len(), 1);
    driver.enable();
    assert_eq!(driver.identify(1, 0)[512], 0x66);
}

#[test]
fn interrupts_are_raised_once_a_batch() {
    let mut driver = Driver::ready_with(|_| {});
    driver.irq.raised.clear();
    for block in 0..8 {
        driver.submit(1, Sqe::new(2).nsid(1).prp(DATA, 0).blocks(block, 1));
    }
    driver.poll();
    let mut done = 0;
    driver.until("completions", |driver| {
        while driver.take(1).is_some() {
            done += 1;
        }
        done == 8
    });
    assert!(driver.irq.raised.len() <= 8);
    assert!(driver.irq.raised.iter().all(|&vector| vector == 1));
    assert!(!driver.irq.raised.is_empty());
}

#[test]
fn the_line_follows_heads_and_mask() {
    let mut driver = Driver::ready_with(|_| {});
    assert!(!driver.irq.line);
    driver.submit(0, Sqe::new(6).nsid(0).prp(DATA, 0).cdw(10, 1));
    driver.poll();
    assert!(driver.irq.line);
    driver.write32(0x0c, 1);
    assert!(!driver.irq.line, "masked");
    assert_eq!(driver.read32(0x0c), 1);
    driver.write32(0x10, 1);
    assert!(driver.irq.line, "unmasked");
    assert_eq!(driver.take(0).unwrap().status, OK);
    assert!(!driver.irq.line, "consumed");
}

#[test]
fn statistics_count() {
    let mut driver = Driver::ready_with(|_| {});
    driver.io(Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 8));
    driver.io(Sqe::new(2).nsid(1).prp(DATA, 0).blocks(0, 2));
    driver.io(Sqe::new(0).nsid(1));
    assert_eq!(driver.stat("bytes_written"), 4096);
    assert_eq!(driver.stat("bytes_read"), 1024);
    assert_eq!(driver.stat("flushes"), 1);
    assert_eq!(driver.stat("io_commands"), 3);
    assert!(driver.stat("doorbell_traps") >= 6);
}
