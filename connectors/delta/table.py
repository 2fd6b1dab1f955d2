"""A Delta table: the types of its columns, whether a stream fits it, and the commit of a checkpoint.

The log of a Delta table has a place for *transactions* of applications: a name and a number that are
written in the same atomic change as the files. They are the marks by which commits know what the table has
(`connectors/tables/commits.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from ...errors import StorageError, UsageError
from ..s3_config import without_role
from ..tables.compaction import due_merges
from ..tables.types import stored_type

if TYPE_CHECKING:
    from deltalake import DeltaTable

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
    attempt: int = 0
    """The attempt that wrote the file; 0 in committables of the first versions."""


def delta_type(type_: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type by which a Delta table holds all values of a type; None: there is none."""
    return stored_type(type_, lambda each: each if each in _SAME else _OTHERS.get(each))


def object_store_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the `s3.*` options as the names that the library of Delta knows."""
    service = without_role(options, "Delta tables")
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


def required_columns(address: str, options: Mapping[str, str]) -> set[str]:
    """Return the columns of a table that must not be null; empty if there is no table.

    Raises:
        StorageError: it cannot be read.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    with _reaching(address):
        try:
            table = DeltaTable(address, storage_options=dict(options), without_files=True)
        except TableNotFoundError:
            return set()
        return {field.name for field in table.schema().fields if not field.nullable}


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


class DeltaVersion:
    """The newest version of a table, for one commit (`tables.commits.TableVersion`)."""

    def __init__(
        self,
        address: str,
        options: Mapping[str, str],
        schema: pa.Schema,
        partition_by: Sequence[str],
    ) -> None:
        """Read it.

        Args:
            address: of the table.
            options: how the library reaches it.
            schema: the columns of the files.
            partition_by: the columns whose values separate them.

        Raises:
            StorageError: the table cannot be reached, or is gone.
        """
        table = open_table(address, options)
        if table is None:
            raise StorageError(
                f"the Delta table is gone table=`{address}`",
                fix="restore it, or create an empty one with the columns of the stream",
            )
        self._table = table
        self._address = address
        self._options = options
        self._schema = schema
        self._partition_by = partition_by

    def committed(self, mark: str, parts: Sequence[Part]) -> int | None:
        """See `TableVersion`."""
        with _reaching(self._address):
            found: int | None = self._table.transaction_version(mark)
        return found

    def check(self, parts: Sequence[Part]) -> None:
        """See `TableVersion`."""
        check_fits(self._table, self._address, self._schema, self._partition_by)

    def missing(self, paths: Sequence[str]) -> list[str]:
        """See `TableVersion`."""
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import FileType, PyFileSystem

        with _reaching(self._address):
            files: Any = PyFileSystem(DeltaStorageHandler(self._address, dict(self._options)))
            found = files.get_file_info(list(paths))
        return [each.path for each in found if each.type is FileType.NotFound]

    def add(
        self, parts: Sequence[Part], marks: Mapping[str, int], properties: Mapping[str, str]
    ) -> bool:
        """See `TableVersion`."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction

        table = self._table
        with _reaching(self._address):
            try:
                table.create_write_transaction(
                    [
                        AddAction(
                            part.path,
                            part.size_bytes,
                            part.partition,
                            part.written_ms,
                            True,
                            part.stats,
                        )
                        for part in parts
                    ],
                    "append",
                    table.schema(),
                    partition_by=list(table.metadata().partition_columns),
                    commit_properties=CommitProperties(
                        custom_metadata=dict(properties),
                        max_commit_retries=0,  # the library would not look at the marks again
                        app_transactions=[
                            Transaction(mark, id_) for mark, id_ in sorted(marks.items())
                        ],
                    ),
                )
            except CommitFailedError:
                return False
        return True


def compact(address: str, options: Mapping[str, str], files: int, limit: int) -> None:
    """Merge small files of a table, by partitions.

    Args:
        address: of the table.
        options: how the library reaches it.
        files: the number of small files of a partition from which on they are merged.
        limit: the size that files should have in the end.

    Raises:
        StorageError: the table cannot be reached, or another writer has removed one of the files.
    """
    table = open_table(address, options)
    if table is None:
        return
    with _reaching(address):
        columns = list(table.metadata().partition_columns)
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        found = [
            (
                tuple(_partition_text(each[f"partition.{name}"]) for name in columns),
                each["size_bytes"],
            )
            for each in actions
        ]
        for due in due_merges(found, files, limit):
            table.optimize.compact(
                [(name, "=", text) for name, text in zip(columns, due.partition, strict=True)],
                target_size=due.target_bytes,
                max_concurrent_tasks=1,
            )
            table.update_incremental()


def _partition_text(value: Any) -> str:
    """Return the value of a partition column in the form of the library's filters, in which null is ''."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


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
