//! Texts of others, quoted safely in this rank's errors.
//!
//! Place: wherever an error quotes what another rank or a stranger has sent.

use std::fmt::Write;

/// Most characters of a text that are quoted.
const MOST: usize = 2000;

/// A text of another rank in one line: control characters and what is not Unicode are spelled out, and a long text is
/// cut. Quotation marks stay, as errors have them, and so do backslashes: what was quoted before stays as it is.
pub fn quoted(bytes: &[u8]) -> String {
    // A character has four bytes at the most: more bytes are not looked at.
    let text = String::from_utf8_lossy(bytes.get(..4 * MOST).unwrap_or(bytes));
    let mut line = String::new();
    let mut shown = 0;
    for c in text.chars().take(MOST) {
        shown += c.len_utf8();
        // Writing to a string cannot fail.
        let _ = match c {
            '"' | '\'' | '\\' => write!(line, "{c}"),
            _ => write!(line, "{}", c.escape_debug()),
        };
    }
    if shown < text.len() || text.len() < bytes.len() && bytes.len() > 4 * MOST {
        line += "...";
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_move_a_terminals_cursor_or_fill_it() {
        assert_eq!(quoted(b"rank 1 has \"x\", it's 5 \xc2\xb5s"), "rank 1 has \"x\", it's 5 \u{b5}s");
        assert_eq!(quoted(b"a\n\x1b[2Jb\x00\r"), "a\\n\\u{1b}[2Jb\\0\\r");
        assert_eq!(quoted(quoted(b"a\n\x1b[2J\\b").as_bytes()), "a\\n\\u{1b}[2J\\b");
        assert_eq!(quoted(b"\xff\xfe"), "\u{fffd}\u{fffd}");
        assert_eq!(quoted(&[b'x'; MOST]), "x".repeat(MOST));
        for long in [vec![b'x'; MOST + 1], vec![b'x'; 9 * MOST], "\u{10348}".repeat(MOST + 1).into_bytes()] {
            let line = quoted(&long);
            assert!(line.ends_with("...") && line.chars().count() == MOST + 3, "{}", line.chars().count());
        }
        assert_eq!(quoted(&[0xff; 5 * MOST]).chars().count(), MOST + 3);
    }
}
