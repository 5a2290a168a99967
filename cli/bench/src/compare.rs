//! Compares two results, ignoring changes within the spread of repeats.
//!
//! A figure has changed when the ranges of its repeats do not touch: then no
//! repeat of one could have been of the other. One repeat has no range, and
//! says nothing.

use crate::{Better, Finding, Results, table};

/// Two results, figure by figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Machine, kernels, QEMU, accelerator, where they differ: (what, before,
    /// after).
    pub differences: Vec<(&'static str, String, String)>,
    /// Figures in both results.
    pub changes: Vec<Change>,
    /// Figures in one result only.
    pub only: Vec<(String, Side)>,
}

/// One of two results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "they say what they are")]
pub enum Side {
    Before,
    After,
}

/// A figure, before and after.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Before.
    pub before: Finding,
    /// After.
    pub after: Finding,
    /// The direction of the change.
    pub direction: Direction,
}

/// The direction of a figure's change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Beyond the spread.
    Better,
    /// Beyond the spread.
    Worse,
    /// Within the spread.
    Same,
    /// There are too few repeats.
    Unknown,
}

impl Comparison {
    /// Of `before` and `after`.
    pub fn new(before: &Results, after: &Results) -> Self {
        let (old, new) = (before.findings(), after.findings());
        let find = |among: &[Finding], id: &str| among.iter().find(|f| f.id == id).cloned();
        let changes = old.iter().filter_map(|before| {
            let after = find(&new, &before.id)?;
            Some(Change {
                direction: direction(before, &after),
                before: before.clone(),
                after,
            })
        });
        let missing = |these: &[Finding], those: &[Finding], side| -> Vec<(String, Side)> {
            let alone = these.iter().filter(|f| find(those, &f.id).is_none());
            alone.map(|f| (f.id.clone(), side)).collect()
        };
        let mut only = missing(&old, &new, Side::Before);
        only.extend(missing(&new, &old, Side::After));
        let facts = before.environment.facts().into_iter();
        let differences = facts
            .zip(after.environment.facts())
            .filter(|(before, after)| before != after)
            .map(|((what, before), (_, after))| (what, before, after))
            .collect();
        Self {
            differences,
            changes: changes.collect(),
            only,
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (what, before, after) in &self.differences {
            text += &format!("{what} differs: {before} before, {after} after\n");
        }
        if !self.differences.is_empty() {
            text += "so a change may come from there, not from farside; ratios suffer less than \
                     figures\n\n";
        }
        let count = |direction| {
            self.changes
                .iter()
                .filter(|c| c.direction == direction)
                .count()
        };
        let mut rows = vec![
            ["what", "before", "after", "change", ""]
                .map(str::to_owned)
                .to_vec(),
        ];
        for direction in [Direction::Worse, Direction::Better] {
            let of = self.changes.iter().filter(|c| c.direction == direction);
            rows.extend(of.map(row));
        }
        if rows.len() > 1 {
            text += &table(&rows);
            text.push('\n');
        }
        text += &format!(
            "{} figures: {} worse, {} better, {} within the spread",
            self.changes.len(),
            count(Direction::Worse),
            count(Direction::Better),
            count(Direction::Same),
        );
        if count(Direction::Unknown) > 0 {
            text += &format!(
                ", {} measured too seldom to tell (repeat them)",
                count(Direction::Unknown)
            );
        }
        text.push('\n');
        for (side, which) in [(Side::Before, "before"), (Side::After, "after")] {
            let ids: Vec<&str> = self
                .only
                .iter()
                .filter(|(_, s)| *s == side)
                .map(|(id, _)| id.as_str())
                .collect();
            if !ids.is_empty() {
                text += &format!("only {which} ({}): {}\n", ids.len(), ids.join("; "));
            }
        }
        text
    }
}

fn direction(before: &Finding, after: &Finding) -> Direction {
    let (Some(old), Some(new)) = (before.spread(), after.spread()) else {
        return Direction::Unknown;
    };
    if before.repeats.len() < 2 || after.repeats.len() < 2 {
        return Direction::Unknown;
    }
    match (old.apart(&new), before.better) {
        (false, _) => Direction::Same,
        (true, Better::More) if new.min > old.max => Direction::Better,
        (true, Better::Less) if new.max < old.min => Direction::Better,
        (true, _) => Direction::Worse,
    }
}

fn row(change: &Change) -> Vec<String> {
    let show = |finding: &Finding| match finding.spread() {
        Some(s) => format!(
            "{} ({}–{})",
            finding.show(s.median),
            finding.show(s.min),
            finding.show(s.max)
        ),
        None => "nothing".to_owned(),
    };
    let factor = match (change.before.spread(), change.after.spread()) {
        (Some(old), Some(new)) if old.median != 0.0 => {
            format!("× {:.2}", new.median / old.median)
        }
        _ => String::new(),
    };
    let direction = match change.direction {
        Direction::Better => "better",
        Direction::Worse => "worse",
        Direction::Same => "same",
        Direction::Unknown => "unknown",
    };
    vec![
        change.before.id.clone(),
        show(&change.before),
        show(&change.after),
        factor,
        direction.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Environment, measurement::tests::job};

    fn results(name: &str, scales: &[f64]) -> Results {
        let mut results = Results::new(Environment::default(), ["borrowed", "own"]);
        results.jobs.push(job(name, scales));
        results
    }

    fn directions(before: &[f64], after: &[f64], what: &str) -> Direction {
        let comparison = Comparison::new(&results("j", before), &results("j", after));
        let id = format!("j: {what}");
        let change = comparison.changes.iter().find(|c| c.before.id == id);
        change.unwrap().direction
    }

    #[test]
    fn what_is_beyond_the_spread_has_changed() {
        let (slow, fast) = (&[1.0, 1.1], &[1.2, 1.3]);
        assert_eq!(directions(slow, fast, "IOPS, borrowed"), Direction::Better);
        assert_eq!(directions(fast, slow, "IOPS, ratio"), Direction::Worse);
        // Less latency is better.
        assert_eq!(directions(slow, fast, "p99, ratio"), Direction::Better);
        assert_eq!(directions(fast, slow, "p99, borrowed"), Direction::Worse);
        assert_eq!(directions(slow, fast, "p50, borrowed"), Direction::Same);
    }

    #[test]
    fn what_is_within_the_spread_has_not() {
        assert_eq!(
            directions(&[1.0, 1.3], &[1.2, 1.5], "IOPS, ratio"),
            Direction::Same
        );
        assert_eq!(
            directions(&[1.0], &[9.0, 9.1], "IOPS, ratio"),
            Direction::Unknown
        );
    }

    #[test]
    fn the_text_says_what_changed_and_what_else_differs() {
        let mut before = results("j", &[1.0, 1.1]);
        let after = results("j", &[2.0, 2.1]);
        before.environment.qemu = Some("QEMU 10".into());
        let text = Comparison::new(&before, &after).text();
        assert!(
            text.contains("QEMU differs: QEMU 10 before, unknown after"),
            "{text}"
        );
        let line = text
            .lines()
            .find(|line| line.starts_with("j: IOPS, ratio"))
            .unwrap();
        assert!(
            line.contains("1.05 (1.00–1.10)") && line.ends_with("× 1.95   better"),
            "{line}"
        );
        assert!(!text.contains("j: p50"), "{text}");
    }

    #[test]
    fn the_same_results_have_not_changed() {
        let results = results("j", &[1.0, 1.1]);
        let text = Comparison::new(&results, &results).text();
        assert_eq!(
            text,
            "21 figures: 0 worse, 0 better, 21 within the spread\n"
        );
    }

    #[test]
    fn what_only_one_has_is_said() {
        let text = Comparison::new(&results("a", &[1.0]), &results("b", &[1.0])).text();
        assert!(
            text.contains("only before (21): a: IOPS, borrowed; "),
            "{text}"
        );
        assert!(text.contains("only after (21): b: "), "{text}");
    }
}
