//! The two ways to write to the peer: this library's endpoint, and a bare loop over the same network.
//!
//! In the data path that is measured, on the main thread of each process. Each way has a region and an endpoint of its
//! own.

use tokenyard::internals::base::{Error, Rank, Result};
use tokenyard::internals::transport::network::imm::ImmValue;
use tokenyard::internals::transport::network::libfabric::{self, LibfabricConfig, LibfabricEndpoint};
use tokenyard::internals::transport::network::verbs::{self, VerbsConfig, VerbsEndpoint};
use tokenyard::internals::transport::network::{Event, Place, Posted, RegionId, Span, Transport, WriteImm};

/// Bytes of a region: several of the largest writes, so that one write's lines are not those of the one before.
pub const REGION_BYTES: usize = 8 << 20;

/// What polls of a way have seen of a slice: the leader may begin its next slice of the way before the follower has
/// left the last one.
#[derive(Debug, Default)]
pub struct Seen {
    /// Own writes that have completed.
    pub completed: u64,
    /// The peer's writes that have arrived, but for the last of a slice, by their immediates.
    pub arrived: u64,
    /// The immediate of the last, if it has arrived.
    pub last: Option<u32>,
}

/// Set in the immediate of the last write of a slice; the other bits are how many came before it.
pub const LAST: u32 = 1 << 31;

impl Seen {
    fn arrive(&mut self, imm: u32) {
        if imm & LAST == 0 {
            self.arrived += 1;
        } else {
            self.last = Some(imm & !LAST);
        }
    }
}

/// A way to write to the peer.
pub trait Way {
    /// Posts a write of so many bytes; false if there is no room.
    ///
    /// # Errors
    /// Of the network.
    fn post(&mut self, bytes: usize, imm: u32) -> Result<bool>;

    /// Hands over what was posted.
    ///
    /// # Errors
    /// Of the network.
    fn flush(&mut self) -> Result<()>;

    /// Takes in completions and arrivals.
    ///
    /// # Errors
    /// Of the network, and if a write failed.
    fn poll(&mut self, seen: &mut Seen) -> Result<()>;
}

/// Where the next write goes: through the region, and again.
#[derive(Debug, Default)]
struct Cursor(usize);

impl Cursor {
    fn next(&mut self, bytes: usize) -> usize {
        let at = if self.0 + bytes > REGION_BYTES { 0 } else { self.0 };
        self.0 = at + bytes.next_multiple_of(64);
        at
    }
}

/// A region's memory, with bytes that differ, as some networks treat zeros alike. Accessed by its address alone.
fn memory() -> Box<[u64]> {
    (0..REGION_BYTES as u64 / 8).map(|word| word.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect()
}

/// A network's settings, by which both ways are opened.
pub trait Network {
    /// This library's endpoint.
    type Endpoint: Transport;
    /// A bare loop.
    type Bare: Bare;

    /// Opens this library's endpoint.
    ///
    /// # Errors
    /// Of the network.
    fn endpoint(&self, rank: Rank) -> Result<Self::Endpoint>;

    /// Opens a bare loop with a region.
    ///
    /// # Errors
    /// Of the network.
    ///
    /// # Safety
    /// The span outlives the loop, and is accessed through raw addresses alone.
    unsafe fn bare(&self, rank: Rank, span: Span) -> Result<Self::Bare>;
}

/// A bare loop over a network: one peer and one region.
pub trait Bare {
    /// The address for the peer.
    ///
    /// # Errors
    /// Of the network.
    fn address(&self) -> Result<Vec<u8>>;

    /// Connects to the peer.
    ///
    /// # Errors
    /// Of the network.
    fn connect(&mut self, address: &[u8]) -> Result<()>;

    /// Posts a write with an immediate, from an offset of the region to the same offset; false if there is no room.
    ///
    /// # Errors
    /// Of the network.
    fn post(&mut self, offset: usize, bytes: usize, imm: u32) -> Result<bool>;

    /// Hands out each arrived immediate as `Some`, and each completed write as `None`.
    ///
    /// # Errors
    /// Of the network, and if a write failed.
    fn poll(&mut self, on_event: impl FnMut(Option<u32>)) -> Result<()>;
}

macro_rules! network {
    ($network:ident $config:ident $endpoint:ident, $bare:ident => $address:expr) => {
        impl Network for $config {
            type Endpoint = $endpoint;
            type Bare = $network::Bare;

            fn endpoint(&self, rank: Rank) -> Result<$endpoint> {
                $endpoint::open(rank, self.clone())
            }

            unsafe fn bare(&self, rank: Rank, span: Span) -> Result<$network::Bare> {
                // SAFETY: as the caller promises.
                unsafe { $network::Bare::open(rank, self, span) }
            }
        }

        impl Bare for $network::Bare {
            fn address(&self) -> Result<Vec<u8>> {
                let $bare = self;
                $address
            }

            fn connect(&mut self, address: &[u8]) -> Result<()> {
                self.connect(address)
            }

            fn post(&mut self, offset: usize, bytes: usize, imm: u32) -> Result<bool> {
                self.post(offset, bytes, imm)
            }

            fn poll(&mut self, on_event: impl FnMut(Option<u32>)) -> Result<()> {
                self.poll(on_event)
            }
        }
    };
}

network!(libfabric LibfabricConfig LibfabricEndpoint, bare => bare.address());
network!(verbs VerbsConfig VerbsEndpoint, bare => Ok(bare.address()));

/// This library's endpoint.
pub struct Own<E> {
    endpoint: E,
    peer: Rank,
    cursor: Cursor,
    /// Behind the endpoint, which uses it.
    _memory: Box<[u64]>,
}

impl<E: Transport> Own<E> {
    /// Opens an endpoint.
    ///
    /// # Errors
    /// Of the network.
    pub fn open(rank: Rank, network: &impl Network<Endpoint = E>) -> Result<Own<E>> {
        let mut endpoint = network.endpoint(rank)?;
        let mut memory = memory();
        let span = Span::host(memory.as_mut_ptr() as u64, REGION_BYTES);
        // SAFETY: the memory is dropped after the endpoint, and nothing else accesses it.
        unsafe { endpoint.register(span) }?;
        Ok(Own { endpoint, peer: Rank(1 - rank.0.min(1)), cursor: Cursor::default(), _memory: memory })
    }

    /// Its address for the peer.
    ///
    /// # Errors
    /// Of the network.
    pub fn address(&mut self) -> Result<Vec<u8>> {
        self.endpoint.address(self.peer)
    }

    /// Connects to the peer.
    ///
    /// # Errors
    /// Of the network.
    pub fn connect(&mut self, address: &[u8]) -> Result<()> {
        self.endpoint.connect(self.peer, address)
    }
}

impl<E: Transport> Way for Own<E> {
    fn post(&mut self, bytes: usize, imm: u32) -> Result<bool> {
        let place = Place { region: RegionId(0), offset: self.cursor.next(bytes) as u64 };
        let write = WriteImm {
            nic: 0,
            peer: self.peer,
            source: place,
            target: place,
            bytes: bytes as u32,
            imm: ImmValue::from_bits(imm),
            token: 0,
        };
        Ok(self.endpoint.post(&write)? == Posted::Accepted)
    }

    fn flush(&mut self) -> Result<()> {
        self.endpoint.flush()
    }

    fn poll(&mut self, seen: &mut Seen) -> Result<()> {
        let mut failed = None;
        self.endpoint.poll(&mut |event| match event {
            Event::Sent { .. } => seen.completed += 1,
            Event::Imm { imm } => seen.arrive(imm.bits()),
            Event::Failed { failure, .. } => failed = Some(failure),
            Event::Dropped { .. } | Event::Message { .. } => {}
        })?;
        match failed {
            None => Ok(()),
            Some(failure) => {
                let what = format!("a write failed: {failure} ({})", self.endpoint.explain(failure));
                Err(Error::transport(what, "see whether the peer still runs, and start again"))
            }
        }
    }
}

/// A bare loop.
pub struct BareWay<B> {
    endpoint: B,
    cursor: Cursor,
    /// Behind the endpoint, which uses it.
    _memory: Box<[u64]>,
}

impl<B: Bare> BareWay<B> {
    /// Opens an endpoint.
    ///
    /// # Errors
    /// Of the network.
    pub fn open(rank: Rank, network: &impl Network<Bare = B>) -> Result<BareWay<B>> {
        let mut memory = memory();
        let span = Span::host(memory.as_mut_ptr() as u64, REGION_BYTES);
        // SAFETY: the memory is dropped after the endpoint, and nothing else accesses it.
        let endpoint = unsafe { network.bare(rank, span) }?;
        Ok(BareWay { endpoint, cursor: Cursor::default(), _memory: memory })
    }

    /// Its address for the peer.
    ///
    /// # Errors
    /// Of the network.
    pub fn address(&self) -> Result<Vec<u8>> {
        self.endpoint.address()
    }

    /// Connects to the peer.
    ///
    /// # Errors
    /// Of the network.
    pub fn connect(&mut self, address: &[u8]) -> Result<()> {
        self.endpoint.connect(address)
    }
}

impl<B: Bare> Way for BareWay<B> {
    fn post(&mut self, bytes: usize, imm: u32) -> Result<bool> {
        let at = self.cursor.next(bytes);
        self.endpoint.post(at, bytes, imm)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, seen: &mut Seen) -> Result<()> {
        self.endpoint.poll(|event| match event {
            Some(imm) => seen.arrive(imm),
            None => seen.completed += 1,
        })
    }
}
