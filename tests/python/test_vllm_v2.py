"""vLLM's prepare and finalize for DeepEP's version 2 over `tokenyard.install_as("deep_ep")`, against a dense reference.

vLLM's class is unmodified; `on_the_cpu` has what stands in for GPUs. Ranks are threads, on CPU tensors. vLLM is in a
folder of its own, `TOKENYARD_VLLM_FOLDER` or target/engines/vllm, into which tests/all.sh unpacks it, and which this
program alone has in sys.path. Of the packages that it asks for, transformers, msgspec and pydantic are needed; others are stood in for.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import subprocess
import sys
import traceback
import types
from unittest import mock

import pytest

from engine_rig import HIDDEN, LOCAL, ROOT, TOP_K, Lines

FOLDER = pathlib.Path(os.environ.get("TOKENYARD_VLLM_FOLDER") or ROOT / "target" / "engines" / "vllm")
PACKAGES = ("transformers", "msgspec", "pydantic")
MOST = 64
DEADLINE_SECONDS = 150.0

if os.environ.get("TOKENYARD_STRICT") != "1":
    pytest.importorskip("torch")
    if not (FOLDER / "vllm").is_dir():
        pytest.skip(f"could not find vllm in {FOLDER}: `tests/all.sh python` unpacks it", allow_module_level=True)
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"could not find {package}: `pip install {package}`", allow_module_level=True)


def test_vllm():
    ran = subprocess.run([sys.executable, "-W", "ignore", __file__], env=os.environ | {"OMP_NUM_THREADS": "1"},
                         capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert ran.returncode == 0 and ran.stdout.count("right") == 2, ran.stdout + ran.stderr


# The program


class AnyClass(type):
    """Classes whose attributes are such classes, too, and whose objects do anything."""

    def __getattr__(cls, name):
        return anything(name)


def anything(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def of_object(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return mock.MagicMock()

    def schema(cls, *given):
        from pydantic_core import core_schema

        return core_schema.any_schema()

    return AnyClass(name, (), {
        "__get_pydantic_core_schema__": classmethod(schema),
        "__class_getitem__": classmethod(lambda cls, item: cls), "__init__": lambda self, *given, **named: None,
        "__call__": lambda self, given=None, *more, **named: given, "__getattr__": of_object,
    })


class StandIn(types.ModuleType):
    """A module of such classes."""

    __path__ = []

    def __getattr__(self, name):
        setattr(self, name, anything(name))
        return self.__dict__[name]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that are missing and that vLLM imports for other things; not those whose presence it takes as a sign."""

    SIGNS = ("vllm", "torch", "numpy", "deep_ep", "tokenyard", "triton", "amdsmi", "libtpu", "pynvml", "torch_xla", "flashinfer",
             "intel_extension_for_pytorch", "tpu_commons", "tpu_inference", "vllm_flash_attn", "deep_gemm", "triton_kernels",
             "aiter", "mori", "nixl_ep", "moonep")

    def __init__(self):
        self.known = set()

    def find_spec(self, name, path, target=None):
        package = name.partition(".")[0]
        if package in self.SIGNS:
            return None
        asking = [frame for frame in traceback.extract_stack() if "importlib" not in frame.filename][:-1]
        if package not in self.known and not (asking and f"{os.sep}vllm{os.sep}" in asking[-1].filename):
            return None
        self.known.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def on_the_cpu():
    """Stand-ins for pinned memory, a kernel of Triton, and quantisation."""
    import torch
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_v2

    def globalized(local, sums, offset, experts):
        real = (torch.arange(len(local)) < sums[-1])[:, None] & (local >= 0) & (local + offset < experts)
        return local.copy_(torch.where(real, local + offset, -1))

    modular_kernel.PIN_MEMORY = False
    deepep_v2._globalize_recv_topk_idx = globalized
    deepep_v2.moe_kernel_quantize_input = lambda x, *given, quant_dtype, **named: quantised_rows(x, quant_dtype)


def quantised_rows(x, quant_dtype):
    """fp8 rows and scales that are powers of two: fp32 by blocks of 128, or UE8M0 bytes by blocks of 32."""
    import torch

    if quant_dtype is None:
        return x, None
    block = 32 if quant_dtype == "mxfp8" else 128
    blocks = x.float().view(x.shape[0], x.shape[1] // block, block)
    exponents = torch.ceil(torch.log2(blocks.abs().amax(2).clamp(min=1e-4) / 448))
    rows = (blocks * torch.exp2(-exponents)[..., None]).to(torch.float8_e4m3fn).view(x.shape)
    return rows, (exponents + 127).to(torch.uint8) if block == 32 else torch.exp2(exponents)


def values(rows, scales):
    """What rows are as fp32."""
    import torch

    if scales is None:
        return rows.float()
    scales = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales
    return rows.float() * scales.repeat_interleave(rows.shape[1] // scales.shape[1], 1)


def experts_of(batch, rank, decode, got):
    """Each element of what prepare returns, and what experts make of it: rows with their weights."""
    import torch

    rows, scales, counts, ids, weights = got
    own = range(rank * LOCAL, (rank + 1) * LOCAL)
    if decode:
        places = [(s, t) for s, of in enumerate(batch.ids) for t in range(len(of)) if any(e in own for e in of[t].tolist())]
        assert counts.expert_num_tokens is None and int(counts.psum_recv_per_rank[-1]) == len(places)
        wanted = [[e if e in own else -1 for e in batch.ids[s][t].tolist()] for s, t in places]
        assert ids[: len(places)].tolist() == wanted and (ids[len(places) :] == -1).all()
    else:
        found = [(e, s, *place) for e in own for s, of in enumerate(batch.ids) for place in (of == e).nonzero().tolist()]
        places = [place[1:3] for place in found]
        assert counts.expert_num_tokens.tolist() == [sum(place[0] == e for place in found) for e in own]
        assert len(rows) == len(found) and ids.tolist() == [[place[0]] for place in found]
        assert weights.tolist() == [[float(batch.weights[s][t, k])] for _, s, t, k in found]
    back = torch.full((len(rows), HIDDEN), float("nan"), dtype=torch.bfloat16)
    for n, (s, t) in enumerate(places):
        assert torch.equal(rows[n].view(torch.uint8), batch.sent[s][0][t].view(torch.uint8))
        assert scales is None or torch.equal(scales[n], batch.sent[s][1][t])
        value = values(rows[n : n + 1], None if scales is None else scales[n : n + 1])[0]
        sums = torch.zeros(HIDDEN)
        for expert, weight in zip(ids[n].tolist(), weights[n]):
            if expert >= 0:
                assert weight in batch.weights[s][t][batch.ids[s][t] == expert]
                sums += weight * batch.expert(expert, value)
        back[n] = sums.bfloat16()
    return back


def exercise(world):
    """Decode and prefill in alternation over one buffer, in each format."""
    import deep_ep
    import torch
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_v2 import DeepEPV2PrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    rank, ranks, seed = world.rank, world.size, 0
    buffer = deep_ep.ElasticBuffer(
        group=world, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOP_K, use_fp8_dispatch=True, allow_hybrid_mode=True,
        prefer_overlap_with_compute=True, allow_multiple_reduction=True, explicitly_destroy=True, num_gpu_timeout_secs=30,
    )
    assert buffer.get_theoretical_num_sms(num_experts=LOCAL * ranks, num_topk=TOP_K) > 0
    kinds = {None: {}, torch.float8_e4m3fn: dict(block_shape=[128, 128]), "mxfp8": dict(is_scale_swizzled=False)}
    for quant_dtype, how in kinds.items():
        config = FusedMoEQuantConfig.make(quant_dtype, **how)
        both = {
            decode: DeepEPV2PrepareAndFinalize(
                buffer, num_dispatchers=ranks, dp_size=ranks, rank_expert_offset=rank * LOCAL, num_experts=LOCAL * ranks,
                num_topk=TOP_K, use_fp8_dispatch=quant_dtype is not None, use_cudagraph=decode,
            )
            for decode in (True, False)
        }
        for counts in ([5 + 3 * r for r in range(ranks)], [0] + [7] * (ranks - 1), [MOST] + [1] * (ranks - 1)):
            for decode, one in both.items():
                for late in (False, True):
                    seed += 1
                    batch = Lines(counts, seed, functools.partial(quantised_rows, quant_dtype=quant_dtype))
                    most = types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(counts))
                    # A step's context is one for the process.
                    DP.dp_metadata = most
                    world.barrier()
                    given = (batch.x[rank], batch.weights[rank], batch.ids[rank], LOCAL * ranks, None, False, config)
                    got = one.prepare_async(*given)() if late else one.prepare(*given)
                    back = experts_of(batch, rank, decode, got)
                    out = torch.full_like(batch.x[rank], float("nan"))
                    give = (out, back, batch.weights[rank], batch.ids[rank], False, TopKWeightAndReduceNoOP())
                    one.finalize_async(*give)() if late else one.finalize(*give)
                    batch.check_sums(rank, out, values(*batch.sent[rank]))
                    world.barrier()
    buffer.destroy()


DP = types.SimpleNamespace(dp_metadata=None)


def main():
    sys.path.append(str(FOLDER))
    # transformers looks at what there is before the stand-ins are.
    import transformers.modeling_utils  # noqa: F401

    sys.meta_path.append(StandIns())
    import tokenyard
    from rig import in_ranks

    tokenyard.install_as("deep_ep")
    on_the_cpu()
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_v2

    deepep_v2.get_forward_context = lambda: DP
    for ranks in (2, 4):
        in_ranks(tokenyard.World.threads(ranks), exercise)
        print("right", flush=True)


if __name__ == "__main__":
    main()
