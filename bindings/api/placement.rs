//! Which rank holds which expert.

use crate::base::{Error, Result};
use crate::transport::world::bootstrap::MAX_WORLD;

/// Most experts of a placement.
pub(crate) const MAX_EXPERTS: usize = 1 << 20;

/// A table expert → rank. The experts of a rank are counted locally in the order of their global ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    rank_of: Vec<u32>,
    local_index: Vec<u32>,
    local_experts: Vec<Vec<u32>>,
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
        Ok(Placement { rank_of: table, local_index, local_experts })
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.rank_of.len()
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
