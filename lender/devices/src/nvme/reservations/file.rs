//! The file in which controllers of one namespace, each in a process of its own, share registrations and reservation.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0 | magic, 8 bytes |
//! | 8 | UUID of the namespace |
//! | 24 | the host's boot id when the table was written last |
//! | 40 | the path of the image and its block size; not its size, which may grow |
//! | 4096 | version of the table; its lowest bit is the number of the copy |
//! | 4224 | for each controller 32 bytes: whose it is, whether it has commands in flight, under which version those were checked, and the number of the last abort after which it has none of before |
//! | 8192, 12288 | two copies of the table: length (2 bytes; 0: an empty table), table |
//!
//! Fields of the table are appended: one that an earlier farside has written ends before them, and has zeroes there.
//!
//! A change is written to the other copy, then the version: who is killed meanwhile has changed nothing. Changes are made
//! under flock(2), which ends with its process. Workers map the file, for what they look at with each command; the lender's
//! process, which has all leases, does not: who shortens the file would end it.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::atomic::{Ordering::SeqCst, fence},
    time::{Duration, Instant},
};

use farside_hand_over::decode;
use ring::rand::{SecureRandom, SystemRandom};
use rustix::fs::{FlockOperation, flock};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileSlice};

use super::table::{MOST, Table};
use crate::block::serial::fnv;

const MAGIC: u64 = u64::from_le_bytes(*b"FSRESRV2");
const UUID: u64 = 8;
const BOOT: u64 = 24;
const IMAGE: u64 = 40;
const VERSION: u64 = 4096;
const CONTROLLERS: u64 = 4224;
const CONTROLLER: u64 = 32;
const BUSY: u64 = 8;
const CHECKED: u64 = 16;
const SETTLED: u64 = 24;
const TABLES: u64 = 8192;
const TABLE: usize = 4096;
const SIZE: usize = TABLES as usize + 2 * TABLE;

/// Timeout for another process to finish its change of the table, which writes some bytes.
const LOCKED: Duration = Duration::from_millis(100);

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Other contents.
    #[error("it has other contents: name a file that farside may create")]
    Foreign,
    /// Of another namespace.
    #[error(
        "it is of another image, of one by another path, or of one with another block size: remove the file while \
         no device that uses it is lent"
    )]
    OtherImage,
    /// No number is left.
    #[error("{MOST} devices have used it, which is the limit: remove the file while none is lent")]
    Full,
    /// A device that has not been lent with it.
    #[error("it has no number for the device")]
    Unknown,
    /// Another process holds the lock.
    #[error("another process has had it locked for {LOCKED:?}")]
    Locked,
    /// A table that cannot be read.
    #[error(
        "its table of reservations cannot be read: remove the file while no device that uses it is lent"
    )]
    Invalid,
    /// A system call has failed.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The file of a namespace, which several lenders of a host must not use for devices of one id.
#[derive(Clone, Copy, Debug)]
struct Contents<'a>(&'a File);

impl Contents<'_> {
    fn bytes<const N: usize>(self, at: u64) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    fn word(self, at: u64) -> io::Result<u64> {
        self.bytes(at).map(u64::from_le_bytes)
    }

    fn set_word(self, at: u64, value: u64) -> io::Result<()> {
        self.0.write_all_at(&value.to_le_bytes(), at)
    }

    /// The table of a version.
    fn table(self, version: u64) -> Result<Table, FileError> {
        let len = usize::from(u16::from_le_bytes(self.bytes(copy(version))?));
        if len == 0 {
            return Ok(Table::default());
        }
        let mut bytes = vec![0; len.min(TABLE - 2)];
        self.0.read_exact_at(&mut bytes, copy(version) + 2)?;
        decode(&bytes).map_err(|_| FileError::Invalid)
    }

    /// Writes the table that has that version once the version is written.
    fn set_table(self, table: &Table, version: u64) -> Result<(), FileError> {
        let mut bytes = vec![0; 2];
        bytes.extend(postcard::to_allocvec(table).map_err(io::Error::other)?);
        let len = u16::try_from(bytes.len() - 2).map_err(|_| FileError::Invalid)?;
        if bytes.len() > TABLE {
            return Err(FileError::Invalid);
        }
        bytes[..2].copy_from_slice(&len.to_le_bytes());
        self.0.write_all_at(&bytes, copy(version))?;
        Ok(())
    }

    /// The number of the device `name`, and the first that is free.
    fn find(self, name: &str) -> io::Result<(Option<u16>, Option<u16>)> {
        let (mut found, mut free) = (None, None);
        for n in 0..MOST as u16 {
            match self.word(at(n))? {
                owner if owner == owner_of(name) => found = Some(n),
                0 => free = free.or(Some(n)),
                _ => {}
            }
        }
        Ok((found, free))
    }

    /// Changes the table, under the lock. `publish` makes its version known.
    fn change<E>(
        self,
        change: impl FnOnce(&mut Table) -> Result<(), E>,
        publish: impl FnOnce(u64) -> io::Result<()>,
    ) -> Result<Result<u64, E>, FileError> {
        let lock = Lock::take(self.0)?;
        let version = self.word(VERSION)?;
        let before = self.table(version)?;
        let mut table = before.clone();
        if let Err(error) = change(&mut table) {
            return Ok(Err(error));
        }
        // Aborts do, for the borrowers that outlive this host.
        let is_abort = table.aborts() != before.aborts();
        let persists = table.persists() || before.persists() || is_abort;
        let is_new = table != before;
        if is_new {
            self.set_table(&table, version + 1)?;
            if persists {
                // Else the version might be on the disk without it.
                self.0.sync_data()?;
            }
            publish(version + 1)?;
        }
        drop(lock);
        // Before a command is answered, also one that was executed by a process that was killed before this.
        if persists {
            self.0.sync_data()?;
        }
        Ok(Ok(version + u64::from(is_new)))
    }
}

/// The file, open and mapped, for one controller.
#[derive(Debug)]
pub struct ReservationFile {
    file: File,
    region: MmapRegion,
    controller: u16,
    uuid: [u8; 16],
}

impl ReservationFile {
    /// Opens `path`, and creates it if there is none: with its own lock, which a duplicate of another descriptor would share.
    ///
    /// # Errors
    /// Those of open(2); it is no regular file.
    pub fn open(path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)?;
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("it is no regular file")),
        }
    }

    /// Checks an open file, and makes its contents if it is new, for the device `name`, in a host that was booted as `boot`
    /// says: what does not persist goes if that was another time. `image` names the namespace's image.
    ///
    /// # Errors
    /// A [`FileError`].
    pub fn prepare(file: &File, name: &str, boot: [u8; 16], image: &str) -> Result<(), FileError> {
        let contents = Contents(file);
        let image = fnv(image.as_bytes()).to_le_bytes();
        if is_blank(file)? {
            let lock = Lock::take(file)?;
            // Not since by another process.
            if is_blank(file)? {
                let mut uuid = [0; 16];
                let random = SystemRandom::new().fill(&mut uuid);
                random.map_err(|_| io::Error::other("no random numbers"))?;
                // Version 4 (RFC 9562, 5.4).
                uuid[6] = uuid[6] & 0x0f | 0x40;
                uuid[8] = uuid[8] & 0x3f | 0x80;
                // Not sparse: a store to a mapping cannot report that the disk is full.
                file.write_all_at(&[0; SIZE], 0)?;
                let magic = MAGIC.to_le_bytes();
                file.write_all_at(&[&magic[..], &uuid, &boot, &image].concat(), 0)?;
                file.sync_data()?;
            }
            drop(lock);
        }
        check(contents)?;
        if contents.bytes(IMAGE)? != image {
            return Err(FileError::OtherImage);
        }
        if contents.bytes(BOOT)? != boot {
            let lose = |table: &mut Table| {
                table.lose_power();
                Ok::<(), FileError>(())
            };
            contents.change(lose, |version| contents.set_word(VERSION, version))??;
            let aborts = contents.table(contents.word(VERSION)?)?.aborts();
            for n in 0..MOST as u16 {
                // Whose process did not end has nothing in flight any more.
                contents.set_word(at(n) + BUSY, 0)?;
                let settled = contents.word(at(n) + SETTLED)?;
                contents.set_word(at(n) + SETTLED, settled.min(aborts))?;
            }
            file.write_all_at(&boot, BOOT)?;
            file.sync_data()?;
        }
        if let (None, _) = contents.find(name)? {
            let lock = Lock::take(file)?;
            let (found, free) = contents.find(name)?;
            let number = found.or(free).ok_or(FileError::Full)?;
            let aborts = contents.table(contents.word(VERSION)?)?.aborts();
            contents.set_word(at(number) + SETTLED, aborts)?;
            contents.set_word(at(number), owner_of(name))?;
            drop(lock);
        }
        Ok(())
    }

    /// The number of the device `name` in the NVM subsystem, and the UUID of the namespace, of a file that was
    /// [prepared](Self::prepare) for it.
    ///
    /// # Errors
    /// A [`FileError`].
    pub fn identity(file: &File, name: &str) -> Result<(u16, [u8; 16]), FileError> {
        let contents = Contents(file);
        check(contents)?;
        let controller = contents.find(name)?.0.ok_or(FileError::Unknown)?;
        Ok((controller, contents.bytes(UUID)?))
    }

    /// The process that served the device `name` is gone, so it has nothing in flight. If its lease is `over`, what belongs
    /// to no named host goes, too.
    ///
    /// # Errors
    /// A [`FileError`].
    pub fn leave(file: &File, name: &str, over: bool) -> Result<(), FileError> {
        let contents = Contents(file);
        check(contents)?;
        let number = contents.find(name)?.0.ok_or(FileError::Unknown)?;
        contents.set_word(at(number) + BUSY, 0)?;
        if over {
            let mut aborts = 0;
            let forget = |table: &mut Table| {
                table.forget_controller(number);
                aborts = table.aborts();
                Ok::<(), FileError>(())
            };
            contents.change(forget, |version| contents.set_word(VERSION, version))??;
            contents.set_word(at(number) + SETTLED, aborts)?;
        }
        Ok(())
    }

    /// Maps a file that was [prepared](Self::prepare) for the device `name`.
    ///
    /// # Errors
    /// A [`FileError`].
    pub fn map(file: File, name: &str) -> Result<Self, FileError> {
        let (controller, uuid) = Self::identity(&file, name)?;
        let region = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), SIZE);
        Ok(Self {
            region: region.map_err(io::Error::other)?,
            file,
            controller,
            uuid,
        })
    }

    /// The controller's number in the NVM subsystem.
    pub fn controller(&self) -> u16 {
        self.controller
    }

    /// The numbers of all controllers that have used the file.
    pub fn controllers(&self) -> Vec<u16> {
        let all = 0..MOST as u16;
        all.filter(|&n| self.load(at(n)) != 0).collect()
    }

    /// The UUID of the namespace.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// The version of the table.
    pub fn version(&self) -> u64 {
        self.load(VERSION)
    }

    /// Notes whether the controller has commands in flight. Before they are checked.
    pub fn set_busy(&self, busy: bool) {
        self.store(at(self.controller) + BUSY, busy.into());
    }

    /// Notes under which version of the table those were checked.
    pub fn set_checked(&self, version: u64) {
        self.store(at(self.controller) + CHECKED, version);
    }

    /// The number of the last abort after which the controller has none of the commands that it had before.
    pub fn settled(&self) -> u64 {
        self.load(at(self.controller) + SETTLED)
    }

    /// Notes that.
    pub fn set_settled(&self, number: u64) {
        self.store(at(self.controller) + SETTLED, number);
    }

    /// Whether no other controller has commands in flight that were checked before `version`.
    pub fn others_have_checked(&self, version: u64) -> bool {
        let is_behind = |n: u16| {
            let busy = self.load(at(n) + BUSY) != 0;
            busy && self.load(at(n) + CHECKED) < version
        };
        !(0..MOST as u16).any(|n| n != self.controller && is_behind(n))
    }

    /// The table and its version.
    ///
    /// # Errors
    /// [`FileError::Invalid`], and [`FileError::Locked`] if it changes all the time.
    pub fn read(&self) -> Result<(Table, u64), FileError> {
        for _ in 0..100 {
            let version = self.version();
            let table = Contents(&self.file).table(version);
            fence(SeqCst);
            // Two changes later its place has another one.
            if self.version() == version {
                return Ok((table?, version));
            }
        }
        Err(FileError::Locked)
    }

    /// Changes the table. Returns its version, which is new if it has changed.
    ///
    /// # Errors
    /// Those of `change`; the others may be temporary.
    pub fn change<E>(
        &self,
        change: impl FnOnce(&mut Table) -> Result<(), E>,
    ) -> Result<Result<u64, E>, FileError> {
        Contents(&self.file).change(change, |version| {
            self.store(VERSION, version);
            Ok(())
        })
    }

    /// An aligned word of the mapping.
    fn load(&self, at: u64) -> u64 {
        self.memory().load(at as usize, SeqCst).unwrap_or(0)
    }

    fn store(&self, at: u64, value: u64) {
        // In the mapping, and aligned.
        let _ = self.memory().store(value, at as usize, SeqCst);
    }

    fn memory(&self) -> VolatileSlice<'_> {
        vm_memory::VolatileMemory::as_volatile_slice(&self.region)
    }
}

/// Whether a file has no contents yet: it is empty, or its zeroes were written by a process that was killed then.
fn is_blank(file: &File) -> io::Result<bool> {
    let len = file.metadata()?.len();
    if len > SIZE as u64 {
        return Ok(false);
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes.iter().all(|&byte| byte == 0))
}

/// Checks that the contents are this file's.
fn check(contents: Contents<'_>) -> Result<(), FileError> {
    let is_whole = contents.0.metadata()?.len() == SIZE as u64;
    match is_whole && contents.word(0)? == MAGIC {
        true => Ok(()),
        false => Err(FileError::Foreign),
    }
}

/// What stands for a device; 0 is nobody's.
fn owner_of(name: &str) -> u64 {
    fnv(name.as_bytes()) as u64 | 1
}

/// Where a controller's words are.
fn at(controller: u16) -> u64 {
    CONTROLLERS + u64::from(controller) * CONTROLLER
}

/// Where the copy of that version is.
fn copy(version: u64) -> u64 {
    TABLES + (version & 1) * TABLE as u64
}

/// The exclusive lock; of the descriptor, until it is dropped.
struct Lock<'a>(&'a File);

impl<'a> Lock<'a> {
    fn take(file: &'a File) -> Result<Self, FileError> {
        let until = Instant::now() + LOCKED;
        loop {
            match flock(file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(file)),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                    // Whoever has it is about to write some bytes.
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(FileError::Locked),
                Err(error) => return Err(FileError::System(error.into())),
            }
        }
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // It ends with the descriptor at the latest.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests;
