//! The format of the state, as each version has it.

use std::{fmt::Debug, path::PathBuf};

use farside_fabric::memory::SharedMemory;
use farside_hand_over::{
    FARSIDE, decode, read_writer,
    samples::{self, Example},
};

use super::{read::Copied, *};
use crate::{
    nvme::saved::{
        Answered, Saved, SavedBuffer, SavedCq, SavedFeatures, SavedReservationLog, SavedShadow,
        SavedSq,
    },
    virtio::saved::{Saved as VirtioSaved, SavedQueue},
};

fn sample(kind: &str, version: u32) -> PathBuf {
    let name = format!("tests/samples/{kind}-{version}.txt");
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// A snapshot without a field that is zero.
fn saved() -> Saved {
    let shadow = |stale, unwritten| SavedShadow { stale, unwritten };
    let sq = |id, stale| SavedSq {
        id,
        base: 0x10_0000 + u64::from(id) * 4096,
        entries: 64,
        cq: id,
        shadow: shadow(stale, true),
    };
    let cq = |id, vector| SavedCq {
        id,
        base: 0x20_0000 + u64::from(id) * 4096,
        entries: 32,
        vector,
        shadow: shadow(Some(9), false),
    };
    Saved {
        session: 3,
        cc: 0x0046_0001,
        ready: true,
        fatal: true,
        shutdown: 2,
        aqa: 0x001f_001f,
        asq: 0x1000,
        acq: 0x2000,
        draining: true,
        features: SavedFeatures {
            arbitration: 1,
            over: 350,
            under: 270,
            error_recovery: 2,
            write_cache: true,
            coalescing: 0x0105,
            vectors_without_coalescing: [1, 2, 3, 1 << 63],
            write_atomicity: 1,
            event_config: 0x1f,
            timestamp: Some((5, 1_795_603_832_401)),
        },
        masked_events: [true, false],
        sqs: vec![sq(0, None), sq(1, Some(17))],
        cqs: vec![cq(0, Some(0)), cq(1, None)],
        buffer: Some(SavedBuffer {
            values: 0x3000,
            events: 0x4000,
            live: true,
        }),
        msix_table: (0..32).collect(),
        answered: Some(Answered {
            sequence: 2,
            result: 0x0007_0007,
            status: 0x4002,
        }),
        flush_failed: true,
        // Since version 2.
        cmb_control: 0,
        host_identifier: 0,
        extended_identifier: false,
        reservation_mask: 0,
        size: 0,
        namespace_changed: false,
        masked_notices: false,
        reservation_log: SavedReservationLog::default(),
        masked_reservations: false,
        pending_reservations: false,
    }
}

/// The same of a virtio-blk device.
fn virtio_saved() -> VirtioSaved {
    let queue = |index| SavedQueue {
        index,
        size: 64,
        descriptors: 0x10_0000 + u64::from(index),
        available: 0x20_0000,
        used: 0x30_0000,
        vector: index + 1,
        enabled: true,
    };
    VirtioSaved {
        session: 3,
        accepted: 1 << 32 | 1 << 9,
        device_feature_select: 1,
        driver_feature_select: 2,
        config_vector: 7,
        status: 0x4f,
        resetting: true,
        queue_select: 5,
        queues: vec![queue(0), queue(9)],
        msix_table: (0..32).collect(),
        writeback: 1,
        flush_failed: true,
        pairs: 0,
        size: 1 << 40,
        generation: 9,
    }
}

fn words(queue: u64) -> Words {
    Words {
        fetched: 1000 + queue,
        tail: 20 + queue,
        posted: 900 + queue,
        head: 10 + queue,
    }
}

const MASK: u32 = 0x5555;
const QUEUES_IN_USE: [u16; 3] = [0, 1, 255];

/// What a controller with two commands in flight leaves.
fn example() -> Vec<u8> {
    left(Saved::default(), saved())
}

/// What a model leaves, whose snapshot was `before`.
fn left<S: Snapshot>(before: S, saved: S) -> Vec<u8> {
    let memory = SharedMemory::anonymous(SIZE).unwrap();
    let memory = memory.slice(0, SIZE).unwrap();
    let mut state = State::<S>::start(memory.clone()).unwrap();
    state.session = 3;
    for queue in QUEUES_IN_USE {
        let words = words(queue.into());
        state.fetched(queue, words.fetched);
        state.tail(queue, words.tail as u16);
        state.posted(queue, words.posted);
        state.head(queue, words.head as u16);
    }
    state.mask(MASK);
    // The one that is current is the other copy.
    state.save(before);
    state.save(saved);
    let first = state.record(0, 1000, &[0xa5; COMMAND_SIZE]).unwrap();
    state.record(255, 1255, &[0x5a; COMMAND_SIZE]).unwrap();
    let done = state.record(1, 1001, &[0xff; COMMAND_SIZE]).unwrap();
    state.completing(first, 900);
    state.release(done);
    let mut bytes = vec![0; SIZE];
    memory.read(&mut bytes);
    bytes
}

/// As it was before the version of farside was in it.
fn version_1(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[AT_WRITER..HEADER].fill(0);
    bytes[AT_VERSION] = 1;
    bytes
}

/// The size is part of it, as backends make the file.
fn examples(bytes: &[u8]) -> Vec<Example> {
    let mut examples = vec![("size".to_owned(), SIZE.to_be_bytes().to_vec())];
    let mut bytes = bytes.to_vec();
    if bytes[AT_WRITER] != 0 {
        // It changes with each release.
        bytes[AT_WRITER..HEADER].fill(b'x');
    }
    examples.extend(samples::parts(&bytes));
    examples
}

fn is_read(bytes: &[u8]) {
    reads(bytes, &saved());
}

fn reads<S: Snapshot + PartialEq + Debug>(bytes: &[u8], saved: &S) {
    let copied = Copied::check::<S>(bytes).unwrap().unwrap();
    let restored = copied.restore::<S>().unwrap();
    assert_eq!(restored.saved, *saved);
    assert_eq!(restored.mask, MASK);
    for (queue, found) in (0u16..).zip(&restored.words) {
        let expected = match QUEUES_IN_USE.contains(&queue) {
            true => words(queue.into()),
            false => Words::default(),
        };
        assert_eq!(*found, expected, "queue {queue}");
    }
    let in_flight = |index, sequence, queue, number, completion, byte| InFlight {
        entry: Entry { index, sequence },
        queue,
        number,
        completion,
        command: [byte; COMMAND_SIZE],
    };
    assert_eq!(
        restored.in_flight,
        [
            in_flight(0, 1, 0, 1000, Some(900), 0xa5),
            in_flight(1, 2, 255, 1255, None, 0x5a),
        ]
    );
}

#[test]
fn the_format_of_the_state_has_not_changed_without_its_version() {
    let version = FORMAT.version();
    samples::is_unchanged(&sample("state", version), &examples(&example()));
    let virtio = left(VirtioSaved::default(), virtio_saved());
    samples::is_unchanged(&sample("virtio-blk", version), &examples(&virtio));
    // No version before this one has it.
    let sample = samples::read(&sample("virtio-blk", version));
    reads(&samples::whole(&sample[1..], SIZE), &virtio_saved());
    assert_eq!(version, 2, "replace `version_1` by the format before");
}

#[test]
fn states_of_this_version_and_of_the_one_before_are_read() {
    samples::write_new(&sample("state", 1), || examples(&version_1(example())));
    for version in FORMAT.oldest()..=FORMAT.version() {
        let sample = samples::read(&sample("state", version));
        let bytes = samples::whole(&sample[1..], SIZE);
        assert_eq!(self::version(&bytes), Ok(Some(version)));
        is_read(&bytes);
        assert_eq!(check_version(&bytes[..HEADER]), Ok(()));
    }
}

#[test]
fn a_state_of_the_version_before_is_of_this_one_when_a_process_goes_on_with_it() {
    let memory = SharedMemory::anonymous(SIZE).unwrap();
    let memory = memory.slice(0, SIZE).unwrap();
    memory.write(&version_1(example()));
    let (mut state, _) = State::<Saved>::resume(memory.clone()).unwrap().unwrap();
    state.save(saved());
    let mut bytes = vec![0; SIZE];
    memory.read(&mut bytes);
    assert_eq!(version(&bytes), Ok(Some(FORMAT.version())));
    assert_eq!(
        read_writer(&bytes[AT_WRITER..HEADER]).as_deref(),
        Some(FARSIDE)
    );
    is_read(&bytes);
}

#[test]
fn a_snapshot_without_its_last_fields_has_none_of_what_they_say() {
    let expected = Saved {
        answered: None,
        flush_failed: false,
        ..saved()
    };
    let all = Saved {
        cmb_control: 1,
        host_identifier: 1,
        extended_identifier: true,
        reservation_mask: 1,
        size: 1,
        namespace_changed: true,
        masked_notices: true,
        reservation_log: SavedReservationLog {
            upto: Some(1),
            count: 1,
            pages: vec![(1, 1)],
        },
        masked_reservations: true,
        pending_reservations: true,
        ..expected.clone()
    };
    let mut bytes = postcard::to_stdvec(&all).unwrap();
    bytes.truncate(bytes.len() - 17);
    assert_eq!(decode::<Saved>(&bytes), Ok(expected));
}

#[test]
fn other_versions_are_refused_by_their_first_bytes() {
    let refused = |version: u32, farside: &[u8]| {
        let mut bytes = example();
        bytes[AT_VERSION..AT_VERSION + 4].copy_from_slice(&version.to_le_bytes());
        bytes[AT_WRITER..HEADER].fill(0);
        bytes[AT_WRITER..AT_WRITER + farside.len()].copy_from_slice(farside);
        let error = check_version(&bytes[..HEADER]).unwrap_err();
        assert_eq!(Copied::check::<Saved>(&bytes).err(), Some(error.clone()));
        error.to_string()
    };
    let reads = format!("this farside ({FARSIDE}) reads versions 1 and 2");
    let text = refused(3, b"9.1.0");
    assert!(text.contains("version 3 (of farside 9.1.0)"), "{text}");
    assert!(text.contains(&reads), "{text}");
    let text = refused(0, b"");
    assert!(text.contains("version 0, and"), "{text}");
    assert_eq!(check_version(&[0; HEADER]), Ok(()));
    assert_eq!(
        check_version(&[1; HEADER]),
        Err(StateError::Unknown(0x0101_0101_0101_0101))
    );
}
