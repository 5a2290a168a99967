//! Plots, as SVG and PNG.
//!
//! [`all`] says which there are; [`chart`] draws them, the same way for both
//! forms. The font comes with the program: machines that measure often have
//! none.

mod chart;
mod font;

use plotters::prelude::{BitMapBackend, IntoDrawingArea, SVGBackend};

use crate::{Axis, Data, Error, METRICS, Quantiles, Results, Section, Spread, Unit};

/// Width, pixels.
const WIDTH: u32 = 900;

/// A plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// Names its files.
    pub name: String,
    /// For people.
    pub title: String,
    /// Its contents.
    pub kind: Kind,
}

/// The contents of a plot.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// For each thing some figures with their spread.
    Dots {
        /// Of the figures; ratios have none, and a line where both are equal.
        unit: Option<Unit>,
        /// What the figures of a thing are; names the colours.
        legend: Vec<String>,
        /// Things, each with as many figures as the legend has names.
        rows: Vec<(String, Vec<Option<Spread>>)>,
    },
    /// Distributions: a box from the first to the third quartile with the median
    /// in it, and lines to the first and the 99th percentile.
    Boxes {
        /// Of the figures.
        unit: Unit,
        /// Things.
        rows: Vec<(String, Quantiles)>,
    },
    /// Figures over something.
    Lines {
        /// What they are over.
        over: Axis,
        /// Of the figures.
        unit: Unit,
        /// Each with its places and figures.
        lines: Vec<(String, Vec<(f64, Spread)>)>,
    },
}

impl Plot {
    /// As SVG.
    ///
    /// # Errors
    /// When it cannot be drawn.
    pub fn svg(&self) -> Result<String, Error> {
        let mut svg = String::new();
        let size = (WIDTH, self.height());
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        self.draw(&root)?;
        drop(root);
        Ok(svg)
    }

    /// As PNG.
    ///
    /// # Errors
    /// When it cannot be drawn.
    pub fn png(&self) -> Result<Vec<u8>, Error> {
        let (width, height) = (WIDTH, self.height());
        let mut pixels = vec![0; (width * height * 3) as usize];
        let root = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
        self.draw(&root)?;
        drop(root);
        let encode = || -> Result<Vec<u8>, png::EncodingError> {
            let mut bytes = Vec::new();
            let mut encoder = png::Encoder::new(&mut bytes, width, height);
            encoder.set_color(png::ColorType::Rgb);
            let mut writer = encoder.write_header()?;
            writer.write_image_data(&pixels)?;
            writer.finish()?;
            Ok(bytes)
        };
        encode().map_err(|error| self.error(error.to_string()))
    }

    fn error(&self, what: String) -> Error {
        Error::Plot {
            name: self.name.clone(),
            what,
        }
    }
}

/// Every plot of some results.
pub fn all(results: &Results) -> Vec<Plot> {
    let mut plots = Vec::new();
    if !results.jobs.is_empty() {
        let rows = results.jobs.iter().map(|job| {
            let ratios = METRICS.iter().map(|metric| job.ratio(metric));
            (job.label(), ratios.collect())
        });
        let [borrowed, beside] = &results.disks;
        plots.push(Plot {
            name: "fio-ratios".into(),
            title: format!("{borrowed} over {beside}"),
            kind: Kind::Dots {
                unit: None,
                legend: METRICS
                    .iter()
                    .map(|metric| metric.name.to_owned())
                    .collect(),
                rows: rows.collect(),
            },
        });
    }
    plots.extend(results.sections.iter().flat_map(of_section));
    plots
}

/// A section's plots: series of one kind and unit are in one.
pub(crate) fn of_section(section: &Section) -> Vec<Plot> {
    let mut kinds: Vec<Kind> = Vec::new();
    for series in &section.series {
        let name = series.name.clone();
        let spread = |repeats: &[f64]| Spread::of(repeats.iter().copied());
        match &series.data {
            Data::Repeats(repeats) => {
                let row = (name, vec![spread(repeats)]);
                let same = kinds.iter_mut().find_map(|kind| match kind {
                    Kind::Dots { unit, rows, .. } if *unit == Some(series.unit) => Some(rows),
                    _ => None,
                });
                match same {
                    Some(rows) => rows.push(row),
                    None => kinds.push(Kind::Dots {
                        unit: Some(series.unit),
                        legend: vec!["median (least to most)".into()],
                        rows: vec![row],
                    }),
                }
            }
            Data::Quantiles(runs) => {
                let Some(typical) = typical(runs) else {
                    continue;
                };
                let same = kinds.iter_mut().find_map(|kind| match kind {
                    Kind::Boxes { unit, rows } if *unit == series.unit => Some(rows),
                    _ => None,
                });
                match same {
                    Some(rows) => rows.push((name, typical)),
                    None => kinds.push(Kind::Boxes {
                        unit: series.unit,
                        rows: vec![(name, typical)],
                    }),
                }
            }
            Data::Points { over, points } => {
                let places = points.iter().filter_map(|p| Some((p.x, spread(&p.y)?)));
                let line = (name, places.collect());
                let same = kinds.iter_mut().find_map(|kind| match kind {
                    Kind::Lines {
                        over: o,
                        unit,
                        lines,
                    } if *unit == series.unit && o == over => Some(lines),
                    _ => None,
                });
                match same {
                    Some(lines) => lines.push(line),
                    None => kinds.push(Kind::Lines {
                        over: over.clone(),
                        unit: series.unit,
                        lines: vec![line],
                    }),
                }
            }
        }
    }
    let plot = |(at, kind)| Plot {
        name: match at {
            0 => section.name.clone(),
            at => format!("{}-{}", section.name, at + 1),
        },
        title: section.title.clone(),
        kind,
    };
    kinds.into_iter().enumerate().map(plot).collect()
}

/// One distribution of those of several repeats: the median of each quantile.
fn typical(runs: &[Quantiles]) -> Option<Quantiles> {
    let median = |of: fn(&Quantiles) -> f64| Some(Spread::of(runs.iter().map(of))?.median);
    Some(Quantiles {
        samples: runs.iter().map(|run| run.samples).sum(),
        min: median(|q| q.min)?,
        p1: median(|q| q.p1)?,
        p25: median(|q| q.p25)?,
        p50: median(|q| q.p50)?,
        p75: median(|q| q.p75)?,
        p99: median(|q| q.p99)?,
        p999: median(|q| q.p999)?,
        max: median(|q| q.max)?,
    })
}

#[cfg(test)]
pub(crate) mod tests;
