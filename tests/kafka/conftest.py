"""A broker for the tests of a process."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headgate.testing.servers.kafka import KafkaServer, running
from headgate.tests.support.skips import available
from headgate.tests.support.threads import begun

_numbers = itertools.count()
thorough_only = pytest.mark.skipif(
    not os.environ.get("HEADGATE_THOROUGH"),
    reason="it takes a minute: make test-all, or HEADGATE_THOROUGH=1",
)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A running broker."""
    with available(running(tmp_path_factory.mktemp("kafka") / "broker")) as server:
        yield server


@pytest.fixture
def new_topic(broker: KafkaServer) -> Callable[..., str]:
    """Creates a topic with a name of its own, and returns the name."""

    def create(partitions: int = 1, **config: str) -> str:
        name = f"topic-{next(_numbers)}"
        settings = {key.replace("_", "."): value for key, value in config.items()}
        broker.create_topic(name, partitions, settings)
        return name

    return create


@contextlib.contextmanager
def broker_killed_at(mark: Path, broker: KafkaServer) -> Iterator[None]:
    """Kill the broker and start it again as soon as the block has made the file `mark`."""
    over = threading.Event()

    def trouble() -> None:
        while not mark.exists() and not over.is_set():
            time.sleep(0.001)
        broker.kill()
        broker.start()

    killer = begun(trouble)
    try:
        yield
    finally:
        over.set()
        killer.result()
    assert mark.exists(), "the broker was not killed while the job ran"
