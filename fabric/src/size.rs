//! Byte counts for people.

use std::fmt;

/// A byte count, shown in the largest binary unit that keeps it exact.
///
/// ```
/// # use farside_fabric::Size;
/// assert_eq!(Size(128 << 20).to_string(), "128 MiB");
/// assert_eq!(Size(1536 << 10).to_string(), "1536 KiB");
/// assert_eq!(Size(1000).to_string(), "1000 bytes");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        for (shift, unit) in UNITS {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{} {unit}", self.0 >> shift);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}
