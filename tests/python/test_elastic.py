"""`tokenyard.deep_ep.ElasticBuffer`: results and handles element by element, against loops over tokens and choices."""

import gc
import os

import numpy as np
import pytest

import tokenyard
from rig import in_threads, poisoned, settle

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
