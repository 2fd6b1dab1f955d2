"""Keyed reduce with a Python function: one tight loop over the records, a dict per subtask.

It emits the running value for each record, with the record's event time. A value is whatever the
function returns, perhaps the object it was given, changed in place. So while a snapshot is being
written, the value of a key is encoded before the function gets it for the first time, for use in
the snapshot.

Values are stored as columns where their type is known: that of the stream's columns, or the one in
the function's annotations. All other values are pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from ...errors import StateError
from ...state.codecs import Codec, PickleCodec, codec_of
from ...state.evolution import check_compatible, is_declared_later
from ...state.forms import returned_type
from ...state.keyed.canonical import Layout, Rows
from ...state.keyed.cuts import Changes, Cut
from ...state.keyed.keys import OPAQUE_KEYS, key_of, keys_of_columns, token
from ...state.snapshot import RestoredState, StateInfo, StateSnapshot, TableCut
from ..base import Operator
from ..elements import Batch, ColumnBatch, ObjectBatch
from ..functions.user_code import bad_result, user_error
from ..origin import Origin
from ..rows import PER_RECORD_ROWS, RowMismatch, getter_of, to_columns, to_list, to_rows


def row_codec(schema: pa.Schema, record_class: type[Any] | None) -> RowCodec | None:
    """Return the codec of a stream's records; None if a column has mutable values."""
    fields = [pa.field(field.name, _lossless(field.type)) for field in schema]
    if any(field.type == pa.null() for field in fields):
        return None
    return RowCodec(pa.schema(fields), record_class)


def _lossless(kind: pa.DataType) -> pa.DataType:
    """Return the type that holds every Python value of a column without loss; null if there is none.

    A function computes with Python's floats and datetimes, which are finer than some columns: a
    restored value must not be rounded.
    """
    types = pa.types
    if types.is_dictionary(kind):
        return _lossless(kind.value_type)
    if types.is_floating(kind):
        return pa.float64()
    if types.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", tz=kind.tz)
    kept = (
        types.is_integer, types.is_boolean, types.is_string, types.is_large_string,
        types.is_binary, types.is_date32, types.is_decimal,
    )  # fmt: skip
    return kind if any(is_kept(kind) for is_kept in kept) else pa.null()


class RowCodec(Codec):
    """Stores records as tuples of their columns, which are immutable.

    Unlike other codecs, its `to_array` takes the results of `hold`.
    """

    adapts = True

    def __init__(self, schema: pa.Schema, record_class: type[Any] | None) -> None:
        self._schema = schema
        self._record_class = record_class
        self.type_ = pa.struct(list(schema))

    def hold(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        names = self._schema.names
        if isinstance(value, Mapping):
            return tuple(value[name] for name in names)
        return tuple(getter_of(value, name)(value) for name in names)

    def release(self, held: tuple[Any, ...]) -> Any:
        return to_rows(to_columns([held], self._schema), self._record_class)[0]

    def encode(self, value: Any) -> bytes:
        raise NotImplementedError("rows are stored as columns only")

    def decode(self, data: bytes) -> Any:
        raise NotImplementedError("rows are stored as columns only")

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        data = to_columns(list(values), self._schema)
        return pa.StructArray.from_arrays(data.columns, fields=list(self._schema))

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        """Return the records; columns that they lacked when they were stored are null."""
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        stored = {field.name: array.field(index) for index, field in enumerate(array.type)}
        columns = [
            stored[field.name].cast(field.type)
            if field.name in stored
            else pa.nulls(len(array), field.type)
            for field in self._schema
        ]
        data = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return to_rows(data, self._record_class)


_STATE = "reduce"
_ABSENT = object()
_PIECE = 4_096
"""The number of keys that the thread of a snapshot takes at a time."""
_PLAIN_KEYS = frozenset({int, str, bytes})


class _PickledCodec(PickleCodec):
    """Pickled values; `to_array` takes the results of `hold`."""

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        return pa.array(values, self.type_)


class _TypedCodec(Codec):
    """Values of a declared type; `to_array` takes the results of `hold`."""

    def __init__(self, inner: Codec) -> None:
        self._inner = inner
        self.type_, self.nullable, self.adapts = inner.type_, inner.nullable, inner.adapts

    def hold(self, value: Any) -> Any:
        return self._inner.hold(value)

    def release(self, held: Any) -> Any:
        return self._inner.release(held)

    def encode(self, value: Any) -> bytes:
        return self._inner.encode(value)

    def decode(self, data: bytes) -> Any:
        return self._inner.decode(data)

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        return self._inner.to_array([self._inner.release(held) for held in values])

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        return self._inner.from_array(array)


def _codec(
    function: Callable[[Any, Any], Any], schema: pa.Schema | None, row_type: type[Any] | None
) -> Codec:
    """Return the codec of values: as columns where their type is known, else pickled."""
    if schema is not None:
        return row_codec(schema, row_type) or _PickledCodec()
    try:
        found = codec_of(returned_type(function))
    except StateError:  # a field of a type that only a type checker can resolve
        return _PickledCodec()
    return _PickledCodec() if found.encoding is not None else _TypedCodec(found)


class ReduceOperator(Operator):
    """Combines the records of each key, two at a time, with the user's function.

    Args:
        function: `(value so far, record) -> new value`; the first record of a key is its first value.
        key: key columns of a column stream, or a function of a record.
        schema: of a column stream, whose values are emitted as columns again; None for Python
            objects.
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
        shape = OPAQUE_KEYS
        if not callable(key) and schema is not None:
            shape = keys_of_columns([schema.field(name) for name in key])
        self._layout = Layout(shape, "reduce", _codec(function, schema, row_type))
        self._values: dict[Any, Any] = {}
        # the keys in order of arrival; it only grows, so a thread can read it concurrently
        self._order: list[Any] = []
        self._changes = Changes()

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
                "a reduce returns what it takes: a record of the same columns",
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
        """Return the running value after each record."""
        if not _PLAIN_KEYS.issuperset(map(type, keys)):
            keys = list(map(token, keys))
        values, function, changes = self._values, self._function, self._changes
        get, absent, arrived = values.get, _ABSENT, self._order.append
        results: list[Any] = []
        append = results.append
        if changes.newest is not None:
            self._keep_old(keys)
        try:
            for key, record in zip(keys, records, strict=True):
                before = get(key, absent)
                if before is absent:
                    value = record
                    values[key] = value
                    arrived(key)
                else:
                    value = values[key] = function(before, record)
                append(value)
        except Exception as error:
            raise user_error(self._step, self._origin, records[len(results)], error) from error
        changes.dirty.update(keys)
        return results

    def _keep_old(self, keys: list[Any]) -> None:
        """Encode the values that open cuts need, before the function can change them."""
        changes, values = self._changes, self._values
        for key in keys:
            cut = changes.newest
            if cut is None:
                return
            if key in values and key not in cut.undo[0]:
                changes.log(0, key, self._held(values[key]))

    def _held(self, value: Any) -> Any:
        """Return the value encoded, or the error, which may be due to a concurrent change."""
        try:
            return self._layout.value.hold(value)
        except Exception as error:
            return error

    def states(self) -> Sequence[StateInfo]:
        return [self._layout.info(_STATE)]

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `reduce`: key group, the key columns, the value."""
        cut, count = self._changes.cut(), len(self._order)
        max_parallelism = self.context.max_parallelism

        def make(since: int | None) -> pa.Table:
            try:
                rows = self._all_rows(cut, count) if since is None else self._changed(cut, since)
                return self._layout.table(rows, max_parallelism, deltas=since is not None)
            finally:
                cut.open = False

        def discard() -> None:
            cut.open = False

        epoch = 0 if self._changes.rebase else cut.epoch
        table = TableCut(
            make, self._layout.identity, epoch, discard=discard, confirm=self._changes.confirm
        )
        return StateSnapshot(tables={_STATE: table})

    def _all_rows(self, cut: Cut, count: int) -> Rows:
        rows = Rows()
        for low in range(0, count, _PIECE):
            for key in self._order[low : min(low + _PIECE, count)]:
                self._add(rows, cut, key)
        return rows

    def _changed(self, cut: Cut, since: int) -> Rows:
        rows = Rows()
        for key in set().union(*self._changes.changed(since, cut)):
            self._add(rows, cut, key)
        return rows

    def _add(self, rows: Rows, cut: Cut, key: Any) -> None:
        """Add the value of a key at the cut; if it changes while it is encoded, the old one was kept."""
        data = cut.find(0, key, self._held(self._values[key]))
        if isinstance(data, Exception):
            verb = (
                "pickled"
                if self._layout.value.encoding
                else f"stored as {self._layout.value.type_}"
            )
            raise StateError(
                f"a value cannot be {verb} step=`{self._step}` key=`{key_of(key)!r}`: {data}",
                where=str(self._origin),
                fix="let the function return plain data, of the type that it is annotated to return",
            ) from data
        rows.keys.append(key_of(key))
        rows.values.append(data)

    def _layout_of(self, state: RestoredState) -> Layout:
        """Return how restored values are stored: pickled, if that was before their type was known."""
        old = state.states.get(_STATE)
        if old is not None and is_declared_later(old, self._layout.info(_STATE)):
            return replace(self._layout, value=_PickledCodec())
        return self._layout

    def restore(self, state: RestoredState) -> None:
        table = state.tables.get(_STATE)
        if table is None:
            return
        info = self._layout.info(_STATE)
        if _STATE in state.states:
            check_compatible(state.states[_STATE], info, self._step)
        if not {*self._layout.identity, "value"} <= set(table.column_names):
            raise StateError(f"the snapshot holds no state of a reduce step=`{self._step}`")
        try:
            rows = self._layout_of(state).rows(table)
        except StateError as error:
            raise StateError(
                f"{error.message} step=`{self._step}`", where=str(self._origin), fix=error.fix
            ) from error
        self._order = list(map(token, rows.keys))
        self._values = dict(zip(self._order, rows.values, strict=True))
        # Deltas in another shape cannot build on what was stored.
        old, schema = state.states.get(_STATE), info.arrow_schema()
        stored = None if old is None else old.arrow_schema()
        reshaped = stored is not None and not stored.equals(schema, check_metadata=True)
        self._changes.restored(rebase=reshaped)
