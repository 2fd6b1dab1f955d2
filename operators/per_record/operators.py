"""The operators of `map`, `filter`, `flat_map` and `union`, and how they call the user's functions.

`map` has one record for each, `filter` passes a record if the function's result is true, `flat_map`
has any number. `union` does nothing, because the inputs of a node are read together. A call has the
error policy of its step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from ...errors import HeadgateError
from ..base import AsyncOperator, Operator, OperatorContext, Output
from ..elements import Batch, ColumnBatch
from ..functions.checks import is_async_generator
from ..functions.dead_letters import FAIL, DeadLetters
from ..functions.user_code import bad_result, user_error, user_failures
from ..rows import PER_RECORD_ROWS, RowMismatch
from .base import UserFunction, pieces
from .read_tuples import ReadTuples

Answered: TypeAlias = tuple[Batch, list[Any], list[Any]]
"""The records that have a result, as a batch and as records, and their results."""


class Guard:
    """The guard of one operator subtask, whose `open` calls `open`."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user
        self._plain = user.on_error == FAIL
        self._letters = DeadLetters(user.step, user.origin, user.on_error)

    def open(self, context: OperatorContext, output: Output) -> None:
        """Set up the counting and sending of failed records."""
        if self._user.on_error.then != "fail":
            self._letters.open(context, output)

    def results(self, batch: Batch) -> Answered:
        """Call the function for each record; failed records become dead letters.

        Raises:
            UserCodeError: it raised, and the policy is to fail.
        """
        records = self._user.reader(batch)
        if self._plain:
            return batch, records, self._user.apply(records)
        results, failures = self._user.attempt(records)
        return self.without(batch, records, results, failures)

    async def results_async(self, batch: Batch) -> Answered:
        """The same for a coroutine function."""
        records = self._user.reader(batch)
        failures: dict[int, BaseException] = {}
        results = await self._user.apply_async(records, failures)
        return self.without(batch, records, results, failures)

    def without(
        self,
        batch: Batch,
        records: list[Any],
        results: list[Any],
        failures: Mapping[int, BaseException],
    ) -> Answered:
        """Make dead letters of the records at the places of `failures`, and return the others."""
        if not failures:
            return batch, records, results
        lost = sorted(failures)
        self._letters.take(batch.take(np.array(lost)), [failures[place] for place in lost])
        kept = [place for place in range(len(records)) if place not in failures]
        return (
            batch.take(np.array(kept, np.intp)),
            [records[place] for place in kept],
            [results[place] for place in kept],
        )

    def batch(self, answered: Answered) -> Batch:
        """Return a batch of one result per record; a result that does not fit `into` is a failure
        as well."""
        batch, records, results = answered
        if self._plain or self._user.into is None:
            return self._user.batch(results, batch.timestamps, records, batch.positions)
        try:
            return self._user.columns(results, batch.timestamps, batch.positions)
        except RowMismatch:
            unfit = self.unfit([[result] for result in results])
            batch, records, results = self.without(batch, records, results, unfit)
            return self._user.batch(results, batch.timestamps, records, batch.positions)

    def unfit(self, results: list[list[Any]]) -> dict[int, BaseException]:
        """Return the places of records with results that do not fit the columns of `into`."""
        user = self._user
        if user.into is None or user.on_error.then == "fail":
            return {}
        try:
            user.columns([each for made in results for each in made], None)
        except RowMismatch:
            pass
        else:
            return {}
        failures: dict[int, BaseException] = {}
        for place, made in enumerate(results):
            try:
                user.columns(made, None)
            except RowMismatch as error:
                failures[place] = error
        return failures


class Guarded(Operator):
    """An operator that calls a user's function under the error policy of its step."""

    def __init__(self, user: UserFunction) -> None:
        self._guard = Guard(user)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._guard.open(context, self.output)


class MapOperator(Guarded):
    """Calls a function for each record; results keep the event times of their records."""

    def __init__(self, user: UserFunction) -> None:
        super().__init__(user)
        self._read_tuples = ReadTuples.of(user)

    def process(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            if self._read_tuples is not None and isinstance(piece, ColumnBatch):
                self.output.emit(self._read_tuples(piece))
            else:
                self.output.emit(self._guard.batch(self._guard.results(piece)))


class AsyncMapOperator(Guarded, AsyncOperator):
    """The same for a coroutine function; results keep the order of the records."""

    async def process_async(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            self.output.emit(self._guard.batch(await self._guard.results_async(piece)))


class FilterOperator(Guarded):
    """Keeps the records for which a function is true. Conditions on columns: `expression_steps.py`."""

    def process(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            _emit_kept(self._guard.results(piece), self.output)


class AsyncFilterOperator(Guarded, AsyncOperator):
    """The same for a coroutine function."""

    async def process_async(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            _emit_kept(await self._guard.results_async(piece), self.output)


def _emit_kept(answered: Answered, output: Output) -> None:
    batch, _, answers = answered
    kept = kept_rows(answers)
    if len(kept):
        output.emit(batch if len(kept) == len(batch) else batch.take(kept))


def kept_rows(answers: list[Any]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the places of the true answers."""
    return np.flatnonzero(np.fromiter(map(bool, answers), np.bool_, len(answers)))


_FIX = "return a list, or make the function a generator with yield; an empty list drops the record"


class Flattening(Guarded):
    """An operator whose function returns an iterable.

    Args:
        user: the function as the user wrote it.
        listed: the function as it is called under an error policy other than to fail: it returns a list, so
            it fails before any of the results of a record is emitted.
    """

    def __init__(self, user: UserFunction, listed: Callable[[Any], Any]) -> None:
        super().__init__(replace(user, function=listed))
        self._user = user

    def _emit_whole(self, answered: Answered) -> None:
        """Emit all results of each record, or make a dead letter of it."""
        batch, records, results = answered
        unfit = self._guard.unfit(results)
        batch, records, results = self._guard.without(batch, records, results, unfit)
        collected = Results(self._user, batch, self.output)
        for index, record in enumerate(records):
            collected.add(index, record, results[index])
        collected.flush()


class FlatMapOperator(Flattening):
    """Calls a function that returns an iterable; each result has the event time of its record.

    Results are emitted in batches while the input batch is processed, so that a record with
    millions of results does not need memory for all of them. Under an error policy other than to
    fail, either all results of a record are emitted, or none.
    """

    def __init__(self, user: UserFunction) -> None:
        super().__init__(user, _Listed(user))

    def process(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            if self._user.on_error == FAIL:
                self._process_at_once(piece)
            else:
                self._emit_whole(self._guard.results(piece))

    def _process_at_once(self, batch: Batch) -> None:
        function = self._user.function
        results = Results(self._user, batch, self.output)
        for index, record in enumerate(self._user.reader(batch)):
            try:
                made = function(record)
            except HeadgateError:
                raise
            except user_failures() as error:
                raise user_error(self._user.step, self._user.origin, record, error) from error
            results.add(index, record, made)
        results.flush()


class AsyncFlatMapOperator(Flattening, AsyncOperator):
    """The same for `async def` functions that return an iterable or yield."""

    def __init__(self, user: UserFunction) -> None:
        if is_async_generator(user.function):
            user = replace(user, function=_Collected(user.function))
        super().__init__(user, _ListedAsync(user))

    async def process_async(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            if self._user.on_error != FAIL:
                self._emit_whole(await self._guard.results_async(piece))
                continue
            records = self._user.reader(piece)
            results = Results(self._user, piece, self.output)
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


class _Listed:
    """A function whose results are collected in a list: it fails before any of them is emitted."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    def __call__(self, record: Any) -> list[Any]:
        return list(iterated(self._user, record, self._user.function(record)))


class _ListedAsync:
    """The same for a coroutine function."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user
        self._function: Callable[[Any], Awaitable[Any]] = user.function

    async def __call__(self, record: Any) -> list[Any]:
        return list(iterated(self._user, record, await self._function(record)))


class Results:
    """Collects results and their event times, and emits them when there are enough."""

    def __init__(self, user: UserFunction, records: Batch, output: Output) -> None:
        self._user = user
        self._times, self._positions = records.timestamps, records.positions
        self._output = output
        self._items: list[Any] = []
        self._sources: list[int] = []

    def add(self, index: int, record: Any, made: Iterable[Any]) -> None:
        """Add the results of record number `index`."""
        items = iterated(self._user, record, made)
        while True:
            try:
                taken = list(islice(items, PER_RECORD_ROWS - len(self._items)))
            except HeadgateError:
                raise
            except user_failures() as error:
                raise user_error(self._user.step, self._user.origin, record, error) from error
            self._items += taken
            self._sources += [index] * len(taken)
            if len(self._items) < PER_RECORD_ROWS:
                return
            self.flush()

    def flush(self) -> None:
        """Emit what was collected."""
        if not self._items:
            return
        rows = np.array(self._sources)
        times = None if self._times is None else self._times[rows]
        positions = None if self._positions is None else self._positions.of(rows)
        batch = self._user.batch(self._items, times, [], positions)
        self._items, self._sources = [], []
        self._output.emit(batch)


def iterated(user: UserFunction, record: Any, made: Iterable[Any]) -> Iterator[Any]:
    """Yield the results of the function for a record.

    Raises:
        UserCodeError: not something that can be iterated, or a single value by mistake.
    """
    try:
        items = iter(made)
    except TypeError as error:
        problem = f"returned {type(made).__name__}, which is not iterable"
        raise bad_result(user.step, user.origin, record, problem, fix=_FIX) from error
    if isinstance(made, str | bytes | dict):
        problem = f"returned one {type(made).__name__}, whose parts would become records"
        raise bad_result(user.step, user.origin, record, problem, fix="return [value]")
    return items


class UnionOperator(Operator):
    """Passes every batch on, whichever input it came from."""

    def process(self, batch: Batch, input_index: int) -> None:
        self.output.emit(batch)
