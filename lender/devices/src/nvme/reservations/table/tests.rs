//! Rights and changes, of three hosts.

use super::*;

const A: Caller = caller(0);
const B: Caller = caller(1);
const C: Caller = caller(2);

const fn caller(controller: u16) -> Caller {
    Caller {
        host: Host::Named(100 + controller as u128, true),
        controller,
    }
}

/// Whether A, B and C may read, and write.
fn rights(table: &Table) -> [(bool, bool); 3] {
    [A, B, C].map(|it| {
        let may = |group| table.allows(it.host, group);
        (may(Group::Read), may(Group::Write))
    })
}

const ALL: (bool, bool) = (true, true);
const READ: (bool, bool) = (true, false);
const NONE: (bool, bool) = (false, false);

/// A and B have registered, with keys 10 and 11.
fn two() -> Table {
    let mut table = Table::default();
    table.register(A, Registration::Add { new: 10 }).unwrap();
    table.register(B, Registration::Add { new: 11 }).unwrap();
    table
}

fn held(kind: Kind) -> Table {
    let mut table = two();
    table.acquire(A, 10, (Acquire::Acquire, kind)).unwrap();
    table
}

#[test]
fn each_kind_gives_holder_registrants_and_others_their_rights() {
    use Kind::*;
    assert_eq!(rights(&two()), [ALL; 3]);
    for (kind, expected) in [
        (WriteExclusive, [ALL, READ, READ]),
        (ExclusiveAccess, [ALL, NONE, NONE]),
        (WriteExclusiveRegistrantsOnly, [ALL, ALL, READ]),
        (ExclusiveAccessRegistrantsOnly, [ALL, ALL, NONE]),
        (WriteExclusiveAllRegistrants, [ALL, ALL, READ]),
        (ExclusiveAccessAllRegistrants, [ALL, ALL, NONE]),
    ] {
        let table = held(kind);
        assert_eq!(rights(&table), expected, "{kind:?}");
        assert_eq!(Kind::from_number(kind.number()), Ok(kind));
    }
    assert_eq!(Kind::from_number(0), Err(Status::INVALID_FIELD));
    assert_eq!(Kind::from_number(7), Err(Status::INVALID_FIELD));
}

#[test]
fn a_key_is_registered_replaced_and_unregistered_by_who_has_it() {
    let conflict = Err(Status::RESERVATION_CONFLICT);
    let mut table = two();
    // The same again, and another one.
    assert_eq!(table.register(A, Registration::Add { new: 10 }), Ok(()));
    assert_eq!(table.register(A, Registration::Add { new: 12 }), conflict);
    let replace = |current, new| Registration::Replace { current, new };
    assert_eq!(table.register(A, replace(Some(11), 12)), conflict);
    assert_eq!(table.register(A, replace(Some(10), 12)), Ok(()));
    assert_eq!(table.register(A, replace(None, 13)), Ok(()));
    assert_eq!(table.register(C, replace(Some(0), 14)), conflict);
    assert_eq!(table.register(C, replace(None, 14)), Ok(()));
    let unregister = |current| Registration::Remove { current };
    assert_eq!(table.register(A, unregister(Some(10))), conflict);
    assert_eq!(table.register(A, unregister(Some(13))), Ok(()));
    assert_eq!(table.register(A, unregister(None)), conflict);
    assert_eq!(table.register(C, unregister(None)), Ok(()));
    assert_eq!(table.registrants.len(), 1);
}

#[test]
fn a_reservation_ends_with_its_holder() {
    let mut table = held(Kind::WriteExclusive);
    let unregister = Registration::Remove { current: None };
    table.register(B, unregister).unwrap();
    assert_eq!(rights(&table), [ALL, READ, READ]);
    table.register(A, unregister).unwrap();
    assert_eq!(rights(&table), [ALL; 3]);
    // With the last one, if all hold it.
    let mut table = held(Kind::ExclusiveAccessAllRegistrants);
    table.register(A, unregister).unwrap();
    assert_eq!(rights(&table), [NONE, ALL, NONE]);
    table.register(B, unregister).unwrap();
    assert_eq!(rights(&table), [ALL; 3]);
}

#[test]
fn a_reservation_is_acquired_once_and_released_by_its_holder() {
    let conflict = Err(Status::RESERVATION_CONFLICT);
    let kind = Kind::WriteExclusive;
    let mut table = two();
    let acquire = (Acquire::Acquire, kind);
    assert_eq!(table.acquire(A, 11, acquire), conflict, "B's key");
    assert_eq!(table.acquire(C, 0, acquire), conflict, "not registered");
    assert_eq!(table.acquire(A, 10, acquire), Ok(()));
    assert_eq!(table.acquire(A, 10, acquire), Ok(()));
    assert_eq!(table.acquire(B, 11, acquire), conflict);
    let other = (Acquire::Acquire, Kind::ExclusiveAccess);
    assert_eq!(table.acquire(A, 10, other), conflict);
    // Of another one, nothing happens.
    let release = Release::Release(kind);
    assert_eq!(table.release(B.host, 11, release), Ok(()));
    assert_eq!(rights(&table), [ALL, READ, READ]);
    let wrong = Release::Release(Kind::ExclusiveAccess);
    assert_eq!(table.release(A.host, 10, wrong), Err(Status::INVALID_FIELD));
    assert_eq!(table.release(C.host, 0, release), conflict);
    assert_eq!(table.release(A.host, 10, release), Ok(()));
    assert_eq!(rights(&table), [ALL; 3]);
    let mut table = held(kind);
    assert_eq!(table.release(B.host, 11, Release::Clear), Ok(()));
    assert_eq!(table.registrants, []);
    assert_eq!(rights(&table), [ALL; 3]);
}

#[test]
fn preempting_takes_registrations_and_the_reservation() {
    let conflict = Err(Status::RESERVATION_CONFLICT);
    let kind = Kind::ExclusiveAccess;
    // The holder's.
    let mut table = held(Kind::WriteExclusive);
    let preempt = |key| (Acquire::Preempt { key, aborts: false }, kind);
    assert_eq!(table.acquire(B, 11, preempt(99)), conflict);
    assert_eq!(table.acquire(B, 11, preempt(10)), Ok(()));
    assert_eq!(rights(&table), [NONE, ALL, NONE]);
    assert_eq!(table.check_key(A.host, 10), conflict);
    // Another one's, which leaves the reservation.
    let mut table = held(Kind::WriteExclusive);
    assert_eq!(table.acquire(A, 10, preempt(11)), Ok(()));
    assert_eq!(table.check_key(B.host, 11), conflict);
    assert_eq!(rights(&table), [ALL, READ, READ]);
    // The own one, to change the kind.
    assert_eq!(table.acquire(A, 10, preempt(10)), Ok(()));
    assert_eq!(rights(&table), [ALL, NONE, NONE]);
    // A reservation of all: of one, then of all others.
    let mut table = held(Kind::WriteExclusiveAllRegistrants);
    table.register(C, Registration::Add { new: 12 }).unwrap();
    assert_eq!(table.acquire(B, 11, preempt(12)), Ok(()));
    assert_eq!(rights(&table), [ALL, ALL, READ]);
    assert_eq!(table.acquire(B, 11, preempt(0)), Ok(()));
    assert_eq!(rights(&table), [NONE, ALL, NONE]);
    assert_eq!(table.registrants.len(), 1);
}

#[test]
fn what_persists_outlives_a_loss_of_power() {
    let kind = Kind::WriteExclusive;
    let mut table = held(kind);
    table.lose_power();
    assert_eq!(rights(&table), [ALL; 3]);
    let mut table = held(kind);
    table.set_persists(true);
    table.lose_power();
    assert_eq!(rights(&table), [ALL, READ, READ]);
    // Without an identifier, nothing outlives a reset, nor does the reservation.
    let unnamed = Caller {
        host: Host::OfController {
            controller: 2,
            session: 5,
        },
        controller: 2,
    };
    let mut table = Table::default();
    let register = Registration::Add { new: 1 };
    table.register(unnamed, register).unwrap();
    table.acquire(unnamed, 1, (Acquire::Acquire, kind)).unwrap();
    assert_eq!(rights(&table), [READ; 3]);
    table.set_persists(true);
    let mut lost = table.clone();
    lost.lose_power();
    assert_eq!(rights(&lost), [ALL; 3]);
    table.forget_controller(1);
    table.begin_session(1, 6);
    table.begin_session(2, 5);
    assert_eq!(rights(&table), [READ; 3]);
    let mut reset = table.clone();
    reset.begin_session(2, 6);
    assert_eq!(rights(&reset), [ALL; 3]);
    table.forget_controller(2);
    assert_eq!(rights(&table), [ALL; 3]);
}

#[test]
fn a_preempted_host_is_known_as_aborted_and_the_oldest_make_room() {
    let kind = Kind::WriteExclusive;
    let mut table = held(kind);
    let preempt = |aborts| (Acquire::Preempt { key: 10, aborts }, kind);
    let mut without = table.clone();
    without.acquire(B, 11, preempt(false)).unwrap();
    assert_eq!(
        (without.aborts(), without.has_aborted(A.host, 0)),
        (0, false)
    );
    table.acquire(B, 11, preempt(true)).unwrap();
    let aborted = |table: &Table, after| [A, B].map(|it| table.has_aborted(it.host, after));
    assert_eq!((table.aborts(), aborted(&table, 0)), (1, [true, false]));
    assert_eq!(aborted(&table, 1), [false, false]);
    // It stays so when all reservations are released, and for a long time.
    table.release(B.host, 11, Release::Clear).unwrap();
    assert_eq!(aborted(&table, 0), [true, false]);
    for n in 2..=MOST as u64 + 1 {
        table.abort(&[Host::Named(n.into(), true)]);
        assert_eq!(aborted(&table, n), [false, false]);
    }
    // Then nobody knows who was.
    assert_eq!(aborted(&table, 0), [true, true]);
    assert_eq!(aborted(&table, 1), [false, false]);
    assert_eq!(table.aborted.len(), MOST);
}

#[test]
fn registrations_have_limits() {
    let mut table = Table::default();
    let named = |id: u128, controller| Caller {
        host: Host::Named(id, true),
        controller,
    };
    let add = |table: &mut Table, caller| table.register(caller, Registration::Add { new: 1 });
    let refused = Err(Status::INTERNAL_ERROR);
    // By one controller, whatever its host calls itself.
    for id in 0..MOST_BY_ONE as u128 {
        assert_eq!(add(&mut table, named(1000 + id, 0)), Ok(()));
    }
    assert_eq!(add(&mut table, named(2000, 0)), refused);
    for n in 1..=(MOST - MOST_BY_ONE) as u16 {
        assert_eq!(add(&mut table, caller(n)), Ok(()));
    }
    assert_eq!(add(&mut table, caller(99)), refused);
}

#[test]
fn a_report_has_each_registrant_in_both_formats() {
    let of_64_bits = |number| Caller {
        host: Host::Named(100 + u128::from(number), false),
        controller: number,
    };
    let (a, b) = (of_64_bits(0), of_64_bits(1));
    let mut table = Table::default();
    table.register(a, Registration::Add { new: 10 }).unwrap();
    table.register(b, Registration::Add { new: 11 }).unwrap();
    let kind = Kind::WriteExclusiveRegistrantsOnly;
    table.acquire(a, 10, (Acquire::Acquire, kind)).unwrap();
    // Formats are not mixed.
    let inconsistent = Status::HOST_IDENTIFIER_INCONSISTENT;
    assert_eq!(table.report(true), Err(inconsistent));
    let other = table.register(C, Registration::Add { new: 12 });
    assert_eq!(other, Err(inconsistent));
    let report = table.report(false).unwrap();
    assert_eq!(report.len(), 24 + 2 * 24);
    assert_eq!(report[..10], [2, 0, 0, 0, 3, 2, 0, 0, 0, 0]);
    let of_a = &report[24..48];
    assert_eq!((of_a[0], of_a[2], of_a[8], of_a[16]), (0, 1, 100, 10));
    let of_b = &report[48..];
    assert_eq!((of_b[0], of_b[2], of_b[8], of_b[16]), (1, 0, 101, 11));
    let table = held(kind);
    let report = table.report(true).unwrap();
    assert_eq!(report.len(), 64 + 2 * 64);
    let of_b = &report[128..];
    assert_eq!((of_b[0], of_b[2], of_b[8], of_b[16]), (1, 0, 11, 101));
}

/// The notifications of A, B and C that a change makes.
fn notified(table: &mut Table, change: impl FnOnce(&mut Table)) -> [Vec<Notification>; 3] {
    let before = table.notifications(A.host, None).upto;
    change(table);
    [A, B, C].map(|it| table.notifications(it.host, Some(before)).notifications)
}

const SOME: [Kind; 6] = Kind::ALL;
const NOBODY: [Vec<Notification>; 3] = [vec![], vec![], vec![]];

fn three(kind: Kind) -> Table {
    let mut table = held(kind);
    table.register(C, Registration::Add { new: 12 }).unwrap();
    table
}

#[test]
fn hosts_that_are_preempted_are_notified_whether_they_held_the_reservation_or_not() {
    use Notification::*;
    let preempted = vec![RegistrationPreempted];
    for aborts in [false, true] {
        for kind in SOME {
            // The holder, or one of all.
            let acquire = |key| (Acquire::Preempt { key, aborts }, kind);
            let mut table = three(kind);
            let found = notified(&mut table, |it| it.acquire(B, 11, acquire(10)).unwrap());
            assert_eq!(found, [preempted.clone(), vec![], vec![]], "{kind:?}");
            // Another registrant.
            let mut table = three(kind);
            let found = notified(&mut table, |it| it.acquire(B, 11, acquire(12)).unwrap());
            assert_eq!(found, [vec![], vec![], preempted.clone()], "{kind:?}");
            // A refused one notifies nobody.
            let found = notified(&mut table, |it| {
                assert!(it.acquire(B, 10, acquire(10)).is_err());
            });
            assert_eq!(found, NOBODY);
        }
        let all = Kind::ExclusiveAccessAllRegistrants;
        let mut table = three(all);
        let acquire = (Acquire::Preempt { key: 0, aborts }, all);
        let found = notified(&mut table, |it| it.acquire(B, 11, acquire).unwrap());
        assert_eq!(found, [preempted.clone(), vec![], preempted.clone()]);
    }
    // A host that preempts itself.
    let mut table = three(Kind::WriteExclusive);
    let own = Acquire::Preempt {
        key: 11,
        aborts: false,
    };
    let found = notified(&mut table, |it| {
        it.acquire(B, 11, (own, Kind::WriteExclusive)).unwrap();
    });
    assert_eq!(found, NOBODY);
    assert_eq!(
        table.check_registered(B.host),
        Err(Status::RESERVATION_CONFLICT)
    );
}

#[test]
fn a_reservation_that_changes_its_kind_is_released_for_the_other_registrants() {
    use Notification::*;
    for from in SOME {
        for to in SOME.into_iter().filter(|_| !from.is_of_all()) {
            let released = match from == to {
                true => vec![],
                false => vec![ReservationReleased],
            };
            let preempt = |key| {
                let aborts = false;
                (Acquire::Preempt { key, aborts }, to)
            };
            let mut table = three(from);
            let found = notified(&mut table, |it| it.acquire(B, 11, preempt(10)).unwrap());
            let expected = [vec![RegistrationPreempted], vec![], released.clone()];
            assert_eq!(found, expected, "{from:?} {to:?}");
            // By its holder.
            let mut table = three(from);
            let found = notified(&mut table, |it| it.acquire(A, 10, preempt(10)).unwrap());
            assert_eq!(
                found,
                [vec![], released.clone(), released],
                "{from:?} {to:?}"
            );
        }
    }
}

#[test]
fn a_release_is_notified_where_registrants_had_the_rights_of_the_holder() {
    use Notification::*;
    for kind in SOME {
        let released = match kind.includes_registrants() {
            true => vec![ReservationReleased],
            false => vec![],
        };
        let expected = [vec![], released.clone(), released];
        let mut table = three(kind);
        let release = |table: &mut Table| table.release(A.host, 10, Release::Release(kind));
        let found = notified(&mut table, |it| release(it).unwrap());
        assert_eq!(found, expected, "{kind:?}");
        // Again, there is nothing to release.
        let found = notified(&mut table, |it| release(it).unwrap());
        assert_eq!(found, NOBODY);
        // The holder unregisters. If all hold it, the others still do.
        let mut table = three(kind);
        let current = Some(10);
        let found = notified(&mut table, |it| {
            it.register(A, Registration::Remove { current }).unwrap();
        });
        match kind.is_of_all() {
            true => assert_eq!(found, NOBODY, "{kind:?}"),
            false => assert_eq!(found, expected, "{kind:?}"),
        }
    }
}

#[test]
fn a_clear_is_notified_to_the_other_registrants() {
    use Notification::*;
    let preempted = vec![ReservationPreempted];
    for mut table in SOME.map(three).into_iter().chain([two()]) {
        let c = match table.check_registered(C.host) {
            Ok(()) => preempted.clone(),
            Err(_) => vec![],
        };
        let clear = |it: &mut Table| it.release(B.host, 11, Release::Clear).unwrap();
        let found = notified(&mut table, clear);
        assert_eq!(found, [preempted.clone(), vec![], c]);
    }
}

#[test]
fn the_end_of_an_unnamed_holder_releases_its_reservation_for_the_others() {
    use Notification::*;
    let unnamed = Caller {
        host: Host::OfController {
            controller: 0,
            session: 1,
        },
        controller: 0,
    };
    for ends in [(|it| it.begin_session(0, 2)) as fn(&mut Table), |it| {
        it.forget_controller(0)
    }] {
        let mut table = Table::default();
        table.register(B, Registration::Add { new: 11 }).unwrap();
        table
            .register(unnamed, Registration::Add { new: 10 })
            .unwrap();
        let kind = Kind::WriteExclusiveRegistrantsOnly;
        table
            .acquire(unnamed, 10, (Acquire::Acquire, kind))
            .unwrap();
        let found = notified(&mut table, ends);
        assert_eq!(found, [vec![], vec![ReservationReleased], vec![]]);
    }
}

/// Its largest encoding: a change that has no room would be refused.
#[test]
fn a_full_table_fits_into_the_file() {
    let host = |n: usize| Host::Named(u128::MAX - n as u128, true);
    let mut table = Table {
        generation: u32::MAX,
        persists: true,
        reservation: Some(Reservation {
            kind: Kind::ExclusiveAccessAllRegistrants,
            holder: Some(host(0)),
        }),
        registrants: (0..MOST)
            .map(|n| Registrant {
                host: host(n),
                controller: n as u16,
                key: u64::MAX,
            })
            .collect(),
        executed: (0..MOST).map(|n| (n as u16, u64::MAX)).collect(),
        aborts: u64::MAX,
        aborted: (0..MOST).map(|n| (host(n), u64::MAX)).collect(),
        forgotten: u64::MAX,
        notifications: Notifications::default(),
    };
    for n in 0..1000 {
        let notification = Notification::ReservationPreempted;
        table.notifications.push(host(n), notification);
    }
    let len = postcard::to_allocvec(&table).unwrap().len();
    // The number of the last notification is short here.
    assert!((3500..4094 - 10).contains(&len), "{len} bytes");
}
