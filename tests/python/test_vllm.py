"""vLLM's own deepep_high_throughput and deepep_low_latency classes over `tokenyard.install_as("deep_ep")`, and the
backends of `tokenyard.integrations.vllm` as vLLM's own functions choose them.

Each case is a round trip: prepare, experts in plain torch, finalize, compared element by element with the sum over a
token's choices at f64. vLLM is unmodified but for what a CPU lacks; `vllm_rig.on_the_cpu` and `patched` have the list.
As a program, this file imports vLLM once and runs every case on ranks that are forks of it, on CPU tensors or, with
`TOKENYARD_TEST_DEVICE=cuda`, on GPU tensors.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import types

import pytest

from engine_rig import DEVICE, drawing, without_gpus
from vllm_rig import in_forks, on_the_cpu, torch, vllm_folder

NATIVE = ["plugin choice", "plugin others", "high_throughput bf16", "high_throughput fp16", "high_throughput int32",
          "high_throughput fp8", "high_throughput async", "high_throughput captured", "high_throughput late",
          "high_throughput input", "batched bf16", "batched int32", "batched fp8", "batched ue8m0", "batched async",
          "batched placed", "batched input", "batched experts"]
CASES = ["normal bf16", "normal fp8", "normal batches", "normal async", "low_latency bf16", "low_latency fp8",
         "low_latency ue8m0", "low_latency batches", "low_latency async"]
EXPERTS_OF_RANK, TOP_K = 3, 4
# Processes that share a GPU run alternately, which is slow.
WORLDS = (2,) if DEVICE == "cuda" else (2, 4)
# vLLM's low-latency class accepts no smaller one.
HIDDEN = 2048
BLOCK = 128


def needs():
    """What is missing for these tests, or None."""
    if vllm_folder() is None:
        return "could not find vllm in target/engines/vllm: `tests/all.sh python` unpacks it"
    for package in ("pydantic", "regex", "psutil", "cloudpickle", "msgspec", "yaml", "tqdm", "urllib3"):
        if importlib.util.find_spec(package) is None:
            return f"could not import '{package}', which vLLM imports: install {package}"
    return None


if sys.version_info < (3, 10):
    pytest.skip("vLLM needs Python 3.10 or newer: run the tests with one", allow_module_level=True)
if os.environ.get("TOKENYARD_STRICT") != "1" and needs():
    pytest.skip(needs(), allow_module_level=True)


@pytest.fixture(scope="module")
def ran():
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run([sys.executable, "-W", "ignore", __file__], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("case", CASES + NATIVE)
def test_vllm(ran, case, ranks):
    assert f"right: {case}, {ranks} ranks\n" in ran.stdout, ran.stdout + ran.stderr


# The program


def patched():
    """Stand-ins for what needs a GPU in vLLM's classes, by name.

    - moe_kernel_quantize_input of deepep_ht: quantises blocks by a kernel of CUDA or Triton.
    - dbo_current_ubatch_id of both: micro-batches are threads with streams of CUDA; here a list has the batch's number.
    """
    import tokenyard

    tokenyard.install_as("deep_ep")
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll

    def quantise(x, scale, quant_dtype, per_act_token_quant, block_shape, **how):
        return (x, None) if quant_dtype is None else quantised(x)

    batch = [0]
    deepep_ht.moe_kernel_quantize_input = quantise
    deepep_ht.dbo_current_ubatch_id = deepep_ll.dbo_current_ubatch_id = lambda: batch[0]
    return deepep_ht.DeepEPHTPrepareAndFinalize, deepep_ll.DeepEPLLPrepareAndFinalize, batch


def quantised(x):
    """fp8 rows and fp32 scales of blocks of 128."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2).clamp(min=1e-4) / 448
    return (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape), scales


def values(rows, scales):
    """The rows that experts compute with: fp8 rows times scales, fp32 or packed powers of two."""
    if scales is None:
        return rows.float()
    if scales.dtype == torch.int32:
        exponents = scales.contiguous().view(torch.uint8).view(*rows.shape[:-1], -1)[..., : rows.shape[-1] // BLOCK]
        scales = torch.pow(2.0, exponents.float() - 127)
    return (rows.float().unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


class Layer:
    """Experts that differ, and the tokens of every rank, which are drawn alike on each."""

    def __init__(self, rank, ranks, seed=1, hidden=HIDDEN, most=12, dtype=torch.bfloat16, top_k=TOP_K, even=False):
        self.dtype, self.ids_dtype, self.on_input = dtype, torch.int64, False
        draw = drawing(seed)
        self.rank, self.ranks, self.experts, self.hidden, self.most = rank, ranks, EXPERTS_OF_RANK * ranks, hidden, most
        self.own, self.mirrored = torch.randn(2, self.experts, hidden, generator=draw)
        # One rank without tokens, and one with all.
        self.count = [most if even or r == 0 else 0 if r == 1 else most - 3 - r for r in range(ranks)]
        self.x = [torch.randn(n, hidden, generator=draw).to(dtype) for n in self.count]
        # An expert may come twice in a token, and -1 is none.
        self.ids = [torch.randint(0, self.experts, (n, top_k), generator=draw) for n in self.count]
        for ids in self.ids:
            ids[torch.rand(ids.shape, generator=draw) < 0.15] = -1
        self.weights = [torch.rand(n, top_k, generator=draw) + 0.05 for n in self.count]

    @property
    def mine(self):
        return self.x[self.rank], self.weights[self.rank], self.ids[self.rank].to(self.ids_dtype)

    def expert(self, number, x):
        return x * self.own[number].to(x.dtype) + x.flip(-1) * self.mirrored[number].to(x.dtype)

    def standard(self, rows, scales, ids, weights):
        """The sum over a row's choices of local experts, `[rows, hidden]`."""
        weights = torch.ones_like(weights) if self.on_input else weights
        x, out = values(rows, scales), torch.zeros(rows.shape[0], self.hidden)
        for number in range(self.rank * EXPERTS_OF_RANK, (self.rank + 1) * EXPERTS_OF_RANK):
            weight = (weights * (ids == number)).sum(1, keepdim=True)
            out += torch.where(weight > 0, weight * self.expert(number, x), 0)
        return out.to(self.dtype)

    def batched(self, rows, scales, counts):
        """What each local expert makes of its rows, `[local experts, rows, hidden]`; NaN where none came."""
        x, out = values(rows, scales), torch.full(rows.shape, float("nan"), dtype=self.dtype)
        for place, count in enumerate(counts.tolist()):
            of_expert = self.expert(self.rank * EXPERTS_OF_RANK + place, x[place, :count])
            out[place, :count] = of_expert.to(self.dtype)
        return out

    def counts(self):
        """Choices of each local expert."""
        ids = torch.cat(self.ids).flatten()
        return torch.bincount(ids[ids >= 0], minlength=self.experts).view(self.ranks, -1)[self.rank].tolist()

    def check(self, out, step=0.0, power=False):
        """`step`: relative error that quantisation may add to an element of x."""
        x, weights, ids = self.mine
        exact, size = torch.zeros(2, x.shape[0], self.hidden, dtype=torch.float64)
        slack = torch.zeros_like(exact)
        x = x.double()
        # An fp8 element is off by half a step of itself, and by half the smallest step of its block.
        # On the input, weights and their products with x are rounded, too.
        off = x.abs() * (2.0**-7 if self.on_input else 0.0)
        if step:
            largest = x.unflatten(-1, (-1, BLOCK)).abs().amax(-1, keepdim=True).expand(-1, -1, BLOCK).flatten(-2)
            off = x.abs() * step + largest * 2.0**-17 * (2 if power else 1)
        for place in range(ids.shape[1]):
            used, number = ids[:, place, None] >= 0, ids[:, place].clamp(min=0)
            own, mirrored = self.own[number].double(), self.mirrored[number].double()
            term = weights[:, place, None].double() * (x * own + x.flip(-1) * mirrored)
            exact += torch.where(used, term, 0)
            size += torch.where(used, term.abs(), 0)
            lost = weights[:, place, None].double() * (off * own.abs() + off.flip(-1) * mirrored.abs())
            slack += torch.where(used, lost, 0)
        # Two roundings of each term, and one of the sum.
        unit = 2.0**-8 if self.dtype == torch.bfloat16 else 2.0**-11
        bound = 1.05 * (slack + unit * (2 * size + exact.abs())) + 1e-5
        error = (out.double() - exact).abs()
        assert out.shape == exact.shape and bool((error <= bound).all()), (error / bound).max()
        # Sums are of x, not of nothing.
        assert not out.numel() or float(out.abs().max()) > 1


def config_of(kind):
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    if kind in ("fp8", "ue8m0", "late"):
        return FusedMoEQuantConfig.make(quant_dtype=torch.float8_e4m3fn, block_shape=[BLOCK, BLOCK])
    return FusedMoEQuantConfig.make()


def now(started):
    """What an asynchronous call comes to: a receiver, or a hook that is called before it."""
    if isinstance(started, tuple):
        hook, receiver = started
        hook()
        return receiver()
    return started()


class Trip:
    """A layer's way through one of vLLM's classes, in two halves."""

    def __init__(self, cls, layer, kind, wait):
        self.cls, self.layer, self.kind, self.wait, self.config = cls, layer, kind, wait, config_of(kind)
        # Experts of the first format may quantise rows themselves.
        self.late = kind == "late"

    def there(self):
        x, weights, ids = self.layer.mine
        given = (x, weights, ids.to(self.cls.topk_indices_dtype() or ids.dtype), self.layer.experts, None, self.layer.on_input,
                 self.config, self.late)
        self.got = now(self.cls.prepare_async(*given)) if self.wait else self.cls.prepare(*given)
        return self

    def back(self):
        from vllm.model_executor.layers.fused_moe import modular_kernel as mk
        from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduce

        rows, scales, meta, ids, weights = self.got
        assert meta.expert_num_tokens.tolist() == self.layer.counts(), (meta, self.layer.counts())
        quantised = self.kind in ("fp8", "ue8m0")
        assert rows.dtype == (torch.float8_e4m3fn if quantised else self.layer.dtype)
        assert ids is None or ids.dtype == self.layer.ids_dtype
        if self.cls.activation_format == mk.FusedMoEActivationFormat.Standard:
            made, how = self.layer.standard(rows, scales, ids, weights), reduce.TopKWeightAndReduceNoOP()
        else:
            made, how = self.layer.batched(rows, scales, meta.expert_num_tokens), reduce.TopKWeightAndReduceDelegate()
            _, weights, ids = self.layer.mine
        out = torch.full((self.layer.mine[0].shape[0], self.layer.hidden), float("nan"), dtype=self.layer.dtype)
        given = (out, made, weights, ids, self.layer.on_input, how)
        if self.wait:
            now(self.cls.finalize_async(*given))
        else:
            self.cls.finalize(*given)
        self.layer.check(out, 2.0**-4 if quantised else 0.0, self.kind == "ue8m0")


def run(case, rank, ranks):
    """One case on one rank."""
    import deep_ep
    import torch.distributed as dist

    mode, kind = case.split()
    if case == "batched experts":
        return with_experts(rank, ranks)
    if mode in ("high_throughput", "batched", "plugin"):
        return plugin(kind, rank, ranks) if mode == "plugin" else native(mode, kind, rank, ranks)
    high, low, batch = patched()
    layers = [Layer(rank, ranks, seed) for seed in (1, 2)]
    buffer = deep_ep.Buffer(group=dist.group.WORLD, num_nvl_bytes=1 << 20, explicitly_destroy=True)
    if mode == "normal":
        cls = high(buffer, num_dispatchers=ranks, dp_size=ranks, rank_expert_offset=rank * EXPERTS_OF_RANK)
    else:
        cls = low(buffer, layers[0].most, ranks, use_fp8_dispatch=kind in ("fp8", "ue8m0"))
        cls.post_init_setup(type("Experts", (), {"supports_packed_ue8m0_act_scales": lambda self: kind == "ue8m0"})())
    trips = [Trip(cls, layer, kind, kind == "async") for layer in layers]
    if kind == "batches":
        for batch[0], trip in enumerate(trips):
            trip.there()
        for batch[0], trip in enumerate(trips):
            trip.back()
    else:
        for trip in trips:
            trip.there().back()
    del cls, trips
    buffer.destroy()


# The backends of tokenyard.integrations.vllm


def entry_point():
    """Where vLLM's loader finds the plug-in: installed with the package, or else as pyproject.toml has it."""
    from importlib.metadata import entry_points

    if not any(found.name == "tokenyard" for found in entry_points(group="vllm.general_plugins")):
        with open(os.path.join(os.path.dirname(__file__), "..", "..", "pyproject.toml")) as file:
            stated = re.search(r'entry-points."vllm.general_plugins"\]\n(.*\n)', file.read())
        folder = os.path.join(tempfile.mkdtemp(), "tokenyard-0.dist-info")
        os.mkdir(folder)
        for name, text in (("METADATA", "Metadata-Version: 2.1\nName: tokenyard\nVersion: 0\n"),
                           ("entry_points.txt", "[vllm.general_plugins]\n" + stated[1].replace('"', ''))):
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
        # First, as an older package may be installed.
        sys.path.insert(0, os.path.dirname(folder))


def configured(backend):
    """Makes a configuration with this backend vLLM's current one, which its classes validate."""
    import vllm.config.vllm as config
    from vllm.config.parallel import ParallelConfig

    parallel = ParallelConfig(all2all_backend=backend)
    assert parallel.all2all_backend == backend
    config._current_vllm_config = types.SimpleNamespace(parallel_config=parallel, use_cumem_cudagraph_pool=False)
    return parallel


def communicator(rank, ranks):
    """vLLM's communicator of the expert-parallel group, which chooses the manager. Stand-ins:

    - get_dp_group, get_tp_group: groups of an initialised vLLM.
    - PyNcclCommunicator: NCCL.
    """
    import torch.distributed as dist
    import vllm.distributed.parallel_state as state
    from vllm.distributed.device_communicators import cuda_communicator, pynccl

    group = types.SimpleNamespace(rank_in_group=rank, world_size=ranks)
    state.get_dp_group = state.get_tp_group = lambda: group
    pynccl.PyNcclCommunicator = lambda **given: types.SimpleNamespace(disabled=True, available=False)
    # A log of NCCL's choices, which are none.
    cuda_communicator.CudaCommunicator._log_all_reduce_backend_selection = lambda self: None
    return cuda_communicator.CudaCommunicator(
        dist.group.WORLD, torch.get_default_device(), dist.group.WORLD, "ep:0", use_all2all=True
    )


def moe_of(layer, backend, tokens=None):
    """vLLM's configuration of the layer."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    ranks, rank = layer.ranks, layer.rank
    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=ranks, ep_size=ranks, tp_rank=0, pcp_rank=0, dp_rank=rank, ep_rank=rank, sp_size=1,
        use_ep=True, all2all_backend=backend, enable_eplb=False,
    )
    return FusedMoEConfig(
        num_experts=layer.experts, experts_per_token=layer.ids[0].shape[1], hidden_dim=layer.hidden, intermediate_size=64,
        num_local_experts=EXPERTS_OF_RANK, num_logical_experts=layer.experts, activation=MoEActivation.SILU, device=DEVICE,
        routing_method=RoutingMethodType.Default, moe_parallel_config=parallel, in_dtype=layer.dtype,
        max_num_tokens=tokens or layer.most,
    )


def plugin(what, rank, ranks):
    """The choice of manager and of classes, by vLLM's own functions."""
    import typing

    from vllm.config.parallel import All2AllBackend, ParallelConfig
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat as Formats
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    names = ["tokenyard_high_throughput", "tokenyard_low_latency"]
    assert typing.get_args(All2AllBackend)[-2:] == tuple(names) and len(set(typing.get_args(All2AllBackend))) > 10
    assert unquantized.maybe_make_prepare_finalize is all2all_utils.maybe_make_prepare_finalize
    layer = Layer(rank, ranks, hidden=264)
    if what == "others":
        with pytest.raises(ValueError, match="all2all_backend"):
            ParallelConfig(all2all_backend="tokenyard")
        parallel = configured("allgather_reducescatter")
        assert type(communicator(rank, ranks).all2all_manager).__name__ == "AgRsAll2AllManager"
        moe = moe_of(layer, "allgather_reducescatter")
        assert not moe.moe_parallel_config.use_batched_activation_format and not parallel.use_batched_dp_moe
        made = all2all_utils.maybe_make_prepare_finalize(
            moe, config_of("bf16"), allow_new_interface=True, all2all_manager=types.SimpleNamespace(world_size=ranks))
        assert "Tokenyard" not in type(made).__name__ and made is not None
        assert moe_of(layer, "deepep_low_latency").moe_parallel_config.use_batched_activation_format
        # A vLLM of another interface: one error, of which the loader's function makes a warning.
        import tokenyard.integrations.vllm as integration

        del all2all_utils.maybe_make_prepare_finalize
        with pytest.raises(ImportError, match="expected that of 0.33.0, got .*maybe_make_prepare_finalize"):
            integration.register()
        integration.plugin()
        return
    for name, format in zip(names, (Formats.Standard, Formats.BatchedExperts)):
        parallel = configured(name)
        parallel.enable_expert_parallel, parallel.tensor_parallel_size, parallel.data_parallel_size = True, 2, 2
        assert parallel.use_sequence_parallel_moe
        assert parallel.use_batched_dp_moe == (format == Formats.BatchedExperts)
        chosen = communicator(rank, ranks)
        assert type(chosen.all2all_manager).__name__ == "TokenyardAll2AllManager" and chosen.use_all2all
        moe = moe_of(layer, name)
        assert moe.moe_parallel_config.use_batched_activation_format == (format == Formats.BatchedExperts)
        made = [all2all_utils.maybe_make_prepare_finalize(moe, config_of("bf16"), all2all_manager=chosen.all2all_manager)
                for _ in range(2)]
        assert made[0].activation_format == format and made[0].topk_indices_dtype() is None and made[0].output_is_reduced()
        # Layers share a context.
        assert made[0] is not made[1] and made[0]._contexts is made[1]._contexts
        assert made[0].max_num_tokens_per_rank() == (layer.most if format == Formats.BatchedExperts else None)
        x, weights, ids = torch.zeros(99, 264, dtype=torch.bfloat16), torch.zeros(99, TOP_K), torch.zeros(99, TOP_K).long()
        with pytest.raises(ValueError, match="at most 12 tokens, got 99"):
            made[0].prepare(x, weights, ids, layer.experts, None, False, config_of("bf16"), False)
        chosen.all2all_manager.destroy()


def native(mode, kind, rank, ranks):
    """A round trip through classes that vLLM's function made."""
    from vllm.model_executor.layers.fused_moe import all2all_utils, utils

    import tokenyard.integrations.vllm as integration

    backend = "tokenyard_high_throughput" if mode == "high_throughput" else "tokenyard_low_latency"
    configured(backend)
    manager = communicator(rank, ranks).all2all_manager
    how = dict(hidden=640 if kind in ("fp8", "ue8m0", "late") else 264, even=kind == "captured")
    how.update(dtype=torch.float16 if kind == "fp16" else torch.bfloat16, top_k=1 if kind == "input" else TOP_K)
    layers = [Layer(rank, ranks, seed, **how) for seed in (1, 2)]
    utils.moe_kernel_quantize_input = lambda x, scale, quant_dtype, *given, **more: (
        (x, None) if quant_dtype is None else quantised(x)
    )
    if kind == "captured":
        # As in a CUDA graph: nobody waits for counts.
        integration._capturing = lambda x: True
    tables = None
    if kind == "placed":
        # vLLM's round-robin placement: the expert's own number differs from that by which it is dispatched.
        tables = (torch.arange(layers[0].experts).roll(1), None, None)
    for layer in layers:
        layer.ids_dtype, layer.on_input = torch.int32 if kind == "int32" else torch.int64, kind == "input"
        cls = all2all_utils.maybe_make_prepare_finalize(
            moe_of(layer, backend), config_of(kind), routing_tables=tables, all2all_manager=manager)
        cls.post_init_setup(type("Experts", (), {"supports_packed_ue8m0_act_scales": lambda self: kind == "ue8m0"})())
        trip = Trip(cls, layer, kind, kind == "async")
        if kind == "placed":
            trip.layer = Placed(layer)
        trip.there()
        if kind == "captured":
            assert trip.got[0].shape[0] == ranks * layer.most and trip.got[2].expert_num_tokens_cpu is None
        elif mode == "high_throughput":
            assert trip.got[2].expert_num_tokens_cpu.tolist() == layer.counts()
        trip.back()


class Placed:
    """A layer whose experts lie one place further."""

    def __init__(self, layer):
        self.layer = layer

    def __getattr__(self, name):
        return getattr(self.layer, name)

    def counts(self):
        ids = torch.cat(self.layer.ids).flatten()
        ids = (ids[ids >= 0] - 1) % self.layer.experts
        return torch.bincount(ids, minlength=self.layer.experts).view(self.layer.ranks, -1)[self.layer.rank].tolist()

    def batched(self, rows, scales, counts):
        moved = Layer.__new__(Layer)
        moved.__dict__ = dict(self.layer.__dict__)
        moved.own, moved.mirrored = self.layer.own.roll(-1, 0), self.layer.mirrored.roll(-1, 0)
        return moved.batched(rows, scales, counts)


def with_experts(rank, ranks):
    """vLLM's own kernel object with vLLM's own experts in plain torch, against the dense formula."""
    from vllm.model_executor.layers.fused_moe import all2all_utils, modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import NaiveBatchedExperts
    from vllm.v1.worker import workspace

    configured("tokenyard_low_latency")
    manager = communicator(rank, ranks).all2all_manager
    layer = Layer(rank, ranks, hidden=136)
    moe, quant = moe_of(layer, "tokenyard_low_latency"), config_of("bf16")
    moe.activation = MoEActivation.SILU
    cls = all2all_utils.maybe_make_prepare_finalize(moe, quant, all2all_manager=manager)
    experts = NaiveBatchedExperts(moe, quant, max_num_tokens=layer.most, num_dispatchers=ranks)
    # The activation is a kernel of CUDA.
    experts.activation = lambda activation, out, x: out.copy_(torch.nn.functional.silu(x[:, :64]) * x[:, 64:])
    # Experts ask a stream of the accelerator whether it is captured, for which torch 2.11 has no answer.
    torch.accelerator.current_stream = lambda *device: types.SimpleNamespace(is_capturing=lambda: False)
    workspace.init_workspace_manager(torch.get_default_device())
    draw = drawing(5)
    w1 = (torch.randn(layer.experts, 128, 136, generator=draw) / 12).to(torch.bfloat16)
    w2 = (torch.randn(layer.experts, 136, 64, generator=draw) / 8).to(torch.bfloat16)
    own = slice(rank * EXPERTS_OF_RANK, (rank + 1) * EXPERTS_OF_RANK)
    x, weights, ids = layer.mine
    kernel = modular_kernel.FusedMoEKernel(cls, experts)
    out = kernel.apply(x, w1[own], w2[own], weights, ids, MoEActivation.SILU, layer.experts, None, False)
    exact = torch.zeros(x.shape[0], 136, dtype=torch.float64)
    for token in range(x.shape[0]):
        for number, weight in zip(ids[token].tolist(), weights[token].tolist()):
            if number >= 0:
                inner = w1[number].double() @ x[token].double()
                exact[token] += weight * (w2[number].double() @ (torch.nn.functional.silu(inner[:64]) * inner[64:]))
    assert out.shape == exact.shape
    assert not out.numel() or float((out.double() - exact).abs().max() / exact.abs().max()) < 0.02


def load():
    """Imports vLLM, whose loader finds the plug-in."""
    with without_gpus():
        on_the_cpu()
        patched()
        entry_point()
        # Some of its modules import a function by name, before the plug-in replaces it.
        import vllm.model_executor.layers.fused_moe.oracle.unquantized  # noqa: F401
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        # Imported before the forks, which need it.
        import vllm.model_executor.layers.fused_moe.topk_weight_and_reduce  # noqa: F401


def main():
    load()
    for case in sys.argv[1:] or CASES + NATIVE:
        for ranks in WORLDS:
            try:
                in_forks(ranks, lambda rank, size, case=case: run(case, rank, size))
                print(f"right: {case}, {ranks} ranks", flush=True)
            except AssertionError as failure:
                print(f"wrong: {case}, {ranks} ranks\n{failure}", flush=True)


if __name__ == "__main__":
    main()
