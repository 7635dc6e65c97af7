//! The library's endpoint over the double of EFA, whose packets go through shared memory.
//!
//! The double opens the way to a peer at the first write, which takes system calls. Afterwards it looks from time to
//! time whether a peer's process lives; a setting puts that off. So every way is used once before a thread is guarded.
//! The proxies begin under the guard.

use super::device::{Device, Offence, Shared};
use super::guard;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokenyard::internals::transport::network::imm::ImmValue;
use tokenyard::internals::transport::network::libfabric::{LibfabricConfig, LibfabricEndpoint};
use tokenyard::internals::transport::network::{
    Event, Failure, Limits, Place, Posted, RegionId, Released, Span, Transport, WriteImm,
};
use tokenyard::{Rank, Result};

/// Settings of the double: the longest time until it looks for a peer's process.
pub const SETTINGS: [(&str, &str); 1] = [("TOKENYARD_EFA_UNREACHABLE_MS", "4000000000")];
/// So few that the endpoint is full at times.
const PEER_POSTS: u32 = 4;
/// Bytes of an arena, which has all that the wire's plan places.
const ARENA: usize = 4 << 20;

/// One rank's endpoint and device.
pub struct Endpoint {
    inner: LibfabricEndpoint,
    pub device: Device,
}

/// The two endpoints, connected, each with an arena as region 0, and without contexts yet.
pub fn pair(shared: &Arc<Shared>, nics: u8, last: u64, offence: Offence) -> [Endpoint; 2] {
    let mut config = LibfabricConfig::new("efa");
    (config.nics, config.peer_posts) = (nics.into(), PEER_POSTS);
    let mut endpoints = [0, 1].map(|rank| {
        let mut inner = LibfabricEndpoint::open(Rank(rank), config.clone()).unwrap();
        let arena = vec![0u64; ARENA / 8].leak();
        let span = Span::host(arena.as_mut_ptr() as u64, ARENA);
        // SAFETY: leaked memory that nothing else refers to.
        assert_eq!(unsafe { inner.register(span) }, Ok(RegionId(0)));
        Endpoint { inner, device: Device::new(shared, rank as usize, last, offence) }
    });
    let [one, two] = &mut endpoints;
    one.inner.connect(Rank(1), &two.inner.address(Rank(0)).unwrap()).unwrap();
    two.inner.connect(Rank(0), &one.inner.address(Rank(1)).unwrap()).unwrap();
    use_every_way(&mut endpoints, nics);
    endpoints
}

/// A write by each NIC, and a message, each way.
fn use_every_way(endpoints: &mut [Endpoint; 2], nics: u8) {
    let place = Place { region: RegionId(0), offset: 0 };
    let imm = ImmValue::user(0, 0, 1).unwrap();
    for (peer, endpoint) in [Rank(1), Rank(0)].into_iter().zip(endpoints.iter_mut()) {
        for nic in 0..nics {
            let write = WriteImm { nic, peer, source: place, target: place, bytes: 8, imm, token: nic.into() };
            assert_eq!(endpoint.inner.post(&write), Ok(Posted::Accepted));
        }
        assert_eq!(endpoint.inner.send(peer, &[7; 12]), Ok(Posted::Accepted));
        endpoint.inner.flush().unwrap();
    }
    let (begin, mut events) = (Instant::now(), 0);
    while events < 2 * (2 * usize::from(nics) + 1) {
        assert!(begin.elapsed() < super::PATIENCE, "{events} events of the first writes and messages");
        for endpoint in endpoints.iter_mut() {
            endpoint.inner.poll(&mut |event| events += usize::from(!matches!(event, Event::Failed { .. }))).unwrap();
        }
    }
}

impl Transport for Endpoint {
    fn nics(&self) -> usize {
        self.inner.nics()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        // SAFETY: as the caller promises.
        unsafe { self.inner.register(span) }
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        self.inner.deregister(region)
    }

    fn address(&mut self, peer: Rank) -> Result<Vec<u8>> {
        self.inner.address(peer)
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        self.inner.connect(peer, address)
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        let posted = self.inner.post(write);
        let shared = &self.device.shared;
        let count = if posted == Ok(Posted::Full) { &shared.full } else { &shared.posts };
        count.fetch_add(1, Ordering::Relaxed);
        posted
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.inner.send(peer, message)
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        guard::begin_if_asked(self.device.shared.guarded.load(Ordering::Relaxed));
        let device = &self.device;
        let count = self.inner.poll(&mut |event| {
            device.note(&event);
            on_event(event);
        });
        self.device.step();
        count
    }

    fn explain(&self, failure: Failure) -> String {
        self.inner.explain(failure)
    }

    fn reset(&mut self) -> Result<()> {
        self.inner.reset()
    }
}
