//! Two controllers that share a namespace.

use super::{crash, world::*};
use crate::{Device, nvme::Nvme};

const REGISTER: u8 = 0x0d;
const REPORT: u8 = 0x0e;
const ACQUIRE: u8 = 0x11;
const RELEASE: u8 = 0x15;

const CONFLICT: (u16, u16) = (0, 0x83);

/// Write exclusive.
const KIND: u32 = 1;
const PREEMPT: u32 = 1;
const PREEMPT_AND_ABORT: u32 = 2;

/// Each with a host identifier.
fn two() -> [Driver; 2] {
    let make = |name: &'static str, image: Option<&std::path::Path>| {
        let mut driver = Driver::off(|config| {
            if let Some(image) = image {
                config.image = image.to_owned();
            }
            // In the directory of the first one's image.
            config.shared = Some(config.image.with_extension("reservations"));
        });
        driver.share = Some(name);
        driver.nvme = share(driver.nvme, &driver.config, name);
        driver.enable();
        driver.create_pair(1, 64);
        driver
    };
    let first = make("first", None);
    let second = make("second", Some(&first.image));
    let mut both = [first, second];
    for (driver, id) in both.iter_mut().zip([100u128, 101]) {
        assert_eq!(set_host(driver, id).status, OK);
    }
    both
}

/// The controller with its part of the shared namespace.
pub fn share(nvme: Nvme, config: &crate::nvme::Config, name: &str) -> Nvme {
    let file = config.open_reservations().unwrap().unwrap();
    let device = (name, IMAGE);
    config.prepare_reservations(&file, device, [1; 16]).unwrap();
    let file = config.map_reservations(file, name).unwrap();
    nvme.sharing(config, file).unwrap()
}

fn set_host(driver: &mut Driver, id: u128) -> Cqe {
    driver.memory.put(DATA, &id.to_le_bytes());
    driver.admin(Sqe::new(0x09).prp(DATA, 0).cdw(10, 0x81).cdw(11, 1))
}

fn command(driver: &mut Driver, opcode: u8, cdw10: u32, keys: [u64; 2]) -> Cqe {
    driver.memory.put(DATA, &keys[0].to_le_bytes());
    driver.memory.put(DATA + 8, &keys[1].to_le_bytes());
    driver.io(Sqe::new(opcode).nsid(1).prp(DATA, 0).cdw(10, cdw10))
}

fn register(driver: &mut Driver, key: u64) -> Cqe {
    command(driver, REGISTER, 0, [0, key])
}

fn acquire(driver: &mut Driver, action: u32, key: u64, preempted: u64) -> Cqe {
    command(driver, ACQUIRE, action | KIND << 8, [key, preempted])
}

fn write(driver: &mut Driver) -> (u16, u16) {
    driver
        .io(Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 1))
        .status
}

fn read(driver: &mut Driver) -> (u16, u16) {
    driver
        .io(Sqe::new(2).nsid(1).prp(DATA, 0).blocks(0, 1))
        .status
}

/// Numbers of registrants and controllers, and of the holder, by a report.
fn report(driver: &mut Driver) -> (u32, Vec<u16>, Option<u16>) {
    let sqe = Sqe::new(REPORT).nsid(1).prp(DATA, 0);
    assert_eq!(driver.io(sqe.cdw(10, 1023).cdw(11, 1)).status, OK);
    let data = driver.memory.get(DATA, 4096);
    let word = |at: usize| u16::from_le_bytes([data[at], data[at + 1]]);
    let count = usize::from(word(5));
    let entries: Vec<_> = (0..count).map(|n| 64 + n * 64).collect();
    let holder = entries.iter().find(|&&at| data[at + 2] & 1 != 0);
    (
        u32::from_le_bytes([data[0], data[1], data[2], data[3]]),
        entries.iter().map(|&at| word(at)).collect(),
        holder.map(|&at| word(at)),
    )
}

#[test]
fn a_reservation_keeps_the_other_controller_from_writing() {
    let [mut first, mut second] = two();
    assert_eq!((write(&mut first), write(&mut second)), (OK, OK));
    assert_eq!(acquire(&mut first, 0, 10, 0).status, CONFLICT);
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!(acquire(&mut first, 0, 10, 0).status, OK);
    assert_eq!((write(&mut first), write(&mut second)), (OK, CONFLICT));
    assert_eq!((read(&mut first), read(&mut second)), (OK, OK));
    // As a write: flush, zeroes, deallocation, format.
    for sqe in [
        Sqe::new(0).nsid(1),
        Sqe::new(8).nsid(1).blocks(0, 1),
        Sqe::new(9).nsid(1).prp(DATA, 0).cdw(11, 4),
    ] {
        assert_eq!(second.io(sqe).status, CONFLICT, "{sqe:?}");
    }
    let format = Sqe::new(0x80).nsid(1);
    assert_eq!(second.admin(format).status, CONFLICT);
    assert_eq!(report(&mut second), (1, vec![0], Some(0)));
    // One registers, and takes it.
    assert_eq!(register(&mut second, 11).status, OK);
    assert_eq!(write(&mut second), CONFLICT);
    assert_eq!(acquire(&mut second, PREEMPT, 11, 10).status, OK);
    assert_eq!((write(&mut first), write(&mut second)), (CONFLICT, OK));
    assert_eq!(report(&mut first), (3, vec![1], Some(1)));
    let release = command(&mut second, RELEASE, KIND << 8, [11, 0]);
    assert_eq!(release.status, OK);
    assert_eq!((write(&mut first), write(&mut second)), (OK, OK));
}

#[test]
fn controllers_are_of_one_subsystem_and_namespace() {
    let [mut first, mut second] = two();
    let identify = |driver: &mut Driver, cns: u32| {
        let sqe = Sqe::new(6)
            .nsid(u32::from(cns != 1))
            .prp(DATA, 0)
            .cdw(10, cns);
        assert_eq!(driver.admin(sqe).status, OK);
        driver.memory.get(DATA, 4096)
    };
    let both = [&mut first, &mut second].map(|driver| {
        let (controller, namespace) = (identify(driver, 1), identify(driver, 0));
        assert_eq!(controller[76], 2, "CMIC");
        assert_eq!(controller[520] & 1 << 5, 1 << 5, "ONCS");
        assert_eq!(namespace[30..32], [1, 0xff], "NMIC, RESCAP");
        let uuid = identify(driver, 3)[..20].to_vec();
        let number = u16::from_le_bytes([controller[78], controller[79]]);
        (
            number,
            controller[4..24].to_vec(),
            controller[768..1024].to_vec(),
            uuid,
        )
    });
    assert_eq!((both[0].0, both[1].0), (0, 1));
    assert_eq!(
        (&both[0].1, &both[0].2, &both[0].3),
        (&both[1].1, &both[1].2, &both[1].3)
    );
    assert_eq!(identify(&mut first, 0x13)[..6], [2, 0, 0, 0, 1, 0]);
    // One alone has neither.
    let mut alone = Driver::ready(ENGINES[0]);
    let sqe = Sqe::new(REPORT).nsid(1).prp(DATA, 0).cdw(10, 15);
    assert_eq!(alone.io(sqe).status, (0, 1));
    assert_eq!(set_host(&mut alone, 1).status, (0, 2));
}

#[test]
fn a_host_without_an_identifier_loses_its_registration_with_a_reset() {
    let [mut first, mut second] = two();
    // Given once.
    assert_eq!(set_host(&mut first, 5).status, (0, 0xc));
    second.enable();
    second.create_pair(1, 64);
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!(register(&mut second, 11).status, OK);
    assert_eq!(report(&mut first).1, [0, 1]);
    for driver in [&mut first, &mut second] {
        driver.enable();
        driver.create_pair(1, 64);
    }
    assert_eq!(report(&mut first).1, [0]);
    // The other format of identifiers, while one is set.
    assert_eq!(set_host(&mut first, 100).status, OK);
    let sqe = Sqe::new(REPORT).nsid(1).prp(DATA, 0).cdw(10, 15);
    assert_eq!(first.io(sqe).status, (0, 0x18));
}

#[test]
fn preempting_waits_for_the_commands_of_others() {
    let [mut first, mut second] = two();
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!(register(&mut second, 11).status, OK);
    // The other one has taken a command, and does not go on.
    second.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 1));
    second.nvme.reservations_admit();
    let abort = Sqe::new(ACQUIRE).nsid(1).prp(DATA, 0);
    first.memory.put(DATA, &10u64.to_le_bytes());
    first.memory.put(DATA + 8, &11u64.to_le_bytes());
    first.submit(1, abort.cdw(10, PREEMPT_AND_ABORT | KIND << 8));
    for _ in 0..20 {
        first.poll();
        assert!(first.nvme.is_polled(), "nothing wakes it");
    }
    // Another change has to wait, as its number would be forgotten.
    first.memory.put(DATA, &10u64.to_le_bytes());
    let other = Sqe::new(RELEASE).nsid(1).prp(DATA, 0);
    assert_eq!(first.io(other.cdw(10, KIND << 8)).status, (0, 0x21));
    assert_eq!(first.take(1), None);
    // It goes on. Without a reservation all may write.
    assert_eq!(second.wait(1).status, OK);
    assert_eq!(first.wait(1).status, OK);
    assert_eq!(report(&mut first).1, [0]);
    assert_eq!(register(&mut second, 12).status, OK);
}

#[test]
fn a_change_whose_process_is_killed_is_made_once() {
    for point in 0..12 {
        let [mut first, _second] = two();
        first.keep_state();
        assert_eq!(register(&mut first, 10).status, OK);
        crash::after(Some(point));
        // Twice, the second would have the wrong key.
        let replaced = command(&mut first, REGISTER, 2, [10, 20]);
        crash::after(None);
        assert_eq!(replaced.status, OK, "killed at point {point}");
        assert_eq!(report(&mut first), (2, vec![0], None));
        // The host is the same for the next process.
        assert_eq!(register(&mut first, 20).status, OK);
    }
}

#[test]
fn what_is_no_command_is_refused() {
    const INVALID_FIELD: (u16, u16) = (0, 2);
    let [mut first, _second] = two();
    assert_eq!(register(&mut first, 10).status, OK);
    for (opcode, cdw10) in [
        (REGISTER, 3),
        (REGISTER, 1 << 30),
        (ACQUIRE, 3 | KIND << 8),
        (ACQUIRE, 0),
        (ACQUIRE, 7 << 8),
        (ACQUIRE, 1 << 3 | KIND << 8),
        (RELEASE, 2),
        (RELEASE, 7 << 8),
        (RELEASE, 1 << 3 | KIND << 8),
    ] {
        let refused = command(&mut first, opcode, cdw10, [10, 10]);
        assert_eq!(refused.status, INVALID_FIELD, "{opcode:#x} {cdw10:#x}");
    }
    let wrong = Sqe::new(REGISTER).nsid(2).prp(DATA, 0);
    assert_eq!(first.io(wrong).status, (0, 0xb));
}

#[test]
fn a_host_without_an_identifier_keeps_its_reservation_when_its_process_is_killed() {
    let [mut first, mut second] = two();
    first.enable();
    first.create_pair(1, 64);
    first.keep_state();
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!(acquire(&mut first, 0, 10, 0).status, OK);
    first.restart();
    assert_eq!((write(&mut first), write(&mut second)), (OK, CONFLICT));
    // Its device is reset, and begins anew.
    first.nvme.reset();
    assert_eq!(write(&mut second), CONFLICT);
    first.enable();
    assert_eq!(write(&mut second), OK);
}

#[test]
fn a_controller_that_is_reset_under_load_holds_nobody_up() {
    let [mut first, mut second] = two();
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!(register(&mut second, 11).status, OK);
    for _ in 0..8 {
        second.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 1));
    }
    second.poll();
    // As its lease ends.
    second.until("rest", |driver| driver.with(|nvme, bus| nvme.quiesce(bus)));
    second.nvme.reset();
    assert_eq!(acquire(&mut first, PREEMPT_AND_ABORT, 10, 11).status, OK);
    assert_eq!(report(&mut first).1, [0]);
}

#[test]
fn a_registrant_has_reservations_persist() {
    let [mut first, mut second] = two();
    let set = |driver: &mut Driver, value: u32| {
        let sqe = Sqe::new(0x09).nsid(1);
        driver.admin(sqe.cdw(10, 0x83).cdw(11, value)).status
    };
    let get = |driver: &mut Driver, feature: u32| {
        let cqe = driver.admin(Sqe::new(0x0a).nsid(1).cdw(10, feature));
        (cqe.status, cqe.result)
    };
    assert_eq!(set(&mut first, 1), CONFLICT);
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!((set(&mut first, 1), get(&mut second, 0x83)), (OK, (OK, 1)));
    // By the command, too.
    assert_eq!(command(&mut first, REGISTER, 2 << 30, [0, 10]).status, OK);
    assert_eq!(get(&mut second, 0x83), (OK, 0));
    let mask = Sqe::new(0x09).nsid(1).cdw(10, 0x82).cdw(11, 0xff);
    assert_eq!(
        (first.admin(mask).status, get(&mut first, 0x82)),
        (OK, (OK, 0xe))
    );
    assert_eq!(first.log(0x80, 64), [0; 64]);
}
