"""The kit's checks of the example connector: `pytest examples/connector`."""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent))

import sqlite_table
from sqlite_table import TableSink, TableSource

from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import Feature, SinkCase, SourceCase, connector_tests

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


class _Table:
    """The common part of the cases of source and sink: a database in a directory of its own."""

    @contextmanager
    def place(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/rows.db"
            with closing(sqlite3.connect(path)) as database:
                database.execute("CREATE TABLE t (id, name)")
                database.execute("PRAGMA journal_mode = wal")
            yield path

    def records(self) -> list[dict[str, Any]]:
        return [{"id": n, "name": f"name {n}"} for n in range(12)]


class TableSourceCase(_Table, SourceCase):
    features = frozenset({Feature.LIVE, Feature.MISTAKES})

    def put(self, place: str, records: Sequence[Any]) -> None:
        with closing(sqlite3.connect(place)) as database, database:
            database.executemany("INSERT INTO t VALUES (:id, :name)", records)

    def source(self, place: str) -> Source:
        sqlite_table.BATCH_ROWS = 1  # so that it is stopped behind each row
        return TableSource(place, "t", SCHEMA)

    def live(self, place: str) -> Source:
        return TableSource(place, "t", SCHEMA, follow=True)

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        return {"another file": (TableSource("/no/such.db", "t", SCHEMA), "unable to open")}


class TableSinkCase(_Table, SinkCase):
    features = frozenset({Feature.EXACTLY_ONCE, Feature.PENDING, Feature.MISTAKES})

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        pairs = [records[at : at + 2] for at in range(0, len(records), 2)]
        return [ColumnBatch(pa.RecordBatch.from_pylist(list(p), schema=SCHEMA)) for p in pairs]

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return TableSink(place, "t")

    def visible(self, place: str) -> list[Any]:
        with closing(sqlite3.connect(place)) as database:
            found = database.execute("SELECT id, name FROM t").fetchall()
        return [{"id": id_, "name": name} for id_, name in found]

    def pending(self, place: str) -> Sequence[Any]:
        with closing(sqlite3.connect(place)) as database:
            return database.execute("SELECT name FROM staged").fetchall()

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        return {"another file": (TableSink("/no/such.db", "t"), "unable to open")}


globals().update(connector_tests(TableSourceCase))
globals().update(connector_tests(TableSinkCase, thorough=True))
