//! Of a lender in another host.

use super::*;

/// A controller whose lender is the test.
fn remote() -> (Driver, Link, MediumKeeper) {
    let [_first, mut second] = two([Here, Here]);
    let (name, _) = second.share.unwrap();
    let file = second.config.open_reservations().unwrap().unwrap();
    let identity = second.config.reservations_identity(&file, name).unwrap();
    let (near, far) = links();
    let (nvme, keeper) = borrow(&second.config, near, identity);
    second.nvme = nvme;
    second.enable();
    listen(&mut second, EVENT);
    (second, far, keeper)
}

/// The notifications that a borrower has asked for.
fn asked(far: &mut Link) -> Vec<Option<u64>> {
    let mut asked = Vec::new();
    while let Some(frame) = far.receive(|_| Ok(Memory::DISCARD)).unwrap() {
        if let Frame::Notified { upto } = frame {
            asked.push(upto);
        }
    }
    asked
}

fn notify(driver: &mut Driver, far: &mut Link, session: u32, notifications: Notifications) {
    let frame = Frame::Notifications {
        session,
        notifications,
    };
    far.post(frame, Memory::NONE);
    far.flush().unwrap();
    for _ in 0..3 {
        driver.enable_notifications();
        driver.poll();
    }
}

#[test]
fn a_lender_notifies_when_it_is_asked_and_at_no_other_time() {
    let (mut driver, mut far, keeper) = remote();
    let session = driver.nvme.queues.state.session();
    assert_eq!(asked(&mut far).last(), Some(&None));
    let all = |upto, types| Notifications {
        upto,
        lost: false,
        types,
    };
    // Of an earlier session.
    notify(&mut driver, &mut far, session.wrapping_sub(1), all(5, 1));
    assert_eq!(asked(&mut far), []);
    notify(&mut driver, &mut far, session, all(7, 0));
    assert_eq!(asked(&mut far), [Some(7)]);
    assert_eq!(driver.take(0), None);
    // As many as there can be; a number that goes back, and one that stays.
    notify(&mut driver, &mut far, session, all(3, u64::MAX));
    assert_eq!(asked(&mut far), [Some(3)]);
    notify(&mut driver, &mut far, session, all(3, 0b10_00_01));
    assert_eq!(asked(&mut far), [Some(3)]);
    expect_event_at(&mut driver);
    let mut expected: Vec<_> = (1..=32).map(|n| (n, RESERVATION_PREEMPTED)).collect();
    expected.push((33, REGISTRATION_PREEMPTED));
    assert_eq!(pages(&mut driver), expected);
    // Twice for one question.
    far.post(
        Frame::Notifications {
            session,
            notifications: all(4, 1),
        },
        Memory::NONE,
    );
    notify(&mut driver, &mut far, session, all(5, 1));
    eventually("end", || {
        driver.enable_notifications();
        matches!(keeper.notices.try_recv(), Ok(Notice::Lost { .. }))
    });
}

/// Each answer makes the borrower ask again, which is in its memory until it is sent.
#[test]
fn a_lender_that_answers_and_does_not_receive_is_given_up() {
    let (mut driver, mut far, keeper) = remote();
    let session = driver.nvme.queues.state.session();
    let mut upto = 0;
    eventually("end", || {
        upto += 1;
        let notifications = Notifications {
            upto,
            lost: false,
            types: 0,
        };
        // It has hung up in the end.
        let frame = Frame::Notifications {
            session,
            notifications,
        };
        far.post(frame, Memory::NONE);
        let _ = far.flush();
        driver.enable_notifications();
        driver.poll();
        matches!(keeper.notices.try_recv(), Ok(Notice::Lost { .. }))
    });
    assert!(upto > 100, "{upto} answers to what it had received");
}

#[track_caller]
fn expect_event_at(driver: &mut Driver) {
    let cqe = driver.take(0).unwrap();
    assert_eq!((cqe.id, cqe.status, cqe.result), (EVENT, OK, AVAILABLE));
}

#[test]
fn what_comes_while_a_connection_is_cut_comes_over_the_next_one_and_once() {
    let [mut first, mut second] = two([Here, Lent]);
    let mut wire = Wire::connect(&mut second);
    assert_eq!(set_host(&mut second, 101).status, OK);
    assert_eq!(register(&mut first, 10).status, OK);
    assert_eq!(register(&mut second, 11).status, OK);
    listen(&mut second, EVENT);
    take(&mut first, REGISTRANTS_ONLY, 10);
    release(&mut first, REGISTRANTS_ONLY, 10);
    catch_up(&mut second);
    expect_event(&mut second, EVENT);
    listen(&mut second, EVENT);
    assert_eq!(pages(&mut second), [(1, RESERVATION_RELEASED)]);
    for n in 0..3 {
        shutdown(&wire.lenders, Shutdown::Both).unwrap();
        clear(&mut first, 10);
        second.enable_notifications();
        wire.reconnect(&second);
        expect_event(&mut second, EVENT);
        listen(&mut second, EVENT);
        assert_eq!(pages(&mut second), [(2 + n, RESERVATION_PREEMPTED)]);
        expect_no_event(&mut second);
        assert_eq!(pages(&mut second), []);
        for (driver, key) in [(&mut first, 10), (&mut second, 11)] {
            assert_eq!(register(driver, key).status, OK);
        }
    }
}

#[test]
fn a_borrower_that_asks_all_the_time_and_does_not_receive_uses_no_memory_of_the_lender() {
    let [mut first, second] = registered([Here, Here]);
    clear(&mut first, 10);
    let (near, mut far) = links();
    let mut lent = lend(&second.config, "second", near);
    let host = HostIdentity {
        id: 101,
        extended: true,
        session: 0,
    };
    far.post(Frame::Host(host), Memory::NONE);
    let mut ask = || {
        far.post(Frame::Notified { upto: None }, Memory::NONE);
        far.flush().unwrap();
        lent.turn(&mut || ()).unwrap();
        lent.unsent()
    };
    eventually("full socket", || ask() > 0);
    for _ in 0..10_000 {
        assert_eq!(ask(), 1, "one frame waits");
    }
    // It gets what it has asked for once it receives.
    let mut answers = 0;
    eventually("end", || {
        let before = answers;
        while let Some(frame) = far.receive(|_| Ok(Memory::NONE)).unwrap() {
            let Frame::Notifications { notifications, .. } = frame else {
                panic!("{frame:?}");
            };
            assert_eq!((notifications.upto, notifications.types), (1, 0));
            answers += 1;
        }
        lent.turn(&mut || ()).unwrap();
        answers == before && lent.unsent() == 0
    });
    assert!(answers > 100, "{answers}");
}
