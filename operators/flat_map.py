"""flat_map: one record in, any number out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from ..errors import HeadgateError
from .base import AsyncOperator, Operator, Output
from .elements import Batch, Timestamps
from .functions import is_async_generator
from .per_record import UserFunction, pieces
from .rows import PER_RECORD_ROWS
from .user_code import FAILURES, bad_result, user_error

_FIX = "return a list, or make the function a generator with yield; an empty list drops the record"


class FlatMapOperator(Operator):
    """Calls a function that returns an iterable; each result has the event time of its record.

    Results are sent on in batches while the input batch is worked on, so that a record which makes
    millions of others needs no memory for all of them.
    """

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    def process(self, batch: Batch, input_index: int) -> None:
        function = self._user.function
        for piece in pieces(batch):
            results = Results(self._user, piece.timestamps, self.output)
            for index, record in enumerate(self._user.reader(piece)):
                try:
                    made = function(record)
                except HeadgateError:
                    raise
                except FAILURES as error:
                    raise user_error(self._user.step, self._user.origin, record, error) from error
                results.add(index, record, made)
            results.flush()


class AsyncFlatMapOperator(AsyncOperator):
    """The same for `async def` functions that return an iterable or yield."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user
        if is_async_generator(user.function):
            self._user = UserFunction(
                _Collected(user.function),
                user.step,
                user.origin,
                user.reader,
                user.into,
                user.max_in_flight,
            )

    async def process_async(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            records = self._user.reader(piece)
            results = Results(self._user, piece.timestamps, self.output)
            made = await self._user.apply_async(records)
            for index, record in enumerate(records):
                results.add(index, record, made[index])
            results.flush()


class _Collected:
    """An async generator function as a coroutine function that returns a list."""

    def __init__(self, function: Any) -> None:
        self._function = function

    async def __call__(self, record: Any) -> list[Any]:
        return [item async for item in self._function(record)]


class Results:
    """Collects results and their event times, and sends them on when there are enough."""

    def __init__(self, user: UserFunction, times: Timestamps | None, output: Output) -> None:
        self._user = user
        self._times = times
        self._output = output
        self._items: list[Any] = []
        self._sources: list[int] = []

    def add(self, index: int, record: Any, made: Iterable[Any]) -> None:
        """Take over what record number `index` became."""
        try:
            items = iter(made)
        except TypeError as error:
            raise bad_result(
                self._user.step,
                self._user.origin,
                record,
                f"returned {type(made).__name__}, which is not iterable",
                fix=_FIX,
            ) from error
        if isinstance(made, str | bytes | dict):
            problem = f"returned one {type(made).__name__}, whose parts would become records"
            raise bad_result(
                self._user.step, self._user.origin, record, problem, fix="return [value]"
            )
        while True:
            try:
                taken = list(islice(items, PER_RECORD_ROWS - len(self._items)))
            except HeadgateError:
                raise
            except FAILURES as error:
                raise user_error(self._user.step, self._user.origin, record, error) from error
            self._items += taken
            self._sources += [index] * len(taken)
            if len(self._items) < PER_RECORD_ROWS:
                return
            self.flush()

    def flush(self) -> None:
        """Send on what there is."""
        if not self._items:
            return
        times = None if self._times is None else self._times[np.array(self._sources)]
        batch = self._user.batch(self._items, times, [])
        self._items, self._sources = [], []
        self._output.emit(batch)
