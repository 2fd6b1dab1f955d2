"""The outputs of a process function: its results, emitted in batches with event times, and side outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ...errors import HeadgateError, PlanError, StateError
from ..base import Output
from ..elements import Batch, Timestamps
from ..functions.user_code import bad_result, user_error, user_failures
from ..per_record.base import UserFunction
from ..rows import PER_RECORD_ROWS
from ..suggestions import suggest

_ONE_RESULT = (str, bytes, dict)
_FIX = "return a list, or make the function a generator with yield; return None for nothing"


class _Collected:
    """Records of one output that wait to be emitted."""

    __slots__ = ("_user", "records", "times")

    def __init__(self, user: UserFunction) -> None:
        self._user = user
        self.records: list[Any] = []
        self.times: list[Any] = []

    def take(self, timed: bool) -> Batch:
        """Remove all records and return them as a batch."""
        times: Timestamps | None = np.array(self.times, np.int64) if timed else None
        records, self.records, self.times = self.records, [], []
        return self._user.batch(records, times, [])


class Timed(Protocol):
    """An object that has an event time, such as the context of a process function.

    Attributes:
        timestamp: the event time, ms; None if there is none.
    """

    timestamp: int | None


class _Time:
    """An event time of its own."""

    __slots__ = ("timestamp",)

    def __init__(self) -> None:
        self.timestamp: int | None = None


class Emitter:
    """Results and side records of one operator subtask.

    Attributes:
        timed: records have event times.

    Args:
        user: the step, and the columns of its results.
        sides: the names of the side outputs; their records stay Python objects.
        timed: the value until the first batch is known.
        output: the destination.
    """

    __slots__ = ("_main", "_marks", "_output", "_own", "_sides", "_times", "_user", "timed")

    def __init__(
        self,
        user: UserFunction,
        sides: Iterable[str],
        timed: bool,
        output: Output,
    ) -> None:
        self.timed = timed
        self._times: Timed = _Time()
        self._own = self._times
        self._user = user
        self._output = output
        self._main = _Collected(user)
        objects = replace(user, into=None)
        self._sides = {name: _Collected(objects) for name in sides}
        self._marks: dict[str, int] | None = None

    @property
    def time(self) -> int | None:
        """The event time of current results, ms."""
        return self._times.timestamp

    @time.setter
    def time(self, time: int | None) -> None:
        self._times = self._own
        self._own.timestamp = time

    def follow(self, times: Timed) -> None:
        """Let current results have the event time of `times`, as it changes, until `time` is set."""
        self._times = times

    def add(self, cause: Any, made: Iterable[Any]) -> None:
        """Add the results of a record or timer, `cause`; large results are emitted as they come.

        Raises:
            UserCodeError: they cannot be iterated, or iteration raised.
        """
        records, time = self._main.records, self.time
        kind = type(made)
        if (kind is list or kind is tuple) and len(records) + len(made) < PER_RECORD_ROWS:  # type: ignore[arg-type]
            records += made
            if self.timed:
                self._main.times += [time] * len(made)  # type: ignore[arg-type]
            return
        items = self._checked(cause, made)
        while True:
            room = PER_RECORD_ROWS - len(records)
            try:
                taken = list(islice(items, room))
            except HeadgateError:
                raise
            except user_failures() as error:
                raise user_error(self._user.step, self._user.origin, cause, error) from error
            records += taken
            self._main.times += [time] * len(taken)
            if len(taken) < room:
                return
            self._output.emit(self._main.take(self.timed))
            records = self._main.records

    def collected(self) -> tuple[list[Any], list[Any], int]:
        """Return the lists of results and of their event times, and a number of results: a loop may append
        to the lists until the next `add`, as long as there are fewer. Results without event times need
        none in the list.
        """
        return self._main.records, self._main.times, PER_RECORD_ROWS

    def _checked(self, cause: Any, made: Iterable[Any]) -> Iterator[Any]:
        try:
            items = iter(made)
        except TypeError as error:
            problem = f"returned {type(made).__name__}, which is not iterable"
            raise self._bad(cause, problem, _FIX) from error
        if isinstance(made, _ONE_RESULT):
            problem = f"returned one {type(made).__name__}, whose parts would become records"
            raise self._bad(cause, problem, "return [value]")
        return items

    def emit(self, side: SideOutput[Any], record: Any) -> None:
        """Add one record for a side output.

        Raises:
            StateError: the function does not declare this side output.
        """
        collected = self._sides.get(getattr(side, "name", ""))
        if collected is None:
            raise StateError(
                f"no such side output {side!r} step=`{self._user.step}`",
                where=str(self._user.origin),
                fix=suggest(str(getattr(side, "name", side)), list(self._sides), "side outputs"),
            )
        collected.records.append(record)
        collected.times.append(self.time)
        if self._marks is None and len(collected.records) >= PER_RECORD_ROWS:
            self._output.emit_side(side.name, collected.take(self.timed))

    def listed(self, cause: Any, made: Iterable[Any] | None) -> list[Any]:
        """Return all results of a record or timer.

        Raises what the function raises, and as `add` does.
        """
        return [] if made is None else list(self._checked(cause, made))

    def hold(self) -> None:
        """Hold side records until `release` or `take_back`."""
        self._marks = {name: len(collected.records) for name, collected in self._sides.items()}

    def release(self) -> None:
        """Release the side records since `hold`."""
        self._marks = None
        for name, collected in self._sides.items():
            if len(collected.records) >= PER_RECORD_ROWS:
                self._output.emit_side(name, collected.take(self.timed))

    def take_back(self) -> None:
        """Discard the side records since `hold`."""
        for name, mark in (self._marks or {}).items():
            collected = self._sides[name]
            del collected.records[mark:], collected.times[mark:]
        self._marks = None

    def flush(self) -> None:
        """Emit everything collected."""
        for name, collected in self._sides.items():
            if collected.records:
                self._output.emit_side(name, collected.take(self.timed))
        if self._main.records:
            self._output.emit(self._main.take(self.timed))

    def _bad(self, cause: Any, problem: str, fix: str) -> Exception:
        return bad_result(self._user.step, self._user.origin, cause, problem, fix=fix)


T = TypeVar("T")


class SideOutput(Generic[T]):
    """A further output of a process function, declared in the body of its class.

        class Guard(hg.KeyedProcess[str, Payment, Alert]):
            ignored = hg.SideOutput[Payment]()

    `ctx.emit(self.ignored, record)` sends a record there, `stream.side(Guard.ignored)` is the stream of
    those records, which can be used any number of times. They are Python objects; `map` with `into=`
    makes columns of them.
    """

    def __init__(self) -> None:
        self.name = ""
        self.owner = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = name
        self.owner = owner.__name__

    def __repr__(self) -> str:
        return f"SideOutput({self.owner}.{self.name})"


def declared_sides(kind: type[Any]) -> dict[str, SideOutput[Any]]:
    """Return the side outputs of a class and its bases by name; a subclass hides those of its base.

    Raises:
        PlanError: one object is the side output of two names.
    """
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        attributes.update(vars(base))
    found = {name: side for name, side in attributes.items() if isinstance(side, SideOutput)}
    for name, side in found.items():
        if side.name != name:
            raise PlanError(
                f"one SideOutput has two names: `{name}` and `{side.name}`",
                fix="write hg.SideOutput[...]() for each",
            )
    return found
