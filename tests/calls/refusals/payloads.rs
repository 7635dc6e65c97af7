//! Side payloads of so many words as a call cannot have.

use super::*;

pub fn faults(case: &Case, good: &Given) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut add = |of, given, name, value: String, advice: String| {
        faults.push(Fault { of, field: "payload", given, name, value, advice });
    };
    let none = "give 1 or more, or leave the payload out".to_owned();
    let room = |setting: &str| format!("this context has room for {PAYLOAD}; build it with {setting}");
    let of_rows = |words, gathered| {
        let payload = good.rows.payload.clone().map(|payload| Payload { words, gathered, ..payload });
        Given { rows: good.rows.clone().payload(payload), ..good.clone() }
    };
    add(Of::Rows, of_rows(0, false), "words of payload", "0".to_owned(), none.clone());
    for (words, gathered, value) in [(PAYLOAD + 1, false, PAYLOAD + 1), (PAYLOAD, true, PAYLOAD * TOP_K)] {
        if !(gathered && case.is_token()) {
            let value = format!("{value} words of a token");
            add(Of::Rows, of_rows(words, gathered), "payload", value, room("payload_words"));
        }
    }
    let of_tokens = |words| {
        let payload = good.tokens.payload.clone().map(|payload| TokenPayload { words, ..payload });
        Given { tokens: good.tokens.clone().payload(payload), ..good.clone() }
    };
    add(Of::Tokens, of_tokens(0), "words of payload", "0".to_owned(), none);
    let value = format!("{} words of a token", PAYLOAD + 1);
    add(Of::Tokens, of_tokens(PAYLOAD + 1), "payload", value, room("dispatch_payload_words"));
    faults
}
