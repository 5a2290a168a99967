//! Columns, each as wide as its widest cell.

/// Columns of text below a header, aligned to the left.
pub fn text_table(header: &[&str], rows: &[Vec<String>]) -> String {
    let header = header.iter().map(|&cell| cell.to_owned()).collect();
    let rows: Vec<_> = [header].into_iter().chain(rows.iter().cloned()).collect();
    lines(&rows, |_, cell, width| format!("{cell:width$}  "))
}

/// Columns of numbers, aligned to the right, except the first.
pub fn table(rows: &[Vec<String>]) -> String {
    lines(rows, |column, cell, width| match column {
        0 => format!("{cell:width$}"),
        _ => format!("   {cell:>width$}"),
    })
}

fn lines(rows: &[Vec<String>], cell: impl Fn(usize, &str, usize) -> String) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut widths = vec![0; columns];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate();
        let line: String = cells
            .map(|(column, (text, width))| cell(column, text, *width))
            .collect();
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned<const N: usize>(row: [&str; N]) -> Vec<String> {
        row.map(str::to_owned).to_vec()
    }

    #[test]
    fn numbers_line_up() {
        let rows = [owned(["job", "x"]), owned(["a", "10 µs"])];
        assert_eq!(table(&rows), "job       x\na     10 µs\n");
    }

    #[test]
    fn text_lines_up() {
        let rows = [owned(["a", "b"]), owned(["long", "c"])];
        let expected = "x     y\na     b\nlong  c\n";
        assert_eq!(text_table(&["x", "y"], &rows), expected);
    }
}
