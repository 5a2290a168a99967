//! Columns of text.

/// Rows of columns, each as wide as its widest cell; the first is to the left,
/// numbers to the right.
pub fn table(rows: &[Vec<String>]) -> String {
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
}
