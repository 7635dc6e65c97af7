//! `tokenyard wire`: this library's endpoint beside a bare loop over the same network, between two processes.
//!
//! On the main thread of each process; the leader starts the follower, and both keep a core each. Slices of both ways
//! alternate, so that whatever drifts meanwhile is the same for both.
//!
//! ```text
//!  leader ── starts, with --as-rank ──▶ follower
//!  leader ◀── a line: addresses of both ways ── follower       on its stdout
//!  leader ─── the same ────────────────▶ follower              on its stdin
//! ```
//!
//! With `--launch env` both are ranks of a job, on any hosts: rank 0 leads, and the world carries the addresses.

mod ratio;
mod slices;
mod ways;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, ExitStatus};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use core_affinity::CoreId;
use serde::Serialize;
use tokenyard::World;
use tokenyard::internals::base::{Error, Rank, Result};
use tokenyard::internals::transport::network::libfabric::libfabric_sys::Library;

use self::ratio::{Bar, Median};
use self::slices::{Kind, Measure, Row};
use self::ways::{BareWay, Network, Own, Seen};
use crate::cli::args::WireArgs;
use crate::cli::cases::words::{Launch, TransportWord, Word};
use crate::cli::files::{self, check_outputs};
use crate::cli::out::Out;
use crate::cli::ranks::launch::{Launcher, die_with_parent};
use crate::cli::ranks::real::Settings;
use crate::cli::report::table::table;
use crate::cli::status::Status;
use crate::cli::usage::Refusal;

/// What is measured: name, and what each slice does.
const ROWS: [(&str, Row); 4] = [
    ("8 B, there and back, one way", Row { kind: Kind::Latency, bytes: 8, window: 1 }),
    ("64 KiB, 16 outstanding", Row { kind: Kind::Rate, bytes: 64 << 10, window: 16 }),
    ("1 MiB, 16 outstanding", Row { kind: Kind::Rate, bytes: 1 << 20, window: 16 }),
    ("8 B, 16 posts, then polls", Row { kind: Kind::Costs, bytes: 8, window: 16 }),
];
/// Time that the follower may take to open its endpoints.
const OPENING: Duration = Duration::from_secs(30);
/// Time that the follower may take to close its endpoints.
const CLOSING: Duration = Duration::from_secs(30);
/// Time in which a follower that was the reason of an error has ended.
const DYING: Duration = Duration::from_millis(200);
/// Time between two looks at the follower.
const CHECK_EVERY: Duration = Duration::from_millis(5);
/// Bars of the ratios, own by bare.
const LATENCY: Bar = Bar::AtMost(1.15);
const RATE: Bar = Bar::AtLeast(0.90);
/// Bars of the differences over EFA, in nanoseconds: there a post is nearly free, so that it shows.
const POST_NS: Bar = Bar::AtMost(120.0);
const COMPLETION_NS: Bar = Bar::AtMost(60.0);

#[derive(Serialize)]
struct Object<'a> {
    version: &'static str,
    commit: &'static str,
    transport: String,
    /// The library's version.
    #[serde(skip_serializing_if = "Option::is_none")]
    libfabric: Option<String>,
    pairs: usize,
    slice_ms: u64,
    rows: &'a [RowObject],
}

#[derive(Serialize)]
struct RowObject {
    row: &'static str,
    bytes: usize,
    window: u64,
    unit: &'static str,
    /// Medians over all slices.
    own: f64,
    bare: f64,
    /// `ratio`, own by bare; or `difference`, own less bare.
    compared: &'static str,
    result: Median,
    #[serde(skip_serializing_if = "Option::is_none")]
    bar: Option<Bar>,
    within: bool,
}

/// Compares both ways over a network, and prints a table.
///
/// # Errors
/// Unusable arguments.
pub fn wire(args: &WireArgs, launcher: &Launcher, out: &Out) -> std::result::Result<Status, Refusal> {
    let transport = &args.transport;
    match Settings::new(transport.word, 1, transport.devices.clone(), args.allow_old_shm) {
        None => {
            let advice = "it has no bare loop; give libfabric:tcp, libfabric:shm, libfabric:efa or verbs";
            Err(Refusal::of("--transport", transport.word.name(), advice))
        }
        Some(Settings::Libfabric(config)) => measure(args, &config, launcher, out),
        Some(Settings::Verbs(config)) => measure(args, &config, launcher, out),
    }
}

/// Compares both ways over a network with these settings.
fn measure(
    args: &WireArgs,
    network: &impl Network,
    launcher: &Launcher,
    out: &Out,
) -> std::result::Result<Status, Refusal> {
    if args.launch == Some(Launch::Threads) {
        return Err(Refusal::of("--launch", Launch::Threads.name(), "give processes or env"));
    }
    if args.as_rank {
        let outcome =
            die_with_parent().and_then(|()| follow(args, network, by_pipes(out)).map_err(|error| error.to_string()));
        return Ok(outcome.map_or_else(
            |sentence| {
                note!(out, "tokenyard: follower: {sentence}");
                Status::Failure
            },
            |()| Status::Success,
        ));
    }
    check_outputs(args.json.as_deref(), &[])?;
    let measured = match args.launch {
        Some(Launch::Env) => in_job(args, network).map_err(|error| error.to_string()),
        _ => with_follower(args, network, launcher).map(Some),
    };
    let rows = match measured {
        Ok(Some(rows)) => rows,
        // The leader reports.
        Ok(None) => return Ok(Status::Success),
        Err(sentence) => {
            note!(out, "tokenyard: {sentence}");
            return Ok(Status::Failure);
        }
    };
    let mut written = Ok(());
    if let Some(path) = &args.json {
        let text = serde_json::to_string(&object(args, &rows)).map_err(|error| error.to_string());
        written = text.and_then(|text| files::write(path, &text, out));
    }
    if args.json.as_deref() != Some("-") {
        say!(out, "{}", listing(&rows));
    }
    let beyond: Vec<&str> = rows.iter().filter(|row| !row.within).map(|row| row.row).collect();
    if !beyond.is_empty() {
        note!(out, "tokenyard: beyond their bars: {}", beyond.join("; "));
    }
    if let Err(sentence) = &written {
        note!(out, "tokenyard: {sentence}");
    }
    Ok(Status::from(written.is_ok() && beyond.is_empty()))
}

/// Leads a follower that this process starts.
fn with_follower(
    args: &WireArgs,
    network: &impl Network,
    launcher: &Launcher,
) -> std::result::Result<Vec<RowObject>, String> {
    let mut child = launcher.start_follower()?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let exchange = |line: &str| {
        let (Some(mut stdin), Some(stdout)) = (stdin, stdout) else {
            return Err(Error::transport("the follower has no pipes", "start again"));
        };
        let theirs = first_line(stdout)?;
        stdin.write_all(line.as_bytes()).map_err(|error| broken(&error))?;
        Ok(theirs)
    };
    let rows = lead(args, network, exchange).map_err(|error| error.to_string());
    // After an error it may wait for this process.
    let ended = end_within(&mut child, if rows.is_ok() { CLOSING } else { DYING });
    match (rows, ended.map_err(|error| format!("the follower cannot be waited for ({error})"))?) {
        (Ok(rows), Some(status)) if status.success() => Ok(rows),
        (Ok(_), Some(status)) => Err(format!("the follower ended with {status}")),
        (Ok(_), None) => Err(format!("the follower did not end within {CLOSING:?} and was killed")),
        // Its own errors it prints itself.
        (Err(sentence), Some(status)) if status.signal().is_some() => {
            Err(format!("{sentence}; the follower ended with {status}"))
        }
        (Err(sentence), _) => Err(sentence),
    }
}

/// The status of a process that ends within that time; any other is killed.
fn end_within(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(CHECK_EVERY);
    }
    child.kill()?;
    child.wait().map(|_| None)
}

/// The exchange of a follower that the leader started.
fn by_pipes<'a>(out: &'a Out<'_>) -> impl FnOnce(&str) -> Result<String> + 'a {
    |line| {
        say!(out, "{}", line.trim_end());
        let mut theirs = String::new();
        std::io::stdin().lock().read_line(&mut theirs).map_err(|error| broken(&error))?;
        Ok(theirs)
    }
}

/// Leads or follows as a rank of the job that the environment describes; rows of the leader.
fn in_job(args: &WireArgs, network: &impl Network) -> Result<Option<Vec<RowObject>>> {
    let world = World::from_env()?;
    if world.size() != 2 {
        return Err(Error::config("WORLD_SIZE", world.size(), "both ways are measured between 2 ranks; start 2"));
    }
    let leads = world.rank().index() == 0;
    let exchange = |line: &str| {
        let lines = world.all_gather("wire addresses", line.as_bytes())?;
        let theirs = if leads { lines.last() } else { lines.first() };
        Ok(theirs.map(|line| String::from_utf8_lossy(line).into_owned()).unwrap_or_default())
    };
    if leads { lead(args, network, exchange).map(Some) } else { follow(args, network, exchange).map(|()| None) }
}

/// Both ways of a process.
struct Ways<N: Network> {
    own: Own<N::Endpoint>,
    bare: BareWay<N::Bare>,
    /// What polls of each have seen.
    seen: [Seen; 2],
}

impl<N: Network> Ways<N> {
    fn open(network: &N, rank: u32) -> Result<Ways<N>> {
        let (own, bare) = (Own::open(Rank(rank), network)?, BareWay::open(Rank(rank), network)?);
        Ok(Ways { own, bare, seen: Default::default() })
    }

    /// Leads a slice of one way.
    fn lead(&mut self, own: bool, row: Row, slice: Duration) -> Result<Measure> {
        let [seen_own, seen_bare] = &mut self.seen;
        if own {
            slices::lead(&mut self.own, seen_own, row, slice)
        } else {
            slices::lead(&mut self.bare, seen_bare, row, slice)
        }
    }

    /// Follows a slice of one way.
    fn follow(&mut self, own: bool, row: Row) -> Result<()> {
        let [seen_own, seen_bare] = &mut self.seen;
        if own { slices::follow(&mut self.own, seen_own, row) } else { slices::follow(&mut self.bare, seen_bare, row) }
    }

    /// A line that names both addresses.
    fn line(&mut self) -> Result<String> {
        let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        Ok(format!("{} {}\n", hex(self.own.address()?), hex(self.bare.address()?)))
    }

    fn connect(&mut self, line: &str) -> Result<()> {
        let addresses: Option<Vec<Vec<u8>>> = line.split_whitespace().map(unhex).collect();
        let Some([own, bare]) = addresses.as_deref() else {
            return Err(Error::transport("the other process gave no two addresses", "see its own message"));
        };
        self.own.connect(own)?;
        self.bare.connect(bare)
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
    digits.map(|digits| digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect())
}

/// Keeps this thread on one of the process's cores, if there are several.
fn pin(rank: usize) {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let core: Option<&CoreId> = if rank == 0 { cores.first() } else { cores.last() };
    if let Some(core) = core.filter(|_| cores.len() > 1) {
        core_affinity::set_for_current(*core);
    }
}

/// The first line of the follower, which may hang as it opens its endpoints.
fn first_line(stdout: ChildStdout) -> Result<String> {
    let (sender, receiver) = mpsc::channel();
    // It ends with the follower, which the caller kills after an error.
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        sender.send(read.map(|_| line))
    });
    match receiver.recv_timeout(OPENING) {
        Ok(line) => line.map_err(|error| broken(&error)),
        Err(_) => {
            let what = format!("the follower opened no endpoints within {OPENING:?}");
            Err(Error::transport(what, "see what the provider waits for, by FI_LOG_LEVEL=warn"))
        }
    }
}

fn broken(error: &std::io::Error) -> Error {
    Error::transport(format!("the other process cannot be reached ({error})"), "see its own message")
}

/// `exchange` hands this process's line over and answers the other's.
fn follow(args: &WireArgs, network: &impl Network, exchange: impl FnOnce(&str) -> Result<String>) -> Result<()> {
    pin(1);
    let mut ways = Ways::open(network, 1)?;
    let line = ways.line()?;
    ways.connect(&exchange(&line)?)?;
    for (_, row) in ROWS {
        for pair in 0..=args.pairs {
            in_order(pair, |own| ways.follow(own, row))?;
        }
    }
    Ok(())
}

/// Both ways once, the one first in every second pair, the other in the others.
fn in_order(pair: usize, mut slice: impl FnMut(bool) -> Result<()>) -> Result<()> {
    let first = pair.is_multiple_of(2);
    slice(first)?;
    slice(!first)
}

/// `exchange` as in [`follow`].
fn lead(
    args: &WireArgs,
    network: &impl Network,
    exchange: impl FnOnce(&str) -> Result<String>,
) -> Result<Vec<RowObject>> {
    pin(0);
    let mut ways = Ways::open(network, 0)?;
    let line = ways.line()?;
    ways.connect(&exchange(&line)?)?;
    let slice = Duration::from_millis(args.slice_ms);
    let mut rows = Vec::new();
    for (name, row) in ROWS {
        let (mut own, mut bare) = (Vec::new(), Vec::new());
        for pair in 0..=args.pairs {
            in_order(pair, |is_own| {
                let measure = ways.lead(is_own, row, slice)?;
                // The first pair warms up.
                if pair > 0 {
                    if is_own { own.push(measure) } else { bare.push(measure) }
                }
                Ok(())
            })?;
        }
        rows.extend(compared(name, row, args.transport.word, &own, &bare));
    }
    Ok(rows)
}

/// The rows of the table that slices of one kind give.
fn compared(
    name: &'static str,
    row: Row,
    transport: TransportWord,
    own: &[Measure],
    bare: &[Measure],
) -> Vec<RowObject> {
    let pick = |of: &[Measure], second: bool| -> Vec<f64> {
        of.iter().map(|measure| if second { measure.second } else { measure.first }).collect()
    };
    let object = |row_name, unit, second, is_ratio: bool, bar: Option<Bar>| {
        let (own, bare) = (pick(own, second), pick(bare, second));
        let pairs = own.iter().zip(&bare);
        let values = pairs.map(|(own, bare)| if is_ratio { own / bare } else { own - bare }).collect();
        let result = Median::of(values);
        RowObject {
            row: row_name,
            bytes: row.bytes,
            window: row.window,
            unit,
            own: Median::of(own).median,
            bare: Median::of(bare).median,
            compared: if is_ratio { "ratio" } else { "difference" },
            result,
            bar,
            within: bar.is_none_or(|bar| bar.admits(result)),
        }
    };
    // Elsewhere the provider's own work dwarfs what this library adds to a post.
    let of_efa = |bar| (transport == TransportWord::Efa).then_some(bar);
    match row.kind {
        Kind::Latency => vec![object(name, "us", false, true, Some(LATENCY))],
        Kind::Rate => vec![object(name, "bytes/s", false, true, Some(RATE))],
        Kind::Costs => vec![
            object("post of 8 B", "ns", false, false, of_efa(POST_NS)),
            object("completion of 8 B", "ns", true, false, of_efa(COMPLETION_NS)),
        ],
    }
}

fn object<'a>(args: &WireArgs, rows: &'a [RowObject]) -> Object<'a> {
    let libfabric = args.transport.word != TransportWord::Verbs;
    Object {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("TOKENYARD_COMMIT").unwrap_or("unknown"),
        transport: args.transport.to_string(),
        libfabric: libfabric.then(|| Library::open().map_or_else(|_| String::new(), |l| l.version().to_string())),
        pairs: args.pairs,
        slice_ms: args.slice_ms,
        rows,
    }
}

fn listing(rows: &[RowObject]) -> String {
    let number = |value: f64| match value {
        value if value >= 1e6 => format!("{:.2}e9", value / 1e9),
        value => format!("{value:.2}"),
    };
    let cells = |row: &RowObject| {
        let Median { median, low, high } = row.result;
        let bar = match row.bar {
            Some(Bar::AtLeast(bar)) => format!(">= {bar}"),
            Some(Bar::AtMost(bar)) => format!("<= {bar}"),
            None => "-".to_owned(),
        };
        let verdict = if row.within { "within" } else { "BEYOND" };
        let result = format!("{} ({} to {})", number(median), number(low), number(high));
        vec![
            row.row.into(),
            row.unit.into(),
            number(row.own),
            number(row.bare),
            format!("{} {result}", row.compared),
            bar,
            verdict.into(),
        ]
    };
    table(
        &["row", "unit", "own", "bare", "own against bare (95 %)", "bar", "verdict"],
        &rows.iter().map(cells).collect::<Vec<_>>(),
    )
}
