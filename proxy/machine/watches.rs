//! The next doorbell of each link, one by one and in groups, since every pass of the driver polls all of
//! them.
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
    /// By direction. No group has links of two directions, whose words are not adjacent.
    orders: [Order; DIRECTIONS],
}

/// The order of a direction's groups: from one link on, then the links before it. If all ranks began with the first
/// node, they would all send to it at the same time, and then to the next: so each begins with the node after its own.
#[derive(Debug, Clone, Copy, Default)]
struct Order {
    begin: usize,
    /// The group of the link to begin with.
    first: usize,
    /// The group of link 0, if it is another one.
    wrapped: usize,
}

impl Order {
    fn group_of(&self, link: usize) -> usize {
        match link.checked_sub(self.begin) {
            Some(on) => self.first + on / GROUP_LINKS,
            None => self.wrapped + link / GROUP_LINKS,
        }
    }
}

impl Watches {
    /// Watches of links that are listed direction by direction; by direction, `first_link` is its first link, and
    /// `begins` the link to poll first.
    pub fn new(list: Vec<Watch>, first_link: &[usize; DIRECTIONS], begins: &[usize; DIRECTIONS]) -> Watches {
        let mut groups: Vec<Group> = Vec::new();
        let mut orders = [Order::default(); DIRECTIONS];
        for (direction, first) in first_link.iter().enumerate() {
            let end = first_link.get(direction + 1).copied().unwrap_or(list.len());
            let begin = begins[direction];
            let mut add = |from: usize, to: usize| {
                let number = groups.len();
                groups.extend((from..to).step_by(GROUP_LINKS).map(|first| Group {
                    first: first as u16,
                    links: GROUP_LINKS.min(to - first) as u16,
                    row: None,
                }));
                number
            };
            orders[direction] = Order { begin, first: add(first + begin, end), wrapped: add(*first, first + begin) };
        }
        let mut watches = Watches { list, groups, orders };
        (0..watches.groups.len()).for_each(|at| watches.even_out(at));
        watches
    }

    pub fn list(&self) -> &[Watch] {
        &self.list
    }

    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Sets a link's watch; `link` is its index in its direction, `at` among all links.
    pub fn set(&mut self, direction: usize, link: usize, at: usize, watch: Watch) {
        self.list[at] = watch;
        self.groups[self.orders[direction].group_of(link)].row = None;
    }

    /// Determines whether a group is even. Not done in `set`: a post would pay for it, and neighbours mostly move
    /// together.
    pub fn even_out(&mut self, at: usize) {
        let Some(group) = self.groups.get_mut(at) else { return };
        let watches = &self.list[group.range()];
        group.row = watches.first().map(|first| Row { word: first.word, epoch: first.epoch }).filter(|row| {
            let in_row = |(watch, word): (&Watch, u32)| watch.word == word && watch.epoch == row.epoch && !watch.asleep;
            watches.iter().zip(row.word..).all(in_row)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Watches of 20 links in the first direction and of 3 in the second, all other directions without any.
    fn watches(begins: [usize; DIRECTIONS]) -> Watches {
        let watch = |word| Watch { word, chunks_word: None, epoch: 7, asleep: false };
        let list = (0..20).chain(100..103).map(watch).collect();
        let mut first_link = [23; DIRECTIONS];
        (first_link[0], first_link[1]) = (0, 20);
        Watches::new(list, &first_link, &begins)
    }

    #[test]
    fn links_are_polled_from_the_first_of_their_order_on_and_all_of_them() {
        for (begin, order) in [(0, vec![0, 8, 16]), (5, vec![5, 13, 0]), (19, vec![19, 0, 8, 16]), (20, vec![0, 8, 16])]
        {
            let mut begins = [0; DIRECTIONS];
            (begins[0], begins[1]) = (begin, 2);
            let mut watches = watches(begins);
            let firsts: Vec<usize> = watches.groups().iter().map(|group| group.range().start).collect();
            assert_eq!(firsts[..order.len()], order);
            assert_eq!(firsts[order.len()..], [22, 20]);
            let mut seen: Vec<usize> = watches.groups().iter().flat_map(Group::range).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..23).collect::<Vec<_>>());
            assert!(watches.groups().iter().all(|group| group.row.is_some()), "neighbours of one epoch");
            for link in 0..20 {
                let watch = watches.list()[link];
                watches.set(0, link, link, Watch { epoch: 9, ..watch });
                let odd: Vec<usize> =
                    (0..watches.groups().len()).filter(|at| watches.groups()[*at].row.is_none()).collect();
                assert!(odd.len() == 1 && watches.groups()[odd[0]].range().contains(&link), "link {link}: {odd:?}");
                watches.set(0, link, link, watch);
                watches.even_out(odd[0]);
            }
        }
    }
}
