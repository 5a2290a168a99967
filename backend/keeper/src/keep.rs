//! The process that holds what a backend leaves.

use std::{
    collections::BTreeSet,
    fmt, io,
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::{Errno, read, write},
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
};

use crate::{
    DeviceFile, Inherited, Words, inherited,
    system::{self, Area, Blocked, Cloned},
};

/// Signals that are passed on to the backend.
const PASSED: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// So many restarts in [`SOON`] are too many, such as those of a guest that has found how to crash its backend.
const MOST: usize = 100;
const SOON: Duration = Duration::from_secs(10);

/// So many in a row are, if none was [ready](Kept::ready).
const MOST_UNREADY: usize = 5;

/// How long a backend waits for the keeper's announcement.
const ANNOUNCED: Timespec = Timespec {
    tv_sec: 5,
    tv_nsec: 0,
};

/// Exit code of a Rust program that has panicked.
const PANICKED: i32 = 101;

/// Words that keeper and backend share: restarts, whether the backend serves, what it serves, and then descriptors of
/// device files and 1.
const ROOT: usize = 16 << 10;
const RESTARTS: usize = 0;
const READY: usize = 1;
const TEXT: usize = 8;
const TEXT_WORDS: usize = 64;
const FILES: usize = TEXT + TEXT_WORDS;

/// What a backend has from the keeper. Clones share it.
#[derive(Clone, Default)]
pub struct Kept(Arc<Mutex<Shared>>);

#[derive(Default)]
struct Shared {
    root: Option<Words>,
    keeper: Option<Pid>,
    bell: Option<Arc<Bell>>,
    /// Blocked until [`Kept::deliver_signals`].
    signals: Option<Blocked>,
    inherited: Inherited,
    files: Vec<(usize, DeviceFile)>,
}

/// Two eventfds of the keeper. They are closed when both processes have ended, as both have one table of descriptors.
struct Bell {
    /// The backend serves.
    serves: ManuallyDrop<OwnedFd>,
    announced: ManuallyDrop<OwnedFd>,
}

impl Bell {
    fn new() -> io::Result<Self> {
        let make = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self {
            serves: ManuallyDrop::new(make()?),
            announced: ManuallyDrop::new(make()?),
        })
    }
}

impl Kept {
    fn new(
        (keeper, bell): (Pid, Arc<Bell>),
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
            let file = inherited.claim(fd as RawFd).ok_or(io::ErrorKind::NotFound);
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
        Ok(Self(Arc::new(Mutex::new(Shared {
            root: Some(root),
            keeper: Some(keeper),
            bell: Some(bell),
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

    /// Whether the keeper has ended: the backend goes on, and is not started again.
    pub fn is_alone(&self) -> bool {
        let keeper = self.lock().keeper;
        keeper.is_some_and(|keeper| rustix::process::getppid() != Some(keeper))
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
        if let Some(bell) = &shared.bell {
            let mut fds = [PollFd::new(&*bell.announced, PollFlags::IN)];
            // The counters are small, so neither blocks. A signal would not reach a process outside of what Landlock
            // confines this one to.
            let announced = write(&*bell.serves, &1u64.to_ne_bytes())
                .and_then(|_| poll(&mut fds, Some(&ANNOUNCED)));
            match announced {
                Ok(1..) => drop(read(&*bell.announced, &mut [0; 8])),
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

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}

/// Runs `backend` in a process of its own, and again when that is killed, until it ends by itself. Returns its exit code,
/// in both processes. Call it before this process has threads. `announce` is called in the keeper when the backend is
/// [ready](Kept::ready), with its text, which has no control characters.
///
/// # Errors
///
/// Those of the system calls.
pub fn keep(backend: impl FnOnce(Kept) -> u8, announce: impl Fn(&str)) -> io::Result<u8> {
    let area = Area::map(DeviceFile::root(ROOT)?, 0..ROOT)?;
    let root = Words::new(area, ROOT / 8);
    let signals = Blocked::new(&[&PASSED[..], &[libc::SIGCHLD]].concat())?;
    let reader = ManuallyDrop::new(signals.descriptor()?);
    let bell = Arc::new(Bell::new()?);
    let base = inherited::open()?;
    let keeper = rustix::process::getpid();
    // Descriptors that it owns are the backend's: dropped here, they would be closed a second time.
    let backend = ManuallyDrop::new(backend);
    let mut starts = Vec::<Instant>::new();
    let mut unready = 0;
    // The signal that has asked the backend to end.
    let mut asked = None;
    loop {
        root.set(READY, 0);
        let pid = match system::clone_with_files()? {
            Cloned::Child => {
                let kept = Kept::new((keeper, bell), root, signals, &base)?;
                return Ok(ManuallyDrop::into_inner(backend)(kept));
            }
            Cloned::Parent(pid) => pid,
        };
        let announce = || announce(&text(&root));
        let how = wait(pid, reader.as_fd(), &bell, announce, &mut asked)?;
        let Some(signal) = how.restart else {
            return Ok(how.code);
        };
        let now = Instant::now();
        starts.retain(|start| now.duration_since(*start) < SOON);
        starts.push(now);
        unready = match root.get(READY) {
            0 => unready + 1,
            _ => 0,
        };
        if unready == MOST_UNREADY || starts.len() > MOST {
            log::error!(
                "the backend (process {pid}) has ended by {signal}, {unready} times in a row before it was ready, {} times within {SOON:?}: not starting it again; its VM loses its devices",
                starts.len()
            );
            return Ok(how.code);
        }
        root.set(RESTARTS, root.get(RESTARTS) + 1);
        log::warn!("the backend (process {pid}) has ended by {signal}: starting it again");
    }
}

/// What the backend serves.
fn text(root: &Words) -> String {
    let words = (TEXT..FILES).map(|word| root.get(word).to_ne_bytes());
    let bytes: Vec<u8> = words.flatten().collect();
    let text = String::from_utf8_lossy(&bytes);
    text.chars().filter(|char| !char.is_control()).collect()
}

/// How a backend has ended.
struct End {
    code: u8,
    /// By what, if not by itself.
    restart: Option<String>,
}

/// Waits for the end of the backend, which one before was `asked` for by a signal.
fn wait(
    pid: i32,
    signals: BorrowedFd<'_>,
    bell: &Bell,
    announce: impl Fn(),
    asked: &mut Option<Signal>,
) -> io::Result<End> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    if let Some(signal) = *asked {
        // It may have ended just now.
        let _ = kill_process(pid, signal);
    }
    loop {
        if let Some((_, status)) = waitpid(Some(pid), WaitOptions::NOHANG)? {
            let code = status.exit_status().unwrap_or_default();
            return Ok(match status.terminating_signal() {
                Some(signal) => End {
                    code: 128u8.saturating_add(signal as u8),
                    restart: Some(format!("signal {signal}")),
                },
                None => End {
                    code: code as u8,
                    restart: (code == PANICKED).then(|| "a panic".into()),
                },
            });
        }
        let mut fds = [
            PollFd::new(&signals, PollFlags::IN),
            PollFd::new(&*bell.serves, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            polled => polled?,
        };
        if read(&*bell.serves, &mut [0; 8]).is_ok() {
            announce();
            write(&*bell.announced, &1u64.to_ne_bytes())?;
        }
        let Some(signalled) = system::next_signal(signals)? else {
            continue;
        };
        // What a terminal sends, it sends to the backend, too.
        if signalled.by_process
            && let Some(signal) = Signal::from_named_raw(signalled.signal)
            && PASSED.contains(&signalled.signal)
        {
            let _ = kill_process(pid, signal);
            *asked = Some(signal);
        }
    }
}
