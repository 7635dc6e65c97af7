"""Dispatch and combine as operators of PyTorch: for torch.compile, CUDA graphs and autograd. Imports torch.

    got = ops.dispatch(ep, x, topk_idx, topk_weights)
    y = ops.combine(experts(got.rows, got.counts), got)

`ep` is a `tokenyard.AllToAll`. The operators `torch.ops.tokenyard.*` have its number as an argument, so a compiled
function is of one context. A handle is a tensor: int64 `[1]`, on the device of the rows, which stands for a
`tokenyard.Handle` as long as its storage lives. On a GPU it is known by its address, so a copy of it is no handle.

Gradients are of rows, and of the router's weights: of `token_weights` in the token layout, else of `row_weights`, which
contexts with `weights="none"` give (`dispatch_payload_words` at least `2 * top_k`, `payload_words` at least `top_k`).
The backward of a dispatch is a combine, and that of a combine a dispatch by the same handle without routing. Both are
collective, so every rank runs backward, too.
"""

from __future__ import annotations

import importlib
import itertools
import weakref
from typing import Any, Callable, Dict, List, MutableMapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.autograd.forward_ad
import torch.fx

from . import _choices, _eager, _native
from ._calls import CONTEXTS, AllToAll, must_be_tokens, must_lie, whole
from ._errors import Found
from ._native import CombineSent, Error, Format, Handle, Output, Sent
from ._tensors import TYPES, in_memory, must_be_tensors, name_of, no_gradient

__all__ = [
    "Dispatched", "combine", "combine_into", "combine_recv", "combine_send", "dispatch", "dispatch_again",
    "dispatch_into", "dispatch_recv", "dispatch_send", "host_counts",
]

EXACT = -1
"""Capacity of an output that has as many rows as come."""
MOST = -2
"""Capacity of an output that has room for any routing."""


class Dispatched(NamedTuple):
    """What a dispatch brought to this rank, as in `tokenyard.Dispatched`."""

    rows: torch.Tensor
    counts: torch.Tensor
    handle: torch.Tensor
    tokens: int
    """Tokens that this rank dispatched, or has room for."""
    scales: Optional[torch.Tensor] = None
    offsets: Optional[torch.Tensor] = None
    token_experts: Optional[torch.Tensor] = None
    token_weights: Optional[torch.Tensor] = None
    row_weights: Optional[torch.Tensor] = None
    """fp32, of the rows' shape: the weight of the choice that each row is, 0 of a row that is none."""
    row_count: Optional[torch.Tensor] = None
    """With `drop_overflow`, int32 `[1]`: all rows that came; in the contiguous layout padding included."""


# Operators


class _Kept:
    """What a tensor stands for: a handle, or a half that is to be received."""

    def __init__(self, ep: AllToAll, value: Any, layout: str, storage: Any) -> None:
        self.ep, self.value, self.layout, self.storage = ep, value, layout, storage
        self.counts: Optional[Tuple[List[int], List[int]]] = None


_KEPT: Dict[int, _Kept] = {}
"""By the number in a tensor on the CPU, which is below 0, and by the address of one on a GPU."""
_NUMBERS = itertools.count(1)


def _keep(
    x: torch.Tensor, ep: AllToAll, value: Any, layout: str, counts: Optional[Tuple[List[int], List[int]]] = None
) -> torch.Tensor:
    """The tensor that stands for a value."""
    if x.is_cuda:
        tensor = torch.empty(1, dtype=torch.int64, device=x.device)
        key = tensor.data_ptr()
    else:
        # Below 0, where no address is.
        key = -next(_NUMBERS)
        tensor = torch.tensor([key], device="cpu")

    def gone(storage: Any) -> None:
        kept = _KEPT.get(key)
        # Memory may have come to another tensor since.
        if kept is not None and kept.storage is storage:
            del _KEPT[key]

    _KEPT[key] = kept = _Kept(ep, value, layout, weakref.ref(tensor.untyped_storage(), gone))
    kept.counts = counts
    return tensor


def _kept(name: str, tensor: torch.Tensor, kind: Any = Handle) -> _Kept:
    """What a tensor stands for."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: give the tensor of a dispatch or a half")
    if tensor.dtype != torch.int64 or tensor.shape != (1,):
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: give the int64 [1] of a dispatch or a half")
    if tensor.untyped_storage().nbytes() == 0:
        raise ValueError(f"{name} has no memory, as its storage was freed: give the tensor itself, and while it is alive")
    key = tensor.data_ptr() if tensor.is_cuda else min(int(tensor), 0)
    kept = _KEPT.get(key) or _of_operator(key)
    if kept is None:
        raise ValueError(f"{name} stands for nothing that is alive: give the tensor itself, and while it is alive")
    if not isinstance(kept.value, kind):
        raise ValueError(f"{name} is the tensor of a {type(kept.value).__name__}: give that of a {kind.__name__}")
    return kept


def _must_be_real(**tensors: Any) -> None:
    """Refuses tensors on meta beside others: torch would have the call's fake answer for them."""
    if torch.compiler.is_compiling():
        return
    devices = {name: tensor.device for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    real = [device for device in devices.values() if device.type != "meta"]
    for name, device in devices.items():
        if device.type == "meta" and real:
            raise ValueError(f"{name} is on meta: give a tensor on {real[0]}")


def _of_operator(key: int) -> Optional[_Kept]:
    """What a tensor stands for that the operator in C made."""
    found = _native.operator_handle(key)
    return None if found is None else _Kept(_context(found[0]), found[1], found[2], None)


def _context(number: int) -> AllToAll:
    ep = CONTEXTS.get(number)
    if ep is None:
        raise ValueError(f"context {number} is closed: keep it as long as functions that were compiled with it")
    return ep


def _names(scales: bool, layout: str, row_weights: bool, drop_overflow: bool) -> List[str]:
    """What a dispatch returns, in this order. `scales`: whether its format has any."""
    names = ["handle", "rows", "counts"] + ["scales"] * scales + ["offsets"] * (layout == "contiguous")
    names += ["row_count"] * bool(drop_overflow)
    return names + ["token_experts", "token_weights"] * (layout == "token") + ["row_weights"] * row_weights


def _made(
    x: torch.Tensor,
    ep: AllToAll,
    format: Format,
    layout: str,
    capacity: Any,
    row_weights: bool,
    zero: bool,
    drop_overflow: bool,
) -> Dict[str, torch.Tensor]:
    """Outputs of a dispatch, without its handle. `capacity` may be symbolic. `zero`: rows that none fills are 0."""
    shapes = ep.shapes(layout, capacity, format)
    if drop_overflow:
        shapes["row_count"] = ((1,), "i32")
    if row_weights:
        shapes["row_weights"] = (shapes["rows"][0][:-1], "fp32")
    made = {}
    for name, (shape, dtype) in shapes.items():
        make = torch.zeros if zero and name == "rows" else torch.empty
        made[name] = make(shape, dtype=TYPES[dtype], device=x.device)
    return made


def _output(ep: AllToAll, layout: str, align: int, made: Dict[str, torch.Tensor], drop_overflow: bool) -> Any:
    """The output with these tensors. For row weights also with what they are computed from, which goes into `made`."""
    given: Dict[str, Any] = {name: tensor for name, tensor in made.items() if name != "row_weights"}
    if "row_weights" in made:
        rows = made["row_weights"].numel()
        more = {"row_expert": (rows,), "source": (rows, 2)} if ep.duplicates else {"row_expert": (rows,)}
        for name, shape in more.items():
            given[name] = made[name] = made["counts"].new_empty(shape)
        words = (*made["row_weights"].shape, 2 * ep.top_k)
        given["payload"] = made["payload"] = made["row_weights"].new_empty(words)
    return Output(layout, align=align, drop_overflow=drop_overflow, **given)


def _payload(topk_idx: torch.Tensor, topk_weights: Optional[torch.Tensor], top_k: int) -> torch.Tensor:
    """The payload from which row weights are computed: each token's experts, as bits, and their weights; -1 and 0 of
    choices that the call lacks."""
    if topk_idx is None:
        raise ValueError("topk_idx is missing: give the experts of each token")
    if topk_idx.dtype not in (torch.int32, torch.int64) or topk_idx.dim() != 2 or topk_idx.shape[1] > top_k:
        raise ValueError(
            f"topk_idx is {topk_idx.dtype} {list(topk_idx.shape)}: give int32 or int64 [tokens, 1 to {top_k}], where "
            "rows have row_weights"
        )
    if topk_weights is None or not topk_weights.is_floating_point() or topk_weights.shape != topk_idx.shape:
        got = "missing" if topk_weights is None else f"{topk_weights.dtype} {list(topk_weights.shape)}"
        raise ValueError(f"topk_weights is {got}: give weights of rows, floating {list(topk_idx.shape)} as topk_idx")
    in_memory("topk_idx", topk_idx)
    in_memory("topk_weights", topk_weights)
    room = (0, top_k - topk_idx.shape[1])
    ids = torch.nn.functional.pad(topk_idx, room, value=-1)
    return torch.cat((_choices.words(ids), torch.nn.functional.pad(topk_weights.float(), room)), 1)


_EXPERTS: MutableMapping[AllToAll, Dict[torch.device, torch.Tensor]] = weakref.WeakKeyDictionary()
_FEW_RUNS = 4


def _numbers(ep: AllToAll, local: torch.Tensor) -> torch.Tensor:
    """The experts that local numbers stand for, where these are 0 or more.

    Ranks have one or two runs of consecutive experts, unless a table of placement scatters them. Then the numbers are
    copied once: not in the first call of a graph whose memory torch owns, which refuses tensors that outlive it."""
    experts = ep.local_experts
    jumps = [(i, experts[i] - experts[i - 1] - 1) for i in range(1, len(experts)) if experts[i] != experts[i - 1] + 1]
    if len(jumps) < _FEW_RUNS:
        numbers = local + (experts[0] if experts else 0)
        for first, jump in jumps:
            numbers = torch.where(local >= first, numbers + jump, numbers)
        return numbers
    made = _EXPERTS.setdefault(ep, {})
    if local.device not in made:
        made[local.device] = torch.tensor(experts, dtype=torch.int32).to(local.device)
    return made[local.device][local.clamp(min=0).long()]


def _weigh(ep: AllToAll, made: Dict[str, torch.Tensor]) -> None:
    """Computes row weights: those of the choice that names the row's expert."""
    local, words = made["row_expert"], made["payload"].flatten(0, -2)
    named, weights = words[:, : ep.top_k].view(torch.int32), words[:, ep.top_k :]
    of_row = _numbers(ep, local)
    match = _choices.of_rows(named, of_row, local, made["source"] if ep.duplicates else None)
    made["row_weights"].copy_(torch.where(match, weights, 0).sum(1).view_as(made["row_weights"]))


def _dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: Optional[torch.Tensor],
    scales: Optional[torch.Tensor],
    context: int,
    format: int,
    layout: str,
    align: int,
    capacity: int,
    row_weights: bool,
    zero: bool,
    drop_overflow: bool,
) -> List[torch.Tensor]:
    ep = _context(context)
    stated, counts = ep.formats[format], None
    must_lie(layout, align)
    found = Found()
    payload = _payload(topk_idx, topk_weights, ep.top_k) if row_weights else None
    weights = topk_weights if stated.weights == "dispatch" else None
    if capacity == EXACT:
        given = dict(scales=scales, payload=payload, format=stated)

        def make(rows: int) -> Any:
            return _made(x, ep, stated, layout, rows, row_weights, zero, False)

        with ep.one_call():
            handle, made, counts = _exact(ep, (x, topk_idx, weights), given, layout, align, make, found)
    else:
        capacity = ep.room(layout, align, stated, drop_overflow) if capacity == MOST else capacity
        made = _made(x, ep, stated, layout, capacity, row_weights, zero, drop_overflow)
        output = _output(ep, layout, align, made, drop_overflow)
        try:
            handle = ep.dispatch_into(output, x, topk_idx, weights, scales=scales, payload=payload, format=stated)
        except BaseException as error:
            # The dispatch took place, also before a Ctrl-C in its wait.
            handle = found.take(error, "handle")
            if found.without_rows():
                made["rows"].zero_()
                if row_weights:
                    made["row_expert"].fill_(-1)
    if row_weights:
        _weigh(ep, made)
    made["handle"] = _keep(x, ep, handle, layout, counts)
    what = (stated.scales is not None, layout, row_weights, drop_overflow)
    results = [made[name] for name in _names(*what)]
    if found:
        found.raise_with(_named(results, x.shape[0], *what))
    return results


def _exact(
    ep: AllToAll,
    tokens: Tuple[Any, ...],
    given: Dict[str, Any],
    layout: str,
    align: int,
    make: Callable[[int], Dict[str, torch.Tensor]],
    found: Found,
) -> Tuple[Handle, Dict[str, torch.Tensor], Tuple[List[int], List[int]]]:
    """A dispatch into outputs that `make` makes for as many rows as come: its handle, these, and the counts."""
    try:
        sent = ep.dispatch_send(*tokens, counts=True, **given)
    except Error as error:
        # Unusable routing: the dispatch goes on without this rank's tokens, and is received.
        sent = found.take(error, "sent")
    try:
        counts = found.receive(lambda: ep.counts(sent))
        made = make(ep.rows_of_counts(*counts, layout=layout, align=align))
        output = _output(ep, layout, align, made, False)
    except BaseException as error:
        setattr(error, "sent", sent)
        raise
    try:
        handle = found.receive(lambda: ep.dispatch_recv(sent, output))
    except BaseException as error:
        # Ctrl-C in its wait: the dispatch took place. Without a handle it did not, and is to be received.
        if not hasattr(error, "handle"):
            setattr(error, "sent", sent)
        handle = found.take(error, "handle")
    return handle, made, counts


def _dispatch_fake(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: Optional[torch.Tensor],
    scales: Optional[torch.Tensor],
    context: int,
    format: int,
    layout: str,
    align: int,
    capacity: Any,
    row_weights: bool,
    zero: bool,
    drop_overflow: bool,
) -> List[torch.Tensor]:
    ep = _context(context)
    if isinstance(capacity, int) and capacity == EXACT:
        capacity = torch.library.get_ctx().new_dynamic_size()
    elif isinstance(capacity, int) and capacity == MOST:
        capacity = ep.room(layout, align, ep.formats[format], drop_overflow)
    made = _made(x, ep, ep.formats[format], layout, capacity, row_weights, False, drop_overflow)
    made["handle"] = x.new_empty((1,), dtype=torch.int64)
    return [made[name] for name in _names(ep.facts[format][1], layout, row_weights, drop_overflow)]


def _dispatch_into(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: Optional[torch.Tensor],
    scales: Optional[torch.Tensor],
    context: int,
    format: int,
    layout: str,
    align: int,
    rows: torch.Tensor,
    counts: torch.Tensor,
    row_scales: Optional[torch.Tensor],
    offsets: Optional[torch.Tensor],
    token_experts: Optional[torch.Tensor],
    token_weights: Optional[torch.Tensor],
    row_count: Optional[torch.Tensor],
    drop_overflow: bool,
) -> torch.Tensor:
    ep = _context(context)
    must_lie(layout, align)
    stated = ep.formats[format]
    given = {"rows": rows, "counts": counts, "scales": row_scales, "offsets": offsets}
    given |= {"token_experts": token_experts, "token_weights": token_weights, "row_count": row_count}
    made = {name: tensor for name, tensor in given.items() if tensor is not None}
    output = _output(ep, layout, align, made, drop_overflow)
    weights = topk_weights if stated.weights == "dispatch" else None
    found = Found()
    try:
        handle = ep.dispatch_into(output, x, topk_idx, weights, scales=scales, format=stated)
    except BaseException as error:
        # The dispatch took place, also before a Ctrl-C in its wait.
        handle = found.take(error, "handle")
    _eager.written(*made.values())
    kept = _keep(x, ep, handle, layout)
    found.raise_with(kept, "handle")
    return kept


def _stands(x: torch.Tensor, *others: Any) -> torch.Tensor:
    """Fake of an operator that returns a handle or a half."""
    return x.new_empty((1,), dtype=torch.int64)


def _dispatch_send(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: Optional[torch.Tensor],
    scales: Optional[torch.Tensor],
    context: int,
    format: int,
) -> torch.Tensor:
    ep = _one_round(_context(context))
    stated = ep.formats[format]
    weights = topk_weights if stated.weights == "dispatch" else None
    return _keep(x, ep, ep.dispatch_send(x, topk_idx, weights, scales=scales, format=stated), "")


def _one_round(ep: AllToAll) -> AllToAll:
    """Refuses calls whose second half reads what the first one was given: compiled code may have used that memory."""
    if ep.rounds > 1:
        raise ValueError(f"calls of this context go in {ep.rounds} rounds: use whole calls, or give round_tokens")
    return ep


def _dispatch_recv(
    sent: torch.Tensor, context: int, format: int, layout: str, align: int, capacity: int, drop_overflow: bool
) -> List[torch.Tensor]:
    kept, ep = _kept("sent", sent, Sent), _context(context)
    if kept.ep is not ep:
        raise ValueError(f"sent is of context {kept.ep.number}, and ep is {ep.number}: give the context that sent it")
    stated = ep.formats[format]
    must_lie(layout, align)
    capacity = kept.ep.room(layout, align, stated, drop_overflow) if capacity == MOST else capacity
    made = _made(sent, kept.ep, stated, layout, capacity, False, False, drop_overflow)
    handle = kept.ep.dispatch_recv(kept.value, _output(kept.ep, layout, align, made, drop_overflow))
    made["handle"] = _keep(sent, kept.ep, handle, layout)
    return [made[name] for name in _names(stated.scales is not None, layout, False, drop_overflow)]


def _dispatch_recv_fake(
    sent: torch.Tensor, context: int, format: int, layout: str, align: int, capacity: Any, drop_overflow: bool
) -> List[torch.Tensor]:
    ep = _context(context)
    if isinstance(capacity, int) and capacity == MOST:
        capacity = ep.room(layout, align, ep.formats[format], drop_overflow)
    made = _made(sent, ep, ep.formats[format], layout, capacity, False, False, drop_overflow)
    made["handle"] = sent.new_empty((1,))
    return [made[name] for name in _names(ep.facts[format][1], layout, False, drop_overflow)]


def _unweighted(kept: _Kept) -> _Kept:
    """Refuses handles whose combines have weights that a gradient would need once more."""
    if kept.value.format.weights == "none" or (kept.layout == "token" and kept.value.format.weights == "dispatch"):
        return kept
    advice = "use a format with weights='none', where rows have row_weights, or the token layout"
    raise RuntimeError(f"combine has weights from {kept.value.format.weights}, so there is no gradient: {advice}")


def _dispatch_again(x: torch.Tensor, handle: torch.Tensor, shape: Sequence[int], gradient: bool) -> torch.Tensor:
    kept = _kept("handle", handle)
    first = (_unweighted(kept) if gradient else kept).value.format
    more = {"combine_dtype": first.combine_dtype, "weights": first.weights}
    # Rows that no token has are 0.
    rows = torch.zeros(shape, dtype=x.dtype, device=x.device)
    kept.ep.dispatch_again(
        kept.value, x, rows, format=Format(first.hidden, first.max_tokens, dtype=name_of(x), **more)
    )
    return rows


def _combine(
    rows: torch.Tensor, handle: torch.Tensor, topk_weights: Optional[torch.Tensor], tokens: int, gradient: bool
) -> torch.Tensor:
    kept = _kept("handle", handle)
    value = (_unweighted(kept) if gradient else kept).value
    out: torch.Tensor = kept.ep.combine(rows, value, tokens=tokens, topk_weights=topk_weights, dtype=name_of(rows))
    return out


def _combine_words(
    rows: torch.Tensor, handle: torch.Tensor, words: torch.Tensor, tokens: int, choices: int, gradient: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    kept = _kept("handle", handle)
    value = (_unweighted(kept) if gradient else kept).value
    shape = (tokens, choices) if choices else (tokens,)
    got = words.new_empty((*shape, words.shape[-1]))
    out: torch.Tensor = kept.ep.combine(
        rows, value, tokens=tokens, payload=words, payload_out=got, dtype=name_of(rows)
    )
    return out, got


def _combine_words_fake(
    rows: torch.Tensor, handle: torch.Tensor, words: torch.Tensor, tokens: Any, choices: int, gradient: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    shape = (tokens, choices) if choices else (tokens,)
    return rows.new_empty((tokens, rows.shape[-1])), words.new_empty((*shape, words.shape[-1]))


def _combine_into(
    rows: torch.Tensor, handle: torch.Tensor, topk_weights: Optional[torch.Tensor], out: torch.Tensor, accumulate: bool
) -> None:
    kept = _kept("handle", handle)
    kept.ep.combine(rows, kept.value, out, topk_weights=topk_weights, accumulate=accumulate, dtype=name_of(rows))
    _eager.written(out)


def _combine_send(rows: torch.Tensor, handle: torch.Tensor, topk_weights: Optional[torch.Tensor]) -> torch.Tensor:
    kept = _kept("handle", handle)
    sent = _one_round(kept.ep).combine_send(rows, kept.value, topk_weights=topk_weights, dtype=name_of(rows))
    return _keep(rows, kept.ep, sent, kept.layout)


def _combine_recv(sent: torch.Tensor, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    kept = _kept("sent", sent, CombineSent)
    must_be_tokens(tokens, kept.value)
    out = torch.empty((tokens, hidden), dtype=dtype, device=sent.device)
    kept.ep.combine_recv(kept.value, out)
    return out


# Some versions of torch have no types there.
_library: Any = torch.library
_forward: Any = torch.autograd.forward_ad
_LIBRARY = _library.Library("tokenyard", "DEF")
_TOKENS = "Tensor x, Tensor topk_idx, Tensor? topk_weights, Tensor? scales, int context, int format"
_PLACE = "str layout, int align"
_ROWS = "Tensor rows, Tensor handle"
_FILLED = "Tensor(a!) rows, Tensor(b!) counts, Tensor(c!)? row_scales, Tensor(d!)? offsets, "
_FILLED += "Tensor(e!)? token_experts, Tensor(f!)? token_weights, Tensor(g!)? row_count"

# Each operator's arguments and results, what it does, and its fake.
_OPERATORS: Dict[str, Tuple[str, Any, Any]] = {
    "dispatch": (
        f"({_TOKENS}, {_PLACE}, SymInt capacity, bool row_weights, bool zero, bool drop_overflow) -> Tensor[]",
        _dispatch, _dispatch_fake,
    ),
    "dispatch_into": (f"({_TOKENS}, {_PLACE}, {_FILLED}, bool drop_overflow) -> Tensor", _dispatch_into, _stands),
    "dispatch_send": (f"({_TOKENS}) -> Tensor", _dispatch_send, _stands),
    "dispatch_recv": (
        f"(Tensor sent, int context, int format, {_PLACE}, SymInt capacity, bool drop_overflow) -> Tensor[]",
        _dispatch_recv, _dispatch_recv_fake,
    ),
    "dispatch_again": (
        "(Tensor x, Tensor handle, SymInt[] shape, bool gradient) -> Tensor",
        _dispatch_again, lambda x, handle, shape, gradient: x.new_empty(shape),
    ),
    "combine": (
        f"({_ROWS}, Tensor? topk_weights, SymInt tokens, bool gradient) -> Tensor",
        _combine, lambda rows, handle, topk_weights, tokens, gradient: rows.new_empty((tokens, rows.shape[-1])),
    ),
    "combine_words": (
        f"({_ROWS}, Tensor words, SymInt tokens, int choices, bool gradient) -> (Tensor, Tensor)",
        _combine_words, _combine_words_fake,
    ),
    "combine_into": (
        f"({_ROWS}, Tensor? topk_weights, Tensor(a!) out, bool accumulate) -> ()",
        _combine_into, lambda rows, handle, topk_weights, out, accumulate: None,
    ),
    "combine_send": (f"({_ROWS}, Tensor? topk_weights) -> Tensor", _combine_send, _stands),
    "combine_recv": (
        "(Tensor sent, SymInt tokens, int hidden, ScalarType dtype) -> Tensor",
        _combine_recv, lambda sent, tokens, hidden, dtype: sent.new_empty((tokens, hidden), dtype=dtype),
    ),
}

for _operator, (_schema, _work, _fake) in _OPERATORS.items():
    _LIBRARY.define(_operator + _schema)
    _LIBRARY.impl(_operator, _work, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tokenyard::{_operator}", _fake, lib=_LIBRARY)
_OPS = torch.ops.tokenyard


def _keep_all() -> None:
    """Calls are collective: other ranks wait for each. So compiled code makes them all, in the order of its source, also
    where it uses nothing of what they return. Before torch 2.10 Inductor leaves such calls out all the same."""
    try:
        effects: Any = importlib.import_module("torch._library.effects")
        register: Any = importlib.import_module("torch._higher_order_ops.effects")._register_effectful_op
    except (ImportError, AttributeError):
        effects = None
    for name, (schema, *_) in _OPERATORS.items():
        operator = getattr(_OPS, name).default
        if effects is None:
            torch.fx.node.has_side_effect(operator)
        elif "!" not in schema:
            # Those that write into tensors are kept for that.
            register(operator, effects.EffectType.ORDERED)


_keep_all()


# Gradients


def _dispatch_setup(ctx: Any, inputs: Tuple[Any, ...], output: List[torch.Tensor]) -> None:
    x, topk_idx, _weights, _scales, context, format, layout, _align, _capacity, row_weights, _zero, drop = inputs
    ctx.save_for_backward(output[0])
    ctx.names = _names(_context(context).facts[format][1], layout, row_weights, drop)
    ctx.rows, ctx.dtype, ctx.tokens, ctx.top_k = output[1].shape, output[1].dtype, x.shape[0], topk_idx.shape[1]
    ctx.inputs, ctx.x, ctx.choices = len(inputs), x.dtype, 0 if layout == "token" else _context(context).top_k


def _dispatch_backward(ctx: Any, grads: List[Optional[torch.Tensor]]) -> Tuple[Any, ...]:
    (handle,) = ctx.saved_tensors
    if ctx.dtype != ctx.x:
        raise RuntimeError(f"dispatch makes {ctx.dtype} of {ctx.x}, so there is no gradient: dispatch {ctx.x} rows")
    of = dict(zip(ctx.names, grads))
    rows, weights = of["rows"], of.get("row_weights" if ctx.choices else "token_weights")
    if rows is None:
        rows = torch.zeros(ctx.rows, dtype=ctx.dtype, device=handle.device)
    if weights is None:
        grad = _OPS.combine(rows.contiguous(), handle, None, ctx.tokens, True)
    else:
        weights = weights.contiguous()
        words = weights.unsqueeze(-1) if ctx.choices else weights
        grad, weights = _OPS.combine_words(rows.contiguous(), handle, words, ctx.tokens, ctx.choices, True)
        weights = weights.squeeze(-1)[:, : ctx.top_k] if ctx.choices else weights[:, : ctx.top_k]
    return (grad, None, weights, *[None] * (ctx.inputs - 3))


def _combine_setup(ctx: Any, inputs: Tuple[Any, ...], output: torch.Tensor) -> None:
    rows, handle = inputs[:2]
    ctx.save_for_backward(handle)
    ctx.rows, ctx.inputs = rows.shape, len(inputs)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> Tuple[Any, ...]:
    (handle,) = ctx.saved_tensors
    return (_OPS.dispatch_again(grad.contiguous(), handle, ctx.rows, True), *[None] * (ctx.inputs - 1))


def _again_setup(ctx: Any, inputs: Tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.tokens = inputs[0].shape[0]


def _again_backward(ctx: Any, grad: torch.Tensor) -> Tuple[Any, ...]:
    (handle,) = ctx.saved_tensors
    return _OPS.combine(grad.contiguous(), handle, None, ctx.tokens, True), None, None, None


def _words_backward(ctx: Any, *grads: Any) -> Tuple[Any, ...]:
    raise RuntimeError(
        "a combine with a payload has no gradient: use dispatch and combine; where a dispatch has gradients of weights, "
        "its backward is such a combine, and cannot be differentiated again"
    )


_DIFFERENTIABLE: Dict[str, Tuple[Any, Any]] = {
    "dispatch": (_dispatch_setup, _dispatch_backward),
    "dispatch_again": (_again_setup, _again_backward),
    "combine": (_combine_setup, _combine_backward),
    "combine_words": (None, _words_backward),
}
for _operator, (_setup, _backward) in _DIFFERENTIABLE.items():
    torch.library.register_autograd(f"tokenyard::{_operator}", _backward, setup_context=_setup, lib=_LIBRARY)


# Calls


def _no_tangent(*tensors: Optional[torch.Tensor]) -> None:
    """Refuses tensors of forward-mode differentiation, whose tangents would be lost."""
    if not torch.compiler.is_compiling() and getattr(_forward, "_current_level", -1) >= 0:
        if any(tensor is not None and _forward.unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise RuntimeError("dispatch and combine have no forward-mode gradient: use backward")


def _must_be_written(**tensors: Optional[torch.Tensor]) -> None:
    """Refuses outputs that are negative views: torch would hand a call a copy, and drop what it wrote there."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_neg():
            raise ValueError(f"{name} is a negative view, which is no memory to write into: give a tensor of its own")


def _checked(ep: AllToAll, format: int, capacity: Optional[int]) -> Tuple[str, bool]:
    """The facts of a format. Refuses a number that is none, and capacities that stand for something else."""
    if not 0 <= format < len(ep.facts):
        raise ValueError(f"format is {format}: give a number of ep.formats, 0 to {len(ep.facts) - 1}")
    if capacity is not None and not torch.compiler.is_compiling() and (type(capacity) is not int or capacity < 0):
        whole("capacity", capacity)
    return ep.facts[format]


def dispatch(
    ep: AllToAll,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: Optional[torch.Tensor] = None,
    *,
    scales: Optional[torch.Tensor] = None,
    format: int = 0,
    layout: str = "contiguous",
    align: int = 1,
    capacity: Optional[int] = None,
    exact: bool = False,
    drop_overflow: bool = False,
) -> Dispatched:
    """As `AllToAll.dispatch`. `format`: a number of `ep.formats`. Where its weights are "none" and weights are given,
    rows have `row_weights`, which `combine` applies. Rows that no token has are 0 where gradients may be asked for. With
    `drop_overflow` rows for which there is no room are left out, and `row_count` is of all that came. An error of a call
    that took place, such as `RoutingError`, has what was made as its `dispatched`: combine that, as the other ranks
    do."""
    weights, has_scales = _checked(ep, format, capacity)
    row_weights = weights == "none" and topk_weights is not None
    if not (exact or row_weights) and _eager.usual() and not _eager.trains(x, topk_weights):
        brought = topk_weights if weights == "dispatch" else None
        plan = ep.plan(format, layout, align, capacity, drop_overflow)
        made, found = _eager.dispatch(plan, x, topk_idx, brought, scales)
        results = _named(made, x.shape[0], has_scales, layout, False, drop_overflow) if made else None
        found.raise_with(results)
        if results is not None:
            return results
    must_be_tensors(x=x, topk_idx=topk_idx)
    must_be_tensors(but_none=True, topk_weights=topk_weights, scales=scales)
    _no_tangent(x, topk_weights)
    zero = _eager.trains(x, topk_weights)
    if exact and drop_overflow:
        raise ValueError("drop_overflow is set with exact: such outputs have room for all rows, so leave one of both out")
    room = EXACT if exact else MOST if capacity is None else capacity
    _must_be_real(x=x, topk_idx=topk_idx, topk_weights=topk_weights, scales=scales)
    got = _OPS.dispatch(
        x, topk_idx, topk_weights, scales, ep.number, format, layout, align, room, row_weights, zero, drop_overflow
    )
    return _named(got, x.shape[0], has_scales, layout, row_weights, drop_overflow)


def host_counts(got: Dispatched) -> Tuple[List[int], List[int]]:
    """The counts for which the host waited in a dispatch with `exact`, as `AllToAll.counts`: without another wait."""
    counts = _kept("handle", got.handle).counts
    if counts is None:
        raise ValueError("got is of a dispatch that the host did not wait for: dispatch with exact=True")
    return counts


def _named(
    got: List[torch.Tensor], tokens: int, scales: bool, layout: str, row_weights: bool, drop_overflow: bool
) -> Dispatched:
    if layout == "contiguous" and not (row_weights or drop_overflow):
        # What decoding calls most.
        if scales:
            handle, rows, counts, row_scales, offsets = got
            return Dispatched(rows, counts, handle, tokens, row_scales, offsets)
        handle, rows, counts, offsets = got
        return Dispatched(rows, counts, handle, tokens, None, offsets)
    return Dispatched(tokens=tokens, **dict(zip(_names(scales, layout, row_weights, drop_overflow), got)))


def dispatch_into(
    ep: AllToAll,
    rows: torch.Tensor,
    counts: torch.Tensor,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: Optional[torch.Tensor] = None,
    *,
    scales: Optional[torch.Tensor] = None,
    format: int = 0,
    layout: str = "contiguous",
    align: int = 1,
    row_scales: Optional[torch.Tensor] = None,
    offsets: Optional[torch.Tensor] = None,
    token_experts: Optional[torch.Tensor] = None,
    token_weights: Optional[torch.Tensor] = None,
    row_count: Optional[torch.Tensor] = None,
    drop_overflow: bool = False,
) -> torch.Tensor:
    """Into tensors of the caller, as those of `AllToAll.output`; returns the handle. Has no gradient. An error of a call
    that took place, such as `RoutingError`, has the handle as its `handle`: combine that, as the other ranks do."""
    weights, of_tokens = _checked(ep, format, None)[0], layout == "token"
    first = token_experts if of_tokens else offsets
    outputs = (rows, counts, row_scales, first, token_weights)
    given = x is not None and topk_idx is not None and rows is not None and counts is not None
    usual = given and (offsets is None if of_tokens else token_experts is None and token_weights is None)
    usual = usual and row_count is None
    if usual and _eager.usual():
        brought = topk_weights if weights == "dispatch" else None
        try:
            plan = ep.plan(format, layout, align, 0, drop_overflow)
            made = _eager.dispatch_into(plan, x, topk_idx, brought, scales, *outputs)
        except BaseException as error:
            # Of a call that took place.
            if hasattr(error, "handle"):
                _eager.written(*outputs)
            raise
        if made is not None:
            _eager.written(*outputs)
            return made
    no_gradient("dispatch_into", x, topk_weights, *outputs, row_count)
    must_be_tensors(x=x, topk_idx=topk_idx, rows=rows, counts=counts)
    _must_be_written(
        rows=rows, counts=counts, row_scales=row_scales, offsets=offsets, token_experts=token_experts,
        token_weights=token_weights, row_count=row_count,
    )
    _must_be_real(
        x=x, topk_idx=topk_idx, topk_weights=topk_weights, scales=scales, rows=rows, counts=counts, row_scales=row_scales,
        offsets=offsets, token_experts=token_experts, token_weights=token_weights, row_count=row_count,
    )
    handle: torch.Tensor = _OPS.dispatch_into(
        x, topk_idx, topk_weights, scales, ep.number, format, layout, align, rows, counts, row_scales, offsets,
        token_experts, token_weights, row_count, drop_overflow,
    )
    return handle


def dispatch_send(
    ep: AllToAll,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: Optional[torch.Tensor] = None,
    *,
    scales: Optional[torch.Tensor] = None,
    format: int = 0,
) -> torch.Tensor:
    """The sending half; `dispatch_recv` takes what it returns, once. Has no gradient. For contexts of one round."""
    no_gradient("dispatch_send", x, topk_weights)
    _checked(ep, format, None)
    _must_be_real(x=x, topk_idx=topk_idx, topk_weights=topk_weights, scales=scales)
    sent: torch.Tensor = _OPS.dispatch_send(x, topk_idx, topk_weights, scales, ep.number, format)
    return sent


def dispatch_recv(
    ep: AllToAll,
    sent: torch.Tensor,
    tokens: int,
    *,
    format: int = 0,
    layout: str = "contiguous",
    align: int = 1,
    capacity: Optional[int] = None,
    drop_overflow: bool = False,
) -> Dispatched:
    """The receiving half of a dispatch of so many tokens, in the same format."""
    has_scales = _checked(ep, format, capacity)[1]
    room = MOST if capacity is None else capacity
    got = _OPS.dispatch_recv(sent, ep.number, format, layout, align, room, drop_overflow)
    return _named(got, tokens, has_scales, layout, False, drop_overflow)


def dispatch_again(x: torch.Tensor, got: Dispatched) -> torch.Tensor:
    """Sends new rows of the tokens of an earlier dispatch to the places that its rows have; others are 0."""
    _must_be_real(x=x, handle=got.handle)
    rows: torch.Tensor = _OPS.dispatch_again(x, got.handle, got.rows.shape, False)
    return rows


def combine(
    rows: torch.Tensor, got: Dispatched, *, topk_weights: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Returns the experts' outputs of a dispatch as sums `[tokens, hidden]` of the rows' dtype, with the weights that the
    dispatch brought, or `topk_weights` where its format has weights with "combine"."""
    if got.row_weights is not None:
        rows = (rows * got.row_weights.unsqueeze(-1)).to(rows.dtype)
    if _eager.usual() and isinstance(got.handle, torch.Tensor):
        sums = _eager.combine(rows, got.handle, topk_weights, got.tokens)
        if sums is not None:
            return sums
    must_be_tensors(rows=rows)
    must_be_tensors(but_none=True, topk_weights=topk_weights)
    _no_tangent(rows)
    if topk_weights is not None:
        no_gradient("combine with topk_weights", rows, topk_weights)
    _must_be_real(rows=rows, handle=got.handle, topk_weights=topk_weights)
    out: torch.Tensor = _OPS.combine(rows, got.handle, topk_weights, got.tokens, False)
    return out


def combine_into(
    out: torch.Tensor,
    rows: torch.Tensor,
    got: Dispatched,
    *,
    topk_weights: Optional[torch.Tensor] = None,
    accumulate: bool = False,
) -> None:
    """As `combine`, into `out` or added to it, and without row weights. Has no gradient."""
    given = rows is not None and out is not None and isinstance(got.handle, torch.Tensor)
    usual = given and _eager.usual()
    if usual and _eager.combine_into(rows, got.handle, topk_weights, out, accumulate):
        _eager.written(out)
        return
    no_gradient("combine_into", rows, topk_weights, out)
    must_be_tensors(rows=rows, out=out)
    _must_be_written(out=out)
    _must_be_real(rows=rows, handle=got.handle, topk_weights=topk_weights, out=out)
    _OPS.combine_into(rows, got.handle, topk_weights, out, accumulate)


def combine_send(
    rows: torch.Tensor, got: Dispatched, *, topk_weights: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """The sending half; `combine_recv` takes what it returns, once. Has no gradient, and no row weights."""
    no_gradient("combine_send", rows, topk_weights)
    _must_be_real(rows=rows, handle=got.handle, topk_weights=topk_weights)
    sent: torch.Tensor = _OPS.combine_send(rows, got.handle, topk_weights)
    return sent


def combine_recv(sent: torch.Tensor, rows: torch.Tensor, got: Dispatched) -> torch.Tensor:
    """The receiving half, of the rows sent."""
    out: torch.Tensor = _OPS.combine_recv(sent, got.tokens, rows.shape[-1], rows.dtype)
    return out
