"""Errors of calls that took place, and how exceptions are copied to other processes."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Optional, Tuple

from ._native import CapacityError, Error, OrderError, RoutingError

# What a call made all the same: of this process alone, and of the context that made it.
_MADE = ("handle", "sent", "dispatched", "out")
# A number that no expert has: it is sent where a caller names an expert that a context has for itself.
NO_EXPERT = (1 << 31) - 1


class Found:
    """An error of a call that took place all the same, such as unusable routing, until what it made is complete. No
    frame of the error's traceback has the error afterwards: what it holds would live until garbage is collected."""

    def __init__(self, error: Optional[BaseException] = None) -> None:
        self._error = error

    def __bool__(self) -> bool:
        return self._error is not None

    def without_rows(self) -> bool:
        """Whether the call's output had no room: then it has no rows. After any other error it has those of the ranks
        whose routing was usable, which count on them."""
        return isinstance(self._error, CapacityError)

    def take(self, error: BaseException, made: str) -> Any:
        """What the call made, by its name among the error's fields, where it is no longer. An error without it is raised
        again, as nothing took place, and so is one after which the context has no further calls: what it made is never
        complete."""
        try:
            if not hasattr(error, made) or getattr(error, "fatal", False) or isinstance(error, OrderError):
                raise error
            self._error, taken = error, getattr(error, made)
            delattr(error, made)
            return taken
        finally:
            del error

    def sending(self, send: Callable[[], Any]) -> Any:
        """What a sending half made, which may go on without this rank's tokens."""
        try:
            return send()
        except Error as error:
            return self.take(error, "sent")

    def receive(self, receive: Callable[[], Any]) -> Any:
        """Makes a call that follows a dispatch's sending half. On a GPU it raises that half's unusable routing in place
        of its own work: the error is noted, and the call made again."""
        try:
            return receive()
        except RoutingError as error:
            if hasattr(error, "handle") or hasattr(error, "sent"):
                raise
            self._error = error
        return receive()

    def raise_with(
        self, made: Any, name: str = "dispatched", sent: Optional[Callable[[], Any]] = None, topk_idx: Any = None
    ) -> None:
        """Raises the error, if there is one, with what the call made as this field, if it made something. `topk_idx`:
        the caller's choices where those of `sent()` went in their place."""
        error, self._error = self._error, None
        if error is None:
            return
        if sent is not None:
            renumber(error, sent(), topk_idx)
        if made is not None:
            setattr(error, name, made)
        try:
            raise error
        finally:
            del error


def renumber(error: BaseException, sent: Any, topk_idx: Any) -> None:
    """Lets an error of routing state the caller's number where `NO_EXPERT` was sent in its place. On a GPU the error may
    be one of an earlier call, whose choices are others: it stays as it is."""
    text = str(error)
    place = re.search(rf"choice (\d+) of token (\d+) names expert {NO_EXPERT},", text)
    if place is None:
        return
    choice, token = (int(number) for number in place.groups())
    if token < sent.shape[0] and choice < sent.shape[1] and int(sent[token, choice]) == NO_EXPERT:
        error.args = (text.replace(str(NO_EXPERT), str(int(topk_idx[token, choice]))),)


def _reduce(error: Error) -> Tuple[Any, Tuple[Any, ...], Dict[str, Any]]:
    """An exception for pickle and copy: its class, text and fields, without what belongs to a context."""
    return type(error), error.args, {name: value for name, value in vars(error).items() if name not in _MADE}


def make_picklable() -> None:
    """Lets exceptions go to other processes, as those of a worker of multiprocessing do."""
    setattr(Error, "__reduce__", _reduce)
