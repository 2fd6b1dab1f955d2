"""A server for the tests of a process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from headgate.testing.servers.mariadb import MariaDbServer, running
from headgate.tests.support.skips import available

_numbers = itertools.count()


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDbServer]:
    """A running server."""
    with available(running(tmp_path_factory.mktemp("mariadb"))) as server:
        yield server


@pytest.fixture
def new_table(database: MariaDbServer) -> Callable[[str], str]:
    """Creates a table with these columns and a name of its own, and returns the name."""

    def create(columns: str = "id bigint PRIMARY KEY, name varchar(50)") -> str:
        name = f"table_{next(_numbers)}"
        database.execute(f"CREATE TABLE {name} ({columns})")
        return name

    return create
