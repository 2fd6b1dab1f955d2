"""A list in the job as a source, for tests and first steps. The list may contain markers for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec
import pyarrow as pa

from ..errors import BadRecordError, UsageError
from ..operators.durations import Duration, parse_duration
from ..operators.elements import Batch, ColumnBatch, ObjectBatch, Positions
from ..operators.event_time import latest_of
from ..operators.functions.user_code import describe_record
from ..operators.origin import capture_origin
from ..operators.per_record.base import describe_columns
from ..operators.rows import RowMismatch, to_columns
from ..operators.schema import ColumnsLike, SchemaLike, record_class, to_schema
from ..operators.source import Record, Record_co, Source, SourceReader
from .arguments import check_count


class MarkerCrash(Exception):
    """Raised by a `Crash` marker."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A marker in a list that holds back the records behind it for a while."""

    duration: Duration


@dataclass(frozen=True, slots=True)
class Crash:
    """A marker in a list that fails the job when it comes here, in its attempts up to number `attempts`."""

    attempts: int = 1


class _Split(msgspec.Struct):
    """The items `index`, `index + of`, ...; `position` counts items of this split, including markers."""

    index: int
    of: int
    position: int = 0

    @property
    def name(self) -> str:
        """The name of the split in event time."""
        return f"split {self.index}"


class ListSource(Source[Record_co]):
    """A source of the items of a list."""

    bounded = True

    def __init__(
        self,
        items: Sequence[Any],
        schema: pa.Schema | None,
        row_type: type[Any] | None,
        batch_rows: int,
        splits: int,
    ) -> None:
        self.items = list(items)
        self.schema = schema
        self.row_type = row_type
        self.batch_rows = batch_rows
        self.split_count = splits
        self.at_rest = not any(isinstance(item, Pause) for item in self.items)

    def splits(self, parallelism: int) -> list[bytes]:
        return [
            msgspec.msgpack.encode(_Split(index, self.split_count))
            for index in range(self.split_count)
        ]

    def latest(self, splits: Sequence[bytes], column: str) -> int | None:
        records = [item for item in self.items if not isinstance(item, Crash | Pause)]
        batch = self.batch(records)
        return latest_of(batch.data.column(column)) if isinstance(batch, ColumnBatch) else None

    def reader(self) -> SourceReader:
        return _ListReader(self)

    def with_columns(self, columns: Sequence[str]) -> ListSource:
        if self.schema is None:
            return self
        wanted = set(columns)
        # One column stays in any case: a batch without columns has no rows to count.
        kept = [field for field in self.schema if field.name in wanted] or [self.schema.field(0)]
        row_type = self.row_type if len(kept) == len(self.schema) else None
        return ListSource(self.items, pa.schema(kept), row_type, self.batch_rows, self.split_count)

    def describe(self) -> str:
        return f"from_list({len(self.items)} items)"

    def batch(self, records: list[Any]) -> Batch:
        """Return these records as the batch that the stream expects."""
        if self.schema is None:
            return ObjectBatch(records)
        try:
            return ColumnBatch(to_columns(records, self.schema))
        except RowMismatch as error:
            record = describe_record(records[error.index])
            raise BadRecordError(
                f"a record of the list does not fit the columns record=`{record}` reason=`{error}`",
                fix=f"the columns are: {describe_columns(self.schema)}",
            ) from error


class _ListReader(SourceReader):
    def __init__(self, source: ListSource) -> None:
        self._source = source
        self._splits: list[_Split] = []
        self._paused_until_s: float | None = None

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self._splits += [msgspec.msgpack.decode(split, type=_Split) for split in splits]
        for split in self._splits:
            self.context.splits.opened(split.name, queued=True)
        self._drop_read()

    def poll(self) -> Batch | None:
        while self._splits:
            split = self._splits[0]
            marker = self._item(split, split.position)
            if isinstance(marker, Crash):
                number = self.context.attempt_number
                if number <= marker.attempts:
                    raise MarkerCrash(f"crash marker attempt=`{number}`")
            elif isinstance(marker, Pause):
                if not self._paused_enough(marker):
                    return None
            else:
                return self._read(split)
            split.position += 1
            self._drop_read()
        return None

    async def wait(self) -> None:
        """Sleep until a pause is over. Cancelling it leaves the reader unchanged."""
        delay_s = 0.0
        if self._paused_until_s is not None:
            delay_s = self._paused_until_s - self.context.clock.monotonic()
        await asyncio.sleep(max(0.0, delay_s))

    @property
    def finished(self) -> bool:
        return not self._splits

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(split) for split in self._splits]

    def lag_records(self) -> dict[str, int]:
        """See the base class; markers count as records."""
        return {s.name: max(0, self._size(s) - s.position) for s in list(self._splits)}

    def _item(self, split: _Split, position: int) -> Any:
        return self._source.items[split.index + position * split.of]

    def _size(self, split: _Split) -> int:
        return max(0, -((split.index - len(self._source.items)) // split.of))

    def _drop_read(self) -> None:
        for split in self._splits:
            if split.position >= self._size(split):
                self.context.splits.ended(split.name)
        self._splits = [split for split in self._splits if split.position < self._size(split)]

    def _read(self, split: _Split) -> Batch:
        """Return the records up to the next marker, at most a batch of them."""
        rows = self._source.batch_rows
        if self.rows_wanted is not None:
            rows = min(rows, self.rows_wanted)
        end = min(split.position + rows, self._size(split))
        records: list[Any] = []
        for position in range(split.position, end):
            item = self._item(split, position)
            if isinstance(item, Crash | Pause):
                break
            records.append(item)
        batch = self._source.batch(records)
        first = split.index + split.position * split.of
        offsets = range(first, first + len(records) * split.of, split.of)
        batch.positions = Positions(self.context.operator_name, split.name, offsets)
        split.position += len(records)
        self.context.splits.reading(split.name)
        self._drop_read()
        return batch

    def _paused_enough(self, pause: Pause) -> bool:
        now_s = self.context.clock.monotonic()
        if self._paused_until_s is None:
            self._paused_until_s = now_s + parse_duration(pause.duration, "pause") / 1000
        if now_s < self._paused_until_s:
            return False
        self._paused_until_s = None
        return True


def _check_items(items: list[Any], schema: pa.Schema) -> None:
    """Raise UsageError if an item does not fit the columns."""
    try:
        to_columns(items, schema)
    except RowMismatch as error:
        raise UsageError(
            f"a record of the list does not fit the columns: {str(error).removeprefix('returned ')} "
            f"record=`{describe_record(items[error.index])}`",
            where=str(capture_origin()),
            fix=f"the columns of schema= are: {describe_columns(schema)}",
        ) from None


@overload
def from_list(
    items: Sequence[Any], *, schema: type[Record], batch_rows: int = ..., splits: int = ...
) -> ListSource[Record]: ...
@overload
def from_list(
    items: Sequence[Any], *, schema: ColumnsLike, batch_rows: int = ..., splits: int = ...
) -> ListSource: ...
@overload
def from_list(
    items: Sequence[Record | Pause | Crash],
    *,
    schema: None = ...,
    batch_rows: int = ...,
    splits: int = ...,
) -> ListSource[Record]: ...
def from_list(
    items: Sequence[Any],
    *,
    schema: SchemaLike | None = None,
    batch_rows: int = 1024,
    splits: int = 1,
) -> ListSource:
    """Return a bounded source of the items of a list. They keep their order if there is one split.

    Args:
        items: Python objects; with `schema` mappings or instances of the class. For tests, the markers
            `Pause("1s")` and `Crash()` may stand between them.
        schema: gives a stream of columns instead of objects.
        batch_rows: records per batch; with 1 a checkpoint can be taken behind every record.
        splits: the number of splits to which the items are dealt, item i to split i mod `splits`.

    Raises:
        UsageError: a number is below 1.
    """
    check_count("batch_rows", batch_rows, 1)
    check_count("splits", splits, 1)
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
        raise UsageError(
            f"from_list takes a list of records, got `{type(items).__name__}`",
            where=str(capture_origin()),
        )
    items = list(items)
    arrow = None if schema is None else to_schema(schema)
    if arrow is not None:
        _check_items([each for each in items if not isinstance(each, Pause | Crash)], arrow)
    return ListSource(items, arrow, record_class(schema), batch_rows, splits)
