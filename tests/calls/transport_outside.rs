//! A network that somebody else writes: everything that it and a proxy need is at the crate's root.

use crate::rig;

pub mod loopback;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use loopback::Loopback;
use rig::{Rig, builder, on_ranks, test_device};
use tokenyard::network::{
    DeviceNeeds, Event, Limits, MAX_ADDRESS, Posted, RegionId, Released, Span, Transport, WriteImm,
};
use tokenyard::{AnyTransport, Error, Liveness, Proxy, ProxyConfig, Rank, Result, ThreadConfig, World};

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

/// An endpoint whose texts are longer than can be gathered.
struct Wordy {
    inner: loopback::Endpoint,
    /// Bytes of its address (the first 12 are needed); then of its refusals to register and to connect.
    address: Arc<AtomicUsize>,
    register: Arc<AtomicUsize>,
    connect: Arc<AtomicUsize>,
}

/// Fails with so long a text.
fn at_length(bytes: &AtomicUsize) -> Result<()> {
    match bytes.load(Ordering::Relaxed) {
        0 => Ok(()),
        bytes => Err(Error::transport("word ".repeat(bytes / 5), "be brief")),
    }
}

impl Transport for Wordy {
    fn nics(&self) -> usize {
        self.inner.nics()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn device_needs(&self) -> DeviceNeeds {
        self.inner.device_needs()
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        at_length(&self.register)?;
        // SAFETY: passed on to the caller.
        unsafe { self.inner.register(span) }
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        self.inner.deregister(region)
    }

    fn address(&mut self, peer: Rank) -> Result<Vec<u8>> {
        let mut address = self.inner.address(peer)?;
        address.resize(self.address.load(Ordering::Relaxed).max(address.len()), 0);
        Ok(address)
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        at_length(&self.connect)?;
        self.inner.connect(peer, address.get(..12).unwrap_or_default())
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.inner.post(write)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.inner.send(peer, message)
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        self.inner.poll(on_event)
    }

    fn reset(&mut self) -> Result<()> {
        self.inner.reset()
    }
}

#[test]
fn an_endpoint_with_more_text_than_can_be_gathered_is_refused_on_all_ranks_with_the_reason() {
    const LONG: usize = 70_000_000;
    let network = Loopback::default();
    on_ranks(3, |world| {
        let world = world.with_nodes(&[2, 1]).unwrap();
        let [address, register, connect] = [(); 3].map(|()| Arc::new(AtomicUsize::new(0)));
        let inner = network.endpoint(world.rank());
        let knobs = [address.clone(), register.clone(), connect.clone()];
        let proxy = Proxy::spawn(&world, Box::new(Wordy { inner, address, register, connect }), config()).unwrap();
        let build = || builder(&world, &test_device(&world)).proxy(&proxy).build().map(drop);
        let wordy = world.rank() == Rank(1);
        // Which text is how long, and a part of the error.
        let cases = [
            (0, LONG, "endpoint of rank 1 has an address of 70000000 bytes for rank"),
            (0, MAX_ADDRESS + 1, "endpoint of rank 1 has an address of 65537 bytes for rank"),
            (1, LONG, "word word"),
            (2, LONG, "word word"),
        ];
        for (knob, bytes, why) in cases {
            knobs[knob].store(if wordy { bytes } else { 0 }, Ordering::Relaxed);
            let error = build().unwrap_err();
            let text = error.to_string();
            assert!(text.contains(why) && !error.is_fatal(), "{}", text.get(..400).unwrap_or(&text));
            if wordy {
                assert!(matches!(error, Error::Transport { .. }));
            } else {
                assert!(matches!(error, Error::Bootstrap { .. }) && text.contains("mend rank 1"), "{:.400}", text);
                assert!(text.len() < 5000, "{} bytes", text.len());
            }
            knobs[knob].store(0, Ordering::Relaxed);
        }
        knobs[0].store(MAX_ADDRESS, Ordering::Relaxed);
        let rig = Rig::with(&world, |builder| builder.proxy(&proxy));
        (0..2).for_each(|salt| rig.good_round(salt));
        world.barrier("used").unwrap();
    });
}

#[test]
fn what_the_loopback_refuses() {
    let network = Loopback::default();
    let mut endpoint = network.endpoint(Rank(0));
    let own = endpoint.address(Rank(1)).unwrap();
    assert!(endpoint.connect(Rank(1), &own).is_err(), "the address of another rank");
    assert!(endpoint.connect(Rank(0), b"?").is_err());
    assert!(endpoint.deregister(tokenyard::network::RegionId(0)).is_err());
}
