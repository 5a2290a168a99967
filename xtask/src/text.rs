//! Text for people.

/// Rows of columns, each as wide as its widest cell; the first is to the left,
/// numbers to the right.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut widths = vec![0; columns];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            line += &match column {
                0 => format!("{cell:width$}"),
                _ => format!("   {cell:>width$}"),
            };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// A byte count in the largest unit that leaves few digits.
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

/// Microseconds, as milliseconds when there are many.
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
    fn columns_line_up() {
        let rows = [
            vec!["job".to_owned(), "x".to_owned()],
            vec!["a".to_owned(), "10 µs".to_owned()],
        ];
        assert_eq!(table(&rows), "job       x\na     10 µs\n");
    }

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
