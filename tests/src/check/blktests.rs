//! The output of blktests' `check`.

use super::{Ending, Outcome};

/// The tests with a device in `printed`, which was not written to a terminal; without their measurements.
pub fn outcomes(printed: &str) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = Vec::new();
    for line in printed.lines() {
        if line.starts_with(' ') {
            let is_measurement = line.split_whitespace().any(|word| word == "...");
            if let Some(last) = outcomes.last_mut()
                && !is_measurement
            {
                last.details.push(line.trim().to_owned());
            }
            continue;
        }
        let Some((test, rest)) = line.split_once(" => ") else {
            continue;
        };
        let device = rest.split_whitespace().next().map(str::to_owned);
        let ending = [
            ("[passed]", Ending::Passed),
            ("[not run]", Ending::NotRun),
            ("[failed]", Ending::Failed),
        ]
        .into_iter()
        .find_map(|(end, ending)| line.trim_end().ends_with(end).then_some(ending));
        // It prints the test's name before the test, and again with the result.
        match outcomes.last_mut() {
            Some(last)
                if last.ending == Ending::Missing && last.test == test && last.device == device =>
            {
                last.ending = ending.unwrap_or(Ending::Missing);
            }
            _ => outcomes.push(Outcome {
                test: test.to_owned(),
                device,
                ending: ending.unwrap_or(Ending::Missing),
                details: Vec::new(),
            }),
        }
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
block/004 => nvme0n1 (run lots of flushes)                  
    runtime  1.1s  ...
block/004 => nvme0n1 (run lots of flushes)                   [passed]
    runtime  1.1s  ...  2.000s
nvme/*** => vda                                              [not run]
    /dev/vda is not a NVMe device
nvme/034 => nvme0n1 (tr=loop) (run data verification fio job on an NVMeOF passthru controller)
nvme/034 => nvme0n1 (tr=loop) (run data verification fio job on an NVMeOF passthru controller) [failed]
    runtime    ...  10.0s
    --- tests/nvme/034.out
    +++ /results/nvme0n1_tr_loop/nvme/034.out.bad
nvme/035 => nvme0n1 (tr=loop) (mkfs)
nvme/036 => nvme0n1 (tr=loop) (reset)
";

    #[test]
    fn each_test_has_its_ending_and_its_reasons() {
        let outcomes = outcomes(PRINTED);
        let seen: Vec<_> = outcomes
            .iter()
            .map(|it| (it.test.as_str(), it.device.as_deref(), it.ending))
            .collect();
        assert_eq!(
            seen,
            [
                ("block/004", Some("nvme0n1"), Ending::Passed),
                ("nvme/***", Some("vda"), Ending::NotRun),
                ("nvme/034", Some("nvme0n1"), Ending::Failed),
                ("nvme/035", Some("nvme0n1"), Ending::Missing),
                ("nvme/036", Some("nvme0n1"), Ending::Missing),
            ]
        );
        assert!(outcomes[0].details.is_empty());
        assert_eq!(outcomes[1].details, ["/dev/vda is not a NVMe device"]);
        assert_eq!(outcomes[2].details.len(), 2);
    }
}
