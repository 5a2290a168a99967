//! A background process, with its log.

use std::{
    fs,
    io::{BufRead, BufReader, Read, pipe},
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use farside_testbed::Process;
use rustix::process::{Pid, Signal, kill_process};

use crate::SHORT;

/// The output of a process so far. Outlives the process.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<(Mutex<Lines>, Condvar)>);

#[derive(Default)]
struct Lines {
    lines: Vec<String>,
    closed: bool,
}

impl Log {
    /// Collects the output of `stream` on a thread.
    fn follow(&self, stream: impl Read + Send + 'static) {
        let log = self.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                log.lock().lines.push(line);
                log.0.1.notify_all();
            }
            log.lock().closed = true;
            log.0.1.notify_all();
        });
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn text(&self) -> String {
        self.lock().lines.join("\n")
    }

    /// Waits until `look` returns a value for the lines from `since` on. Returns `None` on
    /// timeout or at the end of the output.
    fn wait<T>(
        &self,
        since: usize,
        timeout: Duration,
        look: impl Fn(&[String]) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut lines = self.lock();
        loop {
            if let Some(found) = look(lines.lines.get(since..).unwrap_or_default()) {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if lines.closed || left.is_zero() {
                return None;
            }
            lines = self
                .0
                .1
                .wait_timeout(lines, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A background process, killed on drop.
pub struct Daemon {
    name: String,
    process: Process,
    log: Log,
    /// The socket of the keeper that is ended on drop: without it, others go on.
    keeper: Option<PathBuf>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(keeper) = &self.keeper {
            // Fails if it is not there any more.
            let _ = farside_keeper::end(keeper);
        }
    }
}

impl Daemon {
    /// The daemon is a keeper's, which listens at `keeper`: ends whatever process it is by then on drop.
    pub(crate) fn with_keeper(mut self, keeper: PathBuf) -> Self {
        self.keeper = Some(keeper);
        self
    }

    /// It goes on when this is dropped, with the next one.
    pub fn leave_to_the_next(mut self) {
        self.keeper = None;
    }

    /// Starts a process; error messages use `name`.
    pub fn start(name: &str, mut command: Command) -> Result<Self> {
        let (printed, stderr) = pipe().context("making a pipe")?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr);
        let process = Process::spawn(command).with_context(|| name.to_owned())?;
        let log = Log::default();
        log.follow(printed);
        Ok(Self {
            name: name.to_owned(),
            process,
            log,
            keeper: None,
        })
    }

    pub(crate) fn log_handle(&self) -> Log {
        self.log.clone()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// The number of lines logged so far, for [`Daemon::wait_log_since`].
    pub fn log_lines(&self) -> usize {
        self.log.lock().lines.len()
    }

    /// Waits for a line that contains `text`, and returns it.
    pub fn wait_log(&self, text: &str, timeout: Duration) -> Result<String> {
        self.wait_log_since(0, text, timeout)
    }

    /// As [`Daemon::wait_log`], for lines after the first `since`.
    pub fn wait_log_since(&self, since: usize, text: &str, timeout: Duration) -> Result<String> {
        self.log
            .wait(since, timeout, |lines| {
                lines.iter().find(|line| line.contains(text)).cloned()
            })
            .with_context(|| {
                format!(
                    "{} did not log {text:?} within {timeout:?} (or ended); its log:\n{}",
                    self.name,
                    self.log()
                )
            })
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.process.wait(Instant::now())?.is_none())
    }

    /// SIGTERM.
    pub fn terminate(&self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// SIGSTOP: the process hangs until it is killed.
    pub fn stop(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// SIGKILL; waits for the process to end.
    pub fn kill(&mut self) -> Result<()> {
        self.signal(Signal::KILL)?;
        let status = self.wait_exit(crate::SHORT)?;
        if status.signal() != Some(Signal::KILL.as_raw()) {
            bail!("{} had ended already: {status}", self.name);
        }
        Ok(())
    }

    /// SIGKILL for its child processes, and then for it, as a service manager sends it.
    pub fn kill_all(&mut self) -> Result<()> {
        for child in self.children() {
            // It may have ended.
            let _ = kill_process(child, Signal::KILL);
        }
        self.kill()
    }

    /// The child processes of all its threads, but for a spare keeper.
    pub fn children(&self) -> Vec<Pid> {
        let mut children = self.all_children();
        children.retain(|pid| !is_spare(*pid));
        children
    }

    /// The backend of a keeper: its only child once its spare has the name of one, which it takes when it starts.
    pub fn backend(&self) -> Result<Pid> {
        let deadline = Instant::now() + SHORT;
        loop {
            let children = self.children();
            if let [backend] = children[..] {
                return Ok(backend);
            }
            ensure!(
                Instant::now() < deadline,
                "not one backend of {} within {SHORT:?}: {children:?}",
                self.name
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The workers of a lender.
    pub fn workers(&self) -> Vec<Pid> {
        let is_worker = |pid: &Pid| {
            let path = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
            fs::read_to_string(path).is_ok_and(|arguments| arguments.contains("lease-worker"))
        };
        let mut children = self.children();
        children.retain(is_worker);
        children
    }

    /// The spare keeper.
    pub fn spare(&self) -> Option<Pid> {
        self.all_children().into_iter().find(|pid| is_spare(*pid))
    }

    fn all_children(&self) -> Vec<Pid> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid()));
        let threads = threads.into_iter().flatten().flatten();
        let children = threads.map(|thread| fs::read_to_string(thread.path().join("children")));
        let pids: String = children.map(Result::unwrap_or_default).collect();
        let pids = pids.split_whitespace().flat_map(str::parse);
        pids.filter_map(Pid::from_raw).collect()
    }

    /// Waits for the process to end, whose log others may go on with.
    pub fn wait_end(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let ended = self.process.wait(Instant::now() + timeout)?;
        ended.with_context(|| format!("{} does not end within {timeout:?}", self.name))
    }

    /// Waits for the process to end, and for the rest of its log.
    pub fn wait_exit(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let Some(status) = self.process.wait(Instant::now() + timeout)? else {
            bail!(
                "{} has not ended within {timeout:?}; its log:\n{}",
                self.name,
                self.log()
            );
        };
        // The log ends when the process has closed it.
        self.log
            .wait(usize::MAX, Duration::from_secs(5), |_| None::<()>);
        Ok(status)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process
            .signal(signal)
            .with_context(|| format!("signalling {}", self.name))
    }
}

fn is_spare(pid: Pid) -> bool {
    let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()));
    name.is_ok_and(|name| name.starts_with("farside-spare"))
}
