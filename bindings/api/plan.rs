//! The buffer plan: the one author of every offset in a rank's arena.
//!
//! Pure arithmetic, on the host, before anything is allocated. The plan is the same on every rank, so a rank can
//! compute any address in a peer's arena from the peer's base.
//!
//! A world of one node keeps every region twice, by the parity of the epoch. Nothing else protects reuse: a rank
//! writes X(e+2) into its peer only after its own receive of X(e+1), which needed the peer's X(e+1), which the peer
//! sent only after its receive of X(e) was done. The same holds with several nodes while the arena is small. In a
//! larger arena the big node-local regions (rows, partial rows) exist once, protected by free flags.

use crate::base::{Error, Result};
use crate::ffi::layout as raw;
use crate::proxy::wire::{Direction, MessageShape, Nodes, Wire, WireInput, most_chunks, rows_of_chunk};
use crate::transport::network::imm;

/// Bytes that regions and flags are aligned to: two 64-byte lines, since lines are prefetched in pairs.
const ALIGN: u64 = 128;
/// Largest arena, with several nodes, for which the plan chooses larger rounds.
const ARENA_BYTES: u64 = 2 << 30;
/// Rounds of at most so many tokens are not halved to save memory: a launch would cost more than its rows.
const LEAST_ROUND: usize = 256;
/// Receives of a context that the default chunks fit into: no NIC need offer more to a context.
const RECEIVES: usize = 8192;

/// Everything that the plan depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanInput {
    /// Ranks by node.
    pub nodes: Nodes,
    /// Most tokens a rank dispatches in one call.
    pub max_tokens: usize,
    /// Tokens of each rank in a round. `None` to choose: all of them, but with several nodes halved until the arena is
    /// within 2 GiB.
    pub round_tokens: Option<usize>,
    /// Experts a token may name.
    pub top_k: usize,
    /// Bytes of a token row without its scales; a multiple of 16.
    pub row_bytes: usize,
    /// 4-byte scale words of a row.
    pub scale_words: usize,
    /// Most bytes of a row with its scales in calls of other formats; 0 without such.
    pub other_slot_bytes: usize,
    /// Most bytes of a partial row, of any call; a multiple of 16.
    pub partial_bytes: usize,
    /// Most experts on one rank.
    pub max_local_experts: usize,
    /// Whether weights come with dispatch in some call, and so in the headers between nodes.
    pub weights_with_dispatch: bool,
    /// Whether weights come with combine in some call, which sends them ahead to the expert ranks.
    pub weights_with_combine: bool,
    /// NICs of each rank; 1 where there is one node.
    pub nics: u8,
    /// Rows of a chunk between nodes; `None` to choose.
    pub chunk_rows: Option<usize>,
    /// Receives of a NIC that are meant for one context: chosen chunks are large enough for messages to need no more.
    pub receives: usize,
    /// With several nodes: the largest arena, in bytes, in which received rows and partial rows are kept twice.
    pub double_buffer_bytes: u64,
    /// With one node: most tokens of a round with which partial rows are LL rows, without tags.
    pub ll_tokens: usize,
    /// With one node, where rounds have more tokens than `ll_tokens`: most tokens of calls of other formats that get LL
    /// rows of their own; 0 for none.
    pub few_tokens: usize,
    /// Whether some calls need tagged partial rows, since LL rows have no side payload.
    pub tagged: bool,
    /// With one node: rows of an in-place output, into which peers store rows directly; 0 for none.
    pub in_place_rows: usize,
}

impl PlanInput {
    /// Most bytes of a dispatched row with its scales.
    fn slot_bytes(&self) -> usize {
        (self.row_bytes + 4 * self.scale_words).next_multiple_of(16).max(self.other_slot_bytes)
    }

    /// Most tokens of calls that get LL rows of their own; 0: none does.
    fn few_tokens(&self, round_tokens: usize) -> usize {
        match round_tokens <= self.ll_tokens {
            _ if self.nodes.members().len() > 1 || round_tokens < self.max_tokens => 0,
            true => {
                if self.tagged {
                    round_tokens
                } else {
                    0
                }
            }
            false => {
                if self.few_tokens <= self.ll_tokens {
                    self.few_tokens
                } else {
                    0
                }
            }
        }
    }
}

/// What calls of a format take of the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallBytes {
    /// Bytes of a dispatched row, scales included, and of a partial row.
    pub slot_bytes: usize,
    pub partial_bytes: usize,
    pub weights_with_dispatch: bool,
}

/// The shape of one direction's messages between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub shape: MessageShape,
    /// Bytes of each row's header; 0 for none.
    pub header_bytes: u32,
    /// Pitch of a row; 0 if messages have headers only.
    pub row_bytes: u32,
    pub chunk_rows: u32,
    /// Row r is in chunk (r + chunk_shift) / chunk_rows.
    pub chunk_shift: u32,
}

/// One buffer of the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// What the buffer holds.
    pub name: String,
    /// Bytes from the arena's start.
    pub offset: u64,
    /// Its size in bytes, both parities.
    pub bytes: u64,
}

/// Every buffer of a rank's arena.
#[derive(Debug, Clone)]
pub struct Plan {
    buffers: Vec<Buffer>,
    bytes: u64,
    pub(crate) regions: raw::ty_regions,
    /// Most bytes of a dispatched row, and of a partial row.
    pub(crate) slot_bytes: usize,
    pub(crate) partial_bytes: usize,
    /// LL rows of calls of few tokens without payload, where other calls have tagged rows: a tagged word that is left
    /// would look like one that has arrived.
    pub(crate) few_partials: Option<raw::ty_region>,
    few_tokens: usize,
    top_k: usize,
    pub(crate) slots: usize,
    /// Tokens of each rank in a round, and rounds of a call.
    pub(crate) round_tokens: usize,
    pub(crate) rounds: usize,
    /// The wire between nodes, if there are several, and the messages by direction.
    pub(crate) wire: Option<(Wire, [Message; raw::TY_DIRECTIONS as usize])>,
    handle_bytes: u64,
    explanation: String,
}

/// Hands out consecutive aligned pieces of the arena.
struct Cursor {
    buffers: Vec<Buffer>,
    next: u64,
}

impl Cursor {
    /// A region of `sources` parts of `part_bytes` each, kept `copies` times: once, or once per parity.
    fn region(&mut self, name: &str, copies: u64, sources: u64, part_bytes: u64) -> Option<raw::ty_region> {
        let source_stride = part_bytes.checked_next_multiple_of(ALIGN)?;
        let parity = source_stride.checked_mul(sources)?;
        let offset = self.buffer(name, parity.checked_mul(copies)?)?;
        Some(raw::ty_region { offset, parity_stride: if copies == 1 { 0 } else { parity }, source_stride })
    }

    fn buffer(&mut self, name: &str, bytes: u64) -> Option<u64> {
        let offset = self.next;
        self.next = offset.checked_add(bytes.checked_next_multiple_of(ALIGN)?)?;
        self.buffers.push(Buffer { name: name.to_owned(), offset, bytes });
        Some(offset)
    }
}

impl Plan {
    /// Plans the arena of one rank.
    ///
    /// # Errors
    /// `Config` if the arena would not fit a 64-bit address space, or messages between nodes an immediate's fields.
    #[doc(hidden)]
    pub fn new(input: &PlanInput) -> Result<Plan> {
        let mut round_tokens = input.round_tokens.unwrap_or(input.max_tokens).clamp(1, input.max_tokens.max(1));
        if input.nodes.members().len() == 1 {
            return Plan::of_rounds(input, round_tokens, 2);
        }
        loop {
            let plan = Plan::of_rounds(input, round_tokens, 1)?;
            if input.round_tokens.is_some() || plan.bytes <= ARENA_BYTES || round_tokens <= LEAST_ROUND {
                let twice = Plan::of_rounds(input, round_tokens, 2).ok();
                return Ok(twice.filter(|twice| twice.bytes <= input.double_buffer_bytes).unwrap_or(plan));
            }
            round_tokens = round_tokens.div_ceil(2);
        }
    }

    /// With `copies` of received rows and partial rows.
    fn of_rounds(input: &PlanInput, round_tokens: usize, copies: u64) -> Result<Plan> {
        let overflow = || {
            Error::config(
                "max_tokens_per_rank",
                input.max_tokens,
                format!(
                    "the arena of {} ranks and {} bytes a row would overflow 64 bits; lower it",
                    input.nodes.ranks().count(),
                    input.row_bytes
                ),
            )
        };
        let mut cursor = Cursor { buffers: Vec::new(), next: 0 };
        let rounds = input.max_tokens.div_ceil(round_tokens);
        let regions = Self::regions(input, round_tokens, copies, &mut cursor).ok_or_else(overflow)?;
        let (slots, few_tokens) = (input.top_k.min(input.nodes.largest()), input.few_tokens(round_tokens));
        let few_bytes = few_tokens.checked_mul(slots).and_then(|places| places.checked_mul(input.partial_bytes));
        let few_bytes = few_bytes.ok_or_else(overflow)? as u64;
        let few_partials = match few_bytes {
            0 => None,
            bytes => Some(cursor.region("partial rows of few tokens", 2, 1, bytes).ok_or_else(overflow)?),
        };
        let wire =
            if input.nodes.members().len() > 1 { Some(Self::wire(input, round_tokens, &mut cursor)?) } else { None };
        let plan = Plan {
            bytes: cursor.next,
            buffers: cursor.buffers,
            regions,
            slot_bytes: input.slot_bytes(),
            partial_bytes: input.partial_bytes,
            few_partials,
            few_tokens,
            top_k: input.top_k,
            slots,
            round_tokens,
            rounds,
            wire,
            handle_bytes: 0,
            explanation: String::new(),
        };
        Ok(Plan { explanation: plan.formula(input), ..plan })
    }

    /// The same plan with the number of SMs in its explanation.
    pub(crate) fn with_traffic(mut self, traffic: &str) -> Plan {
        self.explanation.push('\n');
        self.explanation.push_str(traffic);
        self
    }

    /// The same plan with the bytes of a handle.
    pub(crate) fn with_handles(self, handle_bytes: u64) -> Plan {
        Plan { handle_bytes, ..self }
    }

    /// Device memory in bytes of each of the handles that are allocated when the context is built
    /// ([`Tuning::handles`](super::Tuning::handles)), which is not in the arena. A compact handle grows with the rows
    /// of its dispatch's output ([`Tuning::compact_handles`](super::Tuning::compact_handles)).
    pub fn handle_bytes(&self) -> u64 {
        self.handle_bytes
    }

    /// The assumption and the formula of the total, for people. For a plan of a builder, also the number of SMs of
    /// calls and the reason.
    pub fn explain(&self) -> &str {
        &self.explanation
    }

    /// Whether calls of so many tokens have LL rows of their own.
    pub(crate) fn are_few(&self, max_tokens: usize) -> bool {
        max_tokens <= self.few_tokens
    }

    /// Whether messages between nodes, if there are any, have room for the headers of such calls.
    pub(crate) fn has_headers_of(&self, call: CallBytes) -> bool {
        let bytes = header_bytes(Direction::Dispatch, self.top_k, call.weights_with_dispatch);
        let most = |messages: &[Message]| messages[Direction::Dispatch.index()].header_bytes as usize;
        self.wire.as_ref().is_none_or(|(_, messages)| bytes <= most(messages))
    }

    /// The messages of a direction in calls of a format, if there are several nodes: rows of its own size, in chunks of
    /// no more bytes, behind the same room for headers.
    pub(crate) fn message_of(&self, direction: Direction, call: CallBytes) -> Option<Message> {
        let most = self.wire.as_ref()?.1[direction.index()];
        let header_bytes = header_bytes(direction, self.top_k, call.weights_with_dispatch) as u32;
        let row_bytes = match direction {
            Direction::Dispatch => call.slot_bytes as u32,
            Direction::Combine => call.partial_bytes as u32,
            Direction::Weights | Direction::Barrier => 0,
        };
        if row_bytes == most.row_bytes {
            return Some(Message { header_bytes, ..most });
        }
        let chunk_rows = (most.shape.chunk_bytes / row_bytes.max(1)).clamp(1, self.round_tokens.max(1) as u32);
        let chunk_shift = if most.chunk_shift == 0 { 0 } else { chunk_rows };
        Some(Message { row_bytes, chunk_rows, chunk_shift, header_bytes, ..most })
    }

    fn regions(input: &PlanInput, round_tokens: usize, copies: u64, cursor: &mut Cursor) -> Option<raw::ty_regions> {
        let ranks = input.nodes.ranks().count() as u64;
        let node_ranks = input.nodes.largest() as u64;
        let several = input.nodes.members().len() > 1;
        let parts = 1 + input.nodes.most_served() as u64;
        let tokens = input.max_tokens as u64;
        let choices = tokens.checked_mul(input.top_k as u64)?;
        let round = round_tokens as u64;
        let rounds = tokens.div_ceil(round);
        let places = round.checked_mul((input.top_k as u64).min(node_ranks))?;
        let ahead = if input.weights_with_combine { choices.checked_mul(4)? } else { 0 };
        let source_token_bytes = if several { tokens.checked_mul(8)? } else { 0 };
        let free = if copies == 1 { 8 } else { 0 };
        let ll = !several && round_tokens <= input.ll_tokens && !input.tagged;
        // In-place output needs no receive buffer for rows.
        let in_place_rows = input.in_place_rows as u64;
        let (recv_buffer, own) = if in_place_rows == 0 { (round, 0) } else { (0, 1) };
        let c = cursor;
        Some(raw::ty_regions {
            rows: c.region("dispatch rows", copies, ranks, recv_buffer.checked_mul(input.slot_bytes() as u64)?)?,
            row_tags: c.region(
                "dispatch row tags",
                copies,
                ranks,
                round.checked_mul(8 * u64::from(raw::TY_SLICES))?,
            )?,
            meta_flags: c.region("metadata flags", 2, node_ranks, 8)?,
            meta_counts: c.region(
                "routing metadata counts",
                2,
                ranks,
                (input.max_local_experts as u64 + 1 + rounds) * 8,
            )?,
            meta_tokens: c.region("routing metadata tokens", 2, ranks, tokens * 8)?,
            meta_source_tokens: c.region("routing metadata source tokens", 2, ranks, source_token_bytes)?,
            meta_choices: c.region("routing metadata choices", 2, ranks, choices.checked_mul(8)?)?,
            meta_weights: c.region("routing metadata weights", 2, ranks, choices.checked_mul(8)?)?,
            partials: c.region("partial rows", copies, parts, places.checked_mul(input.partial_bytes as u64)?)?,
            partial_tags: c.region("partial row tags", copies, parts, if ll { 0 } else { places.checked_mul(8)? })?,
            combine_flags: c.region("combine flags", 2, node_ranks, 8)?,
            ahead_weights: c.region("weights sent ahead", 2, ranks, ahead)?,
            ahead_flags: c.region("flags of weights sent ahead", 2, ranks, ahead.min(8))?,
            barrier_flags: c.region("barrier flags", 2, node_ranks, 8)?,
            dispatch_free: c.region("free flags of dispatch", 1, node_ranks, free)?,
            combine_free: c.region("free flags of combine", 1, node_ranks, free)?,
            in_place_rows: c.region("output rows", 1, 1, in_place_rows.checked_mul(input.row_bytes as u64)?)?,
            in_place_scales: c.region(
                "output scales",
                1,
                1,
                in_place_rows.checked_mul(4 * input.scale_words as u64)?,
            )?,
            all_counts: c.region(
                "routing metadata counts of all ranks",
                2,
                ranks * own,
                node_ranks * (input.max_local_experts as u64 + 1) * 8,
            )?,
            in_place_choices: c.region("routing metadata own choices", 1, own, choices.checked_mul(8)?)?,
        })
    }

    /// The wire between nodes: the messages' shapes, then staging and receive buffer after everything else.
    fn wire(
        input: &PlanInput,
        round_tokens: usize,
        cursor: &mut Cursor,
    ) -> Result<(Wire, [Message; raw::TY_DIRECTIONS as usize])> {
        let messages = Direction::ALL.map(|direction| message(input, round_tokens, direction));
        let [dispatch, combine, weights, barrier] = messages;
        let messages = [dispatch?, combine?, weights?, barrier?];
        let shapes = messages.map(|message| message.shape);
        let at = |staging_offset, recv_buffer_offset| {
            Wire::new(WireInput {
                nodes: input.nodes.clone(),
                nics: input.nics,
                shapes,
                staging_offset,
                recv_buffer_offset,
            })
        };
        let sized = at(cursor.next, cursor.next)?;
        let overflow = || {
            Error::config(
                "max_tokens_per_rank",
                input.max_tokens,
                "wire staging and receive buffer would overflow 64 bits; lower it",
            )
        };
        let staging = cursor.buffer("wire staging", sized.staging_bytes()).ok_or_else(overflow)?;
        let recv_buffer = cursor.buffer("wire receive buffer", sized.recv_buffer_bytes()).ok_or_else(overflow)?;
        Ok((at(staging, recv_buffer)?, messages))
    }

    /// Every buffer, in the order of offsets.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Size of a rank's arena in bytes.
    pub fn arena_bytes(&self) -> u64 {
        self.bytes
    }

    fn formula(&self, input: &PlanInput) -> String {
        let (d, c, tokens) = (input.slot_bytes(), input.partial_bytes, self.round_tokens);
        let rounds = match self.rounds {
            1 => "one round".to_owned(),
            rounds => format!("{rounds} rounds of {tokens} tokens"),
        };
        let (nodes, largest, ranks) = (input.nodes.members().len(), input.nodes.largest(), input.nodes.ranks().count());
        let slots = format!("min(top-k {}, ranks of a node {largest})", input.top_k);
        if input.in_place_rows > 0 {
            let (rows, row) = (input.in_place_rows, input.row_bytes + 4 * input.scale_words);
            return format!(
                "one node, in-place output and no receive buffer: {rows} rows x {row} B + 2 parities x {tokens} tokens x \
                 {slots} x {c} B a partial row, plus flags, tags and routing metadata; {rounds}"
            );
        }
        let few = match self.few_tokens {
            0 => String::new(),
            few => format!(" + 2 parities x {few} tokens of small calls x {slots} x {c} B"),
        };
        if nodes == 1 {
            return format!(
                "one node, any routing: 2 parities x {tokens} tokens x ({ranks} ranks x {d} B a row + {slots} x {c} B a \
                 partial row){few}, plus flags, tags and routing metadata; {rounds}"
            );
        }
        let parts = 1 + input.nodes.most_served();
        let copies = if self.regions.rows.parity_stride == 0 { 1 } else { 2 };
        format!(
            "{nodes} nodes, any routing: {tokens} tokens x (2 parities x {} peers x 2 sides x ({d} + {c}) B on the wire + \
             {copies} x ({ranks} ranks x {d} B a row + {parts} parts x {slots} x {c} B a partial row)), plus flags, tags, \
             routing metadata and headers; {rounds}",
            parts - 1
        )
    }
}

/// Bytes of a row's header in a direction's messages; 0 for none.
fn header_bytes(direction: Direction, top_k: usize, weights_with_dispatch: bool) -> usize {
    let bytes = match direction {
        Direction::Dispatch if weights_with_dispatch => 4 + 8 * top_k,
        Direction::Dispatch => 4 + 4 * top_k,
        Direction::Weights => 4 * top_k,
        Direction::Combine | Direction::Barrier => 0,
    };
    bytes.next_multiple_of(16)
}

/// The messages of one direction.
fn message(input: &PlanInput, round_tokens: usize, direction: Direction) -> Result<Message> {
    let too_large = |what: &str| {
        Error::config(
            "max_tokens_per_rank",
            input.max_tokens,
            format!("{what} of a message between nodes do not fit 32 bits; lower it"),
        )
    };
    let peers = input.nodes.members().len() - 1;
    let header = header_bytes(direction, input.top_k, input.weights_with_dispatch);
    let row_bytes = match direction {
        Direction::Dispatch => input.slot_bytes(),
        Direction::Combine => input.partial_bytes,
        Direction::Weights | Direction::Barrier => 0,
    };
    let used = direction != Direction::Weights || input.weights_with_combine;
    // Headers have chunk 0 to themselves.
    let before_rows = usize::from(header > 0);
    let (chunk_rows, chunks) = if row_bytes == 0 {
        (1, usize::from(used))
    } else {
        let most = most_chunks(RECEIVES.min(input.receives), peers.max(input.nodes.most_served()));
        let rows = input.chunk_rows.unwrap_or_else(|| {
            let least = round_tokens.div_ceil(most.saturating_sub(before_rows).max(1));
            rows_of_chunk(direction, row_bytes, input.nics).max(least)
        });
        // No more than a round has, for which slots have room.
        let rows = rows.clamp(1, round_tokens.max(1));
        (rows, before_rows + round_tokens.div_ceil(rows))
    };
    imm::check_counts(0, chunks, 0, 0)?;
    let rows_offset = raw::TY_WIRE_HEAD_BYTES as usize + input.max_tokens * header;
    let rows_offset = u32::try_from(rows_offset).map_err(|_| too_large("the headers"))?;
    let chunk_bytes = (chunk_rows * row_bytes).max(16);
    let chunk_bytes = u32::try_from(chunk_bytes).map_err(|_| too_large("the rows of a chunk"))?;
    let rows_first = if row_bytes > 0 && before_rows == 0 { chunk_bytes } else { 0 };
    let first_bytes = rows_offset.checked_add(rows_first).ok_or_else(|| too_large("the rows of a chunk"))?;
    let chunk_rows = u32::try_from(chunk_rows).map_err(|_| too_large("the rows of a chunk"))?;
    Ok(Message {
        shape: MessageShape {
            first_bytes,
            chunk_bytes,
            chunks: u16::try_from(chunks).unwrap_or(u16::MAX),
            rows_offset,
        },
        header_bytes: header as u32,
        row_bytes: row_bytes as u32,
        chunk_rows,
        chunk_shift: chunk_rows * before_rows as u32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Rank;

    fn v3(tokens: usize) -> PlanInput {
        PlanInput {
            nodes: Nodes::consecutive(&[8]).unwrap(),
            max_tokens: tokens,
            round_tokens: None,
            top_k: 8,
            row_bytes: 7168,
            scale_words: 56,
            other_slot_bytes: 0,
            partial_bytes: 14336,
            max_local_experts: 32,
            weights_with_dispatch: false,
            weights_with_combine: true,
            nics: 1,
            chunk_rows: None,
            receives: usize::MAX,
            double_buffer_bytes: 256 << 20,
            ll_tokens: 256,
            few_tokens: 0,
            tagged: false,
            in_place_rows: 0,
        }
    }

    fn v3_of_nodes(tokens: usize, sizes: &[usize]) -> PlanInput {
        let nodes = Nodes::consecutive(sizes).unwrap();
        PlanInput {
            nodes,
            max_local_experts: 4,
            weights_with_dispatch: true,
            weights_with_combine: false,
            ..v3(tokens)
        }
    }

    #[test]
    fn ep64_arenas_stay_within_the_limits_of_the_design() {
        let plan = Plan::new(&v3_of_nodes(128, &[8; 8])).unwrap();
        assert!(plan.arena_bytes() <= 256 << 20, "{} MiB", plan.arena_bytes() >> 20);
        assert_ne!(plan.regions.dispatch_free.source_stride, 0, "twice they would not fit");
    }

    #[test]
    fn rows_are_kept_twice_where_the_arena_stays_small() {
        let input = v3_of_nodes(128, &[8; 4]);
        let twice = Plan::new(&input).unwrap();
        let once = Plan::new(&PlanInput { double_buffer_bytes: twice.arena_bytes() - 1, ..input.clone() }).unwrap();
        assert!(twice.arena_bytes() <= 256 << 20 && twice.arena_bytes() > once.arena_bytes() + (64 << 20));
        let flags = [&twice, &once].map(|plan| plan.regions.dispatch_free.source_stride != 0);
        assert_eq!(flags, [false, true]);
        assert!(twice.regions.rows.parity_stride != 0 && once.regions.rows.parity_stride == 0);
        assert!(twice.explain().contains("2 x (32 ranks") && once.explain().contains("1 x (32 ranks"));
    }

    #[test]
    fn large_calls_over_nodes_go_in_rounds() {
        let input = v3_of_nodes(4096, &[8; 8]);
        let plan = Plan::new(&input).unwrap();
        assert!(plan.arena_bytes() <= 2 << 30, "{} MiB", plan.arena_bytes() >> 20);
        assert!(plan.rounds > 1 && plan.rounds * plan.round_tokens >= 4096);
        assert!(plan.explain().contains(&format!("{} rounds of {} tokens", plan.rounds, plan.round_tokens)));
        let whole = Plan::new(&PlanInput { round_tokens: Some(4096), ..input }).unwrap();
        assert!(whole.rounds == 1 && whole.arena_bytes() > 4 << 30);
    }

    #[test]
    fn chunks_are_larger_where_the_network_has_few_receives() {
        let input = v3_of_nodes(256, &[8; 8]);
        let rank = Rank(9);
        let of = |input: &PlanInput| Plan::new(input).unwrap().wire.unwrap().0.receives(rank);
        let unbounded = of(&input);
        // 7 peers, 2 epochs: head and rows of dispatch, rows of combine, the barrier; no weights.
        let least = 2 * 7 * (2 + 1 + 1);
        for receives in [unbounded as usize - 1, 300, 100, 60] {
            assert!((least..=receives as u64).contains(&of(&PlanInput { receives, ..input.clone() })), "{receives}");
        }
        // Too few receives give the fewest chunks, which the proxy refuses; given chunk_rows are kept.
        assert_eq!(of(&PlanInput { receives: 0, ..input.clone() }), least);
        let asked = PlanInput { receives: 60, chunk_rows: Some(8), ..input };
        assert_eq!(of(&asked), 2 * 7 * (1 + 32 + 32 + 1));
    }

    #[test]
    fn ll_rows_have_no_tags() {
        let tags = |input: &PlanInput| Plan::new(input).unwrap().regions.partial_tags.source_stride;
        assert_eq!(tags(&v3(256)), 0);
        assert_ne!(tags(&v3(257)), 0);
        assert_ne!(tags(&PlanInput { ll_tokens: 0, ..v3(1) }), 0);
        assert_eq!(tags(&PlanInput { round_tokens: Some(256), ..v3(4096) }), 0);
        assert_ne!(tags(&v3_of_nodes(1, &[8; 2])), 0, "partial rows for a rail are tagged");
    }

    #[test]
    fn small_calls_have_ll_rows_of_their_own_beside_tagged_rows() {
        let few = |input: &PlanInput| {
            let plan = Plan::new(input).unwrap();
            let named = plan.buffers().iter().find(|buffer| buffer.name == "partial rows of few tokens");
            assert_eq!(named.map(|buffer| buffer.offset), plan.few_partials.map(|region| region.offset));
            let tagged = plan.regions.partial_tags.source_stride != 0;
            assert_eq!(plan.explain().contains("tokens of small calls"), plan.few_partials.is_some());
            (named.map_or(0, |buffer| buffer.bytes), tagged, [1, 100, 101].map(|tokens| plan.are_few(tokens)))
        };
        let some = PlanInput { few_tokens: 100, ..v3(4096) };
        assert_eq!(few(&some), (2 * 100 * 8 * 14_336, true, [true, true, false]));
        // All rows are LL rows, unless some calls have a payload.
        assert_eq!(few(&PlanInput { few_tokens: 50, ..v3(100) }), (0, false, [false; 3]));
        let paid = PlanInput { tagged: true, ..v3(100) };
        assert_eq!(few(&paid), (2 * 100 * 8 * 14_336, true, [true, true, false]));
        for none in [
            PlanInput { ll_tokens: 99, ..some.clone() },
            PlanInput { tagged: true, ..v3(4096) },
            PlanInput { few_tokens: 100, ..v3_of_nodes(4096, &[4, 4]) },
        ] {
            assert_eq!(few(&none), (0, true, [false; 3]));
        }
    }

    #[test]
    fn messages_of_smaller_rows_have_chunks_of_no_more_bytes() {
        let plan = Plan::new(&PlanInput { weights_with_dispatch: true, other_slot_bytes: 768, ..uneven() }).unwrap();
        let [dispatch, combine, ..] = plan.wire.as_ref().unwrap().1;
        assert_eq!((dispatch.row_bytes, combine.row_bytes, dispatch.shape.chunk_bytes), (768, 768, 16 * 768));
        let of = |direction, slot_bytes, partial_bytes, weights_with_dispatch| {
            let call = CallBytes { slot_bytes, partial_bytes, weights_with_dispatch };
            plan.message_of(direction, call).unwrap()
        };
        let own = of(Direction::Dispatch, 768, 0, true);
        assert_eq!(own, dispatch);
        // 12 288 bytes hold 24 rows of 512, and 13 of 912 would hold too much: the rows left over are a chunk more.
        for (bytes, rows) in [(512, 24), (16, 100), (752, 16), (400, 30)] {
            let small = of(Direction::Dispatch, bytes, 0, false);
            let wanted =
                Message { row_bytes: bytes as u32, chunk_rows: rows, chunk_shift: rows, header_bytes: 32, ..own };
            assert_eq!(small, wanted);
            let sums = of(Direction::Combine, 0, bytes, true);
            assert_eq!(sums, Message { row_bytes: bytes as u32, chunk_rows: rows, ..combine });
        }
        assert!(plan.has_headers_of(CallBytes { slot_bytes: 0, partial_bytes: 0, weights_with_dispatch: true }));
        let without = Plan::new(&uneven()).unwrap();
        assert!(!without.has_headers_of(CallBytes { slot_bytes: 0, partial_bytes: 0, weights_with_dispatch: true }));
    }

    #[test]
    fn buffers_neither_overlap_nor_leave_the_arena() {
        let plan = Plan::new(&v3(128)).unwrap();
        let mut next = 0;
        for buffer in plan.buffers() {
            assert_eq!(buffer.offset, next, "{} leaves a gap or overlaps", buffer.name);
            assert_eq!(buffer.offset % ALIGN, 0);
            next += buffer.bytes.next_multiple_of(ALIGN);
        }
        assert_eq!(next, plan.arena_bytes());
    }

    #[test]
    fn v3_arenas_stay_within_the_limits_of_the_design() {
        assert!(Plan::new(&v3(128)).unwrap().arena_bytes() <= 256 << 20);
        assert!(Plan::new(&v3(4096)).unwrap().arena_bytes() <= 2 << 30);
    }

    #[test]
    fn an_arena_beyond_64_bits_is_refused() {
        let error = Plan::new(&PlanInput { max_tokens: usize::MAX / 2, ..v3(1) }).unwrap_err();
        assert!(error.to_string().contains("max_tokens_per_rank"), "{error}");
    }

    /// A region as the design has it: copies, parts, and bytes of a part.
    type Part<'a> = (&'a str, raw::ty_region, u64, u64, u64);

    /// The regions of a plan in their order. `parts` are those that depend on the shape, by their names.
    fn named(r: &raw::ty_regions, parts: [(u64, u64, u64); 20]) -> Vec<Part<'static>> {
        let names = [
            ("dispatch rows", r.rows),
            ("dispatch row tags", r.row_tags),
            ("metadata flags", r.meta_flags),
            ("routing metadata counts", r.meta_counts),
            ("routing metadata tokens", r.meta_tokens),
            ("routing metadata source tokens", r.meta_source_tokens),
            ("routing metadata choices", r.meta_choices),
            ("routing metadata weights", r.meta_weights),
            ("partial rows", r.partials),
            ("partial row tags", r.partial_tags),
            ("combine flags", r.combine_flags),
            ("weights sent ahead", r.ahead_weights),
            ("flags of weights sent ahead", r.ahead_flags),
            ("barrier flags", r.barrier_flags),
            ("free flags of dispatch", r.dispatch_free),
            ("free flags of combine", r.combine_free),
            ("output rows", r.in_place_rows),
            ("output scales", r.in_place_scales),
            ("routing metadata counts of all ranks", r.all_counts),
            ("routing metadata own choices", r.in_place_choices),
        ];
        names
            .into_iter()
            .zip(parts)
            .map(|((name, region), (copies, of, bytes))| (name, region, copies, of, bytes))
            .collect()
    }

    /// Buffers must stand one after the other, with the sizes and strides of their parts in lines of 128 bytes.
    fn assert_parts(plan: &Plan, parts: &[Part<'_>]) {
        let mut next = 0;
        for (buffer, (name, region, copies, of, bytes)) in plan.buffers().iter().zip(parts) {
            let stride = bytes.div_ceil(128) * 128;
            assert_eq!((buffer.name.as_str(), buffer.offset, buffer.bytes), (*name, next, copies * of * stride));
            let parity_stride = if *copies == 1 { 0 } else { of * stride };
            let found = (region.offset, region.parity_stride, region.source_stride);
            assert_eq!(found, (next, parity_stride, stride), "{name}");
            next += buffer.bytes;
        }
    }

    #[test]
    fn a_node_has_rows_of_a_round_and_metadata_of_a_call_from_each_rank_twice() {
        // 8 ranks, 300 tokens of 8 choices in rounds of 100; 29 experts a rank, one word more than lines have room for;
        // weights come with combine.
        let input = PlanInput { round_tokens: Some(100), ll_tokens: 64, max_local_experts: 29, ..v3(300) };
        let plan = Plan::new(&input).unwrap();
        let parts = [
            (2, 8, 100 * (7168 + 4 * 56)),
            // A tag for each of 8 slices.
            (2, 8, 100 * 8 * 8),
            (2, 8, 8),
            // Rows for each expert, of all of them, and in each of 3 rounds.
            (2, 8, (29 + 1 + 3) * 8),
            (2, 8, 300 * 8),
            (2, 8, 0),
            (2, 8, 300 * 8 * 8),
            (2, 8, 300 * 8 * 8),
            // Own tokens: a place for each rank that a token goes to.
            (2, 1, 100 * 8 * 14_336),
            (2, 1, 100 * 8 * 8),
            (2, 8, 8),
            (2, 8, 300 * 8 * 4),
            (2, 8, 8),
            (2, 8, 8),
            (1, 8, 0),
            (1, 8, 0),
            (1, 1, 0),
            (1, 1, 0),
            (2, 0, 8 * (29 + 1) * 8),
            (1, 0, 300 * 8 * 8),
        ];
        assert_parts(&plan, &named(&plan.regions, parts));
        assert_eq!(plan.buffers().len(), 20);
        assert_eq!((plan.slot_bytes, plan.slots, plan.round_tokens, plan.rounds), (7392, 8, 100, 3));
        assert_eq!(
            plan.explain(),
            "one node, any routing: 2 parities x 100 tokens x (8 ranks x 7392 B a row + min(top-k 8, ranks of a node 8) \
             x 14336 B a partial row), plus flags, tags and routing metadata; 3 rounds of 100 tokens"
        );
        // Weights with dispatch are not sent ahead, and fewer choices than ranks need fewer places.
        let few = Plan::new(&PlanInput { weights_with_combine: false, top_k: 3, ..input }).unwrap();
        let bytes = |name: &str| few.buffers().iter().find(|buffer| buffer.name == name).unwrap().bytes;
        assert_eq!([bytes("weights sent ahead"), bytes("flags of weights sent ahead")], [0, 0]);
        assert_eq!(
            [bytes("partial rows"), bytes("partial row tags")],
            [2 * 100 * 3 * 14_336, 2 * (100 * 3 * 8_u64).next_multiple_of(128)]
        );
    }

    #[test]
    fn an_in_place_output_takes_the_place_of_received_rows() {
        let input = PlanInput { in_place_rows: 500, top_k: 2, weights_with_combine: false, ..v3(300) };
        let plan = Plan::new(&input).unwrap();
        let parts = [
            (2, 8, 0),
            (2, 8, 300 * 8 * 8),
            (2, 8, 8),
            (2, 8, (32 + 1 + 1) * 8),
            (2, 8, 300 * 8),
            (2, 8, 0),
            (2, 8, 300 * 2 * 8),
            (2, 8, 300 * 2 * 8),
            (2, 1, 300 * 2 * 14_336),
            (2, 1, 300 * 2 * 8),
            (2, 8, 8),
            (2, 8, 0),
            (2, 8, 0),
            (2, 8, 8),
            (1, 8, 0),
            (1, 8, 0),
            (1, 1, 500 * 7168),
            (1, 1, 500 * 4 * 56),
            // Counts that each rank of the node has of each.
            (2, 8, 8 * (32 + 1) * 8),
            (1, 1, 300 * 2 * 8),
        ];
        assert_parts(&plan, &named(&plan.regions, parts));
        assert_eq!(
            plan.explain(),
            "one node, in-place output and no receive buffer: 500 rows x 7392 B + 2 parities x 300 tokens x min(top-k 2, \
             ranks of a node 8) x 14336 B a partial row, plus flags, tags and routing metadata; one round"
        );
    }

    /// 3 + 2 ranks, 100 tokens of 4 choices, rows of 512 bytes both ways without scales; weights come with combine.
    fn uneven() -> PlanInput {
        PlanInput {
            top_k: 4,
            row_bytes: 512,
            scale_words: 0,
            partial_bytes: 768,
            chunk_rows: Some(16),
            double_buffer_bytes: 0,
            weights_with_dispatch: false,
            weights_with_combine: true,
            ..v3_of_nodes(100, &[3, 2])
        }
    }

    #[test]
    fn nodes_have_partial_rows_for_served_ranks_and_free_flags_where_rows_are_kept_once() {
        let plan = Plan::new(&uneven()).unwrap();
        // Rank 3 is the rail of ranks 0 and 2, so partial rows have three owners.
        let parts = |copies, free| {
            [
                (copies, 5, 100 * 512),
                (copies, 5, 100 * 8 * 8),
                (2, 3, 8),
                (2, 5, (4 + 1 + 1) * 8),
                (2, 5, 100 * 8),
                (2, 5, 100 * 8),
                (2, 5, 100 * 4 * 8),
                (2, 5, 100 * 4 * 8),
                (copies, 3, 100 * 3 * 768),
                (copies, 3, 100 * 3 * 8),
                (2, 3, 8),
                (2, 5, 100 * 4 * 4),
                (2, 5, 8),
                (2, 3, 8),
                (1, 3, free),
                (1, 3, free),
                (1, 1, 0),
                (1, 1, 0),
                (2, 0, 3 * (4 + 1) * 8),
                (1, 0, 100 * 4 * 8),
            ]
        };
        assert_parts(&plan, &named(&plan.regions, parts(1, 8)));
        assert_eq!(plan.slots, 3);
        assert_eq!(
            plan.explain(),
            "2 nodes, any routing: 100 tokens x (2 parities x 2 peers x 2 sides x (512 + 768) B on the wire + 1 x (5 \
             ranks x 512 B a row + 3 parts x min(top-k 4, ranks of a node 3) x 768 B a partial row)), plus flags, tags, \
             routing metadata and headers; one round"
        );
        // A message for each link goes out and one for each source comes in, twice by parity: dispatch 1 and 2, combine
        // 2 and 1, barrier and weights as dispatch. Messages are rounded up to 128 bytes.
        let [dispatch, combine, barrier, weights] =
            [3232 + 7 * 8192, 32 + 7 * 12_288, 32, 32 + 100 * 16].map(|bytes: u64| bytes.next_multiple_of(128));
        let wire: Vec<(&str, u64)> = plan.buffers()[20..].iter().map(|b| (b.name.as_str(), b.bytes)).collect();
        let staging = 2 * (dispatch + 2 * combine + barrier + weights);
        let arrived = 2 * (2 * dispatch + combine + 2 * barrier + 2 * weights);
        assert_eq!(wire, [("wire staging", staging), ("wire receive buffer", arrived)]);
        let end = plan.buffers()[20].offset;
        assert_eq!((plan.buffers()[21].offset, plan.arena_bytes()), (end + staging, end + staging + arrived));
        // Twice: no free flags.
        let twice = Plan::new(&PlanInput { double_buffer_bytes: 4 << 20, ..uneven() }).unwrap();
        assert_parts(&twice, &named(&twice.regions, parts(2, 0)));
    }

    #[test]
    fn messages_have_a_head_headers_and_chunks_of_rows() {
        let messages = |input: &PlanInput| Plan::new(input).unwrap().wire.unwrap().1;
        let of = |(first_bytes, chunk_bytes, chunks), header_bytes, row_bytes, rows_offset, chunk_rows, chunk_shift| {
            let shape = MessageShape { first_bytes, chunk_bytes, chunks, rows_offset };
            Message { shape, header_bytes, row_bytes, chunk_rows, chunk_shift }
        };
        // By direction: dispatch, combine, barrier, weights. A header of dispatch is a token and its 4 experts, 20
        // bytes in units of 16; a chunk has 16 of 100 rows, so the rows are 7 chunks.
        assert_eq!(
            messages(&uneven()),
            [
                of((32 + 100 * 32, 16 * 512, 1 + 7), 32, 512, 32 + 100 * 32, 16, 16),
                of((32 + 16 * 768, 16 * 768, 7), 0, 768, 32, 16, 0),
                of((32, 16, 1), 0, 0, 32, 1, 0),
                of((32 + 100 * 16, 16, 1), 16, 0, 32 + 100 * 16, 1, 1),
            ]
        );
        // Weights with dispatch are in its headers, 36 bytes, and nothing goes ahead.
        let with = PlanInput { weights_with_dispatch: true, weights_with_combine: false, ..uneven() };
        let [dispatch, _, _, ahead] = messages(&with);
        assert_eq!((dispatch.header_bytes, dispatch.shape.rows_offset, ahead.shape.chunks), (48, 32 + 100 * 48, 0));
        // By default a chunk has 128 KiB, or 640 KiB of combine over several NICs; and not more rows than a round.
        let chunk_rows = |input: PlanInput| {
            let [dispatch, combine, ..] = messages(&PlanInput { chunk_rows: None, ..input });
            (dispatch.chunk_rows, combine.chunk_rows)
        };
        let many = PlanInput { round_tokens: Some(2000), ..v3_of_nodes(2000, &[2, 2]) };
        // 131 072 / 7392 and / 14 336, rounded up; 655 360 / 14 336.
        assert_eq!(chunk_rows(many.clone()), (18, 10));
        assert_eq!(chunk_rows(PlanInput { nics: 2, ..many }), (18, 46));
        assert_eq!(chunk_rows(uneven()), (100, 100));
    }
}
