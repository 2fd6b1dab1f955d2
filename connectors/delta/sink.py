"""A Delta table as a sink: all subtasks write files, and the coordinator commits each checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import DataError, InternalError, PlanError, UsageError
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch
from ...operators.sink import (
    GlobalCommit,
    Guarantee,
    IfExists,
    IfExistsLike,
    OutputFile,
    Sink,
    SinkRun,
    SinkWriter,
    parse_if_exists,
)
from ...operators.sizes import parse_size
from ..files.locations import PathLike, address_of, check_storage_options, parse_location
from ..files.sink import tag_of
from ..rows import check_count
from .table import (
    Part,
    application,
    check_fits,
    commit_parts,
    create_table,
    delta_schema,
    object_store_options,
    open_table,
    stats_of,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable

ROLL_BYTES: Final = "128mb"
BUFFER: Final = "64mb"
OPEN_FILES_MAX: Final = 100
_CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class DeltaSettings:
    """The settings of a sink.

    Attributes:
        address: a local directory or an s3:// address.
        partition_by: the columns whose values files are separated by.
        roll_bytes: the size at which a file ends.
        buffer_bytes: the most bytes of rows that wait in memory to be written, per subtask.
        storage_options: `s3.*` options, if they differ from the job's.
        columns: the columns of the table that the stream has.
    """

    address: str
    partition_by: tuple[str, ...]
    roll_bytes: int
    buffer_bytes: int
    storage_options: dict[str, str]
    columns: pa.Schema | None = None

    @property
    def remote(self) -> bool:
        """Whether the table is not in a local directory."""
        return parse_location(self.address).scheme != "file"

    def library_options(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return how the library reaches the table, in a job with these options."""
        if not self.remote:
            return {}
        return object_store_options({**options, **self.storage_options})

    @property
    def schema(self) -> pa.Schema:
        """The columns, once the sink is bound to a stream."""
        if self.columns is None:
            raise InternalError("the sink is not bound")
        return self.columns


class DeltaSink(Sink):
    """One table, to which rows are appended."""

    guarantees = frozenset({Guarantee.EXACTLY_ONCE})
    guarantee = Guarantee.EXACTLY_ONCE
    needs_columns = True
    commits_globally = True

    def __init__(self, settings: DeltaSettings, if_exists: IfExists) -> None:
        self.settings = settings
        self.if_exists = if_exists
        self.place = settings.address
        self.extras = ("delta", "s3") if settings.remote else ("delta",)

    def bind(self, schema: pa.Schema | None) -> None:
        if schema is None:
            raise PlanError(
                "a table is made of columns, and this stream is of Python objects",
                fix="add into=<a Struct class or schema> to the map before it",
            )
        columns = delta_schema(schema)
        for name in self.settings.partition_by:
            at = columns.get_field_index(name)
            if at < 0:
                raise PlanError(
                    f"no such column partition_by=`{name}`",
                    fix=f"one of: {', '.join(columns.names)}",
                )
            kind = columns.field(at).type
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

    def check_output(self, run: SinkRun) -> None:
        settings = self.settings
        if IfExists.OVERWRITE in (run.if_exists, self.if_exists):
            raise UsageError(
                f"rows of a Delta table are not replaced table=`{settings.address}`",
                fix='if_exists="append", or delete the rows with another tool first',
            )
        table = open_table(settings.address, settings.library_options(run.options))
        if table is not None:
            check_fits(table, settings.address, settings.schema, settings.partition_by)

    def list_output(self, run: SinkRun) -> list[OutputFile]:
        """Return the version of the table, if an earlier run of this sink has written to it."""
        settings = self.settings
        table = open_table(settings.address, settings.library_options(run.options))
        mark = application(run.job, run.sink, "")
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

        def check(table: DeltaTable) -> None:
            check_fits(table, settings.address, settings.schema, settings.partition_by)

        commit_parts(settings.address, options, commit.job, commit.sink, commit.epochs, check)

    def describe(self) -> str:
        return f"delta({self.settings.address})"


@dataclass(slots=True)
class _File:
    """A file that is written locally, until it is moved into the table."""

    name: str
    local: Path
    partition: dict[str, str | None]
    parquet: pq.ParquetWriter
    output: pa.NativeFile
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_bytes: int = 0
    rows: int = 0

    def flush(self) -> None:
        """Write the rows that wait in memory."""
        if self.waiting:
            table = pa.Table.from_batches(self.waiting)
            self.parquet.write_table(table)
            self.rows += len(table)
            self.waiting, self.waiting_bytes = [], 0

    def close(self) -> None:
        """End the file."""
        self.flush()
        self.parquet.close()
        self.output.close()


class DeltaWriter(SinkWriter):
    """Writes Parquet files on local disk, and moves them into the table at each barrier.

    A file without an entry in the log of the table is not seen by its readers. Those that dead attempts
    leave behind are deleted by `VACUUM`, as those of all writers of Delta tables.
    """

    def __init__(self, settings: DeltaSettings) -> None:
        self._settings = settings
        self._schema = settings.schema
        self._stored = pa.schema(
            [each for each in self._schema if each.name not in settings.partition_by]
        )
        self._open: dict[tuple[str | None, ...], _File] = {}
        self._ended: list[_File] = []
        self._count = 0
        self._waiting_bytes = 0

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._options = self._settings.library_options(context.options)
        self._prefix = (
            f"part-{tag_of(context.job_name, context.operator_name)}-"
            f"{tag_of(context.job_name, context.run_id)}-"
            f"{context.attempt:06}-{context.restored_checkpoint:09}-{context.subtask_index:05}"
        )

    def write(self, batch: Batch) -> None:
        if not isinstance(batch, ColumnBatch):
            raise InternalError("a sink of columns got objects")
        try:
            rows = batch.data.cast(self._schema)
        except pa.ArrowInvalid as error:
            raise DataError(f"a value does not fit the column of the table: {error}") from error
        for key, part in self._split(rows):
            file = self._open.get(key) or self._begin(key)
            file.waiting.append(part)
            file.waiting_bytes += part.nbytes
            self._waiting_bytes += part.nbytes
        while self._waiting_bytes > self._settings.buffer_bytes:
            self._flush(max(self._open.values(), key=lambda each: each.waiting_bytes))

    def _split(self, rows: pa.RecordBatch) -> list[tuple[tuple[str | None, ...], pa.RecordBatch]]:
        """Return the rows by the values of the partition columns, without these columns."""
        if not len(rows):
            return []
        names = self._settings.partition_by
        stored = rows.select(self._stored.names)
        if not names:
            return [((), stored)]
        # Whole numbers, truth values and dates have the form that the log of a Delta table wants.
        texts = [rows.column(name).cast(pa.string()) for name in names]
        columns = {f"{number}": text for number, text in enumerate(texts)}
        keyed = pa.table({"row": pa.array(range(len(rows)), pa.int64()), **columns})
        groups = keyed.group_by(list(columns)).aggregate([("row", "list")])
        return [
            (tuple(group[name] for name in columns), stored.take(pa.array(group["row_list"])))
            for group in groups.to_pylist()
        ]

    def _begin(self, key: tuple[str | None, ...]) -> _File:
        if len(self._open) >= OPEN_FILES_MAX:
            self._end(max(self._open, key=lambda each: self._open[each].rows))
        self._count += 1
        name = f"{self._prefix}-{self._count:06}.parquet"
        local = self.context.local_directory() / name
        output = pa.OSFile(str(local), "wb")
        parquet = pq.ParquetWriter(output, self._stored, compression="zstd")
        partition = dict(zip(self._settings.partition_by, key, strict=True))
        self._open[key] = file = _File(name, local, partition, parquet, output)
        return file

    def _flush(self, file: _File) -> None:
        self._waiting_bytes -= file.waiting_bytes
        file.flush()
        if file.output.tell() >= self._settings.roll_bytes:
            self._end(next(key for key, each in self._open.items() if each is file))

    def _end(self, key: tuple[str | None, ...]) -> None:
        file = self._open.pop(key)
        self._waiting_bytes -= file.waiting_bytes
        file.close()
        self._ended.append(file)

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        for key in list(self._open):
            self._end(key)
        ended, self._ended = self._ended, []
        if not ended:
            return None
        made: dict[str, bytes] = {}

        def move() -> list[bytes]:
            for file in ended:
                if file.name not in made:
                    made[file.name] = self._move(file)
            return list(made.values())

        return move

    def _move(self, file: _File) -> bytes:
        """Move an ended file into the table, durably; return its committable."""
        part = Part(
            run=self.context.run_id,
            path=file.name,
            size_bytes=file.local.stat().st_size,
            rows=file.rows,
            written_ms=self.context.clock.now_ms(),
            partition=file.partition,
            stats=stats_of(pq.read_metadata(file.local), file.rows),
            job=self.context.job_name,
            sink=self.context.operator_name,
        )
        if self._settings.remote:
            _upload(self._settings.address, self._options, file.local, file.name)
        else:
            _copy(file.local, Path(parse_location(self._settings.address).path) / file.name)
        file.local.unlink(missing_ok=True)
        return msgspec.msgpack.encode(part)

    def close(self) -> None:
        for file in self._open.values():
            file.waiting = []
            file.close()
        for file in (*self._open.values(), *self._ended):
            file.local.unlink(missing_ok=True)
        self._open = {}


def _copy(local: Path, target: Path) -> None:
    with local.open("rb") as source, target.open("wb") as output:
        shutil.copyfileobj(source, output, _CHUNK_BYTES)
        output.flush()
        os.fsync(output.fileno())
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _upload(address: str, options: Mapping[str, str], local: Path, name: str) -> None:
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    filesystem: Any = PyFileSystem(DeltaStorageHandler(address, dict(options)))
    with local.open("rb") as source, filesystem.open_output_stream(name) as output:
        shutil.copyfileobj(source, output, _CHUNK_BYTES)


def delta_sink(
    path: PathLike,
    *,
    partition_by: str | Sequence[str] = (),
    roll_bytes: str | int = ROLL_BYTES,
    buffer: str | int = BUFFER,
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
        if_exists: what happens if a run starts without state, and the table has rows of an earlier run of
            this sink: `error`, or `append`.
        storage_options: `s3.*` options, if they differ from the job's.

    Raises:
        UsageError: an argument is wrong. Whether the table fits is found out when the job starts.
    """
    address = address_of(path)
    parse_location(address)
    policy = parse_if_exists(if_exists)
    if policy is IfExists.OVERWRITE:
        raise UsageError(
            "rows of a Delta table are not replaced if_exists=`overwrite`", fix='if_exists="append"'
        )
    columns = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
    if len(set(columns)) < len(columns):
        raise UsageError(f"a column is named twice partition_by=`{', '.join(columns)}`")
    sizes = {"roll_bytes": roll_bytes, "buffer": buffer}
    known = {
        name: parse_size(size, name) if isinstance(size, str) else size
        for name, size in sizes.items()
    }
    for name, size in known.items():
        check_count(name, size, 1)
    location = parse_location(address)
    settings = DeltaSettings(
        str(location),
        columns,
        known["roll_bytes"],
        known["buffer"],
        check_storage_options(storage_options),
    )
    return DeltaSink(settings, policy)
