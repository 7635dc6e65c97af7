"""SGLang's DeepEP dispatchers over `tokenyard.install_as("deep_ep")`, and tokenyard's own dispatcher for SGLang,
against a dense reference.

SGLang's classes are unmodified. What they ask of GPUs on their way, a machine without GPUs lacks; `on_the_cpu` has the
list of stand-ins. Ranks are processes, on CPU tensors, with gloo groups. SGLang has a wheel for each version of Python,
which asks for 80 packages. So tests/all.sh unpacks its files into a folder, `TOKENYARD_SGLANG_FOLDER` or
target/engines/sglang, which the ranks alone have in sys.path; stand_ins.py has what stands in for packages. As a
program, this file is the ranks: `test_sglang.py ranks 2 4`.
"""

import contextlib
import datetime
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
import weakref

import pytest

from engine_rig import DEVICE, ROOT, SGLANG, another_stream, drawing, fork_ranks, on_its_device, skip_without_sglang, without_gpus
from stand_ins import stand_in_for_sglangs_packages
from rig import free_port, settle

EXPERTS_OF_RANK, TOP_K, HIDDEN = 3, 4, 640
# Columns of a scale, and of four scales in a word.
BLOCK, WORD = 128, 512
DEADLINE_SECONDS = 150.0

skip_without_sglang()


def test_sglang():
    """On two ranks, then on four, by one process, which imports SGLang once. On GPUs, on two alone."""
    worlds = (2,) if DEVICE == "cuda" else (2, 4)
    ran = run_program("ranks", *map(str, worlds))
    assert ran.returncode == 0 and ran.stdout.count("right") == sum(worlds), ran.stdout + ran.stderr


def test_without_deep_ep(tmp_path):
    """A `deep_ep` that cannot be imported is an error of its use alone, which has the reason. tokenyard's own
    dispatcher needs none: SGLang's processes load what the wheel declares, which installs it by environment alone."""
    (tmp_path / "deep_ep.py").write_text('raise AssertionError("two copies of a library")\n')
    ran = run_program("without_deep_ep", str(tmp_path))
    assert ran.returncode == 0 and "right" in ran.stdout, ran.stdout + ran.stderr


def run_program(*arguments, **env):
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | env
    return subprocess.run([sys.executable, "-W", "ignore", __file__, *arguments], env=env, capture_output=True,
                          text=True, timeout=DEADLINE_SECONDS + 60)


# The program


def on_the_cpu():
    """Stand-ins, by name, for what needs a GPU.

    - torch.cuda.get_device_properties: SGLang compares the number of multiprocessors with that of communication.
    - sglang_per_token_group_quant_fp8: a kernel of Triton, which normal dispatch calls before `Buffer.dispatch`.
    - deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM: combine in normal mode is for DeepGEMM's experts alone. The tests' experts
      stand in for them. `deep_gemm` sets its other constants, which state a GPU's kind.
    - ServerArgs: those of no model, since SGLang has none without a command line."""
    import torch
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.runtime_context import get_context

    if DEVICE == "cpu":
        torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(multi_processor_count=132)
    deepep.sglang_per_token_group_quant_fp8 = quantised_rows
    get_context().override_server_args(model_path="dummy").install()


@contextlib.contextmanager
def deep_gemm(ue8m0, present=True):
    """DeepGEMM as SGLang finds it: on Blackwell, whose scales are packed UE8M0, or on Hopper."""
    from sglang.srt.layers import deep_gemm_wrapper as gemm

    names = ("ENABLE_JIT_DEEPGEMM", "DEEPGEMM_BLACKWELL", "DEEPGEMM_SCALE_UE8M0")
    before = [getattr(gemm, name) for name in names]
    gemm.ENABLE_JIT_DEEPGEMM, gemm.DEEPGEMM_BLACKWELL, gemm.DEEPGEMM_SCALE_UE8M0 = present, ue8m0, ue8m0
    try:
        yield
    finally:
        for name, value in zip(names, before):
            setattr(gemm, name, value)


def quantised_rows(x, group_size, column_major_scales, scale_tma_aligned, scale_ue8m0):
    """fp8 rows and scales, in the strides that SGLang's kernel gives them."""
    from reference import quantised

    assert group_size == BLOCK and column_major_scales == scale_tma_aligned == scale_ue8m0
    rows, words = quantised(x, "ue8m0" if scale_ue8m0 else "fp32")
    return rows, words.T.contiguous().T if column_major_scales else words


class Batch:
    """Tokens of all ranks, which each rank draws alike, and what comes of them."""

    def __init__(self, ranks, counts, seed, scales=None, among=None):
        """`scales`: None for bf16 rows, "fp32" or "ue8m0". `among`: how many experts, the first ones, are chosen."""
        import torch
        from reference import quantised

        draw = drawing(seed)
        self.ranks, self.counts, self.scales, self.experts = ranks, counts, scales, EXPERTS_OF_RANK * ranks
        among = among or self.experts
        self.x = [torch.randn(count, HIDDEN, generator=draw).bfloat16() for count in counts]
        # Columns of different size, so that scales differ.
        sizes = 2.0 ** torch.randint(-6, 6, (HIDDEN // BLOCK,), generator=draw).repeat_interleave(BLOCK)
        self.x = [x * sizes.bfloat16() for x in self.x]
        self.ids = [torch.rand(count, among, generator=draw).argsort(1)[:, :TOP_K] for count in counts]
        for ids in self.ids:
            ids[torch.rand(ids.shape, generator=draw) < 0.15] = -1
        self.weights = [0.1 + torch.rand(ids.shape, generator=draw) for ids in self.ids]
        rows = [quantised(x, scales) if scales else (x, None) for x in self.x]
        self.rows, self.words = [row for row, _ in rows], [words for _, words in rows]
        # Experts' functions are lines, of columns that differ.
        self.slopes = torch.randn(self.experts, HIDDEN, generator=draw)
        self.shifts = torch.randn(self.experts, HIDDEN, generator=draw)

    def topk(self, rank):
        """SGLang's output of a router; int32, as its kernels make."""
        import torch
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        return StandardTopKOutput(self.weights[rank], self.ids[rank].to(torch.int32), None)

    def places(self, wanted):
        """(source, token) of the tokens of which `wanted(ids)` is true, in order."""
        return [(s, t) for s in range(self.ranks) for t, ids in enumerate(self.ids[s].tolist()) if wanted(ids)]

    def values(self, rows, words):
        """What rows are as fp32."""
        import torch

        if words is None:
            return rows.float()
        if words.dtype == torch.int32:
            exponents = (words[..., None] >> torch.arange(0, 32, 8, dtype=torch.int32)).flatten(-2) & 255
            words = (exponents[..., : HIDDEN // BLOCK] << 23).view(torch.float32)
        return rows.float() * words.repeat_interleave(BLOCK, -1)

    def expert(self, number, values):
        return values * self.slopes[number].to(values.dtype) + self.shifts[number].to(values.dtype)

    def check_normal(self, rank, got, align):
        """Each element of a normal dispatch."""
        import torch
        from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPNormalDispatchOutput

        own = range(rank * EXPERTS_OF_RANK, (rank + 1) * EXPERTS_OF_RANK)
        places = self.places(lambda ids: any(e in own for e in ids))
        assert type(got) is DeepEPNormalDispatchOutput
        check_rows(self, got.hidden_states, got.hidden_states_scale, places)
        ids = torch.stack([self.ids[s][t] for s, t in places]) if places else torch.zeros((0, TOP_K), dtype=torch.int64)
        here = (ids >= own[0]) & (ids <= own[-1])
        assert got.topk_ids.dtype == torch.int64 and torch.equal(got.topk_ids, torch.where(here, ids - own[0], -1))
        weights = torch.stack([self.weights[s][t] for s, t in places]) if places else torch.zeros((0, TOP_K))
        assert torch.equal(got.topk_weights[here], weights[here]) and got.topk_weights.shape == weights.shape
        counts = [-(-int((ids == e).sum()) // align) * align for e in own]
        assert list(got.num_recv_tokens_per_expert) == counts, (got.num_recv_tokens_per_expert, counts)

    def check_masked(self, rank, got, rows_of_rank):
        """Each element of a low-latency dispatch."""
        import torch
        from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLDispatchOutput

        assert type(got) is DeepEPLLDispatchOutput
        assert got.hidden_states.shape == (EXPERTS_OF_RANK, self.ranks * rows_of_rank, HIDDEN)
        assert got.masked_m.dtype == torch.int32 and got.masked_m.shape == (EXPERTS_OF_RANK,)
        assert torch.equal(got.topk_ids, self.ids[rank]) and torch.equal(got.topk_weights, self.weights[rank])
        assert got.expected_m == (self.counts[rank] * self.ranks * TOP_K + self.experts) // self.experts
        if self.scales is not None:
            # DeepGEMM's layout: the row's number first, in strides of 16 bytes.
            columns = BLOCK if self.scales == "fp32" else WORD
            assert got.hidden_states_scale.shape == (*got.hidden_states.shape[:2], -(-HIDDEN // columns))
            _expert, row, column = got.hidden_states_scale.stride()
            assert row == 1 and column % 4 == 0
        for local in range(EXPERTS_OF_RANK):
            places = self.places(lambda ids: rank * EXPERTS_OF_RANK + local in ids)
            count = int(got.masked_m[local])
            assert count == len(places)
            words = None if got.hidden_states_scale is None else got.hidden_states_scale[local, :count]
            check_rows(self, got.hidden_states[local, :count], words, places)

    def outputs(self, rank, got):
        """What a runner makes of a dispatch: SGLang's input of combine."""
        import torch
        from sglang.srt.layers.moe.token_dispatcher import deepep

        first = rank * EXPERTS_OF_RANK
        if isinstance(got, deepep.DeepEPLLDispatchOutput):
            rows = torch.full(got.hidden_states.shape, float("nan"), dtype=torch.bfloat16)
            for local, count in enumerate(got.masked_m.tolist()):
                words = None if got.hidden_states_scale is None else got.hidden_states_scale[local, :count]
                values = self.values(got.hidden_states[local, :count], words)
                rows[local, :count] = self.expert(first + local, values).bfloat16()
            return deepep.DeepEPLLCombineInput(rows, got.topk_ids, got.topk_weights)
        values = self.values(got.hidden_states, got.hidden_states_scale)
        sums = torch.zeros(values.shape)
        for local in range(EXPERTS_OF_RANK):
            weight = torch.where(got.topk_ids == local, got.topk_weights, 0.0).sum(1, keepdim=True)
            sums += weight * self.expert(first + local, values)
        return deepep.DeepEPNormalCombineInput(sums.bfloat16(), got.topk_ids, got.topk_weights)

    def check_sums(self, rank, sums):
        """Each element of what comes back."""
        import torch

        assert sums.dtype == torch.bfloat16 and sums.shape == (self.counts[rank], HIDDEN)
        values = self.values(self.rows[rank], self.words[rank]).double()
        exact, terms = torch.zeros(2, *values.shape, dtype=torch.float64)
        for choice in range(TOP_K):
            ids = self.ids[rank][:, choice]
            weight = torch.where(ids >= 0, self.weights[rank][:, choice], 0.0).double()[:, None]
            term = weight * self.expert(ids.clamp(min=0), values)
            # Of the sum of two numbers, too.
            sizes = (self.slopes[ids.clamp(min=0)] * values).abs() + self.shifts[ids.clamp(min=0)].abs()
            exact, terms = exact + term, terms + weight * sizes
        # Outputs of experts, or of their sums on a rank, are rounded to bf16, then partial sums, then sums.
        off = (sums.double() - exact).abs() - 3.1 * 2.0**-8 * terms
        assert off.numel() == 0 or off.max() <= 0, f"sums are off by {off.max():.3g} more than rounding explains"
        assert not (self.ids[rank] >= 0).any() or sums.abs().max() > 0.5


def check_rows(batch, rows, words, places):
    """Rows and scales, which have the bits of the tokens' own."""
    import torch
    from reference import bits, equal

    wanted = [batch.rows[s][t] for s, t in places]
    assert rows.shape == (len(places), HIDDEN) and rows.dtype == batch.rows[0].dtype
    assert not places or equal(rows.contiguous(), torch.stack(wanted))
    assert (words is None) == (batch.scales is None)
    if words is not None and places:
        assert equal(bits(words.contiguous()), bits(torch.stack([batch.words[s][t] for s, t in places])))


@contextlib.contextmanager
def mode(extend):
    """A step of prefill, or one of decode."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    set_is_extend_in_batch(extend)
    yield


def layer(dispatcher, batch, rank, prefill, rows_of_rank):
    """Dispatch, experts, combine, all of it compared."""
    with mode(prefill):
        got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=batch.topk(rank))
        check(batch, rank, got, prefill, rows_of_rank)
        batch.check_sums(rank, dispatcher.combine(combine_input=batch.outputs(rank, got)))


def check(batch, rank, got, prefill, rows_of_rank=128, align=128):
    if prefill:
        batch.check_normal(rank, got, align)
    else:
        batch.check_masked(rank, got, rows_of_rank)


def two_batches(first, second, batches, rank, prefill, order, rows_of_rank=128):
    """Two micro-batches through two dispatchers. `order`: of halves, "Ad" for A's dispatch_a, "AD" for its dispatch_b,
    "Ac" and "AC" for those of combine."""
    of, got = {"A": (first, batches[0]), "B": (second, batches[1])}, {}
    with mode(prefill):
        for step in order.split():
            (dispatcher, batch), half = of[step[0]], step[1]
            if half == "d":
                dispatcher.dispatch_a(hidden_states=batch.x[rank], topk_output=batch.topk(rank))
            elif half == "D":
                got[step[0]] = dispatcher.dispatch_b()
                check(batch, rank, got[step[0]], prefill, rows_of_rank)
            elif half == "c":
                dispatcher.combine_a(combine_input=batch.outputs(rank, got[step[0]]))
            else:
                batch.check_sums(rank, dispatcher.combine_b())


# The orders of SGLang's strategies, prefill and decode, and all in flight at once.
ORDERS = {
    True: ("Ad Bd AD Ac BD Bc AC BC",),
    False: ("Ad AD Ac Bd AC BD Ad Bc AD BC Ac AC", "Ad Bd AD Ac BD Bc AC BC"),
}


# --deepep-config, from which SGLang makes `Config(**...)`.
CONFIG = {
    "normal_dispatch": {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8, "num_max_nvl_chunked_recv_tokens": 320,
                        "num_max_rdma_chunked_send_tokens": 16, "num_max_rdma_chunked_recv_tokens": 128},
    "normal_combine": {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 4, "num_max_nvl_chunked_recv_tokens": 256,
                       "num_max_rdma_chunked_send_tokens": 8, "num_max_rdma_chunked_recv_tokens": 128},
}


@contextlib.contextmanager
def settings(rows_of_rank=None, config=""):
    """SGLang's settings by environment and command line, of a buffer that is new."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.runtime_context import get_flags, get_resources

    get_resources().buffers.pop("deepep_ep_state", None)
    deepep.DeepEPConfig._instance = None
    rows = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK
    with get_flags().moe.override(deepep_config=config), rows.override(rows_of_rank or rows.get()):
        yield


def low_latency_bytes(rows_of_rank, experts, hidden):
    """DeepEP's own number of bytes for low latency, which SGLang's reservation of memory computes, too."""
    scales = hidden // 128 * 4
    sent, partial = 16 + max(2 * hidden, hidden + scales), scales + 2 * hidden
    rows = max(rows_of_rank * sent, experts * rows_of_rank * partial)
    total = 2 * (rows + experts * rows_of_rank * max(sent, partial) + -(-4 * experts // 128) * 128)
    return total // 128 * 128 + 128


def deep_ep_part(ranks):
    """SGLang's own dispatchers."""
    import torch.distributed as dist
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from tokenyard.deep_ep import Buffer, Config

    rank = dist.get_rank()
    for scales in (None, "fp32", "ue8m0"):
        rows_of_rank, config = (160, json.dumps(CONFIG)) if scales == "fp32" else (128, "")
        with deep_gemm(scales == "ue8m0"), settings(rows_of_rank, config):
            both, other = own_dispatcher(ranks), own_dispatcher(ranks)
            for one in (both, other):
                one.set_quant_config({"dispatcher_output_dtype": "fp8" if scales else "bf16"})
            exercise(both, other, ranks, rank, scales, rows_of_rank)
            buffer = deepep.DeepEPBuffer._state().buffer
            assert type(buffer) is Buffer and buffer.low_latency_mode and buffer.group_size == ranks
            assert buffer.num_rdma_bytes == low_latency_bytes(rows_of_rank, EXPERTS_OF_RANK * ranks, HIDDEN)
            if config:
                made = deepep.DeepEPConfig.get_instance()
                assert vars(made.normal_dispatch_config) == CONFIG["normal_dispatch"]
                assert vars(made.normal_combine_config) == CONFIG["normal_combine"] and made.num_sms == 24
                hints = [Config(**one).get_nvl_buffer_size_hint(2 * HIDDEN, ranks) for one in CONFIG.values()]
                assert buffer.num_nvl_bytes == max(hints) > 0
    with deep_gemm(False), settings():
        unaligned(own_dispatcher(ranks), ranks, rank)
    with settings(rows_of_rank=1025), pytest.raises(AssertionError):
        own_dispatcher(ranks)
    # In GLM-5.2's shape 12.18 GiB, on any number of ranks.
    assert low_latency_bytes(1024, 256, 6144) == 13_086_230_656
    for shape in [(1024, 6144, 256), (128, 7168, 256), (256, 2048, 64), (1, 5120, 96)]:
        rows_of_rank, hidden, experts = shape
        hints = {Buffer.get_low_latency_rdma_size_hint(rows_of_rank, hidden, size, experts) for size in (1, 2, 4, 8)}
        assert hints == {low_latency_bytes(rows_of_rank, experts, hidden)}, shape


def own_dispatcher(ranks):
    """SGLang's dispatcher, as `create_moe_dispatcher` makes it."""
    import torch
    import torch.distributed as dist
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPDispatcher
    from sglang.srt.layers.moe.utils import DeepEPMode

    return DeepEPDispatcher(
        group=dist.group.WORLD, router_topk=TOP_K, permute_fusion=True, num_experts=EXPERTS_OF_RANK * ranks,
        num_local_experts=EXPERTS_OF_RANK, hidden_size=HIDDEN, params_dtype=torch.bfloat16,
        deepep_mode=DeepEPMode.AUTO, async_finish=True, return_recv_hook=True,
    )


def exercise(dispatcher, other, ranks, rank, scales, rows_of_rank):
    """Steps through one dispatcher, then micro-batches through both."""
    steps(dispatcher, ranks, rank, scales, rows_of_rank)
    for prefill, orders in ORDERS.items():
        for number, order in enumerate(orders):
            batches = [Batch(ranks, [9 + 3 * r + b for r in range(ranks)], 70 + b + number, scales) for b in (0, 1)]
            two_batches(dispatcher, other, batches, rank, prefill, order, rows_of_rank)


def unaligned(dispatcher, ranks, rank):
    """Without DeepGEMM, counts are not rounded up. SGLang's combine is for DeepGEMM's experts alone."""
    batch = Batch(ranks, [9 + 3 * r for r in range(ranks)], 5)
    with mode(True):
        with deep_gemm(False, present=False):
            got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=batch.topk(rank))
        check(batch, rank, got, True, align=1)
        batch.check_sums(rank, dispatcher.combine(combine_input=batch.outputs(rank, got)))


def steps(dispatcher, ranks, rank, scales, rows_of_rank):
    """Prefill and decode, alternately."""
    some = [9 + 3 * r for r in range(ranks)]
    cases = [
        (True, some, None), (False, some, None),
        # More than a context for 128 has room for, on some rank.
        (True, [20 + 140 * r for r in range(ranks)], None),
        (False, [rows_of_rank] + some[1:], None),
        # A rank without tokens; a rank whose experts nobody chooses.
        (True, [0] + some[1:], None), (False, [0] + some[1:], None),
        (True, some, EXPERTS_OF_RANK * (ranks - 1)), (False, some, EXPERTS_OF_RANK * (ranks - 1)),
        (True, [0] * ranks, None), (False, [0] * ranks, None),
    ]
    for seed, (prefill, counts, among) in enumerate(cases):
        layer(dispatcher, Batch(ranks, counts, seed, scales, among and max(among, TOP_K)), rank, prefill, rows_of_rank)


class MicroBatch:
    """One micro-batch's side of a layer's dispatcher, as SGLang's two-batch overlap calls it."""

    def __init__(self, dispatcher, index):
        self.dispatcher, self.index = dispatcher, index

    def __getattr__(self, name):
        return functools.partial(getattr(self.dispatcher, name), tbo_subbatch_index=self.index)


@contextlib.contextmanager
def backend(name, rows_of_rank=None):
    """SGLang with `--moe-a2a-backend name --enable-two-batch-overlap`."""
    import torch.distributed as dist
    from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend
    from sglang.srt.runtime_context import get_flags, get_parallel

    group = types.SimpleNamespace(device_group=dist.group.WORLD)
    flags = {"a2a_backend": MoeA2ABackend(name), "deepep_mode": DeepEPMode.AUTO, "tbo_enabled": True}
    with settings(rows_of_rank), get_flags().moe.override(**flags), get_parallel().override(tp_group=group):
        yield


def made(ranks, top_k=TOP_K):
    """A layer's dispatcher, by SGLang's choice."""
    import torch
    from sglang.srt.layers.moe import MoeRunnerConfig
    from sglang.srt.layers.moe.fused_moe_triton import layer

    config = MoeRunnerConfig(num_experts=EXPERTS_OF_RANK * ranks, num_local_experts=EXPERTS_OF_RANK, top_k=top_k,
                             hidden_size=HIDDEN, params_dtype=torch.bfloat16)
    return layer.create_moe_dispatcher(config, quant_method=None)


def native_part(ranks):
    """tokenyard's dispatcher."""
    import torch.distributed as dist
    from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.runtime_context import get_resources
    from tokenyard.integrations import sglang as native

    rank = dist.get_rank()
    native.install(timeout=30.0)
    for scales in (None, "fp32", "ue8m0"):
        rows_of_rank = 160 if scales == "fp32" else 128
        with deep_gemm(scales == "ue8m0"), backend("deepep", rows_of_rank):
            dispatcher, next_layer = made(ranks), made(ranks)
            assert isinstance(dispatcher, MaybeTboDeepEPDispatcher)
            assert isinstance(dispatcher._inners[0], BaseDispatcher)
            assert [type(one).__name__ for one in dispatcher._inners] == 2 * ["TokenyardDispatcher"]
            for one in (dispatcher, next_layer):
                one.set_quant_config({"dispatcher_output_dtype": "fp8" if scales else "bf16"})
            exercise(MicroBatch(dispatcher, 0), MicroBatch(dispatcher, 1), ranks, rank, scales, rows_of_rank)
            before = len(get_resources().buffers["tokenyard"]["exchanges"])
            for seed, prefill in enumerate((True, False)):
                layer(next_layer, Batch(ranks, [7] * ranks, seed, scales), rank, prefill, rows_of_rank)
                through_runner(next_layer, Batch(ranks, [7] * ranks, seed, scales), rank, prefill)
            assert len(get_resources().buffers["tokenyard"]["exchanges"]) == before
    with deep_gemm(False), backend("deepep"):
        unaligned(made(ranks), ranks, rank)
        own_rules(made(ranks), ranks, rank)
        for prefill in (True, False):
            with mode(prefill):
                refusals(made(ranks), ranks, rank, prefill)
                unusable_routing(made(ranks), ranks, rank, prefill)
                # Decode on a GPU has no wait on the host.
                if ranks == 2 and (prefill or DEVICE == "cpu"):
                    interrupted(made(ranks), ranks, rank, prefill)
        contexts_of_others(ranks, rank)
    choices(native, ranks)


def through_runner(dispatcher, batch, rank, prefill):
    """The steps of SGLang's runner before and after DeepGEMM. Those of prefill are kernels of GPUs."""
    from sglang.srt.layers.moe.moe_runner import deep_gemm as runner
    from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLDispatchOutput

    if prefill:
        return
    with mode(prefill):
        got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=batch.topk(rank))
        state = {}
        given = PermuteMethodPool.get_pre_permute(got.format.value, "deep_gemm")(got, None, None, state)
        assert given.use_masked_gemm and given.expected_m == got.expected_m
        seen = DeepEPLLDispatchOutput(given.hidden_states, given.hidden_states_scale, None, None, given.masked_m, 0)
        outputs = runner.DeepGemmRunnerOutput(batch.outputs(rank, seen).hidden_states)
        back = PermuteMethodPool.get_post_permute("deep_gemm", got.format.value)(outputs, None, None, state)
        batch.check_sums(rank, dispatcher.combine(combine_input=back))


def own_rules(dispatcher, ranks, rank):
    """Hooks, SGLang's record of the distribution, idle ranks, and what is refused."""
    import torch
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPBuffer, DeepEPDispatchMode
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.runtime_context import get_resources

    # SGLang's graphs go from prefill to decode.
    DeepEPBuffer._state().dispatch_mode = DeepEPDispatchMode.NORMAL
    DeepEPBuffer.set_dispatch_mode_as_low_latency()
    dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})
    batch = Batch(ranks, [0] + [9 + r for r in range(1, ranks)], 3)
    calls, record = [], types.SimpleNamespace(
        recording=True, on_deepep_dispatch_normal=lambda counts, **of: calls.append((counts, of)),
        on_deepep_dispatch_low_latency=lambda counts: calls.append(counts),
    )
    handles = dispatcher.register_deepep_dispatch_hook(lambda inner: calls.append(inner))
    resources, before = get_resources(), get_resources().expert_distribution_recorder
    resources.expert_distribution_recorder = record
    # A rank without tokens may have fewer columns where shared experts are among the choices.
    topk = batch.topk(rank)
    if rank == 0:
        topk = StandardTopKOutput(topk.topk_weights[:, 1:], topk.topk_ids[:, 1:], None)
    for prefill in (True, False):
        with mode(prefill):
            got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=topk)
            check(batch, rank, got, prefill)
            batch.check_sums(rank, dispatcher.combine(combine_input=batch.outputs(rank, got)))
    resources.expert_distribution_recorder = before
    for handle in handles:
        handle.remove()
    assert len(calls) == 4 and calls[0] is calls[2] is dispatcher._inners[0] and calls[3] is got.masked_m
    counts, of = calls[1]
    ids = batch.ids[rank]
    assert of["num_tokens_per_expert"].tolist() == [int((ids == e).sum()) for e in range(batch.experts)]
    owners = ids.where(ids >= 0, -EXPERTS_OF_RANK) // EXPERTS_OF_RANK
    assert of["num_tokens_per_rank"].tolist() == [int((owners == r).any(1).sum()) for r in range(ranks)]
    assert of["num_tokens_per_rdma_rank"] is None and len(counts) == EXPERTS_OF_RANK

    for refused in ({"dispatcher_output_dtype": "nvfp4"}, {"input_global_scale": torch.ones(())}):
        with pytest.raises(NotImplementedError, match="output_dtype is nvfp4: expected bf16 or fp8, got nvfp4"):
            dispatcher.set_quant_config(refused)
    dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})
    with mode(False):
        with pytest.raises(RuntimeError, match="dispatch_b is out of order"):
            dispatcher.dispatch_b()
        with pytest.raises(RuntimeError, match="combine_b is out of order"):
            dispatcher.combine_b()
        with pytest.raises(ValueError, match="hidden_states has 129 tokens: expected at most the 128 of SGLANG_DEEPEP"):
            many = Batch(ranks, [129] * ranks, 4)
            dispatcher.dispatch(hidden_states=many.x[rank], topk_output=many.topk(rank))
        with pytest.raises(ValueError, match=f"expected \\[tokens, {HIDDEN}\\], got \\[9, 8\\]"):
            dispatcher.dispatch_a(hidden_states=torch.zeros(9, 8), topk_output=batch.topk(rank))
        got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=topk)
        dispatcher.set_overlap_args(types.SimpleNamespace(overlap=True, signal=None), {})
        with pytest.raises(NotImplementedError, match="combine overlaps the down GEMM"):
            dispatcher.combine(combine_input=batch.outputs(rank, got))
        dispatcher.clear_overlap_args()
        # SGLang's single-batch overlap: combine is sent on its stream, after its event, and received on the current one.
        got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=batch.topk(rank))
        outputs = batch.outputs(rank, got)
        with another_stream("down GEMM") as (stream, event):
            overlap = types.SimpleNamespace(overlap=False, signal=None, stream=stream, wait_event=event)
            dispatcher.set_overlap_args(overlap, {"compute_num_sms": 1})
            batch.check_sums(rank, dispatcher.combine(combine_input=outputs))
        dispatcher.clear_overlap_args()
    # A dispatch that was never combined is no trouble.
    layer(dispatcher, batch, rank, True, 128)
    while_kernels_are_compiled(dispatcher, batch, rank)


def while_kernels_are_compiled(dispatcher, batch, rank):
    """SGLang's barriers, for as long as a rank compiles: before dispatch and, as experts do it, before combine."""
    import torch.distributed as dist
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_parallel

    calls = []
    group = types.SimpleNamespace(device_group=dist.group.WORLD, barrier=lambda: calls.append(dist.barrier()))
    with envs.SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE.override(True), get_parallel().override(tp_group=group):
        for prefill in (True, False):
            with mode(prefill):
                got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=batch.topk(rank))
                assert len(calls) == 1
                dispatcher.combine(combine_input=batch.outputs(rank, got))
                assert len(calls) == 2
            calls.clear()


def in_bf16(dispatcher):
    dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})
    return dispatcher


def refusals(dispatcher, ranks, rank, prefill):
    """What is refused names the argument and changes nothing; calls out of order name the one that is due."""
    import torch
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    in_bf16(dispatcher)
    batch = Batch(ranks, [9 + r for r in range(ranks)], 6)
    x, ids, weights = batch.x[rank], batch.ids[rank], batch.weights[rank]
    first = ids[:, 0]
    for kind, message, given in (
        (TypeError, "hidden_states is of another dtype: .*, got torch.float32", (x.float(), weights, ids)),
        (ValueError, "hidden_states is on meta: expected a tensor on cpu or cuda", (x.to("meta"), weights, ids)),
        (ValueError, "topk_weights is on meta", (x, weights.to("meta"), ids)), (ValueError, "topk_ids is on meta", (x, weights, ids.to("meta"))),
        (TypeError, "topk_output: expected one with topk_ids and topk_weights, got a object", (x, None, None)),
        (ValueError, r"topk_ids: expected int32 or int64 .*, got torch.int64 \[", (x, weights[:, 0], first)),
        (ValueError, "topk_ids: expected int32 or int64 .*, got torch.float32", (x, weights, weights)),
        (ValueError, "topk_ids: expected int32 or int64 .*, got torch.bool", (x, weights, ids > 0)),
        (ValueError, r"topk_weights: .*, got torch.float32 \[\d+, 2\]", (x, weights[:, :2], ids)),
        (RuntimeError, "dispatch has no gradient", (x.clone().requires_grad_(), weights, ids)),
        (RuntimeError, "dispatch has no gradient", (x, weights.clone().requires_grad_(), ids)),
    ):
        topk = object() if given[2] is None else StandardTopKOutput(given[1], given[2], None)
        with pytest.raises(kind, match=message):
            dispatcher.dispatch_a(hidden_states=given[0], topk_output=topk)
    got = dispatcher.dispatch(hidden_states=x, topk_output=batch.topk(rank))
    with pytest.raises(RuntimeError, match="dispatch_b is out of order: expected combine_a or .*, got dispatch_b"):
        dispatcher.dispatch_b()
    outputs = batch.outputs(rank, got)
    rows, _ids, weights = outputs
    for kind, message, given in (
        (TypeError, "hidden_states of combine_input .*, got torch.float64", (rows.double(), ids, weights)),
        (TypeError, "hidden_states of combine_input .*, got a NoneType", (None, ids, weights)),
        (RuntimeError, "combine has no gradient", (rows.clone().requires_grad_(), ids, weights)),
        (ValueError, "rows has the shape", (rows[..., : HIDDEN // 2].contiguous(), ids, weights)),
        # Weights that are cut, or are others' or none, would make other sums.
        (ValueError, r"weights of combine_input: .*, got torch.float32 \[\d+, 8\]", (rows, ids, weights.repeat(1, 2))),
        (ValueError, r"weights of combine_input: .*, got torch.float32 \[\d+, 2\]", (rows, ids, weights[:, :2])),
        (ValueError, "weights of combine_input: .*, got a NoneType", (rows, ids, None)),
        (ValueError, "weights of combine_input: .*, got a list", (rows, ids, [1.0])),
    ):
        if "weights of" not in message or not prefill:
            with pytest.raises(kind, match=message):
                dispatcher.combine_a(combine_input=given)
    dispatcher.combine_a(combine_input=outputs)
    with pytest.raises(RuntimeError, match="dispatch_a is out of order: expected combine_b .*, got dispatch_a"):
        dispatcher.dispatch_a(hidden_states=x, topk_output=batch.topk(rank))
    batch.check_sums(rank, dispatcher.combine_b())


def unusable_routing(dispatcher, ranks, rank, prefill):
    """A rank whose tokens name experts that the model has not takes part without them, also where another rank has
    more tokens than the context has room for, and on a GPU, where the receiving half raises the error. All others'
    sums are right, and its next ones."""
    import torch
    import tokenyard
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    in_bf16(dispatcher)
    received = tokenyard.AllToAll.dispatch_recv
    for seed, more in enumerate((0, 600 * prefill, 0)):
        batch = Batch(ranks, [9 + more, *(9 + r for r in range(1, ranks))], seed)
        wrong = batch.ids[-1].clone()
        batch.ids[-1][:] = -1
        # Those of the further experts that contexts have for themselves among them.
        wrong[:, 0] = batch.experts + seed
        topk = batch.topk(rank)
        if rank != ranks - 1:
            got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=topk)
        else:
            if seed == 2:
                # As on a GPU: sent without an error, which comes in place of the receiving half.
                found = [tokenyard.RoutingError("of the sending half")]
                found[0].fatal = False
                tokenyard.AllToAll.dispatch_recv = lambda *given: raising(found) if found else received(*given)
                wrong = batch.ids[-1]
            topk = StandardTopKOutput(batch.weights[-1], wrong, None)
            message = "of the sending half" if seed == 2 else f"token 0 names expert {batch.experts + seed},"
            with pytest.raises(tokenyard.RoutingError, match=message) as raised:
                got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=topk)
                # Decode on a GPU does not wait: the next call tells of it, and is to be made again.
                assert DEVICE == "cuda" and not prefill
                settle(DEVICE)
                dispatcher.combine_a(combine_input=batch.outputs(rank, got))
            tokenyard.AllToAll.dispatch_recv = received
            if DEVICE == "cpu" or prefill or seed == 2:
                got = raised.value.dispatched
            if not prefill:
                assert torch.equal(got.topk_ids, wrong)
                got = got._replace(topk_ids=batch.ids[-1])
        check(batch, rank, got, prefill)
        batch.check_sums(rank, dispatcher.combine(combine_input=batch.outputs(rank, got)))


def raising(errors):
    raise errors.pop()


def interrupted(dispatcher, ranks, rank, prefill):
    """Ctrl-C in a wait for another rank: what was sent is received later, and combined."""
    import torch.distributed as dist

    def interrupt(number, frame):
        raise KeyboardInterrupt

    in_bf16(dispatcher)
    batch = Batch(ranks, [9 + r for r in range(ranks)], 8)
    layer(dispatcher, batch, rank, prefill, 128)
    dist.barrier()
    if rank > 0:
        # Until rank 0 was interrupted.
        dist.barrier()
        got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=batch.topk(rank))
        check(batch, rank, got, prefill)
    else:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt) as raised:
            dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=batch.topk(rank))
        signal.signal(signal.SIGALRM, before)
        dist.barrier()
        got = getattr(raised.value, "dispatched", None) or dispatcher.dispatch_b()
        # Receiving goes on behind an exception.
        end = time.monotonic() + 20
        while True:
            try:
                check(batch, rank, got, prefill)
                break
            except AssertionError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
    batch.check_sums(rank, dispatcher.combine(combine_input=batch.outputs(rank, got)))


def contexts_of_others(ranks, rank):
    """A layer with other choices leaves the context of decode, which graphs may have captured. A larger context of
    prefill is made once the smaller one has gone."""
    from sglang.srt.runtime_context import get_resources
    from tokenyard import _hosts
    from tokenyard.integrations import sglang as native

    get_resources().buffers.pop("tokenyard", None)
    contexts, alive, times, kept = [], [], [], _hosts.AllToAll

    def noted(*given, timeout, **named):
        alive.append([context() is not None for context in contexts])
        ep = kept(*given, timeout=timeout, **named)
        contexts.append(weakref.ref(ep))
        times.append(timeout)
        return ep

    _hosts.AllToAll = noted
    two, four = in_bf16(made(ranks, top_k=2)), in_bf16(made(ranks))
    with mode(False):
        for dispatcher, choices in ((two, 2), (four, 4), (two, 2)):
            batch = Batch(ranks, [9] * ranks, choices)
            batch.ids, batch.weights = ([one[:, :choices] for one in of] for of in (batch.ids, batch.weights))
            got = dispatcher.dispatch(hidden_states=batch.x[rank], topk_output=batch.topk(rank))
            dispatcher.combine(combine_input=batch.outputs(rank, got))
    assert alive == [[], [True]] and all(context() is not None for context in contexts)
    del contexts[:], alive[:]
    for tokens in (9, 600):
        layer(four, Batch(ranks, [tokens] + [9] * (ranks - 1), 1), rank, True, 128)
    # Those of layers that wait for longer are others.
    native.install(timeout=40.0)
    layer(in_bf16(made(ranks)), Batch(ranks, [9] * ranks, 1), rank, True, 128)
    _hosts.AllToAll = kept
    assert alive[:2] == [[], [False]] and times == [30.0] * 4 + [40.0]


def choices(native, ranks):
    """Which backends get which dispatcher, and versions that do not fit."""
    from sglang.srt.layers.moe import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.fused_moe_triton import layer

    with backend("customized"), pytest.raises(NotImplementedError, match="Unsupported a2a backend"):
        made(ranks)
    native.install("customized")
    with backend("customized"):
        assert type(made(ranks)).__name__ == "TokenyardDispatchers"
    with backend("deepep"):
        assert type(made(ranks)._inners[0]) is deepep.DeepEPDispatcher
    assert not hasattr(layer.create_moe_dispatcher.before_tokenyard, "before_tokenyard")
    with pytest.raises(ValueError, match="backend is 'none at all': expected one of"):
        native.install("none at all")
    with pytest.raises(ValueError, match="timeout is 0"):
        native.install(timeout=0)
    with backend("customized"), pytest.raises(ValueError, match=f"is 7: expected a multiple of the {ranks} ranks"):
        config = types.SimpleNamespace(hidden_size=HIDDEN, num_experts=7, top_k=2, runner_backend=None)
        layer.create_moe_dispatcher(config, None)
    other = {"DeepEPPDispatchHooks": None, "DeepEPLLDispatchOutput": deepep.DeepEPNormalDispatchOutput}
    for name, stand_in in other.items():
        kept = getattr(deepep, name)
        delattr(deepep, name) if stand_in is None else setattr(deepep, name, stand_in)
        native._engine.cache_clear()
        with pytest.raises(ImportError, match="sglang has .*expected a version as 0.5.23, got "):
            native.install()
        setattr(deepep, name, kept)
    fields = MoeRunnerConfig.__dataclass_fields__
    kept = fields.pop("top_k")
    with pytest.raises(ImportError, match="sglang has no MoeRunnerConfig.top_k: expected a version as"):
        native.install()
    fields["top_k"] = kept


def plugin(folder):
    """As SGLang's processes find it, by the entry points of packages that are installed."""
    import tomllib

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    info = pathlib.Path(folder) / "of_tokenyard-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-tokenyard\nVersion: 0\n")
    entries = "".join(f"{name} = {value}\n" for name, value in wanted.items())
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entries}")
    from sglang.srt import plugins
    from sglang.srt.layers.moe.fused_moe_triton import layer

    for asked, installed in ((None, False), ("native", True)):
        plugins._plugins_loaded = False
        os.environ.pop("TOKENYARD_SGLANG", None)
        os.environ.update({"TOKENYARD_SGLANG": asked} if asked else {})
        plugins.load_plugins()
        assert hasattr(layer.create_moe_dispatcher, "before_tokenyard") == installed, asked
    # SGLang logs exceptions of plugins and goes on.
    plugins._plugins_loaded = False
    os.environ["TOKENYARD_SGLANG"] = "deep_ep"
    with pytest.raises(SystemExit, match="TOKENYARD_SGLANG is 'deep_ep': expected 'native' or nothing, got 'deep_ep'"):
        plugins.load_plugins()
    plugins._plugins_loaded = False
    os.environ["TOKENYARD_SGLANG"] = "native"
    from tokenyard.integrations import sglang as native

    native._engine.cache_clear()
    del layer.MaybeTboDeepEPDispatcher
    with pytest.raises(SystemExit, match="TOKENYARD_SGLANG is set: sglang has no .*layer.MaybeTboDeepEPDispatcher"):
        plugins.load_plugins()
    plugins._plugins_loaded = False
    native.install = lambda: raising([RuntimeError("no driver")])
    with pytest.raises(SystemExit, match="TOKENYARD_SGLANG is set: no driver"):
        plugins.load_plugins()


def guard():
    """What SGLang's own dispatchers say without `deep_ep`."""
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.utils import DeepEPMode

    assert not deepep.use_deepep
    try:
        deepep.DeepEPDispatcher(group=None, router_topk=TOP_K, deepep_mode=DeepEPMode.NORMAL)
    except ImportError as missing:
        assert "two copies of a library" in str(missing) and isinstance(missing.__cause__, AssertionError)
    else:
        sys.exit("a dispatcher without deep_ep")


def run_rank(ranks, rank, port):
    import torch.distributed as dist

    size = str(ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_PORT=port)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    on_its_device(rank)
    deep_ep_part(ranks)
    native_part(ranks)
    dist.barrier()
    print("right", flush=True)
    dist.destroy_process_group()


def main(part, *arguments):
    sys.path.append(str(SGLANG))
    with without_gpus():
        stand_in_for_sglangs_packages()
        if part == "without_deep_ep":
            sys.path.insert(0, *arguments)
            guard()
            plugin(*arguments)
            print("right", flush=True)
            return
    import tokenyard

    tokenyard.install_as("deep_ep")
    from tokenyard import deep_ep

    deep_ep.Buffer.timeout_seconds = 30.0
    with without_gpus():
        on_the_cpu()
    for ranks in arguments:
        fork_ranks(int(ranks), functools.partial(run_rank, int(ranks), port=free_port()), DEADLINE_SECONDS / 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
