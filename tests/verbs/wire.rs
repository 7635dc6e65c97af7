//! `tokenyard wire` over soft-RoCE: the library and a bare loop between two processes.

use crate::rig::Backend;
use crate::{Verbs, wire_table};
use std::process::Command;
use wire_table::{SHORT, check, table};

fn command(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenyard"));
    command.args(words.split_whitespace());
    command
}

#[test]
fn both_ways_are_measured_over_verbs() {
    if !(Verbs { even: &["rxe0"], odd: &["rxe0"], flush: false }).is_there() {
        return;
    }
    check(&table(command(&format!("wire --transport verbs:rxe0 {SHORT}"))), "verbs:rxe0", 3);
}
