//! Words of the command line: each set of alternatives, with the names that are given, printed and replayed.
//!
//! Before the data path; pure functions on any thread.

use tokenyard::internals::base::Dtype;

use super::inputs::ScaleKind;

/// A choice among words.
pub trait Word: Copy + PartialEq + 'static {
    /// All words, in the order in which they are listed.
    const ALL: &'static [Self];
    /// The word.
    fn name(self) -> &'static str;
}

/// Reads one of the words; the error lists all.
pub fn word<T: Word>(text: &str) -> Result<T, String> {
    let found = T::ALL.iter().find(|w| w.name() == text).copied();
    found.ok_or_else(|| format!("give {}", alternatives(T::ALL)))
}

/// "a, b or c".
pub fn alternatives<T: Word>(words: &[T]) -> String {
    let names: Vec<&str> = words.iter().map(|w| w.name()).collect();
    match names.as_slice() {
        [] => String::new(),
        [one] => (*one).to_string(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

macro_rules! words {
    ($($(#[$doc:meta])* $name:ident { $($variant:ident = $text:literal),+ $(,)? })+) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $(#[doc = $text] $variant),+ }
        impl Word for $name {
            const ALL: &'static [Self] = &[$($name::$variant),+];
            fn name(self) -> &'static str {
                match self { $($name::$variant => $text),+ }
            }
        }
    )+ };
}

words! {
    /// What the ranks run on.
    DeviceWord { Cpu = "cpu", Cuda = "cuda" }
    /// How ranks come to be.
    Launch { Threads = "threads", Processes = "processes", Env = "env" }
    /// How the CPU device is scheduled.
    WorldMode { OneThread = "one-thread", Threads = "threads" }
    /// How dispatch and combine are called.
    Mode { Fused = "fused", Split = "split", Graph = "graph", Counts = "counts" }
    /// Layout of dispatched rows.
    LayoutWord { Contiguous = "contiguous", Masked = "masked", Token = "token" }
    /// Type of partial rows on the way: the combine dtype, or another.
    PartialWord { Same = "same", Fp32 = "fp32", Fp8 = "fp8" }
    /// Whether calls go on without missing ranks: no; they would; or one is missing.
    MissingWord { No = "no", Able = "able", One = "one" }
    /// When the router's weights are given.
    WeightsWord { Dispatch = "dispatch", Combine = "combine", None = "none" }
    /// Type of the entries of topk_idx; with ranks a token names ranks, not experts.
    IndexWord { I32 = "i32", I64 = "i64", Ranks = "ranks" }
    /// Order of a table, of scales in or out, of choices and weights: by rows or by columns.
    OrderWord { Row = "row", Column = "column" }
    /// How experts are placed on ranks.
    PlacementWord { Even = "even", Table = "table" }
    /// Planned faults: an output that is too small or routing that is refused, each in one iteration and on one rank;
    /// or messages between nodes that are tampered with.
    FaultWord { None = "none", Overflow = "overflow", Routing = "routing", Forged = "forged" }
    /// Where arenas lie: in the GPUs' memory, or in the host's.
    ArenaWord { Device = "device", Host = "host" }
    /// What carries bytes between nodes.
    TransportWord { Sim = "sim", Tcp = "libfabric:tcp", Shm = "libfabric:shm", Efa = "libfabric:efa", Verbs = "verbs" }
    /// How the simulated network behaves: as well as it can, or as badly as it may.
    NetworkWord { Calm = "calm", Hostile = "hostile" }
    /// Assumptions of a projection, each of which can be switched off.
    Assumption {
        ArrivalList = "arrival-list", MetadataAhead = "meta-ahead", EarlySums = "early-sums",
        SpreadMetadata = "spread-meta",
    }
}

impl Mode {
    /// Whether calls have halves. With `Counts` the host learns the counts between those of dispatch, and outputs have
    /// exactly as many rows as they need.
    pub fn is_split(self) -> bool {
        matches!(self, Mode::Split | Mode::Counts)
    }
}

impl Word for Dtype {
    const ALL: &'static [Dtype] = &[Dtype::Fp8E4m3, Dtype::Bf16, Dtype::Fp16, Dtype::Fp32];
    fn name(self) -> &'static str {
        self.name()
    }
}

impl Word for ScaleKind {
    const ALL: &'static [ScaleKind] = &[ScaleKind::None, ScaleKind::F32, ScaleKind::Ue8m0];
    fn name(self) -> &'static str {
        match self {
            ScaleKind::None => "none",
            ScaleKind::F32 => "f32",
            ScaleKind::Ue8m0 => "ue8m0",
        }
    }
}

/// Which iterations are compared with the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    All,
    First,
    /// Iterations whose number is a multiple.
    Every(usize),
}

impl Check {
    /// Whether iteration `i` is compared, counted from 0, warm-up included.
    pub fn covers(self, i: usize) -> bool {
        match self {
            Check::All => true,
            Check::First => i == 0,
            Check::Every(n) => i.is_multiple_of(n.max(1)),
        }
    }
}

/// Types that combine can sum: all but fp8.
pub const SUMMED: &[Dtype] = &[Dtype::Bf16, Dtype::Fp16, Dtype::Fp32];

/// Reads the type of experts' rows or of combine's output.
pub fn summed(text: &str) -> Result<Dtype, String> {
    let found = SUMMED.iter().find(|d| d.name() == text).copied();
    found.ok_or_else(|| format!("give {}", alternatives(SUMMED)))
}

/// Reads the scales of fp8 rows.
pub fn scale_kind(text: &str) -> Result<ScaleKind, String> {
    let given = &ScaleKind::ALL[1..];
    let found = given.iter().find(|s| s.name() == text).copied();
    found.ok_or_else(|| format!("give {}", alternatives(given)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_are_printed_and_others_name_the_alternatives() {
        for mode in Mode::ALL {
            assert_eq!(word::<Mode>(mode.name()), Ok(*mode));
        }
        assert_eq!(word::<Mode>("eager"), Err("give fused, split, graph or counts".to_string()));
        assert_eq!(summed("fp8"), Err("give bf16, fp16 or fp32".to_string()));
        assert_eq!(scale_kind("none"), Err("give f32 or ue8m0".to_string()));
    }

    #[test]
    fn iterations_are_compared_as_asked_for() {
        let covered = |check: Check| (0..9).filter(|i| check.covers(*i)).collect::<Vec<usize>>();
        assert_eq!(covered(Check::All), (0..9).collect::<Vec<usize>>());
        assert_eq!((covered(Check::First), covered(Check::Every(4))), (vec![0], vec![0, 4, 8]));
    }
}
