//! The doorbells that come next: one a link, and the same in groups, since every turn of the driver looks at all of them.
//!
//! Place in the data path: the machine's tables, read by the driver. Allocates in `new` alone.
//!
//! ```text
//!   links of a direction   0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | 16 …
//!   groups                 └── even ─────┘   └── some are ahead ──┘
//!                          neighbours of     looked at one by one,
//!                          one epoch: one    then even again if all
//!                          tight loop        have caught up
//! ```

use super::{GROUP_LINKS, Group, Row, Watch};
use crate::proxy::wire::DIRECTIONS;

/// All watches of a context.
#[derive(Debug)]
pub(super) struct Watches {
    /// By link, direction after direction.
    list: Vec<Watch>,
    groups: Vec<Group>,
    /// By direction: its first group. No group has links of two directions, whose words are far apart.
    first_group: [usize; DIRECTIONS],
}

impl Watches {
    /// Of links that stand direction by direction; `first_link` says where each begins.
    pub fn new(list: Vec<Watch>, first_link: &[usize; DIRECTIONS]) -> Watches {
        let mut groups = Vec::new();
        let mut first_group = [0; DIRECTIONS];
        for (direction, first) in first_link.iter().enumerate() {
            first_group[direction] = groups.len();
            let end = first_link.get(direction + 1).copied().unwrap_or(list.len());
            groups.extend((*first..end).step_by(GROUP_LINKS).map(|first| Group {
                first: first as u16,
                links: GROUP_LINKS.min(end - first) as u16,
                row: None,
            }));
        }
        let mut watches = Watches { list, groups, first_group };
        (0..watches.groups.len()).for_each(|at| watches.even_out(at));
        watches
    }

    pub fn list(&self) -> &[Watch] {
        &self.list
    }

    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// What a link waits for from now on; `link` is its place in its direction, `at` among all.
    pub fn set(&mut self, direction: usize, link: usize, at: usize, watch: Watch) {
        self.list[at] = watch;
        self.groups[self.first_group[direction] + link / GROUP_LINKS].row = None;
    }

    /// Finds out whether a group is even. Not with `set`: a post would pay for it, and neighbours mostly move together.
    pub fn even_out(&mut self, at: usize) {
        let Some(group) = self.groups.get_mut(at) else { return };
        let watches = &self.list[group.range()];
        group.row = watches.first().map(|first| Row { word: first.word, epoch: first.epoch }).filter(|row| {
            let in_row = |(watch, word): (&Watch, u32)| watch.word == word && watch.epoch == row.epoch && !watch.asleep;
            watches.iter().zip(row.word..).all(in_row)
        });
    }
}
