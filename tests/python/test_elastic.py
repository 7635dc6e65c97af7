"""`tokenyard.deep_ep.ElasticBuffer`: results and handles element by element, against loops over tokens and choices."""

import gc
import os
import threading

import numpy as np
import pytest

import tokenyard
from rig import in_threads, one_node, settle

if os.environ.get("TOKENYARD_STRICT") == "1":
    import torch
else:
    torch = pytest.importorskip("torch")

from tokenyard import deep_ep  # noqa: E402: after torch, without which there is no such module
from tokenyard.deep_ep import ElasticBuffer  # noqa: E402

LOCAL, TOP_K, HIDDEN, MOST = 3, 4, 512, 16
KINDS = ["bf16", "fp16", "fp32", "fp8", "fp8 by 128", "fp8 ue8m0", "fp8 mx", "fp8 by 32", "int8"]
# "cuda": all ranks share a GPU, each with streams of its own and a part of the multiprocessors.
DEVICE = os.environ.get("TOKENYARD_TEST_DEVICE", "cpu")


def here(tensor):
    """A tensor on the device of the tests."""
    return tensor.to(DEVICE)


def bits(tensor):
    """Something that torch can compare, to the bit."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(found, wanted):
    settle(DEVICE)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(bits(found.cpu()), bits(wanted.cpu()))


def aligned(rows, alignment):
    return (rows + alignment - 1) // alignment * alignment


class Case:
    """Tokens of all ranks, and by plain loops what comes of them."""

    def __init__(self, ranks=2, counts=(9, 0, 5, 1, 16, 0, 12, 3), seed=1, duplicates=False, top_k=TOP_K):
        draw = self.draw = np.random.default_rng(seed)
        self.ranks, self.counts, self.experts, self.top_k = ranks, counts[:ranks], LOCAL * ranks, top_k
        self.ids, self.weights, self.others = [], [], []
        for n in self.counts:
            ids = draw.integers(0, self.experts, (n, top_k))
            if not duplicates:
                ids = np.argsort(draw.random((n, self.experts)), axis=1)[:, :top_k]
            self.ids.append(torch.from_numpy(np.where(draw.random((n, top_k)) < 0.2, -1, ids)))
            self.weights.append(torch.from_numpy(draw.random((n, top_k), dtype=np.float32)))
            self.others.append(torch.from_numpy(draw.random((n, top_k), dtype=np.float32)))
        # What experts return, by (source, token, choice), and biases: multiples of 1/4, of which sums are exact.
        self.parts = [self.quarters((n, top_k, HIDDEN), 8) for n in self.counts]
        self.bias = [[self.quarters((n, HIDDEN), 16) for _ in range(2)] for n in self.counts]

    def quarters(self, shape, most):
        return torch.from_numpy(self.draw.integers(-most, most + 1, shape).astype(np.float32) / 4)

    def rows(self, kind):
        """Rows of each rank, with scales in strides that are not those of rows, or None."""
        draw, made = self.draw, []
        for n in self.counts:
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(kind)
            if dtype is not None:
                made.append((torch.from_numpy(draw.standard_normal((n, HIDDEN))).to(dtype), None))
                continue
            x = torch.from_numpy(draw.integers(0, 256, (n, HIDDEN), dtype=np.uint8))
            words = {"fp8": 0, "fp8 by 128": HIDDEN // 128, "fp8 ue8m0": HIDDEN // 512, "fp8 mx": HIDDEN // 128,
                     "fp8 by 32": HIDDEN // 32, "int8": 1}[kind]
            scales = torch.from_numpy(draw.integers(-(2**31), 2**31, (n, words), dtype=np.int32)).T.contiguous().T
            scales = scales if kind in ("fp8 ue8m0", "fp8 mx") else scales.view(torch.float32)
            made.append((x.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn), scales if words else None))
        return made

    def owner(self, expert):
        return expert // LOCAL

    def received(self, rank):
        """(source, token) of each row of a dispatch without expansion, in order."""
        return [
            (s, t) for s in range(self.ranks) for t in range(self.counts[s])
            if any(e >= 0 and self.owner(e) == rank for e in self.ids[s][t].tolist())
        ]

    def expanded(self, rank, alignment):
        """(source, token, choice) of each row of an expanded dispatch, None for padding; and where each expert's rows end."""
        rows, ends = [], []
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            rows += [
                (s, t, k) for s in range(self.ranks) for t in range(self.counts[s])
                for k in range(self.top_k) if self.ids[s][t, k] == expert
            ]
            ends.append(len(rows))
            rows += [None] * (aligned(len(rows), alignment) - len(rows))
        return rows, ends

    def counts_of(self, rank):
        return [sum(int((ids == e).sum()) for ids in self.ids) for e in range(rank * LOCAL, (rank + 1) * LOCAL)]

    def sums(self, rank):
        """The unweighted sums of what experts return for a rank's tokens."""
        return (self.parts[rank] * (self.ids[rank] >= 0)[:, :, None]).sum(1)

    def partial(self, rank, source, token):
        """What a rank returns for a token: the sum over its own experts."""
        own = (self.ids[source][token] >= rank * LOCAL) & (self.ids[source][token] < (rank + 1) * LOCAL)
        return (self.parts[source][token] * own[:, None]).sum(0)

    def slots(self, rank):
        """dst_buffer_slot_idx."""
        table, sent = torch.full(self.ids[rank].shape, -1, dtype=torch.int32), [0] * self.ranks
        for t in range(self.counts[rank]):
            went = set()
            for k, e in enumerate(self.ids[rank][t].tolist()):
                if e >= 0 and self.owner(e) not in went:
                    went.add(self.owner(e))
                    table[t, k] = rank * MOST + sent[self.owner(e)]
                    sent[self.owner(e)] += 1
        return table

    def metadata(self, rank, alignment, expand):
        """recv_src_metadata."""
        table = []
        for s, t in self.received(rank):
            first = next(k for k in range(self.top_k) if self.owner(int(self.ids[s][t, k])) == rank and self.ids[s][t, k] >= 0)
            table.append([s * MOST + t, s * self.top_k + first] + [-1] * self.top_k)
        if expand:
            order = {place: n for n, place in enumerate(self.received(rank))}
            for row, place in enumerate(self.expanded(rank, alignment)[0]):
                if place is not None:
                    table[order[place[:2]]][2 + place[2]] = row
        return torch.tensor(table, dtype=torch.int32).reshape(-1, self.top_k + 2)

    # Checks of what a rank got

    def check_rows(self, rank, x, given, expand, alignment, padded):
        """Rows and scales. `padded`: padding between experts is 0."""
        places = self.expanded(rank, alignment)[0] if expand else self.received(rank)
        used = [n for n, place in enumerate(places) if place is not None]
        for found, which in zip(x if isinstance(x, tuple) else (x,), range(2)):
            wanted = [given[places[n][0]][which][places[n][1]] for n in used]
            like = given[0][which]
            same(found[used], torch.stack(wanted) if wanted else like.new_empty((0, like.shape[1])))
            if padded:
                gaps = [n for n, place in enumerate(places) if place is None]
                assert not bits(found[gaps].cpu()).any()

    def check_weights(self, rank, found, of, expand, alignment):
        if expand:
            wanted = [0.0 if place is None else float(of[place[0]][place[1], place[2]]) for place in self.expanded(rank, alignment)[0]]
            same(found[: len(wanted)], torch.tensor(wanted))
            assert not found[len(wanted) :].any()
            return
        places = self.received(rank)
        assert found.shape[1] == self.top_k
        for n, (s, t) in enumerate(places):
            own = [k for k in range(self.top_k) if self.ids[s][t, k] >= 0 and self.owner(int(self.ids[s][t, k])) == rank]
            assert found[n].cpu()[own].tolist() == of[s][t][own].tolist(), (rank, n, s, t)

    def check_experts(self, rank, found):
        wanted = [
            [e - rank * LOCAL if e >= 0 and self.owner(e) == rank else -1 for e in self.ids[s][t].tolist()]
            for s, t in self.received(rank)
        ]
        assert found.dtype == torch.int64 and found[: len(wanted)].tolist() == wanted
        assert (found[len(wanted) :] == -1).all()

    def check_handle(self, rank, handle, expand, alignment, sync, most=MOST):
        counts, places = self.counts_of(rank), self.received(rank)
        rounded = [aligned(n, alignment) for n in counts]
        same(handle.num_unaligned_recv_tokens_per_expert, torch.tensor(counts, dtype=torch.int32))
        ends = self.expanded(rank, alignment)[1] if expand else np.cumsum(rounded).tolist()
        same(handle.psum_num_recv_tokens_per_expert, torch.tensor(ends, dtype=torch.int32))
        of_ranks = [sum(s <= source for s, _ in places) for source in range(self.ranks)]
        same(handle.psum_num_recv_tokens_per_scaleup_rank, torch.tensor(of_ranks, dtype=torch.int32))
        assert handle.num_recv_tokens_per_expert_list == (rounded if sync else [])
        all_rows = aligned(self.ranks * most * min(self.top_k, LOCAL) + (alignment - 1) * LOCAL, alignment)
        assert handle.num_recv_tokens == (len(places) if sync else self.ranks * most)
        assert handle.num_expanded_tokens == (sum(rounded) if sync else all_rows)
        assert handle.do_expand is expand and handle.num_experts == self.experts and handle.expert_alignment == alignment
        assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
        same(handle.topk_idx, self.ids[rank])
        if most == MOST:
            assert handle.num_max_tokens_per_rank == MOST
            same(handle.dst_buffer_slot_idx, self.slots(rank))
            found = handle.recv_src_metadata
            assert found.shape == (handle.num_recv_tokens, self.top_k + 2)
            same(found[: len(places)], self.metadata(rank, alignment, expand))
            assert (found[len(places) :] == -1).all()

    def returned(self, rank, rows, handle, dtype=torch.bfloat16):
        """What a rank's experts return: NaN where no row came."""
        out = torch.full((rows, HIDDEN), float("nan"))
        if handle.do_expand:
            for n, place in enumerate(self.expanded(rank, handle.expert_alignment)[0]):
                if place is not None:
                    out[n] = self.parts[place[0]][place[1], place[2]]
        else:
            for n, (s, t) in enumerate(self.received(rank)):
                out[n] = self.partial(rank, s, t)
        return here(out.to(dtype))

    def weights_of_rows(self, rank, rows, handle):
        """Weights of a combine: NaN where they do not count."""
        if handle.do_expand:
            out = torch.full((rows,), float("nan"))
            for n, place in enumerate(self.expanded(rank, handle.expert_alignment)[0]):
                if place is not None:
                    out[n] = self.others[place[0]][place[1], place[2]]
            return here(out)
        out = torch.full((rows, self.top_k), float("nan"))
        for n, (s, t) in enumerate(self.received(rank)):
            for k, e in enumerate(self.ids[s][t].tolist()):
                if e >= 0 and self.owner(e) == rank:
                    out[n, k] = self.others[s][t, k]
        return here(out)


def in_world(work, ranks=2, **how):
    how = dict(num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOP_K, num_gpu_timeout_secs=20) | how
    if DEVICE == "cuda":
        # What a test left in a cycle has multiprocessors.
        gc.collect()
    in_threads(DEVICE, ranks, lambda world: work(ElasticBuffer(world, **how)))


def pair(given):
    """Rows and scales as callers give them."""
    return here(given[0]) if given[1] is None else (here(given[0]), here(given[1]))


def shared(**how):
    """What dispatches on a GPU that ranks share have besides."""
    return how | (dict(num_sms=8) if DEVICE == "cuda" else {})


def there_and_back(buffer, case, kinds, expand, sync, alignment, column_major=False, first_has=True):
    """A dispatch, one of new rows by its handle, and combines of both."""
    r, given = buffer.rank_idx, kinds
    ids, weights = here(case.ids[r]), here(case.weights[r])
    stats = here(torch.arange(LOCAL, dtype=torch.int32))
    x, experts, got_weights, handle, event = buffer.dispatch(
        pair(given[0][r]), ids, weights if first_has else None, stats, num_experts=case.experts, num_max_tokens_per_rank=MOST,
        expert_alignment=alignment, do_cpu_sync=sync, do_expand=expand, do_zero_padding=expand,
        use_tma_aligned_col_major_sf=column_major, **shared(),
    )
    event.current_stream_wait()
    rows = len(x[0] if isinstance(x, tuple) else x)
    assert rows == (handle.num_expanded_tokens if expand else handle.num_recv_tokens)
    case.check_handle(r, handle, expand, alignment, sync)
    case.check_rows(r, x, given[0], expand, alignment, expand)
    assert stats.tolist() == [n + i for i, n in enumerate(case.counts_of(r))]
    if first_has:
        case.check_weights(r, got_weights, case.weights, expand, alignment)
    else:
        assert got_weights is None
    if expand:
        assert experts is None
    else:
        case.check_experts(r, experts)
        experts.fill_(77)  # the caller's own
    again, experts, again_weights, same_handle, _ = buffer.dispatch(
        pair(given[1][r]), topk_weights=here(case.others[r]), handle=handle, do_expand=expand, do_zero_padding=expand,
        use_tma_aligned_col_major_sf=column_major,
    )
    assert same_handle is handle
    case.check_rows(r, again, given[1], expand, alignment, expand)
    case.check_weights(r, again_weights, case.others, expand, alignment)
    if not expand:
        case.check_experts(r, experts)
    for found in (x, again):
        if isinstance(found, tuple):
            lead = aligned(rows, 4)
            assert found[1].stride() == ((1, lead) if column_major else (found[1].shape[1], 1)) or rows < 2 or found[1].shape[1] < 2
    back = case.returned(r, rows, handle)
    for biases in (None, here(case.bias[r][0].bfloat16()), tuple(here(b.bfloat16()) for b in case.bias[r])):
        out, none, _ = buffer.combine(back, handle, bias=biases)
        added = sum(case.bias[r][: 0 if biases is None else len(biases) if isinstance(biases, tuple) else 1])
        same(out, (case.sums(r) + added).bfloat16())
        assert none is None
    out, weights, _ = buffer.combine(back, handle, topk_weights=case.weights_of_rows(r, rows, handle))
    same(out, case.sums(r).bfloat16())
    same(weights, torch.where(case.ids[r] >= 0, case.others[r], 0.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("expand", [True, False])
def test_every_format_there_and_back(kind, expand, sync):
    case = Case(ranks=3)
    given = [case.rows(kind), case.rows(kind)]
    in_world(lambda buffer: there_and_back(buffer, case, given, expand, sync, 4, column_major=sync is not expand), ranks=3)


@pytest.mark.parametrize(
    ("ranks", "alignment", "duplicates"),
    [(2, 1, True), (2, 16, False), (2, 128, True), (4, 1, False), (4, 16, True), (4, 128, False), (8, 1, True), (8, 128, False)],
)
def test_ranks_alignments_and_experts_named_twice(ranks, alignment, duplicates):
    case = Case(ranks=ranks, seed=ranks + alignment, duplicates=duplicates)
    given = [case.rows("bf16"), case.rows("fp8 by 128")]
    cases = [(expand, sync) for expand in (False, True) for sync in (False, True)]

    def work(buffer):
        for n, (expand, sync) in enumerate(cases):
            there_and_back(buffer, case, given, expand, sync, alignment, first_has=n != 1)

    in_world(work, ranks=ranks)


def test_dispatches_without_weights_and_of_fewer_choices():
    """The buffer has room for more choices than calls have; rows then have as many as the call's."""
    case = Case(ranks=2, top_k=2, seed=4)
    given = [case.rows("bf16"), case.rows("bf16")]

    def work(buffer):
        for expand in (False, True):
            for sync in (False, True):
                there_and_back(buffer, case, given, expand, sync, 1, first_has=False)
                there_and_back(buffer, case, given, expand, sync, 1, first_has=True)

    in_world(work)


def dispatched(buffer, case, x, **how):
    r = buffer.rank_idx
    return buffer.dispatch(x, here(case.ids[r]), here(case.weights[r]), num_experts=case.experts, **shared(**how))


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("round_tokens", [16384, 200])
def test_a_rank_may_have_more_tokens_than_ever_before(round_tokens, expand, monkeypatch):
    monkeypatch.setattr(ElasticBuffer, "round_tokens", round_tokens)
    cases = [Case(counts=counts, seed=n) for n, counts in enumerate([(3, 2), (3, 700), (130, 0), (0, 900)])]
    rows = [case.rows("fp8 by 32") for case in cases]

    def work(buffer):
        r = buffer.rank_idx
        for case, given in zip(cases, rows):
            x, experts, weights, handle, _ = dispatched(buffer, case, pair(given[r]), do_expand=expand, expert_alignment=4)
            most = handle.num_max_tokens_per_rank
            assert most >= max(case.counts)
            case.check_rows(r, x, given, expand, 4, False)
            case.check_weights(r, weights, case.weights, expand, 4)
            case.check_handle(r, handle, expand, 4, True, most=most)
            found = handle.recv_src_metadata
            assert found[:, 0].tolist() == [s * most + t for s, t in case.received(r)]
            out, _, _ = buffer.combine(case.returned(r, len(x[0]), handle), handle)
            same(out, case.sums(r).bfloat16())

    in_world(work, num_bytes=1 << 21, num_max_tokens_per_rank=0)


@pytest.mark.parametrize("expand", [False, True])
def test_most_tokens_by_the_call(expand):
    """Decode in vLLM: capacities are powers of two, and the same buffer has prefills of many more tokens."""
    small, large = Case(counts=(2, 3), seed=5), Case(counts=(16, 9), seed=6)
    rows, prefill = small.rows("bf16"), large.rows("bf16")

    def work(buffer):
        r = buffer.rank_idx
        kept = []
        for case, given, most in ((small, rows, 4), (large, prefill, 16), (small, rows, 4), (large, prefill, 200)):
            x, _, _, handle, _ = dispatched(
                buffer, case, pair(given[r]), num_max_tokens_per_rank=most, do_cpu_sync=False, do_expand=expand, expert_alignment=8
            )
            assert len(x) == (aligned(2 * most * LOCAL + 7 * LOCAL, 8) if expand else 2 * most)
            case.check_rows(r, x, given, expand, 8, False)
            case.check_handle(r, handle, expand, 8, False, most=most)
            out, _, _ = buffer.combine(case.returned(r, len(x), handle), handle)
            same(out, case.sums(r).bfloat16())
            kept.append((case, handle, len(x)))
        # The buffer's own most is 16: decode, prefill and decode have one context, whose handles outlive it.
        contexts = [id(handle._place.kept.ep) for _, handle, _ in kept]
        assert len({*contexts[:3]}) == 1 and contexts[3] != contexts[0]
        for case, handle, length in kept:
            out, _, _ = buffer.combine(case.returned(r, length, handle), handle)
            same(out, case.sums(r).bfloat16())

    in_world(work)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU: graphs of torch")
@pytest.mark.parametrize("expand", [False, True])
def test_replays_of_a_graph_over_other_tokens(expand):
    """Without a wait for counts a capture may have the calls. Experts return what they get."""
    case = Case(ranks=1, seed=31, top_k=LOCAL)
    x, _ = case.rows("fp32")[0]

    def work(world):
        buffer = ElasticBuffer(world, num_max_tokens_per_rank=MOST, hidden=HIDDEN)
        rows, ids, weights = here(x), here(case.ids[0]), here(case.weights[0])

        def step():
            got, _, _, handle, _ = buffer.dispatch(
                rows, ids, weights, num_experts=case.experts, do_expand=expand, do_zero_padding=expand, do_cpu_sync=False
            )
            return got, buffer.combine(got, handle)[0]

        step()
        settle(DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            _, out = step()
        for shift in range(3):
            new_ids = np.where(np.random.default_rng(shift).random(case.ids[0].shape) < 0.3, -1, case.ids[0])
            new_rows = torch.roll(x, shift, 0) + shift
            settle(DEVICE)
            rows.copy_(new_rows)
            ids.copy_(torch.from_numpy(new_ids))
            graph.replay()
            settle(DEVICE)
            times = torch.from_numpy((new_ids >= 0).sum(1) if expand else (new_ids >= 0).any(1)).float()[:, None]
            same(out, torch.where(times > 0, new_rows * times, 0))

    in_threads(DEVICE, 1, work)


@one_node
def test_sums_are_fp32_in_the_order_of_ranks():
    """Partial rows that rounding would change: one rounding, at the end, whatever biases come first."""
    ranks = 4
    case = Case(ranks=ranks, counts=(6, 6, 6, 6), seed=7)
    draw = torch.Generator().manual_seed(5)
    of_rank = torch.randn((ranks, ranks, 6, HIDDEN), generator=draw).bfloat16()
    bias = torch.randn((ranks, 6, HIDDEN), generator=draw).bfloat16()
    given = case.rows("bf16")

    def work(buffer):
        r = buffer.rank_idx
        x, _, _, handle, _ = dispatched(buffer, case, pair(given[r]))
        places = case.received(r)
        back = torch.stack([of_rank[r, s, t] for s, t in places])
        for biased in (False, True):
            out, _, _ = buffer.combine(here(back), handle, bias=here(bias[r]) if biased else None)
            for t in range(6):
                total = bias[r, t].float() if biased else torch.zeros(HIDDEN)
                parts = torch.zeros(HIDDEN)
                for owner in range(ranks):
                    if (r, t) in case.received(owner):
                        parts = parts + of_rank[owner, r, t].float()
                wanted = (total + parts).bfloat16()
                same(out[t], wanted)

    in_world(work, ranks=ranks)


def test_sums_have_the_dtype_of_what_experts_return():
    case = Case(seed=18)
    given = [case.rows("fp32"), case.rows("bf16")]

    def work(buffer):
        r = buffer.rank_idx
        for sent, dtypes in zip(given, ((torch.float32, torch.float16), (torch.float16, torch.float32))):
            for expand in (False, True):
                x, _, _, handle, _ = dispatched(buffer, case, pair(sent[r]), do_expand=expand)
                for dtype in dtypes:
                    back, bias = case.returned(r, len(x), handle, dtype), case.bias[r][0].to(dtype)
                    out, _, _ = buffer.combine(back, handle, bias=here(bias))
                    same(out, (case.sums(r) + case.bias[r][0]).to(dtype))
        # A context that never had fp32 rows has no room for any.
        other = ElasticBuffer(buffer.group, num_max_tokens_per_rank=MOST, hidden=HIDDEN)
        x, _, _, handle, _ = dispatched(other, case, pair(given[1][r]))
        with pytest.raises(tokenyard.ArgumentError, match="dtype of rows is fp32 of 512 columns"):
            other.combine(x.float(), handle)

    in_world(work)


@pytest.mark.parametrize("round_tokens", [16384, 100])
def test_events_and_handles(round_tokens, monkeypatch):
    """Events in and out, dispatches that are never combined, combines out of order and twice, and a buffer that goes first."""
    monkeypatch.setattr(ElasticBuffer, "round_tokens", round_tokens)
    cases = [Case(seed=seed) for seed in (8, 9)]
    rows = [case.rows("bf16") for case in cases]

    def work(buffer):
        r, kept = buffer.rank_idx, []
        for _ in range(2):
            for case, given in zip(cases, rows):
                for expand in (False, True):
                    for sync in (False, True):
                        x, _, _, handle, event = dispatched(
                            buffer, case, pair(given[r]), do_expand=expand, do_cpu_sync=sync, previous_event=buffer.capture(),
                            previous_event_before_epilogue=buffer.capture(), async_with_compute_stream=True,
                            allocate_on_comm_stream=True,
                        )
                        with event(release_handle=True):
                            pass
                        assert event.event is None
                        case.check_rows(r, x, given, expand, 1, False)
                        kept.append((case, handle, len(x)))
        for case, handle, length in [*kept[::-2], *kept[1::3]]:
            for biases in (None, here(case.bias[r][0].bfloat16())):
                out, weights, event = buffer.combine(
                    case.returned(r, length, handle), handle, case.weights_of_rows(r, length, handle) if biases is None else None,
                    biases, previous_event=deep_ep.EventOverlap(buffer.capture()),
                    previous_event_before_epilogue=buffer.capture(), async_with_compute_stream=True,
                )
                event.current_stream_wait()
                same(out, (case.sums(r) + (0 if biases is None else case.bias[r][0])).bfloat16())
                assert (weights is not None) == (biases is None)
            again, *_ = buffer.dispatch(
                pair(case.rows_again[r]), handle=handle, do_expand=handle.do_expand, previous_event_before_epilogue=buffer.capture()
            )
            case.check_rows(r, again, case.rows_again, handle.do_expand, 1, False)
        buffer.barrier(with_cpu_sync=True)
        # Of a dispatch whose counts the host had.
        handle = kept[1][1]
        buffer.destroy()
        del kept
        gc.collect()
        # What it is made of outlives the buffer.
        same(handle.recv_src_metadata, cases[0].metadata(r, 1, handle.do_expand))
        for call in (lambda: buffer.combine(here(torch.zeros(1, HIDDEN)), handle), lambda: buffer.barrier(),
                     lambda: buffer.dispatch(here(torch.zeros(1, HIDDEN)), handle=handle)):
            with pytest.raises(RuntimeError, match="this ElasticBuffer was destroyed: make a new one"):
                call()

    for case in cases:
        case.rows_again = case.rows("fp16")
    in_world(work)


def test_the_handle_has_a_copy_of_choices():
    case = Case(seed=10)
    given = case.rows("bf16")

    def work(buffer):
        r = buffer.rank_idx
        for copies in (True, False):
            ids = here(case.ids[r]).clone()
            _, _, _, handle, _ = buffer.dispatch(pair(given[r]), ids, num_experts=case.experts, do_handle_copy=copies, **shared())
            assert (handle.topk_idx is ids) is not copies
            ids.fill_(-1)
            same(handle.topk_idx, case.ids[r] if copies else ids)
            handle.recv_src_metadata = handle.recv_src_metadata[:1]
            assert len(handle.recv_src_metadata) == 1

    in_world(work)


def test_int32_choices_and_ranks_without_tokens():
    case = Case(ranks=3, counts=(0, 0, 4), seed=11)
    given = case.rows("bf16")

    def work(buffer):
        r = buffer.rank_idx
        for expand in (False, True):
            for sync in (False, True):
                x, _, weights, handle, _ = buffer.dispatch(
                    pair(given[r]), here(case.ids[r].int()), here(case.weights[r]), num_experts=case.experts,
                    do_expand=expand, do_cpu_sync=sync, **shared(),
                )
                assert handle.topk_idx.dtype == torch.int32
                handle.topk_idx = handle.topk_idx.long()
                case.check_handle(r, handle, expand, 1, sync)
                case.check_rows(r, x, given, expand, 1, False)
                out, _, _ = buffer.combine(case.returned(r, len(x), handle), handle)
                same(out, case.sums(r).bfloat16())
        # No rank has a token, and no token an expert.
        nothing = here(torch.zeros((4, HIDDEN)).bfloat16())
        for tokens in (0, 4):
            for expand in (False, True):
                x, _, _, handle, _ = buffer.dispatch(
                    nothing[:tokens], here(torch.full((tokens, TOP_K), -1)), num_experts=case.experts, do_expand=expand,
                    expert_alignment=16, **shared(),
                )
                assert len(x) == 0 and handle.num_recv_tokens == 0 and handle.num_recv_tokens_per_expert_list == [0] * LOCAL
                assert handle.recv_src_metadata.shape == (0, TOP_K + 2)
                out, _, _ = buffer.combine(x, handle)
                same(out, torch.zeros((tokens, HIDDEN)).bfloat16())

    in_world(work, ranks=3)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU a later call raises what this one found")
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("expand", [True, False])
def test_experts_that_are_none(expand, sync):
    """A rank's error is its own: the others go on without its tokens, and so does it."""
    wrong, right = Case(seed=12), Case(seed=12)
    wrong.ids[0][3, 1] = wrong.experts
    right.ids[0][:] = -1
    given = right.rows("bf16")

    def work(buffer):
        r, failure = buffer.rank_idx, None
        try:
            x, _, _, handle, _ = dispatched(buffer, wrong, pair(given[r]), do_expand=expand, do_cpu_sync=sync)
        except tokenyard.RoutingError as error:
            failure, (x, _, _, handle, _) = error, error.dispatched
        assert (failure is not None) == (r == 0)
        right.check_rows(r, x, given, expand, 1, False)
        out, _, _ = buffer.combine(right.returned(r, len(x), handle), handle)
        same(out, right.sums(r).bfloat16())

    in_world(work)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU a later call raises what this one found")
def test_more_rows_than_experts_named_once_can_make():
    """Without a wait for counts there is room for each local expert once a token, as in DeepEP."""
    case = Case(seed=13, counts=(16, 16))
    for ids in case.ids:
        ids[:] = 0

    def work(buffer):
        failure = None
        try:
            x, _, _, handle, _ = dispatched(buffer, case, pair(given[buffer.rank_idx]), do_expand=True, do_cpu_sync=False)
        except tokenyard.CapacityError as error:
            failure, (x, _, _, handle, _) = error, error.dispatched
            assert (error.needed, error.given) == (2 * 16 * TOP_K, 2 * 16 * LOCAL)
        # Only the rank of that expert has no room.
        assert (failure is not None) == (buffer.rank_idx == 0)
        buffer.barrier()
        # The next calls are right.
        there_and_back(buffer, right, [fitting, fitting], True, False, 1)

    right = Case(seed=14)
    given, fitting = case.rows("bf16"), right.rows("bf16")
    in_world(work)


def test_what_is_refused():
    case, other = Case(1, (4,), 15, True), Case(1, (5,), 16, True)
    given, more = case.rows("bf16"), other.rows("bf16")

    def refused(kind, match, call, *arguments, **named):
        with pytest.raises(kind, match=match):
            call(*arguments, **named)

    def work(buffer):
        x, ids, weights = here(given[0][0]), here(case.ids[0]), here(case.weights[0])
        named = shared(num_experts=case.experts)
        dispatch, combine = buffer.dispatch, buffer.combine
        for rows in (x.view(torch.uint8), x[:, ::2].contiguous().view(torch.uint8)):
            refused(NotImplementedError, "x is torch.uint8: there are no nvfp4 rows", dispatch, rows, ids, **named)
        refused(TypeError, "x is torch.float64: give bf16, fp16, fp32, fp8", dispatch, x.double(), ids, **named)
        refused(ValueError, r"x has the shape \[4, 512, 1\]: give a tensor of 2 dimensions", dispatch, x[:, :, None], ids, **named)
        fp8 = here(torch.zeros((4, HIDDEN))).to(torch.float8_e4m3fn)
        refused(TypeError, "scale factors of x are torch.uint8: give fp32", dispatch, (fp8, fp8.view(torch.uint8)), ids, **named)
        refused(ValueError, r"scale factors of x are \[3, 4\]: give \[4, words\]", dispatch, (fp8, here(torch.zeros(3, 4))), ids, **named)
        refused(ValueError, "topk_idx or num_experts is missing", dispatch, x, ids)
        refused(ValueError, "topk_idx or num_experts is missing", dispatch, x, num_experts=3)
        refused(ValueError, "num_experts is 0: give a multiple of the 1 ranks", dispatch, x, ids, num_experts=0)
        refused(TypeError, "topk_idx is torch.float32: give int64 or int32", dispatch, x, ids.float(), **named)
        refused(ValueError, r"topk_idx is \[3, 4\]: give \[4, top_k\]", dispatch, x, ids[:3], **named)
        refused(ValueError, r"topk_idx is \[4, 0\]: give \[4, top_k\], with top_k from 1 to 32", dispatch, x, ids[:, :0], **named)
        refused(ValueError, r"topk_weights has the shape \[4, 3\]: give \[4, 4\]", dispatch, x, ids, weights[:, :3], **named)
        refused(TypeError, "topk_weights is torch.float64: give torch.float32", dispatch, x, ids, weights.double(), **named)
        for kind, said, stats in (
            (ValueError, r"has the shape \[4\]: give \[3\]", torch.zeros(4, dtype=torch.int32)),
            (TypeError, "is torch.float32: give torch.int32", torch.zeros(3)),
        ):
            refused(kind, f"cumulative_local_expert_recv_stats {said}", dispatch, x, ids, weights, here(stats), **named)
        refused(ValueError, "expert_alignment is 0: give 1 or more", dispatch, x, ids, expert_alignment=0, **named)
        refused(ValueError, "do_zero_padding is set without do_expand", dispatch, x, ids, do_zero_padding=True, **named)
        refused(ValueError, "x has 4 tokens, and num_max_tokens_per_rank is 3", dispatch, x, ids, num_max_tokens_per_rank=3, **named)
        refused(ValueError, "num_max_tokens_per_rank is -1", dispatch, x, ids, num_max_tokens_per_rank=-1, **named)
        refused(ValueError, "num_max_tokens_per_rank is 0, and without do_cpu_sync", dispatch, x, ids, num_max_tokens_per_rank=0,
                do_cpu_sync=False, **named)
        for expand in (False, True):
            got, _, received, handle, _ = dispatch(x, ids, weights, do_expand=expand, **named)
            rows = len(got)
            refused(ValueError, "topk_idx or do_cpu_sync is given with handle", dispatch, x, ids, handle=handle, do_expand=expand)
            refused(ValueError, "topk_idx or do_cpu_sync is given", dispatch, x, handle=handle, do_expand=expand, do_cpu_sync=True)
            refused(ValueError, f"do_expand is {not expand}, and the handle's dispatch had {expand}", dispatch, x, handle=handle,
                    do_expand=not expand)
            for name, wrong in (("num_experts", 6), ("num_max_tokens_per_rank", 17), ("expert_alignment", 2)):
                refused(ValueError, f"{name} is {wrong}, and the handle's dispatch had", dispatch, x, handle=handle, do_expand=expand,
                        **{name: wrong})
            refused(ValueError, r"x has the shape \[3, 512\]: give \[4, 512\]", dispatch, x[:3], handle=handle, do_expand=expand)
            refused(ValueError, r"x has the shape \[4, 256\]: give \[4, 512\]", dispatch, x[:, :256], handle=handle, do_expand=expand)
            refused(ValueError, r"topk_weights has the shape \[3, 4\]: give \[4, 4\]", dispatch, x, topk_weights=weights[:3], handle=handle,
                    do_expand=expand)
            refused(TypeError, "handle is a tuple: give the EPHandle", dispatch, x, handle=(handle,), do_expand=expand)
            refused(TypeError, "x is torch.float8_e4m3fn: give bf16, fp16 or fp32", combine, fp8, handle)
            refused(ValueError, rf"x has the shape \[{rows - 1}, 512\]: give \[{rows}, 512\]", combine, got[:-1], handle)
            refused(ValueError, rf"x has the shape \[{rows}, 256\]: give \[{rows}, 512\]", combine, got[:, :256], handle)
            other_shape = received[:, None] if expand else received[:, :-1]
            refused(ValueError, rf"topk_weights has the shape \[{rows}, .\]: give \[{rows}", combine, got, handle, other_shape)
            refused(TypeError, "topk_weights is torch.bfloat16: give torch.float32", combine, got, handle, received.bfloat16())
            refused(TypeError, "bias is torch.float32: give torch.bfloat16", combine, got, handle, None, x.float())
            refused(ValueError, r"bias has the shape \[3, 512\]: give \[4, 512\]", combine, got, handle, None, (x, x[:3]))
            refused(ValueError, "bias has 3 tensors: give at most 2", combine, got, handle, None, (x, x, x))
            refused(TypeError, "handle is a NoneType: give the EPHandle", combine, got, None)
        # Of other buffers.
        second = ElasticBuffer(buffer.group, num_bytes=0)
        for call in (lambda: second.combine(got, handle), lambda: second.dispatch(x, handle=handle, do_expand=True)):
            refused(ValueError, "handle is of another ElasticBuffer", call)
        refused(TypeError, "handle is a NormalHandle", combine, got, deep_ep._buffer.NormalHandle((None,) * 6))
        for name in ("engram_write", "engram_fetch", "pp_set_config", "pp_send", "pp_recv", "all_gather", "create_agrs_session",
                     "destroy_agrs_session", "agrs_new_session", "agrs_set_config", "agrs_get_inplace_tensor"):
            refused(NotImplementedError, "only dispatch and combine", getattr(buffer, name), 1, session=2)
        # A buffer without a most has none but by the call.
        x, _, _, handle, _ = second.dispatch(here(more[0][0]), here(other.ids[0]), num_max_tokens_per_rank=5, do_cpu_sync=False, **named)
        assert len(x) == 5
        refused(ValueError, "num_max_tokens_per_rank is 0, and without", second.dispatch, x, here(other.ids[0]), do_cpu_sync=False, **named)

    in_world(work, ranks=1)
    refused(ValueError, "num_max_tokens_per_rank is 0 and hidden 64: give more than 0 of both", ElasticBuffer,
            tokenyard.World.threads(1)[0], hidden=64)
    refused(ValueError, "num_topk 33: give 0 or more, and of num_topk at most 32", ElasticBuffer, tokenyard.World.threads(1)[0],
            num_bytes=1, num_topk=33)
    refused(NotImplementedError, "num_cpu_bytes is 1: there are no buffers of host memory", ElasticBuffer,
            tokenyard.World.threads(1)[0], num_bytes=2, num_cpu_bytes=1)


@one_node
def test_what_callers_read():
    def work(buffer):
        assert (buffer.rank_idx, buffer.num_ranks) == (buffer.group.rank, 2)
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, 2)
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks, buffer.scaleup_rank_idx) == (1, 2, buffer.rank_idx)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks, buffer.scaleout_rank_idx) == (1, 2, 0)
        # By hand: 8192 tokens of 2 ranks, each 4096 bytes of rows and 3 * 8 + 1 words; more than what combine needs.
        assert buffer.num_bytes == aligned(2 * 8192 * (4096 + 128), 1 << 21)
        assert buffer.get_theoretical_num_sms(256, 8) % 2 == 0 and buffer.get_theoretical_num_qps(20) == 129
        assert isinstance(buffer.capture(), deep_ep.EventHandle)
        for how in (dict(use_comm_stream=False), dict(sequential=False), dict(with_cpu_sync=True)):
            buffer.barrier(**how)
        x = here(torch.zeros((1, 2048)).bfloat16())
        _, _, _, handle, _ = buffer.dispatch(x, here(torch.zeros((1, 8), dtype=torch.int64)), num_experts=4, num_sms=12)
        assert handle.num_sms == 12

    in_world(work, num_max_tokens_per_rank=8192, hidden=2048, num_topk=8)
    world = tokenyard.World.threads(2)[0]
    # fp8: 7168 bytes, a scale for each 32 columns, and words. Without multiple reductions each choice has a row of sums.
    hint = ElasticBuffer.get_buffer_size_hint
    assert hint(world, 100, 7168, 8, True) == aligned(max(2 * 100 * (7168 + 896 + 128), 2 * 100 * (14336 + 64)), 1 << 21)
    assert hint(world, 100, 7168, 8, True, True, False) == aligned(8 * 100 * (14336 + 64), 1 << 21)
    assert hint(world, 300, 7168) == aligned(2 * 300 * (14336 + 416), 1 << 21)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU a later call raises what this one found")
def test_a_rank_of_too_many_tokens_leaves_the_others_waiting_to_their_deadline():
    case = Case(ranks=2, counts=(3, 9), seed=17)
    given = case.rows("bf16")

    def work(buffer):
        wanted = (tokenyard.TimeoutError, "rank 0") if buffer.rank_idx == 0 else (ValueError, "x has 9 tokens, and num_max_tokens_per_rank is 8")
        with pytest.raises(wanted[0], match=wanted[1]):
            dispatched(buffer, case, pair(given[buffer.rank_idx]), num_max_tokens_per_rank=8)

    # A rank that ends its buffer is lost, and perhaps before the others' deadline.
    ended = threading.Barrier(2)

    def both(buffer):
        # The context is made by a call that all ranks take part in.
        dispatched(buffer, case, pair(given[buffer.rank_idx]))
        work(buffer)
        ended.wait(60)

    in_world(both, num_gpu_timeout_secs=1)
