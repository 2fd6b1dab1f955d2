"""A server for the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.testing.servers.kinesis import KinesisServer, running
from headgate.tests.support.kinesis_cases import ENVIRONMENT
from headgate.tests.support.skips import available


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KinesisServer]:
    """A running server."""
    with available(running(tmp_path_factory.mktemp("kinesis") / "server")) as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials of the environment, which the server does not look at."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
