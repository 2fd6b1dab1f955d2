"""Probes, while a store is opened, the one guarantee that everything relies on."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Final

from ...errors import StorageError
from ..protocol import names
from .base import CheckpointStore, Created, Existed

WAVE: Final = 8
"""The number of concurrent races: together they reveal more than one after the other."""
_log = logging.getLogger("headgate.storage")


async def probe_conditional_create(store: CheckpointStore, rng: random.Random) -> None:
    """Create one object twice; the second try must be refused and leave the first bytes unchanged.

    Raises:
        StorageError: the store ignored the condition. On such a store two coordinators could both
            complete a checkpoint, and a job would lose or repeat records.
    """
    name = names.probe(f"{rng.getrandbits(128):032x}")
    first, second = b'{"probe":1}', b'{"probe":2}'
    try:
        created = await store.create_if_absent(name, first)
        repeated = await store.create_if_absent(name, second)
        kept = await store.read(name)
    finally:
        await store.delete(name)
    if not isinstance(created, Created):
        raise _unsafe(store, "it says that a new object had existed already")
    if isinstance(repeated, Created) or kept != first:
        raise _unsafe(store, "it ignored the condition and overwrote an object")
    if repeated.data != first:
        raise _unsafe(store, "it does not return what was last written")


async def probe_races(
    store: CheckpointStore, rng: random.Random, races: int, timeout_s: float
) -> int:
    """Have two writers create the same object at once, many times; exactly one must succeed each time.

    A server that first checks and then writes passes the probe above. This one detects it unless
    all races happen to go well, so it is improbable, but not impossible, that such a store is
    accepted.

    Args:
        store: any; one whose creates are atomic by nature is not asked.
        rng: for names.
        races: the number of contested objects; `WAVE` at a time.
        timeout_s: no more races begin after this time.

    Returns:
        The number of races that were run.

    Raises:
        StorageError: an object was given to two writers, or to none, or changed afterwards.
    """
    if store.creates_are_atomic:
        return 0
    tokens = [names.probe(f"{rng.getrandbits(128):032x}") for _ in range(races)]
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    for start in range(0, races, WAVE):
        if loop.time() >= until:
            _log.warning(
                "only %d of %d concurrent creates were tried on %s: it is slow",
                start,
                races,
                store.describe(),
            )
            return start
        wave = tokens[start : start + WAVE]
        try:
            problems = await asyncio.gather(*(_race(store, name) for name in wave))
        finally:
            await store.delete_files(wave)
        for problem in filter(None, problems):
            raise _unsafe(store, problem)
    return races


async def _race(store: CheckpointStore, name: str) -> str:
    """Return the mistake of the store when two writers created `name` at once; empty: there was none."""
    bodies = [b'{"probe":%d}' % number for number in (1, 2)]
    results: Sequence[Created | Existed] = await asyncio.gather(
        *(store.create_if_absent(name, body) for body in bodies)
    )
    kept = await store.read(name)
    winners = [body for body, r in zip(bodies, results, strict=True) if isinstance(r, Created)]
    if len(winners) > 1:
        return "it gave one object to two writers that created it at once"
    if not winners:
        return "it refused both of two writers that created an object at once"
    told = [result.data for result in results if isinstance(result, Existed)]
    if kept != winners[0] or told != winners:
        return "an object is not what the writer that created it wrote"
    return ""


def _unsafe(store: CheckpointStore, why: str) -> StorageError:
    return StorageError(
        f"this store cannot hold checkpoints: create-if-absent does not work on it, {why}",
        where=store.describe(),
        fix="use a store that honours `If-None-Match: *` on PutObject, also for concurrent requests "
        "(Amazon S3, MinIO since 2024-11, Cloudflare R2), check that no proxy in between strips the "
        "header, or use a directory",
    )
