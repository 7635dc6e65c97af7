//! Who may join: the judgement on the first frame of a connection to rank 0.
//!
//! Place in the data path: none. Runs on rank 0's bootstrap thread, on bytes from anyone who can reach the
//! port. Never panics, allocates by a stranger's length, or says more to a stranger than that he was refused.

use std::hint::black_box;

use super::hub::Failure;
use super::terms::Terms;
use super::wire::{self, Frame, KIND_HELLO, Message, VERSION};
use crate::base::Rank;

/// What rank 0 knows of its own job.
#[derive(Clone)]
pub(super) struct Job {
    pub token: Vec<u8>,
    pub world: usize,
    pub terms: Terms,
}

/// Longest name or address of a host.
const MAX_HOST: usize = 255;

/// Whether a text can name a host.
pub(super) fn is_host(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_HOST && !text.chars().any(|c| c.is_whitespace() || c.is_control())
}

/// The judgement on a first frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// A member, and where it says that its host is reached, if it does.
    Admit(Rank, Option<String>),
    /// Tell the peer why not, and go on without it.
    Refuse(Failure),
    /// The same of a rank of this job that has other terms: rank 0 names it if the world does not form.
    Differ(Failure),
    /// One of this job that cannot take part, whoever else comes: tell it and everyone.
    Stop(Failure),
    /// No member's first frame: close without a word.
    Drop(&'static str),
}

/// Judges a connection's first frame; `taken` says which ranks have joined.
pub(super) fn judge(job: &Job, frame: &Frame, peer: &str, taken: impl Fn(Rank) -> bool) -> Judgement {
    if frame.kind != KIND_HELLO {
        return Judgement::Drop("a first frame that is no hello");
    }
    let Ok((token, _)) = wire::hello_token(&frame.body) else {
        return Judgement::Drop("a malformed hello");
    };
    let known = same_token(token, &job.token);
    if frame.version != VERSION {
        let failure = other_version(peer, frame.version);
        return if known { Judgement::Stop(failure) } else { Judgement::Refuse(failure) };
    }
    if !known {
        return Judgement::Refuse(Failure::new(
            "the job token differs from that of rank 0",
            "set the same TOKENYARD_TOKEN on all ranks, and another TOKENYARD_PORT for another job",
        ));
    }
    match wire::decode(frame) {
        Ok(Message::Hello { rank, world, host, terms, .. }) => match difference(job, rank, world, &terms, peer) {
            Some(failure) => Judgement::Differ(failure),
            None => place(job, rank, host, peer, taken),
        },
        _ => Judgement::Drop("a malformed hello"),
    }
}

/// What a rank and rank 0 disagree on. The generation comes first: another job's tells that it is another.
fn difference(job: &Job, rank: u32, world: u32, terms: &Terms, peer: &str) -> Option<Failure> {
    let generations = job.terms.generation == terms.generation;
    if generations && world as usize != job.world {
        let what = format!(
            "rank {rank} at {peer} has a world of {world} ranks (members {}) and rank 0 one of {} (members {})",
            terms.members, job.world, job.terms.members
        );
        return Some(Failure::new(what, "set the same WORLD_SIZE on all ranks, and regroup with the same members"));
    }
    job.terms.difference(terms, rank, peer)
}

fn place(job: &Job, rank: u32, host: String, peer: &str, taken: impl Fn(Rank) -> bool) -> Judgement {
    let refuse = |what: String, advice: &str| Judgement::Refuse(Failure::new(what, advice));
    let world = job.world;
    if rank as usize >= world {
        return refuse(format!("rank {rank} at {peer} is not below the world size {world}"), "correct its RANK");
    }
    if rank == 0 || taken(Rank(rank)) {
        return refuse(
            format!("rank {rank} has joined already and came again from {peer}"),
            "give each process its own RANK",
        );
    }
    if !host.is_empty() && !is_host(&host) {
        let what = format!("rank {rank} at {peer} says that its host is {host:?}");
        return refuse(what, "set its TOKENYARD_ADDR to a name or address of its host, or not at all");
    }
    Judgement::Admit(Rank(rank), Some(host).filter(|host| !host.is_empty()))
}

/// The sentence for two versions; it stands on both sides.
pub(super) fn other_version(peer: &str, theirs: u16) -> Failure {
    Failure::new(
        format!("the peer at {peer} speaks bootstrap version {theirs} and this rank speaks version {VERSION}"),
        "install the same release on all ranks",
    )
}

/// Compares in a time that depends on the lengths only, so that a token cannot be guessed byte by byte.
fn same_token(theirs: &[u8], ours: &[u8]) -> bool {
    let differing = theirs.iter().zip(ours).fold(0u8, |acc, (a, b)| black_box(acc | (a ^ b)));
    theirs.len() == ours.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(bytes: &[u8]) -> Frame {
        let mut reader = wire::FrameReader::new(wire::MAX_HELLO_BODY);
        reader.push(bytes);
        reader.next_frame().unwrap().unwrap()
    }

    fn terms(generation: u32) -> Terms {
        Terms { generation, members: "0-3".into(), nodes: "4".into() }
    }

    fn hello(token: &str, rank: u32, world: u32) -> Frame {
        from_host(token, rank, world, "")
    }

    fn from_host(token: &str, rank: u32, world: u32, host: &str) -> Frame {
        frame(
            &wire::encode(&Message::Hello { token: token.into(), rank, world, host: host.into(), terms: terms(1) })
                .unwrap(),
        )
    }

    fn ask(frame: &Frame) -> Judgement {
        let job = Job { token: b"secret".to_vec(), world: 4, terms: terms(1) };
        judge(&job, frame, "there", |rank| rank == Rank(2))
    }

    #[test]
    fn a_stranger_or_an_impossible_rank_let_in() {
        assert_eq!(ask(&hello("secret", 1, 4)), Judgement::Admit(Rank(1), None));
        for (token, rank, world) in [
            ("secreT", 1, 4),
            ("secret", 1, 5),
            ("secret", 0, 4),
            ("secret", 2, 4),
            ("secret", 4, 4),
            ("", 1, 4),
            ("secrets", 1, 4),
        ] {
            let judgement = ask(&hello(token, rank, world));
            let told =
                matches!(judgement, Judgement::Refuse(_)) || world != 4 && matches!(judgement, Judgement::Differ(_));
            assert!(told, "{token} {rank} {world}");
        }
        assert!(matches!(ask(&frame(&wire::encode(&Message::Goodbye).unwrap())), Judgement::Drop(_)));
    }

    #[test]
    fn a_stranger_of_another_version_that_stops_the_job() {
        let mut stranger = hello("guess", 1, 4);
        stranger.version = VERSION + 1;
        assert!(matches!(ask(&stranger), Judgement::Refuse(_)));
        let mut member = hello("secret", 1, 4);
        member.version = VERSION + 1;
        member.body.extend_from_slice(b"fields of the future");
        let Judgement::Stop(failure) = ask(&member) else { panic!("a member of another version went unnoticed") };
        let [own, theirs] = [VERSION, VERSION + 1].map(|version| format!("version {version}"));
        assert!(failure.what.contains(&own) && failure.what.contains(&theirs), "{}", failure.what);
    }

    #[test]
    fn a_hello_with_too_much_behind_it_admitted() {
        let mut long = hello("secret", 1, 4);
        long.body.push(0);
        assert!(matches!(ask(&long), Judgement::Drop(_)));
    }

    #[test]
    fn a_host_that_can_be_none_told_to_everyone() {
        for host in ["10.0.0.7", "fe80::1", "node-3.cluster"] {
            let admitted = Judgement::Admit(Rank(1), Some(host.into()));
            assert_eq!(ask(&from_host("secret", 1, 4, host)), admitted);
        }
        for host in [" ", "a b", "a\n", &"x".repeat(256)] {
            assert!(matches!(ask(&from_host("secret", 1, 4, host)), Judgement::Refuse(_)), "{host:?}");
        }
    }

    #[test]
    fn a_token_in_the_text_of_a_refusal() {
        assert!(!format!("{:?}", ask(&hello("guess", 1, 4))).contains("secret"));
    }
}
