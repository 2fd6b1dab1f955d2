"""The sink and the sources of PostgreSQL keep all promises of the conformance kit."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from headgate.connectors.postgres.sink import PostgresSink
from headgate.connectors.postgres.writer import PostgresWriter
from headgate.operators.sink import GuaranteeLike, Sink, SinkWriter
from headgate.testing.connectors import Check, SourceCase, sink_checks, source_checks
from headgate.testing.servers.postgres import PostgresServer
from headgate.tests.support.postgres_cases import POSTGRES, PostgresSinkCase

SLOW = ("once_after_any_two_crashes",)
"""These take a minute and more."""
THOROUGH = bool(os.environ.get("HEADGATE_THOROUGH"))
SECONDS_MAX = 1200 if THOROUGH else 240
pytestmark = pytest.mark.timeout(SECONDS_MAX + 60)


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


UPSERT_CHECKS = ("once_after_any_crash",)
CASES = {**POSTGRES, "upsert": UpsertCase}


def applying() -> list[Any]:
    return [
        pytest.param(kind, check, id=f"{name}-{check.name}")
        for name, kind in CASES.items()
        for check in (source_checks() if issubclass(kind, SourceCase) else sink_checks())
        if check.applies_to(kind) and (name in POSTGRES or check.name in UPSERT_CHECKS)
    ]


@pytest.mark.parametrize(("kind", "check"), applying())
def test_it_keeps_the_promise(database: PostgresServer, kind: type[Any], check: Check[Any]) -> None:
    if check.name in SLOW and not THOROUGH:
        pytest.skip("it takes minutes: make test-all, or HEADGATE_THOROUGH=1")

    async def guarded() -> None:
        async with asyncio.timeout(SECONDS_MAX):
            await check.run(kind(database))

    asyncio.run(guarded())
