"""Expert parallelism of Hugging Face transformers by tokenyard, in inference and in training. Imports torch.

    import tokenyard.integrations.transformers
    tokenyard.integrations.transformers.register()
    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="tokenyard")
    model = AutoModelForCausalLM.from_pretrained(..., distributed_config=config)

`register` names an `EPImplementation` of transformers' own interface, which transformers makes for each experts module.
Its calls dispatch this rank's tokens, run the module's experts on the rows that came, and combine. Every rank of the
expert-parallel group calls each layer, also with no tokens; every rank runs backward, or none does.

Rows are in the contiguous layout: one row for each (token, local expert), with one expert id and one router weight. In
the token layout, rows have `top_k` choices of which most are on other ranks, and transformers' experts gather and weigh
each of them. A token crosses to a rank once in both. Router weights go to the experts, and combine only adds. Their
gradients return with those of the rows.

A context is for one group, hidden size, number of experts, `top_k`, dtype and device. Layers share it, and it lives as
long as one of them. Ranks collect garbage at other times, so a layer's first call gathers which context each rank has,
and all ranks take the same one or make one, for the most tokens that any rank has then, rounded up. Later calls have no
collective but dispatch and combine: a rank with more tokens than there is room for sends, in place of them, a row to
a further expert that each rank has for this alone. The counts of a dispatch come to the host before its rows, so every
rank learns of it; then all of them make a larger context, and dispatch once more.

Where a rank has unusable routing its tokens are left out, and the layer raises `RoutingError` on that rank once the
others' sums are complete. After an error that is `fatal`, such as a deadline that passed, a layer raises it in each
call; layers made anew, and copies of it, work where all ranks have them. A token may name an expert several times, as
in transformers' own exchanges, where all choices of a rank are at most 2^20.

While a CUDA graph is captured the host cannot wait for counts. Outputs then have room for any routing, and the capture
needs a context that an earlier call made large enough.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any, Callable, Dict, List, MutableMapping, Optional, Tuple, TypeVar

import torch
import torch.distributed as dist

from .. import ops
from .._calls import AllToAll
from .._errors import Found, renumber
from .._growth import named, notice, placement, room
from .._hosts import Hosts
from .._native import Error, RoutingError
from .._tensors import capturing, device_of, name_of
from .._worlds import World
from . import seconds

__all__ = ["TESTED_VERSIONS", "register"]

TESTED_VERSIONS = ("5.23.0", "5.24.0")
"""Versions of transformers with which tests/python/test_transformers.py ran."""

# Choices of a rank up to which a token may name an expert several times.
_CHOICES = 1 << 20
_T = TypeVar("_T")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Some versions of torch have no types there.
_uncompiled: Any = torch.compiler.disable


def register(name: str = "tokenyard", *, timeout: float = 600.0) -> None:
    """Makes `DistributedConfig(ep_implementation=name)` exchange tokens by tokenyard, in this process.

    `timeout`: seconds for which a call waits for other ranks, which may be saving a checkpoint or loading data.
    """
    seconds(timeout)
    transformers = importlib.import_module("transformers")
    try:
        interface = importlib.import_module("transformers.distributed.expert_parallel")
        base, registry = interface.EPImplementation, interface.EPImplementationInterface
    except (ImportError, AttributeError) as missing:
        raise ImportError(
            f"transformers has no EPImplementationInterface: expected a version as {TESTED_VERSIONS[-1]}, "
            f"got {transformers.__version__}"
        ) from missing
    registry.register(name, type("TokenyardEP", (_Layer, base), {"timeout": timeout}))


class _Layer:
    """What is registered, beside transformers' base class, whose constructor sets the attributes."""

    experts_forward: Any
    num_local_experts: int
    ep_mesh: Any
    tp_mesh: Any
    timeout: float

    _exchanges: Optional[Dict[Tuple[Any, ...], _Exchange]] = None

    def __getstate__(self) -> Dict[str, Any]:
        """Of a copy, which makes its first call anew."""
        return {name: value for name, value in self.__dict__.items() if name != "_exchanges"}

    # Contexts and counts are the host's business, of which compiled code knows nothing.
    @_uncompiled  # type: ignore[untyped-decorator, unused-ignore]
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        _check(hidden_states, top_k_index, top_k_weights)
        tokens = hidden_states.shape[0]
        if self.tp_mesh.size() > 1:
            # These ranks have the same batch: each dispatches its slice of it.
            hidden_states, top_k_index, top_k_weights = (
                _slice(tensor, self.tp_mesh) for tensor in (hidden_states, top_k_index, top_k_weights)
            )
        wanted = self._wanted(hidden_states, top_k_index.shape[1])
        if self._exchanges is None:
            self._exchanges = {}
        if wanted not in self._exchanges:
            self._exchanges[wanted] = _exchange(wanted, self.timeout)
        exchange, found = self._exchanges[wanted], Found()
        got, ids = exchange.alive(lambda: exchange.dispatch(hidden_states, top_k_index, top_k_weights, found))
        assert got.row_weights is not None
        weights = got.row_weights.unsqueeze(1).to(top_k_weights.dtype)
        if got.rows.shape[0]:
            rows = self.experts_forward(got.rows, ids, weights)
        else:
            # One row that nobody reads: not all experts take none, and backward needs to come by here.
            none = got.rows.sum(0, keepdim=True)
            rows = self.experts_forward(none, ids.new_zeros((1, 1)), weights.new_ones((1, 1)))[:0]
        # The experts have applied the weights. On a GPU unusable routing may be raised as late as here.
        back = rows.to(hidden_states.dtype)
        sums = got._replace(row_weights=None)
        out: torch.Tensor = found.receive(lambda: exchange.alive(lambda: ops.combine(back, sums)))
        if self.tp_mesh.size() > 1:
            out = _whole(out, self.tp_mesh, tokens)
        # Raised where no other rank waits for this one any more: there is nothing left to combine.
        found.raise_with(None)
        return out

    def _wanted(self, x: torch.Tensor, top_k: int) -> Tuple[Any, ...]:
        group, ranks = self.ep_mesh.get_group(), self.ep_mesh.size()
        return group, x.shape[1], self.num_local_experts * ranks, top_k, name_of(x), device_of(x)


def _check(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Refuses what no dispatch can take."""
    for name, given in (("hidden_states", x), ("top_k_index", ids), ("top_k_weights", weights)):
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{name} is of another type: expected a tensor, got {type(given).__name__}")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"hidden_states is on another device: expected cpu or cuda, got {x.device}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"hidden_states is of another dtype: expected one of {list(_DTYPES)}, got {x.dtype}")
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        expected = "[tokens, hidden] and top_k_index [tokens, top_k]"
        raise ValueError(f"hidden_states is of another shape: expected {expected}, got {[*x.shape]} and {[*ids.shape]}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"top_k_index is of another dtype: expected torch.int32 or torch.int64, got {ids.dtype}")
    if ids.shape[1] < 1:
        raise ValueError(f"top_k_index is of another shape: expected 1 or more choices a token, got {[*ids.shape]}")
    if weights.shape != ids.shape:
        raise ValueError(
            f"top_k_weights is of another shape: expected that of top_k_index {[*ids.shape]}, got {[*weights.shape]}"
        )
    if not weights.is_floating_point():
        raise TypeError(f"top_k_weights is of another dtype: expected one of floating point, got {weights.dtype}")
    for name, tensor in (("top_k_index", ids), ("top_k_weights", weights)):
        if tensor.device != x.device:
            raise ValueError(f"{name} is on another device: expected hidden_states' {x.device}, got {tensor.device}")


def _slice(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """This rank's slice of what all ranks of the mesh have; backward gathers the slices' gradients."""
    dt: Any = importlib.import_module("torch.distributed.tensor")
    whole = dt.DTensor.from_local(tensor, mesh, [dt.Replicate()], run_check=False)
    sliced: torch.Tensor = whole.redistribute(mesh, [dt.Shard(0)]).to_local()
    return sliced


def _whole(tensor: torch.Tensor, mesh: Any, tokens: int) -> torch.Tensor:
    """The slices of all ranks of the mesh; backward gives each the gradient of its own."""
    dt: Any = importlib.import_module("torch.distributed.tensor")
    hidden = tensor.shape[1]
    sliced = dt.DTensor.from_local(
        tensor.contiguous(), mesh, [dt.Shard(0)], run_check=False, shape=(tokens, hidden), stride=(hidden, 1)
    )
    whole: torch.Tensor = sliced.full_tensor()
    return whole


class _Group:
    """A group's hosts."""

    def __init__(self, group: Any, number: int) -> None:
        self.hosts, self.number = Hosts(World.from_group(group)), number


# By the group, and by what contexts are for. Entries go with the last layer that uses them.
_GROUPS: MutableMapping[Any, _Group] = weakref.WeakValueDictionary()
_EXCHANGES: MutableMapping[Tuple[Any, ...], _Exchange] = weakref.WeakValueDictionary()
# The largest number of a world or an exchange, which has the same on all its ranks.
_LAST = [0]


def _exchange(wanted: Tuple[Any, ...], timeout: float) -> _Exchange:
    """The exchange that layers of this shape share, if all ranks still have it; else another. Collective."""
    group, key = wanted[0], (*wanted, timeout)
    found, of_group = _EXCHANGES.get(key), _GROUPS.get(group)
    own = (found.number if found and not found.ended else 0, of_group.number if of_group else 0, _LAST[0])
    all_have: List[Tuple[int, int, int]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(all_have, own, group=group)
    exchanges, groups, last = zip(*all_have)
    _LAST[0] = max(last) + 1
    if found is None or found.ended or set(exchanges) != {found.number}:
        if of_group is None or set(groups) != {of_group.number}:
            of_group = _GROUPS[group] = _Group(group, _LAST[0])
        found = _EXCHANGES[key] = _Exchange(wanted, of_group, timeout, _LAST[0])
    return found


class _Exchange:
    """The context for one group and shape, which grows."""

    def __init__(self, wanted: Tuple[Any, ...], group: _Group, timeout: float, number: int) -> None:
        self.wanted, self._group, self._timeout, self.number = wanted, group, timeout, number
        self._room = 0
        self._ep: Optional[AllToAll] = None
        self.ended = False
        """A call found that its context serves no more. Its layers raise that from then on; others make another one."""

    def alive(self, call: Callable[[], _T]) -> _T:
        """What a call returns."""
        try:
            return call()
        except Error as error:
            self.ended |= bool(getattr(error, "fatal", False))
            raise

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, found: Found
    ) -> Tuple[ops.Dispatched, torch.Tensor]:
        """What came, with router weights, and the local expert of each row `[rows, 1]`. `found`: gets the error of
        routing by which this rank sent nothing."""
        _group, _hidden, experts, top_k, _dtype, _device = self.wanted
        ranks = self._group.hosts.world.size
        given, ids = ids, named(ids, experts, ranks, "top_k_index")
        x, weights = x.contiguous(), weights.float().contiguous()
        if capturing(x):
            if self._ep is None or x.shape[0] > self._room:
                raise RuntimeError(
                    f"hidden_states is captured: expected at most the {self._room} tokens of earlier calls, "
                    f"got {x.shape[0]}"
                )
            got = ops.dispatch(self._ep, x, ids, weights)
            return got, self._local(got)
        if self._ep is None:
            self._make(x.shape[0])
        if x.shape[0] <= self._room:
            got = self._exact(x, ids, weights, given, found)
        else:
            with torch.no_grad():
                rows, choices = notice(x, experts, top_k, ranks)
                got = self._exact(rows, choices, torch.zeros(choices.shape, device=x.device), choices, found)
        if ops.host_counts(got)[0][-1]:
            # Some rank has more, which all of them see here.
            del got
            self._make(x.shape[0])
            got = self._exact(x, ids, weights, given, found)
        return got, self._local(got)

    def _exact(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, given: torch.Tensor, found: Found
    ) -> ops.Dispatched:
        """A dispatch whose counts the host has. `given`: the caller's numbers of experts."""
        assert self._ep is not None
        try:
            return ops.dispatch(self._ep, x, ids, weights, exact=True)
        except RoutingError as error:
            renumber(error, ids, given)
            got: ops.Dispatched = found.take(error, "dispatched")
            return got

    def _local(self, got: ops.Dispatched) -> torch.Tensor:
        """Local experts of rows; their number for rows that no token has."""
        assert got.offsets is not None
        # The last local expert is the further one.
        ends = got.offsets[1:-1]
        place = torch.arange(got.rows.shape[0], dtype=ends.dtype, device=ends.device)
        return torch.searchsorted(ends, place, right=True).unsqueeze(1)

    def _make(self, tokens: int) -> None:
        """Makes a context for the most tokens that any rank has now. Collective."""
        _group, hidden, experts, top_k, dtype, device = self.wanted
        world = self._group.hosts.world
        most = room(world, tokens, self._room, _CHOICES // top_k)
        # Its memory first, as the new one may need it. Handles keep it as long as they live.
        self._ep = None
        self._ep = self._group.hosts.context(
            hidden=hidden, experts=experts + world.size, top_k=top_k, max_tokens_per_rank=most, device=device,
            dtype=dtype, combine_dtype=dtype, weights="none", payload_words=top_k, dispatch_payload_words=2 * top_k,
            placement=placement(experts, world.size), timeout=self._timeout, duplicates=most * top_k <= _CHOICES,
        )
        self._room = most
