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
    /// Bytes of the side payload behind a row; a multiple of 16.
    pub slot_payload_bytes: usize,
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
    /// Whether a token has a slot for the partial row of every rank of the node, instead of at most top_k.
    pub slot_of_rank: bool,
    /// With one node: rows of an in-place output, into which peers store rows directly; 0 for none.
    pub in_place_rows: usize,
}

impl PlanInput {
    /// Most bytes of a dispatched row with its scales and side payload.
    fn slot_bytes(&self) -> usize {
        (self.row_bytes + 4 * self.scale_words).next_multiple_of(16).max(self.other_slot_bytes)
            + self.slot_payload_bytes
    }

    /// Partial rows that a token can get in a node.
    fn slots(&self) -> usize {
        let ranks = self.nodes.largest();
        if self.slot_of_rank { ranks } else { self.top_k.min(ranks) }
    }

    /// Most tokens of calls that get LL rows of their own; 0: none does.
    fn few_tokens(&self, round_tokens: usize) -> usize {
        let several = self.nodes.members().len() > 1 || round_tokens < self.max_tokens;
        let needed = !several && round_tokens > self.ll_tokens && self.few_tokens <= self.ll_tokens;
        if needed { self.few_tokens } else { 0 }
    }
}

/// What calls of a format take of the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallBytes {
    /// Bytes of a dispatched row, scales and side payload included, and of a partial row.
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
    /// LL rows of calls of few tokens, where other calls have tagged rows: a tagged word that is left would look like
    /// one that has arrived.
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
        let (slots, few_tokens) = (input.slots(), input.few_tokens(round_tokens));
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
        let places = round.checked_mul(input.slots() as u64)?;
        let ahead = if input.weights_with_combine { choices.checked_mul(4)? } else { 0 };
        let source_token_bytes = if several { tokens.checked_mul(8)? } else { 0 };
        let free = if copies == 1 { 8 } else { 0 };
        let ll = !several && round_tokens <= input.ll_tokens;
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
            signs: c.region("signs of life", 1, node_ranks, if input.slot_of_rank { 8 * (1 + ranks) } else { 0 })?,
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
        let slots = match input.slot_of_rank {
            true => format!("ranks of a node {largest}"),
            false => format!("min(top-k {}, ranks of a node {largest})", input.top_k),
        };
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
#[path = "plan_tests.rs"]
mod tests;
