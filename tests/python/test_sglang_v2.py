"""SGLang's dispatcher for DeepEP's version 2 over `tokenyard.install_as("deep_ep")`, against a dense reference.

SGLang's class is unmodified; `on_the_cpu` has what stands in for GPUs. Ranks are processes, on CPU tensors, with a gloo
group. SGLang is in a folder of its own, `TOKENYARD_SGLANG_FOLDER` or target/engines/sglang, which these ranks alone have
in sys.path. As a program, this file is the ranks.
"""

import functools
import os
import subprocess
import sys

import pytest

from engine_rig import HIDDEN, LOCAL, SGLANG, TOP_K, Lines, fork_ranks, skip_without_sglang
from stand_ins import stand_in_for_sglangs_packages
from rig import free_port

ALIGNMENT, MOST = 128, 128
DEADLINE_SECONDS = 100.0

skip_without_sglang()


@pytest.mark.parametrize("ranks", [2, 4])
def test_sglang(ranks):
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-W", "ignore", __file__, str(ranks)], env=env, capture_output=True, text=True,
                         timeout=2 * DEADLINE_SECONDS)
    assert ran.returncode == 0 and ran.stdout.count("right") == ranks, ran.stdout + ran.stderr


# The program


def on_the_cpu():
    """Stand-ins for a kernel of Triton, and for settings, which SGLang has by its command line alone."""
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2
    from sglang.srt.runtime_context import get_context

    deepep_v2.sglang_per_token_group_quant_fp8 = quantised_rows
    get_context().override_server_args(model_path="dummy").install()


def quantised_rows(x, block, column_major_scales, scale_tma_aligned, scale_ue8m0):
    """fp8 rows and their scales, a power of two for each block, in the order that SGLang's kernel has."""
    import torch

    blocks = x.float().view(x.shape[0], x.shape[1] // block, block)
    exponents = torch.ceil(torch.log2(blocks.abs().amax(2).clamp(min=1e-4) / 448))
    rows = (blocks * torch.exp2(-exponents)[..., None]).to(torch.float8_e4m3fn).view(x.shape)
    words = torch.exp2(exponents)
    if scale_ue8m0:
        words = (exponents + 127).to(torch.uint8).view(torch.int32)
    return rows, words.T.contiguous().T if column_major_scales else words


def values(rows, words, block):
    """What rows are as fp32."""
    import torch

    if words is None:
        return rows.float()
    if words.dtype == torch.int32:
        words = torch.exp2(words.contiguous().view(torch.uint8).float() - 127)
    return rows.float() * words.repeat_interleave(block, 1)


class Batch(Lines):
    """Tokens in SGLang's formats."""

    def __init__(self, counts, seed, ue8m0, block):
        super().__init__(
            counts, seed, lambda x: (x, None) if block is None else quantised_rows(x, block, ue8m0, ue8m0, ue8m0)
        )
        self.block = block

    def expanded(self, rank, padded):
        """(expert, source, token, choice) of each row, None in padding."""
        rows = []
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            rows += [(expert, s, *place) for s, ids in enumerate(self.ids) for place in (ids == expert).nonzero().tolist()]
            rows += [None] * (-len(rows) % ALIGNMENT)
        return rows

    def received(self, rank):
        """(source, token) of each row."""
        own = range(rank * LOCAL, (rank + 1) * LOCAL)
        return [(s, t) for s, ids in enumerate(self.ids) for t, of in enumerate(ids.tolist()) if any(e in own for e in of)]


def outputs(batch, rank, got):
    """Each element of a dispatch, and what SGLang's runners make of it: rows with their weights."""
    import torch
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput, DeepEPv2DispatchOutput

    assert type(got) is DeepEPv2DispatchOutput and got.topk_weights.dtype == torch.float32
    places = batch.expanded(rank, True) if got.is_expanded else [(None, *place) for place in batch.received(rank)]
    used = [n for n, place in enumerate(places) if place is not None]
    assert len(got.hidden_states) >= len(places)
    back = torch.full(got.hidden_states.shape, float("nan"), dtype=torch.bfloat16)
    for which, found in enumerate((got.hidden_states, got.hidden_states_scale)):
        if found is not None and used:
            wanted = torch.stack([batch.sent[places[n][1]][which][places[n][2]] for n in used])
            assert torch.equal(found[used].contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
    assert (got.hidden_states_scale is None) == (batch.block is None)
    if used:
        scales = None if batch.block is None else got.hidden_states_scale[used]
        rows = values(got.hidden_states[used], scales, batch.block)
    if got.is_expanded:
        assert got.topk_ids is None and got.topk_weights.shape == (len(got.hidden_states),)
        ends, last = [], 0
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            last += -last % ALIGNMENT + sum(int((ids == expert).sum()) for ids in batch.ids)
            ends.append(last)
        assert got.psum_num_recv_tokens_per_expert.tolist() == ends
        for n, at in zip(used, range(len(used))):
            expert, s, t, k = places[n]
            assert got.topk_weights[n] == batch.weights[s][t, k]
            back[n] = (got.topk_weights[n] * batch.expert(expert, rows[at])).bfloat16()
    else:
        assert len(got.hidden_states) == len(places)
        for n, (_, s, t) in enumerate(places):
            own = [e - rank * LOCAL if e // LOCAL == rank and e >= 0 else -1 for e in batch.ids[s][t].tolist()]
            assert got.topk_ids[n].tolist() == own
            choices = [(e, w) for e, w in zip(own, got.topk_weights[n]) if e >= 0]
            back[n] = sum(w * batch.expert(rank * LOCAL + e, rows[n]) for e, w in choices).bfloat16()
    return DeepEPv2CombineInput(back, None)


def exercise(ranks):
    """Prefill and decode in alternation, in each format."""
    import torch
    import torch.distributed as dist
    from sglang.srt.environ import envs
    from sglang.srt.layers import deep_gemm_wrapper as gemm
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2Buffer, DeepEPv2Dispatcher
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from tokenyard.deep_ep import ElasticBuffer

    rank, seed = dist.get_rank(), 0
    for ue8m0, block in ((False, None), (False, 128), (True, 128), (True, 32), (False, 32)):
        gemm.DEEPGEMM_SCALE_UE8M0 = gemm.DEEPGEMM_NEED_TMA_ALIGNED_SCALES = ue8m0
        for expand in (None, ue8m0):
            # The default is to expand unless scales are UE8M0.
            with envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.override(expand):
                dispatcher = DeepEPv2Dispatcher(
                    group=dist.group.WORLD, router_topk=TOP_K, num_experts=LOCAL * ranks, num_local_experts=LOCAL,
                    hidden_size=HIDDEN, params_dtype=torch.bfloat16, use_fp8_dispatch=block is not None,
                    activation_scale_block_size=block or 128,
                )
                dispatcher.prebuild()
            buffer = DeepEPv2Buffer._state().buffer
            assert type(buffer) is ElasticBuffer and buffer.num_ranks == ranks and buffer.num_max_tokens_per_rank == MOST
            for prefill, counts in (
                (True, [9 + 20 * r for r in range(ranks)]), (False, [3] * ranks), (False, [0] + [7] * (ranks - 1)),
                (True, [5] * (ranks - 1) + [0]), (True, [MOST] * ranks), (False, [MOST] + [0] * (ranks - 1)),
            ):
                seed += 1
                batch = Batch(counts, seed, ue8m0, block)
                set_is_extend_in_batch(prefill)
                if prefill:
                    # An idle rank sends a token, of which combine gives nothing back.
                    batch_seen = with_dummies(batch)
                else:
                    batch_seen = batch
                router = StandardTopKOutput(batch.weights[rank], batch.ids[rank].int(), None)
                got = dispatcher.dispatch(batch.x[rank], router)
                assert got.use_masked_gemm is not prefill
                batch.check_sums(rank, dispatcher.combine(outputs(batch_seen, rank, got)), values(*batch.sent[rank], batch.block))


def with_dummies(batch):
    """The batch as it is sent in prefill: SGLang gives ranks without tokens one of zeros, to the first experts, of weight 0."""
    import copy

    import torch

    seen = copy.copy(batch)
    for name in ("ids", "weights", "sent"):
        setattr(seen, name, list(getattr(batch, name)))
    for rank, count in enumerate(batch.counts):
        if count == 0:
            seen.ids[rank], seen.weights[rank] = torch.arange(TOP_K)[None], torch.zeros(1, TOP_K)
            x = torch.zeros(1, HIDDEN).bfloat16()
            ue8m0 = batch.sent[rank][1] is not None and batch.sent[rank][1].dtype == torch.int32
            seen.sent[rank] = (x, None) if batch.block is None else quantised_rows(x, batch.block, ue8m0, ue8m0, ue8m0)
    return seen


def run_rank(ranks, rank):
    import datetime

    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    exercise(ranks)
    dist.barrier()
    print("right", flush=True)
    dist.destroy_process_group()


def main(ranks):
    sys.path.append(str(SGLANG))
    stand_in_for_sglangs_packages()
    import tokenyard

    tokenyard.install_as("deep_ep")
    on_the_cpu()
    fork_ranks(ranks, functools.partial(run_rank, ranks), DEADLINE_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]))
