"""What the backends of `tokenyard.integrations.vllm` refuse, how they go on after errors, and microbatches.

As `test_vllm.py`, whose layers and configurations these are: a program imports vLLM once and runs every case on ranks that
are forks of it.
"""

import gc
import os
import subprocess
import sys
import threading
import types

import pytest

from engine_rig import DEVICE, on_its_device
from rig import settle
from test_vllm import TOP_K, Layer, communicator, config_of, configured, load, moe_of, now, quantised
from vllm_rig import in_forks, torch

CASES = ["arguments", "experts", "hidden", "timeout", "elastic", "steps", "sms", "delegated", "microbatches configured"]
# Each with both formats.
FORMATS = ["refused", "routing", "order", "retried", "columns", "scales", "interleaved", "nowhere",
           "microbatches", "microbatches fp8", "too many microbatches", "failed microbatch"]
CASES += [f"{case} {format}" for case in FORMATS for format in ("standard", "batched")]
CASES += ["routing placed", "slept batched", "microbatches ue8m0 batched"]
BACKENDS = {"standard": "tokenyard_high_throughput", "batched": "tokenyard_low_latency"}
HIDDEN = 256


@pytest.fixture(scope="module")
def ran():
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run([sys.executable, "-W", "ignore", __file__], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_vllm_native(ran, case):
    assert f"right: {case}\n" in ran.stdout, ran.stdout + ran.stderr


# The program


class Stage:
    """A layer's class, and its way there and back with changes."""

    def __init__(self, rank, ranks, format, kind="bf16", tables=None, manager=None, columns=None, **how):
        from vllm.model_executor.layers.fused_moe import all2all_utils

        self.format, self.kind, backend = format, kind, BACKENDS[format]
        if manager is None:
            configured(backend)
            manager = communicator(rank, ranks).all2all_manager
        self.manager, self.config = manager, config_of(kind)
        self.layer = Layer(rank, ranks, **{"hidden": HIDDEN, **how})
        self.columns = columns or self.layer.hidden
        self.cls = all2all_utils.maybe_make_prepare_finalize(
            moe_of(self.layer, backend), self.config, routing_tables=tables, all2all_manager=manager)
        self.cls.post_init_setup(types.SimpleNamespace(supports_packed_ue8m0_act_scales=lambda: kind == "ue8m0"))

    def reduce(self):
        from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduce

        standard = self.format == "standard"
        return reduce.TopKWeightAndReduceNoOP() if standard else reduce.TopKWeightAndReduceDelegate()

    def there(self, wait=False, config=None, **changed):
        x, weights, ids = self.layer.mine
        given = dict(a1=x, topk_weights=weights, topk_ids=ids, num_experts=self.layer.experts, expert_map=None,
                     apply_router_weight_on_input=False, quant_config=config or self.config)
        given.update(changed)
        return (self.cls.prepare_async if wait else self.cls.prepare)(**given)

    def outputs(self, got):
        """The experts' outputs of what came, and the weights and ids that go with them."""
        rows, scales, meta, ids, weights = got
        if self.format == "standard":
            return self.layer.standard(rows, scales, ids, weights), weights, ids
        return (self.layer.batched(rows, scales, meta.expert_num_tokens), *self.layer.mine[1:])

    def back(self, got, wait=False, out=None, made=None, weights=None):
        outputs, own_weights, ids = self.outputs(got)
        if out is None:
            out = torch.full(self.layer.mine[0].shape, float("nan"), dtype=self.layer.dtype)
        given = (out, outputs if made is None else made, own_weights if weights is None else weights, ids, False,
                 self.reduce())
        return out, (self.cls.finalize_async if wait else self.cls.finalize)(*given)

    def check(self, out):
        self.layer.check(out, 0.0 if self.kind == "bf16" else 2.0**-4, self.kind == "ue8m0")

    def trip(self):
        self.check(self.back(self.there())[0])


def arguments(rank, ranks):
    """The command line of vLLM, of which a parser may have been made before the plug-in was loaded."""
    import vllm.platforms
    from vllm.config.parallel import All2AllBackend
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    import tokenyard.integrations.vllm as integration

    # There is no platform here, of which a configuration's default asks.
    vllm.platforms.current_platform.device_type = "cpu"
    given = ["--enable-expert-parallel", "--data-parallel-size", "8", "--enable-dbo", "--all2all-backend"]
    for backend in BACKENDS.values():
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        assert parser.parse_args([*given, backend]).all2all_backend == backend
    All2AllBackend.__args__ = All2AllBackend.__args__[:-2]
    from vllm.engine import arg_utils

    arg_utils._compute_kwargs.cache_clear()
    choices = EngineArgs.add_cli_args(FlexibleArgumentParser()).format_help()
    assert "tokenyard" not in choices
    integration.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args([*given, backend]).all2all_backend == backend


def delegated(rank, ranks):
    """Experts that leave weights and sums of the standard format to this class, with fewer choices than there may be."""
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduce

    # A kernel of CUDA.
    reduce.ops.moe_sum = lambda rows, out: out.copy_(rows.float().sum(1))
    for choices in (TOP_K, TOP_K - 1):
        stage = Stage(rank, ranks, "standard")
        layer = stage.layer
        layer.ids, layer.weights = ([of[:, :choices] for of in all_of] for all_of in (layer.ids, layer.weights))
        rows, scales, meta, ids, weights = stage.there()
        assert ids.is_contiguous() and weights.is_contiguous() and ids.shape == weights.shape == (rows.shape[0], choices)
        made = torch.zeros(rows.shape[0], choices, HIDDEN, dtype=torch.bfloat16)
        for place in range(3):
            made = torch.where((ids == 3 * rank + place)[..., None], layer.expert(3 * rank + place, rows.float())[:, None], made)
        out = torch.full_like(layer.mine[0], float("nan"))
        stage.cls.finalize(out, made.bfloat16(), weights, ids, False, reduce.TopKWeightAndReduceDelegate())
        error = (out.double() - exact(layer)).abs()
        assert not out.numel() or float(error.max() / exact(layer).abs().max()) < 0.02


def exact(layer):
    x, weights, ids = layer.mine
    sums = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for number, weight in zip(ids[token].tolist(), weights[token].tolist()):
            if number >= 0:
                sums[token] += weight * layer.expert(number, x[token].double())
    return sums


def experts(rank, ranks):
    """Experts that cannot take a dispatch's standard format are those that cannot take DeepEP's."""
    from vllm.model_executor.layers.fused_moe.experts import cutlass_moe, trtllm_bf16_moe

    layer = Layer(rank, ranks, hidden=HIDDEN)
    for kind in (cutlass_moe.CutlassExpertsFp8, cutlass_moe.CutlassExpertsFp4, trtllm_bf16_moe.TrtLlmBf16ExpertsModular):
        for format, like in (("standard", "deepep_high_throughput"), ("batched", "deepep_low_latency")):
            takes = [kind._supports_parallel_config(moe_of(layer, backend).moe_parallel_config)
                     for backend in (BACKENDS[format], like)]
            assert takes[0] == takes[1] == (format == "batched"), (kind, format, takes)
    # vLLM asks by this for other things of that backend.
    assert not moe_of(layer, BACKENDS["batched"]).use_deepep_ht_kernels
    assert not moe_of(layer, "allgather_reducescatter").use_deepep_ht_kernels


def hidden(rank, ranks):
    from vllm.model_executor.layers.fused_moe import all2all_utils

    layer = Layer(rank, ranks, hidden=HIDDEN)
    for backend in BACKENDS.values():
        parallel = moe_of(layer, backend).moe_parallel_config
        for dtype, size, wanted in ((torch.bfloat16, 100, 104), (torch.float32, 100, 100), (torch.float32, 101, 104),
                                    (torch.float16, 2880, 2880)):
            assert all2all_utils.maybe_roundup_layer_hidden_size(size, dtype, parallel) == wanted
    parallel = moe_of(layer, "allgather_reducescatter").moe_parallel_config
    assert all2all_utils.maybe_roundup_layer_hidden_size(101, torch.bfloat16, parallel) == 101
    for format in BACKENDS:
        with pytest.raises(ValueError, match="hidden_dim: expected a multiple of 128, .* got 200"):
            Stage(rank, ranks, format, "fp8", hidden=200)


def timeout(rank, ranks):
    import tokenyard.integrations.vllm as integration

    assert integration._TIMEOUT == [600.0]
    integration.register(timeout=7.0)
    integration.plugin()
    assert integration._TIMEOUT == [7.0], "the loader of vLLM, which comes later, forgets what a script stated"
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout is .*expected seconds above 0"):
            integration.register(timeout=wrong)
    assert integration._TIMEOUT == [7.0]


def elastic(rank, ranks):
    from vllm.config import DeviceConfig, ParallelConfig, VllmConfig

    for backend in BACKENDS.values():
        parallel = ParallelConfig(all2all_backend=backend, data_parallel_size=2, enable_expert_parallel=True)
        parallel.enable_elastic_ep = True
        with pytest.raises(NotImplementedError, match="enable_elastic_ep: expected False with tokenyard_.*, got True"):
            VllmConfig(parallel_config=parallel, device_config=DeviceConfig(device="cpu"))
        configured(backend).enable_elastic_ep = True
        with pytest.raises(NotImplementedError, match="enable_elastic_ep"):
            communicator(rank, ranks)


def steps(rank, ranks):
    """What replays of graphs find is raised by the worker's next step. A context that finds something, as if on a GPU."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    stage = Stage(rank, ranks, "batched")
    worker = WorkerWrapperBase()
    worker.worker = types.SimpleNamespace(execute_model=lambda given: f"did {given}")
    worker.mm_receiver_cache = None
    assert worker.execute_model("this") == "did this"

    class Found:
        def check(self):
            raise TimeoutError("rank 1 did not answer")

    stage.manager._contexts["further"] = [Found()]
    with pytest.raises(TimeoutError, match="rank 1"):
        worker.execute_model("this")
    stage.manager.destroy()
    assert worker.execute_model("that") == "did that"


def sms(rank, ranks):
    """vLLM sets the number of multiprocessors around each step of microbatches, which makes no further context."""
    for format, most in (("standard", None), ("batched", 0)):
        stage = Stage(rank, ranks, format)
        assert stage.manager.max_sms_used() == most
        for name in ("dispatch", "dispatch_router_logits", "combine"):
            with pytest.raises(NotImplementedError, match="enable_expert_parallel: expected True"):
                getattr(stage.manager, name)(*stage.layer.mine)
        stage.manager.set_num_sms(20)
        again = Stage(rank, ranks, format, manager=stage.manager)
        assert again.cls._contexts[0] is stage.cls._contexts[0]
        again.trip()


def refused(rank, ranks, format):
    """Before anything is sent: the next trip is right, though this rank alone was refused."""
    stage = Stage(rank, ranks, format)
    x, weights, ids = stage.layer.mine
    if rank == 0:
        n = x.shape[0]
        for changed, kind, text in (
            (dict(a1=x.float()), TypeError, "a1 .*expected torch.bfloat16, got torch.float32"),
            (dict(a1=x.flatten()), ValueError, r"a1 .*expected \[tokens, 256\], got"),
            (dict(a1=torch.cat([x, x], 1)), ValueError, r"a1 .*expected \[tokens, 256\], got \[12, 512\]"),
            (dict(a1=torch.cat([x, x])), ValueError, "a1: expected at most 12 tokens, got 24"),
            (dict(topk_ids=ids[:-1]), ValueError, r"topk_ids .*expected \[12, 1 to 4\], got \[11, 4\]"),
            (dict(topk_ids=torch.cat([ids, ids], 1)), ValueError, r"topk_ids .*got \[12, 8\]"),
            (dict(topk_ids=ids.to(torch.int16)), TypeError, "topk_ids .*got torch.int16"),
            (dict(topk_weights=weights[:, :1]), ValueError, r"topk_weights .*\[12, 4\], got \[12, 1\]"),
            (dict(topk_ids=ids.tolist()), TypeError, "topk_ids is a list"),
            (dict(a1=x.clone().requires_grad_()), RuntimeError, "prepare has no gradient"),
            (dict(topk_weights=weights.clone().requires_grad_()), RuntimeError, "prepare has no gradient"),
            (dict(num_experts=-1), ValueError, "num_experts: expected the layer's 6, got -1"),
            (dict(apply_router_weight_on_input=True), ValueError, "apply_router_weight_on_input: .*got 4"),
        ):
            with pytest.raises(kind, match=text):
                stage.there(**changed)
    got = stage.there()
    if rank == 0:
        outputs, freed = stage.outputs(got)[0], torch.zeros(n, HIDDEN).bfloat16()
        freed.untyped_storage().resize_(0)
        for changed, kind, text in (
            (dict(made=torch.stack([outputs, outputs], -2)), ValueError, "fused_expert_output .*expected .*got"),
            (dict(made=torch.cat([outputs, outputs])), ValueError, "fused_expert_output .*expected"),
            (dict(made=outputs.float()), TypeError, "fused_expert_output .*expected torch.bfloat16, got torch.float32"),
            (dict(made=outputs.clone().requires_grad_()), RuntimeError, "finalize has no gradient"),
            (dict(out=torch.zeros(n + 1, HIDDEN).bfloat16()), ValueError, r"output .*expected \[12, up to 256\], got"),
            (dict(out=torch.zeros(n, HIDDEN + 8).bfloat16()), ValueError, r"output .*expected \[12, up to 256\], got"),
            (dict(out=torch.zeros(n, HIDDEN, dtype=torch.float64)), TypeError, "output .*got torch.float64"),
            (dict(out=torch.zeros(n, HIDDEN, device="meta").bfloat16()), ValueError, "output is on meta"),
            (dict(out=torch.zeros(HIDDEN).bfloat16().expand(n, HIDDEN)), ValueError, "output has the strides .0, 1."),
            (dict(out=torch._neg_view(torch.zeros(n, HIDDEN).bfloat16())), ValueError, "output is a negative view"),
            (dict(out=freed), ValueError, "output has no memory"),
            (dict(out=outputs.tolist()), TypeError, "output is a list"),
        ):
            with pytest.raises(kind, match=text):
                stage.back(got, **changed)
        if format == "batched":
            for wrong, shape in ((weights[:, :1], r"\[12, 1\]"), (weights[:-1], r"\[11, 4\]")):
                with pytest.raises(ValueError, match=f"topk_weights .*got {shape}"):
                    stage.back(got, weights=wrong)
            with pytest.raises(RuntimeError, match="finalize has no gradient"):
                stage.back(got, weights=weights.clone().requires_grad_())
    stage.check(stage.back(got)[0])
    stage.trip()


def routing(rank, ranks, format):
    """An id that no expert has: the other ranks go on, and so does this one if it finalizes."""
    import tokenyard

    tables = None
    if format == "placed":
        # vLLM's round-robin placement, which here changes nothing.
        format, tables = "batched", (torch.arange(3 * ranks), None, None)
    stage = Stage(rank, ranks, format, tables=tables)
    # More than any expert's number by one, and by far.
    for number in (stage.layer.experts, 1 << 30):
        ids = stage.layer.mine[2].clone()
        if rank == 0:
            ids[3, 1] = number
            out = torch.full_like(stage.layer.mine[0], float("nan"))
            with pytest.raises(tokenyard.RoutingError, match=f"token 3 names expert {number}") as raised:
                got = stage.there(topk_ids=ids)
                # On a GPU, where prepare does not wait, finalize tells of it, and has the sums.
                assert DEVICE == "cuda" and format == "batched"
                settle(DEVICE)
                stage.back(got, out=out)
            if hasattr(raised.value, "dispatched"):
                got = raised.value.dispatched
                assert len(got) == 5
                stage.back(got, out=out)
            # None of its tokens went.
            assert not out.any()
        else:
            # Rank 0 sent nothing.
            got = stage.there()
            came = [stage.layer.ids[source] for source in range(1, ranks)]
            came = torch.cat(came).flatten() - 3 * rank
            assert got[2].expert_num_tokens.tolist() == [int((came == place).sum()) for place in range(3)]
            stage.check(stage.back(got)[0])
        stage.trip()


def slept(rank, ranks, format):
    """vLLM's memory of a model's weights may be discarded between a layer's making and its calls."""
    table = torch.arange(3 * ranks)
    stage = Stage(rank, ranks, format, tables=(table, None, None))
    table.fill_(0)
    stage.trip()


def order(rank, ranks, format):
    """Halves late, twice or never: an error each time, and then a right trip."""
    import tokenyard

    stage = Stage(rank, ranks, format)
    empty = torch.zeros(0, HIDDEN, dtype=torch.bfloat16)
    finalize = (torch.zeros_like(stage.layer.mine[0]), empty, *stage.layer.mine[1:], False, stage.reduce())
    with pytest.raises(RuntimeError, match="finalize: expected one after each prepare"):
        stage.cls.finalize(*finalize)
    started = stage.there(wait=True)
    if DEVICE == "cpu":
        # On a GPU a later call tells of it.
        with pytest.raises(tokenyard.OrderError, match="sent and not received"):
            stage.there(wait=True)
    with pytest.raises(RuntimeError, match="finalize: expected one after each prepare"):
        stage.cls.finalize(*finalize)
    got = now(started)
    with pytest.raises(ValueError, match="received already"):
        now(started)
    out, receiver = stage.back(got, wait=True)
    with pytest.raises(RuntimeError, match="finalize: expected one after each prepare"):
        stage.back(got)
    # A further dispatch may go between the halves of a combine.
    got = stage.there()
    now(receiver)
    stage.check(out)
    with pytest.raises(ValueError, match="received already"):
        now(receiver)
    # One that is never combined.
    got = stage.there()
    stage.check(stage.back(got)[0])
    # A receiver without its hook.
    started = stage.there(wait=True)
    got = (started[1] if isinstance(started, tuple) else started)()
    stage.manager.destroy()
    stage.check(stage.back(got)[0])
    stage.trip()


def retried(rank, ranks, format):
    """After Ctrl-C before the receiver, as in its wait, the receiver may be called again."""
    stage = Stage(rank, ranks, format)
    started = stage.there(wait=True)
    context = stage.cls._contexts[0]
    receive = context.dispatch_recv

    def interrupted(*given):
        raise KeyboardInterrupt

    context.dispatch_recv = interrupted
    with pytest.raises(KeyboardInterrupt):
        now(started)
    context.dispatch_recv = receive
    stage.check(stage.back(now(started))[0])

    def late(*given):
        raised = KeyboardInterrupt()
        raised.handle = receive(*given)
        raise raised

    # One that comes after it took place is raised with what it made.
    started = stage.there(wait=True)
    context.dispatch_recv = late
    with pytest.raises(KeyboardInterrupt) as raised:
        now(started)
    context.dispatch_recv = receive
    stage.check(stage.back(raised.value.dispatched)[0])


def columns(rank, ranks, format):
    """Experts that drop the padding of the hidden size, and arrays with strides."""
    stage = Stage(rank, ranks, format)
    x, weights, ids = stage.layer.mine
    wide = torch.full((x.shape[0], 2 * HIDDEN), float("nan"), dtype=torch.bfloat16)
    wide[:, ::2] = x
    got = stage.there(a1=wide[:, ::2], topk_weights=weights.t().contiguous().t(), topk_ids=ids.t().contiguous().t())
    made = stage.outputs(got)[0]
    strided = torch.stack([made, made + 1], -1)[..., 0]
    out = torch.full_like(wide, float("nan"))
    stage.back(got, made=strided, out=out[:, ::2])
    stage.check(out[:, ::2])
    assert out[:, 1::2].isnan().all()
    got = stage.there()
    made = stage.outputs(got)[0]
    out = torch.full((x.shape[0], 200), float("nan"), dtype=torch.bfloat16)
    stage.back(got, made=made[..., :200], out=out)
    whole = torch.full_like(x, float("nan"))
    stage.back(stage.there(), out=whole)
    stage.check(whole)
    assert torch.equal(out, whole[:, :200])


def scales(rank, ranks, format):
    """A scale of a tensor, by its largest element: of rows that came, not of what memory held before."""
    from vllm.model_executor.layers.fused_moe import utils
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    import tokenyard.integrations.vllm as integration

    config = FusedMoEQuantConfig.make(quant_dtype=torch.float8_e4m3fn)
    assert config.a1_scale is None and config.block_shape is None
    seen = []

    def quantise(x, scale, *given, **named):
        seen.append(x.float().abs().amax())
        scale = seen[-1].clamp(min=1e-6).view(1) / 448
        return (x.float() / scale).to(torch.float8_e4m3fn), scale

    utils.moe_kernel_quantize_input = quantise
    # Outputs of dispatch lie where numbers lay before.
    empty = torch.empty
    torch.empty = lambda *shape, **how: (
        empty(*shape, **how).fill_(3e38) if how.get("dtype") == torch.bfloat16 else empty(*shape, **how))
    integration._capturing = lambda x: True
    stage = Stage(rank, ranks, format, even=True)
    rows, scale, meta, _ids, _weights = stage.there(config=config)
    largest = max(float(x[(ids // 3 == rank).any(1)].abs().max()) for x, ids in zip(stage.layer.x, stage.layer.ids))
    assert [float(of_rows) for of_rows in seen] == [largest], (seen, largest)
    assert torch.allclose(scale.flatten(), torch.full_like(scale.flatten(), largest / 448))
    assert rows.dtype == torch.float8_e4m3fn and not rows.float().isnan().any()


def interleaved(rank, ranks, format):
    """Layers of one context, of which the second ends first."""
    stages = [Stage(rank, ranks, format, seed=1)]
    stages.append(Stage(rank, ranks, format, seed=2, manager=stages[0].manager))
    assert stages[0].cls._contexts is stages[1].cls._contexts
    got = [stage.there() for stage in stages]
    for stage, of_stage in reversed(list(zip(stages, got))):
        stage.check(stage.back(of_stage)[0])


def nowhere(rank, ranks, format):
    """Tokens that go to no expert, and a rank whose experts get none."""
    stage = Stage(rank, ranks, format, "fp8")
    for ids in stage.layer.ids:
        ids[:] = torch.where(ids >= 0, ids % 3, -1)
    got = stage.there()
    assert rank == 0 or not got[2].expert_num_tokens.any()
    stage.check(stage.back(got)[0])
    for ids in stage.layer.ids:
        ids[:] = -1
    out = stage.back(stage.there())[0]
    assert not out.any()


class Stream:
    """A stream, of which microbatches know the name."""

    def __init__(self, name):
        self.name = name

    def wait_event(self, event):
        assert event.recorded


def streams():
    """Those of computing and of communication, with names."""
    if DEVICE == "cpu":
        return Stream("compute"), Stream("comm")
    made = torch.cuda.Stream(), torch.cuda.Stream()
    made[0].name, made[1].name = "compute", "comm"
    return made


class Event:
    recorded = False

    def record(self, stream):
        self.recorded = True


def microbatches_configured(rank, ranks):
    """vLLM's configuration takes them for these backends, and for others as before."""
    from vllm.config import CUDAGraphMode, CompilationConfig, DeviceConfig, ParallelConfig, VllmConfig

    def made(backend, mode=CUDAGraphMode.NONE, **how):
        parallel = ParallelConfig(all2all_backend=backend, data_parallel_size=2, enable_expert_parallel=True, **how)
        return VllmConfig(
            parallel_config=parallel, device_config=DeviceConfig(device="cpu"),
            compilation_config=CompilationConfig(cudagraph_mode=mode),
        )

    for backend in BACKENDS.values():
        for how in (dict(enable_dbo=True), dict(ubatch_size=3), {}):
            config = made(backend, **how)
            assert config.parallel_config.all2all_backend == backend
            assert config.parallel_config.use_ubatching == bool(how)
    for backend in ("mori_low_latency", "allgather_reducescatter"):
        with pytest.raises(ValueError, match="Microbatching"):
            made(backend, enable_dbo=True)
    for format, name in BACKENDS.items():
        configured(name).enable_dbo = True
        manager = communicator(rank, ranks).all2all_manager
        stage = Stage(rank, ranks, format, manager=manager)
        assert stage.cls.supports_dbo() and len(stage.cls._contexts) == 2
        # Outside of microbatches the first context serves.
        stage.trip()
        assert not Stage(rank, ranks, format).cls.supports_dbo()


def microbatches(rank, ranks, format, kind, fails=None):
    """Layers of two microbatches by vLLM's own steps, which pass the threads on. Stand-ins on the CPU: streams and events
    of CUDA."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.v1.worker import ubatching

    configured(BACKENDS[format]).enable_dbo = True
    manager = communicator(rank, ranks).all2all_manager
    (compute, comm), trace = streams(), []
    current, number, set_stream = [compute], 2, torch.cuda.set_stream

    def noted(stream):
        current[0] = stream
        if DEVICE == "cuda":
            set_stream(stream)

    ubatching.current_stream, torch.cuda.set_stream = lambda: current[0], noted
    layers = []
    for seed in (1, 2, 3):
        # Packed scales of 128 columns come by fours.
        stages = [Stage(rank, ranks, format, kind, manager=manager, seed=10 * batch + seed, hidden=640) for batch in range(2)]
        # The same experts, and one class.
        stages[1].cls = stages[0].cls
        stages[1].layer.own, stages[1].layer.mirrored = stages[0].layer.own, stages[0].layer.mirrored
        experts = types.SimpleNamespace(
            moe_config=types.SimpleNamespace(moe_parallel_config=None), quant_config=stages[0].config,
            expects_unquantized_inputs=False, finalize_weight_and_reduce_impl=stages[0].reduce,
        )
        layers.append((modular_kernel.FusedMoEKernelModularImpl(stages[0].cls, experts), stages))
        for of_batch, context in enumerate(stages[0].cls._contexts):
            traced(context, of_batch, trace, current, fails)

    outs, failures = {}, []

    def run(batch, context):
        try:
            on_its_device(rank)
            if DEVICE == "cuda":
                set_stream(compute)
            with context:
                for at, (kernel, stages) in enumerate(layers):
                    stage = stages[batch]
                    layer = stage.layer
                    x, weights, ids = layer.mine
                    trace.append((batch, "attention", current[0].name))
                    if (batch, at, "attention") == fails:
                        raise MemoryError("in attention")
                    rows, row_scales, meta, ids, weights = kernel._prepare(x, weights, ids, layer.experts, None, False)
                    trace.append((batch, "experts", current[0].name))
                    if (batch, at, "experts") == fails:
                        raise MemoryError("in experts")
                    made, weights, ids = stage.outputs((rows, row_scales, meta, ids, weights))
                    out = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)
                    kernel._finalize(out, made, x, weights, ids, False, lambda x, order: None, x)
                    outs[at, batch] = out
        except BaseException as failure:
            failures.append(failure)

    barrier = threading.Barrier(number + 1, timeout=20)
    contexts = ubatching.make_ubatch_contexts(number, compute, comm, [object() for _ in range(number)], barrier)
    if DEVICE == "cpu":
        for context in contexts:
            context.gpu_comm_done_event, context.gpu_compute_done_event = Event(), Event()
    settle(DEVICE)
    threads = [threading.Thread(target=run, args=given, daemon=True) for given in enumerate(contexts)]
    for thread in threads:
        thread.start()
    barrier.wait()
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), (failures, trace)
    torch.cuda.set_stream = set_stream
    settle(DEVICE)
    return layers, outs, trace, failures


def traced(context, batch, trace, current, fails):
    for name in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
        call = getattr(context, name)
        if hasattr(call, "before"):
            continue

        def with_trace(*given, call=call, name=name, **named):
            trace.append((batch, name, current[0].name))
            if (batch, sum((batch, name) == event[:2] for event in trace) - 1, name) == fails:
                raise MemoryError("in a call")
            return call(*given, **named)

        with_trace.before = call
        setattr(context, name, with_trace)


def microbatches_right(rank, ranks, format, kind="bf16"):
    layers, outs, trace, failures = microbatches(rank, ranks, format, kind)
    assert not failures, failures
    for at, (_kernel, stages) in enumerate(layers):
        for batch, stage in enumerate(stages):
            stage.check(outs[at, batch])
    # The other one computes while rows are on their way, in each layer but for the ends.
    on = "comm" if format == "standard" else "compute"
    assert {stream for _, name, stream in trace if "_" in name} == {on}, trace
    assert {stream for _, name, stream in trace if "_" not in name} == {"compute"}, trace
    for sent, received in (("dispatch_send", "dispatch_recv"), ("combine_send", "combine_recv")):
        for batch in range(2):
            begins = [at for at, (of, name, _) in enumerate(trace) if (of, name) == (batch, sent)]
            ends = [at for at, (of, name, _) in enumerate(trace) if (of, name) == (batch, received)]
            assert len(begins) == len(ends) == 3
            if format == "batched":
                between = [any(of != batch for of, _, _ in trace[begin:end]) for begin, end in zip(begins, ends)]
                assert sum(between) >= 2, (sent, batch, trace)
    switches = sum(first[0] != second[0] for first, second in zip(trace, trace[1:]))
    assert switches >= 10, trace


def too_many(rank, ranks, format):
    """A microbatch that has no context of its own."""
    from vllm.v1.worker import ubatching

    stage = Stage(rank, ranks, format)
    ubatching._THREAD_ID_TO_CONTEXT[threading.get_ident()] = 1
    with pytest.raises(RuntimeError, match="microbatch 1: expected at most 1 microbatches"):
        stage.there()
    ubatching._THREAD_ID_TO_CONTEXT.clear()
    stage.trip()


def failed(rank, ranks, format):
    """An exception in one ends the other one, which would wait for it."""
    # One that did not begin, those that wait, and the last hook, which runs while the other one is left.
    for fails in ((0, 0, "attention"), (0, 0, "experts"), (1, 0, "experts"), (0, 2, "experts"), (1, 2, "experts"),
                  (0, 1, "combine_recv"), (1, 2, "combine_recv")):
        _layers, outs, trace, failures = microbatches(rank, ranks, format, "bf16", fails)
        assert any(isinstance(failure, MemoryError) for failure in failures), (fails, failures)
        # In its last layer the other one may have come to its end, or not. vLLM fails by itself where one gives a hook to
        # one that is no more.
        if fails[1] < 2:
            texts = [str(failure) for failure in failures if not isinstance(failure, MemoryError)]
            assert len(texts) == 1 and ("another microbatch failed: in " in texts[0] or "recv_hook" in texts[0]), failures
        # Exceptions and their frames hold each other, and contexts, of which a GPU has room for a few.
        del _layers, outs, failures
        gc.collect()


ALONE = {"arguments": arguments, "delegated": delegated, "experts": experts, "hidden": hidden, "timeout": timeout, "elastic": elastic, "steps": steps, "sms": sms,
         "microbatches configured": microbatches_configured}
OF_FORMAT = {"refused": refused, "routing": routing, "slept": slept, "order": order, "retried": retried, "columns": columns, "scales": scales,
             "interleaved": interleaved, "nowhere": nowhere, "microbatches": microbatches_right}


def run(case, rank, ranks):
    from vllm.model_executor.layers.fused_moe import utils

    utils.moe_kernel_quantize_input = lambda x, scale, quant_dtype, *given, **more: (
        (x, None) if quant_dtype is None else quantised(x))
    torch.manual_seed(1)
    if case in ALONE:
        return ALONE[case](rank, ranks)
    what, _, format = case.rpartition(" ")
    if what in ("too many microbatches", "failed microbatch"):
        return (too_many if what.startswith("too") else failed)(rank, ranks, format)
    name, *kind = what.split()
    return OF_FORMAT[name](rank, ranks, format, *kind)


def main():
    load()
    for case in sys.argv[1:] or CASES:
        try:
            in_forks(2, lambda rank, size, case=case: run(case, rank, size), seconds=30.0)
            print(f"right: {case}", flush=True)
        except AssertionError as failure:
            print(f"wrong: {case}\n{failure}", flush=True)


if __name__ == "__main__":
    main()
