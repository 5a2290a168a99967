//! Migrations that were interrupted under the former version of farside, and are resumed by
//! this one.

use farside_migration::{MANIFEST_VERSION, Strategy};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::*;
use world::migrate_live;

/// A journal in the format of version 1.
fn former(text: &str) -> String {
    let mut file: Value = serde_json::from_str(text).unwrap();
    assert_eq!(file["manifest"], MANIFEST_VERSION);
    let mut body = file["migration"].take();
    let fields = body.as_object_mut().unwrap();
    let configuration = fields.remove("configuration").unwrap();
    fields.insert("description".into(), configuration);
    let strategy = fields.remove("strategy").unwrap();
    if strategy != "cold" {
        fields.insert("live".into(), strategy["live"].clone());
    }
    let digest = Sha256::digest(body.to_string());
    let checksum: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({ "manifest": 1, "checksum": checksum, "migration": body }).to_string()
}

fn live_a_to_b(world: &Rc<World>) -> Result<()> {
    migrate_live(world, "a", "b")
}

#[test]
fn a_former_journal_is_resumed_at_every_point() {
    for run in [a_to_b, live_a_to_b] {
        for back in [false, true] {
            let (mut here, mut there) = (0, 0);
            at_every_point(super::there, run, |world, crash| {
                world.rewrite_journals(former);
                for last in [back, !back] {
                    world.restart(None);
                    let _ = resume(&world, "a", "b", last, false);
                }
                match world.running() {
                    Some("a") => {
                        there_and_not(&world, "a", "b");
                        here += 1;
                    }
                    Some(_) => {
                        moved(&world, "b", "a");
                        there += 1;
                    }
                    None => panic!("{crash:?}: the VM runs nowhere"),
                }
            });
            let (wanted, other) = if back { (here, there) } else { (there, here) };
            assert!(wanted > 20 && wanted > other, "{here} {there}");
        }
    }
}

/// The strategy survives: a running guest is not booted again.
#[test]
fn a_former_live_journal_stays_live() {
    at_every_point(there, live_a_to_b, |world, crash| {
        let before = world.host("a").journal(&VM).unwrap();
        world.rewrite_journals(former);
        let read = world.host("a").journal(&VM).unwrap();
        assert_eq!(read, before, "{crash:?}");
        if let Some(journal) = read {
            let address = [127, 0, 0, 1].into();
            assert_eq!(journal.strategy, Strategy::Live { address });
        }
        world.restart(None);
        let _ = resume(&world, "a", "b", false, false);
        assert_eq!(world.boots(), 1, "{crash:?}: the guest was booted again");
    });
}

/// Hosts keep the journals of completed migrations, too.
#[test]
fn a_vm_that_moved_under_the_former_version_moves_back() {
    let world = World::new();
    migrate(&world, "a", "b").unwrap();
    world.rewrite_journals(former);
    moved(&world, "b", "a");
    migrate(&world, "b", "a").unwrap();
    moved(&world, "a", "b");
}
