//! The proxy's state machine alone: every rank of a drawn world against a virtual network, clock and device.
//!
//! TOKENYARD_MACHINE_SEEDS: number of seeds (default 1500). TOKENYARD_MACHINE_SEED replays one.

mod device;
mod direct;
mod draw;
mod net;
mod universe;
mod world;

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use universe::{Totals, Universe};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

fn run_seed(seed: u64) -> Totals {
    catch_unwind(|| Universe::new(seed).run()).unwrap_or_else(|_| {
        panic!("seed {seed} fails; TOKENYARD_MACHINE_SEED={seed} cargo test --test proxy seeds replays it")
    })
}

#[test]
fn seeds() {
    if let Some(seed) = number("TOKENYARD_MACHINE_SEED") {
        println!("{:?}", run_seed(seed));
        return;
    }
    let seeds = number("TOKENYARD_MACHINE_SEEDS").unwrap_or(1500);
    let (start, next) = (Instant::now(), AtomicU64::new(0));
    let work = || {
        let mut totals = Totals::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds {
                return totals;
            }
            totals.add(&run_seed(seed));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut totals = Totals::default();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            totals.add(&worker.join().unwrap_or_else(|_| panic!("a seed failed; see above")));
        }
    });
    println!("{seeds} seeds in {:.1} s:", start.elapsed().as_secs_f64());
    for (name, count) in totals.fields() {
        println!("{count:12} {name}");
        assert!(count > 0 || seeds < 1000, "{name} never happened");
    }
}
