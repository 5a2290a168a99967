//! The figures as tables, for terminals and for the report.

use crate::{JobResult, METRICS, Passthrough, Results, Section, Spread, table};

/// Rows of cells; the first row names the columns.
pub type Rows = Vec<Vec<String>>;

const DASH: &str = "–";

/// Ratios of the jobs, with whether the targets are met.
pub fn job_ratios(results: &Results) -> Rows {
    let mut header = vec!["job".to_owned()];
    header.extend(METRICS.iter().map(|metric| metric.name.to_owned()));
    header.push("target".to_owned());
    let mut rows = vec![header];
    rows.extend(results.jobs.iter().map(|job| {
        let mut row = vec![job.label()];
        row.extend(METRICS.iter().map(|metric| {
            let ratio = job.ratio(metric);
            ratio.map_or(DASH.to_owned(), |ratio| ratio.to_string())
        }));
        row.push(verdict(job));
        row
    }));
    rows
}

/// Which targets of a job are missed.
fn verdict(job: &JobResult) -> String {
    if METRICS.iter().all(|metric| job.target(metric).is_none()) {
        return DASH.to_owned();
    }
    let missed: Vec<&str> = METRICS
        .iter()
        .filter(|metric| {
            let target = job.target(metric).zip(job.ratio(metric));
            target.is_some_and(|(target, ratio)| !target.met(&ratio))
        })
        .map(|metric| metric.name)
        .collect();
    match missed.as_slice() {
        [] => "met".to_owned(),
        missed => format!("missed: {}", missed.join(", ")),
    }
}

/// Medians of both disks.
pub fn job_figures(results: &Results) -> Rows {
    let mut header = vec!["job".to_owned(), "disk".to_owned()];
    header.extend(METRICS.iter().map(|metric| metric.name.to_owned()));
    let mut rows = vec![header];
    for job in &results.jobs {
        let sides: [fn(&JobResult, &crate::Metric) -> Vec<f64>; 2] =
            [JobResult::borrowed, JobResult::beside];
        let [borrowed, beside] = &results.disks;
        let beside = match (&job.network, &job.passthrough) {
            (Some(network), _) => &network.peer,
            (None, Some(_)) => Passthrough::BESIDE,
            (None, None) => beside,
        };
        for (disk, side) in [borrowed, beside].into_iter().zip(sides) {
            let mut row = vec![job.label(), disk.to_owned()];
            row.extend(METRICS.iter().map(|metric| {
                let median = Spread::of(side(job, metric)).map(|spread| spread.median);
                median.map_or(DASH.to_owned(), |median| metric.unit.show(median))
            }));
            rows.push(row);
        }
    }
    rows
}

/// All series of a section.
pub fn section(section: &Section) -> Rows {
    let header = ["what", "median", "least", "most", "ratio", "over", "target"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for series in &section.series {
        for (at, figure) in series.figures().iter().enumerate() {
            let name = match figure.what.as_str() {
                "" => series.name.clone(),
                what => format!("{}, {what}", series.name),
            };
            let mut row = vec![name];
            match Spread::of(figure.repeats.iter().copied()) {
                Some(Spread { median, min, max }) => {
                    row.extend([median, min, max].map(|value| series.unit.show(value)));
                }
                None => row.extend([DASH; 3].map(str::to_owned)),
            }
            let ratio = section.ratio(series, figure);
            row.push(ratio.map_or(DASH.to_owned(), |ratio| ratio.to_string()));
            row.push(series.against.clone().unwrap_or_else(|| DASH.to_owned()));
            let measured = section.measured(series, figure);
            row.push(match series.has_target(at).zip(measured) {
                Some((target, measured)) => {
                    let met = if target.met(&measured) {
                        "met"
                    } else {
                        "missed"
                    };
                    let unit = series.against.is_none().then_some(series.unit);
                    format!("{}: {met}", target.show(unit))
                }
                None => DASH.to_owned(),
            });
            rows.push(row);
        }
    }
    rows
}

/// Everything, for a terminal.
pub fn text(results: &Results) -> String {
    let mut text = String::new();
    if !results.jobs.is_empty() {
        let [borrowed, beside] = &results.disks;
        text += &format!(
            "\n{borrowed} over {beside}\n\n{}",
            table(&job_ratios(results))
        );
        text += &format!("\n{}", HOW_TO_READ);
        text += &format!("\n\n{}", table(&job_figures(results)));
    }
    for each in &results.sections {
        text += &format!("\n{}\n\n{}", each.title, table(&section(each)));
        text += &format!("\n{}\n", each.about);
    }
    text += &format!("\n{}\n", targets(results));
    text
}

/// An explanation of the ratios.
pub const HOW_TO_READ: &str = "Ratios are median (least–most) of pairs of runs, one after the \
other on the two disks. More is better for IOPS and bandwidth, less for everything else: \
latency is fio's, from submission to completion; guest CPU is the time that the guest's CPUs were busy \
for one I/O, host CPU that of all processes that serve the guest. Wanted are IOPS and bandwidth of \
at least 1.00 and p99 of at most 1.00.";

/// How many targets are met, and which are not.
pub fn targets(results: &Results) -> String {
    let findings = results.findings();
    let judged: Vec<_> = findings
        .iter()
        .filter_map(|f| Some((f, f.met()?)))
        .collect();
    let missed: Vec<_> = judged.iter().filter(|(_, met)| !met).collect();
    let mut text = match (judged.len(), missed.len()) {
        (0, _) => return "nothing measured has a target".to_owned(),
        (all, 0) => return format!("all {all} targets are met"),
        (all, missed) => format!("{missed} of {all} targets are missed:"),
    };
    for (finding, _) in missed {
        let spread = match finding.spread() {
            Some(s) => format!(
                "{} ({}–{})",
                finding.show(s.median),
                finding.show(s.min),
                finding.show(s.max)
            ),
            None => "not measured".to_owned(),
        };
        let wanted = finding.target.map(|target| target.show(finding.unit));
        text += &format!(
            "\n  {}: {spread}, wanted {}",
            finding.id,
            wanted.unwrap_or_default()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Better, Data, Environment, Quantiles, Series, Target, Unit, measurement::tests::job,
    };

    fn results(scales: &[f64]) -> Results {
        let mut results = Results::new(Environment::default(), ["borrowed", "own"]);
        results.jobs.push(job("randread-4k-qd1", scales));
        results
    }

    #[test]
    fn a_slower_drive_misses_the_target() {
        let row = |scales: &[f64]| job_ratios(&results(scales))[1].clone();
        assert_eq!(row(&[1.0]).last().unwrap(), "met");
        assert_eq!(row(&[0.99]).last().unwrap(), "missed: IOPS, bandwidth, p99");
        assert_eq!(row(&[2.0, 1.0, 4.0])[1], "2.00 (1.00–4.00)");
    }

    #[test]
    fn figures_are_medians_of_each_drive() {
        let rows = job_figures(&results(&[2.0, 3.0, 9.0]));
        assert_eq!(rows[1][..3], ["randread-4k-qd1", "borrowed", "3000/s"]);
        assert_eq!(rows[2][1..4], ["own", "1000/s", "3.91 MiB/s"]);
        assert_eq!(rows[2].last().unwrap(), "30 µs");
    }

    #[test]
    fn a_section_shows_ratio_and_verdict() {
        let series = |name: &str, scale: f64, against: Option<&str>| Series {
            name: name.into(),
            unit: Unit::Nanoseconds,
            better: Better::Less,
            data: Data::Quantiles(vec![Quantiles::of([scale]).unwrap()]),
            against: against.map(Into::into),
            target: against.map(|_| Target::AtMost(1.05)),
        };
        let rows = section(&Section {
            name: "s".into(),
            title: "S".into(),
            about: String::new(),
            series: vec![
                series("direct", 2200.0, Some("bare")),
                series("bare", 2000.0, None),
            ],
        });
        assert_eq!(rows[1][..2], ["direct, p50", "2.20 µs"]);
        assert_eq!(
            rows[1][4..],
            ["1.10 (1.10–1.10)", "bare", "at most 1.05: missed"]
        );
        // The median has a target, not the tail.
        assert_eq!(rows[2][6], DASH);
    }

    #[test]
    fn what_is_missed_is_named_with_figures() {
        let text = targets(&results(&[0.5]));
        assert!(text.starts_with("3 of 3 targets are missed:"), "{text}");
        assert!(
            text.contains("randread-4k-qd1: p99, ratio: 2.00 (2.00–2.00), wanted at most 1"),
            "{text}"
        );
        assert_eq!(targets(&results(&[1.0])), "all 3 targets are met");
    }
}
