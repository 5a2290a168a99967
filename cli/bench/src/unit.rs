//! Units of figures, and their display.

use serde::{Deserialize, Serialize};

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Time.
    Nanoseconds,
    /// Throughput.
    BytesPerSecond,
    /// A rate, such as I/O operations a second.
    PerSecond,
    /// Memory, sizes of requests.
    Bytes,
    /// A share of something; 1.0 is all of it.
    Share,
    /// Things.
    Count,
}

/// In which direction a figure gets better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// As throughput.
    More,
    /// As latency.
    Less,
}

impl Unit {
    /// A figure with its unit, in few digits.
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Nanoseconds => nanoseconds(value),
            Self::BytesPerSecond => format!("{}/s", bytes(value)),
            Self::PerSecond => format!("{}/s", digits(value)),
            Self::Bytes => bytes(value),
            Self::Share => format!("{:.1} %", value * 100.0),
            Self::Count => digits(value),
        }
    }
}

fn nanoseconds(ns: f64) -> String {
    match ns.abs() {
        abs if abs < 1e3 => format!("{} ns", digits(ns)),
        abs if abs < 1e6 => format!("{} µs", digits(ns / 1e3)),
        abs if abs < 1e9 => format!("{} ms", digits(ns / 1e6)),
        _ => format!("{} s", digits(ns / 1e9)),
    }
}

fn bytes(bytes: f64) -> String {
    const KIB: f64 = 1024.0;
    match bytes.abs() {
        abs if abs < KIB => format!("{} B", digits(bytes)),
        abs if abs < KIB * KIB => format!("{} KiB", digits(bytes / KIB)),
        abs if abs < KIB * KIB * KIB => format!("{} MiB", digits(bytes / KIB / KIB)),
        _ => format!("{} GiB", digits(bytes / KIB / KIB / KIB)),
    }
}

/// About three digits; none behind the point when there is nothing.
fn digits(value: f64) -> String {
    let rounded = match value.abs() {
        abs if abs < 10.0 => format!("{value:.2}"),
        abs if abs < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    };
    match rounded.split_once('.') {
        Some((whole, behind)) if behind.bytes().all(|b| b == b'0') => whole.to_owned(),
        _ => rounded,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_few_digits_and_a_unit() {
        assert_eq!(Unit::Nanoseconds.show(950.0), "950 ns");
        assert_eq!(Unit::Nanoseconds.show(1234.0), "1.23 µs");
        assert_eq!(Unit::Nanoseconds.show(123_456.0), "123 µs");
        assert_eq!(Unit::Nanoseconds.show(29.7e9), "29.7 s");
        assert_eq!(Unit::BytesPerSecond.show(3.0 * 1048576.0), "3 MiB/s");
        assert_eq!(Unit::BytesPerSecond.show(1.5e9), "1.40 GiB/s");
        assert_eq!(Unit::PerSecond.show(12_345.6), "12346/s");
        assert_eq!(Unit::Bytes.show(4096.0), "4 KiB");
        assert_eq!(Unit::Share.show(0.256), "25.6 %");
        assert_eq!(Unit::Count.show(2.0), "2");
    }
}
