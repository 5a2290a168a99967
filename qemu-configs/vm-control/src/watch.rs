//! Waiting for a process that was just started to answer at a socket.

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

/// A socket is bound a moment before it listens, and only the first is an
/// event: so much later it is tried once more.
const LISTENS_AFTER: Duration = Duration::from_millis(100);

/// Watches a directory in which a socket is to appear.
pub(crate) struct Watch(File);

/// How a wait ended.
pub(crate) enum Waited<T> {
    /// It answered.
    Answered(T),
    /// The process has ended.
    Ended,
    /// The time is up.
    Late,
}

impl Watch {
    /// To be made before the process is started.
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

    /// Tries until something answers, whenever the directory changes.
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
            // What changed does not matter.
            let _ = self.0.read(&mut [0; 4096]);
        }
    }
}
