//! Runs one shell command with a timeout, and collects its output.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use farside_guest_agent::{Answer, MAX_OUTPUT};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// One output stream of the command.
struct Stream<R> {
    pipe: Option<R>,
    bytes: Vec<u8>,
}

impl<R: Read + AsFd> Stream<R> {
    fn new(pipe: Option<R>) -> Result<Self> {
        let pipe = pipe.context("command has no pipe")?;
        let flags = fcntl_getfl(&pipe).context("reading a pipe's flags")?;
        fcntl_setfl(&pipe, flags | OFlags::NONBLOCK).context("making a pipe non-blocking")?;
        Ok(Stream {
            pipe: Some(pipe),
            bytes: Vec::new(),
        })
    }

    /// Reads the available output; closes the pipe at its end. Output beyond [`MAX_OUTPUT`]
    /// is read (so that the command does not block) and discarded.
    fn drain(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        let mut chunk = [0; 65536];
        loop {
            match pipe.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => {
                    let room = MAX_OUTPUT - self.bytes.len();
                    self.bytes.extend_from_slice(&chunk[..n.min(room)]);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.pipe = None;
    }
}

/// Runs `sh -c command`. Returns when the shell exits, even if a background process still
/// holds its output open.
pub fn run(command: &str, timeout: Duration) -> Result<Answer> {
    let deadline = Instant::now() + timeout;
    let mut child = Command::new("/bin/sh")
        .arg("-c")
        .arg(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .context("starting /bin/sh")?;
    let pid = Pid::from_child(&child);
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
    let mut stdout = Stream::new(child.stdout.take())?;
    let mut stderr = Stream::new(child.stderr.take())?;
    let mut timed_out = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() && !timed_out {
            timed_out = true;
            // It may have just exited, and then there is nothing to kill.
            let _ = kill_process_group(pid, Signal::KILL);
        }
        let wait = (!timed_out).then(|| Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let mut fds = vec![PollFd::new(&pidfd, PollFlags::IN)];
        fds.extend(stdout.pipe.as_ref().map(|p| PollFd::new(p, PollFlags::IN)));
        fds.extend(stderr.pipe.as_ref().map(|p| PollFd::new(p, PollFlags::IN)));
        match poll(&mut fds, wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
        let ended = !fds[0].revents().is_empty();
        stdout.drain();
        stderr.drain();
        if ended {
            break;
        }
    }
    let status = child.wait().context("waiting for the command")?;
    Ok(Answer::Exit {
        code: status.code(),
        signal: status.signal(),
        timed_out,
        stdout: STANDARD.encode(&stdout.bytes),
        stderr: STANDARD.encode(&stderr.bytes),
    })
}
