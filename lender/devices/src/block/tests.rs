//! The engines' contract, below the controller.

use std::{
    fs::File,
    io::{Write, stdout},
    os::unix::fs::FileExt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farside_fabric::{
    NtbLimits, Owner, PeerAddress,
    memory::{HostSlice, SharedMemory},
    soft::Adapter,
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{MemfdFlags, ftruncate, memfd_create},
    time::Timespec,
};

use super::{
    BlockError, BlockQueue, Durability, EngineChoice, Limits, PUNCH_HOLE, Tag, ZERO_RANGE,
    transfer::{Job, Step, Transfer},
};

const ENGINES: [EngineChoice; 2] = [EngineChoice::IoUring, EngineChoice::Threads];

fn file(len: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    file
}

fn memory(len: usize) -> (rustix::fd::OwnedFd, HostSlice) {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len as u64).unwrap();
    let memory = SharedMemory::map(file.try_clone().unwrap(), 0, len, true).unwrap();
    (file, memory.slice(0, len).unwrap())
}

/// For `cargo xtask test`: libtest captures `eprintln!`.
fn skipped(test: &str, why: &dyn std::fmt::Display) {
    let test = format_args!("block::tests::{test}");
    writeln!(stdout().lock(), "skipped: {test}: {why}").unwrap();
}

fn finish(queue: &mut BlockQueue) -> (Tag, Result<(), BlockError>) {
    loop {
        queue.turn();
        if let Some(done) = queue.next_done() {
            return done;
        }
        if !queue.is_busy() {
            let fd = queue.wake_fd();
            poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
        }
    }
}

#[test]
fn more_vectors_than_one_call_takes() {
    for engine in ENGINES {
        let image = file(1 << 20);
        let data: Vec<u8> = (0..3000u32).map(|index| (index * 31) as u8).collect();
        image.write_all_at(&data, 0).unwrap();
        let mut queue = BlockQueue::open(image, engine, 4).unwrap();
        let (_fd, memory) = memory(1 << 20);
        // 3000 pieces of one byte, apart.
        for index in 0..3000 {
            queue.slices(0).push(memory.slice(index * 3, 1).unwrap());
        }
        queue.read(0, 0);
        assert_eq!(finish(&mut queue), (0, Ok(())));
        let mut back = vec![0; 9000];
        memory.read(&mut back);
        assert!((0..3000).all(|index| back[index * 3] == data[index]));
    }
}

#[test]
fn guest_memory_that_is_gone_is_told_apart() {
    for engine in ENGINES {
        let image = file(1 << 20);
        let mut queue = BlockQueue::open(image, engine, 4).unwrap();
        let (fd, memory) = memory(1 << 16);
        queue.slices(0).push(memory);
        ftruncate(&fd, 8192).unwrap();
        queue.read(0, 0);
        assert_eq!(finish(&mut queue), (0, Err(BlockError::GuestMemory)));
        queue.write(0, 0, Durability::Cached);
        assert_eq!(finish(&mut queue), (0, Err(BlockError::GuestMemory)));
    }
}

/// Its data is not the guest's: zeroes were written, or what was read is lost.
#[test]
fn io_whose_memory_was_taken_fails() {
    const AT: PeerAddress = PeerAddress::new(0);
    for engine in ENGINES {
        let mut queue = BlockQueue::open(file(1 << 20), engine, 4).unwrap();
        let (_fd, slice) = memory(1 << 16);
        let mut path = Adapter::new(NtbLimits::default())
            .unwrap()
            .attach("disk0", &Owner::new("vm", "user 1"))
            .unwrap();
        path.map_shared(AT, Arc::clone(slice.memory())).unwrap();
        queue.slices(0).push(slice.clone());
        queue.read(0, 0);
        path.seize_peer(AT, 1 << 16).unwrap();
        assert_eq!(finish(&mut queue), (0, Err(BlockError::GuestMemory)));
        queue.write(0, 0, Durability::Cached);
        assert_eq!(finish(&mut queue), (0, Err(BlockError::GuestMemory)));
    }
}

#[test]
fn dropping_waits_for_what_is_in_flight() {
    for engine in ENGINES {
        let image = file(64 << 20);
        let mut queue = BlockQueue::open(image.try_clone().unwrap(), engine, 64).unwrap();
        let (_fd, memory) = memory(1 << 20);
        memory.write(&[5; 1 << 20]);
        for tag in 0..64 {
            queue.slices(tag).push(memory.clone());
            queue.write(tag, u64::from(tag) << 20, Durability::Durable);
        }
        queue.turn();
        drop(memory);
        drop(queue);
        let mut byte = [0];
        image.read_exact_at(&mut byte, (64 << 20) - 1).unwrap();
        assert_eq!(byte, [5]);
    }
}

#[test]
#[should_panic(expected = "the kernel is using this transfer's memory")]
fn memory_in_flight_cannot_be_reached() {
    let mut queue = BlockQueue::open(file(1 << 20), EngineChoice::Threads, 4).unwrap();
    queue.flush(1);
    queue.slices(1);
}

#[test]
fn a_file_without_holes_is_zeroed_by_writing() {
    // /dev/shm does not support FALLOC_FL_ZERO_RANGE, so a hole is punched.
    let image = match tempfile::tempfile_in("/dev/shm") {
        Ok(image) => image,
        Err(error) => {
            let test = "a_file_without_holes_is_zeroed_by_writing";
            return skipped(test, &format_args!("no file in /dev/shm: {error}"));
        }
    };
    image.write_all_at(&[7; 1 << 16], 0).unwrap();
    for engine in ENGINES {
        let mut queue = BlockQueue::open(image.try_clone().unwrap(), engine, 4).unwrap();
        queue.zero(2, 100, 1000, false);
        assert_eq!(finish(&mut queue), (2, Ok(())));
        let mut back = vec![1; 1200];
        image.read_exact_at(&mut back, 0).unwrap();
        assert!(back[..100].iter().all(|&byte| byte == 7));
        assert!(back[100..1100].iter().all(|&byte| byte == 0));
        assert!(back[1100..].iter().all(|&byte| byte == 7));
    }
}

#[test]
fn a_queue_can_move_to_another_thread() {
    for engine in ENGINES {
        let mut queue = BlockQueue::open(file(1 << 20), engine, 4).unwrap();
        queue.flush(0);
        queue.turn();
        let result = thread::spawn(move || finish(&mut queue)).join().unwrap();
        assert_eq!(result, (0, Ok(())));
    }
}

/// Takes a write lease and drops it (fcntl(2), F_SETLEASE).
fn lease(file: &File) -> std::io::Result<()> {
    for kind in [libc::F_WRLCK, libc::F_UNLCK] {
        // SAFETY: takes a descriptor, which is open, and no pointers.
        if unsafe { libc::fcntl(super::raw(file), libc::F_SETLEASE, kind) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Whether `file` has no other opener: only then does the kernel grant a write lease.
fn is_only_user(file: &File) -> bool {
    lease(file).is_ok()
}

#[test]
fn an_image_is_free_as_soon_as_its_queue_is_dropped() {
    let alone = tempfile::NamedTempFile::new().unwrap();
    if let Err(error) = lease(alone.as_file()) {
        let test = "an_image_is_free_as_soon_as_its_queue_is_dropped";
        let place = alone.path().display();
        return skipped(test, &format_args!("no lease on {place}: {error}"));
    }
    for engine in ENGINES {
        for round in 0..50 {
            let image = tempfile::NamedTempFile::new().unwrap();
            image.as_file().set_len(1 << 20).unwrap();
            let mut queue = BlockQueue::open(image.reopen().unwrap(), engine, 64).unwrap();
            assert!(!is_only_user(image.as_file()));
            let (_fd, memory) = memory(1 << 16);
            for tag in 0..8 {
                queue.slices(tag).push(memory.clone());
                queue.write(tag, u64::from(tag) << 16, Durability::Durable);
            }
            queue.turn();
            drop(queue);
            assert!(is_only_user(image.as_file()), "{engine:?}, round {round}");
        }
    }
}

/// Writes of 4 KiB, as fast as the limits let them be taken, for a second or more: how many, and for how long.
fn writes(limits: Limits, engine: EngineChoice) -> (f64, Duration) {
    let queue = BlockQueue::open(file(1 << 20), engine, 4).unwrap();
    let mut queue = queue.limited(limits).unwrap();
    let (_fd, memory) = memory(4096);
    queue.slices(0).push(memory);
    let (start, mut count) = (Instant::now(), 0.0);
    while start.elapsed() < Duration::from_secs(1) {
        if queue.may_take() {
            queue.write(0, 0, Durability::Cached);
            assert_eq!(finish(&mut queue), (0, Ok(())));
            count += 1.0;
        } else if !queue.is_busy() {
            assert!(queue.is_held());
            let fd = queue.wake_fd();
            let limit = Timespec::try_from(Duration::from_secs(10)).unwrap();
            assert_eq!(
                poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)),
                Ok(1)
            );
        }
    }
    (count, start.elapsed())
}

#[test]
fn zeroes_count_where_they_are_written() {
    let mut transfer = Transfer::default();
    let zero = Job::zero(0, 8192, true);
    let allocate = |mode| Job::Allocate {
        mode,
        offset: 0,
        len: 8192,
    };
    // Of a block device, and of a file.
    let costs = |job: &Job| [true, false].map(|writes| transfer.cost(job, writes));
    assert_eq!(costs(&zero), [8192, 0]);
    assert_eq!(costs(&allocate(ZERO_RANGE)), [8192, 0]);
    assert_eq!(costs(&allocate(PUNCH_HOLE)), [0, 0]);
    assert!(transfer.begin(zero).is_some());
    // Neither way of fallocate(2) works.
    for _ in 0..2 {
        assert_eq!(transfer.zeroes_written(0), 0);
        assert!(matches!(
            transfer.finish(-libc::EOPNOTSUPP),
            Step::Continue(_)
        ));
    }
    assert_eq!(transfer.zeroes_written(4096), 4096);
    assert!(matches!(transfer.finish(4096), Step::Continue(_)));
    assert_eq!(transfer.zeroes_written(-libc::EIO), 0);
    assert_eq!(transfer.zeroes_written(4096), 4096);
    assert!(matches!(transfer.finish(4096), Step::Done(Ok(()))));
}

#[test]
fn a_device_keeps_its_limits_and_reaches_them() {
    for engine in ENGINES {
        let iops = Limits {
            iops: Some(2560),
            ..Limits::default()
        };
        let bandwidth = Limits {
            bandwidth: Some(10 << 20),
            ..Limits::default()
        };
        for limits in [iops, bandwidth] {
            let (count, time) = writes(limits, engine);
            // The 100 ms that nothing may start at first are what may be used at once later.
            let most = 2560.0 * time.as_secs_f64() + 1.0;
            assert!(
                (1280.0..=most).contains(&count),
                "{engine:?}, {limits:?}: {count} in {time:?}"
            );
        }
    }
}

#[test]
fn what_was_taken_is_not_held_back() {
    let limits = Limits {
        iops: Some(100),
        ..Limits::default()
    };
    let queue = BlockQueue::open(file(1 << 20), EngineChoice::Threads, 4).unwrap();
    let mut queue = queue.limited(limits).unwrap();
    let start = Instant::now();
    // A command of many steps.
    for _ in 0..1000 {
        queue.punch(0, 0, 4096);
        assert_eq!(finish(&mut queue), (0, Ok(())));
    }
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(!queue.may_take());
}

/// A queue whose owner is held back, and asleep.
fn held_back() -> BlockQueue {
    let limits = Limits {
        iops: Some(100),
        ..Limits::default()
    };
    let queue = BlockQueue::open(file(1 << 20), EngineChoice::Threads, 4).unwrap();
    let mut queue = queue.limited(limits).unwrap();
    assert!(!queue.may_take() && !queue.is_busy());
    queue
}

/// Whether the owner is woken within `limit`.
fn wakes(queue: &BlockQueue, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).unwrap();
    let fd = queue.wake_fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&limit)).unwrap() > 0
}

#[test]
fn an_owner_that_is_off_is_woken_once() {
    let mut queue = held_back();
    assert!(wakes(&queue, Duration::from_secs(10)));
    assert!(queue.is_busy());
    assert!(!queue.is_busy() && !queue.is_held());
    assert!(!wakes(&queue, Duration::from_millis(50)));
}

/// An owner that polls does not ask whether it is busy.
#[test]
fn an_owner_that_is_awake_is_not_woken() {
    let mut queue = held_back();
    assert!(wakes(&queue, Duration::from_secs(10)));
    queue.turn();
    assert!(!wakes(&queue, Duration::ZERO));
    // It was held back, and hears that once.
    assert!(queue.is_busy() && !queue.is_busy());
}
