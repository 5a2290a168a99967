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
        farside: "9.1.0".into(),
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
        ToKeeper::Look,
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

#[test]
fn messages_of_this_version_and_of_the_one_before_are_read() {
    fn again<T: Serialize + serde::de::DeserializeOwned>(bytes: &[u8]) -> Vec<u8> {
        let message: T = farside_hand_over::decode(bytes).expect("a message");
        postcard::to_stdvec(&message).expect("a message")
    }
    for version in KEEPER.oldest()..=KEEPER.version() {
        let sample = samples::read(&sample(version));
        for (name, bytes) in &sample {
            match name.split('-').next() {
                Some("to") => assert_eq!(again::<ToKeeper>(bytes), *bytes, "{name}"),
                Some("from") => assert_eq!(again::<FromKeeper>(bytes), *bytes, "{name}"),
                _ => {
                    let hello: Hello = farside_hand_over::decode(bytes).expect("a message");
                    assert_eq!((hello.version, hello.busy), (version, name == "hello-2"));
                    let farside = if version == 1 { "" } else { "9.1.0" };
                    assert_eq!(hello.farside, farside);
                }
            }
        }
        // The messages of the version before are as they were.
        let now = examples();
        let others = sample.iter().filter(|(name, _)| !name.starts_with("hello"));
        for message in others {
            assert!(now.contains(message), "{message:?}");
        }
    }
}

fn refusal(record: &str) -> Option<String> {
    look::check(record.as_bytes())
        .err()
        .map(|it| it.to_string())
}

#[test]
fn leases_of_other_versions_are_refused_with_a_remedy() {
    let record = |version: u32, worker: u32, state: u32| {
        let text = format!(
            r#"{{"version":{version},"farside":"9.1.0","device":"disk0","vm":"web1","worker":{worker},"state":{state},"lease":"anything"}}"#
        );
        refusal(&text)
    };
    assert_eq!(record(2, 2, 2), None);
    assert_eq!(record(2, 1, 1), None);
    let text = record(3, 3, 3).expect("a refusal");
    for part in [
        "device disk0 (VM web1): its lease has version 3 (of farside 9.1.0)",
        "reads versions 1 and 2",
        "install farside 9.1.0 and start the lender again",
        "stopping their VMs",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let text = record(2, 2, 3).expect("a refusal");
    assert!(text.contains("the model has version 3"), "{text}");
    let text = record(2, 0, 2).expect("a refusal");
    assert!(text.contains("install the earlier farside"), "{text}");
    // Before there were versions.
    let text = r#"{"device":"disk0","vm":"web1","served":{"Model":{"Nvme":{}}}}"#;
    assert_eq!(refusal(text), None);
    // What is no lease is not of another version.
    assert_eq!(refusal("nonsense"), None);
}
