//! Byte counts as people write and read them.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{self, Visitor},
};

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

/// Bytes in whole MiB, for values that change too fast for more digits.
pub(crate) struct Mib(pub(crate) u64);

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes @ 1..0x10_0000 => Size(bytes).fmt(f),
            bytes => write!(f, "{} MiB", bytes >> 20),
        }
    }
}

/// Bytes of `512M`, `4G`, `4 GiB` or `1073741824`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let bad = || {
        format!(
            "{text:?} is not a size: give a number of bytes, or a number and K, M, G or T, as in \
             512M or 4G"
        )
    };
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| bad())?;
    let shift = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(bad()),
    };
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("{text:?} is more than 2^64 bytes"))
}

/// Reads a size of a configuration file: a number of bytes, or a text as
/// [`parse_size`] takes it. On the wire, where formats describe nothing, a number.
pub fn deserialize_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    struct SizeVisitor;

    impl Visitor<'_> for SizeVisitor {
        type Value = u64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a size, such as \"4 GiB\" or a number of bytes")
        }

        fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<u64, E> {
            Ok(bytes)
        }

        fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<u64, E> {
            let negative = || E::invalid_value(de::Unexpected::Signed(bytes), &self);
            u64::try_from(bytes).map_err(|_| negative())
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<u64, E> {
            parse_size(text).map_err(E::custom)
        }
    }

    match deserializer.is_human_readable() {
        true => deserializer.deserialize_any(SizeVisitor),
        false => u64::deserialize(deserializer),
    }
}

/// As [`deserialize_size`], for a key that may be left out.
pub fn deserialize_optional_size<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    struct Bytes(#[serde(deserialize_with = "deserialize_size")] u64);

    let bytes = Option::<Bytes>::deserialize(deserializer)?;
    Ok(bytes.map(|bytes| bytes.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        assert_eq!(parse_size("4 GiB"), Ok(4 << 30));
        assert_eq!(parse_size("123"), Ok(123));
        for bad in ["", "M", "4X", "-1", "99999999999T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn files_have_numbers_of_bytes_or_texts_with_units() {
        let read = |json: &str| deserialize_size(&mut serde_json::Deserializer::from_str(json));
        assert_eq!(read("\"4 GiB\"").unwrap(), 4 << 30);
        assert_eq!(read("4096").unwrap(), 4096);
        for bad in ["-1", "1.5", "\"4X\"", "true"] {
            assert!(read(bad).is_err(), "{bad}");
        }
        let error = read("\"4X\"").unwrap_err().to_string();
        assert!(error.contains("as in 512M or 4G"), "{error}");
    }
}
