//! A simulated network of one process, which reorders as much as its interface allows.
//!
//! Place in the data path: where libfabric or verbs would be. It copies payloads into registered memory packet by
//! packet, in any order and at any moment, and hands out the immediate only when all packets have been placed. It does
//! everything that the promises of the [network](super) leave open: chances, queues and speeds are a [`SimConfig`]'s,
//! every draw comes from its seed, and every disturbance is counted.
//!
//! It runs in two ways. With [`Clock::Virtual`] and all ranks on one thread (or its host fibers), all events follow
//! from the seed and from the calls; [`Network::trace_hash`] of two such runs is equal. With [`Clock::Real`] (or
//! virtual ticks) ranks are threads, and no two runs are alike. The network has no thread of its own: whoever polls
//! moves everyone's packets, under one lock. Unlike a real backend, it allocates and locks in `post` and `poll`; it
//! never blocks, and makes no callbacks while it holds the lock.
//!
//! ```text
//!  SimEndpoint ── post, send ──▶ State (state.rs): admitted? room? reachable? ──▶ Flight in its slot
//!       ▲                                                                           │ launch
//!       └── poll ── EndpointState (endpoint_state.rs) ◀── Due steps, by time (traffic.rs) ◀──────┘
//!                                                           └──▶ bytes move (memory.rs)
//! ```

mod config;
mod counts;
mod endpoint_state;
mod flight;
mod memory;
pub mod models;
mod process;
mod random;
mod state;
mod traffic;

pub use config::{Clock, DeadPeers, LinkModel, SimConfig};
pub use counts::Counts;
pub use process::{ProcessEndpoint, Refused};

use super::address::{self, Address};
use super::imm::MAX_RANKS;
use super::{DeviceNeeds, Event, Limits, Posted, RegionId, Released, Span, Transport, WriteImm};
use crate::base::{Error, Rank, Result};
use endpoint_state::Pending;
use state::State;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Virtual time ends here, after some hundred days: enough, and far from overflowing.
const END_NS: u64 = 1 << 53;

/// A network of some ranks. Clones share it.
#[derive(Debug, Clone)]
pub struct Network {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    number: u64,
    ranks: usize,
    nics: usize,
    limits: Limits,
    clock: Clock,
    poll_batch: usize,
    start: Instant,
    state: Mutex<State>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, with the clock set if it is the real one.
    fn state_now(&self) -> MutexGuard<'_, State> {
        let mut state = self.state();
        if self.clock == Clock::Real {
            state.now_ns = state.now_ns.max(self.start.elapsed().as_nanos() as u64);
        }
        state
    }
}

impl Network {
    /// A network without endpoints yet.
    ///
    /// # Errors
    /// `Config` if a setting makes no sense.
    pub fn new(ranks: usize, config: SimConfig) -> Result<Network> {
        config.check()?;
        if ranks == 0 || ranks > MAX_RANKS {
            let advice = format!("give 1 to {MAX_RANKS}");
            return Err(Error::config("ranks", ranks, advice));
        }
        let nics = config.nics.len();
        log::info!(target: crate::base::targets::NETWORK, "simulated in this process: {ranks} ranks, {nics} NICs each");
        let shared = Shared {
            number: address::number(),
            ranks,
            nics: config.nics.len(),
            limits: config.limits(),
            clock: config.clock,
            poll_batch: config.poll_batch,
            start: Instant::now(),
            state: Mutex::new(State::new(ranks, config)),
        };
        Ok(Network { shared: Arc::new(shared) })
    }

    /// The endpoint of a rank that has none, or whose last was dropped or killed.
    ///
    /// # Errors
    /// `Argument` if the rank is outside the world or has one.
    pub fn endpoint(&self, rank: Rank) -> Result<SimEndpoint> {
        let Some(life) = self.shared.state().add_endpoint(rank) else {
            let advice = format!("take one endpoint for each of the {} ranks", self.shared.ranks);
            return Err(Error::argument("rank", rank, advice));
        };
        Ok(SimEndpoint { network: self.clone(), rank, life, batch: Vec::new() })
    }

    /// The network's time.
    pub fn now_ns(&self) -> u64 {
        self.shared.state_now().now_ns
    }

    /// Lets virtual time pass, and executes the steps that are due by then. With the real clock: those due by now.
    pub fn advance_ns(&self, by_ns: u64) {
        let mut state = self.shared.state_now();
        let by_ns = if self.shared.clock == Clock::Real { 0 } else { by_ns };
        let to_ns = state.now_ns.saturating_add(by_ns).min(END_NS);
        state.run_until(to_ns);
    }

    /// When the next step is due, if nobody posts anything: how far a simulation may leap.
    pub fn next_due_ns(&self) -> Option<u64> {
        self.shared.state().next_due_ns()
    }

    /// Counts of events so far.
    pub fn counts(&self) -> Counts {
        self.shared.state().counts
    }

    /// A hash of all events: when, between which ranks, in which order.
    pub fn trace_hash(&self) -> u64 {
        self.shared.state().trace
    }

    /// Stops one NIC of a rank: for that time nothing leaves or reaches it.
    pub fn stop(&self, rank: Rank, nic: u8, for_ns: u64) {
        self.shared.state_now().stop(rank, usize::from(nic), for_ns);
    }

    /// Makes the next `count` writes that a rank posts fail.
    pub fn fail_next(&self, rank: Rank, count: u32) {
        if let Some(endpoint) = self.shared.state().endpoints.get_mut(rank.index()) {
            endpoint.fail_next = count;
        }
    }

    /// Kills a rank's endpoint, as if its process ended at this moment: its memory is touched no more, and its calls
    /// answer errors from now on. Its peers are not notified.
    pub fn kill(&self, rank: Rank) {
        self.shared.state_now().kill(rank);
    }
}

/// A rank's endpoint in a simulated network.
#[derive(Debug)]
pub struct SimEndpoint {
    network: Network,
    rank: Rank,
    life: u64,
    /// The events of the present poll.
    batch: Vec<Pending>,
}

impl SimEndpoint {
    /// Its rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The network's state, as long as this endpoint is its rank's.
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.network.shared.state_now();
        let endpoint = &state.endpoints[self.rank.index()];
        if endpoint.alive && endpoint.life == self.life {
            return Ok(state);
        }
        Err(Error::transport(
            format!("endpoint of rank {} was killed", self.rank),
            "take a new endpoint, and let its peers connect to it",
        )
        .ending())
    }

    fn address_now(&self) -> Result<Address> {
        let state = self.state()?;
        let endpoint = &state.endpoints[self.rank.index()];
        Ok(Address {
            network: self.network.shared.number,
            key: endpoint.key,
            rank: self.rank,
            nics: self.network.shared.nics as u32,
            regions: endpoint.regions.lengths(),
        })
    }
}

impl Transport for SimEndpoint {
    fn nics(&self) -> usize {
        self.network.shared.nics
    }

    fn limits(&self) -> Limits {
        self.network.shared.limits
    }

    fn device_needs(&self) -> DeviceNeeds {
        DeviceNeeds { host_memory: true, ..DeviceNeeds::default() }
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        self.state()?.endpoints[self.rank.index()].regions.register_host(span)
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        self.state()?.deregister(self.rank, region)
    }

    fn address(&mut self, _peer: Rank) -> Result<Vec<u8>> {
        self.address_now().map(|address| address.encode())
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        let mut state = self.state()?;
        let outcome = Address::decode(address).and_then(|address| match address {
            Address { network, .. } if network != self.network.shared.number => Err("is of another network"),
            Address { rank, .. } if rank != peer => Err("is of another rank"),
            address => state.connect(self.rank, address),
        });
        outcome.map_err(|why| {
            Error::transport(
                format!("address of rank {peer} ({} bytes) {why}", address.len()),
                "exchange the addresses anew, with the same version of tokenyard on all ranks",
            )
        })
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.state()?.post(self.rank, write)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.state()?.send(self.rank, peer, message)
    }

    fn flush(&mut self) -> Result<()> {
        self.state()?.flush(self.rank);
        Ok(())
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        let mut state = self.state()?;
        let tick_ns = match self.network.shared.clock {
            Clock::Virtual { tick_ns } => tick_ns,
            Clock::Real => 0,
        };
        let now_ns = state.now_ns.saturating_add(tick_ns).min(END_NS);
        state.flush(self.rank);
        state.run_until(now_ns);
        state.exchange_notices(self.rank);
        let endpoint = &mut state.endpoints[self.rank.index()];
        batch.extend(std::iter::from_fn(|| endpoint.take()).take(self.network.shared.poll_batch));
        drop(state);
        for pending in &batch {
            on_event(pending.event());
        }
        self.batch = batch;
        Ok(self.batch.len())
    }

    fn reset(&mut self) -> Result<()> {
        self.state()?.reset(self.rank);
        Ok(())
    }
}

impl Drop for SimEndpoint {
    fn drop(&mut self) {
        if let Ok(mut state) = self.state() {
            state.kill(self.rank);
        }
    }
}

#[cfg(test)]
mod tests;
