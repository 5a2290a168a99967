//! One tag's transfer, with continuation after short I/O and fallbacks for unsupported
//! operations.

use farside_fabric::memory::HostSlice;
use farside_medium::REFUSED;

use super::{BlockError, BlockQueue, Durability, PUNCH_HOLE, RawOp, ZERO_RANGE};

/// Most vectors of one system call (`IOV_MAX`).
const MAX_IOVECS: usize = 1024;

/// Most retries of an interrupted operation that moved no data.
const MAX_RETRIES: u8 = 16;

const ZEROES: usize = 64 << 10;
static ZERO: [u8; ZEROES] = [0; ZEROES];

/// The job of a transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Job {
    #[default]
    Idle,
    ReadGuest {
        offset: u64,
    },
    WriteGuest {
        offset: u64,
        durability: Durability,
    },
    ReadScratch {
        offset: u64,
        len: usize,
    },
    Flush,
    /// fallocate(2).
    Allocate {
        mode: i32,
        offset: u64,
        len: u64,
    },
    /// Zeroes by the first supported method.
    Zero {
        offset: u64,
        len: u64,
        method: ZeroMethod,
        punch: bool,
    },
    /// Sends the request in the scratch memory.
    Reserve,
    /// Reads a report into guest memory.
    Report {
        extended: bool,
    },
    /// Of a tap interface.
    Offloads {
        bits: u32,
        discard: bool,
    },
}

/// Methods to zero a range, in the order of attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ZeroMethod {
    /// `fallocate`: a hole with `punch`, else FALLOC_FL_ZERO_RANGE.
    First,
    /// `fallocate` with the other flag.
    Second,
    /// Writes of zeroes.
    Write,
}

impl Job {
    pub(super) fn zero(offset: u64, len: u64, punch: bool) -> Self {
        Job::Zero {
            offset,
            len,
            method: ZeroMethod::First,
            punch,
        }
    }
}

/// The next step after a finished system call.
pub(super) enum Step {
    Continue(RawOp),
    Done(Result<(), BlockError>),
}

/// A tag's memory and progress.
#[derive(Default)]
pub(super) struct Transfer {
    /// `Idle` when the tag is not in flight.
    job: Job,
    slices: Vec<HostSlice>,
    /// The vectors of the transfer. The kernel reads them while the tag is in flight.
    iovecs: Vec<libc::iovec>,
    /// Index of the first unfinished vector.
    next: usize,
    /// Bytes transferred.
    moved: u64,
    scratch: Vec<u8>,
    retries: u8,
    /// Reservations have aborted it, with these bits of a status.
    aborted: Option<u16>,
}

// SAFETY: `iovecs` holds the only pointers. They point to memory that `slices` and
// `scratch` of the same transfer own, or to a static, and only the kernel dereferences
// them; so a transfer can move between threads as its parts can.
unsafe impl Send for Transfer {}

impl Transfer {
    fn assert_idle(&self) {
        assert!(
            matches!(self.job, Job::Idle),
            "the kernel is using this transfer's memory"
        );
    }

    pub(super) fn slices_mut(&mut self) -> &mut Vec<HostSlice> {
        self.assert_idle();
        &mut self.slices
    }

    pub(super) fn scratch(&self) -> (&[u8], &[HostSlice]) {
        self.assert_idle();
        (&self.scratch, &self.slices)
    }

    /// Puts a request into the scratch memory.
    pub(super) fn set_scratch(&mut self, bytes: Vec<u8>) {
        self.assert_idle();
        self.scratch = bytes;
    }

    /// Whether guest memory of it was replaced by zero pages meanwhile: the data is not the guest's.
    pub(super) fn has_lost_memory(&self) -> bool {
        self.slices.iter().any(|slice| slice.memory().is_gone())
    }

    pub(super) fn release(&mut self) {
        self.assert_idle();
        self.slices.clear();
        self.iovecs.clear();
        self.scratch = Vec::new();
    }

    /// The bytes of a job on this idle transfer that count against limits.
    pub(super) fn cost(&self, job: &Job, writes_zeroes: bool) -> u64 {
        match *job {
            Job::ReadGuest { .. } | Job::WriteGuest { .. } => {
                self.slices.iter().map(|slice| slice.len() as u64).sum()
            }
            Job::ReadScratch { len, .. } => len as u64,
            Job::Zero { len, .. }
            | Job::Allocate {
                mode: ZERO_RANGE,
                len,
                ..
            } if writes_zeroes => len,
            Job::Idle
            | Job::Flush
            | Job::Reserve
            | Job::Report { .. }
            | Job::Allocate { .. }
            | Job::Zero { .. }
            | Job::Offloads { .. } => 0,
        }
    }

    /// The bytes of zeroes that a system call with this result has written.
    pub(super) fn zeroes_written(&self, result: i32) -> u64 {
        match self.job {
            Job::Zero {
                method: ZeroMethod::Write,
                ..
            } => u64::try_from(result).unwrap_or(0),
            _ => 0,
        }
    }

    /// Starts a job on an idle transfer; `None` if it is empty.
    pub(super) fn begin(&mut self, job: Job) -> Option<RawOp> {
        self.assert_idle();
        self.iovecs.clear();
        self.next = 0;
        self.moved = 0;
        self.retries = 0;
        self.aborted = None;
        match job {
            Job::Idle => return None,
            Job::ReadGuest { .. } | Job::WriteGuest { .. } | Job::Report { .. } => {
                self.iovecs_from_slices();
            }
            Job::ReadScratch { len, .. } => {
                let len = len.min(BlockQueue::SCRATCH);
                self.scratch.clear();
                self.scratch.resize(len, 0);
                self.iovec_from_scratch();
            }
            Job::Reserve => self.iovec_from_scratch(),
            Job::Flush | Job::Allocate { .. } | Job::Zero { .. } | Job::Offloads { .. } => {}
        }
        let op = Self::op(&job, &self.iovecs, self.next, self.moved)?;
        self.job = job;
        Some(op)
    }

    fn iovec_from_scratch(&mut self) {
        self.iovecs.push(libc::iovec {
            iov_base: self.scratch.as_mut_ptr().cast(),
            iov_len: self.scratch.len(),
        });
    }

    /// Builds one vector for each range that is contiguous in host memory.
    fn iovecs_from_slices(&mut self) {
        for slice in self.slices.iter().filter(|s| !s.is_empty()) {
            let base = slice.as_ptr();
            match self.iovecs.last_mut() {
                Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
                    last.iov_len += slice.len();
                }
                _ => self.iovecs.push(libc::iovec {
                    iov_base: base.cast(),
                    iov_len: slice.len(),
                }),
            }
        }
    }

    fn op(job: &Job, iovecs: &[libc::iovec], next: usize, moved: u64) -> Option<RawOp> {
        let rest = &iovecs[next..];
        let count = rest.len().min(MAX_IOVECS) as u32;
        let iovecs = rest.as_ptr();
        match *job {
            Job::Idle => None,
            Job::ReadGuest { offset } | Job::ReadScratch { offset, .. } => {
                (count > 0).then_some(RawOp::Read {
                    iovecs,
                    count,
                    offset: offset + moved,
                })
            }
            Job::WriteGuest { offset, durability } => (count > 0).then_some(RawOp::Write {
                iovecs,
                count,
                offset: offset + moved,
                durability,
            }),
            Job::Flush => Some(RawOp::Sync),
            Job::Allocate { mode, offset, len } => Some(RawOp::Allocate { mode, offset, len }),
            Job::Reserve => Some(RawOp::Reserve { iovecs, count }),
            Job::Report { extended } => (count > 0).then_some(RawOp::Report {
                iovecs,
                count,
                extended,
            }),
            Job::Offloads { bits, discard } => Some(RawOp::Offloads { bits, discard }),
            Job::Zero {
                offset,
                len,
                method,
                punch,
            } => {
                let hole = (method == ZeroMethod::First) == punch;
                match method {
                    ZeroMethod::Write => (count > 0).then_some(RawOp::Write {
                        iovecs,
                        count,
                        offset: offset + moved,
                        durability: Durability::Cached,
                    }),
                    _ => Some(RawOp::Allocate {
                        mode: if hole { PUNCH_HOLE } else { ZERO_RANGE },
                        offset,
                        len,
                    }),
                }
            }
        }
    }

    /// Ends a transfer in flight with its current step, unless it is a request.
    pub(super) fn abort(&mut self, status: u16) {
        if !matches!(self.job, Job::Idle | Job::Reserve | Job::Report { .. }) {
            self.aborted = Some(status);
        }
    }

    /// Handles the result of the system call: bytes, or a negative errno.
    pub(super) fn finish(&mut self, result: i32) -> Step {
        if let Some(status) = self.aborted {
            self.job = Job::Idle;
            return Step::Done(Err(match error_of(result.saturating_neg()) {
                refused @ BlockError::Refused(_) => refused,
                _ => BlockError::Refused(status),
            }));
        }
        match self.advance(result) {
            Ok(true) => {
                self.job = Job::Idle;
                Step::Done(Ok(()))
            }
            Ok(false) => match Self::op(&self.job, &self.iovecs, self.next, self.moved) {
                Some(op) => Step::Continue(op),
                None => {
                    self.job = Job::Idle;
                    Step::Done(Ok(()))
                }
            },
            Err(error) => {
                self.job = Job::Idle;
                Step::Done(Err(error))
            }
        }
    }

    /// Handles the result of the only system call for a frame.
    pub(super) fn finish_frame(&mut self, result: i32) -> Step {
        self.job = Job::Idle;
        self.moved = u64::try_from(result).unwrap_or(0);
        Step::Done(match result {
            0.. => Ok(()),
            _ => Err(error_of(result.saturating_neg())),
        })
    }

    /// The bytes that the last job has transferred, or the result of a request.
    pub(super) fn moved(&self) -> u64 {
        self.moved
    }

    /// Returns whether the job is complete.
    fn advance(&mut self, result: i32) -> Result<bool, BlockError> {
        if result < 0 {
            return self.refused(result.saturating_neg()).map(|()| false);
        }
        self.retries = 0;
        match self.job {
            Job::Idle | Job::Flush | Job::Allocate { .. } | Job::Offloads { .. } => Ok(true),
            Job::Zero {
                len,
                method: ZeroMethod::Write,
                ..
            } => {
                self.consume(result as usize)?;
                if self.next == self.iovecs.len() && self.moved < len {
                    self.zero_iovecs(len - self.moved);
                }
                Ok(self.moved == len)
            }
            Job::Zero { .. } => Ok(true),
            Job::Reserve => {
                self.moved = result as u64;
                Ok(true)
            }
            Job::Report { .. } => {
                self.consume(result as usize)?;
                // Another one would begin anew.
                match self.next == self.iovecs.len() {
                    true => Ok(true),
                    false => Err(BlockError::EndsEarly),
                }
            }
            Job::ReadGuest { .. } | Job::WriteGuest { .. } | Job::ReadScratch { .. } => {
                self.consume(result as usize)?;
                Ok(self.next == self.iovecs.len())
            }
        }
    }

    /// Advances over `bytes` that the kernel has transferred. Zero means that the image is
    /// too short.
    fn consume(&mut self, mut bytes: usize) -> Result<(), BlockError> {
        if bytes == 0 {
            return Err(BlockError::EndsEarly);
        }
        self.moved += bytes as u64;
        while bytes > 0 {
            let Some(iovec) = self.iovecs.get_mut(self.next) else {
                return Err(BlockError::Medium(libc::EIO));
            };
            let step = bytes.min(iovec.iov_len);
            bytes -= step;
            iovec.iov_len -= step;
            iovec.iov_base = iovec.iov_base.cast::<u8>().wrapping_add(step).cast();
            if iovec.iov_len == 0 {
                self.next += 1;
            }
        }
        Ok(())
    }

    /// Vectors for up to 64 MiB of zeroes.
    fn zero_iovecs(&mut self, len: u64) {
        self.iovecs.clear();
        self.next = 0;
        let mut left = len.min((ZEROES * MAX_IOVECS) as u64) as usize;
        while left > 0 {
            let part = left.min(ZEROES);
            self.iovecs.push(libc::iovec {
                // Used for writes only: the kernel does not modify it.
                iov_base: ZERO.as_ptr().cast_mut().cast(),
                iov_len: part,
            });
            left -= part;
        }
    }

    /// Handles an error. Returns `Ok` to continue, perhaps with another method.
    fn refused(&mut self, errno: i32) -> Result<(), BlockError> {
        if let Job::Zero {
            len,
            ref mut method,
            ..
        } = self.job
            && matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)
            && *method != ZeroMethod::Write
        {
            let last = *method == ZeroMethod::Second;
            *method = if last {
                ZeroMethod::Write
            } else {
                ZeroMethod::Second
            };
            if last {
                self.zero_iovecs(len);
            }
            return Ok(());
        }
        match errno {
            libc::EINTR | libc::EAGAIN if self.retries < MAX_RETRIES => {
                self.retries += 1;
                Ok(())
            }
            _ => Err(error_of(errno)),
        }
    }
}

fn error_of(errno: i32) -> BlockError {
    match errno {
        libc::EFAULT => BlockError::GuestMemory,
        libc::ENOSPC | libc::EDQUOT => BlockError::NoSpace,
        libc::EOPNOTSUPP | libc::ENOSYS => BlockError::Unsupported,
        libc::EROFS | libc::EPERM => BlockError::ReadOnly,
        libc::ECANCELED => BlockError::Unreachable,
        REFUSED.. => BlockError::Refused((errno - REFUSED) as u16),
        _ => BlockError::Medium(errno),
    }
}
