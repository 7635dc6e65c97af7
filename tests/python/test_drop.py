"""Outputs that take the rows for which they have room, and leave out the rest."""

import os

import numpy as np
import pytest

import tokenyard
from rig import Case, in_threads, settle, the_torch

torch = the_torch()

# "cuda": all ranks share a GPU, each with a stream of its own and a part of the multiprocessors.
DEVICE = os.environ.get("TOKENYARD_TEST_DEVICE", "cpu")
PLACE = {"device": "cuda:0", "sms": 16} if DEVICE == "cuda" else {}
WORDS = 2


class Short(Case):
    """A case of which each rank's output has room for so many rows fewer than come; `lack` by rank."""

    def __init__(self, layout, align, lack, **more):
        super().__init__(**more)
        self.layout, self.align, self.lack = layout, align, lack

    def tokens_of(self, expert):
        """The (source rank, token) of each row of an expert, in order."""
        return [(r, t) for r in range(self.ranks) for t in range(self.count[r]) if expert in self.ids[r][t]]

    def experts_of(self, rank):
        return [e for e in range(self.experts) if self.owner(e) == rank]

    def full(self, rank):
        """Where rows would lie in an output with room for all: (expert, number among the expert's, row), and its rows."""
        places, begin = [], 0
        for expert in self.experts_of(rank):
            rows = len(self.tokens_of(expert))
            places += [(expert, n, begin + n) for n in range(rows)]
            begin += -(-rows // self.align) * self.align
        fullest = max(len(self.tokens_of(e)) for e in self.experts_of(rank))
        return places, (fullest if self.layout == "masked" else begin)

    def capacity(self, rank):
        return max(self.full(rank)[1] - self.lack[rank], 0)

    def kept(self, rank):
        """Of each expert of a rank: its number, its rows that are there, and where the first lies."""
        capacity, begin, found = self.capacity(rank), 0, []
        for i, expert in enumerate(self.experts_of(rank)):
            rows = self.tokens_of(expert)
            if self.layout == "masked":
                found.append((expert, rows[:capacity], i * capacity))
                continue
            found.append((expert, rows[: max(capacity - begin, 0)], min(begin, capacity)))
            begin += -(-len(rows) // self.align) * self.align
        return found

    def named(self, rank):
        """What a dispatch is given."""
        return dict(layout=self.layout, align=self.align, capacity=self.capacity(rank), drop_overflow=True)

    def outputs(self, rank, got):
        """The experts' outputs of the rows that are there, and NaNs."""
        rows = torch.full_like(got.rows, float("nan"))
        for expert, places, begin in self.kept(rank):
            made = [self.expert(expert, self.x[s][t]) for s, t in places]
            if made:
                rows.view(-1, self.hidden)[begin : begin + len(made)] = torch.tensor(np.array(made), device=DEVICE)
        return rows

    def sums_without(self, rank):
        """The weighted sums of a rank's tokens, without rows that were left out."""
        there = {(e, s, t) for r in range(self.ranks) for e, rows, _ in self.kept(r) for s, t in rows}
        out = np.zeros((self.count[rank], self.hidden))
        for t, k in np.ndindex(self.ids[rank].shape):
            e = self.ids[rank][t, k]
            if e >= 0 and (e, rank, t) in there:
                out[t] += self.weights[rank][t, k].astype(np.float64) * self.expert(e, self.x[rank][t])
        return out


def on_host(tensor):
    settle(DEVICE)
    return tensor.cpu().numpy()


def check_rows(case, rank, got, x, words):
    """What a dispatch with `drop_overflow` made: rows, words beside them, counts, and what describes them."""
    rows, counts = on_host(got.rows).reshape(-1, case.hidden), on_host(got.counts)
    beside, source = on_host(got.payload).reshape(-1, WORDS), on_host(got.also["source"])
    local, ranges = on_host(got.also["row_expert"]), on_host(got.also["source_ranges"])
    used = np.zeros(len(rows), dtype=bool)
    for i, (expert, places, begin) in enumerate(case.kept(rank)):
        assert counts[i] == len(places)
        if case.layout == "contiguous":
            assert on_host(got.offsets)[i] == begin
        for n, (s, t) in enumerate(places):
            row = begin + n
            assert np.array_equal(rows[row], x[s][t]) and np.array_equal(beside[row], words[s][t])
            assert source[row].tolist() == [s, t] and local[row] == i
            used[row] = True
        for s in range(case.ranks):
            of_rank = [n for n, (source_rank, _) in enumerate(places) if source_rank == s]
            first, number = int(ranges[i, s]) >> 32, int(ranges[i, s]) & 0xFFFFFFFF
            assert number == len(of_rank) and (not of_rank or first == of_rank[0])
    assert np.all(source[~used] == -1) and np.all(local[~used] == -1)
    if case.layout == "contiguous":
        assert on_host(got.offsets)[-1] == min(case.full(rank)[1], case.capacity(rank))
    came = len(case.full(rank)[0]) if case.layout == "masked" else case.full(rank)[1]
    assert int(on_host(got.also["row_count"])[0]) == came


CASES = [("contiguous", 1, [5, 0, 1]), ("contiguous", 4, [4, 8, 0]), ("contiguous", 4, [8, 4, 1000]),
         ("masked", 1, [2, 0, 1]), ("masked", 1, [1000, 1, 0])]


@pytest.mark.parametrize("layout, align, lack", CASES)
def test_the_last_rows_are_left_out_and_nothing_else(layout, align, lack):
    """Other ranks, whose outputs have room or lack other rows, notice nothing but what their sums lack."""
    there_and_back(Short(layout, align, lack, ranks=3, experts=7, top_k=3, tokens=9, seed=5))


@pytest.mark.parametrize("layout, align, lack", [("contiguous", 4, [8]), ("masked", 1, [2])])
def test_sanitized(layout, align, lack):
    """For compute-sanitizer: by a rank that is alone."""
    there_and_back(Short(layout, align, lack, ranks=1, experts=3, top_k=2, tokens=8, seed=5))


def there_and_back(case):
    draw = np.random.default_rng(9)
    words = [draw.random((n, WORDS), dtype=np.float32) for n in case.count]
    new = [draw.standard_normal(x.shape).astype(np.float32) for x in case.x]
    assert any(len(rows) < len(case.tokens_of(e)) for r in range(case.ranks) for e, rows, _ in case.kept(r))

    def rank(world):
        r = world.rank
        ep = tokenyard.AllToAll(world, **case.limits | PLACE, dispatch_payload_words=WORDS)
        x, ids, weights, beside, again = (
            torch.tensor(value[r], device=DEVICE) for value in (case.x, case.ids, case.weights, words, new)
        )
        for _ in range(3):
            got = ep.dispatch(
                x, ids, weights, payload=beside, layout=case.layout, align=case.align, capacity=case.capacity(r),
                drop_overflow=True, also=("source", "row_expert", "row_count", "source_ranges"),
            )
            check_rows(case, r, got, case.x, words)
            rows = case.outputs(r, got)
            wanted = case.sums_without(r)
            for _ in range(2):
                out = ep.combine(rows, got.handle)
                assert np.allclose(on_host(out), wanted, rtol=0, atol=64 * 2.0**-24 * 16)
                # New rows by the handle go to the places of those that are there.
                placed = torch.full_like(got.rows, -1.0)
                ep.dispatch_again(got.handle, again, placed)
                flat, used = on_host(placed).reshape(-1, case.hidden), 0
                for _, places, begin in case.kept(r):
                    for n, (s, t) in enumerate(places):
                        assert np.array_equal(flat[begin + n], new[s][t])
                    used += len(places)
                assert (flat == -1.0).all(axis=1).sum() == len(flat) - used
        ep.check()

    in_threads(DEVICE, case.ranks, rank)


@pytest.mark.parametrize("counts", [False, True])
def test_halves_leave_rows_out_too(counts):
    case = Short("contiguous", 1, [4, 0], ranks=2, experts=4, top_k=2, tokens=8, seed=6)

    def rank(world):
        r = world.rank
        ep = tokenyard.AllToAll(world, **case.limits | PLACE)
        x, ids, weights = (torch.tensor(value[r], device=DEVICE) for value in (case.x, case.ids, case.weights))
        output, got = ep.output(x, capacity=case.capacity(r), also=("row_count",), drop_overflow=True)
        sent = ep.dispatch_send(x, ids, weights, counts=counts)
        if counts:
            # What comes first is of all rows.
            assert ep.counts(sent)[0] == [len(case.tokens_of(e)) for e in case.experts_of(r)]
        handle = ep.dispatch_recv(sent, output)
        assert on_host(got.counts).tolist() == [len(rows) for _, rows, _ in case.kept(r)]
        assert int(on_host(got.also["row_count"])[0]) == case.full(r)[1]
        rows = torch.zeros_like(got.rows)
        for expert, places, begin in case.kept(r):
            for n, (s, t) in enumerate(places):
                rows[begin + n] = torch.tensor(case.expert(expert, case.x[s][t]))
        assert np.allclose(on_host(ep.combine(rows, handle)), case.sums_without(r), rtol=0, atol=2.0**-15)
        ep.check()

    in_threads(DEVICE, 2, rank)


def whole(ops, ep, case, r, x, ids, weights, out):
    got = ops.dispatch(ep, x, ids, weights, **case.named(r))
    assert got.row_count.shape == (1,) and got.tokens == len(x)
    out.copy_(ops.combine(case.outputs(r, got), got))
    return got.rows, got.counts, got.offsets, got.row_count


def halves(ops, ep, case, r, x, ids, weights, out):
    got = ops.dispatch_recv(ep, ops.dispatch_send(ep, x, ids, weights), len(x), **case.named(r))
    rows = case.outputs(r, got)
    out.copy_(ops.combine_recv(ops.combine_send(rows, got), rows, got))
    return got.rows, got.counts, got.offsets, got.row_count


def into(ops, ep, case, r, x, ids, weights, out, counted=True):
    named, masked = case.named(r), case.layout == "masked"
    number = lambda *shape: torch.full(shape, -1, dtype=torch.int32, device=DEVICE)  # noqa: E731
    experts, capacity = len(ep.local_experts), named.pop("capacity")
    rows = torch.full((*(experts,) * masked, capacity, case.hidden), float("nan"), device=DEVICE)
    counts, offsets, count = number(experts), None if masked else number(experts + 1), number(1) if counted else None
    handle = ops.dispatch_into(ep, rows, counts, x, ids, weights, offsets=offsets, row_count=count, **named)
    got = ops.Dispatched(rows, counts, handle, len(x), None, offsets)
    ops.combine_into(out, case.outputs(r, got), got)
    return rows, counts, offsets, count


def into_without_its_count(*given):
    return into(*given, counted=False)


def compiled(ops, ep, case, r, x, ids, weights, out):
    named = case.named(r)
    make = torch.compile(lambda x, ids, weights: ops.dispatch(ep, x, ids, weights, **named), fullgraph=True, backend="eager")
    got = make(x, ids, weights)
    out.copy_(ops.combine(case.outputs(r, got), got))
    return got.rows, got.counts, got.offsets, got.row_count


@pytest.mark.parametrize("way", [whole, halves, into, into_without_its_count, compiled])
@pytest.mark.parametrize("layout, align, lack", [("contiguous", 4, [4, 8, 0]), ("masked", 1, [2, 0, 1])])
def test_operators_leave_rows_out_too(way, layout, align, lack):
    ops = pytest.importorskip("tokenyard.ops")
    case = Short(layout, align, lack, ranks=3, experts=7, top_k=3, tokens=9, seed=5)

    def rank(world):
        r = world.rank
        ep = tokenyard.AllToAll(world, **case.limits | PLACE)
        x, ids, weights = (torch.tensor(value[r], device=DEVICE) for value in (case.x, case.ids, case.weights))
        out = torch.full_like(x, float("nan"))
        rows, counts, offsets, count = way(ops, ep, case, r, x, ids, weights, out)
        came = len(case.full(r)[0]) if layout == "masked" else case.full(r)[1]
        assert count is None or on_host(count).tolist() == [came]
        assert on_host(counts).tolist() == [len(places) for _, places, _ in case.kept(r)]
        if offsets is not None:
            assert on_host(offsets).tolist() == [begin for *_, begin in case.kept(r)] + [min(came, case.capacity(r))]
        flat = on_host(rows).reshape(-1, case.hidden)
        for _, places, begin in case.kept(r):
            for n, (s, t) in enumerate(places):
                assert np.array_equal(flat[begin + n], case.x[s][t])
        assert np.allclose(on_host(out), case.sums_without(r), rtol=0, atol=64 * 2.0**-24 * 16)
        ep.check()

    in_threads(DEVICE, 3, rank)


def test_gradients_without_rows_that_were_left_out():
    """A row that was left out has no part in its token's gradient, and is none of its expert's."""
    ops = pytest.importorskip("tokenyard.ops")
    case = Short("contiguous", 1, [5, 3], ranks=2, experts=4, top_k=2, tokens=8, seed=6)

    def rank(world):
        r = world.rank
        ep = tokenyard.AllToAll(world, **case.limits | PLACE, weights="none", dispatch_payload_words=4, payload_words=2)
        x, ids, weights = (torch.tensor(value[r], device=DEVICE) for value in (case.x, case.ids, case.weights))
        x.requires_grad_(), weights.requires_grad_()
        got = ops.dispatch(ep, x, ids, weights, **case.named(r))
        assert on_host(got.row_count).tolist() == [case.full(r)[1]]
        used = sum(len(places) for _, places, _ in case.kept(r))
        weighed = on_host(got.row_weights.detach())
        assert np.all(weighed[:used] != 0) and np.all(weighed[used:] == 0)
        out = ops.combine(3 * got.rows, got)
        there = {(e, s, t) for q in range(case.ranks) for e, rows, _ in case.kept(q) for s, t in rows}
        named = case.ids[r]
        kept = np.array([[named[t, k] >= 0 and (named[t, k], r, t) in there for k in range(2)] for t in range(len(named))])
        factor = 3 * (case.weights[r] * kept).sum(1, keepdims=True)
        assert np.allclose(on_host(out.detach()), factor * case.x[r], rtol=0, atol=2.0**-15)
        out.sum().backward()
        assert np.allclose(on_host(x.grad), np.broadcast_to(factor, case.x[r].shape), rtol=0, atol=2.0**-15)
        wanted = 3 * kept * case.x[r].sum(1, keepdims=True)
        assert np.allclose(on_host(weights.grad), wanted, rtol=0, atol=2.0**-12)
        ep.check()

    in_threads(DEVICE, 2, rank)


def test_operators_refuse_what_cannot_be_left_out():
    ops = pytest.importorskip("tokenyard.ops")
    case = Short("contiguous", 1, [1], ranks=1, experts=4, top_k=2, tokens=8, seed=7)

    def rank(world):
        ep = tokenyard.AllToAll(world, **case.limits | PLACE)
        x, ids, weights = (torch.tensor(value[0], device=DEVICE) for value in (case.x, case.ids, case.weights))
        for needs in (False, True):
            x.requires_grad_(needs)
            for refused in (dict(layout="token"), dict(exact=True), dict(align=4, capacity=6)):
                with pytest.raises(ValueError, match="drop_overflow"):
                    ops.dispatch(ep, x, ids, weights, drop_overflow=True, **refused)
        x.requires_grad_(False)
        rows, counts = x.new_empty(6, case.hidden), ids.new_empty(4, dtype=torch.int32)
        for count in (None, ids.new_empty(1, dtype=torch.int32)):
            with pytest.raises(ValueError, match="drop_overflow"):
                ops.dispatch_into(ep, rows, counts, x, ids, weights, align=4, row_count=count, drop_overflow=True)
        got = ops.dispatch(ep, x, ids, weights, align=5, drop_overflow=True)
        assert int(on_host(got.counts).sum()) == int((case.ids[0] >= 0).sum())
        # Without it all rows come or none.
        assert got._replace(row_count=None) and ops.dispatch(ep, x, ids, weights).row_count is None
        ep.check()

    in_threads(DEVICE, 1, rank)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU: graphs of torch")
def test_replays_of_a_graph_leave_out_what_each_lacks_room_for():
    case = Short("contiguous", 1, [3], ranks=1, experts=4, top_k=2, tokens=8, seed=8)

    def rank(world):
        ep = tokenyard.AllToAll(world, **case.limits | PLACE)
        x, ids, weights = (torch.tensor(value[0], device=DEVICE) for value in (case.x, case.ids, case.weights))
        named = dict(capacity=case.capacity(0), drop_overflow=True, also=("row_count",))

        def step():
            got = ep.dispatch(x, ids, weights, **named)
            return got, ep.combine(got.rows, got.handle)

        step()
        settle(DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            got, out = step()
        for shown in (8, 2, 5):
            ids[:] = torch.where(torch.arange(8, device=DEVICE)[:, None] < shown, torch.tensor(case.ids[0], device=DEVICE), -1)
            graph.replay()
            came = int((on_host(ids) >= 0).sum())
            assert int(on_host(got.also["row_count"])[0]) == came
            assert int(on_host(got.counts).sum()) == min(came, case.capacity(0))
            ep.check()

    in_threads(DEVICE, 1, rank)


def test_without_it_an_output_that_is_too_small_is_an_error():
    case = Short("contiguous", 1, [1], ranks=1, experts=4, top_k=2, tokens=8, seed=7)

    def rank(world):
        ep = tokenyard.AllToAll(world, **case.limits | PLACE)
        x, ids, weights = (torch.tensor(value[0], device=DEVICE) for value in (case.x, case.ids, case.weights))
        with pytest.raises(tokenyard.CapacityError):
            ep.dispatch(x, ids, weights, capacity=case.capacity(0))
            settle(DEVICE)
            ep.check()
        got = ep.dispatch(x, ids, weights, capacity=case.capacity(0), drop_overflow=True)
        settle(DEVICE)
        assert int(on_host(got.counts).sum()) == case.capacity(0)
        for refused in (dict(layout="token"), dict(exact=True), dict(align=4, capacity=6)):
            with pytest.raises(ValueError, match="drop_overflow"):
                ep.dispatch(x, ids, weights, drop_overflow=True, **refused)
        with pytest.raises(ValueError, match="multiple of align, 0"):
            tokenyard.Output("contiguous", got.rows, got.counts, align=0, drop_overflow=True)
        got = ep.dispatch(x, ids, weights, align=5, drop_overflow=True)
        settle(DEVICE)
        assert int(on_host(got.counts).sum()) == int((case.ids[0] >= 0).sum())
        ep.check()

    in_threads(DEVICE, 1, rank)
