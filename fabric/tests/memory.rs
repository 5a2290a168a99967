//! Shared memory: what may be mapped, and accesses within it.

use std::{fs::File, os::fd::OwnedFd, sync::atomic::Ordering};

use farside_fabric::memory::{SharedMemory, create_sealed};
use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate};

fn error(file: OwnedFd, offset: u64, len: usize) -> String {
    let error = SharedMemory::map(file, offset, len, true).expect_err("must be refused");
    error.to_string()
}

#[test]
fn a_range_beyond_the_file_is_refused() {
    let fd = || create_sealed("test", 8192).expect("memfd");
    for (offset, len) in [(0, 8193), (4096, 8192), (8192, 1), (!0xfff, 4096)] {
        let text = error(fd(), offset, len);
        assert!(
            text.contains("not all in the file, which has 0x2000"),
            "{text}"
        );
    }
    assert!(error(fd(), 0, 0).contains("must not be 0"));
    assert!(error(fd(), 512, 512).contains("multiple of 4 KiB"));
}

#[test]
fn what_is_no_memory_is_refused() {
    let null = File::open("/dev/null").expect("/dev/null");
    assert!(error(null.into(), 0, 4096).contains("no regular file"));
    let (pipe, _other) = rustix::pipe::pipe().expect("pipe");
    assert!(error(pipe, 0, 4096).contains("no regular file"));
    // As on a FUSE file system, a process of the client would answer page faults.
    let file = File::open("/proc/self/status").expect("/proc");
    assert!(error(file.into(), 0, 4096).contains("not in memory"));
}

#[test]
fn a_sealed_memfd_keeps_its_size() {
    let fd = create_sealed("test", 4096).expect("memfd");
    let seals = fcntl_get_seals(&fd).expect("seals");
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    assert!(ftruncate(&fd, 0).is_err());
    assert!(fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
}

#[test]
fn slices_stay_inside() {
    let memory = SharedMemory::anonymous(5000).expect("memory");
    assert_eq!(memory.len(), 8192);
    assert!(memory.slice(8192, 1).is_none());
    assert!(memory.slice(usize::MAX, 2).is_none());
    let slice = memory.slice(100, 200).expect("inside");
    assert!(slice.slice(199, 2).is_none());
    assert!(slice.slice(usize::MAX, 1).is_none());
    let part = slice.slice(100, 100).expect("inside");
    assert_eq!((part.offset(), part.len()), (200, 100));
    // Longer buffers are cut, not overrun.
    assert_eq!(part.write(&[5; 300]), 100);
    assert_eq!(part.read(&mut [0; 300]), 100);
    let mut around = [9; 102];
    memory.slice(199, 102).expect("inside").read(&mut around);
    assert_eq!(
        (around[0], around[1], around[100], around[101]),
        (0, 5, 5, 0)
    );
}

#[test]
fn words_must_be_inside_and_aligned() {
    let memory = SharedMemory::anonymous(4096).expect("memory");
    let slice = memory.slice(0, 16).expect("inside");
    let order = Ordering::SeqCst;
    assert_eq!(slice.store_u32(12, 0x1234_5678, order), Some(()));
    assert_eq!(slice.load_u32(12, order), Some(0x1234_5678));
    assert_eq!(slice.load_u64(8, order), Some(0x1234_5678_0000_0000));
    assert_eq!(slice.load_u32(2, order), None);
    assert_eq!(slice.load_u32(16, order), None);
    assert_eq!(slice.store_u64(12, 0, order), None);
}

#[test]
fn read_only_memory_is_not_written() {
    let fd = create_sealed("test", 4096).expect("memfd");
    let memory = SharedMemory::map(fd, 0, 4096, false).expect("map");
    let slice = memory.slice(0, 16).expect("inside");
    assert_eq!(slice.write(&[1; 16]), 0);
    assert_eq!(slice.store_u32(0, 1, Ordering::Relaxed), None);
    assert_eq!(slice.load_u32(0, Ordering::Relaxed), Some(0));
}

#[test]
fn a_slice_keeps_its_memory() {
    let memory = SharedMemory::anonymous(4096).expect("memory");
    let slice = memory.slice(0, 4).expect("inside");
    drop(memory);
    slice.write(&[1, 2, 3, 4]);
    assert_eq!(slice.load_u32(0, Ordering::Relaxed), Some(0x0403_0201));
}
