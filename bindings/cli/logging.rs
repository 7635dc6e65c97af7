//! The program's log: the library's events of the crate `log`, written to stderr on request.
//!
//! On the thread that runs the program, once, before the command. Without `TOKENYARD_LOG` nothing is installed.

use std::io::Write;

use log::LevelFilter;
use tokenyard::internals::base::targets;

use super::usage::Refusal;

/// `LEVEL[,TARGET=LEVEL...]`, such as `warn,proxy=debug`.
const VARIABLE: &str = "TOKENYARD_LOG";

/// Levels of all targets, or of one.
#[derive(Debug, PartialEq, Eq)]
struct Levels(Vec<(&'static str, LevelFilter)>);

/// The common prefix of all targets.
const ALL: &str = "tokenyard";

impl Levels {
    fn parse(text: &str) -> Result<Levels, Refusal> {
        let mut levels = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (target, level) = match part.split_once('=') {
                Some((name, level)) => (target(name.trim()), level.trim()),
                None => (Some(ALL), part),
            };
            match (target, self::level(level)) {
                (Some(target), Some(level)) => levels.push((target, level)),
                _ => return Err(refused(text)),
            }
        }
        Ok(Levels(levels))
    }
}

/// A target of the library by its name, with or without the library's name before it.
fn target(name: &str) -> Option<&'static str> {
    let short = |target: &'static str| target.trim_start_matches(ALL).trim_start_matches("::");
    targets::ALL.into_iter().find(|target| *target == name || short(target) == name)
}

fn level(word: &str) -> Option<LevelFilter> {
    let levels = [LevelFilter::Error, LevelFilter::Warn, LevelFilter::Info, LevelFilter::Debug];
    levels.into_iter().find(|level| level.as_str().eq_ignore_ascii_case(word))
}

fn refused(text: &str) -> Refusal {
    let names: Vec<&str> = targets::ALL.iter().filter_map(|target| target.split("::").nth(1)).collect();
    let advice = format!(
        "give error, warn, info or debug, and a level per target as in warn,proxy=debug; targets are {}",
        names.join(", ")
    );
    Refusal::of_variable(VARIABLE, text, advice)
}

/// Installs a logger for this process, if the environment asks for one. A logger that the process already has stays.
///
/// # Errors
/// A value that is no level, or names no target.
pub fn install() -> Result<(), Refusal> {
    let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else { return Ok(()) };
    let Levels(levels) = Levels::parse(&value.to_string_lossy())?;
    let mut builder = env_logger::Builder::new();
    for (target, level) in levels {
        builder.filter_module(target, level);
    }
    builder.format(|line, record| {
        let level = record.level().as_str().to_ascii_lowercase();
        writeln!(line, "{level} {}: {}", record.target(), record.args())
    });
    // Fails if the process already has a logger, which then gets every event.
    let _ = builder.try_init();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_of_all_targets_or_of_those_that_are_named() {
        let of = |text: &str| Levels::parse(text).map(|levels| levels.0);
        assert_eq!(of("info"), Ok(vec![("tokenyard", LevelFilter::Info)]));
        let both = vec![("tokenyard", LevelFilter::Warn), (targets::PROXY, LevelFilter::Debug)];
        assert_eq!(of("WARN, tokenyard::proxy=debug"), Ok(both));
        assert_eq!(of("world=error"), Ok(vec![(targets::WORLD, LevelFilter::Error)]));
        for text in ["loud", "", "info,", "info,proxy", "proxies=info", "proxy=", "=info", "trace"] {
            let refusal = of(text).unwrap_err().to_string();
            assert!(
                refusal.contains("TOKENYARD_LOG is `") && refusal.contains("warn,proxy=debug"),
                "{text}: {refusal}"
            );
        }
    }
}
