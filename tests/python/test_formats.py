"""Calls that state their format, payloads of dispatch, tokens that name ranks, and what else an output may ask for."""

import copy

import numpy as np
import pytest

import tokenyard
from rig import Case, in_ranks, poisoned, the_torch
from tokenyard import Format

BOUND = 1e-5
FP16 = Format(32, 5, dtype="fp16", combine_dtype="fp32", weights="combine")


def of_format(format, seed, **more):
    """A case whose rows the format holds exactly."""
    case = Case(hidden=format.hidden, tokens=format.max_tokens, seed=seed, **more)
    if format.dtype == "fp16":
        case.x = [x.astype(np.float16).astype(np.float32) for x in case.x]
    return case


def segments(ep, got):
    """Each local expert, and where its rows are."""
    return [(e, slice(got.offsets[i], got.offsets[i] + got.counts[i])) for i, e in enumerate(ep.local_experts)]


def computed(case, ep, got, dtype=np.float32):
    """Checks each expert's rows, and returns what the experts make of them, between poison."""
    rows = poisoned(got.rows.shape, dtype)
    for expert, part in segments(ep, got):
        np.testing.assert_array_equal(got.rows[part].astype(np.float32), case.rows_of(expert))
        rows[part] = case.expert(expert, got.rows[part].astype(np.float32))
    return rows


def test_two_formats_alternate_and_their_handles_are_combined_in_another_order():
    own = Case()
    formats = [Format(64, 9, dtype="fp32", combine_dtype="fp32"), FP16]
    cases = [of_format(formats[n % 3 % 2], seed=20 + n) for n in range(24)]
    order = np.random.default_rng(3).permutation(len(cases))

    def rank(world):
        ep, r = tokenyard.AllToAll(world, **own.limits, room_for=iter([FP16])), world.rank
        assert ep.format == formats[0] and ep.formats == tuple(formats)
        for _ in range(2):
            kept = []
            for n, case in enumerate(cases):
                format = formats[n % 3 % 2]
                x = case.x[r].astype(np.float16) if format == FP16 else case.x[r]
                weights = None if format == FP16 else case.weights[r]
                got = ep.dispatch(x, case.ids[r], weights, format=format, exact=n % 5 == 4)
                assert got.handle.format == format and got.handle.tokens == case.count[r]
                kept.append((got, computed(case, ep, got)))
            for n in order:
                (got, rows), case = kept[n], cases[n]
                weights = case.weights[r] if got.handle.format == FP16 else None
                out = poisoned((case.count[r], case.hidden))
                ep.combine(rows, got.handle, out, topk_weights=weights)
                np.testing.assert_allclose(out, case.sums(r), rtol=BOUND, atol=1e-4)
        world.barrier()

    in_ranks(tokenyard.World.threads(own.ranks), rank)


def test_formats_are_equal_by_value_and_keys():
    one, other = Format(64, 9, dtype="fp8", scales="ue8m0", quantize=True), Format(64, 9, dtype="fp8", scales="ue8m0")
    assert one != other and one == Format(64, 9, dtype="fp8", scales="ue8m0", quantize=True) and one != "fp8"
    assert {one: 1, other: 2}[Format(64, 9, dtype="fp8", scales="ue8m0", quantize=True)] == 1
    assert hash(one) != hash(other) and eval(repr(one)) == one and eval(repr(FP16)) == FP16  # noqa: S307
    got = (one.hidden, one.max_tokens, one.dtype, one.scales, one.quantize, one.combine_dtype, one.weights)
    assert got == (64, 9, "fp8", "ue8m0", True, "bf16", "dispatch") and other.scales == "ue8m0"
    with pytest.raises(AttributeError):
        one.hidden = 3
    with pytest.raises(TypeError):
        assert one < other
    assert copy.deepcopy(one) == one
    for words, text in [({"dtype": "bf17"}, 'dtype is "bf17"'), ({"scales": "fp8"}, 'scales is "fp8"'),
                        ({"weights": "both"}, 'weights is "both"'), ({"combine_dtype": ""}, 'combine_dtype is ""')]:
        with pytest.raises(ValueError, match=text):
            Format(64, 9, **words)


@pytest.mark.parametrize("layout", ["contiguous", "masked", "token"])
@pytest.mark.parametrize("exact", [False, True])
def test_payloads_come_beside_rows_with_their_bits(layout, exact):
    case = Case(seed=31)
    words = [np.stack([x[:, 0], -x[:, 1], x[:, 2]], axis=1).copy() for x in case.x]
    for part in words:
        part.view(np.uint32)[:, 2] = 0x7FA12345  # a signalling NaN
        part[::2, 1] = -0.0

    def rank(world):
        ep, r = tokenyard.AllToAll(world, **case.limits, dispatch_payload_words=5, room_for=[FP16]), world.rank
        got = ep.dispatch(case.x[r], case.ids[r], case.weights[r], payload=words[r], layout=layout, exact=exact,
                          also=("source", "row_expert", "row_count", "source_ranges") if layout != "token" else "source")
        sources, payload = got.also["source"], got.payload.reshape(-1, 3)
        here = [(e, s, t) for e in ep.local_experts for s in range(case.ranks) for t in range(case.count[s]) if e in case.ids[s][t]]
        per = got.rows.shape[1] if layout == "masked" else 0
        if layout == "token":
            wanted = dict(enumerate(sorted({(s, t) for _, s, t in here})))
        else:
            begin = {e: i * per if per else int(got.offsets[i]) for i, e in enumerate(ep.local_experts)}
            wanted = {}
            for i, e in enumerate(ep.local_experts):
                rows = [place[1:] for place in here if place[0] == e]
                wanted.update(enumerate(rows, start=begin[e]))
                assert (got.also["row_expert"][begin[e] :][: len(rows)] == i).all() and got.counts[i] == len(rows)
                at = 0
                for s in range(case.ranks):
                    of_source, found = sum(place[:2] == (e, s) for place in here), int(got.also["source_ranges"][i, s])
                    assert found & 0xFFFFFFFF == of_source and (of_source == 0 or found >> 32 == at)
                    at += of_source
            assert got.also["row_count"][0] == (got.counts.sum() if per else got.offsets[-1])
            unused = np.setdiff1d(np.arange(len(sources)), list(wanted))
            assert (got.also["row_expert"][unused] == -1).all() and (sources[unused] == -1).all()
        for n, (s, t) in wanted.items():
            assert tuple(sources[n]) == (s, t)
            np.testing.assert_array_equal(payload[n].view(np.uint32), words[s][t].view(np.uint32))
        again, beside = poisoned(got.rows.shape), poisoned((*got.rows.shape[:-1], 1))
        ep.dispatch_again(got.handle, case.x[r] * 2, again, payload=words[r][:, :1].copy(), row_payload=beside)
        narrow, halves = poisoned((*got.rows.shape[:-1], 32), np.float16), [x[:, :32].astype(np.float16) for x in case.x]
        ep.dispatch_again(got.handle, halves[r], narrow, format=FP16)
        for n, (s, t) in wanted.items():
            np.testing.assert_array_equal(again.reshape(-1, 64)[n], case.x[s][t] * 2)
            assert beside.reshape(-1)[n] == words[s][t, 0]
            np.testing.assert_array_equal(narrow.reshape(-1, 32)[n], halves[s][t])
        assert np.isnan(again).sum() == again.size - 64 * len(wanted) and np.isnan(narrow).sum() == narrow.size - 32 * len(wanted)
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


def test_tokens_that_name_ranks_have_a_row_at_each_ones_first_expert():
    case = Case(seed=32, tokens=5)
    draw = np.random.default_rng(5)
    named = [draw.random((n, case.ranks)) < 0.6 for n in case.count]
    weights = [draw.random((n, case.ranks), dtype=np.float32) for n in case.count]

    def rank(world):
        ep, r = tokenyard.AllToAll(world, **case.limits), world.rank
        for given in (named[r], np.asfortranarray(named[r])):
            got = ep.dispatch(case.x[r], given, weights[r])
            wanted = [case.x[s][t] for s in range(case.ranks) for t in range(case.count[s]) if named[s][t, r]]
            assert got.counts.tolist() == [len(wanted)] + [0] * (len(ep.local_experts) - 1)
            np.testing.assert_array_equal(got.rows[: len(wanted)], np.reshape(wanted, (-1, case.hidden)))
            got.rows[len(wanted) :] = np.nan
            out = ep.combine(got.rows * np.float32(r + 1), got.handle, poisoned((case.count[r], case.hidden)))
            factors = (named[r] * weights[r] * np.arange(1, case.ranks + 1)).sum(1, keepdims=True)
            np.testing.assert_allclose(out, case.x[r] * factors, rtol=BOUND, atol=BOUND)
        with pytest.raises(ValueError, match="topk_idx has the shape .* give"):
            ep.dispatch(case.x[r], np.ones((case.count[r], case.ranks + 1), dtype=bool), weights[r])
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


@pytest.mark.parametrize("more, bound", [
    (dict(partial="fp32"), BOUND), (dict(partial="fp8"), 0.13), (dict(round_tokens=4), BOUND),
    (dict(handles=3, handle_rows=20), BOUND), (dict(round_tokens=1, handles=1), BOUND),
])
def test_contexts_of_each_sort_and_what_calls_add_to(more, bound):
    case = Case(seed=33, hidden=128)

    def rank(world):
        ep, r = tokenyard.AllToAll(world, **case.limits | more), world.rank
        assert ep.rounds == -(-case.tokens // more.get("round_tokens", case.tokens))
        output, got = ep.output(case.x[r])
        totals, waits = np.full(len(got.counts), 5, dtype=np.int32), np.full(case.ranks, 7, dtype=np.int64)
        output = tokenyard.Output("contiguous", got.rows, got.counts, offsets=got.offsets, total_counts=totals, wait_times=waits)
        for n in range(1, 4):
            got.rows[:] = np.nan
            before = waits.copy()
            handle = ep.dispatch_into(output, case.x[r], case.ids[r], case.weights[r])
            np.testing.assert_array_equal(totals, 5 + n * got.counts)
            assert (waits >= before).all() and (waits > before).any()
            rows, times = computed(case, ep, got), np.full(case.ranks, 9, dtype=np.int64)
            out = ep.combine(rows, handle, poisoned((case.count[r], case.hidden)), wait_times=times)
            scale = np.abs(case.sums(r)).max(initial=1) if bound > BOUND else 1
            np.testing.assert_allclose(out, case.sums(r), rtol=bound, atol=bound * scale)
            assert (times >= 9).all() and (times > 9).any()
            ep.combine_recv(ep.combine_send(rows, handle), out, wait_times=times)
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


def test_combines_of_another_dtype_than_the_formats():
    case = Case(seed=34)
    case.x = [np.round(x * 4) / 4 for x in case.x]
    torch = the_torch()

    def rank(world):
        ep, r = tokenyard.AllToAll(world, **case.limits), world.rank
        got = ep.dispatch(case.x[r], case.ids[r], case.weights[r])
        for name, dtype, step in (("bf16", torch.bfloat16, 2.0**-7), ("fp16", torch.float16, 2.0**-9), ("fp32", torch.float32, 2.0**-20)):
            rows = torch.from_numpy(computed(case, ep, got)).to(dtype)
            out, wide = ep.combine(rows, got.handle, dtype=name), torch.full((case.count[r], case.hidden), float("nan"))
            assert out.dtype == dtype
            ep.combine_recv(ep.combine_send(rows, got.handle, dtype=name), wide)
            for sums in (out.double(), wide.double()):
                np.testing.assert_allclose(sums.numpy(), case.sums(r), rtol=4 * step, atol=40 * step)
        with pytest.raises(TypeError, match="rows has elements of type float32: give rows of bf16"):
            ep.combine(got.rows, got.handle, dtype="bf16")
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


@pytest.mark.parametrize("scales", ["fp32", "ue8m0"])
def test_rows_of_fp8_given_and_quantised_in_one_context(scales):
    torch = the_torch()
    given = Format(256, 4, dtype="fp8", scales=scales, combine_dtype="fp32", weights="none")
    quantised = Format(256, 3, dtype="fp8", scales=scales, quantize=True, weights="none")
    x = torch.arange(-512, 512, dtype=torch.float32).reshape(4, 256).clamp(-448, 448)
    words = torch.tensor([[1.0, 0.5], [2.0, 4.0], [8.0, 1.0], [0.25, 1.0]])
    if scales == "ue8m0":
        words = torch.tensor([[0x7F80], [0x7E7D], [0x0102], [0x8081]], dtype=torch.int32)

    def rank(world):
        r = world.rank
        ep = tokenyard.AllToAll(world, hidden=256, experts=4, top_k=2, max_tokens_per_rank=4, device="cpu", weights="none",
                                room_for=[given, quantised])
        ids = torch.tensor([[0, 3], [1, 2], [3, -1], [2, 0]])
        ours = (x * (r + 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
        strided = torch.full((4, 3), 99, dtype=words.dtype)
        strided[:, : words.shape[1]] = words + r
        got = ep.dispatch(ours, ids, scales=strided[:, : words.shape[1]], format=given)
        for i, e in enumerate(ep.local_experts):
            tokens = [t for t in range(4) if e in ids[t]]
            wanted = torch.cat([(x * (s + 1)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)[tokens] for s in (0, 1)])
            part = slice(int(got.offsets[i]), int(got.offsets[i] + got.counts[i]))
            assert torch.equal(got.rows[part].view(torch.uint8), wanted)
            assert torch.equal(got.scales[part], torch.cat([words[tokens] + s for s in (0, 1)]))
        per, n = 6, words.shape[1]
        rows, counts = torch.zeros((2, per, 256), dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.int32)
        columns = torch.full((2, n, 8), 0, dtype=torch.float32 if scales == "fp32" else torch.int32)
        output = tokenyard.Output("masked", rows, counts, scales=columns, column_major=True)
        bf16 = torch.full((3, 256), 224.0 * (r + 1), dtype=torch.bfloat16)
        handle = ep.dispatch_into(output, bf16, ids[:3], format=quantised)
        assert handle.format.quantize and counts.tolist() == ([[2, 2], [2, 4]][r])
        for i in range(2):
            sources = [0] * (int(counts[i]) // 2) + [1] * (int(counts[i]) // 2)
            for n_row, s in enumerate(sources):
                exponent = columns[i, :, n_row]
                factor = exponent if scales == "fp32" else 2.0 ** (((exponent & 0xFF) - 127).double())
                assert torch.equal(rows[i, n_row].double() * factor.double()[0], torch.full((256,), 224.0 * (s + 1)).double())
        out = ep.combine(torch.ones((2, per, 256), dtype=torch.bfloat16), handle)
        assert torch.equal(out, torch.tensor([[2.0], [2.0], [1.0]]).expand(3, 256).to(torch.bfloat16))
        for wrong in (torch.zeros((2, 8, n)), torch.zeros((2, n, 12)), torch.zeros((2, n + 1, 8))):
            given_scales = tokenyard.Output("masked", rows, counts, scales=wrong.to(columns.dtype), column_major=True)
            with pytest.raises(ValueError, match="scales has the shape"):
                ep.dispatch_into(given_scales, bf16, ids[:3], format=quantised)
        with pytest.raises(ValueError, match="scales has the shape"):
            ep.dispatch(ours, ids, scales=strided, format=given)
        world.barrier()

    in_ranks(tokenyard.World.threads(2), rank)
