//! `cargo xtask test`: every test, and at the end a list of those that were not run.

use std::{
    collections::BTreeMap,
    fmt,
    io::{PipeReader, Read, Write, pipe, stdout},
    process::{Child, ExitCode},
};

use anyhow::{Context, Result};
use console::strip_ansi_codes;
use farside_testbed::{Progress, Testbed};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, ioctl_fionread},
    process::{Pid, PidfdFlags, pidfd_open},
};

use crate::{
    cargo::{Profile, build_product, cargo},
    child::die_with_us,
};

/// Runs cargo on all tests with these arguments, and ends as it does.
pub(crate) fn run(more: &[String]) -> Result<ExitCode> {
    let testbed = Testbed::prepare(&Progress::auto())?;
    eprintln!(
        "Test bed: {}, {:?}",
        testbed.qemu_version(),
        testbed.accel()
    );
    let program = build_product(Profile::Dev)?;
    // One pipe, as a terminal would have it: cargo names the test binaries on stderr.
    let (output, input) = pipe().context("a pipe for cargo's output")?;
    let mut command = cargo();
    command
        .args(["test", "--workspace"])
        .args(more)
        .env("FARSIDE_BIN", &program)
        .stdout(input.try_clone().context("a pipe for cargo's output")?)
        .stderr(input);
    die_with_us(&mut command);
    let mut child = command.spawn().context("running cargo test")?;
    // It has the pipe's other end, too.
    drop(command);

    let not_run = copy(output, &child, stdout())?;
    let status = child.wait().context("waiting for cargo test")?;
    print!("\n{not_run}");
    if !status.success() {
        println!("cargo test failed: what it would have run after that is not listed.");
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(1)))
}

/// Copies what the child writes into the pipe, until it ends: processes that it leaves
/// behind may keep the pipe open.
fn copy(mut output: PipeReader, child: &Child, mut to: impl Write) -> Result<NotRun> {
    let pid = Pid::from_child(child);
    let ended = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
    let mut not_run = NotRun::default();
    let mut line = Vec::new();
    let mut bytes = [0; 4096];
    // Bytes in the pipe, once the child has ended: all that is left of its output.
    let mut left = None;
    while left != Some(0) {
        if left.is_none() {
            let mut fds = [
                PollFd::new(&output, PollFlags::IN),
                PollFd::new(&ended, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Err(Errno::INTR) => continue,
                result => result.context("poll")?,
            };
            if !fds[1].revents().is_empty() {
                left = Some(ioctl_fionread(&output).context("FIONREAD of cargo's output")?);
                continue;
            }
        }
        let len = output.read(&mut bytes).context("reading cargo's output")?;
        if len == 0 {
            break;
        }
        left = left.map(|left| left.saturating_sub(len as u64));
        // At once: a test's name shows while it runs.
        to.write_all(&bytes[..len])
            .and_then(|()| to.flush())
            .context("writing cargo's output")?;
        for byte in &bytes[..len] {
            match byte {
                b'\n' => {
                    not_run.read(&String::from_utf8_lossy(&line));
                    line.clear();
                }
                byte => line.push(*byte),
            }
        }
    }
    Ok(not_run)
}

/// Tests that were not run, as the test binaries' output has them.
#[derive(Debug, Default)]
struct NotRun {
    /// The test binary whose output is being read.
    binary: String,
    /// By the reason, each with its binary.
    tests: BTreeMap<String, Vec<String>>,
}

impl NotRun {
    /// Reads a line without its end.
    fn read(&mut self, line: &str) {
        // With CARGO_TERM_COLOR=always and `-- --color=always`.
        let line = strip_ansi_codes(line);
        let line = line.trim();
        if let Some(binary) = binary(line) {
            self.binary = binary.to_owned();
        } else if let Some((test, reason)) = ignored(line).or_else(|| skipped(line)) {
            let tests = self.tests.entry(reason.to_owned()).or_default();
            tests.push(format!("{}: {test}", self.binary));
        }
    }
}

/// Cargo begins a test binary with `Running tests/guests/main.rs (…/guests-0123)`, and
/// a crate's examples with `Doc-tests farside_fabric`.
fn binary(line: &str) -> Option<&str> {
    if let Some(name) = line.strip_prefix("Doc-tests ") {
        return Some(name);
    }
    let path = line.strip_prefix("Running ")?.strip_suffix(')')?;
    let name = path.rsplit_once(" (")?.1.rsplit('/').next()?;
    name.rsplit_once('-').map(|(name, _)| name)
}

/// `test NAME ... ignored`, with a reason after a comma (libtest) or in parentheses
/// (libtest-mimic).
fn ignored(line: &str) -> Option<(&str, &str)> {
    let (test, reason) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    let reason = reason.strip_prefix(", ").or_else(|| {
        reason
            .strip_prefix(" (")
            .map(|rest| rest.strip_suffix(')').unwrap_or(rest))
    });
    Some((test.trim_end(), reason.unwrap_or("no reason given")))
}

/// `skipped: NAME: REASON`, of a test that finds out only while it runs. It may stand
/// behind the name that libtest has begun a line with.
fn skipped(line: &str) -> Option<(&str, &str)> {
    let (before, rest) = line.split_once("skipped: ")?;
    (before.is_empty() || before.starts_with("test ")).then_some(())?;
    rest.split_once(": ")
}

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tests.is_empty() {
            return match self.binary.is_empty() {
                true => writeln!(f, "Not run: no test binary was started"),
                false => writeln!(f, "Not run: none"),
            };
        }
        let count: usize = self.tests.values().map(Vec::len).sum();
        writeln!(f, "Not run: {count}")?;
        for (reason, tests) in &self.tests {
            writeln!(f, "- {reason}")?;
            for test in tests {
                writeln!(f, "    {test}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What cargo and test binaries print, of both kinds.
    const OUTPUT: &str = "\
   Compiling farside-tests v0.1.0 (/src/tests)
     Running unittests src/lib.rs (target/debug/deps/farside_fabric-0123)
running 2 tests
test pin::limits ... ignored, a measurement
test pin::skipped_pages_are_counted ... ok
     Running tests/pin.rs (target/debug/deps/pin-4567)
skipped: huge_pages: no hugetlbfs (ENOSYS (os error 38))
test huge_pages ... ok
test one_at_a_time ... skipped: one_at_a_time: no huge page is free
ok
     Running tests/libvirt/main.rs (/t/debug/deps/libvirt-89ab)
test life::starts   ... ignored (needs root, or a user namespace: x: y (EPERM))
test life::stops    ... ignored (needs root, or a user namespace: x: y (EPERM))
test life::fails    ... FAILED
   Doc-tests farside_vfio_user
test vfio-user/src/lib.rs - (line 7) ... ignored
test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out
";

    fn read(output: &str) -> NotRun {
        let mut not_run = NotRun::default();
        output.lines().for_each(|line| not_run.read(line));
        not_run
    }

    #[test]
    fn every_test_that_was_not_run_is_listed_with_binary_and_reason() {
        let expected = "\
Not run: 6
- a measurement
    farside_fabric: pin::limits
- needs root, or a user namespace: x: y (EPERM)
    libvirt: life::starts
    libvirt: life::stops
- no huge page is free
    pin: one_at_a_time
- no hugetlbfs (ENOSYS (os error 38))
    pin: huge_pages
- no reason given
    farside_vfio_user: vfio-user/src/lib.rs - (line 7)
";
        assert_eq!(read(OUTPUT).to_string(), expected);
    }

    #[test]
    fn coloured_output_is_read_alike() {
        let coloured = "\
\x1b[1m\x1b[92m     Running\x1b[0m unittests src/lib.rs (target/debug/deps/farside_fabric-0123)
test pin::limits ... \x1b[33mignored, a measurement\x1b[m
\x1b[1m\x1b[92m   Doc-tests\x1b[0m farside_vfio_user
test vfio-user/src/lib.rs - (line 7) ... \x1b[33mignored\x1b[0m
";
        let expected = "\
Not run: 2
- a measurement
    farside_fabric: pin::limits
- no reason given
    farside_vfio_user: vfio-user/src/lib.rs - (line 7)
";
        assert_eq!(read(coloured).to_string(), expected);
    }

    #[test]
    fn output_ends_with_the_child_although_another_process_has_the_pipe() {
        let (output, input) = pipe().unwrap();
        // More than one read takes, and all of it in the pipe when the child ends.
        let script = "echo 'test a ... ignored, b'; head -c 20000 /dev/zero; echo; \
                      echo 'test c ... ignored, d'";
        let kept_open = input.try_clone().unwrap();
        let mut command = std::process::Command::new("sh");
        let mut child = command.args(["-c", script]).stdout(input).spawn().unwrap();
        drop(command);
        let mut copied = Vec::new();
        let not_run = copy(output, &child, &mut copied).unwrap();
        assert!(child.wait().unwrap().success());
        drop(kept_open);
        assert!(copied.ends_with(b"test c ... ignored, d\n"));
        let printed = not_run.to_string();
        assert_eq!(printed, "Not run: 2\n- b\n    : a\n- d\n    : c\n");
    }

    #[test]
    fn that_all_were_run_is_claimed_only_where_some_were() {
        let all = "     Running tests/pin.rs (target/debug/deps/pin-4567)\ntest a ... ok\n";
        assert_eq!(read(all).to_string(), "Not run: none\n");
        let broken = "error: could not compile `farside`\n";
        let printed = read(broken).to_string();
        assert_eq!(printed, "Not run: no test binary was started\n");
    }
}
