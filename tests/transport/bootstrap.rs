//! Worlds form, agree, notice dead ranks, and withstand strangers at the port.
//!
//! Ranks are threads that share a `World`, threads that each join over TCP, or processes: then this test
//! program starts itself again with `CHILD` set, and the test of that name plays the child.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tokenyard::internals::base::{Error, Rank, wait};
use tokenyard::internals::transport::{Bootstrap, World};

mod regroup;
pub mod support;
use support::*;

// ---- worlds of threads

#[test]
fn threads_get_parts_of_the_wrong_round_or_rank() {
    for size in [1, 2, 8] {
        threaded(size, |world| {
            assert!(world.same_process() && world.lost_peers().is_empty());
            exchange_many(world)
        });
    }
}

#[test]
fn threads_wait_for_an_absent_rank_without_naming_it() {
    let mut worlds = World::threads(3).unwrap();
    let _sleeper = worlds.remove(1);
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || {
                let world = world.with_timeout(SHORT);
                let error = bootstrap_error(world.barrier("gate"));
                let text = error.to_string();
                assert!(text.contains("\"gate\" and rank 1 has not arrived") && error.is_fatal(), "{error:?}");
                assert_eq!(bootstrap_text(world.barrier("next")), text, "a failed world starts another round");
            });
        }
    });
}

#[test]
fn threads_wait_for_one_that_left() {
    let start = Instant::now();
    threaded(2, |world| {
        if world.rank() == Rank(0) {
            let text = bootstrap_text(world.barrier("gate"));
            assert!(text.contains("rank 1 has left"), "{text}");
        }
    });
    assert!(start.elapsed() < PATIENCE / 2);
}

#[test]
fn threads_exchange_bytes_of_different_steps() {
    let texts = threaded(2, |world| {
        let what = if world.rank() == Rank(0) { "plan" } else { "arena" };
        bootstrap_text(world.all_gather(what, b"x"))
    });
    assert_eq!(texts[0], texts[1]);
    assert!(texts[0].contains("\"plan\"") && texts[0].contains("\"arena\""), "{}", texts[0]);
}

#[test]
fn threads_swap_each_others_descriptors() {
    for size in [1, 2, 8] {
        threaded(size, exchange_memfds);
    }
}

#[test]
fn a_lock_held_while_other_fibers_of_the_thread_run() {
    thread_local!(static OTHER: RefCell<Option<World>> = const { RefCell::new(None) });
    // Stands for the fiber scheduler: the first wait of rank 0 runs rank 1 on the same thread to its end.
    fn run_other(_site: &'static str, _switches: u32) {
        if let Some(world) = OTHER.take() {
            exchange_one(&world);
        }
    }
    fn exchange_one(world: &World) {
        let parts = world.all_gather("fiber", &[world.rank().0 as u8]).unwrap();
        assert_eq!(parts, [[0], [1]]);
    }
    let mut worlds = World::threads(2).unwrap();
    OTHER.set(worlds.pop());
    wait::set_fibers(Some(wait::Fibers { yield_fiber: run_other, now: wait::system_now }));
    exchange_one(&worlds[0]);
    wait::set_fibers(None);
}

#[test]
fn clones_of_one_rank_in_a_collective_at_once() {
    threaded(2, |world| {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let world = world.clone();
                scope.spawn(move || (0..50).for_each(|_| world.barrier("same").unwrap()));
            }
        });
    });
}

#[test]
fn a_regroup_of_threads_that_failed_never_tried_again() {
    let tries = AtomicBool::new(false);
    threaded(3, |world| {
        let (rank, members) = (world.rank(), [Rank(0), Rank(2)]);
        if rank == Rank(1) {
            return;
        }
        if rank == Rank(2) {
            // Late for the first try.
            wait::poll("first try", PATIENCE, || tries.load(Ordering::Relaxed).then_some(())).unwrap();
        } else {
            let error = bootstrap_error(world.clone().with_timeout(SHORT / 4).regroup(1, &members));
            assert!(error.to_string().contains("rank 2 has not arrived") && !error.is_fatal(), "{error:?}");
            tries.store(true, Ordering::Relaxed);
        }
        exchange_many(world.regroup(1, &members).unwrap());
    });
}

#[test]
fn a_rank_that_regroups_again_alone_leaves_the_world_as_it_is() {
    threaded(2, |world| {
        let next = world.regroup(1, &[Rank(0), Rank(1)]).unwrap();
        next.barrier("both are there").unwrap();
        if world.rank() == Rank(0) {
            let error = world.regroup(1, &[Rank(0), Rank(1)]).map(drop).unwrap_err();
            assert!(error.to_string().contains("this rank is of generation 1; give a later one"), "{error}");
        }
        exchange_many(next);
    });
}

/// For ranks 1, 2 and 3 of the first generation, which are 0, 1 and 2 of the later ones: the errors of each, which are
/// that rank 3 failed, that rank 3 did not come to a collective, and that rank 1 has left.
fn errors_naming_rank_3(world: &World) -> Option<[String; 3]> {
    let members = [1, 2, 3].map(Rank);
    // A rank that leaves before the others are notified that all have joined would end their joining.
    world.barrier("up").unwrap();
    if world.rank() == Rank(0) {
        return None;
    }
    let (own, is_culprit) = (world.rank(), world.rank() == Rank(3));
    let next = world.regroup(1, &members).unwrap();
    let mine = is_culprit.then(|| Error::device("a fault", "of this test"));
    let failed = next.agree("a step", mine.as_ref()).unwrap_err().to_string();
    // The culprit keeps its world until the others have been notified.
    let absent =
        if is_culprit { String::new() } else { bootstrap_text(next.clone().with_timeout(SHORT).barrier("gate")) };
    let last = world.regroup(2, &members).unwrap();
    last.barrier("up").unwrap();
    drop(next);
    if own == Rank(1) {
        return Some([failed, absent, String::new()]);
    }
    Some([failed, absent, bootstrap_text(last.barrier("end"))])
}

fn assert_rank_3_is_named(errors: &[Option<[String; 3]>]) {
    let [_, Some(first), Some(second), Some(culprit)] = errors else { panic!("{errors:?}") };
    assert!(culprit[0].contains("a fault"), "{errors:?}");
    for errors in [first, second] {
        assert!(errors[0].contains("rank 3 failed in a step") && errors[0].contains("mend rank 3 and"), "{errors:?}");
        let waited = [1, 2].map(|rank| format!("rank {rank} waited 400 ms in collective \"gate\" and rank 3 has not"));
        assert!(waited.iter().any(|text| errors[1].contains(text)), "{errors:?}");
    }
    assert!([second, culprit].iter().all(|errors| errors[2].contains("rank 1 has left the world")), "{errors:?}");
}

#[test]
fn threads_of_a_later_generation_named_by_their_new_ranks() {
    assert_rank_3_is_named(&threaded(4, |world| errors_naming_rank_3(&world)));
    let texts = threaded(4, |world| {
        (world.rank() > Rank(0)).then(|| {
            let next = world.regroup(1, &[1, 2, 3].map(Rank)).unwrap();
            let text = bootstrap_text(next.barrier(if world.rank() == Rank(3) { "left" } else { "right" }));
            next.barrier("none leaves before").map(drop).unwrap_err();
            text
        })
    });
    let texts: Vec<String> = texts.into_iter().flatten().collect();
    assert!(
        texts.iter().all(|text| text == &texts[0] && text.contains("rank 3 calls") | text.contains("while rank 3"))
    );
}

// ---- worlds of members that join over TCP

#[test]
fn members_of_a_later_generation_named_by_their_new_ranks() {
    assert_rank_3_is_named(&joined(4, |world| errors_naming_rank_3(&world)));
}

/// Regroups that fail: rank 3 comes alone to one generation, and not to another.
#[test]
fn members_that_do_not_come_again_named_by_their_new_ranks() {
    const FORMING: Duration = Duration::from_secs(3);
    let place = place();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let place = &place;
            scope.spawn(move || {
                let world = World::join(&Bootstrap { timeout: FORMING, ..bootstrap(place, rank, 4) }).unwrap();
                world.barrier("up").unwrap();
                let text = match rank {
                    0 => return,
                    3 => bootstrap_text(world.regroup(2, &[1, 3].map(Rank))),
                    _ => bootstrap_text(world.regroup(1, &[1, 2, 3].map(Rank))),
                };
                let expected = match rank {
                    3 => "rank 3 waited 3000 ms for rank 1 at ",
                    _ => "rank 1 waited 3000 ms and rank 3 has not joined",
                };
                assert!(text.contains(expected) && (rank < 3 || text.contains("start rank 1 or see")), "{text}");
            });
        }
    });
}

#[test]
fn members_get_parts_of_the_wrong_round_or_rank() {
    for size in [1, 2, 8] {
        joined(size, |world| {
            assert!(!world.same_process());
            exchange_many(world)
        });
    }
}

#[test]
fn a_part_larger_than_a_socket_buffer_torn() {
    joined(3, |world| {
        // Nobody is absent, so nothing is learnt from a deadline; a loaded machine takes long for so many bytes.
        let world = world.with_timeout(PATIENCE * 9);
        let part = vec![world.rank().0 as u8 + 1; 5 << 20];
        let parts = world.all_gather("large", &part).unwrap();
        assert!(parts.iter().enumerate().all(|(r, p)| p.len() == 5 << 20 && p.iter().all(|b| *b == r as u8 + 1)));
    });
}

#[test]
fn parts_too_large_together_hang_instead_of_failing() {
    joined(2, |world| {
        let error = bootstrap_error(world.all_gather("large", &vec![0; 40 << 20]));
        assert!(error.to_string().contains("exceed") && error.is_fatal(), "{error:?}");
    });
    let one = World::threads(1).unwrap().remove(0).all_gather("large", &vec![0; 65 << 20]);
    assert!(matches!(one, Err(Error::Argument { name: "payload", .. })));
}

#[test]
fn a_late_rank_0_refuses_those_who_were_early() {
    let place = place();
    std::thread::scope(|scope| {
        let early = scope.spawn(|| World::join(&bootstrap(&place, 1, 2)).unwrap().barrier("up").unwrap());
        std::thread::sleep(SHORT);
        World::join(&bootstrap(&place, 0, 2)).unwrap().barrier("up").unwrap();
        early.join().unwrap();
    });
}

#[test]
fn rank_0_deaf_when_its_address_is_a_name() {
    let port = place().1;
    for token in [TOKEN, ""] {
        std::thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let b = Bootstrap { token: token.into(), ..bootstrap(&("localhost".into(), port), rank, 2) };
                    World::join(&b).unwrap().barrier("up").unwrap();
                });
            }
        });
    }
}

#[test]
fn a_rank_that_never_comes_named_on_no_rank() {
    let place = place();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for rank in [0, 1, 3] {
            let place = &place;
            scope.spawn(move || {
                let text = bootstrap_text(World::join(&Bootstrap { timeout: SHORT, ..bootstrap(place, rank, 5) }));
                assert!(text.contains("ranks 2, 4 have not joined"), "rank {rank}: {text}");
            });
        }
    });
    assert!(start.elapsed() < SHORT * 4);
}

#[test]
fn rank_0_that_never_comes_waited_for_without_end() {
    let text = bootstrap_text(World::join(&Bootstrap { timeout: SHORT, ..bootstrap(&place(), 1, 2) }));
    assert!(text.contains("for rank 0 at 127."), "{text}");
}

#[test]
fn members_wait_for_an_absent_rank_without_naming_it() {
    let (both_begin, gave_up) = (std::sync::Barrier::new(2), AtomicU32::new(0));
    joined(3, |world| {
        if world.rank() == Rank(2) {
            // Still a member, and not lost, while the others give up.
            wait::poll("others", PATIENCE, || (gave_up.load(Ordering::Relaxed) == 2).then_some(())).unwrap();
        } else {
            both_begin.wait();
        }
        // Far longer than the machine may pause one of the two, which the other would name, too.
        let world = world.with_timeout(SHORT * 8);
        let text = bootstrap_text(world.barrier("gate"));
        assert!(text.contains("\"gate\" and rank 2 has not arrived"), "{text}");
        assert!(world.lost_peers().is_empty());
        gave_up.fetch_add(1, Ordering::Relaxed);
    });
}

#[test]
fn an_orderly_end_reported_as_a_loss() {
    for leaver in 0..3 {
        joined(3, |world| {
            world.barrier("up").unwrap();
            if world.rank() == Rank(leaver) {
                return;
            }
            let start = Instant::now();
            let text = bootstrap_text(world.barrier("gate"));
            assert!(text.contains(&format!("rank {leaver} has left")), "{text}");
            assert!(start.elapsed() < PATIENCE / 2 && world.lost_peers().is_empty());
        });
    }
}

#[test]
fn members_exchange_bytes_of_different_steps() {
    let texts = joined(2, |world| {
        let what = if world.rank() == Rank(0) { "plan" } else { "arena" };
        bootstrap_text(world.all_gather(what, b"x"))
    });
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn members_swap_each_others_descriptors() {
    for size in [1, 2, 5] {
        joined(size, exchange_memfds);
    }
}

#[test]
fn a_second_world_on_the_same_port() {
    let place = place();
    for _ in 0..5 {
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let place = &place;
                scope.spawn(move || World::join(&bootstrap(place, rank, 2)).unwrap().barrier("up").unwrap());
            }
        });
    }
}

/// Where rank `rank` of a world of that place is reached: all of 127/8 is this host.
fn own_addr(place: &(String, u16), rank: u32) -> String {
    let last = place.0.splitn(3, '.').last().unwrap();
    format!("127.{}.{last}", 251 + rank)
}

/// Holds a port that a later generation must not need.
fn hold(addr: &str, port: u16) -> TcpListener {
    TcpListener::bind((addr, port)).unwrap()
}

#[test]
fn survivors_of_rank_0_that_meet_at_its_host() {
    let place = place();
    // Rank 0's host is gone with it: listeners that still answer there belong to nobody.
    let _gone: Vec<_> = (1..=3).map(|generation| hold(&place.0, place.1 + generation)).collect();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let place = &place;
            scope.spawn(move || {
                let own = Bootstrap { own_addr: Some(own_addr(place, rank)), ..bootstrap(place, rank, 4) };
                let world = World::join(&own).unwrap();
                world.barrier("up").unwrap();
                if rank == 0 {
                    return;
                }
                let second = world.regroup(1, &[1, 2, 3].map(Rank)).unwrap();
                assert_eq!(
                    (second.rank(), second.size(), second.original(second.rank())),
                    (Rank(rank - 1), 3, Rank(rank))
                );
                exchange_many(second.clone());
                // The host of the second goes, too.
                if rank == 1 {
                    return;
                }
                let third = second.regroup(2, &[2, 3].map(Rank)).unwrap();
                exchange_many(third);
                // An older world can regroup, too.
                let again = second.regroup(3, &[2, 3].map(Rank)).unwrap();
                again.barrier("again").unwrap();
                let error = again.regroup(4, &[Rank(9)]).map(drop).unwrap_err();
                assert!(matches!(error, Error::Config { name: "members", .. }), "{error}");
            });
        }
    });
}

/// A world of one rank listens nowhere, whatever the port.
#[test]
fn ports_of_generations_that_wrap() {
    let alone = |port, generation| {
        let own = Bootstrap { port, generation, ..bootstrap(&place(), 0, 1) };
        move |later| World::join(&own).unwrap().regroup(later, &[Rank(0)])
    };
    for (port, generation, last) in [(65_530, 0, 5), (65_530, 10, 15), (29_611, 0, 35_924)] {
        for beyond in [last + 1, u32::MAX - 29_610, u32::MAX] {
            match alone(port, generation)(beyond) {
                Err(Error::Config { name: "generation", value, advice, .. }) => {
                    assert_eq!(value, beyond.to_string());
                    assert!(advice.contains(&format!("give at most {last},")), "{advice}");
                    assert!(advice.contains(&format!("generation {generation} met on port {port}")), "{advice}");
                    let wanted = u64::from(port) + u64::from(beyond - generation);
                    assert!(advice.contains(&format!("on port {wanted}:")), "{advice}");
                }
                other => panic!("generation {beyond} behind {generation} on {port} gave {other:?}"),
            }
        }
        assert_eq!(alone(port, generation)(last).unwrap().generation(), last);
    }
    // A port that is lower than its generation's number is nothing special: ports differ as generations do.
    assert_eq!(alone(3, 7)(9).unwrap().generation(), 9);
}

#[test]
fn a_member_that_comes_back_as_the_first_of_its_generation() {
    let place = place();
    let _gone = hold(&place.0, place.1 + 1);
    let members = [0, 1, 2].map(Rank).to_vec();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (place, members) = (&place, &members);
            scope.spawn(move || {
                let own = Bootstrap { own_addr: Some(own_addr(place, rank)), ..bootstrap(place, rank, 3) };
                let world = World::join(&own).unwrap();
                world.barrier("up").unwrap();
                let next = if rank == 0 {
                    drop(world);
                    // A new process, which is given its own address and the port.
                    World::join(&Bootstrap {
                        addr: own_addr(place, 0),
                        port: place.1 + 1,
                        generation: 1,
                        members: Some(members.clone()),
                        ..own
                    })
                } else {
                    world.regroup(1, members)
                };
                exchange_many(next.unwrap());
            });
        }
    });
}

// ---- strangers, impostors and mistakes

/// Starts rank 0 of 2, lets `meddle` at the port, then joins as rank 1; the job must form all the same.
/// Returns how many connections rank 0 refused.
fn meddled(meddle: impl FnOnce(&(String, u16))) -> u64 {
    let place = place();
    std::thread::scope(|scope| {
        let root = scope.spawn(|| {
            let world = World::join(&bootstrap(&place, 0, 2)).unwrap();
            world.barrier("up").unwrap();
            world.refused()
        });
        meddle(&place);
        World::join(&bootstrap(&place, 1, 2)).unwrap().barrier("up").unwrap();
        root.join().unwrap()
    })
}

#[test]
fn garbage_on_the_port_stops_the_job() {
    let refused = meddled(|place| {
        // Connects and closes.
        drop(dial(place));
        // Random bytes; a request of another protocol.
        let noise: Vec<u8> = (0..9000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        talk(place, &noise);
        talk(place, b"GET / HTTP/1.1\r\n\r\n");
        // Half a frame, then closes.
        drop(dial(place).write_all(&hello(VERSION, false)[..20]));
        // A huge length, a length that only members may send, a first frame that is no hello.
        talk(place, &[&frame(VERSION, 1, b"")[..8], &u32::MAX.to_le_bytes()].concat());
        talk(place, &[&frame(VERSION, 1, b"")[..8], &(1u32 << 20).to_le_bytes()].concat());
        talk(place, &frame(VERSION, 5, &[0; 40]));
        // A hello with a token length beyond its end, and one followed by bytes.
        talk(place, &frame(VERSION, 1, &[255, 0, 1]));
        talk(place, &frame(VERSION, 1, &[&hello(VERSION, false)[12..], b"more"].concat()));
        // Two hellos; a proved join with impossible fields; and a join that is cut short.
        talk(place, &hello(VERSION, false).repeat(2));
        rest_of(asking(place, VERSION, TOKEN, b"I am rank 1", false));
        let mut stream = dial(place);
        stream.write_all(&hello(VERSION, false)).unwrap();
        stream.read_exact(&mut [0; 44]).unwrap();
        stream.write_all(&frame(VERSION, 12, &[0; 31])).unwrap();
        rest_of(stream);
    });
    assert_eq!(refused, 12);
}

#[test]
fn a_silent_connection_holds_up_the_others() {
    let mut silent = Vec::new();
    let start = Instant::now();
    meddled(|place| {
        silent.extend((0..20).map(|_| dial(place)));
        // And one that sends a byte now and then.
        silent.push(dial(place));
        silent[20].write_all(b"T").unwrap();
    });
    assert!(start.elapsed() < PATIENCE / 2);
}

#[test]
fn more_strangers_than_rank_0_has_room_for() {
    let mut silent = Vec::new();
    let refused = meddled(|place| silent.extend((0..300).map(|_| dial(place))));
    assert_eq!(refused, 300);
}

#[test]
fn a_slow_stranger_served_for_ever() {
    let refused = meddled(|place| {
        let mut stream = dial(place);
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let bytes = hello(VERSION, false);
        let start = Instant::now();
        for byte in bytes.iter().take(bytes.len() - 1).cycle() {
            // Ends when rank 0 has closed the connection.
            if stream.write_all(&[*byte]).is_err() || matches!(stream.read(&mut [0]), Ok(0)) {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "still served");
            if start.elapsed() > Duration::from_millis(100 * (bytes.len() as u64 - 2)) {
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    });
    assert_eq!(refused, 1);
}

#[test]
fn a_stranger_with_a_wrong_token_or_version_joins_or_stops_the_job() {
    let refused = meddled(|place| {
        let answer = ask(place, VERSION, "guess", 1, 2);
        assert!(answer.contains("token differs") && !answer.contains(TOKEN), "{answer}");
        let answer = ask(place, 7, "guess", 1, 2);
        assert!(answer.contains("version 7") && answer.contains("version 3"), "{answer}");
        let mistaken = Bootstrap { token: "guess".into(), ..bootstrap(place, 1, 2) };
        assert!(bootstrap_text(World::join(&mistaken)).contains("token differs"));
    });
    assert_eq!(refused, 3);
}

#[test]
fn a_member_of_another_version_understood_by_halves() {
    let place = place();
    std::thread::scope(|scope| {
        let root = scope.spawn(|| bootstrap_text(World::join(&bootstrap(&place, 0, 3))));
        let other = scope.spawn(|| bootstrap_text(World::join(&bootstrap(&place, 2, 3))));
        std::thread::sleep(SHORT);
        let answer = ask(&place, 7, TOKEN, 1, 3);
        for text in [answer, root.join().unwrap(), other.join().unwrap()] {
            assert!(text.contains("version 7") && text.contains("version 3"), "{text}");
        }
    });
}

#[test]
fn a_rank_0_of_another_version_understood_by_halves() {
    for (reply, expected) in
        [(frame(7, 2, b"words of the future"), "version 7"), (b"HTTP/1.1 400".to_vec(), "no frame")]
    {
        let place = place();
        let listener = TcpListener::bind((place.0.as_str(), place.1)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(&reply).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            });
            let text = bootstrap_text(World::join(&bootstrap(&place, 1, 2)));
            assert!(text.contains(expected), "{text}");
        });
    }
}

#[test]
fn two_processes_with_one_rank_both_admitted() {
    let place = place();
    std::thread::scope(|scope| {
        let first: Vec<_> = (0..2)
            .map(|rank| {
                let place = &place;
                scope.spawn(move || World::join(&bootstrap(place, rank, 3)).unwrap().barrier("up").unwrap())
            })
            .collect();
        std::thread::sleep(SHORT);
        let text = bootstrap_text(World::join(&bootstrap(&place, 1, 3)));
        assert!(text.contains("rank 1 has joined already"), "{text}");
        let text = bootstrap_text(World::join(&bootstrap(&place, 3, 4)));
        assert!(text.contains("world of 4 ranks"), "{text}");
        World::join(&bootstrap(&place, 2, 3)).unwrap().barrier("up").unwrap();
        first.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_port_in_use_waited_for_in_silence() {
    let place = place();
    let _holder = TcpListener::bind((place.0.as_str(), place.1)).unwrap();
    let start = Instant::now();
    let error = bootstrap_error(World::join(&bootstrap(&place, 0, 2)));
    assert!(error.to_string().contains("cannot listen") && start.elapsed() < PATIENCE / 2, "{error}");
    let cause = std::error::Error::source(&error).and_then(|cause| cause.downcast_ref::<std::io::Error>());
    assert_eq!(cause.map(std::io::Error::kind), Some(std::io::ErrorKind::AddrInUse), "{error:?}");
    assert!(!error.is_fatal(), "no world was formed");
}

#[test]
fn a_place_that_ended_before_the_world_formed_kept_taken() {
    let place = place();
    std::thread::scope(|scope| {
        let join = |rank| World::join(&bootstrap(&place, rank, 4)).unwrap().barrier("up").unwrap();
        scope.spawn(move || join(0));
        // A hello whose sender has closed already, and a member that is notified of its admission and dies.
        drop(asking(&place, VERSION, TOKEN, &join_fields(1, 4), false));
        let mut stream = asking(&place, VERSION, TOKEN, &join_fields(2, 4), false);
        stream.read_exact(&mut [0; 12]).unwrap();
        drop(stream);
        std::thread::sleep(Duration::from_millis(50));
        scope.spawn(move || join(1));
        scope.spawn(move || join(3));
        join(2);
    });
}

#[test]
fn another_user_of_the_host_joins_a_job_without_a_token() {
    let place = place();
    std::thread::scope(|scope| {
        let join = |rank, token: &str| World::join(&Bootstrap { token: token.into(), ..bootstrap(&place, rank, 2) });
        let root = scope.spawn(move || join(0, "").map(|world| world.barrier("up").unwrap()));
        // A peer without the secret that only this user can read: no token, an empty one, and one of its own.
        let answer = rest_of(asking(&place, VERSION, "", &join_fields(1, 2), true));
        assert!(answer.contains("not of one user and host"), "{answer}");
        let answer = talk(&place, &hello(VERSION, false));
        assert!(answer.contains("token differs from that of rank 0 (which has none)"), "{answer}");
        assert!(bootstrap_text(join(1, "mine")).contains("which has none"));
        join(1, "").unwrap().barrier("up").unwrap();
        root.join().unwrap().unwrap();
    });
}

/// Rank 1's error for a squatter that has taken rank 0's port and answers each frame; and all that the squatter got.
fn squatted(answer: impl Fn(&[u8]) -> Vec<u8> + Send) -> (String, Vec<u8>) {
    let place = place();
    let listener = TcpListener::bind((place.0.as_str(), place.1)).unwrap();
    std::thread::scope(|scope| {
        let squatter = scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = Vec::new();
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = stream.read(&mut bytes) {
                received.extend(&bytes[..count]);
                // A goodbye is not answered.
                if bytes[6] != 10 {
                    let _ = stream.write_all(&answer(&bytes[..count]));
                }
            }
            received
        });
        let text = bootstrap_text(World::join(&bootstrap(&place, 1, 2)));
        (text, squatter.join().unwrap())
    })
}

#[test]
fn a_squatter_on_the_port_of_rank_0_taken_for_it_or_sent_the_token() {
    let is_hello = |bytes: &[u8]| bytes[6] == 1;
    let challenge = || frame(VERSION, 11, &[9; 32]);
    let welcome = || frame(VERSION, 4, &[2, 0, 0, 0, 0, 0, 0, 0]);
    let accepted = move |bytes: &[u8], proof: &[u8]| {
        if is_hello(bytes) { challenge() } else { [frame(VERSION, 13, proof), welcome()].concat() }
    };
    let squatters = [
        ("who echoes", squatted(<[u8]>::to_vec), "no proof"),
        ("who sends that all have joined", squatted(|_| welcome()), "no proof"),
        ("who accepts without a proof", squatted(|b| if is_hello(b) { challenge() } else { welcome() }), "no proof"),
        ("who gives back the proof", squatted(move |b| accepted(b, &b[12..44])), "a proof of another job token"),
        ("who has another token", squatted(move |b| accepted(b, &foreign(b))), "a proof of another job token"),
    ];
    for (who, (text, received), expected) in squatters {
        assert!(text.contains(expected), "{who}: {text}");
        assert!(!received.windows(TOKEN.len()).any(|bytes| bytes == TOKEN.as_bytes()), "{who} got the token");
    }
}

/// The proof of a rank 0 that has another token.
fn foreign(join: &[u8]) -> Vec<u8> {
    proof("guess", "rank 0", &[9; 32], &join[44..])
}

/// Joins a pair of which rank 1 was changed; returns the errors of both.
fn differing(change: impl Fn(&mut Bootstrap), both: impl Fn(&mut Bootstrap)) -> [String; 2] {
    let place = place();
    let [root, mut member] = [0, 1].map(|rank| {
        let mut b = bootstrap(&place, rank, 2);
        both(&mut b);
        b
    });
    change(&mut member);
    let root = Bootstrap { timeout: SHORT * 2, ..root };
    std::thread::scope(|scope| {
        let root = scope.spawn(|| bootstrap_text(World::join(&root)));
        let joined = bootstrap_text(World::join(&member));
        // A stranger that comes later must not hide the reason for which a rank of the job was refused.
        let mut stranger = TcpStream::connect((place.0.as_str(), place.1)).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        [root.join().unwrap(), joined]
    })
}

#[test]
fn members_of_other_terms_form_a_world() {
    let second = |b: &mut Bootstrap| {
        (b.generation, b.nodes, b.first_nodes) = (2, Some(vec![1, 1]), Some(vec![2, 2]));
        b.members = Some(vec![Rank(0), Rank(2)]);
    };
    let texts = [
        // Of another job on a port beside this one's.
        (differing(|b| b.generation = 1, second), "generation 1", "2"),
        (differing(|b| b.members = Some(vec![Rank(0), Rank(3)]), second), "members 0,3", "0,2"),
        (differing(|b| b.first_nodes = Some(vec![1, 3]), second), "(of 1,3 at first)", "1,1 (of 2,2 at first)"),
        (differing(|b| b.nodes = Some(vec![1, 1]), |_| ()), "nodes 1,1", "2"),
    ];
    for (errors, theirs, ours) in texts {
        for text in errors {
            assert!(text.contains(theirs) && text.contains(&format!("and rank 0 has {ours}")), "{text}");
        }
    }
}

#[test]
fn survivors_that_name_other_members_meet() {
    let (place, refused) = (place(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (place, refused) = (&place, &refused);
            scope.spawn(move || {
                let world = World::join(&bootstrap(place, rank, 3)).unwrap();
                world.barrier("up").unwrap();
                if rank == 1 {
                    // Not before the other: rank 0 listens until then.
                    wait::poll("refusal", PATIENCE, || refused.load(Ordering::Relaxed).then_some(())).unwrap();
                }
                let members = [Rank(0), Rank(rank.max(1))];
                let next = world.regroup(1, &members);
                if rank == 2 {
                    let text = bootstrap_text(next);
                    refused.store(true, Ordering::Relaxed);
                    assert!(text.contains("members 0,2") && text.contains("rank 0 has 0-1"), "{text}");
                } else {
                    next.unwrap().barrier("up").unwrap();
                }
            });
        }
    });
}

// ---- worlds of processes

#[test]
fn a_killed_process_goes_unnoticed() {
    const TEST: &str = "a_killed_process_goes_unnoticed";
    if is_child() {
        return sit_until_killed();
    }
    let place = place();
    let mut rig = Rig((1..4).map(|rank| child(TEST, &place, rank, 4)).collect());
    let world = World::join(&bootstrap(&place, 0, 4)).unwrap();
    world.barrier("up").unwrap();
    assert!(world.lost_peers().is_empty());
    rig.0[1].kill().unwrap();
    assert!(wait_lost(&world, &[Rank(2)]) < Duration::from_secs(1));
    rig.0[0].kill().unwrap();
    assert!(wait_lost(&world, &[Rank(1), Rank(2)]) < Duration::from_secs(1));
    let start = Instant::now();
    let text = bootstrap_text(world.barrier("gate"));
    assert!(text.contains("rank 1 is lost") && start.elapsed() < Duration::from_secs(1), "{text}");
}

#[test]
fn a_killed_process_noticed_by_rank_0_alone() {
    const TEST: &str = "a_killed_process_noticed_by_rank_0_alone";
    if is_child() {
        return sit_until_killed();
    }
    // This process is rank 1; rank 0 and rank 2 are others. First rank 2 dies, then rank 0.
    let place = place();
    let mut rig = Rig([0, 2].into_iter().map(|rank| child(TEST, &place, rank, 3)).collect());
    let world = World::join(&bootstrap(&place, 1, 3)).unwrap();
    world.barrier("up").unwrap();
    rig.0[1].kill().unwrap();
    assert!(wait_lost(&world, &[Rank(2)]) < Duration::from_secs(1));
    rig.0[0].kill().unwrap();
    assert!(wait_lost(&world, &[Rank(0), Rank(2)]) < Duration::from_secs(1));
    let start = Instant::now();
    let text = bootstrap_text(world.barrier("gate"));
    assert!(text.contains("rank 0 is lost") && start.elapsed() < Duration::from_secs(1), "{text}");
}

#[test]
fn a_process_killed_in_a_collective_waited_for_until_the_deadline() {
    const TEST: &str = "a_process_killed_in_a_collective_waited_for_until_the_deadline";
    if is_child() {
        return sit_until_killed();
    }
    let place = place();
    let mut rig = Rig(vec![child(TEST, &place, 1, 2)]);
    let world = World::join(&bootstrap(&place, 0, 2)).unwrap();
    world.barrier("up").unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| bootstrap_text(world.barrier("gate")));
        std::thread::sleep(Duration::from_millis(100));
        rig.0[0].kill().unwrap();
        assert!(waiting.join().unwrap().contains("rank 1 is lost"));
    });
    assert!(start.elapsed() < PATIENCE / 2);
}

#[test]
fn processes_swap_each_others_descriptors_or_end_as_losses() {
    const TEST: &str = "processes_swap_each_others_descriptors_or_end_as_losses";
    if is_child() {
        let world = World::from_env().unwrap();
        return exchange_memfds(world);
    }
    let place = place();
    let mut rig = Rig((1..4).map(|rank| child(TEST, &place, rank, 4)).collect());
    let world = World::join(&bootstrap(&place, 0, 4)).unwrap();
    exchange_memfds(world.clone());
    for child in &mut rig.0 {
        assert!(child.wait().unwrap().success());
    }
    assert!(world.lost_peers().is_empty(), "an orderly end was taken for a loss");
}

#[test]
fn a_process_killed_while_descriptors_are_exchanged_waited_for() {
    const TEST: &str = "a_process_killed_while_descriptors_are_exchanged_waited_for";
    if is_child() {
        return sit_until_killed();
    }
    let place = place();
    let mut rig = Rig(vec![child(TEST, &place, 1, 2)]);
    let world = World::join(&bootstrap(&place, 0, 2)).unwrap();
    world.barrier("up").unwrap();
    let own = memfd("mine");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| bootstrap_text(world.exchange_fds(own.as_fd())));
        std::thread::sleep(Duration::from_millis(100));
        rig.0[0].kill().unwrap();
        assert!(waiting.join().unwrap().contains("rank 1 is lost"));
    });
}
