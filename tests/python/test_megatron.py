"""Megatron-Core's flex dispatcher over `tokenyard.install_as("deep_ep")`, against its own all-to-all dispatcher.

Megatron-Core is unmodified. What it asks of torch.cuda on its way, a machine without GPUs lacks; `on_the_cpu` has the
list of stand-ins. Ranks are processes, on CPU tensors, with gloo groups. As a program, this file is those ranks:
`test_megatron.py PART RANKS BACKEND`.
"""

import contextlib
import datetime
import functools
import importlib.util
import os
import subprocess
import sys
import types

import pytest

from engine_rig import fork_ranks
from rig import free_port

EXPERTS_OF_RANK, TOP_K, HIDDEN = 4, 3, 64
DEADLINE_SECONDS = 150.0


def importable():
    try:
        return importlib.util.find_spec("torch") and importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return False


if os.environ.get("TOKENYARD_STRICT") != "1" and not importable():
    pytest.skip("could not import 'megatron.core': install megatron-core", allow_module_level=True)


@pytest.mark.parametrize("backend, part, ranks", [
    ("deepep", "dispatcher", 2), ("deepep", "dispatcher", 4), ("deepep", "layers", 2), ("deepep", "layers", 4),
    ("hybridep", "dispatcher", 2), ("hybridep", "dispatcher", 4), ("hybridep", "layers", 2),
])
def test_megatron(backend, part, ranks):
    env = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                        # Megatron compiles reshapes of the flex dispatcher, for which CPUs need a C++ compiler.
                        "TORCHDYNAMO_DISABLE": "1"}
    ran = subprocess.run([sys.executable, "-W", "ignore", __file__, part, str(ranks), backend], env=env,
                         capture_output=True, text=True, timeout=DEADLINE_SECONDS + 60)
    assert ran.returncode == 0 and ran.stdout.count("right") == ranks, ran.stdout + ran.stderr


# The program


def on_the_cpu():
    """Stand-ins, by name, for what needs a GPU. The flex dispatcher calls none of them, but for the last.

    - torch.cuda.current_device: the router, the collectives and the all-to-all put tensors there.
    - torch.cuda.Stream, current_stream, stream: the all-to-all dispatcher copies its counts on a stream of its own.
    - maybe_move_tensor_to_cpu of the all-to-all dispatcher: makes numbers for torch of what is on a GPU alone.
    - te_general_gemm of moe_utils: 0.16 leaves it undefined without Transformer Engine.
    - torch.zeros: with HybridEP 0.19 makes a flag on "cuda"."""
    import torch
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    event = types.SimpleNamespace(synchronize=lambda: None)
    the_stream = types.SimpleNamespace(record_event=lambda: event)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.current_stream = lambda: the_stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    zeros = torch.zeros
    torch.zeros = lambda *size, device=None, **how: zeros(*size, device=None if device == "cuda" else device, **how)
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def groups_of(ranks, tensor_parallel=1):
    """Megatron's process groups: `ranks` of expert parallelism times `tensor_parallel`."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    # The module has one HybridEPBuffer, whose group may be another one.
    fused_a2a.reset_hybrid_ep_buffer()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel, expert_model_parallel_size=ranks // tensor_parallel,
        expert_tensor_parallel_size=tensor_parallel, create_gloo_process_groups=False,
    )
    return get_default_pg_collection()


def config_of(kind, ranks, tensor_parallel=1, **how):
    """A configuration of two layers with a dispatcher, "alltoall", or the flex one's "deepep" or "hybridep"."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    expert_parallel, flex = ranks // tensor_parallel, kind != "alltoall"
    return TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=96, moe_ffn_hidden_size=96,
        num_moe_experts=EXPERTS_OF_RANK * expert_parallel, moe_router_topk=TOP_K, moe_router_dtype="fp32",
        moe_token_dispatcher_type="flex" if flex else kind, moe_flex_dispatcher_backend=kind if flex else "deepep",
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=tensor_parallel, expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=tensor_parallel, sequence_parallel=tensor_parallel > 1, use_cpu_initialization=True,
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False, **how,
    )


class Tokens:
    """A rank's tokens: rows, routing, probabilities (0 where not routed), and the gradient of the outputs."""

    def __init__(self, count, experts, named, dtype, seed):
        """`named(token)`: the TOP_K experts of a token."""
        import torch

        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 1, HIDDEN, generator=draw).to(dtype)
        self.gradient = torch.randn(count, 1, HIDDEN, generator=draw).to(dtype)
        self.map = torch.zeros(count, experts, dtype=torch.bool)
        for token in range(count):
            self.map[token, named(token)] = True
        self.probs = (0.1 + torch.rand(count, experts, generator=draw)) * self.map

    def drop(self, moe_expert_capacity_factor, moe_pad_expert_input_to_capacity=False):
        """Megatron's dropping of what is beyond the experts' capacity, and its filling of what is below."""
        from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

        before = self.map.sum()
        self.probs, self.map = apply_router_token_dropping(
            self.probs, self.map, TOP_K, moe_expert_capacity_factor, pad_to_capacity=moe_pad_expert_input_to_capacity
        )
        assert 0 < self.map.sum() < before or (moe_pad_expert_input_to_capacity and self.map.sum(1).max() > TOP_K)


def passed(dispatcher, tokens, vectors):
    """Forward and backward through a dispatcher, between whose halves expert e multiplies its rows by `vectors[e]`, and
    by the probabilities: the sums, and the gradients of rows and of probabilities."""
    import torch

    x, probs = tokens.x.clone().requires_grad_(), tokens.probs.clone().requires_grad_()
    sent, weights = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, tokens.map, probs))
    rows, counts, weights = dispatcher.dispatch_postprocess(sent, weights)
    further = rows.shape[0] - int(counts.sum())
    assert further == 0 or (further > 0 and dispatcher.config.moe_expert_rank_capacity_factor is not None)
    assert rows.shape[0] == weights.shape[0] and (rows[int(counts.sum()) :] == 0).all()
    of_rows = vectors[dispatcher.local_expert_indices].repeat_interleave(counts, 0)
    of_rows = torch.nn.functional.pad(of_rows, (0, 0, 0, further))
    outputs = (rows.float() * of_rows * weights[:, None]).to(rows.dtype)
    sums = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(outputs)))
    sums.backward(tokens.gradient)
    return sums.detach(), x.grad, probs.grad


def close(what, found, wanted, magnitude, additions, unit):
    """Two sums of the same terms in any order: each is off by at most gamma = n u / (1 - n u) of the terms' magnitudes,
    where n is how often a term is rounded, and u the unit of rounding."""
    gamma = additions * unit / (1 - additions * unit)
    off = (found.double() - wanted.double()).abs() - 2 * gamma * magnitude
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert off.numel() == 0 or off.max() <= 0, f"{what} is off by {off.max():.3g} more than rounding explains"


def compare(case, backend, tokens, groups, config):
    """The flex dispatcher against the all-to-all. `config(kind)`: their configurations."""
    import torch
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher

    parts = groups.expt_tp.size()
    # Of each expert, the vectors of its parts, of which tensor parallelism adds up the outputs.
    vectors = torch.randn(parts, config(backend).num_moe_experts, HIDDEN, generator=torch.Generator().manual_seed(7))
    mine = vectors[groups.expt_tp.rank()]
    first = groups.ep.rank() * EXPERTS_OF_RANK
    local = list(range(first, first + EXPERTS_OF_RANK))
    theirs = passed(MoEAlltoAllTokenDispatcher(EXPERTS_OF_RANK, local, config("alltoall"), groups), tokens, mine)
    magnitudes = vectors.abs().sum(0).double()
    rows, gradient = tokens.x[:, 0].double().abs(), tokens.gradient[:, 0].double().abs()
    weighted = tokens.probs.double() @ magnitudes
    # One rounding for each addition, and one of the terms.
    terms, unit = TOP_K * parts, {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[tokens.x.dtype]
    dispatcher = MoEFlexTokenDispatcher(EXPERTS_OF_RANK, local, config(backend), groups)
    # Twice, as the second calls find what the first have left.
    for _ in range(2):
        ours = passed(dispatcher, tokens, mine)
        close(f"{case}: the sum", ours[0], theirs[0], (rows * weighted)[:, None], terms, unit)
        close(f"{case}: the rows' gradient", ours[1], theirs[1], (gradient * weighted)[:, None], terms, unit)
        # These are sums over columns, in fp32.
        of_probs = ((rows * gradient) @ magnitudes.T) * tokens.map
        close(f"{case}: the probabilities' gradient", ours[2], theirs[2], of_probs, HIDDEN * parts, 2.0**-24)
        assert not tokens.map.any() or (ours[0].abs().max() > 0.1 and ours[2].abs().max() > 0.1)


def dispatcher_part(ranks, backend):
    """The dispatcher alone."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    experts = EXPERTS_OF_RANK * ranks
    # Each rank's tokens, and of how many experts, the first ones, they choose. More than 128 need a larger context.
    cases = {
        "all experts": (24 + 5 * rank, experts),
        "a rank that gets nothing": (24, experts - EXPERTS_OF_RANK),
        "a rank that gets all": (24, EXPERTS_OF_RANK),
        "a rank without tokens": (24 * (rank > 0), experts),
        "a rank with many tokens": (150 * (rank + 1), experts),
    }

    def some(count, among, dtype, routing=rank, of=experts):
        draw = torch.Generator().manual_seed(100 + routing)
        return Tokens(count, of, lambda token: torch.randperm(among, generator=draw)[:TOP_K], dtype, seed=rank)

    groups = groups_of(ranks)
    for dtype in (torch.bfloat16, torch.float32):
        for case, (count, among) in cases.items():
            compare(f"{case}, {dtype}", backend, some(count, among, dtype), groups, lambda kind: config_of(kind, ranks))
        skewed, limit = some(40, experts // 2 + 2, dtype), {"moe_expert_capacity_factor": 1.0}
        skewed.drop(**limit)
        compare(f"drops, {dtype}", backend, skewed, groups, lambda kind: config_of(kind, ranks, **limit))
        if backend == "hybridep":
            filled = limit | {"moe_pad_expert_input_to_capacity": True}
            skewed.drop(**filled)
            compare(f"filled, {dtype}", backend, skewed, groups, lambda kind: config_of(kind, ranks, **filled))
            within_a_budget(some(300, experts, dtype), groups, ranks)
    if ranks < 4:
        return
    # Two ranks have parts of the same experts. Routing is the same on both: gloo gathers pieces of one size alone.
    groups = groups_of(ranks, tensor_parallel=2)
    for dtype in (torch.bfloat16, torch.float32):
        tokens = some(24, experts // 2, dtype, routing=groups.ep.rank(), of=experts // 2)
        compare(f"tensor parallelism, {dtype}", backend, tokens, groups, lambda kind: config_of(kind, ranks, 2))


def within_a_budget(tokens, groups, ranks):
    """Rows of a number that is fixed beforehand, since 0.19: with room for all, and then with too little on each rank."""
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    config = config_of("hybridep", ranks)
    if not hasattr(config, "moe_expert_rank_capacity_factor"):
        return
    compare("a budget", "hybridep", tokens, groups, lambda kind: with_budget(config_of(kind, ranks), 2.0 * ranks))
    first = groups.ep.rank() * EXPERTS_OF_RANK
    local = list(range(first, first + EXPERTS_OF_RANK))
    for factor, over in ((2.0 * ranks, False), (0.3, True)):
        dispatcher = MoEFlexTokenDispatcher(EXPERTS_OF_RANK, local, with_budget(config, factor), groups)
        x = tokens.x.clone()
        sent, weights = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, tokens.map, tokens.probs))
        rows, counts, _ = dispatcher.dispatch_postprocess(sent, weights)
        assert int(counts.sum()) <= rows.shape[0] and bool(dispatcher.check_over_budget()) == over
        dispatcher.token_combine(dispatcher.combine_preprocess(rows))


def with_budget(config, factor):
    """The factor is set afterwards, as configurations demand Transformer Engine for it."""
    if config.moe_token_dispatcher_type == "flex":
        config.moe_expert_rank_capacity_factor, config.use_transformer_engine_op_fuser = factor, True
    return config


def trained(kind, ranks, steps=20, **how):
    """The losses of each step of this rank, of two layers with residuals."""
    import torch
    import torch.distributed as dist
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    groups, config = groups_of(ranks), config_of(kind, ranks, **how)
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    # A functools.partial since 0.17.
    submodules = spec.keywords["submodules"] if hasattr(spec, "keywords") else spec.submodules
    layers = torch.nn.ModuleList(MoELayer(config, submodules, number, groups) for number in (1, 2))
    shared = [value for name, value in layers.named_parameters() if "experts" not in name]
    assert len(shared) == 2 and sum(1 for _ in layers.parameters()) == 2 + 2 * 2 * EXPERTS_OF_RANK
    # Routers are the same on all ranks, and experts differ.
    draws = {True: torch.Generator().manual_seed(1), False: torch.Generator().manual_seed(2 + dist.get_rank())}
    for value in layers.parameters():
        everywhere = any(value is router for router in shared)
        value.data = torch.randn(value.shape, generator=draws[everywhere]) * (0.3 if everywhere else 0.15)
    draw = draws[False]
    x = torch.randn(32, 1, HIDDEN, generator=draw)
    goal = 2 * x.roll(1, 2).relu()
    optimizer, losses = torch.optim.SGD(layers.parameters(), lr=0.03, momentum=0.9), []
    for _ in range(steps):
        y = x
        for layer in layers:
            y = y + layer(y)[0]
        loss = (y - goal).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        (loss / ranks).backward()
        for value in shared:
            dist.all_reduce(value.grad)
        optimizer.step()
    return losses


def layers_part(ranks, backend):
    """Whole layers, trained: with each dispatcher the same losses."""
    # Drops are tested on two ranks alone, to save time.
    limit = {"moe_expert_capacity_factor": 1.0} | ({"moe_pad_expert_input_to_capacity": True} if backend == "hybridep" else {})
    for how in ({}, limit) if ranks == 2 else ({},):
        wanted, found = trained("alltoall", ranks, **how), trained(backend, ranks, **how)
        assert wanted[-1] < 0.5 * wanted[0], f"the layers learn little: {wanted}"
        off = max(abs(one - other) for one, other in zip(found, wanted))
        assert len(found) == len(wanted) and off <= 1e-4, f"losses are off by {off:.3g}: {found}, not {wanted}"


def run_rank(part, ranks, backend, rank):
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    {"dispatcher": dispatcher_part, "layers": layers_part}[part](ranks, backend)
    dist.barrier()
    print("right", flush=True)
    dist.destroy_process_group()


def main(part, ranks, backend):
    """Imports once and forks the ranks. The first that fails ends the others."""
    import tokenyard

    tokenyard.install_as("deep_ep")
    from tokenyard import deep_ep

    deep_ep.Buffer.timeout_seconds = deep_ep.HybridEPBuffer.timeout_seconds = 30.0
    on_the_cpu()
    import megatron.core.transformer.moe.moe_layer  # noqa: F401

    fork_ranks(ranks, functools.partial(run_rank, part, ranks, backend), DEADLINE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
