//! A time slice of one way: the leader measures, the follower answers. The same code for both ways.
//!
//! ```text
//!  leader                                follower
//!  writes for the slice's time ────────▶ counts them; echoes each, if asked to
//!  LAST, and how many came before ─────▶ waits until as many have come
//!  ends the slice ◀──────────────────── LAST
//! ```
//!
//! Writes overtake each other, so that counts decide, not order.

use std::time::{Duration, Instant};

use tokenyard::internals::base::{Error, Result};

use super::ways::{LAST, Seen, Way};

/// Beyond this the peer is lost.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a slice measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One write at a time, there and back.
    Latency,
    /// Many writes at a time, one way.
    Rate,
    /// The same; time in posts, and in polls.
    Costs,
}

/// A row of the table: what each slice of it does.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub kind: Kind,
    pub bytes: usize,
    /// Writes that may be outstanding.
    pub window: u64,
}

/// What a slice gave: the median time there and back halved, bytes a second, or nanoseconds of a post and of a
/// completion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measure {
    pub first: f64,
    pub second: f64,
}

/// Longer than any device takes. Where the kernel does a device's work, as for soft-RoCE, it may need this core for it.
const SPIN: Duration = Duration::from_micros(100);

/// How long polls have found nothing.
struct Quiet {
    since: Instant,
    count: u64,
}

impl Quiet {
    fn new(seen: &Seen) -> Quiet {
        Quiet { since: Instant::now(), count: Quiet::count(seen) }
    }

    fn count(seen: &Seen) -> u64 {
        seen.completed + seen.arrived + u64::from(seen.last.is_some())
    }

    /// Gives the core away if polls have found nothing for long; answers for how long.
    fn look(&mut self, seen: &Seen) -> Duration {
        if Quiet::count(seen) != self.count {
            *self = Quiet::new(seen);
            return Duration::ZERO;
        }
        let quiet = self.since.elapsed();
        if quiet > SPIN {
            std::thread::yield_now();
        }
        quiet
    }
}

/// Polls until something has been seen.
fn wait(way: &mut impl Way, seen: &mut Seen, what: &str, done: impl Fn(&Seen) -> bool) -> Result<()> {
    let mut quiet = Quiet::new(seen);
    while !done(seen) {
        way.poll(seen)?;
        if quiet.look(seen) > PATIENCE {
            let advice = "see whether the peer still runs, and whether both have a core";
            let Seen { completed, arrived, last } = seen;
            let so_far = format!("{completed} writes completed, {arrived} and {} last arrived", last.iter().len());
            return Err(Error::transport(format!("{what} did not come within {PATIENCE:?}; {so_far}"), advice));
        }
    }
    Ok(())
}

/// Posts one write for certain.
fn post(way: &mut impl Way, seen: &mut Seen, bytes: usize, imm: u32) -> Result<()> {
    let mut quiet = Quiet::new(seen);
    while !way.post(bytes, imm)? {
        way.poll(seen)?;
        if quiet.look(seen) > PATIENCE {
            return Err(Error::transport(format!("the network was full for {PATIENCE:?}"), "start again"));
        }
    }
    way.flush()
}

/// Leads a slice.
///
/// # Errors
/// Of the network, and if the peer does not answer.
pub fn lead(way: &mut impl Way, seen: &mut Seen, row: Row, slice: Duration) -> Result<Measure> {
    // All of the slice before has arrived and completed.
    *seen = Seen::default();
    match row.kind {
        Kind::Latency => latency(way, seen, row.bytes, slice),
        Kind::Rate => rate(way, seen, row, slice),
        Kind::Costs => costs(way, seen, row, slice),
    }
}

/// The last write of a slice, and the follower's.
fn end(way: &mut impl Way, seen: &mut Seen, posted: u64) -> Result<()> {
    post(way, seen, 8, LAST | posted as u32)?;
    wait(way, seen, "the end of the follower's slice", |seen| seen.last.is_some() && seen.completed > posted)
}

fn latency(way: &mut impl Way, seen: &mut Seen, bytes: usize, slice: Duration) -> Result<Measure> {
    let start = Instant::now();
    let mut times: Vec<f64> = Vec::new();
    let mut posted = 0;
    while start.elapsed() < slice {
        let begun = Instant::now();
        post(way, seen, bytes, 0)?;
        posted += 1;
        wait(way, seen, "an echo", |seen| seen.arrived >= posted)?;
        times.push(begun.elapsed().as_secs_f64());
    }
    end(way, seen, posted)?;
    times.sort_unstable_by(f64::total_cmp);
    let median = times.get(times.len() / 2).copied().unwrap_or(f64::NAN);
    Ok(Measure { first: median / 2.0 * 1e6, second: 0.0 })
}

fn rate(way: &mut impl Way, seen: &mut Seen, Row { bytes, window, .. }: Row, slice: Duration) -> Result<Measure> {
    let start = Instant::now();
    let (mut posted, mut quiet) = (0, Quiet::new(seen));
    while start.elapsed() < slice {
        while posted - seen.completed < window && way.post(bytes, 0)? {
            posted += 1;
        }
        way.flush()?;
        way.poll(seen)?;
        quiet.look(seen);
    }
    end(way, seen, posted)?;
    Ok(Measure { first: (posted as f64) * bytes as f64 / start.elapsed().as_secs_f64(), second: 0.0 })
}

fn costs(way: &mut impl Way, seen: &mut Seen, Row { bytes, window, .. }: Row, slice: Duration) -> Result<Measure> {
    let start = Instant::now();
    let (mut posted, mut posting, mut polling) = (0, Duration::ZERO, Duration::ZERO);
    while start.elapsed() < slice {
        let begun = Instant::now();
        for _ in 0..window {
            posted += u64::from(way.post(bytes, 0)?);
        }
        way.flush()?;
        posting += begun.elapsed();
        // Polls that find nothing wait for the peer, and are nobody's cost.
        let mut quiet = Quiet::new(seen);
        while seen.completed < posted {
            let (begun, before) = (Instant::now(), seen.completed);
            way.poll(seen)?;
            if seen.completed > before {
                polling += begun.elapsed();
            }
            if quiet.look(seen) > PATIENCE {
                return Err(Error::transport(format!("completions did not come within {PATIENCE:?}"), "start again"));
            }
        }
    }
    end(way, seen, posted)?;
    let each = |time: Duration| time.as_nanos() as f64 / posted.max(1) as f64;
    Ok(Measure { first: each(posting), second: each(polling) })
}

/// Follows a slice.
///
/// # Errors
/// Of the network, and if the leader does not go on.
pub fn follow(way: &mut impl Way, seen: &mut Seen, row: Row) -> Result<()> {
    let mut echoed = 0;
    let all = |seen: &Seen| seen.last.is_some_and(|count| seen.arrived >= u64::from(count));
    let mut quiet = Quiet::new(seen);
    while !all(seen) || (row.kind == Kind::Latency && echoed < seen.arrived) {
        way.poll(seen)?;
        if row.kind == Kind::Latency && echoed < seen.arrived {
            post(way, seen, row.bytes, 0)?;
            echoed += 1;
        }
        if quiet.look(seen) > PATIENCE {
            let what = format!("the leader's next write of {} did not come within {PATIENCE:?}", row.bytes);
            let what = format!("{what}; {} have come, last: {:?}", seen.arrived, seen.last);
            return Err(Error::transport(what, "see whether the leader still runs"));
        }
    }
    // What arrives from here on is of the leader's next slice.
    let ended = seen.last.take().unwrap_or_default();
    seen.arrived -= u64::from(ended);
    post(way, seen, 8, LAST)?;
    wait(way, seen, "the completion of the follower's last write", |seen| seen.completed > echoed)?;
    seen.completed = 0;
    Ok(())
}
