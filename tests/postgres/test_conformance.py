"""The sink and the sources of PostgreSQL keep all promises of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.connectors.postgres.sink import PostgresSink
from headgate.connectors.postgres.writer import PostgresWriter
from headgate.operators.sink import GuaranteeLike, Sink, SinkWriter
from headgate.testing.connectors import Check
from headgate.testing.servers.postgres import PostgresServer
from headgate.tests.support.conformance import TIMEOUT, keep, promises
from headgate.tests.support.postgres_cases import POSTGRES, PostgresSinkCase

pytestmark = TIMEOUT


class KilledWriter(PostgresWriter):
    """One whose process is killed instead of being closed: its staged rows stay."""

    def close(self) -> None:
        self._closed = True


class KilledSink(PostgresSink):
    def writer(self) -> SinkWriter:
        return KilledWriter(self.settings)


class UpsertCase(PostgresSinkCase):
    """Rows that replace others, by writers whose processes are killed."""

    columns = "id bigint PRIMARY KEY, name text"

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        made = self.table_sink(place, guarantee=guarantee, mode="upsert", key="id")
        return KilledSink(made.settings, made.guarantee)


CHECKS = promises({**POSTGRES, "upsert": UpsertCase}, {"upsert": ("once_after_any_crash",)})


@pytest.mark.parametrize(("kind", "check"), CHECKS)
def test_it_keeps_the_promise(database: PostgresServer, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(database))
