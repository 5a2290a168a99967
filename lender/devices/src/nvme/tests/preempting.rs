//! Two controllers that share a namespace, of which one is preempted while it has commands in flight.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
};

use farside_medium::{Condition, Frame, HostIdentity, Link, Memory, REFUSED};
use rustix::net::{Shutdown, shutdown};

use super::{
    crash,
    failing::{Faults, Watch},
    reservations::*,
    watch::Effect,
    world::{
        Place::{Here, Lent},
        *,
    },
};
use crate::{
    Device,
    block::{BlockQueue, DEPTH, LentMedium, MediumKeeper, Supply},
    nvme::LentReservations,
    test_links::links,
};

/// The connection of a controller whose medium is elsewhere, which can be cut.
pub(super) struct Wire {
    keeper: MediumKeeper,
    pub(super) lenders: OwnedFd,
    /// While it is held, the lender does nothing.
    gate: Arc<Mutex<()>>,
}

impl Wire {
    /// Connects the controller anew, which begins again.
    pub(super) fn connect(driver: &mut Driver) -> Self {
        let (name, _) = driver.share.unwrap();
        let file = driver.config.open_reservations().unwrap().unwrap();
        let identity = driver.config.reservations_identity(&file, name).unwrap();
        let gate = Arc::default();
        let (near, lenders) = Self::lend(driver, &gate);
        let (nvme, keeper) = borrow(&driver.config, near, identity);
        driver.nvme = nvme;
        driver.enable();
        driver.create_pair(1, 64);
        Self {
            keeper,
            lenders,
            gate,
        }
    }

    fn lend(driver: &Driver, gate: &Arc<Mutex<()>>) -> (Link, OwnedFd) {
        let (near, far) = links();
        let lenders = far.as_fd().try_clone_to_owned().unwrap();
        let (config, (name, _)) = (driver.config.clone(), driver.share.unwrap());
        let gate = Arc::clone(gate);
        std::thread::spawn(move || serve(lend(&config, name, far), &gate));
        (near, lenders)
    }

    pub(super) fn reconnect(&mut self, driver: &Driver) {
        let (near, lenders) = Self::lend(driver, &self.gate);
        self.lenders = lenders;
        assert!(self.keeper.supply(Supply::Link(Box::new(near), IMAGE)));
    }
}

#[test]
fn a_change_whose_answer_is_lost_with_the_connection_is_made_once() {
    let [mut first, mut second] = two([Lent, Here]);
    let mut wire = Wire::connect(&mut first);
    first.keep_state();
    assert_eq!(set_host(&mut first, 100).status, OK);
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!(report(&mut second).0, 1);
    // The lender receives, and cannot answer.
    shutdown(&wire.lenders, Shutdown::Write).unwrap();
    first.memory.put(DATA, &10u64.to_le_bytes());
    first.memory.put(DATA + 8, &20u64.to_le_bytes());
    first.submit(1, Sqe::new(REGISTER).nsid(1).prp(DATA, 0).cdw(10, 2));
    first.poll();
    eventually("change", || report(&mut second).0 == 2);
    assert_eq!(first.take(1), None);
    wire.reconnect(&first);
    // Twice, the second would have the wrong key.
    assert_eq!(first.wait(1).status, OK);
    assert_eq!(report(&mut second).0, 2);
    // The lender knows the host over the new connection.
    assert_eq!(acquire(&mut first, 0, 20, 0).status, OK);
    assert_eq!((write(&mut first), write(&mut second)), (OK, CONFLICT));
}

#[test]
fn a_write_that_waits_for_a_connection_is_fenced() {
    let [mut first, mut second] = two([Here, Lent]);
    let mut wire = Wire::connect(&mut second);
    assert_eq!(set_host(&mut second, 101).status, OK);
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!(register(&mut second, 11).status, OK);
    assert_eq!(acquire(&mut second, 0, 11, 0).status, OK);
    assert_eq!(write(&mut second), OK);
    shutdown(&wire.lenders, Shutdown::Both).unwrap();
    second.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 1));
    second.poll();
    // As when its worker is gone.
    second.config.leave_reservations("second", false).unwrap();
    assert_eq!(acquire(&mut first, PREEMPT_AND_ABORT, 10, 11).status, OK);
    wire.reconnect(&second);
    assert_eq!(second.wait(1).status, CONFLICT);
    assert_eq!((read(&mut second), write(&mut first)), (OK, OK));
    // Neither that nor a flush is a failure of the medium.
    assert_eq!(second.io(Sqe::new(0).nsid(1)).status, CONFLICT);
    assert_eq!(second.nvme.problem(), None);
}

const ABORTED: (u16, u16) = (0, 0x1b);

/// Takes the reservation and the registration from the other one, whose I/O has ended then, writes, and releases everything.
fn take_over(first: &mut Driver) {
    assert_eq!(acquire(first, PREEMPT_AND_ABORT, 10, 11).status, OK);
    first.memory.put(DATA, &[10; 512]);
    assert_eq!(write(first), OK);
    assert_eq!(command(first, RELEASE, 1, [10, 0]).status, OK);
}

/// Both register, and the second one holds the reservation.
fn hold(first: &mut Driver, second: &mut Driver) {
    assert_eq!(register(first, 10).status, OK);
    assert_eq!(register(second, 11).status, OK);
    assert_eq!(acquire(second, 0, 11, 0).status, OK);
    second.memory.put(DATA, &[11; 512]);
}

fn first_byte(driver: &mut Driver) -> u8 {
    driver.memory.put(DATA, &[0; 512]);
    assert_eq!(read(driver), OK);
    driver.memory.get(DATA, 1)[0]
}

#[test]
fn what_was_on_the_wire_is_aborted_for_good() {
    let [mut first, mut second] = two([Here, Lent]);
    let mut wire = Wire::connect(&mut second);
    assert_eq!(set_host(&mut second, 101).status, OK);
    hold(&mut first, &mut second);
    for is_cut in [false, true] {
        // The lender is there.
        assert_eq!(read(&mut second), OK);
        second.memory.put(DATA, &[11; 512]);
        let held = wire.gate.lock().unwrap();
        second.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 1));
        second.poll();
        if is_cut {
            shutdown(&wire.lenders, Shutdown::Both).unwrap();
        }
        take_over(&mut first);
        drop(held);
        if is_cut {
            wire.reconnect(&second);
        }
        assert_eq!(second.wait(1).status, ABORTED, "cut: {is_cut}");
        assert_eq!(first_byte(&mut first), 10);
        // It may write anew.
        assert_eq!(write(&mut second), OK);
        hold(&mut first, &mut second);
    }
    assert_eq!(second.nvme.problem(), None);
}

/// The frames that a borrower has sent.
fn sent(far: &mut Link) -> Vec<Frame> {
    let mut frames = Vec::new();
    while let Some(frame) = far.receive(|_| Ok(Memory::DISCARD)).unwrap() {
        frames.push(frame);
    }
    frames
}

#[test]
fn a_fence_is_answered_when_nothing_of_before_is_left() {
    let [_first, mut second] = two([Here, Lent]);
    let (name, _) = second.share.unwrap();
    let file = second.config.open_reservations().unwrap().unwrap();
    let identity = second.config.reservations_identity(&file, name).unwrap();
    let (near, mut far) = links();
    let (nvme, keeper) = borrow(&second.config, near, identity);
    second.nvme = nvme;
    second.enable();
    second.create_pair(1, 64);
    second.submit(1, Sqe::new(1).nsid(1).prp(DATA, 0).blocks(0, 1));
    second.poll();
    let before = sent(&mut far);
    let [Frame::Host(_), asks, Frame::Write { tag, .. }] = before[..] else {
        panic!("{before:?}");
    };
    assert_eq!(asks, Frame::Notified { upto: None });
    let fence = |far: &mut Link, second: &mut Driver| {
        far.post(Frame::Fence { number: 1 }, Memory::NONE);
        far.flush().unwrap();
        for _ in 0..5 {
            second.poll();
            second.enable_notifications();
        }
    };
    fence(&mut far, &mut second);
    // Nor does another command start.
    second.submit(1, Sqe::new(0).nsid(1));
    second.poll();
    assert_eq!(sent(&mut far), []);
    // A cut: the write is sent again, and the next lender does not know that it was told.
    let (near, next) = links();
    far = next;
    eventually("cut", || {
        second.enable_notifications();
        keeper.notices.try_recv().is_ok()
    });
    assert!(keeper.supply(Supply::Link(Box::new(near), IMAGE)));
    second.enable_notifications();
    assert_eq!(sent(&mut far), before);
    fence(&mut far, &mut second);
    assert_eq!(sent(&mut far), []);
    let done = Frame::Done {
        tag,
        result: 512,
        data: 0,
        condition: Condition {
            size: IMAGE,
            full: false,
            read_only: false,
        },
    };
    far.post(done, Memory::NONE);
    far.flush().unwrap();
    assert_eq!(second.wait(1).status, ABORTED);
    second.poll();
    let after = sent(&mut far);
    assert!(
        matches!(after[..], [Frame::Fenced { number: 1 }, Frame::Sync { .. }]),
        "{after:?}"
    );
    // Another one before the answer was sent is no lender's.
    for number in 2..4 {
        far.post(Frame::Fence { number }, Memory::NONE);
    }
    far.flush().unwrap();
    eventually("end", || {
        second.enable_notifications();
        keeper.notices.try_recv().is_ok()
    });
}

#[test]
fn what_a_killed_process_had_in_flight_is_aborted_for_good() {
    let mut aborted = 0;
    for point in 0..30 {
        let [mut first, mut second] = two([Here, Here]);
        second.keep_state();
        hold(&mut first, &mut second);
        let config = second.config.clone();
        second.while_dead = Some(Box::new(move || {
            config.leave_reservations("second", false).unwrap();
            take_over(&mut first);
        }));
        crash::after(Some(point));
        let written = write(&mut second);
        crash::after(None);
        second.while_dead = None;
        if written == ABORTED {
            aborted += 1;
            assert_eq!(first_byte(&mut second), 10, "killed at point {point}");
            assert_eq!(write(&mut second), OK);
        }
    }
    assert!(aborted > 2, "{aborted}");
}

#[test]
fn one_change_at_a_time_crosses_a_connection() {
    let [mut first, _second] = two([Lent, Here]);
    let wire = Wire::connect(&mut first);
    let held = wire.gate.lock().unwrap();
    first.memory.put(DATA, &[0; 16]);
    first.submit(1, Sqe::new(REGISTER).nsid(1).prp(DATA, 0));
    assert_eq!(command(&mut first, RELEASE, 1, [0, 0]).status, (0, 0x21));
    drop(held);
    assert_eq!(first.wait(1).status, OK);
}

#[test]
fn hosts_that_preempt_each_other_do_not_wait_for_each_other() {
    for places in PLACES {
        let mut both = two(places);
        for (driver, key) in both.iter_mut().zip([10, 11]) {
            assert_eq!(register(driver, key).status, OK);
        }
        for (driver, [own, other]) in both.iter_mut().zip([[10u64, 11], [11, 10]]) {
            driver.memory.put(DATA, &own.to_le_bytes());
            driver.memory.put(DATA + 8, &other.to_le_bytes());
            let abort = Sqe::new(ACQUIRE).nsid(1).prp(DATA, 0);
            driver.submit(1, abort.cdw(10, PREEMPT_AND_ABORT | KIND << 8));
            driver.poll();
        }
        let mut ended = both.each_mut().map(|driver| driver.wait(1).status);
        ended.sort_unstable();
        assert_eq!(ended, [OK, CONFLICT], "{places:?}");
    }
}

/// The results of operations, and the numbers of fences, that a borrower receives.
fn received(far: &mut Link) -> (Vec<i32>, Vec<u64>) {
    let (mut results, mut fences) = (Vec::new(), Vec::new());
    while let Some(frame) = far.receive(|_| Ok(Memory::NONE)).unwrap() {
        match frame {
            Frame::Done { result, .. } => results.push(result),
            Frame::Fence { number } => fences.push(number),
            other => panic!("{other:?}"),
        }
    }
    (results, fences)
}

#[test]
fn what_is_in_flight_at_a_lender_is_waited_for() {
    let [mut first, mut second] = two([Here, Here]);
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!(register(&mut second, 11).status, OK);
    // The second one's medium is at a lender from here on, and slow.
    let (near, mut far) = links();
    let image = second.config.open_image().unwrap().file;
    let faults = Faults {
        seed: 1,
        lost: 0,
        busy: 0,
        hangs: 0,
        again: 0,
        short: 0,
        delay: 10_000,
    };
    let watch = Watch::default();
    watch.submitted((1, 1), Effect::Flush);
    let block = BlockQueue::faulty(image, faults, watch.clone(), DEPTH).unwrap();
    let file = second.config.open_reservations().unwrap().unwrap();
    let file = second.config.map_reservations(file, "second").unwrap();
    let lent = LentMedium::new(block, (IMAGE, false), ("second", near)).unwrap();
    let mut lent = lent.sharing(LentReservations::new(file).unwrap());
    let mut turn = || lent.turn(&mut || ()).map(|_| lent.in_flight().0).unwrap();
    let host = HostIdentity {
        id: 101,
        extended: true,
        session: 0,
    };
    let sync = Frame::Sync { tag: 0 };
    for frame in [Frame::Host(host), sync] {
        far.post(frame, Memory::NONE);
        far.flush().unwrap();
        turn();
    }
    first.memory.put(DATA, &10u64.to_le_bytes());
    first.memory.put(DATA + 8, &11u64.to_le_bytes());
    let abort = Sqe::new(ACQUIRE).nsid(1).prp(DATA, 0);
    first.submit(1, abort.cdw(10, PREEMPT_AND_ABORT | KIND << 8));
    for _ in 0..20 {
        first.poll();
        assert_eq!((first.take(1), turn()), (None, 1));
    }
    eventually("end", || turn() == 0);
    assert_eq!(first.wait(1).status, OK);
    // The next one was sent before the borrower heard of that.
    let fence = |number| Frame::Fenced { number };
    for (frames, results) in [
        (vec![], (vec![0], vec![1])),
        (
            vec![sync, fence(2), sync],
            (vec![-REFUSED - 0x401b; 2], vec![]),
        ),
        (vec![fence(1), sync], (vec![0], vec![])),
    ] {
        for frame in frames {
            far.post(frame, Memory::NONE);
            far.flush().unwrap();
            watch.submitted((1, 2), Effect::Flush);
            eventually("answer", || turn() == 0);
            watch.reset();
        }
        assert_eq!(received(&mut far), results);
    }
}
