//! A program that is asked something, and has a deadline.

use std::{
    ffi::OsStr,
    io::{self, Read},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};

use crate::Host;

/// Longest answer, bytes. QEMU lists its devices in some 30 KB.
const MAX_ANSWER: u64 = 4 << 20;

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum RunError {
    /// It cannot be run.
    Run(io::Error),
    /// It did not answer in time.
    Late(Duration),
    /// It ended with an error, and said why.
    Failed { status: ExitStatus, said: String },
}

impl std::fmt::Display for RunError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Run(error) => write!(f, "it cannot be run: {error}"),
            Self::Late(limit) => write!(f, "it did not answer within {limit:?}"),
            Self::Failed { status, said } => write!(f, "it failed ({status}): {said}"),
        }
    }
}

impl Host {
    /// Runs a program, and returns what it prints.
    pub(crate) fn ask(&self, program: &Path, args: &[&str]) -> Result<String, RunError> {
        let mut command = Command::new(program);
        command
            .args(args.iter().map(OsStr::new))
            // Its words are looked at.
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        if let Some(path) = &self.path {
            command.env("PATH", path);
        }
        let mut child = command.spawn().map_err(RunError::Run)?;
        let deadline = Instant::now() + self.patience;
        let answer = listen(&mut child, deadline);
        if answer.is_none() {
            // What it has started, too.
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        }
        let status = child.wait().map_err(RunError::Run)?;
        let Some([out, complaint]) = answer else {
            return Err(RunError::Late(self.patience));
        };
        match status.success() {
            true => Ok(out),
            false => Err(RunError::Failed {
                status,
                said: complaint.trim().to_owned(),
            }),
        }
    }
}

/// What it prints and what it complains of, if it ends in time.
fn listen(child: &mut Child, deadline: Instant) -> Option<[String; 2]> {
    let left = || deadline.saturating_duration_since(Instant::now());
    let out = reader(child.stdout.take()?);
    let complaint = reader(child.stderr.take()?);
    let answer = [
        out.recv_timeout(left()).ok()?,
        complaint.recv_timeout(left()).ok()?,
    ];
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).ok()?;
    let limit = Timespec::try_from(left()).ok()?;
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    let ended = poll(&mut fds, Some(&limit)).is_ok_and(|ready| ready != 0);
    ended.then_some(answer)
}

fn reader(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (send, receive) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stream.take(MAX_ANSWER).read_to_end(&mut bytes);
        // Nobody listens any more when the time was up.
        let _ = send.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receive
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, patience: Duration) -> Result<String, RunError> {
        let host = Host::this().with_patience(patience);
        host.ask(Path::new("/bin/sh"), &["-c", script])
    }

    #[test]
    fn an_answer_a_complaint_and_silence() {
        let long = Duration::from_secs(60);
        assert_eq!(sh("echo yes", long).unwrap(), "yes\n");
        let failed = sh("echo no >&2; exit 3", long).unwrap_err().to_string();
        assert!(
            failed.contains("exit status: 3") && failed.ends_with(": no"),
            "{failed}"
        );

        let began = Instant::now();
        // Its child has the pipe, too.
        let late = sh("sleep 1000 & wait", Duration::from_millis(50)).unwrap_err();
        assert!(matches!(late, RunError::Late(_)), "{late}");
        let closed = sh("exec >&- 2>&-; sleep 1000", Duration::from_millis(50)).unwrap_err();
        assert!(matches!(closed, RunError::Late(_)), "{closed}");
        assert!(began.elapsed() < Duration::from_secs(500));
        let missing = Host::this().ask(Path::new("/no/such"), &[]).unwrap_err();
        assert!(matches!(missing, RunError::Run(_)), "{missing}");
    }
}
