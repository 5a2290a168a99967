//! Pinning real memory: resident on return, limits checked first, nothing left after an
//! error.

use std::{
    num::NonZeroUsize,
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Instant,
};

use farside_fabric::{
    MemoryRange,
    memory::{SharedMemory, create_sealed},
    pin::{PinError, PinOptions, PinPolicy, Pins, check_memlock, check_room},
};
use rustix::{
    fs::{SeekFrom, fstat, seek},
    io::Errno,
    process::{Resource, Rlimit, setrlimit},
};

const MIB: u64 = 1 << 20;

fn ram(len: u64) -> MemoryRange {
    MemoryRange::whole(create_sealed("ram", len).expect("memfd"), len)
}

/// Bytes of the file with allocated pages. `st_blocks` can miss pages that the kernel is swapping
/// out.
fn resident(range: &MemoryRange) -> u64 {
    let (mut bytes, mut at) = (0, 0);
    loop {
        let data = match seek(&range.file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return bytes,
            Err(errno) => panic!("lseek: {errno}"),
        };
        at = seek(&range.file, SeekFrom::Hole(data)).expect("lseek");
        bytes += at - data;
    }
}

/// Bytes of the file that are locked in this process's page tables.
fn locked(range: &MemoryRange) -> u64 {
    let inode = format!(" {} ", fstat(&range.file).expect("fstat").st_ino);
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("read smaps");
    let mut ours = false;
    let mut kib = 0;
    for line in maps.lines() {
        match line.strip_prefix("Locked:") {
            // "START-END PERMISSIONS OFFSET DEVICE INODE …"
            None if line.contains('-') => ours = line.contains(&inode),
            Some(rest) if ours => {
                let number = rest.trim().strip_suffix(" kB").expect("kB");
                kib += number.parse::<u64>().expect("a number");
            }
            _ => {}
        }
    }
    kib * 1024
}

#[test]
fn what_is_locked_is_there_to_be_locked() {
    // Within an ordinary user's RLIMIT_MEMLOCK.
    let (fresh, touched) = (ram(2 * MIB), ram(MIB));
    let memory = SharedMemory::map_range(&touched).expect("map");
    let all = memory.slice(0, MIB as usize).expect("inside");
    assert_eq!(all.write(&[7; MIB as usize]), MIB as usize);
    drop((all, memory));
    let ranges = [fresh.clone(), touched.clone()];
    let pins = Pins::new(&ranges, &PinOptions::new(PinPolicy::Require)).expect("pin");
    assert_eq!(pins.report().bytes_locked, 3 * MIB);
    assert_eq!(locked(&fresh), 2 * MIB);
    assert_eq!(locked(&touched), MIB);
    drop(pins);
    assert_eq!(locked(&fresh), 0);
    assert_eq!(locked(&touched), 0);
}

#[test]
fn pinned_memory_is_resident_and_unchanged() {
    let ranges = [ram(200 * MIB), ram(4096)];
    let memory = SharedMemory::map_range(&ranges[0]).expect("map");
    let written = memory.slice(MIB as usize, MIB as usize).expect("inside");
    assert_eq!(written.write(&[7; MIB as usize]), MIB as usize);
    assert_eq!(resident(&ranges[0]), MIB);
    let seen = AtomicU64::new(0);
    let progress = |progress: farside_fabric::pin::PinProgress| {
        assert_eq!(progress.total, 200 * MIB + 4096);
        seen.fetch_max(progress.done, Ordering::Relaxed);
    };
    let options = PinOptions {
        workers: NonZeroUsize::new(4),
        progress: Some(&progress),
        ..PinOptions::new(PinPolicy::Prefer)
    };
    let pins = Pins::new(&ranges, &options).expect("pin");
    let report = pins.report();
    assert_eq!(report.bytes_pinned, 200 * MIB + 4096);
    assert_eq!(report.pages.bytes(), report.bytes_pinned);
    assert_eq!(seen.into_inner(), report.bytes_pinned);
    assert_eq!(resident(&ranges[0]), 200 * MIB);
    assert_eq!(resident(&ranges[1]), 4096);
    // Either all of it is locked, or none.
    assert!([0, report.bytes_pinned].contains(&report.bytes_locked));
    drop(pins);
    // What has never been written need not stay resident: the kernel may reclaim clean pages.
    assert_eq!([locked(&ranges[0]), locked(&ranges[1])], [0, 0]);
    let mut bytes = vec![0; 3 * MIB as usize];
    let all = memory.slice(0, bytes.len()).expect("inside");
    assert_eq!(all.read(&mut bytes), bytes.len());
    let (before, rest) = bytes.split_at(MIB as usize);
    let (written, after) = rest.split_at(MIB as usize);
    assert!(before.iter().chain(after).all(|byte| *byte == 0));
    assert!(written.iter().all(|byte| *byte == 7));
}

#[test]
fn a_part_of_a_file_is_pinned() {
    let range = MemoryRange {
        offset: MIB,
        len: 2 * MIB,
        ..ram(16 * MIB)
    };
    let pins = Pins::new(
        std::slice::from_ref(&range),
        &PinOptions::new(PinPolicy::Prefer),
    )
    .expect("pin");
    assert_eq!(pins.report().bytes_pinned, 2 * MIB);
    let resident = resident(&range);
    assert!((2 * MIB..=16 * MIB).contains(&resident), "{resident}");
}

#[test]
fn nothing_to_pin_is_fine() {
    let pins = Pins::new(&[], &PinOptions::new(PinPolicy::Require)).expect("pin");
    assert_eq!(pins.report().bytes_pinned, 0);
}

#[test]
fn a_file_too_short_is_refused() {
    let range = MemoryRange {
        len: 8192,
        ..ram(4096)
    };
    let error = Pins::new(&[range], &PinOptions::new(PinPolicy::Prefer)).expect_err("too short");
    assert!(matches!(error, PinError::Map { .. }), "{error}");
}

#[test]
fn a_deadline_and_a_cancel_stop_it() {
    let range = [ram(512 * MIB)];
    let late = PinOptions {
        deadline: Some(Instant::now()),
        ..PinOptions::new(PinPolicy::Prefer)
    };
    let error = Pins::new(&range, &late).expect_err("no time");
    assert!(
        matches!(error, PinError::Deadline { done: 0, .. }),
        "{error}"
    );

    // Cancelled by the first completed chunk.
    let cancel = AtomicBool::new(false);
    let progress = |_| cancel.store(true, Ordering::Relaxed);
    let options = PinOptions {
        cancel: Some(&cancel),
        progress: Some(&progress),
        workers: NonZeroUsize::new(2),
        ..PinOptions::new(PinPolicy::Prefer)
    };
    let error = Pins::new(&range, &options).expect_err("cancelled");
    assert!(matches!(error, PinError::Cancelled { .. }), "{error}");
    assert!(resident(&range[0]) < 512 * MIB);
}

/// The limit applies to the process, so this and its opposite are one test, run in a
/// separate process.
#[test]
fn the_memlock_limit_is_looked_at_first() {
    let program = std::env::current_exe().expect("this program");
    let output = std::process::Command::new(program)
        .args(["--ignored", "--exact", "child_with_a_small_memlock_limit"])
        .output()
        .expect("run it again");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

#[test]
#[ignore = "changes a limit of the process; run by another test"]
fn child_with_a_small_memlock_limit() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    // Root may lock any amount: drop the capability.
    let mut sets = capabilities(None).expect("capabilities");
    sets.effective -= CapabilitySet::IPC_LOCK;
    set_capabilities(None, sets).expect("drop CAP_IPC_LOCK");
    let limit = Rlimit {
        current: Some(MIB),
        maximum: Some(MIB),
    };
    setrlimit(Resource::Memlock, limit).expect("lower the limit");

    check_memlock(MIB).expect("just enough");
    let small = [ram(MIB / 2)];
    let pins = Pins::new(&small, &PinOptions::new(PinPolicy::Require)).expect("small enough");
    assert_eq!(pins.report().bytes_locked, MIB / 2);

    let large = [ram(8 * MIB)];
    let error = Pins::new(&large, &PinOptions::new(PinPolicy::Require)).expect_err("too large");
    let text = error.to_string();
    for part in [
        "RLIMIT_MEMLOCK is 1 MiB",
        "512 KiB are locked",
        "8 MiB more",
        "ulimit -l 8704",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(resident(&large[0]), 0, "nothing was populated");

    let pins = Pins::new(&large, &PinOptions::new(PinPolicy::Prefer)).expect("without locking");
    assert_eq!(pins.report().bytes_locked, 0);
    assert_eq!(resident(&large[0]), 8 * MIB);
}

/// For `cargo xtask test`: not by `println!`, which libtest shows only of failed tests.
fn skipped(why: &str) {
    use std::io::{Write, stdout};
    let test = "huge_pages_are_used_where_the_memory_has_them";
    writeln!(stdout().lock(), "skipped: {test}: {why}").expect("stdout");
}

#[test]
fn huge_pages_are_used_where_the_memory_has_them() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let fd: OwnedFd = match memfd_create("huge", flags) {
        Ok(fd) => fd,
        Err(error) => return skipped(&format!("no hugetlbfs ({error})")),
    };
    ftruncate(&fd, 4 * MIB).expect("set its size");
    let whole = MemoryRange::whole(fd, 4 * MIB);
    // A PC's layout: RAM from 0 to 640 KiB and from 1 MiB, in one file.
    let low = MemoryRange {
        len: 640 << 10,
        ..whole.clone()
    };
    let rest = MemoryRange {
        offset: MIB,
        len: 3 * MIB,
        ..whole
    };
    match Pins::new(&[low, rest.clone()], &PinOptions::new(PinPolicy::Require)) {
        Ok(pins) => {
            // The first page is in both.
            assert_eq!(pins.report().pages.pages_2m, 3);
            assert_eq!(pins.report().bytes_pinned, 3 * MIB + (640 << 10));
            assert_eq!(pins.report().bytes_locked, pins.report().bytes_pinned);
            let memory = SharedMemory::map_range(&rest).expect("map");
            assert_eq!(memory.len() as u64, 3 * MIB);
            let slice = memory.slice(3 << 19, 3 << 19).expect("inside");
            assert_eq!(slice.write(&[1; 100]), 100);
        }
        // An empty pool is an error, not a signal.
        Err(error) => {
            assert!(matches!(error, PinError::Populate { .. }), "{error}");
            skipped(&format!("no huge page is free ({error})"));
        }
    }
}

#[test]
fn populating_stops_when_the_rest_does_not_fit_any_more() {
    let range = [ram(512 * MIB)];
    // The host's memory fills up meanwhile.
    let asked = AtomicU64::new(0);
    let too_much = ram(1 << 50);
    let room = || match asked.fetch_add(1, Ordering::Relaxed) {
        0 | 1 => Ok(()),
        _ => check_room(std::slice::from_ref(&too_much)),
    };
    let options = PinOptions {
        room: Some(&room),
        workers: NonZeroUsize::new(1),
        ..PinOptions::new(PinPolicy::Prefer)
    };
    let error = Pins::new(&range, &options).expect_err("no room");
    assert!(matches!(error, PinError::TooLarge(_)), "{error}");
    let resident = resident(&range[0]);
    assert!((MIB..512 * MIB).contains(&resident), "{resident}");
}
