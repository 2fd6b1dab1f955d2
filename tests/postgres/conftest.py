"""A server for the tests of a process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from headgate.testing.servers.postgres import PostgresServer, running
from headgate.tests.support.skips import available

_numbers = itertools.count()


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A running server."""
    with available(running(tmp_path_factory.mktemp("postgres"))) as server:
        yield server


@pytest.fixture
def new_table(database: PostgresServer) -> Callable[[str], str]:
    """Creates a table with these columns and a name of its own, and returns the name."""

    def create(columns: str = "id bigint PRIMARY KEY, name text") -> str:
        name = f"table_{next(_numbers)}"
        database.execute(f"CREATE TABLE {name} ({columns})")
        return name

    return create
