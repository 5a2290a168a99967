//! Measures a borrowed device next to another one, and presents the results.
//!
//! Creates command lines, parses output, computes, renders text, SVG, PNG and HTML, and writes
//! files. `farside bench` and `cargo xtask bench` run guests and fio.
//!
//! - [`job`]: the jobs for fio; [`fio`]: its command line and its output;
//! - [`JobResult`]: both disks, pair by pair; [`METRICS`]: the metrics;
//! - [`Section`]: measurements of any other kind, side by side, with targets;
//! - [`Results`]: all of it with where it was measured, as a file;
//! - [`Comparison`]: the changes between two of those;
//! - [`output`]: files of results; [`tables`], [`plots`], [`report`]: for people.

#![forbid(unsafe_code)]

mod compare;
pub mod environment;
mod error;
pub mod fio;
pub mod job;
mod measurement;
pub mod output;
pub mod plots;
pub mod report;
mod results;
mod section_check;
mod series;
mod spread;
mod table;
pub mod tables;
mod unit;

pub use compare::{Change, Comparison, Direction, Side};
pub use environment::Environment;
pub use error::Error;
pub use measurement::{Hosts, JobResult, METRICS, Measurement, Metric, Network, Pair, Passthrough};
pub use results::{FORMAT, Finding, Results};
pub use series::{Axis, Data, Figure, Point, Quantiles, Section, Series, Target};
pub use spread::Spread;
pub use table::{table, text_table};
pub use unit::{Better, Unit};
