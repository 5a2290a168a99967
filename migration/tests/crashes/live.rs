//! Live migrations interrupted at every point. The guest runs once and never boots again:
//! its memory contents are not lost.

use super::*;
use world::migrate_live;

fn live_a_to_b(world: &Rc<World>) -> Result<()> {
    migrate_live(world, "a", "b")
}

fn same_guest(world: &Rc<World>) {
    assert_eq!(world.boots(), 1, "the guest was booted again");
}

#[test]
fn a_guest_moves_there_and_back_as_often_as_one_likes() {
    let world = World::new();
    for _ in 0..5 {
        migrate_live(&world, "a", "b").unwrap();
        moved(&world, "b", "a");
        migrate_live(&world, "b", "a").unwrap();
        moved(&world, "a", "b");
    }
    same_guest(&world);
}

#[test]
fn a_live_migration_that_was_cut_off_goes_on_or_back() {
    for back in [false, true] {
        let (mut here, mut away) = (0, 0);
        at_every_point(there, live_a_to_b, |world, crash| {
            for last in [back, !back] {
                world.restart(None);
                let _ = resume(&world, "a", "b", last, false);
                assert!(
                    world.running().is_some(),
                    "{crash:?}: the guest does not run"
                );
            }
            match world.running() {
                Some("a") => {
                    there_and_not(&world, "a", "b");
                    here += 1;
                }
                _ => {
                    moved(&world, "b", "a");
                    away += 1;
                }
            }
            same_guest(&world);
        });
        // Until the guest has arrived, the resuming user decides the direction.
        let (wanted, other) = if back { (here, away) } else { (away, here) };
        assert!(wanted > 20 && wanted > other, "{here} {away}");
    }
}

#[test]
fn a_guest_that_cannot_be_sent_has_its_devices_back_by_itself() {
    let world = World::new();
    world.broken_transfer.set(true);
    let error = migrate_live(&world, "a", "b").unwrap_err().to_string();
    assert!(
        error.contains("broke") && error.contains("as it was"),
        "{error}"
    );
    there_and_not(&world, "a", "b");
    world.broken_transfer.set(false);
    migrate_live(&world, "a", "b").unwrap();
    moved(&world, "b", "a");
    same_guest(&world);
}

/// While the guest is here, the other host need not be declared lost.
#[test]
fn a_guest_that_was_not_sent_needs_nobody_to_have_its_devices_back() {
    let (mut free, mut told) = (0, 0);
    at_every_point(there, live_a_to_b, |world, crash| {
        world.restart(None);
        world.unreachable.set(Some("b"));
        let here = world.running() == Some("a");
        match resume(&world, "a", "b", true, false) {
            // There was nothing left to do.
            Ok(true) => {}
            Ok(false) => {
                assert!(here, "{crash:?}");
                free += 1;
            }
            Err(error) => {
                let error = error.to_string();
                assert!(!here, "{crash:?}: {error}");
                let known = error.contains("--lost-host") || error.contains("has arrived");
                assert!(known, "{crash:?}: {error}");
                told += 1;
            }
        }
        if world.running() == Some("a") {
            assert_eq!(world.holders(), [Some("a"); 2], "{crash:?}");
            // The other host is back, and cannot continue without having had the guest.
            world.unreachable.set(None);
            world.restart(None);
            let _ = resume(&world, "b", "a", false, false);
            assert_eq!(world.running(), Some("a"), "{crash:?}");
            assert_eq!(world.holders(), [Some("a"); 2], "{crash:?}");
        }
        same_guest(&world);
    });
    assert!(free > 10 && told > 2, "{free} {told}");
}

/// The old host lost power. If the guest had arrived completely, it continues; else it is
/// booted on the new host, since no copy of it is left.
#[test]
fn the_new_host_has_the_vm_when_the_old_one_is_lost() {
    let (mut whole, mut anew) = (0, 0);
    at_every_point(there, live_a_to_b, |world, crash| {
        world.restart(None);
        let open = world
            .host("b")
            .journal(&VM)
            .unwrap()
            .filter(Journal::is_open);
        world.power_off("a");
        if open.is_none() {
            return;
        }
        // The new host cannot detect that, so the user must declare it.
        let told = world.boots() == 1 && open.is_some_and(|ours| ours.step > Step::Start);
        let unsaid = resume(&world, "b", "a", false, false);
        assert_eq!(unsaid.is_ok(), told, "{crash:?}: {unsaid:?}");
        resume(&world, "b", "a", false, true).unwrap();
        assert_eq!(world.running(), Some("b"), "{crash:?}");
        assert_eq!(world.holders(), [Some("b"); 2], "{crash:?}");
        match world.boots() {
            1 => whole += 1,
            _ => anew += 1,
        }
        // The old host is back, and does not get the VM.
        world.restart(None);
        let _ = resume(&world, "a", "b", true, false);
        let _ = resume(&world, "a", "b", false, false);
        moved(&world, "b", "a");
        assert!(world.boots() <= 2, "{crash:?}");
    });
    assert!(whole > 2 && anew > 10, "{whole} {anew}");
}
