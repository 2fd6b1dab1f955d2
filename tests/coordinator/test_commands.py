"""The target of a client's savepoint is checked before anything happens to the job."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.errors import UsageError
from headgate.runtime.coordinator.commands import savepoint_target
from headgate.runtime.coordinator.environment import ClientCommand
from headgate.runtime.options.registry import Options
from headgate.runtime.storage.open_store import open_store_at


def target(directory: str, **options: str) -> str:
    env: Any = SimpleNamespace(
        options=Options(options),
        spec=SimpleNamespace(name="job", options=options),
        open_at=open_store_at,
    )

    async def main() -> str:
        answer = asyncio.get_running_loop().create_future()
        return savepoint_target(env, ClientCommand("stop", answer, {"savepoint": directory}))

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("directory", "begins"),
    [
        ("/data/kept/", "/data/kept/savepoint-job-"),
        ("/", "/savepoint-job-"),
        ("file:///data", "file:///data/savepoint-job-"),
        ("memory://kept", "memory://kept/savepoint-job-"),
    ],
)
def test_it_is_a_new_directory_below_the_one_named(directory: str, begins: str) -> None:
    assert target(directory).startswith(begins)
    assert target(directory) != target(directory)


@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("gs://bucket/kept", "scheme=`gs`"),
        ("s3://", "empty"),
        ("file://data/kept", "three slashes"),
    ],
)
def test_an_address_that_nobody_understands_is_refused(directory: str, why: str) -> None:
    """Each subtask would find out for itself, with the sources of a stopping job silent already."""
    with pytest.raises(UsageError, match=why):
        target(directory)
