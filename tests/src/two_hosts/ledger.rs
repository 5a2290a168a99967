//! The leases of the device, from the logs of all of its lender's processes.
//!
//! Polling both hosts could miss a moment in which both hold the device. The lender logs
//! the begin and the end of each lease in order.

use anyhow::{Context, Result, bail, ensure};

use crate::Daemon;

use super::VM;

/// The logs of a test's lenders, in order.
#[derive(Default)]
pub struct Ledger {
    /// Logs of killed lenders.
    past: Vec<String>,
}

/// The leases found in the logs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Leases {
    /// Number of leases.
    pub count: usize,
    /// The process that holds the device now.
    pub holder: Option<u32>,
    /// Number of handovers.
    pub handovers: usize,
}

impl Ledger {
    /// Keeps the log of a killed lender.
    pub fn killed(&mut self, lender: &Daemon) {
        self.past.push(lender.log());
    }

    /// Checks all logs. Fails if a lease began before the preceding one ended, or if a
    /// fenced-off host received one.
    pub fn audit(&self, lender: &Daemon) -> Result<Leases> {
        let now = lender.log();
        let logs = self.past.iter().chain([&now]);
        audit(logs.map(String::as_str))
    }
}

fn audit<'a>(lives: impl Iterator<Item = &'a str>) -> Result<Leases> {
    let mut leases = Leases::default();
    let mut fence = 0;
    for log in lives {
        // A lease ends with its lender, unless the next one adopts it.
        let mut open: Option<u64> = None;
        let mut unused: Option<u64> = None;
        let lines = log.lines().filter(|line| line.contains("device disk0: "));
        for line in lines {
            if line.contains(&format!("borrowed by VM {VM} (")) {
                let generation = number(line, "(generation ")?;
                ensure!(open.is_none(), "{open:?} was not over: {line}\n{log}");
                ensure!(
                    generation >= fence,
                    "fence {fence} kept nobody off: {line}\n{log}"
                );
                open = Some(generation);
                leases.count += 1;
                leases.holder = Some(number(line, "process ")?.try_into()?);
            } else if line.contains("its lease goes on (") {
                open = Some(number(line, ", generation ")?);
            } else if line.contains(&format!("(VM {VM}, generation ")) {
                let generation = number(line, ", generation ")?;
                if unused == Some(generation) {
                    continue;
                }
                ensure!(open == Some(generation), "{open:?} was lent: {line}\n{log}");
                open = None;
                leases.holder = None;
            } else if line.contains("lease dropped before VM ") {
                unused = Some(number(line, "(generation ")?);
            } else if line.contains("handed over to where") {
                ensure!(open.is_none(), "{open:?} was not over: {line}\n{log}");
                let next = number(line, ", fence ")?;
                // A resumed migration repeats its request, and gets the same answer.
                ensure!(next >= fence, "fence {fence} was followed by {line}\n{log}");
                fence = next;
                leases.handovers += 1;
            } else if line.contains("borrowed by") {
                bail!("a stranger has it: {line}");
            }
        }
    }
    Ok(leases)
}

/// The number that follows a word.
fn number(line: &str, word: &str) -> Result<u64> {
    let rest = line.split_once(word).map(|(_, rest)| rest);
    let digits = rest.map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit());
        &rest[..end.unwrap_or(rest.len())]
    });
    digits
        .and_then(|digits| digits.parse().ok())
        .with_context(|| format!("no number behind {word:?} in: {line}"))
}
