//! Surviving SIGBUS.
//!
//! A CPU access to a mapped file raises SIGBUS when the file has become shorter, or
//! when the system has no page to give (a full tmpfs, an empty pool of huge pages).
//! The first is controlled by the client that shared the file, so it must not end
//! the process.
//!
//! Every mapping that the CPU accesses is entered in a fixed table. The signal handler looks the
//! faulting address up there; when it finds it, it replaces the *whole* mapping by anonymous zero
//! pages, marks the entry as gone, and returns, so that the access is repeated and succeeds.
//! Replacing all of it at once means one fault per mapping, and no growth of the process's list of
//! mappings under a peer's control. The next translation of a DMA finds the mark and refuses. Any
//! other SIGBUS goes to the previous handler.
//!
//! Anonymous pages are accounted for when they are mapped, so where the kernel does not overcommit
//! (`vm.overcommit_memory=2`), or under RLIMIT_DATA, there may be none. Then the mapping is replaced
//! by a part of a sparse memfd, whose pages are accounted for when they are touched: the part at the
//! offset of the mapping's own address, which no other mapping has, and which is emptied when the
//! mapping goes.
//!
//! What the handler does is async-signal-safe by what it consists of, not by
//! POSIX's list of functions (signal-safety(7)), which has no mmap: atomics, and
//! `mmap_anonymous` and `mmap` of rustix, whose linux_raw backend (the default; nothing here
//! selects its libc one) issues the system call inline. Neither takes a lock,
//! allocates, or touches errno. A signal that is not ours goes on by
//! sigaction(2) and raise(3), which are on the list.
//!
//! # Why the handler replaces the right pages
//!
//! The thread that faults is using the mapping, so it keeps it alive, and its
//! entry unchanged, until the handler returns. Entries of other mappings may
//! come and go meanwhile; a sequence number shows when one was read torn.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    io, mem,
    os::fd::OwnedFd,
    ptr,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    mm::{MapFlags, ProtFlags},
};

use crate::memory::create_sealed;

/// Entries: three quarters of the mappings that the kernel allows a process by
/// default (`vm.max_map_count`, 65,530), so that this limit, which fails one
/// mapping, is met before that one, which fails threads and allocations, too.
/// Untouched entries take no memory.
pub(crate) const SLOTS: usize = 49_152;

struct Slot {
    /// Odd while the entry is being changed.
    sequence: AtomicUsize,
    /// First address; 0 when the entry is free.
    start: AtomicUsize,
    /// First address after the mapping.
    end: AtomicUsize,
    gone: AtomicBool,
    /// Whether it has been replaced by a part of [`ZEROES`].
    in_zeroes: AtomicBool,
    /// Faults since it was replaced: of threads that faulted at the same time, or because there is no
    /// page for the replacement either.
    repeated: AtomicUsize,
}

/// Faults of a replaced mapping that are taken for those of other threads.
const MOST_REPEATED: usize = 1 << 16;

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        sequence: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        gone: AtomicBool::new(false),
        in_zeroes: AtomicBool::new(false),
        repeated: AtomicUsize::new(0),
    }
}; SLOTS];

/// A sparse file as large as the address space; empty, but where a mapping was replaced by it.
static ZEROES: OnceLock<Result<OwnedFd, i32>> = OnceLock::new();

/// Bytes of the address space of a process, where addresses are not extended explicitly.
const ADDRESS_SPACE: u64 = 1 << 47;

/// Entries from here on have never been used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Free entries below [`USED`]. Never locked by the handler.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// The previous handler of SIGBUS.
static PREVIOUS: OnceLock<Result<libc::sigaction, i32>> = OnceLock::new();

/// A mapping's entry in the table; removed on drop, which must come before
/// the unmapping.
#[derive(Debug)]
pub(crate) struct Guarded(usize);

impl Guarded {
    /// Enters the mapping `start..start + len`, of pages of `page_size` bytes.
    pub(crate) fn new(start: *mut u8, len: usize, page_size: usize) -> io::Result<Self> {
        install()?;
        let start = start as usize;
        let len = len.checked_next_multiple_of(page_size);
        let end = len
            .and_then(|len| start.checked_add(len))
            .ok_or(io::ErrorKind::InvalidInput)?;
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match free.pop() {
            Some(index) => index,
            None if USED.load(SeqCst) < SLOTS => USED.fetch_add(1, SeqCst),
            None => {
                return Err(io::Error::other(format!(
                    "the limit of {SLOTS} mappings of shared memory is reached"
                )));
            }
        };
        drop(free);
        let slot = &TABLE[index];
        slot.sequence.fetch_add(1, SeqCst);
        slot.gone.store(false, SeqCst);
        slot.in_zeroes.store(false, SeqCst);
        slot.repeated.store(0, SeqCst);
        slot.end.store(end, SeqCst);
        slot.start.store(start, SeqCst);
        slot.sequence.fetch_add(1, SeqCst);
        Ok(Self(index))
    }

    /// Whether the mapping has been replaced by zero pages.
    pub(crate) fn is_gone(&self) -> bool {
        // A thread that reads the mark late writes into the zero pages, which is harmless.
        TABLE[self.0]
            .gone
            .load(std::sync::atomic::Ordering::Relaxed)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let slot = &TABLE[self.0];
        if slot.in_zeroes.load(SeqCst) {
            let (start, end) = (slot.start.load(SeqCst), slot.end.load(SeqCst));
            empty_zeroes(start as u64, (end - start) as u64);
        }
        slot.sequence.fetch_add(1, SeqCst);
        slot.start.store(0, SeqCst);
        slot.end.store(0, SeqCst);
        slot.sequence.fetch_add(1, SeqCst);
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(self.0);
    }
}

/// Replaces the mapping that contains `address`. Called by the signal handler.
fn replace(address: usize) -> bool {
    let used = USED.load(SeqCst).min(SLOTS);
    for slot in &TABLE[..used] {
        let sequence = slot.sequence.load(SeqCst);
        let (start, end) = (slot.start.load(SeqCst), slot.end.load(SeqCst));
        let torn = !sequence.is_multiple_of(2) || slot.sequence.load(SeqCst) != sequence;
        if torn || address < start || address >= end {
            continue;
        }
        if slot.gone.load(SeqCst) {
            // Another thread was faster, or there is no page.
            return slot.repeated.fetch_add(1, SeqCst) < MOST_REPEATED;
        }
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: validity and length: start..end is a whole mapping of ours,
        // which the faulting thread keeps alive (see the module's text), so
        // MAP_FIXED replaces nothing else. Aliasing: other threads that access
        // it make volatile and atomic accesses only, and see either the file
        // or zeroes. The Mapping's munmap later removes the replacement.
        let done =
            unsafe { rustix::mm::mmap_anonymous(start as *mut c_void, end - start, prot, flags) };
        if done.is_ok() {
            slot.gone.store(true, SeqCst);
            return true;
        }
        let Some(Ok(zeroes)) = ZEROES.get() else {
            return false;
        };
        slot.in_zeroes.store(true, SeqCst);
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        let (at, len, offset) = (start as *mut c_void, end - start, start as u64);
        // SAFETY: as above. The file is as large as the address space and sealed, and nothing else
        // maps this part of it.
        let done = unsafe { rustix::mm::mmap(at, len, prot, flags, zeroes, offset) };
        if done.is_ok() {
            slot.gone.store(true, SeqCst);
        }
        return done.is_ok();
    }
    false
}

/// Makes [`ZEROES`].
fn create_zeroes() -> io::Result<OwnedFd> {
    create_sealed("farside-zeroes", ADDRESS_SPACE)
}

/// Removes what was written to a replaced mapping: another one may get the same addresses.
fn empty_zeroes(start: u64, len: u64) {
    let Some(Ok(zeroes)) = ZEROES.get() else {
        return;
    };
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if let Err(error) = fallocate(zeroes, flags, start, len) {
        log::error!("cannot release what replaced memory that is gone: {error}");
    }
}

/// Installs the handler, once a process.
fn install() -> io::Result<()> {
    let previous = PREVIOUS.get_or_init(|| {
        // SAFETY: sigaction is plain data, for which zeroes are a value.
        let mut previous: libc::sigaction = unsafe { mem::zeroed() };
        // SAFETY: a null action only queries; `previous` is ours.
        match unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &mut previous) } {
            0 => Ok(previous),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    });
    // Before the handler, which must not create it. Without it only the fallback is missing.
    ZEROES.get_or_init(|| create_zeroes().map_err(|error| error.raw_os_error().unwrap_or(0)));
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    previous
        .as_ref()
        .map(|_| ())
        .and_then(|()| {
            // Only now: the handler must find `PREVIOUS` set.
            INSTALLED
                .get_or_init(|| {
                    // SAFETY: as above.
                    let mut action: libc::sigaction = unsafe { mem::zeroed() };
                    action.sa_sigaction = on_sigbus as *const () as usize;
                    // On the alternative stack where a thread has one, as the
                    // handler of Rust's runtime needs.
                    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                    // SAFETY: `action` is fully set, and the handler does only
                    // what is allowed in one.
                    match unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } {
                        0 => Ok(()),
                        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
                    }
                })
                .as_ref()
                .map(|_| ())
        })
        .map_err(|&errno| io::Error::from_raw_os_error(errno))
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo_t; for BUS_ADRERR it has an
    // address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // A memory error (BUS_MCEERR_*) or a signal from another process is not handled here.
    if code != libc::BUS_ADRERR || !replace(address) {
        forward(signal, info, context);
    }
}

/// Passes the signal to the previous handler.
fn forward(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo_t.
    let sent_by_someone = unsafe { (*info).si_code } <= 0;
    let Some(Ok(previous)) = PREVIOUS.get() else {
        return;
    };
    let handler = previous.sa_sigaction;
    match handler {
        libc::SIG_IGN if sent_by_someone => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: sigaction is plain data; zeroes are SIG_DFL.
            let default: libc::sigaction = unsafe { mem::zeroed() };
            // SAFETY: both calls are async-signal-safe. The raised signal is
            // blocked until this handler returns, then ends the process, as it
            // would have without us.
            unsafe {
                libc::sigaction(libc::SIGBUS, &default, ptr::null_mut());
                libc::raise(libc::SIGBUS);
            }
        }
        _ if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: SA_SIGINFO means that the address is of a function of this type; the code
            // that installed it guarantees that.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { mem::transmute(handler) };
            handler(signal, info, context);
        }
        _ => {
            // SAFETY: without SA_SIGINFO it is of a function of this type.
            let handler: extern "C" fn(c_int) = unsafe { mem::transmute(handler) };
            handler(signal);
        }
    }
}
