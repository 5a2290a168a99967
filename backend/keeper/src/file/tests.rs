//! The format of the file, as each version has it.

use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::PathBuf,
};

use farside_hand_over::samples::{self, Example};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;

fn sample(version: u32) -> Vec<Example> {
    let name = format!("tests/samples/device-{version}.txt");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name);
    if version == RECORDS.version() {
        samples::write_new(&path, example);
    }
    samples::read(&path)
}

/// Numbers of descriptors that are recorded and not used.
const SOCKET: i32 = 300;
const ANSWERED: i32 = 301;

const MESSAGES: &[u8] = b"done|current|next";
const DONE: usize = 5;
const DRAIN: u32 = 77;
const ANSWER: &[u8] = b"an answer";
const SNAPSHOT: &[u8] = b"a snapshot";
const STAGED: &[u8] = b"one that is not current";

/// A device with a client, from which it has received a descriptor with three messages. One was answered, the others were
/// not processed.
fn example() -> Vec<Example> {
    let file = DeviceFile::new().unwrap();
    let mut journal = file.journal().unwrap();
    let mut snapshots = file.snapshots(&journal).unwrap();
    let (theirs, ours) = UnixStream::pair().unwrap();
    journal.begin(SOCKET);
    let passed = [theirs.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&passed)));
    let message = [IoSlice::new(MESSAGES)];
    sendmsg(&theirs, &message, &mut control, SendFlags::empty()).unwrap();
    let received = journal.receive(ours.as_fd(), 4096, (&[], false)).unwrap();
    let received = received.unwrap();
    assert_eq!(received.bytes, MESSAGES.len());
    snapshots.stage(SNAPSHOT).unwrap();
    journal.commit(DONE, DRAIN, ANSWER, Some(ANSWERED)).unwrap();
    snapshots.stage(STAGED).unwrap();
    let (lease, log) = (file.lease().unwrap(), file.log().unwrap());
    for n in [0, 1, lease.len() - 1] {
        lease.set(n, 0x1000 + n as u64);
    }
    for n in [0, 1, log.len() - 1] {
        log.set(n, 0x2000 + n as u64);
    }
    let mut bytes = vec![0; SNAPSHOTS.end];
    rustix::io::pread(&file, &mut bytes, 0).unwrap();
    let numbers = received.fds.iter().map(|fd| fd.as_raw_fd() as u8);
    let mut example = samples::parts(&bytes);
    example.push(("received".into(), numbers.collect()));
    example
}

fn is_read(version: u32) {
    let sample = sample(version);
    let (_, numbers) = sample.last().unwrap();
    let numbers: Vec<i32> = numbers.iter().map(|number| i32::from(*number)).collect();
    let memory = DeviceFile::new().unwrap().file;
    rustix::io::pwrite(&memory, &samples::whole(&sample, SNAPSHOTS.end), 0).unwrap();
    let file = DeviceFile::take_over(&memory).unwrap();
    let journal = file.journal().unwrap();
    assert_eq!(journal.client(), Some(SOCKET));
    assert_eq!(journal.input(), &MESSAGES[DONE..]);
    assert_eq!(journal.to_drain(), DRAIN);
    assert_eq!(journal.queued(), ANSWER.len());
    assert_eq!(journal.queued_bytes(), ANSWER);
    assert_eq!(journal.waiting(), Some(ANSWERED));
    assert_eq!(file.turn(), 1);
    let [carried, last] = journal.inherited();
    assert_eq!(carried, (Vec::new(), false));
    assert_eq!(last, (numbers, false));
    let snapshots = file.snapshots(&journal).unwrap();
    assert_eq!(snapshots.inherited(), SNAPSHOT);
    let words = |words: Words, base: u64| {
        let set: Vec<_> = (0..words.len()).filter(|n| words.get(*n) != 0).collect();
        assert_eq!(set, [0, 1, words.len() - 1]);
        let is_set = |n: &usize| words.get(*n) == base + *n as u64;
        assert!(set.iter().all(is_set));
    };
    words(file.lease().unwrap(), 0x1000);
    words(file.log().unwrap(), 0x2000);
}

#[test]
fn device_files_of_this_version_and_of_the_one_before_are_read() {
    for version in RECORDS.oldest()..=RECORDS.version() {
        is_read(version);
    }
}

/// The arguments of system calls are addresses: all else is as the sample has it.
#[test]
fn the_format_of_a_device_file_has_not_changed_without_its_version() {
    const SLOTS: std::ops::Range<usize> = JOURNAL.start + 4096..JOURNAL.start + 8192;
    let without = |parts: &[Example]| {
        let mut bytes = samples::whole(parts, SNAPSHOTS.end);
        bytes[SLOTS].fill(0);
        // It changes with each release.
        bytes[FARSIDE..FARSIDE + WRITER].fill(0);
        bytes
    };
    let sample = sample(RECORDS.version());
    let [sample, now] = [sample, example()].map(|it| without(&it));
    let differs = sample.iter().zip(&now).position(|(a, b)| a != b);
    assert_eq!(
        differs, None,
        "the layout has changed: raise the version (docs/hand-over-state.md)"
    );
}

#[test]
fn device_files_of_other_versions_are_refused_in_words() {
    let refused = |version: u64, farside: &[u8]| {
        let memory = DeviceFile::new().unwrap().file;
        rustix::io::pwrite(&memory, &(MAGIC ^ version).to_le_bytes(), 0).unwrap();
        rustix::io::pwrite(&memory, &[0; WRITER], FARSIDE as u64).unwrap();
        rustix::io::pwrite(&memory, farside, FARSIDE as u64).unwrap();
        DeviceFile::take_over(&memory).unwrap_err().to_string()
    };
    let text = refused(3, b"9.1.0");
    for part in [
        "the record of a device has version 3 (of farside 9.1.0)",
        "reads versions 1 and 2",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let text = refused(0, b"");
    assert!(text.contains("version 0, and"), "{text}");
    let text = refused(1 << 40, b"");
    assert!(text.contains("no record"), "{text}");
}

#[test]
fn a_file_of_the_version_before_is_of_this_one_when_a_process_takes_it_over() {
    let memory = DeviceFile::new().unwrap().file;
    rustix::io::pwrite(&memory, &(MAGIC ^ 1).to_le_bytes(), 0).unwrap();
    rustix::io::pwrite(&memory, &[0; WRITER], FARSIDE as u64).unwrap();
    let file = DeviceFile::take_over(&memory).unwrap();
    let mut header = [0; FARSIDE + WRITER];
    rustix::io::pread(&file, &mut header, 0).unwrap();
    let version = u64::from(RECORDS.version());
    assert_eq!(header[..8], (MAGIC ^ version).to_le_bytes());
    assert_eq!(header[FARSIDE..], writer());
}
