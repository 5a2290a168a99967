//! I/O commands against direct reads of the image, on both engines.

use std::os::unix::fs::MetadataExt;

use super::world::{BASE, DATA, Driver, IMAGE, OK, SIZE, Sqe, on_each_engine, pattern};

const LIST: u64 = BASE + 0x6000;
const PAGE: u64 = 4096;

fn read() -> Sqe {
    Sqe::new(2).nsid(1)
}

fn write() -> Sqe {
    Sqe::new(1).nsid(1)
}

#[test]
fn one_and_two_prps() {
    on_each_engine(|driver| {
        let data = pattern(8192, 1);
        driver.memory.put(DATA, &data);
        // One page, an offset in a page, two pages, two with an offset.
        for (first, count, prp1, prp2, from) in [
            (0, 8, DATA, 0, 0),
            (100, 1, DATA + 512, 0, 512),
            (200, 16, DATA, DATA + PAGE, 0),
            (300, 8, DATA + 2048, DATA + PAGE, 2048),
        ] {
            let cqe = driver.io(write().prp(prp1, prp2).blocks(first, count));
            assert_eq!(cqe.status, OK);
            let len = count as usize * 512;
            assert_eq!(driver.disk(first * 512, len), data[from..from + len]);
            let back = DATA + 0x10_0000;
            driver.memory.put(back, &[0; 3 * 4096]);
            let (prp1, prp2) = (prp1 - DATA + back, (back + PAGE));
            let cqe = driver.io(read().prp(prp1, prp2).blocks(first, count));
            assert_eq!(cqe.status, OK);
            assert_eq!(driver.memory.get(prp1, len), data[from..from + len]);
        }
    });
}

/// Pages that are apart and out of order.
fn scattered(count: usize) -> Vec<u64> {
    (0..count as u64)
        .map(|index| DATA + (index * 7 % 509) * 2 * PAGE)
        .collect()
}

#[test]
fn prp_lists_of_the_largest_transfer() {
    on_each_engine(|driver| {
        let data = pattern(1 << 20, 2);
        let pages = scattered(256);
        for (page, chunk) in pages.iter().zip(data.chunks(4096)) {
            driver.memory.put(*page, chunk);
        }
        driver.memory.put_qwords(LIST, pages[1..].iter().copied());
        let cqe = driver.io(write().prp(pages[0], LIST).blocks(8, 2048));
        assert_eq!(cqe.status, OK);
        assert!(driver.disk(4096, 1 << 20) == data);
        // Back into adjacent pages.
        let adjacent = (1..256).map(|page| DATA + 0x100_0000 + page * PAGE);
        driver.memory.put_qwords(LIST, adjacent);
        let cqe = driver.io(read().prp(DATA + 0x100_0000, LIST).blocks(8, 2048));
        assert_eq!(cqe.status, OK);
        assert!(driver.memory.get(DATA + 0x100_0000, 1 << 20) == data);
    });
}

#[test]
fn prp_lists_may_start_anywhere_and_chain() {
    on_each_engine(|driver| {
        let pages = scattered(40);
        let data = pattern(40 * 4096, 3);
        driver.set_disk(0, &data);
        // The first list has room for three entries and a pointer, then for
        // the pointer alone.
        for room in [4, 1] {
            let list = LIST + PAGE - room * 8;
            let first = room as usize - 1;
            driver
                .memory
                .put_qwords(list, pages[1..1 + first].iter().copied());
            driver.memory.put_qwords(LIST + PAGE - 8, [LIST + 2 * PAGE]);
            driver
                .memory
                .put_qwords(LIST + 2 * PAGE, pages[1 + first..].iter().copied());
            for page in &pages {
                driver.memory.put(*page, &[0; 4096]);
            }
            let cqe = driver.io(read().prp(pages[0], list).blocks(0, 320));
            assert_eq!(cqe.status, OK);
            for (page, chunk) in pages.iter().zip(data.chunks(4096)) {
                assert!(driver.memory.get(*page, 4096) == chunk);
            }
        }
    });
}

#[test]
fn bad_prps_are_refused() {
    let mut driver = Driver::ready_with(|_| {});
    const OFFSET: (u16, u16) = (0, 0x13);
    const FAULT: (u16, u16) = (0, 0x04);
    let mut of = |prp1, prp2, count| driver.io(read().prp(prp1, prp2).blocks(0, count)).status;
    assert_eq!(of(DATA + 2, 0, 1), OFFSET);
    assert_eq!(of(DATA, DATA + 512, 16), OFFSET);
    assert_eq!(of(DATA, LIST + 4, 32), OFFSET);
    assert_eq!(of(0x1000, 0, 1), FAULT);
    assert_eq!(of(BASE + SIZE as u64 - PAGE, BASE + SIZE as u64, 16), FAULT);
    assert_eq!(of(u64::MAX - 4095, u64::MAX - 4095, 16), FAULT);
    assert_eq!(of(DATA, 0x2000, 32), FAULT, "the list");
    driver.memory.put_qwords(LIST, [DATA + 8]);
    let mut of = |prp1, prp2, count| driver.io(read().prp(prp1, prp2).blocks(0, count)).status;
    assert_eq!(of(DATA, LIST, 24), OFFSET, "an entry");
    // A chain pointer with an offset, and one that leads back to itself.
    driver.memory.put_qwords(LIST + PAGE - 8, [LIST + 8]);
    let cqe = driver.io(read().prp(DATA, LIST + PAGE - 8).blocks(0, 32));
    assert_eq!(cqe.status, OFFSET);
    driver.memory.put_qwords(LIST, [LIST; 512]);
    let cqe = driver.io(read().prp(DATA, LIST + PAGE - 8).blocks(0, 2048));
    assert_eq!(cqe.status, OK, "odd, but bounded");
    assert_eq!(driver.memory.faults.len(), 4);
}

#[test]
fn pages_of_64_kib() {
    on_each_engine(|driver| {
        driver.write32(0x14, 0);
        driver.until("disabled state", |driver| driver.read32(0x1c) == 0);
        driver.write64(0x28, BASE + 0x10_0000);
        driver.write64(0x30, BASE + 0x11_0000);
        driver.memory.put(BASE + 0x10_0000, &[0; 0x2_0000]);
        driver.write32(0x14, 4 << 20 | 6 << 16 | 4 << 7 | 1);
        assert_eq!(driver.read32(0x1c), 1);
        let mut admin = driver.pairs[0];
        (admin.sq, admin.cq) = (BASE + 0x10_0000, BASE + 0x11_0000);
        (admin.head, admin.tail, admin.phase) = (0, 0, true);
        driver.pairs = vec![admin];
        driver.create_pair(1, 64);
        let data = pattern(3 * 0x1_0000, 9);
        driver.set_disk(0, &data);
        driver
            .memory
            .put_qwords(LIST, [DATA + 0x8_0000, DATA + 0x2_0000]);
        let cqe = driver.io(read().prp(DATA, LIST).blocks(0, 384));
        assert_eq!(cqe.status, OK);
        for (at, chunk) in [0, 0x8_0000, 0x2_0000].iter().zip(data.chunks(0x1_0000)) {
            assert!(driver.memory.get(DATA + at, 0x1_0000) == chunk);
        }
    });
}

fn descriptor(address: u64, len: u32, kind: u8) -> [u64; 2] {
    [address, u64::from(len) | u64::from(kind) << 56]
}

#[test]
fn sgls() {
    on_each_engine(|driver| {
        let data = pattern(16384, 4);
        driver.set_disk(0, &data);
        let cqe = driver.io(read().sgl(DATA + 3, 4096, 0).blocks(0, 8));
        assert_eq!(cqe.status, OK, "one block of data, byte aligned");
        assert_eq!(driver.memory.get(DATA + 3, 4096), data[..4096]);

        // Last segment of odd pieces, one of them empty.
        let pieces = [
            (DATA, 1000),
            (DATA + 0x5001, 3000),
            (DATA, 0),
            (DATA + 0x9000, 96),
        ];
        let list = pieces.map(|(at, len)| descriptor(at, len, 0));
        driver.memory.put_qwords(LIST, list.into_iter().flatten());
        let cqe = driver.io(read().sgl(LIST, 64, 0x30).blocks(0, 8));
        assert_eq!(cqe.status, OK);
        let mut from = 0;
        for (at, len) in pieces {
            let len = len as usize;
            assert_eq!(driver.memory.get(at, len), data[from..from + len]);
            from += len;
        }

        // A segment that leads to the last one, on write.
        let more = LIST + 0x800;
        let list = [descriptor(DATA + 0x100, 512, 0), descriptor(more, 32, 0x30)];
        driver.memory.put_qwords(LIST, list.into_iter().flatten());
        let list = [descriptor(DATA, 512, 0), descriptor(DATA + 1024, 512, 0)];
        driver.memory.put_qwords(more, list.into_iter().flatten());
        driver.memory.put(DATA, &data[..4096]);
        let cqe = driver.io(write().sgl(LIST, 32, 0x20).blocks(50, 3));
        assert_eq!(cqe.status, OK);
        let disk = driver.disk(50 * 512, 1536);
        assert_eq!(disk[..512], data[0x100..0x300]);
        assert_eq!(disk[512..1024], data[..512]);
        assert_eq!(disk[1024..], data[1024..1536]);
    });
}

#[test]
fn an_sgl_may_describe_more_than_is_transferred() {
    on_each_engine(|driver| {
        let data = pattern(512, 6);
        driver.set_disk(0, &data);
        driver.memory.put(DATA, &[0xee; 4096]);
        let cqe = driver.io(read().sgl(DATA, 4096, 0).blocks(0, 1));
        assert_eq!(cqe.status, OK);
        assert_eq!(driver.memory.get(DATA, 512), data);
        assert_eq!(driver.memory.get(DATA + 512, 3584), [0xee; 3584]);

        // The rest is not reached.
        let list = [descriptor(DATA + 64, 600, 0), descriptor(0x1000, 96, 0)];
        driver.memory.put_qwords(LIST, list.into_iter().flatten());
        let cqe = driver.io(read().sgl(LIST, 32, 0x30).blocks(0, 1));
        assert_eq!(cqe.status, OK);
        assert_eq!(driver.memory.get(DATA + 64, 512), data);
        assert!(driver.memory.faults.is_empty());
    });
}

#[test]
fn bad_sgls_are_refused() {
    let mut driver = Driver::ready_with(|_| {});
    let status = |driver: &mut Driver, address, len, kind| {
        driver
            .io(read().sgl(address, len, kind).blocks(0, 8))
            .status
    };
    let driver = &mut driver;
    assert_eq!(status(driver, DATA, 4095, 0), (0, 0x0f), "too short");
    assert_eq!(status(driver, DATA, 4096, 0x10), (0, 0x11), "bit bucket");
    assert_eq!(status(driver, DATA, 4096, 0x01), (0, 0x11), "sub type");
    assert_eq!(status(driver, 0x1000, 4096, 0), (0, 0x04));
    assert_eq!(status(driver, 0x1000, 16, 0x30), (0, 0x04), "the list");
    assert_eq!(status(driver, LIST, 0, 0x30), (0, 0x0d));
    assert_eq!(status(driver, LIST, 24, 0x30), (0, 0x0d));
    assert_eq!(status(driver, LIST, 1025 * 16, 0x30), (0, 0x0e));
    // A chain in the middle, one in the last segment, none in a segment, and
    // one that never ends.
    let mut list = |list: &[[u64; 2]]| {
        driver
            .memory
            .put_qwords(LIST, list.iter().flatten().copied());
        let len = list.len() as u32 * 16;
        (
            driver.io(read().sgl(LIST, len, 0x20).blocks(0, 8)).status,
            driver.io(read().sgl(LIST, len, 0x30).blocks(0, 8)).status,
        )
    };
    let data = descriptor(DATA, 2048, 0);
    let chain = descriptor(LIST, 32, 0x30);
    assert_eq!(list(&[chain, data]), ((0, 0x0d), (0, 0x0d)));
    assert_eq!(list(&[data, data]), ((0, 0x0d), OK));
    let empty = descriptor(DATA, 0, 0);
    let forever = descriptor(LIST, 32, 0x20);
    assert_eq!(list(&[empty, forever]).0, (0, 0x0e));
    let mut both = read().prp(DATA, 0).blocks(0, 8);
    both.0[0] |= 3 << 14;
    assert_eq!(driver.io(both).status, (0, 0x02));
}

#[test]
fn memory_in_pieces_is_no_obstacle() {
    on_each_engine(|driver| {
        driver.memory.run = 192;
        let data = pattern(128 << 10, 6);
        driver.memory.put(DATA, &data);
        driver
            .memory
            .put_qwords(LIST, (1..32).map(|page| DATA + page * PAGE));
        let cqe = driver.io(write().prp(DATA, LIST).blocks(0, 256));
        assert_eq!(cqe.status, OK);
        assert!(driver.disk(0, 128 << 10) == data);
        driver.memory.put(DATA, &[0; 128 << 10]);
        assert_eq!(driver.io(read().prp(DATA, LIST).blocks(0, 256)).status, OK);
        assert!(driver.memory.get(DATA, 128 << 10) == data);
    });
}

#[test]
fn ranges_are_checked() {
    on_each_engine(|driver| {
        let blocks = IMAGE / 512;
        const RANGE: (u16, u16) = (0, 0x80);
        for opcode in [1, 2, 5, 8, 0x0c] {
            let mut of = |first, count| {
                driver
                    .io(Sqe::new(opcode).nsid(1).prp(DATA, 0).blocks(first, count))
                    .status
            };
            assert_eq!(of(blocks, 1), RANGE, "{opcode}");
            assert_eq!(of(blocks - 1, 2), RANGE, "{opcode}");
            assert_eq!(of(u64::MAX, 1), RANGE, "{opcode}");
            assert_eq!(of(u64::MAX - 5, 8), RANGE, "{opcode}");
            assert_eq!(of(blocks - 1, 1), OK, "{opcode}");
            let cqe = driver.io(Sqe::new(opcode).nsid(2).prp(DATA, 0).blocks(0, 1));
            assert_eq!(cqe.status, (0, 0x0b), "{opcode}");
        }
        // Above MDTS.
        let cqe = driver.io(read().prp(DATA, LIST).blocks(0, 2049));
        assert_eq!(cqe.status, (0, 0x02));
        assert_eq!(driver.io(Sqe::new(0).nsid(0xffff_ffff)).status, OK);
        assert_eq!(driver.io(Sqe::new(0).nsid(3)).status, (0, 0x0b));
    });
}

#[test]
fn durable_writes() {
    on_each_engine(|driver| {
        let data = pattern(4096, 8);
        driver.memory.put(DATA, &data);
        let cqe = driver.io(write().prp(DATA, 0).cdw(12, 1 << 30).blocks(0, 8));
        assert_eq!(cqe.status, OK);
        assert_eq!(driver.disk(0, 4096), data);
        driver.set_feature(6, 0);
        let cqe = driver.io(write().prp(DATA, 0).blocks(8, 8));
        assert_eq!(cqe.status, OK);
        assert_eq!(driver.disk(4096, 4096), data);
    });
}

#[test]
fn write_zeroes_and_holes() {
    on_each_engine(|driver| {
        driver.set_disk(0, &vec![0xee; 4 << 20]);
        let cqe = driver.io(Sqe::new(8).nsid(1).blocks(1, 3));
        assert_eq!(cqe.status, OK);
        let disk = driver.disk(0, 4096);
        assert!(disk[..512].iter().all(|&byte| byte == 0xee));
        assert!(disk[512..2048].iter().all(|&byte| byte == 0));
        assert!(disk[2048..].iter().all(|&byte| byte == 0xee));
        // DEAC: as a hole; FUA: followed by a flush.
        let before = std::fs::metadata(&driver.image).unwrap().blocks();
        let cqe = driver.io(Sqe::new(8)
            .nsid(1)
            .cdw(12, 1 << 25 | 1 << 30)
            .blocks(8, 4096));
        assert_eq!(cqe.status, OK);
        assert!(driver.disk(4096, 2 << 20).iter().all(|&byte| byte == 0));
        assert!(std::fs::metadata(&driver.image).unwrap().blocks() <= before - 4096);
        // All of it, in one command.
        let cqe = driver.io(Sqe::new(8).nsid(1).blocks(0, (IMAGE / 512) as u32));
        assert_eq!(cqe.status, OK);
        assert!(driver.disk(0, 4 << 20).iter().all(|&byte| byte == 0));
    });
}

fn range(first: u64, count: u32) -> [u64; 2] {
    [u64::from(count) << 32, first]
}

#[test]
fn deallocation() {
    on_each_engine(|driver| {
        driver.set_disk(0, &vec![0xee; 4 << 20]);
        let before = std::fs::metadata(&driver.image).unwrap().blocks();
        let ranges = [
            range(0, 1024),
            range(1024, 1024),
            range(4096, 8),
            range(9, 0),
        ];
        driver.memory.put_qwords(DATA, ranges.into_iter().flatten());
        let cqe = driver.io(Sqe::new(9).nsid(1).prp(DATA, 0).cdw(10, 3).cdw(11, 4));
        assert_eq!(cqe.status, OK);
        assert!(driver.disk(0, 1 << 20).iter().all(|&byte| byte == 0));
        assert_eq!(driver.disk(1 << 20, 1), [0xee]);
        assert_eq!(driver.disk(2 << 20, 4096), [0; 4096]);
        assert!(std::fs::metadata(&driver.image).unwrap().blocks() <= before - 2048);
        // With an invalid range, none is deallocated.
        let ranges = [range(2048, 8), range(IMAGE / 512 - 1, 2)];
        driver.memory.put_qwords(DATA, ranges.into_iter().flatten());
        let sqe = Sqe::new(9).nsid(1).prp(DATA, 0).cdw(10, 1).cdw(11, 4);
        assert_eq!(driver.io(sqe).status, (0, 0x80));
        assert_eq!(driver.disk(1 << 20, 1), [0xee]);
        // A hint only.
        assert_eq!(driver.io(sqe.cdw(11, 1)).status, OK);
        // All 256.
        let ranges = (0..256).flat_map(|index| range(index * 16, 8));
        driver.memory.put_qwords(DATA, ranges);
        let cqe = driver.io(Sqe::new(9).nsid(1).prp(DATA, 0).cdw(10, 255).cdw(11, 4));
        assert_eq!(cqe.status, OK);
        assert_eq!(driver.disk(255 * 16 * 512, 1), [0]);
    });
}

#[test]
fn compare_and_verify() {
    on_each_engine(|driver| {
        let data = pattern(256 << 10, 7);
        driver.set_disk(8192, &data);
        driver.memory.put(DATA, &data);
        driver
            .memory
            .put_qwords(LIST, (1..64).map(|page| DATA + page * PAGE));
        let compare = Sqe::new(5).nsid(1).prp(DATA, LIST).blocks(16, 512);
        assert_eq!(driver.io(compare).status, OK);
        for wrong in [0, 4095, 70_000, (256 << 10) - 1] {
            driver.memory.put(DATA + wrong, &[!data[wrong as usize]]);
            assert_eq!(driver.io(compare).status, (2, 0x85), "{wrong}");
            driver.memory.put(DATA + wrong, &[data[wrong as usize]]);
        }
        assert_eq!(driver.io(compare).status, OK);
        let verify = Sqe::new(0x0c).nsid(1).blocks(0, (IMAGE / 512) as u32);
        assert_eq!(driver.io(verify).status, OK);
    });
}

#[test]
fn a_read_only_namespace() {
    for engine in super::world::ENGINES {
        let mut driver = Driver::ready_with(|config| {
            config.engine = engine;
            config.read_only = true;
        });
        assert_eq!(driver.identify(0, 1)[99], 1, "NSATTR");
        assert_eq!(driver.log(2, 512)[0], 8);
        const PROTECTED: (u16, u16) = (0, 0x20);
        assert_eq!(
            driver.io(write().prp(DATA, 0).blocks(0, 1)).status,
            PROTECTED
        );
        assert_eq!(
            driver.io(Sqe::new(8).nsid(1).blocks(0, 1)).status,
            PROTECTED
        );
        let cqe = driver.io(Sqe::new(9).nsid(1).prp(DATA, 0).cdw(11, 4));
        assert_eq!(cqe.status, PROTECTED);
        assert_eq!(driver.admin(Sqe::new(0x80).nsid(1)).status, PROTECTED);
        assert_eq!(driver.io(read().prp(DATA, 0).blocks(0, 1)).status, OK);
        assert_eq!(driver.io(Sqe::new(0).nsid(1)).status, OK);
        assert_eq!(driver.set_feature(6, 0).status, OK);
        driver.write32(0x14, 4 << 20 | 6 << 16 | 1 << 14 | 1);
        assert_eq!(driver.read32(0x1c) >> 2 & 3, 2);
    }
}

#[test]
fn an_image_that_shrinks_is_a_media_error() {
    on_each_engine(|driver| {
        let file = std::fs::File::options()
            .write(true)
            .open(&driver.image)
            .unwrap();
        file.set_len(8192).unwrap();
        let cqe = driver.io(read().prp(DATA, DATA + PAGE).blocks(12, 8));
        assert_eq!(cqe.status, (2, 0x81), "over the end");
        let cqe = driver.io(read().prp(DATA, 0).blocks(1000, 1));
        assert_eq!(cqe.status, (2, 0x81), "behind the end");
        assert_eq!(driver.io(read().prp(DATA, 0).blocks(0, 8)).status, OK);
        assert_eq!(driver.log(2, 512)[160], 2, "media errors");
    });
}

#[test]
fn more_commands_than_slots() {
    on_each_engine(|driver| {
        for id in 2..=6 {
            driver.create_pair(id, 1024);
        }
        for at in 2..=6 {
            for block in 0..1000 {
                driver.submit(at, write().prp(DATA, 0).blocks(block, 1));
            }
        }
        for at in 2..=6 {
            for _ in 0..1000 {
                assert_eq!(driver.wait(at).status, OK);
            }
        }
    });
}

#[test]
fn a_completion_queue_smaller_than_the_submission_queue() {
    on_each_engine(|driver| {
        // A pair whose completions have a queue of two entries: one place.
        let at = driver.create_pair(2, 64);
        assert_eq!(driver.admin(Sqe::new(0).cdw(10, 2)).status, OK);
        assert_eq!(driver.admin(Sqe::new(4).cdw(10, 2)).status, OK);
        let pair = driver.pairs[at];
        let cq = Sqe::new(5).prp(pair.cq, 0).cdw(10, 1 << 16 | 2).cdw(11, 3);
        assert_eq!(driver.admin(cq).status, OK);
        let sq = Sqe::new(1)
            .prp(pair.sq, 0)
            .cdw(10, 63 << 16 | 2)
            .cdw(11, 2 << 16 | 1);
        assert_eq!(driver.admin(sq).status, OK);
        for _ in 0..50 {
            driver.submit(at, Sqe::new(0).nsid(1));
        }
        let pair = &mut driver.pairs[at];
        (pair.entries, pair.head, pair.phase) = (2, 0, true);
        for _ in 0..50 {
            assert_eq!(driver.wait(at).status, OK);
        }
    });
}

#[test]
fn random_io_matches_a_shadow_copy() {
    on_each_engine(|driver| {
        let mut copy = vec![0; 1 << 20];
        let mut state = 12345u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            (state >> 33) % below
        };
        for round in 0..400 {
            let count = 1 + random(32);
            let first = random(2048 - count);
            let (from, len) = ((first * 512) as usize, (count * 512) as usize);
            let offset = random(8) * 512;
            let (prp1, prp2) = (DATA + offset, LIST);
            let pages = (offset + len as u64).div_ceil(PAGE);
            match pages {
                ..=2 => driver.memory.put_qwords(LIST, [0]),
                _ => driver
                    .memory
                    .put_qwords(LIST, (1..pages).map(|page| DATA + page * PAGE)),
            }
            let prp2 = if pages <= 2 { DATA + PAGE } else { prp2 };
            let sqe = match random(4) {
                0 | 1 => {
                    let data = pattern(len, round);
                    driver.memory.put(prp1, &data);
                    copy[from..from + len].copy_from_slice(&data);
                    write()
                }
                2 => {
                    copy[from..from + len].fill(0);
                    Sqe::new(8).nsid(1).cdw(12, (random(2) as u32) << 25)
                }
                _ => read(),
            };
            let sqe = sqe.prp(prp1, prp2).blocks(first, count as u32);
            assert_eq!(driver.io(sqe).status, OK);
            if sqe.0[0] & 0xff == 2 {
                assert!(driver.memory.get(prp1, len) == copy[from..from + len]);
            }
        }
        assert!(driver.disk(0, 1 << 20) == copy);
    });
}
