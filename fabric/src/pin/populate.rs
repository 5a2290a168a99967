//! Having the kernel back memory with pages, by several threads: each takes one
//! chunk after the other.

use std::{
    io,
    num::NonZeroUsize,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use super::{PinError, PinOptions, PinProgress, Pinned};
use crate::mapping::Residency;

/// Bytes per worker between two checks of the deadline: some 4 ms where pages must be zeroed first,
/// and not too long where others use the CPU as well.
const CHUNK: usize = 16 << 20;

/// Workers beyond this many wait for each other's zeroing.
const MAX_WORKERS: usize = 16;

impl Pinned {
    fn chunk_size(&self) -> usize {
        CHUNK.max(self.page_size as usize)
    }

    fn chunks(&self) -> usize {
        self.mapping.len().div_ceil(self.chunk_size())
    }

    /// Has a part of it backed with memory.
    fn populate(&self, start: usize, len: usize) -> Result<(), PinError> {
        // What a read brings into tmpfs is all that a write needs, and where
        // the pages are there already it maps many at a time.
        let populate = match self.writable && self.hugetlb {
            true => Residency::PopulateWrite,
            false => Residency::PopulateRead,
        };
        retry(|| self.mapping.make(populate, start, len)).map_err(|source| PinError::Populate {
            offset: self.offset + start as u64,
            len: len as u64,
            source,
        })
    }
}

/// The work of all threads: a queue of chunks.
pub(super) struct Job<'a> {
    ranges: &'a [Pinned],
    /// Number of the first chunk of each range.
    first_chunk: Vec<usize>,
    chunks: usize,
    total: u64,
    options: &'a PinOptions<'a>,
    began: Instant,
    next: AtomicUsize,
    done: AtomicU64,
    failed: AtomicBool,
    error: Mutex<Option<PinError>>,
}

impl<'a> Job<'a> {
    pub(super) fn new(ranges: &'a [Pinned], options: &'a PinOptions<'a>, began: Instant) -> Self {
        let mut chunks = 0;
        let first_chunk = ranges
            .iter()
            .map(|range| {
                let first = chunks;
                chunks += range.chunks();
                first
            })
            .collect();
        Self {
            ranges,
            first_chunk,
            chunks,
            total: ranges.iter().map(|range| range.mapping.len() as u64).sum(),
            options,
            began,
            next: AtomicUsize::new(0),
            done: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
        }
    }

    /// Does all chunks, in this thread and others.
    pub(super) fn run(&self) -> Result<(), PinError> {
        let cpus = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let workers = match self.options.workers {
            Some(workers) => workers.get(),
            None => cpus().min(MAX_WORKERS),
        };
        thread::scope(|scope| {
            // This thread is a worker, too. Fewer others than requested make it
            // slower, not wrong.
            for _ in 1..workers.min(self.chunks) {
                let builder = thread::Builder::new().name("pin".into());
                if let Err(error) = builder.spawn_scoped(scope, || self.work()) {
                    log::warn!("pinning with fewer threads: {error}");
                    break;
                }
            }
            self.work();
        });
        let error = self
            .error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        error.map_or(Ok(()), Err)
    }

    fn work(&self) {
        while !self.failed.load(Ordering::Relaxed) {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.chunks {
                return;
            }
            if let Err(error) = self.may_go_on().and_then(|()| self.pin(chunk)) {
                self.failed.store(true, Ordering::Relaxed);
                let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
            }
        }
    }

    fn may_go_on(&self) -> Result<(), PinError> {
        let (done, total) = (self.done.load(Ordering::Relaxed), self.total);
        if self
            .options
            .cancel
            .is_some_and(|flag| flag.load(Ordering::Relaxed))
        {
            return Err(PinError::Cancelled { done, total });
        }
        if self.options.deadline.is_some_and(|at| Instant::now() >= at) {
            return Err(PinError::Deadline {
                done,
                total,
                elapsed: self.began.elapsed(),
            });
        }
        self.options.room.map_or(Ok(()), |room| room())
    }

    fn pin(&self, chunk: usize) -> Result<(), PinError> {
        let index = self.first_chunk.partition_point(|&first| first <= chunk) - 1;
        let range = &self.ranges[index];
        let start = (chunk - self.first_chunk[index]) * range.chunk_size();
        let len = range.chunk_size().min(range.mapping.len() - start);

        range.populate(start, len)?;
        let done = self.done.fetch_add(len as u64, Ordering::Relaxed) + len as u64;
        if let Some(progress) = self.options.progress {
            progress(PinProgress {
                done,
                total: self.total,
            });
        }
        Ok(())
    }
}

/// Repeats `call` when a signal has interrupted it.
fn retry(mut call: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
