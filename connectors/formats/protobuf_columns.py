"""Columns made of messages of Protobuf, and messages made of columns, a field of all of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ...errors import DataError
from ..files.decode import Unreadable, reason_of
from .protobuf_schema import (
    DURATION,
    Unfit,
    check_fits,
    is_map,
    is_repeated,
    is_wrapper,
)

_UNITS: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_NANOS: Final = 10**9


def check_columns(descriptor: Any, schema: pa.Schema) -> None:
    """Check that columns can be made of messages, or messages of columns.

    Raises:
        Unfit: a column has no field, or one of another type.
    """
    for column in schema:
        field = descriptor.fields_by_name.get(column.name)
        if field is None:
            raise Unfit(f"the message `{descriptor.full_name}` has no field `{column.name}`")
        check_fits(field, column.type, column.name)


def make_batch(messages: Sequence[Any], descriptor: Any, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of messages.

    Raises:
        Unreadable: a value does not fit its column.
    """
    columns = []
    for column in schema:
        field = descriptor.fields_by_name[column.name]
        try:
            made = _column(messages, field, column.type)
        except (pa.ArrowException, OverflowError, ValueError) as error:
            raise Unreadable(f"column `{column.name}`: {reason_of(error)}") from error
        if made.null_count and not column.nullable:
            raise Unreadable(f"no value for column `{column.name}`")
        columns.append(made)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(messages: Sequence[Any], field: Any, kind: pa.DataType) -> pa.Array:
    """Return one field of messages; None among them stands for no message."""
    name = field.name
    if is_map(field):
        maps = [() if each is None else getattr(each, name) for each in messages]
        key, value = field.message_type.fields
        offsets = _offsets(maps)
        keys = list(chain.from_iterable(maps))
        values = [each[at] for each in maps for at in each] if len(keys) else []
        return pa.MapArray.from_arrays(
            offsets,
            _values(keys, key, kind.key_type),
            _values(values, value, kind.item_type),
            type=kind,
        )
    if is_repeated(field):
        lists = [() if each is None else getattr(each, name) for each in messages]
        items = _values(list(chain.from_iterable(lists)), field, kind.value_type)
        if pa.types.is_large_list(kind):
            offsets = _offsets(lists).cast(pa.int64())
            return pa.LargeListArray.from_arrays(offsets, items, type=kind)
        return pa.ListArray.from_arrays(_offsets(lists), items, type=kind)
    if field.has_presence:
        values = [
            getattr(each, name) if each is not None and each.HasField(name) else None
            for each in messages
        ]
    elif None in messages:
        values = [None if each is None else getattr(each, name) for each in messages]
    else:
        values = list(map(attrgetter(name), messages))
    return _values(values, field, kind)


def _offsets(parts: Sequence[Any]) -> pa.Array:
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, parts), np.int32, len(parts)), out=offsets[1:])
    return pa.array(offsets)


def _values(values: list[Any], field: Any, kind: pa.DataType) -> pa.Array:
    """Return single values of a field as a column; None is null."""
    message = field.message_type
    if message is None:
        if field.enum_type is not None and not pa.types.is_integer(kind):
            return _symbols(values, field.enum_type, kind)
        if kind in (pa.binary(), pa.large_binary()) and field.type == field.TYPE_STRING:
            return pa.array(values, pa.large_string()).cast(kind)
        return pa.array(values, kind)
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        parts = [_column(values, message.fields_by_name[each.name], each.type) for each in fields]
        mask = pa.array([each is None for each in values], pa.bool_())
        return pa.StructArray.from_arrays(parts, fields=fields, mask=mask)
    if is_wrapper(field):
        return pa.array([None if each is None else each.value for each in values], kind)
    return _times(values, kind)


def _symbols(values: list[Any], enum: Any, kind: pa.DataType) -> pa.Array:
    names = {number: each.name for number, each in enum.values_by_number.items()}
    try:
        return pa.array([None if each is None else names[each] for each in values], kind)
    except KeyError as error:
        raise ValueError(f"the enum `{enum.name}` has no symbol for {error}") from None


def _times(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return timestamps or durations, rounded down to the unit of the column."""
    valid = np.fromiter((each is not None for each in values), np.bool_, len(values))
    there = [each for each in values if each is not None]
    seconds = np.fromiter(map(attrgetter("seconds"), there), np.int64, len(there))
    nanos = np.fromiter(map(attrgetter("nanos"), there), np.int64, len(there))
    low = 0 if pa.types.is_timestamp(kind) else 1 - _NANOS
    if ((nanos < low) | (nanos >= _NANOS)).any():
        raise ValueError("the nanoseconds of a time are out of range")
    factor = _UNITS[kind.unit]
    limit = (2**63 - 1) // factor - 1
    if ((seconds > limit) | (seconds < -limit)).any():
        raise ValueError(f"a time does not fit into {kind}")
    made = np.zeros(len(values), np.int64)
    made[valid] = seconds * factor + nanos // (_NANOS // factor)
    numbers = pa.array(made, mask=~valid)
    return numbers.cast(kind)


# -- messages ---------------------------------------------------------------------------------------


def fill_messages(messages: Sequence[Any], batch: pa.RecordBatch, descriptor: Any) -> None:
    """Set the fields of messages to the values of their rows; a null leaves a field unset.

    Raises:
        DataError: a value does not fit its field.
    """
    for column, values in zip(batch.schema, batch.columns, strict=True):
        field = descriptor.fields_by_name[column.name]
        try:
            _setter(field, values.type)(messages, values)
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            raise DataError(
                f"a value does not fit its field of Protobuf column=`{column.name}`: {error}",
                fix="filter such records out, or change the type of the field",
            ) from error


def _setter(field: Any, kind: pa.DataType) -> Callable[[Sequence[Any], pa.Array], None]:
    name, message = field.name, field.message_type
    if is_map(field) or is_repeated(field):
        return lambda messages, values: _set_many(messages, values, field)
    if message is None:
        plain = _plain(field)

        def set_plain(messages: Sequence[Any], values: pa.Array) -> None:
            for each, value in zip(messages, plain(values), strict=True):
                if value is not None:
                    setattr(each, name, value)

        return set_plain

    def set_message(messages: Sequence[Any], values: pa.Array) -> None:
        there = values.is_valid().to_pylist()
        chosen = [getattr(each, name) for each, valid in zip(messages, there, strict=True) if valid]
        for each in chosen:
            each.SetInParent()
        _fill(chosen, values.drop_null(), field)

    return set_message


def _fill(messages: Sequence[Any], values: pa.Array, field: Any) -> None:
    """Fill messages that are values of a field from values that are not null."""
    message = field.message_type
    if pa.types.is_struct(values.type):
        for inner, column in zip(values.type, values.flatten(), strict=True):
            _setter(message.fields_by_name[inner.name], inner.type)(messages, column)
    elif is_wrapper(field):
        for each, value in zip(messages, values.to_pylist(), strict=True):
            each.value = value
    else:
        factor = _UNITS[values.type.unit]
        numbers = values.cast(pa.int64()).to_numpy()
        seconds, rest = np.divmod(numbers, factor)
        nanos = rest * (_NANOS // factor)
        if message.full_name == DURATION:
            # Both parts have the same sign.
            behind = (seconds < 0) & (nanos > 0)
            seconds, nanos = seconds + behind, nanos - behind * _NANOS
        for each, whole, part in zip(messages, seconds.tolist(), nanos.tolist(), strict=True):
            each.seconds, each.nanos = whole, part


def _set_many(messages: Sequence[Any], values: pa.Array, field: Any) -> None:
    """Set lists or maps. Items that are null have no form in Protobuf."""
    name = field.name
    for each, row in zip(messages, values, strict=True):
        if not row.is_valid:
            continue
        target = getattr(each, name)
        if not is_map(field):
            items = row.values
            _refuse_nulls(items)
            if field.message_type is None:
                target.extend(_plain(field)(items))
            else:
                _fill([target.add() for _ in range(len(items))], items, field)
            continue
        key_field, value_field = field.message_type.fields
        pairs = row.values
        keys = _plain(key_field)(pairs.field(0))
        _refuse_nulls(pairs.field(1))
        if value_field.message_type is None:
            target.update(zip(keys, _plain(value_field)(pairs.field(1)), strict=True))
        else:
            _fill([target[key] for key in keys], pairs.field(1), value_field)


def _refuse_nulls(values: pa.Array) -> None:
    if values.null_count:
        raise ValueError("an item of a list or map is null")


def _plain(field: Any) -> Callable[[pa.Array], list[Any]]:
    """Return a function that returns the values of a column as a field takes them."""
    if field.enum_type is None:
        return _as_list
    numbers = {each.name: each.number for each in field.enum_type.values}
    enum = field.enum_type.name

    def symbols(values: pa.Array) -> list[Any]:
        found: list[Any] = values.to_pylist()
        if pa.types.is_integer(values.type):
            return found
        unknown = set(found) - numbers.keys() - {None}
        if unknown:
            raise ValueError(f"the enum `{enum}` has no symbol `{sorted(unknown)[0]}`")
        return [None if each is None else numbers[each] for each in found]

    return symbols


def _as_list(values: pa.Array) -> list[Any]:
    found: list[Any] = values.to_pylist()
    return found
