//! The state of a device, as of its last answered request.

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::system::Area;

const PAGE: usize = 4096;

/// Most bytes of a snapshot.
const MOST: usize = 4 << 20;

pub(crate) const BYTES: usize = PAGE + 2 * MOST;

/// Two snapshots, of which one is current.
///
/// A new one is [staged](Self::stage), and becomes current with the next commit of the [`Journal`](crate::Journal): so it
/// is never seen without the answer to the request that led to it, nor that without it.
pub struct Snapshots {
    area: Area,
    /// The one to be written next.
    next: usize,
    /// It has been.
    written: bool,
    /// Its number and 1, until a commit makes it current.
    staged: Arc<AtomicUsize>,
}

impl Snapshots {
    /// `current` is the one that the journal names.
    pub(crate) fn new(area: Area, current: Option<usize>, staged: Arc<AtomicUsize>) -> Self {
        Self {
            area,
            next: current.map_or(0, |current| current ^ 1),
            written: false,
            staged,
        }
    }

    /// The current one, of the process before.
    pub fn inherited(&self) -> &[u8] {
        let current = self.next ^ 1;
        let len = self.area.word(8 * current).load(Ordering::Acquire);
        let len = usize::try_from(len).unwrap_or(MOST).min(MOST);
        let start = PAGE + current * MOST;
        self.area.bytes(start..start + len)
    }

    /// Stages a snapshot. One that was staged and is not current yet is replaced.
    ///
    /// # Errors
    ///
    /// If it is too long; then the state of the device cannot be taken over until the next one.
    pub fn stage(&mut self, bytes: &[u8]) -> io::Result<()> {
        // Once it is current it stays as it is until another one is.
        if self.written && self.staged.load(Ordering::Acquire) == 0 {
            self.next ^= 1;
        }
        self.written = true;
        let fits = bytes.len() <= MOST;
        let bytes = if fits { bytes } else { &[] };
        let start = PAGE + self.next * MOST;
        self.area
            .bytes_mut(start..start + bytes.len())
            .copy_from_slice(bytes);
        self.area
            .word(8 * self.next)
            .store(bytes.len() as u64, Ordering::Release);
        self.staged.store(self.next + 1, Ordering::Release);
        match fits {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "the state of the device takes more than {MOST} bytes"
            ))),
        }
    }
}

impl fmt::Debug for Snapshots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Snapshots")
    }
}
