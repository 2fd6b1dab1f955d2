"""Writers of tables: Parquet files on local disk, which are moved into the table at each barrier."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import DataError, InternalError
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch
from ...operators.sink import SinkWriter
from ...state.durable_files import sync
from ..files.sink import tag_of

OPEN_FILES_MAX: Final = 100
COPIED_BYTES: Final = 8 << 20
"""The most bytes that are in memory while a file is copied."""
Key = tuple[Any, ...]
"""The values that all rows of a file have in common."""


@dataclass(slots=True)
class LocalFile:
    """A file that is written locally, until it is moved into the table."""

    name: str
    local: Path
    key: Key
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


class TableWriter(SinkWriter):
    """Writes Parquet files on local disk, and moves them into the table at each barrier.

    A file that no version of the table has is not seen by its readers. Those that dead attempts leave
    behind are deleted by the tools that clean such tables, as those of all writers.

    Attributes:
        required: the columns of the table that must not be null, once `prepare` has looked.
    """

    required: Sequence[str] = ()

    def __init__(self, roll_bytes: int, buffer_bytes: int) -> None:
        self._roll_bytes = roll_bytes
        self._buffer_bytes = buffer_bytes
        self._open: dict[Key, LocalFile] = {}
        self._ended: list[LocalFile] = []
        self._count = 0
        self._waiting_bytes = 0

    def split(self, rows: pa.RecordBatch) -> list[tuple[Key, pa.RecordBatch]]:
        """Return the rows as they are stored, by the values that separate files.

        Raises:
            DataError: the table does not take a row.
            pa.ArrowInvalid: a value does not fit its column.
        """
        raise NotImplementedError

    def stored(self) -> pa.Schema:
        """Return the columns of the files."""
        raise NotImplementedError

    def move(self, file: LocalFile) -> bytes:
        """Move an ended file into the table, durably; return its committable. May be repeated."""
        raise NotImplementedError

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._prefix = (
            f"part-{tag_of(context.job_name, context.operator_name)}-"
            f"{tag_of(context.job_name, context.run_id)}-"
            f"{context.attempt:06}-{context.restored_checkpoint:09}-{context.subtask_index:05}"
        )

    def write(self, batch: Batch) -> None:
        if not isinstance(batch, ColumnBatch):
            raise InternalError("a sink of columns got objects")
        if not len(batch.data):
            return
        for name in self.required:
            if batch.data.column(name).null_count:
                raise DataError(
                    f"a required column of the table has a null column=`{name}`",
                    fix="filter such rows out, or make the column optional in the table",
                )
        try:
            split = self.split(batch.data)
        except pa.ArrowInvalid as error:
            raise DataError(f"a value does not fit the column of the table: {error}") from error
        for key, part in split:
            file = self._open.get(key) or self._begin(key)
            file.waiting.append(part)
            file.waiting_bytes += part.nbytes
            self._waiting_bytes += part.nbytes
        while self._waiting_bytes > self._buffer_bytes:
            self._flush(max(self._open.values(), key=lambda each: each.waiting_bytes))

    def _begin(self, key: Key) -> LocalFile:
        if len(self._open) >= OPEN_FILES_MAX:
            self._end(max(self._open, key=lambda each: self._open[each].rows))
        self._count += 1
        name = f"{self._prefix}-{self._count:06}.parquet"
        local = self.context.local_directory() / name
        output = pa.OSFile(str(local), "wb")
        parquet = pq.ParquetWriter(output, self.stored(), compression="zstd")
        self._open[key] = file = LocalFile(name, local, key, parquet, output)
        return file

    def _flush(self, file: LocalFile) -> None:
        self._waiting_bytes -= file.waiting_bytes
        file.flush()
        if file.output.tell() >= self._roll_bytes:
            self._end(file.key)

    def _end(self, key: Key) -> None:
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
                    made[file.name] = self.move(file)
                    file.local.unlink(missing_ok=True)
            return list(made.values())

        return move

    def close(self) -> None:
        for file in self._open.values():
            file.waiting = []
            file.close()
        for file in (*self._open.values(), *self._ended):
            file.local.unlink(missing_ok=True)
        self._open = {}


def split_by(keys: Sequence[pa.Array], rows: pa.RecordBatch) -> list[tuple[Key, pa.RecordBatch]]:
    """Return the rows of a batch, separated by the values of these columns."""
    if not keys:
        return [((), rows)]
    columns = {f"{number}": column for number, column in enumerate(keys)}
    keyed = pa.table({"row": pa.array(range(len(rows)), pa.int64()), **columns})
    groups = keyed.group_by(list(columns)).aggregate([("row", "list")])
    return [
        (tuple(group[name] for name in columns), rows.take(pa.array(group["row_list"])))
        for group in groups.to_pylist()
    ]


def copy_durably(local: Path, target: Path) -> None:
    """Copy a file within the local file systems; the copy outlives a crash of the machine."""
    made = [each for each in (target.parent, *target.parent.parents) if not each.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    with local.open("rb") as source, target.open("wb") as output:
        shutil.copyfileobj(source, output, COPIED_BYTES)
        output.flush()
        os.fsync(output.fileno())
    for directory in (target.parent, *(each.parent for each in made)):
        sync(directory)
