"""Tensors of torch on a GPU that all ranks share, and, where no GPU is needed, the same calls on the CPU device.

A rank is a thread with a stream of its own. Kernels of ranks that share a GPU wait for one another, so their streams must
not share a hardware queue, and nothing may wait for the whole GPU between calls: kernels are loaded when CUDA starts.
TOKENYARD_TEST_DEVICE=cuda: without a GPU the tests fail instead of being skipped.
"""

import functools
import gc
import os
import threading

import numpy as np
import pytest

import tokenyard
from rig import in_ranks

MUST = os.environ.get("TOKENYARD_TEST_DEVICE") == "cuda"
if MUST or os.environ.get("TOKENYARD_STRICT") == "1":
    import torch
else:
    torch = pytest.importorskip("torch")

from reference import FORMATS, LAYOUTS, Job, equal  # noqa: E402: needs torch

GPU = MUST or torch.cuda.is_available()
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU that torch sees")
DEVICES = [pytest.param("cuda:0", marks=on_gpu), "cpu"]
each_device = pytest.mark.parametrize("device", DEVICES)
FILL = 0xA5
# Long enough for the host to enqueue all else meanwhile: a tenth of a second at 2 GHz.
CYCLES = 200_000_000
# Blocks of contexts whose calls run beside other work: the block of torch.cuda._sleep has an SM for itself. An SM divides
# its memory otherwise for kernels with much shared memory, and only when it is idle.
FEW = {"sms": 60}


@functools.lru_cache(None)
def streams():
    """A stream for each rank, and one for work beside it, of different hardware queues: torch's pool has 32."""
    return [torch.cuda.Stream(0) for _ in range(8)]


def made(world, limits, device="cuda:0", **more):
    """A rank's context. Blocks wait for those of other ranks, so the blocks of all ranks that share a GPU must fit at once."""
    shared = {"sms": 120 // world.size, "timeout": 8.0} if device != "cpu" and world.size > 1 else {}
    return tokenyard.AllToAll(world, **{**limits, "device": device, **shared, **more})


def in_streams(ranks, device, work):
    """`work(world)` of each rank in a thread, with a current stream of its own; then the streams are idle."""
    # An exception that a frame keeps keeps the frame, and so a context, for whose blocks the GPU then has no room.
    gc.collect()

    def rank(world):
        if device == "cpu":
            return work(world)
        with torch.cuda.stream(streams()[world.rank]):
            result = work(world)
            streams()[world.rank].synchronize()
            return result

    return in_ranks(tokenyard.World.threads(ranks), rank)


def given(job, rank, device, ids=torch.int64):
    """What a rank dispatches, on the device: rows, choices, weights, scales."""
    arrays = job.x[rank], job.ids[rank].to(ids), job.weights[rank], job.scales[rank]
    return tuple(None if each is None else each.to(device) for each in arrays)


def fetched(tensor):
    """The tensor on the CPU, once the current stream is done with it.

    A copy alone would wait inside of the driver, where another rank, for whose call the stream waits, may not enter.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
    return tensor.cpu()


def on_host(got):
    """A `Dispatched` of tensors on the CPU."""
    return got._replace(**{name: fetched(value) for name, value in got._asdict().items() if isinstance(value, torch.Tensor)})


def filled(output):
    """The same `Dispatched` with its arrays filled, so that what is not written shows."""
    for value in output:
        if isinstance(value, torch.Tensor):
            value.view(torch.uint8).fill_(FILL)
    return output


def check_whole(job, ep, rank, layout, got, align=1):
    """Checks an output, has the experts return their rows, combines these and checks the sums."""
    host = on_host(got)
    job.check_output(rank, layout, host, align)
    out = ep.combine(job.returned(rank, layout, host).to(got.rows.device), got.handle)
    job.check_sums(rank, fetched(out))
    ep.check()


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, scales, quantize", FORMATS)
def test_rows_scales_and_sums_of_every_format(device, layout, dtype, scales, quantize):
    ranks = 3 if layout == "masked" else 2
    job = Job(dtype, scales, quantize, ranks=ranks, seed=len(dtype) + ranks)

    def rank(world):
        ep, r = made(world, job.limits, device), world.rank
        align = 8 if layout == "contiguous" else 1
        for ids in (torch.int32, torch.int64):
            x, chosen, weights, words = given(job, r, device, ids)
            got = ep.dispatch(x, chosen, weights, scales=words, layout=layout, align=align)
            assert got.rows.device == x.device and (got.scales is None) == (scales is None)
            check_whole(job, ep, r, layout, got, align)
        world.barrier()

    in_streams(ranks, device, rank)


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_outputs(device, layout):
    job = Job("fp8", "fp32", True, ranks=3, seed=2)

    def rank(world):
        ep, r = made(world, job.limits, device), world.rank
        x, ids, weights, _ = given(job, r, device)
        for align in (1, 4):
            got = ep.dispatch(x, ids, weights, layout=layout, align=align, exact=True)
            rows = [len(job.tokens_of(e)) for e in job.experts_of(r)]
            wanted = {"contiguous": sum(-(-n // align) * align for n in rows), "masked": max(rows), "token": len(job.tokens_at(r))}
            assert got.rows.shape[-2] == wanted[layout]
            check_whole(job, ep, r, layout, got, align)
        world.barrier()

    in_streams(3, device, rank)


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_of_the_caller_in_halves_keep_what_is_not_written(device, layout):
    job = Job("bf16", ranks=2, seed=3)

    def rank(world):
        ep, r = made(world, job.limits, device), world.rank
        x, ids, weights, _ = given(job, r, device)
        output, got = ep.output(x, layout=layout, align=4)
        filled(got)
        handle = ep.dispatch_recv(ep.dispatch_send(x, ids, weights), output)
        host = on_host(got)
        kept = job.check_output(r, layout, host, 4)
        assert len(kept) and (kept.view(torch.uint8) == FILL).all()
        rows = job.returned(r, layout, host).to(device)
        # Sums in fp32, with gaps between rows.
        wide = torch.full((job.count[r], job.hidden + 32), float("nan"), device=device)
        sums = wide[:, : job.hidden]
        sums[:] = 0
        for times in (1, 2):
            ep.combine_recv(ep.combine_send(rows, handle), sums, accumulate=True)
            job.check_sums(r, fetched(sums), times=times, out_dtype="fp32")
        assert wide[:, job.hidden :].isnan().all()
        assert ep.combine(rows, handle, sums) is sums
        job.check_sums(r, fetched(sums), out_dtype="fp32")
        ep.check()
        world.barrier()

    in_streams(2, device, rank)


@each_device
def test_slices_and_transposed_choices(device):
    job = Job("fp8", "fp32", ranks=2, seed=4)

    def rank(world):
        ep, r = made(world, job.limits, device), world.rank
        x, ids, weights, words = given(job, r, device)
        wide = torch.empty((len(x), job.hidden + 64), dtype=torch.uint8, device=device).fill_(FILL).view(x.dtype)
        # By bytes: torch copies few things of fp8.
        wide.view(torch.uint8)[:, 32 : job.hidden + 32] = x.view(torch.uint8)
        x = wide[:, 32 : job.hidden + 32]
        ids, weights, words = (each.T.contiguous().T for each in (ids, weights, words))
        assert not any(each.is_contiguous() for each in (x, ids, weights, words))
        check_whole(job, ep, r, "contiguous", ep.dispatch(x, ids, weights, scales=words))
        world.barrier()

    in_streams(2, device, rank)


@each_device
def test_a_count_on_the_device(device):
    job = Job("bf16", ranks=2, seed=5)

    def rank(world):
        ep, r = made(world, job.limits, device), world.rank
        # Rows and choices after the last token are there and are not read.
        n, (x, ids, weights, _) = job.count[r], given(job, r, device)
        x = torch.cat([x, x.new_full((job.tokens - n, job.hidden), float("nan"))])
        ids = torch.cat([ids, ids.new_full((job.tokens - n, job.top_k), 10**9)])
        weights = torch.cat([weights, weights.new_full((job.tokens - n, job.top_k), float("nan"))])
        got = ep.dispatch(x, ids, weights, count=torch.tensor([n], dtype=torch.int32, device=device))
        host = on_host(got)
        job.check_output(r, "contiguous", host)
        out = torch.full((job.tokens, job.hidden), float("nan"), dtype=torch.bfloat16, device=device)
        ep.combine(job.returned(r, "contiguous", host).to(device), got.handle, out)
        job.check_sums(r, fetched(out[:n]))
        assert out[n:].isnan().all()
        ep.check()
        world.barrier()

    in_streams(2, device, rank)


@each_device
def test_new_rows_by_an_earlier_handle_payloads_and_weights_of_combine(device):
    job = Job("bf16", ranks=2, seed=6)

    def rank(world):
        ep, r = made(world, job.limits, device, payload_words=2 * job.top_k, weights="combine"), world.rank
        x, ids, weights, _ = given(job, r, device)
        got = ep.dispatch(torch.zeros_like(x), ids)
        ep.dispatch_again(got.handle, x, got.rows)
        host = on_host(got)
        job.check_output(r, "contiguous", host)
        payload = torch.full((len(got.rows), 2), float("nan"))
        for n, s, t, e in job.places(r, "contiguous", host):
            payload[n] = torch.tensor([100.0 * e + 10 * s + t, -0.0])
        rows = job.returned(r, "contiguous", host).to(device)
        gathered = torch.full((job.count[r], job.top_k, 2), float("nan"), device=device)
        out = ep.combine(rows, got.handle, topk_weights=weights, payload=payload.to(device), payload_out=gathered)
        job.check_sums(r, fetched(out))
        wanted = torch.zeros(gathered.shape)
        for t, k in np.ndindex(job.count[r], job.top_k):
            if (e := int(job.ids[r][t, k])) >= 0:
                wanted[t, k] = torch.tensor([100.0 * e + 10 * r + t, -0.0])
        assert equal(fetched(gathered), wanted)
        summed = gathered[:, 0].contiguous()
        ep.combine(rows, got.handle, topk_weights=weights, payload=payload.to(device), payload_out=summed)
        # Small integers: exact.
        assert torch.equal(fetched(summed), wanted.sum(1))
        ep.check()
        world.barrier()

    in_streams(2, device, rank)


@on_gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_follow_the_work_of_the_current_stream_and_later_work_follows_them(ranks):
    job = Job("bf16", ranks=ranks, seed=7)

    def rank(world):
        ep, r = made(world, job.limits, **FEW), world.rank
        x, ids, weights, _ = given(job, r, "cuda:0")
        first = ep.dispatch(x, ids, weights)
        rows = job.returned(r, "contiguous", on_host(first)).to("cuda:0")
        late_x, late_ids, late_weights, late_rows = (torch.zeros_like(each) for each in (x, ids, weights, rows))
        late_ids[:] = torch.arange(job.top_k, device="cuda:0")
        output, got = ep.output(x)
        out, kept, sums = torch.empty_like(x), torch.empty_like(got.rows), torch.empty_like(x)
        counts, offsets = torch.empty_like(got.counts), torch.empty_like(got.offsets)
        torch.cuda.current_stream().synchronize()
        world.barrier()
        torch.cuda._sleep(CYCLES)
        for late, value in ((late_x, x), (late_ids, ids), (late_weights, weights)):
            late.copy_(value)
        handle = ep.dispatch_into(output, late_x, late_ids, late_weights)
        for copy, value in ((kept, got.rows), (counts, got.counts), (offsets, got.offsets)):
            copy.copy_(value)
        torch.cuda._sleep(CYCLES)
        late_rows.copy_(rows)
        ep.combine(late_rows, handle, out)
        sums.copy_(out)
        late_x.zero_()
        assert not torch.cuda.current_stream().query(), "the producer was done before the calls were enqueued: lengthen CYCLES"
        job.check_output(r, "contiguous", got._replace(rows=fetched(kept), counts=fetched(counts), offsets=fetched(offsets)))
        job.check_sums(r, fetched(sums))
        ep.check()
        world.barrier()

    in_streams(ranks, "cuda:0", rank)


@on_gpu
def test_a_call_on_another_stream_does_not_wait_so_the_test_above_can_fail():
    job = Job("bf16", ranks=1, seed=8)

    def rank(world):
        ep, other = made(world, job.limits, **FEW), streams()[4]
        x, ids, weights, _ = given(job, 0, "cuda:0")
        late_x = torch.full_like(x, -7)
        output, got = ep.output(x)
        torch.cuda.current_stream().synchronize()
        torch.cuda._sleep(CYCLES)
        late_x.copy_(x)
        ep.dispatch_into(output, late_x, ids, weights, stream=other)
        other.synchronize()
        rows = int((job.ids[0] >= 0).sum())
        with torch.cuda.stream(other):
            assert (fetched(got.rows[:rows]) == -7).all()
        assert not torch.cuda.current_stream().query()

    in_streams(1, "cuda:0", rank)


@on_gpu
@pytest.mark.parametrize("address", [False, True], ids=["torch's stream", "its address"])
@pytest.mark.parametrize("exact", [False, True])
def test_calls_on_a_given_stream_follow_its_work(address, exact):
    job = Job("bf16", ranks=2, seed=9)

    def rank(world):
        ep, r = made(world, job.limits), world.rank
        other = streams()[4 + r]
        stream = other.cuda_stream if address else other
        x, ids, weights, _ = given(job, r, "cuda:0")
        late_x, rows = torch.zeros_like(x), None
        torch.cuda.current_stream().synchronize()
        world.barrier()
        with torch.cuda.stream(other):
            torch.cuda._sleep(CYCLES)
            late_x.copy_(x)
        got = ep.dispatch(late_x, ids, weights, stream=stream, exact=exact)
        with torch.cuda.stream(other):
            host = on_host(got)
            job.check_output(r, "contiguous", host)
            rows = job.returned(r, "contiguous", host).to("cuda:0")
        out = ep.combine(rows, got.handle, stream=stream)
        sent = ep.dispatch_send(x, ids, weights, stream=stream)
        output, again = ep.output(x)
        ep.dispatch_recv(sent, output, stream=stream)
        with torch.cuda.stream(other):
            job.check_sums(r, fetched(out))
            job.check_output(r, "contiguous", on_host(again))
        ep.check()
        world.barrier()

    in_streams(2, "cuda:0", rank)


@on_gpu
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_arrays_made_for_a_given_stream_are_not_those_that_other_work_still_uses(call):
    """torch reuses memory at once for its own stream: here for that of a call on another stream."""
    job = Job("bf16", ranks=1, seed=10)

    def rank(world):
        ep, other, current = made(world, job.limits, **FEW), streams()[4], torch.cuda.current_stream()
        x, ids, weights, _ = given(job, 0, "cuda:0")
        current.synchronize()
        # A call waits for the context's former calls, and so for the work of their streams: these are on the same one.
        with torch.cuda.stream(other):
            first = ep.dispatch(x, ids, weights)
            rows = job.returned(0, "contiguous", on_host(first)).to("cuda:0")
            out = ep.combine(rows, first.handle)
            other.synchronize()
        shapes, others = (first.rows.shape, first.counts.shape, first.offsets.shape), []
        # All that is free in the current stream's pool is still to be written by its work.
        torch.cuda._sleep(CYCLES)
        for _ in range(64):
            others += [torch.full(shape, -1, dtype=torch.bfloat16, device="cuda:0") for shape in (*shapes, out.shape)]
        del others
        if call == "dispatch":
            got = ep.dispatch(x, ids, weights, stream=other)
        else:
            got = ep.combine(rows, first.handle, stream=other)
        other.synchronize()
        assert not current.query()
        current.synchronize()
        if call == "dispatch":
            job.check_output(0, "contiguous", on_host(got))
        else:
            job.check_sums(0, fetched(got))

    in_streams(1, "cuda:0", rank)


REPLAYS = 100


class Replayed:
    """Inputs of 100 replays, and the sums: expert e multiplies by 1 + e % 4. Rows are multiples of 1/4, so products are exact."""

    def __init__(self, ranks, hidden=256, experts=8, top_k=3, tokens=16, seed=11):
        draw = np.random.default_rng(seed)
        self.limits = dict(hidden=hidden, experts=experts, top_k=top_k, max_tokens_per_rank=tokens, timeout=20.0)
        self.tokens, self.count, self.x, self.ids, self.weights = tokens, [], [], [], []
        for _ in range(ranks):
            ids = np.argsort(draw.random((REPLAYS, tokens, experts)), axis=2)[..., :top_k]
            ids[draw.random(ids.shape) < 0.1] = -1
            self.ids.append(torch.from_numpy(ids).cuda())
            self.x.append(torch.from_numpy(draw.integers(-30, 31, (REPLAYS, tokens, hidden)) / 4).to(torch.bfloat16).cuda())
            self.weights.append(torch.from_numpy(draw.random(ids.shape, dtype=np.float32)).cuda())
            self.count.append(torch.from_numpy(draw.integers(0, tokens + 1, (REPLAYS, 1), dtype=np.int32)).cuda())

    def rows(self):
        """Rows of each expert in each replay."""
        counts = torch.zeros((REPLAYS, self.limits["experts"]), dtype=torch.int64, device="cuda:0")
        for ids, count in zip(self.ids, self.count):
            here = torch.arange(self.tokens, device="cuda:0")[None, :, None] < count[:, :, None]
            for e in range(self.limits["experts"]):
                counts[:, e] += ((ids == e) & here).sum((1, 2))
        return counts

    def check(self, rank, out):
        x, ids, weights = (each[rank].double() for each in (self.x, self.ids, self.weights))
        factors = (weights * (1 + ids.long() % 4) * (ids >= 0)).sum(2, keepdim=True)
        here = torch.arange(self.tokens, device="cuda:0")[None, :, None] < self.count[rank][:, :, None]
        exact = factors * x
        wrong = (out.double() - exact).abs() > 2.1 * 2.0**-8 * exact.abs()
        assert not (wrong & here).any()
        assert (out.isnan() | here).all()


@on_gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_graph_of_torch_replayed_over_fresh_inputs(ranks, warm, mode):
    """`cold`: the context's first calls are those that are captured."""
    case, lock = Replayed(ranks), threading.Lock()
    torch.cuda.synchronize()

    def rank(world):
        ep, r, stream = made(world, case.limits), world.rank, torch.cuda.current_stream()
        fresh = case.x[r], case.ids[r], case.weights[r], case.count[r]
        x, ids, weights, count = (each[0].clone() for each in fresh)
        out = torch.empty_like(x)
        # What the experts multiply by, in the masked layout.
        factors = torch.tensor([[[1.0 + e % 4]] for e in ep.local_experts], dtype=x.dtype, device="cuda:0")

        def step():
            got = ep.dispatch(x, ids, weights, count=count, layout="masked")
            ep.combine(got.rows * factors, got.handle, out)
            return got

        if warm:
            for _ in range(3):
                step()
        sums, counts = torch.empty_like(case.x[r]), torch.empty((REPLAYS, len(ep.local_experts)), dtype=torch.int32, device="cuda:0")
        stream.synchronize()
        ep.check()
        world.barrier()
        graph = torch.cuda.CUDAGraph()
        # One after the other: torch waits for the GPU and frees memory before a capture.
        with lock, torch.cuda.graph(graph, capture_error_mode=mode):
            got = step()
        world.barrier()
        for i in range(REPLAYS):
            for static, values in zip((x, ids, weights, count), fresh):
                static.copy_(values[i])
            out.fill_(float("nan"))
            graph.replay()
            if i % 10 == 9:
                # A call beside the graph's, of the same inputs.
                before = out.clone()
                eager = step()
                torch._assert_async((before.nan_to_num(-1) == out.nan_to_num(-1)).all() & (eager.counts == got.counts).all())
            sums[i].copy_(out)
            counts[i].copy_(got.counts)
        stream.synchronize()
        ep.check()
        case.check(r, sums)
        assert torch.equal(counts.long(), case.rows()[:, ep.local_experts])
        stream.synchronize()
        world.barrier()

    in_streams(ranks, "cuda:0", rank)


@on_gpu
def test_what_a_capture_cannot_have_is_refused_and_the_context_goes_on():
    job = Job("bf16", ranks=1, seed=12)

    def rank(world):
        ep = made(world, job.limits)
        x, ids, weights, _ = given(job, 0, "cuda:0")
        handles = []
        # The handles of a context are allocated when it is built.
        with pytest.raises(tokenyard.ArgumentError, match="none free while the stream captures"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                for _ in range(20):
                    handles.append(ep.dispatch(x, ids, weights).handle)
        assert handles
        handles.clear()
        with pytest.raises(tokenyard.ArgumentError, match="capturing a dispatch whose counts come first"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                ep.dispatch(x, ids, weights, exact=True)
        check_whole(job, ep, 0, "contiguous", ep.dispatch(x, ids, weights))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = ep.dispatch(x, ids, weights)
        graph.replay()
        job.check_output(0, "contiguous", on_host(got))
        ep.check()

    in_streams(1, "cuda:0", rank)


@on_gpu
def test_a_graphs_handle_that_is_kept_serves_calls_after_a_replay():
    """And another call's handle is another one: a graph of torch has its own only as long as Python keeps it."""
    job = Job("bf16", ranks=1, seed=13)

    def rank(world):
        ep = made(world, job.limits)
        x, ids, weights, _ = given(job, 0, "cuda:0")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = ep.dispatch(x, ids, weights)
        eager = ep.dispatch(x.flip(0).contiguous(), ids.flip(0).contiguous(), weights.flip(0).contiguous())
        graph.replay()
        for got in (kept, eager):
            host = on_host(got)
            if got is kept:
                job.check_output(0, "contiguous", host)
                rows = job.returned(0, "contiguous", host).cuda()
                job.check_sums(0, fetched(ep.combine(rows, kept.handle)))
            else:
                sums = fetched(ep.combine(torch.ones_like(eager.rows), eager.handle))
                exact = (job.weights[0] * (job.ids[0] >= 0)).sum(1, keepdim=True).double().flip(0)
                assert ((sums.double() - exact).abs() <= 2.1 * 2.0**-8 * exact).all()
        ep.check()

    in_streams(1, "cuda:0", rank)


@on_gpu
def test_unusable_routing_that_a_kernel_finds_is_raised_by_check():
    job = Job("bf16", ranks=2, seed=14)

    def rank(world):
        ep, r, stream = made(world, job.limits), world.rank, torch.cuda.current_stream()
        x, ids, weights, _ = given(job, r, "cuda:0")
        for wrong in (job.experts, -2, 10**9):
            bad = ids.clone()
            if r == 0:
                bad[0, 0] = wrong
            got = ep.dispatch(x, bad, weights)
            stream.synchronize()
            if r == 0:
                with pytest.raises(tokenyard.RoutingError, match=f"names expert {wrong}") as raised:
                    ep.check()
                assert (raised.value.rank, raised.value.fatal) == (0, False)
            # Not enqueued where it raises what an earlier call found, here that of rank 0.
            out = ep.combine(torch.zeros_like(got.rows), got.handle)
            assert (fetched(out) == 0).all()
            ep.check()
            world.barrier()
        check_whole(job, ep, r, "contiguous", ep.dispatch(x, ids, weights))
        world.barrier()

    in_streams(2, "cuda:0", rank)


@on_gpu
def test_an_output_without_room_is_raised_by_check():
    job = Job("bf16", ranks=1, seed=15)

    def rank(world):
        ep = made(world, job.limits)
        x, ids, weights, _ = given(job, 0, "cuda:0")
        got = ep.dispatch(x, ids, weights, capacity=3)
        assert got.counts.tolist() == [0] * job.experts
        with pytest.raises(tokenyard.CapacityError) as raised:
            ep.check()
        assert (raised.value.given, raised.value.needed) == (3, int((job.ids[0] >= 0).sum()))
        check_whole(job, ep, 0, "contiguous", ep.dispatch(x, ids, weights))

    in_streams(1, "cuda:0", rank)


@on_gpu
def test_arrays_elsewhere_are_refused_and_the_next_call_works():
    job = Job("bf16", ranks=1, seed=16)

    def rank(world):
        ep = made(world, job.limits)
        x, ids, weights, _ = here = given(job, 0, "cuda:0")
        output, got = ep.output(x)
        handle = ep.dispatch_into(output, x, ids, weights)
        refused = [
            ("x is on Cpu and the context on Cuda\\(0\\)", lambda: ep.dispatch(x.cpu(), ids, weights)),
            ("topk_idx is on Cpu and the context on Cuda\\(0\\)", lambda: ep.dispatch(x, ids.cpu(), weights)),
            ("topk_weights is on Cpu", lambda: ep.dispatch(x, ids, weights.cpu())),
            ("count is on Cpu", lambda: ep.dispatch(x, ids, weights, count=torch.tensor([3], dtype=torch.int32))),
            ("rows is on Cpu", lambda: ep.dispatch_into(ep.output(x.cpu())[0], x, ids, weights)),
            ("rows is on Cpu", lambda: ep.combine(got.rows.cpu(), handle, x)),
            ("out is on Cpu", lambda: ep.combine(got.rows, handle, x.cpu())),
            ("x is on Cpu", lambda: ep.dispatch(x.cpu().view(torch.int16).numpy().view(np.uint16), ids, weights)),
        ]
        for text, call in refused:
            with pytest.raises(ValueError, match=text):
                call()
        on_cpu = made(tokenyard.World.threads(1)[0], job.limits, "cpu")
        with pytest.raises(ValueError, match="x is on Cuda\\(0\\) and the context on Cpu"):
            on_cpu.dispatch(*here[:3])
        with pytest.raises(tokenyard.Error, match="cu|GPU"):
            made(tokenyard.World.threads(1)[0], job.limits, "cuda:99")
        check_whole(job, ep, 0, "contiguous", ep.dispatch(x, ids, weights))

    in_streams(1, "cuda:0", rank)


@on_gpu
def test_a_rank_that_does_not_come_closes_the_context_and_its_later_calls_are_refused():
    job = Job("bf16", ranks=2, seed=17)

    def rank(world):
        ep, r, stream = made(world, job.limits, timeout=0.5), world.rank, torch.cuda.current_stream()
        if r == 0:
            x, ids, weights, _ = given(job, r, "cuda:0")
            ep.dispatch(x, ids, weights)
            stream.synchronize()
            for call in (ep.check, lambda: ep.dispatch(x, ids, weights), ep.check):
                with pytest.raises(tokenyard.TimeoutError) as raised:
                    call()
                assert (raised.value.rank, raised.value.peer, raised.value.fatal) == (0, 1, True)
        world.barrier()

    in_streams(2, "cuda:0", rank)
    # A new world on the same GPU.
    job = Job("bf16", ranks=2, seed=18)

    def anew(world):
        ep, r = made(world, job.limits), world.rank
        x, ids, weights, _ = given(job, r, "cuda:0")
        check_whole(job, ep, r, "contiguous", ep.dispatch(x, ids, weights))
        world.barrier()

    in_streams(2, "cuda:0", anew)


@on_gpu
def test_many_contexts_leave_no_memory_behind():
    job = Job("bf16", ranks=1, seed=19)
    x, ids, weights, _ = given(job, 0, "cuda:0")
    output, got = made(tokenyard.World.threads(1)[0], job.limits).output(x)
    out = torch.empty_like(x)

    def some(n):
        for _ in range(n):
            # Dropped with its calls under way.
            ep = made(tokenyard.World.threads(1)[0], job.limits)
            ep.combine(got.rows, ep.dispatch_into(output, x, ids, weights), out)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(0)[0], len(os.listdir("/proc/self/fd")), threading.active_count()

    some(20)
    before, after = some(1), some(200)
    assert before == after or (after[0] >= before[0] - (4 << 20) and after[1:] == before[1:]), (before, after)


@on_gpu
def test_arrays_of_cupy_and_their_current_stream():
    cupy = pytest.importorskip("cupy")
    job = Job("fp16", ranks=1, seed=20)

    def rank(world):
        ep, current = made(world, job.limits, **FEW), streams()[4]
        x, ids, weights = (cupy.asarray(each.numpy()) for each in (job.x[0], job.ids[0], job.weights[0]))
        stream, late = cupy.cuda.ExternalStream(current.cuda_stream), cupy.zeros_like(x)
        cupy.cuda.get_current_stream().synchronize()
        for exact in (False, True):
            with stream:
                with torch.cuda.stream(current):
                    torch.cuda._sleep(CYCLES)
                cupy.copyto(late, x)
                # torch has another current stream, which is not asked.
                got = ep.dispatch(late, ids, weights, exact=exact)
                host = tokenyard.Dispatched(*(torch.from_numpy(cupy.asnumpy(a)) if isinstance(a, cupy.ndarray) else a for a in got))
                job.check_output(0, "contiguous", host)
                rows = cupy.asarray(job.returned(0, "contiguous", host).numpy())
                out = ep.combine(rows, got.handle)
                assert isinstance(out, cupy.ndarray)
                job.check_sums(0, torch.from_numpy(cupy.asnumpy(out)))
                late.fill(0)
                stream.synchronize()
        ep.check()

    in_streams(1, "cuda:0", rank)


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, scales, quantize", [("bf16", None, False), ("fp8", "fp32", True)])
def test_sanitized(device, layout, dtype, scales, quantize):
    """For compute-sanitizer: little of everything that writes, by a rank that is alone."""
    job = Job(dtype, scales, quantize, ranks=1, hidden=512, tokens=8, seed=21)

    def rank(world):
        ep = made(world, job.limits, device, payload_words=job.top_k)
        x, ids, weights, words = given(job, 0, device)
        check_whole(job, ep, 0, layout, ep.dispatch(x, ids, weights, scales=words, layout=layout))
        got = ep.dispatch(x, ids, weights, scales=words, layout=layout, exact=True)
        check_whole(job, ep, 0, layout, got)
        ep.dispatch_again(got.handle, x, got.rows, row_scales=got.scales)
        job.check_output(0, layout, on_host(got))

    in_streams(1, device, rank)
