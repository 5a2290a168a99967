//! `cargo xtask test`: runs every test, then lists the slowest, and those that were not
//! run.
//!
//! Cargo builds the tests ([`binaries`]), but would run one binary after the other. Here
//! two lanes run them: one has those that boot VMs, the longest first; the other has all
//! others, those that mostly wait first, and then shares the remaining ones of the first
//! kind.

mod binaries;
mod output;
mod report;

use std::{
    collections::{BTreeMap, VecDeque},
    io::{Write, pipe, stdout},
    ops::ControlFlow,
    path::PathBuf,
    process::ExitCode,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::{Progress, Testbed};

use binaries::{Binary, Built};
use report::Report;

/// Timeout of all tests of a binary: above the limit of a single test, which would be
/// named.
const LIMIT: Duration = Duration::from_secs(75 * 60);

/// Timeout of a test that boots no VM, unless it is one of [`binaries::LONG`].
const TEST_LIMIT: Duration = Duration::from_secs(10);

/// Cargo's options that select tests; those of the second list take a value.
const FLAGS: [&str; 7] = [
    "--no-fail-fast",
    "--workspace",
    "--lib",
    "--bins",
    "--tests",
    "--examples",
    "--all-targets",
];
const WITH_VALUE: [&str; 6] = [
    "-p",
    "--package",
    "--exclude",
    "--bin",
    "--test",
    "--example",
];

/// The request in cargo's arguments.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    /// Which tests cargo builds.
    selection: Vec<String>,
    /// Also run doc tests.
    docs: bool,
    /// Arguments for the test binaries.
    harness: Vec<String>,
    /// Continue after a failure.
    no_fail_fast: bool,
}

impl Request {
    /// Whether it selects all tests.
    fn is_all(&self) -> bool {
        self.selection == ["--workspace"]
    }

    fn read(args: &[String]) -> Result<Self> {
        let (cargo, harness) = match args.iter().position(|arg| arg == "--") {
            Some(at) => (&args[..at], &args[at + 1..]),
            None => (args, &[][..]),
        };
        let mut request = Self {
            selection: Vec::new(),
            docs: true,
            harness: harness.to_vec(),
            no_fail_fast: false,
        };
        let mut all = true;
        let mut cargo = cargo.iter().cloned();
        while let Some(arg) = cargo.next() {
            if !arg.starts_with('-') {
                // A filter of test names.
                request.harness.insert(0, arg);
                continue;
            }
            let (name, value) = match arg.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (arg, None),
            };
            ensure!(
                FLAGS.contains(&&*name) || WITH_VALUE.contains(&&*name),
                "{name} is not known here; known are {}, {}, and what follows `--` goes to the test binaries",
                FLAGS.join(", "),
                WITH_VALUE.join(", ")
            );
            match &*name {
                "--no-fail-fast" => {
                    request.no_fail_fast = true;
                    continue;
                }
                "-p" | "--package" | "--workspace" => all = false,
                "--exclude" => {}
                _ => request.docs = false,
            }
            let has_value = WITH_VALUE.contains(&&*name);
            let value = value.or_else(|| has_value.then(|| cargo.next()).flatten());
            ensure!(
                has_value == value.is_some(),
                "{name}: its value is missing, or it has none"
            );
            request.selection.push(name);
            request.selection.extend(value);
        }
        if all {
            request.selection.insert(0, "--workspace".to_owned());
        }
        Ok(request)
    }
}

/// Runs tests, all unless `args` selects some as cargo's would.
pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    let request = Request::read(args)?;
    let testbed = Testbed::prepare(&Progress::auto())?;
    eprintln!(
        "Test bed: {}, {:?}",
        testbed.qemu_version(),
        testbed.accel()
    );
    let Some(Built { binaries, programs }) = binaries::build(&request)? else {
        return Ok(ExitCode::FAILURE);
    };
    let began = Instant::now();
    let (mut others, mut with_vms): (Vec<_>, Vec<_>) =
        binaries.into_iter().partition(Binary::is_beside_vms);
    others.sort_by_key(|binary| !binary.waits());
    let beside = match with_vms.is_empty() {
        true => Show::AtOnce,
        false => Show::AtItsEnd,
    };
    with_vms.sort_by_key(Binary::rank);
    let run = Run {
        request: &request,
        programs: &programs,
        report: Mutex::default(),
    };
    let (with_vms, others) = (Mutex::new(with_vms.into()), Mutex::new(others.into()));
    // The kernel kills the tests with the thread that started them.
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            run.lane(&others, beside)?;
            run.lane(&with_vms, Show::AtItsEnd)
        });
        let first = run.lane(&with_vms, Show::AtOnce);
        second
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            .and(first)
    })?;
    let mut report = run.report();
    if request.harness.is_empty() && report.passed() == 0 {
        report.fail("all", "no test was run");
    }
    println!("\n{report}in {:.0} s", began.elapsed().as_secs_f64());
    if report.is_failed() && !request.no_fail_fast {
        println!("What would have been run after that is not listed; --no-fail-fast goes on.");
    }
    Ok(match report.is_failed() {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

/// When a binary's output is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Show {
    /// Line by line.
    AtOnce,
    /// As a whole, so that it does not mix with another's.
    AtItsEnd,
}

struct Run<'a> {
    request: &'a Request,
    programs: &'a BTreeMap<&'static str, PathBuf>,
    report: Mutex<Report>,
}

impl Run<'_> {
    /// Runs binaries one after the other, until none is left.
    fn lane(&self, binaries: &Mutex<VecDeque<Binary>>, show: Show) -> Result<()> {
        let next = || {
            let mut binaries = binaries.lock().unwrap_or_else(PoisonError::into_inner);
            binaries.pop_front()
        };
        while let Some(binary) = next() {
            if self.report().is_failed() && !self.request.no_fail_fast {
                break;
            }
            self.one(&binary, show)
                .with_context(|| format!("running the tests of {}", binary.name))?;
        }
        Ok(())
    }

    fn one(&self, binary: &Binary, show: Show) -> Result<()> {
        // One pipe for both streams, as on a terminal.
        let (output, input) = pipe().context("a pipe for a test's output")?;
        let mut command = binary.command(self.request, self.programs);
        command
            .stdout(input.try_clone().context("a pipe for a test's output")?)
            .stderr(input);
        let mut child = command.spawn().context("starting it")?;
        // It holds the pipe's write end, too.
        drop(command);
        self.report().begin();
        let mut block = Vec::new();
        let mut say = |line: &[u8], flush: bool| -> Result<()> {
            block.extend_from_slice(line);
            block.push(b'\n');
            if flush || show == Show::AtOnce {
                let mut stdout = stdout().lock();
                stdout
                    .write_all(&block)
                    .and_then(|()| stdout.flush())
                    .context("writing to standard output")?;
                block.clear();
            }
            Ok(())
        };
        say(binary.title().as_bytes(), false)?;
        let mut hung = None;
        let limits = output::Limits {
            total: LIMIT,
            // libtest prints a line at the end of each test: those that run now have been
            // running since the last line.
            silence: match binary.has_test_limit() {
                true => TEST_LIMIT,
                false => LIMIT,
            },
        };
        let exceeded = output::read_lines(output, &child, limits, |line| {
            let text = String::from_utf8_lossy(line);
            self.report().read(&binary.name, binary.has_vms, &text);
            say(line, false)?;
            if binary.has_vms {
                return Ok(ControlFlow::Continue(()));
            }
            hung = hung.take().or(report::hung(&text).map(str::to_owned));
            Ok(match hung {
                Some(_) => ControlFlow::Break(()),
                None => ControlFlow::Continue(()),
            })
        })?;
        let status = child.wait().context("waiting for it")?;
        if let Some(limit) = exceeded {
            let how = match limit == LIMIT {
                true => format!("killed after {LIMIT:?}"),
                false => format!("killed: no test ended within {limit:?}"),
            };
            self.report().fail(&binary.name, &how);
        } else if !status.success() {
            let how = match hung {
                Some(test) => format!("killed: {test} had not ended after a minute"),
                None => status.to_string(),
            };
            self.report().fail(&binary.name, &how);
        }
        say(b"", true)
    }

    fn report(&self) -> MutexGuard<'_, Report> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(args: &str) -> Request {
        let args: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
        Request::read(&args).unwrap()
    }

    #[test]
    fn arguments_are_those_of_cargo_test() {
        let all = request("--no-fail-fast");
        assert_eq!(all.selection, ["--workspace"]);
        assert!(all.docs && all.no_fail_fast && all.harness.is_empty());

        let some = request("--test guests -- life:: --test-threads 1");
        assert_eq!(some.selection, ["--workspace", "--test", "guests"]);
        assert_eq!(some.harness, ["life::", "--test-threads", "1"]);
        assert!(!some.docs && !some.no_fail_fast);

        let package = request("-p farside-fabric pin");
        assert_eq!(package.selection, ["-p", "farside-fabric"]);
        assert_eq!(package.harness, ["pin"]);
        assert!(package.docs);
        let package = request("--package=farside-fabric");
        assert_eq!(package.selection, ["--package", "farside-fabric"]);

        for (unknown, named) in [
            ("--color always", "--color"),
            ("--doc", "--doc"),
            ("-p", "-p"),
        ] {
            let args: Vec<String> = unknown.split(' ').map(str::to_owned).collect();
            let error = Request::read(&args).unwrap_err().to_string();
            assert!(error.starts_with(named), "{error}");
        }
    }
}
