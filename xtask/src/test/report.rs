//! Parses the output of test binaries: tests that were not run, and times.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    time::Duration,
};

use console::strip_ansi_codes;

use super::{TEST_LIMIT, binaries::LONG};

/// Number of slowest tests to list.
const SLOWEST: usize = 20;

/// A test without VMs that takes longer is always listed.
const SLOW: Duration = Duration::from_secs(1);

/// Lines of a failed test's message to repeat at the end: the first ones, which may be a script's, and
/// the last ones, in which an error that follows logs has its cause.
const FIRST_LINES: usize = 16;
const LAST_LINES: usize = 8;

/// Characters of each.
const LINE_LEN: usize = 400;

/// The summary of a run, from the output of test binaries.
#[derive(Debug, Default)]
pub(super) struct Report {
    binaries: usize,
    counts: BTreeMap<&'static str, usize>,
    /// Tests that were not run, with their binary, by reason.
    not_run: BTreeMap<String, Vec<String>>,
    /// Times of tests that were run, with their binary.
    times: Vec<(Duration, String)>,
    /// Tests without VMs among them that took longer than [`SLOW`].
    slow: Vec<(Duration, String)>,
    /// Binaries that failed, and how.
    failed: Vec<String>,
    /// What each failed test, with its binary, said.
    messages: Vec<(String, Message)>,
    /// Binaries whose lines belong to the last of their messages.
    in_message: BTreeSet<String>,
}

/// The first and last lines of a failed test's message.
#[derive(Debug, Default)]
struct Message {
    first: Vec<String>,
    /// Number of lines between `first` and `last`.
    left_out: usize,
    last: VecDeque<String>,
}

impl Message {
    fn push(&mut self, line: &str) {
        let line = line.chars().take(LINE_LEN).collect();
        if self.first.len() < FIRST_LINES {
            self.first.push(line);
            return;
        }
        if self.last.len() == LAST_LINES {
            self.last.pop_front();
            self.left_out += 1;
        }
        self.last.push_back(line);
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.first {
            writeln!(f, "        {line}")?;
        }
        if self.left_out > 0 {
            writeln!(f, "        … ({} lines left out)", self.left_out)?;
        }
        for line in &self.last {
            writeln!(f, "        {line}")?;
        }
        Ok(())
    }
}

impl Report {
    pub(super) fn begin(&mut self) {
        self.binaries += 1;
    }

    /// Parses a line of a binary's output, without its terminator.
    pub(super) fn read(&mut self, binary: &str, has_vms: bool, line: &str) {
        // With CARGO_TERM_COLOR=always and `-- --color=always`.
        let line = strip_ansi_codes(line);
        let line = line.trim();
        self.read_message(binary, line);
        if let Some((test, reason)) = ignored(line).or_else(|| skipped(line)) {
            let tests = self.not_run.entry(reason.to_owned()).or_default();
            tests.push(format!("{binary}: {test}"));
        } else if let Some((test, time)) = timed(line) {
            let is_long = LONG
                .iter()
                .any(|&(of, name, _)| (of, name) == (binary, test));
            if time > TEST_LIMIT && !has_vms && !is_long {
                let how = format!("{test} took {time:.1?}, the limit is {TEST_LIMIT:?}");
                self.fail(binary, &how);
            }
            let test = (time, format!("{binary}: {test}"));
            if time > SLOW && !has_vms {
                self.slow.push(test.clone());
            }
            self.times.push(test);
        } else if let Some(counts) = line.strip_prefix("test result: ") {
            for kind in ["passed", "failed", "ignored"] {
                *self.counts.entry(kind).or_default() += count(counts, kind);
            }
        }
    }

    /// `---- NAME stdout ----` (libtest) or `---- NAME ----` (libtest-mimic), and what follows.
    fn read_message(&mut self, binary: &str, line: &str) {
        let name = line
            .strip_prefix("---- ")
            .and_then(|rest| rest.strip_suffix(" ----"));
        if let Some(name) = name {
            let name = name.strip_suffix(" stdout").unwrap_or(name);
            self.messages
                .push((format!("{binary}: {name}"), Message::default()));
            self.in_message.insert(binary.to_owned());
        } else if line == "failures:" {
            self.in_message.remove(binary);
        } else if self.in_message.contains(binary) && !line.is_empty() {
            let of_binary = |(test, _): &&mut (String, Message)| {
                test.strip_prefix(binary)
                    .is_some_and(|rest| rest.starts_with(": "))
            };
            if let Some((_, message)) = self.messages.iter_mut().rev().find(of_binary) {
                message.push(line);
            }
        }
    }

    pub(super) fn fail(&mut self, binary: &str, how: &str) {
        self.failed.push(format!("{binary}: {how}"));
    }

    pub(super) fn passed(&self) -> usize {
        self.counts.get("passed").copied().unwrap_or(0)
    }

    pub(super) fn is_failed(&self) -> bool {
        !self.failed.is_empty()
    }
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
    let reason = reason.map(|reason| match reason.rsplit_once(" <") {
        Some((before, time)) if time.ends_with("s>") => before,
        _ => reason,
    });
    Some((test.trim_end(), reason.unwrap_or("no reason given")))
}

/// `skipped: NAME: REASON`, printed by a test that detects a missing requirement at run
/// time. It may follow the name with which libtest has begun a line.
fn skipped(line: &str) -> Option<(&str, &str)> {
    let (before, rest) = line.split_once("skipped: ")?;
    (before.is_empty() || before.starts_with("test ")).then_some(())?;
    rest.split_once(": ")
}

/// `test NAME ... ok <0.123s>` (libtest), `took: NAME: 0.123s` (ours).
fn timed(line: &str) -> Option<(&str, Duration)> {
    let (test, time) = match line.split_once("took: ") {
        Some((_, rest)) => rest.split_once(": ")?,
        None => {
            let (test, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
            (test, rest.rsplit_once('<')?.1.strip_suffix('>')?)
        }
    };
    let seconds: f64 = time.strip_suffix('s')?.parse().ok()?;
    Some((test.trim_end(), Duration::try_from_secs_f64(seconds).ok()?))
}

/// `test NAME has been running for over 60 seconds`, of libtest.
pub(super) fn hung(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?
        .strip_suffix(" has been running for over 60 seconds")
}

/// The number before `kind` in `ok. 3 passed; 0 failed; …`.
fn count(text: &str, kind: &str) -> usize {
    let before = text.split(kind).next().unwrap_or_default();
    let number = before.split_whitespace().next_back();
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn slowest_first(times: &[(Duration, String)]) -> Vec<&(Duration, String)> {
    let mut times: Vec<_> = times.iter().collect();
    times.sort_by(|a, b| b.cmp(a));
    times
}

fn list(f: &mut fmt::Formatter<'_>, title: &str, times: &[&(Duration, String)]) -> fmt::Result {
    writeln!(f, "{title}")?;
    for (time, test) in times {
        writeln!(f, "{:8.1} s  {test}", time.as_secs_f64())?;
    }
    writeln!(f)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.binaries == 0 {
            return writeln!(f, "Not run: no test binary was started");
        }
        let times = slowest_first(&self.times);
        if times.first().is_some_and(|(slowest, _)| *slowest >= SLOW) {
            list(f, "Slowest tests:", &times[..times.len().min(SLOWEST)])?;
        }
        if !self.slow.is_empty() {
            let title = format!("Tests without VMs that took over {SLOW:?}:");
            list(f, &title, &slowest_first(&self.slow))?;
        }
        let not_run: usize = self.not_run.values().map(Vec::len).sum();
        match not_run {
            0 => writeln!(f, "Not run: none")?,
            count => writeln!(f, "Not run: {count}")?,
        }
        for (reason, tests) in &self.not_run {
            writeln!(f, "- {reason}")?;
            for test in tests {
                writeln!(f, "    {test}")?;
            }
        }
        if !self.failed.is_empty() {
            writeln!(f, "\nFailed:")?;
            for failed in &self.failed {
                writeln!(f, "    {failed}")?;
            }
        }
        for (test, message) in &self.messages {
            write!(f, "    {test}\n{message}")?;
        }
        let of = |kind| self.counts.get(kind).copied().unwrap_or(0);
        writeln!(
            f,
            "\n{} test binaries: {} passed, {} failed, {} ignored",
            self.binaries,
            of("passed"),
            of("failed"),
            of("ignored")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sample output of both kinds of test binaries.
    const OUTPUT: [(&str, &str); 4] = [
        (
            "farside_fabric",
            "\
running 2 tests
test pin::limits ... ignored, a measurement <0.000s>
test pin::skipped_pages_are_counted ... ok <1.204s>
test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 1.21s",
        ),
        (
            "pin",
            "\
skipped: huge_pages: no hugetlbfs (ENOSYS (os error 38))
test huge_pages ... ok <0.000s>
test one_at_a_time ... skipped: one_at_a_time: no huge page is free
ok <0.001s>",
        ),
        (
            "libvirt",
            "\
test life::starts   ... ignored (needs root, or a user namespace: x: y (EPERM))
test life::stops    ... ignored (needs root, or a user namespace: x: y (EPERM))
took: life::fails: 12.5s
test life::fails    ... FAILED

failures:

---- life::fails ----
the agent did not answer
because of this

failures:
    life::fails

test result: FAILED. 0 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 13s",
        ),
        (
            "examples",
            "test backend/vfio-user/src/lib.rs - (line 7) ... ignored",
        ),
    ];

    fn read(output: &[(&str, &str)]) -> Report {
        let mut report = Report::default();
        for (binary, lines) in output {
            report.begin();
            let has_vms = *binary == "libvirt";
            lines
                .lines()
                .for_each(|line| report.read(binary, has_vms, line));
        }
        report
    }

    #[test]
    fn the_end_has_the_slowest_tests_and_those_that_were_not_run() {
        let mut report = read(&OUTPUT);
        assert!(!report.is_failed());
        report.fail("libvirt", "exit status: 101");
        let expected = "\
Slowest tests:
    12.5 s  libvirt: life::fails
     1.2 s  farside_fabric: pin::skipped_pages_are_counted
     0.0 s  pin: huge_pages

Tests without VMs that took over 1s:
     1.2 s  farside_fabric: pin::skipped_pages_are_counted

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
    examples: backend/vfio-user/src/lib.rs - (line 7)

Failed:
    libvirt: exit status: 101
    libvirt: life::fails
        the agent did not answer
        because of this

4 test binaries: 1 passed, 1 failed, 3 ignored
";
        assert_eq!(report.to_string(), expected);
        assert!(report.is_failed());
    }

    #[test]
    fn a_slow_test_without_vms_fails() {
        let (binary, long, _) = LONG[0];
        let listed = format!("test {long} ... ok <12.5s>");
        let lines = |name, line| read(&[(name, line)]).failed;
        assert!(lines(binary, &listed).is_empty());
        assert!(lines("libvirt", "test life::starts ... ok <12.5s>").is_empty());
        assert_eq!(
            lines("pin", &listed),
            [format!("pin: {long} took 12.5s, the limit is 10s")]
        );
    }

    #[test]
    fn a_message_is_repeated_in_part_and_kept_apart_from_another_binarys() {
        let long = "x".repeat(500);
        let mut report = Report::default();
        let mut say = |binary, line: &str| report.read(binary, false, line);
        say("one", "---- a stdout ----");
        say("two", "---- b ----");
        say("one", &long);
        say("two", "of b");
        (1..40).for_each(|n| say("one", &format!("line {n}")));
        say("one", "failures:");
        say("one", "a");
        let [(a, of_a), (b, of_b)] = &report.messages[..] else {
            panic!("{report:?}");
        };
        assert_eq!((&**a, &**b), ("one: a", "two: b"));
        assert_eq!(of_a.first[0], "x".repeat(LINE_LEN));
        assert_eq!(of_a.first[FIRST_LINES - 1], "line 15");
        assert_eq!((of_a.last.len(), of_a.left_out), (LAST_LINES, 16));
        assert_eq!(of_a.last.back().unwrap(), "line 39");
        let said = of_a.to_string();
        assert!(
            said.contains("line 15\n        … (16 lines left out)\n        line 32\n"),
            "{said}"
        );
        assert_eq!(of_b.to_string(), "        of b\n");
    }

    #[test]
    fn libtest_names_a_test_that_hangs() {
        let line = "test pin::limits has been running for over 60 seconds";
        assert_eq!(hung(line), Some("pin::limits"));
        assert_eq!(hung("test pin::limits ... ok <61.2s>"), None);
    }

    #[test]
    fn coloured_output_is_read_alike() {
        let coloured = [
            (
                "farside_fabric",
                "test pin::limits ... \x1b[33mignored, a measurement\x1b[m",
            ),
            (
                "farside_vfio_user",
                "test backend/vfio-user/src/lib.rs - (line 7) ... \x1b[33mignored\x1b[0m",
            ),
        ];
        let expected = "\
Not run: 2
- a measurement
    farside_fabric: pin::limits
- no reason given
    farside_vfio_user: backend/vfio-user/src/lib.rs - (line 7)

2 test binaries: 0 passed, 0 failed, 0 ignored
";
        assert_eq!(read(&coloured).to_string(), expected);
    }

    #[test]
    fn that_all_were_run_is_claimed_only_where_some_were() {
        let all = read(&[("pin", "test a ... ok")]).to_string();
        assert!(all.starts_with("Not run: none\n"), "{all}");
        let none = Report::default().to_string();
        assert_eq!(none, "Not run: no test binary was started\n");
    }
}
