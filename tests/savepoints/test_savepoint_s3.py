"""Savepoints on S3: taken, restored, claimed, and unfinished ones told from others."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.errors import StateError
from headgate.runtime.protocol import names
from headgate.runtime.savepoint import store as savepoints
from headgate.runtime.storage.open_store import open_store_at

ROWS, KEYS = 1_200, 50


def make_job(server: Any, sink: Any, parallelism: int, *, rate: float | None) -> hg.Job:
    job = hg.Job("job", parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="500ms", storage=server.uri)
    job.options.update(server.options)
    (
        job.read(numbers(ROWS, rate=rate, batch_rows=20, splits=6), name="numbers")
        .map(lambda n: (n % KEYS, 1))
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1]), name="count")
        .write(sink, name="out")
    )
    return job


async def listed(server: Any, address: str) -> list[str]:
    async with savepoints.opened(open_store_at, address, server.options, writable=False) as store:
        return sorted([name async for name, _ in store.list_files("")])


async def remove(server: Any, address: str, name: str) -> None:
    async with savepoints.opened(open_store_at, address, server.options, writable=False) as store:
        await store.delete(name)


def test_a_savepoint_on_s3(lab: Any, s3_server: Any) -> None:
    sink, taken = collect(guarantee="exactly_once"), []
    target = f"s3://{s3_server.bucket}/kept"

    async def script(job: Any) -> None:
        await job.checkpoint()
        taken.append((await job.request("savepoint", savepoint=target))["savepoint"])
        taken.append((await job.request("stop", savepoint=target))["savepoint"])

    lab.run(make_job(s3_server, sink, 2, rate=300), script)
    spare, last = taken
    assert asyncio.run(listed(s3_server, last))[0] == names.SAVEPOINT_METADATA

    ran = lab.run(make_job(s3_server, sink, 3, rate=None), restore_from=last, claim=True)
    assert ran.outcome.status == "FINISHED"
    assert Counter(sink.rows) == Counter((n % KEYS, n // KEYS + 1) for n in range(ROWS))
    assert asyncio.run(listed(s3_server, last)) == []

    asyncio.run(remove(s3_server, spare, names.SAVEPOINT_METADATA))
    with pytest.raises(StateError, match="unfinished"):
        asyncio.run(savepoints.dispose(open_store_at, spare, s3_server.options))
    asyncio.run(savepoints.dispose(open_store_at, spare, s3_server.options, unfinished=True))
    assert asyncio.run(listed(s3_server, spare)) == []
