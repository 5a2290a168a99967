//! What a backend has from its keeper.

use std::{
    collections::BTreeSet,
    fmt, io,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    DeviceFile, Inherited, Words,
    root::{FILES, NOW, READY, REPLACED, RESTARTS, Shared, TEXT, TEXT_WORDS, ring, was_rung},
    system::Blocked,
};

/// How long a backend waits for the keeper's announcement.
const ANNOUNCED: Timespec = Timespec {
    tv_sec: 5,
    tv_nsec: 0,
};

/// What a backend has from the keeper. Clones share it.
#[derive(Clone, Default)]
pub struct Kept(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    root: Option<Words>,
    shared: Option<Arc<Shared>>,
    /// Blocked until [`Kept::deliver_signals`].
    signals: Option<Blocked>,
    inherited: Inherited,
    files: Vec<(usize, DeviceFile)>,
}

impl Kept {
    pub(crate) fn new(
        shared: Arc<Shared>,
        root: Words,
        signals: Blocked,
        base: &BTreeSet<RawFd>,
    ) -> io::Result<Self> {
        let mut inherited = Inherited::all_but(base)?;
        let mut files = Vec::new();
        for index in FILES..root.len() {
            let Some(fd) = root.get(index).checked_sub(1) else {
                continue;
            };
            // Open until the copy has its place: this process may be killed in between.
            let former = inherited.claim(fd as RawFd);
            let file = former.as_ref().ok_or(io::ErrorKind::NotFound);
            match file
                .map_err(io::Error::from)
                .and_then(DeviceFile::take_over)
            {
                Ok(file) => {
                    root.set(index, file.as_fd().as_raw_fd() as u64 + 1);
                    files.push((index, file));
                }
                Err(error) => {
                    log::error!("cannot take over a device of the process before: {error}");
                    root.set(index, 0);
                }
            }
        }
        Ok(Self(Arc::new(Mutex::new(State {
            root: Some(root),
            shared: Some(shared),
            signals: Some(signals),
            inherited,
            files,
        }))))
    }

    /// Has this process get signals, for which it has handlers now: without, they would end it, and the keeper would
    /// start it again. Call it before this process has threads.
    ///
    /// # Errors
    ///
    /// Those of sigprocmask(2).
    pub fn deliver_signals(&self) -> io::Result<()> {
        match self.lock().signals.take() {
            Some(signals) => signals.undo(),
            None => Ok(()),
        }
    }

    /// How often the backend was started again. `None` without a keeper.
    pub fn restarts(&self) -> Option<u64> {
        Some(self.lock().root.as_ref()?.get(RESTARTS))
    }

    /// How often another keeper has taken over because one had ended. `None` without a keeper.
    pub fn replaced(&self) -> Option<u64> {
        Some(self.lock().root.as_ref()?.get(REPLACED))
    }

    /// Whether both keepers have ended: the backend goes on, and is not started again.
    pub fn is_alone(&self) -> bool {
        let state = self.lock();
        let ended = |shared: &Arc<Shared>| {
            // In this order: the spare becomes the keeper.
            shared.spare.is_vacant(NOW) && shared.keeper.is_vacant(NOW)
        };
        state.shared.as_ref().is_some_and(ended)
    }

    /// The backend serves what `text` says, of which the start is kept. Has the keeper [announce](keep) that, and waits
    /// for it.
    pub fn ready(&self, text: &str) {
        let shared = self.lock();
        if let Some(root) = &shared.root {
            let mut bytes = [0; 8 * TEXT_WORDS];
            let len = text.len().min(bytes.len());
            bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
            for (n, word) in bytes.as_chunks().0.iter().enumerate() {
                root.set(TEXT + n, u64::from_ne_bytes(*word));
            }
            root.set(READY, 1);
        }
        if let Some(places) = &shared.shared {
            was_rung(&places.announced);
            ring(&places.serves);
            // A signal would not reach a process outside of what Landlock confines this one to.
            let mut fds = [PollFd::new(&*places.announced, PollFlags::IN)];
            match poll(&mut fds, Some(&ANNOUNCED)) {
                Ok(1..) => drop(was_rung(&places.announced)),
                _ => log::warn!("the keeper does not announce that the backend serves"),
            }
        }
    }

    /// The files of the process before, with their places: once.
    pub fn files(&self) -> Vec<(usize, DeviceFile)> {
        std::mem::take(&mut self.lock().files)
    }

    /// The descriptor of this number, of those that the process before has left: once.
    pub fn claim(&self, fd: RawFd) -> Option<OwnedFd> {
        self.lock().inherited.claim(fd)
    }

    /// Closes the others.
    pub fn close_others(&self) {
        self.lock().inherited = Inherited::default();
    }

    /// Has the next backend find `file`. Returns its place; `None` without a keeper, or without room.
    pub fn register(&self, file: &DeviceFile) -> Option<usize> {
        let shared = self.lock();
        let root = shared.root.as_ref()?;
        let free = (FILES..root.len()).find(|index| root.get(*index) == 0)?;
        root.set(free, file.as_fd().as_raw_fd() as u64 + 1);
        Some(free)
    }

    /// Has the next backend not find what is at `place`.
    pub fn forget(&self, place: usize) {
        if let Some(root) = &self.lock().root {
            root.set(place, 0);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}
