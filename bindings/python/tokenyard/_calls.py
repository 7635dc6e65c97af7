"""Contexts: calls with outputs that are made for the caller."""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from contextlib import nullcontext
from typing import (
    Any, Callable, ContextManager, Dict, Iterable, List, MutableMapping, NamedTuple, Optional, Sequence, Tuple,
)

from . import _native
from ._errors import Found
from ._native import CombineSent, Format, Handle, Output, RankMask, Sent


class Dispatched(NamedTuple):
    """What a dispatch brought to this rank."""

    rows: Any
    """Rows in the layout's shape, of the context's dtype."""
    scales: Optional[Any]
    """Scales of the rows, 4-byte words `[rows, words]`, if rows have scales."""
    counts: Any
    """int32 `[local experts]`: rows of each expert."""
    offsets: Optional[Any]
    """int32 `[local experts + 1]`: first row of each expert in the contiguous layout."""
    token_experts: Optional[Any]
    """int32 `[rows, top_k]`: local experts of each row in the token layout, -1 for none."""
    token_weights: Optional[Any]
    """fp32 `[rows, top_k]`: their weights."""
    handle: Any
    """What combine needs."""
    payload: Optional[Any] = None
    """fp32 `[rows, words]`: the words of each row's token, if the call had a payload."""
    also: Optional[Dict[str, Any]] = None
    """Further outputs, by the names that were asked for."""


CONTEXTS: MutableMapping[int, "AllToAll"] = weakref.WeakValueDictionary()
"""The contexts of this process by their numbers, which operators of torch have as an argument."""
_NUMBERS = itertools.count(1)


class AllToAll:
    """Dispatch and combine over one world. Collective: every rank makes it with the same limits.

    `device`: "cpu", "cuda" (the GPU of the world's local rank) or "cuda:N". `dtype` ("bf16", "fp16", "fp32", "fp8") and
    `scales` (None, "fp32", "ue8m0") are of dispatched rows; with `quantize` dispatch takes bf16 and makes them.
    `combine_dtype` is of the experts' outputs. `weights` come with "dispatch", with "combine", or are "none" of the
    library's business. These, `hidden` and `max_tokens_per_rank` are the context's own `Format`; `room_for` has further
    ones, which calls may state. `timeout`: seconds for which calls wait. `placement`: the rank of each expert; by
    default expert e is on rank e * ranks // experts. `duplicates`: a token may name an expert several times.
    `payload_words`, `dispatch_payload_words`: most words of a token's side payload in combine and in dispatch.
    `missing_ranks`: "fatal"; "masked" for `mask_rank`; "masked_at_deadline" if a deadline masks the rank that is silent.
    `partial`: in what partial rows travel, "same" as the experts' outputs, "fp32" or "fp8". `round_tokens`: tokens of a
    round of larger calls. `handles`, `handle_rows`: how many handles are there from the start, for captures, and for
    outputs of how many rows. `proxy`: this rank's, in a world of several nodes.

    On the CPU device calls return when they are done, and raise what they found. On a GPU they enqueue work on the
    current stream of the arrays' library, or on `stream`, and `check` raises what they found since. Arrays of calls in
    flight belong to them as to any work of their stream, and arrays that a call makes to the stream of the call.

    `close`, or the end of a block of `with`, gives the context's memory back once its handles have gone, too.
    """

    def __init__(
        self,
        world: _native.World,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        device: str = "cuda",
        dtype: str = "bf16",
        scales: Optional[str] = None,
        quantize: bool = False,
        combine_dtype: str = "bf16",
        weights: str = "dispatch",
        timeout: float = 30.0,
        sms: Optional[int] = None,
        placement: Optional[Sequence[int]] = None,
        duplicates: bool = False,
        payload_words: int = 0,
        dispatch_payload_words: int = 0,
        room_for: Sequence[Format] = (),
        missing_ranks: str = "fatal",
        partial: str = "same",
        round_tokens: Optional[int] = None,
        handles: Optional[int] = None,
        handle_rows: Optional[int] = None,
        proxy: Optional[_native.Proxy] = None,
    ) -> None:
        # The format has another name for it.
        whole("max_tokens_per_rank", max_tokens_per_rank)
        self._format = Format(
            hidden, max_tokens_per_rank, dtype=dtype, scales=scales, quantize=quantize, combine_dtype=combine_dtype,
            weights=weights,
        )
        room_for = list(room_for)
        self._context = _native.Context(
            world, self._format, experts=experts, top_k=top_k, device=device, room_for=room_for, timeout=timeout,
            sms=sms, placement=placement, duplicates=duplicates, payload_words=payload_words,
            dispatch_payload_words=dispatch_payload_words, missing_ranks=missing_ranks, partial=partial,
            round_tokens=round_tokens, handles=handles, handle_rows=handle_rows, proxy=proxy,
        )
        self._top_k, self._ranks, self._duplicates = top_k, world.size, duplicates
        # Ranks that wait for each other count as missing after eight deadlines.
        self._timeout = timeout if missing_ranks == "fatal" else min(20 * timeout, 1e9)
        self._experts = self._context.local_experts
        self._formats = (self._format, *room_for)
        # What functions that torch compiles ask of formats, which they cannot look into.
        self.facts = tuple((format.weights, format.scales is not None) for format in self._formats)
        self._plans: Dict[Any, _native.Plan] = {}
        self._number = next(_NUMBERS)
        CONTEXTS[self._number] = self

    def close(self) -> None:
        """Gives the context up: later calls raise `ClosedError`. On the CPU device calls of other threads end first.

        Local, and may be called again. Handles, halves and the world may go before or after. A call that other ranks
        wait for is missed by them, as of a rank that has gone: close after a barrier.
        """
        CONTEXTS.pop(self._number, None)
        self._plans.clear()
        self._context.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._context.closed

    def __enter__(self) -> "AllToAll":
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()

    @property
    def local_experts(self) -> List[int]:
        """Numbers of the experts of this rank, in the order of outputs."""
        return list(self._experts)

    @property
    def format(self) -> Format:
        """The format of calls that do not state one."""
        return self._format

    @property
    def formats(self) -> Tuple[Format, ...]:
        """The context's own format, then those that room was made for."""
        return self._formats

    @property
    def number(self) -> int:
        """A number of this context in the process."""
        return self._number

    @property
    def ranks(self) -> int:
        """Ranks of the world."""
        return self._ranks

    @property
    def top_k(self) -> int:
        """Most choices of a token."""
        return self._top_k

    @property
    def duplicates(self) -> bool:
        """Whether a token may name an expert several times."""
        return self._duplicates

    @property
    def rounds(self) -> int:
        """In how many rounds each call goes."""
        return self._context.rounds

    def capacity(self, layout: str = "contiguous", align: int = 1, format: Optional[Format] = None) -> int:
        """As many rows as any routing can need in a layout; in the masked layout of each expert."""
        tokens, experts = self._ranks * (format or self._format).max_tokens, len(self._experts)
        if layout == "masked":
            return tokens * (self._top_k if self._duplicates else 1)
        if layout == "token":
            return tokens
        return tokens * (self._top_k if self._duplicates else min(self._top_k, experts)) + experts * (align - 1)

    def shapes(self, layout: str, capacity: Any, format: Format) -> Dict[str, Tuple[Tuple[Any, ...], str]]:
        """Shape and dtype of what an output has in a layout, by name. `capacity` may be symbolic."""
        experts = len(self._experts)
        rows = (experts, capacity) if layout == "masked" else (capacity,)
        shapes: Dict[str, Tuple[Tuple[Any, ...], str]] = {"rows": ((*rows, format.hidden), format.dtype)}
        shapes["counts"] = ((experts,), "i32")
        if format.scales is not None:
            columns, word = (128, "fp32") if format.scales == "fp32" else (512, "i32")
            shapes["scales"] = ((*rows, -(-format.hidden // columns)), word)
        if layout == "contiguous":
            shapes["offsets"] = ((experts + 1,), "i32")
        if layout == "token":
            shapes["token_experts"] = ((capacity, self._top_k), "i32")
            shapes["token_weights"] = ((capacity, self._top_k), "fp32")
        return shapes

    def plan(
        self, format: int, layout: str, align: int, capacity: Optional[int], drop_overflow: bool = False
    ) -> int:
        """The number of dispatches with such outputs, for the operator in C. `format`: a number of `formats`.
        `capacity` and `drop_overflow`: as of `output`, with "row_count"."""

        def make() -> _native.Plan:
            must_lie(layout, align)
            stated = self._formats[format]
            room = self.room(layout, align, stated, drop_overflow) if capacity is None else capacity
            whole("capacity", room)
            outputs_of = self.shapes(layout, room, stated)
            if drop_overflow:
                outputs_of["row_count"] = ((1,), "i32")
            outputs = [(name, *made) for name, made in outputs_of.items()]
            # Of one dtype, as what torch saves and compiles has in one storage.
            small = [name for name in ("token_experts", "offsets", "row_count", "counts") if name in outputs_of]
            return _native.Plan(
                self._context, self._number, stated, layout, align, outputs, together=[small], shared=0,
                drop_overflow=drop_overflow,
            )

        # Others may be equal to whole numbers, or be other ones later.
        if type(align) is not int or (capacity is not None and type(capacity) is not int):
            align = whole("align", align)
            capacity = None if capacity is None else whole("capacity", capacity)
        return self.planned((format, layout, align, capacity, drop_overflow), make)

    def one_call(self) -> _native.OneCall:
        """For `with`: halves within it are one call, and other threads' calls of this kind come before or after it."""
        return self._context.one_call()

    def room(self, layout: str, align: int, format: Format, drop_overflow: bool) -> int:
        """The capacity of an output for which none is given."""
        capacity = self.capacity(layout, align, format)
        return -(-capacity // align) * align if drop_overflow else capacity

    def planned(self, key: Any, make: Callable[[], _native.Plan]) -> int:
        """The number of the plan of this key, which is made if it is not there."""
        plan = self._plans.get(key)
        if plan is None:
            plan = make()
            if len(self._plans) == _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan.number

    def prepare(self, format: Format, layout: str, outputs: Any, **more: Any) -> _native.Plan:
        """A plan with outputs of the caller's own shapes, as `_native.Plan` takes them."""
        return _native.Plan(self._context, self._number, format, layout, 1, outputs, **more)

    @staticmethod
    def rows_of_counts(experts: List[int], sources: List[int], *, layout: str = "contiguous", align: int = 1) -> int:
        """The capacity that an output needs for these counts."""
        if layout == "contiguous":
            return sum(-(-rows // align) * align for rows in experts)
        return max(experts, default=0) if layout == "masked" else sum(sources)

    def output(
        self,
        like: Any,
        *,
        layout: str = "contiguous",
        align: int = 1,
        capacity: Optional[int] = None,
        payload_words: int = 0,
        format: Optional[Format] = None,
        also: Iterable[str] = (),
        column_major: bool = False,
        drop_overflow: bool = False,
    ) -> Tuple[Output, Dispatched]:
        """An `Output` with arrays of its own, and these as `Dispatched` without a handle.

        `like`: an array of the kind and device that outputs have. `capacity`: rows of the output, in the masked layout
        of each expert; by default as many as any routing can need. `payload_words`: of each token in the call.
        `format`: of the call, if it is not the context's. `also`: further outputs, of "row_expert" (int32 `[rows]`: the
        local expert, -1 for a row that is none), "source" (int32 `[rows, 2]`: rank and token), "row_count" (int32
        `[1]`: rows used) and "source_ranges" (int64 `[local experts, ranks]`: where the rows of a rank begin among the
        expert's, times 2^32, plus how many they are). `column_major`: a row's scales lie as far apart as there are rows,
        rounded up to 4, as DeepGEMM takes them; in the same shape. `drop_overflow`, not in the token layout: the last rows,
        in the masked layout of each expert, are left out if there is no room for them, in place of `CapacityError`;
        `capacity` is then a multiple of `align`. "row_count" is then of all rows that came, counts and offsets of those that are there.
        """
        format = format or self._format
        experts = len(self._experts)
        also = _further(also)
        must_lie(layout, align)
        if not isinstance(format, Format):
            raise TypeError(f"format is a {type(format).__name__}: give a tokenyard.Format")
        if capacity is None:
            capacity = self.room(layout, align, format, drop_overflow)
        whole("capacity", capacity)
        whole("payload_words", payload_words)
        make = _maker(like)
        shapes = self.shapes(layout, capacity, format)
        column_major = column_major and "scales" in shapes
        if column_major:
            (*places, rows, words), kind = shapes["scales"]
            shapes["scales"] = ((*places, words, -(-rows // 4) * 4), kind)
        made = {name: make(*shape) for name, shape in shapes.items()}
        if payload_words:
            made["payload"] = make((*made["rows"].shape[:-1], payload_words), "fp32")
        all_rows = experts * capacity if layout == "masked" else capacity
        sizes = {"row_expert": ((all_rows,), "i32"), "source": ((all_rows, 2), "i32"), "row_count": ((1,), "i32")}
        sizes["source_ranges"] = ((experts, self._ranks), "i64")
        further = {name: make(*sizes[name]) for name in also}
        order = dict(column_major=column_major, drop_overflow=drop_overflow)
        output = Output(layout, align=align, **order, **made, **further)
        if column_major:
            made["scales"] = made["scales"].swapaxes(-1, -2)[..., :rows, :]
        absent = dict.fromkeys(("scales", "offsets", "token_experts", "token_weights"))
        return output, Dispatched(**{**absent, **made}, handle=None, also=further)

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        count: Any = None,
        payload: Any = None,
        format: Optional[Format] = None,
        stream: Any = None,
        layout: str = "contiguous",
        align: int = 1,
        capacity: Optional[int] = None,
        exact: bool = False,
        also: Iterable[str] = (),
        drop_overflow: bool = False,
    ) -> Dispatched:
        """Sends `x` `[tokens, hidden]` to the experts `topk_idx` `[tokens, top_k]` (int32 or int64, -1 for none).

        `topk_weights`: fp32 `[tokens, top_k]`, where weights come with dispatch. `count`: int32 `[1]` on the device, of
        how many tokens there are. `payload`: fp32 `[tokens, words]`, which comes beside each row. `format`: of this call,
        one for which the context has room. `layout`, `align`, `capacity`, `also` and `drop_overflow` are those of
        `output`. With a bool array `[tokens, ranks]` in place of `topk_idx` tokens name ranks, and have a row at each one's
        first expert. An error of a call that took place, such as `RoutingError`, has what was made as its `dispatched`:
        combine that, as the other ranks do.

        `exact`: the host waits for the counts, and outputs have exactly as many rows as come (and the masked layout as
        many as the fullest expert has). Not while a graph is captured.
        """
        if exact and drop_overflow:
            raise ValueError("drop_overflow is set with exact: such outputs have room for all rows, so leave one of both out")
        if exact:
            given = dict(scales=scales, count=count, payload=payload, format=format)
            with self.one_call():
                return self._dispatch_exact(x, topk_idx, topk_weights, given, stream, layout, align, also)
        words = _words(payload)
        with _owner(x, stream):
            output, got = self.output(
                x, layout=layout, align=align, capacity=capacity, payload_words=words, format=format, also=also,
                drop_overflow=drop_overflow,
            )
        try:
            handle = self.dispatch_into(
                output, x, topk_idx, topk_weights, scales=scales, count=count, payload=payload, format=format,
                stream=stream,
            )
        except BaseException as error:
            # KeyboardInterrupt, too, if it came while the call was under way.
            if (made := getattr(error, "handle", None)) is not None:
                setattr(error, "dispatched", got._replace(handle=made))
            raise
        return got._replace(handle=handle)

    def _dispatch_exact(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        given: Dict[str, Any],
        stream: Any,
        layout: str,
        align: int,
        also: Iterable[str],
    ) -> Dispatched:
        found, on = Found(), _stream(x, stream)
        # What is refused is refused before anything is sent, which must be received.
        _maker(x)
        must_lie(layout, align)
        also = _further(also)
        try:
            sent = self.dispatch_send(x, topk_idx, topk_weights, counts=True, stream=on, **given)
        except _native.Error as error:
            # Unusable routing: the dispatch goes on without this rank's tokens.
            sent = found.take(error, "sent")
        try:
            counts = found.receive(lambda: self.counts(sent))
            capacity = self.rows_of_counts(*counts, layout=layout, align=align)
            words, format = _words(given["payload"]), given["format"]
            with _owner(x, stream):
                output, got = self.output(
                    x, layout=layout, align=align, capacity=capacity, payload_words=words, format=format, also=also
                )
        except BaseException as error:
            # Ctrl-C in the wait, or no memory for the output: the dispatch is to be received all the same.
            setattr(error, "sent", sent)
            raise
        try:
            got = got._replace(handle=found.receive(lambda: self.dispatch_recv(sent, output, stream=on)))
        except BaseException as error:
            # Ctrl-C in its wait: the dispatch took place. Without a handle it did not, and is to be received.
            if hasattr(error, "handle"):
                setattr(error, "dispatched", got._replace(handle=error.handle))
            else:
                setattr(error, "sent", sent)
            raise
        found.raise_with(got)
        return got

    def dispatch_into(
        self,
        output: Output,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        count: Any = None,
        payload: Any = None,
        format: Optional[Format] = None,
        stream: Any = None,
    ) -> Handle:
        """As `dispatch`, into arrays of the caller; an error of a call that took place has the handle as `handle`."""
        on = _stream(x, stream)
        return self._context.dispatch(
            x, topk_idx, topk_weights, output, scales=scales, count=count, payload=payload, format=format, stream=on
        )

    def dispatch_send(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        count: Any = None,
        payload: Any = None,
        format: Optional[Format] = None,
        counts: bool = False,
        stream: Any = None,
    ) -> Sent:
        """The sending half of a dispatch: other work of the stream may follow, and then `dispatch_recv`.

        With `counts` the host can ask for `counts(sent)` in between, and make an output of exactly as many rows.
        """
        on = _stream(x, stream)
        return self._context.dispatch_send(
            x, topk_idx, topk_weights, scales=scales, count=count, payload=payload, format=format, counts=counts,
            stream=on,
        )

    def counts(self, sent: Sent, seconds: Optional[float] = None) -> Tuple[List[int], List[int]]:
        """Waits until the counts of a sent dispatch are known: rows of each local expert, and rows from each rank.

        The second list counts tokens, which are rows in the token layout. `seconds`: by default the
        context's timeout, or 20 times as long where calls go on without missing ranks.
        """
        return self._context.counts(sent, self._timeout if seconds is None else seconds)

    def dispatch_again(
        self,
        handle: Handle,
        x: Any,
        rows: Any,
        *,
        scales: Any = None,
        row_scales: Any = None,
        column_major: bool = False,
        count: Any = None,
        payload: Any = None,
        row_payload: Any = None,
        format: Optional[Format] = None,
        stream: Any = None,
    ) -> None:
        """Sends new rows `x` of the same tokens to the places that the handle's dispatch gave them, in `rows`.

        `rows` has the layout and capacity of that dispatch's output. Padding stays as it is. The backward of a combine:
        gradients of sums go to the experts' rows. `payload` `[tokens, words]` goes to `row_payload` `[rows, words]`.
        `format`: of the rows, by default that of the handle's dispatch.
        """
        on = _stream(x, stream)
        self._context.dispatch_again(
            handle, x, rows, scales=scales, row_scales=row_scales, column_major=column_major, count=count,
            payload=payload, row_payload=row_payload, format=format, stream=on,
        )

    def dispatch_recv(self, sent: Sent, output: Output, *, stream: Any = None) -> Handle:
        """The receiving half, once for each `sent`. `stream`: by default the one that is current in torch, else in cupy."""
        on = self._current() if stream is None else _stream(None, stream)
        return self._context.dispatch_recv(sent, output, stream=on)

    def combine(
        self,
        rows: Any,
        handle: Handle,
        out: Any = None,
        *,
        tokens: Optional[int] = None,
        topk_weights: Any = None,
        accumulate: bool = False,
        payload: Any = None,
        payload_out: Any = None,
        dtype: Optional[str] = None,
        wait_times: Any = None,
        stream: Any = None,
    ) -> Any:
        """Returns the experts' outputs as weighted sums `[tokens, hidden]`, in `out` if it is given.

        `rows` are in the layout of the dispatch. `tokens`: rows of the sums, by default as many as the handle's dispatch
        had, and no more. `topk_weights`: fp32, where weights come with combine. `accumulate` adds to what `out` holds.
        `payload`: fp32 words beside each row, `[rows, words]`, of which `payload_out` gets the sums `[tokens, words]`,
        or each choice's words `[tokens, top_k, words]`, with their bits. `dtype`: of `rows`, the same on all ranks, if
        it is not the combine dtype of the dispatch's format. `wait_times`: int64 `[ranks]`, to which the nanoseconds
        are added for which the call waited for each rank.
        """
        if out is None:
            if accumulate:
                raise ValueError("out is missing: give what accumulate adds to, or leave accumulate out")
            if tokens is not None:
                must_be_tokens(tokens, handle)
            if dtype is not None and dtype not in ROWS:
                raise ValueError(f"dtype is {dtype!r}: give one of {', '.join(ROWS)}")
            format = handle.format
            shape = (handle.tokens if tokens is None else tokens, format.hidden)
            with _owner(rows, stream):
                out = _maker(rows)(shape, dtype or format.combine_dtype)
        on = _stream(rows, stream)
        self._context.combine(
            rows, handle, out, topk_weights=topk_weights, accumulate=accumulate, payload=payload,
            payload_out=payload_out, dtype=dtype, wait_times=wait_times, stream=on,
        )
        return out

    def combine_send(
        self, rows: Any, handle: Handle, *, topk_weights: Any = None, dtype: Optional[str] = None, stream: Any = None
    ) -> CombineSent:
        """The sending half of a combine."""
        on = _stream(rows, stream)
        return self._context.combine_send(rows, handle, topk_weights=topk_weights, dtype=dtype, stream=on)

    def combine_recv(
        self, sent: CombineSent, out: Any, *, accumulate: bool = False, wait_times: Any = None, stream: Any = None
    ) -> None:
        """The receiving half, once for each `sent`."""
        on = _stream(out, stream)
        self._context.combine_recv(sent, out, accumulate=accumulate, wait_times=wait_times, stream=on)

    def barrier(self, stream: Any = None) -> None:
        """A barrier of all ranks on their streams: later work of a stream runs after every rank's stream came here.
        Collective. `stream`: by default the current one. On the CPU device the host waits for it."""
        _native.barrier(self._context, self._current() if stream is None else _stream(None, stream))

    def mask_rank(self, rank: int) -> None:
        """Goes on without a rank, also while a call waits for it, where `missing_ranks` allows that."""
        self._context.mask_rank(rank)

    @property
    def rank_mask(self) -> RankMask:
        """int32 `[ranks]` on the device, an array interface: an entry that is not 0 masks its rank from the next call
        on. `numpy.asarray(ep.rank_mask)` on the CPU device, `torch.as_tensor(ep.rank_mask, device="cuda")` on a GPU."""
        return self._context.rank_mask()

    def silent_ranks(self) -> List[Tuple[int, str, int]]:
        """Ranks that a deadline masked: the rank, the call that waited for it, and that call's epoch."""
        return self._context.silent_ranks()

    def check(self) -> None:
        """Raises what earlier calls found: unusable routing, an output without room, a lost peer, a deadline."""
        self._context.check()

    def _current(self) -> int:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if self._context.on_cpu or (torch is None and cupy is None):
            return 0
        if torch is None:
            return int(cupy.cuda.get_current_stream().ptr)  # type: ignore[union-attr]
        return _torch_stream(torch, self._context.ordinal)


ROWS = ("bf16", "fp16", "fp32", "fp8")
"""Dtypes of rows."""
_MOST_PLANS = 64
"""More are made anew: of callers whose capacity differs from call to call."""
_LAYOUTS = ("contiguous", "masked", "token")
_FURTHER = ("row_expert", "source", "row_count", "source_ranges")


def whole(name: str, value: Any) -> int:
    """A number of things. Refuses what is none."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__}: give a whole number") from None
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{name} is {number}: give 0 or more, and less than 2^63")
    return number


def must_be_tokens(tokens: Any, of: Any) -> None:
    """Refuses more tokens of sums than the dispatch `of` a handle or a half had: nobody writes the rows of others."""
    if whole("tokens", tokens) > of.tokens:
        raise ValueError(f"tokens is {tokens}, and the dispatch had {of.tokens}: give as many")


def must_lie(layout: Any, align: Any) -> None:
    """Refuses what is no layout or no alignment."""
    if layout not in _LAYOUTS:
        raise ValueError(f'layout is "{layout}": give one of {", ".join(_LAYOUTS)}')
    whole("align", align)
    if not 1 <= align < 1 << 31:
        raise ValueError(f"align is {align}: give 1 for no alignment, or up to 2^31 - 1")


def _further(also: Any) -> List[str]:
    """Names of further outputs."""
    try:
        names = [also] if isinstance(also, str) else list(also)
    except TypeError:
        raise TypeError(f"also is a {type(also).__name__}: give names, some of {', '.join(_FURTHER)}") from None
    if unknown := [name for name in names if name not in _FURTHER]:
        raise ValueError(f"also has {unknown[0]!r}: give some of {', '.join(_FURTHER)}")
    return names


def _maker(like: Any) -> Callable[[Tuple[int, ...], str], Any]:
    """Makes arrays of the same library and device as `like`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        if like.device.type not in ("cpu", "cuda"):
            raise ValueError(f"x is on {like.device.type}: give a tensor on cpu or cuda")
        from ._tensors import TYPES as types

        empty, device = torch.empty, like.device
        return lambda shape, dtype: empty(shape, dtype=types[dtype], device=device)
    library = sys.modules.get(type(like).__module__.partition(".")[0])
    if library is None or not hasattr(library, "empty"):
        raise TypeError(f"x is a {type(like).__name__}: give an array of torch, numpy or cupy, or an output")
    names = {"bf16": "uint16", "fp16": "float16", "fp32": "float32", "i32": "int32", "i64": "int64", "fp8": "uint8"}
    return lambda shape, dtype: library.empty(shape, dtype=names[dtype])


def _words(payload: Any) -> int:
    """Words of each token; 0 of what is no array, which the call refuses."""
    shape = getattr(payload, "shape", ())
    return int(shape[-1]) if shape else 0


def _stream(array: Any, given: Any) -> int:
    """The address of the stream given, of torch or cupy or an address itself; else of the array's library's current one."""
    if given is not None:
        address = getattr(given, "cuda_stream", getattr(given, "ptr", given))
        if not hasattr(address, "__index__") or int(address) < 0:
            raise TypeError(f"stream is {given!r}: give a stream of torch or cupy, or the address of one")
        return int(address)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_stream(torch, array.get_device()) if array.is_cuda else 0
    cupy = sys.modules.get("cupy")
    if cupy is not None and hasattr(array, "__cuda_array_interface__"):
        return int(cupy.cuda.get_current_stream().ptr)
    return 0


def _torch_stream(torch: Any, ordinal: Optional[int]) -> int:
    """The address of the current stream, in one call of C where torch has it."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(ordinal) if raw is not None else torch.cuda.current_stream(ordinal).cuda_stream)


def _owner(like: Any, stream: Any) -> ContextManager[Any]:
    """Makes a stream given current, so that arrays made meanwhile are its own.

    Memory of another stream's may still be in use there: libraries reuse it as soon as their own stream's work is enqueued.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    owner: ContextManager[Any] = nullcontext()
    if stream is None:
        return owner
    if torch is not None and isinstance(like, torch.Tensor):
        if like.is_cuda:
            same = isinstance(stream, torch.cuda.Stream)
            owner = torch.cuda.stream(stream if same else torch.cuda.ExternalStream(_stream(None, stream), like.device))
    elif cupy is not None and hasattr(like, "__cuda_array_interface__"):
        owner = cupy.cuda.ExternalStream(_stream(None, stream))
    return owner
