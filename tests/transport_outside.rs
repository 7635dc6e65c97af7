//! A network that somebody else writes: everything that it and a proxy need is at the crate's root.

mod rig;

#[path = "transport_outside/loopback.rs"]
mod loopback;

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use loopback::Loopback;
use rig::{Rig, on_ranks};
use tokenyard::network::Transport;
use tokenyard::{AnyTransport, Liveness, Proxy, ProxyConfig, Rank, Result, ThreadConfig, World};

fn config() -> ProxyConfig {
    ProxyConfig { liveness: Liveness::default(), thread: ThreadConfig { core: None, spinners: 8 } }
}

/// Several calls of two contexts between nodes of the given sizes.
fn use_it(world: World, network: &Loopback, nodes: &[usize]) {
    let world = world.with_nodes(nodes).unwrap();
    let endpoint: AnyTransport = Box::new(network.endpoint(world.rank()));
    let proxy = Proxy::spawn(&world, endpoint, config()).unwrap();
    for round in 0..2 {
        let rig = Rig::with(&world, |builder| builder.proxy(&proxy));
        (0..4).for_each(|salt| rig.good_round(salt + 4 * round));
        world.barrier("used").unwrap();
    }
}

#[test]
fn contexts_between_nodes_over_a_network_of_somebody_else() {
    let network = Loopback::default();
    on_ranks(2, |world| use_it(world, &network, &[1, 1]));
    let network = Loopback::default();
    on_ranks(3, |world| use_it(world, &network, &[2, 1]));
}

/// Neither the world's collectives nor the network are the crate's.
#[test]
fn contexts_between_nodes_over_an_all_gather_and_a_network_of_somebody_else() {
    const RANKS: usize = 3;
    let network = Loopback::default();
    let (parts, barrier) = (Arc::new(Mutex::new(vec![Vec::new(); RANKS])), Arc::new(Barrier::new(RANKS)));
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (parts, barrier, network) = (parts.clone(), barrier.clone(), &network);
            let gather = move |_: &str, own: &[u8], _: Duration| -> Result<Vec<Vec<u8>>> {
                parts.lock().unwrap()[rank] = own.to_vec();
                barrier.wait();
                let all = parts.lock().unwrap().clone();
                barrier.wait();
                Ok(all)
            };
            scope.spawn(move || use_it(World::over(rank, RANKS, None, gather).unwrap(), network, &[2, 1]));
        }
    });
}

#[test]
fn what_the_loopback_refuses() {
    let network = Loopback::default();
    let mut endpoint = network.endpoint(Rank(0));
    assert!(endpoint.connect(Rank(1), &endpoint.address()).is_err(), "the address of another rank");
    assert!(endpoint.connect(Rank(0), b"?").is_err());
    assert!(endpoint.deregister(tokenyard::network::RegionId(0)).is_err());
}
