"""`spark.read.format("headgate")`: what Spark calls, on the driver and in each task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyarrow.compute import field as column
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from ..errors import StateError
from ..runtime.offline.keys import values_array
from ..runtime.offline.scan import Share, StateScan
from ..runtime.offline.snapshot import METADATA_SCHEMA, metadata_table, open_snapshot
from .options import ReadOptions, read_options
from .types import as_spark, spark_schema, spark_type


def pushes_filters() -> bool:
    """True if this version of Spark hands filters to Python data sources: from 4.1 on."""
    return hasattr(DataSourceReader, "pushFilters")


class HeadgateDataSource(DataSource):  # type: ignore[misc]
    """One state of a savepoint or checkpoint, or the table of its states."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "headgate"

    def schema(self) -> Any:
        """The columns, as Spark has them."""
        options = self._options()
        found = METADATA_SCHEMA if options.query is None else options.scan(None).schema
        return from_arrow_schema(spark_schema(found), True)  # times without zone stay so

    def reader(self, schema: Any) -> DataSourceReader:
        """The reader; of a schema that the user gave, it reads only those columns."""
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
        """Read only what equality of columns leaves over; Spark looks at those rows again all the same."""
        from pyspark.sql.datasource import EqualTo, In

        for one in filters:
            if isinstance(one, EqualTo | In) and len(one.attribute) == 1:
                values = list(one.value) if isinstance(one, In) else [one.value]
                self._push(one.attribute[0], values)
            yield one

    def _push(self, name: str, values: list[Any]) -> None:
        """Only where equality means the same to both: no floats, and types that are Spark's own, or times
        that it does not cut off."""
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
        """One per share of the key groups."""
        return [_Part(share) for share in self._scan.shares()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one share; runs in a task."""
        schema = spark_schema(self._scan.schema)
        for table in self._scan.read(partition.value):
            yield from as_spark(table, schema)


class _MetadataReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: ReadOptions, names: tuple[str, ...]) -> None:
        self._table = metadata_table(open_snapshot(options.path, options.storage)).select(names)

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        """As `_StateReader`."""
        from pyspark.sql.datasource import EqualTo

        for one in filters:
            if isinstance(one, EqualTo) and len(one.attribute) == 1:
                self._table = self._table.filter(column(one.attribute[0]) == one.value)
            yield one

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """All rows."""
        yield from as_spark(self._table, spark_schema(self._table.schema))
