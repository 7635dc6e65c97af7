//! Runs the program as its users do, and reads what it answers.

// Each place that mounts this module uses a part of it.
#![allow(dead_code)]

use std::process::{Command, Output};

use serde_json::Value;

/// Small enough for a debug build, and still more than one rank, expert and token.
pub const SMALL: &str = "--device cpu --world 3 --hidden 128 --experts 7 --top-k 3 --tokens 5 --iters 3";
/// The same for other tokens and iterations.
pub const SHAPE: &str = "--device cpu --world 3 --hidden 128 --experts 7 --top-k 3";

pub fn command(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenyard"));
    command.args(words.split_whitespace());
    command
}

pub fn run(words: &str) -> Output {
    command(words).output().expect("the program starts")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The object on stdout, which must hold nothing else.
pub fn object(words: &str) -> Value {
    let output = run(words);
    assert!(output.status.success(), "{words}: {}", text(&output.stderr));
    serde_json::from_str(&text(&output.stdout)).unwrap_or_else(|e| panic!("{words}: {e}: {}", text(&output.stdout)))
}

/// Exit status 2 and one sentence on stderr, which is returned.
pub fn refusal(words: &str) -> String {
    let output = run(words);
    assert_eq!(output.status.code(), Some(2), "{words}: {}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.stdout.is_empty(), "{words}: {}", text(&output.stdout));
    let sentence = text(&output.stderr);
    assert_eq!(sentence.trim_end().lines().count(), 1, "{words}: {sentence}");
    sentence
}
