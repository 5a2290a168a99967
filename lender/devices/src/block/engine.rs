//! What moves data between a medium and memory, by system calls or over a connection.

use std::{io, os::fd::BorrowedFd};

use farside_medium::{Condition, HostIdentity, Notifications};

use super::{Durability, Tag};
#[cfg(doc)]
use super::{Offloads, transfer::Transfer};

/// An operation of an engine, on the vectors of the [`Transfer`] that made it. Not `Clone`: it is
/// queued once.
#[derive(Debug)]
pub(super) enum RawOp {
    Read {
        iovecs: *const libc::iovec,
        count: u32,
        offset: u64,
    },
    Write {
        iovecs: *const libc::iovec,
        count: u32,
        offset: u64,
        durability: Durability,
    },
    /// `fdatasync`.
    Sync,
    /// `fallocate` with `mode`.
    Allocate { mode: i32, offset: u64, len: u64 },
    /// Of a shared namespace at another host: a request for its lender, in the vectors.
    Reserve {
        iovecs: *const libc::iovec,
        count: u32,
    },
    /// Of a shared namespace at another host: the report on its reservations.
    Report {
        iovecs: *const libc::iovec,
        count: u32,
        extended: bool,
    },
    /// Of a tap interface: [`Offloads`]. With `discard`, what came before is for nobody.
    Offloads { bits: u32, discard: bool },
}

/// An I/O engine.
///
/// Guaranteed by the caller: at most `depth` tags in flight, each once.
/// Guaranteed by the engine: `reap` returns each queued tag exactly once, and only after
/// the kernel's last access to its memory; dropping the engine waits for that for all
/// tags.
pub(super) trait Engine: Send {
    /// Queues an operation; [`Engine::submit`] starts it.
    ///
    /// # Safety
    ///
    /// The `iovecs` and their memory must stay allocated, and be
    /// neither moved nor freed, until `reap` has returned `tag` or the
    /// engine has been dropped. (The guest may change the bytes or shrink
    /// the file behind them: only the kernel accesses them.)
    unsafe fn queue(&mut self, tag: Tag, op: RawOp);

    /// Starts the queued operations. Returns whether all were started; the others stay
    /// queued for the next call.
    fn submit(&mut self) -> bool;

    /// Appends the finished tags with the system call's result: bytes, or a
    /// negative errno.
    fn reap(&mut self, done: &mut Vec<(Tag, i32)>);

    /// Whether `reap` would return a tag. Clears stale readiness of `wake_fd`.
    fn has_finished(&mut self) -> bool;

    /// Readable when an operation has finished.
    fn wake_fd(&self) -> BorrowedFd<'_>;

    /// Blocks until a started operation has finished, or a signal arrives.
    fn wait(&mut self);

    /// The medium's condition. Values that cannot be queried count as good.
    fn condition(&self) -> Condition;

    /// Flushes all completed writes to the medium, and waits.
    fn sync(&self) -> io::Result<()>;

    /// The owner waits for everything in flight: an engine whose medium may be out of reach finishes
    /// what it cannot complete soon, with ECANCELED; at once if it is `now`.
    fn hurry(&mut self, _now: bool) {}

    /// On whose behalf the operations are that are queued from now on: of interest for a lender in another host.
    fn set_host(&mut self, _host: HostIdentity) {}

    /// Whether a lender in another host has aborted what was in flight, and waits for [`Engine::fence`].
    fn wants_fence(&self) -> bool {
        false
    }

    /// All that was in flight has ended.
    fn fence(&mut self) {}

    /// The size of the medium that a lender in another host has reported since the last call. It may be any size: that lender
    /// is not trusted.
    fn take_size(&mut self) -> Option<u64> {
        None
    }

    /// The owner has the reservation notifications up to this number, of a lender in another host, and waits for those after it;
    /// `None`: in a session that has begun, for those that come from now on.
    fn set_notified(&mut self, _upto: Option<u64>) {}

    /// The notifications that have come, once.
    fn take_notifications(&mut self) -> Option<Notifications> {
        None
    }

    /// The engine is about to be dropped. Finishes all reads with ECANCELED: of frames, which may never come.
    fn cancel_reads(&mut self) {}

    /// Whether the medium can be reached: of another host it may not, and then operations wait.
    fn is_connected(&self) -> bool;
}
