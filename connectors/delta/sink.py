"""A Delta table as a sink: all subtasks write files, and the coordinator commits each checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import PlanError
from ...operators.base import OperatorContext
from ...operators.sink import (
    GlobalCommit,
    IfExists,
    IfExistsLike,
    OutputFile,
    SinkRun,
    SinkWriter,
    stream_columns,
)
from ..files.locations import (
    PathLike,
    address_of,
    check_directory,
    filesystem,
    parse_location,
)
from ..tables.commits import mark_of
from ..tables.sink import (
    BUFFER,
    ROLL_BYTES,
    TableSettings,
    TableSink,
    check_column,
    table_arguments,
)
from ..tables.types import stored_schema
from ..tables.writer import COPIED_BYTES, Key, LocalFile, TableWriter, copy_durably, split_by
from .table import (
    DeltaVersion,
    Part,
    check_fits,
    compact,
    create_table,
    delta_type,
    object_store_options,
    open_table,
    required_columns,
    stats_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSettings(TableSettings):
    """The settings of a sink.

    Attributes:
        address: a local directory or an s3:// address.
    """

    address: str

    @property
    def remote(self) -> bool:
        """Whether the table is not in a local directory."""
        return parse_location(self.address).scheme != "file"

    def library_options(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return how the library reaches the table, in a job with these options."""
        if not self.remote:
            return {}
        return object_store_options(self.over(options))


class DeltaSink(TableSink[DeltaSettings]):
    """One table, to which rows are appended."""

    format = "Delta"

    def __init__(self, settings: DeltaSettings, if_exists: IfExists) -> None:
        super().__init__(settings, settings.address, if_exists)
        self.extras = ("delta", "s3") if settings.remote else ("delta",)

    def bind(self, schema: pa.Schema | None) -> None:
        columns = stored_schema(stream_columns(schema, "rows of a table"), delta_type, "Delta")
        for name in self.settings.partition_by:
            kind = check_column(columns, name).type
            if not (pa.types.is_integer(kind) or kind in (pa.string(), pa.bool_(), pa.date32())):
                raise PlanError(
                    f"a table cannot be partitioned by this type column=`{name}` type=`{kind}`",
                    fix="use a text, a whole number, a truth value or a date, such as the day of a time",
                )
        if len(self.settings.partition_by) == len(columns):
            raise PlanError(
                "all columns are partition columns", fix="leave one out of partition_by="
            )
        self.settings = replace(self.settings, columns=columns)

    def writer(self) -> SinkWriter:
        return DeltaWriter(self.settings)

    def check_connection(self, options: Mapping[str, str]) -> str:
        settings = self.settings
        found = check_directory(settings.address, settings.over(options))
        if self.check_table(options):
            return "the table takes the columns"
        return f"the table does not exist yet; {found}"

    def check_table(self, options: Mapping[str, str]) -> bool:
        settings = self.settings
        table = open_table(settings.address, settings.library_options(options))
        if table is not None:
            check_fits(table, settings.address, settings.schema, settings.partition_by)
        return table is not None

    def list_output(self, run: SinkRun) -> list[OutputFile]:
        """Return the version of the table, if an earlier run of this sink has written to it."""
        settings = self.settings
        table = open_table(settings.address, settings.library_options(run.options))
        mark = mark_of(run.job, run.sink, "")
        if table is None or table.transaction_version(mark) is None:
            return []
        return [OutputFile(settings.address, str(table.version()))]

    def begin_output(self, run: SinkRun) -> None:
        """Create the table, unless there is one."""
        settings = self.settings
        create_table(
            settings.address,
            settings.schema,
            settings.partition_by,
            settings.library_options(run.options),
        )

    def commit_globally(self, commit: GlobalCommit) -> None:
        settings = self.settings
        options = settings.library_options(commit.options)

        def version() -> DeltaVersion:
            return DeltaVersion(settings.address, options, settings.schema, settings.partition_by)

        self.commit_files(
            commit,
            Part,
            version,
            lambda files: compact(settings.address, options, files, settings.roll_bytes),
        )


class DeltaWriter(TableWriter):
    """Writes the files of one subtask. Partition columns are in their entries in the log, not in them."""

    def __init__(self, settings: DeltaSettings) -> None:
        super().__init__(settings.roll_bytes, settings.buffer_bytes)
        self._settings = settings
        self._schema = settings.schema
        self._stored = pa.schema(
            [each for each in self._schema if each.name not in settings.partition_by]
        )

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._options = self._settings.over(context.options)

    def prepare(self) -> None:
        settings = self._settings
        library_options = settings.library_options(self.context.options)
        required = required_columns(settings.address, library_options)
        self.required = [name for name in self._schema.names if name in required]

    def stored(self) -> pa.Schema:
        return self._stored

    def split(self, rows: pa.RecordBatch) -> list[tuple[Key, pa.RecordBatch]]:
        rows = rows.cast(self._schema)
        # Whole numbers, truth values and dates have the form that the log of a Delta table wants.
        texts = [rows.column(name).cast(pa.string()) for name in self._settings.partition_by]
        return split_by(texts, rows.select(self._stored.names))

    def move(self, file: LocalFile) -> bytes:
        part = Part(
            run=self.context.run_id,
            path=file.name,
            size_bytes=file.local.stat().st_size,
            rows=file.rows,
            written_ms=self.context.clock.now_ms(),
            partition=dict(zip(self._settings.partition_by, file.key, strict=True)),
            stats=stats_of(pq.read_metadata(file.local), file.rows),
            job=self.context.job_name,
            sink=self.context.operator_name,
            attempt=self.context.attempt,
        )
        table = parse_location(self._settings.address)
        if table.scheme == "file":
            copy_durably(file.local, Path(table.path) / file.name)
        else:
            files = filesystem(table.scheme, self._options)
            with (
                file.local.open("rb") as source,
                files.open_output_stream(f"{table.path}/{file.name}") as output,
            ):
                shutil.copyfileobj(source, output, COPIED_BYTES)
        return msgspec.msgpack.encode(part)


def delta_sink(
    path: PathLike,
    *,
    partition_by: str | Sequence[str] = (),
    roll_bytes: str | int = ROLL_BYTES,
    buffer: str | int = BUFFER,
    compact_files: int | None = None,
    if_exists: IfExistsLike = "error",
    storage_options: Mapping[str, str] | None = None,
) -> DeltaSink:
    """Return a sink that appends to a Delta table, exactly once. It needs `pip install 'headgate[delta]'`.

    The table is created if there is none. The rows of each checkpoint of all subtasks appear together.

    Args:
        path: the table: a local directory, or `s3://bucket/prefix`.
        partition_by: columns by whose values the files are separated.
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
    address = address_of(path)
    given, policy = table_arguments(
        "Delta", partition_by, roll_bytes, buffer, compact_files, if_exists, storage_options
    )
    return DeltaSink(DeltaSettings(address=str(parse_location(address)), **given), policy)
