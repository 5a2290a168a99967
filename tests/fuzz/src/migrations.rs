//! Migrations between two hosts whose processes end at any call, and are resumed forward, back, and
//! on either host. The hosts' own checks hold after each call: see `world`. Then messages and
//! journals that nobody of ours wrote.
//!
//! Input: a byte for the kind; then steps of two bytes each, or a text.

use farside_migration::{Arrival, Journal, Reply, Request};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    input::Input,
    world::{Crash, World, migrate, migrate_live, resume},
};

/// Most steps of a run.
const MAX_STEPS: usize = 64;

pub fn run(input: &[u8]) {
    let mut input = Input(input);
    match input.u8() % 8 {
        0 => journal(input.0),
        1 => message(input.0),
        _ => moves(&mut input),
    }
}

/// A journal of any text, and one with a correct checksum of any body.
fn journal(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    let _ = Journal::from_text(&text);
    let Ok(mut body) = serde_json::from_str::<Value>(&text) else {
        return;
    };
    let version = match &mut body {
        Value::Object(fields) => fields.remove("manifest"),
        _ => None,
    };
    let digest = Sha256::digest(body.to_string());
    let checksum: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let file = json!({
        "manifest": version.unwrap_or(json!(1)),
        "checksum": checksum,
        "migration": body,
    });
    if let Ok(journal) = Journal::from_text(&file.to_string()) {
        let text = journal.to_text().expect("it was parsed");
        assert_eq!(Journal::from_text(&text), Ok(journal), "written and read");
    }
}

/// Bytes from the other host, to a host without a migration.
fn message(text: &[u8]) {
    let _ = serde_json::from_slice::<Reply>(text);
    if let Ok(request) = serde_json::from_slice::<Request>(text) {
        let host = World::new().host("b");
        let reply = Arrival::new(&host).answer(request);
        assert!(serde_json::to_vec(&reply).is_ok());
    }
}

/// Ends with what an operator does after the last crash: resume until nothing is left.
fn moves(input: &mut Input<'_>) {
    let world = World::new();
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let (kind, call) = (input.u8(), input.u8());
        // Most steps are cut off somewhere.
        let crash = Crash {
            call: usize::from(call),
            after: kind & 0x80 != 0,
        };
        world.restart((kind & 0x40 == 0).then_some(crash));
        let (from, to) = match kind & 0x20 {
            0 => ("a", "b"),
            _ => ("b", "a"),
        };
        // Each may be refused: the VM is elsewhere, a migration is open, the process has ended.
        let _ = match kind % 4 {
            0 => migrate(&world, from, to),
            1 => migrate_live(&world, from, to),
            back => resume(&world, from, to, back == 3, false).map(drop),
        };
    }
    world.restart(None);
    // Forward, and back where the error of that says so. A journal may stay open at a host that the VM
    // did not go to, after both were told to go on by themselves: `forget` is for that.
    for back in [false, true, false, true] {
        for (here, there) in [("a", "b"), ("b", "a")] {
            let _ = resume(&world, here, there, back, false);
        }
    }
    let host = world.running().expect("the VM runs at the end");
    assert_eq!(world.holders(), [Some(host); 2], "with its devices");
}
