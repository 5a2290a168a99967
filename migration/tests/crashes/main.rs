//! A cold migration interrupted at every possible point, and resumed: forward, back, on the
//! other host, and interrupted again in between. Two hosts never hold a device at once
//! (checked after each call of either), and at the end exactly one holds all of them.

mod former;
mod live;
mod live_world;
mod world;

use std::rc::Rc;

use farside_migration::{
    Error, Journal, Mover, Peer, Reply, Request, Result, Runner, Step, Store, may_run,
};
use world::{Crash, DEVICES, VM, World, migrate, resume};

/// Interrupts `run` at every possible point, in a new world each time. Returns the number
/// of calls.
fn at_every_point(
    prepare: impl Fn() -> Rc<World>,
    run: impl Fn(&Rc<World>) -> Result<()>,
    mut then: impl FnMut(Rc<World>, Crash),
) -> usize {
    let whole = prepare();
    whole.restart(None);
    run(&whole).unwrap();
    let calls = whole.calls();
    for call in 0..calls {
        for after in [false, true] {
            let world = prepare();
            let crash = Crash { call, after };
            world.restart(Some(crash));
            // The error is that of the interrupted process.
            let _ = run(&world);
            assert!(world.crashed(), "{crash:?}");
            then(world, crash);
        }
    }
    assert!(calls > 10, "{calls}");
    calls
}

fn there_and_not(world: &Rc<World>, here: &'static str, other: &'static str) {
    assert_eq!(world.running(), Some(here));
    assert_eq!(world.holders(), [Some(here); 2]);
    assert!(world.is_configured(here));
    for device in DEVICES {
        assert!(world.may_borrow(here, device));
        assert!(!world.reserved(device), "{device} is there for others");
    }
    may_run(&world.host(here), &VM).unwrap();
    // The other host can get the VM in neither way.
    assert!(world.host(other).start_anyhow().is_err());
}

/// Checks the result of a move: the old host is refused by its moved marker and by the
/// lender.
fn moved(world: &Rc<World>, to: &'static str, from: &'static str) {
    there_and_not(world, to, from);
    for device in DEVICES {
        assert!(!world.may_borrow(from, device), "{device} at {from}");
    }
    let refusal = may_run(&world.host(from), &VM).unwrap_err().to_string();
    assert!(refusal.contains(&format!("has moved to {to}")), "{refusal}");
}

trait StartAnyhow {
    fn start_anyhow(&self) -> Result<()>;
}

impl StartAnyhow for world::FakeHost {
    fn start_anyhow(&self) -> Result<()> {
        match self.configuration(&VM)? {
            Some(_) => self.start(&VM),
            None => Err(farside_migration::Error::refused("no configuration")),
        }
    }
}

fn there() -> Rc<World> {
    World::new()
}

/// A world in which the VM has moved to `b` and back, so that all have fences and moved
/// markers.
fn there_and_back() -> Rc<World> {
    let world = World::new();
    migrate(&world, "a", "b").unwrap();
    migrate(&world, "b", "a").unwrap();
    world
}

fn a_to_b(world: &Rc<World>) -> Result<()> {
    migrate(world, "a", "b")
}

#[test]
fn a_vm_moves_there_and_back_as_often_as_one_likes() {
    let world = World::new();
    for _ in 0..5 {
        migrate(&world, "a", "b").unwrap();
        moved(&world, "b", "a");
        migrate(&world, "b", "a").unwrap();
        moved(&world, "a", "b");
    }
}

#[test]
fn what_was_cut_off_goes_on() {
    for prepare in [there, there_and_back] {
        at_every_point(prepare, a_to_b, |world, crash| {
            world.restart(None);
            let nothing = resume(&world, "a", "b", false, false).unwrap();
            if world.running() == Some("a") {
                // It was interrupted before the journal was written, or after the last
                // step.
                assert!(nothing, "{crash:?}");
                there_and_not(&world, "a", "b");
            } else {
                moved(&world, "b", "a");
            }
        });
    }
}

#[test]
fn what_was_cut_off_goes_back() {
    for prepare in [there, there_and_back] {
        let (mut back, mut too_late) = (0, 0);
        at_every_point(prepare, a_to_b, |world, crash| {
            world.restart(None);
            match resume(&world, "a", "b", true, false) {
                Ok(_) if world.running() == Some("a") => {
                    there_and_not(&world, "a", "b");
                    back += 1;
                }
                Ok(nothing) => {
                    assert!(nothing, "{crash:?}");
                    moved(&world, "b", "a");
                }
                Err(error) => {
                    assert!(error.to_string().contains("has arrived"), "{error}");
                    world.restart(None);
                    resume(&world, "a", "b", false, false).unwrap();
                    moved(&world, "b", "a");
                    too_late += 1;
                }
            }
        });
        assert!(back > 10 && too_late > 2, "{back} {too_late}");
    }
}

/// Interrupted, resumed in either direction, interrupted again, resumed again.
#[test]
fn what_was_cut_off_twice_ends_at_one_host() {
    let mut cases = 0;
    for back in [false, true] {
        at_every_point(there_and_back, a_to_b, |_, first| {
            for call in 0.. {
                let mut reached = false;
                for after in [false, true] {
                    let world = there_and_back();
                    world.restart(Some(first));
                    let _ = a_to_b(&world);
                    world.restart(Some(Crash { call, after }));
                    let _ = resume(&world, "a", "b", back, false);
                    if !world.crashed() {
                        continue;
                    }
                    reached = true;
                    cases += 1;
                    for last in [back, !back] {
                        world.restart(None);
                        let _ = resume(&world, "a", "b", last, false);
                    }
                    match world.running() {
                        Some("a") => there_and_not(&world, "a", "b"),
                        Some("b") => moved(&world, "b", "a"),
                        _ => panic!("the VM runs nowhere: {first:?}, then {call} {after}"),
                    }
                }
                if !reached {
                    break;
                }
            }
        });
    }
    assert!(cases > 1000, "{cases}");
}

/// The old host is permanently lost. The new one continues by itself if it has been
/// notified of the release of the VM, and otherwise after the old host is declared lost.
#[test]
fn the_new_host_goes_on_without_the_old_one() {
    let (mut alone, mut told) = (0, 0);
    at_every_point(there_and_back, a_to_b, |world, crash| {
        let nobody_knows = world
            .host("b")
            .journal(&VM)
            .unwrap()
            .filter(Journal::is_open)
            .is_none();
        world.restart(None);
        if nobody_knows {
            return;
        }
        match resume(&world, "b", "a", false, false) {
            Ok(_) => alone += 1,
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("may still run on a"), "{crash:?}: {text}");
                resume(&world, "b", "a", false, true).unwrap();
                told += 1;
            }
        }
        assert_eq!(world.running(), Some("b"), "{crash:?}");
        for device in DEVICES {
            assert!(!world.may_borrow("a", device));
        }
        // It was not lost after all, and comes back.
        world.restart(None);
        let _ = resume(&world, "a", "b", true, false);
        let _ = resume(&world, "a", "b", false, false);
        moved(&world, "b", "a");
    });
    assert!(alone > 5 && told > 5, "{alone} {told}");
}

/// The new host has gone on alone, and then tried to move the VM back, whose journal replaced that
/// of the first migration.
#[test]
fn a_vm_that_runs_on_the_new_host_is_not_taken_from_it() {
    let (mut left, mut refused) = (0, 0);
    at_every_point(there, a_to_b, |world, crash| {
        world.restart(None);
        let _ = resume(&world, "b", "a", false, false);
        if world.running() != Some("b") || migrate(&world, "b", "a").is_ok() {
            return;
        }
        let forward = resume(&world, "a", "b", false, false);
        let _ = resume(&world, "a", "b", true, false);
        assert_eq!(world.running(), Some("b"), "{crash:?}");
        assert_eq!(world.holders(), [Some("b"); 2], "{crash:?}");
        if forward.is_ok() {
            left += 1;
            return moved(&world, "b", "a");
        }
        refused += 1;
        world.power_off("b");
        resume(&world, "a", "b", true, false).unwrap();
        assert_eq!(world.running(), Some("a"), "{crash:?}");
        for device in DEVICES {
            assert!(!world.may_borrow("b", device), "{crash:?}");
        }
    });
    assert!(left > 0 && refused > 0, "{left} {refused}");
}

#[test]
fn the_old_host_takes_the_vm_back_without_the_new_one_only_on_somebodys_word() {
    let (mut free, mut told) = (0, 0);
    at_every_point(there, a_to_b, |world, crash| {
        world.restart(None);
        // Host b is down: its processes have ended.
        world.unreachable.set(Some("b"));
        if let Err(error) = resume(&world, "a", "b", true, false) {
            if error.to_string().contains("has arrived") {
                return;
            }
            assert!(error.to_string().contains("--lost-host"), "{error}");
            world.restart(None);
            resume(&world, "a", "b", true, true).unwrap();
            told += 1;
        } else {
            free += 1;
        }
        if world.running() == Some("a") {
            assert_eq!(world.holders(), [Some("a"); 2], "{crash:?}");
            // If it was up nevertheless, it does not get the devices.
            world.unreachable.set(None);
            world.restart(None);
            let _ = resume(&world, "b", "a", false, false);
            assert_eq!(world.holders(), [Some("a"); 2], "{crash:?}");
        }
    });
    assert!(free > 5 && told > 2, "{free} {told}");
}

/// A host that refuses all requests, such as one on which another farside holds the lock.
struct Grumpy;

impl Peer for Grumpy {
    fn ask(&mut self, _: Request) -> Result<Reply> {
        Ok(Reply::Failed(Error::refused("another farside is at it")))
    }
}

/// A refusal does not count as confirmation that the VM has arrived: the old host would
/// delete a VM that the new one may never have received.
#[test]
fn a_host_that_refuses_to_go_back_leaves_the_vm_where_it_is() {
    let mut cases = 0;
    at_every_point(there, a_to_b, |world, crash| {
        world.restart(None);
        let host = world.host("a");
        let open = host.journal(&VM).unwrap().filter(Journal::is_open);
        let Some(journal) = open.filter(|journal| journal.step < Step::Finish) else {
            return;
        };
        let error = Mover::new(&host, &mut Grumpy, journal).back().unwrap_err();
        assert!(error.to_string().contains("another farside"), "{error}");
        let step = host.journal(&VM).unwrap().map(|journal| journal.step);
        assert_eq!(step, Some(Step::StopThere), "{crash:?}");
        assert!(world.is_configured("a"), "{crash:?}");
        cases += 1;
        if resume(&world, "a", "b", true, false).is_ok() {
            there_and_not(&world, "a", "b");
        } else {
            moved(&world, "b", "a");
        }
    });
    assert!(cases > 10, "{cases}");
}

#[test]
fn a_guest_that_does_not_power_off_runs_on() {
    let world = World::new();
    world.guest_deaf.set(true);
    let error = migrate(&world, "a", "b").unwrap_err().to_string();
    assert!(
        error.contains("does not power off") && error.contains("as it was"),
        "{error}"
    );
    there_and_not(&world, "a", "b");
    // It can be moved once it handles the request.
    world.guest_deaf.set(false);
    migrate(&world, "a", "b").unwrap();
    moved(&world, "b", "a");
}

#[test]
fn a_vm_that_does_not_start_there_can_go_on_or_back() {
    for back in [false, true] {
        let world = World::new();
        world.broken_start.set(Some("b"));
        let error = migrate(&world, "a", "b").unwrap_err().to_string();
        assert!(error.contains("migration resume web1"), "{error}");
        assert_eq!(world.running(), None);
        for device in DEVICES {
            assert!(world.reserved(device), "nobody takes it meanwhile");
        }
        let refusal = may_run(&world.host("a"), &VM).unwrap_err().to_string();
        assert!(refusal.contains("on its way from a to b"), "{refusal}");
        if back {
            resume(&world, "a", "b", true, false).unwrap();
            there_and_not(&world, "a", "b");
        } else {
            world.broken_start.set(None);
            resume(&world, "a", "b", false, false).unwrap();
            moved(&world, "b", "a");
        }
    }
}

/// Each host's checks are respected: the VM is not touched.
#[test]
fn a_host_that_refuses_leaves_the_vm_as_it_is() {
    for run in [migrate, world::migrate_live] {
        let world = World::new();
        world.stays_behind.set(Some("a"));
        let error = run(&world, "a", "b").unwrap_err().to_string();
        assert!(error.contains("has snapshots"), "{error}");
        assert_eq!(world.host("a").journal(&VM), Ok(None));
        there_and_not(&world, "a", "b");
        world.stays_behind.set(None);

        world.name_taken.set(Some("b"));
        let error = run(&world, "a", "b").unwrap_err().to_string();
        let words = ["there is a domain web1", "as it was"];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        there_and_not(&world, "a", "b");
        world.name_taken.set(None);

        run(&world, "a", "b").unwrap();
        moved(&world, "b", "a");
    }
}

#[test]
fn a_name_that_is_taken_there_is_refused_and_the_vm_runs_on() {
    let world = World::new();
    let other = farside_migration::Configuration {
        toml: "of another VM".into(),
        ..Default::default()
    };
    world.host("b").install(&VM, &other).unwrap();
    let error = migrate(&world, "a", "b").unwrap_err().to_string();
    assert!(
        error.contains("there is a VM web1 already") && error.contains("as it was"),
        "{error}"
    );
    assert_eq!(world.running(), Some("a"));
    assert_eq!(world.host("b").configuration(&VM).unwrap(), Some(other));
}
