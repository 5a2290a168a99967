//! Measurements of any kind, side by side.
//!
//! A [`Section`] is about one question ("what does an interrupt cost?"). Its [`Series`] are the
//! answers, one for each way of doing it. A series may be set against another of its section: then
//! what counts is the ratio of the repeats made next to each other, so that other load affects
//! both.

use serde::{Deserialize, Serialize};

use crate::{Better, Spread, Unit};

/// Some measurements that belong together: a table, and plots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Section {
    /// Short and stable, such as `ping-pong`: names files, and what is compared.
    pub name: String,
    /// For people.
    pub title: String,
    /// What was measured, how, and how to interpret it, in some sentences.
    pub about: String,
    /// The results.
    pub series: Vec<Series>,
}

/// The repeated measurements of one quantity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Unique in its section.
    pub name: String,
    /// Unit of the values.
    pub unit: Unit,
    /// When a figure is better.
    pub better: Better,
    /// The results.
    pub data: Data,
    /// The series of the same section, with the same kind of data, that this
    /// one is divided by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
    /// The target: of the ratio where there is one, else of the figure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
}

/// Figures of a series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Data {
    /// One figure a repeat.
    Repeats(Vec<f64>),
    /// One distribution a repeat.
    Quantiles(Vec<Quantiles>),
    /// Values over an axis.
    Points {
        /// The x axis.
        over: Axis,
        /// In rising order of `x`.
        points: Vec<Point>,
    },
}

/// What points are over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Axis {
    /// For people, such as "transfer size".
    pub name: String,
    /// Of [`Point::x`].
    pub unit: Unit,
}

/// The figures at one place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The place, in the axis' unit.
    pub x: f64,
    /// One figure a repeat, in the series' unit.
    pub y: Vec<f64>,
}

/// A distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "they say what they are")]
pub struct Quantiles {
    /// Number of samples.
    pub samples: u64,
    pub min: f64,
    pub p1: f64,
    pub p25: f64,
    pub p50: f64,
    pub p75: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
}

impl Target {
    /// Whether the median is as wanted.
    pub fn met(self, spread: &Spread) -> bool {
        match self {
            Self::AtLeast(least) => spread.median >= least,
            Self::AtMost(most) => spread.median <= most,
        }
    }

    /// For people: of a figure with this unit, or of a ratio.
    pub fn show(self, unit: Option<Unit>) -> String {
        let value = |value: f64| unit.map_or(value.to_string(), |unit| unit.show(value));
        match self {
            Self::AtLeast(least) => format!("at least {}", value(least)),
            Self::AtMost(most) => format!("at most {}", value(most)),
        }
    }
}

impl Quantiles {
    /// Of samples; `None` when there is none.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        // The nearest rank: always a sample that was seen.
        let at = |share: f64| {
            let rank = (share * sorted.len() as f64).ceil() as usize;
            sorted[rank.clamp(1, sorted.len()) - 1]
        };
        Some(Self {
            samples: sorted.len() as u64,
            min,
            p1: at(0.01),
            p25: at(0.25),
            p50: at(0.5),
            p75: at(0.75),
            p99: at(0.99),
            p999: at(0.999),
            max,
        })
    }
}

/// A figure of a series, with its repeats.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What it is of the series: empty, a quantile, a place.
    pub what: String,
    /// One a repeat.
    pub repeats: Vec<f64>,
}

impl Series {
    /// What can be said of it in numbers.
    pub fn figures(&self) -> Vec<Figure> {
        match &self.data {
            Data::Repeats(repeats) => vec![Figure {
                what: String::new(),
                repeats: repeats.clone(),
            }],
            Data::Quantiles(runs) => {
                let figure = |what: &str, of: fn(&Quantiles) -> f64| Figure {
                    what: what.to_owned(),
                    repeats: runs.iter().map(of).collect(),
                };
                vec![figure("p50", |q| q.p50), figure("p99", |q| q.p99)]
            }
            Data::Points { over, points } => points
                .iter()
                .map(|point| Figure {
                    what: over.unit.show(point.x),
                    repeats: point.y.clone(),
                })
                .collect(),
        }
    }

    /// Which of the [figures](Self::figures) the target is about: of
    /// distributions the median.
    pub fn has_target(&self, figure: usize) -> Option<Target> {
        let all = !matches!(self.data, Data::Quantiles(_));
        self.target.filter(|_| all || figure == 0)
    }
}

impl Section {
    /// The series of that name.
    pub fn series(&self, name: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.name == name)
    }

    /// A series' figure over the same figure of the one it is against, one ratio
    /// a pair of repeats.
    pub fn ratios(&self, series: &Series, figure: &Figure) -> Option<Vec<f64>> {
        let against = self.series(series.against.as_deref()?)?.figures();
        let other = against.iter().find(|other| other.what == figure.what)?;
        let pairs = figure.repeats.iter().zip(&other.repeats);
        Some(pairs.map(|(this, that)| this / that).collect())
    }

    /// The spread of the [ratios](Self::ratios).
    pub fn ratio(&self, series: &Series, figure: &Figure) -> Option<Spread> {
        Spread::of(self.ratios(series, figure)?)
    }

    /// What the target of a series' figure is about: the ratio, or the figure.
    pub fn measured(&self, series: &Series, figure: &Figure) -> Option<Spread> {
        match series.against {
            Some(_) => self.ratio(series, figure),
            None => Spread::of(figure.repeats.iter().copied()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, data: Data, against: Option<&str>) -> Series {
        Series {
            name: name.into(),
            unit: Unit::Nanoseconds,
            better: Better::Less,
            data,
            against: against.map(Into::into),
            target: Some(Target::AtMost(1.05)),
        }
    }

    fn section(series: Vec<Series>) -> Section {
        Section {
            name: "s".into(),
            title: String::new(),
            about: String::new(),
            series,
        }
    }

    #[test]
    fn quantiles_are_samples() {
        let q = Quantiles::of((1..=1000).rev().map(f64::from)).unwrap();
        assert_eq!((q.samples, q.min, q.max), (1000, 1.0, 1000.0));
        assert_eq!((q.p1, q.p25, q.p50), (10.0, 250.0, 500.0));
        assert_eq!((q.p75, q.p99, q.p999), (750.0, 990.0, 999.0));
        let one = Quantiles::of([7.0]).unwrap();
        assert_eq!((one.p1, one.p999), (7.0, 7.0));
        assert_eq!(Quantiles::of([]), None);
    }

    #[test]
    fn a_ratio_is_of_the_same_figure_of_the_other() {
        let over = || Axis {
            name: "size".into(),
            unit: Unit::Bytes,
        };
        let points = |ys: &[(f64, f64)]| Data::Points {
            over: over(),
            points: ys
                .iter()
                .map(|(x, y)| Point { x: *x, y: vec![*y] })
                .collect(),
        };
        let section = section(vec![
            series("a", points(&[(1024.0, 6.0), (2048.0, 8.0)]), Some("b")),
            // Another order, and one place less.
            series("b", points(&[(2048.0, 2.0)]), None),
        ]);
        let a = &section.series[0];
        let figures = a.figures();
        assert_eq!(section.ratio(a, &figures[0]), None);
        assert_eq!(section.ratio(a, &figures[1]).unwrap().median, 4.0);
        assert_eq!(section.measured(a, &figures[1]).unwrap().median, 4.0);
        let b = &section.series[1];
        assert_eq!(section.measured(b, &b.figures()[0]).unwrap().median, 2.0);
    }

    #[test]
    fn the_target_of_a_distribution_is_about_its_median() {
        let q = Quantiles::of([1.0, 2.0]).unwrap();
        let s = series("a", Data::Quantiles(vec![q]), None);
        assert_eq!(s.figures()[0].what, "p50");
        assert!(s.has_target(0).is_some() && s.has_target(1).is_none());
    }

    #[test]
    fn a_target_may_be_just_met() {
        let spread = Spread::of([1.0]).unwrap();
        assert!(Target::AtLeast(1.0).met(&spread) && Target::AtMost(1.0).met(&spread));
        assert!(!Target::AtLeast(1.01).met(&spread) && !Target::AtMost(0.99).met(&spread));
    }

    #[test]
    fn a_target_has_the_unit_of_what_it_is_about() {
        let target = Target::AtMost(50e6);
        assert_eq!(target.show(Some(Unit::Nanoseconds)), "at most 50 ms");
        assert_eq!(Target::AtLeast(1.05).show(None), "at least 1.05");
    }

    #[test]
    fn the_written_form_is_stable() {
        let s = series("a", Data::Repeats(vec![1.5]), Some("b"));
        let json = serde_json::to_string(&s).unwrap();
        assert_eq!(
            json,
            r#"{"name":"a","unit":"nanoseconds","better":"less","data":{"repeats":[1.5]},"against":"b","target":{"at_most":1.05}}"#
        );
        assert_eq!(serde_json::from_str::<Series>(&json).unwrap(), s);
    }
}
