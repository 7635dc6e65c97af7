//! Arenas: one span of memory for each rank, into which its node peers store.
//!
//! Place in the data path: beside it. An arena is made and mapped while a context is built; afterwards kernels
//! store through the addresses found here and nothing of this module runs. Runs on the caller's thread or host
//! fiber and waits only in the world's collectives. It never touches an arena's contents after zeroing it, and
//! never maps memory of a rank of another node.
//!
//! ```text
//!             ranks of one process                    ranks that are processes
//!   CPU       the peer's own mapping, shared          memfd, passed over Unix sockets, mapped here
//!   GPU       the peer's address; the owner grants    exported as a descriptor, passed likewise,
//!             every GPU of the node access            imported and mapped for this rank's GPU
//!   GPU, host the peer's own mapping, registered      memfd as for the CPU, mapped here and registered
//!   memory    once for all GPUs of the process        for this rank's GPU
//! ```

#[cfg(feature = "cuda")]
mod cuda;
pub mod gdr;
mod gdrcopy_sys;
mod host;
#[cfg(feature = "cuda")]
mod pinned;

use super::network::{Span, SpanMemory};
use super::world::World;
use crate::base::{Error, Rank, Result, quoted};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// The memory of an arena.
#[derive(Debug)]
enum Memory {
    Host(host::HostMemory),
    #[cfg(feature = "cuda")]
    Cuda(cuda::CudaMemory),
    #[cfg(feature = "cuda")]
    Pinned(pinned::PinnedMemory),
}

impl Memory {
    /// Its address on the device for which it was made or imported.
    fn base(&self) -> u64 {
        match self {
            Memory::Host(memory) => memory.base(),
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.base(),
            #[cfg(feature = "cuda")]
            Memory::Pinned(memory) => memory.base(),
        }
    }

    /// The span that networks register.
    fn span(&self, bytes: usize) -> Span {
        match self {
            Memory::Host(memory) => Span::host(memory.base(), bytes),
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => Span {
                base: memory.base(),
                bytes,
                memory: SpanMemory::Gpu { ordinal: memory.ordinal(), allocation: memory.allocation() },
            },
            #[cfg(feature = "cuda")]
            Memory::Pinned(memory) => Span::host(memory.host_base(), bytes),
        }
    }

    /// Its address on the device of `viewer`, of this process.
    fn seen_by(&self, viewer: &Memory) -> Result<u64> {
        match (self, viewer) {
            #[cfg(feature = "cuda")]
            (Memory::Pinned(memory), Memory::Pinned(viewer)) => memory.seen_by(viewer),
            (memory, _) => Ok(memory.base()),
        }
    }
}

/// One rank's memory, zeroed when made; unmapped and freed when the last map that holds it is dropped.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<Memory>,
    bytes: usize,
}

impl Arena {
    /// Host memory for the CPU device, which other processes can map.
    pub fn cpu(bytes: usize) -> Result<Arena> {
        check_bytes(bytes)?;
        Ok(Arena { memory: Arc::new(Memory::Host(host::HostMemory::create(bytes)?)), bytes })
    }

    /// Memory of GPU `ordinal`, which other GPUs and processes can map.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: usize, bytes: usize) -> Result<Arena> {
        check_bytes(bytes)?;
        Ok(Arena { memory: Arc::new(Memory::Cuda(cuda::CudaMemory::create(ordinal, bytes)?)), bytes })
    }

    /// Memory of GPU `ordinal`: an error, as this build has no GPU part.
    #[cfg(not(feature = "cuda"))]
    pub fn cuda(ordinal: usize, bytes: usize) -> Result<Arena> {
        check_bytes(bytes)?;
        Err(no_gpu_part(format!("an arena on GPU {ordinal}")))
    }

    /// Host memory that GPU `ordinal` reaches over PCIe, and so do other GPUs and processes.
    #[cfg(feature = "cuda")]
    pub fn cuda_host(ordinal: usize, bytes: usize) -> Result<Arena> {
        check_bytes(bytes)?;
        Ok(Arena { memory: Arc::new(Memory::Pinned(pinned::PinnedMemory::create(ordinal, bytes)?)), bytes })
    }

    /// Host memory for GPU `ordinal`: an error, as this build has no GPU part.
    #[cfg(not(feature = "cuda"))]
    pub fn cuda_host(ordinal: usize, bytes: usize) -> Result<Arena> {
        Arena::cuda(ordinal, bytes)
    }

    /// Length in bytes, as asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its address on its own device.
    pub fn base(&self) -> u64 {
        self.memory.base()
    }

    /// The span that networks register: all of the arena. Its address is this process's for host memory, and the GPU's
    /// for GPU memory.
    pub fn span(&self) -> Span {
        self.memory.span(self.bytes)
    }

    /// Lets every GPU of this process that can reach it store into it: for networks whose own kernels move bytes
    /// between GPUs. That gives nobody its address; see [`PeerMap::base_of`].
    ///
    /// # Errors
    /// `Device` if the driver refuses.
    pub fn grant_process(&self) -> Result<()> {
        match &*self.memory {
            // Host memory needs no grant.
            Memory::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.grant_all(),
            #[cfg(feature = "cuda")]
            Memory::Pinned(_) => Ok(()),
        }
    }

    /// A descriptor by which another process can map it.
    fn export(&self) -> Result<Handle<'_>> {
        match &*self.memory {
            Memory::Host(memory) => Ok(Handle::Lent(memory.fd())),
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.export().map(Handle::Made),
            #[cfg(feature = "cuda")]
            Memory::Pinned(memory) => Ok(Handle::Lent(memory.fd())),
        }
    }

    /// Maps a peer's memory, for the device of this arena.
    fn import(&self, fd: OwnedFd, card: &Card) -> Result<Memory> {
        match &*self.memory {
            Memory::Host(_) => host::HostMemory::import(fd, self.bytes).map(Memory::Host),
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.import(fd, card.bus_id()).map(Memory::Cuda),
            #[cfg(feature = "cuda")]
            Memory::Pinned(memory) => memory.import(fd, self.bytes).map(Memory::Pinned),
        }
        .map_err(|why| {
            let mut why = why;
            if let Error::Device { what, .. } = &mut why {
                *what = format!("{what} (memory of {})", card.place());
            }
            why
        })
    }

    fn card(&self, ticket: u64, shareable: bool) -> Card {
        let (kind, ordinal, bus_id) = match &*self.memory {
            Memory::Host(_) => (Kind::Host, 0, [0; BUS_ID_BYTES]),
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => (Kind::Cuda, memory.ordinal() as u32, memory.bus_id()),
            #[cfg(feature = "cuda")]
            Memory::Pinned(memory) => (Kind::Pinned, memory.ordinal() as u32, memory.bus_id()),
        };
        Card { kind, shareable, ordinal, bytes: self.bytes as u64, ticket, bus_id }
    }
}

/// A descriptor of an allocation of GPU memory, by which NICs reach it, and where in it a span begins. **Unstable**, as
/// [`network`](super::network) is.
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor to register (`ibv_reg_dmabuf_mr`, `FI_MR_DMABUF`); it may be closed once that is done.
    pub fd: OwnedFd,
    /// Bytes from the start of the dma-buf to the span.
    pub offset: u64,
}

/// Which way a dma-buf's memory is reached. **Unstable**, as [`network`](super::network) is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaBufMapping {
    /// The driver's choice.
    Usual,
    /// Over PCIe, also where the GPU has a link of its own to the processor: what NICs with data direct need. Drivers
    /// of CUDA 12.8 and later make it.
    Pcie,
}

/// Makes a dma-buf of the whole allocation of a span of GPU memory, for backends whose NICs reach GPU memory.
/// **Unstable**, as [`network`](super::network) is: it was not tested with a NIC so far, since none was available.
///
/// # Errors
/// `Argument` for host memory, which is registered by its address; `Device` if the GPU or its driver makes none.
pub fn dma_buf(span: &Span, mapping: DmaBufMapping) -> Result<DmaBuf> {
    match span.memory {
        #[cfg(feature = "cuda")]
        SpanMemory::Gpu { ordinal, allocation } => {
            Ok(DmaBuf { offset: span.offset_in(allocation)?, fd: cuda::dma_buf(ordinal, allocation, mapping)? })
        }
        #[cfg(not(feature = "cuda"))]
        SpanMemory::Gpu { ordinal, allocation } => {
            span.offset_in(allocation)?;
            Err(no_gpu_part(format!("a dma-buf of memory of GPU {ordinal} by {mapping:?} mapping")))
        }
        SpanMemory::Host => Err(Error::argument("span", "host memory", "register host memory by its address")),
    }
}

/// What a GPU offers to NICs. **Unstable**, as [`network`](super::network) is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuDirect {
    /// Its PCI address, such as `0000:1b:00.0`.
    pub pci: String,
    /// Whether devices can reach its memory at all.
    pub supported: bool,
    /// Whether kernels of this GPU see what NICs write in the order in which it arrives; otherwise a read by the NIC
    /// has to flush it.
    pub ordered: bool,
}

/// What GPU `ordinal` offers to NICs. Source: `GPU_DIRECT_RDMA_SUPPORTED` and `GPU_DIRECT_RDMA_WRITES_ORDERING` of
/// `CUdevice_attribute` in the CUDA driver's interface.
///
/// # Errors
/// `Device` if there is no such GPU, or this build has no GPU part.
pub fn gpu_direct(ordinal: usize) -> Result<GpuDirect> {
    #[cfg(feature = "cuda")]
    return cuda::gpu_direct(ordinal);
    #[cfg(not(feature = "cuda"))]
    Err(no_gpu_part(format!("what GPU {ordinal} offers to NICs")))
}

#[cfg(not(feature = "cuda"))]
fn no_gpu_part(what: String) -> Error {
    Error::device(
        format!("{what} was asked for and this build has no GPU part"),
        "build with the feature cuda, or use the CPU device",
    )
}

enum Handle<'a> {
    Lent(BorrowedFd<'a>),
    #[cfg(feature = "cuda")]
    Made(OwnedFd),
}

impl AsFd for Handle<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Handle::Lent(fd) => *fd,
            #[cfg(feature = "cuda")]
            Handle::Made(fd) => fd.as_fd(),
        }
    }
}

fn check_bytes(bytes: usize) -> Result<()> {
    if bytes > 0 && isize::try_from(bytes).is_ok() {
        return Ok(());
    }
    Err(Error::argument("bytes", bytes, "take an arena's length from the plan"))
}

/// What errors call a rank of the world.
fn named(world: &World, rank: usize) -> Rank {
    world.original(Rank(rank as u32))
}

fn mismatch(what: String, advice: &str) -> Error {
    Error::transport(what, advice)
}

/// The arenas of this rank's node as its device sees them. Keeps all of them mapped.
#[derive(Debug)]
pub struct PeerMap {
    own: Arena,
    bases: Vec<u64>,
    _peers: Vec<Arc<Memory>>,
}

impl PeerMap {
    /// Collective: makes every rank's arena reachable from every rank of its node, or fails on all of them.
    pub fn establish(world: &World, arena: Arena) -> Result<PeerMap> {
        let ticket = Ticket::issue(&arena.memory);
        let handle = if world.same_process() { None } else { Some(arena.export()) };
        let shareable = handle.as_ref().is_none_or(Result::is_ok);
        let cards = world.all_gather("arena cards", &arena.card(ticket.number, shareable).encode())?;
        let cards = read_cards(world, &cards)?;
        let mapped = match handle {
            None => map_within(world, &arena, &cards),
            // All cards are shareable: see read_cards.
            Some(handle) => map_between(world, &arena, handle?.as_fd(), &cards)?,
        };
        let peers = agree(world, mapped)?;
        drop(ticket);
        let own = world.rank().index();
        let (name, bytes) = (world.original(world.rank()), arena.bytes());
        let mapped = peers.iter().flatten().count();
        log::debug!(target: crate::base::targets::MEMORY, "rank {name}: {bytes} bytes, {mapped} of peers mapped");
        let base = |(rank, peer): (usize, &Option<Mapped>)| match peer {
            _ if rank == own => arena.base(),
            Some(peer) => peer.base,
            None => 0,
        };
        let bases = peers.iter().enumerate().map(base).collect();
        Ok(PeerMap { own: arena, bases, _peers: peers.into_iter().flatten().map(|peer| peer.memory).collect() })
    }

    /// The address of `peer`'s arena on this rank's device; 0 for a rank of another node or
    /// outside the world.
    pub fn base_of(&self, peer: Rank) -> u64 {
        self.bases.get(peer.index()).copied().unwrap_or(0)
    }

    /// This rank's own arena.
    pub fn own(&self) -> &Arena {
        &self.own
    }
}

/// Memory of a rank of the node, and its address on this rank's device.
struct Mapped {
    base: u64,
    memory: Arc<Memory>,
}

/// Mapped memory of all ranks of the node, by rank in the world.
type Node = Vec<Option<Mapped>>;

/// Memory of the node where all ranks are in this process.
fn map_within(world: &World, arena: &Arena, cards: &[Card]) -> Result<Node> {
    #[cfg(feature = "cuda")]
    if let Memory::Cuda(memory) = &*arena.memory {
        memory.grant(world.node_peers().filter_map(|rank| Some(cards.get(rank)?.ordinal as usize)))?;
    }
    let peer = |(rank, card): (usize, &Card)| {
        if rank == world.rank().index() {
            return Ok(Some(mapped(arena.memory.clone())));
        }
        if !world.node_peers().contains(&rank) {
            return Ok(None);
        }
        let gone =
            || mismatch(format!("the arena of rank {} is gone", named(world, rank)), "see why that rank gave up");
        let memory = Ticket::redeem(card.ticket).ok_or_else(gone)?;
        Ok(Some(Mapped { base: memory.seen_by(&arena.memory)?, memory }))
    };
    cards.iter().enumerate().map(peer).collect()
}

/// Memory that was made or imported for this rank's device.
fn mapped(memory: Arc<Memory>) -> Mapped {
    Mapped { base: memory.base(), memory }
}

/// Memory of the node where ranks are processes. The outer error is the world's, which all ranks see.
fn map_between(world: &World, arena: &Arena, own: BorrowedFd<'_>, cards: &[Card]) -> Result<Result<Node>> {
    let fds = world.exchange_fds(own)?;
    let peer = |(rank, (card, fd)): (usize, (&Card, Option<OwnedFd>))| match fd {
        Some(fd) => arena.import(fd, card).map(|memory| Some(mapped(Arc::new(memory)))),
        None if rank == world.rank().index() => Ok(Some(mapped(arena.memory.clone()))),
        None if !world.node_peers().contains(&rank) => Ok(None),
        None => Err(mismatch(
            format!("rank {} passed no descriptor of its arena", named(world, rank)),
            "run the ranks of a node on one host",
        )),
    };
    Ok(cards.iter().zip(fds).enumerate().map(peer).collect())
}

/// Collective: if any rank could not map, all fail: that rank with its reason, the others with an error naming it.
fn agree<T>(world: &World, outcome: Result<T>) -> Result<T> {
    let reason = outcome.as_ref().err().map(Error::text_for_peers).unwrap_or_default();
    let all = world.all_gather("arenas mapped", reason.as_bytes())?;
    let value = outcome?;
    match all.iter().position(|text| !text.is_empty()) {
        None => Ok(value),
        Some(rank) => Err(mismatch(
            format!("rank {} could not map the arenas: {}", named(world, rank), quoted(&all[rank])),
            "mend it there and start all ranks again",
        )),
    }
}

/// Decodes the cards and refuses combinations that cannot work. All ranks see the same cards, so all decide alike.
fn read_cards(world: &World, cards: &[Vec<u8>]) -> Result<Vec<Card>> {
    let decode = |(rank, bytes): (usize, &Vec<u8>)| {
        let name = named(world, rank);
        let what = match read_u32(bytes, 0) {
            Some(version) if version != Card::VERSION => {
                format!(
                    "rank {name} described its arena in version {version} of the form, and this rank has {}",
                    Card::VERSION
                )
            }
            _ => format!("rank {name} described its arena in an unknown form"),
        };
        Card::decode(bytes).ok_or_else(|| mismatch(what, SAME_VERSION))
    };
    let cards: Vec<Card> = cards.iter().enumerate().map(decode).collect::<Result<_>>()?;
    for (rank, card) in cards.iter().enumerate() {
        let (first, root, name) = (&cards[0], named(world, 0), named(world, rank));
        if card.kind != first.kind {
            return Err(mismatch(
                format!("rank {name} is on {} and rank {root} on {}", card.place(), first.place()),
                "use one kind of device on all ranks, and one place for their arenas",
            ));
        }
        if card.bytes != first.bytes {
            return Err(mismatch(
                format!("the arena of rank {name} has {} bytes and that of rank {root} {}", card.bytes, first.bytes),
                "build all ranks with equal settings",
            ));
        }
        if !card.shareable {
            return Err(mismatch(
                format!("the memory of rank {name}, on {}, cannot be shared between processes", card.place()),
                "allow its container to export GPU memory, or run all ranks in one process",
            ));
        }
    }
    Ok(cards)
}

const SAME_VERSION: &str = "run the same version of tokenyard on all ranks";
const BUS_ID_BYTES: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Host,
    Cuda,
    /// Host memory, registered with GPUs.
    Pinned,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Kind::Host => 0,
            Kind::Cuda => 1,
            Kind::Pinned => 2,
        }
    }

    fn of(code: u8) -> Option<Kind> {
        [Kind::Host, Kind::Cuda, Kind::Pinned].into_iter().find(|kind| kind.code() == code)
    }
}

/// What ranks send each other about their arenas, little end first:
///
/// ```text
/// byte  0        4      5           6..8   8         12..16  16      24       32        48
///       version  kind   shareable   zero   ordinal   zero    bytes   ticket   bus id
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Card {
    kind: Kind,
    shareable: bool,
    ordinal: u32,
    bytes: u64,
    /// Finds the memory in its own process.
    ticket: u64,
    bus_id: [u8; BUS_ID_BYTES],
}

impl Card {
    const VERSION: u32 = 1;
    const BYTES: usize = 48;

    fn encode(&self) -> [u8; Card::BYTES] {
        let mut out = [0; Card::BYTES];
        out[0..4].copy_from_slice(&Card::VERSION.to_le_bytes());
        out[4] = self.kind.code();
        out[5] = u8::from(self.shareable);
        out[8..12].copy_from_slice(&self.ordinal.to_le_bytes());
        out[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        out[24..32].copy_from_slice(&self.ticket.to_le_bytes());
        out[32..48].copy_from_slice(&self.bus_id);
        out
    }

    fn decode(bytes: &[u8]) -> Option<Card> {
        let bytes: &[u8; Card::BYTES] = bytes.try_into().ok()?;
        if read_u32(bytes, 0)? != Card::VERSION {
            return None;
        }
        // The bytes that are drawn as zero.
        if bytes[6..8] != [0; 2] || bytes[12..16] != [0; 4] {
            return None;
        }
        Some(Card {
            kind: Kind::of(bytes[4])?,
            shareable: bytes[5] == 1,
            ordinal: read_u32(bytes, 8)?,
            bytes: read_u64(bytes, 16)?,
            ticket: read_u64(bytes, 24)?,
            bus_id: bytes[32..48].try_into().ok()?,
        })
    }

    /// The PCI address of a GPU, as text.
    fn bus_id(&self) -> &str {
        let text = self.bus_id.split(|byte| *byte == 0).next().unwrap_or_default();
        std::str::from_utf8(text).unwrap_or_default()
    }

    fn place(&self) -> String {
        match self.kind {
            Kind::Host => "the CPU device".into(),
            Kind::Cuda => format!("GPU {} ({})", self.ordinal, quoted(self.bus_id().as_bytes())),
            Kind::Pinned => format!("host memory of GPU {} ({})", self.ordinal, quoted(self.bus_id().as_bytes())),
        }
    }
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// A number under which ranks of this process find an arena while it is being mapped.
struct Ticket {
    number: u64,
}

impl Ticket {
    fn table() -> &'static Mutex<HashMap<u64, Weak<Memory>>> {
        static TABLE: OnceLock<Mutex<HashMap<u64, Weak<Memory>>>> = OnceLock::new();
        TABLE.get_or_init(Mutex::default)
    }

    fn issue(memory: &Arc<Memory>) -> Ticket {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut table = Self::table().lock().unwrap_or_else(PoisonError::into_inner);
        table.insert(number, Arc::downgrade(memory));
        Ticket { number }
    }

    fn redeem(number: u64) -> Option<Arc<Memory>> {
        let table = Self::table().lock().unwrap_or_else(PoisonError::into_inner);
        table.get(&number).and_then(Weak::upgrade)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        Self::table().lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> Card {
        let mut bus_id = [0; BUS_ID_BYTES];
        bus_id[..12].copy_from_slice(b"0000:1b:00.0");
        Card { kind: Kind::Cuda, shareable: true, ordinal: 3, bytes: 1 << 30, ticket: 7, bus_id }
    }

    #[test]
    fn cards_survive_the_wire_and_other_bytes_do_not() {
        let bytes = card().encode();
        assert_eq!(Card::decode(&bytes), Some(card()));
        assert_eq!(card().bus_id(), "0000:1b:00.0");
        assert_eq!(Card::decode(&bytes[..47]), None);
        let mut other_version = bytes;
        other_version[0] = 9;
        assert_eq!(Card::decode(&other_version), None);
        let mut other_kind = bytes;
        other_kind[4] = 3;
        assert_eq!(Card::decode(&other_kind), None);
        let pinned = Card { kind: Kind::Pinned, ..card() };
        assert_eq!(Card::decode(&pinned.encode()), Some(pinned));
    }

    /// The cards of two ranks as rank 0 reads them, of which rank 1's was changed.
    fn read_changed(change: impl FnOnce(&mut Vec<u8>)) -> Result<Vec<Card>> {
        let mut cards = [card().encode().to_vec(), card().encode().to_vec()];
        change(&mut cards[1]);
        read_cards(&World::threads(2).unwrap()[0], &cards)
    }

    #[test]
    fn every_field_of_a_card_that_ranks_must_agree_on_is_compared() {
        type Change = fn(&mut Vec<u8>);
        let Card { kind: Kind::Cuda, shareable: true, ordinal: 3, bytes: 0x4000_0000, ticket: 7, bus_id: _ } = card()
        else {
            panic!("{:?}", card());
        };
        read_changed(|_| ()).unwrap();
        let unknown = "rank 1 described its arena in an unknown form";
        let refused: [(&str, Change, &str); 9] = [
            ("version", |card| card[0] = 2, "rank 1 described its arena in version 2 of the form, and this rank has 1"),
            (
                "version",
                |card| card[3] = 1,
                "rank 1 described its arena in version 16777217 of the form, and this rank has 1",
            ),
            ("kind", |card| card[4] = 3, unknown),
            ("kind", |card| card[4] = 0, "rank 1 is on the CPU device and rank 0 on GPU 3 (0000:1b:00.0)"),
            ("kind", |card| card[4] = 2, "rank 1 is on host memory of GPU 3 (0000:1b:00.0) and rank 0 on GPU 3"),
            ("shareable", |card| card[5] = 0, "the memory of rank 1, on GPU 3 (0000:1b:00.0), cannot be shared"),
            ("bytes", |card| card[16] = 9, "the arena of rank 1 has 1073741833 bytes and that of rank 0 1073741824"),
            ("bytes", |card| card[23] = 1, "has 72057595111669760 bytes and that of rank 0 1073741824"),
            ("length", |card| card.push(0), unknown),
        ];
        for (field, change, expected) in refused {
            let text = read_changed(change).unwrap_err().to_string();
            assert!(text.contains(expected), "{field}: {text}");
        }
        for bytes in 0..Card::BYTES {
            let text = read_changed(|card| card.truncate(bytes)).unwrap_err().to_string();
            assert!(text.contains(unknown), "{bytes} bytes: {text}");
        }
        // Each rank has its own.
        let own: [(&str, Change); 3] =
            [("ordinal", |card| card[8] = 5), ("ticket", |card| card[24] = 9), ("bus id", |card| card[32] = b'1')];
        for (field, change) in own {
            let cards = read_changed(change).unwrap();
            assert_ne!(cards[1], cards[0], "{field} is not read");
        }
    }

    #[test]
    fn a_bus_id_of_control_characters_is_shown_in_one_line() {
        let text = read_changed(|card| {
            card[5] = 0;
            card[32..41].copy_from_slice(b"\x1b[31m\r\n\x07\0");
        });
        let text = text.unwrap_err().to_string();
        assert!(!text.contains(char::is_control) && text.contains(r"GPU 3 (\u{1b}[31m\r\n\u{7})"), "{text:?}");
        let text = read_changed(|card| (card[5], card[32]) = (0, 0xff)).unwrap_err().to_string();
        assert!(text.contains("rank 1, on GPU 3 ("), "{text:?}");
    }

    #[test]
    fn arenas_of_unequal_length_are_refused_on_every_rank() {
        let other = Card { bytes: 4096, ..card() };
        let why = read_cards(&World::threads(2).unwrap()[0], &[card().encode().to_vec(), other.encode().to_vec()])
            .unwrap_err();
        assert!(why.to_string().contains("rank 1 has 4096 bytes"), "{why}");
    }

    #[test]
    fn arenas_in_different_places_are_refused_on_every_rank() {
        let other = Card { kind: Kind::Pinned, ..card() };
        let why = read_cards(&World::threads(2).unwrap()[0], &[card().encode().to_vec(), other.encode().to_vec()])
            .unwrap_err();
        assert!(why.to_string().contains("rank 1 is on host memory of GPU 3"), "{why}");
    }

    #[test]
    fn threads_store_into_each_others_arenas() {
        let worlds = World::threads(3).unwrap();
        std::thread::scope(|scope| {
            for world in worlds {
                scope.spawn(move || {
                    let map = PeerMap::establish(&world, Arena::cpu(5000).unwrap()).unwrap();
                    let own = world.rank();
                    assert_eq!(map.base_of(own), map.own().base());
                    assert_eq!(map.base_of(Rank(3)), 0);
                    for peer in 0..3 {
                        let slot = map.base_of(Rank(peer)) + u64::from(own.0);
                        // SAFETY: inside the peer's arena, a byte of this rank alone.
                        unsafe { *(slot as *mut u8) += own.0 as u8 + 1 };
                    }
                    world.barrier("stored").unwrap();
                    // SAFETY: inside the own arena; nobody writes after the barrier.
                    let seen = unsafe { std::slice::from_raw_parts(map.own().base() as *const u8, 4) };
                    assert_eq!(seen, [1, 2, 3, 0]);
                });
            }
        });
    }

    #[test]
    fn memory_of_other_nodes_is_not_mapped() {
        let worlds = World::threads(3).unwrap();
        std::thread::scope(|scope| {
            for world in worlds {
                scope.spawn(move || {
                    let world = world.with_nodes(&[2, 1]).unwrap();
                    let map = PeerMap::establish(&world, Arena::cpu(5000).unwrap()).unwrap();
                    for rank in 0..3 {
                        assert_eq!(map.base_of(Rank(rank)) != 0, (rank < 2) == (world.rank().0 < 2));
                    }
                });
            }
        });
    }

    #[test]
    fn arena_outlives_its_owners_map_while_a_peer_holds_it() {
        let worlds = World::threads(2).unwrap();
        std::thread::scope(|scope| {
            for world in worlds {
                scope.spawn(move || {
                    let map = PeerMap::establish(&world, Arena::cpu(100).unwrap()).unwrap();
                    if world.rank() == Rank(0) {
                        drop(map);
                        world.barrier("dropped").unwrap();
                    } else {
                        world.barrier("dropped").unwrap();
                        // SAFETY: this map keeps the peer's arena.
                        assert_eq!(unsafe { *(map.base_of(Rank(0)) as *const u8) }, 0);
                    }
                });
            }
        });
    }

    #[test]
    fn impossible_lengths_are_refused_in_a_sentence() {
        assert!(Arena::cpu(0).is_err());
        assert!(Arena::cpu(usize::MAX).is_err());
        let why = Arena::cpu(isize::MAX as usize / 2).unwrap_err().to_string();
        assert!(why.contains("bytes"), "{why}");
    }
}
