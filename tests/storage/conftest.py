"""Stores to run the same tests on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from headgate.runtime.storage.base import CheckpointStore
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.open_store import open_store


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.server)])
def make_store(request, tmp_path) -> Iterator[Callable[..., CheckpointStore]]:
    """Makes a new store object over the same durable place, as another process would."""
    uri, options = f"memory://{request.node.name}", {}
    if request.param == "local":
        uri = str(tmp_path / "checkpoints")
    elif request.param == "s3":
        server = request.getfixturevalue("s3_server")
        uri, options = server.uri, server.options
    yield lambda job="job": open_store(uri, job, options)
    for job in ("job", "other"):
        MemoryStore.forget(f"{request.node.name}/{job}")
