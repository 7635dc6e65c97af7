"""The contexts behind a `Buffer`: made by the first call that needs them, which is collective as all calls are.

DeepEP's normal mode knows no most number of tokens, and a context does: `_growth` has how contexts grow.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from .. import _growth
from .._calls import AllToAll
from .._errors import Found
from .._hosts import Hosts
from .._native import Error, Format, Handle, World
from .._tensors import capturing, device_of
from . import _checks


def refuse_capture(x: torch.Tensor) -> None:
    if capturing(x):
        raise RuntimeError("a capture needs a context that is not there: make the same calls once before it, eagerly")


def weights_of(ep: AllToAll, weights: torch.Tensor) -> torch.Tensor:
    """Weights `[tokens, choices]` as combine takes them: of as many choices as the context has."""
    missing = ep.top_k - weights.shape[1]
    if missing < 0:
        raise ValueError(f"topk_weights has {weights.shape[1]} choices a token: give the dispatch's, at most {ep.top_k}")
    return torch.nn.functional.pad(weights, (0, missing)) if missing else weights.contiguous()


class Unreceived:
    """Calls of a kind in two halves, of which a context receives each before it sends the next. Where an exception
    comes in between, such as Ctrl-C in the wait for counts or no memory for the output, the next call receives that
    half first, and its results are nobody's."""

    def __init__(self) -> None:
        self._left: Optional[Tuple[Callable[[], Any], Callable[[Any], Any]]] = None

    def halves(
        self,
        send: Callable[[], Any],
        prepare: Callable[[Any], Any],
        receive: Callable[[Any, Any], Any],
        later: Optional[Callable[[Any], Any]] = None,
    ) -> Any:
        """What `receive(sent, prepare(sent))` returns, of what `send` returned. `later`: in place of `prepare` in a
        later call, which may be called several times; by default `prepare`."""
        self.finish()
        later = prepare if later is None else later
        try:
            sent = send()
        except BaseException as error:
            # Ctrl-C in its wait. An error of the library's says what became of the call.
            if not isinstance(error, Error) and hasattr(error, "sent"):
                self._leave(error.sent, later, receive)
            raise
        self._leave(sent, later, receive)
        try:
            made = receive(sent, prepare(sent))
        except BaseException as error:
            if hasattr(error, "handle"):
                self._left = None
            raise
        self._left = None
        return made

    def _leave(self, sent: Any, prepare: Callable[[Any], Any], receive: Callable[[Any, Any], Any]) -> None:
        self._left = partial(prepare, sent), partial(receive, sent)

    def finish(self) -> None:
        """Receives what an earlier call left."""
        if self._left is None:
            return
        prepare, receive = self._left
        try:
            receive(prepare())
        except ValueError as error:
            # It was received, and Ctrl-C came in the wait after that.
            if isinstance(error, Error):
                raise
        except Error as error:
            if getattr(error, "fatal", False):
                self._left = None
            # What a call found that took place was for its caller. Without a handle it is an earlier call's.
            if self._left is None or not hasattr(error, "handle"):
                raise
        self._left = None

    def drop(self) -> None:
        """Leaves it unreceived: the context goes."""
        self._left = None


class Wanted(NamedTuple):
    """What a normal call needs of its context, the same on all ranks."""

    hidden: int
    experts: int
    choices: int
    fp32: bool
    device: str
    words: int = 0
    """Of a token's payload in dispatch."""

    def covers(self, other: Wanted) -> bool:
        same = self.hidden == other.hidden and self.experts == other.experts and self.device == other.device
        room = self.choices >= other.choices and self.words >= other.words
        return same and room and self.fp32 >= other.fp32


class Offered(NamedTuple):
    """What a rank gives to a dispatch."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    weights: Optional[torch.Tensor]
    scales: Optional[torch.Tensor]
    payload: Optional[torch.Tensor] = None

    def within(self, ep: AllToAll, experts: int) -> Offered:
        """This, or where it is more than the context has room for the notice that goes in its place."""
        if self.x.shape[0] <= ep.format.max_tokens:
            return self
        ranks, choices = ep.ranks, self.topk_idx.shape[1]
        x, topk_idx = _growth.notice(self.x, experts, choices, ranks)

        def zeros(like: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
            return None if like is None else like.new_zeros((x.shape[0], like.shape[1]))

        return Offered(x, topk_idx, zeros(self.weights), zeros(self.scales), zeros(self.payload))


class Counted(NamedTuple):
    """A dispatch for whose counts the host waited."""

    ep: AllToAll
    handle: Handle
    made: Any
    experts: List[int]
    """Rows of each local expert."""
    sources: List[int]
    """Tokens from each rank."""
    found: Found
    """Unusable routing: the dispatch took place without this rank's tokens."""


def counted(
    dispatches: Unreceived,
    ep: AllToAll,
    send: Callable[[AllToAll], Any],
    receive: Callable[[AllToAll, List[int], List[int], bool], Tuple[Any, Any]],
    repeat: Callable[[], Any],
) -> Counted:
    """A dispatch. `send`: the sending half, with counts. `receive`: the output for so many rows, those of notices
    included, and what else is to be returned; with True an output that is as small as can be, whose rows are
    nobody's. `repeat`: makes a larger context and this dispatch again, as other ranks do where there were notices,
    after a call whose rows are nobody's."""
    found = Found()

    def prepared(sent: Any, later: bool = False) -> Any:
        experts, sources = found.receive(partial(ep.counts, sent))
        return (later, experts, sources, *receive(ep, experts, sources, later))

    def received(sent: Any, prepared: Any) -> Counted:
        later, experts, sources, output, made = prepared
        handle = found.receive(partial(ep.dispatch_recv, sent, output))
        done = Counted(ep, handle, made, experts, sources, found)
        if later and experts[-1] != 0:
            repeat()
        return done

    done: Counted = dispatches.halves(
        lambda: found.sending(lambda: send(ep)), prepared, received, partial(prepared, later=True)
    )
    return done


class Normal:
    """The context of normal calls."""

    def __init__(self, hosts: Hosts, timeout: float, round_tokens: int) -> None:
        self._hosts, self._timeout, self._round_tokens = hosts, timeout, round_tokens
        self._made: Optional[Tuple[Wanted, int, AllToAll]] = None
        self.dispatches, self.combines = Unreceived(), Unreceived()

    def get(self, x: torch.Tensor, wanted: Wanted, sms: Optional[int], tokens: Optional[int] = None) -> AllToAll:
        """One for calls like this one. `tokens`: how many each rank may have, the same on all ranks; `None`: as many as
        any has now, if it must be made."""
        # It may make a larger context.
        self.dispatches.finish()
        if self._made is not None and self._made[0].covers(wanted) and (tokens or 0) <= self._made[1]:
            return self._made[2]
        refuse_capture(x)
        return self._make(wanted, x.shape[0] if tokens is None else tokens, sms)

    def counted(
        self,
        x: torch.Tensor,
        wanted: Wanted,
        sms: Optional[int],
        tokens: Optional[int],
        send: Callable[[AllToAll], Any],
        receive: Callable[[AllToAll, List[int], List[int], bool], Tuple[Any, Any]],
    ) -> Counted:
        """A dispatch that makes larger contexts until all ranks' tokens have room, by the arguments of `counted`."""

        def repeat() -> None:
            self.grow(x, sms)
            self.counted(x, wanted, sms, tokens, send, lambda ep, experts, sources, _: receive(ep, experts, sources, True))

        while True:
            done = counted(self.dispatches, self.get(x, wanted, sms, tokens), send, receive, repeat)
            if done.experts.pop() == 0:
                return done
            # Some rank has more tokens than this context has room for, which goes before the new one is made.
            del done
            self.grow(x, sms)

    def grow(self, x: torch.Tensor, sms: Optional[int]) -> None:
        """Makes room for the tokens that ranks have now."""
        if self._made is not None:
            self._make(self._made[0], x.shape[0], sms)

    def close(self) -> None:
        """Gives the context up, for good."""
        self._made = None
        self.dispatches.drop()
        self.combines.drop()

    def _make(self, wanted: Wanted, tokens: int, sms: Optional[int]) -> AllToAll:
        before = 0 if self._made is None else self._made[1]
        if self._made is not None and self._made[0].hidden == wanted.hidden:
            wanted = wanted._replace(
                choices=max(wanted.choices, self._made[0].choices), fp32=wanted.fp32 or self._made[0].fp32,
                words=max(wanted.words, self._made[0].words),
            )
        # With an expert named several times, tokens times choices of a rank are at most 2^20.
        room = _growth.room(self._hosts.world, tokens, before, (1 << 20) // wanted.choices)
        ranks, experts = self._hosts.world.size, wanted.experts
        dtype = "fp32" if wanted.fp32 else "bf16"
        # Its memory first, as the new one may need it. Handles keep it as long as they live.
        self._made = None
        self.dispatches.drop()
        ep = self._hosts.context(
            hidden=wanted.hidden, experts=experts + ranks, top_k=wanted.choices, max_tokens_per_rank=room,
            device=wanted.device, dtype=dtype, combine_dtype=dtype, duplicates=True, payload_words=wanted.choices,
            dispatch_payload_words=wanted.words, placement=_growth.placement(experts, ranks), timeout=self._timeout,
            sms=sms, round_tokens=self._round_tokens if room > self._round_tokens else None,
        )
        self._made = (wanted, room, ep)
        return ep


class LowLatency:
    """The context of low-latency calls."""

    def __init__(self, hosts: Hosts, timeout: float, shrinks: bool) -> None:
        if len(hosts.world.nodes) > 1:
            hosts.must_agree("enable_shrink", shrinks)
            # Rows between nodes go by way of a rank there, and without that rank the node would be out of reach. A rank
            # that is a node by itself is out of reach alone.
            hosts = Hosts(hosts.world.with_nodes([1] * hosts.world.size)) if shrinks else hosts
        self._hosts, self._timeout, self._shrinks = hosts, timeout, shrinks
        self._made: Optional[Tuple[Tuple[Any, ...], AllToAll]] = None
        self.shapes: Dict[Tuple[Any, ...], Any] = {}
        """Of dispatches of the context that is there, by the arguments that state their kind."""

    def there(self, x: torch.Tensor, tokens: int, experts: int, choices: int) -> Optional[AllToAll]:
        """The one that is there, if calls like this one are for it."""
        if self._made is None:
            return None
        key, ep = self._made
        fits = key[0] == tokens and key[1] == x.shape[1] and key[2] == experts and key[4] >= choices
        return ep if fits and key[3] == x.device else None

    def get(self, x: torch.Tensor, tokens: int, experts: int, choices: int, sms: Optional[int]) -> AllToAll:
        """One for calls like this one."""
        there = self.there(x, tokens, experts, choices)
        if there is not None:
            return there
        refuse_capture(x)
        # What can be seen here is refused before the context goes: other ranks make none for this call.
        _checks.low_latency(x, tokens, experts // self._hosts.world.size, choices)
        self.clean()
        ep = self._hosts.context(
            hidden=x.shape[1], experts=experts, top_k=choices, max_tokens_per_rank=tokens, device=device_of(x),
            weights="combine", duplicates=True, timeout=self._timeout, sms=sms,
            missing_ranks="masked_at_deadline" if self._shrinks else "fatal",
        )
        self._made = ((tokens, x.shape[1], experts, x.device, choices), ep)
        return ep

    def made(self) -> Optional[AllToAll]:
        """The one that is there."""
        return None if self._made is None else self._made[1]

    def clean(self) -> None:
        """The next call, of all ranks, makes a new one, whose mask is empty."""
        self._made = None
        self.shapes.clear()

    def close(self) -> None:
        """Gives the context up, for good."""
        self.clean()
        self._hosts.close()


class Kept(NamedTuple):
    """What a handle's calls need."""

    ep: AllToAll
    handle: Handle
    tokens: int
    capacity: int
    format: Format

