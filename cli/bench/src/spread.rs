//! One figure of many, with how far they spread.

use std::fmt;

/// Median, least and most of some figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Half of the figures are below it.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
}

impl Spread {
    /// Of figures; `None` when there is none. Non-finite values are omitted: a ratio to nothing
    /// says nothing.
    pub fn of(figures: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut figures: Vec<f64> = figures.into_iter().filter(|f| f.is_finite()).collect();
        figures.sort_by(f64::total_cmp);
        let (min, max) = (*figures.first()?, *figures.last()?);
        let middle = figures.len() / 2;
        let median = match figures.len() % 2 {
            0 => f64::midpoint(figures[middle - 1], figures[middle]),
            _ => figures[middle],
        };
        Some(Self { median, min, max })
    }

    /// Whether no figure of one is within the other.
    pub fn apart(&self, other: &Self) -> bool {
        self.max < other.min || other.max < self.min
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { median, min, max } = self;
        write!(f, "{median:.2} ({min:.2}–{max:.2})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_does_not_depend_on_the_order() {
        let odd = Spread::of([3.0, 1.0, 100.0]).unwrap();
        assert_eq!((odd.median, odd.min, odd.max), (3.0, 1.0, 100.0));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 9.0]).unwrap().median, 3.0);
        assert_eq!(Spread::of([1.5]).unwrap().to_string(), "1.50 (1.50–1.50)");
    }

    #[test]
    fn there_is_no_median_of_nothing() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([f64::INFINITY, f64::NAN]), None);
    }

    #[test]
    fn touching_ranges_are_not_apart() {
        let range = |min, max| Spread::of([min, max]).unwrap();
        assert!(range(1.0, 2.0).apart(&range(2.1, 3.0)));
        assert!(range(2.1, 3.0).apart(&range(1.0, 2.0)));
        assert!(!range(1.0, 2.0).apart(&range(2.0, 3.0)));
        assert!(!range(1.0, 5.0).apart(&range(2.0, 3.0)));
    }
}
