"""vLLM's own deepep_high_throughput and deepep_low_latency classes over `tokenyard.install_as("deep_ep")`.

Each case is a round trip: prepare, experts in plain torch, finalize, compared element by element with the sum over a
token's choices at f64. vLLM is unmodified but for what a CPU lacks; `vllm_rig.on_the_cpu` and `patched` have the list.
As a program, this file imports vLLM once and runs every case on ranks that are forks of it.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

from vllm_rig import in_forks, on_the_cpu, torch, vllm_folder

CASES = ["normal bf16", "normal fp8", "normal batches", "normal async", "low_latency bf16", "low_latency fp8",
         "low_latency ue8m0", "low_latency batches", "low_latency async"]
EXPERTS_OF_RANK, TOP_K = 3, 4
# vLLM's low-latency class accepts no smaller one.
HIDDEN = 2048
BLOCK = 128


def needs():
    """What is missing for these tests, or None."""
    if vllm_folder() is None:
        return "TOKENYARD_VLLM names no folder with vLLM's Python files: unpack its wheel there"
    for package in ("pydantic", "regex", "psutil", "cloudpickle", "msgspec", "yaml", "tqdm"):
        if importlib.util.find_spec(package) is None:
            return f"could not import '{package}', which vLLM imports: install {package}"
    return None


if os.environ.get("TOKENYARD_STRICT") != "1" and needs():
    pytest.skip(needs(), allow_module_level=True)


@pytest.fixture(scope="module")
def ran():
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run([sys.executable, "-W", "ignore", __file__], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
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

    def __init__(self, rank, ranks, seed=1, hidden=HIDDEN, most=12):
        draw = torch.Generator().manual_seed(seed)
        self.rank, self.ranks, self.experts, self.hidden, self.most = rank, ranks, EXPERTS_OF_RANK * ranks, hidden, most
        self.own, self.mirrored = torch.randn(2, self.experts, hidden, generator=draw)
        # One rank without tokens, and one with all.
        self.count = [0 if r == 1 else most if r == 0 else most - 3 - r for r in range(ranks)]
        self.x = [torch.randn(n, hidden, generator=draw).to(torch.bfloat16) for n in self.count]
        # An expert may come twice in a token, and -1 is none.
        self.ids = [torch.randint(0, self.experts, (n, TOP_K), generator=draw) for n in self.count]
        for ids in self.ids:
            ids[torch.rand(ids.shape, generator=draw) < 0.15] = -1
        self.weights = [torch.rand(n, TOP_K, generator=draw) + 0.05 for n in self.count]

    @property
    def mine(self):
        return self.x[self.rank], self.weights[self.rank], self.ids[self.rank]

    def expert(self, number, x):
        return x * self.own[number].to(x.dtype) + x.flip(-1) * self.mirrored[number].to(x.dtype)

    def standard(self, rows, scales, ids, weights):
        """The sum over a row's choices of local experts, `[rows, hidden]` bf16."""
        x, out = values(rows, scales), torch.zeros(rows.shape[0], self.hidden)
        for number in range(self.rank * EXPERTS_OF_RANK, (self.rank + 1) * EXPERTS_OF_RANK):
            weight = (weights * (ids == number)).sum(1, keepdim=True)
            out += torch.where(weight > 0, weight * self.expert(number, x), 0)
        return out.to(torch.bfloat16)

    def batched(self, rows, scales, counts):
        """What each local expert makes of its rows, `[local experts, rows, hidden]` bf16; NaN where none came."""
        x, out = values(rows, scales), torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
        for place, count in enumerate(counts.tolist()):
            of_expert = self.expert(self.rank * EXPERTS_OF_RANK + place, x[place, :count])
            out[place, :count] = of_expert.to(torch.bfloat16)
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
        off = x.abs() * step + (x.unflatten(-1, (-1, BLOCK)).abs().amax(-1, keepdim=True) * 2.0**-17).expand(
            -1, -1, BLOCK).flatten(-2) * (step > 0) * (2 if power else 1)
        for place in range(TOP_K):
            used, number = ids[:, place, None] >= 0, ids[:, place].clamp(min=0)
            own, mirrored = self.own[number].double(), self.mirrored[number].double()
            term = weights[:, place, None].double() * (x * own + x.flip(-1) * mirrored)
            exact += torch.where(used, term, 0)
            size += torch.where(used, term.abs(), 0)
            lost = weights[:, place, None].double() * (off * own.abs() + off.flip(-1) * mirrored.abs())
            slack += torch.where(used, lost, 0)
        # Two roundings to bf16 of each term, and one of the sum.
        bound = 1.05 * (slack + 2.0**-8 * (2 * size + exact.abs())) + 1e-5
        error = (out.double() - exact).abs()
        assert out.shape == exact.shape and bool((error <= bound).all()), (error / bound).max()
        # Sums are of x, not of nothing.
        assert not out.numel() or float(out.abs().max()) > 1


def config_of(kind):
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    if kind in ("fp8", "ue8m0"):
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
        self.cls, self.layer, self.kind, self.wait = cls, layer, kind, wait

    def there(self):
        x, weights, ids = self.layer.mine
        given = (x, weights, ids.to(self.cls.topk_indices_dtype()), self.layer.experts, None, False, config_of(self.kind), False)
        self.got = now(self.cls.prepare_async(*given)) if self.wait else self.cls.prepare(*given)
        return self

    def back(self):
        from vllm.model_executor.layers.fused_moe import modular_kernel as mk
        from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduce

        rows, scales, meta, ids, weights = self.got
        assert meta.expert_num_tokens.tolist() == self.layer.counts(), (meta, self.layer.counts())
        quantised = self.kind in ("fp8", "ue8m0")
        assert rows.dtype == (torch.float8_e4m3fn if quantised else torch.bfloat16)
        if self.cls.activation_format == mk.FusedMoEActivationFormat.Standard:
            made, how = self.layer.standard(rows, scales, ids, weights), reduce.TopKWeightAndReduceNoOP()
        else:
            made, how = self.layer.batched(rows, scales, meta.expert_num_tokens), reduce.TopKWeightAndReduceDelegate()
            _, weights, ids = self.layer.mine
        out = torch.full((self.layer.mine[0].shape[0], self.layer.hidden), float("nan"), dtype=torch.bfloat16)
        given = (out, made, weights, ids, False, how)
        if self.wait:
            now(self.cls.finalize_async(*given))
        else:
            self.cls.finalize(*given)
        self.layer.check(out, 2.0**-4 if quantised else 0.0, self.kind == "ue8m0")


def run(case, rank, ranks):
    """One case on one rank."""
    import deep_ep
    import torch.distributed as dist

    high, low, batch = patched()
    mode, kind = case.split()
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


def main():
    on_the_cpu()
    patched()
    # Imported before the forks, which need it.
    import vllm.model_executor.layers.fused_moe.topk_weight_and_reduce  # noqa: F401

    for case in sys.argv[1:] or CASES:
        for ranks in (2, 4):
            try:
                in_forks(ranks, lambda rank, size, case=case: run(case, rank, size))
                print(f"right: {case}, {ranks} ranks", flush=True)
            except AssertionError as failure:
                print(f"wrong: {case}, {ranks} ranks\n{failure}", flush=True)


if __name__ == "__main__":
    main()
