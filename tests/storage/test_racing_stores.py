"""Goal: a store that gives one object to two writers that create it at once is refused before a job begins.

Method: the probe on a simulated store that looks first and then writes (always the same order of events),
on a real server of that kind (versitygw, built with Go; posix backend), and on stores that are all right.
"""

from __future__ import annotations

import asyncio
import random

import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import StorageError
from headgate.runtime.job import runnable
from headgate.runtime.storage.base import Created, Existed
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.open_store import open_store
from headgate.runtime.storage.probe import probe_conditional_create, probe_races
from headgate.testing.servers import versitygw
from headgate.testing.servers.process import START_S_MAX

RACES = 32


class CheckThenWriteStore(MemoryStore):
    """Looks, waits as often as `pauses` says, and writes."""

    creates_are_atomic = False

    def __init__(self, pauses):
        super().__init__("racing", {})
        self.pauses = pauses
        self.created = 0

    async def create_if_absent(self, name, data):
        existing = self._objects.get(name)
        await self.pause()
        if existing is not None:
            return Existed(existing)
        self._objects[name] = data
        self.created += 1
        return Created()

    async def pause(self):
        for _ in range(self.pauses()):
            await asyncio.sleep(0)


class AtomicStore(CheckThenWriteStore):
    """As slow, but it looks and writes at once."""

    async def create_if_absent(self, name, data):
        await self.pause()
        return await MemoryStore.create_if_absent(self, name, data)


def race(store, races=RACES, timeout_s=60.0):
    return asyncio.run(probe_races(store, random.Random(1), races, timeout_s))


def test_a_store_that_looks_and_then_writes_passes_one_request_after_another():
    store = CheckThenWriteStore(lambda: 1)
    asyncio.run(probe_conditional_create(store, random.Random(1)))


def test_and_is_refused_when_two_writers_come_at_once():
    store = CheckThenWriteStore(lambda: 1)
    with pytest.raises(StorageError, match="two writers that created it at once"):
        race(store)
    assert not store._objects, "the probe leaves nothing"


@pytest.mark.parametrize("seed", range(20))
def test_also_if_that_happens_seldom(seed):
    """Two creates overlap in one of ten races."""
    rng = random.Random(seed)
    store = CheckThenWriteStore(lambda: int(rng.random() < 0.05))
    with pytest.raises(StorageError, match="at once"):
        race(store, races=400)


def test_a_store_that_creates_atomically_passes():
    rng = random.Random(1)
    store = AtomicStore(lambda: rng.randrange(4))
    assert race(store) == RACES
    assert not store._objects


def test_a_store_that_changes_an_object_afterwards_is_refused():
    class Careless(AtomicStore):
        async def create_if_absent(self, name, data):
            result = await super().create_if_absent(name, data)
            self._objects[name] = data
            return result

    with pytest.raises(StorageError, match="not what the writer that created it wrote"):
        race(Careless(lambda: 1))


def test_the_probe_ends_in_time_and_says_how_far_it_came(caplog):
    assert race(AtomicStore(lambda: 1), timeout_s=0.0) == 0
    assert "only 0 of 32 concurrent creates were tried" in caplog.text


@pytest.mark.parametrize("uri", ["memory://racing", "directory"])
def test_stores_that_are_atomic_by_nature_are_not_asked(uri, tmp_path, monkeypatch):
    store = open_store(uri if "://" in uri else str(tmp_path), "job", {})
    monkeypatch.setattr(type(store), "create_if_absent", None)
    assert race(store) == 0
    asyncio.run(store.close())


@pytest.mark.server
def test_moto_passes(s3_server):
    async def main():
        store = open_store(s3_server.uri, "job", s3_server.options)
        await store.open()
        try:
            assert await probe_races(store, random.Random(), RACES, 60.0) == RACES
            assert [name async for name, _ in store.list_files("")] == []
        finally:
            await store.close()

    asyncio.run(main())


# --- a real server that looks and then writes ------------------------------------------------------------


@pytest.mark.server
@pytest.mark.timeout(versitygw.BUILD_S_MAX + START_S_MAX)
def test_a_job_does_not_start_on_versitygw(gateway, tmp_path):
    job = hg.Job("refused")
    job.checkpoint(every="1s", storage=f"s3://{versitygw.BUCKET}/checkpoints")
    job.read(from_list([1, 2, 3]), name="in").write(collect(), name="out")
    runnable(job).override({**gateway, "headgate.storage.probe.races": "200"})
    with pytest.raises(StorageError, match="cannot hold checkpoints.*created it at once"):
        job.run(cluster="in-process")
    left = [path for path in (tmp_path / "objects").rglob("*.json") if "log" in path.parts]
    assert left == [], "no generation was claimed"
