"""Compaction of an Iceberg table (`connectors/tables/compaction.py`).

The rows of small files are copied into larger ones, and one snapshot replaces the former by the latter. It
is valid only for the snapshot that was read, so it never brings back rows that others delete meanwhile. Its
kind is `replace`, which readers of the changes of a table pass over. The library makes no such snapshots by
itself: it is one that overwrites, under the other name.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import (
    ArrowScan,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles

from ...errors import StorageError
from ...operators.private_directory import own_directory
from ..tables.compaction import MERGED_BYTES_MAX, Merge, due_merges
from ..tables.writer import COPIED_BYTES
from .table import existing

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import FileScanTask, Table

_GROUP_BYTES: Final = 64 << 20
"""The size in memory of the rows that are written together."""


class _ReplaceFiles(_OverwriteFiles):  # type: ignore[misc]
    """Replaces files by others with the same rows."""

    def _summary(self, *args: Any, **options: Any) -> Summary:
        summary = super()._summary(*args, **options)
        return Summary(Operation.REPLACE, **summary.additional_properties)


def compact(catalog: Catalog, name: str, prefix: str, files: int, limit: int) -> None:
    """Merge small files of a table, by partitions, in one snapshot.

    Files of former partitions of the table, and those with rows that were deleted, stay as they are.

    Args:
        catalog: has the table.
        name: of the table.
        prefix: begins the names of the files.
        files: the number of small files of a partition from which on they are merged.
        limit: the size that files should have in the end.

    Raises:
        StorageError: another writer was faster.
    """
    table = existing(catalog, name)
    if table.metadata.current_snapshot_id is None:
        return
    spec = table.metadata.default_spec_id
    tasks: dict[Any, list[FileScanTask]] = {}
    for task in table.scan().plan_files():
        parquet = task.file.file_format == FileFormat.PARQUET
        if parquet and task.file.spec_id == spec and not task.delete_files:
            tasks.setdefault(task.file.partition, []).append(task)
    found = [
        (partition, task.file.file_size_in_bytes)
        for partition, each in tasks.items()
        for task in each
    ]
    due = due_merges(found, files, limit)
    if due:
        _replace(catalog, table, name, prefix, list(_groups(tasks, due)))


def _groups(
    tasks: dict[Any, list[FileScanTask]], due: Sequence[Merge[Any]]
) -> Iterator[list[FileScanTask]]:
    """Yield the files that are merged into one: several, and together not larger than is wanted.

    What would be more than `MERGED_BYTES_MAX` waits for a later commit, but for the first ones.
    """
    merged_bytes = 0
    for size, group in _all_groups(tasks, due):
        merged_bytes += size
        if size < merged_bytes > MERGED_BYTES_MAX:
            return
        yield group


def _all_groups(
    tasks: dict[Any, list[FileScanTask]], due: Sequence[Merge[Any]]
) -> Iterator[tuple[int, list[FileScanTask]]]:
    """Yield the files that are merged into one, with their size."""
    for merge in due:
        group: list[FileScanTask] = []
        size = 0
        for task in tasks[merge.partition]:
            more = task.file.file_size_in_bytes
            if more >= merge.target_bytes / 2:
                continue
            if size + more > merge.target_bytes:
                yield size, group
                group, size = [], 0
            group.append(task)
            size += more
        if len(group) > 1:
            yield size, group


def _replace(
    catalog: Catalog, table: Table, name: str, prefix: str, groups: list[list[FileScanTask]]
) -> None:
    """Write the larger files, and replace the small ones by them."""
    transaction = table.transaction()
    replace = _ReplaceFiles(operation=Operation.OVERWRITE, transaction=transaction, io=table.io)
    merged: list[DataFile] = []
    try:
        with own_directory(Path(gettempdir()), "headgate-compaction-") as directory:
            for group in groups:
                local = Path(directory, f"{prefix}-merged-{secrets.token_hex(8)}.parquet")
                merged.append(_merge(table, local, group))
                local.unlink()
        with replace:
            for file in merged:
                replace.append_data_file(file)
            for group in groups:
                for task in group:
                    replace.delete_data_file(task.file)
    except BaseException:
        _delete(table, merged)
        raise
    # As in `IcebergVersion.add`: the library must not repeat the commit.
    producers, transaction._snapshot_producers = transaction._snapshot_producers, []
    try:
        transaction.commit_transaction()
    except CommitFailedException as error:
        newest = existing(catalog, name)
        if newest.metadata.snapshot_by_id(replace.snapshot_id) is None:
            for producer in producers:
                producer._clean_all_uncommitted()
            _delete(table, merged)
        raise StorageError(f"another writer of the table was faster: {error}") from error


def _delete(table: Table, merged: Sequence[DataFile]) -> None:
    """Delete files that no snapshot has. Tools that clean tables delete those that remain."""
    for file in merged:
        with suppress(Exception):
            table.io.delete(file.file_path)


def _merge(table: Table, local: Path, group: list[FileScanTask]) -> DataFile:
    """Write the rows of some files of a partition into one; return its entry for a manifest."""
    schema = table.schema()
    scan = ArrowScan(table.metadata, table.io, schema, AlwaysTrue())
    stored = schema_to_pyarrow(schema)
    with pq.ParquetWriter(local, stored, compression="zstd") as writer:
        waiting: list[Any] = []
        size = 0
        for task in group:
            found = scan.to_table([task]).cast(stored)
            waiting.append(found)
            size += found.nbytes
            if size >= _GROUP_BYTES:
                writer.write_table(pa.concat_tables(waiting))
                waiting, size = [], 0
        if waiting:
            writer.write_table(pa.concat_tables(waiting))
    plan = compute_statistics_plan(schema, table.properties)
    numbers = parquet_path_to_id_mapping(schema)
    statistics = data_file_statistics_from_parquet_metadata(pq.read_metadata(local), plan, numbers)
    first = group[0].file
    spec = table.spec()
    directory = spec.partition_to_path(first.partition, schema) if spec.fields else ""
    path = table.location_provider().new_data_location(
        "/".join(filter(None, (directory, local.name)))
    )
    with local.open("rb") as source, table.io.new_output(path).create() as output:
        shutil.copyfileobj(source, output, COPIED_BYTES)
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=first.partition,
        file_size_in_bytes=local.stat().st_size,
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )
    file.spec_id = first.spec_id
    return file
