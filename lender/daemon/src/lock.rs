//! Locks between processes.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read, Write},
    os::unix::fs::MetadataExt,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// A lock on a file, which has the PID of the holder. The kernel ends it with the
/// process; the file stays, unless the holder removes it.
#[derive(Debug)]
pub struct FileLock(#[allow(dead_code, reason = "held, not used")] File);

/// Why a [`FileLock`] was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds it, of this PID. Empty if it is just taking the lock.
    #[error("locked by process {0}")]
    Held(String),
    /// The file cannot be opened or locked.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl FileLock {
    /// Locks the file `path`, which is created if it is missing. Waits up to `limit`
    /// while another process holds the lock.
    pub fn take(path: &Path, limit: Duration) -> Result<Self, LockError> {
        let deadline = Instant::now() + limit;
        let mut options = File::options();
        options.read(true).append(true).create(true);
        loop {
            let mut file = options.open(path)?;
            match file.try_lock() {
                Ok(()) if is_at(&file, path)? => {
                    file.set_len(0)?;
                    writeln!(file, "{}", std::process::id())?;
                    return Ok(Self(file));
                }
                // Its last holder removed the file after it was opened here.
                Ok(()) => {}
                // flock(2) has no time limit.
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(50));
                }
                Err(TryLockError::WouldBlock) => {
                    let mut pid = String::new();
                    // For the message only.
                    let _ = file.read_to_string(&mut pid);
                    return Err(LockError::Held(pid.trim().to_owned()));
                }
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
    match fs::metadata(path) {
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
        let text = format!("locked by process {}", std::process::id());
        assert_eq!(error.to_string(), text);
        drop(held);
        FileLock::take(&path, Duration::ZERO).unwrap();
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
