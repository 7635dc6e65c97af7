//! Building a context: its shape, the checks, and the exchange after which every rank can address its peers.

use super::context::AllToAll;
use super::placement::Placement;
use super::plan::PlanInput;
use super::service::Proxy;
use super::sms::{Traffic, sms_available};
use super::wire::Nodes;
use crate::base::{Dtype, Error, Rank, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, DeviceKind};
use crate::transport::World;
use crate::transport::memory::gdr::GdrCopy;
use std::time::Duration;

/// Scales that travel with fp8 rows: one per 128 columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scales {
    /// None; rows are their bytes alone.
    None,
    /// fp32, one word per 128 columns.
    F32,
    /// UE8M0 exponents, four to a 4-byte word, little end first; unused bytes zero.
    Ue8m0,
}

/// Where the weights of combine's sums come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weights {
    /// With dispatch.
    Dispatch,
    /// With combine: sent ahead to the expert ranks.
    Combine,
    /// Nowhere: every weight is 1.
    None,
}

/// What partial rows travel as: an expert rank's sum of its rows of a token, on its way home or to a rail, and between
/// nodes the sum of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Partial {
    /// The combine dtype: one rounding a level.
    #[default]
    Same,
    /// fp32: no rounding, and twice the bytes of 16-bit rows.
    Fp32,
    /// fp8 e4m3 with an fp32 scale per 128 columns: about half the bytes of 16-bit rows.
    Fp8,
}

/// Where a context's arena lies: what node peers store into, and what the network reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ArenaPlace {
    /// In the GPU's own memory.
    #[default]
    Device,
    /// In host memory, which GPUs reach over PCIe: for networks that cannot reach the memory of GPUs. Slow.
    Host,
}

/// Arenas up to which received rows and partial rows are kept twice, with several nodes.
const DOUBLE_BUFFER_BYTES: u64 = 256 << 20;

/// Columns of a scale.
const SCALE_COLUMNS: usize = 128;

/// What a context was built for.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    /// This rank and the number of ranks, in this generation.
    pub rank: usize,
    pub ranks: usize,
    /// This rank in the first generation, as nodes and placement name it.
    pub name: Rank,
    pub nodes: Nodes,
    pub nics: u8,
    pub chunk_rows: Option<usize>,
    /// Receives of a NIC that are meant for this context.
    pub receives: usize,
    pub double_buffer_bytes: u64,
    pub arriving_tokens: Option<usize>,
    pub wave_tokens: Option<usize>,
    /// Rows and alignment of an output in the arena.
    pub own_output: Option<(usize, usize)>,
    pub arena: ArenaPlace,
    pub hidden: usize,
    pub experts: usize,
    pub top_k: usize,
    pub max_tokens: usize,
    pub dtype: Dtype,
    pub scales: Scales,
    pub quantize: bool,
    pub combine_dtype: Dtype,
    pub partial: Partial,
    pub weights: Weights,
    pub row_bytes: usize,
    pub scale_words: usize,
    pub local_experts: usize,
    pub max_local_experts: usize,
}

impl Shape {
    pub fn weights_with_dispatch(&self) -> bool {
        self.weights == Weights::Dispatch
    }

    pub fn weights_with_combine(&self) -> bool {
        self.weights == Weights::Combine
    }

    /// Whether kernels can number the rows of so many experts, of any routing, with starts that are aligned so.
    pub fn is_counted(&self, experts: usize, align: usize) -> bool {
        let rows = self.ranks.saturating_mul(self.max_tokens).saturating_mul(self.top_k);
        rows.saturating_add(experts.saturating_mul(align)) <= i32::MAX as usize
    }

    pub fn weights_sentence(&self) -> &'static str {
        match self.weights {
            Weights::Dispatch => "this context takes weights with dispatch",
            Weights::Combine => "this context takes weights with combine",
            Weights::None => "this context has no weights",
        }
    }

    pub fn scales_sentence(&self) -> &'static str {
        match self.scales {
            Scales::None => "this context's rows have no scales",
            _ => "this context's rows have scales",
        }
    }

    /// Bytes of a row as the caller gives it.
    pub fn input_row_bytes(&self) -> usize {
        if self.quantize { self.hidden * Dtype::Bf16.bytes() } else { self.row_bytes }
    }

    /// Whether rows are given with scales, and why.
    pub fn input_scales(&self) -> (bool, &'static str) {
        match (self.quantize, self.scales) {
            (true, _) => (false, "this context makes the scales as it quantises bf16 rows"),
            (false, scales) => (scales != Scales::None, self.scales_sentence()),
        }
    }

    pub fn combine_row_bytes(&self) -> usize {
        self.hidden * self.combine_dtype.bytes()
    }

    /// Pitch of a partial row; one of fp8 has its scales behind its elements.
    pub fn partial_bytes(&self) -> usize {
        match self.partial {
            Partial::Same => self.hidden * self.combine_dtype.bytes(),
            Partial::Fp32 => self.hidden * 4,
            Partial::Fp8 => (self.hidden + self.hidden.div_ceil(SCALE_COLUMNS) * 4).next_multiple_of(16),
        }
    }

    /// Rounded rows of 16-bit and 32-bit floats; the error names `what`.
    pub fn float_code(&self, what: &'static str, dtype: Dtype) -> Result<u32> {
        let code = match dtype {
            Dtype::Bf16 => raw::TY_BF16,
            Dtype::Fp16 => raw::TY_FP16,
            Dtype::Fp32 => raw::TY_FP32,
            Dtype::Fp8E4m3 => return Err(config(what, dtype.name(), "use bf16, fp16 or fp32".into())),
        };
        if !(self.hidden * dtype.bytes()).is_multiple_of(16) {
            let advice = format!("a row of {} {dtype} elements is no multiple of 16 bytes", self.hidden);
            return Err(config(what, dtype.name(), advice));
        }
        Ok(code)
    }

    pub fn plan_input(&self) -> PlanInput {
        PlanInput {
            nodes: self.nodes.clone(),
            max_tokens: self.max_tokens,
            wave_tokens: self.wave_tokens,
            top_k: self.top_k,
            row_bytes: self.row_bytes,
            scale_words: self.scale_words,
            partial_bytes: self.partial_bytes(),
            max_local_experts: self.max_local_experts,
            weights_with_dispatch: self.weights_with_dispatch(),
            weights_with_combine: self.weights_with_combine(),
            nics: self.nics,
            chunk_rows: self.chunk_rows,
            receives: self.receives,
            double_buffer_bytes: self.double_buffer_bytes,
            arriving_tokens: self.arriving_tokens.unwrap_or(0),
            own_rows: self.own_output.map_or(0, |(rows, _)| rows),
        }
    }

    /// What must be equal on all ranks, as text.
    pub fn fingerprint(&self, placement: &Placement, first_epoch: u64, generation: u32) -> String {
        let table: u64 = (0..placement.experts()).fold(0xcbf2_9ce4_8422_2325, |hash: u64, expert| {
            (hash ^ u64::from(placement.rank_of(expert).unwrap_or(0))).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let names = |ranks: &Vec<Rank>| ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join("+");
        let sizes: Vec<String> = self.nodes.members().iter().map(names).collect();
        format!(
            "tokenyard {} generation={} ranks={} nodes={} nics={} chunk_rows={} double_buffer_bytes={} arriving_tokens={} own_output={} arena={:?} hidden={} experts={} top_k={} \
             max_tokens={} wave_tokens={} dtype={} scales={:?} quantize={} combine_dtype={} \
             partial={:?} weights={:?} placement={table:016x} first_epoch={first_epoch}",
            env!("CARGO_PKG_VERSION"),
            generation,
            self.ranks,
            sizes.join(","),
            self.nics,
            self.chunk_rows.unwrap_or(0),
            self.double_buffer_bytes,
            self.arriving_tokens.map_or("default".into(), |tokens| tokens.to_string()),
            self.own_output.map_or("none".into(), |(rows, align)| format!("{rows}:{align}")),
            self.arena,
            self.hidden,
            self.experts,
            self.top_k,
            self.max_tokens,
            self.wave_tokens.unwrap_or(0),
            self.dtype,
            self.scales,
            self.quantize,
            self.combine_dtype,
            self.partial,
            self.weights,
        )
    }
}

/// Collects what a context needs; see [`AllToAll::builder`].
#[derive(Clone)]
pub struct AllToAllBuilder {
    pub(crate) world: World,
    pub(crate) device: Option<Device>,
    pub(crate) hidden: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) max_tokens: usize,
    pub(crate) dtype: Dtype,
    pub(crate) scales: Scales,
    pub(crate) quantize: bool,
    pub(crate) combine_dtype: Dtype,
    pub(crate) partial: Partial,
    pub(crate) placement: Option<Placement>,
    pub(crate) weights: Weights,
    pub(crate) sms: Option<u32>,
    pub(crate) timeout: Duration,
    pub(crate) handles: usize,
    pub(crate) first_epoch: u64,
    pub(crate) proxy: Option<Proxy>,
    pub(crate) chunk_rows: Option<usize>,
    pub(crate) double_buffer_bytes: u64,
    pub(crate) arriving_tokens: Option<usize>,
    pub(crate) wave_tokens: Option<usize>,
    pub(crate) own_output: Option<(usize, usize)>,
    pub(crate) meta_tile: Option<usize>,
    pub(crate) arena: ArenaPlace,
    pub(crate) statistics: bool,
    pub(crate) gdrcopy: Option<GdrCopy>,
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
            dtype: Dtype::Bf16,
            scales: Scales::None,
            quantize: false,
            combine_dtype: Dtype::Bf16,
            partial: Partial::Same,
            placement: None,
            weights: Weights::Dispatch,
            sms: None,
            timeout: Duration::from_secs(30),
            handles: 4,
            first_epoch: 1,
            proxy: None,
            chunk_rows: None,
            double_buffer_bytes: DOUBLE_BUFFER_BYTES,
            arriving_tokens: None,
            wave_tokens: None,
            own_output: None,
            meta_tile: None,
            arena: ArenaPlace::Device,
            statistics: false,
            gdrcopy: None,
        }
    }

    /// Has the device write down when its blocks come through each stage of a call, and whom it heard of when; see
    /// [`AllToAll::dispatch_statistics`]. Default: off. It costs a few stores to host memory a block.
    pub fn statistics(mut self, on: bool) -> Self {
        self.statistics = on;
        self
    }

    /// The device of this rank. Default: a CPU device of its own.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Columns of a row.
    pub fn hidden(mut self, hidden: usize) -> Self {
        self.hidden = hidden;
        self
    }

    /// Experts of the layer, over all ranks.
    pub fn experts(mut self, experts: usize) -> Self {
        self.experts = experts;
        self
    }

    /// Experts a token may name, at most 32.
    pub fn top_k(mut self, top_k: usize) -> Self {
        self.top_k = top_k;
        self
    }

    /// Most tokens of one rank in one call: 2^20 in one node; with N nodes a bitmap of them per node has to fit in a block's
    /// shared memory, which ends at 32 floor(8256 / N) - 1 (132 095 with 2, 4127 with 64).
    pub fn max_tokens(mut self, max_tokens: usize) -> Self {
        self.max_tokens = max_tokens;
        self
    }

    /// Type of the dispatched rows. Default bf16.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// Scales that travel with fp8 rows. Default none.
    pub fn scales(mut self, scales: Scales) -> Self {
        self.scales = scales;
        self
    }

    /// Whether tokens are given as bf16 rows without scales, and become fp8 rows with scales as they are sent. Needs an
    /// fp8 [`dtype`](Self::dtype) and [`scales`](Self::scales), which say what travels and what comes out. Default no.
    ///
    /// Each block of 128 columns (DeepSeek-V3's 1x128 tiles of activations) is scaled by itself: amax is its largest
    /// magnitude, at least 1e-4. The scale is amax / 448, or with UE8M0 the smallest power of two that is not below it.
    /// The element is x times the inverse, which is 448 / amax or that power's reciprocal, rounded to e4m3. All of it is
    /// fp32 arithmetic, each operation rounded once, to nearest even, so every device makes the same bits. A NaN stays
    /// one, 0x7f, and does not count in amax; an infinity makes the whole block's scale infinite (UE8M0: 255, which is
    /// NaN), so that no element of it can be read as a number.
    pub fn quantize(mut self, on: bool) -> Self {
        self.quantize = on;
        self
    }

    /// Type of the experts' outputs: bf16 (default), fp16 or fp32.
    pub fn combine_dtype(mut self, dtype: Dtype) -> Self {
        self.combine_dtype = dtype;
        self
    }

    /// What partial rows travel as. Default [`Partial::Same`].
    ///
    /// With [`Partial::Fp8`] each block of 128 columns becomes e4m3 elements with one fp32 scale, as a block with fp32
    /// scales does that [`quantize`](Self::quantize) makes, and whoever adds the row multiplies elements with scale, all
    /// of it fp32 arithmetic with one rounding an operation. It needs a hidden size that is a multiple of 128. Where amax
    /// is the largest magnitude of the block's sums, and 1e-4 at least, an element x is off by at most |x| / 16 or
    /// amax / 458000, whichever is larger, on each way that it goes: home or to a rail, and between nodes once more.
    pub fn partial(mut self, partial: Partial) -> Self {
        self.partial = partial;
        self
    }

    /// Which rank holds which expert, by ranks of the world's first generation; experts of ranks that are not there any
    /// more get no tokens. Default [`Placement::even`].
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// Where weights come from. Default: with dispatch.
    pub fn weights(mut self, weights: Weights) -> Self {
        self.weights = weights;
        self
    }

    /// Blocks of a kernel. Default, on a GPU: of its multiprocessors, less those that the network's own kernels need, all for
    /// contexts of few tokens, and for large ones the fewest by which calls take no more than a percent longer, by a model of
    /// the bytes that they move ([`explain_plan`](Self::explain_plan) tells; docs/performance.md, "As many multiprocessors as
    /// it takes"). On the CPU device all.
    ///
    /// Kernels wait for those of other ranks, so where calls of several contexts overlap on a GPU, all of their blocks must
    /// fit on it at once: give each such context a budget. [`build`](Self::build) refuses the one by which the budgets of
    /// this process's contexts on a GPU exceed its multiprocessors; a context gives its own back when it is dropped.
    /// Contexts with the default are not counted: their calls must follow one another, on one stream or by events.
    pub fn sms(mut self, sms: u32) -> Self {
        self.sms = Some(sms);
        self
    }

    /// Gives the context an output in its arena, the same on all ranks: `rows` rows in the contiguous layout, starts of
    /// experts at multiples of `align` rows, scales row by row. Peers then store a row where its first expert wants it, and
    /// no inbox lies between: of eight ranks each moves less than half of what it does otherwise, and the arena lacks the
    /// inbox. But no row leaves before all counts are here. For large calls with few multiprocessors
    /// (docs/performance.md, "Rows stored in place"). Default: none.
    ///
    /// Every [`dispatch`](AllToAll::dispatch) then goes to [`AllToAll::own_output`], whose rows are there until the next one
    /// begins; calls are not split. In worlds of one node of at most 32 ranks, without quantisation.
    pub fn own_output(mut self, rows: usize, align: usize) -> Self {
        self.own_output = Some((rows, align));
        self
    }

    /// Progress deadline of every wait on the device. Default 30 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Dispatches whose handles may be alive at once. Default 4.
    pub fn handles(mut self, handles: usize) -> Self {
        self.handles = handles;
        self
    }

    /// Number of the first epoch, the same on all ranks. Default 1; tests start just below 2^32 to see flags wrap.
    /// At most 2^42.
    pub fn first_epoch(mut self, epoch: u64) -> Self {
        self.first_epoch = epoch;
        self
    }

    /// This rank's proxy, which a world of several nodes needs.
    pub fn proxy(mut self, proxy: &Proxy) -> Self {
        self.proxy = Some(proxy.clone());
        self
    }

    /// Rows of a chunk between nodes: a message is posted chunk by chunk, as each is packed. Default: 128 KiB, or 640 KiB
    /// of combine where there are several NICs, and more where rows of a message would be more than 1023 chunks, or the
    /// context need more than a quarter of the network's receives. [`build`](Self::build) refuses a context that needs more
    /// than the others of its proxy leave.
    pub fn chunk_rows(mut self, rows: usize) -> Self {
        self.chunk_rows = Some(rows);
        self
    }

    /// With several nodes: received rows and partial rows are kept twice, so that no call waits until peers have read
    /// those of the call before (2.3 µs on H200s), where the arena then takes up to so many bytes; the same on all ranks.
    /// Default: 256 MiB, which 128 tokens of DeepSeek-V3 stay below with up to 32 ranks in nodes of 8. 0: always once.
    pub fn double_buffer_bytes(mut self, bytes: u64) -> Self {
        self.double_buffer_bytes = bytes;
        self
    }

    /// With one node: where a wave has up to so many tokens of a rank, each word of a partial row tells that it has come,
    /// and neither fence nor tag stands behind the row; home leaves zeros in its place. Where blocks are few, or tokens
    /// many and ranks few, that takes longer than a fence; the same on all ranks. Default: 256, and 0, which is never,
    /// where a rank has at most 48 blocks.
    pub fn arriving_tokens(mut self, tokens: usize) -> Self {
        self.arriving_tokens = Some(tokens);
        self
    }

    /// Tokens whose META (see docs/design.md) one block builds, rounded up to a multiple of 32, and as many as shared memory
    /// has room for; of larger calls other blocks build that of the others. Default: 256.
    pub fn meta_tile(mut self, tokens: usize) -> Self {
        self.meta_tile = Some(tokens);
        self
    }

    /// Tokens of each rank that a call sends at once; a larger call goes in waves of so many, a launch each, and always
    /// in as many as `max_tokens` needs. Rows' and partial rows' places in the arena are for one wave alone. Default: all
    /// of them; with several nodes no more than keep the arena within 2 GiB. With several waves a call's halves need its
    /// input until the receiving half is through.
    pub fn wave_tokens(mut self, tokens: usize) -> Self {
        self.wave_tokens = Some(tokens);
        self
    }

    /// Where the arena lies. Default: in the GPU's own memory; the CPU device's is host memory whatever is given here.
    pub fn arena(mut self, place: ArenaPlace) -> Self {
        self.arena = place;
        self
    }

    /// Whether GPU and proxy share flags in the GPU's memory, by way of GDRCopy. Default: as `TOKENYARD_GDRCOPY` says, and
    /// `Auto` where it says nothing. The CPU device's flags lie in plain memory whatever is given here. Ranks may differ.
    pub fn gdrcopy(mut self, gdrcopy: GdrCopy) -> Self {
        self.gdrcopy = Some(gdrcopy);
        self
    }

    /// Leaves calls of different streams without an order among them, for tests of what the device does then.
    #[doc(hidden)]
    pub fn unordered(self) -> Self {
        self
    }

    /// Builds the context. Collective: every rank of the world calls it with the same configuration.
    ///
    /// # Errors
    /// `Config` for a shape that cannot be served or that differs between ranks, and for a budget of
    /// [`sms`](Self::sms) that its GPU does not have left; `Device` where memory or peer access
    /// is lacking; `Bootstrap` where a rank does not come. A failure on one rank is an error on all.
    pub fn build(self) -> Result<AllToAll> {
        AllToAll::build(self)
    }

    /// What a rank of this configuration needs, without building it.
    ///
    /// # Errors
    /// As [`build`](Self::build), for what can be seen on one rank.
    pub fn plan(&self) -> Result<super::Plan> {
        let (shape, _) = self.check()?;
        super::Plan::new(&shape.plan_input())
    }

    /// The same as [`plan`](Self::plan), as the formula behind it.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn explain_plan(&self) -> Result<String> {
        let shape = self.check()?.0;
        let input = shape.plan_input();
        let gpu = self.device.as_ref().filter(|device| device.kind() == DeviceKind::Cuda);
        let gpu = gpu.map(|gpu| sms_available(gpu, self.proxy.as_ref()));
        Ok(format!("{}\n{}", super::Plan::new(&input)?.explain(&input), Traffic::of(&shape).explain(gpu)))
    }

    /// Checks everything that can be seen on one rank.
    pub(crate) fn check(&self) -> Result<(Shape, Placement)> {
        let (ranks, first_ranks) = (self.world.size(), self.world.first_size());
        let nodes = self.check_nodes()?;
        within("hidden", self.hidden, 1, 1 << 20, "columns")?;
        within("experts", self.experts, 1, 1 << 20, "experts")?;
        within("top_k", self.top_k, 1, self.experts.min(raw::TY_MAX_TOP_K as usize), "experts a token")?;
        within("max_tokens", self.max_tokens, 1, raw::TY_MAX_TOKENS as usize, "tokens a rank")?;
        within("handles", self.handles, 1, 1024, "handles")?;
        if let Some(tokens) = self.wave_tokens {
            within("wave_tokens", tokens, 1, raw::TY_MAX_TOKENS as usize, "tokens a wave")?;
        }
        if ranks.saturating_mul(self.max_tokens).saturating_mul(self.top_k) > i32::MAX as usize {
            let advice = format!("{ranks} ranks with top-{} exceed 2^31 rows; lower it", self.top_k);
            return Err(config("max_tokens", self.max_tokens, advice));
        }
        // Landings keep 43 bits of an epoch, and fresh memory holds one of epoch 0: 2^42 calls are left at the least.
        if self.first_epoch > 1 << 42 {
            let advice = "epochs are counted to 2^43; start at 2^42 at the most".into();
            return Err(config("first_epoch", self.first_epoch, advice));
        }
        // Fresh memory holds flags of 0, so neither of the first two epochs may look like it.
        if self.first_epoch as u32 == 0 || self.first_epoch as u32 == u32::MAX {
            let advice = "its low 32 bits, and those of the next, must differ from 0, which fresh memory holds".into();
            return Err(config("first_epoch", self.first_epoch, advice));
        }
        self.check_own_output(&nodes)?;
        let placement = match &self.placement {
            Some(placement) => placement.clone(),
            None => Placement::even(self.experts, first_ranks)?,
        };
        if placement.experts() != self.experts || placement.ranks() != first_ranks {
            let value = format!("{} experts on {} ranks", placement.experts(), placement.ranks());
            return Err(config("placement", value, format!("this world has {} on {first_ranks}", self.experts)));
        }
        if placement.max_local_experts() > raw::TY_MAX_LOCAL_EXPERTS as usize {
            let advice = format!("a rank holds at most {} experts; spread them", raw::TY_MAX_LOCAL_EXPERTS);
            return Err(config("placement", format!("{} experts on a rank", placement.max_local_experts()), advice));
        }
        if ranks * placement.max_local_experts() > raw::TY_MAX_COUNTS as usize {
            let advice = format!("{ranks} ranks times that must not exceed {}; spread them", raw::TY_MAX_COUNTS);
            return Err(config("placement", format!("{} experts on a rank", placement.max_local_experts()), advice));
        }
        let name = self.world.original(self.world.rank());
        let shape = Shape {
            rank: self.world.rank().index(),
            ranks,
            name,
            nodes,
            nics: self.proxy.as_ref().map_or(1, Proxy::nics),
            chunk_rows: self.chunk_rows,
            receives: self.proxy.as_ref().map_or(usize::MAX, Proxy::receives_of_a_context),
            double_buffer_bytes: self.double_buffer_bytes,
            arriving_tokens: self.arriving_tokens,
            wave_tokens: self.wave_tokens,
            own_output: self.own_output,
            arena: match self.device_kind() {
                DeviceKind::Cpu => ArenaPlace::Host,
                DeviceKind::Cuda => self.arena,
            },
            hidden: self.hidden,
            experts: self.experts,
            top_k: self.top_k,
            max_tokens: self.max_tokens,
            dtype: self.dtype,
            scales: self.scales,
            quantize: self.quantize,
            combine_dtype: self.combine_dtype,
            partial: self.partial,
            weights: self.weights,
            row_bytes: self.hidden * self.dtype.bytes(),
            scale_words: match self.scales {
                Scales::None => 0,
                Scales::F32 => self.hidden.div_ceil(SCALE_COLUMNS),
                Scales::Ue8m0 => self.hidden.div_ceil(4 * SCALE_COLUMNS),
            },
            local_experts: placement.local_experts(name.index()).len(),
            max_local_experts: placement.max_local_experts(),
        };
        self.check_rows(&shape)?;
        if let Some((_, align)) =
            self.own_output.filter(|(_, align)| !shape.is_counted(shape.max_local_experts, *align))
        {
            let advice =
                "rows are counted in int32, those by which experts' starts are aligned, too; align by less".into();
            return Err(config("own_output align", align, advice));
        }
        Ok((shape, placement))
    }

    fn check_own_output(&self, nodes: &Nodes) -> Result<()> {
        let Some((rows, align)) = self.own_output else { return Ok(()) };
        within("own_output rows", rows, 1, i32::MAX as usize, "rows")?;
        within("own_output align", align, 1, i32::MAX as usize, "rows")?;
        let why = if nodes.members().len() > 1 {
            "an output in the arena is for worlds of one node; leave it out between nodes"
        } else if nodes.largest() > raw::TY_MAX_IN_PLACE_RANKS as usize {
            "an output in the arena is for nodes of 32 ranks at the most; leave it out"
        } else if self.quantize {
            "rows that are quantised as they are sent have no output in the arena; leave one of them out"
        } else if self.wave_tokens.is_some_and(|tokens| tokens < self.max_tokens) {
            "calls with an output in the arena go in one wave; leave wave_tokens out"
        } else {
            return Ok(());
        };
        Err(config("own_output", format!("{rows} rows"), why.into()))
    }

    fn check_nodes(&self) -> Result<Nodes> {
        let nodes = Nodes::of_sizes(self.world.nodes(), self.world.members())?;
        let count = nodes.members().len();
        within("world", self.world.size(), 1, raw::TY_MAX_RANKS as usize, "ranks")?;
        within("nodes", count, 1, raw::TY_MAX_NODES as usize, "nodes")?;
        within("ranks of a node", nodes.largest(), 1, raw::TY_MAX_NODE_RANKS as usize, "ranks of one node")?;
        if let Some(tokens) = self.meta_tile {
            within("meta_tile", tokens, 1, raw::TY_MAX_TOKENS as usize, "tokens of a tile")?;
        }
        if count == 1 {
            return Ok(nodes);
        }
        if let Some(rows) = self.chunk_rows {
            within("chunk_rows", rows, 1, 1 << 20, "rows of a chunk")?;
        }
        // A row of the bitmap has a word beyond the last token's.
        let most = 32 * (raw::TY_NODES_BITMAP_WORDS as usize / count) - 1;
        within("max_tokens", self.max_tokens, 1, most, "tokens a rank, of which a block keeps a bitmap per node")?;
        if self.sms == Some(1) {
            return Err(config(
                "sms",
                1,
                "with several nodes one block watches the proxy's words; use 2 or more".into(),
            ));
        }
        Ok(nodes)
    }

    fn check_rows(&self, shape: &Shape) -> Result<()> {
        if !shape.row_bytes.is_multiple_of(16) {
            let advice = format!("a row of {} bytes is no multiple of 16; pad the hidden size", shape.row_bytes);
            return Err(config("hidden", self.hidden, advice));
        }
        let blocks = self.hidden.is_multiple_of(SCALE_COLUMNS);
        if self.dtype == Dtype::Fp8E4m3 && !blocks {
            return Err(config("hidden", self.hidden, "fp8 rows have a scale per 128 columns; use a multiple".into()));
        }
        if self.dtype != Dtype::Fp8E4m3 && self.scales != Scales::None {
            let advice = format!("{} rows carry no scales; use none, or fp8 rows", self.dtype);
            return Err(config("scales", format!("{:?}", self.scales), advice));
        }
        if self.quantize && (self.dtype != Dtype::Fp8E4m3 || self.scales == Scales::None) {
            let advice = format!(
                "it makes fp8 rows with scales, and these are {} with scales {:?}; use fp8 with F32 or Ue8m0",
                self.dtype, self.scales
            );
            return Err(config("quantize", true, advice));
        }
        shape.float_code("combine_dtype", self.combine_dtype)?;
        if self.partial == Partial::Fp8 && !blocks {
            let advice = "fp8 partial rows have a scale per 128 columns; use a multiple, or other partial rows".into();
            return Err(config("hidden", self.hidden, advice));
        }
        if let (Some(0), _) | (Some(1), DeviceKind::Cpu) = (self.sms, self.device_kind()) {
            return Err(config("sms", self.sms.unwrap_or(0), "the CPU device needs two blocks, a GPU one".into()));
        }
        Ok(())
    }

    fn device_kind(&self) -> DeviceKind {
        self.device.as_ref().map_or(DeviceKind::Cpu, Device::kind)
    }
}

pub(crate) fn config(name: &'static str, value: impl ToString, advice: String) -> Error {
    Error::Config { name, value: value.to_string(), advice }
}

fn within(name: &'static str, value: usize, low: usize, high: usize, unit: &str) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(config(name, value, format!("use {low} to {high} {unit}")))
}
