"""The state of calls in flight: their records, for which the calls are made again after a restore.

In a stream without keys they are items of a few records each, redistributed when the parallelism
changes. In a keyed stream they are a table with a row per key group, so that each record goes to
the subtask of its key.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import StateError
from ...state.codecs import dumps
from ...state.hashing import hash_keys, key_groups_of
from ...state.keyed.keys import key_of
from ...state.snapshot import (
    KEY_GROUP_COLUMN,
    ItemsCut,
    RestoredState,
    StateInfo,
    StateSnapshot,
    TableCut,
    state_info,
)
from ..elements import Batch, ColumnBatch, ObjectBatch, Timestamps, concatenated
from ..origin import Origin
from ..schema import difference
from .call import Call

STATE: Final = "in-flight"
ITEM_ROWS: Final = 16
"""The number of records that stay together when the parallelism changes."""
_POSITION: Final = "position"
_TABLE: Final = pa.schema(
    [
        pa.field(KEY_GROUP_COLUMN, pa.int32(), False),
        pa.field(_POSITION, pa.int64(), False),
        pa.field("records", pa.binary(), False),  # those of this key group, in order of arrival
    ]
)


def pickled(record: Any) -> bytes | Exception:
    """Return the pickled record, or the error; an error fails the checkpoint, not the record."""
    try:
        return dumps(record)
    except Exception as error:
        return error


class InFlightState:
    """Writes and reads the records of calls.

    Args:
        schema: the columns of the records; None: Python objects.
        keyed: whether calls have keys.
        step: the name of the step, for errors.
        origin: the user's line.
    """

    def __init__(self, schema: pa.Schema | None, keyed: bool, step: str, origin: Origin) -> None:
        self._schema = schema
        self._keyed = keyed
        self._step = step
        self._origin = origin

    @property
    def pickled(self) -> bool:
        """True if records are Python objects, which are pickled."""
        return self._schema is None

    def infos(self) -> Sequence[StateInfo]:
        """Return the declarations of the state."""
        if self._keyed:
            return [state_info(STATE, STATE, _TABLE)]
        return [state_info(STATE, "split")]

    def cut(self, calls: list[Call], max_parallelism: int) -> StateSnapshot:
        """Snapshot the records of `calls`, a copy for this purpose; they are written in a thread."""
        if not self._keyed:
            return StateSnapshot(items={STATE: ItemsCut(lambda: list(self._items(calls)))})
        return StateSnapshot(
            tables={STATE: TableCut(lambda _: self._table(calls, max_parallelism))}
        )

    def restored(self, state: RestoredState) -> Iterator[Batch]:
        """Yield the records in order of arrival, except between different old subtasks.

        Raises:
            StateError: they do not fit this stream.
        """
        if STATE in state.tables:
            table = state.tables[STATE]
            for data in table.sort_by(_POSITION).column("records").to_pylist():
                yield self._decode(data)
        for item in state.items.get(STATE, ()):
            yield self._decode(item)

    def _items(self, calls: list[Call]) -> Iterator[bytes]:
        some: list[Call] = []
        rows = 0
        for call in calls:
            some.append(call)
            rows += call.rows
            if rows >= ITEM_ROWS:
                yield self._encode(some)
                some, rows = [], 0
        if some:
            yield self._encode(some)

    def _table(self, calls: list[Call], max_parallelism: int) -> pa.Table:
        groups = np.zeros(0, np.int32)
        if calls:
            keys = [key_of(call.key) for call in calls]
            groups = key_groups_of(hash_keys(keys), max_parallelism)
        # A row per record would repeat the names and types of all columns each time.
        order = np.argsort(groups, kind="stable")
        found, first = np.unique(groups[order], return_index=True)
        parts = np.split(order, first[1:]) if calls else []
        columns = [
            pa.array(found, pa.int32()),
            pa.array([part[0] for part in parts], pa.int64()),
            pa.array([self._encode([calls[at] for at in part]) for part in parts], pa.binary()),
        ]
        return pa.Table.from_arrays(columns, schema=_TABLE)

    def _encode(self, calls: list[Call]) -> bytes:
        """Encode times and records: an Arrow stream, or a list of pickles."""
        parts = [call.records() for call in calls]
        times = None
        if parts[0].timestamps is not None:
            times = [time for part in parts for time in _times_of(part)]
        if self._schema is None:
            saved = [call.saved for call in calls]
            return msgspec.msgpack.encode((times, list(map(self._checked, saved))))
        sink = pa.BufferOutputStream()
        data = concatenated([part for part in parts if isinstance(part, ColumnBatch)]).data
        with pa.ipc.new_stream(sink, data.schema) as writer:
            writer.write_batch(data)  # as one batch: a batch per record would be mostly headers
        return msgspec.msgpack.encode((times, sink.getvalue().to_pybytes()))

    def _checked(self, saved: bytes | Exception | None) -> bytes:
        if isinstance(saved, bytes):
            return saved
        raise StateError(
            f"a record cannot be pickled step=`{self._step}`: {saved}",
            where=str(self._origin),
            fix="let the step before turn it into plain data",
        )

    def _decode(self, item: bytes) -> Batch:
        numbers, data = msgspec.msgpack.decode(item)
        times = None if numbers is None else np.array(numbers, np.int64)
        if isinstance(data, bytes) != (self._schema is not None):
            now = "Python objects" if self._schema is None else "columns"
            raise self._misfit(f"the stream is now of {now}, and was not")
        if self._schema is None:
            return ObjectBatch([pickle.loads(each) for each in data], times)
        table = pa.ipc.open_stream(data).read_all()
        if problem := difference(self._schema, table.schema):
            raise self._misfit(problem)
        table = table.select(self._schema.names).cast(self._schema).combine_chunks()
        return ColumnBatch(table.to_batches()[0], times)

    def _misfit(self, problem: str) -> StateError:
        return StateError(
            f"records with calls in flight do not fit the step step=`{self._step}`: {problem}",
            where=str(self._origin),
            fix="restore with the stream as it was, end that job with `headgate stop --drain`, and "
            "start the new one from the savepoint",
        )


def _times_of(batch: Batch) -> list[int]:
    times: Timestamps | None = batch.timestamps
    assert times is not None  # all batches of a stream have event times, or none has
    found: list[int] = times.tolist()
    return found
