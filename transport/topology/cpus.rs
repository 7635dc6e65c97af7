//! Sets of CPUs, and their lists as the kernel writes them.

use std::collections::BTreeSet;
use std::fmt;

/// CPUs are numbered below this: the most that a Linux kernel can be built for.
pub const MAX_CPUS: u32 = 8192;

/// A set of CPUs, by the kernel's numbers. A CPU is one hyperthread of a core.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cpus(BTreeSet<u32>);

impl Cpus {
    /// Reads a list such as `0-3,8`; an empty text is the empty set. `None` for any other text, for ranges that go
    /// backwards, for CPUs from [`MAX_CPUS`] on, and where a list names more than so many, the same ones among them.
    pub fn parse(list: &str) -> Option<Cpus> {
        let (mut cpus, mut named) = (BTreeSet::new(), 0);
        for part in list.split(',').filter(|_| !list.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return None;
            }
            named += last - first + 1;
            if named > MAX_CPUS {
                return None;
            }
            cpus.extend(first..=last);
        }
        Some(Cpus(cpus))
    }

    /// As [`parse`](Cpus::parse), of a list that a user gives: at least one CPU.
    ///
    /// # Errors
    /// What to give instead.
    pub fn listed(list: &str) -> Result<Cpus, String> {
        let cpus = Cpus::parse(list).filter(|cpus| !cpus.is_empty());
        cpus.ok_or_else(|| format!("give CPUs below {MAX_CPUS}, as in 0-11,48-59"))
    }

    /// Whether the CPU is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Whether the set has no CPU.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// The CPUs that both sets have.
    #[must_use]
    pub fn both(&self, other: &Cpus) -> Cpus {
        Cpus(self.0.intersection(&other.0).copied().collect())
    }

    /// Whether every CPU of this set is in the other.
    pub fn is_within(&self, other: &Cpus) -> bool {
        self.0.is_subset(&other.0)
    }
}

/// A CPU's number, without a sign.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|&cpu| digits && cpu < MAX_CPUS)
}

impl FromIterator<u32> for Cpus {
    fn from_iter<T: IntoIterator<Item = u32>>(cpus: T) -> Cpus {
        Cpus(cpus.into_iter().collect())
    }
}

impl fmt::Display for Cpus {
    /// The list that [`Cpus::parse`] reads, with ranges as long as they can be.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(first) = rest.next() {
            let mut last = first;
            while let Some(next) = rest.next_if(|&cpu| cpu == last + 1) {
                last = next;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}
