//! Two controllers that share a namespace.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use farside_medium::Link;
use rustix::event::{PollFd, PollFlags, poll};

use super::{
    crash,
    world::{
        Place::{Here, Lent},
        *,
    },
};
use crate::{
    Device,
    block::{BlockQueue, DEPTH, LentMedium, MediumKeeper, Turn, remote_medium},
    nvme::{Config, LentReservations, Nvme},
    test_links::links,
};

pub(super) const REGISTER: u8 = 0x0d;
const REPORT: u8 = 0x0e;
pub(super) const ACQUIRE: u8 = 0x11;
pub(super) const RELEASE: u8 = 0x15;

pub(super) const CONFLICT: (u16, u16) = (0, 0x83);

/// Write exclusive.
pub(super) const KIND: u32 = 1;
pub(super) const PREEMPT: u32 = 1;
pub(super) const PREEMPT_AND_ABORT: u32 = 2;

/// Where the media of two controllers are that share them.
pub(super) const PLACES: [[Place; 2]; 4] = [[Here, Here], [Here, Lent], [Lent, Here], [Lent, Lent]];

/// Each with a host identifier.
pub(super) fn two(places: [Place; 2]) -> [Driver; 2] {
    sharing(places)
}

/// As [`two`], of up to three.
pub(super) fn sharing<const N: usize>(places: [Place; N]) -> [Driver; N] {
    let make = |name: &'static str, place, image: Option<&std::path::Path>| {
        let mut driver = Driver::off(|config| {
            if let Some(image) = image {
                config.image = image.to_owned();
            }
            // In the directory of the first one's image.
            config.shared = Some(config.image.with_extension("reservations"));
        });
        driver.share = Some((name, place));
        driver.nvme = share(driver.nvme, &driver.config, (name, place));
        driver.enable();
        driver.create_pair(1, 64);
        driver
    };
    let mut image = None;
    let mut all = [0; N].map(|_| None);
    let named = ["first", "second", "third"].into_iter().zip(places);
    for ((driver, (name, place)), id) in all.iter_mut().zip(named).zip(100u128..) {
        let mut made = make(name, place, image.as_deref());
        image.get_or_insert_with(|| made.image.clone());
        assert_eq!(set_host(&mut made, id).status, OK);
        *driver = Some(made);
    }
    all.map(Option::unwrap)
}

/// The controller with its part of the shared namespace, or in its place one whose medium is elsewhere.
pub fn share(nvme: Nvme, config: &Config, (name, place): (&str, Place)) -> Nvme {
    let file = config.open_reservations().unwrap().unwrap();
    config.prepare_reservations(&file, name, [1; 16]).unwrap();
    if place == Lent {
        let identity = config.reservations_identity(&file, name).unwrap();
        let (near, far) = links();
        let (config_there, name) = (config.clone(), name.to_owned());
        std::thread::spawn(move || serve(lend(&config_there, &name, far), &Mutex::default()));
        return borrow(config, near, identity).0;
    }
    let file = config.map_reservations(file, name).unwrap();
    nvme.sharing(config, file).unwrap()
}

/// A controller whose medium is at the other end of a connection.
pub(super) fn borrow(
    config: &Config,
    near: Link,
    identity: (u16, [u8; 16]),
) -> (Nvme, MediumKeeper) {
    let (medium, keeper) = remote_medium(IMAGE, near).unwrap();
    let config = Config {
        shared: None,
        ..config.clone()
    };
    let nvme = Nvme::with_remote("disk0", &config, medium, (IMAGE, true)).unwrap();
    (nvme.sharing_remotely(&config, identity), keeper)
}

/// The lender's end, with a part of its own of the shared namespace.
pub(super) fn lend(config: &Config, name: &str, far: Link) -> LentMedium {
    let image = config.open_image().unwrap().file;
    let block = BlockQueue::open(image, config.engine, DEPTH).unwrap();
    let file = config.open_reservations().unwrap().unwrap();
    let reservations = LentReservations::new(config.map_reservations(file, name).unwrap());
    let lent = LentMedium::new(block, (IMAGE, false), (name, far)).unwrap();
    lent.sharing(reservations.unwrap())
}

/// Serves a borrower until it has gone, while `gate` is free.
pub(super) fn serve(mut lent: LentMedium, gate: &Mutex<()>) {
    loop {
        let open = gate.lock().unwrap();
        let Ok(turn) = lent.turn(&mut || ()) else {
            return lent.end();
        };
        drop(open);
        if turn != Turn::Idle {
            continue;
        }
        let (link, reads, writes) = lent.link();
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::IN, reads);
        interest.set(PollFlags::OUT, writes);
        let mut fds = [
            PollFd::from_borrowed_fd(link, interest),
            PollFd::from_borrowed_fd(lent.wake_fd(), PollFlags::IN),
        ];
        let patience = lent.looks_again().unwrap_or(Link::TICK);
        poll(&mut fds, Some(&patience.try_into().unwrap())).unwrap();
    }
}

pub(super) fn set_host(driver: &mut Driver, id: u128) -> Cqe {
    driver.memory.put(DATA, &id.to_le_bytes());
    driver.admin(Sqe::new(0x09).prp(DATA, 0).cdw(10, 0x81).cdw(11, 1))
}

pub(super) fn command(driver: &mut Driver, opcode: u8, cdw10: u32, keys: [u64; 2]) -> Cqe {
    driver.memory.put(DATA, &keys[0].to_le_bytes());
    driver.memory.put(DATA + 8, &keys[1].to_le_bytes());
    driver.io(Sqe::new(opcode).nsid(1).prp(DATA, 0).cdw(10, cdw10))
}

pub(super) fn register(driver: &mut Driver, key: u64) -> Cqe {
    command(driver, REGISTER, 0, [0, key])
}

pub(super) fn acquire(driver: &mut Driver, action: u32, key: u64, preempted: u64) -> Cqe {
    command(driver, ACQUIRE, action | KIND << 8, [key, preempted])
}

pub(super) fn write(driver: &mut Driver) -> (u16, u16) {
    driver
        .io(Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 1))
        .status
}

pub(super) fn read(driver: &mut Driver) -> (u16, u16) {
    driver
        .io(Sqe::new(2).nsid(1).prp(DATA, 0).blocks(0, 1))
        .status
}

/// Waits for what a lender does at its end.
pub(super) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "no {what}");
    }
}

/// Numbers of registrants and controllers, and of the holder, by a report.
pub(super) fn report(driver: &mut Driver) -> (u32, Vec<u16>, Option<u16>) {
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
    for places in PLACES {
        let [mut first, mut second] = two(places);
        assert_eq!((write(&mut first), write(&mut second)), (OK, OK));
        assert_eq!(acquire(&mut first, 0, 10, 0).status, CONFLICT);
        assert_eq!(register(&mut first, 10).status, OK);
        assert_eq!(acquire(&mut first, 0, 10, 0).status, OK);
        assert_eq!((write(&mut first), write(&mut second)), (OK, CONFLICT));
        assert_eq!((read(&mut first), read(&mut second)), (OK, OK));
        // As a write: flush, zeroes, deallocation, format.
        second.memory.put(DATA, &[4, 0, 0, 0, 1, 0, 0, 0]);
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
}

#[test]
fn controllers_are_of_one_subsystem_and_namespace() {
    for places in PLACES {
        let [mut first, mut second] = two(places);
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
        // Elsewhere, the others are not known.
        let list: [u8; 6] = match places[0] {
            Here => [2, 0, 0, 0, 1, 0],
            Lent => [1, 0, 0, 0, 0, 0],
        };
        assert_eq!(identify(&mut first, 0x13)[..6], list);
        // One alone has neither.
        let mut alone = Driver::ready(ENGINES[0]);
        let sqe = Sqe::new(REPORT).nsid(1).prp(DATA, 0).cdw(10, 15);
        assert_eq!(alone.io(sqe).status, (0, 1));
        assert_eq!(set_host(&mut alone, 1).status, (0, 2));
    }
}

#[test]
fn a_host_without_an_identifier_loses_its_registration_with_a_reset() {
    for places in PLACES {
        let [mut first, mut second] = two(places);
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
        // A lender hears of that.
        eventually("reset", || report(&mut first).1 == [0]);
        // The other format of identifiers, while one is set.
        assert_eq!(set_host(&mut first, 100).status, OK);
        let sqe = Sqe::new(REPORT).nsid(1).prp(DATA, 0).cdw(10, 15);
        assert_eq!(first.io(sqe).status, (0, 0x18));
    }
}

#[test]
fn preempting_waits_for_the_commands_of_others() {
    for place in [Here, Lent] {
        preempt_one_with_a_command(place);
    }
}

fn preempt_one_with_a_command(place: Place) {
    let [mut first, mut second] = two([place, Here]);
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
        assert!(place == Lent || first.nvme.is_polled(), "nothing wakes it");
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
    for places in PLACES {
        for point in 0..12 {
            let [mut first, _second] = two(places);
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
}

#[test]
fn what_is_no_command_is_refused() {
    for places in PLACES {
        const INVALID_FIELD: (u16, u16) = (0, 2);
        let [mut first, _second] = two(places);
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
}

#[test]
fn a_host_without_an_identifier_keeps_its_reservation_when_its_process_is_killed() {
    for places in PLACES {
        let [mut first, mut second] = two(places);
        first.nvme.reset();
        first.keep_state();
        first.enable();
        first.create_pair(1, 64);
        assert_eq!(register(&mut first, 10).status, OK);
        assert_eq!(acquire(&mut first, 0, 10, 0).status, OK);
        first.restart();
        assert_eq!((write(&mut first), write(&mut second)), (OK, CONFLICT));
        // Its device is reset, and begins anew.
        first.nvme.reset();
        assert_eq!(write(&mut second), CONFLICT);
        first.enable();
        eventually("reset", || write(&mut second) == OK);
    }
}

#[test]
fn a_controller_that_is_reset_under_load_holds_nobody_up() {
    for places in PLACES {
        let [mut first, mut second] = two(places);
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
}

#[test]
fn a_registrant_has_reservations_persist() {
    for places in PLACES {
        let [mut first, mut second] = two(places);
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
}
