"""The sinks of Delta and Iceberg tables as cases of the conformance kit."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from headgate.connectors import delta_sink, iceberg_sink
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.testing.connectors import Case, Feature, SinkCase
from headgate.tests.support.connector_cases import NOWHERE, PASSWORD, SCHEMA, Directory, Rows

if TYPE_CHECKING:
    from pyiceberg.table import Table


class DeltaSinkCase(Rows, Directory, SinkCase):
    """Appends to a Delta table."""

    features = frozenset({Feature.EXACTLY_ONCE, Feature.MISTAKES, Feature.CONNECTS})

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        if not DeltaTable.is_deltatable(str(place / "table")):
            write_deltalake(place / "table", SCHEMA.empty_table())
        return delta_sink(place / "table")

    def visible(self, place: Path) -> list[Any]:
        rows: list[Any] = DeltaTable(str(place / "table")).to_pyarrow_table().to_pylist()
        return rows

    def mistakes(self, place: Path) -> Mapping[str, tuple[Sink, str]]:
        other = pa.table({"id": pa.array([], pa.string()), "name": pa.array([], pa.string())})
        write_deltalake(place / "other", other)
        return {"another type": (delta_sink(place / "other"), "another type column=`id`")}


def let_readers_be(catalog: Path) -> None:
    """Create a SQLite database in which cursors that are still open do not hold up commits.

    Otherwise a cursor of the Iceberg library holds its lock until it is freed, which is seldom at once.
    """
    with closing(sqlite3.connect(catalog)) as connection:
        assert connection.execute("PRAGMA journal_mode=WAL").fetchall() == [("wal",)]


class IcebergSinkCase(Rows, Directory, SinkCase):
    """Appends to an Iceberg table whose catalog is a SQLite database."""

    features = frozenset({Feature.EXACTLY_ONCE, Feature.MISTAKES, Feature.CONNECTS})
    secrets = (PASSWORD,)

    @contextmanager
    def place(self) -> Iterator[Path]:
        with super().place() as place:
            let_readers_be(place / "catalog.db")
            yield place

    def catalog(self, place: Path) -> dict[str, str]:
        uri = f"sqlite:///{place}/catalog.db"
        return {"uri": uri, "warehouse": f"file://{place}/tables", "token": PASSWORD}

    def table(self, place: Path, name: str, schema: pa.Schema) -> Table:
        from pyiceberg.catalog import load_catalog

        with load_catalog("default", **self.catalog(place)) as catalog:
            catalog.create_namespace_if_not_exists("cases")
            return catalog.create_table_if_not_exists(f"cases.{name}", schema)

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        self.table(place, "table", SCHEMA)
        return iceberg_sink("cases.table", catalog=self.catalog(place))

    def visible(self, place: Path) -> list[Any]:
        return list(self.table(place, "table", SCHEMA).scan().to_arrow().to_pylist())

    def mistakes(self, place: Path) -> Mapping[str, tuple[Sink, str]]:
        other = pa.schema([("id", pa.string()), ("name", pa.string())])
        self.table(place, "other", other)
        catalog = self.catalog(place)
        wrong = iceberg_sink("cases.other", catalog=catalog)
        nowhere = {"uri": f"http://{NOWHERE}", "token": PASSWORD}
        return {
            "another type": (wrong, "another type column=`id`"),
            "no catalog": (iceberg_sink("cases.other", catalog=nowhere), NOWHERE),
        }


TABLES: dict[str, type[Case]] = {"delta_sink": DeltaSinkCase, "iceberg_sink": IcebergSinkCase}
