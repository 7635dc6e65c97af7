#!/usr/bin/env python3
"""Plants one-line bugs in the kernels, one at a time, and demands that the suite catches each.

A mutant is a named (file, original text, mutated text). The text must occur exactly once, so that a mutant cannot rot
in silence. Works on copies of the tree under target/mutants, one a core. Prints a table; exit status 0 only if all were caught.
Arguments: names of mutants to run alone; or --one-in N for every Nth one, from a first that the files' contents decide;
or --resume for all but those that an earlier run with --resume saw caught, unless they or their files have changed since,
which tests/data/mutants_caught.txt keeps, and --resume FOLDER... for those of some folders; or --check, which only looks at
the table and counts those that were caught as they stand.
"""

import hashlib
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

from mutants_stated import GROUPS

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACE = ROOT / "target" / "mutants"
CAUGHT = ROOT / "tests" / "data" / "mutants_caught.txt"
WORKERS = min(os.cpu_count() or 1, 4)
METADATA, SEND, RECEIVE = (
    "kernels/dispatch/meta.cuh", "kernels/dispatch/send.cuh", "kernels/dispatch/receive.cuh")
COMBINE, CONTEXT, DISPATCH, BARRIER = (
    "kernels/combine/combine.cuh", "kernels/common/context.cuh", "kernels/dispatch/dispatch.cuh", "kernels/common/barrier.cuh")
WAITS = "kernels/common/waits.cuh"
QUANTIZE, NUMBERS = "kernels/common/quantize.cuh", "kernels/common/numbers.cuh"
IN_PLACE = "kernels/dispatch/in_place.cuh"
PARTIAL, NODES, TO_NODES, FROM_NODES = (
    "kernels/combine/send.cuh", "kernels/common/wire.cuh", "kernels/dispatch/wire.cuh", "kernels/combine/wire.cuh")
COUNTER, LINKS, MACHINE, WIRE = "proxy/counter.rs", "proxy/machine/links.rs", "proxy/machine/mod.rs", "proxy/wire.rs"
WATCHES, NIC, PICK = "proxy/machine/watches.rs", "kernels/nic/nic.cuh", "bindings/api/pick.rs"
SERVICE, CARDS, PEERS = "proxy/service.rs", "proxy/cards.rs", "proxy/machine/peers.rs"
DRIVER, FREE_MEMORY, REGIONS = "proxy/driver/mod.rs", "kernels/base/memory.rs", "transport/network/regions.rs"
FDS = "transport/world/fds.rs"
SCHEDULER, SCHEDULE, STACKS, SEEDED = "kernels/cpu/schedule.cpp", "kernels/cpu/schedule.h", "kernels/cpu/context.cpp", "kernels/device/cpu_seeded.rs"
OUT, LAUNCH, TRACE_FILE = "bindings/cli/out.rs", "bindings/cli/ranks/launch.rs", "bindings/cli/cases/trace_file.rs"
LOGGING = "bindings/cli/logging.rs"
PROJECTION = "bindings/cli/commands/simulate/world.rs"
CASE, FILES, REPLAY = "bindings/cli/cases/case.rs", "bindings/cli/files.rs", "bindings/cli/commands/verify.rs"
VIEW, DEVICE, CPU, RECORDING = (
    "kernels/device/view.rs", "kernels/device/mod.rs", "kernels/device/cpu.rs", "kernels/device/recording.rs")
OPEN, HANDLE, EXECUTOR = "bindings/api/open.rs", "bindings/api/handle.rs", "kernels/cpu/executor.cpp"
LAUNCHES = "kernels/cpu/launch.cpp"
VIEWS, SHAPE, BUILDER = "bindings/api/calls.rs", "bindings/api/shape.rs", "bindings/api/builder.rs"
CALLS, WORLD, REPORT = "bindings/api/context.rs", "transport/world/mod.rs", "bindings/api/report.rs"
ADMIT, MEMBER, SECRET, TERMS, ROOT_SIDE = (
    "transport/world/admit.rs", "transport/world/member.rs", "transport/world/secret.rs", "transport/world/terms.rs", "transport/world/root.rs")
BOOTSTRAP, LOCAL = "transport/world/bootstrap.rs", "transport/world/local.rs"
COLLECTIVE, NAMES, HOST = "transport/world/collective.rs", "transport/world/names.rs", "transport/memory/host.rs"
AGREEMENT, QUOTE = "bindings/api/agreement.rs", "kernels/base/quote.rs"
PAIRS, MAILBOX = "benches/pairs.py", "proxy/driver/mailbox.rs"
REMOTE = "proxy/driver/thread.rs"
OVER, SOCKET_THREAD, WAIT, INTERRUPT = (
    "transport/world/over.rs", "transport/world/socket_thread.rs", "kernels/base/wait.rs", "kernels/base/interrupt.rs")
ERROR = "kernels/base/error.rs"

# Rust and C++ without optimisation or debug information: most of the time goes into building. Warnings are no errors,
# since a mutant may leave something unused.
QUICK = os.environ | {"CARGO_PROFILE_DEV_OPT_LEVEL": "0", "CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_INCREMENTAL": "1",
                      "TOKENYARD_MACHINE_SEEDS": "400", "TOKENYARD_STRICT": "0"}
# Metadata in several tiles, one of which has a faulty choice.
TILES = "world=3,hidden=64,experts=12,top_k=3,tokens=160,max_tokens=160,meta_tile=32,fault=routing,iters=6"
# Some blocks are dedicated senders.
DEDICATED = ("world=6,sms=4,hidden=128,experts=24,top_k=4,tokens=70,max_tokens=70,meta_tile=32,iters=4,"
         "world_mode=one-thread,hold_stores=yes")
# Completions that are later than whole messages (the seed has many), and a direction whose messages go link by link.
LATE = ("world=8,nodes=1+1+1+1+1+1+1+1,hidden=16,experts=8,top_k=1,weights=combine,tokens=2,max_tokens=2,sms=2,iters=24,"
        "world_mode=one-thread,seed=1")
# Dispatches ahead of their combines, of rows that are kept once: nothing else shows when those may be overwritten.
KEPT_ONCE = ("world=4,nodes=2+2,ahead=2,hidden=32,experts=16,top_k=4,tokens=24,max_tokens=24,sms=2,iters=8,"
             "double_buffer=no,world_mode=one-thread,hold_stores=yes,seed=1")
# Partial rows whose scales come after what they scale, and are polled in between.
SCALES_LATER = ("world=4,hidden=256,experts=8,top_k=1,partial=fp8,ll_tokens=256,tokens=24,max_tokens=24,sms=4,"
                 "iters=240,world_mode=one-thread,seed=1")
# LL rows that are looked at between the two halves of a vector's store.
HALVES_LATER = ("world=4,hidden=512,experts=8,top_k=3,ll_tokens=256,tokens=24,max_tokens=24,sms=2,iters=240,"
                "world_mode=one-thread,seed=5")
MUTANTS = [
    ("row tag without release", SEND,
     "  if (mask) fence_acq_rel_sys();\n", ""),
    ("row tag before the other threads' stores", SEND,
     "  warp_barrier();\n  // N2: the warp's stores", "  // N2: the warp's stores"),
    ("the round is raised by a block that does not send", DISPATCH, "block_index() == first_sender)\n        raise_epoch",
     "block_index() == 0)\n        raise_epoch"),
    ("own rows looked for where the caller had them", SEND,
     "return a.phases == (TY_PHASE_SEND | TY_PHASE_RECEIVE) &&", "return (a.phases & TY_PHASE_RECEIVE) != 0 &&"),
    ("rows to place counted over two dispatches", DISPATCH, "store(&state_of(c)->placed[(ended + 1) & 1], 0u);", "(void)0;"),
    ("some rows are for blocks that only place", DISPATCH, "blocks = dedicated ? dedicated : worker_count(c);", "blocks = worker_count(c);"),
    ("own rows counted among those before them", IN_PLACE, "before += source < c.rank", "before += source <= c.rank"),
    ("an output without room stored into", IN_PLACE, "&& needed <= a.output.capacity;", ";"),
    ("rows of refused routing stored in outputs", IN_PLACE, "bool room = load(&shared.refused) == 0 &&", "bool room ="),
    ("a row stored where its last expert wants it", IN_PLACE, "if (j <= k && other == rank) first = false;", "(void)other;"),
    ("segments of other ranks not aligned", IN_PLACE, "experts, a.output.align, a.output.align_inverse);", "experts);"),
    ("row of the first choice looked for at the first lane", DISPATCH, "shuffle(mine, lowest_bit(all))", "shuffle(mine, 0)"),
    ("first place of own rows taken for stored", DISPATCH, "bool lies = in_place(c) && places && item.source != c.rank,", "bool lies = in_place(c) && places,"),
    ("counts of other ranks not published", METADATA, "in_place(c) && rank < c.node_ranks; ++rank)", "in_place(c) && rank < 1; ++rank)"),
    ("row tag raised in the wrong slot", SEND, "slot * TY_SLICES + slice,\n", "slot / 2 * TY_SLICES + slice,\n"),
    ("tag of the last slice forgotten", SEND, "i >> shift < c.node_ranks;", "(i + 1) >> shift < c.node_ranks;"),
    ("last slice of a row not carried", SEND, "slice_begin(vectors, slices.end, warp_size);",
     "slice_begin(vectors, slices.end - (slices.end > 1), warp_size);"),
    ("half of a block left out of its largest magnitude", QUANTIZE, "step = block_vectors / 2;", "step = block_vectors / 4;"),
    ("power of two not rounded up", QUANTIZE, "> 0x600000u ? 1 : 0)", "> 0x700000u ? 1 : 0)"),
    ("exponents of two blocks in a word exchanged", QUANTIZE, "(lane_index() / block_vectors * 8)", "((lane_index() / block_vectors ^ 1) * 8)"),
    ("unused exponents not zero", QUANTIZE, "u32 word = there ? ", "u32 word = true ? "),
    ("forwarded rows quantised again", TO_NODES, "from + c.row_bytes, 1, TY_QUANTIZE_NONE}", "from + c.row_bytes, 1, c.quantize}"),
    ("no barrier between marking and counting", METADATA,
     "  return team_any(team, faulty);\n}\n\n// ---- what in-place", "  return faulty;\n}\n\n// ---- what in-place"),
    ("a rank without tokens publishes nothing", METADATA,
     "  bool last = is_last_tile(by.in, tile);", "  if (by.in.tokens == 0) return true;\n  bool last = is_last_tile(by.in, tile);"),
    ("refused routing looks like no tokens", METADATA, "faulty && e == experts ? meta_refused : rows", "rows"),
    ("later launches of a call report why they are refused", CONTEXT, "next.epoch == 0 && round == 0 && leads", "next.epoch == 0 && leads"),
    ("refusals not noted", RECEIVE, "source != c.rank) note_refused(c, source, round.call);", "source != c.rank) note_refused(c, source, 0);"),
    ("own refusal noted like another's", RECEIVE, "block_index() == 0 && source != c.rank", "block_index() == 0"),
    ("earlier tiles of metadata not counted", METADATA, "before = team_warp(team); before < number;", "before = team_warp(team) + 1; before < number;"),
    ("N9: rows of earlier tiles read before they are there", METADATA, "failed |= !wait_word(c, wait, tile_rows", "failed |= false && !wait_word(c, wait, tile_rows"),
    ("N9: a tile's rows kept without release", METADATA, "store_release_gpu(own.tag, epoch)", "store_relaxed_gpu(own.tag, epoch)"),
    ("fault in an earlier tile forgotten", METADATA, "refused |= earlier == meta_refused;", ""),
    ("N11: helpers place rows by no plan", "kernels/common/prim.cuh", "TY_DEVICE void take_over() { named_barrier(hand_over_id, block_threads()); }", "TY_DEVICE void take_over() { named_arrive(hand_over_id, block_threads()); }"),
    ("an item taken twice", CONTEXT, "atomic_add_block(taken, 1) : 0, 0)", "atomic_add_block(taken, 1) / 2 : 0, 0)"),
    ("old metadata word taken for a new one", WAITS, "return (seen >> 32) == (epoch & 0xffffffffu) &&", "return (seen >> 32) != 0 &&"),
    ("off by one in a position", METADATA, "((1u << (token % 32)) - 1)", "((2u << (token % 32)) - 1)"),
    ("a repeated expert's times have one row", METADATA, "tile, local, token) + before;", "tile, local, token);"),
    ("a rank's number taken for its expert", METADATA, "load(pointer<const i32>(c.rank_experts) + k)", "static_cast<i32>(k)"),
    ("replicas looked up a second time behind the wire", METADATA, "!in.own || !c.replicas || expert < 0", "!c.replicas || expert < 0"),
    ("a replica by choice, not by token", METADATA, "row + replica_slot(c, token)", "row + replica_slot(c, token + k)"),
    ("a source's rows begin behind them", RECEIVE, "(rows.first) << 32 |", "(rows.end) << 32 |"),
    ("rows of the last source counted from those of the next", RECEIVE, "source + 1 < c.ranks ? load", "source < c.ranks ? load"),
    ("counts not added to earlier ones", RECEIVE, "store(total, load(total) + rows);", "store(total, rows);"),
    ("a number beyond the logical experts looked up", METADATA, "static_cast<u32>(expert) >= c.logical_experts", "static_cast<u32>(expert) > c.logical_experts"),
    ("planes above the first not counted", METADATA, "rows += (rank ? single : single + 2 * twofold) << plane;", "rows += single << plane;"),
    ("the times of a tile counted as tokens of its rank", METADATA, "rank ? single : single + 2 * twofold", "single + 2 * twofold"),
    ("planes above the second not weighted", METADATA, "single + 2 * twofold) << plane;", "single + 2 * twofold);"),
    ("whole words of a token's own word counted", METADATA, "mask = left < 32 ? (1u << left) - 1 : ~0u;", "mask = ~0u;"),
    ("what repeats noted for a warp's first choice alone", METADATA, "warp_or(here ? times.all : 0)", "(here ? times.all : 0)"),
    ("choices beyond those given are read", METADATA, "takes_any_routing(c) && k >= in.choices) return -1;", "takes_any_routing(c) && k >= c.top_k) return -1;"),
    ("a repeated expert marked once for each time", METADATA, "} else if (times.before == 0) {", "} else if (times.before < 2) {"),
    ("planes of a former tile counted", METADATA, "i < planes * (tile.experts + 1) * tile.words;", "i < (tile.experts + 1) * tile.words;"),
    ("repeated experts between nodes refused where they may be", TO_NODES, "once = !repeats_experts(c);", "once = true;"),
    ("repeated experts refused where they may be", METADATA, "u32 first = repeats_experts(c) ? c.top_k : 1;", "u32 first = 1;"),
    ("duplicate expert not seen", METADATA, "twice |= first + j <= choice.k &&", "twice |= first + j < choice.k &&"),
    ("duplicate expert not seen across nodes", TO_NODES, "for (u32 i = 0; i < j; ++i) twice", "for (u32 i = 1; i < j; ++i) twice"),
    ("errors of both kinds share a record", CONTEXT, "u32 fatal = closes ||", "closes = false;\n  u32 fatal = closes ||"),
    ("error of another warp reported", CONTEXT, "shared.first[fatal][lowest_bit(there)]", "shared.first[fatal][0]"),
    ("quotient too small by one", CONTEXT, ": Quotient{whole + 1, rest - d};", ": Quotient{whole, rest};"),
    ("slot at the owner counted from the wrong rank", METADATA, "slot_of_rank(c, ranks, tile.destination())", "slot_of_rank(c, ranks, tile.destination() + 1)"),
    ("parity ignored", CONTEXT, "(epoch & 1) * region.parity_stride", "0 * region.parity_stride"),
    ("stale tag or flag accepted", WAITS,
     "if ((seen >> shift) == expected) return found", "if ((seen >> shift) != 0) return found"),
    ("rows lost to ranks before the first", SEND, "| bits << ((", "| 0 * bits << (("),
    ("receive buffer published as free by every block", CONTEXT, "1u) + 1 != blocks) return false;", "1u) + 1 == 0) return false;"),
    ("a forged token's number not bounded", TO_NODES, "token < c.max_tokens ? token : 0", "token"),
    ("a launch not counted", CONTEXT, "load(&kept.launches) + 1);\n  u64 epoch", "load(&kept.launches));\n  u64 epoch"),
    ("an epoch received too early", CONTEXT, "  if (phases & TY_PHASE_RECEIVE) store(&own->received", "  store(&own->received"),
    ("order not checked", CONTEXT, "bool follows = sends == (sent == received),", "bool follows = sends || sent != received,"),
    ("a launch that runs on the same block overlooked", CONTEXT, "begun == before && !others ?", "!others ?"),
    ("blocks that have not ended overlooked", CONTEXT, "begun == before && !others ?", "begun == before ?"),
    ("an overlap leaves the context open", CONTEXT, "progress.sent, direction, progress.sent, progress.received});\n  close(c);", "progress.sent, direction, progress.sent, progress.received});"),
    ("an overlap reported once", REPORT, "overlap_problem(record), fatal: true }", "overlap_problem(record), fatal: false }"),
    ("rows outside of the output stored", RECEIVE, "return row < output_rows(a) ? static_cast<i32>(row) : -1;", "return static_cast<i32>(row);"),
    ("tokens without a row described", RECEIVE, "bool there = k < c.top_k && own >= 0;", "bool there = k < c.top_k;"),
    ("rows behind a peer's output stored", IN_PLACE, "bool there = row < static_cast<u32>(a.output.capacity);", "bool there = row != ~0u;"),
    ("rounds of two calls taken for one", RECEIVE, "if (c.rounds > 1 && round_tokens_of(shared, s) > c.round_tokens)", "if (false)"),
    ("rows of the source itself counted as earlier", RECEIVE,
     "store(rows + i * c.local_experts, sum);", "store(rows + i * c.local_experts, sum + own[i]);"),
    ("row tag not waited for", RECEIVE, "failed = !wait_tag(c, news.word, round.epoch", "failed = false && !wait_tag(c, news.word, round.epoch"),
    ("segment starts read too early", RECEIVE,
     "plan_segments(a, team, shared);\n  team_barrier(team);", "plan_segments(a, team, shared);"),
    ("sums over sources read too early", RECEIVE,
     "  team_barrier(team);\n  if (team_warp(team) == 0) plan_segments", "  if (team_warp(team) == 0) plan_segments"),
    ("first token of a round forgotten", DISPATCH, "item.token = load(&shared.source_first[item.source]) + item.slot;", "item.token = item.slot;"),
    ("counts read too early", RECEIVE,
     "  if (team_any(team, failed)) return false;\n  return !tolerates", "  if (failed) return false;\n  return !tolerates"),
    ("alignment forgotten", CONTEXT, "divide(load(in + begin + i) + align - 1, align, inverse).whole * align", "load(in + begin + i)"),
    ("node of an expert computed, and its rank in the world", METADATA, "(rank - node * c.node_ranks) << 16", "rank << 16"),
    ("segments rounded down", CONTEXT, "divide(load(in + begin + i) + align - 1,", "divide(load(in + begin + i),"),
    ("ranks of the next token counted", METADATA, "if (first + j < c.top_k) all |= other;", "all |= other;"),
    ("overflow not noticed", RECEIVE, "load(&shared.needed) <= a.output.capacity", "load(&shared.needed) <= a.output.capacity + 1"),
    ("partial row tag without release", PARTIAL,
     "for TY_SITE_PARTIAL acquires.\n  fence_acq_rel_sys();\n", "for TY_SITE_PARTIAL acquires.\n"),
    ("piece counted before the other lanes' stores", PARTIAL,
     "  warp_barrier();\n  if (piece.parts == row_parts) return true;", "  if (piece.parts == row_parts) return true;"),
    ("row whole before all of its pieces", PARTIAL, "shuffle(before, 0) + piece.parts == row_parts", "shuffle(before, 0) + 2 * piece.parts >= row_parts"),
    ("pieces counted of another row", PARTIAL, "&counts.parts[row], piece.parts)", "&counts.parts[row / 2], piece.parts)"),
    ("counts of pieces not cleared", PARTIAL, "store(&counts.parts[row], 0u);", "store(&counts.parts[row], row & 1);"),
    ("a piece taken twice", PARTIAL, "next - before < pieces; next = take_next(taken)", "next - before < pieces; next = lane_index() == 99 ? take_next(taken) : next + 1"),
    ("rows of the last chunk not sent", PARTIAL, "divide(most + run - 1, run, run_inverse).whole", "divide(most, run, run_inverse).whole"),
    ("row of another run", PARTIAL, "cycle.whole * run + list.rest", "cycle.whole + list.rest"),
    ("sums that are in the message made again", FROM_NODES, "if (sends_sums(a)) return true;", "if (false && sends_sums(a)) return true;"),
    ("E10: sums in staging that the network still reads", FROM_NODES, "if (inter_node && sends_sums(a) && !wait_stagings(", "if (false && sends_sums(a) && !wait_stagings("),
    ("staging that was passed on a launch ahead waited for again", NODES, "== epoch - 2) continue;", "== epoch - 2 && false) continue;"),
    ("tag of another slot", PARTIAL, "c.regions.partial_tags, epoch, part) + place;", "c.regions.partial_tags, epoch, part) + place - place % c.slots;"),
    ("parts of a row not summed", PARTIAL, "blocks * (piece.first + piece.parts) / row_parts", "blocks * (piece.first + 1) / row_parts"),
    ("scale of another block of a partial row", NUMBERS,
     "= load(partial_scales(row, columns) + g * n / Fp8::block);", "= load(partial_scales(row, columns) + g * n / Fp8::block / 2);"),
    ("LL rows added before they have arrived", PARTIAL, "if (least != 0) return true;", "if (poll != 0) return true;"),
    ("places of LL rows not cleared", COMBINE, "if (ll) clear_terms", "if (ll && token != 0) clear_terms"),
    ("a sum's zeros sent as what has not come", NUMBERS, "data.w[w] == 0 ? 1u << 31 : data.w[w]", "data.w[w]"),
    ("half of an LL row looked at", NUMBERS, "w < 4; ++w) least =", "w < 2; ++w) least ="),
    ("scale that has not come taken for one", NUMBERS, "least = smaller(least, same_bits<u32>(raw.scale));", "(void)0;"),
    ("scale cleared before all lanes have seen it", PARTIAL, "  if (lanes_share_blocks<T>) warp_barrier();\n", ""),
    ("LL rows waited for by tags", PICK, "partial_tags.source_stride == 0;", "partial_tags.source_stride == 1;"),
    ("lanes past a partial row's end leave their block", PARTIAL, "if (!lanes_share_blocks<Partial> && !together) return columns.end;", "if (!together) return columns.end;"),
    ("flag of weights before the weights", PARTIAL,
     "    team_barrier(team);\n    // N10: the weights happen", "    // N10: the weights happen"),
    ("partial rows not waited for", PARTIAL, "bool here = wait_word(c, wait, tag, 0, epoch, \"partial row\");", "bool here = true || wait_word(c, wait, tag, 0, epoch, \"partial row\");"),
    ("weight of the wrong choice", PARTIAL, "load(weights_of(a, call, source, token) + k)", "load(weights_of(a, call, source, token) + c.top_k - 1 - k)"),
    ("a missing choice summed", PARTIAL, "  u32 here = warp_ballot(row >= 0);", "  if (k < c.top_k && row < 0) row = 0;\n  u32 here = warp_ballot(row >= 0);"),
    ("old value forgotten when accumulating", COMBINE, "add_to(old, sums[i]);", "old = sums[i];"),
    ("another row taken for the one that comes next", PARTIAL, "& 1) != 0 && before == n", "& 1) != 0 && before <= n"),
    ("later rows taken for those that were looked up ahead", PARTIAL,
     "if (!looks_ahead(c) || n >= worker_count(c) * warp_size)", "if (!looks_ahead(c))"),
    ("a call of several rounds taken for a specialised one", PICK, "        && context.rounds == 1\n", ""),
    ("rows kept once taken for those of specialised calls", PICK, "        && context.free_flags == 0\n", ""),
    ("experts placed anyhow taken for even ones", PICK, "        && context.even_experts != 0\n", ""),
    ("specialised sums where old values are to be added", PICK, " && args.accumulate == 0", ""),
    ("specialised sums before weights are there", PICK, "let late = args.context.weights == raw::TY_WEIGHTS_COMBINE;",
     "let late = false;"),
    ("rows sent as they are that were to be quantised", PICK, "specialised && args.context.quantize != raw::TY_QUANTIZE_NONE;", "false;"),
    ("incomplete rank's row waited for", PARTIAL, "if (!((parts.present >> rank) & 1)) continue;", "if (!((parts.ranks >> rank) & 1)) continue;"),
    ("incomplete rank's row added", FROM_NODES, "count = popcount64(parts.present);", "count = popcount64(parts.ranks);"),
    ("a block's threads each check whether they are closed", CONTEXT, "progress.closed = block_any(progress.closed != 0) ? 1 : 0;", ";"),
    ("a barrier's faults cleared after its meeting", BARRIER,
     "  begin_faults();\n  Progress progress = agree_progress(c, ask_progress(c, TY_DIRECTION_BARRIER), TY_DIRECTION_BARRIER);\n",
     "  Progress progress = agree_progress(c, ask_progress(c, TY_DIRECTION_BARRIER), TY_DIRECTION_BARRIER);\n  begin_faults();\n"),
    ("a closed context's handle reported as empty", COMBINE, "thread_index() == 0 && progress.closed == 0)", "thread_index() == 0)"),
    ("a team's threads each look whether they are closed", CONTEXT, "return !team_any(team, closed);", "return team_any(team, false), !closed;"),
    ("a summing thread waits though it is closed", PARTIAL, "bool failed = closed;", "if (closed) return false;\n  bool failed = false;"),
    ("rows that are dropped go to the next expert", RECEIVE, "!a.output.drop_overflow || position < a.output.capacity;", "true;"),
    ("padding behind an output that drops rows", RECEIVE,
     "    if (a.output.drop_overflow && end > a.output.capacity) end = a.output.capacity;\n", ""),
    ("dropped rows are counted", RECEIVE, "  return rows < room ? rows : static_cast<u32>(room);", "  return rows;"),
    ("experts behind an output that drops rows", RECEIVE,
     "      if (out.drop_overflow && start > out.capacity) start = static_cast<u32>(out.capacity);\n", ""),
    ("ranges of dropped rows", RECEIVE, "{smaller(begin, placed), smaller(end, placed)}", "{smaller(begin, placed), end}"),
    ("an output that drops rows is refused", RECEIVE, "return a.output.drop_overflow || load", "return load"),
    ("a placing thread waits though it is closed", RECEIVE, "bool failed = closed;", "if (closed) return false;\n  bool failed = false;"),
    ("a thread that marks a tile returns since it is closed", METADATA, "closed = !meet_open(c, team, closed);", "if (closed) return true;\n    (void)meet_open(c, team, false);"),
    ("a sending warp's threads each look whether they are closed", SEND, "closed = agrees_late(c) && warp_ballot(closed) != 0;", ";"),
    ("a closed context's launches go on", CONTEXT, "return agrees_late(c) && progress.closed != 0;", "return agrees_late(c) && progress.closed == 7;"),
    ("a graph dispatches into a handle between a combine's halves", RECORDING, "last.halves.load(Ordering::Relaxed) != 0", "last.halves.load(Ordering::Relaxed) > 9"),
    ("a half is never over", RECORDING, "self.0.halves.fetch_sub(1, Ordering::Relaxed);", ""),
    ("a generation entered twice", WORLD, "self.newest.load(Ordering::Acquire).max(self.family.generation)", "self.family.generation"),
    ("a launch without memory runs", LAUNCHES, "shared_alignment, bytes) != 0) return false;", "shared_alignment, bytes) != 0) {}"),
    ("a fiber without a stack runs", SCHEDULER, "if (!next->started && !start(*next)) {", "if (!next->started && !start(*next) && seeded) {"),
    ("a node peer's combine of another dispatch", PARTIAL, "failed |= status >> 1 != own;", ""),
    ("another node's combine of another dispatch", COMBINE, "if (dispatch == own && load(&head->status)", "if (load(&head->status)"),
    ("another node's dispatch not published", FROM_NODES, "->dispatch, dispatch_number(a));", "->dispatch, dispatch_number(a) + (j == 0));"),
    ("a refused pair reported once", REPORT, "pairing_problem(record, combines, rank, peer), fatal: true }", "pairing_problem(record, combines, rank, peer), fatal: false }"),
    ("barrier lets go early", BARRIER, "u64 number = progress.received + 1;", "u64 number = progress.received + 1 - (c.rank == 0);"),
    ("handle marked received by send", DISPATCH, "if (ended == 0 || !(a.phases & TY_PHASE_RECEIVE)) return;", "if (ended == 0) return;"),
    ("launches of any round taken for the next", CONTEXT, "bool in_round = c.rounds == 1 || next.number == round,", "bool in_round = true,"),
    ("a call received that another call sent", CONTEXT, "own = (sends && next.number == 0) || progress.call == call;", "own = (sends && next.number == 0) || progress.call != 0;"),
    ("lanes of a warp list rows by masks of their own", PARTIAL, "if (!handle_may_change(c)) return masks.at(i);", "if (c.ranks != 0) return masks.at(i);"),
    ("a combine has the number of the call before", CALLS, "call: self.open.pool.number() })", "call: handle.lease.raw().serial })"),
    ("free flag ignored", WAITS, "  if (c.free_flags == 0 || epoch == c.first_epoch) return true;", "  if (c.first_epoch != 0) return true;"),
    ("free flag of the epoch before", WAITS, "word, epoch - 1,", "word, epoch - 2,"),
    ("NIC: completed before all parts are copied", NIC, "!= group.blocks - 1) return;", "!= 0) return;"),
    ("NIC: a request of the batch not passed on", NIC, "if (lane_index() < count * nic_request_words) {", "if (lane_index() < (count - (count > 1)) * nic_request_words) {"),
    ("E1: doorbell without release", NODES,
     "  fence_acq_rel_sys();\n  store_relaxed_sys(pointer<u64>(c.wire.doorbells)", "  store_relaxed_sys(pointer<u64>(c.wire.doorbells)"),
    ("E1: doorbell for this device alone", NODES,
     "  fence_acq_rel_sys();\n  store_relaxed_sys(pointer<u64>(c.wire.doorbells)",
     "  fence_acq_rel_gpu();\n  store_relaxed_sys(pointer<u64>(c.wire.doorbells)"),
    ("chunks of a message not published", TO_NODES, "  if (thread_index() == 0) publish_chunks(", "  if (thread_index() == block_threads()) publish_chunks("),
    ("sums of other nodes among the own node's", COMBINE, "(n >= list.own && n < list.after)", "(n >= list.own && n <= list.after)"),
    ("reports of rails on their nodes not read", COMBINE, "block_index() == 0) report_rails", "block_index() == block_count()) report_rails"),
    ("own node's sum left out after all others", COMBINE, "list.after == list.count && i < groups", "list.after == 0 && i < groups"),
    ("E1: row counted before the barrier", TO_NODES,
     "  warp_barrier();\n  for (u32 link = lane_index(); link < l.targets", "  for (u32 link = lane_index(); link < l.targets"),
    ("doorbell before the last row", NODES, "u32 all = rows_here * packed_row", "u32 all = (rows_here - (rows_here > 1)) * packed_row"),
    ("empty message not sent", NODES, "  store(counter, 0u);\n", "  store(counter, 0u);\n  if (rows == 0 && l.row_bytes != 0) return;\n"),
    ("E6: relayed whatever the host wrote", NODES, "(seen[i] == expected ? 1u : 0u)", "(i < count && seen[i] != 0 ? 1u : 0u)"),
    ("E6: arrivals of two epochs before", NODES, "(names[i] >> name_bits == 0 ? 1u : 0u)", "((names[i] >> name_bits & 1) == 0 ? 1u : 0u)"),
    ("E6: arrivals after a gap", NODES, "u32 count = lowest_bit(~there);", "u32 count = popcount(there);"),
    ("a source's last chunk not relayed", NODES, "(source & 0xffff) >= source >> 16", "(source & 0xffff) + 1 >= source >> 16"),
    ("arrivals of an epoch in one place", COUNTER, "list.chunks += 1;", "list.chunks += 0;"),
    ("arrivals two epochs later after those before", COUNTER, "Some(List { epoch, chunks: 0 })", "Some(List { epoch, ..self })"),
    ("E10: staging that was passed on waited for again", NODES, "missing &= ~relay_words(", "missing = ((1u << count) - 1) & ~relay_words("),
    ("staging parity ignored", NODES, "l.staging + (epoch & 1) * l.staging_parity", "l.staging + 0 * l.staging_parity"),
    ("E10: staging packed before the network read it", NODES, "if (epoch - c.first_epoch < 2) return true;\n  const u64 *word = pointer<const u64>(c.wire.free)",
     "if (epoch != 0) return true;\n  const u64 *word = pointer<const u64>(c.wire.free)"),
    ("rows of a word before not counted", TO_NODES, "return load(&shared.before[word]) + popcount", "return popcount"),
    ("rows packed before all warps have marked tokens", DISPATCH, "if (block_any(stuck)) return false;", "if (stuck) return false;"),
    ("rows packed though a choice is faulty", TO_NODES, "faulty && word < words; word", "false && word < words; word"),
    ("forwarded before its chunk arrived", DISPATCH, "u32 chunk = chunk_of_row(layout_of(c, TY_DIRECTION_DISPATCH), item.slot);", "u32 chunk = 0;"),
    ("placed before its chunk arrived", RECEIVE, "chunk_of_row(l, slot));", "0);"),
    ("placed from another source's message", TO_NODES, "source - (source > c.rank ? 1 : 0)", "source - (source > 1 ? 1 : 0)"),
    ("rows of a message over its headers", NODES, "return l.rows_offset + ", "return TY_WIRE_HEAD_BYTES + "),
    ("rows begin with the metadata's chunk", NODES, "divide(row + l.chunk_shift, l.chunk_rows", "divide(row, l.chunk_rows"),
    ("rows before a chunk as if metadata had none", NODES, "smaller(chunk * l.chunk_rows - l.chunk_shift, rows)", "smaller(chunk * l.chunk_rows, rows)"),
    ("headers of a head taken on trust", TO_NODES, "headers < c.max_tokens ? headers : c.max_tokens", "headers"),
    ("experts of a header taken on trust", METADATA, "return static_cast<u32>(expert) < c.experts;", "return expert >= 0;"),
    ("rounds of another node begin anew", TO_NODES, "round.number == 0 ? 0 : load(round_starts(c, a.handle.rail_rows, j) + round.number);", "0;"),
    ("token number at the source lost", TO_NODES, "load(pointer<const u32>(in.idx - 4 + static_cast<u64>(row) * in.idx_pitch))", "row"),
    ("weights forwarded before they arrived", FROM_NODES, "team_thread(team) == 0 && !wait_arrived(c, TY_DIRECTION_WEIGHTS, call, j, 0);",
     "false && !wait_arrived(c, TY_DIRECTION_WEIGHTS, call, j, 0);"),
    ("node sum counted with its first piece", FROM_NODES, "if (is_row_whole(shared.sums, counted, piece)) count_sum(",
     "(void)is_row_whole(shared.sums, counted, piece);\n  if (piece.first == 0) count_sum("),
    ("first row to send not taken", SEND, "store(&shared.taken[kind], 0u);", "store(&shared.taken[kind], 1u);"),
    ("sum at the source before its chunk arrived", COMBINE, "chunk_of_row(l, row_of_sum(a, round, link, row)))", "0)"),
    ("a second thread looks at host memory", DISPATCH, "if (thread_index() == 0) relay_dispatch(a, round);", "if (thread_index() < 2) relay_dispatch(a, round);"),
    ("chunk flagged one shard early", COUNTER, "if now != self.full {",
     "if now.count_ones() + 1 < self.full.count_ones() {"),
    ("parity ignored when counting", COUNTER, "let slot = (epoch & 1) as usize * self.sources",
     "let slot = 0 * self.sources"),
    ("staging free after the first completion", LINKS, "if under_way.whole && under_way.posts == 0 {",
     "if under_way.whole {"),
    ("full queue drops a shard", LINKS, "                Answer::Full => {\n",
     "                Answer::Full => {\n                    left &= !(1 << nic);\n"),
    ("first blocked link holds up the others", MACHINE, "        for _ in 0..self.blocked.len() {",
     "        for _ in 0..self.blocked.len().min(1) {"),
    ("wire receive buffer parity ignored", WIRE, "self.recv_buffer(direction).at(epoch, source.index())",
     "self.recv_buffer(direction).at(0, source.index())"),
    ("empty shard not posted", LINKS, "Some(write) => out.post(&write),",
     "Some(write) if write.bytes == 0 => Answer::Accepted,\n                Some(write) => out.post(&write),"),
    ("link left in its row when it moves", WATCHES, ".row = None;", ".row.is_none();"),
    ("peers of a closed context are sent no heartbeats", "proxy/machine/peers.rs", "State::Expected | State::Alive | State::Parted => State::Parted,", "State::Expected | State::Alive | State::Parted => State::Unlinked,"),
    ("parted peers outlive a reset", "proxy/machine/peers.rs", "self.table.iter_mut().filter(|peer| peer.state == State::Parted)", "self.table.iter_mut().filter(|peer| peer.state == State::Left)"),
    ("a peer that left and owes a message not lost", MACHINE, "State::Left if !self.is_owed_by(peer)", "State::Left if !self.is_owed_by(self.rank)"),
    ("a peer that left lost by a failed write", MACHINE, "Ending::Failed(failure) if self.peers.state(peer) != State::Left", "Ending::Failed(failure) if self.peers.state(peer) != State::Lost"),
    ("settled between two chunks", LINKS, "|link: &Link| link.chunk.0 == 0 && !matches!", "|link: &Link| link.chunk.0 != 9 && !matches!"),
    ("busy peers lost like others", PEERS, "State::Alive if peer.sequence.is_some_and(Sequence::is_busy)", "State::Alive if false"),
    ("message of an earlier sequence taken for news", PEERS, "sequence.is_after(before)", "sequence != before"),
    ("sequence of a former process remembered", PEERS, "(State::Expected, self.now_ns, None)", "(State::Expected, self.now_ns, peer.sequence)"),
    ("peers not notified that a rank is busy", SERVICE, "let _ = remote.ask(Driver::begin_busy);", ""),
    ("a context opens before what is left of others is handed out", SERVICE, "                driver.drain();", ""),
    ("a number given again at once", SERVICE, "std::cmp::Reverse(*age)", "0 * *age"),
    ("a number given again while writes are outstanding", SERVICE, "Slot::Free if last == 0 =>", "Slot::Leaving { .. } => 1,\n                Slot::Free if last == 0 =>"),
    ("receives of other contexts not counted", SERVICE, "if others + needs.receives > u64", "if needs.receives > u64"),
    ("a context freed under what a capture came after", RECORDING, "queue.drain(patience).is_ok()", "queue.is_capturing().unwrap_or(false) || queue.drain(patience).is_ok()"),
    ("a proxy goes back to an older generation", DRIVER, "if generation < self.generation {", "if false {"),
    ("stale generation counted", MACHINE, "if context.generation() != imm.generation() {", "if false {"),
    ("doorbells of later chunks left as they were rung", MACHINE, "self.chunks_word.is_none()", "false"),
    ("doorbells of later chunks not cleared", DRIVER, "doorbell.store(0, Ordering::Relaxed);", ""),
    ("callers wait for a driver that was dropped", DRIVER, "self.shared.end();\n    }\n}\n\n/// Gives one doorbell",
     "}\n}\n\n/// Gives one doorbell"),
    ("an unanswered descriptor taken for delivered", FDS, "Ok(_) | Err(_) => self.sent = None,", "Ok(_) | Err(_) => return Ok(true),"),
    ("a descriptor that was cut off acknowledged", FDS, "if slot.is_none() && passed.is_none() {", "if false {"),
    ("a peer whose exchange is over sent to again", FDS, "Err(Errno::ECONNREFUSED | Errno::EPERM) if self.tried =>", "Err(Errno::ECONNREFUSED | Errno::EPERM) if false =>"),
    ("a rank without answers blamed for them", FDS, "if self.absent().is_empty() && self.never_sent() == 0 {", "if false {"),
    ("addresses contain regions that are gone", REGIONS, "|(_, length)| **length > 0", "|_| true"),
    ("time counted while the process was stopped", SCHEDULE, "if (gap_ns > step_ns_)", "if (gap_ns > ~0ull - step_ns_)"),
    ("guard pages not counted down", STACKS, "if (chunk.guarded) guards -= chunk.stacks;", ""),
    ("host closures left where they waited", SEEDED, "if code != ffi::TY_EXEC_OK as i32 {\n        // No host", "if false {\n        // No host"),
    ("limits of outer control groups overlooked", FREE_MEMORY, "inner.chain([left(&top, &files)]).flatten().min()",
     "inner.last().flatten().or(left(&top, &files))"),
    ("control groups overlooked", FREE_MEMORY, ".chain(group_bytes(root)).min()", ".chain(None).min()"),
    ("a reader that leaves fails the command", OUT, "if error.kind() != ErrorKind::BrokenPipe {", "if true {"),
    ("a full disk of stdout passed over", OUT, "            lines.failed = true;\n", ""),
    ("a full disk reported with every line", OUT, "        if lines.ended {\n", "        if false {\n"),
    ("the status forgets what stdout lost", OUT, "if held(&self.lines).failed && earned", "if false && earned"),
    ("the caller's world left to ranks as processes", LAUNCH, "command.env_remove(name);", "let _ = name;"),
    ("a rank starts ranks of its own", LAUNCH, "        if is_rank() {\n            let here", "        if false {\n            let here"),
    ("--as-rank taken from anybody", LAUNCH, "    if is_rank() {\n        let watched", "    if true {\n        let watched"),
    ("any word taken for a level of the log", LOGGING, "_ => return Err(refused(text)),", "_ => {}"),
    ("a FIFO waits for its writer", TRACE_FILE, "custom_flags(libc::O_NONBLOCK)", "custom_flags(0)"),
    ("a trace file of any size read", TRACE_FILE, "if meta.len() > MAX_FILE_BYTES {", "if false {"),
    ("a header of any size read", TRACE_FILE, "if length > MAX_HEADER_BYTES {", "if false {"),
    ("the longest trace file refused", TRACE_FILE, "meta.len() > MAX_FILE", "meta.len() >= MAX_FILE"),
    ("the longest header refused", TRACE_FILE, "length > MAX_HEADER", "length >= MAX_HEADER"),
    ("a stream of another device taken", VIEW, "if self == wanted {", "if true {"),
    ("a view of another device taken", VIEW, "self.place.must_be(name, place)", "place.must_be(name, place)"),
    ("input of later rounds freed under them", CALLS, "(self.plan.rounds > 1).then(|| tokens.clone());\n        Ok(Sent {", "None;\n        Ok(Sent {"),
    ("rows of later rounds freed under them", CALLS, "(self.plan.rounds > 1).then(|| rows.clone())", "None"),
    ("the host copies while a kernel runs", CPU, "if runs_here(self.exec.raw()) || ended() {", "if true {"),
    ("a copy made once its caller has gone", CPU, "match lock(&transfer.copy).take() {", "match *lock(&transfer.copy) {"),
    ("a graph's views not kept", RECORDING, "self.owners.extend(view.owner().cloned());", "let _ = view;"),
    ("a graph's context not kept", RECORDING, "self.owners.push(context());", "let _ = context;"),
    ("a graph's handles not kept", OPEN, "recording.keep(lease.clone());", ""),
    ("a graph dropped ahead of its replays", DEVICE, "!kept.is_empty() && launched", "kept.is_empty() && launched"),
    ("calls of two streams not ordered", RECORDING, "            queue.wait_for(before)?;\n        }\n        *last = Some(queue.clone());\n        Ok(())", "            let _ = before;\n        }\n        *last = Some(queue.clone());\n        Ok(())"),
    ("a call that came before a capture forgotten", RECORDING, "        if let Some(before) = last.as_ref() {\n            queue.wait_for(before)?;\n        }\n        *last = Some(queue.clone());\n        Ok(())", "        if let Some(before) = last.as_ref().filter(|before| !before.is_capturing().unwrap_or(true)) {\n            queue.wait_for(before)?;\n        }\n        *last = Some(queue.clone());\n        Ok(())"),
    ("a handle's use that came before a capture forgotten", RECORDING, "        if let Some(before) = last.as_ref() {\n            queue.wait_for(before)?;\n        }\n        *last = Some(queue.clone());\n        self.number", "        if let Some(before) = last.as_ref().filter(|before| !before.is_capturing().unwrap_or(true)) {\n            queue.wait_for(before)?;\n        }\n        *last = Some(queue.clone());\n        self.number"),
    ("a graph that nothing guards launched", RECORDING, "enqueued.guarded && bits & UNGUARDED != 0", "enqueued.guarded && bits & UNGUARDED == 7"),
    ("another library's capture not noticed", RECORDING, "self.guarded |= recorded;", "let _ = recorded;"),
    ("threads of a guarded combine read the head for themselves", PARTIAL, "return handle_may_change(a.context) ? &block_shared<CombineShared>().head : live_head_of(a);", "return live_head_of(a);"),
    ("specialised kernels drop rows", PICK, " && output.drop_overflow == 0", ""),
    ("a guarded call takes a specialised kernel", PICK, "        && context.guarded == 0\n", ""),
    ("replays not ordered", RECORDING, "enqueued.follow(chain, queue)?;", "let _ = (&enqueued, chain, queue);"),
    ("a handle given on under its last use", OPEN, "None => lease.last_use().follow(self.stream.queue()),", "None => Ok(()),"),
    ("a graph overwrites a handle under its last use", RECORDING, "self.uses.iter().try_for_each(|last| last.follow(queue))", "Ok(()).map(|()| drop((&self.uses, queue)))"),
    ("last use of a handle taken for its first", RECORDING, "            queue.wait_for(before)?;\n        }\n        *last = Some(queue.clone());\n        self.number", "            queue.wait_for(before)?;\n        }\n        last.get_or_insert(queue.clone());\n        self.number"),
    ("memory freed under kernels that do not end", OPEN, "forget((self.memory.clone(), self", "forget((self"),
    ("idle streams kept for ever", RECORDING, "queues.retain(|known| !known.is_idle());", ""),
    ("a stream after another does not wait", EXECUTOR, "std::make_shared<bool>(false)", "std::make_shared<bool>(true)"),
    ("another context's combine received", CALLS,
     'self.own("sent", sent.handle.context)?;\n        let mut needs = self.needs(&sent.kind);\n        // As in',
     "let mut needs = self.needs(&sent.kind);\n        // As in"),
    ("launches of two threads mixed", OPEN, "        Ok(Call { open, stream, _enqueued: enqueued, guarded, foreign, recording })",
     "        drop((enqueued, recording));\n"
     "        let (chains, none) = (Box::leak(Box::new(Chains::new(true, Default::default()))), Box::leak(Box::new(std::sync::Mutex::new(None))));\n"
     "        Ok(Call { open, stream, _enqueued: chains.lock(), guarded, foreign, recording: none.lock().unwrap() })"),
    ("a context built over a past world", CALLS, "world.check_current()?;\n        let checked", "let checked"),
    ("a past generation's context goes on", CALLS, "self.open.chains.check_current()?;\n        if let Some(ended)", "if let Some(ended)"),
    ("a graph of a past generation's context launched", RECORDING, "self.chains.iter().try_for_each(|(chains, _)| chains.check_current())?;", ""),
    ("calls on another device's stream taken", CALLS, 'self.device.expect_own("stream", stream.device())?;', ""),
    ("a graph launched on another device's stream", DEVICE, 'stream.queue.device.place().must_be("stream", self.place())?;', ""),
    ("outputs lie in inputs of their call", "bindings/api/needs.rs", "for other in &used[..at] {", "for other in &used[self.read..at] {"),
    ("outputs of a call lie in each other", "bindings/api/needs.rs", "for other in &used[..at] {", "for other in &used[..self.read] {"),
    ("memory that ends where other begins overlaps it", "bindings/api/needs.rs", "written.begin < other.end &&", "written.begin <= other.end &&"),
    ("sums written where later rounds read", CALLS, "if let Some(rows) = &sent.views {", "if let (Some(rows), 1) = (&sent.views, self.plan.rounds) {"),
    ("rows written where later rounds read", CALLS,
     "if let Some(tokens) = &sent.views {\n            tokens.check(&mut needs)?;\n        }\n        let out = self.check_output",
     "if let (Some(tokens), 1) = (&sent.views, self.plan.rounds) {\n            tokens.check(&mut needs)?;\n        }\n        let out = self.check_output"),
    ("blocks of the CPU device beyond memory for their stacks", BUILDER, "MAX_CPU_BLOCKS: usize = 1024", "MAX_CPU_BLOCKS: usize = 1025"),
    ("calls of more rounds than they may take", BUILDER, "if rounds <= MAX_ROUNDS {", "if rounds <= MAX_ROUNDS + 1 {"),
    ("worlds of more ranks than a context has words for", BUILDER, 'raw::TY_MAX_RANKS as usize, "ranks")?;', 'usize::MAX, "ranks")?;'),
    ("an alignment is cut where there are no experts", SHAPE, "experts.max(1).saturating_mul(align)", "experts.saturating_mul(align)"),
    ("a call that is half enqueued leaves its context open", CALLS, "if round > 0 && !call.is_recorded()", "if round > self.plan.rounds && !call.is_recorded()"),
    ("a call of which nothing is enqueued closes its context", CALLS, "if round > 0 && !call.is_recorded()", "if !call.is_recorded()"),
    ("a call that is half recorded closes its context", CALLS, "if round > 0 && !call.is_recorded()", "if round > 0"),
    ("an address of any length is gathered", CARDS, "address.len() > MAX_ADDRESS)", "address.len() > usize::MAX)"),
    ("why a rank has no arena on the network is kept from the others", CARDS,
     "if index == NO_CONTEXT {", "if index == NO_CONTEXT && table.is_empty() {"),
    ("ports of later generations wrap", WORLD, "u16::try_from(port).map_err(|_| {", "Ok(port as u16).map_err(|_: ()| {"),
    ("a world over an all-gather of nobody", WORLD, "if ranks == 0 || ranks > MAX_WORLD {", "if ranks > MAX_WORLD {"),
    ("a new world leaves the old one current", WORLD, "newest.fetch_max(self.family.generation, Ordering::Release);", ""),
    ("the order of halves between nodes not named", REPORT, "raw::TY_SITE_ROW if nodes > 1 =>", "raw::TY_SITE_ROW if nodes > 64 =>"),
    ("the order of a stream's calls not named", REPORT, "=> \"; all ranks must enqueue their calls on a stream in the same order\",", "=> \"\","),
    ("an error given again", REPORT, "            given.sequences[number] = record.sequence;\n", ""),
    ("a context goes on after its call was cut short", REPORT, "record.a as u32 == raw::TY_ORDER_ROUND;", "false;"),
    ("a mistake in order closes the context", REPORT, "record.a as u32 == raw::TY_ORDER_ROUND;", "true;"),
    ("a timeout is no fatal error", ERROR, "            Error::Generation { .. } | Error::Timeout { .. } | Error::PeerLost { .. } => true,",
     "            Error::Timeout { .. } => false,\n            Error::Generation { .. } | Error::PeerLost { .. } => true,"),
    ("the driver's code lost", ERROR, "Error::Device { code, .. } => *code,", "Error::Device { code, .. } => code.filter(|_| false),"),
    ("a proxy ended by an error that its caller survives", REMOTE, "let error = error.ending();", "let error = error;"),
    ("members of another generation let in", TERMS, "if self.generation != theirs.generation {", "if false {"),
    ("other members let in", TERMS, "if self.members != theirs.members {", "if false {"),
    ("other nodes let in", TERMS, "if self.nodes != theirs.nodes {", "if false {"),
    ("rank 0 not notified of other terms", ROOT_SIDE, "self.differing.get_or_insert(failure);", "drop(failure);"),
    ("parts of another rank or step taken", OVER, "Some((head, begin)) if head == self.head(rank, seq, what) => begin,",
     "Some((_, begin)) if begin > 0 => begin,"),
    ("as many parts as come are taken", OVER, "if parts.len() != world {", "if false {"),
    ("members that disagree form a world", OVER, "all.iter().find(|theirs| !theirs.ends_with(",
     "all.iter().find(|theirs| !theirs.ends_with(&[]) && !theirs.ends_with("),
    ("ranks of later generations called by their new numbers", NAMES, "self.0.get(rank.index()).copied().unwrap_or(rank)", "rank"),
    ("absent ranks called by their new numbers", COLLECTIVE, "absent.map(|r| self.names.of(r)).collect();", "absent.collect();"),
    ("a rank that failed called by its new number", WORLD, "let name = self.original(Rank(rank as u32));", "let name = Rank(rank as u32);"),
    ("a rank that differs called by its new number", AGREEMENT, "let name = world.original(Rank(rank as u32));",
     "let name = Rank(rank as u32);"),
    ("an arena longer than files may be", HOST, "filter(|longest| *longest < bytes as u64)", "filter(|_| false)"),
    ("another rank's proxy taken", SERVICE, "if (*rank, *others) == (own, ranks) {", "if *others > 0 || *rank == own {"),
    ("texts of others quoted raw", QUOTE, '_ => write!(line, "{}", c.escape_debug()),', '_ => write!(line, "{c}"),'),
    ("no look after a deadline", WAIT, "        let now = Instant::now();\n        if let Some(value) = ready() {\n            return Waited::Ready(value);\n        }\n", "        if let Some(value) = ready() {\n            return Waited::Ready(value);\n        }\n        let now = Instant::now();\n"),
    ("an interrupt not looked at", WAIT, "if due(now) {", "if false && due(now) {"),
    ("a fiber interrupted for another", WAIT, "uninterrupted(|| yield_fiber(site, polls))", "yield_fiber(site, polls)"),
    ("destructors are interrupted", INTERRUPT,
     "    let _restored = Restored(take());\n    work()", "    work()"),
    ("an interrupted request's outcome lost", REMOTE, "Err(interrupted) if slip.withdraw() =>",
     "Err(interrupted) if slip.withdraw() || true =>"),
    ("an interrupted collective reported as a deadline", SOCKET_THREAD,
     "if interrupted.is_some() { INTERRUPTED } else { waited_ms }", "waited_ms"),
    ("whoever joins has the token", ADMIT, "    if !known {", "    if false {"),
    ("whoever accepts is rank 0", MEMBER, "if self.secret.proved(Role::Root, nonces, fields, &proof) {", "if proof != [0; 32] {"),
    ("a member's proof proves rank 0", SECRET, 'b"tokenyard bootstrap: rank 0"', 'b"tokenyard bootstrap: member"'),
    ("rank 0's nonce not proved", SECRET, "            .chain_update(nonces.root)\n", ""),
    ("fields of a member not proved", SECRET, "            .chain_update(fields)\n", ""),
    ("a secret that others can read taken", SECRET, "match about.mode() & 0o077 {", "match about.mode() & 0 {"),
    ("a link followed to the secret", SECRET, "libc::O_NOFOLLOW | libc::O_NONBLOCK", "libc::O_NONBLOCK"),
    ("a peer of another host challenged without a token", ADMIT, "if job.secret.own_host && !on_this_host {", "if false {"),
    ("nodes that the members are not of", BOOTSTRAP, "Some(nodes) if *nodes != placed =>", "Some(nodes) if nodes.is_empty() =>"),
    ("first nodes without ranks", BOOTSTRAP, "first_nodes.contains(&0) ||", "false ||"),
    ("a regroup of threads waits for members with other terms", LOCAL, "if shared.is_some() {", "if false {"),
    ("a rank that is behind waits for a newer generation", LOCAL, "differ(failure.clone(), generation <= theirs.0)", "differ(failure.clone(), generation == theirs.0)"),
    ("a rank that is early for a later generation fails", LOCAL, "differ(failure, theirs.0 <= generation)", "differ(failure, true)"),
    ("a regroup that ends at its deadline without what differed", COLLECTIVE, "if let Some(Failure { what: difference, advice, .. }) = self.differing.take() {", "if let Some(Failure { what: difference, advice, .. }) = None {"),
    ("a regroup of threads waited for by members with other terms", LOCAL, "if theirs.1.contains(&own) {", "if false {"),
    ("a failed regroup of threads kept", LOCAL, ".collective.failure().is_some() {", ".collective.failure().is_none() && false {"),
    ("refused strangers kept", ROOT_SIDE, "        self.closing.drain(..surplus);\n", ""),
    ("a slower build passes", PAIRS, 'return bound, "faster" if change < 0 else "SLOWER"', 'return bound, "faster"'),
    ("noise taken for a slower build", PAIRS, "if abs(change) <= noise:", "if False:"),
    ("a kernel that spills passes", PAIRS, "worse = b[key][0] > a[key][0] or", "worse = b[key][0] > a[key][0]  #"),
    ("a request's flag cleared after the lock", MAILBOX, "        if request.is_none() {\n",
     "        drop(requests);\n        if request.is_none() {\n"),
    ("a request's flag raised before the lock", MAILBOX,
     "    pub fn put(&self, request: R) {\n        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);\n"
     "        requests.push_back(request);\n        // Relaxed: the lock protects the queue.\n"
     "        self.waiting.store(true, Ordering::Relaxed);\n",
     "    pub fn put(&self, request: R) {\n        self.waiting.store(true, Ordering::Relaxed);\n"
     "        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);\n"
     "        requests.push_back(request);\n"),
    ("the end not released", MAILBOX, "self.ended.store(true, Ordering::Release);", "self.ended.store(true, Ordering::Relaxed);"),
    ("the end not acquired", MAILBOX, "self.ended.load(Ordering::Acquire)", "self.ended.load(Ordering::Relaxed)"),
    ("a core beyond the mask", REMOTE, "if core < libc::CPU_SETSIZE as usize && ", "if "),
    ("a phase waits for heartbeats", PROJECTION, "self.posted == self.completed", "self.network.next_due_ns().is_none()"),
    ("a projected peer is lost", PROJECTION, "Liveness { heartbeat_ns, silence_ns: u64::MAX, first_contact_ns: u64::MAX }",
     "Liveness { heartbeat_ns, ..default }"),
    ("heartbeats fill a slow link", PROJECTION, "default.heartbeat_ns.max((PHASES_PER_HEARTBEAT * phase_us * 1e3) as u64)",
     "default.heartbeat_ns"),
    ("a replayed size without a bound", CASE, "hidden: show, within::<1, MAX_HIDDEN>;", "hidden: show, within::<0, { u64::MAX }>;"),
    ("a replayed field given twice", CASE, "if given.contains(&name) =>", "if false && given.contains(&name) =>"),
    ("what is refused by design is held to nothing", REPLAY, "check_case(&usable, judge.device)?;",
     "if case == usable { check_case(&usable, judge.device)?; }"),
    ("a replay larger than the memory", REPLAY, "    check_memory(&usable, judge.device, usable.world)?;\n", ""),
    ("a pipe with a name is waited for", FILES, "kind.is_char_device() || handed)", "kind.is_char_device() || kind.is_fifo())"),
    ("two results in one file", FILES, "*before == place)", "false && *before == place)"),
    ("a look at a file leaves it", FILES, "            fs::remove_file(file).map_err(unwritable)?;\n", ""),
    ("waits at a thread's end need its interrupts", INTERRUPT, "IN_FORCE.try_with(Cell::take).unwrap_or_default()", "IN_FORCE.take()"),
    ("what a check panicked with is dropped", INTERRUPT, "        std::mem::forget(payload);\n", ""),
    ("runs that are missing pass", PAIRS, "if any(len(row[build]) < alternations for build in BUILDS):", "if False:"),
]

MUTANTS += [mutant for _, _, group in GROUPS for mutant in group]
# What catches a mutant, where it is stated: unit tests or a module of a test program, by the mutant's name.
STATED = {mutant[0]: (kind, words) for kind, words, group in GROUPS for mutant in group}

# Seconds; some mutants never end.
LONGEST_CHECK = 200
LONGEST_BUILD = 900
# How often as long as a check takes that passes it may take, on a machine that is busy.
SLOWER = 4


def run_whole(command, folder, environment, limit):
    """Runs a command. What it started ends with it at the limit, such as tests of cargo test, which may hang for good."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **piped) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except BaseException:
            # Nobody has waited for it, so the number is still its own.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class Worker:
    """A copy of the tree with a build folder of its own."""

    # How long checks took that passed.
    took = {}

    def __init__(self, number):
        self.tree = PLACE / f"tree-{number}"
        self.target = PLACE / f"build-{number}"
        self.cargo = ["--no-default-features", "--features", "cli", "--target-dir", str(self.target)]

    def copy(self):
        """Makes the copy, in place of an earlier run's."""
        if self.tree.exists():
            shutil.rmtree(self.tree)
        # With new times: a build of an earlier run may be of a mutant that was written later than these files.
        shutil.copytree(ROOT, self.tree, copy_function=shutil.copy, ignore=shutil.ignore_patterns("target", ".git", ".venv*", ".gpu"))

    def seed(self):
        """Takes other crates from the build with coverage, if there is one: cargo builds them the same way here."""
        built, own = ROOT / "target" / "coverage" / "debug", self.target / "debug"
        if own.exists() or not built.exists():
            return

        def left_out(folder, names):
            libraries = (".rlib", ".rmeta", ".so", ".d")
            return {name for name in names if "tokenyard" in name or (folder.endswith("/deps") and not name.endswith(libraries))}

        # Compilers and linkers put new files in the place of old ones, so libraries take no room of their own.
        for folder, copy in (("deps", os.link), ("build", shutil.copy2), (".fingerprint", shutil.copy2)):
            shutil.copytree(built / folder, own / folder, copy_function=copy, ignore=left_out)

    def run(self, command, limit):
        return run_whole(command, self.tree, QUICK, limit)

    def build(self):
        return self.run(["cargo", "build", "-q", *self.cargo], LONGEST_BUILD)

    def checks(self, file):
        """What the suite runs against a mutant of a file; the first that fails catches it."""
        program = str(self.target / "debug" / "tokenyard")
        cargo = ["cargo", "test", "-q", *self.cargo]

        def test(module, *parts):
            return [*cargo, "--test", *tests_of(module, parts)]

        worlds = [
            ("schedules", [program, "verify", "--schedules", "80", "--timeout-ms", "4000"]),
            ("seeds", [program, "verify", "--seeds", "60", "--timeout-ms", "2000"]),
            ("faults", test("faults")),
            ("nodes", test("nodes", "rounds", "another_dispatch")),
            ("contexts", test("contexts", "another_dispatch", "another_call", "threads_of_a_block", "closed_context", "the_first_launch")),
            ("several tiles", [program, "verify", "--replay", TILES]),
            ("dedicated senders", [program, "verify", "--timeout-ms", "4000", "--replay", DEDICATED]),
            ("rows kept once", [program, "verify", "--timeout-ms", "4000", "--replay", KEPT_ONCE]),
            ("scales later", [program, "verify", "--timeout-ms", "4000", "--replay", SCALES_LATER]),
            ("halves later", [program, "verify", "--timeout-ms", "4000", "--replay", HALVES_LATER]),
            ("late completions", [program, "verify", "--timeout-ms", "4000", "--replay", LATE]),
            ("overlap", test("overlap")),
            ("messages tampered with", [program, "verify", "--timeout-ms", "1000", "--schedules", "200", "--forge"]),
        ]
        in_place = [
            ("outputs in the arena", [program, "verify", "--schedules", "120", "--in-place", "--timeout-ms", "4000"]),
            ("in_place", test("in_place")),
        ]
        worlds = in_place + worlds if file == IN_PLACE else worlds + in_place
        # The proxy has tests of its own, which are quicker than whole worlds, and these have no emulated NIC.
        proxy = [("proxy_machine", test("proxy_machine"))]
        pick = [("unit tests", ["cargo", "test", "-q", *self.cargo, "--lib", "pick"])]
        nic = [("gpu_nic", test("gpu_nic"))]
        # What a context and its proxy agree on as it is built.
        service = [
            ("unit tests", ["cargo", "test", "-q", *self.cargo, "--lib", "service"]),
            ("transport_outside", test("transport_outside", "gathered")),
            ("nodes", test("nodes")),
        ]
        lib = ["cargo", "test", "-q", *self.cargo, "--lib"]
        # The program: what it does with its streams, its ranks' environment and files of its user.
        cli = [
            ("cli", test("cli", "reader", "full_disk", "caller", "trace", "log")),
            ("cli_run", test("cli_run")),
            ("unit tests", [*lib, "cli::cases::trace_file"]),
        ]
        contexts = [("contexts", test("contexts"))]
        overlaps = [("aliasing", test("aliasing"))]
        ownership = [("ownership", test("ownership"))]
        interrupts = [("interrupts", test("interrupts")), ("unit tests", [*lib, "base::"])]
        own = {
            CARDS: [("unit tests", [*lib, "cards"]), ("transport_outside", test("transport_outside", "gathered", "text"))],
            MACHINE: proxy + [("unit tests", [*lib, "driver"])],
            DRIVER: [("unit tests", [*lib, "driver"])],
            REGIONS: [("unit tests", [*lib, "regions"])],
            FREE_MEMORY: [("unit tests", [*lib, "memory"])],
            SCHEDULER: [("cli", test("cli", "stacks"))],
            LAUNCHES: [("unit tests", [*lib, "lack_of_memory"])],
            SCHEDULE: [("stopped", test("stopped"))],
            STACKS: [("unit tests", [*lib, "guard_pages"])],
            SEEDED: [("device", test("device", "world"))],
            CALLS: contexts + overlaps + ownership + [("unit tests", [*lib, "context::"])],
            VIEWS: overlaps + contexts,
            SHAPE: contexts,
            BUILDER: [("faults", test("faults", "are_refused"))],
            VIEW: [("unit tests", [*lib, "device::view"])] + ownership,
            DEVICE: ownership + contexts,
            CPU: ownership + [("unit tests", [*lib, "given_up"])],
            RECORDING: ownership + contexts + [("unit tests", [*lib, "recording"])],
            OPEN: ownership,
            HANDLE: ownership,
            EXECUTOR: ownership,
            WORLD: contexts + [
                ("bootstrap", test("bootstrap", "ports", "again", "generation")), ("worlds", test("worlds", "sizes"))],
            REPORT: [("unit tests", [*lib, "report::"]), ("contexts", test("contexts", "other_orders")), ("nodes", test("nodes", "halves_go")),
                     ("overlap", test("overlap"))],
            ERROR: [("unit tests", [*lib, "error::"])],
            PAIRS: [("pairs", test("pairs"))],
            MAILBOX: [("tests/loom.rs", [*cargo, "--test", "loom"])],
            REMOTE: [("unit tests", [*lib, "driver"])],
            PROJECTION: [("unit tests", [*lib, "--", "simulate::tests::a_link", "simulate::tests::a_peer"])],
            CASE: [("unit tests", [*lib, "cli::cases::case"])],
            FILES: [("cli", test("cli", "files_that"))],
            REPLAY: [("cli", test("cli", "unusable_arguments"))],
            OVER: [("worlds", test("worlds"))],
            AGREEMENT: [("worlds", test("worlds"))],
            HOST: [("memory", test("memory", "limit"))],
            QUOTE: [("unit tests", [*lib, "quote"]), ("worlds", test("worlds", "texts_of_others"))],
            WAIT: interrupts,
            INTERRUPT: interrupts + [("ownership", test("ownership", "own_storage"))],
        }
        bootstrap = [
            ("unit tests", ["cargo", "test", "-q", *self.cargo, "--lib", "transport"]),
            ("bootstrap", test("bootstrap")),
            ("interrupts", test("interrupts")),
        ]
        if file in own:
            return own[file]
        if file.startswith("bindings/cli/"):
            return cli
        if file.startswith("transport/"):
            return bootstrap
        return service if file == SERVICE else pick + worlds if file == PICK else proxy if file.startswith("proxy/") else nic if file == NIC else worlds

    def checks_of(self, mutant):
        """What the suite runs against a mutant."""
        name, file, _, _ = mutant
        if name not in STATED:
            return self.checks(file)
        kind, words = STATED[name]
        cargo = ["cargo", "test", "-q", *self.cargo]
        return [(words, [*cargo, "--lib", words] if kind == "unit" else [*cargo, "--test", *tests_of(words, ())])]

    def checks_of_all(self, mutants):
        """What the suite runs against any of the mutants, each once and in the same order in all places."""
        return list({tuple(command): (name, command) for mutant in mutants for name, command in self.checks_of(mutant)}.values())

    def thorough(self, mutant):
        """What the suite runs besides, for what the quick checks let through: as many schedules as all.sh."""
        name, file, _, _ = mutant
        program = str(self.target / "debug" / "tokenyard")
        schedules = [("all schedules", [program, "verify", "--schedules", "2000", "--timeout-ms", "4000"])]
        special = file in (NIC, FREE_MEMORY, SCHEDULER, SCHEDULE, STACKS, SEEDED, DEVICE, PAIRS, WAIT, INTERRUPT)
        separate = file.startswith(("proxy/", "transport/", "bindings/")) and file != PICK or special
        return [] if separate or name in STATED else schedules

    def caught_by(self, checks, longest=LONGEST_CHECK, hangs_are_caught=True):
        """The name of the check that fails, with its last line, or None; no name if its test program does not build, or
        if it passes its limit and that proves nothing."""
        for name, command in checks:
            limit = max(longest, SLOWER * self.took.get(name, 0))
            # Apart from the check, whose limit a build of a whole test program may pass: that would look like a catch.
            if command[0] == "cargo":
                arguments = command[:command.index("--")] if "--" in command else command
                try:
                    built = self.run([*arguments, "--no-run"], LONGEST_BUILD)
                except subprocess.TimeoutExpired:
                    return "", f"{name}: the test program is not built within {LONGEST_BUILD} s"
                if built.returncode != 0:
                    return "", f"{name}: the test program does not build: {built.stderr}"
            start = time.time()
            try:
                result = self.run(command, limit)
            except subprocess.TimeoutExpired:
                return name if hangs_are_caught else "", f"{name}: hung for {limit} s"
            if result.returncode != 0:
                lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
                # Of test programs: what panicked, with the line behind it.
                panics = [" ".join(lines[at:at + 2]) for at, line in enumerate(lines) if " panicked at " in line]
                return name, (panics or lines[-1:] or [f"exit status {result.returncode}"])[0]
            if command[0] == "cargo" and not re.search(r"\b[1-9]\d* passed", result.stdout):
                return "", f"{name}: no test ran"
            self.took[name] = max(self.took.get(name, 0), time.time() - start)
        return None

    def judge(self, mutant):
        """The outcome of a mutant: the check that caught it, None if none did, or why it does not count."""
        name, file, original, mutated = mutant
        path = self.tree / file
        text = path.read_text()
        path.write_text(text.replace(original, mutated))
        try:
            try:
                built = self.build()
            except subprocess.TimeoutExpired:
                return "", f"is not built within {LONGEST_BUILD} s"
            if built.returncode != 0:
                return "", f"does not compile: {built.stderr}"
            quick = self.caught_by(self.checks_of(mutant))
            # So many schedules take long on some machines even where nothing hangs, and end what hangs themselves.
            return quick or self.caught_by(self.thorough(mutant), LONGEST_BUILD, hangs_are_caught=False)
        finally:
            path.write_text(text)


def tests_of(module, parts):
    """The test program of a module, and what chooses its tests: all of them, or those whose names have one of the parts."""
    # Other folders hold parts of a program, and the one for verbs needs a VM.
    files = [file for file in ROOT.glob(f"tests/*/{module}.rs") if (file.parent / "main.rs").exists() and file.parent.name != "verbs"]
    if len(files) != 1:
        sys.exit(f"{len(files)} files of test programs are called {module}.rs: it must be one")
    file = files[0]
    names = re.findall(r"#\[test\]\n\s*fn (\w+)", file.read_text())
    chosen = [f"{module}::{name}" for name in names if any(part in name for part in parts)]
    if parts and not chosen:
        sys.exit(f"no test of {file} has one of {parts} in its name")
    return [file.parent.name, "--", *(["--exact", *chosen] if parts else [f"{module}::"])]


def check_texts():
    """Refuses a table whose texts do not each stand once in their file, or whose checks name tests that are not there."""
    for mutant in MUTANTS:
        name, file, original, _ = mutant
        found = (ROOT / file).read_text().count(original)
        if found != 1:
            sys.exit(f"mutant «{name}»: its original text stands {found} times in {file}")
        Worker(0).checks_of(mutant)


def prepare(mutants):
    """Builds the tree in as many places, and demands that what is run against the mutants passes without any."""
    workers = [Worker(number) for number in range(WORKERS)]
    for worker in workers:
        worker.copy()
        worker.seed()
    waiting, problems = queue.SimpleQueue(), []
    for number in range(len(workers[0].checks_of_all(mutants))):
        waiting.put(number)

    def work(worker):
        if (unmutated := worker.build()).returncode != 0:
            problems.append("the tree does not build: " + unmutated.stderr)
        checks = worker.checks_of_all(mutants)
        while not problems and (number := next_of(waiting)) is not None:
            if (false_alarm := worker.caught_by([checks[number]], LONGEST_BUILD)) is not None:
                problems.append(f"the suite fails without any mutant: {false_alarm}")

    in_threads(work, workers)
    if problems:
        sys.exit(problems[0])
    return workers


def next_of(waiting):
    """The next of a queue; None if none is left."""
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def in_threads(work, workers):
    """Does the work with each worker, in a thread of its own. What ends a thread ends the run, once all have ended."""
    failures = []

    def attempt(worker):
        try:
            work(worker)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=attempt, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def fingerprint(mutant):
    """Of a mutant and of the file that it changes."""
    return hashlib.sha256(repr(mutant).encode() + (ROOT / mutant[1]).read_bytes()).hexdigest()[:16]


def caught_before():
    """The fingerprints of mutants that earlier runs with --resume saw caught."""
    return {line.split()[0] for line in CAUGHT.read_text().splitlines()} if CAUGHT.exists() else set()


def forget_changed():
    """Leaves in the list of those caught the mutants that stand in the table as they were then."""
    known, caught = map(fingerprint, MUTANTS), caught_before()
    lines = [f"{mark} {mutant[0]}\n" for mark, mutant in zip(known, MUTANTS) if mark in caught]
    CAUGHT.write_text("".join(lines))


def chosen(arguments):
    """The mutants that the arguments ask for."""
    if arguments[:1] == ["--resume"]:
        caught, folders = caught_before(), tuple(arguments[1:]) or ""
        return [mutant for mutant in MUTANTS if mutant[1].startswith(folders) and fingerprint(mutant) not in caught]
    if arguments[:1] == ["--one-in"]:
        parts = int(arguments[1])
        contents = b"".join((ROOT / file).read_bytes() for file in sorted({file for _, file, _, _ in MUTANTS}))
        return MUTANTS[hashlib.sha256(contents).digest()[0] % parts :: parts]
    known = {mutant[0] for mutant in MUTANTS}
    if unknown := [name for name in arguments if name not in known]:
        sys.exit(f"no mutant is called «{unknown[0]}»")
    return [mutant for mutant in MUTANTS if not arguments or mutant[0] in arguments]


def main():
    check_texts()
    if sys.argv[1:] == ["--check"]:
        caught = caught_before()
        print(f"{sum(fingerprint(mutant) in caught for mutant in MUTANTS)} of {len(MUTANTS)} mutants were seen caught as they stand")
        return
    mutants, missed, resumes = chosen(sys.argv[1:]), [], sys.argv[1:2] == ["--resume"]
    if resumes:
        forget_changed()
    waiting = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)

    def work(worker):
        while (mutant := next_of(waiting)) is not None:
            start = time.time()
            result = worker.judge(mutant)
            verdict = "SURVIVED" if result is None else f"caught by {result[0]}" if result[0] else result[1]
            if result is None or not result[0]:
                missed.append(mutant[0])
            elif resumes:
                with CAUGHT.open("a") as caught:
                    caught.write(f"{fingerprint(mutant)} {mutant[0]}\n")
            print(f"{mutant[0]:50} {verdict:32} {time.time() - start:5.1f} s", flush=True)

    in_threads(work, prepare(mutants))
    print(f"{len(mutants) - len(missed)} of {len(mutants)} mutants caught")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
