//! The output of a process, line by line, until the process ends.

use std::{
    io::{PipeReader, Read},
    ops::ControlFlow,
    process::Child,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionread},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// How long a child may run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) total: Duration,
    /// Without output.
    pub(super) silence: Duration,
}

/// Passes each line that the child writes into the pipe to `line`, without its terminator,
/// until the child ends: processes that it leaves behind may keep the pipe open. Kills it
/// if `line` breaks, and at a limit; returns the limit that it exceeded.
pub(super) fn read_lines(
    mut output: PipeReader,
    child: &Child,
    limits: Limits,
    mut line: impl FnMut(&[u8]) -> Result<ControlFlow<()>>,
) -> Result<Option<Duration>> {
    let pid = Pid::from_child(child);
    let ended = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
    let kill = || pidfd_send_signal(&ended, Signal::KILL).context("killing a test binary");
    let deadline = Instant::now() + limits.total;
    let mut silent_until = Instant::now() + limits.silence;
    let mut exceeded = None;
    let mut pending = Vec::new();
    let mut bytes = [0; 4096];
    // Bytes in the pipe when the child ended: the rest of its output.
    let mut left = None;
    while left != Some(0) {
        if left.is_none() {
            let mut fds = [
                PollFd::new(&output, PollFlags::IN),
                PollFd::new(&ended, PollFlags::IN),
            ];
            let until = deadline.min(silent_until);
            let remaining = until.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(remaining).context("timeout")?;
            match poll(&mut fds, exceeded.is_none().then_some(&timeout)) {
                Err(Errno::INTR) => continue,
                Ok(0) => {
                    exceeded = Some(match until == deadline {
                        true => limits.total,
                        false => limits.silence,
                    });
                    kill()?;
                    continue;
                }
                result => result.context("poll")?,
            };
            if !fds[1].revents().is_empty() {
                left = Some(ioctl_fionread(&output).context("FIONREAD of a test's output")?);
                continue;
            }
        }
        let len = output.read(&mut bytes).context("reading a test's output")?;
        if len == 0 {
            break;
        }
        left = left.map(|left| left.saturating_sub(len as u64));
        silent_until = Instant::now() + limits.silence;
        for byte in &bytes[..len] {
            match byte {
                b'\n' => {
                    if line(&pending)?.is_break() {
                        kill()?;
                    }
                    pending.clear();
                }
                byte => pending.push(*byte),
            }
        }
    }
    if !pending.is_empty() {
        // The child has ended.
        let _ = line(&pending)?;
    }
    Ok(exceeded)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{PipeWriter, pipe},
        process::Command,
    };

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(200);

    /// Runs a script. Returns its lines, the limit that it exceeded, and its pipe's write
    /// end.
    fn run(
        script: &str,
        total: Duration,
        silence: Duration,
    ) -> (Vec<String>, Option<Duration>, PipeWriter) {
        let (output, input) = pipe().unwrap();
        let kept_open = input.try_clone().unwrap();
        let mut command = Command::new("sh");
        let mut child = command.args(["-c", script]).stdout(input).spawn().unwrap();
        drop(command);
        let mut lines = Vec::new();
        let limits = Limits { total, silence };
        let exceeded = read_lines(output, &child, limits, |line| {
            lines.push(String::from_utf8(line.to_owned()).unwrap());
            Ok(match line {
                b"break" => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            })
        });
        child.wait().unwrap();
        (lines, exceeded.unwrap(), kept_open)
    }

    #[test]
    fn output_ends_with_the_child_although_another_process_has_the_pipe() {
        // More than one read returns, and all in the pipe when the child ends.
        let script = "echo a; head -c 20000 /dev/zero; echo; printf b";
        let (lines, exceeded, _kept_open) = run(script, LONG, LONG);
        assert_eq!(lines.len(), 3);
        assert_eq!((&*lines[0], lines[1].len(), &*lines[2]), ("a", 20000, "b"));
        assert_eq!(exceeded, None);
    }

    #[test]
    fn a_child_is_killed_for_what_it_prints() {
        let script = "echo a; echo break; exec sleep 1000";
        let (lines, exceeded, _kept_open) = run(script, LONG, LONG);
        assert_eq!(exceeded, None);
        assert_eq!(lines, ["a", "break"]);
    }

    #[test]
    fn a_child_that_takes_too_long_is_killed() {
        let (lines, exceeded, _kept_open) = run("echo a; exec sleep 1000", SHORT, LONG);
        assert_eq!(exceeded, Some(SHORT));
        assert_eq!(lines, ["a"]);
    }

    #[test]
    fn a_child_that_is_silent_too_long_is_killed() {
        let script = "for n in 1 2 3 4; do sleep 0.1; echo $n; done; exec sleep 1000";
        let silence = SHORT * 3;
        let (lines, exceeded, _kept_open) = run(script, LONG, silence);
        assert_eq!(exceeded, Some(silence));
        assert_eq!(lines, ["1", "2", "3", "4"]);
    }
}
