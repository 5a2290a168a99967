//! Records of a process that was taken over: whatever is in them, the next process reads them without a panic, and
//! from a file of its own.

use std::{
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    panic::catch_unwind,
};

use farside_keeper::DeviceFile;
use rustix::{
    fs::{MemfdFlags, fstat, ftruncate, memfd_create},
    io::{pread, pwrite},
};

const PAGE: u64 = 4096;

/// Bytes of two snapshots, which are at the end of the file, behind their page of words.
const SNAPSHOTS: u64 = 8 << 20;

/// xorshift64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number of which many are near a limit.
    fn word(&mut self) -> u64 {
        let near = [
            0,
            1,
            8,
            16,
            64 << 10,
            1 << 20,
            1 << 21,
            1 << 22,
            1 << 31,
            u64::MAX,
        ];
        match self.next() % 4 {
            0 => self.next(),
            1 => 1 << (self.next() % 64),
            _ => near[self.next() as usize % near.len()].wrapping_add(self.next() % 3),
        }
    }
}

/// A file whose words are random, but for its header.
fn garbage(random: &mut Random) -> OwnedFd {
    let file = DeviceFile::new().unwrap();
    let end = fstat(&file).unwrap().st_size as u64;
    // Of the lease, the log and the journal, before its buffers; then those of the snapshots.
    let pages = [
        0..64,
        (end - SNAPSHOTS) / PAGE - 1..(end - SNAPSHOTS) / PAGE,
    ];
    for page in pages.into_iter().flatten() {
        let word = |n| match n > 0 && random.next().is_multiple_of(3) {
            true => random.word(),
            false => 0,
        };
        let words: Vec<u8> = (0..PAGE / 8).map(word).flat_map(u64::to_ne_bytes).collect();
        // Behind the magic number.
        let start = if page == 0 { 8 } else { 0 };
        pwrite(&file, &words[start..], page * PAGE + start as u64).unwrap();
    }
    file.as_fd().try_clone_to_owned().unwrap()
}

#[test]
fn records_of_garbage_cause_no_panic() {
    for seed in 1..160 {
        let run = || {
            let mut random = Random(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
            let file = DeviceFile::take_over(&garbage(&mut random)).unwrap();
            let mut journal = file.journal().unwrap();
            let mut snapshots = file.snapshots(&journal).unwrap();
            assert!(snapshots.inherited().len() as u64 <= SNAPSHOTS / 2);
            let (_, fds) = (journal.client(), journal.inherited());
            assert!(fds.iter().all(|(fds, _)| fds.len() <= 17));
            let (ours, theirs) = UnixStream::pair().unwrap();
            // Each fails, or does something that a client can see.
            let _ = (journal.waiting(), journal.to_drain(), journal.input().len());
            let _ = journal.flush(ours.as_fd());
            rustix::io::write(&theirs, &[7; 100]).unwrap();
            let want = journal.input().len() + 64;
            let _ = journal.receive(ours.as_fd(), want, (&[], false));
            snapshots.stage(&[1; 10]).unwrap();
            let _ = journal.commit(random.next() as usize % 100, 0, &[2; 30], None);
            let _ = journal.flush(ours.as_fd());
            journal.begin(0);
            journal.end();
        };
        assert!(catch_unwind(run).is_ok(), "seed {seed}");
    }
}

/// QEMU may have the file of a backend that it has taken over.
#[test]
fn a_process_has_a_copy_of_what_the_one_before_has_left() {
    let before = DeviceFile::new().unwrap();
    before.lease().unwrap().set(3, 41);
    let shared = before.as_fd().try_clone_to_owned().unwrap();
    let own = DeviceFile::take_over(&shared).unwrap();
    before.lease().unwrap().set(3, 42);
    assert_eq!(own.lease().unwrap().get(3), 41);
    let seals = rustix::fs::fcntl_get_seals(&own).unwrap();
    assert!(seals.contains(rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::SEAL));
}

#[test]
fn another_file_is_refused() {
    let before = DeviceFile::new().unwrap();
    let size = fstat(&before).unwrap().st_size as u64;
    let mut header = [0; 8];
    pread(&before, &mut header, 0).unwrap();
    let file = |size: u64, header: [u8; 8]| {
        let file = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, size).unwrap();
        pwrite(&file, &header, 0).unwrap();
        file
    };
    DeviceFile::take_over(&file(size, [1; 8])).unwrap_err();
    DeviceFile::take_over(&file(size - PAGE, header)).unwrap_err();
    DeviceFile::take_over(&UnixStream::pair().unwrap().0.into()).unwrap_err();
    // What it is a copy of need not be sealed.
    DeviceFile::take_over(&file(size, header)).unwrap();
}
