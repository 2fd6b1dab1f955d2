"""A Delta table: the types of its columns, whether a stream fits it, and the commit of a checkpoint.

The log of a Delta table has a place for *transactions* of applications: a name and a number that are
written in the same atomic change as the files. The name is that of the run of the job, and the number that
of the checkpoint. A commit first looks what the table has, and leaves out what is there. It is written only
if no other writer was faster; otherwise it looks again. So it may be repeated by anybody at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from ...errors import JobError, PlanError, StorageError, UsageError
from ...operators.clock import SystemClock
from ...operators.sink import EpochOutput
from ..s3_config import s3_service

if TYPE_CHECKING:
    from deltalake import DeltaTable

_OLD_MS: Final = 3_600_000
"""Files that are committed later than this are looked for before, as `VACUUM` may have deleted them."""
COMMITS_MAX: Final = 50
"""The number of times in a row that other writers of the table may be faster."""
_SAFE_FEATURES: Final = frozenset(
    {
        *("appendOnly", "changeDataFeed", "deletionVectors", "domainMetadata"),
        *("timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "inCommitTimestamp"),
    }
)
"""Features of a table that ask nothing of a writer that only adds files."""
_SAME: Final = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.binary(), pa.date32()),
)
_OTHERS: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A committable: a durable file that is not in the log of the table yet."""

    run: str
    path: str
    size_bytes: int
    rows: int
    written_ms: int
    partition: dict[str, str | None]
    """The values of the partition columns, as text."""
    stats: str
    """The statistics by which readers skip the file, as JSON."""
    job: str = ""
    """The job whose run wrote the file; empty in committables of the first versions."""
    sink: str = ""
    """The name of the sink's step in that job."""


def delta_type(type_: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type by which a Delta table holds all values of a type; None: there is none."""
    if type_ in _SAME:
        return type_
    if type_ in _OTHERS:
        return _OTHERS[type_]
    if pa.types.is_timestamp(type_) and type_.unit != "ns":
        return pa.timestamp("us", None if type_.tz is None else "UTC")
    if pa.types.is_decimal128(type_):
        return type_
    if pa.types.is_dictionary(type_):
        return delta_type(type_.value_type)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = delta_type(type_.value_type)
        return None if inner is None else pa.list_(pa.field("element", inner))
    if pa.types.is_map(type_):
        key, item = delta_type(type_.key_type), delta_type(type_.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if pa.types.is_struct(type_):
        fields = [(field.name, delta_type(field.type)) for field in type_]
        return None if any(each is None for _, each in fields) else pa.struct(fields)
    return None


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a table for a stream.

    Raises:
        PlanError: there is no type for a column.
    """
    fields = []
    for field in schema:
        made = delta_type(field.type)
        if made is None:
            raise PlanError(
                f"Delta has no type for this column column=`{field.name}` type=`{field.type}`",
                fix="cast it, such as a timestamp to microseconds, or select it out",
            )
        fields.append(pa.field(field.name, made))
    return pa.schema(fields)


def object_store_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the `s3.*` options as the names that the library of Delta knows."""
    service = s3_service(options)
    found = {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": str(not service.path_style).lower()}
    if service.endpoint:
        found["AWS_ENDPOINT_URL"] = service.endpoint
        found["AWS_ALLOW_HTTP"] = str(service.endpoint.startswith("http://")).lower()
    if service.region or service.endpoint:
        found["AWS_REGION"] = service.region or "us-east-1"
    return found


@contextmanager
def _reaching(address: str) -> Iterator[None]:
    """Turn errors of the library into StorageError."""
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (DeltaError, OSError) as error:
        first = str(error).strip().partition("\n")[0]
        raise StorageError(
            f"the Delta table cannot be reached table=`{address}`: {first}",
            fix="check the address, the credentials and the rights",
        ) from error


def open_table(address: str, options: Mapping[str, str]) -> DeltaTable | None:
    """Return the newest version of a table; None: there is no table.

    Raises:
        StorageError: it cannot be read.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    with _reaching(address):
        try:
            return DeltaTable(address, storage_options=dict(options))
        except TableNotFoundError:
            return None


def create_table(
    address: str, schema: pa.Schema, partition_by: Sequence[str], options: Mapping[str, str]
) -> None:
    """Create an empty table unless there is one.

    Raises:
        StorageError: it cannot be created.
    """
    from deltalake import DeltaTable, Schema

    with _reaching(address):
        DeltaTable.create(
            address,
            schema=Schema.from_arrow(schema),
            mode="ignore",
            partition_by=list(partition_by),
            storage_options=dict(options),
        )


def check_fits(
    table: DeltaTable, address: str, schema: pa.Schema, partition_by: Sequence[str]
) -> None:
    """Check that files with these columns can be added to a table.

    Raises:
        UsageError: the table has other columns, other partitions, or rules that headgate does not check.
    """
    there = {field.name: field for field in pa.schema(table.schema().to_arrow())}
    for field in schema:
        own = there.pop(field.name, None)
        if own is None:
            raise UsageError(
                f"the table has no such column column=`{field.name}` table=`{address}`",
                fix="add the column to the table, or select it out of the stream",
            )
        wanted = delta_type(own.type)
        if wanted != field.type:
            raise UsageError(
                f"the column of the table has another type column=`{field.name}` table=`{own.type}` "
                f"stream=`{field.type}`",
                fix="cast the column of the stream",
            )
    needed = [name for name, field in there.items() if not field.nullable]
    if needed:
        raise UsageError(
            f"the stream lacks columns that must not be null columns=`{', '.join(needed)}`",
            fix="add them to the stream",
        )
    found = table.metadata().partition_columns
    if list(found) != list(partition_by):
        raise UsageError(
            f"the table has other partitions table=`{', '.join(found)}` sink=`{', '.join(partition_by)}`",
            fix=f"partition_by={list(found)!r}",
        )
    _check_rules(table, address)


def _check_rules(table: DeltaTable, address: str) -> None:
    configuration = table.metadata().configuration
    rules = [
        key
        for key in configuration
        if key.startswith("delta.constraints.")
        or (key == "delta.columnMapping.mode" and configuration[key] != "none")
    ]
    features = table.protocol().writer_features or []
    if table.protocol().min_writer_version >= 7:
        rules += [feature for feature in features if feature not in _SAFE_FEATURES]
    if rules:
        raise UsageError(
            f"the table has rules for its writers that headgate does not keep table=`{address}` "
            f"rules=`{', '.join(sorted(set(rules)))}`",
            fix="write into a table without them, and copy from there",
        )


def application(job: str, sink: str, run: str) -> str:
    """Return the name under which a run records its checkpoints in the log of a table."""
    return f"headgate/{job}/{sink}/{run}"


def _mark(part: Part, job: str, sink: str) -> str:
    """Return the name under which the run that wrote a file has recorded its checkpoints.

    A job of another name may have been started with a savepoint that holds the file. Then the run that
    wrote it has perhaps committed it, under the name of its own job.
    """
    return application(part.job or job, part.sink or sink, part.run)


def commit_parts(
    address: str,
    options: Mapping[str, str],
    job: str,
    sink: str,
    epochs: Sequence[EpochOutput],
    check: Callable[[DeltaTable], None],
) -> None:
    """Add the files of some checkpoints to the log of a table, unless it has them. May be repeated.

    Args:
        address: of the table.
        options: how the library reaches it.
        job: the name of the job.
        sink: the name of the sink's step.
        epochs: the files.
        check: raises an error if the table does not take the files any more.

    Raises:
        StorageError: the table cannot be reached, is gone, or others write to it all the time.
        JobError: the files are gone.
    """
    parts = [
        (epoch.checkpoint_id, msgspec.msgpack.decode(data, type=Part))
        for epoch in epochs
        for data in epoch.committables
    ]
    marks = {_mark(part, job, sink) for _, part in parts}
    for _ in range(COMMITS_MAX):
        table = open_table(address, options)
        if table is None:
            raise StorageError(
                f"the Delta table is gone table=`{address}`",
                fix="restore it, or create an empty one with the columns of the stream",
            )
        with _reaching(address):
            committed = {mark: table.transaction_version(mark) or 0 for mark in marks}
            due = [(id_, part) for id_, part in parts if id_ > committed[_mark(part, job, sink)]]
            if not due:
                return
            check(table)
            _check_there(address, options, [part for _, part in due])
            newest: dict[str, int] = {}
            for id_, part in due:
                mark = _mark(part, job, sink)
                newest[mark] = max(newest.get(mark, 0), id_)
            # A run without state looks whether any run of this sink has written here.
            newest[application(job, sink, "")] = max(newest.values())
            if _add(table, [part for _, part in due], newest, job, sink):
                return
    raise StorageError(
        f"other writers of the Delta table were faster {COMMITS_MAX} times table=`{address}`"
    )


def _add(
    table: DeltaTable, parts: Sequence[Part], marks: Mapping[str, int], job: str, sink: str
) -> bool:
    """Add files and marks to the log of a table in one change; False: another writer was faster."""
    from deltalake import CommitProperties, Transaction
    from deltalake.exceptions import CommitFailedError
    from deltalake.transaction import AddAction

    try:
        table.create_write_transaction(
            [
                AddAction(
                    part.path, part.size_bytes, part.partition, part.written_ms, True, part.stats
                )
                for part in parts
            ],
            "append",
            table.schema(),
            partition_by=list(table.metadata().partition_columns),
            commit_properties=CommitProperties(
                custom_metadata={"headgate.job": job, "headgate.sink": sink},
                max_commit_retries=0,  # the library would not look at the marks again
                app_transactions=[Transaction(mark, id_) for mark, id_ in sorted(marks.items())],
            ),
        )
    except CommitFailedError:
        return False
    return True


def _check_there(address: str, options: Mapping[str, str], parts: Sequence[Part]) -> None:
    """Check that old files are there: with one that is not, nobody could read the table any more.

    Raises:
        JobError: one is not.
    """
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import FileType, PyFileSystem

    now_ms = SystemClock().now_ms()
    old = [part.path for part in parts if part.written_ms < now_ms - _OLD_MS]
    if not old:
        return
    files: Any = PyFileSystem(DeltaStorageHandler(address, dict(options)))
    gone = [each.path for each in files.get_file_info(old) if each.type is FileType.NotFound]
    if gone:
        raise JobError(
            f"files of a checkpoint are not in the directory of the table any more table=`{address}` "
            f"files=`{len(gone)}` first=`{gone[0]}`",
            fix="`VACUUM` deletes files that are not in the log when they are a week old: restore an older "
            "checkpoint, or give the sink another name and allow non-restored state",
        )


def stats_of(metadata: Any, rows: int) -> str:
    """Return the statistics of a Parquet file for the log of a table, as JSON.

    Only values that Parquet and Delta order in the same way are given: whole numbers, and texts that are
    short enough to be there whole.

    Args:
        metadata: the `pyarrow.parquet.FileMetaData` of the file.
        rows: the number of its rows.
    """
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    for index, name in enumerate(names):
        if "." in name:
            continue
        groups = [
            metadata.row_group(group).column(index).statistics
            for group in range(metadata.num_row_groups)
        ]
        if not groups or any(each is None or not each.has_null_count for each in groups):
            continue
        nulls[name] = sum(each.null_count for each in groups)
        full = [each for each in groups if each.null_count < each.num_values + each.null_count]
        if not full or any(not each.has_min_max for each in full):
            continue
        low, high = min(each.min for each in full), max(each.max for each in full)
        if all(_comparable(value) for value in (low, high)):
            least[name], most[name] = low, high
    return msgspec.json.encode(
        {"numRecords": rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    ).decode()


def _comparable(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= 32 and value.isascii()
    return isinstance(value, int) and not isinstance(value, bool)
