"""Generated data: deterministic, seekable, at any rate.

Row i is a pure function of (seed, i), so a restored job reads exactly the rows it would have read, and
the rows do not depend on the parallelism.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack, cast, overload

import msgspec
import numpy as np
import pyarrow as pa

from ..errors import UsageError
from ..operators.durations import parse_duration
from ..operators.elements import Batch, ColumnBatch, ObjectBatch
from ..operators.lazy_modules import pc
from ..operators.origin import capture_origin
from ..operators.schema import ColumnsLike, SchemaLike, record_class, to_schema
from ..operators.source import BATCH_ROWS, Record, Record_co
from . import draws
from .rows import DEFAULT_SPLITS, RowSource


class _Field(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """One generated column."""

    def __post_init__(self) -> None:
        fields = msgspec.structs.fields(self)
        for field in fields:
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                names = ", ".join(each.name for each in fields)
                raise UsageError(
                    f"a wrong type of value for a generated column {field.name}=`{value!r}`: "
                    f"{str(error)[:1].lower()}{str(error)[1:]}",
                    where=str(capture_origin()),
                    fix=f"the arguments are, in this order: {names}",
                ) from None

    def type(self) -> pa.DataType:
        raise NotImplementedError

    def column(self, seed: int, first: int, count: int) -> pa.Array:
        """Return rows `first` to `first + count - 1`; `seed` is that of this column."""
        raise NotImplementedError


class RowSequence(_Field, frozen=True, tag="sequence"):
    """The numbers start, start + step, ..."""

    start: int = 0
    step: int = 1

    def type(self) -> pa.DataType:
        return pa.int64()

    def column(self, seed: int, first: int, count: int) -> pa.Array:
        rows = np.arange(first, first + count, dtype=np.int64)
        return pa.array(rows * self.step + self.start)


class RandomInt(_Field, frozen=True, tag="int"):
    """Whole numbers in [low, high)."""

    low: int = 0
    high: int = 1_000_000

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        _check_int64(self.low, self.high)

    def type(self) -> pa.DataType:
        return pa.int64()

    def column(self, seed: int, first: int, count: int) -> pa.Array:
        return pa.array(draws.below(seed, first, count, self.high - self.low) + self.low)


class RandomFloat(_Field, frozen=True, tag="float"):
    """Floats in [low, high)."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    def type(self) -> pa.DataType:
        return pa.float64()

    def column(self, seed: int, first: int, count: int) -> pa.Array:
        numbers = draws.uniform(seed, first, count)
        return pa.array(numbers * (self.high - self.low) + self.low)


class RandomChoice(_Field, frozen=True, tag="choice"):
    """One of `values`, each with equal chance."""

    values: list[Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, list | tuple) or not self.values:
            raise UsageError(
                f"a choice needs a list of values values=`{self.values!r}`",
                fix='such as choice(["a", "b"])',
            )
        _arrow_type(self.values)

    def type(self) -> pa.DataType:
        return pa.array(self.values).type

    def column(self, seed: int, first: int, count: int) -> pa.Array:
        picks = draws.below(seed, first, count, len(self.values))
        return pa.array(self.values).take(pa.array(picks))


class Constant(_Field, frozen=True, tag="constant"):
    """Always `value`."""

    value: Any

    def __post_init__(self) -> None:
        _arrow_type([self.value])

    def type(self) -> pa.DataType:
        return pa.scalar(self.value).type

    def column(self, seed: int, first: int, count: int) -> pa.Array:
        return pa.repeat(pa.scalar(self.value), count)


class RowTimes(_Field, frozen=True, tag="timestamp"):
    """Timestamps that advance by `every` per row, minus a random delay of up to `jitter`."""

    start: datetime.datetime = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
    every: str = "1ms"
    jitter: str = "0ms"

    def __post_init__(self) -> None:
        self._spans()
        super().__post_init__()

    def _spans(self) -> tuple[int, int]:
        return parse_duration(self.every), parse_duration(self.jitter)

    def type(self) -> pa.DataType:
        return pa.timestamp("ms", tz="UTC")

    def column(self, seed: int, first: int, count: int) -> pa.Array:
        every_ms, jitter_ms = self._spans()
        start = self.start if self.start.tzinfo else self.start.replace(tzinfo=datetime.UTC)
        times = np.arange(first, first + count, dtype=np.int64) * every_ms
        times += int(start.timestamp() * 1000)
        if jitter_ms:
            times -= draws.below(seed, first, count, jitter_ms + 1)
        return pa.array(times).cast(self.type())


class TextPattern(_Field, frozen=True, tag="pattern"):
    """Texts `prefix` + number + `suffix`; the number is random in [0, distinct), or the row number if
    that is None.
    """

    prefix: str = ""
    suffix: str = ""
    distinct: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distinct is not None:
            _check_range(0, self.distinct)

    def type(self) -> pa.DataType:
        return pa.string()

    def column(self, seed: int, first: int, count: int) -> pa.Array:
        if self.distinct is None:
            numbers = np.arange(first, first + count, dtype=np.int64)
        else:
            numbers = draws.below(seed, first, count, self.distinct)
        texts = pa.array(numbers).cast(pa.string())
        return pc.binary_join_element_wise(self.prefix, texts, self.suffix, "")


Field: TypeAlias = (
    RowSequence | RandomInt | RandomFloat | RandomChoice | Constant | RowTimes | TextPattern
)
"""A column of `generator`; in a manifest a mapping with `kind: sequence | int | float | ...`."""

sequence = RowSequence
random_int = RandomInt
random_float = RandomFloat
choice = RandomChoice
constant = Constant
event_time = RowTimes
pattern = TextPattern


def _check_range(low: float, high: float) -> None:
    numbers = all(isinstance(bound, int | float) for bound in (low, high))
    if not numbers or not -math.inf < low < high < math.inf:
        raise UsageError(f"low must be a number below high low=`{low!r}` high=`{high!r}`")


def _check_int64(low: int, high: int) -> None:
    whole = isinstance(low, int) and isinstance(high, int)
    if not whole or low < -(1 << 63) or high > 1 << 63 or high - low > (1 << 63) - 1:
        raise UsageError(f"not a range of int64 low=`{low!r}` high=`{high!r}`")


def _arrow_type(values: Sequence[Any]) -> pa.DataType:
    try:
        return pa.array(values).type
    except (pa.ArrowException, OverflowError) as error:
        raise UsageError(
            f"these values do not make a column values=`{values!r:.200}`: {error}",
            fix="give values of one type: all numbers, all texts, ...",
        ) from None


class ColumnGenerator(RowSource[Record_co]):
    """Rows of generated columns."""

    def __init__(
        self,
        fields: Mapping[str, Field],
        seed: int,
        rows: int | None,
        rate: float | None,
        batch_rows: int,
        splits: int,
        row_type: type[Any] | None,
    ) -> None:
        super().__init__(rows, rate, batch_rows, splits)
        self.fields = dict(fields)
        self.seed = seed
        self.row_type = row_type
        self.schema = pa.schema([(name, field.type()) for name, field in fields.items()])
        self._seeds = {name: draws.stream_seed(seed, name) for name in fields}

    def make(self, first: int, count: int) -> Batch:
        columns = [
            field.column(self._seeds[name], first, count) for name, field in self.fields.items()
        ]
        return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=self.schema))

    def with_columns(self, columns: Sequence[str]) -> ColumnGenerator[Record_co]:
        wanted = set(columns)
        # One column stays in any case: a batch without columns has no rows to count.
        fields = {name: field for name, field in self.fields.items() if name in wanted}
        fields = fields or dict(list(self.fields.items())[:1])
        row_type = self.row_type if len(fields) == len(self.fields) else None
        return ColumnGenerator(
            fields, self.seed, self.rows, self.rate, self.batch_rows, self.split_count, row_type
        )

    def describe(self) -> str:
        rows = "unbounded" if self.rows is None else f"{self.rows:,} rows"
        return f"generator({', '.join(self.fields)}; {rows})"


class FunctionGenerator(RowSource[Record_co]):
    """Rows made one by one by a function of the row number."""

    def __init__(
        self,
        function: Callable[[int], Any],
        rows: int | None,
        rate: float | None,
        batch_rows: int,
        splits: int,
    ) -> None:
        super().__init__(rows, rate, batch_rows, splits)
        self.function = function

    def make(self, first: int, count: int) -> Batch:
        function = self.function
        return ObjectBatch([function(row) for row in range(first, first + count)])

    def describe(self) -> str:
        name = getattr(self.function, "__name__", "function")
        return f"generator({name})"


class Numbers(RowSource[int]):
    """The numbers 0, 1, 2, ... as Python ints."""

    def make(self, first: int, count: int) -> Batch:
        return ObjectBatch(list(range(first, first + count)))

    def describe(self) -> str:
        return "numbers()" if self.rows is None else f"numbers({self.rows})"


class GeneratorOptions(TypedDict, total=False):
    """The keyword arguments of `generator`, which documents them."""

    rows: int | None
    rate: float | None
    batch_rows: int
    splits: int
    seed: int


@overload
def generator(fields: type[Record], **options: Unpack[GeneratorOptions]) -> RowSource[Record]: ...
@overload
def generator(
    fields: Mapping[str, Field | Mapping[str, Any] | str] | ColumnsLike,
    **options: Unpack[GeneratorOptions],
) -> RowSource: ...
@overload
def generator(
    *, function: Callable[[int], Record], **options: Unpack[GeneratorOptions]
) -> RowSource[Record]: ...
def generator(
    fields: Mapping[str, Field | Mapping[str, Any] | str] | SchemaLike | None = None,
    *,
    function: Callable[[int], Any] | None = None,
    rows: int | None = None,
    rate: float | None = None,
    batch_rows: int = BATCH_ROWS,
    splits: int = DEFAULT_SPLITS,
    seed: int = 0,
) -> RowSource:
    """Return a source of generated records, which are the same each time, at any parallelism.

    Args:
        fields: the columns, as a mapping from name to field (`sequence()`, `random_int(0, 10)`, ...) or
            to its form in a manifest (`{"kind": "int", "high": 10}` or just `"sequence"`); or a schema,
            whose columns then get random values of their type.
        function: takes the place of `fields` and makes record i, a Python object. It must be pure.
        rows: the number of rows; None for an unbounded source.
        rate: rows per second over all subtasks; None for no limit.
        batch_rows: the most rows of a batch. With a rate, batches are small enough that rows wait for
            20 ms at most; objects come in batches of 1,024.
        splits: the number of parts to which the rows are dealt, which is the highest useful parallelism.
        seed: the data depend on it.

    Raises:
        UsageError: both or none of `fields` and `function` are given, or a field does not parse.
    """
    if (fields is None) == (function is None):
        raise UsageError(
            "generator needs either fields or function", fix="give exactly one of them"
        )
    if function is not None:
        return FunctionGenerator(function, rows, rate, min(batch_rows, 1024), splits)
    if isinstance(fields, Mapping):
        parsed = {name: _parse_field(name, field) for name, field in fields.items()}
        row_type = None
    else:
        schema = to_schema(fields)
        parsed = {column.name: _default_field(column) for column in schema}
        row_type = record_class(fields)
    if not parsed:
        raise UsageError("generator needs at least one field")
    return ColumnGenerator(parsed, seed, rows, rate, batch_rows, splits, row_type)


def numbers(
    rows: int | None = None,
    *,
    rate: float | None = None,
    batch_rows: int = 1024,
    splits: int = DEFAULT_SPLITS,
) -> RowSource[int]:
    """Return a source of the numbers 0 to rows - 1 (or without end) as Python ints."""
    return Numbers(rows, rate, batch_rows, splits)


def _parse_field(name: str, value: Any) -> Field:
    if isinstance(value, _Field):
        return cast("Field", value)
    try:
        described = {"kind": value} if isinstance(value, str) else value
        return cast("Field", msgspec.convert(described, type=Field))
    except msgspec.ValidationError as error:
        raise UsageError(
            f"not a generator field field=`{name}`: {str(error)[:1].lower()}{str(error)[1:]}",
            fix="kinds: sequence, int, float, choice, constant, timestamp, pattern",
        ) from None
    except UsageError as error:
        raise UsageError(
            f"not a generator field field=`{name}`: {error.message}", fix=error.fix
        ) from None


def _default_field(column: pa.Field) -> Field:
    """Return a field with random values for a column of a schema."""
    if pa.types.is_int64(column.type):
        return RandomInt()
    if pa.types.is_float64(column.type):
        return RandomFloat()
    if pa.types.is_string(column.type):
        return TextPattern(prefix=f"{column.name}-", distinct=1000)
    if column.type == pa.timestamp("ms", tz="UTC"):
        return RowTimes()
    if pa.types.is_boolean(column.type):
        return RandomChoice([False, True])
    raise UsageError(
        f"no default values for this type column=`{column.name}` type=`{column.type}`",
        fix="name the fields instead: generator({...: sequence(), ...})",
    )
