//! Which rank holds which expert.

use crate::base::{Error, Result};
use crate::transport::world::bootstrap::MAX_WORLD;

/// Most experts of a placement.
pub(crate) const MAX_EXPERTS: usize = 1 << 20;

/// Slots of the table of replicas for each replica of the expert that has most: the shares of its replicas differ by a
/// sixteenth at most.
const SLOTS_A_REPLICA: usize = 16;
/// Most slots of that table.
pub(crate) const MAX_REPLICA_SLOTS: usize = 4096;

/// A table expert → rank. The experts of a rank are counted locally in the order of their global ids. Several experts
/// may be [replicas](Placement::replicas) of one logical expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    rank_of: Vec<u32>,
    local_index: Vec<u32>,
    local_experts: Vec<Vec<u32>>,
    /// The logical expert of each expert, and the experts of each logical expert; both empty without replicas.
    logical_of: Vec<u32>,
    replicas_of: Vec<Vec<u32>>,
}

impl Placement {
    /// The default: consecutive experts, ranks hold floor or ceil of `experts / ranks`.
    /// Expert e lies on rank `floor(e · ranks / experts)`.
    ///
    /// # Errors
    /// `Config` if there are no ranks or experts, more than 2^20 experts, or more than 16 384 ranks.
    pub fn even(experts: usize, ranks: usize) -> Result<Placement> {
        check_sizes(experts, ranks)?;
        let table = (0..experts).map(|e| (e as u64 * ranks as u64 / experts as u64) as u32).collect();
        Placement::table(table, ranks)
    }

    /// Any placement: `table[e]` is the rank of expert e. A replicated expert is several physical experts.
    ///
    /// # Errors
    /// `Config` if the table is empty or names a rank outside the world, or if there are more than 2^20 experts or more
    /// than 16 384 ranks.
    pub fn table(table: Vec<u32>, ranks: usize) -> Result<Placement> {
        check_sizes(table.len(), ranks)?;
        let mut local_experts = vec![Vec::new(); ranks];
        let mut local_index = Vec::with_capacity(table.len());
        for (expert, &rank) in table.iter().enumerate() {
            let Some(list) = local_experts.get_mut(rank as usize) else {
                let advice = format!("expert {expert} must lie on a rank below {ranks}");
                return Err(Error::config("placement", format!("rank {rank}"), advice));
            };
            local_index.push(list.len() as u32);
            list.push(expert as u32);
        }
        Ok(Placement { rank_of: table, local_index, local_experts, logical_of: Vec::new(), replicas_of: Vec::new() })
    }

    /// Makes experts replicas: expert e of the table becomes a replica of the logical expert `logical[e]`, and calls
    /// name logical experts. Expert parallel load balancers make such tables (DeepSeek's EPLB calls this one
    /// `phy2log`).
    ///
    /// Each choice goes to one replica. Only the nearest replicas that are in the world are candidates: those of the
    /// source rank; if there is none, those of its node; else all. By a hash of its number a token takes one slot of a
    /// table ([`replica_table`](super::Tuning::replica_table)), the same for all its choices. Slot s of a logical
    /// expert holds candidate (source rank + s) mod n of its n candidates in ascending order. The table has the
    /// smallest power of two of slots that is at least 16 times the replicas of the expert that has most, at most 4096.
    /// So the same input goes to the same replicas in every run, and no choice needs to know of others.
    ///
    /// # Errors
    /// `Config` if the table is not as long as this placement, or a logical expert below the largest has no replica.
    pub fn replicas(self, logical: Vec<u32>) -> Result<Placement> {
        if logical.len() != self.experts() {
            let advice = format!("give a logical expert for each of the {} experts", self.experts());
            return Err(Error::config("replicas", format!("{} entries", logical.len()), advice));
        }
        let most = logical.iter().max().map_or(0, |most| *most as usize);
        let mut replicas_of = vec![Vec::new(); most.min(MAX_EXPERTS) + 1];
        for (expert, &logical) in logical.iter().enumerate() {
            if let Some(list) = replicas_of.get_mut(logical as usize) {
                list.push(expert as u32);
            }
        }
        if let Some(nowhere) = replicas_of.iter().position(Vec::is_empty) {
            let advice =
                format!("the experts are replicas of {most} and lower numbers; number logical experts without gaps");
            return Err(Error::config("replicas", format!("without one of logical expert {nowhere}"), advice));
        }
        Ok(Placement { logical_of: logical, replicas_of, ..self })
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.rank_of.len()
    }

    /// Number of experts that calls name: of logical experts, or of all.
    pub fn logical_experts(&self) -> usize {
        if self.has_replicas() { self.replicas_of.len() } else { self.experts() }
    }

    /// The logical expert of an expert, itself without replicas; `None` beyond the table.
    pub fn logical_of(&self, expert: usize) -> Option<u32> {
        if self.has_replicas() {
            self.logical_of.get(expert).copied()
        } else {
            Some(expert as u32).filter(|_| expert < self.experts())
        }
    }

    /// Whether experts are replicas of logical experts.
    pub fn has_replicas(&self) -> bool {
        !self.logical_of.is_empty()
    }

    /// Rows of each logical expert, from rows of each expert, as balancers read them: the sum over its replicas.
    /// Experts that `rows` lacks have none.
    pub fn logical_rows(&self, rows: &[u64]) -> Vec<u64> {
        let mut sums = vec![0; self.logical_experts()];
        for (expert, rows) in rows.iter().enumerate().take(self.experts()) {
            if let Some(sum) = self.logical_of(expert).and_then(|logical| sums.get_mut(logical as usize)) {
                *sum += rows;
            }
        }
        sums
    }

    /// The table of replicas of a source rank, `[logical experts, slots]`: see [`replicas`](Placement::replicas).
    /// `class(rank)`: 0 of the source, 1 of its node, 2 of another, `None` outside the world. A logical expert that is
    /// nowhere in the world keeps its replicas of old, which get nothing.
    pub(crate) fn replica_table(&self, source: usize, class: impl Fn(u32) -> Option<u8>) -> Vec<u32> {
        let most = self.replicas_of.iter().map(Vec::len).max().unwrap_or(1);
        let slots = (most * SLOTS_A_REPLICA).next_power_of_two().min(MAX_REPLICA_SLOTS);
        let row = |replicas: &Vec<u32>| {
            let class_of = |expert: &u32| self.rank_of(*expert as usize).and_then(&class).unwrap_or(u8::MAX);
            let nearest = replicas.iter().map(class_of).min();
            let candidates: Vec<u32> =
                replicas.iter().copied().filter(|expert| Some(class_of(expert)) == nearest).collect();
            (0..slots).filter_map(move |slot| candidates.get((source + slot) % candidates.len().max(1)).copied())
        };
        self.replicas_of.iter().flat_map(row).collect()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.local_experts.len()
    }

    /// The rank of an expert; `None` beyond the table.
    pub fn rank_of(&self, expert: usize) -> Option<u32> {
        self.rank_of.get(expert).copied()
    }

    /// The index of an expert on its rank; `None` beyond the table.
    pub fn local_index(&self, expert: usize) -> Option<u32> {
        self.local_index.get(expert).copied()
    }

    /// The experts of a rank, ascending; empty for a rank outside the world.
    pub fn local_experts(&self, rank: usize) -> &[u32] {
        self.local_experts.get(rank).map_or(&[], Vec::as_slice)
    }

    /// Most experts on one rank.
    pub fn max_local_experts(&self) -> usize {
        self.local_experts.iter().map(Vec::len).max().unwrap_or(0)
    }
}

/// Refuses numbers of experts and ranks outside the limits of a table.
fn check_sizes(experts: usize, ranks: usize) -> Result<()> {
    if experts == 0 {
        return Err(Error::config("placement", "empty", "give one rank per expert"));
    }
    if experts > MAX_EXPERTS || ranks == 0 || ranks > MAX_WORLD {
        let advice = format!("give 1 to {MAX_EXPERTS} experts on 1 to {MAX_WORLD} ranks");
        return Err(Error::config("placement", format!("{experts} experts on {ranks} ranks"), advice));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_placement_differs_by_at_most_one_and_is_consecutive() {
        for (experts, ranks) in [(256, 8), (10, 4), (3, 8), (7, 3), (1, 1)] {
            let placement = Placement::even(experts, ranks).unwrap();
            let sizes: Vec<usize> = (0..ranks).map(|r| placement.local_experts(r).len()).collect();
            let (low, high) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
            assert!(high - low <= 1, "{experts} experts on {ranks} ranks: {sizes:?}");
            let order: Vec<u32> = (0..ranks).flat_map(|r| placement.local_experts(r).to_vec()).collect();
            assert!(order.windows(2).all(|w| w[0] < w[1]));
        }
    }

    #[test]
    fn a_table_may_leave_ranks_empty_but_not_leave_the_world() {
        let placement = Placement::table(vec![2, 0, 2], 3).unwrap();
        assert_eq!(placement.local_experts(1), &[] as &[u32]);
        assert_eq!((placement.local_experts(2), placement.local_index(2)), (&[0, 2][..], Some(1)));
        assert!(Placement::table(vec![0, 3], 3).unwrap_err().to_string().contains("expert 1"));
        assert!(Placement::table(vec![], 3).is_err());
    }

    #[test]
    fn a_source_takes_its_nearest_replicas_that_are_in_the_world_one_after_the_other() {
        // Logical expert 0 on ranks 0 to 3, 1 on ranks 1 and 3, 2 on rank 3.
        let placement = Placement::table(vec![0, 1, 2, 3, 1, 3, 3], 4).unwrap();
        let placement = placement.replicas(vec![0, 0, 0, 0, 1, 1, 2]).unwrap();
        // The first slots of each row: 16 for each of four replicas.
        let firsts = |source: usize, class: [Option<u8>; 4]| {
            let table = placement.replica_table(source, |rank| class[rank as usize]);
            assert_eq!(table.len(), 3 * 64);
            table.chunks(64).map(|row| row[..4].to_vec()).collect::<Vec<_>>()
        };
        let (own, node, other) = (Some(0), Some(1), Some(2));
        assert_eq!(firsts(0, [own, node, other, other])[..2], [vec![0; 4], vec![4; 4]]);
        assert_eq!(firsts(2, [other, other, own, node]), [vec![2; 4], vec![5; 4], vec![6; 4]]);
        assert_eq!(firsts(1, [None, None, node, node])[0], [3, 2, 3, 2]);
        assert_eq!(firsts(2, [other, other, None, other]), [vec![3, 0, 1, 3], vec![4, 5, 4, 5], vec![6; 4]]);
        // Nowhere in the world: replicas of old, which get nothing.
        assert_eq!(firsts(0, [own, node, other, None])[2], [6; 4]);
    }

    #[test]
    fn experts_and_ranks_beyond_what_a_table_counts_are_refused_with_both() {
        for (experts, ranks) in [(usize::MAX, 1), ((1 << 20) + 1, 8), (8, usize::MAX), (8, 16_385), (8, 0)] {
            let text = Placement::even(experts, ranks).unwrap_err().to_string();
            let wanted = "give 1 to 1048576 experts on 1 to 16384 ranks";
            assert_eq!(text, format!("configuration placement is {experts} experts on {ranks} ranks: {wanted}"));
        }
        assert!(Placement::table(vec![0], usize::MAX).unwrap_err().to_string().contains("1 to 16384 ranks"));
        assert!(Placement::even(0, 8).is_err());
        assert_eq!(Placement::even(1 << 20, 1 << 14).unwrap().max_local_experts(), 64);
    }
}
