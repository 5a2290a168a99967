//! The output of xfstests' `check`.

use super::{Ending, Outcome};

/// The tests in `printed`.
pub fn outcomes(printed: &str) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = Vec::new();
    for line in printed.lines() {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        if !is_test(word) {
            if let Some(last) = outcomes.last_mut()
                && line.starts_with(' ')
            {
                last.details.push(line.trim().to_owned());
            }
            continue;
        }
        let rest = rest.trim();
        let (ending, details) = if let Some(reason) = rest.strip_prefix("[not run]") {
            (Ending::NotRun, reason.trim())
        } else if is_duration(rest) {
            (Ending::Passed, rest)
        } else if rest.is_empty() {
            (Ending::Missing, rest)
        } else {
            (Ending::Failed, rest)
        };
        outcomes.push(Outcome {
            test: word.to_owned(),
            device: None,
            ending,
            details: Vec::from_iter((!details.is_empty()).then(|| details.to_owned())),
        });
    }
    outcomes
}

/// As `generic/001`.
fn is_test(word: &str) -> bool {
    word.split_once('/').is_some_and(|(group, number)| {
        let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        !group.is_empty()
            && group.bytes().all(is_name)
            && number.len() >= 3
            && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// As `12s`.
fn is_duration(text: &str) -> bool {
    text.strip_suffix('s')
        .is_some_and(|number| number.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
FSTYP         -- xfs (non-debug)
PLATFORM      -- Linux/x86_64 guest 7.3.4
MKFS_OPTIONS  -- -f /dev/vdb
MOUNT_OPTIONS -- /dev/vdb /scratch

generic/001         12s
generic/038         [not run] This test requires at least 10GB free on /scratch to run
generic/050         [failed, exit status 1]- output mismatch (see /results/generic/050.out.bad)
    --- tests/generic/050.out
    +++ /results/generic/050.out.bad
    ...
    (Run 'diff -u /suite/tests/generic/050.out /results/generic/050.out.bad'  to see the entire diff)
generic/051         _check_dmesg: something found in dmesg (see /results/generic/051.dmesg)

generic/052        Ran: generic/001 generic/038
Not run: generic/038
Failures: generic/050 generic/051
Failed 2 of 5 tests
";

    #[test]
    fn each_test_has_its_ending_and_its_reasons() {
        let outcomes = outcomes(&PRINTED.replace("Ran: generic/001 generic/038", ""));
        let seen: Vec<_> = outcomes
            .iter()
            .map(|it| (it.test.as_str(), it.ending))
            .collect();
        assert_eq!(
            seen,
            [
                ("generic/001", Ending::Passed),
                ("generic/038", Ending::NotRun),
                ("generic/050", Ending::Failed),
                ("generic/051", Ending::Failed),
                ("generic/052", Ending::Missing),
            ]
        );
        assert_eq!(
            outcomes[1].details,
            ["This test requires at least 10GB free on /scratch to run"]
        );
        assert_eq!(outcomes[2].details.len(), 5);
    }
}
