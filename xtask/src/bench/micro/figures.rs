//! Series of a section, in microseconds.

use farside_bench::{Better, Data, Series, Target, Unit};

/// A series with one figure per turn, microseconds.
pub(super) fn series(name: impl Into<String>, micros: impl IntoIterator<Item = f64>) -> Series {
    Series {
        name: name.into(),
        unit: Unit::Nanoseconds,
        better: Better::Less,
        data: Data::Repeats(micros.into_iter().map(|us| us * 1e3).collect()),
        against: None,
        target: None,
    }
}

/// The series divided by another series of the section, turn by turn.
pub(super) fn against(mut series: Series, other: impl Into<String>) -> Series {
    series.against = Some(other.into());
    series
}

/// The series with an upper target.
pub(super) fn at_most(mut series: Series, most: f64) -> Series {
    series.target = Some(Target::AtMost(most));
    series
}
