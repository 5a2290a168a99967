//! Admin commands, with the status codes of figures 127 and 128.

use super::world::{BASE, DATA, Driver, OK, Sqe};
use crate::nvme::status::Status;

const INVALID_FIELD: (u16, u16) = (0, 0x02);
const INVALID_NAMESPACE: (u16, u16) = (0, 0x0b);
const SEQUENCE_ERROR: (u16, u16) = (0, 0x0c);
const PRP_OFFSET: (u16, u16) = (0, 0x13);
const INVALID_CQ: (u16, u16) = (1, 0x00);
const INVALID_QUEUE: (u16, u16) = (1, 0x01);
const INVALID_SIZE: (u16, u16) = (1, 0x02);
const INVALID_VECTOR: (u16, u16) = (1, 0x08);

fn driver() -> Driver {
    Driver::ready_with(|_| {})
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes)
        .unwrap()
        .trim_end_matches([' ', '\0'])
}

#[test]
fn identify_controller() {
    let mut driver = driver();
    let data = driver.identify(1, 0);
    assert_eq!(text(&data[4..24]), "disk0");
    assert_eq!(text(&data[24..64]), "farside NVMe");
    assert_eq!(data[77], 8, "MDTS: 1 MiB");
    assert_eq!(data[80..84], 0x0001_0400u32.to_le_bytes());
    assert_eq!((data[512], data[513]), (0x66, 0x44));
    assert_eq!(data[516..520], 1u32.to_le_bytes());
    assert_eq!(data[257] & 1, 1, "doorbell buffer config");
    assert!(text(&data[768..1024]).starts_with("nqn.2014-08.org.nvmexpress:"));
}

#[test]
fn identify_namespace_and_lists() {
    let mut driver = driver();
    let data = driver.identify(0, 1);
    assert_eq!(data[..8], (16u64 << 20 >> 9).to_le_bytes());
    assert_eq!(data[128 + 2], 9);
    assert_eq!(data[33], 0b1001, "holes read as zeroes");
    assert_eq!(driver.identify(2, 0)[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(driver.identify(2, 1)[..4], [0; 4]);
    let descriptors = driver.identify(3, 1);
    assert_eq!(descriptors[..2], [3, 16]);
    assert_eq!(descriptors[4 + 6] >> 4, 8, "UUID version");
    assert_eq!(descriptors[20..24], [0; 4], "end of list");
    assert_eq!(driver.identify(6, 0)[1], 13);
    assert_eq!(driver.identify(0x13, 0)[..4], [1, 0, 0, 0]);
    let mut of = |cns: u32, nsid| {
        driver
            .admin(Sqe::new(6).nsid(nsid).prp(DATA, 0).cdw(10, cns))
            .status
    };
    assert_eq!(of(0, 0), INVALID_NAMESPACE);
    assert_eq!(of(0, 2), INVALID_NAMESPACE);
    assert_eq!(of(0, 0xffff_ffff), INVALID_NAMESPACE);
    assert_eq!(of(2, 0xffff_fffe), INVALID_NAMESPACE);
    assert_eq!(of(3, 2), INVALID_NAMESPACE);
    assert_eq!(of(0x14, 0), INVALID_FIELD);
    assert_eq!(of(0xff, 0), INVALID_FIELD);
}

#[test]
fn four_kib_blocks() {
    let mut driver = Driver::ready_with(|config| config.block_size = 4096);
    let data = driver.identify(0, 1);
    assert_eq!(data[..8], (16u64 << 20 >> 12).to_le_bytes());
    assert_eq!(data[128 + 2], 12);
    let cqe = driver.io(Sqe::new(2).nsid(1).prp(DATA, 0).blocks(4095, 1));
    assert_eq!(cqe.status, OK);
    let cqe = driver.io(Sqe::new(2).nsid(1).prp(DATA, 0).blocks(4096, 1));
    assert_eq!(cqe.status, (0, 0x80));
}

#[test]
fn identify_to_unreachable_or_misaligned_memory() {
    let mut driver = driver();
    let cqe = driver.admin(Sqe::new(6).prp(0x1000, 0).cdw(10, 1));
    assert_eq!(cqe.status, (0, 0x04));
    let cqe = driver.admin(Sqe::new(6).prp(DATA + 1, 0).cdw(10, 1));
    assert_eq!(cqe.status, PRP_OFFSET);
    let cqe = driver.admin(Sqe::new(6).sgl(DATA, 4096, 0).cdw(10, 1));
    assert_eq!(cqe.status, INVALID_FIELD, "no SGL in admin commands");
    // Over a page boundary, as firmware does it.
    let cqe = driver.admin(Sqe::new(6).prp(DATA + 0x800, DATA + 0x2000).cdw(10, 1));
    assert_eq!(cqe.status, OK);
    assert_eq!(text(&driver.memory.get(DATA + 0x804, 20)), "disk0");
    assert_eq!(driver.memory.get(DATA + 0x2000, 4)[0], 0xc4, "PSD0");
}

#[test]
fn queue_creation_is_checked() {
    let mut driver = driver();
    let page = BASE + 0x8000;
    let mut cq = |id: u32, size: u32, cdw11: u32, at: u64| {
        driver
            .admin(
                Sqe::new(5)
                    .prp(at, 0)
                    .cdw(10, size << 16 | id)
                    .cdw(11, cdw11),
            )
            .status
    };
    assert_eq!(cq(0, 63, 3, page), INVALID_QUEUE);
    assert_eq!(cq(1, 63, 3, page), INVALID_QUEUE, "exists");
    assert_eq!(cq(65, 63, 3, page), INVALID_QUEUE);
    assert_eq!(cq(2, 0, 3, page), INVALID_SIZE);
    assert_eq!(cq(2, 1024, 3, page), INVALID_SIZE);
    assert_eq!(cq(2, 63, 65 << 16 | 3, page), INVALID_VECTOR);
    assert_eq!(cq(2, 63, 2, page), INVALID_FIELD, "not contiguous");
    assert_eq!(cq(2, 63, 3, page + 8), PRP_OFFSET);
    assert_eq!(cq(2, 1023, 64 << 16 | 3, page), OK);
    let mut sq = |id: u32, size: u32, cdw11: u32, at: u64| {
        driver
            .admin(
                Sqe::new(1)
                    .prp(at, 0)
                    .cdw(10, size << 16 | id)
                    .cdw(11, cdw11),
            )
            .status
    };
    assert_eq!(sq(0, 63, 2 << 16 | 1, page), INVALID_QUEUE);
    assert_eq!(sq(1, 63, 2 << 16 | 1, page), INVALID_QUEUE);
    assert_eq!(sq(2, 63, 1, page), INVALID_QUEUE, "the admin queue");
    assert_eq!(sq(2, 63, 3 << 16 | 1, page), INVALID_CQ);
    assert_eq!(sq(2, 63, 99 << 16 | 1, page), INVALID_QUEUE);
    assert_eq!(sq(2, 0, 2 << 16 | 1, page), INVALID_SIZE);
    assert_eq!(sq(2, 63, 2 << 16, page), INVALID_FIELD);
    assert_eq!(sq(2, 63, 2 << 16 | 1, page), OK);
}

#[test]
fn queue_deletion_is_checked() {
    let mut driver = driver();
    let mut delete = |opcode, id| driver.admin(Sqe::new(opcode).cdw(10, id)).status;
    assert_eq!(delete(4, 1), (1, 0x0c), "in use");
    assert_eq!(delete(4, 0), INVALID_QUEUE);
    assert_eq!(delete(4, 2), INVALID_QUEUE);
    assert_eq!(delete(0, 0), INVALID_QUEUE);
    assert_eq!(delete(0, 9), INVALID_QUEUE);
    assert_eq!(delete(0, 1), OK);
    assert_eq!(delete(0, 1), INVALID_QUEUE);
    assert_eq!(delete(4, 1), OK);
    driver.pairs.truncate(1);
    driver.create_pair(1, 2);
    for _ in 0..5 {
        assert_eq!(driver.io(Sqe::new(0).nsid(1)).status, OK);
    }
}

#[test]
fn a_queue_is_deleted_behind_its_last_command() {
    let mut driver = driver();
    for block in 0..40 {
        driver.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(block, 1));
    }
    driver.poll();
    assert_eq!(driver.admin(Sqe::new(0).cdw(10, 1)).status, OK);
    let mut done = 0;
    while driver.take(1).is_some() {
        done += 1;
    }
    assert!(done >= 32, "what was fetched has completed: {done}");
}

#[test]
fn sixty_four_pairs_work_at_once() {
    let mut driver = Driver::off(|_| {});
    driver.enable();
    let cqe = driver.set_feature(7, 63 << 16 | 63);
    assert_eq!((cqe.status, cqe.result), (OK, 63 << 16 | 63));
    for id in 1..=64 {
        driver.create_pair(id, 16);
    }
    assert_eq!(driver.set_feature(7, 63).status, SEQUENCE_ERROR);
    for at in 1..=64 {
        for block in 0..4 {
            driver.submit(at, Sqe::new(2).nsid(1).prp(DATA, 0).blocks(block, 1));
        }
    }
    for at in 1..=64 {
        for _ in 0..4 {
            assert_eq!(driver.wait(at).status, OK);
        }
    }
}

#[test]
fn features_hold_select_and_refuse() {
    let mut driver = driver();
    // Linux: hwmon reads and sets thresholds, by sensor and side.
    assert_eq!(driver.feature(4, 0).result, 343);
    assert_eq!(driver.feature(4, 1 << 20).result, 0);
    assert_eq!(driver.feature(4, 1 << 16).status, INVALID_FIELD);
    assert_eq!(driver.set_feature(4, 350).status, OK);
    assert_eq!(driver.feature(4, 0).result, 350);
    assert_eq!(driver.feature(4 | 1 << 8, 0).result, 343, "default");
    assert_eq!(driver.feature(4 | 2 << 8, 0).result, 343, "saved");
    assert_eq!(driver.feature(4 | 3 << 8, 0).result, 4, "capabilities");
    assert_eq!(driver.feature(4 | 4 << 8, 0).status, INVALID_FIELD);
    assert_eq!(driver.set_feature(4 | 1 << 31, 0).status, (1, 0x0d));
    assert_eq!(
        driver
            .admin(Sqe::new(9).nsid(1).cdw(10, 6).cdw(11, 1))
            .status,
        (1, 0x0f)
    );
    assert_eq!(
        driver.admin(Sqe::new(9).nsid(2).cdw(10, 6)).status,
        INVALID_NAMESPACE
    );
    assert_eq!(driver.set_feature(2, 1).status, INVALID_FIELD);
    assert_eq!(driver.set_feature(5, 1 << 16).status, INVALID_FIELD);
    assert_eq!(driver.set_feature(9, 65).status, INVALID_FIELD);
    assert_eq!(driver.set_feature(9, 64 | 1 << 16).status, OK);
    assert_eq!(driver.feature(9, 64).result, 64 | 1 << 16);
    assert_eq!(driver.set_feature(0x7f, 0).status, INVALID_FIELD);
    assert_eq!(driver.feature(0x7f, 0).status, INVALID_FIELD);
    for (feature, value) in [(1, 0x0707_0703), (5, 7), (6, 0), (8, 0x1234), (0x0a, 1)] {
        assert_eq!(driver.set_feature(feature, value).status, OK, "{feature}");
        assert_eq!(driver.feature(feature, 0).result, value, "{feature}");
    }
    assert_eq!(driver.stat("flushes"), 1, "the cache was turned off");
}

#[test]
fn timestamp_runs_on() {
    let mut driver = driver();
    let set_to = 1_800_000_000_000u64;
    driver.memory.put(DATA, &set_to.to_le_bytes());
    let sqe = Sqe::new(9).prp(DATA, 0).cdw(10, 0x0e);
    assert_eq!(driver.admin(sqe).status, OK);
    let sqe = Sqe::new(0x0a).prp(DATA + 64, 0).cdw(10, 0x0e);
    assert_eq!(driver.admin(sqe).status, OK);
    let data = driver.memory.get(DATA + 64, 8);
    let now = u64::from_le_bytes(data.try_into().unwrap());
    assert_eq!(now >> 48, 2, "set by the host");
    assert!((set_to..set_to + 60_000).contains(&(now & 0xffff_ffff_ffff)));
}

#[test]
fn logs() {
    let mut driver = driver();
    driver.io(Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 8));
    let health = driver.log(2, 512);
    assert_eq!(health[1..3], 313u16.to_le_bytes());
    assert_eq!(health[48], 1, "data units, rounded up");
    assert_eq!(health[80], 1, "host writes");
    let failed = driver.io(Sqe::new(2).nsid(1).prp(DATA, 0).blocks(1 << 40, 1));
    assert_eq!(failed.status, (0, 0x80));
    let errors = driver.log(1, 128);
    assert_eq!(errors[..8], 1u64.to_le_bytes(), "number of the error");
    assert_eq!(errors[8..10], [1, 0], "queue");
    assert_eq!(errors[10..12], failed.id.to_le_bytes());
    let status = u16::from_le_bytes([errors[12], errors[13]]) >> 1;
    assert_eq!(status, Status::LBA_OUT_OF_RANGE.bits());
    assert_eq!(errors[16..24], (1u64 << 40).to_le_bytes());
    assert_eq!(errors[24..28], [1, 0, 0, 0]);
    assert_eq!(errors[64..72], [0; 8], "no second one");
    assert_eq!(driver.log(2, 512)[176], 1, "count of errors");
    assert_eq!(driver.log(3, 512)[0], 1);
    assert_eq!(driver.log(4, 64), [0; 64]);
    let effects = driver.log(5, 4096);
    assert_eq!((effects[6 * 4], effects[1024 + 4]), (1, 3));
    let mut of = |page: u32, offset: u32, dwords: u32| {
        driver
            .admin(
                Sqe::new(2)
                    .nsid(0xffff_ffff)
                    .prp(DATA, 0)
                    .cdw(10, page | (dwords - 1) << 16)
                    .cdw(12, offset),
            )
            .status
    };
    assert_eq!(of(0x7f, 0, 1), (1, 0x09));
    assert_eq!(of(2, 2, 1), INVALID_FIELD, "offset not of a dword");
    assert_eq!(of(2, 516, 1), INVALID_FIELD, "offset behind the end");
    assert_eq!(of(2, 512, 1), OK);
    assert_eq!(of(2, 256, 128), OK, "over the end");
    let cqe = driver.admin(Sqe::new(2).nsid(7).prp(DATA, 0).cdw(10, 2));
    assert_eq!(cqe.status, INVALID_NAMESPACE);
    let cqe = driver.admin(Sqe::new(2).prp(DATA, 0).cdw(10, 2).cdw(11, 0xffff));
    assert_eq!(cqe.status, INVALID_FIELD, "256 MiB");
}

#[test]
fn event_requests_have_a_limit_and_can_be_aborted() {
    let mut driver = driver();
    for id in 100..104 {
        driver.submit_as(0, Sqe::new(0x0c), id);
    }
    driver.submit_as(0, Sqe::new(0x0c), 104);
    let cqe = driver.wait(0);
    assert_eq!((cqe.id, cqe.status), (104, (1, 0x05)));
    driver.submit_as(0, Sqe::new(8).cdw(10, 101 << 16), 200);
    let aborted = driver.wait(0);
    assert_eq!((aborted.id, aborted.status), (101, (0, 0x07)));
    let abort = driver.wait(0);
    assert_eq!((abort.id, abort.status, abort.result & 1), (200, OK, 0));
    let none = driver.admin(Sqe::new(8).cdw(10, 999 << 16 | 1));
    assert_eq!((none.status, none.result & 1), (OK, 1), "not aborted");
    let queue = driver.admin(Sqe::new(8).cdw(10, 77));
    assert_eq!(queue.status, INVALID_FIELD);
}

#[test]
fn invalid_doorbells_raise_one_event_until_the_log_is_read() {
    let mut driver = driver();
    driver.submit_as(0, Sqe::new(0x0c), 50);
    driver.submit_as(0, Sqe::new(0x0c), 51);
    driver.poll();
    driver.write32(0x1000 + 4 * 2 * 9, 1);
    driver.write32(0x1000 + 4 * 2 * 9, 1);
    let event = driver.wait(0);
    assert_eq!((event.id, event.status), (50, OK));
    assert_eq!(event.result, 0x01_00_00, "error, invalid register, log 1");
    driver.poll();
    assert!(driver.take(0).is_none(), "masked");
    driver.log(1, 64);
    driver.write32(0x1000 + 4 * 2, 64);
    let event = driver.wait(0);
    assert_eq!((event.id, event.result), (51, 0x01_01_00));
    // A head doorbell beyond the posted completions.
    driver.log(1, 64);
    driver.submit_as(0, Sqe::new(0x0c), 52);
    driver.write32(0x1000 + 4 * 3, 5);
    assert_eq!(driver.wait(0).result, 0x01_01_00);
}

#[test]
fn a_temperature_threshold_raises_an_event() {
    let mut driver = driver();
    driver.submit_as(0, Sqe::new(0x0c), 50);
    driver.set_feature(0x0b, 2);
    driver.submit(0, Sqe::new(9).cdw(10, 4).cdw(11, 300));
    let mut results = [driver.wait(0), driver.wait(0)];
    results.sort_by_key(|cqe| cqe.id != 50);
    assert_eq!((results[0].id, results[0].result), (50, 0x02_01_01));
    assert_eq!(driver.log(2, 512)[0], 2, "critical warning");
    driver.set_feature(4, 343);
    assert_eq!(driver.log(2, 512)[0], 0);
}

#[test]
fn format_erases() {
    let mut driver = driver();
    driver.set_disk(0, &[7; 8192]);
    let cqe = driver.admin(Sqe::new(0x80).nsid(1).cdw(10, 1 << 9));
    assert_eq!(cqe.status, OK);
    assert_eq!(driver.disk(0, 8192), [0; 8192]);
    driver.set_disk(0, &[7; 8192]);
    let cqe = driver.admin(Sqe::new(0x80).nsid(0xffff_ffff));
    assert_eq!(cqe.status, OK);
    assert_eq!(driver.disk(0, 8192), [0; 8192]);
    let mut format = |nsid, options| {
        driver
            .admin(Sqe::new(0x80).nsid(nsid).cdw(10, options))
            .status
    };
    assert_eq!(format(1, 1), (1, 0x0a), "no such LBA format");
    assert_eq!(format(1, 2 << 9), INVALID_FIELD, "no cryptographic erase");
    assert_eq!(format(2, 0), INVALID_NAMESPACE);
}

#[test]
fn unknown_and_fused_commands_are_refused() {
    let mut driver = driver();
    assert_eq!(driver.admin(Sqe::new(0x81)).status, (0, 0x01));
    assert_eq!(driver.io(Sqe::new(0x7f).nsid(1)).status, (0, 0x01));
    let mut fused = Sqe::new(2).nsid(1).prp(DATA, 0).blocks(0, 1);
    fused.0[0] |= 1 << 8;
    assert_eq!(driver.io(fused).status, INVALID_FIELD);
}
