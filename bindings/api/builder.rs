//! Building a context: its shape, the checks, and the exchange after which every rank can address its peers.

use super::call_format::{CallFormat, Room, Weights};
use super::format::{Partial, RowFormat};
use super::handle::Size;
use super::missing::MissingRanks;
use super::placement::{MAX_EXPERTS, MAX_REPLICA_SLOTS, Placement};
use super::plan::Plan;
use super::shape::{FEW_BLOCKS, LL_TOKENS, Shape, most_local_experts};
use super::sms::{Traffic, sms_available, sms_of};
use super::tuning::{ArenaPlace, Tuning};
use crate::base::{Dtype, Error, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, DeviceKind};
use crate::proxy::Proxy;
use crate::proxy::wire::Nodes;
use crate::transport::World;
use std::time::Duration;

/// Collects what a context needs; see [`AllToAll::builder`](super::AllToAll::builder). A context is an arena with
/// limits: most tokens of a rank in a call, bytes of a row, experts of a token, experts in all.
#[derive(Clone)]
pub struct AllToAllBuilder {
    pub(crate) world: World,
    pub(crate) device: Option<Device>,
    pub(crate) hidden: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) max_tokens: usize,
    pub(crate) format: RowFormat,
    pub(crate) quantize: bool,
    pub(crate) combine_dtype: Dtype,
    pub(crate) placement: Option<Placement>,
    pub(crate) weights: Weights,
    pub(crate) others: Vec<CallFormat>,
    pub(crate) missing: MissingRanks,
    pub(crate) sms: Option<u32>,
    pub(crate) timeout: Duration,
    pub(crate) proxy: Option<Proxy>,
    pub(crate) tuning: Tuning,
}

/// Most tokens of a rank in a call in a world of so many nodes, at least one.
pub(crate) fn most_tokens(nodes: usize) -> usize {
    match nodes {
        0 | 1 => raw::TY_MAX_TOKENS as usize,
        // A row of the bitmap has a word beyond the last token's.
        nodes => (32 * (raw::TY_NODES_BITMAP_WORDS as usize / nodes)).saturating_sub(1),
    }
}

impl AllToAllBuilder {
    pub(crate) fn new(world: &World) -> Self {
        AllToAllBuilder {
            world: world.clone(),
            device: None,
            hidden: 0,
            experts: 0,
            top_k: 0,
            max_tokens: 0,
            format: RowFormat::BF16,
            quantize: false,
            combine_dtype: Dtype::Bf16,
            placement: None,
            weights: Weights::Dispatch,
            others: Vec::new(),
            missing: MissingRanks::Fatal,
            sms: None,
            timeout: Duration::from_secs(30),
            proxy: None,
            tuning: Tuning::default(),
        }
    }

    /// The device of this rank. Default: a CPU device of its own.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Columns of a row: 1 to 2^20. The bytes of a row must be a multiple of 16. Mandatory.
    pub fn hidden(mut self, hidden: usize) -> Self {
        self.hidden = hidden;
        self
    }

    /// Experts of the layer, over all ranks: 1 to 2^20. Where experts have [replicas](Placement::replicas), each
    /// replica counts. Mandatory.
    pub fn experts(mut self, experts: usize) -> Self {
        self.experts = experts;
        self
    }

    /// Experts a token may name, at most 32. Mandatory.
    pub fn top_k(mut self, top_k: usize) -> Self {
        self.top_k = top_k;
        self
    }

    /// Most tokens of one rank in one call. Mandatory. The limit is 2^20 in one node. With N nodes a block keeps a
    /// bitmap of the tokens per node in shared memory, so the limit is 32 floor(8256 / N) - 1 (132 095 with 2, 4127
    /// with 64).
    pub fn max_tokens_per_rank(mut self, max_tokens: usize) -> Self {
        self.max_tokens = max_tokens;
        self
    }

    /// Format in which dispatched rows travel: element type and scales. Default [`RowFormat::BF16`].
    pub fn format(mut self, format: RowFormat) -> Self {
        self.format = format;
        self
    }

    /// Whether dispatch quantises: the caller gives bf16 rows without scales, and dispatch sends fp8 rows with scales.
    /// Needs an fp8 [`format`](Self::format) with scales, the format of the rows sent and received. Default no.
    ///
    /// Each block of 128 columns (DeepSeek-V3's 1x128 tiles of activations) is scaled by itself: amax is its largest
    /// magnitude, at least 1e-4. The scale is amax / 448, or with UE8M0 the smallest power of two that is not below it.
    /// The element is x times the inverse, which is 448 / amax or that power's reciprocal, rounded to e4m3. All of it
    /// is fp32 arithmetic, each operation rounded once, to nearest even, so every device makes the same bits. A NaN
    /// stays one, 0x7f, and does not count in amax; an infinity makes the whole block's scale infinite (UE8M0: 255,
    /// which is NaN), so that no element of it can be read as a number.
    pub fn quantize(mut self, on: bool) -> Self {
        self.quantize = on;
        self
    }

    /// Type of the experts' outputs: bf16 (default), fp16 or fp32.
    pub fn combine_dtype(mut self, dtype: Dtype) -> Self {
        self.combine_dtype = dtype;
        self
    }

    /// Which rank holds which expert, by ranks of the world's first generation. Experts of ranks that are no longer in
    /// the world get no tokens. Default [`Placement::even`].
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// Where weights come from. Default: with dispatch.
    pub fn weights(mut self, weights: Weights) -> Self {
        self.weights = weights;
        self
    }

    /// Makes room in the arena for calls of another format. Calls may have any format whose rows and partial rows are
    /// no larger than the largest that was made room for; the context's own format is that of
    /// [`hidden`](Self::hidden), [`format`](Self::format), [`quantize`](Self::quantize),
    /// [`combine_dtype`](Self::combine_dtype), [`weights`](Self::weights) and
    /// [`max_tokens_per_rank`](Self::max_tokens_per_rank), and calls that do not state another have it. May be called
    /// several times. In one node, calls of few tokens get partial rows of their own beside those of larger calls.
    /// Where calls go in rounds, all of them take as many launches.
    ///
    /// ```
    /// # use tokenyard::{AllToAllBuilder, CallFormat, RowFormat};
    /// /// Prefill in bf16 or fp8, and decode in fp8 of at most 128 tokens: one arena.
    /// fn formats(builder: AllToAllBuilder) -> AllToAllBuilder {
    ///     let builder = builder.hidden(7168).format(RowFormat::BF16).max_tokens_per_rank(4096);
    ///     builder
    ///         .room_for(CallFormat::new(7168, RowFormat::FP8_F32, 4096))
    ///         .room_for(CallFormat::new(7168, RowFormat::FP8_F32, 128).quantize(true))
    /// }
    /// ```
    pub fn room_for(mut self, format: CallFormat) -> Self {
        self.others.push(format);
        self
    }

    /// What calls do about ranks that are missing; the same on all ranks. Default: a silent rank closes the context.
    /// The other choices cost time and memory: partial rows have tags, and a token a slot for every rank of the node.
    /// They are for worlds of at most 32 ranks, of nodes that have equally many, without in-place output, rounds, side
    /// payloads and partial rows of another type, for combines that do not accumulate, and not for
    /// [`dispatch_again`](super::AllToAll::dispatch_again).
    ///
    /// A masked rank gets nothing, is waited for by nobody, and adds nothing: tokens lose its experts' terms, and the
    /// dispatched rows of its tokens are left out. Each rank has a mask of its own
    /// ([`rank_mask`](super::AllToAll::rank_mask)), and ranks may differ in when they mask another one. Of two ranks
    /// each masks the other as soon as it knows that it is masked. A rank stays masked; it comes back with a new
    /// [generation](crate::World::regroup), whose contexts have new masks.
    ///
    /// Between nodes a rank's rows go by way of the rank of the same place in the other node, its rail there. Nothing
    /// comes to a node of a rank that its rail there has masked. While a rail is masked, the ranks that it serves lack
    /// its node: they are not masked, but their tokens go without that node's experts. A rank is not notified that a
    /// rank of another node has masked it: mask on both sides.
    pub fn missing_ranks(mut self, missing: MissingRanks) -> Self {
        self.missing = missing;
        self
    }

    /// Thread blocks per kernel. Default on a GPU: every SM that the network's own kernels do not need. For large
    /// `max_tokens_per_rank`: the smallest count that a byte model predicts to be within 1 % of the fastest, if that
    /// leaves a quarter of the SMs ([`Plan::explain`](super::Plan::explain) states the choice; docs/notebook.md, "As
    /// many multiprocessors as it takes"). The CPU device takes 2 to 1024, by default all that it has.
    ///
    /// Kernels wait for kernels of other ranks. So where calls of several contexts overlap on a GPU, all their blocks
    /// must fit on the GPU at once: give each such context a budget. [`build`](Self::build) refuses a context if the
    /// budgets of this process's contexts on the GPU would exceed its SMs. A dropped context gives its budget back.
    /// Contexts with the default are not counted: their calls must not overlap, so order them by one stream or by
    /// events.
    pub fn sms(mut self, sms: u32) -> Self {
        self.sms = Some(sms);
        self
    }

    /// Progress deadline of every wait on the device. Default 30 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// This rank's proxy, mandatory in a world of several nodes. Another rank's proxy is refused.
    pub fn proxy(mut self, proxy: &Proxy) -> Self {
        self.proxy = Some(proxy.clone());
        self
    }

    /// Changes optional settings: `builder.tuning(|tuning| tuning.statistics = true)`. May be called several times.
    pub fn tuning(mut self, change: impl FnOnce(&mut Tuning)) -> Self {
        change(&mut self.tuning);
        self
    }

    /// The arena that a rank of this configuration needs, without building the context.
    /// [`Plan::explain`](super::Plan::explain) gives the formula.
    ///
    /// # Errors
    /// As [`build`](Self::build), for the checks that need no other rank.
    pub fn plan(&self) -> Result<Plan> {
        let (mut shape, _) = self.check()?;
        shape.choose_ll_tokens(self.has_few_blocks(&shape));
        let gpu = self.device.as_ref().filter(|device| device.kind() == DeviceKind::Cuda);
        let gpu = gpu.map(|gpu| sms_available(gpu, self.proxy.as_ref()));
        let plan = Plan::new(&shape.plan_input())?;
        let handle_bytes = Size::of(&shape, plan.rounds, &self.tuning).in_all();
        Ok(plan.with_handles(handle_bytes).with_traffic(&Traffic::of(&shape).explain(gpu)))
    }

    /// Whether this rank's calls have few blocks. Without a device: whether a GPU's have.
    pub(super) fn has_few_blocks(&self, shape: &Shape) -> bool {
        let sms = match &self.device {
            Some(device) => sms_of(self.sms, shape, device, self.proxy.as_ref()),
            None => self.sms.unwrap_or(u32::MAX),
        };
        sms <= FEW_BLOCKS
    }

    /// Runs the checks that need no other rank.
    pub(crate) fn check(&self) -> Result<(Shape, Placement)> {
        self.proxy.as_ref().map_or(Ok(()), |proxy| proxy.check_world(&self.world))?;
        let nodes = self.check_nodes()?;
        self.check_limits()?;
        self.check_rounds()?;
        self.check_rows_in_all()?;
        self.check_first_epoch()?;
        self.check_in_place(&nodes)?;
        self.check_missing(&nodes)?;
        let placement = self.check_placement()?;
        let shape = self.shape(nodes, &placement);
        shape.check_rows().and_then(|()| shape.check_sums("combine_dtype"))?;
        self.check_sms()?;
        let shape = Shape { room: self.check_others(&shape)?, ..shape };
        self.check_bitmap(&shape)?;
        if let Some((rows, _)) = self.tuning.in_place.filter(|_| Size::of(&shape, 1, &self.tuning).is_compact()) {
            within("in_place rows", rows, 0, raw::TY_MAX_COMPACT_ROWS as usize, "rows with compact handles")?;
        }
        if let Some((_, align)) =
            self.tuning.in_place.filter(|(_, align)| !shape.is_counted(shape.max_local_experts, *align))
        {
            let advice = "rows are counted in int32, padding for alignment included; align by less";
            return Err(Error::config("in_place align", align, advice));
        }
        Ok((shape, placement))
    }

    fn check_limits(&self) -> Result<()> {
        within("experts", self.experts, 1, MAX_EXPERTS, "experts")?;
        // Rows of an expert from a rank are numbered with 20 bits.
        let experts = self.placement.as_ref().map_or(self.experts, |placement| placement.logical_experts());
        let (names, rows) = if self.tuning.duplicates { (usize::MAX, self.top_k) } else { (experts, 1) };
        within("top_k", self.top_k, 1, names.min(raw::TY_MAX_TOP_K as usize), "experts a token")?;
        within("max_tokens_per_rank", self.max_tokens, 1, raw::TY_MAX_TOKENS as usize / rows, "tokens a rank")?;
        within("payload_words", self.tuning.payload_words, 0, MAX_PAYLOAD_WORDS, "words of a token's payload")?;
        if self.tuning.payload_words > 0 && self.tuning.partial != Partial::Same {
            let advice =
                "partial rows with a payload are of the combine dtype; leave one of payload_words and partial out";
            return Err(Error::config("payload_words", self.tuning.payload_words, advice));
        }
        let words = self.tuning.dispatch_payload_words;
        within("dispatch_payload_words", words, 0, MAX_PAYLOAD_WORDS, "words of a token's payload")?;
        within("handles", self.tuning.handles, 1, 1024, "handles")?;
        let rows = self.tuning.handle_rows.unwrap_or(1);
        within("handle_rows", rows, 0, raw::TY_MAX_COMPACT_ROWS as usize, "rows of a handle")
    }

    fn check_rounds(&self) -> Result<()> {
        let Some(tokens) = self.tuning.round_tokens else { return Ok(()) };
        within("round_tokens", tokens, 1, raw::TY_MAX_TOKENS as usize, "tokens a round")?;
        let rounds = self.max_tokens.div_ceil(tokens);
        if rounds <= MAX_ROUNDS {
            return Ok(());
        }
        let least = self.max_tokens.div_ceil(MAX_ROUNDS);
        let advice = format!(
            "a call of {} tokens would go in {rounds} rounds, a launch each, where {MAX_ROUNDS} are the most; give at \
             least {least}",
            self.max_tokens
        );
        Err(Error::config("round_tokens", tokens, advice))
    }

    /// Rows of a call in all are numbered with 31 bits.
    fn check_rows_in_all(&self) -> Result<()> {
        let ranks = self.world.size();
        if ranks.saturating_mul(self.max_tokens).saturating_mul(self.top_k) <= i32::MAX as usize {
            return Ok(());
        }
        let advice = format!("{ranks} ranks with top-{} exceed 2^31 rows; lower it", self.top_k);
        Err(Error::config("max_tokens_per_rank", self.max_tokens, advice))
    }

    fn check_first_epoch(&self) -> Result<()> {
        let first = self.tuning.first_epoch;
        let advice = if first > 1 << 42 {
            // Arrival words keep 43 bits of an epoch, and fresh memory reads as epoch 0: at least 2^42 calls are left.
            "epochs are counted to 2^43; start below 2^42"
        } else if first as u32 == 0 || first as u32 == u32::MAX {
            // Fresh memory holds flags of 0, so neither of the first two epochs may look like it.
            "its low 32 bits, and those of the next, must differ from 0, which fresh memory holds"
        } else {
            return Ok(());
        };
        Err(Error::config("first_epoch", first, advice))
    }

    fn check_placement(&self) -> Result<Placement> {
        let (ranks, first_ranks) = (self.world.size(), self.world.first_size());
        let placement = match &self.placement {
            Some(placement) => placement.clone(),
            None => Placement::even(self.experts, first_ranks)?,
        };
        if placement.experts() != self.experts || placement.ranks() != first_ranks {
            let value = format!("{} experts on {} ranks", placement.experts(), placement.ranks());
            return Err(Error::config("placement", value, format!("this world has {} on {first_ranks}", self.experts)));
        }
        self.check_replica_table(&placement)?;
        let most = placement.max_local_experts();
        let advice = if most > raw::TY_MAX_LOCAL_EXPERTS as usize {
            format!("a rank holds at most {} experts; spread them", raw::TY_MAX_LOCAL_EXPERTS)
        } else if ranks * most > raw::TY_MAX_COUNTS as usize {
            format!("{ranks} ranks times that must not exceed {}; spread them", raw::TY_MAX_COUNTS)
        } else {
            return Ok(placement);
        };
        Err(Error::config("placement", format!("{most} experts on a rank"), advice))
    }

    fn check_replica_table(&self, placement: &Placement) -> Result<()> {
        let Some(table) = &self.tuning.replica_table else { return Ok(()) };
        let logical = placement.logical_experts();
        let slots = table.len() / logical;
        if slots * logical != table.len() || !slots.is_power_of_two() || slots > MAX_REPLICA_SLOTS {
            let advice =
                format!("give a power of two, at most {MAX_REPLICA_SLOTS}, for each of {logical} logical experts");
            return Err(Error::config("replica_table", format!("{} entries", table.len()), advice));
        }
        let wrong = table
            .iter()
            .zip(0..)
            .find(|(expert, at)| placement.logical_of(**expert as usize) != Some((at / slots) as u32));
        wrong.map_or(Ok(()), |(expert, at)| {
            let advice = format!("entry {at} must be a replica of logical expert {}", at / slots);
            Err(Error::config("replica_table", format!("expert {expert}"), advice))
        })
    }

    fn shape(&self, nodes: Nodes, placement: &Placement) -> Shape {
        let name = self.world.original(self.world.rank());
        let network = self.proxy.as_ref().filter(|_| nodes.members().len() > 1);
        let needs_host = network.is_some_and(|proxy| proxy.device_needs().host_memory);
        Shape {
            rank: self.world.rank().index(),
            ranks: self.world.size(),
            first_ranks: self.world.first_size(),
            rank_without_experts: (0..placement.ranks()).find(|rank| placement.local_experts(*rank).is_empty()),
            name,
            nodes,
            nics: self.proxy.as_ref().map_or(1, Proxy::nics),
            chunk_rows: self.tuning.chunk_rows,
            receives: self.proxy.as_ref().map_or(usize::MAX, Proxy::receives_of_a_context),
            double_buffer_bytes: self.tuning.double_buffer_bytes,
            missing: self.missing,
            ll_tokens: self.tuning.ll_tokens,
            round_tokens: self.tuning.round_tokens,
            in_place: self.tuning.in_place,
            arena: match self.device_kind() {
                DeviceKind::Cpu => ArenaPlace::Host,
                DeviceKind::Cuda => self.tuning.arena.on_gpu(needs_host),
            },
            hidden: self.hidden,
            experts: self.experts,
            top_k: self.top_k,
            duplicates: self.tuning.duplicates,
            max_tokens: self.max_tokens,
            format: self.format,
            quantize: self.quantize,
            combine_dtype: self.combine_dtype,
            payload: None,
            payload_words: self.tuning.payload_words,
            token_words: 0,
            dispatch_payload_words: self.tuning.dispatch_payload_words,
            room: Room::default(),
            partial: self.tuning.partial,
            weights: self.weights,
            row_bytes: self.format.row_bytes(self.hidden),
            scale_words: self.format.scale_bytes(self.hidden) / 4,
            local_experts: placement.local_experts(name.index()).len(),
            max_local_experts: placement.max_local_experts(),
        }
    }

    fn goes_in_rounds(&self) -> bool {
        self.tuning.round_tokens.is_some_and(|tokens| tokens < self.max_tokens)
    }

    fn check_in_place(&self, nodes: &Nodes) -> Result<()> {
        let Some((rows, align)) = self.tuning.in_place else { return Ok(()) };
        within("in_place rows", rows, 1, i32::MAX as usize, "rows")?;
        within("in_place align", align, 1, i32::MAX as usize, "rows")?;
        let why = if nodes.members().len() > 1 {
            "in-place output is for worlds of one node; leave it out with several nodes"
        } else if nodes.largest() > raw::TY_MAX_IN_PLACE_RANKS as usize {
            "in-place output is for nodes of at most 32 ranks; leave it out"
        } else if self.quantize {
            "in-place output is not for rows that are quantised in dispatch; leave one of them out"
        } else if self.goes_in_rounds() {
            "calls with in-place output go in one round; leave round_tokens out"
        } else if self.tuning.dispatch_payload_words > 0 {
            "in-place output has no place for the words of a side payload; leave dispatch_payload_words out"
        } else {
            return Ok(());
        };
        Err(Error::config("in_place", format!("{rows} rows"), why))
    }

    fn check_missing(&self, nodes: &Nodes) -> Result<()> {
        let why = if self.missing == MissingRanks::Fatal {
            return Ok(());
        } else if nodes.ranks().count() > MOST_MASKED {
            "calls go on without missing ranks in worlds of at most 32 ranks; leave it out"
        } else if nodes.members().iter().any(|ranks| ranks.len() != nodes.largest()) {
            "where calls go on without missing ranks, nodes have equally many ranks, as others are linked one way alone; \
             leave it out"
        } else if self.tuning.in_place.is_some() {
            "with in-place output rows leave after the counts of all ranks; leave one of them out"
        } else if self.goes_in_rounds() {
            "calls that go on without missing ranks go in one round; leave round_tokens out"
        } else if self.tuning.payload_words > 0 {
            "calls that go on without missing ranks have no side payload; leave payload_words out"
        } else if self.tuning.dispatch_payload_words > 0 {
            "calls that go on without missing ranks have no side payload; leave dispatch_payload_words out"
        } else if self.tuning.partial != Partial::Same {
            "calls that go on without missing ranks have partial rows of the combine dtype; leave partial out"
        } else {
            return Ok(());
        };
        Err(Error::config("missing_ranks", format!("{:?}", self.missing), why))
    }

    fn check_nodes(&self) -> Result<Nodes> {
        let nodes = Nodes::of_sizes(self.world.nodes(), self.world.members())?;
        let count = nodes.members().len();
        within("world", self.world.size(), 1, raw::TY_MAX_RANKS as usize, "ranks")?;
        within("nodes", count, 1, raw::TY_MAX_NODES as usize, "nodes")?;
        within("ranks of a node", nodes.largest(), 1, raw::TY_MAX_NODE_RANKS as usize, "ranks of one node")?;
        if let Some(tokens) = self.tuning.meta_tile {
            within("meta_tile", tokens, 1, raw::TY_MAX_TOKENS as usize, "tokens of a tile")?;
        }
        if count == 1 {
            return Ok(nodes);
        }
        if let Some(rows) = self.tuning.chunk_rows {
            within("chunk_rows", rows, 1, 1 << 20, "rows of a chunk")?;
        }
        let most = most_tokens(count);
        within(
            "max_tokens_per_rank",
            self.max_tokens,
            1,
            most,
            "tokens per rank, since a block keeps a bitmap of them per node",
        )?;
        if self.sms == Some(1) {
            return Err(Error::config(
                "sms",
                1,
                "with several nodes one block watches the proxy's words; use 2 or more",
            ));
        }
        Ok(nodes)
    }

    fn check_sms(&self) -> Result<()> {
        if let (Some(0), _) | (Some(1), DeviceKind::Cpu) = (self.sms, self.device_kind()) {
            return Err(Error::config("sms", self.sms.unwrap_or(0), "the CPU device needs two blocks, a GPU one"));
        }
        // GPUs have fewer; the error of the budget states their number.
        if let (Some(sms), DeviceKind::Cpu) = (self.sms, self.device_kind()) {
            within(
                "sms",
                sms as usize,
                2,
                MAX_CPU_BLOCKS,
                "blocks on the CPU device, where each has 64 threads with a stack of their own",
            )?;
        }
        Ok(())
    }

    /// Refuses formats of other calls that no call of this context may have; returns the room that they need.
    fn check_others(&self, shape: &Shape) -> Result<Room> {
        self.others.iter().try_fold(Room::default(), |room, format| {
            let other = shape.of_format(format);
            let refuse = |why: &str| Err(Error::config("room_for", format!("{format:?}"), why));
            match other.check_rows().and_then(|()| other.check_sums("combine_dtype")) {
                Err(Error::Config { name, value, advice }) => return refuse(&format!("{name} is {value}: {advice}")),
                checked => checked?,
            }
            if self.tuning.in_place.is_some() {
                return refuse("calls with in-place output are of the context's own format; leave one of them out");
            }
            if !(1..=self.max_tokens).contains(&format.max_tokens) {
                return refuse(&format!("max_tokens is {}: use 1 to {} tokens", format.max_tokens, self.max_tokens));
            }
            if shape.nodes.members().len() > 1 && other.weights_with_combine() != shape.weights_with_combine() {
                return refuse("between nodes all calls of a context have weights with combine, or none has");
            }
            Ok(other.add_to(room, self.tuning.ll_tokens.unwrap_or(LL_TOKENS)))
        })
    }

    /// A tile's bitmap, of 32 tokens at least, is in shared memory.
    fn check_bitmap(&self, shape: &Shape) -> Result<()> {
        let most = most_local_experts(self.top_k, self.tuning.duplicates);
        if shape.max_local_experts <= most {
            return Ok(());
        }
        let value = format!("{} experts on a rank", shape.max_local_experts);
        let advice = format!("with duplicates and top-{} a rank holds at most {most}; spread them", self.top_k);
        Err(Error::config("placement", value, advice))
    }

    fn device_kind(&self) -> DeviceKind {
        self.device.as_ref().map_or(DeviceKind::Cpu, Device::kind)
    }
}

/// Most ranks of a node of which some may be missing: a warp has a lane for each.
const MOST_MASKED: usize = 32;

/// Most words of a token's side payload.
const MAX_PAYLOAD_WORDS: usize = 4096;

/// Most blocks of a context on the CPU device: each thread of a launch has a stack. A device without memory for a stack
/// ends with an error.
const MAX_CPU_BLOCKS: usize = 1024;

/// Most rounds of a call: each is a launch, which the host enqueues before the call returns. Where round_tokens is left
/// out, no call has so many.
const MAX_ROUNDS: usize = 4096;

fn within(name: &'static str, value: usize, low: usize, high: usize, unit: &str) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Error::config(name, value, format!("use {low} to {high} {unit}")))
}
