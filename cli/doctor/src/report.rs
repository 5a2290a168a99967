//! All findings, as text and as JSON.

use std::fmt::Write as _;

use serde::{Serialize, Serializer, ser::SerializeStruct};

use crate::{Finding, Level};

/// The findings on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// In the order of the checks.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The version of the JSON format. Incremented when a key is removed or changes its type or
    /// meaning; new keys leave it as it is.
    pub const FORMAT: u32 = 1;

    /// How many findings are of that level.
    pub fn count(&self, level: Level) -> usize {
        let findings = self.findings.iter();
        findings.filter(|finding| finding.level == level).count()
    }

    /// As text: problem, reason, and commands.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let Finding {
                level, check, what, ..
            } = finding;
            let vm = finding.vm.as_ref();
            let vm = vm.map_or_else(String::new, |vm| format!(" (VM {vm})"));
            let head = format!("{level:7}  {check}{vm}: {what}");
            line(&mut text, &head);
            if !finding.why.is_empty() {
                line(&mut text, &format!("         why: {}", finding.why));
            }
            for command in &finding.fix {
                // As it is: it is there to be copied.
                let _ = writeln!(text, "         fix: {command}");
            }
        }
        text
    }
}

/// One line, or several of which the others are indented.
fn line(text: &mut String, lines: &str) {
    let lines = lines.trim_end().replace('\n', "\n           ");
    let _ = writeln!(text, "{lines}");
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut report = serializer.serialize_struct("Report", 4)?;
        report.serialize_field("format", &Self::FORMAT)?;
        report.serialize_field("problems", &self.count(Level::Problem))?;
        report.serialize_field("notes", &self.count(Level::Note))?;
        report.serialize_field("findings", &self.findings)?;
        report.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            findings: vec![
                Finding::ok("kvm", "works"),
                Finding::problem("memlock", "8 MiB\nand no more", "too little")
                    .of_vm("web1")
                    .fix("ulimit -l 1"),
            ],
        }
    }

    #[test]
    fn people_read_what_why_and_fix() {
        assert_eq!(
            report().text(),
            "ok       kvm: works\n\
             problem  memlock (VM web1): 8 MiB\n           and no more\n         \
             why: too little\n         fix: ulimit -l 1\n"
        );
    }

    #[test]
    fn programs_read_counts_and_findings() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["problems"], 1);
        assert_eq!(json["findings"][0]["level"], "ok");
        assert_eq!(json["findings"][1]["fix"][0], "ulimit -l 1");
        assert!(json["findings"][0].get("why").is_none());
    }
}
