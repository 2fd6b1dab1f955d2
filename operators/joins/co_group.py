"""Co-group: a function gets all rows of a key in a window, from both streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ...errors import HeadgateError
from ...state.values import Index
from ..base import OperatorContext
from ..functions.user_code import user_error, user_failures
from ..per_record.base import UserFunction
from ..process.emitter import Emitter
from ..rows import PER_RECORD_ROWS, to_list, to_rows
from .columns import LEFT, RIGHT
from .matching import Runs, expanded, portions
from .step import JoinStep
from .windowed import WindowedPair

if TYPE_CHECKING:
    from ..windows.kinds import PaneWindow

CoGroupFunction = Callable[[Any, list[Any], list[Any]], Iterable[Any] | None]
"""A function of a key and its rows on the left and on the right."""


@dataclass(frozen=True)
class CoGroupStep:
    """The parts of a co-group step. Picklable.

    Attributes:
        join: the columns of the join.
        function: the user's function.
        user: the step, its line and the columns of its results.
        row_types: the classes that the rows of both sides become.
    """

    join: JoinStep
    function: CoGroupFunction
    user: UserFunction
    row_types: tuple[type[Any] | None, type[Any] | None]


class CoGroup(WindowedPair):
    """Calls a function for each key of a window.

    A row that arrives within the allowed lateness, after its window has fired, makes the function
    run again for its key, with all rows, once per batch.
    """

    kind = "co-group"

    def __init__(self, step: CoGroupStep, window: PaneWindow) -> None:
        super().__init__(step.join, window)
        self._user, self._row_types = step.user, step.row_types
        self._function: CoGroupFunction = step.function

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._emitter = Emitter(self._user, (), True, self.output)

    def _fire(self, left: pa.RecordBatch, right: pa.RecordBatch, time: int) -> None:
        self._call((left, right), None, time)

    def _add_late(self, side: int, new: pa.RecordBatch, window: int, time: int) -> None:
        keys = self._columns.key_columns(side, new)
        both = self._rows_of(LEFT, window, keys), self._rows_of(RIGHT, window, keys)
        self._call(both, keys, time)

    def _call(
        self,
        both: tuple[pa.RecordBatch, pa.RecordBatch],
        only: list[pa.Array] | None,
        time: int,
    ) -> None:
        """Call the function for all keys of a window, or only for those with the key columns `only`."""
        left, right, index = self._numbers(*both)
        runs = [Runs(own, index.size) for own in (left, right)]
        wanted = np.arange(index.size) if only is None else np.unique(self._look_up(index, only))
        counts = np.sum([run.ends[wanted] - run.starts[wanted] for run in runs], axis=0)
        self._emitter.time = time
        # A few keys at a time: rows as Python objects are many times as large.
        for low, high in portions(counts, PER_RECORD_ROWS):
            self._call_some(both, runs, wanted[low:high])
        self._emitter.flush()

    def _call_some(
        self, both: tuple[pa.RecordBatch, pa.RecordBatch], runs: list[Runs], keys: Index
    ) -> None:
        records: list[list[Any]] = []
        cuts: list[list[int]] = []
        for rows, run, row_type in zip(both, runs, self._row_types, strict=True):
            starts, ends = run.starts[keys], run.ends[keys]
            taken = rows.take(pa.array(run.order[expanded(starts, ends)[1]]))
            records.append(to_rows(taken, row_type))
            cuts.append(np.append(0, np.cumsum(ends - starts)).tolist())
        for at, key in enumerate(self._keys_of(both, runs, keys)):
            left, right = (
                own[cut[at] : cut[at + 1]] for own, cut in zip(records, cuts, strict=True)
            )
            self._call_one(key, left, right)

    def _keys_of(
        self, both: tuple[pa.RecordBatch, pa.RecordBatch], runs: list[Runs], keys: Index
    ) -> list[Any]:
        """Return the keys with these numbers, from their first row on the left, or else on the right."""
        on_left = runs[LEFT].ends[keys] > runs[LEFT].starts[keys]
        found: list[Any] = [None] * len(keys)
        for side, which in ((LEFT, np.flatnonzero(on_left)), (RIGHT, np.flatnonzero(~on_left))):
            first = runs[side].order[runs[side].starts[keys[which]]]
            columns = [
                to_list(column.take(pa.array(first)))
                for column in self._columns.key_columns(side, both[side])
            ]
            values = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
            for at, value in zip(which.tolist(), values, strict=True):
                found[at] = value
        return found

    def _call_one(self, key: Any, left: list[Any], right: list[Any]) -> None:
        try:
            made = self._function(key, left, right)
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self._user.step, self._user.origin, key, error) from error
        if made is not None:
            self._emitter.add(key, made)
