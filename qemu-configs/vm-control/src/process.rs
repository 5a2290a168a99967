//! Processes, held by pidfd: even if a PID is reused, a signal or a wait never reaches another
//! process.

use std::{
    fs::{self, OpenOptions},
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
    process::Child,
    time::Instant,
};

use farside_daemon::peer_credentials;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, major, minor},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Maximum length of a PID file, in bytes: a number and a newline.
const MAX_PID_TEXT: u64 = 32;

/// A process.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Process {
    /// The peer process of a connected UNIX socket. The PID is certain if the peer answers on that
    /// socket afterwards: it was alive when the pidfd was opened.
    pub(crate) fn of_peer(socket: impl AsFd) -> io::Result<Self> {
        let unseen = || io::Error::other("its process is in another PID namespace");
        let pid = peer_credentials(&socket)?.pid.ok_or_else(unseen)?;
        Self::open(pid)
    }

    /// A child of this process: its PID cannot be reused before it is waited for.
    pub(crate) fn of_child(child: &Child) -> io::Result<Self> {
        Self::open(Pid::from_child(child))
    }

    /// The holder of the flock(2) lock on `file`. `None` if it is not held, or held outside this
    /// PID namespace.
    pub(crate) fn of_lock(file: &Path) -> io::Result<Option<Self>> {
        let Some(pid) = lock_holder(file)? else {
            return Ok(None);
        };
        let process = match Self::open(pid) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => return Ok(None),
            process => process?,
        };
        // It held the lock when the pidfd was opened, so the PID was not reused.
        let same = lock_holder(file)? == Some(pid);
        Ok(same.then_some(process))
    }

    /// The process that wrote its PID into `file` and still has it open, as QEMU does (`-pidfile`).
    /// `None` if there is none.
    ///
    /// Other users may own the VM's directory: only a regular file is accepted, no links, so that
    /// they cannot name another process.
    pub(crate) fn of_pid_file(file: &Path) -> io::Result<Option<Self>> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits().cast_signed())
            .open(file);
        let opened = match opened {
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || Errno::from_io_error(&error) == Some(Errno::LOOP) =>
            {
                return Ok(None);
            }
            opened => opened?,
        };
        let wanted = opened.metadata()?;
        if !wanted.is_file() || wanted.nlink() != 1 {
            return Ok(None);
        }
        let mut text = String::new();
        opened.take(MAX_PID_TEXT).read_to_string(&mut text)?;
        let Some(pid) = text.trim().parse().ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let process = match Self::open(pid) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => return Ok(None),
            process => process?,
        };
        // Checked after pidfd_open: a process that has the file open is QEMU, not a later owner of
        // its PID.
        let is_it = |entry: io::Result<fs::DirEntry>| {
            let open = fs::metadata(entry.ok()?.path()).ok()?;
            Some((open.dev(), open.ino()) == (wanted.dev(), wanted.ino()))
        };
        let mut open = match fs::read_dir(format!("/proc/{}/fd", process.pid())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            open => open?,
        };
        Ok(open
            .any(|entry| is_it(entry) == Some(true))
            .then_some(process))
    }

    fn open(pid: Pid) -> io::Result<Self> {
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid, pidfd })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Whether it is the system's service manager, which listens at the sockets of units until their
    /// process has taken them over by listen(2).
    pub(crate) fn is_service_manager(&self) -> bool {
        self.pid == Pid::INIT
    }

    /// The process id of its parent.
    pub(crate) fn parent(&self) -> io::Result<u32> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        let pid = line.and_then(|pid| pid.trim().parse().ok());
        pid.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Sends a signal. Returns `None` if the process has exited.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Err(Errno::SRCH) => Ok(()),
            sent => sent.map_err(Into::into),
        }
    }

    /// Kills the peer process of `socket` ([`Process::of_peer`]) that has not answered. SIGKILL
    /// also ends a stopped process.
    pub(crate) fn kill_listener(&self, socket: impl AsFd) -> io::Result<()> {
        let mut fds = [PollFd::new(&socket, PollFlags::empty())];
        // The connection is open: that process is the listener.
        match poll(&mut fds, Some(&Timespec::default()))? {
            0 => self.signal(Signal::KILL),
            _ => Ok(()),
        }
    }

    /// Waits for its exit. Returns whether it exited.
    pub(crate) fn wait(&self, deadline: Instant) -> io::Result<bool> {
        loop {
            match poll(
                &mut [PollFd::new(&self.pidfd, PollFlags::IN)],
                Some(&left(deadline)),
            ) {
                Err(Errno::INTR) => {}
                Ok(0) if Instant::now() < deadline => {}
                ready => return Ok(ready? != 0),
            }
        }
    }

    /// Whether it has exited.
    pub(crate) fn has_ended(&self) -> io::Result<bool> {
        self.wait(Instant::now())
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// As /proc/locks lists it (proc_locks(5)).
fn lock_holder(file: &Path) -> io::Result<Option<Pid>> {
    let meta = match fs::metadata(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        meta => meta?,
    };
    let (dev, inode) = (meta.dev(), meta.ino());
    let id = format!("{:02x}:{:02x}:{inode}", major(dev), minor(dev));
    let locks = fs::read_to_string("/proc/locks")?;
    Ok(locks.lines().find_map(|line| {
        // A waiter has "->" before its "FLOCK".
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            [_, "FLOCK", _, "WRITE", pid, at, ..] if at == id => Pid::from_raw(pid.parse().ok()?),
            _ => None,
        }
    }))
}

/// The remaining time until `deadline`, for poll.
pub(crate) fn left(deadline: Instant) -> Timespec {
    let left = deadline.saturating_duration_since(Instant::now());
    Timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, process::Command, time::Duration};

    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen_and_a_late_signal_meets_nobody() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of_child(&child).unwrap();
        assert!(!process.has_ended().unwrap());
        process.signal(Signal::TERM).unwrap();
        assert!(
            process
                .wait(Instant::now() + Duration::from_secs(20))
                .unwrap()
        );
        child.wait().unwrap();
        process.signal(Signal::TERM).unwrap();
    }

    #[test]
    fn the_holder_of_a_lock_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        assert!(Process::of_lock(&path).unwrap().is_none());
        let file = fs::File::create(&path).unwrap();
        assert!(Process::of_lock(&path).unwrap().is_none());
        file.lock().unwrap();
        let holder = Process::of_lock(&path).unwrap().expect("a holder");
        assert_eq!(holder.pid(), std::process::id());
        drop(file);
        assert!(Process::of_lock(&path).unwrap().is_none());
    }

    #[test]
    fn a_peer_is_known_by_its_socket() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(Process::of_peer(&ours).unwrap().pid(), std::process::id());
    }
}
