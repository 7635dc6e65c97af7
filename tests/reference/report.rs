//! The findings of a comparison: how much was compared, how much was wrong, and the first findings as sentences.

/// Sentences kept; the rest is counted.
const SENTENCES: usize = 12;

/// The result of a check. Reports of several ranks may be merged.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Elements (columns, scale words, indices) compared.
    pub compared: u64,
    /// Elements that were wrong.
    pub mismatches: u64,
    /// Largest error of a combined element, relative to its own magnitude or, where terms cancel, to an eighth of the
    /// sum of its terms' magnitudes; infinite if a NaN was seen.
    pub max_rel_err: f64,
    /// The first findings.
    pub sentences: Vec<String>,
}

impl Report {
    /// Whether something was compared and all of it was right.
    pub fn ok(&self) -> bool {
        self.mismatches == 0
    }

    /// Adds another report's findings.
    pub fn merge(&mut self, other: Report) {
        self.compared += other.compared;
        self.mismatches += other.mismatches;
        self.max_rel_err = self.max_rel_err.max(other.max_rel_err);
        let room = SENTENCES.saturating_sub(self.sentences.len());
        self.sentences.extend(other.sentences.into_iter().take(room));
    }

    /// Counts `elements` wrong elements; `sentence` is asked for only while there is room for it.
    pub(super) fn miss(&mut self, elements: u64, sentence: impl FnOnce() -> String) {
        self.mismatches += elements.max(1);
        if self.sentences.len() < SENTENCES {
            self.sentences.push(sentence());
        }
    }
}
