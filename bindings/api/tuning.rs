//! Settings of a context that most do without: what each is for stands at its field.

use super::format::Partial;
use crate::transport::memory::gdr::GdrCopy;

/// Arenas up to which received rows and partial rows are kept twice, with several nodes.
const DOUBLE_BUFFER_BYTES: u64 = 256 << 20;

/// Where a context's arena lies: what node peers store into, and what the network reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ArenaPlace {
    /// In the GPU's own memory.
    #[default]
    Device,
    /// In host memory, which GPUs reach over PCIe: for networks that cannot reach the memory of GPUs. Slow.
    Host,
}

/// Settings of a context beyond those of [`AllToAllBuilder`](super::AllToAllBuilder), which hands them out to be
/// changed: [`tuning`](super::AllToAllBuilder::tuning). Their defaults are meant for everybody; later versions may have
/// more.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Tuning {
    /// What partial rows travel as. Default [`Partial::Same`].
    ///
    /// With [`Partial::Fp8`] each block of 128 columns becomes e4m3 elements with one fp32 scale, as a block with fp32
    /// scales does that [`quantize`](super::AllToAllBuilder::quantize) makes, and whoever adds the row multiplies
    /// elements with scale, all of it fp32 arithmetic with one rounding an operation. It needs a hidden size that is a
    /// multiple of 128. Where amax is the largest magnitude of the block's sums, and 1e-4 at least, an element x is off
    /// by at most |x| / 16 or amax / 458000, whichever is larger, on each way that it goes: home or to a rail, and
    /// between nodes once more.
    pub partial: Partial,
    /// Gives the context an output in its arena, the same on all ranks: `rows` rows in the contiguous layout, starts of
    /// experts at multiples of `align` rows, scales row by row. Peers then store a row where its first expert wants it,
    /// and no inbox lies between: of eight ranks each moves less than half of what it does otherwise, and the arena
    /// lacks the inbox. But no row leaves before all counts are here. For large calls with few multiprocessors
    /// (docs/performance.md, "Rows stored in place"). Default: none.
    ///
    /// Every [`dispatch`](super::AllToAll::dispatch) then goes to
    /// [`AllToAll::own_output`](super::AllToAll::own_output), whose rows are there until the next one begins; calls are
    /// not split. In worlds of one node of at most 32 ranks, without quantisation.
    pub own_output: Option<(usize, usize)>,
    /// Tokens of each rank that a call sends at once; a larger call goes in waves of so many, a launch each, and always
    /// in as many as `max_tokens_per_rank` needs, which must be no more than 4096. Rows' and partial rows' places in
    /// the arena are for one wave alone. Default: all of them; with several nodes no more than keep the arena within
    /// 2 GiB. With several waves a call's halves need its input until the receiving half is through.
    pub wave_tokens: Option<usize>,
    /// Handles whose memory is allocated when the context is built: those of dispatches that are alive at once. More
    /// are allocated on demand, but not while a stream captures: a recorded dispatch takes a handle that is allocated
    /// and free, or is refused with `Argument`. Its graph keeps that handle, also once the [`Handle`](super::Handle) is
    /// dropped. So give at least the dispatches that all graphs record, and the handles that are alive beside them.
    /// Default: 4.
    pub handles: usize,
    /// Has the device write down when its blocks come through each stage of a call, and whom it heard of when; see
    /// [`AllToAll::dispatch_statistics`](super::AllToAll::dispatch_statistics). Default: off. It costs a few stores to
    /// host memory a block.
    pub statistics: bool,
    /// Where the arena lies. Default: in the GPU's own memory; the CPU device's is host memory whatever is given here.
    pub arena: ArenaPlace,
    /// Whether GPU and proxy share flags in the GPU's memory, by way of GDRCopy. Default: as `TOKENYARD_GDRCOPY` says,
    /// and `Auto` where it says nothing. The CPU device's flags lie in plain memory whatever is given here. Ranks may
    /// differ.
    pub gdrcopy: Option<GdrCopy>,
    /// Rows of a chunk between nodes: a message is posted chunk by chunk, as each is packed. Default: 128 KiB, or 640
    /// KiB of combine where there are several NICs, and more where rows of a message would be more than 1023 chunks, or
    /// the context need more than a quarter of the network's receives. [`build`](super::AllToAllBuilder::build) refuses
    /// a context that needs more than the others of its proxy leave.
    pub chunk_rows: Option<usize>,
    /// With several nodes: received rows and partial rows are kept twice, so that no call waits until peers have read
    /// those of the call before (2.3 µs on H200s), where the arena then takes up to so many bytes; the same on all
    /// ranks. Default: 256 MiB, which 128 tokens of DeepSeek-V3 stay below with up to 32 ranks in nodes of 8. 0: always
    /// once.
    pub double_buffer_bytes: u64,
    /// With one node: where a wave has up to so many tokens of a rank, each word of a partial row tells that it has
    /// come, and neither fence nor tag stands behind the row; home leaves zeros in its place. Where blocks are few, or
    /// tokens many and ranks few, that takes longer than a fence; the same on all ranks. Default: 256, and 0, which is
    /// never, where a rank has at most 48 blocks.
    pub arriving_tokens: Option<usize>,
    /// Tokens whose META (see docs/design.md) one block builds, rounded up to a multiple of 32, and as many as shared
    /// memory has room for; of larger calls other blocks build that of the others. Default: 256.
    pub meta_tile: Option<usize>,
    /// Number of the first [epoch](crate::Error#epochs), the same on all ranks. Default 1; tests start just below 2^32
    /// to see flags wrap. Below 2^42, and with low 32 bits that are neither 0 nor 2^32 - 1.
    pub first_epoch: u64,
    /// Whether a call on another stream than the last of its direction waits for that one. Default: yes. No is for
    /// tests of what the device finds then.
    #[doc(hidden)]
    pub ordered: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            partial: Partial::Same,
            own_output: None,
            wave_tokens: None,
            handles: 4,
            statistics: false,
            arena: ArenaPlace::Device,
            gdrcopy: None,
            chunk_rows: None,
            double_buffer_bytes: DOUBLE_BUFFER_BYTES,
            arriving_tokens: None,
            meta_tile: None,
            first_epoch: 1,
            ordered: true,
        }
    }
}
