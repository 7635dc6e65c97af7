//! Worlds of several nodes in one process, over a simulated network.

use std::time::Duration;

use tokenyard::internals::proxy::driver::ThreadConfig;
use tokenyard::internals::proxy::machine::Liveness;
use tokenyard::internals::transport::network::sim::{Clock, Network, SimConfig};
use tokenyard::*;

use super::Rig;

/// Of any wait on the device.
pub const DEADLINE: Duration = Duration::from_secs(3);

/// A network that delays, reorders and refuses.
pub fn network(ranks: usize, seed: u64) -> Network {
    Network::new(ranks, SimConfig { clock: Clock::Real, ..SimConfig::hostile(seed) }).unwrap()
}

/// A proxy whose peers are lost after so long a silence.
pub fn proxy(network: &Network, world: &World, silence_ms: u64) -> Proxy {
    let liveness = Liveness { silence_ns: silence_ms * 1_000_000, ..Liveness::default() };
    let endpoint = network.endpoint(world.original(world.rank())).unwrap();
    let thread = ThreadConfig { core: None, spinners: 64 };
    Proxy::spawn(world, Box::new(endpoint), ProxyConfig { liveness, thread }).unwrap()
}

/// Messages of a row a chunk.
pub fn rig(world: &World, proxy: &Proxy) -> Rig {
    Rig::with(world, |builder| builder.proxy(proxy).tuning(|t| t.chunk_rows = Some(1)).timeout(DEADLINE))
}

/// Runs `body` as every rank of a world whose nodes have these sizes.
pub fn on_nodes(sizes: &[usize], body: impl Fn(World, &Network) + Sync) {
    let ranks = sizes.iter().sum();
    on_network(&network(ranks, 7), ranks, sizes, body);
}

/// The same over a given network.
pub fn on_network(network: &Network, ranks: usize, sizes: &[usize], body: impl Fn(World, &Network) + Sync) {
    std::thread::scope(|scope| {
        for world in World::threads(ranks).unwrap() {
            let body = &body;
            scope.spawn(move || body(world.with_nodes(sizes).unwrap(), network));
        }
    });
}
