"""`spark.read.format("headgate")`: its options, and what Spark calls, on the driver and in each task."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow.compute import field as column
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from ..errors import OptionError, StateError, UsageError
from ..operators.suggestions import suggest
from ..runtime.offline.keys import values_array
from ..runtime.offline.scan import Query, Share, StateScan
from ..runtime.offline.snapshot import METADATA_SCHEMA, metadata_table, open_snapshot
from ..state.snapshot import KEY_GROUP_COLUMN
from .types import as_spark, spark_schema, spark_type

# --- options ---------------------------------------------------------------------------------------


T = TypeVar("T")
_OPTIONS = (
    "path", "operator", "state", "flatten", "ttl", "columns", "key", "keygroups", "partitions", "from",
)  # fmt: skip
"""The options of the format. Those with a dot in their name are for the storage."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The parsed options of a read.

    Attributes:
        path: the path of the savepoint, or of a job's checkpoints.
        storage: options of the storage, such as `s3.endpoint`.
        query: the state to read; None: the metadata table.
        key: the key to read, one value per column; empty: all keys.
        since: the path of an older snapshot, from which on changes are read; empty: everything is read.
    """

    path: str
    storage: Mapping[str, str]
    query: Query | None
    key: tuple[Any, ...]
    since: str

    def scan(self, columns: tuple[str, ...] | None) -> StateScan:
        """Return a scan of the state. Raises StateError or UsageError as `StateScan` does."""
        assert self.query is not None
        snapshot = open_snapshot(self.path, self.storage)
        since = open_snapshot(self.since, self.storage) if self.since else None
        query = self.query
        if columns is not None:
            query = replace(query, columns=columns)
        scan = StateScan(snapshot, query, since)
        if self.key:
            names = scan.state.hash_columns or ()
            if len(names) != len(self.key):
                raise UsageError(
                    f"the key has other columns {scan.state.text} columns=`{', '.join(names) or 'none'}` "
                    f"given=`{len(self.key)}`",
                    fix="give one value, or a JSON list with one per column",
                )
            for name, value in zip(names, self.key, strict=True):
                scan.where(name, [value])
        return scan


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read; names are in lower case.

    Raises:
        OptionError: an option is unknown, missing, or its value does not parse.
    """
    for name in options:
        if "." not in name and name not in _OPTIONS:
            raise OptionError(
                f"no such option of format headgate option=`{name}`",
                fix=suggest(name, _OPTIONS, "options"),
            )
    if not options.get("path"):
        raise OptionError(
            "the path is missing",
            fix="load(PATH): a savepoint, or the directory of a job's checkpoints",
        )
    storage = {name: value for name, value in options.items() if "." in name}
    key = (
        _parsed(options, "key", _key, "a value, or a JSON list with one per column of the key")
        or ()
    )
    query = _query(options)
    if query is None and len(options.keys() - storage.keys()) > 1:
        raise OptionError(
            "operator and state go together, and with all other options",
            fix="give both, or neither for the table of all states",
        )
    return ReadOptions(options["path"], storage, query, key, options.get("from", ""))


def _query(options: Mapping[str, str]) -> Query | None:
    operator, state = options.get("operator"), options.get("state")
    if not operator or not state:
        return None
    columns = options.get("columns")
    groups = _parsed(options, "keygroups", _groups, "a range such as 0-15, or a number")
    return Query(
        operator=operator,
        state=state,
        flatten=_parsed(options, "flatten", _flag, "true or false") is not False,
        ttl=_parsed(options, "ttl", _flag, "true or false") is True,
        columns=None if not columns else tuple(name.strip() for name in columns.split(",")),
        values={} if groups is None else {KEY_GROUP_COLUMN: groups},
        shares=_parsed(options, "partitions", _positive, "a whole number of at least 1"),
    )


def _parsed(
    options: Mapping[str, str], name: str, parse: Callable[[str], T], wanted: str
) -> T | None:
    text = options.get(name)
    if text is None:
        return None
    try:
        return parse(text)
    except (ValueError, KeyError) as error:
        raise OptionError(
            f"the option does not parse {name}=`{text}`", fix=f"give {wanted}"
        ) from error


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.strip().lower()]


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _groups(text: str) -> tuple[int, ...]:
    first, _, last = text.partition("-")
    return tuple(range(int(first), int(last or first) + 1))


def _key(text: str) -> tuple[Any, ...]:
    """Parse a key. Text that is not JSON is a string, so that names need no quotes."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return tuple(value) if isinstance(value, list) else (value,)


# --- the data source -------------------------------------------------------------------------------


def pushes_filters() -> bool:
    """Return True if this version of Spark hands filters to Python data sources, as from 4.1 on."""
    return hasattr(DataSourceReader, "pushFilters")


class HeadgateDataSource(DataSource):  # type: ignore[misc]
    """One state of a savepoint or checkpoint, or the table of its states."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "headgate"

    def schema(self) -> Any:
        """Return the columns in Spark's types."""
        options = self._options()
        found = METADATA_SCHEMA if options.query is None else options.scan(None).schema
        return from_arrow_schema(spark_schema(found), True)  # times without zone stay without zone

    def reader(self, schema: Any) -> DataSourceReader:
        """Return the reader. If the user gave a schema, it reads only those columns."""
        options = self._options()
        names = tuple(schema.fieldNames())
        if options.query is None:
            return _MetadataReader(options, names)
        return _StateReader(options.scan(names))

    def _options(self) -> ReadOptions:
        return read_options({name.lower(): value for name, value in self.options.items()})


class _Part(InputPartition):  # type: ignore[misc]
    def __init__(self, share: Share) -> None:
        super().__init__(share)


class _StateReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, scan: StateScan) -> None:
        self._scan = scan

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        """Use filters on the equality of columns to read fewer rows. Spark applies all filters again."""
        from pyspark.sql.datasource import EqualTo, In

        for one in filters:
            if isinstance(one, EqualTo | In) and len(one.attribute) == 1:
                values = list(one.value) if isinstance(one, In) else [one.value]
                self._push(one.attribute[0], values)
            yield one

    def _push(self, name: str, values: list[Any]) -> None:
        """Use a filter only where equality means the same to Spark and to us: not for floats, and only
        for types that Spark has too, or for times that it does not cut off.
        """
        kind = self._scan.type_of(name)
        same = spark_type(kind) == kind or (pa.types.is_timestamp(kind) and kind.unit != "ns")
        if pa.types.is_nested(kind) or pa.types.is_floating(kind) or not same:
            return
        try:
            values_array(values, kind)
        except StateError:
            return  # such as microseconds where there are milliseconds: Spark finds that none is equal
        self._scan.where(name, values)

    def partitions(self) -> list[InputPartition]:
        """Return one partition per share of the key groups."""
        return [_Part(share) for share in self._scan.shares()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one share; runs in a task."""
        schema = spark_schema(self._scan.schema)
        for table in self._scan.read(partition.value):
            yield from as_spark(table, schema)


class _MetadataReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: ReadOptions, names: tuple[str, ...]) -> None:
        self._table = metadata_table(open_snapshot(options.path, options.storage)).select(names)

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        """Apply equality filters to the table; see `_StateReader`."""
        from pyspark.sql.datasource import EqualTo

        for one in filters:
            if isinstance(one, EqualTo) and len(one.attribute) == 1:
                self._table = self._table.filter(column(one.attribute[0]) == one.value)
            yield one

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield all rows."""
        yield from as_spark(self._table, spark_schema(self._table.schema))
