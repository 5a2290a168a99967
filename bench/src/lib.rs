//! Measures a borrowed device beside another one, and shows what came out.
//!
//! Everything here is pure: it makes command lines, reads what programs printed,
//! computes, and renders text, SVG, PNG and HTML. Who runs guests and fio is
//! somebody else (`farside bench`, `cargo xtask bench`).
//!
//! - [`Section`]: measurements of any kind, side by side, with targets;
//! - [`Spread`]: one figure of several repeats.

#![forbid(unsafe_code)]

mod series;
mod spread;
mod unit;

pub use series::{Axis, Data, Figure, Point, Quantiles, Section, Series, Target};
pub use spread::Spread;
pub use unit::{Better, Unit};
