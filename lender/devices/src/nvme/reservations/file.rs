//! The file in which controllers of one namespace, each in a process of its own, share registrations and reservation.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0 | magic, 8 bytes |
//! | 8 | UUID of the namespace |
//! | 24 | the host's boot id when the table was written last |
//! | 64 | version of the table; its lowest bit is the number of the copy |
//! | 128 | for each controller 32 bytes: whose it is, whether it has commands in flight, under which version those were checked |
//! | 4096, 6144 | two copies of the table: length (2 bytes), table |
//!
//! A change is written to the other copy, then the version: who is killed meanwhile has changed nothing. Changes are made
//! under flock(2), which ends with its process. Commands read the version alone.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::atomic::Ordering::SeqCst,
    time::{Duration, Instant},
};

use ring::rand::{SecureRandom, SystemRandom};
use rustix::fs::{FlockOperation, flock};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileSlice};

use super::table::{MOST, Table};
use crate::block::serial::fnv;

const MAGIC: u64 = u64::from_le_bytes(*b"FSRESRV1");
const UUID: usize = 8;
const BOOT: usize = 24;
const VERSION: usize = 64;
const CONTROLLERS: usize = 128;
const CONTROLLER: usize = 32;
const TABLES: usize = 4096;
const TABLE: usize = 2048;
const SIZE: usize = TABLES + 2 * TABLE;

/// Timeout for another process to finish its change of the table, which writes to memory.
const LOCKED: Duration = Duration::from_millis(100);

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Other contents.
    #[error("it has other contents: name a file that farside may create")]
    Foreign,
    /// No number is left.
    #[error("{MOST} devices have used it, which is the limit: remove the file while none is lent")]
    Full,
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

impl From<vm_memory::VolatileMemoryError> for FileError {
    fn from(error: vm_memory::VolatileMemoryError) -> Self {
        Self::System(io::Error::other(error))
    }
}

/// The file, open and mapped, for one controller.
#[derive(Debug)]
pub struct ReservationFile {
    file: File,
    region: MmapRegion,
    controller: u16,
}

impl ReservationFile {
    /// Opens `path`, and creates it if there is none: with its own lock, which a duplicate of another descriptor would share.
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

    /// Maps the file for the device `name`, in a host that was booted as `boot` says. What does not persist goes if that
    /// was another time.
    pub fn map(file: File, name: &str, boot: Option<[u8; 16]>) -> Result<Self, FileError> {
        let lock = Lock::take(&file)?;
        let len = file.metadata()?.len();
        if len == 0 {
            file.set_len(SIZE as u64)?;
        } else if len != SIZE as u64 {
            return Err(FileError::Foreign);
        }
        let region = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), SIZE)
            .map_err(io::Error::other)?;
        let mut this = Self {
            file: file.try_clone()?,
            region,
            controller: 0,
        };
        let memory = this.memory();
        match (memory.load::<u64>(0, SeqCst)?, len) {
            (MAGIC, _) => {}
            // New, or its process was killed before it had a magic number.
            (0, _) => {
                let mut uuid = [0; 16];
                let random = SystemRandom::new().fill(&mut uuid);
                random.map_err(|_| io::Error::other("no random numbers"))?;
                // Version 4 (RFC 9562, 5.4).
                uuid[6] = uuid[6] & 0x0f | 0x40;
                uuid[8] = uuid[8] & 0x3f | 0x80;
                memory.write_slice(&uuid, UUID)?;
                this.write(&Table::default(), 0)?;
                memory.store(MAGIC, 0, SeqCst)?;
            }
            _ => return Err(FileError::Foreign),
        }
        if let Some(boot) = boot {
            let mut before = [0; 16];
            memory.read_slice(&mut before, BOOT)?;
            if before != boot {
                let (mut table, version) = this.read()?;
                table.lose_power();
                this.write(&table, version)?;
                memory.write_slice(&boot, BOOT)?;
                this.file.sync_data()?;
            }
        }
        // 0 is nobody's.
        let owner = fnv(name.as_bytes()) as u64 | 1;
        let mut free = None;
        let mut found = None;
        for n in 0..MOST as u16 {
            match memory.load::<u64>(at(n), SeqCst)? {
                it if it == owner => found = Some(n),
                0 => free = free.or(Some(n)),
                _ => {}
            }
        }
        let controller = found.or(free).ok_or(FileError::Full)?;
        memory.store(owner, at(controller), SeqCst)?;
        memory.store(0u32, at(controller) + 8, SeqCst)?;
        drop(lock);
        this.controller = controller;
        Ok(this)
    }

    /// The controller's number in the NVM subsystem.
    pub fn controller(&self) -> u16 {
        self.controller
    }

    /// The numbers of all controllers that have used the file.
    pub fn controllers(&self) -> Vec<u16> {
        let owner = |n: u16| self.memory().load::<u64>(at(n), SeqCst).unwrap_or(0);
        (0..MOST as u16).filter(|&n| owner(n) != 0).collect()
    }

    /// The UUID of the namespace.
    pub fn uuid(&self) -> [u8; 16] {
        let mut uuid = [0; 16];
        // In the mapping.
        let _ = self.memory().read_slice(&mut uuid, UUID);
        uuid
    }

    /// The version of the table.
    pub fn version(&self) -> u64 {
        // Aligned, and in the mapping.
        self.memory().load(VERSION, SeqCst).unwrap_or(0)
    }

    /// Notes whether the controller has commands in flight. Before they are checked.
    pub fn set_busy(&self, busy: bool) {
        let _ = self
            .memory()
            .store(u32::from(busy), at(self.controller) + 8, SeqCst);
    }

    /// Notes under which version of the table those were checked.
    pub fn set_checked(&self, version: u64) {
        let _ = self
            .memory()
            .store(version, at(self.controller) + 16, SeqCst);
    }

    /// Whether no other controller has commands in flight that were checked before `version`.
    pub fn others_have_checked(&self, version: u64) -> bool {
        let memory = self.memory();
        let is_behind = |n: u16| {
            let busy = memory.load::<u32>(at(n) + 8, SeqCst).unwrap_or(0) != 0;
            let checked = memory.load::<u64>(at(n) + 16, SeqCst).unwrap_or(0);
            busy && checked < version
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
            let copy = copy(version);
            let memory = self.memory();
            let len = usize::from(memory.load::<u16>(copy, SeqCst)?);
            let mut bytes = vec![0; len.min(TABLE - 2)];
            memory.read_slice(&mut bytes, copy + 2)?;
            // Two changes later its place has another one.
            if self.version() == version {
                let table = postcard::from_bytes(&bytes);
                return Ok((table.map_err(|_| FileError::Invalid)?, version));
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
        let lock = Lock::take(&self.file)?;
        let (mut table, version) = self.read()?;
        let before = table.clone();
        if let Err(error) = change(&mut table) {
            return Ok(Err(error));
        }
        if table == before {
            return Ok(Ok(version));
        }
        self.write(&table, version)?;
        drop(lock);
        // Before a command that has made it persist is answered.
        if table.persists() || before.persists() {
            self.file.sync_data()?;
        }
        Ok(Ok(version + 1))
    }

    /// Writes the table that follows `version`.
    fn write(&self, table: &Table, version: u64) -> Result<(), FileError> {
        let bytes = postcard::to_allocvec(table).map_err(io::Error::other)?;
        let (memory, copy) = (self.memory(), copy(version + 1));
        let len = u16::try_from(bytes.len()).ok();
        let len = len.filter(|len| usize::from(*len) <= TABLE - 2);
        memory.store(len.ok_or(FileError::Invalid)?, copy, SeqCst)?;
        memory.write_slice(&bytes, copy + 2)?;
        memory.store(version + 1, VERSION, SeqCst)?;
        Ok(())
    }

    fn memory(&self) -> VolatileSlice<'_> {
        vm_memory::VolatileMemory::as_volatile_slice(&self.region)
    }
}

/// Where a controller's words are.
fn at(controller: u16) -> usize {
    CONTROLLERS + usize::from(controller) * CONTROLLER
}

/// Where the copy of that version is.
fn copy(version: u64) -> usize {
    TABLES + (version & 1) as usize * TABLE
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
mod tests {
    use super::{
        super::table::{Caller, Group, Host, Registration},
        *,
    };

    fn open(path: &Path, name: &str) -> ReservationFile {
        let file = ReservationFile::open(path).unwrap();
        ReservationFile::map(file, name, Some([7; 16])).unwrap()
    }

    fn caller(controller: u16) -> Caller {
        Caller {
            host: Host::Named(controller.into()),
            controller,
        }
    }

    #[test]
    fn controllers_see_each_others_changes_and_keep_their_numbers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shared");
        let (one, two) = (open(&path, "one"), open(&path, "two"));
        assert_eq!((one.controller(), two.controller()), (0, 1));
        assert_eq!(open(&path, "one").controller(), 0);
        assert_eq!(one.controllers(), [0, 1]);
        assert_eq!(one.uuid(), two.uuid());
        assert_ne!(one.uuid(), [0; 16]);
        let before = two.version();
        let register = |table: &mut Table| table.register(caller(0), Registration::Add { new: 1 });
        let version = one.change(register).unwrap().unwrap();
        assert_eq!((version, two.version()), (before + 1, before + 1));
        // A change to nothing is none.
        let none = |_: &mut Table| Ok::<(), ()>(());
        assert_eq!(two.change(none).unwrap(), Ok(version));
        assert_eq!(two.read().unwrap(), one.read().unwrap());
        assert_eq!(two.read().unwrap().0.report(false)[5], 1);
        // In flight, and checked when it was not yet registered.
        assert!(one.others_have_checked(version));
        two.set_busy(true);
        assert!(!one.others_have_checked(version));
        two.set_checked(version);
        assert!(one.others_have_checked(version));
    }

    #[test]
    fn what_does_not_persist_goes_with_a_boot_of_the_host() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shared");
        let one = open(&path, "one");
        let register = |table: &mut Table| table.register(caller(0), Registration::Add { new: 1 });
        one.change(register).unwrap().unwrap();
        let count = |file: &ReservationFile| file.read().unwrap().0.report(false)[5];
        assert_eq!(count(&open(&path, "one")), 1);
        let booted = |boot| {
            let file = ReservationFile::open(&path).unwrap();
            ReservationFile::map(file, "one", Some([boot; 16])).unwrap()
        };
        assert_eq!(count(&booted(8)), 0);
        let persist = |table: &mut Table| {
            table.set_persists(true);
            table.register(caller(0), Registration::Add { new: 1 })
        };
        one.change(persist).unwrap().unwrap();
        assert_eq!(count(&booted(9)), 1);
        assert!(one.read().unwrap().0.allows(caller(0).host, Group::Write));
    }

    #[test]
    fn other_contents_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shared");
        std::fs::write(&path, "notes").unwrap();
        let map = || ReservationFile::map(ReservationFile::open(&path).unwrap(), "one", None);
        assert!(matches!(map(), Err(FileError::Foreign)));
        std::fs::write(&path, vec![1; SIZE]).unwrap();
        assert!(matches!(map(), Err(FileError::Foreign)));
        assert!(ReservationFile::open(directory.path()).is_err());
        // A table that is none.
        std::fs::remove_file(&path).unwrap();
        map().unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        let at = copy(1);
        bytes[at] = 0xff;
        bytes[at + 1..at + 300].fill(0xff);
        std::fs::write(&path, bytes).unwrap();
        let file = map().unwrap();
        assert!(matches!(file.read(), Err(FileError::Invalid)));
    }

    #[test]
    fn a_lock_that_is_not_released_is_waited_for_a_moment() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shared");
        let one = open(&path, "one");
        let other = ReservationFile::open(&path).unwrap();
        let lock = Lock::take(&other).unwrap();
        let none = |_: &mut Table| Ok::<(), ()>(());
        assert!(matches!(one.change(none), Err(FileError::Locked)));
        drop(lock);
        assert_eq!(one.change(none).unwrap(), Ok(one.version()));
    }

    #[test]
    fn as_many_devices_as_there_are_numbers_use_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shared");
        for n in 0..MOST {
            assert_eq!(usize::from(open(&path, &n.to_string()).controller()), n);
        }
        let file = ReservationFile::open(&path).unwrap();
        let error = ReservationFile::map(file, "more", None).unwrap_err();
        assert!(error.to_string().contains("32 devices"), "{error}");
    }
}
