//! Locks between processes.

use std::{
    fmt,
    fs::{self, File, TryLockError},
    io::{self, Read, Write},
    os::unix::fs::MetadataExt,
    path::Path,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use crate::files;

/// A lock on a file, which has the PID of the holder. The kernel ends it with the
/// process; the file stays, unless the holder removes it.
#[derive(Debug)]
pub struct FileLock(#[allow(dead_code, reason = "held, not used")] File);

/// Why a [`FileLock`] was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds it.
    #[error("locked by another process{0}")]
    Held(Holder),
    /// The file cannot be opened or locked.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The PID of a lock's holder, which displays as ` (process 12)`; as nothing if the
/// holder has not written it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder(pub Option<u32>);

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(pid) => write!(f, " (process {pid})"),
            None => Ok(()),
        }
    }
}

impl FileLock {
    /// Locks the file `path`, which is created if it is missing. Waits up to `limit`
    /// while another process holds the lock.
    ///
    /// The directory may belong to a user with fewer rights than this process, and
    /// the file is written: links are not followed, and only a regular file with one
    /// name is taken.
    pub fn take(path: &Path, limit: Duration) -> Result<Self, LockError> {
        let deadline = Instant::now() + limit;
        loop {
            let mut file = files::append(path)?;
            match lock_by(&file, deadline) {
                Ok(()) if is_at(&file, path)? => {
                    // For others' messages only: a full file system does not matter.
                    let _ = file.set_len(0);
                    let _ = writeln!(file, "{}", std::process::id());
                    return Ok(Self(file));
                }
                // Its last holder removed the file after it was opened here.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut pid = String::new();
                    // For the message only.
                    let _ = (&mut file).take(32).read_to_string(&mut pid);
                    return Err(LockError::Held(Holder(pid.trim().parse().ok())));
                }
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }
}

/// Locks `file`; fails with `WouldBlock` if another process holds it until `deadline`.
fn lock_by(file: &File, deadline: Instant) -> Result<(), TryLockError> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) if Instant::now() < deadline => {}
        done => return done,
    }
    // flock(2) has no time limit, so a thread waits. If it is too late, it closes its copy,
    // and gives the lock up with it once `file` is closed, too.
    let copy = file.try_clone().map_err(TryLockError::Error)?;
    let (locked, waits) = mpsc::channel();
    thread::Builder::new()
        .name("lock".to_owned())
        .spawn(move || {
            let result = loop {
                match copy.lock() {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    result => break result,
                }
            };
            // Fails if the waiter has given up.
            let _ = locked.send(result);
        })
        .map_err(TryLockError::Error)?;
    match waits.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(locked) => locked.map_err(TryLockError::Error),
        Err(_) => Err(TryLockError::WouldBlock),
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        there => Ok(identity(there?) == identity(file.metadata()?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_holds_it_and_another_is_told_which() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let held = FileLock::take(&path, Duration::ZERO).unwrap();
        let error = FileLock::take(&path, Duration::ZERO).unwrap_err();
        let text = format!("locked by another process (process {})", std::process::id());
        assert_eq!(error.to_string(), text);
        drop(held);
        FileLock::take(&path, Duration::ZERO).unwrap();
    }

    #[test]
    fn a_waiter_that_gave_up_does_not_keep_the_lock() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let held = FileLock::take(&path, Duration::ZERO).unwrap();
        let error = FileLock::take(&path, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, LockError::Held(_)), "{error}");
        drop(held);
        FileLock::take(&path, Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn what_is_no_file_of_its_own_is_neither_locked_nor_written() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("precious"), "data").unwrap();
        std::os::unix::fs::symlink(at("precious"), at("symlink")).unwrap();
        std::os::unix::fs::symlink(at("new"), at("dangling")).unwrap();
        fs::hard_link(at("precious"), at("hard link")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), 0o600.into()).unwrap();
        for name in ["symlink", "dangling", "hard link", "fifo"] {
            let error = FileLock::take(&at(name), Duration::ZERO).unwrap_err();
            assert!(matches!(error, LockError::System(_)), "{name}: {error}");
        }
        assert_eq!(fs::read_to_string(at("precious")).unwrap(), "data");
        assert!(!at("new").exists());
    }

    #[test]
    fn a_waiter_gets_the_lock_of_a_holder_that_removes_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let held = FileLock::take(&path, Duration::ZERO).unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| FileLock::take(&path, Duration::from_secs(60)));
            fs::remove_file(&path).unwrap();
            drop(held);
            let _taken = waiter.join().unwrap().unwrap();
            assert!(path.exists());
        });
    }
}
