//! Tables of text.

/// Rows of cells under a head, columns aligned: the first to the left, the others to the right.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    aligned(head, rows, 1)
}

/// The same with all columns to the left, for cells of words.
pub fn left_table(head: &[&str], rows: &[Vec<String>]) -> String {
    aligned(head, rows, head.len())
}

fn aligned(head: &[&str], rows: &[Vec<String>], left: usize) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([head[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &[String]| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(i, (cell, &w))| match i {
            i if i < left => format!("{cell:<w$}"),
            _ => format!("{cell:>w$}"),
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    let head: Vec<String> = head.iter().map(ToString::to_string).collect();
    let rule: Vec<String> = widths.iter().map(|&w| "-".repeat(w)).collect();
    let mut lines = vec![line(&head), line(&rule)];
    lines.extend(rows.iter().map(|row| line(row)));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_aligns_columns() {
        let text = table(&["a", "long"], &[vec!["xyz".into(), "1".into()]]);
        assert_eq!(text, "a    long\n---  ----\nxyz     1");
        let text = left_table(&["a", "long"], &[vec!["xyz".into(), "1".into()]]);
        assert_eq!(text, "a    long\n---  ----\nxyz  1");
    }
}
