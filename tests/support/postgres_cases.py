"""The connectors of PostgreSQL as cases of the conformance kit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from headgate.connectors import postgres_cdc_source, postgres_sink, postgres_source
from headgate.connectors.postgres.sink import PostgresSink
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import Case, Feature, Server, SinkCase, SourceCase
from headgate.testing.servers.postgres import WITH_PASSWORD, PostgresServer
from headgate.tests.support.connector_cases import PASSWORD, SCHEMA, Proxied, Rows

_numbers = itertools.count()


class DatabaseTable(Proxied):
    """A table of its own for each check, on a server that is killed now and then."""

    columns = "id bigint PRIMARY KEY, name text"

    def __init__(self, database: PostgresServer) -> None:
        self.database = database
        self.server: Server | None = database
        self.port = database.port

    @property
    def dsn(self) -> str:
        return self.database.dsn.replace(str(self.database.port), str(self.port))

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case_{next(_numbers)}"
        self.database.execute(f"CREATE TABLE {name} ({self.columns})")
        yield name
        self.database.execute(f"DROP TABLE {name}")

    @property
    def wrong_password(self) -> str:
        """An address with a password that the server refuses."""
        self.database.execute(
            f"DO $$ BEGIN CREATE ROLE {WITH_PASSWORD}; CREATE ROLE ann LOGIN PASSWORD 'right' "
            f"IN ROLE {WITH_PASSWORD}; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
        )
        return self.database.dsn.replace("postgres@", f"ann:{PASSWORD}@")


class PostgresTableSource(Rows, DatabaseTable, SourceCase):
    """The rows of a table; a live source polls for new ones."""

    features = frozenset(
        {Feature.LIVE, Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS}
    )
    secrets = (PASSWORD,)

    def put(self, place: str, records: Sequence[Any]) -> None:
        for record in records:
            name = "NULL" if record["name"] is None else f"'{record['name']}'"
            self.database.execute(f"INSERT INTO {place} VALUES ({record['id']}, {name})")

    def source(self, place: str, **options: Any) -> Source:
        return postgres_source(self.dsn, place, batch_rows=1, **options)

    def live(self, place: str) -> Source:
        return self.source(place, incremental_by="id", lag="0ms", every="10ms")

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        dsn = self.database.dsn
        nowhere = dsn.replace(str(self.database.port), "1")

        def wrong(dsn: str, table: str, **options: Any) -> Source:
            return postgres_source(dsn, table, schema=SCHEMA, **options)

        return {
            "a table that does not exist": (wrong(dsn, "no_such_table"), "no_such_table"),
            "no server": (wrong(nowhere, place), "127.0.0.1:1"),
            "a wrong password": (wrong(self.wrong_password, place), "password"),
            "a column that does not exist": (wrong(dsn, place, key="idd"), "idd"),
        }


class PostgresCdcSource(Rows, DatabaseTable, SourceCase):
    """Changes of a table, from a slot that is made with it."""

    features = frozenset(
        {
            *(Feature.LIVE, Feature.CONFIRMS, Feature.SERVER),
            *(Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )
    secrets = (PASSWORD,)
    snapshot: Literal["initial", "never"] = "never"

    def __init__(self, database: PostgresServer) -> None:
        super().__init__(database)
        self.places: list[int] = []
        """For each row that was put, a place in the log in its transaction."""

    @contextmanager
    def place(self) -> Iterator[str]:
        self.places = []
        with super().place() as name:
            self.source(name).splits(1)
            yield name
            self.database.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                f"WHERE slot_name = '{name}' AND active"
            )
            while self.database.execute(
                f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{name}' AND active"
            ):
                time.sleep(0.01)
            self.database.execute(
                f"SELECT pg_drop_replication_slot('{name}')", f"DROP PUBLICATION {name}"
            )

    def records(self) -> list[dict[str, Any]]:
        return super().records()[:8]  # the more, the more often a slot is left and taken

    def put(self, place: str, records: Sequence[Any]) -> None:
        for record in records:
            name = "NULL" if record["name"] is None else f"'{record['name']}'"
            ((lsn,),) = self.database.execute(
                f"WITH put AS (INSERT INTO {place} VALUES ({record['id']}, {name}) RETURNING id) "
                "SELECT pg_current_wal_insert_lsn() - '0/0' FROM put"
            )
            self.places.append(int(lsn))

    def source(self, place: str, **options: Any) -> Source:
        given = {"slot": place, "stop": "latest", "batch_rows": 1, "snapshot": self.snapshot}
        made = postgres_cdc_source(self.dsn, place, **(given | options))
        return made.with_columns(["id", "name"])

    def live(self, place: str) -> Source:
        return self.source(place, stop=None)

    def confirmed(self, place: str) -> int:
        ((lsn,),) = self.database.execute(
            "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots "
            f"WHERE slot_name = '{place}'"
        )
        return sum(each < lsn for each in self.places)

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        dsn, schema = self.database.dsn, SCHEMA
        nowhere = dsn.replace(str(self.database.port), "1")

        def wrong(dsn: str, table: str, **options: Any) -> Source:
            return postgres_cdc_source(dsn, table, slot="wrong", schema=schema, **options)

        return {
            "a table that does not exist": (wrong(dsn, "no_such_table"), "no_such_table"),
            "no server": (wrong(nowhere, place), "127.0.0.1:1"),
            "a wrong password": (wrong(self.wrong_password, place), "password"),
            "no slot": (wrong(dsn, place, publication=place, create=False), "no such slot"),
        }


class PostgresSinkCase(Rows, DatabaseTable, SinkCase):
    """Rows that are appended, staged or at least once."""

    columns = "id bigint, name text"
    features = frozenset(
        {
            *(Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE, Feature.PENDING),
            *(Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )
    secrets = (PASSWORD,)

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return self.table_sink(place, guarantee=guarantee)

    def table_sink(self, place: str, **options: Any) -> PostgresSink:
        return postgres_sink(self.dsn, place, **options)

    def visible(self, place: str) -> list[Any]:
        rows = self.database.execute(f"SELECT id, name FROM {place} ORDER BY id")
        return [{"id": number, "name": name} for number, name in rows]

    def pending(self, place: str) -> Sequence[Any]:
        return self.database.execute("SELECT relname FROM pg_class WHERE relname LIKE 'hg\\_%'")

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        dsn = self.database.dsn
        nowhere = dsn.replace(str(self.database.port), "1")
        return {
            "a table that does not exist": (postgres_sink(dsn, "no_such_table"), "no_such_table"),
            "no server": (postgres_sink(nowhere, place), "127.0.0.1:1"),
            "a wrong password": (postgres_sink(self.wrong_password, place), "password"),
        }


POSTGRES: dict[str, type[Case]] = {
    "postgres_source": PostgresTableSource,
    "postgres_cdc_source": PostgresCdcSource,
    "postgres_sink": PostgresSinkCase,
}
