"""Keyed reduce with a Python function: one tight loop over the records, a dict per subtask.

It emits the running value for each record, with the record's event time. A value is whatever the
function returns, perhaps the object it was given, changed in place. So while a snapshot is being
written, the value of a key is encoded before the function gets it for the first time, for use in
the snapshot. Where the values can go back to a checkpoint (`state/keyed/rollback.py`), this is so behind
each cut, until a later checkpoint is complete.

With a time to live, or with the backend `rocksdb`, the values lie in a keyed backend instead, which
gives the function a copy of each.

Values are stored as columns where their type is known: that of the stream's columns, or the one in
the function's annotations. All other values are pickled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import HeadgateError, StateError
from ...state.codecs import Codec, PickleCodec, codec_of
from ...state.evolution import check_compatible, is_declared_later
from ...state.forms import returned_type
from ...state.hashing import hash_keys, key_groups_of
from ...state.keyed.base import ABSENT
from ...state.keyed.canonical import Layout, Rows, TableSpec
from ...state.keyed.committed import CommittedTables, CommittedValueTable
from ...state.keyed.cuts import Changes, Cut
from ...state.keyed.keys import OPAQUE_KEYS, key_of, keys_of_columns, token
from ...state.keyed.rollback import KeptCut, KeptTable, kept_cuts
from ...state.keyed.ttl import Expiry, StateTtl
from ...state.queryable import CommittedPoints, KeyScan, NotKept, OldByKey, once
from ...state.snapshot import (
    CommitPermit,
    KeptState,
    RestoredState,
    StateInfo,
    StateSnapshot,
    TableCut,
)
from ..base import Operator, OperatorContext
from ..durations import parse_duration
from ..elements import Batch, ColumnBatch, ObjectBatch
from ..functions.key_function import KeyFunction
from ..functions.user_code import bad_result, user_error
from ..keyed_backend import (
    ProcessingClock,
    kept_bytes_max,
    lies_in_rocksdb,
    open_keyed_backend,
)
from ..origin import Origin
from ..queries import old_values_max
from ..rows import PER_RECORD_ROWS, RowMismatch, getter_of, row_of, to_columns, to_list, to_rows
from .aggregate_tables import files_of_another_backend


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
    """Stores records as tuples of their columns, which are immutable."""

    adapts = True

    def __init__(self, schema: pa.Schema, record_class: type[Any] | None) -> None:
        self._schema = schema
        self._record_class = record_class
        self.type_ = pa.struct(list(schema))
        self._encode = msgspec.msgpack.Encoder(enc_hook=_plain_scalar).encode
        hints = tuple(_python_type(field.type) | None for field in schema)
        self._decode = msgspec.msgpack.Decoder(tuple[hints]).decode  # type: ignore[valid-type]

    def hold(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        names = self._schema.names
        if isinstance(value, Mapping):
            return tuple(value[name] for name in names)
        try:
            return tuple(getter_of(value, name)(value) for name in names)
        except (AttributeError, KeyError) as error:
            raise TypeError(f"a record lacks a column: {error}") from error

    def release(self, held: tuple[Any, ...]) -> Any:
        return row_of(held, tuple(self._schema.names), self._record_class)

    def named(self, value: Any) -> dict[str, Any]:
        """Return a record as its columns by name."""
        return dict(zip(self._schema.names, self.hold(value), strict=True))

    def encode(self, value: Any) -> bytes:
        return self._encode(self.hold(value))

    def decode(self, data: bytes) -> Any:
        return self.release(self._decode(data))

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


_PYTHON: Final[tuple[tuple[Callable[[pa.DataType], bool], Any], ...]] = (
    (pa.types.is_boolean, bool),
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (pa.types.is_timestamp, datetime),
    (pa.types.is_date, date),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_binary, bytes),
)


def _python_type(kind: pa.DataType) -> Any:
    """Return the type of the Python values of a column that `_lossless` keeps."""
    return next((python for is_one, python in _PYTHON if is_one(kind)), str)


def _plain_scalar(value: Any) -> Any:
    """Return a scalar of numpy as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"this cannot be a value of a column type=`{type(value).__name__}`")


_STATE = "reduce"
_SWEEP_MS: Final = 1_000
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
        self.held_as_it_is = inner.held_as_it_is

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
        return row_codec(schema, row_type) or PickleCodec()
    try:
        found = codec_of(returned_type(function))
    except StateError:  # a field of a type that only a type checker can resolve
        return PickleCodec()
    return PickleCodec() if found.encoding is not None else found


def _of_held(codec: Codec) -> Codec:
    """Return a codec whose `to_array` takes the results of `hold`."""
    if isinstance(codec, RowCodec):
        return codec
    return _PickledCodec() if codec.encoding is not None else _TypedCodec(codec)


class _StoredValues:
    """The values of the keys in a keyed backend, where they can expire, and need not fit into memory.

    Args:
        layout: of the values.
        ttl: when they expire; None: never.
        ttl_ms: its duration.
        context: of the subtask.
        committed: whether they can be read as of checkpoints.
    """

    def __init__(
        self,
        layout: Layout,
        ttl: StateTtl | None,
        ttl_ms: int | None,
        context: OperatorContext,
        committed: bool,
    ) -> None:
        self._context = context
        spec = TableSpec(_STATE, layout, ttl_ms)
        self._backend = open_keyed_backend(context, layout.keys, {_STATE: spec})
        read = [_STATE] if committed else []
        self.committed = CommittedTables(self._backend, read, old_values_max(context.options))
        self._table = self.committed.value_table(_STATE)
        self._expiry: Expiry | None = None
        self._cancel_sweep: Callable[[], None] | None = None
        if ttl is not None and ttl_ms is not None:
            self._expiry = Expiry(ttl_ms, ttl, ProcessingClock(context.clock))
            if ttl.cleanup_per_second:
                self._cancel_sweep = context.timers.call_later(_SWEEP_MS, self._sweep)

    def reduce(
        self,
        function: Callable[[Any, Any], Any],
        keys: list[Any],
        records: list[Any],
        results: list[Any],
    ) -> None:
        """Add the running value after each record to `results`."""
        groups = [-1] * len(keys)
        if self._backend.needs_key_groups:
            groups = key_groups_of(hash_keys(keys), self._context.max_parallelism).tolist()
        places = self._backend.places(keys, groups)
        try:
            self._reduce(function, zip(*places, records, strict=True), results)
        finally:
            self._backend.clear_key()

    def _reduce(
        self,
        function: Callable[[Any, Any], Any],
        keyed: Iterable[tuple[Any, Any, Any]],
        results: list[Any],
    ) -> None:
        """Add the running value after each record to `results`; `keyed` are the token and place of its
        key, and the record.
        """
        table, expiry, cursor = self._table, self._expiry, self._backend.cursor
        get, put = table.get, table.put
        if expiry is None:
            for cursor.token, cursor.place, record in keyed:
                before = get()
                value = record if before is ABSENT else function(before, record)
                put(value)
                results.append(value)
            return
        now, dead_until = expiry.clock.now(), expiry.dead_until()
        for cursor.token, cursor.place, record in keyed:
            before = get()
            if before is ABSENT or before[1] <= dead_until:
                value, used = record, now
            else:
                value, used = function(before[0], record), max(now, before[1])
            put((value, used))
            results.append(value)
        table.sweep(expiry.ttl.cleanup_per_access * len(results), dead_until)

    def get(self, key: Any, checkpoint_id: int) -> Any:
        """Return the value of a key, or `ABSENT`; it does not live longer for it. See `Operator.query`."""
        self._backend.set_key(key)
        try:
            if not checkpoint_id:
                value = self._table.get()
            elif isinstance(self._table, CommittedValueTable):
                value = self._table.as_of(checkpoint_id)
            else:
                raise NotKept
        finally:
            self._backend.clear_key()
        if value is ABSENT or self._expiry is None:
            return value
        return ABSENT if value[1] <= self._expiry.dead_until() else value[0]

    def _sweep(self) -> None:
        assert self._expiry is not None
        self._table.sweep(self._expiry.ttl.cleanup_per_second, self._expiry.all_dead_until())
        self._cancel_sweep = self._context.timers.call_later(_SWEEP_MS, self._sweep)

    def snapshot(self) -> StateSnapshot:
        dead_until = {} if self._expiry is None else {_STATE: self._expiry.all_dead_until()}
        cut = self._backend.snapshot(dead_until)[_STATE]
        if isinstance(cut, TableCut):
            return StateSnapshot(tables={_STATE: cut})
        return StateSnapshot(files={_STATE: cut})

    def restore(self, state: RestoredState) -> None:
        self._backend.restore(state, self._context.clock.now_ms())

    def keep(self) -> dict[str, KeptState]:
        return self._backend.keep()

    def close(self) -> None:
        if self._cancel_sweep is not None:
            self._cancel_sweep()
        self._backend.close()


class ReduceOperator(Operator):
    """Combines the records of each key, two at a time, with the user's function.

    Args:
        function: `(value so far, record) -> new value`; the first record of a key is its first value.
        key: key columns of a column stream, or a function of a record.
        schema: of a column stream, whose values are emitted as columns again; None for Python
            objects.
        row_type: the class of the records of a column stream, None for a generated one.
        ttl: when values expire, by the machine's clock; None: never.
        committed: whether clients read the values as of checkpoints.
        step: name of the step, for errors.
        origin: the user's line.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        key: Sequence[str] | Callable[[Any], Hashable],
        *,
        ttl: StateTtl | None = None,
        schema: pa.Schema | None = None,
        row_type: type[Any] | None = None,
        committed: bool = False,
        step: str = "reduce",
        origin: Origin | None = None,
    ) -> None:
        self._function = function
        self._key = KeyFunction(key) if callable(key) else tuple(key)
        self._schema, self._row_type = schema, row_type
        self._step, self._origin = step, origin or Origin("")
        shape = OPAQUE_KEYS
        if not callable(key) and schema is not None:
            shape = keys_of_columns([schema.field(name) for name in key])
        self._ttl = ttl
        self._ttl_ms = None if ttl is None else parse_duration(ttl.after, "ttl")
        codec = _codec(function, schema, row_type)
        self._layout = Layout(shape, "reduce", codec, with_ttl=ttl is not None)
        self._stored: _StoredValues | None = None  # instead of `_values`
        self._values: dict[Any, Any] = {}
        # the keys in order of arrival; it only grows, so a thread can read it concurrently
        self._order: list[Any] = []
        self._changes = Changes()
        self._committed = committed
        self._points: CommittedPoints[OldByKey] | None = None  # of `_values`
        self._cuts: CommittedPoints[KeptCut] | None = None  # to which `_values` can go back
        self._told: list[CommittedPoints[Any] | CommittedTables] = []
        """Those that hear of checkpoints."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if self._ttl is not None or lies_in_rocksdb(context.options):
            self._stored = _StoredValues(
                self._layout, self._ttl, self._ttl_ms, context, self._committed
            )
            self._told = [self._stored.committed]
            return
        self._layout = replace(self._layout, value=_of_held(self._layout.value))
        if self._committed:
            self._points = CommittedPoints(OldByKey, old_values_max(context.options))
            self._told.append(self._points)
        if bytes_max := kept_bytes_max(context.options):
            self._cuts = kept_cuts(self._changes, bytes_max)
            self._told.append(self._cuts)

    def process(self, batch: Batch, input_index: int) -> None:
        if isinstance(batch, ColumnBatch):
            for low in range(0, len(batch), PER_RECORD_ROWS):
                self._process_columns(batch.slice(low, min(PER_RECORD_ROWS, len(batch) - low)))
        elif len(batch):
            records = batch.records
            values = self._reduce(self._keys_of(records), records, self._has_int_keys(batch))
            self.output.emit(ObjectBatch(values, batch.timestamps))

    def _has_int_keys(self, batch: ObjectBatch) -> bool:
        """Return True if all keys are known to be integers."""
        assert isinstance(self._key, KeyFunction)
        keys = batch.numbers_at(self._key.place)
        return keys is not None and keys.dtype == np.int64

    def _process_columns(self, batch: ColumnBatch) -> None:
        records = to_rows(batch.data, self._row_type)
        if isinstance(self._key, KeyFunction):
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
        assert isinstance(self._key, KeyFunction)
        try:
            self._key.extend(keys, records)
        except Exception as error:
            raise user_error(self._step, self._origin, records[len(keys)], error) from error
        return keys

    def _reduce(self, keys: list[Any], records: list[Any], int_keys: bool = False) -> list[Any]:
        """Return the running value after each record; `int_keys`: all keys are known to be integers."""
        if self._stored is not None:
            return self._reduce_stored(self._stored, keys, records)
        if not int_keys and not _PLAIN_KEYS.issuperset(map(type, keys)):
            keys = list(map(token, keys))
        values, function, changes = self._values, self._function, self._changes
        get, absent, arrived = values.get, _ABSENT, self._order.append
        results: list[Any] = []
        append = results.append
        fresh: list[Any] = []
        if changes.active:
            dirty = changes.dirty
            fresh = [key for key in keys if key not in dirty]
            self._keep_old(fresh)
        if self._points is not None:
            self._keep_committed(self._points, keys)
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
        changes.dirty.update(fresh)
        return results

    def _reduce_stored(
        self, stored: _StoredValues, keys: list[Any], records: list[Any]
    ) -> list[Any]:
        results: list[Any] = []
        try:
            stored.reduce(self._function, keys, records, results)
        except HeadgateError:
            raise
        except Exception as error:
            raise user_error(self._step, self._origin, records[len(results)], error) from error
        return results

    def _keep_old(self, keys: list[Any]) -> None:
        """Encode the values of these keys, if open cuts need them, before the function can change them.

        They are keys that have not changed since the newest cut.
        """
        if not keys or not self._changes.logs:
            return
        get, held, old = self._values.get, self._held, {}
        for key in set(keys):
            value = get(key, ABSENT)
            old[key] = value if value is ABSENT else held(value)
        self._changes.log_all(0, old)

    def _keep_committed(self, points: CommittedPoints[OldByKey], keys: list[Any]) -> None:
        """Encode the values that may be read as of checkpoints, before the function can change them."""
        values = self._values
        for key in keys:
            old = points.newest
            if old is None:
                return
            if key not in old.values:
                old.keep(key, self._held(values[key]) if key in values else ABSENT)
                points.grew()

    def _held(self, value: Any) -> Any:
        """Return the value encoded, or the error, which may be due to a concurrent change."""
        try:
            return self._layout.value.hold(value)
        except Exception as error:
            return error

    def query(self, state: str, key: Any, checkpoint_id: int = 0) -> Any:
        if self._stored is not None:
            value = self._stored.get(key, checkpoint_id)
        elif checkpoint_id:
            value = self._as_of(token(key), checkpoint_id)
        else:
            value = self._values.get(token(key), ABSENT)
        codec = self._layout.value
        return value if value is ABSENT or not isinstance(codec, RowCodec) else codec.named(value)

    def scan(self, state: str, checkpoint_id: int = 0) -> KeyScan:
        if self._stored is not None:
            return self._stored.committed.scan(_STATE, checkpoint_id)
        points = self._points
        if not checkpoint_id:
            return KeyScan(self._keys(), lambda: None)
        if points is None:
            raise NotKept
        points.hold(checkpoint_id)
        return KeyScan(self._keys(), once(lambda: points.release(checkpoint_id)))

    def _keys(self) -> Iterator[Sequence[Any]]:
        """Yield the keys that there are now: none is ever removed, and later ones are not of a checkpoint
        that is complete now.
        """
        count = len(self._order)
        for low in range(0, count, _PIECE):
            yield list(map(key_of, self._order[low : min(low + _PIECE, count)]))

    def _as_of(self, key: Any, checkpoint_id: int) -> Any:
        """Return the value that a key had at a checkpoint, or `ABSENT`."""
        if self._points is None:
            raise NotKept
        for old in self._points.since(checkpoint_id):
            if key in old.values:
                held = old.values[key]
                if isinstance(held, Exception):
                    raise StateError(f"a value cannot be stored step=`{self._step}`: {held}")
                return held if held is ABSENT else self._layout.value.release(held)
        return self._values.get(key, ABSENT)

    def on_checkpoint_complete(self, permit: CommitPermit) -> None:
        for told in self._told:
            told.completed(permit.checkpoint_id)

    def drop_point(self, checkpoint_id: int) -> None:
        for told in self._told:
            told.aborted(checkpoint_id)

    def states(self) -> Sequence[StateInfo]:
        return [self._layout.info(_STATE, ttl_ms=self._ttl_ms)]

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `reduce`: key group, the key columns, the value; or its files."""
        if self._stored is not None:
            stored = self._stored.snapshot()
            self._stored.committed.cut(checkpoint_id)
            return stored
        cut, count = self._changes.cut(), len(self._order)
        for told in self._told:
            told.cut(checkpoint_id)
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
        if data is ABSENT:
            return  # the key came after the cut: a set of changes may be that of several cuts
        if isinstance(data, Exception):
            raise self._not_stored(key, data) from data
        rows.keys.append(key_of(key))
        rows.values.append(data)

    def _not_stored(self, key: Any, error: Exception) -> StateError:
        codec = self._layout.value
        verb = "pickled" if codec.encoding else f"stored as {codec.type_}"
        return StateError(
            f"a value cannot be {verb} step=`{self._step}` key=`{key_of(key)!r}`: {error}",
            where=str(self._origin),
            fix="let the function return plain data, of the type that it is annotated to return",
        )

    def _layout_of(self, state: RestoredState) -> Layout:
        """Return how restored values are stored: pickled, if that was before their type was known."""
        old = state.states.get(_STATE)
        if old is not None and is_declared_later(old, self._layout.info(_STATE)):
            return replace(self._layout, value=_PickledCodec())
        return self._layout

    def keep(self) -> dict[str, KeptState]:
        if self._stored is not None:
            return self._stored.keep()
        if self._cuts is None:
            return {}
        kept = KeptTable.of([self._values], self._cuts, self._changes)
        self._values = {}
        return {_STATE: kept}

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        for told in self._told:
            told.restored(self.context.restored_checkpoint)
        if self._stored is not None:
            stored = self._stored
            return self.context.run_in_thread(lambda: self._restored(lambda: stored.restore(state)))
        if state.files.get(_STATE):
            raise files_of_another_backend(_STATE, self._step)
        if (kept := state.kept.get(_STATE)) is not None:
            self._take_over(kept.content, state.checkpoint_id)
        else:
            self._restore(state)
        return None

    def _take_over(self, kept: KeptTable[Any], checkpoint_id: int) -> None:
        """Take over the values of the attempt before, as of a checkpoint.

        Keys are never removed, and those that came after it are the last ones.
        """
        (old,), (values,) = kept.old_values(checkpoint_id), kept.parts
        later = []
        for key, held in old.items():
            if held is ABSENT:
                later.append(key)
            elif isinstance(held, Exception):
                raise self._not_stored(key, held) from held
        for key in later:
            del values[key], old[key]
        codec = self._layout.value
        if not codec.held_as_it_is:
            release = codec.release
            old = {key: release(held) for key, held in old.items()}
        values.update(old)
        self._values, self._order = values, list(values)
        self._changes.restored()

    def _restored(self, restore: Callable[[], Any]) -> Any:
        """Call `restore`; its errors name the step."""
        try:
            return restore()
        except StateError as error:
            raise StateError(
                f"{error.message} step=`{self._step}`", where=str(self._origin), fix=error.fix
            ) from error

    def _restore(self, state: RestoredState) -> None:
        table = state.tables.get(_STATE)
        if table is None:
            return
        info = self._layout.info(_STATE)
        if _STATE in state.states:
            check_compatible(state.states[_STATE], info, self._step)
        if not {*self._layout.identity, "value"} <= set(table.column_names):
            raise StateError(f"the snapshot holds no state of a reduce step=`{self._step}`")
        rows = self._restored(lambda: self._layout_of(state).rows(table))
        self._order = list(map(token, rows.keys))
        self._values = dict(zip(self._order, rows.values, strict=True))
        # Deltas in another shape cannot build on what was stored.
        old, schema = state.states.get(_STATE), info.arrow_schema()
        stored = None if old is None else old.arrow_schema()
        reshaped = stored is not None and not stored.equals(schema, check_metadata=True)
        self._changes.restored(rebase=reshaped)

    def close(self) -> None:
        if self._stored is not None:
            self._stored.close()
