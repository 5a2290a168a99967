//! Child processes with a deadline.

use std::{
    io::{self, Read},
    os::unix::process::CommandExt,
    process::{Child, Command, Output, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};

/// Most bytes of output that are read. QEMU's list of devices has about 30 KB.
const MAX_OUTPUT: u64 = 4 << 20;

/// Why a command's output is not available.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The command could not be run.
    #[error("it cannot be run")]
    Run(#[source] io::Error),
    /// The command exceeded its limit; its process group was killed.
    #[error("it did not answer within {0:?}")]
    Late(Duration),
}

/// Runs `command` without input, in a process group of its own, and returns its output.
/// Kills the group after `limit`.
///
/// # Errors
/// [`OutputError`]. An unsuccessful exit is no error; see [`Output::status`].
pub fn output_within(command: &mut Command, limit: Duration) -> Result<Output, OutputError> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(OutputError::Run)?;
    let written = read_until_end(&mut child, Instant::now() + limit);
    if written.is_none() {
        // Fails only if no process of the group is left.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    }
    let status = child.wait().map_err(OutputError::Run)?;
    let [stdout, stderr] = written.ok_or(OutputError::Late(limit))?;
    Ok(Output {
        status,
        stdout,
        stderr,
    })
}

/// The child's standard output and error, if it exits in time.
fn read_until_end(child: &mut Child, deadline: Instant) -> Option<[Vec<u8>; 2]> {
    let left = || deadline.saturating_duration_since(Instant::now());
    let stdout = reader(child.stdout.take()?);
    let stderr = reader(child.stderr.take()?);
    let written = [
        stdout.recv_timeout(left()).ok()?,
        stderr.recv_timeout(left()).ok()?,
    ];
    ends_by(child, deadline).ok()?.then_some(written)
}

/// Waits until `child`, which must not have been reaped, has exited. Returns whether it
/// has by `deadline`.
///
/// # Errors
/// Fails if pidfd_open(2) does, for instance with EMFILE.
pub fn ends_by(child: &Child, deadline: Instant) -> io::Result<bool> {
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)) {
            Err(Errno::INTR) => {}
            ready => return Ok(ready? != 0),
        }
    }
}

fn reader(stream: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (send, receive) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stream.take(MAX_OUTPUT).read_to_end(&mut bytes);
        // Fails after the deadline: the receiver is dropped.
        let _ = send.send(bytes);
    });
    receive
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, limit: Duration) -> Result<Output, OutputError> {
        output_within(Command::new("/bin/sh").args(["-c", script]), limit)
    }

    #[test]
    fn output_comes_with_the_status() {
        let output = sh("echo yes; echo no >&2; exit 3", Duration::from_secs(60)).unwrap();
        assert_eq!(output.stdout, b"yes\n");
        assert_eq!(output.stderr, b"no\n");
        assert_eq!(output.status.code(), Some(3));
    }

    #[test]
    fn a_hanging_command_is_killed_with_its_children() {
        let limit = Duration::from_millis(50);
        let began = Instant::now();
        // A child that also holds the pipes; and a command that has closed them.
        for script in ["sleep 1000 & wait", "exec >&- 2>&-; sleep 1000"] {
            let error = sh(script, limit).unwrap_err();
            assert!(matches!(error, OutputError::Late(_)), "{script}: {error}");
        }
        assert!(began.elapsed() < Duration::from_secs(500));
    }

    #[test]
    fn waits_for_the_exit_of_a_child() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take();
        assert!(!ends_by(&child, Instant::now() + Duration::from_millis(50)).unwrap());
        drop(input);
        assert!(ends_by(&child, Instant::now() + Duration::from_secs(60)).unwrap());
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn a_missing_command_cannot_be_run() {
        let error = output_within(&mut Command::new("/no/such"), Duration::from_secs(1));
        assert!(matches!(error, Err(OutputError::Run(_))), "{error:?}");
    }
}
