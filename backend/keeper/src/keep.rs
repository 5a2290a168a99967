//! The processes that hold what a backend leaves.
//!
//! Two have the backend's table of descriptors: the *keeper*, which starts the backend, and the *spare*, which waits for the
//! keeper's end, and is the keeper then. Each keeper starts a spare when the backend serves, and another one when that has
//! ended. So any of the three may be killed. Who has which role, all know by [places](crate::root::Place) in the table.

use std::{
    collections::BTreeSet,
    io,
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
    time::{Duration, Instant},
};

use farside_daemon::OwnedListener;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, Signal, WaitOptions, getpid, kill_process, pidfd_send_signal, waitpid},
};

use crate::{
    Kept, Words,
    handover::{self, Former, HandoverError, Wants},
    inherited,
    root::{
        ASKED, ENDED, FILES, LEFT, NOW, READY, REPLACED, RESTARTS, STARTS, Shared, TEXT, map, ring,
        was_rung,
    },
    system::{self, Blocked, Cloned},
};

/// Signals that are passed on to the backend.
const PASSED: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Signals that a keeper waits for.
pub(crate) const SIGNALS: [i32; 5] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGCHLD,
    libc::SIGUSR1,
];

/// So many restarts in [`SOON`] are too many, such as those of a guest that has found how to crash its backend.
const MOST: usize = 100;
const SOON: Duration = Duration::from_secs(10);

/// So many in a row are, if none was [ready](Kept::ready).
const MOST_UNREADY: usize = 5;

/// How long the next attempt waits if there can be no spare.
const AGAIN: Duration = Duration::from_secs(1);

/// Timeout for a process to end that was killed, and for a spare to begin.
const SOME: Timespec = Timespec {
    tv_sec: 5,
    tv_nsec: 0,
};

/// Exit code of a Rust program that has panicked.
const PANICKED: i32 = 101;

/// Names of processes, for `ps`.
const KEEPER: &std::ffi::CStr = c"farside";
const SPARE: &std::ffi::CStr = c"farside-spare";

/// What [`keep`] needs.
pub struct Options<'a> {
    /// What a former keeper of the same backend has left.
    pub former: Former,
    /// Called in the keeper when the backend is [ready](Kept::ready), with its text, which has no control characters.
    pub announce: &'a dyn Fn(&str),
    /// The backend gets another SIGTERM so long after the first.
    pub patience: Option<Duration>,
}

/// What the process is at the end of [`Keeper::run`].
enum Outcome {
    Backend,
    Ended(u8),
}

/// Runs `backend` in a process of its own, and again when that is killed, until it ends by itself. Returns its exit code,
/// in all processes. Call it before this process has threads. SIGUSR1 ends this process, and leaves the backend to the spare
/// and to the next process that [takes](Former::take) it.
///
/// # Errors
///
/// Those of the system calls.
pub fn keep(backend: impl FnOnce(Kept) -> u8, options: Options<'_>) -> Result<u8, HandoverError> {
    let left = options.former.into_left()?;
    let signals = left.signals;
    let root = map(&*left.root)?;
    let reader = ManuallyDrop::new(signals.descriptor()?);
    let shared = Shared::new()?;
    shared.keeper.take()?;
    let mut base = inherited::open()?;
    base.retain(|fd| !left.numbers.contains(fd));
    // Descriptors that it owns are the backend's: dropped here, they would be closed a second time.
    let backend = ManuallyDrop::new(backend);
    let mut keeper = Keeper {
        shared,
        root,
        signals,
        reader,
        base,
        root_number: left.root.as_raw_fd(),
        listener: left.listener,
        announce: options.announce,
        patience: options.patience,
        is_first: true,
        is_leaving: false,
        backend: None,
        spare: None,
        no_spare_until: None,
        starts: Vec::new(),
        unready: 0,
        again_at: None,
    };
    if left.is_taken {
        keeper.restarted();
        keeper.root.set(LEFT, 0);
    }
    if let Some(signal) = Signal::from_named_raw(keeper.root.get(ASKED) as i32) {
        keeper.expect_end(signal);
    }
    let outcome = match keeper.start()? {
        Some(outcome) => outcome,
        None => keeper.run()?,
    };
    match outcome {
        Outcome::Ended(code) => Ok(code),
        Outcome::Backend => {
            let Keeper {
                shared,
                root,
                signals,
                base,
                ..
            } = keeper;
            let ended = map(&*left.root)?;
            let kept = Kept::new(shared, root, signals, &base)?;
            let code = ManuallyDrop::into_inner(backend)(kept);
            ended.set(ENDED, u64::from(code) + 1);
            Ok(code)
        }
    }
}

struct Keeper<'a> {
    shared: Arc<Shared>,
    root: Words,
    signals: Blocked,
    reader: ManuallyDrop<OwnedFd>,
    /// Descriptors that no backend leaves.
    base: BTreeSet<RawFd>,
    root_number: RawFd,
    /// Of the process that goes on.
    listener: ManuallyDrop<OwnedListener>,
    announce: &'a dyn Fn(&str),
    patience: Option<Duration>,
    /// It was started as such, and has not taken over: nobody else may have the backend.
    is_first: bool,
    is_leaving: bool,
    /// The backend, if it is this process's child.
    backend: Option<Pid>,
    spare: Option<Pid>,
    no_spare_until: Option<Instant>,
    starts: Vec<Instant>,
    unready: usize,
    /// When the backend gets the next SIGTERM.
    again_at: Option<Instant>,
}

/// How a backend has ended.
struct End {
    code: u8,
    /// By what, if not by itself.
    restart: Option<String>,
}

impl Keeper<'_> {
    fn run(&mut self) -> io::Result<Outcome> {
        loop {
            if let Some(end) = self.backend_end()? {
                let restart = self.root.get(ENDED) == 0 && end.restart.is_some();
                if !restart || !self.may_start(&end) {
                    return Ok(self.end(end.code));
                }
                self.restarted();
                if let Some(outcome) = self.start()? {
                    return Ok(outcome);
                }
            }
            self.reap_spare()?;
            let serves = self.root.get(READY) != 0;
            if serves && self.spare.is_none() && self.no_spare_until.is_none() {
                self.make_spare();
                continue;
            }
            if self.is_leaving && self.spare.is_some() {
                self.root.set(LEFT, 1);
                return Ok(Outcome::Ended(0));
            }
            if let Some(outcome) = self.wait(serves)? {
                return Ok(outcome);
            }
        }
    }

    /// Waits for an event, and does what it asks for.
    fn wait(&mut self, serves: bool) -> io::Result<Option<Outcome>> {
        let now = Instant::now();
        let until = self.again_at.into_iter().chain(self.no_spare_until).min();
        let left = until.map(|until| until.saturating_duration_since(now));
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        let backend = self.shared.backend.pidfd();
        let mut fds = vec![
            PollFd::new(&*self.reader, PollFlags::IN),
            PollFd::new(&*self.shared.serves, PollFlags::IN),
        ];
        if self.backend.is_none() {
            fds.push(PollFd::from_borrowed_fd(backend, PollFlags::IN));
        }
        // While a backend starts, the table has no descriptors but those that it finds and its own.
        if serves {
            fds.push(PollFd::new(&*self.listener, PollFlags::IN));
        }
        match poll(&mut fds, left.as_ref()) {
            Err(Errno::INTR) => return Ok(None),
            polled => polled?,
        };
        let now = Instant::now();
        self.no_spare_until = self.no_spare_until.filter(|until| *until > now);
        if self.again_at.is_some_and(|at| at <= now) {
            self.again_at = None;
            self.pass(Signal::TERM);
        }
        if was_rung(&self.shared.serves) {
            (self.announce)(&text(&self.root));
            ring(&self.shared.announced);
        }
        self.serve_signals()?;
        match serves {
            true => self.serve_peer(),
            false => Ok(None),
        }
    }

    fn serve_signals(&mut self) -> io::Result<()> {
        while let Some(signalled) = system::next_signal(self.reader.as_fd())? {
            if signalled.signal == libc::SIGUSR1 {
                self.is_leaving = true;
            }
            // What a terminal sends, it sends to the backend, too.
            if signalled.by_process
                && let Some(signal) = Signal::from_named_raw(signalled.signal)
                && PASSED.contains(&signalled.signal)
            {
                self.root.set(ASKED, signalled.signal as u64);
                self.expect_end(signal);
                self.pass(signal);
            }
        }
        Ok(())
    }

    /// The backend was asked to end by `signal`.
    fn expect_end(&mut self, signal: Signal) {
        if let (Signal::TERM, Some(patience), None) = (signal, self.patience, self.again_at) {
            self.again_at = Some(Instant::now() + patience);
        }
    }

    fn pass(&self, signal: Signal) {
        // It may have ended just now.
        let _ = match self.backend {
            Some(pid) => kill_process(pid, signal),
            None => pidfd_send_signal(self.shared.backend.pidfd(), signal),
        };
    }

    fn serve_peer(&mut self) -> io::Result<Option<Outcome>> {
        let Ok(Some(peer)) = self.listener.accept() else {
            return Ok(None);
        };
        match handover::greet(&peer, self.is_first && !self.is_leaving) {
            Some(Wants::End) => {
                self.kill_backend();
                Ok(Some(self.end(128 + Signal::KILL.as_raw() as u8)))
            }
            Some(Wants::All) => {
                if !self.kill_backend() {
                    return Ok(None);
                }
                self.end_spare();
                let mut fds = inherited::open()?;
                fds.retain(|fd| !self.base.contains(fd) && *fd != peer.as_raw_fd());
                let marked = [self.root_number, self.listener.as_raw_fd()];
                match handover::give(&peer, &fds, marked) {
                    Ok(()) => Ok(Some(Outcome::Ended(0))),
                    Err(error) => {
                        log::error!(
                            "the next process has not taken the backend over, which is started again: {error}"
                        );
                        Ok(None)
                    }
                }
            }
            None => Ok(None),
        }
    }

    /// How the backend has ended, if it has.
    fn backend_end(&mut self) -> io::Result<Option<End>> {
        let Some(pid) = self.backend else {
            if !self.shared.backend.is_vacant(NOW) {
                return Ok(None);
            }
            // One that the former keeper has started just now finds that it is not wanted.
            self.root.set(STARTS, self.root.get(STARTS) + 1);
            fence(Ordering::SeqCst);
            if !self.shared.backend.is_vacant(NOW) {
                return Ok(None);
            }
            let code = self.root.get(ENDED).saturating_sub(1) as u8;
            return Ok(Some(End {
                code,
                restart: Some("a signal".into()),
            }));
        };
        let Some((_, status)) = waitpid(Some(pid), WaitOptions::NOHANG)? else {
            return Ok(None);
        };
        self.backend = None;
        let code = status.exit_status().unwrap_or_default();
        Ok(Some(match status.terminating_signal() {
            Some(signal) => End {
                code: 128u8.saturating_add(signal as u8),
                restart: Some(format!("signal {signal}")),
            },
            None => End {
                code: code as u8,
                restart: (code == PANICKED).then(|| "a panic".into()),
            },
        }))
    }

    fn may_start(&mut self, end: &End) -> bool {
        let by = end.restart.as_deref().unwrap_or_default();
        let now = Instant::now();
        self.starts
            .retain(|start| now.duration_since(*start) < SOON);
        self.starts.push(now);
        self.unready = match self.root.get(READY) {
            0 => self.unready + 1,
            _ => 0,
        };
        if self.unready == MOST_UNREADY || self.starts.len() > MOST {
            log::error!(
                "the backend has ended by {by}, {} times in a row before it was ready, {} times within {SOON:?}: not starting it again; its VM loses its devices",
                self.unready,
                self.starts.len()
            );
            return false;
        }
        log::warn!("the backend has ended by {by}: starting it again");
        true
    }

    fn restarted(&self) {
        self.root.set(RESTARTS, self.root.get(RESTARTS) + 1);
    }

    /// Starts the backend. Returns what this process is if it is not the keeper.
    fn start(&mut self) -> io::Result<Option<Outcome>> {
        let turn = self.root.get(STARTS) + 1;
        self.root.set(READY, 0);
        self.root.set(ENDED, 0);
        self.root.set(STARTS, turn);
        match system::clone_with_files()? {
            Cloned::Child => {
                self.shared.backend.take()?;
                fence(Ordering::SeqCst);
                Ok(Some(match self.root.get(STARTS) == turn {
                    true => Outcome::Backend,
                    false => Outcome::Ended(0),
                }))
            }
            Cloned::Parent(pid) => {
                self.backend = Pid::from_raw(pid);
                if let Some(signal) = Signal::from_named_raw(self.root.get(ASKED) as i32) {
                    self.pass(signal);
                }
                Ok(None)
            }
        }
    }

    fn reap_spare(&mut self) -> io::Result<()> {
        if let Some(pid) = self.spare
            && waitpid(Some(pid), WaitOptions::NOHANG)?.is_some()
        {
            log::warn!("the spare keeper (process {pid}) has ended: starting another one");
            self.spare = None;
        }
        Ok(())
    }

    /// Starts the spare. Returns in the spare when it has become the keeper.
    fn make_spare(&mut self) {
        // One that the former keeper had started, and that was not wanted, may have taken the place since.
        if let Some(pid) = self.backend
            && let Err(error) = self.shared.backend.give(pid)
        {
            log::warn!("the next keeper may not find the backend: {error}");
        }
        was_rung(&self.shared.begun);
        let failed = match system::clone_with_files() {
            Ok(Cloned::Child) => return self.be_spare(),
            Ok(Cloned::Parent(pid)) => {
                self.spare = Pid::from_raw(pid);
                let mut fds = [
                    PollFd::new(&*self.shared.begun, PollFlags::IN),
                    PollFd::new(&*self.reader, PollFlags::IN),
                ];
                let begun = loop {
                    match poll(&mut fds, Some(&SOME)) {
                        Err(Errno::INTR) => {}
                        ready => break ready.is_ok_and(|ready| ready > 0),
                    }
                };
                (!begun).then(|| io::Error::from(io::ErrorKind::TimedOut))
            }
            Err(error) => Some(error),
        };
        if let Some(error) = failed {
            self.end_spare();
            self.no_spare_until = Some(Instant::now() + AGAIN);
            log::warn!("cannot start a spare keeper, trying again in {AGAIN:?}: {error}");
        }
    }

    fn be_spare(&mut self) {
        // For `ps` alone.
        let _ = rustix::thread::set_name(SPARE);
        (self.backend, self.spare, self.is_first) = (None, None, false);
        if let Err(error) = self.shared.spare.take() {
            log::error!("cannot run the spare keeper: {error}");
            std::process::exit(1);
        }
        ring(&self.shared.begun);
        while !self.shared.keeper.is_vacant(None) {}
        // Without a descriptor in between, which a backend that starts would find.
        let own = self.shared.spare.pidfd();
        let taken = system::replace(own, self.shared.keeper.number());
        if let Err(error) = taken.and_then(|()| self.shared.spare.vacate(&self.shared.nobody)) {
            log::error!("cannot take over: {error}");
        }
        let _ = rustix::thread::set_name(KEEPER);
        let pid = getpid();
        match self.root.get(LEFT) {
            0 => {
                self.root.set(REPLACED, self.root.get(REPLACED) + 1);
                log::warn!("the keeper has ended: process {pid} goes on in its place");
            }
            _ => log::info!("process {pid} keeps the backend until the next service takes it"),
        }
        if let Some(signal) = Signal::from_named_raw(self.root.get(ASKED) as i32) {
            self.expect_end(signal);
        }
    }

    /// Kills the backend. Returns whether it has ended.
    fn kill_backend(&mut self) -> bool {
        self.pass(Signal::KILL);
        let ended = self.shared.backend.is_vacant(Some(SOME));
        if ended && let Some(pid) = self.backend.take() {
            // Fails if it was waited for.
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
        ended
    }

    fn end_spare(&mut self) {
        if let Some(pid) = self.spare.take() {
            // It may have ended.
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }

    /// The backend has ended for good.
    fn end(&mut self, code: u8) -> Outcome {
        self.end_spare();
        handover::remove(&self.listener);
        Outcome::Ended(code)
    }
}

/// What the backend serves.
fn text(root: &Words) -> String {
    let words = (TEXT..FILES).map(|word| root.get(word).to_ne_bytes());
    let bytes: Vec<u8> = words.flatten().collect();
    let text = String::from_utf8_lossy(&bytes);
    text.chars().filter(|char| !char.is_control()).collect()
}
