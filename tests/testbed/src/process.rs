//! Child processes that do not outlive this one.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal, set_parent_process_death_signal,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A child process, or one started elsewhere; killed on drop.
#[derive(Debug)]
pub struct Process {
    child: Option<Mutex<Child>>,
    id: u32,
    pidfd: OwnedFd,
}

impl Process {
    /// Starts a command. The child is killed when this process ends, not when the calling
    /// thread does.
    pub fn spawn(command: Command) -> Result<Self> {
        let shown = format!("{command:?}");
        let child =
            spawn_from_lasting_thread(command).with_context(|| format!("starting {shown}"))?;
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
        Ok(Process {
            id: child.id(),
            child: Some(Mutex::new(child)),
            pidfd,
        })
    }

    /// The process that connects to both sockets, and the connections. Connections of ended
    /// processes are skipped.
    pub(crate) fn adopt(
        first: &UnixListener,
        second: &UnixListener,
        timeout: Duration,
    ) -> Result<(Self, UnixStream, UnixStream)> {
        let deadline = Instant::now() + timeout;
        let mut one = accept_living(first, deadline)?;
        let mut two = accept_living(second, deadline)?;
        while one.pid != two.pid {
            // One of them has ended since; the listeners return connections in order.
            match has_ended(&one.pidfd)? {
                true => one = accept_living(first, deadline)?,
                false => two = accept_living(second, deadline)?,
            }
        }
        let process = Process {
            id: one.pid.as_raw_nonzero().get().cast_unsigned(),
            child: None,
            pidfd: one.pidfd,
        };
        Ok((process, one.stream, two.stream))
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Accepts the child's connection; fails if the child ends first.
    pub(crate) fn accept(&self, listener: &UnixListener, deadline: Instant) -> Result<UnixStream> {
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(&self.pidfd, PollFlags::IN),
        ];
        if !poll_until(&mut fds, deadline)? {
            bail!("it did not connect to its socket in time");
        }
        if fds[0].revents().is_empty() {
            bail!("it ended");
        }
        Ok(listener.accept().context("accepting a connection")?.0)
    }

    /// How the child ended, or `None` at the deadline. A process that is not our child has
    /// no exit status here: it counts as successful.
    pub fn wait(&self, deadline: Instant) -> Result<Option<ExitStatus>> {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        if !poll_until(&mut fds, deadline)? {
            return Ok(None);
        }
        let Some(child) = &self.child else {
            return Ok(Some(ExitStatus::default()));
        };
        let mut child = child.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Some(child.wait().context("waiting for a child process")?))
    }

    /// Sends a signal. Fails if the child has been waited for.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(pidfd_send_signal(&self.pidfd, signal)?)
    }

    pub(crate) fn kill(&self) {
        // Fails only if it has already ended.
        let _ = self.signal(Signal::KILL);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        let Some(child) = &mut self.child else {
            return;
        };
        let child = child.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = child.wait() {
            log::warn!("waiting for process {}: {error}", self.id);
        }
    }
}

/// A connection, and the process at its other end.
struct Connected {
    pid: Pid,
    pidfd: OwnedFd,
    stream: UnixStream,
}

fn accept_living(listener: &UnixListener, deadline: Instant) -> Result<Connected> {
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        if !poll_until(&mut fds, deadline)? {
            bail!("none did in time");
        }
        let stream = listener.accept().context("accepting a connection")?.0;
        let pid = rustix::net::sockopt::socket_peercred(&stream)
            .context("asking who connected")?
            .pid;
        if let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
            && !has_ended(&pidfd)?
        {
            return Ok(Connected { pid, pidfd, stream });
        }
    }
}

fn has_ended(pidfd: &OwnedFd) -> Result<bool> {
    poll_until(&mut [PollFd::new(pidfd, PollFlags::IN)], Instant::now())
}

/// Polls; false when the deadline passes first.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], deadline: Instant) -> Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(fds, Some(&timeout)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
    }
}

/// Makes the kernel kill the child when the *thread* that starts it ends
/// (`PR_SET_PDEATHSIG`).
#[expect(unsafe_code, reason = "the hook between fork and exec")]
pub fn die_with_us(command: &mut Command) {
    let parent = rustix::process::getpid();
    let hook = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the call above took effect.
        if rustix::process::getppid() != Some(parent) {
            return Err(std::io::Error::from(rustix::io::Errno::SRCH));
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe code may run; the hook
    // makes two system calls and neither allocates nor locks.
    unsafe { command.pre_exec(hook) };
}

type Order = (Command, CpuSet, Sender<std::io::Result<Child>>);

/// Starts a command on a thread that lasts as long as the process: see [`die_with_us`]. It inherits
/// the caller's CPU affinity all the same.
fn spawn_from_lasting_thread(mut command: Command) -> Result<Child> {
    static SPAWNER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    die_with_us(&mut command);
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, orders) = channel::<Order>();
        std::thread::Builder::new()
            .name("spawner".to_owned())
            .spawn(move || {
                for (mut command, cpus, result) in orders {
                    let child = sched_setaffinity(None, &cpus)
                        .map_err(std::io::Error::from)
                        .and_then(|()| command.spawn());
                    // The caller waits for the result.
                    let _ = result.send(child);
                }
            })
            .expect("a process can have one more thread");
        Mutex::new(sender)
    });
    let cpus = sched_getaffinity(None).context("reading this thread's CPU affinity")?;
    let (sender, result) = channel();
    spawner
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .send((command, cpus, sender))
        .ok()
        .context("the thread that starts processes is gone")?;
    Ok(result
        .recv()
        .context("the thread that starts processes is gone")??)
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    fn spawn(script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        Process::spawn(command).unwrap()
    }

    #[test]
    fn a_child_inherits_the_affinity_of_the_thread_that_asked_for_it() {
        let all = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|&cpu| all.is_set(cpu)).unwrap();
        let mut one = CpuSet::new();
        one.set(last);
        let of = |process: &Process| sched_getaffinity(Pid::from_raw(process.id() as i32)).unwrap();
        let pinned = std::thread::spawn(move || {
            sched_setaffinity(None, &one).unwrap();
            spawn("sleep 60")
        });
        assert_eq!(of(&pinned.join().unwrap()), one);
        assert_eq!(of(&spawn("sleep 60")), all);
    }

    #[test]
    fn a_child_outlives_the_thread_that_asked_for_it() {
        let process = std::thread::spawn(|| spawn("sleep 60")).join().unwrap();
        let soon = Instant::now() + Duration::from_millis(200);
        assert!(process.wait(soon).unwrap().is_none());
    }

    #[test]
    fn the_end_is_seen() {
        let process = spawn("exit 3");
        let status = process
            .wait(Instant::now() + Duration::from_secs(20))
            .unwrap();
        assert_eq!(status.unwrap().code(), Some(3));
    }

    #[test]
    fn somebody_elses_process_is_adopted_by_its_connections() {
        let dir = tempfile::tempdir().unwrap();
        let listeners = ["a", "b"].map(|name| UnixListener::bind(dir.path().join(name)).unwrap());
        let connect = |name| UnixStream::connect(dir.path().join(name)).unwrap();
        let streams = [connect("a"), connect("b")];
        let soon = Duration::from_secs(20);
        let (process, one, _two) = Process::adopt(&listeners[0], &listeners[1], soon).unwrap();
        // It is this process, which must not be killed.
        assert_eq!(process.id(), std::process::id());
        std::mem::forget(process);
        drop(streams);
        assert_eq!(std::io::Read::read(&mut &one, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn accept_ends_when_the_child_does() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let process = spawn("exit 1");
        let deadline = Instant::now() + Duration::from_secs(20);
        let error = process.accept(&listener, deadline).unwrap_err();
        assert_eq!(error.to_string(), "it ended");
    }
}
