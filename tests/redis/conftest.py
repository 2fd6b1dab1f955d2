"""A server for the tests of a process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headgate.testing.servers.process import HeldPort
from headgate.testing.servers.redis import RedisServer, running
from headgate.tests.support.skips import available

_numbers = itertools.count()
LOOKS_MAX = 6_000


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A running server."""
    with available(running(tmp_path_factory.mktemp("redis") / "server")) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def cluster(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A cluster of one node."""
    directory = tmp_path_factory.mktemp("redis") / "node"
    # By default the port of the cluster is 10,000 higher, and so perhaps none at all.
    with (
        HeldPort() as port,
        running(directory, "--cluster-enabled", "yes", "--cluster-port", str(port)) as node,
    ):
        with node.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            for _ in range(LOOKS_MAX):
                if b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"):
                    break
                time.sleep(0.01)
        yield node


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with server.client() as made:
        yield made


@pytest.fixture
def new_stream() -> Callable[[], str]:
    """Returns the name of a stream that does not exist."""
    return lambda: f"stream-{next(_numbers)}"
