//! Refusals: one sentence that names the argument, its value, and what to give instead.
//!
//! On the main thread, before anything runs. It makes one sentence of the parser's several lines, and gives the new
//! names of options, their words and replay fields that were renamed.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::error::Error as _;
use std::fmt;

use tokenyard::internals::base::Error;

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

    /// The same for an environment variable.
    pub fn of_variable(name: &str, value: impl fmt::Display, advice: impl fmt::Display) -> Refusal {
        Refusal(one_line(&format!("variable {name} is `{value}`: {advice}")))
    }

    /// From an error of a file that an option names.
    pub fn of_file(option: &str, path: &str, error: &Error) -> Refusal {
        match error {
            Error::Config { value, advice, .. } => Refusal::of(option, path, format!("{value}: {advice}")),
            other => Refusal::from_error(other),
        }
    }

    /// From an error of the library or of an input file.
    pub fn from_error(error: &Error) -> Refusal {
        Refusal(one_line(&error.to_string()))
    }

    /// From the parser.
    pub fn from_parser(error: &clap::Error) -> Refusal {
        Refusal(one_line(&sentence(error)))
    }
}

/// Options, words of options and replay fields that were renamed: old and new names.
const RENAMED: [(&str, &str); 7] = [
    ("--arriving-tokens", "--ll-tokens"),
    ("--wave-tokens", "--round-tokens"),
    ("--own-output", "--in-place"),
    ("landing-list", "arrival-list"),
    ("arriving_tokens", "ll_tokens"),
    ("wave_tokens", "round_tokens"),
    ("own_output", "in_place"),
];

/// The advice for an old name: "--own-output is called --in-place now".
pub fn old_name(name: &str) -> Option<String> {
    let renamed = RENAMED.iter().find(|(old, _)| *old == name);
    renamed.map(|(old, new)| format!("{old} is called {new} now"))
}

/// The text in one line, with control characters spelled out: values come from command lines, variables and files.
fn one_line(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let spelled = |c: char| if c.is_control() { c.escape_debug().to_string() } else { c.to_string() };
    line.chars().map(spelled).collect()
}

fn sentence(error: &clap::Error) -> String {
    let text = |kind| context(error, kind);
    // The parser names an option together with its placeholder: "--hidden <H>".
    let argument = text(ContextKind::InvalidArg).map(|a| a.split_whitespace().next().unwrap_or_default().to_string());
    let named = argument.clone().unwrap_or_else(|| "given".to_string());
    let value = text(ContextKind::InvalidValue).unwrap_or_default();
    match error.kind() {
        ErrorKind::ValueValidation => {
            let advice = old_name(&value)
                .unwrap_or_else(|| error.source().map_or("give another value".to_string(), ToString::to_string));
            format!("argument {named} is `{value}`: {advice}")
        }
        ErrorKind::InvalidValue if value.is_empty() => format!("argument {named} has no value: give one after it"),
        ErrorKind::InvalidValue => format!("argument {named} is `{value}`: {}", valid(error)),
        ErrorKind::UnknownArgument => {
            let advice = old_name(&named).unwrap_or_else(|| match text(ContextKind::SuggestedArg) {
                Some(similar) => format!("did you mean {similar}"),
                None => "see --help of its command for those that are".to_string(),
            });
            format!("argument `{named}` is not known: {advice}")
        }
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

const COMMANDS: &str = "give bench, verify, plan, simulate, doctor, topology or wire";

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Cli;
    use clap::Parser;

    fn refused(args: &[&str]) -> String {
        let error = Cli::try_parse_from(["tokenyard"].iter().chain(args)).unwrap_err();
        Refusal::from_parser(&error).to_string()
    }

    #[test]
    fn an_old_name_is_refused_with_the_new_name() {
        for (args, wanted) in [
            (&["bench", "--own-output"][..], "`--own-output` is not known: --own-output is called --in-place now"),
            (&["verify", "--own-output"], "--own-output is called --in-place now"),
            (&["plan", "--wave-tokens", "9"], "--wave-tokens is called --round-tokens now"),
            (&["bench", "--arriving-tokens=9"], "--arriving-tokens is called --ll-tokens now"),
            (
                &["simulate", "--calibrate", "--without", "early-sums,landing-list"],
                "argument --without is `landing-list`: landing-list is called arrival-list now",
            ),
        ] {
            let refused = refused(args);
            assert!(refused.ends_with(wanted), "{refused}");
        }
    }

    /// What moves a terminal's cursor, or takes its line.
    const RED: &str = "\x1b[31m\u{9b}0m\r\n\u{7}";

    #[test]
    fn values_with_control_characters_are_shown_in_one_line() {
        let of_library = tokenyard::internals::base::Error::argument("x", RED, RED);
        let refusals = [
            refused(&["bench", "--dtype", RED]),
            refused(&["bench", RED]),
            refused(&[RED]),
            Refusal::of("--json", RED, RED).to_string(),
            Refusal::of_variable("TOKENYARD_LOG", RED, RED).to_string(),
            Refusal::from_error(&of_library).to_string(),
        ];
        for refusal in refusals {
            assert!(!refusal.contains(char::is_control), "{refusal:?}");
            assert!(refusal.contains("\\u{1b}[31m\\u{9b}0m"), "{refusal}");
        }
    }

    #[test]
    fn every_new_name_is_taken_and_no_old_one() {
        for (old, new) in RENAMED.iter().filter(|(old, _)| old.starts_with("--")) {
            let value = if *new == "--in-place" { None } else { Some("9") };
            for (name, taken) in [(new, true), (old, false)] {
                let args = ["tokenyard", "bench", *name].into_iter().chain(value);
                assert_eq!(Cli::try_parse_from(args).is_ok(), taken, "{name}");
            }
        }
        assert_eq!(old_name("--in-place"), None);
    }
}
