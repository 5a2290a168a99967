//! I/O by a small pool of threads, for hosts without io_uring.
//!
//! The calling thread performs a read that the page cache can serve (`RWF_NOWAIT`); all
//! other operations go to the pool.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use farside_medium::Condition;

use super::{Durability, Engine, NO_MODE, RawOp, Tag, eventfd, last_errno, raw};

/// Threads of the pool: enough to overlap the medium's latency.
const THREADS: usize = 4;

struct Job {
    tag: Tag,
    op: RawOp,
}

// SAFETY: only the kernel dereferences the pointers in `op`, to memory that
// `Engine::queue`'s caller keeps valid until the job is reaped.
unsafe impl Send for Job {}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    done: Vec<(Tag, i32)>,
    stopping: bool,
}

struct Shared {
    file: Arc<File>,
    state: Mutex<State>,
    work: Condvar,
    finished: Condvar,
    /// Eventfd, signalled when `done` becomes non-empty.
    wake: OwnedFd,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Threads {
    shared: Arc<Shared>,
    pool: Vec<JoinHandle<()>>,
    /// Not yet passed to the pool.
    queued: Vec<Job>,
    /// Done in the calling thread.
    inline: Vec<(Tag, i32)>,
    /// Passed to the pool and not reaped.
    in_flight: usize,
}

impl Threads {
    pub(super) fn start(file: Arc<File>, depth: u16) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            file,
            state: Mutex::new(State {
                jobs: VecDeque::with_capacity(depth.into()),
                done: Vec::with_capacity(depth.into()),
                stopping: false,
            }),
            work: Condvar::new(),
            finished: Condvar::new(),
            wake: eventfd()?,
        });
        let mut engine = Self {
            shared,
            pool: Vec::new(),
            queued: Vec::with_capacity(depth.into()),
            inline: Vec::with_capacity(depth.into()),
            in_flight: 0,
        };
        for number in 0..THREADS {
            let shared = Arc::clone(&engine.shared);
            engine.pool.push(
                std::thread::Builder::new()
                    .name(format!("nvme-io-{number}"))
                    .spawn(move || serve(&shared))?,
            );
        }
        Ok(engine)
    }

    fn try_inline(&self, op: &RawOp) -> Option<i32> {
        let RawOp::Read {
            iovecs,
            count,
            offset,
        } = *op
        else {
            return None;
        };
        // SAFETY: `count` valid iovecs, by the contract of `Engine::queue`; only the
        // kernel accesses their memory, with EFAULT where it is no longer mapped.
        let bytes = unsafe {
            libc::preadv2(
                raw(&self.shared.file),
                iovecs,
                count as i32,
                offset as i64,
                libc::RWF_NOWAIT,
            )
        };
        (bytes > 0).then_some(bytes as i32)
    }
}

fn serve(shared: &Shared) {
    let mut state = shared.state();
    loop {
        while let Some(job) = state.jobs.pop_front() {
            drop(state);
            let result = perform(&shared.file, job.op);
            state = shared.state();
            state.done.push((job.tag, result));
            if state.done.len() == 1 {
                // Cannot fail: the counter is far below its maximum.
                let _ = rustix::io::write(&shared.wake, &1u64.to_ne_bytes());
                shared.finished.notify_all();
            }
        }
        if state.stopping {
            return;
        }
        state = shared
            .work
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner);
    }
}

/// Performs one operation; bytes or a negative errno.
pub(super) fn perform(file: &File, op: RawOp) -> i32 {
    let fd = raw(file);
    // SAFETY: the iovecs are valid until the job is reaped, by the contract of
    // `Engine::queue`, which is after this. Only the kernel accesses their memory, with
    // EFAULT where it is no longer mapped. The other calls take no pointers.
    let result = unsafe {
        match op {
            RawOp::Read {
                iovecs,
                count,
                offset,
            } => libc::preadv(fd, iovecs, count as i32, offset as i64),
            RawOp::Write {
                iovecs,
                count,
                offset,
                durability,
            } => {
                let flags = match durability {
                    Durability::Cached => 0,
                    Durability::Durable => libc::RWF_DSYNC,
                };
                libc::pwritev2(fd, iovecs, count as i32, offset as i64, flags)
            }
            RawOp::Sync => libc::fdatasync(fd) as isize,
            RawOp::Allocate { mode, offset, len } => {
                libc::fallocate(fd, mode, offset as i64, len as i64) as isize
            }
            RawOp::Offloads { .. } | RawOp::Reserve { .. } | RawOp::Report { .. } => {
                libc::fallocate(fd, NO_MODE, 0, 1) as isize
            }
        }
    };
    match result {
        0.. => result as i32,
        _ => last_errno(),
    }
}

impl Engine for Threads {
    unsafe fn queue(&mut self, tag: Tag, op: RawOp) {
        self.queued.push(Job { tag, op });
    }

    fn submit(&mut self) -> bool {
        let mut queued = std::mem::take(&mut self.queued);
        queued.retain(|job| match self.try_inline(&job.op) {
            Some(bytes) => {
                self.inline.push((job.tag, bytes));
                false
            }
            None => true,
        });
        if !queued.is_empty() {
            self.in_flight += queued.len();
            let wake = queued.len();
            self.shared.state().jobs.extend(queued.drain(..));
            if wake == 1 {
                self.shared.work.notify_one();
            } else {
                self.shared.work.notify_all();
            }
        }
        // Keeps its capacity.
        self.queued = queued;
        true
    }

    fn reap(&mut self, done: &mut Vec<(Tag, i32)>) {
        done.append(&mut self.inline);
        if self.in_flight > 0 {
            let mut state = self.shared.state();
            self.in_flight -= state.done.len();
            done.append(&mut state.done);
        }
    }

    fn has_finished(&mut self) -> bool {
        // Cleared before the check, so that a later completion signals it again.
        // EAGAIN: already clear.
        let _ = rustix::io::read(&self.shared.wake, &mut [0u8; 8]);
        !self.inline.is_empty() || !self.shared.state().done.is_empty()
    }

    fn is_connected(&self) -> bool {
        true
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    fn condition(&self) -> Condition {
        super::condition(&self.shared.file)
    }

    fn sync(&self) -> io::Result<()> {
        self.shared.file.sync_data()
    }

    fn wait(&mut self) {
        let state = self.shared.state();
        if self.in_flight > 0 && self.inline.is_empty() && state.done.is_empty() {
            drop(
                self.shared
                    .finished
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
            );
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.state().stopping = true;
        self.shared.work.notify_all();
        for thread in self.pool.drain(..) {
            // A thread that panicked no longer accesses the memory.
            let _ = thread.join();
        }
    }
}
