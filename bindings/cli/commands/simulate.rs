//! `tokenyard simulate`: projects dispatch and combine of a world of several nodes.
//!
//! On the main thread, in virtual time: one real proxy machine per rank (`proxy.rs`), the simulated network with a link
//! model between them, and the devices as servers with measured costs (`dispatch.rs`, `combine.rs`, `costs.rs`).
//! Nothing here moves a row. `--calibrate` sends the messages of systems with published latencies over the same network
//! (`peers.rs`), and runs the worlds that were measured on the same devices.

mod calibrate;
mod combine;
mod costs;
mod dispatch;
mod peers;
mod plan;
mod proxy;
mod result;
mod workload;
mod world;

use tokenyard::internals::transport::network::imm::MAX_RANKS;
use tokenyard::internals::transport::network::sim::models::{self, Link};

use crate::cli::args::{List, SimulateArgs};
use crate::cli::cases::presets;
use crate::cli::cases::words::Word;
use crate::cli::files::{self, check_outputs};
use crate::cli::out::Out;
use crate::cli::progress::Progress;
use crate::cli::status::Status;
use crate::cli::usage::Refusal;
use combine::Combine;
use costs::Costs;
use dispatch::Dispatch;
use plan::{Order, Plan};
use result::{About, Projection, Samples};
use workload::{Shape, Workload};
use world::{Outcome, World};

/// Tokens by default: a decode step.
const TOKENS: usize = 128;
/// Most rows of a world and direction: they fit in memory, and in a few minutes.
const MOST_ROWS: usize = 1 << 24;
/// Samples that are enough: larger worlds run fewer iterations.
const SAMPLES: usize = 2048;
const ITERS: std::ops::RangeInclusive<usize> = 3..=50;

/// The configuration of a projection.
struct Config {
    shape: Shape,
    tokens: Vec<usize>,
    link: Link,
    order: Order,
    chunk_rows: Option<usize>,
    about: About,
    json: Option<String>,
}

/// Projects, or calibrates.
///
/// # Errors
/// Unusable arguments.
pub fn simulate(args: &SimulateArgs, out: &Out) -> Result<Status, Refusal> {
    check_outputs(args.json.as_deref(), &[])?;
    if args.calibrate {
        calibrate::check(args)?;
        return Ok(finish(calibrate::run(args.json.as_deref(), out), out));
    }
    let config = Config::new(args)?;
    Ok(finish(project(&config, out), out))
}

fn finish(outcome: Outcome<()>, out: &Out) -> Status {
    match outcome {
        Ok(()) => Status::Success,
        Err(sentence) => {
            note!(out, "tokenyard: {sentence}");
            Status::Failure
        }
    }
}

impl Config {
    fn new(args: &SimulateArgs) -> Result<Config, Refusal> {
        let refused = |error: tokenyard::Error| Refusal::from_error(&error);
        let missing = |name: &str| Refusal::of(name, "missing", "give it, or --calibrate alone");
        let nodes = args.nodes.ok_or_else(|| missing("--nodes"))?;
        let per_node = args.ranks_per_node.ok_or_else(|| missing("--ranks-per-node"))?;
        let text = args.link.clone().ok_or_else(|| missing("--link"))?;
        let link = models::parse(&text).map_err(refused)?;
        let preset = presets::find(args.preset.as_deref().unwrap_or(presets::PRESETS[0].name)).map_err(refused)?;
        let tokens = args.tokens.clone().unwrap_or(List(vec![TOKENS])).0;
        let most = tokens.iter().copied().max().unwrap_or(TOKENS);
        if nodes * per_node > MAX_RANKS {
            let advice = format!("give at most {} nodes of {per_node}: {MAX_RANKS} ranks", MAX_RANKS / per_node);
            return Err(Refusal::of("--nodes", nodes, advice));
        }
        let rows_of_token = nodes * per_node * preset.top_k.min(nodes);
        if most > MOST_ROWS / rows_of_token {
            let advice = format!("give at most {} tokens for so many ranks", MOST_ROWS / rows_of_token);
            return Err(Refusal::of("--tokens", most, advice));
        }
        let iters = args.iters.unwrap_or((SAMPLES / (nodes * per_node)).clamp(*ITERS.start(), *ITERS.end()));
        let mut order = Order::DESIGN;
        let without = args.without.clone().unwrap_or_default();
        without.iter().for_each(|assumption| order.give_up(*assumption));
        let without = without.iter().map(|assumption| assumption.name()).collect();
        Ok(Config {
            shape: Shape { nodes, per_node, preset, tokens: most, seed: args.seed.unwrap_or(1) },
            tokens,
            link,
            order,
            chunk_rows: args.chunk_rows,
            about: About { link: text, iters, without },
            json: args.json.clone(),
        })
    }
}

fn project(config: &Config, out: &Out) -> Outcome<()> {
    let bar = Progress::new(out);
    let mut results = Vec::new();
    for &tokens in &config.tokens {
        let shape = Shape { tokens, ..config.shape };
        let plan = Plan::new(shape, config.link.nics, config.order, config.chunk_rows);
        let show = |done: usize| bar.show(&format!("{tokens} tokens"), done, config.about.iters);
        let samples = run(&plan, &config.link, Costs::H200, config.about.iters, &show);
        bar.clear();
        let (dispatch, combine) = samples?;
        results.push(Projection::new(&plan, &config.link, &config.about, dispatch, combine));
    }
    if let Some(path) = &config.json {
        files::write(path, &files::json(&results).map_err(|error| error.to_string())?, out)?;
    }
    if config.json.as_deref() != Some("-") {
        say!(out, "{}", result::projection_table(&results));
    }
    Ok(())
}

/// Runs a world for some iterations, each a dispatch and a combine of new routing.
fn run(plan: &Plan, link: &Link, costs: Costs, iters: usize, show: &dyn Fn(usize)) -> Outcome<(Samples, Samples)> {
    let mut world = World::new(&plan.shape, plan, link, costs)?;
    let (mut dispatches, mut combines) = (Samples::default(), Samples::default());
    for iteration in 0..iters {
        show(iteration);
        let workload = Workload::draw(plan.shape, iteration as u64).map_err(|error| error.to_string())?;
        let before = world.posts();
        let mut dispatch = Dispatch::new(plan, costs, &workload);
        world.run(&mut dispatch)?;
        let between = world.posts();
        dispatches.add(dispatch.times_us(), &dispatch.traffic, between - before);
        let mut combine = Combine::new(plan, costs, &workload);
        world.run(&mut combine)?;
        combines.add(combine.times_us(), &combine.traffic, world.posts() - between);
    }
    Ok((dispatches, combines))
}

#[cfg(test)]
mod tests;
