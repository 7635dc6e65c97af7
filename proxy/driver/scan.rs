//! Finds doorbells that may be rung among hundreds that are not.
//!
//! Place in the data path: every pass of the proxy's loop scans the doorbells, so a doorbell waits for half a scan on
//! average. A group with a row is eight neighbouring loads that depend on no other load and not on the machine.
//! The driver loads what the scan finds again, one by one and with Acquire (E1): a scan may report a doorbell that is
//! not rung, and must miss none.

use crate::proxy::machine::{GROUP_LINKS, Group, Row};
use std::sync::atomic::{AtomicU64, Ordering};

/// The next group at or after `from` that has no row or whose row shows its epoch somewhere.
pub(super) fn next_group(groups: &[Group], from: usize, doorbells: &[AtomicU64]) -> Option<usize> {
    let found = groups.get(from..)?.iter().position(|group| may_ring(group, doorbells))?;
    Some(from + found)
}

#[inline]
fn may_ring(group: &Group, doorbells: &[AtomicU64]) -> bool {
    let Some(Row { word, epoch }) = group.row else { return true };
    let (first, links) = (word as usize, usize::from(group.links));
    let Some(words) = doorbells.get(first..first + links) else { return true };
    match <&[AtomicU64; GROUP_LINKS]>::try_from(words) {
        Ok(words) => shows(words, epoch),
        Err(_) => shows(words, epoch),
    }
}

/// Whether some doorbell has the epoch in its upper half. Over an array, all loads come before the first comparison.
#[inline]
fn shows(words: &[AtomicU64], epoch: u32) -> bool {
    // Relaxed: the driver loads the word again before it acts on it.
    words.iter().fold(false, |shows, word| shows | ((word.load(Ordering::Relaxed) >> 32) as u32 == epoch))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Doorbells of 19 links in one row from word 4 on, beside those of others, and their groups.
    fn row(epoch: u32) -> (Vec<AtomicU64>, Vec<Group>) {
        let words = (0..32).map(|at| AtomicU64::new(u64::from(epoch - 2 * u32::from((4..23).contains(&at))) << 32 | 9));
        let group = |first: u16| {
            let (links, word) = ((19 - first).min(GROUP_LINKS as u16), 4 + u32::from(first));
            Group { first, links, row: Some(Row { word, epoch }) }
        };
        (words.collect(), [0, 8, 16].map(group).to_vec())
    }

    #[test]
    fn every_doorbell_of_a_row_is_found_and_no_neighbour_of_it() {
        let (words, groups) = row(7);
        assert_eq!(next_group(&groups, 0, &words), None);
        for link in 0..19 {
            words[4 + link].store(7 << 32 | 1, Ordering::Relaxed);
            let group = link / GROUP_LINKS;
            assert_eq!(next_group(&groups, 0, &words), Some(group), "link {link}");
            assert_eq!(next_group(&groups, group, &words), Some(group), "link {link}");
            assert_eq!(next_group(&groups, group + 1, &words), None, "link {link}");
            words[4 + link].store(5 << 32 | 1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_group_without_a_row_or_beyond_the_words_is_looked_at() {
        let (words, mut groups) = row(7);
        groups[1].row = None;
        assert_eq!(next_group(&groups, 0, &words), Some(1));
        assert_eq!(next_group(&groups, 2, &words), None);
        assert_eq!(next_group(&groups[2..], 0, &words[..22]), Some(0));
        assert_eq!(next_group(&groups, 4, &words), None);
    }
}
