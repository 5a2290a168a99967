//! The file with the records of one device.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Release},
    },
};

use farside_hand_over::{Format, WRITER, read_writer, writer};
use rustix::{
    fs::{MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, fstat, ftruncate, memfd_create, seek},
    io::{Errno, pread, pwrite},
};

use crate::{Journal, Snapshots, Words, journal, snapshots, system::Area};

/// The format of the records: of this file, of the [`Journal`] in it, and of what the backend puts into snapshots, lease and
/// log. See docs/hand-over-state.md before changing one of them.
///
/// | version | new in it |
/// | --- | --- |
/// | 2 | the version of farside, the size of an expansion ROM |
pub const RECORDS: Format = Format::new("the record of a device", 2);

/// The first word, but for the version.
const MAGIC: u64 = u64::from_le_bytes(*b"farside\0");

/// Words of the header: the version of farside, 0 in version 1.
const FARSIDE: usize = 8;

const PAGE: usize = 4096;

/// Bytes that are copied at a time.
const CHUNK: usize = 64 << 10;

/// Words of the [lease](DeviceFile::lease).
pub const LEASE_WORDS: usize = PAGE / 8;

/// Words of the [log](DeviceFile::log) of register writes.
pub const LOG_WORDS: usize = 4 * 4096 + PAGE / 8;

const HEADER: Range<usize> = 0..PAGE;
const LEASE: Range<usize> = part(HEADER, LEASE_WORDS * 8);
const LOG: Range<usize> = part(LEASE, LOG_WORDS * 8);
const JOURNAL: Range<usize> = part(LOG, journal::BYTES);
const SNAPSHOTS: Range<usize> = part(JOURNAL, snapshots::BYTES);

const fn part(before: Range<usize>, len: usize) -> Range<usize> {
    before.end..before.end + len
}

/// A memfd, sealed against resizing; pages are allocated when they are written.
#[derive(Debug)]
pub struct DeviceFile {
    file: OwnedFd,
    /// The snapshot that waits for the next commit of the journal; see [`Snapshots`].
    staged: Arc<AtomicUsize>,
    /// The journal's count of messages.
    turn: Arc<AtomicUsize>,
}

impl DeviceFile {
    /// A new, empty one.
    pub fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("farside-device", flags)?;
        ftruncate(&file, SNAPSHOTS.end as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::put_version(&Area::map(&file, HEADER)?);
        Ok(Self::with(file))
    }

    /// What is new in this version is there before it: the version before ignores it.
    fn put_version(header: &Area) {
        for (n, word) in writer().as_chunks().0.iter().enumerate() {
            let at = FARSIDE + n * 8;
            header.word(at).store(u64::from_le_bytes(*word), Release);
        }
        let version = u64::from(RECORDS.version());
        header.word(0).store(MAGIC ^ version, Release);
    }

    /// A copy of that of the process before. That one may have been taken over by its guest, and have given its file to
    /// QEMU, so what is in it is read once.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] for another file, or one of a version that is not [read](RECORDS).
    pub fn take_over(file: &OwnedFd) -> io::Result<Self> {
        let invalid = |error: &dyn std::fmt::Display| {
            io::Error::new(io::ErrorKind::InvalidData, error.to_string())
        };
        let bytes = fstat(file)?.st_size;
        if bytes < HEADER.end as i64 {
            return Err(invalid(&format!(
                "the record of a device has {bytes} bytes"
            )));
        }
        let mut header = [0; FARSIDE + WRITER];
        let read = pread(file, &mut header, 0)?;
        let (magic, farside) = header.split_at(FARSIDE);
        let magic = magic.try_into().map_or(0, u64::from_ne_bytes);
        let version = u16::try_from(magic ^ MAGIC).ok();
        let version = version.filter(|_| read == header.len());
        let version = version.ok_or_else(|| invalid(&"it is no record of a device"))?;
        let farside = read_writer(farside);
        let checked = RECORDS.check(version.into(), farside.as_deref());
        checked.map_err(|error| invalid(&error))?;
        if bytes != SNAPSHOTS.end as i64 {
            let size = SNAPSHOTS.end;
            return Err(invalid(&format!(
                "the record of a device has {bytes} bytes, and not {size}"
            )));
        }
        let own = Self::new()?;
        let mut chunk = vec![0; CHUNK];
        let mut at = HEADER.end as u64;
        while at < SNAPSHOTS.end as u64 {
            // Few of the pages have been written.
            at = match seek(file, SeekFrom::Data(at)) {
                Ok(data) => at.max(data),
                Err(Errno::NXIO) => break,
                Err(errno) => return Err(errno.into()),
            };
            let len = pread(file, &mut chunk, at)?;
            if len == 0 {
                break;
            }
            let mut left = &chunk[..len];
            while !left.is_empty() {
                let written = pwrite(&own.file, left, at)?;
                left = &left[written..];
                at += written as u64;
            }
        }
        Ok(own)
    }

    /// A file of `len` zero bytes for what keeper and backend share.
    pub(crate) fn root(len: usize) -> io::Result<OwnedFd> {
        let file = memfd_create("farside-keeper", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, len as u64)?;
        Ok(file)
    }

    fn with(file: OwnedFd) -> Self {
        Self {
            file,
            staged: Arc::default(),
            turn: Arc::default(),
        }
    }

    /// The journal of the device's client. Call once.
    pub fn journal(&self) -> io::Result<Journal> {
        let area = Area::map(&self.file, JOURNAL)?;
        let (staged, turn) = (Arc::clone(&self.staged), Arc::clone(&self.turn));
        Ok(Journal::new(area, staged, turn))
    }

    /// Counts the messages that the journal is done with, modulo 128: the same number when a message is processed again
    /// by the next process.
    pub fn turn(&self) -> u8 {
        self.turn.load(std::sync::atomic::Ordering::Relaxed) as u8
    }

    /// The snapshots, of which `journal` knows the current one. Call once.
    pub fn snapshots(&self, journal: &Journal) -> io::Result<Snapshots> {
        let area = Area::map(&self.file, SNAPSHOTS)?;
        Ok(Snapshots::new(
            area,
            journal.snapshot(),
            Arc::clone(&self.staged),
        ))
    }

    /// Facts of the lease, [`LEASE_WORDS`] in number. What they mean is up to the caller. Call once.
    pub fn lease(&self) -> io::Result<Words> {
        Ok(Words::new(Area::map(&self.file, LEASE)?, LEASE_WORDS))
    }

    /// The log of register writes, [`LOG_WORDS`]. Call once.
    pub fn log(&self) -> io::Result<Words> {
        Ok(Words::new(Area::map(&self.file, LOG)?, LOG_WORDS))
    }
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests;
