//! Ranks that are missing between nodes: what goes by way of a rank of another node is missing with it, and no more.

use super::*;
use crate::rig::nodes::{on_nodes, proxy};

/// The node of a rank, and its place there: nodes have equally many ranks.
fn place(nodes: &[usize], rank: usize) -> (usize, usize) {
    (rank / nodes[0], rank % nodes[0])
}

/// The rail of a rank on a node.
fn rail(nodes: &[usize], rank: usize, node: usize) -> usize {
    node * nodes[0] + place(nodes, rank).1
}

/// Whether rows go from `from` to `to`, where some ranks are missing.
fn goes(nodes: &[usize], from: usize, to: usize, missing: &[usize]) -> bool {
    let (own, other) = (place(nodes, from).0, place(nodes, to).0);
    let cut = own != other && missing.contains(&rail(nodes, from, other));
    !cut && !missing.contains(&from) && !missing.contains(&to)
}

/// Which sources' rows come to a rank, and which ranks add to its sums.
fn expected(nodes: &[usize], rank: usize, missing: &[usize]) -> (Vec<Came>, Vec<bool>) {
    let all = || 0..nodes.iter().sum();
    let came = |source| if goes(nodes, source, rank, missing) { Came::Whole } else { Came::Not };
    (all().map(came).collect(), all().map(|owner| goes(nodes, rank, owner, missing)).collect())
}

pub(super) fn rounds(member: &Member, salts: std::ops::Range<usize>, missing: &[usize]) {
    let (came, adds) = expected(&member.nodes, member.rig.rank, missing);
    for salt in salts {
        let call = member.call(salt);
        member.put(call);
        let handle = member.dispatch(call).unwrap();
        assert_eq!(member.wrong_rows(call, &came), None, "rank {} {call:?} {:?}", member.rig.rank, member.nodes);
        member.combine(call, &handle).unwrap();
        assert_eq!(member.wrong_sums(call, &adds), None, "rank {} {call:?} {:?}", member.rig.rank, member.nodes);
    }
}

fn member(world: &World, proxy: &Proxy, missing: MissingRanks, deadline: Duration, weights: Weights) -> Member {
    let change = with_masks(missing, deadline);
    let tune = |tuning: &mut Tuning| tuning.chunk_rows = Some(1);
    Member::new(world, test_device(world), |b| change(b).proxy(proxy).weights(weights).tuning(tune))
        .with_weights(weights)
}

const SHAPES: [&[usize]; 4] = [&[2, 2], &[1, 1], &[1, 1, 1, 1], &[2, 2, 2, 2]];
pub(super) const WEIGHTS: [Weights; 2] = [Weights::Dispatch, Weights::Combine];

/// All ranks mask one, which calls no more: the others' calls go on without it, and without what went by way of it.
#[test]
fn calls_go_on_without_a_masked_rank_of_any_node() {
    for (nodes, weights) in SHAPES.into_iter().flat_map(|nodes| WEIGHTS.map(|weights| (nodes, weights))) {
        // The first, one between, and the last.
        let ranks: usize = nodes.iter().sum();
        for missing in [0, ranks / 2, ranks - 1] {
            on_nodes(nodes, |world, network| {
                let proxy = proxy(network, &world, 10_000);
                let member = member(&world, &proxy, MissingRanks::Masked, LONG, weights);
                rounds(&member, 0..5, &[]);
                world.barrier("before the mask").unwrap();
                if member.rig.rank != missing {
                    member.rig.ep.mask_rank(Rank(missing as u32)).unwrap();
                    rounds(&member, 5..14, &[missing]);
                    member.rig.ep.barrier(&member.rig.stream).unwrap();
                    member.rig.stream.synchronize(PATIENCE).unwrap();
                    rounds(&member, 14..18, &[missing]);
                    let mask: Vec<i32> = (0..member.ranks).map(|rank| i32::from(rank == missing)).collect();
                    assert_eq!(member.mask(), mask);
                    assert_eq!(member.silent(), [0usize; 0]);
                }
                world.barrier("all done").unwrap();
            });
        }
    }
}

/// A rank falls silent somewhere in a call, alive in every other respect or with its proxy gone. Each rank's part in
/// the dispatch counts whole or not at all; to each sum a rank adds or does not; then all goes on without it.
#[test]
fn calls_go_on_without_a_rank_that_falls_silent_on_any_node() {
    use Stop::*;
    let stops = [BeforeDispatch, AfterDispatchSend, AfterDispatch, AfterCombineSend, BeforeBarrier];
    for (number, stop) in stops.into_iter().cycle().take(16).enumerate() {
        let (nodes, weights) = (SHAPES[number % 4], WEIGHTS[number / 4 % 2]);
        silence(nodes, weights, number % nodes.iter().sum::<usize>(), stop, number, number % 3 == 0);
    }
}

fn silence(nodes: &[usize], weights: Weights, victim: usize, stop: Stop, salt: usize, dies: bool) {
    let deadline = Duration::from_millis(800);
    let left = AtomicUsize::new(nodes.iter().sum::<usize>() - 1);
    on_nodes(nodes, |world, network| {
        let proxy = proxy(network, &world, 1_000);
        let member = member(&world, &proxy, MissingRanks::MaskedAtDeadline, deadline, weights);
        let (ep, stream, rank) = (&member.rig.ep, &member.rig.stream, member.rig.rank);
        let what = format!("rank {rank} of {nodes:?}, {victim} stops {stop:?}, {salt}, {weights:?}");
        rounds(&member, 0..3, &[]);
        world.barrier("silence").unwrap();
        let call = member.call(salt);
        member.put(call);
        if rank == victim {
            member.play_until(stop, call);
            if dies {
                drop((member, proxy));
            }
            while left.load(Ordering::Acquire) != 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            return;
        }
        let (came, adds) = expected(nodes, rank, &[victim]);
        let all = vec![true; member.ranks];
        let handle = member.dispatch(call).unwrap();
        // Each source that the victim can cut off has come, or not, or in part.
        let wrong = wrong_rows_of_any(&member, call, &came);
        assert_eq!(wrong, None, "{what}");
        member.combine(call, &handle).unwrap();
        let alone: Vec<_> = (0..member.ranks).map(|owner| owner != victim).collect();
        assert_eq!(member.wrong_sums_of_any(call, &[all, alone, adds]), None, "{what}");
        // Whoever does not need the victim in this call learns of it by the next ones.
        for _ in 0..2 {
            ep.barrier(stream).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            ep.check().unwrap();
        }
        rounds(&member, 60..66, &[victim]);
        // The others get nothing of it, and learn of it from nobody.
        let ((own, local), (node, served)) = (place(nodes, rank), place(nodes, victim));
        let knows = own == node || local == served;
        let mask: Vec<i32> = (0..member.ranks).map(|rank| i32::from(rank == victim && knows)).collect();
        assert_eq!(member.mask(), mask, "{what}");
        assert_eq!(member.silent(), if knows { vec![victim] } else { vec![] }, "{what}");
        left.fetch_sub(1, Ordering::Release);
    });
}

/// What is wrong with the rows of a dispatch, if of the sources that may be cut off (`came` has them as `Not`) each has
/// come whole, or not, or in part.
pub(super) fn wrong_rows_of_any(member: &Member, call: Call, came: &[Came]) -> Option<String> {
    let cut: Vec<usize> = (0..came.len()).filter(|source| came[*source] == Came::Not).collect();
    let mut first = None;
    for number in 0..3usize.pow(cut.len() as u32) {
        let mut ways = came.to_vec();
        let mut rest = number;
        for source in &cut {
            ways[*source] = [Came::Whole, Came::Not, Came::InPart][rest % 3];
            rest /= 3;
        }
        let wrong = member.wrong_rows(call, &ways)?;
        first.get_or_insert(wrong);
    }
    first
}

/// One rank alone masks one of another node, of another place there: the two go on without each other, and all else is
/// as ever.
#[test]
fn a_rank_masks_a_rank_of_another_node_alone() {
    for (by, masked, weights) in [(3, 0, WEIGHTS[0]), (1, 2, WEIGHTS[0]), (3, 0, WEIGHTS[1]), (1, 2, WEIGHTS[1])] {
        on_nodes(&[2, 2], |world, network| {
            let proxy = proxy(network, &world, 10_000);
            let member = member(&world, &proxy, MissingRanks::MaskedAtDeadline, LONG, weights);
            let (rank, begun) = (member.rig.rank, Instant::now());
            rounds(&member, 0..3, &[]);
            world.barrier("before the mask").unwrap();
            if rank == by {
                member.rig.ep.mask_rank(Rank(masked as u32)).unwrap();
            }
            let goes = |one: usize, other: usize| ![(by, masked), (masked, by)].contains(&(one, other));
            let came: Vec<_> = (0..4).map(|from| if goes(from, rank) { Came::Whole } else { Came::Not }).collect();
            let adds: Vec<bool> = (0..4).map(|owner| goes(rank, owner)).collect();
            for call in (3..12).map(|salt| member.call(salt)) {
                member.put(call);
                let handle = member.dispatch(call).unwrap();
                assert_eq!(member.wrong_rows(call, &came), None, "rank {rank} {call:?}");
                member.combine(call, &handle).unwrap();
                assert_eq!(member.wrong_sums(call, &adds), None, "rank {rank} {call:?}");
            }
            assert!(begun.elapsed() < LONG / 2, "{rank}: {:?}", begun.elapsed());
            world.barrier("all done").unwrap();
        });
    }
}
