//! Waits for a new process to answer at a socket.

use std::{
    fs::File,
    io::Read,
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::inotify,
    io::Errno,
};

use crate::{
    Error,
    process::{Process, left},
};

/// Delay of a second attempt: a socket is bound a moment before it listens, and only the bind is an
/// event.
const LISTENS_AFTER: Duration = Duration::from_millis(100);

/// Watches a directory for a new socket.
pub(crate) struct Watch(File);

/// How a wait ended.
pub(crate) enum Waited<T> {
    /// It answered.
    Answered(T),
    /// The process has exited.
    Ended,
    /// The deadline passed.
    Late,
}

impl Watch {
    /// Create it before starting the process.
    pub(crate) fn new(directory: &Path) -> Result<Self, Error> {
        let watch = || -> Result<OwnedFd, Errno> {
            let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
            let watch = inotify::init(flags)?;
            inotify::add_watch(&watch, directory, inotify::WatchFlags::CREATE)?;
            Ok(watch)
        };
        match watch() {
            Ok(watch) => Ok(Self(watch.into())),
            Err(errno) => Err(Error::System {
                what: format!("cannot watch {}", directory.display()),
                source: errno.into(),
            }),
        }
    }

    /// Tries to connect whenever the directory changes, until the process answers.
    pub(crate) fn wait<T>(
        &mut self,
        process: &Process,
        deadline: Instant,
        mut try_it: impl FnMut() -> Option<T>,
    ) -> Result<Waited<T>, Error> {
        loop {
            if let Some(answer) = try_it() {
                return Ok(Waited::Answered(answer));
            }
            if process.has_ended().map_err(Error::system("poll"))? {
                return Ok(Waited::Ended);
            }
            if Instant::now() >= deadline {
                return Ok(Waited::Late);
            }
            let until = deadline.min(Instant::now() + LISTENS_AFTER);
            let mut fds = [
                PollFd::new(&self.0, PollFlags::IN),
                PollFd::new(process, PollFlags::IN),
            ];
            match poll(&mut fds, Some(&left(until))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::system("poll")(errno.into())),
            }
            // Which change it was does not matter.
            let _ = self.0.read(&mut [0; 4096]);
        }
    }
}
