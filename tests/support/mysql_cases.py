"""The source of MySQL and MariaDB as a case of the conformance kit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from headgate.connectors import mysql_cdc_source
from headgate.connectors.mysql.cdc_model import Position
from headgate.connectors.mysql.cdc_source import CdcSource
from headgate.connectors.mysql.log import file_number, place_of
from headgate.operators.source import Source
from headgate.testing.connectors import Case, Feature, Server, SourceCase
from headgate.testing.servers.mariadb import MariaDbServer
from headgate.tests.support.connector_cases import PASSWORD, SCHEMA, Proxied, Rows

_numbers = itertools.count()


class ChangesSince(CdcSource):
    """Changes since a place in the log, instead of those since the job was started."""

    def __init__(self, made: CdcSource, place: int) -> None:
        super().__init__(made.settings, made.rows)
        self._place = place

    def splits(self, parallelism: int) -> list[bytes]:
        position = msgspec.msgpack.decode(super().splits(parallelism)[0], type=Position)
        return [msgspec.msgpack.encode(msgspec.structs.replace(position, confirmed=self._place))]


def log_end(database: MariaDbServer) -> int:
    """Return the place at which the log ends now."""
    *_, (file, size, *_) = database.execute("SHOW BINARY LOGS")
    return place_of(file_number(file), int(size))


class MySqlCdcSource(Rows, Proxied, SourceCase):
    """Changes of a table of its own for each check, on a server that is killed now and then."""

    features = frozenset(
        {Feature.LIVE, Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS}
    )
    secrets = (PASSWORD,)

    def __init__(self, database: MariaDbServer) -> None:
        self.database = database
        self.server: Server | None = database
        self.port = database.port
        self.begin = 0
        """The place in the log at which the table was made."""

    @property
    def url(self) -> str:
        return self.database.url.replace(str(self.database.port), str(self.port))

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case_{next(_numbers)}"
        self.database.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, name varchar(50))")
        self.begin = log_end(self.database)
        yield name
        self.database.execute(f"DROP TABLE {name}")

    def records(self) -> list[dict[str, Any]]:
        return super().records()[:5]  # the more, the more often the log is opened

    def put(self, place: str, records: Sequence[Any]) -> None:
        for record in records:
            name = "NULL" if record["name"] is None else f"'{record['name']}'"
            self.database.execute(f"INSERT INTO {place} VALUES ({record['id']}, {name})")

    def source(self, place: str, **options: Any) -> Source:
        given = {"stop": "latest", "batch_rows": 1, "snapshot": "never"}
        made = mysql_cdc_source(self.url, place, **(given | options))
        return ChangesSince(made, self.begin).with_columns(["id", "name"])

    def live(self, place: str) -> Source:
        return self.source(place, stop=None)

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        url = self.database.url
        nowhere = url.replace(str(self.database.port), "1")

        def wrong(url: str, table: str) -> Source:
            return mysql_cdc_source(url, table, schema=SCHEMA)

        return {
            "a table that does not exist": (wrong(url, "no_such_table"), "no_such_table"),
            "no server": (wrong(nowhere, place), "127.0.0.1:1"),
            "a wrong password": (
                wrong(url.replace("root@", f"root:{PASSWORD}@"), place),
                "Access denied",
            ),
        }


MYSQL: dict[str, type[Case]] = {"mysql_cdc_source": MySqlCdcSource}
