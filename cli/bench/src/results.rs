//! A file of results.

use serde::{Deserialize, Serialize};

use crate::{
    Better, Environment, Error, JobResult, METRICS, Section, Spread, Target, Unit,
    section_check::check,
};

/// The version of the files that are written, and the only one that is read.
pub const FORMAT: u32 = 1;

/// All that was measured in one go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`].
    pub format: u32,
    /// The environment.
    pub environment: Environment,
    /// What the two disks are called in tables: first the borrowed one.
    #[serde(rename = "drives")]
    pub disks: [String; 2],
    /// fio's jobs on both disks.
    pub jobs: Vec<JobResult>,
    /// Everything else.
    pub sections: Vec<Section>,
}

/// One figure of the results, with where it comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Stable: the same figure of other results has the same.
    pub id: String,
    /// Of the figures; ratios have none.
    pub unit: Option<Unit>,
    /// When it is better.
    pub better: Better,
    /// One figure a repeat.
    pub repeats: Vec<f64>,
    /// What is wanted of it.
    pub target: Option<Target>,
}

impl Finding {
    /// Median, least, most.
    pub fn spread(&self) -> Option<Spread> {
        Spread::of(self.repeats.iter().copied())
    }

    /// Whether it is as wanted, where something is; what was not measured is
    /// not.
    pub fn met(&self) -> Option<bool> {
        let met = |target: Target| self.spread().is_some_and(|spread| target.met(&spread));
        self.target.map(met)
    }

    /// A value of it, as people write it.
    pub fn show(&self, value: f64) -> String {
        match self.unit {
            Some(unit) => unit.show(value),
            None => format!("{value:.2}"),
        }
    }
}

impl Results {
    /// Nothing measured yet.
    pub fn new(environment: Environment, disks: [&str; 2]) -> Self {
        Self {
            format: FORMAT,
            environment,
            disks: disks.map(str::to_owned),
            jobs: Vec::new(),
            sections: Vec::new(),
        }
    }

    /// Reads a file's contents.
    ///
    /// # Errors
    /// When it is something else, or has another version.
    pub fn parse(json: &str) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Format {
            format: u64,
        }
        // The version first: the rest may look different in another.
        let Format { format } = serde_json::from_str(json).map_err(Error::NotResults)?;
        if format != u64::from(FORMAT) {
            return Err(Error::Format {
                found: format,
                known: FORMAT,
            });
        }
        let results: Self = serde_json::from_str(json).map_err(Error::NotResults)?;
        results.sections.iter().try_for_each(check)?;
        Ok(results)
    }

    /// A file's contents.
    pub fn to_json(&self) -> String {
        let json = serde_json::to_string_pretty(self);
        json.expect("maps have strings as keys") + "\n"
    }

    /// Adds a section.
    ///
    /// # Errors
    /// When its series do not fit each other, or have figures that are no
    /// numbers.
    pub fn add(&mut self, section: Section) -> Result<(), Error> {
        check(&section)?;
        self.sections.push(section);
        Ok(())
    }

    /// Every figure there is.
    pub fn findings(&self) -> Vec<Finding> {
        let jobs = self.jobs.iter().flat_map(job_findings);
        let sections = self.sections.iter().flat_map(section_findings);
        jobs.chain(sections).collect()
    }
}

fn job_findings(job: &JobResult) -> Vec<Finding> {
    let label = job.label();
    METRICS
        .iter()
        .flat_map(|metric| {
            let finding = |what: &str, unit, repeats, target| Finding {
                id: format!("{label}: {}, {what}", metric.name),
                unit,
                better: metric.better,
                repeats,
                target,
            };
            [
                finding("borrowed", Some(metric.unit), job.borrowed(metric), None),
                finding("beside", Some(metric.unit), job.beside(metric), None),
                finding("ratio", None, job.ratios(metric), job.target(metric)),
            ]
        })
        .filter(|finding| !finding.repeats.is_empty())
        .collect()
}

fn section_findings(section: &Section) -> Vec<Finding> {
    let mut findings = Vec::new();
    for series in &section.series {
        for (at, figure) in series.figures().into_iter().enumerate() {
            let target = series.has_target(at);
            let what = match figure.what.as_str() {
                "" => String::new(),
                what => format!(", {what}"),
            };
            let id = format!("{}: {}{what}", section.name, series.name);
            let ratios = section.ratios(series, &figure);
            let has_ratio = ratios.is_some();
            findings.extend(ratios.map(|repeats| Finding {
                id: format!("{id}, ratio"),
                unit: None,
                better: series.better,
                repeats,
                target,
            }));
            findings.push(Finding {
                id,
                unit: Some(series.unit),
                better: series.better,
                repeats: figure.repeats,
                target: target.filter(|_| !has_ratio && series.against.is_none()),
            });
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Data, Series, measurement::tests::job};

    fn series(name: &str, repeats: &[f64], against: Option<&str>) -> Series {
        Series {
            name: name.into(),
            unit: Unit::Nanoseconds,
            better: Better::Less,
            data: Data::Repeats(repeats.to_vec()),
            against: against.map(Into::into),
            target: Some(Target::AtMost(1.05)),
        }
    }

    fn results() -> Results {
        let mut results = Results::new(Environment::default(), ["borrowed", "own"]);
        results.jobs.push(job("randread-4k-qd1", &[0.5, 0.9]));
        results.sections.push(Section {
            name: "interrupts".into(),
            title: "Interrupts".into(),
            about: "How long.".into(),
            series: vec![
                series("direct", &[3.0, 30.0], Some("bare")),
                series("bare", &[2.0, 20.0], None),
            ],
        });
        results
    }

    fn finding(id: &str) -> Finding {
        let findings = results().findings();
        let found = findings.iter().find(|finding| finding.id == id);
        found
            .unwrap_or_else(|| panic!("no {id} in {findings:#?}"))
            .clone()
    }

    #[test]
    fn results_survive_being_written() {
        let results = results();
        assert_eq!(Results::parse(&results.to_json()).unwrap(), results);
    }

    #[test]
    fn another_version_is_refused() {
        let json = results().to_json();
        let other = json.replacen("\"format\": 1", "\"format\": 2", 1);
        let error = Results::parse(&other).unwrap_err().to_string();
        assert!(
            error.contains("format 2") && error.contains("format 1"),
            "{error}"
        );
        // Even if the rest of the file is unknown.
        let error = Results::parse(r#"{"format": 7, "all": "new"}"#).unwrap_err();
        assert!(error.to_string().contains("format 7"), "{error}");
    }

    #[test]
    fn what_is_no_results_is_refused() {
        for text in ["", "{}", "[1]", r#"{"format": 1}"#, r#"{"format": "1"}"#] {
            let error = Results::parse(text).unwrap_err();
            assert!(matches!(error, Error::NotResults(_)), "{text}: {error}");
        }
        let astray = results().to_json().replace("\"bare\"\n", "\"nobody\"\n");
        let astray = astray.replace("\"against\": \"bare\"", "\"against\": \"nobody\"");
        let error = Results::parse(&astray).unwrap_err().to_string();
        assert!(error.contains("nobody"), "{error}");
    }

    #[test]
    fn a_section_that_makes_no_sense_is_not_added() {
        let refused = |series: Vec<Series>, name: &str| {
            let mut section = results().sections[0].clone();
            (section.series, section.name) = (series, name.to_owned());
            results().add(section).unwrap_err().to_string()
        };
        let of = |figure: f64| series("a", &[figure], None);
        assert!(refused(vec![of(f64::NAN)], "s").contains("no numbers"));
        assert!(refused(vec![of(1.0), of(1.0)], "s").contains("two series"));
        assert!(refused(vec![of(1.0)], "../s").contains("letters"));
        let mut bytes = series("b", &[1.0], Some("a"));
        bytes.unit = Unit::Bytes;
        assert!(refused(vec![of(1.0), bytes], "s").contains("another unit"));
    }

    #[test]
    fn a_jobs_targets_are_about_its_ratios() {
        let ratio = finding("randread-4k-qd1: IOPS, ratio");
        assert_eq!(
            (ratio.spread().unwrap().median, ratio.met()),
            (0.7, Some(false))
        );
        let borrowed = finding("randread-4k-qd1: IOPS, borrowed");
        assert_eq!(
            (borrowed.met(), borrowed.show(500.0)),
            (None, "500/s".into())
        );
    }

    #[test]
    fn a_series_target_is_about_its_ratio_where_it_has_one() {
        let ratio = finding("interrupts: direct, ratio");
        assert_eq!(
            (ratio.repeats.clone(), ratio.met()),
            (vec![1.5, 1.5], Some(false))
        );
        assert_eq!(finding("interrupts: direct").met(), None);
        assert_eq!(finding("interrupts: bare").met(), Some(false));
    }
}
