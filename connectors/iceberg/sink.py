"""An Iceberg table as a sink: all subtasks write files, and the coordinator commits each checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import UsageError
from ...operators.sink import (
    GlobalCommit,
    IfExists,
    IfExistsLike,
    OutputFile,
    SinkRun,
    SinkWriter,
    stream_columns,
)
from ..files.sink import tag_of
from ..tables.commits import mark_of
from ..tables.sink import (
    BUFFER,
    ROLL_BYTES,
    TableSettings,
    TableSink,
    table_arguments,
)
from ..tables.types import stored_schema
from ..tables.writer import COPIED_BYTES, Key, LocalFile, TableWriter, copy_durably, split_by
from .catalog import IcebergCatalog, load_table, with_whole_paths
from .partitions import Partition, PartitionValues, parse_partitions
from .table import (
    IcebergVersion,
    Part,
    Statistics,
    check_fits,
    create_table,
    existing,
    iceberg_type,
)

_OLD_MS: Final = 300_000
"""The age at which the table is looked at again: what a REST catalog hands out expires, as snapshots do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergSettings(TableSettings):
    """The settings of a sink.

    Attributes:
        catalog: has the table.
        table: its name, `namespace.table`.
        partitions: `partition_by`, once the sink is bound to a stream.
    """

    catalog: IcebergCatalog
    table: str
    partitions: tuple[Partition, ...] = ()


class IcebergSink(TableSink[IcebergSettings]):
    """One table, to which rows are appended."""

    format = "Iceberg"
    extras = ("iceberg",)

    def __init__(self, settings: IcebergSettings, if_exists: IfExists) -> None:
        super().__init__(settings, settings.table, if_exists)

    def bind(self, schema: pa.Schema | None) -> None:
        columns = stored_schema(stream_columns(schema, "rows of a table"), iceberg_type, "Iceberg")
        partitions = parse_partitions(self.settings.partition_by, columns)
        self.settings = replace(self.settings, columns=columns, partitions=partitions)

    def writer(self) -> SinkWriter:
        return IcebergWriter(self.settings)

    def check_connection(self, options: Mapping[str, str]) -> str:
        settings = self.settings
        if not settings.catalog.exists(settings.over(options)):
            return "the catalog does not exist yet"
        fits = self.check_table(options)
        return "the table takes the columns" if fits else "the table does not exist yet"

    def check_table(self, options: Mapping[str, str]) -> bool:
        settings = self.settings
        with settings.catalog.opened(settings.over(options)) as catalog:
            table = load_table(catalog, settings.table)
            if table is not None:
                check_fits(table, settings.table, settings.schema, settings.partitions)
            return table is not None

    def list_output(self, run: SinkRun) -> list[OutputFile]:
        """Return the table and its newest snapshot, if an earlier run of this sink has written to it."""
        settings = self.settings
        with settings.catalog.opened(settings.over(run.options)) as catalog:
            table = load_table(catalog, settings.table)
            if table is None or mark_of(run.job, run.sink, "") not in table.properties:
                return []
            return [OutputFile(settings.table, str(table.metadata.current_snapshot_id))]

    def begin_output(self, run: SinkRun) -> None:
        """Create the table, unless there is one."""
        settings = self.settings
        with settings.catalog.opened(settings.over(run.options)) as catalog:
            create_table(catalog, settings.table, settings.schema, settings.partitions)

    def commit_globally(self, commit: GlobalCommit) -> None:
        settings = self.settings
        with settings.catalog.opened(settings.over(commit.options)) as catalog:

            def version() -> IcebergVersion:
                return IcebergVersion(catalog, settings.table, settings.schema, settings.partitions)

            prefix = f"part-{tag_of(commit.job, commit.sink)}"
            self.commit_files(
                commit,
                Part,
                version,
                lambda files: _compact(catalog, settings.table, prefix, files, settings.roll_bytes),
            )


def _compact(*args: Any) -> None:
    from .compaction import compact  # which imports the library

    compact(*args)


class IcebergWriter(TableWriter):
    """Writes the files of one subtask, by the columns and partitions of the table at its start."""

    def __init__(self, settings: IcebergSettings) -> None:
        super().__init__(settings.roll_bytes, settings.buffer_bytes)
        self._settings = settings

    def prepare(self) -> None:
        from pyiceberg.io.pyarrow import (
            compute_statistics_plan,
            parquet_path_to_id_mapping,
            schema_to_pyarrow,
        )

        settings = self._settings
        with settings.catalog.opened(self._options) as catalog:
            table = existing(catalog, settings.table)
        check_fits(table, settings.table, settings.schema, settings.partitions)
        schema = table.schema()
        given = set(settings.schema.names)
        own = schema.select(*(each.name for each in schema.fields if each.name in given))
        self._stored = schema_to_pyarrow(own)  # with the numbers by which readers know the columns
        self.required = [each.name for each in own.fields if each.required]
        self._values = PartitionValues(schema, table.spec())
        self._spec = table.metadata.default_spec_id
        self._uuid = str(table.metadata.table_uuid)
        self._since = table.metadata.current_snapshot_id
        self._locations = table.location_provider()
        self._io = table.io
        self._plan = compute_statistics_plan(own, table.properties)
        self._numbers = parquet_path_to_id_mapping(own)
        self._loaded_ms = self.context.clock.now_ms()

    @property
    def _options(self) -> dict[str, str]:
        return self._settings.over(self.context.options)

    def stored(self) -> pa.Schema:
        return self._stored

    def split(self, rows: pa.RecordBatch) -> list[tuple[Key, pa.RecordBatch]]:
        rows = rows.select(self._stored.names).cast(self._stored)
        return split_by(self._values.of_rows(rows), rows)

    def move(self, file: LocalFile) -> bytes:
        from pyiceberg.io.pyarrow import data_file_statistics_from_parquet_metadata

        name = "/".join(filter(None, (self._values.path(file.key), file.name)))
        path = self._locations.new_data_location(name)
        self._look_again()
        found = data_file_statistics_from_parquet_metadata(
            pq.read_metadata(file.local), self._plan, self._numbers
        ).to_serialized_dict()
        part = Part(
            run=self.context.run_id,
            job=self.context.job_name,
            sink=self.context.operator_name,
            path=path,
            size_bytes=file.local.stat().st_size,
            rows=found.pop("record_count"),
            written_ms=self.context.clock.now_ms(),
            table=self._uuid,
            spec=self._spec,
            partition=self._values.encoded(file.key),
            since=self._since,
            statistics=Statistics(**found),
            attempt=self.context.attempt,
        )
        self._upload(file.local, path)
        return msgspec.msgpack.encode(part)

    def _upload(self, local: Path, path: str) -> None:
        from pyiceberg.io.pyarrow import PyArrowFileIO

        scheme, _, place = PyArrowFileIO.parse_location(path)
        if scheme == "file":
            copy_durably(local, Path(place))
            return
        with local.open("rb") as source, self._io.new_output(path).create(True) as output:
            shutil.copyfileobj(source, output, COPIED_BYTES)

    def _look_again(self) -> None:
        """Load the credentials of the table and its newest snapshot, if those that are known are old."""
        now_ms = self.context.clock.now_ms()
        if now_ms > self._loaded_ms + _OLD_MS:
            with self._settings.catalog.opened(self._options) as catalog:
                table = existing(catalog, self._settings.table)
                self._io, self._since = table.io, table.metadata.current_snapshot_id
            self._loaded_ms = now_ms


def iceberg_sink(
    table: str,
    *,
    catalog: Mapping[str, str],
    partition_by: str | Sequence[str] = (),
    roll_bytes: str | int = ROLL_BYTES,
    buffer: str | int = BUFFER,
    compact_files: int | None = None,
    if_exists: IfExistsLike = "error",
    storage_options: Mapping[str, str] | None = None,
) -> IcebergSink:
    """Return a sink that appends to an Iceberg table, exactly once.

    It needs `pip install 'headgate[iceberg]'`. The table is created if there is none. The rows of each
    checkpoint of all subtasks appear together, as one snapshot.

    Args:
        table: its name, `namespace.table`.
        catalog: the properties of the catalog as pyiceberg knows them: `type` (`rest` or `sql`), `uri`,
            `warehouse`, `token` and others. `env:NAME` and `file:/path` are read on each machine.
        partition_by: partitions of a table that is created: columns, `year(c)`, `month(c)`, `day(c)`,
            `hour(c)`, `bucket(16, c)`, `truncate(4, c)`. A table that is there has its own, which must be
            these; empty: whatever it has.
        roll_bytes: the size at which a file ends; one ends at each checkpoint as well.
        buffer: the most bytes of rows that wait in memory to be written, per subtask.
        compact_files: the number of small files of a partition from which on they are merged into files of
            up to `roll_bytes`, after a commit; None: they are not merged.
        if_exists: what happens if a run starts without state, and the table has rows of an earlier run of
            this sink: `error`, or `append`.
        storage_options: `s3.*` options, if they differ from the job's.

    Raises:
        UsageError: an argument is wrong. Whether the table fits is found out when the job starts.
    """
    if not isinstance(table, str) or not all(table.split(".")) or "." not in table:
        raise UsageError(
            f"not the name of a table table=`{table}`", fix='a namespace and a name: "shop.orders"'
        )
    given, policy = table_arguments(
        "Iceberg", partition_by, roll_bytes, buffer, compact_files, if_exists, storage_options
    )
    known = IcebergCatalog(with_whole_paths(catalog))
    settings = IcebergSettings(catalog=known, table=table, **given)
    return IcebergSink(settings, policy)
