//! Metadata words of which no routing makes use: rewritten before the 32 bits of their epochs wrap.

use super::*;
use crate::bindings::api::{Rows, TokenCount};

const TOP_K: usize = 2;
const PATIENCE: Duration = Duration::from_secs(10);

/// A world of one rank with two experts.
struct Alone {
    ep: AllToAll,
    stream: Stream,
    device: Device,
    max_tokens: usize,
}

impl Alone {
    fn new(max_tokens: usize, in_place: bool) -> Alone {
        let (world, device) = (World::threads(1).unwrap().remove(0), Device::cpu().unwrap());
        let ep = AllToAll::builder(&world).device(device.clone()).hidden(8).experts(2).top_k(TOP_K);
        let ep = ep.max_tokens_per_rank(max_tokens).timeout(PATIENCE);
        let ep = ep.tuning(|tuning| tuning.in_place = in_place.then_some((max_tokens * TOP_K, 1)));
        Alone { ep: ep.build().unwrap(), stream: device.new_stream().unwrap(), device, max_tokens }
    }

    fn view(&self, bytes: &[u8]) -> View {
        let buffer = self.device.alloc(bytes.len().max(16)).unwrap();
        buffer.write(0, bytes).unwrap();
        buffer.view()
    }

    /// Dispatches and combines tokens that all have these choices.
    fn call(&self, tokens: usize, choices: [i32; TOP_K]) {
        self.call_of(None, tokens, choices);
    }

    /// The same by a call of at most so many tokens.
    fn call_of(&self, most: Option<usize>, tokens: usize, choices: [i32; TOP_K]) {
        let words: Vec<u8> = choices.repeat(tokens).iter().flat_map(|choice| choice.to_ne_bytes()).collect();
        let zeros = vec![0; 16 * self.max_tokens * TOP_K];
        let input = Tokens::new(self.view(&zeros), self.view(&words), TokenCount::Host(tokens));
        let input = input.topk_weight(self.view(&zeros)).max_tokens(most);
        let layout = Layout::Contiguous { align: 1, capacity: self.max_tokens * TOP_K };
        let rows = self.ep.in_place().map_or_else(|| self.view(&zeros), |own| own.rows.clone());
        let output = Output::new(layout, rows.clone(), self.view(&[0; 8]));
        let handle = self.ep.dispatch(&self.stream, &input, &output).unwrap();
        let out = Combined::new(self.view(&zeros));
        self.ep.combine(&self.stream, &handle, &Rows::new(rows), &out).unwrap();
        self.stream.synchronize(PATIENCE).unwrap();
        self.ep.check().unwrap();
    }

    /// The oldest epoch in the words of tokens, choices and weights, and in the own choices of in-place output.
    fn oldest(&self) -> u64 {
        let [base, _] = self.ep.addresses().unwrap();
        let (regions, tokens) = (&self.ep.plan.regions, self.max_tokens);
        let tables = [
            (&regions.meta_tokens, tokens, 2),
            (&regions.meta_choices, tokens * TOP_K, 2),
            (&regions.meta_weights, tokens * TOP_K, 2),
            (&regions.in_place_choices, if self.ep.in_place().is_some() { tokens * TOP_K } else { 0 }, 1),
        ];
        let words = tables.into_iter().flat_map(|(region, words, parities)| {
            (0..parities).flat_map(move |parity| {
                let first = (base + region.offset + parity * region.parity_stride) as *const u64;
                // SAFETY: words of the arena, which is host memory on the CPU device; no call runs.
                (0..words).map(move |word| unsafe { first.add(word).read() })
            })
        });
        words.map(|word| word >> 32).min().unwrap()
    }
}

/// After a call that uses every word, calls that use none: tokens that are absent, or lead to no expert.
#[test]
fn metadata_words_that_no_call_uses_are_rewritten_one_by_one() {
    for (max_tokens, in_place) in [(4, false), (3, false), (4, true), (40, false)] {
        let alone = Alone::new(max_tokens, in_place);
        for (tokens, choices) in [(0, [-1, -1]), (max_tokens, [-1, -1]), (1, [1, 0]), (max_tokens, [-1, 1])] {
            (0..2).for_each(|_| alone.call(max_tokens, [0, 1]));
            let used = alone.oldest();
            assert_ne!(used, 0, "{max_tokens} {tokens}");
            // Words of every token are rewritten once in so many calls of either parity.
            (0..2 * max_tokens).for_each(|_| alone.call(tokens, choices));
            assert!(alone.oldest() > used + 1, "{max_tokens} tokens, {tokens} with {choices:?}, in place: {in_place}");
        }
    }
}

/// The same by calls of fewer tokens at the most: a call of the most tokens may follow, however many came between.
#[test]
fn metadata_words_beyond_the_tokens_of_small_calls_are_rewritten_too() {
    let alone = Alone::new(5, false);
    (0..2).for_each(|_| alone.call(5, [0, 1]));
    let used = alone.oldest();
    (0..10).for_each(|_| alone.call_of(Some(2), 2, [0, 1]));
    assert!(alone.oldest() > used + 1, "{} after {used}", alone.oldest());
}
