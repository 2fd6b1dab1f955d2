"""An Iceberg table: the types of its columns, whether a stream fits it, and the commit of a checkpoint.

The marks by which commits know what the table has (`connectors/tables/commits.py`) are in the summary of
the snapshot that has the files, and among the properties of the table, which the same change sets:
snapshots expire, and properties do not. If both are lost, nobody knows whether the table has the files, and
the commit fails.

The library by itself would repeat a commit that has lost a race, without a look at the marks. Then a commit
that is late adds its files once more. So it is not allowed to repeat any.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from ...errors import JobError, StorageError, UsageError
from ..tables.types import stored_type
from .catalog import load_table
from .partitions import Partition, PartitionValues, add_partitions, partitions_of

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

_SAME: Final = (
    *(pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()),
    *(pa.string(), pa.binary(), pa.date32(), pa.time64("us")),
)
_OTHERS: Final = {
    pa.int8(): pa.int32(),
    pa.int16(): pa.int32(),
    pa.uint8(): pa.int32(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.time32("s"): pa.time64("us"),
    pa.time32("ms"): pa.time64("us"),
}
_WIDER: Final = {(pa.int32(), pa.int64()), (pa.float32(), pa.float64())}
_MERGED: Final = "commit.manifest-merge.enabled"


class Statistics(msgspec.Struct, frozen=True, array_like=True):
    """The statistics of a file for its manifest, by the numbers of its columns."""

    column_sizes: dict[int, int]
    value_counts: dict[int, int]
    null_value_counts: dict[int, int]
    nan_value_counts: dict[int, int]
    lower_bounds: dict[int, bytes]
    upper_bounds: dict[int, bytes]
    split_offsets: list[int]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A committable: a durable file that no snapshot of the table has yet."""

    run: str
    job: str
    sink: str
    path: str
    size_bytes: int
    rows: int
    written_ms: int
    table: str
    """The UUID of the table whose columns the file has."""
    spec: int
    """The number of the partition spec of the table by which the file was made."""
    partition: list[bytes | None]
    """The values of the partitions."""
    since: int | None
    """The newest snapshot before the file was made; None: the table had none."""
    statistics: Statistics
    attempt: int = 0
    """The attempt that wrote the file; 0 in committables of the first versions."""


def iceberg_type(type_: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type by which an Iceberg table holds all values of a type; None: there is none."""

    def primitive(each: pa.DataType) -> pa.DataType | None:
        fixed = pa.types.is_fixed_size_binary(each)
        return each if each in _SAME or fixed else _OTHERS.get(each)

    return stored_type(type_, primitive)


def _holds(table: pa.DataType | None, stream: pa.DataType) -> bool:
    """Return True if a column of a table holds all values of a column of a stream (`iceberg_type`)."""
    if table is None:
        return False
    if table == stream or (stream, table) in _WIDER:
        return True
    if pa.types.is_decimal(table) and pa.types.is_decimal(stream):
        return bool(table.scale == stream.scale and table.precision >= stream.precision)
    if pa.types.is_list(table) and pa.types.is_list(stream):
        return _holds(table.value_type, stream.value_type)
    if pa.types.is_map(table) and pa.types.is_map(stream):
        same_key = _holds(table.key_type, stream.key_type)
        return same_key and _holds(table.item_type, stream.item_type)
    if pa.types.is_struct(table) and pa.types.is_struct(stream):
        return [each.name for each in table] == [each.name for each in stream] and all(
            _holds(own.type, given.type) for own, given in zip(table, stream, strict=True)
        )
    return False


def check_fits(
    table: Table, name: str, schema: pa.Schema, partition_by: Sequence[Partition]
) -> None:
    """Check that rows with these columns can be added to a table.

    Args:
        table: the newest version of the table.
        name: its name, for errors.
        schema: the columns.
        partition_by: the partitions that the user expects; empty: any.

    Raises:
        UsageError: the table has other columns or partitions.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.table.metadata import SUPPORTED_TABLE_FORMAT_VERSION

    version = table.metadata.format_version
    if version > SUPPORTED_TABLE_FORMAT_VERSION:
        raise UsageError(
            f"the library of Iceberg cannot write to tables of this format version table=`{name}` "
            f"version=`{version}`",
            fix=f"write into a table of version {SUPPORTED_TABLE_FORMAT_VERSION}",
        )
    there = {field.name: field for field in table.schema().fields}
    arrow = schema_to_pyarrow(table.schema(), include_field_ids=False)
    for field in schema:
        own = there.pop(field.name, None)
        if own is None:
            raise UsageError(
                f"the table has no such column column=`{field.name}` table=`{name}`",
                fix="add the column to the table, or select it out of the stream",
            )
        stored = arrow.field(field.name).type
        if not _holds(iceberg_type(stored), field.type):
            raise UsageError(
                f"the column of the table has another type column=`{field.name}` "
                f"table=`{own.field_type}` stream=`{field.type}`",
                fix="cast the column of the stream",
            )
        if _must_be_there(stored):
            raise UsageError(
                f"a part of the column must not be null, which headgate does not check "
                f"column=`{field.name}` type=`{own.field_type}`",
                fix="make the part optional in the table",
            )
    needed = [
        each.name for each in there.values() if each.required or each.write_default is not None
    ]
    if needed:
        raise UsageError(
            "the stream lacks columns that must not be null, or have a default "
            f"columns=`{', '.join(needed)}`",
            fix="add them to the stream",
        )
    found = partitions_of(table.schema(), table.spec())
    if partition_by and list(partition_by) != found:
        raise UsageError(
            f"the table has other partitions table=`{', '.join(map(str, found))}` "
            f"sink=`{', '.join(map(str, partition_by))}`",
            fix=f"partition_by={[str(each) for each in found]!r}",
        )


def _must_be_there(type_: pa.DataType) -> bool:
    """Return True if a type has parts that must not be null. Keys of maps do not count: they never are."""
    if pa.types.is_map(type_):
        return not type_.item_field.nullable or _must_be_there(type_.item_type)
    if pa.types.is_large_list(type_) or pa.types.is_list(type_):
        return not type_.value_field.nullable or _must_be_there(type_.value_type)
    if pa.types.is_struct(type_):
        return any(not each.nullable or _must_be_there(each.type) for each in type_)
    return False


def create_table(
    catalog: Catalog, name: str, schema: pa.Schema, partition_by: Sequence[Partition]
) -> None:
    """Create an empty table, and its namespace, unless there is one."""
    from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError

    if load_table(catalog, name) is not None:
        return
    namespace = name.rpartition(".")[0]
    if not catalog.namespace_exists(namespace):  # creating one is a right of its own
        catalog.create_namespace_if_not_exists(namespace)
    try:
        transaction = catalog.create_table_transaction(name, schema)
        with transaction.update_spec() as update:
            add_partitions(update, partition_by)
        transaction.commit_transaction()
    except (TableAlreadyExistsError, CommitFailedException):
        if load_table(catalog, name) is None:  # otherwise another coordinator has created it
            raise


class IcebergVersion:
    """The newest version of a table, for one commit (`tables.commits.TableVersion`)."""

    def __init__(
        self, catalog: Catalog, name: str, schema: pa.Schema, partition_by: Sequence[Partition]
    ) -> None:
        """Read it.

        Args:
            catalog: has the table.
            name: of the table.
            schema: the columns of the files.
            partition_by: the partitions that the user expects; empty: any.

        Raises:
            StorageError: the table is gone.
        """
        self._table = existing(catalog, name)
        self._catalog = catalog
        self._name = name
        self._schema = schema
        self._partition_by = partition_by

    def committed(self, mark: str, parts: Sequence[Part]) -> int | None:
        """See `TableVersion`."""
        for part in parts:
            self._check_same(part)
        known = [self._table.properties.get(mark)]
        known += [each.summary[mark] for each in self._table.metadata.snapshots if each.summary]
        found = max((int(text) for text in known if text), default=None)
        if found is None and not self._has_marks(mark, parts):
            for part in parts:
                self._check_history(mark, part)
        return found

    def _has_marks(self, mark: str, parts: Sequence[Part]) -> bool:
        """Return True if the table has marks of a run among its properties: then it has all of them."""
        run = mark.removesuffix(f"/{parts[0].attempt}")
        return any(name == run or name.startswith(f"{run}/") for name in self._table.properties)

    def _check_same(self, part: Part) -> None:
        """Raise JobError if a file was made for another table, whose columns have other numbers."""
        if part.table != str(self._table.metadata.table_uuid):
            raise JobError(
                f"the table was replaced by another one of the same name table=`{self._name}`",
                fix="restore the former table; or give the sink another name and allow non-restored "
                "state, which gives up what was not committed",
            )

    def _check_history(self, mark: str, part: Part) -> None:
        """Check that all snapshots since a file was made are known, so that none has the file.

        Raises:
            JobError: some of them were expired, and the table has no mark.
        """
        if part.since is not None:
            if self._table.metadata.snapshot_by_id(part.since) is not None:
                return
        else:
            oldest = self._table.current_snapshot()
            while oldest is not None and oldest.parent_snapshot_id is not None:
                before = self._table.metadata.snapshot_by_id(oldest.parent_snapshot_id)
                if before is None:
                    break
                oldest = before
            if oldest is None or oldest.parent_snapshot_id is None:
                return
        raise JobError(
            "nobody knows whether the table has the files of this run, as its history has expired "
            f"table=`{self._name}` property=`{mark}` first=`{part.path}`",
            fix="look whether the table has their rows, and set this property of the table: to the number "
            "of the newest checkpoint of the run whose rows it has, or to 0 if it has none",
        )

    def check(self, parts: Sequence[Part]) -> None:
        """See `TableVersion`."""
        for part in parts:
            if part.spec != self._table.metadata.default_spec_id:
                raise JobError(
                    "the table got other partitions before files of the former ones were committed "
                    f"table=`{self._name}` first=`{part.path}`",
                    fix="give the table its former partitions, stop the job with a savepoint, and change "
                    "them then",
                )
            self._check_columns(part)
        check_fits(self._table, self._name, self._schema, self._partition_by)

    def _check_columns(self, part: Part) -> None:
        """Raise JobError if a column of a file was removed: one of the same name has another number."""
        schema = self._table.schema()
        gone = [id_ for id_ in part.statistics.column_sizes if schema.find_column_name(id_) is None]
        if gone:
            raise JobError(
                "a column of the table was removed before files with it were committed: readers would "
                f"see nulls table=`{self._name}` number=`{gone[0]}` first=`{part.path}`",
                fix="give the sink another name and allow non-restored state, which gives up what was not "
                "committed; next time stop the job with a savepoint before the change",
            )

    def missing(self, paths: Sequence[str]) -> list[str]:
        """See `TableVersion`."""
        return [path for path in paths if not self._table.io.new_input(path).exists()]

    def add(
        self, parts: Sequence[Part], marks: Mapping[str, int], properties: Mapping[str, str]
    ) -> bool:
        """See `TableVersion`."""
        from pyiceberg.exceptions import CommitFailedException
        from sqlalchemy.exc import OperationalError

        marked = {mark: str(id_) for mark, id_ in marks.items()}
        transaction = self._table.transaction()
        update = transaction.update_snapshot(snapshot_properties={**properties, **marked})
        merged = str(self._table.properties.get(_MERGED, "false")).lower() == "true"
        with update.merge_append() if merged else update.fast_append() as append:
            for part in parts:
                append.append_data_file(self._data_file(part))
        transaction.set_properties(marked)
        # Without its producers the library neither repeats the commit nor deletes their manifests. A
        # commit of which a proxy says that it has failed may be in the table, and needs them.
        producers, transaction._snapshot_producers = transaction._snapshot_producers, []
        locked = False
        try:
            transaction.commit_transaction()
            return True
        except CommitFailedException:
            pass
        except OperationalError as error:
            if not (locked := "database is locked" in str(error.orig)):
                raise
        if locked:
            # The connection whose commit has failed is in the pool with its lock of the file. A cursor of
            # this process that is in a circle of references, as with a traceback, keeps its lock as well,
            # until the collector runs.
            self._catalog.close()
            gc.collect()
        newest = existing(self._catalog, self._name)
        if newest.metadata.snapshot_by_id(append.snapshot_id) is None:
            for producer in producers:
                producer._clean_all_uncommitted()
        return False

    def _data_file(self, part: Part) -> DataFile:
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

        values = PartitionValues(self._table.schema(), self._table.spec())
        file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=part.path,
            file_format=FileFormat.PARQUET,
            partition=values.decoded(part.partition),
            record_count=part.rows,
            file_size_in_bytes=part.size_bytes,
            sort_order_id=None,
            equality_ids=None,
            key_metadata=None,
            **msgspec.structs.asdict(part.statistics),
        )
        file.spec_id = part.spec
        return file


def existing(catalog: Catalog, name: str) -> Table:
    """Return the newest version of a table.

    Raises:
        StorageError: there is no table.
    """
    table = load_table(catalog, name)
    if table is None:
        raise StorageError(
            f"the Iceberg table is gone table=`{name}`",
            fix="restore it, or create an empty one with the columns of the stream",
        )
    return table
