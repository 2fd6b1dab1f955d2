"""Small state of the subtasks of a worker is written together, and nobody is left waiting for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headgate.errors import StorageError
from headgate.runtime.protocol import names
from headgate.runtime.storage.base import FileContent
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.task.local_files import SnapshotTarget
from headgate.runtime.task.segments import (
    Pieces,
    Places,
    SegmentKey,
    SegmentSettings,
    SegmentWriter,
)

ROOTS = itertools.count()
KEY = SegmentKey(attempt=1, generation=1, checkpoint_id=7)


class Gated(MemoryStore):
    """A store whose writes wait, or fail."""

    def __init__(self) -> None:
        super().__init__(f"segments-{next(ROOTS)}")
        self.open_gate = asyncio.Event()
        self.open_gate.set()
        self.fails = False
        self.deleted: list[str] = []

    async def write_file(self, name: str, data: FileContent) -> None:
        await self.open_gate.wait()
        if self.fails:
            raise StorageError("the store refuses")
        await super().write_file(name, data)

    async def delete_files(self, names: Any) -> None:
        self.deleted += names
        await super().delete_files(names)


class Bench:
    """A worker with a number of subtasks."""

    def __init__(self, subtasks: int, **settings: Any) -> None:
        self.store = Gated()
        self.writer = SegmentWriter("worker-1", lambda attempt: subtasks, ThreadPoolExecutor(1))
        self.writer.configure(SegmentSettings(**{"delay_ms": 10_000, **settings}))
        self.transfers = asyncio.Semaphore(2)
        self.target = SnapshotTarget(self.store, lambda *_: "", 0)

    def pieces(self, *pieces: tuple[str, bytes], key: SegmentKey = KEY) -> Pieces:
        made = Pieces(self.writer, key)
        for name, data in pieces:
            assert made.reserve(len(data))
            made.add(name, data)
        return made

    def place(self, *pieces: tuple[str, bytes], key: SegmentKey = KEY) -> asyncio.Task[Places]:
        placing = self.pieces(*pieces, key=key).place(self.target, self.transfers)
        return asyncio.get_running_loop().create_task(placing)

    @property
    def files(self) -> list[str]:
        return [name for name in self.store._objects if names.segment_bytes(name) is not None]

    async def content(self, place: tuple[str, int], size: int) -> bytes:
        return await self.store.read_range(*place, size)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_subtasks_of_a_worker_share_an_object() -> None:
    async def main() -> None:
        bench = Bench(3)
        first = bench.place(("a", b"aaa"), ("b", b"bbbbb"))
        nothing = bench.place()
        await turns()
        assert bench.files == []
        assert await nothing == {}, "who has nothing to write waits for nobody"
        last = bench.place(("c", b"cc"))
        places = await first | await last
        (file,) = bench.files
        assert names.segment_bytes(file) == 10
        assert names.checkpoint_of(file) == (1, 7)
        assert {place[0] for place in places.values()} == {file}
        for name, size in {"a": 3, "b": 5, "c": 2}.items():
            assert await bench.content(places[name], size) == name.encode() * size

    run(main())


def test_the_wait_for_other_subtasks_is_bounded() -> None:
    async def main() -> None:
        bench = Bench(2, delay_ms=5)
        places = await bench.place(("a", b"aaa"))
        later = await bench.place(("b", b"b"))
        assert places.keys() == {"a"}
        assert places["a"][0] != later["b"][0]

    run(main())


def test_checkpoints_and_attempts_do_not_share_objects() -> None:
    async def main() -> None:
        bench = Bench(1)
        keys = [KEY, SegmentKey(1, 1, 8), SegmentKey(2, 1, 7), SegmentKey(1, 2, 7)]
        placed = [await bench.place(("a", b"a"), key=key) for key in keys]
        assert len({place["a"][0] for place in placed}) == 4

    run(main())


def test_a_failed_write_is_the_failure_of_all_and_leaves_nothing() -> None:
    async def main() -> None:
        bench = Bench(2)
        bench.store.fails = True
        waiting = [bench.place(("a", b"a")), bench.place(("b", b"b"))]
        for each in waiting:
            with pytest.raises(StorageError, match="refuses"):
                await each
        (deleted,) = bench.store.deleted
        assert names.segment_bytes(deleted) == 2

    run(main())


def test_one_who_leaves_does_not_take_the_object_from_the_others() -> None:
    async def main() -> None:
        bench = Bench(2)
        bench.store.open_gate.clear()
        leaves, stays = bench.place(("a", b"a")), bench.place(("b", b"b"))
        await turns()
        leaves.cancel()
        await turns()
        bench.store.open_gate.set()
        places = await stays
        assert await bench.content(places["b"], 1) == b"b"
        assert leaves.cancelled()

    run(main())


@pytest.mark.parametrize("begun", [True, False])
def test_when_all_have_left_nothing_is_written(begun: bool) -> None:
    async def main() -> None:
        bench = Bench(2 if begun else 3)
        bench.store.open_gate.clear()
        waiting = [bench.place(("a", b"a")), bench.place(("b", b"b"))]
        await turns()
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        bench.store.open_gate.set()
        await turns()
        assert bench.files == []
        assert not bench.writer._groups

    run(main())


def test_large_state_and_too_much_of_it_is_written_by_itself() -> None:
    bench = Bench(1, piece_bytes_max=10, bytes_max=25)
    pieces = Pieces(bench.writer, KEY)
    assert not pieces.reserve(11)
    assert pieces.reserve(10)
    assert pieces.reserve(10)
    assert not pieces.reserve(6)
    other = Pieces(bench.writer, KEY)
    assert other.reserve(5)
    pieces.close()
    pieces.close()
    assert other.reserve(10), "the room is free again"
    bench.writer.configure(None)
    assert not other.reserve(1), "segments are off"
