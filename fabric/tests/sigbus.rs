//! A shared file that shrinks must not end the process; any other SIGBUS must.

use std::{
    fs::File,
    io::Write,
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    process::{Command, ExitStatus},
    sync::atomic::Ordering,
    thread,
};

use farside_fabric::{
    Access, FaultReason, Iova, LenderPath, MemoryRange, NtbLimits, Owner, PeerAddress,
    memory::SharedMemory, soft::Adapter,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const LEN: u64 = 64 << 10;

/// A memfd that may shrink.
fn unsealed(len: u64) -> OwnedFd {
    let fd = memfd_create("unsealed", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&fd, len).expect("set its size");
    fd
}

fn shrunk(keep: u64) -> std::sync::Arc<SharedMemory> {
    let fd = unsealed(LEN);
    let other = fd.try_clone().expect("dup");
    let memory = SharedMemory::map(fd, 0, LEN as usize, true).expect("map");
    ftruncate(&other, keep).expect("shrink");
    memory
}

#[test]
fn reading_a_shrunk_file_gives_zeroes() {
    let memory = shrunk(0);
    assert!(!memory.is_gone());
    let slice = memory.slice(0, LEN as usize).expect("inside");
    let mut buf = vec![0xff; LEN as usize];
    assert_eq!(slice.read(&mut buf), buf.len());
    assert!(buf.iter().all(|&byte| byte == 0));
    assert!(memory.is_gone());
}

#[test]
fn writing_to_a_shrunk_file_does_no_harm() {
    let memory = shrunk(4096);
    let slice = memory.slice(8190, 100).expect("inside");
    assert_eq!(slice.write(&[7; 100]), 100);
    assert!(memory.is_gone());
}

#[test]
fn atomics_on_a_shrunk_file_do_no_harm() {
    let memory = shrunk(0);
    let slice = memory.slice(0, 16).expect("inside");
    assert_eq!(slice.load_u32(4, Ordering::Acquire), Some(0));
    let memory = shrunk(0);
    let slice = memory.slice(0, 16).expect("inside");
    assert_eq!(slice.store_u64(8, 1, Ordering::Release), Some(()));
    assert!(memory.is_gone());
}

#[test]
fn many_threads_may_fault_at_once() {
    let memories: Vec<_> = (0..8).map(|_| shrunk(0)).collect();
    thread::scope(|scope| {
        for n in 0..16 {
            let memories = &memories;
            scope.spawn(move || {
                for memory in memories {
                    let slice = memory.slice(n * 4096, 4096).expect("inside");
                    assert_eq!(slice.write(&[1; 4096]), 4096);
                }
            });
        }
    });
    assert!(memories.iter().all(|memory| memory.is_gone()));
}

#[test]
fn neighbours_of_a_shrunk_file_are_untouched() {
    let whole: Vec<_> = (0..4)
        .map(|_| SharedMemory::anonymous(4096).expect("memory"))
        .collect();
    let gone = shrunk(0);
    for memory in &whole {
        memory.slice(0, 4096).expect("inside").write(&[9; 4096]);
    }
    gone.slice(0, 1).expect("inside").write(&[1]);
    for memory in &whole {
        let mut buf = [0; 4096];
        memory.slice(0, 4096).expect("inside").read(&mut buf);
        assert_eq!(buf, [9; 4096]);
        assert!(!memory.is_gone());
    }
}

#[test]
fn an_entry_is_used_again_without_the_old_mark() {
    for _ in 0..100 {
        let memory = shrunk(0);
        assert!(!memory.is_gone());
        memory.slice(0, 1).expect("inside").write(&[1]);
        assert!(memory.is_gone());
    }
}

#[test]
fn a_translation_to_gone_memory_is_refused() {
    let fd = unsealed(LEN);
    let other = fd.try_clone().expect("dup");
    let adapter = Adapter::new(NtbLimits::default()).expect("limits");
    let mut path = adapter
        .attach("nvme0", &Owner::new("vm", "user 1"))
        .expect("attach");
    let peer_address = PeerAddress::new(1 << 40);
    path.map_peer(peer_address, MemoryRange::whole(File::from(fd), LEN))
        .expect("map");
    path.open_window(Iova::new(0), peer_address, LEN)
        .expect("window");
    path.set_bus_master(true).expect("bus master");
    let slice = path
        .translate(Iova::new(0), 16, Access::Write)
        .expect("mapped");
    ftruncate(&other, 0).expect("shrink");
    slice.write(&[1; 16]);
    let fault = path
        .translate(Iova::new(4096), 16, Access::Read)
        .expect_err("gone");
    assert_eq!(fault.reason, FaultReason::MemoryGone);
    assert_eq!(path.faults().summary().by_reason.memory_gone, 1);
}

#[test]
fn an_empty_pool_of_huge_pages_does_no_harm() {
    // More than any pool has; mapping does not reserve pages.
    const LEN: u64 = 1 << 40;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let fd = match memfd_create("huge", flags) {
        Ok(fd) => fd,
        Err(error) => {
            // For `cargo xtask test`: libtest shows `println!` only of failed tests.
            let test = "an_empty_pool_of_huge_pages_does_no_harm";
            let line = format!("skipped: {test}: no hugetlbfs ({error})\n");
            return std::io::stdout()
                .write_all(line.as_bytes())
                .expect("stdout");
        }
    };
    ftruncate(&fd, LEN).expect("set its size");
    let memory = SharedMemory::map(fd, 1 << 20, 1 << 30, true).expect("map");
    assert_eq!(memory.page_size(), 2 << 20);
    for at in (0..1 << 30).step_by(2 << 20) {
        assert_eq!(memory.slice(at, 8).expect("inside").write(&[1; 8]), 8);
    }
    eprintln!("gone: {}", memory.is_gone());
}

/// As with `vm.overcommit_memory=2`: private pages are accounted for when they are mapped.
#[test]
fn a_shrunk_file_does_no_harm_where_no_more_memory_can_be_reserved() {
    assert_eq!(in_child("child_has_reserved_all_memory").code(), Some(0));
}

#[test]
#[ignore = "limits its process; run by another test"]
fn child_has_reserved_all_memory() {
    const LARGE: usize = 1 << 40;
    let gone = |keep| {
        let fd = unsealed(LARGE as u64);
        let other = fd.try_clone().expect("dup");
        let memory = SharedMemory::map(fd, 0, LARGE, true).expect("map");
        ftruncate(&other, keep).expect("shrink");
        memory
    };
    let limit = libc::rlimit {
        rlim_cur: 1 << 30,
        rlim_max: 1 << 30,
    };
    // SAFETY: a system call on a value of ours.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) }, 0);
    for _ in 0..3 {
        // Likely at the same address each time: what was written is not found again.
        let memory = gone(0);
        let slice = memory.slice(LARGE / 2, 8).expect("inside");
        let mut found = [1; 8];
        assert_eq!(slice.read(&mut found), 8);
        assert_eq!(found, [0; 8]);
        assert!(memory.is_gone());
        assert_eq!(slice.write(&[7; 8]), 8);
        assert_eq!(slice.read(&mut found), 8);
        assert_eq!(found, [7; 8]);
    }
    // Two at once do not see each other's.
    let [one, two] = [gone(0), gone(4096)];
    one.slice(8192, 8).expect("inside").write(&[1; 8]);
    let mut found = [9; 8];
    two.slice(8192, 8).expect("inside").read(&mut found);
    assert_eq!(found, [0; 8]);
}

/// Runs the test `name` of this binary, which is otherwise ignored, in a separate process.
fn in_child(name: &str) -> ExitStatus {
    let program = std::env::current_exe().expect("this program");
    Command::new(program)
        .args(["--ignored", "--exact", "--test-threads=1", name])
        .output()
        .expect("run it again")
        .status
}

/// Raises SIGBUS at an address that is not registered.
fn touch_foreign_memory() {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let fd = unsealed(4096);
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, not used elsewhere.
    let at = unsafe { mmap(std::ptr::null_mut(), 4096, prot, MapFlags::SHARED, &fd, 0) };
    let at = at.expect("map").cast::<u8>();
    ftruncate(&fd, 0).expect("shrink");
    // SAFETY: the address is mapped for writing; that the file behind it has
    // shrunk, and the access raises SIGBUS, is what is tested.
    unsafe { at.write_volatile(1) };
}

#[test]
fn sigbus_elsewhere_still_ends_the_process() {
    assert_eq!(
        in_child("child_touches_foreign_memory").signal(),
        Some(libc::SIGBUS)
    );
    assert_eq!(
        in_child("child_is_sent_sigbus").signal(),
        Some(libc::SIGBUS)
    );
}

#[test]
fn sigbus_elsewhere_reaches_the_handler_before_ours() {
    assert_eq!(in_child("child_has_a_handler").code(), Some(42));
}

#[test]
#[ignore = "ends the process; run by another test"]
fn child_touches_foreign_memory() {
    let _guarded = SharedMemory::anonymous(4096).expect("memory");
    touch_foreign_memory();
}

#[test]
#[ignore = "ends the process; run by another test"]
fn child_is_sent_sigbus() {
    // The handler of Rust's runtime would ignore it.
    // SAFETY: the default action is not a function.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    let _guarded = SharedMemory::anonymous(4096).expect("memory");
    // SAFETY: sends a signal to this thread; touches no memory.
    unsafe { libc::raise(libc::SIGBUS) };
}

#[test]
#[ignore = "ends the process; run by another test"]
fn child_has_a_handler() {
    extern "C" fn leave(_: libc::c_int) {
        // SAFETY: _exit is async-signal-safe.
        unsafe { libc::_exit(42) };
    }
    // SAFETY: the handler is a function of the right type.
    unsafe { libc::signal(libc::SIGBUS, leave as *const () as libc::sighandler_t) };
    let _guarded = SharedMemory::anonymous(4096).expect("memory");
    touch_foreign_memory();
}
