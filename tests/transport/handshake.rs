//! Every field of the bootstrap protocol, wrong once: in what a member sends rank 0, and in what rank 0 sends a member.
//! The side that gets it ends at once, or refuses the sender, with an error that names the field and both values.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use crate::bootstrap::support::*;
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::{Bootstrap, World};

/// What moves a terminal's cursor, or takes its line; and how errors show it.
const RED: &str = "\x1b[31m\r\n\x07";
const SHOWN: &str = r"\u{1b}[31m\r\n\u{7}";

const BEYOND: u32 = (64 << 20) + 1;

type Place = (String, u16);

/// Runs the cases at the same time, each at a place of its own, as some wait for a deadline. None may return a problem.
fn all_at_once<C: Sync>(cases: &[C], run: impl Fn(&C, &Place) -> Result<(), String> + Sync) {
    let places = places(cases.len());
    let problems: Vec<String> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> =
            cases.iter().zip(&places).map(|(case, place)| scope.spawn(move || run(case, place))).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap().err()).collect()
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Whether the text has all words, and nothing that controls a terminal.
fn check(what: &str, text: &str, words: &[&str]) -> Result<(), String> {
    match words.iter().find(|word| !text.contains(**word)) {
        Some(word) => Err(format!("{what}: «{text}» lacks «{word}»")),
        None if text.contains(char::is_control) => Err(format!("{what}: {text:?}")),
        None => Ok(()),
    }
}

fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u16).to_le_bytes()[..], text].concat()
}

/// The head of a frame whose body does not come.
fn head(magic: &[u8; 4], version: u16, kind: u16, length: u32) -> Vec<u8> {
    [&magic[..], &version.to_le_bytes(), &kind.to_le_bytes(), &length.to_le_bytes()].concat()
}

// ---- a member that joins

/// The fields of a Join that follow its proof.
#[derive(Debug, Clone, Copy)]
struct Join<'a> {
    rank: u32,
    world: u32,
    host: &'a str,
    generation: u32,
    members: &'a str,
    nodes: &'a str,
}

const GOOD: Join<'static> = Join { rank: 1, world: 2, host: "", generation: 0, members: "0-1", nodes: "2" };

impl Join<'_> {
    fn encode(&self) -> Vec<u8> {
        let Join { rank, world, host, generation, members, nodes } = self;
        let [host, members, nodes] = [host, members, nodes].map(|field| text(field.as_bytes()));
        [&rank.to_le_bytes()[..], &world.to_le_bytes(), &host, &generation.to_le_bytes(), &members, &nodes].concat()
    }
}

/// The error of a rank 0 of two that does not find its member, and what the meddler got.
fn unjoined(place: &Place, meddle: impl FnOnce(&Place) -> String) -> [String; 2] {
    // Longer than a busy machine stands still: strangers are refused before that.
    let root = Bootstrap { timeout: PATIENCE / 4, ..bootstrap(place, 0, 2) };
    std::thread::scope(|scope| {
        let root = scope.spawn(|| bootstrap_text(World::join(&root)));
        let answer = meddle(place);
        [root.join().unwrap(), answer]
    })
}

/// The reason with which rank 0 refuses.
fn reason(mut stream: TcpStream) -> String {
    let answer = whole_frame(&mut stream);
    assert_eq!(answer[4..8], [3, 0, 2, 0], "no refusal");
    let length = usize::from(u16::from_le_bytes([answer[12], answer[13]]));
    String::from_utf8(answer[14..14 + length].to_vec()).unwrap()
}

/// Asks to join with these fields, and returns the reason for the refusal.
fn refused(place: &Place, version: u16, token: &str, fields: &[u8]) -> String {
    reason(asking(place, version, token, fields, false))
}

#[test]
fn every_field_of_a_join_that_is_wrong_is_named_on_both_sides_with_both_values() {
    assert_eq!(GOOD.encode(), join_fields(1, 2));
    let long = "x".repeat(256);
    let [odd_members, odd_nodes, odd_host] = ["0-2", "2", "a"].map(|text| format!("{text}{RED}"));
    let cases = [
        (Join { rank: 2, ..GOOD }, vec!["rank 2 at 127.", "is not below the world size 2"]),
        (Join { rank: u32::MAX, ..GOOD }, vec!["rank 4294967295 at 127.", "is not below the world size 2"]),
        (Join { rank: 0, ..GOOD }, vec!["rank 0 has joined already and came again from 127."]),
        (
            Join { world: 3, members: "0-2", ..GOOD },
            vec!["rank 1 at 127.", "has a world of 3 ranks (members 0-2) and rank 0 one of 2 (members 0-1)"],
        ),
        (Join { world: 1, members: "0", ..GOOD }, vec!["has a world of 1 ranks (members 0) and rank 0 one of 2"]),
        (Join { world: 3, members: &odd_members, ..GOOD }, vec!["has a world of 3 ranks (members 0-2", SHOWN]),
        (Join { host: "a b", ..GOOD }, vec!["rank 1 at 127.", "gives \"a b\" as its host"]),
        (Join { host: &long, ..GOOD }, vec!["rank 1 at 127.", "gives \"xxx", "as its host"]),
        (Join { host: &odd_host, ..GOOD }, vec!["rank 1 at 127.", SHOWN, "as its host"]),
        (Join { generation: 7, ..GOOD }, vec!["rank 1 at 127.", "has the generation 7 and rank 0 has 0"]),
        (Join { members: "0,5", ..GOOD }, vec!["rank 5 at 127.", "has the members 0,5 and rank 0 has 0-1"]),
        (Join { members: &odd_members, ..GOOD }, vec!["has the members 0-2", SHOWN, "and rank 0 has 0-1"]),
        (Join { nodes: "1,1", ..GOOD }, vec!["rank 1 at 127.", "has the nodes 1,1 and rank 0 has 2"]),
        (Join { nodes: &odd_nodes, ..GOOD }, vec!["rank 1 at 127.", "has the nodes 2", SHOWN, "and rank 0 has 2"]),
    ];
    all_at_once(&cases, |(join, words), place| {
        let [root, member] = unjoined(place, |place| refused(place, VERSION, TOKEN, &join.encode()));
        check(&format!("rank 0, {join:?}"), &root, words)?;
        check(&format!("the member, {join:?}"), &member, words)
    });
}

#[test]
fn a_proof_version_or_kind_of_secret_that_is_wrong_is_named_on_both_sides() {
    type Meddle = fn(&Place) -> String;
    let (token, version) =
        ("the job token differs from that of rank 0", "speaks bootstrap version 7 and this rank speaks version 3");
    let own_host: Meddle = |place| {
        let mut stream = dial(place);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&hello(VERSION, true)).unwrap();
        reason(stream)
    };
    let cases: [(Meddle, &str); 4] = [
        (|place| refused(place, VERSION, "guess", &GOOD.encode()), token),
        (|place| refused(place, 7, TOKEN, &GOOD.encode()), version),
        (|place| refused(place, 7, "guess", &GOOD.encode()), version),
        (own_host, "the job token differs from that of rank 0 (this rank has none)"),
    ];
    all_at_once(&cases, |(meddle, expected), place| {
        let [root, member] = unjoined(place, meddle);
        check("rank 0", &root, &[expected])?;
        check("the member", &member, &[expected])
    });
}

/// Sends a Hello, reads the challenge, and sends what `then` makes of its nonce.
fn challenged(place: &Place, then: impl FnOnce(&[u8]) -> Vec<u8>) -> String {
    let mut stream = dial(place);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&hello(VERSION, false)).unwrap();
    let mut challenge = [0; 44];
    stream.read_exact(&mut challenge).unwrap();
    stream.write_all(&then(&challenge[12..])).unwrap();
    rest_of(stream)
}

/// A Join of these fields, which its proof covers.
fn join(root: &[u8], fields: &[u8]) -> Vec<u8> {
    frame(VERSION, 12, &[&proof(TOKEN, "member", root, fields)[..], fields].concat())
}

#[test]
fn every_part_of_a_strangers_frames_that_is_wrong_is_named_by_rank_0() {
    type Meddle = fn(&Place) -> String;
    let cases: [(Meddle, &str); 18] = [
        (|place| talk(place, b"GET / HTTP/1.1\r\n\r\n"), "bytes that are no frame"),
        (|place| talk(place, &head(b"TKYE", VERSION, 1, 0)), "bytes that are no frame"),
        (|place| talk(place, &head(b"TKYD", VERSION, 1, 4097)), "a frame of 4097 bytes where 4096 may come"),
        (|place| talk(place, &head(b"TKYD", VERSION, 1, u32::MAX)), "a frame of 4294967295 bytes where 4096 may"),
        (|place| talk(place, &frame(VERSION, 5, &[0; 40])), "a first frame that is no hello"),
        (|place| talk(place, &frame(VERSION, 99, b"")), "a first frame that is no hello"),
        (|place| talk(place, &frame(VERSION, 1, &[&[31, 0][..], &[7; 31], &[0]].concat())), "a malformed hello"),
        (|place| talk(place, &frame(VERSION, 1, &[&[32, 0][..], &[7; 31]].concat())), "a malformed hello"),
        (|place| talk(place, &frame(VERSION, 1, &[&[32, 0][..], &[7; 32], &[2]].concat())), "a malformed hello"),
        (|place| talk(place, &frame(VERSION, 1, &[&[32, 0][..], &[7; 32], &[0, 0]].concat())), "a malformed hello"),
        (|place| talk(place, &hello(VERSION, false).repeat(2)), "bytes right behind a hello"),
        (
            |place| {
                dial(place).write_all(&hello(VERSION, false)[..20]).unwrap();
                String::new()
            },
            "a connection closed before it was admitted",
        ),
        (|place| challenged(place, |_| frame(VERSION, 5, &[0; 40])), "a second frame that proves nothing"),
        (|place| challenged(place, |_| frame(VERSION, 12, &[0; 31])), "a malformed proof"),
        (|place| challenged(place, |root| join(root, &[&GOOD.encode()[..], &[0]].concat())), "a malformed proof"),
        (|place| challenged(place, |root| join(root, &GOOD.encode()[..20])), "a malformed proof"),
        (
            |place| {
                let fields = |host: &[u8]| [&[1, 0, 0, 0, 2, 0, 0, 0][..], host, &GOOD.encode()[10..]].concat();
                challenged(place, |root| join(root, &fields(&text(b"\xff"))))
            },
            "a malformed proof",
        ),
        (|place| challenged(place, |_| head(b"TKYD", VERSION, 12, 4097)), "a frame of 4097 bytes where 4096 may"),
    ];
    all_at_once(&cases, |(meddle, expected), place| {
        let [root, _] = unjoined(place, meddle);
        check("rank 0", &root, &["rank 1 has not joined (1 connections refused, the last from 127.", expected])
    });
}

// ---- a member that has joined

/// The error of rank 0's barrier "gate" once its only member has sent these bytes, and how many messages it refused.
fn after_joining(place: &Place, bytes: &[u8]) -> (String, u64) {
    let (formed, is_formed) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let root = scope.spawn(move || {
            let world = World::join(&bootstrap(place, 0, 2)).unwrap();
            formed.send(()).unwrap();
            let start = Instant::now();
            let error = bootstrap_error(world.barrier("gate"));
            assert!(error.is_fatal() && start.elapsed() < PATIENCE / 2, "{:?}: {error:?}", start.elapsed());
            (error.to_string(), world.refused())
        });
        let mut member = asking(place, VERSION, TOKEN, &GOOD.encode(), false);
        // Accept and Welcome.
        member.read_exact(&mut [0; 44 + 20]).unwrap();
        is_formed.recv().unwrap();
        member.write_all(bytes).unwrap();
        let outcome = root.join().unwrap();
        drop(member);
        outcome
    })
}

fn gather(seq: u64, what: &[u8], payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_le_bytes();
    frame(VERSION, 5, &[&seq.to_le_bytes()[..], &text(what), &length, payload].concat())
}

fn give_up(seq: u64, waited_ms: u64) -> Vec<u8> {
    frame(VERSION, 7, &[seq.to_le_bytes(), waited_ms.to_le_bytes()].concat())
}

#[test]
fn every_field_of_a_members_messages_that_is_wrong_ends_the_collective_with_both_values() {
    let odd = [b"gate", RED.as_bytes()].concat();
    let cases = [
        (gather(1, b"gate", b""), vec!["rank 1 brings collective number 1 during number 0"]),
        (gather(u64::MAX, b"gate", b""), vec!["collective number 18446744073709551615 during number 0"]),
        (gather(0, b"other", b""), vec!["rank 0 calls ", "\"gate\"", "rank 1 calls ", "\"other\""]),
        (gather(0, &odd, b""), vec!["rank 1 calls ", SHOWN]),
        (give_up(0, 77), vec!["rank 1 waited 77 ms in collective \""]),
        (give_up(0, u64::MAX), vec!["rank 1 was interrupted in collective \""]),
        (frame(VERSION, 10, b""), vec!["rank 1 has left the world and collective \"gate\" needs it"]),
    ];
    all_at_once(&cases, |(bytes, words), place| {
        let (error, refused) = after_joining(place, bytes);
        check("rank 0", &error, words)?;
        if refused == 0 { Ok(()) } else { Err(format!("{refused} refused: {error}")) }
    });
}

#[test]
fn a_member_that_sends_what_is_no_message_is_dropped_with_the_reason() {
    let good = gather(0, b"gate", b"");
    let unexpected = "a message that no member sends then";
    let cases = [
        (head(b"TKYE", VERSION, 5, 0), "bytes that are no frame"),
        (head(b"TKYD", VERSION, 5, BEYOND), "a frame of 67108865 bytes where 67108864 may come"),
        (frame(7, 5, &good[12..]), "a message of version 7, not 3"),
        (frame(VERSION, 99, b""), "a frame of unknown kind 99"),
        // A message of rank 0, and one of a member that joins.
        (frame(VERSION, 8, &1u32.to_le_bytes()), unexpected),
        (hello(VERSION, false), unexpected),
        (frame(VERSION, 5, &good[12..good.len() - 1]), "a frame with a malformed length"),
        (frame(VERSION, 5, &[&good[12..], &[0]].concat()), "a frame with a malformed end"),
        (gather(0, b"\xff", b""), "a frame with a malformed string"),
        (frame(VERSION, 7, &[0; 15]), "a frame with a malformed length"),
    ];
    all_at_once(&cases, |(bytes, sent), place| {
        let (error, refused) = after_joining(place, bytes);
        let expected = format!("rank 1 sent {sent}, and rank 0 has dropped its connection");
        check(sent, &error, &[&expected])?;
        if refused == 1 { Ok(()) } else { Err(format!("{refused} refused of {sent}")) }
    });
}

// ---- rank 0

/// How far rank 0 goes before it errs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
enum Stage {
    Greeted,
    Proved,
    Accepted,
    /// The member takes part in its first collective.
    Joined,
}

/// One frame of the member, whole.
fn whole_frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = vec![0; 12];
    stream.read_exact(&mut bytes).unwrap();
    let length = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]) as usize;
    bytes.resize(12 + length, 0);
    stream.read_exact(&mut bytes[12..]).unwrap();
    bytes
}

fn welcome(hosts: &[&str]) -> Vec<u8> {
    let count = hosts.len() as u32;
    let hosts: Vec<u8> = hosts.iter().flat_map(|host| text(host.as_bytes())).collect();
    frame(VERSION, 4, &[&count.to_le_bytes()[..], &hosts].concat())
}

fn fail(what: &[u8], advice: &[u8]) -> Vec<u8> {
    frame(VERSION, 2, &[text(what), text(advice)].concat())
}

fn gathered(seq: u64, payloads: &[&[u8]]) -> Vec<u8> {
    let count = (payloads.len() as u32).to_le_bytes();
    let blob = |bytes: &&[u8]| [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat();
    frame(VERSION, 6, &[&seq.to_le_bytes()[..], &count, &payloads.iter().flat_map(blob).collect::<Vec<u8>>()].concat())
}

/// The error of a member to which rank 0 sends these bytes once it has come so far.
fn from_root(place: &Place, stage: Stage, bytes: &[u8]) -> String {
    let listener = TcpListener::bind((place.0.as_str(), place.1)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let hello = whole_frame(&mut stream);
            if stage > Stage::Greeted {
                let accept = challenge(&mut stream, &hello);
                if stage > Stage::Proved {
                    stream.write_all(&accept).unwrap();
                }
            }
            if stage == Stage::Joined {
                stream.write_all(&welcome(&["", ""])).unwrap();
                whole_frame(&mut stream);
            }
            stream.write_all(bytes).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let start = Instant::now();
        let error = match World::join(&bootstrap(place, 1, 2)) {
            Ok(world) if stage == Stage::Joined => bootstrap_error(world.barrier("gate")),
            outcome => bootstrap_error(outcome),
        };
        assert!(start.elapsed() < PATIENCE / 2, "{:?}: {error}", start.elapsed());
        error.to_string()
    })
}

/// Challenges a member, and returns the frame that accepts what it answers.
fn challenge(stream: &mut TcpStream, hello: &[u8]) -> Vec<u8> {
    stream.write_all(&frame(VERSION, 11, &[9; 32])).unwrap();
    let join = whole_frame(stream);
    frame(VERSION, 13, &proof_of(TOKEN, "rank 0", [&hello[14..46], &[9; 32]], &join[44..]))
}

#[test]
fn every_field_of_rank_0s_messages_that_is_wrong_ends_the_member_with_both_values() {
    use Stage::*;
    let here = "where rank 0 should be, sent ";
    let versions = "speaks bootstrap version 7 and this rank speaks version 3";
    let odd = RED.as_bytes();
    let odd_host = format!("a{RED}");
    let no_text = [&[1, 0][..], b"\xff", &[0, 0]].concat();
    let cases = [
        (Greeted, head(b"TKYE", VERSION, 11, 32), vec![here, "bytes that are no frame"]),
        (Greeted, head(b"TKYD", VERSION, 11, BEYOND), vec![here, "a frame of 67108865 bytes where 67108864 may come"]),
        (Greeted, frame(VERSION, 11, &[9; 31]), vec![here, "a frame with a malformed length"]),
        (Greeted, frame(7, 11, &[9; 32]), vec![versions]),
        (Greeted, frame(VERSION, 99, b""), vec![here, "a frame of unknown kind 99"]),
        (Greeted, frame(VERSION, 10, b""), vec![here, "no proof that it has the job token"]),
        (Greeted, fail(odd, b"mend it"), vec![SHOWN, "mend it"]),
        (Greeted, fail(b"no", odd), vec!["no", SHOWN]),
        (Greeted, frame(VERSION, 2, &no_text), vec![here, "a frame with a malformed string"]),
        (Proved, frame(VERSION, 13, &[9; 32]), vec![here, "a proof of another job token"]),
        (Proved, frame(VERSION, 13, &[9; 31]), vec![here, "a frame with a malformed length"]),
        (Proved, frame(VERSION, 13, &[9; 33]), vec![here, "a frame with a malformed end"]),
        (Proved, frame(7, 13, &[9; 32]), vec![versions]),
        (Proved, welcome(&["", ""]), vec![here, "no proof that it has the job token"]),
        (Accepted, frame(7, 4, &[0; 4]), vec![versions]),
        (Accepted, frame(VERSION, 99, b""), vec![here, "a frame of unknown kind 99"]),
        (Accepted, frame(VERSION, 3, &[1, 0, 0, 0, 9, 0, 0, 0]), vec![here, "a frame with a malformed count"]),
        (Accepted, welcome(&["", "", ""]), vec![here, "a welcome of 3 ranks to a world of 2"]),
        (Accepted, welcome(&[""]), vec![here, "a welcome of 1 ranks to a world of 2"]),
        (Accepted, welcome(&["", "a b"]), vec![here, "\"a b\" as the host of a rank"]),
        (Accepted, welcome(&[&odd_host, ""]), vec![here, SHOWN, "as the host of a rank"]),
        (Accepted, gathered(0, &[b"", b""]), vec![here, "collective number 0, and this rank's is number none"]),
        (Accepted, frame(VERSION, 10, b""), vec!["rank 0 has left the world"]),
        (Accepted, hello(VERSION, false), vec![here, "a message that only members send"]),
        (Accepted, fail(odd, b"mend it"), vec![SHOWN, "mend it"]),
        (Joined, frame(7, 6, &[0; 12]), vec![versions]),
        (Joined, head(b"TKYD", VERSION, 6, BEYOND), vec!["rank 0 is lost"]),
        (Joined, gathered(0, &[b"", b"", b""]), vec![here, "the parts of 3 ranks in a world of 2"]),
        (Joined, gathered(0, &[b""]), vec![here, "the parts of 1 ranks in a world of 2"]),
        (Joined, gathered(1, &[b"", b""]), vec![here, "collective number 1, and this rank's is number 0"]),
        (Joined, frame(VERSION, 6, &[0; 11]), vec![here, "a frame with a malformed length"]),
        (Joined, frame(VERSION, 8, &2u32.to_le_bytes()), vec![here, "the loss of rank 2 in a world of 2"]),
        (Joined, gather(0, b"gate", b""), vec![here, "a message that only members send"]),
        (Joined, frame(VERSION, 10, b""), vec!["rank 0 has left the world"]),
        (Joined, fail(odd, b"mend it"), vec![SHOWN, "mend it"]),
        (Joined, fail(b"no", odd), vec!["no", SHOWN]),
    ];
    all_at_once(&cases, |(stage, bytes, words), place| {
        check(&format!("{stage:?}"), &from_root(place, *stage, bytes), words)
    });
}

/// Good messages in the same places, so that the cases above fail for what is wrong in them.
#[test]
fn a_member_and_a_rank_0_put_together_by_hand_are_taken() {
    let place = place();
    std::thread::scope(|scope| {
        let root = scope.spawn(|| World::join(&bootstrap(&place, 0, 2)).unwrap().all_gather("gate", b"root").unwrap());
        let mut member = asking(&place, VERSION, TOKEN, &GOOD.encode(), false);
        member.read_exact(&mut [0; 44 + 20]).unwrap();
        member.write_all(&gather(0, b"gate", b"member")).unwrap();
        assert_eq!(root.join().unwrap(), [&b"root"[..], b"member"]);
        assert_eq!(whole_frame(&mut member), gathered(0, &[b"root", b"member"]));
    });
    let listener = TcpListener::bind((place.0.as_str(), place.1)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let hello = whole_frame(&mut stream);
            let accept = challenge(&mut stream, &hello);
            stream.write_all(&accept).unwrap();
            stream.write_all(&welcome(&["", ""])).unwrap();
            assert_eq!(whole_frame(&mut stream), gather(0, b"gate", b"member"));
            stream.write_all(&gathered(0, &[b"root", b"member"])).unwrap();
            // A rank that is lost, and one that has left, end nothing by themselves.
            stream.write_all(&frame(VERSION, 8, &1u32.to_le_bytes())).unwrap();
            stream.write_all(&frame(VERSION, 9, &1u32.to_le_bytes())).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let world = World::join(&bootstrap(&place, 1, 2)).unwrap();
        assert_eq!(world.all_gather("gate", b"member").unwrap(), [&b"root"[..], b"member"]);
        wait_lost(&world, &[Rank(1)]);
    });
}
