//! Who may join: the judgement on the first two frames of a connection to rank 0.
//!
//! Place in the data path: none. Runs on rank 0's bootstrap thread, on bytes from anyone who can reach the
//! port. Never panics, never allocates by a stranger's length, and tells a stranger only that it was refused.

use super::collective::Failure;
use super::names::Names;
use super::secret::{self, Nonces, Role, Secret};
use super::terms::Terms;
use super::wire::{self, Frame, KIND_HELLO, KIND_JOIN, Message, VERSION};
use crate::base::{Rank, quoted};

/// Rank 0's own job: the terms that members are checked against.
#[derive(Clone)]
pub(super) struct Job {
    pub secret: Secret,
    /// Of all ranks of the world.
    pub names: Names,
    pub terms: Terms,
}

/// Longest name or address of a host.
const MAX_HOST: usize = 255;

/// Whether a text can name a host.
pub(super) fn is_host(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_HOST && !text.chars().any(|c| c.is_whitespace() || c.is_control())
}

/// The judgement on a second frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// A member, and the name or address of its host, if the Join gives one.
    Admit(Rank, Option<String>),
    /// Send the peer the reason, and go on without it.
    Refuse(Failure),
    /// As `Refuse`, for a rank of this job with other terms: rank 0 names that rank if the world does not form.
    Differ(Failure),
    /// A rank of this job that can never take part: send the reason to it and to all members.
    Stop(Failure),
    /// Not a member's frame: close without an answer.
    Drop(&'static str),
}

/// What to do about a first frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// Send it rank 0's nonce.
    Challenge(Nonces),
    /// Send the peer the reason, and go on without it.
    Refuse(Failure),
    /// Not a member's first frame: close without an answer.
    Drop(&'static str),
}

/// Judges a connection's first frame; `on_this_host`: whether the peer is on rank 0's host.
pub(super) fn challenge(job: &Job, hello: &Frame, peer: &str, on_this_host: bool) -> Greeting {
    if hello.kind != KIND_HELLO {
        return Greeting::Drop("a first frame that is no hello");
    }
    if job.secret.own_host && !on_this_host {
        return Greeting::Refuse(Failure::new(
            format!("rank {} has no job token, and {peer} is not known to be on its host", job.names.root()),
            "set TOKENYARD_TOKEN to the same random string on all ranks; torchrun's default run id \"none\" is no secret",
        ));
    }
    let nonce = match (wire::hello_nonce(&hello.body), wire::decode(hello)) {
        (Ok((nonce, _)), _) if hello.version != VERSION => nonce,
        (Err(_), _) if hello.version != VERSION => return Greeting::Refuse(other_version(peer, hello.version)),
        (_, Ok(Message::Hello { nonce, own_host })) if own_host == job.secret.own_host => nonce,
        (_, Ok(Message::Hello { own_host, .. })) => {
            return Greeting::Refuse(token_differs(job, own_host));
        }
        _ => return Greeting::Drop("a malformed hello"),
    };
    match secret::nonce() {
        Ok(root) => Greeting::Challenge(Nonces { member: nonce, root }),
        Err(failure) => Greeting::Refuse(failure),
    }
}

/// Judges the answer to a challenge; `taken`: whether a rank has joined.
pub(super) fn judge(job: &Job, join: &Frame, nonces: &Nonces, peer: &str, taken: impl Fn(Rank) -> bool) -> Judgement {
    if join.kind != KIND_JOIN {
        return Judgement::Drop("a second frame that proves nothing");
    }
    let Ok((proof, fields)) = wire::first_bytes(&join.body) else {
        return Judgement::Drop("a malformed proof");
    };
    let known = job.secret.proved(Role::Member, nonces, fields, &proof);
    if join.version != VERSION {
        let failure = other_version(peer, join.version);
        return if known { Judgement::Stop(failure) } else { Judgement::Refuse(failure) };
    }
    if !known {
        return Judgement::Refuse(token_differs(job, job.secret.own_host));
    }
    match wire::decode(join) {
        Ok(Message::Join { rank, world, host, terms, .. }) => match difference(job, rank, world, &terms, peer) {
            Some(failure) => Judgement::Differ(failure),
            None => place(job, rank, host, peer, taken),
        },
        _ => Judgement::Drop("a malformed proof"),
    }
}

/// Refusal of a peer with another secret. Without a token, the secret is that of a host's user.
fn token_differs(job: &Job, theirs_own_host: bool) -> Failure {
    let whose = match (theirs_own_host, job.secret.own_host) {
        (false, false) => "",
        (true, true) => " (neither has one, and they are not of one user and host)",
        (true, false) => " (this rank has none)",
        (false, true) => " (which has none)",
    };
    Failure::new(
        format!("the job token differs from that of rank {}{whose}", job.names.root()),
        "set the same TOKENYARD_TOKEN on all ranks, and another TOKENYARD_PORT for another job",
    )
}

/// What a rank and rank 0 disagree on. The generation is compared first: in another job it differs.
fn difference(job: &Job, rank: u32, world: u32, terms: &Terms, peer: &str) -> Option<Failure> {
    let generations = job.terms.generation == terms.generation;
    let (who, root, own) = (terms.who(rank), job.names.root(), job.names.size());
    if generations && world as usize != own {
        let what = format!(
            "{who} at {peer} has a world of {world} ranks (members {}) and rank {root} one of {own} (members {})",
            quoted(terms.members.as_bytes()),
            job.terms.members
        );
        return Some(Failure::new(what, "set the same WORLD_SIZE on all ranks, and regroup with the same members"));
    }
    job.terms.difference(terms, (&who, peer), root)
}

fn place(job: &Job, rank: u32, host: String, peer: &str, taken: impl Fn(Rank) -> bool) -> Judgement {
    let refuse = |what: String, advice: &str| Judgement::Refuse(Failure::new(what, advice));
    let (world, name) = (job.names.size(), job.names.of(Rank(rank)));
    if rank as usize >= world {
        return refuse(format!("rank {rank} at {peer} is not below the world size {world}"), "correct its RANK");
    }
    if rank == 0 || taken(Rank(rank)) {
        return refuse(
            format!("rank {name} has joined already and came again from {peer}"),
            "give each process its own RANK",
        );
    }
    if !host.is_empty() && !is_host(&host) {
        let what = format!("rank {name} at {peer} gives {host:?} as its host");
        return refuse(what, "set its TOKENYARD_ADDR to a name or address of its host, or not at all");
    }
    Judgement::Admit(Rank(rank), Some(host).filter(|host| !host.is_empty()))
}

/// The error text for different versions; both sides report it.
pub(super) fn other_version(peer: &str, theirs: u16) -> Failure {
    Failure::new(
        format!("the peer at {peer} speaks bootstrap version {theirs} and this rank speaks version {VERSION}"),
        "install the same release on all ranks",
    )
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

    const NONCES: Nonces = Nonces { member: [1; 32], root: [2; 32] };

    /// A Join with its proof, of any version.
    fn proved(token: &str, version: u16, mut join: Frame) -> Frame {
        let proof = Secret::token(token).prove(Role::Member, &NONCES, &join.body[32..]);
        join.body[..32].copy_from_slice(&proof);
        Frame { version, ..join }
    }

    fn from_host(token: &str, rank: u32, world: u32, host: &str) -> Frame {
        let join = Message::Join { proof: [0; 32], rank, world, host: host.into(), terms: terms(1) };
        proved(token, VERSION, frame(&wire::encode(&join).unwrap()))
    }

    fn job(secret: Secret) -> Job {
        Job { secret, names: Names::all(4), terms: terms(1) }
    }

    fn ask(frame: &Frame) -> Judgement {
        judge(&job(Secret::token("secret")), frame, &NONCES, "there", |rank| rank == Rank(2))
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
            let refused =
                matches!(judgement, Judgement::Refuse(_)) || world != 4 && matches!(judgement, Judgement::Differ(_));
            assert!(refused, "{token} {rank} {world}");
        }
        assert!(matches!(ask(&frame(&wire::encode(&Message::Goodbye).unwrap())), Judgement::Drop(_)));
    }

    #[test]
    fn a_stranger_of_another_version_that_stops_the_job() {
        let mut stranger = hello("guess", 1, 4);
        stranger.version = VERSION + 1;
        assert!(matches!(ask(&stranger), Judgement::Refuse(_)));
        let mut member = hello("secret", 1, 4);
        member.body.extend_from_slice(b"fields of the future");
        let member = proved("secret", VERSION + 1, member);
        let Judgement::Stop(failure) = ask(&member) else { panic!("a member of another version went unnoticed") };
        let [own, theirs] = [VERSION, VERSION + 1].map(|version| format!("version {version}"));
        assert!(failure.what.contains(&own) && failure.what.contains(&theirs), "{}", failure.what);
    }

    #[test]
    fn a_hello_with_too_many_bytes_admitted() {
        let mut long = hello("secret", 1, 4);
        long.body.push(0);
        assert!(matches!(ask(&long), Judgement::Refuse(_)), "the appended byte is not proved");
        let long = proved("secret", VERSION, long);
        assert!(matches!(ask(&long), Judgement::Drop(_)));
    }

    #[test]
    fn an_impossible_host_reported_to_everyone() {
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

    fn greet(job: &Job, own_host: bool, on_this_host: bool) -> Greeting {
        let hello = wire::encode(&Message::Hello { nonce: [5; 32], own_host }).unwrap();
        challenge(job, &frame(&hello), "10.0.0.7:5", on_this_host)
    }

    #[test]
    fn a_peer_of_another_host_challenged_without_a_token() {
        let (token, host) = (job(Secret::token("secret")), job(Secret::host().unwrap()));
        let refusal = |greeting| match greeting {
            Greeting::Refuse(failure) => failure.error().to_string(),
            other => panic!("{other:?}"),
        };
        for own_host in [true, false] {
            let text = refusal(greet(&host, own_host, false));
            assert!(
                text.contains("10.0.0.7") && text.contains("TOKENYARD_TOKEN") && text.contains("\"none\""),
                "{text}"
            );
        }
        assert!(refusal(greet(&token, true, false)).contains("this rank has none"));
        assert!(refusal(greet(&host, false, true)).contains("which has none"));
        assert!(matches!(greet(&host, true, true), Greeting::Challenge(_)));
        let challenges = [0, 1].map(|_| greet(&token, false, false));
        let roots = challenges.map(|greeting| match greeting {
            Greeting::Challenge(Nonces { member, root }) if member == [5; 32] => root,
            other => panic!("{other:?}"),
        });
        assert!(roots[0] != roots[1], "a repeated nonce");
    }

    #[test]
    fn a_version_that_shows_its_token_not_notified_of_this_one() {
        let body = [&6u16.to_le_bytes()[..], b"secret", &[1, 0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
        let hello = Frame { version: 2, kind: KIND_HELLO, body };
        let greeting = challenge(&job(Secret::token("secret")), &hello, "there", true);
        assert!(matches!(greeting, Greeting::Refuse(failure) if failure.what.contains("version 2")));
    }
}
