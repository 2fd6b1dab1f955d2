"""Encodes columns as messages of Avro: fields become columns of bytes, and these are joined per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import DataError
from .avro_schema import (
    MISSING,
    Array,
    AvroType,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    RecordField,
    Unfit,
    Union,
    is_decimal,
    time_type,
)
from .cursors import Int64s, binary_array, encode_varints, same_sized, zigzag

Writer: TypeAlias = Callable[[pa.Array], pa.Array]
"""Returns the bytes of each value of a column without nulls, as a binary array."""
_EMPTY: Final = pa.scalar(b"")
_END: Final = pa.scalar(b"\0")
_NULL: Final = Primitive("null")


def record_writer(avro: AvroType, schema: pa.Schema) -> Callable[[pa.RecordBatch], pa.Array]:
    """Return a function that encodes the rows of batches with these columns.

    Raises:
        Unfit: the columns have no form in this schema.
    """
    if isinstance(avro, Record):
        write = _record_writer(avro, list(schema), "")
        return lambda batch: write(pa.StructArray.from_arrays(batch.columns, fields=list(schema)))
    if len(schema) != 1:
        raise Unfit("the Avro schema is no record, so it has one column only")
    field = schema.field(0)
    only = column_writer(avro, field.type, field.name, nullable=field.nullable)
    return lambda batch: only(batch.column(0))


def column_writer(avro: AvroType, kind: pa.DataType, path: str, *, nullable: bool) -> Writer:
    """Return the writer of a column. Nulls need a union with null.

    Raises:
        Unfit: values of this type have no form in this type of Avro.
    """
    if isinstance(avro, Union):
        return _union_writer(avro, kind, path, nullable=nullable)
    write = _value_writer(avro, kind, path)
    if avro == _NULL or not nullable:
        return write
    return _refusing_nulls(write, path)


def _value_writer(avro: AvroType, kind: pa.DataType, path: str) -> Writer:
    is_a = pa.types
    made: Writer | None = None
    if isinstance(avro, Record) and is_a.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        made = _record_writer(avro, fields, f"{path}.")
    elif isinstance(avro, Array) and (is_a.is_list(kind) or is_a.is_large_list(kind)):
        made = _list_writer(avro, kind, path)
    elif isinstance(avro, Map) and is_a.is_map(kind) and is_a.is_string(kind.key_type):
        made = _map_writer(avro, kind, path)
    elif isinstance(avro, Enum) and _is_text(kind):
        made = _enum_writer(avro, path)
    elif is_decimal(avro) and is_a.is_decimal128(kind):
        made = _decimal_writer(avro, kind, path)
    elif isinstance(avro, Fixed) and (kind == pa.binary(avro.size) or _is_bytes(kind)):
        made = _fixed_writer(avro.size, path)
    elif isinstance(avro, Primitive):
        made = _primitive_writer(avro, kind)
    if made is None:
        raise Unfit(f"`{path}` of type {kind} does not fit into {_name(avro)} of Avro")
    return made


def _name(avro: AvroType) -> str:
    if isinstance(avro, Primitive | Fixed | Enum | Record):
        return f"`{avro.name}`"
    return type(avro).__name__.lower()


def _joined(parts: list[pa.Array]) -> pa.Array:
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, _EMPTY)


def _constant(value: bytes, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value), rows)


def _numbers(values: Int64s) -> pa.Array:
    return encode_varints(zigzag(values))


def _refusing_nulls(write: Writer, path: str) -> Writer:
    def checked(values: pa.Array) -> pa.Array:
        if values.null_count:
            raise DataError(
                f"a value is null, which the Avro schema does not allow column=`{path}`",
                fix='filter such records out, or make the field ["null", ...]',
            )
        return write(values)

    return checked


def _union_writer(avro: Union, kind: pa.DataType, path: str, *, nullable: bool) -> Writer:
    """Return the writer of the null and of the first other branch that fits."""
    reasons = []
    for place, branch in enumerate(avro.branches):
        if branch == _NULL:
            continue
        try:
            write = _value_writer(branch, kind, path)
        except Unfit as error:
            reasons.append(error)
            continue
        null = avro.branches.index(_NULL) if _NULL in avro.branches else -1
        made = _branch_writer(write, place, null)
        return made if null >= 0 or not nullable else _refusing_nulls(made, path)
    if pa.types.is_null(kind) and _NULL in avro.branches:
        index = zigzag_byte(avro.branches.index(_NULL))
        return lambda values: _constant(index, len(values))
    raise reasons[0] if reasons else Unfit(f"`{path}` of type {kind} does not fit into null")


def zigzag_byte(number: int) -> bytes:
    """Return a small number that is not negative, as Avro writes it."""
    return bytes(_numbers(np.array([number]))[0].as_py())


def _branch_writer(write: Writer, place: int, null: int) -> Writer:
    prefix, none = zigzag_byte(place), zigzag_byte(null) if null >= 0 else b""

    def written(values: pa.Array) -> pa.Array:
        if not values.null_count:
            return _joined([_constant(prefix, len(values)), write(values)])
        valid = values.is_valid()
        present = valid.to_numpy(zero_copy_only=False)
        data = write(values.drop_null())
        places = np.cumsum(present) - 1
        spread = data.take(pa.array(places, mask=~present)).fill_null(b"")
        return _joined([pc.if_else(valid, pa.scalar(prefix), pa.scalar(none)), spread])

    return written


def _record_writer(avro: Record, fields: list[pa.Field], path: str) -> Writer:
    known = {each.name: place for place, each in enumerate(fields)}
    unknown = [each.name for each in fields if all(each.name != f.name for f in avro.fields)]
    if unknown:
        raise Unfit(f"the record `{avro.name}` has no field for `{path}{unknown[0]}`")
    parts: list[tuple[int, Writer]] = []
    for each in avro.fields:
        place = known.get(each.name)
        if place is None:
            parts.append((-1, _default_writer(each, f"{path}{each.name}")))
            continue
        given = fields[place]
        made = column_writer(each.type, given.type, f"{path}{each.name}", nullable=given.nullable)
        parts.append((place, made))

    def write(values: pa.StructArray) -> pa.Array:
        columns = values.flatten()
        if not parts:
            return _constant(b"", len(values))
        return _joined(
            [made(pa.nulls(len(values)) if place < 0 else columns[place]) for place, made in parts]
        )

    return write


def _default_writer(field: RecordField, path: str) -> Writer:
    """Return the writer of a field without a column: it gets its default, as far as that is null."""
    avro = field.type
    if field.default is None and isinstance(avro, Union) and _NULL in avro.branches:
        return _union_writer(avro, pa.null(), path, nullable=True)
    default = "no default" if field.default is MISSING else "a default other than null"
    raise Unfit(f"no column for the field `{path}`, which has {default}")


def _list_writer(avro: Array, kind: pa.DataType, path: str) -> Writer:
    item = kind.value_field
    write = column_writer(avro.items, item.type, f"{path}[]", nullable=item.nullable)
    return lambda values: _blocks(
        pc.list_value_length(values), write(values.flatten()), len(values)
    )


def _map_writer(avro: Map, kind: pa.DataType, path: str) -> Writer:
    item = kind.item_field
    write = column_writer(avro.values, item.type, f"{path}[]", nullable=item.nullable)

    def written(values: pa.MapArray) -> pa.Array:
        start, stop = values.offsets[0].as_py(), values.offsets[-1].as_py()
        keys, items = values.keys[start:stop], values.items[start:stop]
        return _blocks(
            pc.subtract(values.offsets[1:], values.offsets[:-1]),
            _joined([_text(keys), write(items)]),
            len(values),
        )

    return written


def _blocks(counts: pa.Array, items: pa.Array, rows: int) -> pa.Array:
    """Return the items of each row as one block and its end; without items only the end."""
    number = counts.to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(number, out=offsets[1:])
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), items), b"")
    head = pc.if_else(pa.array(number == 0), _EMPTY, _numbers(number))
    return _joined([head, joined, _constant(b"\0", rows)])


def _text(values: pa.Array) -> pa.Array:
    """Return texts or bytes with their sizes in front."""
    data = values.cast(pa.binary())
    sizes = pc.binary_length(data).to_numpy(zero_copy_only=False).astype(np.int64)
    return _joined([_numbers(sizes), data])


def _primitive_writer(avro: Primitive, kind: pa.DataType) -> Writer | None:
    is_a = pa.types
    name, time = avro.name, time_type(avro)
    if name == "null":
        return (lambda values: _constant(b"", len(values))) if is_a.is_null(kind) else None
    if name == "boolean" and is_a.is_boolean(kind):
        return lambda values: same_sized(
            values.to_numpy(zero_copy_only=False).astype(np.uint8).reshape(-1, 1)
        )
    if name in ("string", "bytes"):
        fits = _is_text(kind) or (name == "bytes" and _is_bytes(kind))
        return _text if fits else None
    if name in ("float", "double"):
        size = 4 if name == "float" else 8
        exact = is_a.is_floating(kind) and kind.bit_width <= size * 8
        whole = is_a.is_integer(kind) and kind.bit_width <= size * 4
        return _float_writer(size) if exact or whole else None
    if is_a.is_integer(kind):
        bits = 32 if name == "int" else 64
        unsigned = is_a.is_unsigned_integer(kind)
        if time is not None or kind.bit_width + unsigned > bits:
            return None
        return lambda values: _numbers(values.to_numpy(zero_copy_only=False).astype(np.int64))
    if time is None or not _holds_time(time, kind):
        return None
    base = pa.int32() if name == "int" else pa.int64()
    return lambda values: _numbers(
        values.cast(time).view(base).to_numpy(zero_copy_only=False).astype(np.int64)
    )


def _holds_time(time: pa.DataType, kind: pa.DataType) -> bool:
    """Return True if values of a column are never finer than what the type of Avro holds."""
    is_a = pa.types
    order = ("s", "ms", "us", "ns")
    if is_a.is_timestamp(time):
        same = is_a.is_timestamp(kind) and (kind.tz is None) == (time.tz is None)
        return bool(same and order.index(kind.unit) <= order.index(time.unit))
    if is_a.is_time(time):
        return bool(is_a.is_time(kind) and order.index(kind.unit) <= order.index(time.unit))
    return bool(kind == time)


def _float_writer(size: int) -> Writer:
    kind: Any = np.dtype("<f4" if size == 4 else "<f8")

    def write(values: pa.Array) -> pa.Array:
        numbers = values.to_numpy(zero_copy_only=False).astype(kind)
        return same_sized(numbers.view(np.uint8).reshape(-1, size))

    return write


def _enum_writer(avro: Enum, path: str) -> Writer:
    symbols = pa.array(avro.symbols, pa.string())

    def write(values: pa.Array) -> pa.Array:
        found = pc.index_in(values.cast(pa.string()), symbols)
        if found.null_count:
            value = values.filter(found.is_null())[0].as_py()
            raise DataError(
                f"an enum of Avro has no such symbol column=`{path}` value=`{value}`",
                fix=f"the symbols of `{avro.name}` are {', '.join(avro.symbols)[:200]}",
            )
        return _numbers(found.to_numpy(zero_copy_only=False).astype(np.int64))

    return write


def _fixed_writer(size: int, path: str) -> Writer:
    def write(values: pa.Array) -> pa.Array:
        data = values.cast(pa.binary())
        wrong = pc.not_equal(pc.binary_length(data), size)
        if pc.any(wrong).as_py():
            raise DataError(
                f"a value of another size than the fixed type of Avro column=`{path}` size=`{size}`",
                fix="make the values as long as the schema says",
            )
        return data

    return write


def _decimal_writer(avro: AvroType, kind: pa.DataType, path: str) -> Writer:
    assert isinstance(avro, Primitive | Fixed)
    if kind.scale > avro.scale or kind.precision - kind.scale > avro.precision - avro.scale:
        raise Unfit(f"`{path}` of type {kind} has more digits than its field in Avro")
    natural = pa.decimal128(avro.precision, avro.scale)
    size = avro.size if isinstance(avro, Fixed) else 0
    if size and 2 ** (8 * size - 1) <= 10**avro.precision:
        raise Unfit(f"`{path}` does not fit into {size} bytes")

    def write(values: pa.Array) -> pa.Array:
        exact = values.cast(natural)
        whole = np.frombuffer(exact.buffers()[1], np.uint8).reshape(-1, 16)
        bytes_ = whole[exact.offset : exact.offset + len(exact), ::-1]
        sign = np.where(bytes_[:, :1] >= 0x80, 0xFF, 0).astype(np.uint8)
        if size:
            wide = np.repeat(sign, max(0, size - 16), axis=1)
            return same_sized(np.hstack([wide, bytes_[:, max(0, 16 - size) :]]))
        # The byte in front of the first one that differs from the sign stays if that has another top bit.
        differs = bytes_ != sign
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), 15)
        top = bytes_[np.arange(len(bytes_)), first] >= 0x80
        first = np.maximum(first - (top != (sign[:, 0] == 0xFF)), 0)
        kept = np.arange(16) >= first[:, None]
        offsets = np.zeros(len(bytes_) + 1, np.int32)
        np.cumsum(16 - first, out=offsets[1:])
        return _text(binary_array(offsets, bytes_[kept]))

    return write


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string())


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary())
