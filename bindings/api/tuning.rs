//! Optional settings of a context, each documented at its field.

use super::format::Partial;
use crate::base::{Error, Result};
use crate::transport::memory::gdr::GdrCopy;
use std::ffi::OsString;

/// With several nodes: the largest arena, in bytes, in which received rows and partial rows are kept twice.
const DOUBLE_BUFFER_BYTES: u64 = 256 << 20;

/// Where a context's arena lies: the memory that node peers store into and that the network reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum ArenaPlace {
    /// In the GPU's own memory if the network between nodes reaches it, else in host memory.
    #[default]
    Auto,
    /// In the GPU's own memory.
    Device,
    /// In host memory, which GPUs reach over PCIe. Slow; for networks that cannot reach GPU memory.
    Host,
}

impl ArenaPlace {
    /// Where it lies on a GPU, by whether the network needs host memory.
    pub(super) fn on_gpu(self, needs_host: bool) -> ArenaPlace {
        match self {
            ArenaPlace::Auto if needs_host => ArenaPlace::Host,
            ArenaPlace::Auto => ArenaPlace::Device,
            given => given,
        }
    }
}

/// Further settings of a context, changed through [`AllToAllBuilder::tuning`](super::AllToAllBuilder::tuning). Their
/// defaults suit most uses. Later versions may add settings, so there is no literal of them:
///
/// ```compile_fail,E0639
/// # use tokenyard::Tuning;
/// fn more_handles(tuning: Tuning) -> Tuning {
///     Tuning { handles: 8, ..tuning }
/// }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Tuning {
    /// Format in which partial rows travel. Default [`Partial::Same`].
    ///
    /// [`Partial::Fp8`]: each block of 128 columns becomes e4m3 elements with one fp32 scale, computed as by
    /// [`quantize`](super::AllToAllBuilder::quantize) with fp32 scales. The rank that adds the row multiplies elements
    /// by the scale. All of it is fp32 arithmetic with one rounding per operation. The hidden size must be a multiple
    /// of 128. With amax the largest magnitude of the block's sums, at least 1e-4, the error of an element x is at most
    /// |x| / 16 or amax / 458000, whichever is larger, per transfer: one transfer to the source rank or to a rail, and
    /// one more between nodes.
    pub partial: Partial,
    /// Most words of a token's side payload in combine ([`Payload`](super::Payload)): K of summed payloads, top_k times
    /// K of gathered ones, at most 4096. Partial rows have room for them, and are [`Partial::Same`]. Default: 0, and no
    /// combine has a payload.
    pub payload_words: usize,
    /// Most words of a token's side payload in dispatch ([`TokenPayload`](super::TokenPayload)), at most 4096. Rows in
    /// the arena and in messages have room for them. It is a setting apart from [`payload_words`](Self::payload_words)
    /// since each takes memory of its own. Default: 0, and no dispatch has a payload.
    pub dispatch_payload_words: usize,
    /// In-place output `(rows, align)`: an output in the context's arena, the same on all ranks. It has `rows` rows in
    /// the contiguous layout, each expert's first row at a multiple of `align` rows, and row-major scales. Peers store
    /// a row directly at the place of its first expert, and the arena has no receive buffer for rows. Each of eight
    /// ranks moves less than half the bytes that it moves otherwise. But no row leaves before all counts have arrived.
    /// For large calls with few SMs (docs/notebook.md, "In-place output"). Default: none.
    ///
    /// Every [`dispatch`](super::AllToAll::dispatch) then writes to [`AllToAll::in_place`](super::AllToAll::in_place),
    /// whose rows stay until the next dispatch begins. Calls have no halves. For worlds of one node of at most 32
    /// ranks, without quantisation.
    pub in_place: Option<(usize, usize)>,
    /// Tokens of each rank in a round. A call of a larger context is sent in rounds, one launch each. Every call takes
    /// as many rounds as `max_tokens_per_rank` needs, at most 4096. The arena has room for rows and partial rows of one
    /// round. Default: all tokens in one round; with several nodes the rounds are halved until the arena is within 2
    /// GiB or a round has at most 256 tokens. With several rounds a call's input must stay until the receiving half is
    /// done.
    pub round_tokens: Option<usize>,
    /// Whether a token may name an expert several times; the same on all ranks. Each time is a choice of its own, with
    /// its own weight, which counts in the sum: two rows in the expert-major layouts, in the order of the choices; in
    /// the token layout one row with the expert's number twice. An output then needs up to ranks · tokens · top_k rows
    /// ([`Layout`](super::Layout)), tokens · top_k of a rank is at most 2^20, and a rank holds at most 1364 experts, or
    /// 818 if top_k is more than 15. Default: no, and such a token is refused with `Routing`.
    pub duplicates: bool,
    /// Which replica this rank's tokens take, `[logical experts, slots]` row by row: slots is a power of two up to
    /// 4096, and each entry is a [replica](super::Placement::replicas) of its row's expert. Token t takes the entry of
    /// slot floor((t · 2 654 435 769 mod 2^32) · slots / 2^32). Replicas on ranks that are no longer in the world get
    /// nothing. Ranks may differ. Default: the table that
    /// [`Placement::replicas`](super::Placement::replicas) describes.
    pub replica_table: Option<Vec<u32>>,
    /// Handles allocated when the context is built, 1 to 1024: one for each dispatch that is alive at the same time.
    /// More are allocated on demand, but not while a stream captures: a recorded dispatch takes an allocated handle
    /// that is free, or is refused with `Argument`. Its graph keeps that handle, also after the
    /// [`Handle`](super::Handle) is dropped. So give at least the dispatches that all graphs record, plus the handles
    /// that are alive beside them; see also [`handle_rows`](Self::handle_rows). Default: 4.
    pub handles: usize,
    /// Whether handles are compact: each then has 4 bytes for each token of each rank, and 8 bytes for each row of its
    /// dispatch's output, instead of 8 bytes for each choice of each token of each rank. Ranks may differ. Outputs then
    /// have at most 2^26 - 1 rows. Default: yes where the latter would be more than 1 MiB, or 4 MiB in one node, and
    /// four times what rows of uniform routing take. Combine looks up one choice of a token after the other, which
    /// takes long where a rank gets many choices of each token, and calls of one node with compact handles take general
    /// kernels.
    pub compact_handles: Option<bool>,
    /// Output rows for which the compact handles of [`handles`](Self::handles) have room when the context is built. A
    /// dispatch into a larger output allocates memory for its handle and all free ones, which on a GPU may wait for
    /// kernels under way. While a stream captures it is refused with `Argument` instead. So give the rows of the
    /// largest output where calls are captured without a call before, or wait for later calls of their own rank.
    /// Default: the rows that a rank gets of `max_tokens_per_rank` tokens of each rank if all experts get as many, and
    /// an eighth more.
    pub handle_rows: Option<usize>,
    /// Whether the device records when its blocks complete each stage of a call, and when each rank's counts or flag
    /// arrives; see [`AllToAll::dispatch_statistics`](super::AllToAll::dispatch_statistics). Costs a few stores to host
    /// memory per block. Default: off.
    pub statistics: bool,
    /// Where the arena lies. Default: [`ArenaPlace::Auto`]. The CPU device ignores this: its arena is host memory. The
    /// arenas of all ranks lie alike.
    pub arena: ArenaPlace,
    /// Whether GPU and proxy share flags in GPU memory, through GDRCopy. Default: the value of `TOKENYARD_GDRCOPY`, or
    /// `Auto` if unset. The CPU device ignores this: its flags lie in host memory. Ranks may differ.
    pub gdrcopy: Option<GdrCopy>,
    /// Rows of a chunk between nodes: a message is posted chunk by chunk, each as soon as it is packed. Default: the
    /// rows of 128 KiB, rounded up, or of 640 KiB for combine with several NICs. The default is larger if the rows of a
    /// message would otherwise need more than 1023 chunks, or the context more than a quarter of the network's
    /// receives. [`build`](super::AllToAllBuilder::build) refuses a context that needs more receives than the other
    /// contexts of its proxy leave.
    pub chunk_rows: Option<usize>,
    /// With several nodes: the largest arena, in bytes, in which received rows and partial rows are kept twice; the
    /// same on all ranks. With two copies no call waits until peers have read the rows of the call before (2.3 µs on
    /// H200s). Default: 256 MiB, enough for 128 tokens of DeepSeek-V3 on up to 32 ranks in nodes of 8. 0: always one
    /// copy.
    pub double_buffer_bytes: u64,
    /// With one node: largest number of tokens of a rank in a round with which partial rows are LL rows; the same on
    /// all ranks. In an LL row each word carries its own arrival flag (a word that is not 0 has arrived), so no fence
    /// and no tag follows the row. The source rank zeroes the words after reading them. With few blocks, or with many
    /// tokens on few ranks, zeroing takes longer than the fence. Default: 256, or 0 (never) if any rank has at most 48
    /// blocks.
    pub ll_tokens: Option<usize>,
    /// Most tokens whose routing metadata (see docs/design.md) one block builds: rounded up to a multiple of 32, and at
    /// most as many as fit in shared memory. Other blocks build the routing metadata of further tokens; in a call of
    /// one node that has more tokens each builds that of half as many if there are blocks for it. Default: 256.
    pub meta_tile: Option<usize>,
    /// Whether the device detects launches of this context that overlap, once another library's capture has recorded
    /// calls of it. The caller orders that library's replays
    /// ([`stream_from_raw`](crate::Device::stream_from_raw)); this finds replays that nothing orders. They end in
    /// `Order`, which closes the context. All calls then take general kernels: 3 µs more for a call of 128 tokens.
    /// Ranks may differ. Default: yes if `TOKENYARD_DETECT_OVERLAPS` is `1`, else no.
    pub detect_overlaps: Option<bool>,
    /// Number of the first [epoch](crate::Error#epochs), the same on all ranks. At most 2^42, and its low 32 bits are
    /// neither 0 nor 2^32 - 1. Default 1; tests start just below 2^32 to see flags wrap.
    pub first_epoch: u64,
    /// Whether a call on another stream than the last call of its kind waits for that call. Default: yes. No is for
    /// tests of the device's own check.
    #[doc(hidden)]
    pub ordered: bool,
}

/// Whether contexts detect overlaps that do not say.
const DETECT_OVERLAPS: &str = "TOKENYARD_DETECT_OVERLAPS";

impl Tuning {
    /// `detect_overlaps`, by the environment where it is not given.
    ///
    /// # Errors
    /// `Config` for anything in the environment but 0, 1 and nothing.
    pub(super) fn detects_overlaps(&self) -> Result<bool> {
        self.detect_overlaps.map_or_else(|| detects(std::env::var_os(DETECT_OVERLAPS)), Ok)
    }
}

fn detects(value: Option<OsString>) -> Result<bool> {
    match value.as_ref().map(|value| value.to_str()) {
        None | Some(Some("" | "0")) => Ok(false),
        Some(Some("1")) => Ok(true),
        _ => Err(Error::config(DETECT_OVERLAPS, format!("{:?}", value.unwrap_or_default()), "set it to 0 or 1")),
    }
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            partial: Partial::Same,
            payload_words: 0,
            dispatch_payload_words: 0,
            in_place: None,
            round_tokens: None,
            duplicates: false,
            replica_table: None,
            handles: 4,
            compact_handles: None,
            handle_rows: None,
            statistics: false,
            arena: ArenaPlace::Auto,
            gdrcopy: None,
            chunk_rows: None,
            double_buffer_bytes: DOUBLE_BUFFER_BYTES,
            ll_tokens: None,
            meta_tile: None,
            detect_overlaps: None,
            first_epoch: 1,
            ordered: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_detected_where_the_context_or_the_environment_says_so() {
        let given = |value: &str| detects(Some(value.into()));
        assert_eq!([given(""), given("0"), given("1")].map(Result::unwrap), [false, false, true]);
        assert!(!detects(None).unwrap());
        let refused = given("yes").unwrap_err().to_string();
        assert!(
            refused.starts_with("configuration TOKENYARD_DETECT_OVERLAPS is \"yes\"") && refused.contains("0 or 1"),
            "{refused}"
        );
        let stated = Tuning { detect_overlaps: Some(true), ..Tuning::default() };
        assert!(stated.detects_overlaps().unwrap());
    }

    #[test]
    fn an_arena_lies_where_the_network_reaches_it_unless_its_place_is_given() {
        use ArenaPlace::{Auto, Device, Host};
        let placed = [(Auto, true), (Auto, false), (Device, true), (Host, false)].map(|(at, host)| at.on_gpu(host));
        assert_eq!(placed, [Host, Device, Device, Host]);
    }
}
