//! A medium that delays, loses, refuses and cuts operations, for tests.
//!
//! It is deterministic: one seed gives one sequence, in which time is counted in turns. The [`Watch`] sees each
//! operation, and panics at a forbidden one.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use farside_medium::Condition;

use super::{Engine, RawOp, Tag, eventfd, threads::perform};
use crate::nvme::tests::{
    crash,
    random::Random,
    watch::{Access, Watch},
};

/// Turns after which an owner that waits for everything gets what was lost.
const HURRY: u32 = 4;

/// How often a fault occurs: once in so many chances, 0 for never.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub seed: u64,
    /// An operation is never completed, until the owner resets the device.
    pub lost: u64,
    /// The medium takes no operations for some turns.
    pub busy: u64,
    /// It completes none for some turns.
    pub hangs: u64,
    /// An operation is refused, to be tried again.
    pub again: u64,
    /// A transfer is cut.
    pub short: u64,
    /// Turns that an operation takes at most.
    pub delay: u64,
}

struct Pending {
    tag: Tag,
    op: RawOp,
    turns: u64,
    lost: bool,
}

// SAFETY: only the kernel dereferences the pointers in `op`, to memory that `Engine::queue`'s caller keeps valid until
// the tag is reaped or the engine is dropped.
unsafe impl Send for Pending {}

/// The engine.
pub(super) struct Faulty {
    file: File,
    faults: Faults,
    random: Random,
    watch: Watch,
    queued: Vec<Pending>,
    started: Vec<Pending>,
    finished: Vec<(Tag, i32)>,
    busy: u64,
    hangs: u64,
    hurried: u32,
    /// Always readable: nobody sleeps on it for long.
    wake: OwnedFd,
}

impl Faulty {
    pub(super) fn start(file: File, faults: Faults, watch: Watch) -> io::Result<Self> {
        let wake = eventfd()?;
        rustix::io::write(&wake, &1u64.to_ne_bytes())?;
        Ok(Self {
            file,
            faults,
            random: Random(faults.seed),
            watch,
            queued: Vec::new(),
            started: Vec::new(),
            finished: Vec::new(),
            busy: 0,
            hangs: 0,
            hurried: 0,
            wake,
        })
    }

    /// Performs an operation, or with `cut` the first part of a transfer.
    fn perform(&self, tag: Tag, op: &RawOp, cut: bool) -> i32 {
        self.watch.touch(tag, &access(op));
        let part = |iovecs: *const libc::iovec, count: u32| {
            // SAFETY: `count` valid vectors, by the contract of `Engine::queue`.
            let iovecs = unsafe { std::slice::from_raw_parts(iovecs, count as usize) };
            let mut iovecs = iovecs.to_vec();
            let len: usize = iovecs.iter().map(|iovec| iovec.iov_len).sum();
            let mut left = match cut {
                true => (len / 2).next_multiple_of(512).min(len),
                false => len,
            };
            for iovec in &mut iovecs {
                iovec.iov_len = iovec.iov_len.min(left);
                left -= iovec.iov_len;
            }
            iovecs
        };
        let iovecs;
        let op = match *op {
            RawOp::Read {
                iovecs: all,
                count,
                offset,
            } => {
                iovecs = part(all, count);
                RawOp::Read {
                    iovecs: iovecs.as_ptr(),
                    count,
                    offset,
                }
            }
            RawOp::Write {
                iovecs: all,
                count,
                offset,
                durability,
            } => {
                iovecs = part(all, count);
                RawOp::Write {
                    iovecs: iovecs.as_ptr(),
                    count,
                    offset,
                    durability,
                }
            }
            RawOp::Sync => RawOp::Sync,
            RawOp::Allocate { mode, offset, len } => RawOp::Allocate { mode, offset, len },
            // A medium of this host has none of them.
            RawOp::Offloads { .. } | RawOp::Reserve { .. } | RawOp::Report { .. } => {
                return -libc::EOPNOTSUPP;
            }
        };
        // As for any engine, the vectors' memory is valid until the tag is reaped.
        perform(&self.file, op)
    }

    /// Ends an operation that nobody waits for: it is done, or not, or in part.
    fn abandon(&mut self, it: &Pending) {
        match self.random.below(3) {
            0 => {}
            n => {
                self.perform(it.tag, &it.op, n == 1);
            }
        }
        self.finished.push((it.tag, -libc::ECANCELED));
    }
}

fn access(op: &RawOp) -> Access {
    let len = |iovecs: *const libc::iovec, count: u32| {
        // SAFETY: `count` valid vectors, by the contract of `Engine::queue`.
        let iovecs = unsafe { std::slice::from_raw_parts(iovecs, count as usize) };
        iovecs.iter().map(|iovec| iovec.iov_len as u64).sum()
    };
    match *op {
        RawOp::Read {
            iovecs,
            count,
            offset,
        } => Access::Read(offset, len(iovecs, count)),
        RawOp::Write {
            iovecs,
            count,
            offset,
            ..
        } => Access::Write(offset, len(iovecs, count)),
        // The others no image has.
        RawOp::Sync | RawOp::Offloads { .. } | RawOp::Reserve { .. } | RawOp::Report { .. } => {
            Access::Sync
        }
        RawOp::Allocate { offset, len, .. } => Access::Allocate(offset, len),
    }
}

impl Engine for Faulty {
    unsafe fn queue(&mut self, tag: Tag, op: RawOp) {
        self.hurried = 0;
        self.watch.begin(tag, &access(&op));
        let turns = self.random.below(self.faults.delay + 1);
        // A flush that fails does so for good.
        let lost = !matches!(op, RawOp::Sync) && self.random.one_in(self.faults.lost);
        self.queued.push(Pending {
            tag,
            op,
            turns,
            lost,
        });
        crash::point();
    }

    fn submit(&mut self) -> bool {
        if self.queued.is_empty() {
            return true;
        }
        crash::point();
        if self.busy > 0 {
            self.busy -= 1;
            return false;
        }
        if self.random.one_in(self.faults.busy) {
            self.busy = self.random.below(4);
            return false;
        }
        self.started.append(&mut self.queued);
        true
    }

    fn reap(&mut self, done: &mut Vec<(Tag, i32)>) {
        done.append(&mut self.finished);
        if self.started.is_empty() {
            return;
        }
        crash::point();
        if self.hangs > 0 {
            self.hangs -= 1;
            return;
        }
        if self.random.one_in(self.faults.hangs) {
            self.hangs = self.random.below(20);
        }
        let mut at = 0;
        while let Some(it) = self.started.get_mut(at) {
            if it.lost || it.turns > 0 {
                it.turns = it.turns.saturating_sub(1);
                at += 1;
                continue;
            }
            let it = self.started.swap_remove(at);
            let is_flush = matches!(it.op, RawOp::Sync);
            let result = match self.random.one_in(self.faults.again) {
                true => -libc::EAGAIN,
                // The kernel reports a failure once, to whichever process asks.
                false if is_flush && self.watch.takes_flush_failure() => -libc::EIO,
                false => {
                    let cut = self.random.one_in(self.faults.short);
                    self.perform(it.tag, &it.op, cut)
                }
            };
            if is_flush && result == 0 {
                self.watch.flushed(it.tag);
            }
            done.push((it.tag, result));
            crash::point();
        }
    }

    fn has_finished(&mut self) -> bool {
        !self.finished.is_empty() || self.started.iter().any(|it| !it.lost)
    }

    fn is_connected(&self) -> bool {
        true
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn wait(&mut self) {}

    fn condition(&self) -> Condition {
        super::condition(&self.file)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn hurry(&mut self, now: bool) {
        self.hurried += 1;
        let is_over = |it: &mut Pending| now || it.lost && self.hurried > HURRY;
        let over: Vec<_> = self.started.extract_if(.., is_over).collect();
        let never_started = self.queued.extract_if(.., |_| now).collect::<Vec<_>>();
        for it in over.iter().chain(&never_started) {
            self.abandon(it);
        }
    }
}
