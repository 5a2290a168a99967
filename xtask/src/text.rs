//! Text formatting.

/// A byte count in a unit that keeps the digits few.
pub(crate) fn bytes(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    match bytes {
        0 => "0 bytes".to_owned(),
        _ if bytes < 10 << 10 => format!("{bytes} bytes"),
        _ if bytes < 1 << 20 => format!("{} KiB", bytes >> 10),
        _ if mib.fract() == 0.0 => format!("{mib} MiB"),
        _ => format!("{mib:.1} MiB"),
    }
}

/// Microseconds; large values as milliseconds.
pub(crate) fn micros(us: f64) -> String {
    match us {
        _ if us < 100.0 => format!("{us:.1} µs"),
        _ if us < 10_000.0 => format!("{us:.0} µs"),
        _ => format!("{:.1} ms", us / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_short() {
        assert_eq!(bytes(0), "0 bytes");
        assert_eq!(bytes(4096), "4096 bytes");
        assert_eq!(bytes(131_072), "128 KiB");
        assert_eq!(bytes(256 << 20), "256 MiB");
        assert_eq!(bytes((1 << 30) - 131_072), "1023.9 MiB");
        assert_eq!(micros(12.34), "12.3 µs");
        assert_eq!(micros(1234.0), "1234 µs");
        assert_eq!(micros(123_456.0), "123.5 ms");
    }
}
