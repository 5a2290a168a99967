//! Memory that another process may change: addressed for the kernel, and copied by its address.
#![allow(unsafe_code)]

#[cfg(doc)]
use crate::Link;

/// Most vectors of a system call.
const VECTORS: usize = 64;

/// The memory of a frame's data.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    iovecs: *const libc::iovec,
    count: usize,
}

impl Memory {
    /// No memory, for frames without data.
    pub const NONE: Self = Self {
        iovecs: std::ptr::null(),
        count: 0,
    };

    /// No memory for data that nobody waits for.
    pub const DISCARD: Self = Self {
        iovecs: std::ptr::null(),
        count: usize::MAX,
    };

    /// Whether it is [`Memory::DISCARD`].
    pub(crate) fn is_discard(&self) -> bool {
        self.iovecs.is_null() && self.count > 0
    }

    /// `count` vectors at `iovecs`, in the order of the data.
    ///
    /// # Safety
    /// The vectors and the memory that they name must stay allocated, writable if data is received into
    /// it, until the link that they are passed to has sent the frame ([`Link::sent`]), has returned the
    /// received frame ([`Link::receive`]), or is dropped. (Other processes may change the bytes.)
    pub unsafe fn new(iovecs: *const libc::iovec, count: usize) -> Self {
        Self { iovecs, count }
    }
}

/// A position in a frame's memory.
#[derive(Debug)]
pub(crate) struct Cursor {
    memory: Memory,
    /// The vector.
    at: usize,
    /// Bytes of it that are done.
    skip: usize,
    /// Bytes left.
    pub(crate) left: usize,
}

// SAFETY: the pointers are used by the thread that calls the link, one at a time; what they point to
// stays valid by the contract of `Memory::new`, which names no thread.
unsafe impl Send for Cursor {}

impl Cursor {
    pub(crate) fn new(memory: Memory, left: usize) -> Self {
        Self {
            memory,
            at: 0,
            skip: 0,
            left,
        }
    }

    /// The rest of the vector `n` from here, with at most `most` bytes.
    fn vector(&self, n: usize, most: usize) -> Option<libc::iovec> {
        let at = self.at + n;
        if at >= self.memory.count || most == 0 {
            return None;
        }
        // SAFETY: `at` is below the number of valid vectors (`Memory::new`).
        let libc::iovec { iov_base, iov_len } = unsafe { *self.memory.iovecs.add(at) };
        let skip = if n == 0 { self.skip } else { 0 };
        Some(libc::iovec {
            iov_base: iov_base.cast::<u8>().wrapping_add(skip).cast(),
            iov_len: (iov_len - skip).min(most),
        })
    }

    /// Appends what is left to `vectors`. Returns whether all of it.
    pub(crate) fn append(&self, vectors: &mut Vectors) -> bool {
        let mut left = self.left;
        let mut n = 0;
        while left > 0 {
            match self.vector(n, left) {
                Some(vector) if vectors.push(vector) => left -= vector.iov_len,
                _ => return false,
            }
            n += 1;
        }
        true
    }

    /// Whether the memory has room for what is left.
    pub(crate) fn is_covered(&self) -> bool {
        let mut left = self.left;
        let mut n = 0;
        while let Some(vector) = self.vector(n, left) {
            left -= vector.iov_len;
            n += 1;
        }
        left == 0
    }

    pub(crate) fn advance(&mut self, mut bytes: usize) {
        self.left -= bytes;
        while bytes > 0 {
            let Some(vector) = self.vector(0, usize::MAX) else {
                return;
            };
            let step = bytes.min(vector.iov_len);
            bytes -= step;
            self.skip += step;
            if step == vector.iov_len {
                self.at += 1;
                self.skip = 0;
            }
        }
    }

    /// Copies up to `most` bytes of the memory to the end of `into`.
    pub(crate) fn copy_out(&mut self, into: &mut Vec<u8>, most: usize) -> usize {
        let mut done = 0;
        while done < most.min(self.left) {
            let most = (most - done).min(self.left);
            let Some(vector) = self.vector(0, most) else {
                break;
            };
            into.reserve(vector.iov_len);
            let spare = into.spare_capacity_mut();
            // SAFETY: the vector names `iov_len` bytes of valid memory (`Memory::new`), which `into`
            // is not part of and has reserved room for. Their values may be any, also while they are
            // copied: they are plain bytes that nothing is decided by.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    vector.iov_base.cast::<u8>(),
                    spare.as_mut_ptr().cast(),
                    vector.iov_len,
                );
                into.set_len(into.len() + vector.iov_len);
            }
            self.advance(vector.iov_len);
            done += vector.iov_len;
        }
        done
    }

    /// Copies from `from` to the memory.
    pub(crate) fn copy_in(&mut self, mut from: &[u8]) -> usize {
        let all = from.len();
        while let Some(vector) = self.vector(0, from.len().min(self.left)) {
            let (now, rest) = from.split_at(vector.iov_len);
            // SAFETY: the vector names `iov_len` bytes of valid, writable memory (`Memory::new`), as
            // many as `now` has, which is memory of this link.
            unsafe {
                std::ptr::copy_nonoverlapping(now.as_ptr(), vector.iov_base.cast(), now.len());
            }
            self.advance(now.len());
            from = rest;
        }
        all - from.len()
    }
}

/// The vectors of one system call.
pub(crate) struct Vectors {
    pub(crate) vectors: [libc::iovec; VECTORS],
    pub(crate) count: usize,
}

impl Vectors {
    pub(crate) fn new() -> Self {
        let none = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            vectors: [none; VECTORS],
            count: 0,
        }
    }

    pub(crate) fn push(&mut self, vector: libc::iovec) -> bool {
        let room = self.vectors.get_mut(self.count);
        let fits = room.map(|room| *room = vector).is_some();
        self.count += usize::from(fits);
        fits
    }
}
