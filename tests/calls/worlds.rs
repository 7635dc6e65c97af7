//! Worlds over the caller's own all-gather: of threads that meet in a table, and of processes with sockets of this
//! test. The all-gather's results may be late, too few, another rank's or another step's.

use crate::rig;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rig::{PATIENCE, Rig};
use tokenyard::{AllGather, Device, Error, Rank, Result, World};

/// A deadline that a test waits out on purpose.
const SHORT: Duration = Duration::from_millis(300);
const CHILD: &str = "TOKENYARD_TEST_WORLD_CHILD";

// ---- an all-gather of threads

struct Round {
    number: u64,
    parts: Vec<Option<Vec<u8>>>,
    last: Vec<Vec<u8>>,
}

/// The meeting point of the ranks of one process.
struct Table {
    round: Mutex<Round>,
    over: Condvar,
}

impl Table {
    fn new(ranks: usize) -> Arc<Table> {
        let round = Round { number: 0, parts: vec![None; ranks], last: Vec::new() };
        Arc::new(Table { round: Mutex::new(round), over: Condvar::new() })
    }

    fn meet(&self, rank: usize, what: &str, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut round = self.round.lock().unwrap();
        let number = round.number;
        round.parts[rank] = Some(own.to_vec());
        if round.parts.iter().all(Option::is_some) {
            round.last = round.parts.iter_mut().filter_map(Option::take).collect();
            round.number += 1;
            self.over.notify_all();
        }
        let (round, _) = self.over.wait_timeout_while(round, timeout, |round| round.number == number).unwrap();
        if round.number == number {
            let (what, advice) = (format!("nobody else came to \"{what}\""), "of this test");
            return Err(Error::bootstrap(what, advice));
        }
        Ok(round.last.clone())
    }

    fn of(self: &Arc<Table>, rank: usize) -> impl AllGather + 'static {
        let table = self.clone();
        move |what: &str, own: &[u8], timeout: Duration| table.meet(rank, what, own, timeout)
    }
}

/// Runs `body` as each rank of a world over a table.
fn over<T: Send>(ranks: usize, body: impl Fn(World) -> T + Sync) -> Vec<T> {
    let table = Table::new(ranks);
    std::thread::scope(|scope| {
        let run = |rank| {
            let (table, body) = (&table, &body);
            scope.spawn(move || body(World::over(rank, ranks, None, table.of(rank)).unwrap()))
        };
        let threads: Vec<_> = (0..ranks).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn text<T: std::fmt::Debug>(outcome: Result<T>) -> String {
    match outcome {
        Err(error @ Error::Bootstrap { .. }) => error.to_string(),
        other => panic!("a Bootstrap error was due, not {other:?}"),
    }
}

/// Everything that a context needs of a world.
fn use_it(world: &World) {
    let (rank, size) = (world.rank().index(), world.size());
    assert!(!world.same_process() && world.lost_peers().is_empty() && world.refused() == 0);
    for round in 0..5 {
        let parts = world.all_gather("parts", &vec![rank as u8; round * (rank + 1)]).unwrap();
        let expected: Vec<Vec<u8>> = (0..size).map(|r| vec![r as u8; round * (r + 1)]).collect();
        assert_eq!(parts, expected);
    }
    world.agree("nothing", None).unwrap();
    let own = std::fs::File::open("/dev/null").unwrap();
    let fds = world.exchange_fds(own.as_fd()).unwrap();
    assert_eq!(fds.iter().map(Option::is_some).collect::<Vec<_>>(), (0..size).map(|r| r != rank).collect::<Vec<_>>());
    let rigs = [Rig::new(world), Rig::new(world)];
    (0..4).for_each(|salt| rigs[salt % 2].good_round(salt));
    world.barrier("used").unwrap();
    drop(rigs);
}

#[test]
fn contexts_over_an_all_gather_of_threads() {
    for ranks in [1, 2, 4] {
        over(ranks, |world| {
            assert_eq!(world.local_rank(), world.rank().index());
            use_it(&world)
        });
    }
}

#[test]
fn ranks_of_other_nodes_get_no_descriptors() {
    over(4, |world| {
        let world = world.with_nodes(&[3, 1]).unwrap();
        let own = std::fs::File::open("/dev/null").unwrap();
        let given = world.exchange_fds(own.as_fd()).unwrap().iter().filter(|fd| fd.is_some()).count();
        assert_eq!(given, if world.rank() == Rank(3) { 0 } else { 2 });
    });
}

// ---- an all-gather that goes wrong

#[test]
fn ranks_and_sizes_that_cannot_be() {
    let never = |_: &str, _: &[u8], _: Duration| -> Result<Vec<Vec<u8>>> { panic!("called") };
    let cases = [
        (2, 2, "configuration rank is 2: ranks are counted from 0, so give one below the size 2"),
        (0, 0, "configuration size is 0: give the number of ranks, 1 to 16384"),
        (0, 16_385, "configuration size is 16385: give the number of ranks, 1 to 16384"),
        (usize::MAX, usize::MAX, "configuration size is 18446744073709551615: give the number of ranks, 1 to 16384"),
    ];
    for (rank, size, expected) in cases {
        let error = World::over(rank, size, None, never).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn an_all_gather_that_fails_ends_the_collectives_with_its_own_error() {
    let fails = |_: &str, _: &[u8], _: Duration| Err(Error::transport("of mine", "x"));
    let error = World::over(0, 2, None, fails).unwrap_err();
    assert_eq!(error, Error::transport("of mine", "x"));
    let table = Table::new(1);
    let second_fails = {
        let calls = Mutex::new(0);
        move |what: &str, own: &[u8], timeout: Duration| {
            *calls.lock().unwrap() += 1;
            if *calls.lock().unwrap() == 2 {
                return Err(Error::transport("of mine", "x"));
            }
            table.meet(0, what, own, timeout)
        }
    };
    let world = World::over(0, 1, Some(7), second_fails).unwrap();
    assert_eq!(world.local_rank(), 7);
    assert_eq!(world.barrier("first"), Err(Error::transport("of mine", "x").ending()));
    let later = text(world.barrier("later"));
    assert!(later.contains("\"first\" failed") && later.contains("of mine"), "{later}");
}

#[test]
fn parts_that_are_too_few_another_ranks_or_another_steps() {
    type Change = fn(&mut Vec<Vec<u8>>);
    let cases: [(Change, &str); 7] = [
        (|parts| drop(parts.pop()), "gave 1 parts for 2 ranks"),
        (|parts| parts.push(Vec::new()), "gave 3 parts for 2 ranks"),
        (|parts| parts.clear(), "gave 0 parts for 2 ranks"),
        (|parts| parts.swap(0, 1), "gave rank 1's part in the place of rank 0's"),
        (|parts| parts[1].truncate(20), "20 bytes that this library did not send are rank 1's part"),
        (|parts| parts[1][4] = 9, "rank 1 has version 9 of this protocol"),
        (|parts| parts[0].push(0), "own part came back with other bytes"),
    ];
    for (change, expected) in cases {
        let table = Table::new(2);
        let message = std::thread::scope(|scope| {
            let peer = scope.spawn(|| World::over(1, 2, None, table.of(1)).unwrap());
            let gather = {
                let table = table.clone();
                move |what: &str, own: &[u8], timeout: Duration| {
                    let mut parts = table.meet(0, what, own, timeout)?;
                    change(&mut parts);
                    Ok(parts)
                }
            };
            let message = text(World::over(0, 2, None, gather));
            peer.join().unwrap();
            message
        });
        assert!(message.contains(expected) && message.contains("world over an all-gather"), "{message}");
    }
}

#[test]
fn an_answer_of_the_round_before_is_not_taken_for_this_one() {
    let (table, last) = (Table::new(1), Mutex::new(Vec::<Vec<Vec<u8>>>::new()));
    let stale = move |what: &str, own: &[u8], timeout: Duration| {
        let parts = table.meet(0, what, own, timeout)?;
        let mut last = last.lock().unwrap();
        if last.len() == 2 {
            return Ok(last[1].clone());
        }
        last.push(parts.clone());
        Ok(parts)
    };
    let world = World::over(0, 1, None, stale).unwrap();
    world.all_gather("step", b"a").unwrap();
    let message = text(world.all_gather("step", b"a"));
    assert!(message.contains("rank 0 calls \"step\", its collective number 1, during number 2"), "{message}");
}

#[test]
fn ranks_that_call_different_steps_are_all_notified() {
    let texts = over(2, |world| {
        let what = if world.rank() == Rank(0) { "plan" } else { "arena" };
        text(world.all_gather(what, b"x"))
    });
    assert!(texts.iter().all(|text| text.contains("\"plan\"") && text.contains("\"arena\"")), "{texts:?}");
}

#[test]
fn an_all_gather_that_hangs_is_given_the_deadline_and_keeps_it() {
    let texts = over(2, |world| {
        let world = world.with_timeout(SHORT);
        if world.rank() == Rank(1) {
            return String::new();
        }
        let start = Instant::now();
        let built = AllToAllAlone(&world).build();
        assert!(start.elapsed() >= SHORT && start.elapsed() < PATIENCE / 2);
        assert!(text(world.barrier("next")).contains("and with it all later ones"));
        text(built)
    });
    assert!(texts[0].contains("nobody else came to \"configuration of a context\""), "{texts:?}");
}

/// Builds a context whose peers do not come.
struct AllToAllAlone<'a>(&'a World);

impl AllToAllAlone<'_> {
    fn build(&self) -> Result<()> {
        rig::builder(self.0, &Device::cpu()?).build().map(drop)
    }
}

// ---- later generations

#[test]
fn survivors_regroup_over_an_all_gather_of_their_own() {
    let (next, members) = (Table::new(2), [Rank(0), Rank(2)]);
    over(3, |world| {
        let before = Rig::new(&world);
        before.good_round(0);
        let refused = world.regroup(1, &members).unwrap_err().to_string();
        assert!(refused.contains("regroup_over"), "{refused}");
        let Some(rank) = members.iter().position(|member| *member == world.rank()) else {
            let error = world.regroup_over(1, &members, next.of(0)).unwrap_err();
            assert!(matches!(error, Error::Config { name: "members", .. }), "{error}");
            return;
        };
        let error = world.regroup_over(0, &members, next.of(rank)).unwrap_err();
        assert!(matches!(error, Error::Config { name: "generation", .. }), "{error}");
        let later = world.regroup_over(1, &members, next.of(rank)).unwrap();
        assert_eq!((later.rank().index(), later.size(), later.generation()), (rank, 2, 1));
        assert_eq!((later.original(later.rank()), later.first_size()), (world.rank(), 3));
        assert!(matches!(before.ep.check(), Err(Error::Generation { generation: 0, newest: 1, .. })));
        drop(before);
        later.barrier("regrouped").unwrap();
    });
}

#[test]
fn members_that_disagree_form_no_world() {
    let next = Table::new(2);
    let texts = over(3, |world| {
        let members = if world.rank() == Rank(0) { [Rank(0), Rank(1)] } else { [Rank(0), Rank(2)] };
        if world.rank() == Rank(1) {
            return None;
        }
        let rank = usize::from(world.rank() != Rank(0));
        Some(text(world.regroup_over(1, &members, next.of(rank))))
    });
    let messages: Vec<String> = texts.into_iter().flatten().collect();
    assert!(
        messages.len() == 2 && messages.iter().all(|text| text.contains("Rank(1)") && text.contains("Rank(2)")),
        "{messages:?}"
    );
}

#[test]
fn generations_that_differ_are_reported_with_both_numbers() {
    let next = Table::new(2);
    let texts = over(2, |world| {
        let generation = 1 + world.rank().0;
        text(world.regroup_over(generation, &[Rank(0), Rank(1)], next.of(world.rank().index())))
    });
    assert!(texts.iter().all(|text| text.contains("generation 1") && text.contains("generation 2")), "{texts:?}");
}

/// Ranks 1 and 2 of three are 0 and 1 of the next generation.
#[test]
fn survivors_are_named_by_their_ranks_in_the_first_generation() {
    let next = Table::new(2);
    let texts = over(3, |world| {
        let own = world.rank();
        if own == Rank(0) {
            return None;
        }
        let later = world.regroup_over(1, &[1, 2].map(Rank), next.of(own.index() - 1)).unwrap();
        let fault = (own == Rank(2)).then(|| Error::device("a fault", "of this test"));
        let failed = later.agree("a step", fault.as_ref()).unwrap_err().to_string();
        let hidden = rig::builder(&later, &Device::cpu().unwrap()).hidden(64 * own.index());
        let differs = hidden.build().map(drop).unwrap_err().to_string();
        let steps = text(later.barrier(if own == Rank(1) { "left" } else { "right" }));
        Some([failed, differs, steps])
    });
    let [None, Some(first), Some(second)] = &texts[..] else { panic!("{texts:?}") };
    assert!(first[0].contains("rank 2 failed in a step"), "{first:?}");
    assert!(first[1].contains("rank 2 has hidden=128") && second[1].contains("rank 1 has hidden=64"), "{texts:?}");
    assert!(first[2].contains("rank 2 calls \"right\"") && first[2].contains("of rank 1"), "{first:?}");
    assert!(second[2].contains("rank 1 calls \"left\"") && second[2].contains("of rank 2"), "{second:?}");
}

// ---- texts of others

#[test]
fn texts_of_others_are_shown_in_one_line_that_ends() {
    const RED: &str = "\u{1b}[31m\r\n\0";
    let long = RED.repeat(2000);
    // A configuration that ranks receive is not the one that the other rank sent.
    let garbled = |what: &str, theirs: &mut Vec<u8>| {
        if what == "configuration" {
            theirs.truncate(28 + what.len() + 9);
            theirs.extend(RED.repeat(2000).into_bytes());
        }
    };
    let table = Table::new(2);
    let texts = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let (table, long) = (table.clone(), &long);
            scope.spawn(move || {
                let gather = move |what: &str, own: &[u8], timeout: Duration| {
                    let mut parts = table.meet(rank, what, own, timeout)?;
                    garbled(what, &mut parts[1 - rank]);
                    Ok(parts)
                };
                let world = World::over(rank, 2, None, gather).unwrap();
                let fault = (rank == 1).then(|| Error::device(long.as_str(), "of this test"));
                let failed = world.agree("a step", fault.as_ref()).map(drop);
                let built = rig::builder(&world, &Device::cpu().unwrap()).build().map(drop);
                let steps = world.clone().with_timeout(SHORT).barrier(if rank == 0 { "left" } else { RED });
                [failed, built, steps].map(|outcome| outcome.map_or_else(|error| error.to_string(), |()| String::new()))
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    let messages = &texts[0];
    assert!(
        messages[0].contains("rank 1 failed in a step") && messages[1].contains("same configuration"),
        "{messages:?}"
    );
    for text in messages {
        assert!(!text.contains(char::is_control) && text.contains("\\u{1b}[31m\\r\\n\\0"), "{text:?}");
        assert!(text.len() < 20_000, "{} bytes", text.len());
    }
}

// ---- processes

/// A star of sockets around rank 0, with lengths ahead of parts.
struct Star {
    rank: usize,
    sockets: Mutex<Vec<TcpStream>>,
}

fn put(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(bytes.len() as u32).to_le_bytes())?;
    stream.write_all(bytes)
}

fn get(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

impl Star {
    fn gather(&self, own: &[u8], timeout: Duration) -> std::io::Result<Vec<Vec<u8>>> {
        let mut sockets = self.sockets.lock().unwrap();
        sockets.iter().try_for_each(|socket| socket.set_read_timeout(Some(timeout)))?;
        if self.rank > 0 {
            put(&mut sockets[0], own)?;
            let count = u64::from_le_bytes(get(&mut sockets[0])?.try_into().unwrap());
            return (0..count).map(|_| get(&mut sockets[0])).collect();
        }
        let mut parts = vec![own.to_vec()];
        for socket in sockets.iter_mut() {
            parts.push(get(socket)?);
        }
        for socket in sockets.iter_mut() {
            put(socket, &(parts.len() as u64).to_le_bytes())?;
            parts.iter().try_for_each(|part| put(socket, part))?;
        }
        Ok(parts)
    }
}

impl AllGather for Star {
    fn all_gather(&self, what: &str, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let failed = |error| Error::bootstrap(format!("{what}: {error}"), "see the peers");
        self.gather(own, timeout).map_err(failed)
    }
}

/// Kills the processes that a failing test leaves.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn contexts_over_an_all_gather_of_processes() {
    const NAME: &str = "worlds::contexts_over_an_all_gather_of_processes";
    if let Ok(place) = std::env::var(CHILD) {
        let numbers: Vec<usize> = place.split(' ').map(|number| number.parse().unwrap()).collect();
        let [rank, size, port] = numbers[..] else { panic!("{place}") };
        let mut socket = TcpStream::connect(("127.0.0.1", port as u16)).unwrap();
        put(&mut socket, &(rank as u64).to_le_bytes()).unwrap();
        let star = Star { rank, sockets: Mutex::new(vec![socket]) };
        use_it(&World::over(rank, size, None, star).unwrap());
        return;
    }
    for size in [2, 4] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let start = |rank: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args([NAME, "--exact", "--nocapture", "--test-threads=1"])
                .env(CHILD, format!("{rank} {size} {port}"))
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        let mut children = Children((1..size).map(start).collect());
        let mut sockets: Vec<(u64, TcpStream)> = (1..size)
            .map(|_| {
                let mut socket = listener.accept().unwrap().0;
                (u64::from_le_bytes(get(&mut socket).unwrap().try_into().unwrap()), socket)
            })
            .collect();
        sockets.sort_by_key(|(rank, _)| *rank);
        let sockets = Mutex::new(sockets.into_iter().map(|(_, socket)| socket).collect());
        use_it(&World::over(0, size, None, Star { rank: 0, sockets }).unwrap());
        for child in &mut children.0 {
            assert!(child.wait().unwrap().success());
        }
    }
}
