"""Microbatches of vLLM: its hooks, and exceptions in one of them.

Microbatches are threads of a worker, of which one runs at a time until it yields to the next. vLLM 0.33.0 lets the
others wait for good for one that ended with an exception. Where tokenyard's backends are used, they raise instead.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Sequence

MODULE = "vllm.v1.worker.ubatching"
# Microbatches are threads of which one runs at a time, until it yields. Without microbatches these do nothing.
HOOKS = (
    "dbo_enabled", "dbo_current_ubatch_id", "dbo_maybe_run_recv_hook", "dbo_switch_to_comm", "dbo_switch_to_compute",
    "dbo_switch_to_compute_sync", "dbo_yield_and_switch_from_compute_to_comm",
    "dbo_yield_and_switch_from_comm_to_compute",
)


def with_failure(leave: Callable[..., Any], current: Callable[[], Sequence[Any]]) -> Callable[..., Any]:
    """`UBatchContext.__exit__`, which leaves a microbatch's exception with the others. `current`: vLLM's contexts of
    microbatches that are under way, and None for others; none where vLLM is to be left alone."""

    @functools.wraps(leave)
    def leaving(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        others = [other for other in current() if other not in (None, self)]
        try:
            _fail(others, error)
            return leave(self, kind, error, trace)
        except BaseException as later:
            # The hook of another one, which runs here.
            _fail(others, later)
            if others:
                self.cpu_signal_event.set()
            raise

    return leaving


def _fail(others: List[Any], error: Any) -> None:
    for other in others:
        other.tokenyard_failure = error or getattr(other, "tokenyard_failure", None)


def or_failure(pass_on: Callable[[Any], None]) -> Callable[[Any], None]:
    """`UBatchContext._cpu_yield`, which raises if another microbatch did, before and after its wait."""

    def must_go_on(self: Any) -> None:
        failure = getattr(self, "tokenyard_failure", None)
        if failure is not None:
            raise RuntimeError(f"another microbatch failed: {failure}") from failure

    @functools.wraps(pass_on)
    def or_failure(self: Any) -> None:
        must_go_on(self)
        pass_on(self)
        must_go_on(self)

    return or_failure
