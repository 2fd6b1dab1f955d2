"""Decodes messages of Avro into columns, by the schema of their writer and the columns that are wanted.

`column_reader` compares the two once, by the rules of Avro for the evolution of schemas, and returns a tree
of readers. Each reader moves the cursors of all messages over one field, and returns its column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..files.decode import Decoded
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
    arrow_type,
    is_decimal,
    time_type,
)
from .cursors import BYTES_MAX, Cursors, Int64s, UInt64s

_INT: Final = np.iinfo(np.int32)
_NULL: Final = Primitive("null")
_JOINED: Final = 256
"""The number of columns that are joined at once: a column of one item takes a hundred times its memory."""


class Reader(Protocol):
    """Reads one value of each message, and moves the cursors behind it."""

    def __call__(
        self, c: Cursors, at: Int64s, end: Int64s, rows: Int64s
    ) -> tuple[pa.Array | None, Int64s]:
        """Return the values, or None if they are only skipped, and the new positions."""
        ...


class AvroDecoder:
    """Decodes messages that one schema has written."""

    def __init__(self, writer: AvroType, schema: pa.Schema, reader: AvroType | None = None) -> None:
        """Make a decoder.

        Args:
            writer: the schema with which the messages were written.
            schema: the columns to make.
            reader: the schema that the columns come from, which has aliases and defaults of fields.

        Raises:
            Unfit: the columns cannot be made of such messages.
        """
        self._schema = schema
        if isinstance(writer, Record):
            self._read: Reader = _record_reader(writer, list(schema), reader, "")
        elif len(schema) == 1:
            field = schema.field(0)
            self._read = _struct(
                [(field.name, column_reader(writer, field.type, reader, field.name))], [field], {}
            )
        else:
            raise Unfit("the messages are no records, so they make one column only")

    def __call__(self, messages: Sequence[bytes], skipped: int = 0) -> Decoded:
        """Decode messages that have a header of `skipped` bytes, which is known to be there."""
        if len(messages) > 1 and sum(map(len, messages)) > BYTES_MAX:
            middle = len(messages) // 2
            first, second = self(messages[:middle], skipped), self(messages[middle:], skipped)
            bad = [(middle + index, reason) for index, reason in second.bad]
            return Decoded(first.batches + second.batches, first.bad + bad)
        c = Cursors(messages, skipped)
        rows = np.arange(len(messages))
        struct, at = self._read(c, c.start, c.end, rows)
        left = np.flatnonzero((at != c.end) & ~c.failed)
        if len(left):
            c.fail(left, "bytes are left behind the record")
        assert struct is not None
        batch = pa.RecordBatch.from_arrays(struct.flatten(), schema=self._schema)
        if not c.reasons:
            return Decoded([batch])
        good = batch.filter(pa.array(~c.failed))
        return Decoded([good] if good.num_rows else [], sorted(c.reasons.items()))


def column_reader(
    writer: AvroType, kind: pa.DataType, reader: AvroType | None, path: str
) -> Reader:
    """Return the reader of values of a type of Avro as a column of this type.

    Raises:
        Unfit: such values do not fit into the column.
    """
    if isinstance(writer, Union):
        return _union_reader(writer, kind, reader, path)
    reader = _branch_of(reader, writer)
    if isinstance(writer, Record) and pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        return _record_reader(writer, fields, reader, f"{path}.")
    if isinstance(writer, Array) and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        items = reader.items if isinstance(reader, Array) else None
        read = column_reader(writer.items, kind.value_type, items, f"{path}[]")
        read = read if kind.value_field.nullable else _without_nulls(read, f"{path}[]")
        return _Repeated(read, _smallest(writer.items), lambda o, v: _list_of(kind, o, v))
    if isinstance(writer, Map) and pa.types.is_map(kind):
        values = reader.values if isinstance(reader, Map) else None
        pair = pa.struct([pa.field("key", kind.key_type), kind.item_field.with_name("value")])
        return _Repeated(
            _struct(
                [
                    ("key", column_reader(Primitive("string"), kind.key_type, None, path)),
                    ("value", column_reader(writer.values, kind.item_type, values, f"{path}[]")),
                ],
                [pair.field(0), pair.field(1)],
                {},
            ),
            1,
            lambda o, v: pa.MapArray.from_arrays(pa.array(o, pa.int32()), *v.flatten(), type=kind),
        )
    if isinstance(writer, Enum) and _is_text(kind):
        return _enum_reader(writer, reader, kind)
    if is_decimal(writer) and pa.types.is_decimal128(kind):
        return _decimal_reader(writer, kind)
    made = _leaf_reader(writer, kind)
    if made is None:
        raise Unfit(f"`{path}` is {name_of(writer)} in Avro, and does not fit into {kind}")
    return made


def name_of(avro: AvroType) -> str:
    """Return a type in a form for messages."""
    if isinstance(avro, Primitive | Fixed):
        return f"{avro.name} ({avro.logical})" if avro.logical else avro.name
    return type(avro).__name__.lower()


def _branch_of(reader: AvroType | None, writer: AvroType) -> AvroType | None:
    """Return the branch of a reader's union that a value of the writer's type belongs to."""
    if not isinstance(reader, Union):
        return reader
    fitting = [each for each in reader.branches if type(each) is type(writer)]
    same = [each for each in fitting if getattr(each, "name", "") == getattr(writer, "name", "")]
    return next(iter([*same, *fitting]), None)


# -- records ----------------------------------------------------------------------------------------


def _record_reader(
    writer: Record, fields: Sequence[pa.Field], reader: AvroType | None, path: str
) -> Reader:
    """Return the reader of the fields of a record, which come in the order of their writer."""
    known = {each.name: each for each in reader.fields} if isinstance(reader, Record) else {}
    written = {each.name for each in writer.fields}
    names: dict[str, pa.Field] = {}
    constants: dict[str, pa.Scalar] = {}
    for field in fields:
        described = known.get(field.name)
        aliases = () if described is None else described.aliases
        found = [name for name in (field.name, *aliases) if name in written]
        if found:
            names[found[0]] = field
        else:
            constants[field.name] = _default(field, described, f"{path}{field.name}", writer)
    parts: list[tuple[str, Reader]] = []
    for each in writer.fields:
        wanted = names.get(each.name)
        if wanted is None:
            parts.append(("", skipper(each.type)))
            continue
        described = known.get(wanted.name)
        inner = None if described is None else described.type
        parts.append(
            (wanted.name, column_reader(each.type, wanted.type, inner, f"{path}{wanted.name}"))
        )
    return _struct(parts, fields, constants)


def _default(
    field: pa.Field, described: RecordField | None, path: str, writer: Record
) -> pa.Scalar:
    """Return the value of a column that the writer does not have."""
    if described is not None and described.default is not MISSING:
        return default_value(described, field.type)
    if field.nullable:
        return pa.scalar(None, field.type)
    raise Unfit(
        f"the record `{writer.name}` has no field `{path}`, which has no default and must not be null"
    )


def default_value(described: RecordField, kind: pa.DataType) -> pa.Scalar:
    """Return the default of a field as a value of its column.

    Raises:
        Unfit: it is none.
    """
    avro = described.type.branches[0] if isinstance(described.type, Union) else described.type
    try:
        natural = kind if described.default is None else arrow_type(avro)[0]
        made = pa.array([_plain_default(avro, described.default)], natural)
        return made.cast(kind)[0]
    except (pa.ArrowException, TypeError, ValueError, AttributeError, KeyError) as error:
        raise Unfit(
            f"the default of `{described.name}` does not fit into {kind}: {error}"
        ) from None


def _plain_default(avro: AvroType, value: Any) -> Any:
    """Return the value that a default in JSON stands for."""
    if isinstance(avro, Union):
        return _plain_default(avro.branches[0], value)
    if isinstance(avro, Record):
        return {
            each.name: _plain_default(each.type, value.get(each.name, each.default))
            for each in avro.fields
        }
    if isinstance(avro, Array):
        return [_plain_default(avro.items, each) for each in value]
    if isinstance(avro, Map):
        return [(key, _plain_default(avro.values, each)) for key, each in value.items()]
    if isinstance(avro, Fixed) or avro == Primitive("bytes") or is_decimal(avro):
        data = value.encode("latin-1")  # each character stands for one byte
        if not is_decimal(avro):
            return data
        assert isinstance(avro, Primitive | Fixed)
        return Decimal(int.from_bytes(data, "big", signed=True)).scaleb(-avro.scale)
    return value


def _struct(
    parts: Sequence[tuple[str, Reader]],
    fields: Sequence[pa.Field],
    constants: dict[str, pa.Scalar],
) -> Reader:
    """Return the reader of several values as a struct; those without a name are skipped."""
    if not fields:
        raise Unfit("a struct without fields is not supported")
    kind = pa.struct(fields)

    def read(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        columns = {name: pa.repeat(value, len(rows)) for name, value in constants.items()}
        for name, part in parts:
            column, at = part(c, at, end, rows)
            if name:
                columns[name] = column
        for field in fields:
            column = columns[field.name]
            if not field.nullable and column.null_count:
                c.fail(rows[_nulls(column)], f"no value for column `{field.name}`")
        made = [columns[field.name] for field in fields]
        return pa.StructArray.from_arrays(made, fields=list(kind)), at

    return read


def _without_nulls(part: Reader, path: str) -> Reader:
    def read(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        values, at = part(c, at, end, rows)
        if values is not None and values.null_count:
            c.fail(rows[_nulls(values)], f"no value for `{path}`")
        return values, at

    return read


def _nulls(values: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = values.is_null().to_numpy(zero_copy_only=False)
    return found


# -- unions -----------------------------------------------------------------------------------------


def _union_reader(writer: Union, kind: pa.DataType, reader: AvroType | None, path: str) -> Reader:
    """Return the reader of a union. Values of a branch that does not fit the column are damaged."""
    branches: list[Reader] = []
    reasons = []
    fits = False
    for each in writer.branches:
        if each == _NULL:
            branches.append(_nothing)
            continue
        try:
            branches.append(column_reader(each, kind, reader, path))
            fits = True
        except Unfit as error:
            reasons.append(error)
            branches.append(_refused(str(error)))
    if reasons and not fits:
        raise reasons[0]
    return _Union(branches, kind)


def _nothing(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
    return None, at


def _refused(reason: str) -> Reader:
    def read(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        c.fail(rows, reason)
        return None, end

    return read


class _Union:
    """Reads the branches of a union, each for the messages that have it. A branch of None is null."""

    def __init__(self, branches: Sequence[Reader], kind: pa.DataType | None) -> None:
        self._branches = branches
        self._kind = kind
        """The type of the column; None if values are only skipped."""

    def __call__(
        self, c: Cursors, at: Int64s, end: Int64s, rows: Int64s
    ) -> tuple[pa.Array | None, Int64s]:
        index, at = c.zigzag(at, end, rows)
        wrong = (index < 0) | (index >= len(self._branches))
        if wrong.any():
            c.fail(rows[wrong], "a union has no such branch")
            index, at = np.where(wrong, 0, index), np.where(wrong, end, at)
        parts: list[pa.Array] = []
        places = np.full(len(rows), -1)
        count = 0
        for number in np.flatnonzero(np.bincount(index)).tolist():
            chosen = np.flatnonzero(index == number)
            read = self._branches[number]
            if len(chosen) == len(rows):
                values, at = read(c, at, end, rows)
                if values is not None:
                    return values, at
                break
            values, moved = read(c, at[chosen], end[chosen], rows[chosen])
            at[chosen] = moved
            if values is not None:
                parts.append(values)
                places[chosen] = np.arange(count, count + len(chosen))
                count += len(chosen)
        if self._kind is None:
            return None, at
        if not parts:
            return pa.nulls(len(rows), self._kind), at
        values = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
        return values.take(pa.array(places, mask=places < 0)), at


# -- arrays and maps --------------------------------------------------------------------------------


class _Repeated:
    """Reads blocks of items, up to an empty one. The next item of all messages is read at once."""

    def __init__(
        self,
        item: Reader,
        smallest: int,
        make: Callable[[npt.NDArray[np.int64], pa.Array], pa.Array] | None,
    ) -> None:
        """Make a reader.

        Args:
            item: reads one item.
            smallest: the fewest bytes of an item.
            make: returns the column for the offsets and the values of items; None: they are skipped.

        Raises:
            Unfit: an item may have no bytes: then a few bytes could stand for any number of them.
        """
        if not smallest:
            raise Unfit("items without bytes are not supported")
        self._item = item
        self._smallest = smallest
        self._make = make

    def __call__(
        self, c: Cursors, at: Int64s, end: Int64s, rows: Int64s
    ) -> tuple[pa.Array | None, Int64s]:
        at = at.copy()
        left = np.zeros(len(rows), np.int64)
        block_end = np.full(len(rows), -1)
        parts: list[pa.Array] = []
        owners: list[Int64s] = []
        joined = 0
        live = np.arange(len(rows))
        while len(live):
            fresh = live[left[live] == 0]
            if len(fresh):
                self._begin(c, at, end, rows, fresh, left, block_end)
                live = live[left[live] > 0]
            if not len(live):
                break
            values, moved = self._item(c, at[live], end[live], rows[live])
            at[live] = moved
            left[live] -= 1
            if self._make is not None:
                assert values is not None
                parts.append(values)
                owners.append(live)
                if len(parts) - joined == _JOINED:
                    parts[joined:] = [pa.concat_arrays(parts[joined:])]
                    owners[joined:] = [np.concatenate(owners[joined:])]
                    joined += 1
            live = live[~c.failed[rows[live]]]
        if self._make is None:
            return None, at
        if not parts:
            empty, _ = self._item(c, at[:0], end[:0], rows[:0])
            return self._make(np.zeros(len(rows) + 1, np.int64), empty), at
        owner = np.concatenate(owners)
        values = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
        if len(parts) > 1:
            values = values.take(pa.array(np.argsort(owner, kind="stable")))
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.bincount(owner, minlength=len(rows)), out=offsets[1:])
        return self._make(offsets, values), at

    def _begin(
        self,
        c: Cursors,
        at: Int64s,
        end: Int64s,
        rows: Int64s,
        fresh: Int64s,
        left: Int64s,
        block_end: Int64s,
    ) -> None:
        """Read the beginning of the next block; with 0 items it is the end of all."""
        short = (block_end[fresh] >= 0) & (block_end[fresh] != at[fresh])
        if short.any():
            c.fail(rows[fresh[short]], "a block of items is not as long as it says")
            at[fresh[short]] = end[fresh[short]]
        count, moved = c.zigzag(at[fresh], end[fresh], rows[fresh])
        block_end[fresh] = -1
        sized = np.flatnonzero(count < 0)
        if len(sized):
            of = fresh[sized]
            size, behind = c.zigzag(moved[sized], end[of], rows[of])
            starts, size, _ = c.sized(size, behind, end[of], rows[of])
            moved[sized] = starts
            block_end[of] = starts + size
            count[sized] = -count[sized]
        room = (end[fresh] - moved) // self._smallest
        wrong = (count > room) | (count < 0) | c.failed[rows[fresh]]
        if wrong.any():
            c.fail(rows[fresh[wrong]], "there are more items than bytes for them")
            count[wrong], moved[wrong] = 0, end[fresh[wrong]]
        at[fresh] = moved
        left[fresh] = count


def _list_of(kind: pa.DataType, offsets: npt.NDArray[np.int64], values: pa.Array) -> pa.Array:
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=kind)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)


def _smallest(avro: AvroType, inside: tuple[Record, ...] = ()) -> int:
    """Return the fewest bytes that a value takes."""
    if isinstance(avro, Record):
        if avro in inside:
            raise Unfit(f"the record `{avro.name}` contains itself")
        return sum(_smallest(each.type, (*inside, avro)) for each in avro.fields)
    if isinstance(avro, Fixed):
        return avro.size
    if isinstance(avro, Primitive):
        return {"null": 0, "float": 4, "double": 8}.get(avro.name, 1)
    return 1


# -- single values ----------------------------------------------------------------------------------


def _leaf_reader(writer: AvroType, kind: pa.DataType) -> Reader | None:
    """Return the reader of a type without parts; None: it does not fit into the column."""
    is_a = pa.types
    if isinstance(writer, Fixed):
        if kind == pa.binary(writer.size):
            return _fixed_bytes(writer.size, kind)
        return _fixed_bytes(writer.size, kind) if _is_bytes(kind) else None
    if not isinstance(writer, Primitive):
        return None
    name = writer.name
    if name == "null":
        return lambda c, at, end, rows: (pa.nulls(len(rows), kind), at)
    if name == "boolean":
        return _boolean if is_a.is_boolean(kind) else None
    if name in ("string", "bytes"):
        return _text_reader(kind) if _is_text(kind) or _is_bytes(kind) else None
    if name in ("float", "double"):
        fits = kind == pa.float64() or (name == "float" and kind == pa.float32())
        return _float_reader(4 if name == "float" else 8, kind) if fits else None
    time = time_type(writer)
    if is_a.is_timestamp(kind) or is_a.is_time(kind) or is_a.is_date32(kind):
        if time is None or not _same_kind_of_time(time, kind):
            return None
        return _integer_reader(name, kind, *_scale(time, kind))
    if is_a.is_integer(kind) or kind in (pa.float32(), pa.float64()):
        return _integer_reader(name, kind, 1, 1)
    return None


def _same_kind_of_time(time: pa.DataType, kind: pa.DataType) -> bool:
    is_a = pa.types
    if is_a.is_timestamp(time):
        return bool(is_a.is_timestamp(kind) and (time.tz is None) == (kind.tz is None))
    if is_a.is_time(time):
        return bool(is_a.is_time(kind))
    return bool(time == kind)


_UNITS: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _scale(time: pa.DataType, kind: pa.DataType) -> tuple[int, int]:
    """Return the factor and the divisor between the units of two types of time."""
    if pa.types.is_date32(kind):
        return 1, 1
    given, wanted = _UNITS[time.unit], _UNITS[kind.unit]
    return (wanted // given, 1) if wanted >= given else (1, given // wanted)


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string())


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary())


def _boolean(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
    value, at = c.byte(at, end, rows)
    wrong = value > 1
    if wrong.any():
        c.fail(rows[wrong], "a boolean is neither 0 nor 1")
    return pa.array(value == 1), at


def _integer_reader(name: str, kind: pa.DataType, factor: int, divisor: int) -> Reader:
    """Return the reader of an int or a long, of which the column has a multiple or a part.

    Times are rounded down to the unit of the column.
    """
    numpy_type: Any = kind.to_pandas_dtype() if pa.types.is_integer(kind) else None
    if pa.types.is_floating(kind):
        low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        numpy_type = kind.to_pandas_dtype()
    elif numpy_type is None:
        numpy_type = np.int32 if kind.bit_width == 32 else np.int64
        low, high = np.iinfo(numpy_type).min, np.iinfo(numpy_type).max
    else:
        low, high = np.iinfo(numpy_type).min, min(np.iinfo(numpy_type).max, 2**63 - 1)
    if pa.types.is_time(kind):
        low, high = 0, 86_400 * _UNITS[kind.unit] - 1
    low, high = -(-low // factor), high // factor
    lowest, highest = (_INT.min, _INT.max) if name == "int" else (-(2**63), 2**63 - 1)
    checked = lowest < low or highest > high

    def read(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        value, at = c.zigzag(at, end, rows)
        if name == "int":
            wrong = (value < _INT.min) | (value > _INT.max)
            if wrong.any():
                c.fail(rows[wrong], "an int has more than 32 bits")
                value = np.where(wrong, 0, value)
        if divisor > 1:
            value = value // divisor
        if checked:
            wrong = (value < low) | (value > high)
            if wrong.any():
                c.fail(rows[wrong], f"a number does not fit into {kind}")
                value = np.where(wrong, 0, value)
        made = (value * factor if factor > 1 else value).astype(numpy_type)
        return pa.Array.from_buffers(kind, len(made), [None, pa.py_buffer(made)]), at

    return read


def _float_reader(size: int, kind: pa.DataType) -> Reader:
    def read(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        word, at = c.fixed(size, at, end, rows)
        value = word.astype(np.uint32).view(np.float32) if size == 4 else word.view(np.float64)
        return pa.array(value.astype(kind.to_pandas_dtype())), at

    return read


def _text_reader(kind: pa.DataType) -> Reader:
    def read(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        size, at = c.zigzag(at, end, rows)
        starts, size, at = c.sized(size, at, end, rows)
        return text_column(c, c.slices(starts, size), kind, rows), at

    return read


def text_column(c: Cursors, values: pa.Array, kind: pa.DataType, rows: Int64s) -> pa.Array:
    """Return bytes as a column of texts or bytes; what is no UTF-8 is no text."""
    if kind == pa.binary():
        return values
    try:
        return values.cast(kind)
    except pa.ArrowException:
        texts = values.to_pylist()
        wrong = np.fromiter((not _is_utf8(each) for each in texts), np.bool_, len(texts))
        c.fail(rows[wrong], "not valid UTF-8")
        return pc.if_else(pa.array(wrong), pa.scalar(b""), values).cast(kind)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _fixed_bytes(size: int, kind: pa.DataType) -> Reader:
    def read(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        starts, sizes, at = c.sized(np.full(len(rows), size), at, end, rows)
        values = c.slices(starts, sizes)
        if pa.types.is_fixed_size_binary(kind):
            # Those of damaged messages are empty.
            short = pa.array(sizes < size)
            values = pc.if_else(short, pa.scalar(bytes(size)), values)
        return values.cast(kind), at

    return read


def _enum_reader(writer: Enum, reader: AvroType | None, kind: pa.DataType) -> Reader:
    """Return the reader of an enum, whose symbols must be known if the columns come from a schema."""
    symbols: list[str | None] = list(writer.symbols)
    if isinstance(reader, Enum):
        symbols = [each if each in reader.symbols else reader.default for each in symbols]
    known = pa.array([symbol or "" for symbol in symbols] or [""], kind)
    unknown = np.array([symbol is None for symbol in symbols] or [True])

    def read(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        index, at = c.zigzag(at, end, rows)
        wrong = (index < 0) | (index >= len(symbols))
        if wrong.any():
            c.fail(rows[wrong], "an enum has no such symbol")
            index = np.where(wrong, 0, index)
        if unknown[index].any():
            c.fail(rows[unknown[index]], "a symbol of an enum is not in the schema of the source")
        return known.take(pa.array(index)), at

    return read


def _decimal_reader(writer: AvroType, kind: pa.DataType) -> Reader:
    """Return the reader of decimals: numbers with a sign, the highest byte first."""
    assert isinstance(writer, Primitive | Fixed)
    if writer.scale > kind.scale or writer.precision - writer.scale > kind.precision - kind.scale:
        raise Unfit(f"decimal({writer.precision}, {writer.scale}) does not fit into {kind}")
    natural = pa.decimal128(writer.precision, writer.scale)
    limit = 10**writer.precision
    size = writer.size if isinstance(writer, Fixed) else None

    def read(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        if size is None:
            sizes, at = c.zigzag(at, end, rows)
        else:
            sizes = np.full(len(rows), size)
        starts, sizes, at = c.sized(sizes, at, end, rows)
        if (sizes > 16).any():
            c.fail(rows[sizes > 16], "a decimal has more than 16 bytes")
            sizes = np.where(sizes > 16, 0, sizes)
        made = np.zeros((len(rows), 16), np.uint8)
        sign = np.where((sizes > 0) & (c.bytes_at(starts) >= 0x80), 0xFF, 0).astype(np.uint8)
        for place in range(16):
            inside = sizes > place
            last = np.where(inside, starts + sizes - 1 - place, 0)
            made[:, place] = np.where(inside, c.bytes_at(last), sign)
        halves = made.view("<i8")
        _check_digits(c, halves, limit, rows)
        values = pa.Array.from_buffers(natural, len(rows), [None, pa.py_buffer(halves)])
        return values.cast(kind), at

    return read


def _check_digits(c: Cursors, halves: npt.NDArray[np.int64], limit: int, rows: Int64s) -> None:
    """Check that numbers of 128 bits lie between -limit and limit; others become 0."""
    bits = limit.bit_length()
    high, low = halves[:, 1], halves[:, 0].view(np.uint64)
    small = (high == 0) & (low < np.uint64(min(limit, 2**64 - 1)))
    negated: UInt64s = ~low + np.uint64(1)
    small |= (high == -1) & (low != 0) & (negated < np.uint64(min(limit, 2**64 - 1)))
    if small.all():
        return
    for row in np.flatnonzero(~small).tolist():
        value = (int(high[row]) << 64) | int(low[row])
        if bits <= 64 or not -limit < value < limit:
            c.fail(rows[row : row + 1], "a decimal has too many digits")
            halves[row] = 0


def skipper(writer: AvroType, inside: tuple[Record, ...] = ()) -> Reader:
    """Return a reader that moves over values, which are checked as far as their size goes.

    Raises:
        Unfit: the type contains itself.
    """
    if isinstance(writer, Record):
        if writer in inside:
            raise Unfit(f"the record `{writer.name}` contains itself")
        parts = [skipper(each.type, (*inside, writer)) for each in writer.fields]
        return _in_turn(parts)
    if isinstance(writer, Union):
        return _Union([skipper(each, inside) for each in writer.branches], None)
    if isinstance(writer, Array | Map):
        inner = writer.items if isinstance(writer, Array) else writer.values
        item = skipper(inner, inside)
        smallest = _smallest(inner, inside)
        if isinstance(writer, Map):
            item, smallest = _in_turn([skipper(Primitive("string")), item]), smallest + 1
        return _Repeated(item, smallest, None)
    if isinstance(writer, Fixed):
        return _skip_bytes(writer.size)
    if isinstance(writer, Primitive):
        if writer.name == "null":
            return _nothing
        if writer.name in ("float", "double", "boolean"):
            return _skip_bytes({"float": 4, "double": 8, "boolean": 1}[writer.name])
        if writer.name in ("string", "bytes"):
            return _skip_sized
    return _skip_number


def _in_turn(parts: Sequence[Reader]) -> Reader:
    def skip(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        for part in parts:
            _, at = part(c, at, end, rows)
        return None, at

    return skip


def _skip_bytes(size: int) -> Reader:
    def skip(c: Cursors, at: Int64s, end: Int64s, rows: Int64s) -> tuple[pa.Array | None, Int64s]:
        return None, c.move(at, size, end, rows)

    return skip


def _skip_sized(
    c: Cursors, at: Int64s, end: Int64s, rows: Int64s
) -> tuple[pa.Array | None, Int64s]:
    size, at = c.zigzag(at, end, rows)
    return None, c.sized(size, at, end, rows)[2]


def _skip_number(
    c: Cursors, at: Int64s, end: Int64s, rows: Int64s
) -> tuple[pa.Array | None, Int64s]:
    return None, c.varint(at, end, rows)[1]
