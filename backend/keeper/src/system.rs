//! The system calls for which there is no safe interface, and memory that is shared with the kernel.

#![allow(unsafe_code)]

use std::{
    io, mem,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr::{self, NonNull},
    sync::atomic::AtomicU64,
};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A mapped part of a file that this process made, sealed against resizing. The keeper maps none of these bytes. Where two
/// areas of this process map the same, one of them is out of use: that of a client that has gone, or of a process before. So
/// references into an area follow the rules for memory of one's own.
#[derive(Debug)]
pub(crate) struct Area {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to no thread, and has one owner.
unsafe impl Send for Area {}
// SAFETY: shared references give out shared slices and atomics only.
unsafe impl Sync for Area {}

impl Area {
    /// Maps `part` of `file`, both ends of which are multiples of the page size.
    pub(crate) fn map(file: impl AsFd, part: Range<usize>) -> io::Result<Self> {
        let len = part.len();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            mmap(
                ptr::null_mut(),
                len,
                protection,
                flags,
                file,
                part.start as u64,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    pub(crate) fn bytes(&self, at: Range<usize>) -> &[u8] {
        self.check(&at);
        // SAFETY: inside the mapping, as checked, which lives as long as `self`; nothing writes to it while it is
        // borrowed (see the type).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at.start), at.len()) }
    }

    pub(crate) fn bytes_mut(&mut self, at: Range<usize>) -> &mut [u8] {
        self.check(&at);
        // SAFETY: as in `bytes`, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at.start), at.len()) }
    }

    /// Copies bytes from one place to another.
    pub(crate) fn copy(&mut self, from: Range<usize>, to: usize) {
        self.check(&from);
        self.check(&(to..to + from.len()));
        // SAFETY: both are inside the mapping, as checked, and may overlap; nothing borrows them, as `self` is borrowed
        // exclusively.
        unsafe {
            let start = self.start.as_ptr();
            ptr::copy(start.add(from.start), start.add(to), from.len());
        }
    }

    /// The 64-bit word at `at`, a multiple of 8.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        self.check(&(at..at + 8));
        assert!(at.is_multiple_of(8), "words are aligned");
        // SAFETY: inside the mapping and aligned, as checked; all accesses to words are atomic.
        unsafe { &*self.start.as_ptr().add(at).cast() }
    }

    fn check(&self, at: &Range<usize>) {
        assert!(at.start <= at.end && at.end <= self.len, "inside the area");
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, to which no reference is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Bytes that are reserved for a [`Slot`].
pub(crate) const SLOT: usize = 512;

/// Bytes of ancillary data: an aligned header, and descriptors, of which one more than allowed shows that there were too
/// many.
const CONTROL: usize =
    (mem::size_of::<libc::cmsghdr>() + 4 * (crate::MAX_FDS + 1)).next_multiple_of(8);

/// The arguments of one system call, and what the kernel has stored of its result.
#[repr(C)]
struct Slot {
    message: libc::mmsghdr,
    vector: libc::iovec,
    control: [u64; CONTROL / 8],
}

const _: () = assert!(mem::size_of::<Slot>() <= SLOT);

/// What a call has done, from its slot.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) bytes: usize,
    /// Numbers of the received descriptors.
    pub(crate) fds: Vec<RawFd>,
    /// The kernel has closed some for which there was no room.
    pub(crate) truncated: bool,
}

impl Area {
    fn slot(&self, at: usize) -> *mut Slot {
        self.check(&(at..at + SLOT));
        assert!(at.is_multiple_of(SLOT), "slots are aligned");
        // SAFETY: inside the mapping, as checked.
        unsafe { self.start.as_ptr().add(at).cast() }
    }

    /// Clears the slot at `at`: no call was made with it.
    pub(crate) fn clear_slot(&mut self, at: usize) {
        let slot = self.slot(at);
        // SAFETY: `slot` points to a `Slot` inside the mapping, of which all bit patterns are valid. Only the counter
        // that the kernel writes tells whether a call was made.
        unsafe { ptr::write_volatile(&raw mut (*slot).message.msg_len, 0) };
    }

    /// What the call of the slot at `at` has done. 0 bytes if none was made, or it failed.
    pub(crate) fn done(&self, at: usize) -> Done {
        let slot = self.slot(at);
        let mut done = Done::default();
        // SAFETY: `slot` points to a `Slot` inside the mapping, of which all bit patterns are valid. The lengths are
        // clamped before they are used.
        unsafe {
            done.bytes = ptr::read_volatile(&raw const (*slot).message.msg_len) as usize;
            if done.bytes == 0 {
                return done;
            }
            let header = (*slot).message.msg_hdr;
            done.truncated = header.msg_flags & libc::MSG_CTRUNC != 0;
            let control = header.msg_controllen.min(CONTROL);
            let bytes: [u8; CONTROL] = mem::transmute((*slot).control);
            fds_in(&bytes[..control], &mut done.fds);
        }
        done
    }

    /// Receives into `to` of this area by the slot at `at`, which is cleared. Does not block.
    pub(crate) fn receive(
        &mut self,
        at: usize,
        socket: BorrowedFd<'_>,
        to: Range<usize>,
    ) -> io::Result<()> {
        self.check(&to);
        let slot = self.slot(at);
        // SAFETY: all pointers that are stored lead into the mapping, which outlives the call; `to` is inside, as
        // checked, and overlaps no slot, as the layout has them in other pages. The kernel writes no more than the
        // lengths that are given.
        let result = unsafe {
            (*slot).vector = libc::iovec {
                iov_base: self.start.as_ptr().add(to.start).cast(),
                iov_len: to.len(),
            };
            let header = &raw mut (*slot).message.msg_hdr;
            ptr::write_bytes(header, 0, 1);
            (*header).msg_iov = &raw mut (*slot).vector;
            (*header).msg_iovlen = 1;
            (*header).msg_control = (&raw mut (*slot).control).cast();
            (*header).msg_controllen = CONTROL as _;
            let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
            libc::recvmmsg(
                socket.as_raw_fd(),
                &raw mut (*slot).message,
                1,
                flags as _,
                ptr::null_mut(),
            )
        };
        match result {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    /// Sends `from` of this area, with `fd`, by the slot at `at`, which is cleared. Does not block.
    pub(crate) fn send(
        &mut self,
        at: usize,
        socket: BorrowedFd<'_>,
        from: Range<usize>,
        fd: Option<RawFd>,
    ) -> io::Result<()> {
        self.check(&from);
        let slot = self.slot(at);
        // SAFETY: as in `receive`; the kernel only reads. The control buffer holds one header with one descriptor.
        let result = unsafe {
            (*slot).vector = libc::iovec {
                iov_base: self.start.as_ptr().add(from.start).cast(),
                iov_len: from.len(),
            };
            let header = &raw mut (*slot).message.msg_hdr;
            ptr::write_bytes(header, 0, 1);
            (*header).msg_iov = &raw mut (*slot).vector;
            (*header).msg_iovlen = 1;
            if let Some(fd) = fd {
                (*header).msg_control = (&raw mut (*slot).control).cast();
                (*header).msg_controllen = libc::CMSG_SPACE(4) as _;
                let control = libc::CMSG_FIRSTHDR(header);
                (*control).cmsg_len = libc::CMSG_LEN(4) as _;
                (*control).cmsg_level = libc::SOL_SOCKET;
                (*control).cmsg_type = libc::SCM_RIGHTS;
                ptr::write_unaligned(libc::CMSG_DATA(control).cast(), fd);
            }
            // NOSIGNAL: report a closed peer as EPIPE, without SIGPIPE.
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            libc::sendmmsg(socket.as_raw_fd(), &raw mut (*slot).message, 1, flags as _)
        };
        match result {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

/// Appends the descriptors of the SCM_RIGHTS messages in `control`.
fn fds_in(mut control: &[u8], fds: &mut Vec<RawFd>) {
    const HEADER: usize = mem::size_of::<libc::cmsghdr>();
    while let Some((header, rest)) = control.split_at_checked(HEADER) {
        // SAFETY: as many bytes as the header has, of which all bit patterns are valid.
        let header: libc::cmsghdr = unsafe { ptr::read_unaligned(header.as_ptr().cast()) };
        let Some(len) = (header.cmsg_len as usize).checked_sub(HEADER) else {
            return;
        };
        let len = len.min(rest.len());
        let data = &rest[..len];
        if (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            let (numbers, _) = data.as_chunks();
            fds.extend(numbers.iter().copied().map(RawFd::from_ne_bytes));
        }
        let next = len.next_multiple_of(mem::align_of::<libc::cmsghdr>());
        control = rest.get(next..).unwrap_or_default();
    }
}

/// Makes the caller the owner of an open descriptor.
///
/// The number comes from a record of the process that had the same table of descriptors before, and each number is
/// given out once (`Inherited`).
pub(crate) fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: it is open, and nothing else in this process owns it: see above.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// What a process has become by [`clone_with_files`].
pub(crate) enum Cloned {
    Parent(libc::pid_t),
    Child,
}

/// As fork(2), with one table of descriptors for both. The caller must have one thread.
pub(crate) fn clone_with_files() -> io::Result<Cloned> {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: without CLONE_VM the child has memory of its own, and without a stack it goes on with the copy of the
    // caller's. No other thread exists (the caller's duty) that could have held a lock. The C library's record of the
    // thread's number is that of the parent, whose process lives for as long as the child's main thread uses it as an
    // owner's name of locks.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Cloned::Child),
        pid => Ok(Cloned::Parent(pid as libc::pid_t)),
    }
}

/// Signals that are read instead of being delivered.
pub(crate) struct Blocked {
    set: libc::sigset_t,
    before: libc::sigset_t,
}

/// A signal, and whether a process sent it (and not a terminal or the kernel).
pub(crate) struct Signalled {
    pub(crate) signal: i32,
    pub(crate) by_process: bool,
}

impl Blocked {
    pub(crate) fn new(signals: &[i32]) -> io::Result<Self> {
        // SAFETY: both sets are initialised by the calls that get them, before they are read.
        unsafe {
            let (mut set, mut before) = (mem::zeroed(), mem::zeroed());
            libc::sigemptyset(&raw mut set);
            for signal in signals {
                libc::sigaddset(&raw mut set, *signal);
            }
            // Ignored, as its parent may have left it, it would not be reported.
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            match libc::sigprocmask(libc::SIG_BLOCK, &raw const set, &raw mut before) {
                0 => Ok(Self { set, before }),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }

    /// Has them delivered again as before, in this process.
    pub(crate) fn undo(&self) -> io::Result<()> {
        // SAFETY: `before` was filled by the kernel.
        match unsafe {
            libc::sigprocmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut())
        } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// A descriptor from which they are [read](Self::next), readable when there is one.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the set is initialised; a descriptor that is returned is new, and has no other owner.
        unsafe {
            match libc::signalfd(-1, &raw const self.set, flags) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(OwnedFd::from_raw_fd(fd)),
            }
        }
    }
}

/// The next signal of a [descriptor](Blocked::descriptor), if there is one.
pub(crate) fn next_signal(descriptor: BorrowedFd<'_>) -> io::Result<Option<Signalled>> {
    const BYTES: usize = mem::size_of::<libc::signalfd_siginfo>();
    let mut bytes = [0; BYTES];
    match rustix::io::read(descriptor, &mut bytes) {
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        read => read?,
    };
    // SAFETY: as many bytes as the structure has, of which all bit patterns are valid.
    let information: libc::signalfd_siginfo = unsafe { mem::transmute(bytes) };
    Ok(Some(Signalled {
        signal: information.ssi_signo as i32,
        by_process: information.ssi_code <= 0,
    }))
}

/// Has the descriptor `number`, which nothing owns but this module's callers by agreement, be what `fd` is.
pub(crate) fn replace(fd: impl AsFd, number: RawFd) -> io::Result<()> {
    // SAFETY: dup3(2) touches no memory. Who uses `number` expects another file there: it is a place of this crate, or has
    // no owner.
    match unsafe { libc::dup3(fd.as_fd().as_raw_fd(), number, libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
