"""Batches as bytes: for what a loop spills, and for what a checkpoint keeps of it."""

from __future__ import annotations

import pickle
from typing import Final

import numpy as np
import pyarrow as pa

from ...errors import StateError
from ...state.codecs import dumps
from ..elements import Batch, ColumnBatch, ObjectBatch

_TIMES: Final = "__timestamps"
_OBJECTS, _COLUMNS, _TIMED = b"o", b"c", b"t"


def encode(batch: Batch, step: str) -> bytes:
    """Encode a batch with its event times: an Arrow stream, or a pickle.

    Raises:
        StateError: a record cannot be pickled.
    """
    if isinstance(batch, ObjectBatch):
        try:
            return _OBJECTS + dumps((batch.records, batch.timestamps))
        except Exception as error:
            raise StateError(
                f"a record in a loop cannot be pickled step=`{step}`: {error!r}",
                fix="let the steps of the loop make plain data",
            ) from error
    data, kind = batch.data, _COLUMNS
    if batch.timestamps is not None:
        times = pa.array(batch.timestamps, pa.int64())
        data, kind = data.append_column(pa.field(_TIMES, pa.int64(), False), times), _TIMED
    sink = pa.BufferOutputStream()
    sink.write(kind)
    with pa.ipc.new_stream(sink, data.schema) as writer:
        writer.write_batch(data)
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def decode(data: bytes) -> Batch:
    """The reverse of `encode`."""
    kind, body = data[:1], memoryview(data)[1:]
    if kind == _OBJECTS:
        records, timestamps = pickle.loads(body)
        return ObjectBatch(records, timestamps)
    batch = pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch()
    if kind == _COLUMNS:
        return ColumnBatch(batch)
    last = batch.num_columns - 1
    times = batch.column(last).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return ColumnBatch(batch.remove_column(last), times)


def restored(data: bytes, schema: pa.Schema | None, step: str) -> Batch:
    """Decode a batch of a checkpoint and fit it to the loop's columns of today.

    Objects are only unpickled for a loop of objects.

    Raises:
        StateError: it has other columns, or is of another kind.
    """
    _check_kind(data[:1] == _OBJECTS, schema, step)
    return fitting(decode(data), schema, step)


def fitting(batch: Batch, schema: pa.Schema | None, step: str) -> Batch:
    """Fit a restored batch to the columns that the loop has now.

    Raises:
        StateError: it has other columns, or is of another kind.
    """
    _check_kind(isinstance(batch, ObjectBatch), schema, step)
    if isinstance(batch, ObjectBatch) or schema is None:
        return batch
    if batch.data.schema.names != schema.names:
        before, now = ", ".join(batch.data.schema.names), ", ".join(schema.names)
        raise _misfit(step, f"their columns are ({before}), and those of the loop ({now})")
    try:
        columns = [batch.data.column(field.name).cast(field.type) for field in schema]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _misfit(step, str(error)) from error
    return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=schema), batch.timestamps)


def _check_kind(objects: bool, schema: pa.Schema | None, step: str) -> None:
    if objects != (schema is None):
        now = "Python objects" if schema is None else "columns"
        raise _misfit(step, f"the loop is now of {now}, and was not")


def _misfit(step: str, problem: str) -> StateError:
    return StateError(
        f"records that were in a loop do not fit it any more step=`{step}`: {problem}",
        fix="restore with the loop as it was, let it end with `headgate stop --drain`, and start the new "
        "one from the savepoint",
    )
