//! Runs each target on its committed corpus, in which are also the inputs that once failed.

use std::{fs, path::Path};

use farside_fuzz::TARGETS;

fn replay(name: &str) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(name);
    let mut inputs: Vec<_> = fs::read_dir(&directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{} is empty", directory.display());
    for path in inputs {
        // Printed where the test fails.
        println!("{}", path.display());
        farside_fuzz::run(name, &fs::read(&path).unwrap());
    }
}

/// A test for each target.
macro_rules! targets {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                replay(stringify!($name));
            }
        )*

        #[test]
        fn every_target_has_a_test_and_nothing_else_has_a_corpus() {
            let tested = [$(stringify!($name)),*];
            let targets = TARGETS.map(|(name, _)| name);
            assert_eq!(targets, tested);
            let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
            for entry in fs::read_dir(corpus).unwrap() {
                let name = entry.unwrap().file_name();
                assert!(targets.iter().any(|target| name == *target), "{name:?}");
            }
        }
    };
}

targets! {
    admin
    backend
    config_files
    config_space
    description
    domains
    etcd
    irqs
    leases
    lender_messages
    lender_stream
    medium
    message_sequences
    migrations
    nvme
    qmp
    register_tokens
    virtio
}
