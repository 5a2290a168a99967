//! I/O through io_uring.
//!
//! All queued operations are submitted with one system call. Reads that the page cache
//! can serve are complete when that call returns, so at queue depth 1 a read is one
//! system call and no wake-up. The owner sleeps on the ring's descriptor, which is
//! readable exactly while completions are pending and needs no clearing.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd},
    sync::Arc,
};

use io_uring::{IoUring, Probe, opcode, register::Restriction, squeue, types};

use farside_medium::Condition;

use super::{Durability, Engine, NO_MODE, RawOp, Tag, raw};

pub(super) struct Uring {
    ring: IoUring,
    /// Entries that wait for room in the ring.
    waiting: VecDeque<squeue::Entry>,
    /// Started or waiting, not reaped.
    in_flight: usize,
    // Closed after the ring.
    file: Arc<File>,
}

/// The operations in use.
const OPERATIONS: [(u8, &str); 6] = [
    (opcode::Read::CODE, "READ"),
    (opcode::Write::CODE, "WRITE"),
    (opcode::Readv::CODE, "READV"),
    (opcode::Writev::CODE, "WRITEV"),
    (opcode::Fsync::CODE, "FSYNC"),
    (opcode::Fallocate::CODE, "FALLOCATE"),
];

/// `IORING_UNREGISTER_FILES` of io_uring_register(2), with which a ring ends.
const UNREGISTER_FILES: u8 = 3;

/// The only registered file.
const IMAGE: types::Fixed = types::Fixed(0);

impl Uring {
    pub(super) fn open(file: Arc<File>, depth: u16) -> io::Result<Self> {
        let depth = u32::from(depth).next_power_of_two();
        let ring: IoUring = IoUring::builder()
            .dontfork()
            .setup_clamp()
            // At most one completion for each tag, so it cannot overflow.
            .setup_cqsize(depth * 2)
            .setup_r_disabled()
            .build(depth)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        for (code, name) in OPERATIONS {
            if !probe.is_supported(code) {
                return Err(io::Error::other(format!(
                    "the kernel's io_uring lacks IORING_OP_{name}"
                )));
            }
        }
        ring.submitter().register_files(&[raw(&file)])?;
        // A process that a guest has taken over would otherwise open files and connect sockets
        // through the ring, where no filter of system calls sees it.
        let fixed = squeue::Flags::FIXED_FILE.bits();
        let flags = [
            Restriction::sqe_flags_allowed(fixed | squeue::Flags::ASYNC.bits()),
            Restriction::sqe_flags_required(fixed),
        ];
        let operations = OPERATIONS.map(|(code, _)| Restriction::sqe_op(code));
        let end = Restriction::register_op(UNREGISTER_FILES);
        let mut restrictions: Vec<_> = operations.into_iter().chain(flags).chain([end]).collect();
        ring.submitter().register_restrictions(&mut restrictions)?;
        ring.submitter().register_enable_rings()?;
        Ok(Self {
            ring,
            waiting: VecDeque::with_capacity(depth as usize),
            in_flight: 0,
            file,
        })
    }

    fn entry(op: RawOp) -> squeue::Entry {
        match op {
            RawOp::Read {
                iovecs,
                count: 1,
                offset,
            } => {
                // SAFETY: `Engine::queue` was promised one valid iovec.
                let iovec = unsafe { *iovecs };
                opcode::Read::new(IMAGE, iovec.iov_base.cast(), clamp(iovec.iov_len))
                    .offset(offset)
                    .build()
            }
            RawOp::Read {
                iovecs,
                count,
                offset,
            } => opcode::Readv::new(IMAGE, iovecs.cast(), count)
                .offset(offset)
                .build(),
            RawOp::Write {
                iovecs,
                count: 1,
                offset,
                durability,
            } => {
                // SAFETY: `Engine::queue` was promised one valid iovec.
                let iovec = unsafe { *iovecs };
                let entry = opcode::Write::new(IMAGE, iovec.iov_base.cast(), clamp(iovec.iov_len))
                    .offset(offset)
                    .rw_flags(write_flags(durability))
                    .build();
                off_thread(entry, durability)
            }
            RawOp::Write {
                iovecs,
                count,
                offset,
                durability,
            } => {
                let entry = opcode::Writev::new(IMAGE, iovecs.cast(), count)
                    .offset(offset)
                    .rw_flags(write_flags(durability))
                    .build();
                off_thread(entry, durability)
            }
            RawOp::Sync => opcode::Fsync::new(IMAGE)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            RawOp::Allocate { mode, offset, len } => opcode::Fallocate::new(IMAGE, len)
                .offset(offset)
                .mode(mode)
                .build()
                .flags(squeue::Flags::ASYNC),
            RawOp::Offloads { .. } | RawOp::Reserve { .. } | RawOp::Report { .. } => {
                opcode::Fallocate::new(IMAGE, 1).mode(NO_MODE).build()
            }
        }
    }

    fn fill_ring(&mut self) {
        let mut queue = self.ring.submission();
        while let Some(entry) = self.waiting.front() {
            // SAFETY: the entry's memory stays valid until it is reaped or the engine is
            // dropped, by the contract of `Engine::queue`; dropping waits (see `Drop`).
            if unsafe { queue.push(entry) }.is_err() {
                return;
            }
            self.waiting.pop_front();
        }
    }
}

/// On some file systems a durable write would block the submitting thread.
fn off_thread(entry: squeue::Entry, durability: Durability) -> squeue::Entry {
    match durability {
        Durability::Cached => entry,
        Durability::Durable => entry.flags(squeue::Flags::ASYNC),
    }
}

fn write_flags(durability: Durability) -> i32 {
    match durability {
        Durability::Cached => 0,
        Durability::Durable => libc::RWF_DSYNC,
    }
}

/// The kernel moves at most 2 GiB per operation; further operations move the rest.
fn clamp(len: usize) -> u32 {
    len.min(1 << 30) as u32
}

impl Engine for Uring {
    unsafe fn queue(&mut self, tag: Tag, op: RawOp) {
        let entry = Self::entry(op).user_data(tag.into());
        self.waiting.push_back(entry);
        self.in_flight += 1;
    }

    fn submit(&mut self) -> bool {
        loop {
            self.fill_ring();
            if self.ring.submission().is_empty() {
                return self.waiting.is_empty();
            }
            match self.ring.submit() {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // Out of memory, or completions must be reaped first: retried later.
                Err(_) => return false,
            }
        }
    }

    fn reap(&mut self, done: &mut Vec<(Tag, i32)>) {
        for completion in self.ring.completion() {
            self.in_flight -= 1;
            done.push((completion.user_data() as Tag, completion.result()));
        }
    }

    fn has_finished(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    fn is_connected(&self) -> bool {
        true
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring keeps its descriptor open for the lifetime of `self`, which
        // the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    fn condition(&self) -> Condition {
        super::condition(&self.file)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn wait(&mut self) {
        if self.in_flight > 0 && !self.has_finished() {
            // On failure (a signal) it returns without a completion, as documented.
            let _ = self.ring.submit_and_wait(1);
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut discarded = Vec::new();
        // Entries that were never submitted need no waiting.
        self.in_flight -= self.waiting.len();
        self.waiting.clear();
        while self.in_flight > 0 {
            self.wait();
            self.reap(&mut discarded);
            discarded.clear();
        }
        // After close(2) of the ring a kernel worker drops its reference to the image
        // later. Drop it now, so that a restarted lender can claim the image at once. On
        // failure the worker does it.
        let _ = self.ring.submitter().unregister_files();
    }
}
