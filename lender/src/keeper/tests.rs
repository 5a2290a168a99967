//! The format of the keeper's messages, as each version has it.

use std::path::PathBuf;

use farside_hand_over::samples::{self, Example};

use super::*;

fn sample(version: u32) -> PathBuf {
    let name = format!("tests/samples/keeper-{version}.txt");
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn encoded<T: Serialize>(name: &str, messages: Vec<T>) -> Vec<Example> {
    let encoded = (1..).zip(messages).map(|(number, message)| {
        let bytes = postcard::to_stdvec(&message).expect("a message");
        (format!("{name}-{number}"), bytes)
    });
    encoded.collect()
}

fn examples() -> Vec<Example> {
    let lease = || b"{}".to_vec();
    let hello = |busy| Hello {
        version: VERSION,
        busy,
    };
    let to_keeper = vec![
        ToKeeper::End,
        ToKeeper::Take,
        ToKeeper::Listen,
        ToKeeper::Keep {
            id: 300,
            lease: lease(),
            with_worker: 2,
        },
        ToKeeper::Update {
            id: 300,
            lease: lease(),
        },
        ToKeeper::Forget { id: 300 },
    ];
    let from_keeper = vec![
        FromKeeper::Lease {
            id: 300,
            lease: lease(),
        },
        FromKeeper::Done,
    ];
    encoded("hello", vec![hello(false), hello(true)])
        .into_iter()
        .chain(encoded("to", to_keeper))
        .chain(encoded("from", from_keeper))
        .collect()
}

#[test]
fn the_format_of_messages_has_not_changed_without_its_version() {
    samples::is_unchanged(&sample(VERSION), &examples());
}
