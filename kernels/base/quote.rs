//! Texts of others in this rank's own words.
//!
//! Place: wherever an error tells what another rank or a stranger has sent.

use std::fmt::Write;

/// Most characters that are told of a text.
const MOST: usize = 2000;

/// What a text of another says, in one line: control characters and what is not Unicode are spelled out, and of a long
/// one the beginning stands. Quotation marks stay, as errors have them.
pub fn quoted(bytes: &[u8]) -> String {
    // Four bytes a character at the most, so that no more than that is looked at.
    let text = String::from_utf8_lossy(bytes.get(..4 * MOST).unwrap_or(bytes));
    let mut told = String::new();
    let mut shown = 0;
    for c in text.chars().take(MOST) {
        shown += c.len_utf8();
        // Writing to a string cannot fail.
        let _ = match c {
            '"' | '\'' => write!(told, "{c}"),
            _ => write!(told, "{}", c.escape_debug()),
        };
    }
    if shown < text.len() || text.len() < bytes.len() && bytes.len() > 4 * MOST {
        told += "...";
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_move_a_terminals_cursor_or_fill_it() {
        assert_eq!(quoted(b"rank 1 has \"x\", it's 5 \xc2\xb5s"), "rank 1 has \"x\", it's 5 \u{b5}s");
        assert_eq!(quoted(b"a\n\x1b[2Jb\x00\r"), "a\\n\\u{1b}[2Jb\\0\\r");
        assert_eq!(quoted(b"\xff\xfe"), "\u{fffd}\u{fffd}");
        assert_eq!(quoted(&[b'x'; MOST]), "x".repeat(MOST));
        for long in [vec![b'x'; MOST + 1], vec![b'x'; 9 * MOST], "\u{10348}".repeat(MOST + 1).into_bytes()] {
            let told = quoted(&long);
            assert!(told.ends_with("...") && told.chars().count() == MOST + 3, "{}", told.chars().count());
        }
        assert_eq!(quoted(&[0xff; 5 * MOST]).chars().count(), MOST + 3);
    }
}
