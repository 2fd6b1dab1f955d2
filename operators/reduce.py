"""Keyed reduce with a Python function: one tight loop over the records, a dict per subtask.

Emits the running value for each record, with the record's event time. State is pickled at the cut of a
snapshot, since user code may change its own values later; that pauses the subtask for about a second per
million keys.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from ..errors import StateError
from ..state.hashing import hash_keys, key_groups_of
from ..state.snapshot import KEY_GROUP_COLUMN, RestoredState, StateSnapshot
from .base import Operator
from .elements import Batch, ColumnBatch, ObjectBatch
from .graph import Origin
from .rows import PER_RECORD_ROWS, RowMismatch, to_columns, to_list, to_rows
from .user_code import bad_result, user_error

_STATE = "reduce"
_SCHEMA = pa.schema(
    [
        pa.field(KEY_GROUP_COLUMN, pa.int32(), False),
        pa.field("key_text", pa.string(), False),
        pa.field("key", pa.binary(), False),
        pa.field("value", pa.binary(), False),
    ]
)
_KEY_TEXT_MAX = 200
_ABSENT = object()


class ReduceOperator(Operator):
    """Combines the records of each key, two at a time, with the user's function.

    Args:
        function: `(value so far, record) -> new value`; the first record of a key is its first value.
        key: key columns of a column stream, or a function of a record.
        schema: of a column stream, whose values come out as columns again; None for Python objects.
        row_type: the class of the records of a column stream, None for a generated one.
        step: name of the step, for errors.
        origin: the user's line.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        key: Sequence[str] | Callable[[Any], Hashable],
        *,
        schema: pa.Schema | None = None,
        row_type: type[Any] | None = None,
        step: str = "reduce",
        origin: Origin | None = None,
    ) -> None:
        self._function = function
        self._key = key if callable(key) else tuple(key)
        self._schema, self._row_type = schema, row_type
        self._step, self._origin = step, origin or Origin("")
        self._values: dict[Any, Any] = {}

    def process(self, batch: Batch, input_index: int) -> None:
        if isinstance(batch, ColumnBatch):
            for low in range(0, len(batch), PER_RECORD_ROWS):
                self._process_columns(batch.slice(low, min(PER_RECORD_ROWS, len(batch) - low)))
        elif batch.records:
            values = self._reduce(self._keys_of(batch.records), batch.records)
            self.output.emit(ObjectBatch(values, batch.timestamps))

    def _process_columns(self, batch: ColumnBatch) -> None:
        records = to_rows(batch.data, self._row_type)
        if callable(self._key):
            keys = self._keys_of(records)
        else:
            lists = [to_list(batch.data.column(name)) for name in self._key]
            keys = lists[0] if len(lists) == 1 else list(zip(*lists, strict=True))
        values = self._reduce(keys, records)
        if self._schema is None:
            self.output.emit(ObjectBatch(values, batch.timestamps))
            return
        try:
            data = to_columns(values, self._schema)
        except RowMismatch as error:
            raise bad_result(
                self._step,
                self._origin,
                records[error.index],
                str(error),
                "a reduce gives back what it takes: a record of the same columns",
            ) from error
        self.output.emit(ColumnBatch(data, batch.timestamps))

    def _keys_of(self, records: list[Any]) -> list[Any]:
        keys: list[Any] = []
        assert callable(self._key)
        try:
            keys.extend(map(self._key, records))
        except Exception as error:
            raise user_error(self._step, self._origin, records[len(keys)], error) from error
        return keys

    def _reduce(self, keys: list[Any], records: list[Any]) -> list[Any]:
        """The running value behind each record."""
        values, function = self._values, self._function
        get, absent = values.get, _ABSENT
        results: list[Any] = []
        append = results.append
        try:
            for key, record in zip(keys, records, strict=True):
                before = get(key, absent)
                value = record if before is absent else function(before, record)
                values[key] = value
                append(value)
        except Exception as error:
            raise user_error(self._step, self._origin, records[len(results)], error) from error
        return results

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Table `reduce`: key group, the key as text and pickled, the value pickled."""
        keys = list(self._values)
        values = [_dumps(value) for value in self._values.values()]
        max_parallelism = self.context.max_parallelism

        def make() -> pa.Table:
            groups = key_groups_of(hash_keys(keys), max_parallelism)
            order = np.argsort(groups, kind="stable")
            columns = [
                pa.array(groups),
                pa.array([repr(key)[:_KEY_TEXT_MAX] for key in keys], pa.string()),
                pa.array([_dumps(key) for key in keys], pa.binary()),
                pa.array(values, pa.binary()),
            ]
            return pa.Table.from_arrays(columns, schema=_SCHEMA).take(pa.array(order))

        return StateSnapshot(tables={_STATE: make})

    def restore(self, state: RestoredState) -> None:
        table = state.tables.get(_STATE)
        if table is None:
            return
        if not {"key", "value"} <= set(table.column_names):
            raise StateError(f"the snapshot holds no state of a reduce step=`{self._step}`")
        keys = table.column("key").to_pylist()
        values = table.column("value").to_pylist()
        self._values = dict(zip(map(pickle.loads, keys), map(pickle.loads, values), strict=True))


def _dumps(value: Any) -> bytes:
    """Pickled; by the slower cloudpickle only where a class travels with the job's code."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError):
        data: bytes = cloudpickle.dumps(value)
        return data
