"""transformers' Mixture-of-Experts layers over 4 and 8 ranks that are processes: tokenyard's exchange against the layer
in one piece, and against transformers' own all-to-all.

Hidden states are the bytes of a text through an embedding, so ranks' tokens repeat and experts' loads differ. Each
fixture starts this file once as a program, which imports torch and transformers, forks the ranks, and leaves a report
of each case. Cases of layers are elementwise within a bound that `Near` derives; those of whole models are within
a multiple of the rounding of the model in one piece.
"""

import copy
import datetime
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
import weakref

import pytest
from rig import free_port

if os.environ.get("TOKENYARD_STRICT") == "1":
    import torch
    import transformers
else:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.distributed.expert_parallel", reason="install transformers 5.24 or later")

TEXT = pathlib.Path(__file__).parents[2] / "LICENSE-APACHE"
SIZES = (4, 8)
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
DTYPES = {"mixtral": ("fp32", "bf16", "fp16"), "qwen3_moe": ("fp32", "bf16"), "deepseek_v3": ("fp32", "bf16"),
          "gpt_oss": ("fp32", "bf16")}
LAYERS = [f"{family} {dtype}" for family in FAMILIES for dtype in DTYPES[family]]
MODELS = [f"{family} tp" for family in FAMILIES] + ["mixtral fsdp", "qwen3_moe fsdp"]
REFUSALS = ["refusals"]

# Tokens of each rank: some have none, and one has more than the 128 for which contexts are made at first.
COUNTS = {4: (37, 0, 150, 19), 8: (20, 0, 141, 1, 0, 9, 32, 3)}
TOKENS = 206
# Tokens of which all choose the first experts, so that the other ranks' experts get no rows. Equally many on each rank.
NARROW = 24
EXPERTS, INNER = 16, 32
HIDDEN = {"mixtral": 64, "qwen3_moe": 48, "deepseek_v3": 80, "gpt_oss": 96}
TOP_K = {"mixtral": 2, "qwen3_moe": 4, "deepseek_v3": 4, "gpt_oss": 3}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The largest relative error of rounding to each type, and the largest error of rounding below its normal range.
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
UNDERFLOW = {"fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-25}


class Near:
    """A value in fp64, and how far any evaluation of it may be from it whose numbers are of a type, and whose sums are
    in fp32 in any order: the elementary bounds of rounding, to which every operation adds what its operands' errors
    become. A sum of n terms adds n * 2^-24 * sum |terms|, and storing a number u * |number|."""

    u, tiny = 0.0, 0.0

    def __init__(self, value, error=None):
        self.value, self.error = value, torch.zeros_like(value) if error is None else error

    def map(self, move):
        """Other places of the same numbers."""
        return Near(move(self.value), move(self.error))

    @property
    def most(self):
        return self.value.abs() + self.error

    def stored(self, roundings=1):
        """Rounded to the type so many times."""
        return Near(self.value, self.error + roundings * (self.u * self.most + self.tiny))

    def __matmul__(self, other):
        error = self.value.abs() @ other.error + self.error @ other.most
        sums = self.value.shape[-1] * 2.0**-24 * (self.most @ other.most)
        return Near(self.value @ other.value, error + sums).stored()

    def __mul__(self, other):
        """Twice rounded: products of fp32 weights are first of fp32."""
        return Near(self.value * other.value, self.value.abs() * other.error + self.error * other.most).stored(2)

    def __add__(self, other):
        return Near(self.value + other.value, self.error + other.error).stored()

    def sum(self, dim, terms):
        """A sum whose addends are rounded, with so many roundings of partial sums, too."""
        most = self.most.sum(dim)
        error = self.error.sum(dim) + (terms * self.u + self.value.shape[dim] * 2.0**-24) * most
        return Near(self.value.sum(dim), error + terms * self.tiny)

    def swish(self, alpha):
        """g * sigmoid(alpha * g), and its derivative. Their slopes are at most 1.1 and alpha / 2. Each is a handful of
        operations, by whose roundings sigmoid is off by (|alpha * g| / 4 + 1) * u, times up to 1 + |alpha * g|."""
        z = alpha * self.value
        s = torch.sigmoid(z)
        rounded = 4 * self.u * (1 + z.abs()) ** 2 + 4 * self.tiny
        value = Near(self.value * s, 1.1 * self.error + rounded * (1 + self.value.abs()))
        return value, Near(s + z * s * (1 - s), alpha / 2 * self.error + rounded)


def analysed(family, dtype, weights, x, ids, w, grad, ranks):
    """What the experts make of `x`, and gradients of all that they are given, for the gradient `grad` of the output."""
    Near.u, Near.tiny = ROUNDING[dtype], UNDERFLOW[dtype]
    weights = {name: tensor.double() for name, tensor in weights.items()}
    up, down = weights["gate_up_proj"], weights["down_proj"]
    alpha, offset = 1.0, 0.0
    if family == "gpt_oss":
        # Columns are inputs, and gate and up alternate.
        up, down = up.transpose(1, 2), down.transpose(1, 2)
        up = torch.cat((up[:, ::2], up[:, 1::2]), 1)
        alpha, offset = 1.702, 1.0
    x, w, grad = x.double(), w.double(), grad.double()
    tokens, top_k = ids.shape
    # The addends of each token, by its choices.
    shape = (tokens, top_k, x.shape[1])
    y, dx, dw = Near(torch.zeros(shape).double()), Near(torch.zeros(shape).double()), Near(torch.zeros_like(w))
    of = {name: Near(torch.zeros_like(tensor)) for name, tensor in weights.items()}

    def put(into, place, what):
        into.value[place], into.error[place] = what.value, what.error

    for e in range(up.shape[0]):
        t, k = torch.where(ids == e)
        if not t.numel():
            continue
        rows, weight, towards = Near(x[t]), Near(w[t, k, None]), Near(grad[t])
        both = rows @ Near(up[e].T)
        if family == "gpt_oss":
            bias = weights["gate_up_proj_bias"][e]
            both = both + Near(torch.cat((bias[::2], bias[1::2])).expand_as(both.value))
        gate, linear = both.map(lambda t: t[:, :INNER]), both.map(lambda t: t[:, INNER:])
        assert family != "gpt_oss" or both.value.abs().max() < 6.9, "the clamps act, which is not analysed"
        linear = linear + Near(torch.full_like(linear.value, offset)) if offset else linear
        act, slope = gate.swish(alpha)
        inner = act * linear
        out = inner @ Near(down[e].T)
        if family == "gpt_oss":
            out = out + Near(weights["down_proj_bias"][e].expand_as(out.value))
        put(y, (t, k), out * weight)
        put(dw, (t, k), (out * towards).sum(1, 1))
        d_out = towards * weight
        d_inner = d_out @ Near(down[e])
        d_linear, d_gate = d_inner * act, d_inner * linear * slope
        d_both = Near(torch.cat((d_gate.value, d_linear.value), 1), torch.cat((d_gate.error, d_linear.error), 1))
        put(dx, (t, k), d_both @ Near(up[e]))
        d_up, d_down = d_both.map(lambda t: t.T) @ rows, d_out.map(lambda t: t.T) @ inner
        if family == "gpt_oss":
            mixed = lambda t: torch.stack(t.chunk(2), 1).flatten(0, 1)  # noqa: E731
            put(of["gate_up_proj_bias"], e, d_both.sum(0, 1).map(mixed))
            put(of["down_proj_bias"], e, d_out.sum(0, 1))
            d_up, d_down = d_up.map(mixed).map(lambda t: t.T), d_down.map(lambda t: t.T)
        put(of["gate_up_proj"], e, d_up)
        put(of["down_proj"], e, d_down)
    # Sums of choices: partial sums are rounded top_k times, or for each rank and once more.
    roundings = max(top_k, 1 + min(top_k, ranks))
    return {"y": y.sum(1, roundings), "x": dx.sum(1, roundings), "w": dw.stored(), **of}


def config_of(family):
    """A small model's configuration."""
    hidden = HIDDEN[family]
    common = dict(vocab_size=256, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                  max_position_embeddings=256, num_experts_per_tok=TOP_K[family], pad_token_id=0, bos_token_id=1,
                  eos_token_id=2)
    if family == "mixtral":
        return transformers.MixtralConfig(num_local_experts=EXPERTS, intermediate_size=INNER, head_dim=16, **common)
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(num_experts=EXPERTS, intermediate_size=INNER, moe_intermediate_size=INNER,
                                           head_dim=16, norm_topk_prob=True, **common)
    if family == "gpt_oss":
        return transformers.GptOssConfig(num_local_experts=EXPERTS, intermediate_size=INNER, head_dim=16,
                                         sliding_window=32, **common)
    return transformers.DeepseekV3Config(
        n_routed_experts=EXPERTS, intermediate_size=INNER, moe_intermediate_size=INNER, first_k_dense_replace=1,
        kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_group=4,
        topk_group=2, num_nextn_predict_layers=0, **common)


def layer_of(family, dtype):
    """A layer whose weights are random, and make numbers of about 1."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    classes = (MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock, DeepseekV3MoE, GptOssMLP)
    config = config_of(family)
    config._experts_implementation = "eager"
    layer = classes[FAMILIES.index(family)](config)
    torch.manual_seed(FAMILIES.index(family))
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            inputs = INNER if "down" in name else HIDDEN[family]
            torch.nn.init.normal_(tensor, std=0.1 if "bias" in name else inputs**-0.5)
    return layer.to(TYPES[dtype])


def text(first, count):
    return torch.tensor(list(TEXT.read_bytes()[300 + first : 300 + first + count]))


def experts_of(experts, x, ids, w, grad):
    """What experts make, and all gradients."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    experts.zero_grad()
    y = experts(x, ids, w)
    y.backward(grad)
    local = lambda t: t.to_local() if hasattr(t, "to_local") else t  # noqa: E731
    weights = {name: local(weight.grad).clone() for name, weight in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "w": w.grad, **weights}


def case_of_layer(name):
    """A layer, its inputs, what it makes of them in one piece, and the bounds."""
    family, dtype = name.split()
    layer = layer_of(family, dtype)
    torch.manual_seed(7)
    table = torch.randn(256, HIDDEN[family])
    case = {"layer": layer.state_dict()}
    for inputs, first, count in (("routed", 0, TOKENS), ("narrow", TOKENS, NARROW), ("repeated", TOKENS, NARROW)):
        x = table[text(first, count)].to(TYPES[dtype])
        with torch.no_grad():
            _, w, ids = getattr(layer, "gate", getattr(layer, "router", None))(x)
        if inputs == "narrow":
            ids = torch.arange(TOP_K[family]).expand(count, -1).contiguous()
        if inputs == "repeated":
            # As of DeepSeek-V4's table before it is loaded, but for some of other experts.
            ids = torch.arange(count)[:, None].expand(-1, TOP_K[family]) % EXPERTS
            ids = ids.contiguous().index_fill_(0, torch.arange(0, count, 3), EXPERTS - 1)
            ids[:, -1] = ids[:, 0].where(torch.arange(count) % 2 == 0, 0)
        grad = torch.randn(count, HIDDEN[family]).to(TYPES[dtype])
        weights = dict(layer.experts.named_parameters())
        whole = experts_of(layer.experts, x, ids, w, grad)
        near = analysed(family, dtype, {n: t.detach() for n, t in weights.items()}, x, ids, w, grad, max(SIZES))
        for what, found in whole.items():
            check(f"{inputs} {what} of the layer in one piece", found, near[what].value, near[what].error)
        bounds = {what: 2 * found.error for what, found in near.items()}
        checked()
        case[inputs] = {"x": x, "ids": ids, "w": w, "grad": grad, "whole": whole, "bounds": bounds}
    return case


FAULTS = []


def check(what, found, wanted, bound):
    """Elementwise; a NaN is no number within a bound. Notes what is wrong, as a rank that stopped would stop others."""
    if found.shape != wanted.shape:
        FAULTS.append(f"{what} is {[*found.shape]}, not {[*wanted.shape]}")
        return
    error = (found.detach().double() - wanted.detach().double()).abs()
    within = error <= bound
    if not bool(within.all()):
        worst = float((error / bound).max())
        FAULTS.append(f"{what}: {int((~within).sum())} of {within.numel()} off, by up to {worst:.3g} bounds")


def checked():
    """Raises what was noted."""
    faults = "\n".join(FAULTS)
    FAULTS.clear()
    assert not faults, faults


def distributed(layer, meshes, implementation):
    """The layer, with its experts over the ranks."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    names = [name for name, _ in layer.experts.named_parameters()]
    plan = {f"experts.{name}": "grouped_gemm" for name in names} | {"experts": "ep_dispatch_experts"}
    return apply_expert_parallelism(layer, meshes["ep"], meshes["tp"], plan, ep_implementation=implementation)


def part_of(values, size, rank, counts):
    """A rank's part of inputs, and of what should come of them."""
    tokens = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    owned = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    return {name: value[tokens if name in ("y", "x", "w", "ids", "grad") else owned] for name, value in values.items()}


def run_layer(name, case, size, rank, meshes):
    from tokenyard.integrations import transformers as integration

    family, dtype = name.split()
    whole = layer_of(family, dtype)
    for implementation in ("tokenyard", "all_to_all"):
        layer = layer_of(family, dtype)
        layer.load_state_dict(case["layer"])
        layer = distributed(layer, meshes, implementation)
        # Few tokens first, then more than the context has room for.
        few = (NARROW // size,) * size
        for inputs, counts in (("narrow", few), ("routed", COUNTS[size]), ("repeated", few)):
            part = part_of({n: case[inputs][n] for n in ("x", "ids", "w", "grad")}, size, rank, counts)
            wanted, bounds = (part_of(case[inputs][n], size, rank, counts) for n in ("whole", "bounds"))
            if implementation == "tokenyard":
                with torch.no_grad():
                    y = layer.experts(part["x"], part["ids"], part["w"])
                check(f"{inputs} y without gradients", y, wanted["y"], bounds["y"])
            found = experts_of(layer.experts, part["x"], part["ids"], part["w"], part["grad"])
            for what in found:
                check(f"{inputs} {what} of {implementation}", found[what], wanted[what], bounds[what])
        if implementation == "tokenyard":
            rooms = [made._room for made in integration._EXCHANGES.values() if made.wanted[1] == HIDDEN[family]]
            assert max(rooms) == 256, f"contexts have room for {rooms} tokens"
            # The whole block, with its router, in evaluation.
            whole.load_state_dict(case["layer"])
            x = part["x"].unsqueeze(0)
            with torch.no_grad():
                found, in_one = layer.eval()(x), whole.eval()(x)
            found, in_one = (y[0] if isinstance(y, tuple) else y for y in (found, in_one))
            rest = 2 * ROUNDING[dtype] * (in_one[0].double().abs() + bounds["y"])
            check("the block", found[0], in_one[0], bounds["y"] + rest)


def whole(tensor):
    """All of a tensor, of which ranks may have parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def logits_and_gradients(model, batches):
    """For the mean of the batches' losses; `{name: tensor}`."""
    model.zero_grad()
    made = {}
    for number, tokens in batches.items():
        out = model(input_ids=tokens, labels=tokens)
        (out.loss / len(batches)).backward()
        made |= {f"logits {number}": out.logits.detach(), f"loss {number}": out.loss.detach()}
    gradients = {n: whole(weight.grad).clone() for n, weight in model.named_parameters() if weight.grad is not None}
    return made | gradients


def batches_of(kind, size):
    """One batch for all ranks, or one of another length for each."""
    if kind == "tp":
        return {0: text(1000, 96).view(2, 48)}
    return {rank: text(1000, 8 + 24 * rank).view(1, -1) for rank in range(size)}


def case_of_model(name, folder):
    """A model in one piece: what it makes, and by how much its rounding moves that."""
    family, kind = name.split()
    batches = batches_of(kind, min(SIZES))
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.05) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder / family)
    made = logits_and_gradients(model, batches)
    # Grouped matrix products know no fp64.
    model.config._experts_implementation = "eager"
    exact = logits_and_gradients(model.double(), batches)
    # Sums in other orders are off by about as much; with one expert in the place of another it is 10^4 times as much.
    bounds = {what: 16 * float((made[what] - exact[what]).abs().max()) + 2.0**-24 * float(exact[what].abs().max())
              for what in made}
    return {"whole": exact, "bounds": bounds}


def run_model(name, case, size, rank, folder):
    family, kind = name.split()
    batches = batches_of(kind, size)
    # Once two groups of experts, each with all of them.
    groups = 2 if name == "qwen3_moe fsdp" else 1
    if kind == "fsdp":
        # Each rank has its own, and gradients are of the mean.
        batches = {rank: batches[rank]}
    for implementation in ("tokenyard", "all_to_all"):
        distribution = transformers.DistributedConfig(
            **{f"{kind}_size": size}, ep_size=size // groups, ep_implementation=implementation)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / family, distributed_config=distribution, dtype=torch.float32)
        found = logits_and_gradients(model, batches)
        assert sum("weight" in what for what in found) == sum("weight" in what for what in case["whole"]) > 9
        for what, value in found.items():
            check(f"{what} of {implementation}", value, case["whole"][what], torch.tensor(case["bounds"][what]))


def run_refusals(size, rank, meshes):
    """Arguments that no rank sends, routing that one rank must not, and what comes of it."""
    import tokenyard
    from torch.distributed.device_mesh import init_device_mesh

    layer = distributed(layer_of("mixtral", "fp32"), meshes, "tokenyard")
    x, ids, w = torch.zeros(3, HIDDEN["mixtral"]), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    ids[:, 1] = 1
    refused = (
        (TypeError, "hidden_states is of another dtype: expected one of .*, got torch.float64", (x.double(), ids, w)),
        (ValueError, r"hidden_states is of another shape: .*, got \[3, 64\] and \[2, 2\]", (x, ids[:2], w[:2])),
        (ValueError, r"top_k_weights is of another shape: .* \[3, 2\], got \[3, 1\]", (x, ids, w[:, :1])),
        (ValueError, r"top_k_index is of another shape: .*, got \[3, 0\]", (x, ids[:, :0], w[:, :0])),
        (TypeError, "top_k_index is of another dtype: .*, got torch.float32", (x, w, w)),
        (TypeError, "top_k_weights is of another dtype: .*, got torch.int64", (x, ids, ids)),
        (ValueError, "top_k_index is on another device: expected hidden_states' cpu, got meta", (x, ids.to("meta"), w)),
    )
    for kind, message, given in refused:
        with pytest.raises(kind, match=message):
            layer.experts(*given)
    with pytest.raises(TypeError, match="top_k_weights is of another type: expected a tensor, got list"):
        layer.experts(x, ids, w.tolist())
    with pytest.raises(ValueError, match="hidden_states is on another device: expected cpu or cuda, got meta"):
        layer.experts(*(tensor.to("meta") for tensor in (x, ids, w)))
    layer.experts(x, ids, w)
    # The number of the further expert of rank 0, which ranks use among themselves.
    with pytest.raises(tokenyard.RoutingError):
        layer.experts(x, ids + EXPERTS, w)
    draw = torch.Generator().manual_seed(3)
    x, w = torch.randn(6, HIDDEN["mixtral"], generator=draw), torch.rand(6, 2, generator=draw)
    ids = torch.arange(12).view(6, 2)
    unusable_routing(layer, rank, size - 1, x, ids, w, False)
    # All ranks have the same batch, of which each sends a slice.
    shared = {"ep": meshes["ep"], "tp": init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]}
    unusable_routing(distributed(layer_of("mixtral", "fp32"), shared, "tokenyard"), rank, 2, x, ids, w, True)
    a_larger_context(layer)
    a_layer_made_anew(layer, meshes, x, ids, w)


def a_layer_made_anew(layer, meshes, x, ids, w):
    """Layers made anew, and copies, do not share a context that has ended with those that do."""
    from tokenyard.integrations import transformers as integration

    right = layer_of("mixtral", "fp32").experts(x, ids, w).detach()
    before = list(integration._EXCHANGES.values())
    for exchange in before:
        exchange.ended = True
    check("y of the layer itself", layer.experts(x, ids, w), right, torch.tensor(1e-5))
    other = distributed(layer_of("mixtral", "fp32"), meshes, "tokenyard")
    check("y of a layer made anew", other.experts(x, ids, w), right, torch.tensor(1e-5))
    made = [exchange for exchange in integration._EXCHANGES.values() if not exchange.ended]
    assert len(made) == 1 and made[0] not in before
    kept = [each for each in gc.get_objects() if isinstance(each, integration._Layer) and each._exchanges]
    assert kept and all(copy.copy(each)._exchanges is None for each in kept)


def unusable_routing(layer, rank, wrong_rank, x, ids, w, shared):
    """One rank's tokens name an expert that the model has not. The others get their sums, and wait for nobody."""
    import tokenyard

    wrong = ids.clone()
    if shared or rank == wrong_rank:
        wrong[5, 1] = EXPERTS + 2
    right = layer_of("mixtral", "fp32").experts(x, ids, w).detach()
    if rank == wrong_rank:
        text = f"choice 1 of token {1 if shared else 5} names expert {EXPERTS + 2},"
        with pytest.raises(tokenyard.RoutingError, match=text) as raised:
            layer.experts(x, wrong, w)
        assert not hasattr(raised.value, "dispatched")
    else:
        # Nothing of the slice was sent.
        wanted = torch.cat((right[:4], torch.zeros_like(right[4:]))) if shared else right
        check("y beside unusable routing", layer.experts(x, wrong, w), wanted, torch.tensor(1e-5))
    check("y after it", layer.experts(x, ids, w), right, torch.tensor(1e-5))
    # As on a GPU, where a call raises the error of an earlier one in place of its own work.
    combine, found = tokenyard.AllToAll.combine, [tokenyard.RoutingError("of the dispatch")] * (rank == 0)

    def once(*given, **named):
        if found:
            raise found.pop()
        return combine(*given, **named)

    tokenyard.AllToAll.combine = once
    if rank == 0:
        with pytest.raises(tokenyard.RoutingError, match="of the dispatch"):
            layer.experts(x, ids, w)
    else:
        check("y beside a late error", layer.experts(x, ids, w), right, torch.tensor(1e-5))
    tokenyard.AllToAll.combine = combine


def a_larger_context(layer):
    """Is made once the smaller one has gone, as there may be no memory for both."""
    from tokenyard import _hosts

    contexts, alive, kept = [], [], _hosts.AllToAll

    def noted(*given, **named):
        alive.append([context() is not None for context in contexts])
        ep = kept(*given, **named)
        contexts.append(weakref.ref(ep))
        return ep

    _hosts.AllToAll = noted
    with torch.no_grad():
        for tokens in (1, 300):
            # Three choices, for which there is no context yet.
            ids = torch.arange(3).expand(tokens, 3)
            layer.experts(torch.ones(tokens, HIDDEN["mixtral"]), ids, torch.ones(tokens, 3))
    _hosts.AllToAll = kept
    assert alive == [[], [False]], alive


def program_of_rank(size, rank, port, folder):
    import torch.distributed as dist
    from tokenyard.integrations import transformers as integration
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    meshes = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ep", "tp"))
    integration.register(timeout=30)
    cases = torch.load(folder / "cases.pt", weights_only=False)
    report = {}
    for name in cases_over(size):
        started = time.monotonic()
        try:
            if name in LAYERS:
                run_layer(name, cases[name], size, rank, meshes)
            elif name in MODELS:
                run_model(name, cases[name], size, rank, folder)
            else:
                run_refusals(size, rank, meshes)
            checked()
            report[name] = "right"
        except BaseException as failure:  # noqa: BLE001: goes into the report
            report[name] = traceback.format_exc()
            if not isinstance(failure, AssertionError):
                # Ranks are no longer in step.
                break
        report[f"seconds of {name}"] = round(time.monotonic() - started, 2)
    (folder / f"{size}-{rank}.json").write_text(json.dumps(report))


def forked(work, *given):
    """A process that does the work and ends."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            work(*given)
            code = 0
        except BaseException:  # noqa: BLE001: printed
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return number


def waited(numbers, seconds):
    """Waits for processes, and ends those that take longer."""
    deadline, left, codes = time.monotonic() + seconds, set(numbers), []
    while left and time.monotonic() < deadline:
        for number in list(left):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                left.remove(number)
                codes.append(status)
        time.sleep(0.02)
    for number in left:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
    return not left and not any(codes)


def program(folder):
    """Cases by one process, and then the ranks: autograd does not work in forks of a process that used it."""
    torch.set_num_threads(1)

    def cases():
        made = {name: case_of_layer(name) for name in LAYERS}
        made |= {name: case_of_model(name, folder) for name in MODELS}
        torch.save(made, folder / "cases.pt")

    layer_of("mixtral", "fp32"), [config_of(family) for family in FAMILIES]
    import tokenyard.integrations.transformers  # noqa: F401: once for all ranks

    if not waited([forked(cases)], 60):
        sys.exit("the cases failed")
    for size in SIZES:
        port = int(free_port())
        waited([forked(program_of_rank, size, rank, port, folder) for rank in range(size)], 100)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each rank of each size says."""
    folder = tmp_path_factory.mktemp("transformers")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error",
                                "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    ran = subprocess.run([sys.executable, __file__, str(folder)], env=environment, capture_output=True, text=True,
                         timeout=280)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*-*.json")}
    return found, ran.stderr[-2000:]


def cases_over(size):
    """Whole models run over the fewest ranks alone."""
    return LAYERS + (MODELS + REFUSALS) * (size == min(SIZES))


@pytest.mark.parametrize(("name", "size"), [(name, size) for size in SIZES for name in cases_over(size)])
def test_transformers_over_ranks(reports, name, size):
    found, printed = reports
    for rank in range(size):
        said = found.get(f"{size}-{rank}", {}).get(name, f"not run: {printed}")
        assert said == "right", f"rank {rank}: {said}"


def test_what_register_refuses():
    from tokenyard.integrations import transformers as integration

    for timeout in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"timeout is {timeout}: expected seconds above 0, up to 1e9, got"):
            integration.register(timeout=timeout)
    with pytest.raises(TypeError, match="timeout is of another type: expected seconds, got str"):
        integration.register(timeout="10")


if __name__ == "__main__":
    program(pathlib.Path(sys.argv[1]))
