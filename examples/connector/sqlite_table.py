"""A connector of one's own: a table of an SQLite database, as a source and as an exactly-once sink.

The source reads the rows in the order of their rowid, so its position is one number. The sink stages
rows beside the table, and moves them into it when their checkpoint is complete.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa

from headgate.errors import JobError, UsageError
from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.sink import DROPPED_FIX, Guarantee, Sink, SinkWriter
from headgate.operators.source import Source, SourceReader
from headgate.state.snapshot import CommitPermit

BATCH_ROWS = 1000


def connect(path: str) -> sqlite3.Connection:
    """Open the database, without making a new one."""
    try:
        return sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=60)
    except sqlite3.OperationalError as error:
        raise UsageError(f"cannot open the database `{path}`: {error}") from None


class TableSource(Source[Any]):
    """Reads the rows of a table; if `follow`, it waits for more at the end."""

    def __init__(self, path: str, table: str, schema: pa.Schema, *, follow: bool = False) -> None:
        self.path, self.table, self.schema, self.bounded = path, table, schema, not follow

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split: the rows behind rowid 0, up to the last one of now."""
        with closing(connect(self.path)) as database:
            (last,) = database.execute(f'SELECT max(rowid) FROM "{self.table}"').fetchone()
        return [json.dumps([0, (last or 0) if self.bounded else None]).encode()]

    def reader(self) -> SourceReader:
        return TableReader(self)


class TableReader(SourceReader):
    """Reads the rows behind `after` up to `last`, or without end."""

    def __init__(self, source: TableSource) -> None:
        self.source, self.after, self.last = source, 0, 0
        columns = ", ".join(f'"{name}"' for name in source.schema.names)
        where = "WHERE rowid > ? AND rowid <= ? ORDER BY rowid LIMIT ?"
        self.query = f'SELECT rowid, {columns} FROM "{source.table}" {where}'

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self.database = connect(self.source.path)
        for split in splits:
            self.after, self.last = json.loads(split)

    @property
    def finished(self) -> bool:
        return self.last is not None and self.after >= self.last

    def poll(self) -> Batch | None:
        last = 2**63 - 1 if self.last is None else self.last
        limit = min(self.rows_wanted or BATCH_ROWS, BATCH_ROWS)
        found = self.database.execute(self.query, (self.after, last, limit)).fetchall()
        if not found:  # the last rows may have been deleted
            self.after = self.after if self.last is None else self.last
            return None
        self.after = found[-1][0]
        schema = self.source.schema
        rows = [dict(zip(schema.names, row[1:], strict=True)) for row in found]
        return ColumnBatch(pa.RecordBatch.from_pylist(rows, schema=schema))

    def snapshot(self) -> list[bytes]:
        return [] if self.finished else [json.dumps([self.after, self.last]).encode()]

    def close(self) -> None:
        self.database.close()


class TableSink(Sink):
    """Appends rows to a table, exactly once."""

    guarantees = frozenset({Guarantee.EXACTLY_ONCE})
    guarantee = Guarantee.EXACTLY_ONCE
    needs_columns = True

    def __init__(self, path: str, table: str) -> None:
        self.path, self.table, self.place = path, table, f"{path}:{table}"

    def writer(self) -> SinkWriter:
        return TableWriter(self.path, self.table)


class TableWriter(SinkWriter):
    """Stages the rows of a checkpoint under a name, which is the committable."""

    def __init__(self, path: str, table: str) -> None:
        self.path, self.table, self.rows = path, table, []

    def prepare(self) -> None:
        """Delete what dead attempts have staged for checkpoints that never completed."""
        own = self.context
        with closing(connect(self.path)) as database, database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS staged (name, owner, subtask, attempt, checkpoint_id, row)"
            )
            database.execute("CREATE TABLE IF NOT EXISTS moved (writer PRIMARY KEY, checkpoint_id)")
            database.execute(
                "DELETE FROM staged WHERE owner = ? AND subtask % ? = ? AND attempt < ? "
                "AND checkpoint_id > ?",
                (
                    self.owner(),
                    own.parallelism,
                    own.subtask_index,
                    own.attempt,
                    own.restored_checkpoint,
                ),
            )

    def owner(self) -> str:
        return f"{self.context.job_name}/{self.context.operator_name}"

    def write(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)
        self.rows += [json.dumps(list(row.values())) for row in batch.data.to_pylist()]

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        rows, self.rows = self.rows, []
        key = (self.owner(), self.context.subtask_index, self.context.attempt, checkpoint_id)
        name = "/".join(map(str, (self.context.run_id, *key)))

        def stage() -> list[bytes]:
            with closing(connect(self.path)) as database, database:
                database.execute("DELETE FROM staged WHERE name = ?", (name,))
                staged = [(name, *key, row) for row in rows]
                database.executemany("INSERT INTO staged VALUES (?, ?, ?, ?, ?, ?)", staged)
            return [name.encode()]

        return stage if rows else None

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        """Move the rows in one transaction, which notes that: what was moved is not missed later."""
        with closing(connect(self.path)) as database, database:
            database.execute("BEGIN IMMEDIATE")
            for name in map(bytes.decode, committables):
                writer, _, number = name.rpartition("/")
                moved = "SELECT 1 FROM moved WHERE writer = ? AND checkpoint_id >= ?"
                if database.execute(moved, (writer, int(number))).fetchone():
                    continue
                found = database.execute("SELECT row FROM staged WHERE name = ?", (name,))
                rows = [json.loads(text) for (text,) in found.fetchall()]
                if not rows:
                    raise JobError(f"rows of a checkpoint are gone name=`{name}`", fix=DROPPED_FIX)
                places = ", ".join("?" * len(rows[0]))
                database.executemany(f'INSERT INTO "{self.table}" VALUES ({places})', rows)
                database.execute("DELETE FROM staged WHERE name = ?", (name,))
                database.execute("REPLACE INTO moved VALUES (?, ?)", (writer, int(number)))
