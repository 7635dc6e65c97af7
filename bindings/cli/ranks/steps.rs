//! The order in which a rank enqueues the halves of several dispatches and their combines.
//!
//! Before the data path; pure. All ranks take the same order, since it follows from the case. It keeps the library's
//! grammar: a dispatch is received before the next is sent, and so with combines; a combine follows its dispatch.

use crate::cli::cases::case::Case;
use crate::cli::cases::inputs::{Counter, Use};

/// One step that is enqueued for a dispatch, by the dispatch's number. Without split calls the sending step is the
/// whole call and the receiving step does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    SendDispatch(usize),
    ReceiveDispatch(usize),
    Experts(usize),
    SendCombine(usize),
    ReceiveCombine(usize),
}

/// The steps of `count` dispatches, numbered from 0, and their combines. Combines come in a random order: half of
/// the time after all dispatches, else interleaved at random.
pub fn steps(case: &Case, group: usize, count: usize) -> Vec<Step> {
    let mut dice = Counter::new(case.seed, Use::Choice, u64::MAX - 5, group, 0);
    let mut back: Vec<usize> = (0..count).collect();
    (1..count).for_each(|i| back.swap(i, dice.below(i + 1)));
    let patient = dice.below(2) == 0;
    let mut out = (0..count).flat_map(|i| [Step::SendDispatch(i), Step::ReceiveDispatch(i)]).peekable();
    let mut back =
        back.into_iter().flat_map(|i| [Step::Experts(i), Step::SendCombine(i), Step::ReceiveCombine(i)]).peekable();
    let mut steps = Vec::new();
    while let Some(&next) = back.peek() {
        let dispatched = match next {
            Step::Experts(i) => steps.contains(&Step::ReceiveDispatch(i)),
            _ => true,
        };
        let wait = !dispatched || (out.peek().is_some() && (patient || dice.below(2) == 0));
        steps.extend(if wait { out.next() } else { back.next() });
    }
    steps.extend(out);
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(steps: &[Step], step: Step) -> usize {
        steps.iter().position(|s| *s == step).unwrap()
    }

    #[test]
    fn every_order_keeps_the_grammar() {
        let (mut overtaken, mut reversed, mut between) = (0, 0, 0);
        for seed in 0..300 {
            let case = Case { seed, ..Case::default() };
            for count in 1..=3 {
                let steps = steps(&case, seed as usize, count);
                assert_eq!(steps.len(), 5 * count);
                for i in 0..count {
                    let order = [
                        Step::SendDispatch(i),
                        Step::ReceiveDispatch(i),
                        Step::Experts(i),
                        Step::SendCombine(i),
                        Step::ReceiveCombine(i),
                    ];
                    assert!(order.map(|step| at(&steps, step)).is_sorted(), "{steps:?}");
                    assert!(i == 0 || at(&steps, Step::ReceiveDispatch(i - 1)) < at(&steps, Step::SendDispatch(i)));
                }
                let combines: Vec<Step> = steps
                    .iter()
                    .filter(|s| matches!(s, Step::SendCombine(_) | Step::ReceiveCombine(_)))
                    .copied()
                    .collect();
                assert!(combines.chunks(2).all(|pair| matches!(pair,
                    [Step::SendCombine(a), Step::ReceiveCombine(b)] if a == b)));
                if count == 3 {
                    let last_dispatch = at(&steps, Step::ReceiveDispatch(2));
                    overtaken += usize::from((0..3).all(|i| at(&steps, Step::SendCombine(i)) > last_dispatch));
                    reversed += usize::from(combines[0] == Step::SendCombine(2));
                    let send = at(&steps, Step::SendCombine(0));
                    between += usize::from(matches!(steps[send + 1], Step::SendDispatch(_)));
                }
            }
        }
        assert!(overtaken > 100 && reversed > 50 && between > 10, "{overtaken} {reversed} {between}");
    }
}
