//! Refusals: one sentence that names the argument, its value, and what would do.
//!
//! On the main thread, before anything runs. It turns the parser's several lines into that one sentence.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::error::Error as _;
use std::fmt;

/// Why a command line is unusable, as one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Refusal {
    /// "argument --hidden is `9`: give a multiple of 8".
    pub fn of(argument: &str, value: impl fmt::Display, advice: impl fmt::Display) -> Refusal {
        Refusal(one_line(&format!("argument {argument} is `{value}`: {advice}")))
    }

    /// The same of a variable of the environment.
    pub fn of_variable(name: &str, value: impl fmt::Display, advice: impl fmt::Display) -> Refusal {
        Refusal(one_line(&format!("variable {name} is `{value}`: {advice}")))
    }

    /// From a check of the library or of an input file.
    pub fn from_error(error: &tokenyard::internals::base::Error) -> Refusal {
        Refusal(one_line(&error.to_string()))
    }

    /// From the parser.
    pub fn from_parser(error: &clap::Error) -> Refusal {
        Refusal(one_line(&sentence(error)))
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn sentence(error: &clap::Error) -> String {
    let text = |kind| context(error, kind);
    // The parser names an option together with its placeholder: "--hidden <H>".
    let argument = text(ContextKind::InvalidArg).map(|a| a.split_whitespace().next().unwrap_or_default().to_string());
    let named = argument.clone().unwrap_or_else(|| "given".to_string());
    let value = text(ContextKind::InvalidValue).unwrap_or_default();
    match error.kind() {
        ErrorKind::ValueValidation => {
            let advice = error.source().map_or("give another value".to_string(), ToString::to_string);
            format!("argument {named} is `{value}`: {advice}")
        }
        ErrorKind::InvalidValue if value.is_empty() => format!("argument {named} has no value: give one behind it"),
        ErrorKind::InvalidValue => format!("argument {named} is `{value}`: {}", valid(error)),
        ErrorKind::UnknownArgument => match text(ContextKind::SuggestedArg) {
            Some(near) => format!("argument `{named}` is not known: did you mean {near}"),
            None => format!("argument `{named}` is not known: see --help of its command for those that are"),
        },
        ErrorKind::TooManyValues => {
            format!("argument {named} is `{value}`: it takes no value there; leave the value out")
        }
        ErrorKind::InvalidSubcommand => {
            let given = text(ContextKind::InvalidSubcommand).unwrap_or_default();
            format!("command `{given}` is not known: {COMMANDS}")
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            format!("no command is given: {COMMANDS}")
        }
        ErrorKind::MissingRequiredArgument => {
            let missing = text(ContextKind::InvalidArg).unwrap_or_default();
            format!("argument {missing} is missing: give it")
        }
        ErrorKind::ArgumentConflict => format!("argument {named} is given more than once: give it once"),
        _ => {
            let rendered = error.to_string();
            let first = rendered.lines().next().unwrap_or("the command line is unusable");
            format!("{}: see tokenyard --help", first.trim_start_matches("error: "))
        }
    }
}

const COMMANDS: &str = "give bench, verify, plan, simulate or doctor";

fn valid(error: &clap::Error) -> String {
    match context(error, ContextKind::ValidValue) {
        Some(values) => format!("give one of {values}"),
        None => "give another value".to_string(),
    }
}

fn context(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        ContextValue::Strings(texts) => Some(texts.join(", ")),
        other => Some(other.to_string()),
    }
}
