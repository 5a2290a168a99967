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

/// Passes each line that the child writes into the pipe to `line`, without its terminator,
/// until the child ends: processes that it leaves behind may keep the pipe open. Kills it
/// if `line` breaks, and after `limit`; returns whether it timed out.
pub(super) fn read_lines(
    mut output: PipeReader,
    child: &Child,
    limit: Duration,
    mut line: impl FnMut(&[u8]) -> Result<ControlFlow<()>>,
) -> Result<bool> {
    let pid = Pid::from_child(child);
    let ended = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
    let kill = || pidfd_send_signal(&ended, Signal::KILL).context("killing a test binary");
    let deadline = Instant::now() + limit;
    let mut late = false;
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
            let remaining = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(remaining).context("timeout")?;
            match poll(&mut fds, (!late).then_some(&timeout)) {
                Err(Errno::INTR) => continue,
                Ok(0) => {
                    late = true;
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
    Ok(late)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{PipeWriter, pipe},
        process::Command,
    };

    use super::*;

    /// Runs a script. Returns its lines, whether it timed out, and its pipe's write end.
    fn run(script: &str, limit: Duration) -> (Vec<String>, bool, PipeWriter) {
        let (output, input) = pipe().unwrap();
        let kept_open = input.try_clone().unwrap();
        let mut command = Command::new("sh");
        let mut child = command.args(["-c", script]).stdout(input).spawn().unwrap();
        drop(command);
        let mut lines = Vec::new();
        let late = read_lines(output, &child, limit, |line| {
            lines.push(String::from_utf8(line.to_owned()).unwrap());
            Ok(match line {
                b"break" => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            })
        });
        child.wait().unwrap();
        (lines, late.unwrap(), kept_open)
    }

    #[test]
    fn output_ends_with_the_child_although_another_process_has_the_pipe() {
        // More than one read returns, and all in the pipe when the child ends.
        let script = "echo a; head -c 20000 /dev/zero; echo; printf b";
        let (lines, late, _kept_open) = run(script, Duration::from_secs(60));
        assert_eq!(lines.len(), 3);
        assert_eq!((&*lines[0], lines[1].len(), &*lines[2]), ("a", 20000, "b"));
        assert!(!late);
    }

    #[test]
    fn a_child_is_killed_for_what_it_prints() {
        let script = "echo a; echo break; exec sleep 1000";
        let (lines, late, _kept_open) = run(script, Duration::from_secs(60));
        assert!(!late);
        assert_eq!(lines, ["a", "break"]);
    }

    #[test]
    fn a_child_that_takes_too_long_is_killed() {
        let (lines, late, _kept_open) = run("echo a; exec sleep 1000", Duration::from_millis(200));
        assert!(late);
        assert_eq!(lines, ["a"]);
    }
}
