//! Operations under way, by number.
//!
//! Place in the data path: between `post` and the completion queue. On the endpoint's thread. Nothing here allocates
//! after the opening.

/// Numbers of one kind, each free or under way.
#[derive(Debug)]
pub(super) struct Slots<T> {
    flying: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slots<T> {
    pub fn new(count: u32) -> Slots<T> {
        Slots { flying: (0..count).map(|_| None).collect(), free: (0..count).rev().collect() }
    }

    /// Takes a free number; `None` if all are under way.
    pub fn take(&mut self, operation: T) -> Option<u32> {
        let number = self.free.pop()?;
        *self.flying.get_mut(number as usize)? = Some(operation);
        Some(number)
    }

    /// How many numbers one of so many owners may have: `most` while half of all are free. Behind that owners share
    /// this half alike, so that those who never end theirs hold nobody else up.
    pub fn share(&self, owners: usize, most: usize) -> usize {
        let half = self.flying.len() / 2;
        if self.free.len() > half { most } else { most.min((half / owners.max(1)).max(1)) }
    }

    pub fn get(&self, number: u32) -> Option<&T> {
        self.flying.get(number as usize)?.as_ref()
    }

    /// Changes one that is under way.
    pub fn change(&mut self, number: u32, change: impl FnOnce(&mut T)) {
        if let Some(operation) = self.flying.get_mut(number as usize).and_then(Option::as_mut) {
            change(operation);
        }
    }

    /// Ends an operation, whose number is free again; `None` if none is under way by that number.
    pub fn end(&mut self, number: u32) -> Option<T> {
        let operation = self.flying.get_mut(number as usize)?.take()?;
        self.free.push(number);
        Some(operation)
    }

    /// All that are under way, by number.
    pub fn flying(&self) -> impl Iterator<Item = (u32, &T)> {
        (0u32..).zip(&self.flying).filter_map(|(number, operation)| Some((number, operation.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_under_way_once() {
        let mut slots = Slots::new(2);
        assert_eq!([slots.take('a'), slots.take('b'), slots.take('c')], [Some(0), Some(1), None]);
        assert_eq!(
            (slots.get(1).copied(), slots.end(1), slots.end(1), slots.end(7)),
            (Some('b'), Some('b'), None, None)
        );
        assert_eq!((slots.take('d'), slots.flying().collect::<Vec<_>>()), (Some(1), vec![(0, &'a'), (1, &'d')]));
    }

    #[test]
    fn owners_who_end_nothing_leave_numbers_for_all_others() {
        for (count, owners) in [(1024, 511), (1024, 70), (1024, 3), (256, 100)] {
            let mut slots = Slots::new(count);
            let mut held = vec![0; owners];
            // All but the last take what they get.
            for _ in 0..20 {
                for held in &mut held[1..] {
                    if *held < slots.share(owners, 16) && slots.take(()).is_some() {
                        *held += 1;
                    }
                }
            }
            assert!(held[1..].iter().all(|held| *held > 0), "{owners} owners of {count}: {held:?}");
            assert!(slots.share(owners, 16) > 0 && slots.take(()).is_some(), "{owners} owners of {count}");
        }
        let slots: Slots<()> = Slots::new(8);
        assert_eq!([slots.share(1, 16), slots.share(100, 16)], [16; 2], "while there is room, as many as they want");
    }
}
