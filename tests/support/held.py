"""Sources that neither end nor run ahead before the script of a test is done with their job.

A test that stops a job, or kills a part of it, must not depend on a machine that is slow enough for
it. `sources_held` holds all sources of jobs in this process, `Held` those of jobs whose workers are
processes of their own, and `Paced` ties the progress of a source to the job's checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from headgate.operators.source import Source, SourceReader, SourceRun
from headgate.runtime.protocol.split_discovery import LedgerStart
from headgate.runtime.task.source_subtask import SourceSubtask

LOOK_S = 0.05


class Over(Protocol):
    """Says when sources may end; an `asyncio.Event` is one."""

    def is_set(self) -> bool: ...

    async def wait(self) -> Any: ...


class OverByFile:
    """Like an `asyncio.Event`, for several processes: it is set when a file exists."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self) -> None:
        self._path.touch()

    def is_set(self) -> bool:
        return self._path.exists()

    async def wait(self) -> None:
        while not self.is_set():  # noqa: ASYNC110  no event reaches another process
            await asyncio.sleep(LOOK_S)


class HeldReader:
    """A reader that does not end before `over` is set, and reads at most `batches` batches until then.

    `batches=None` sets no limit. Everything else is passed on to the wrapped reader.
    """

    def __init__(self, reader: SourceReader, over: Over, batches: int | None) -> None:
        self.__dict__.update(_reader=reader, _over=over, _left=batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._reader, name, value)

    def _waits(self) -> bool:
        return not self._over.is_set() and (self._reader.finished or self._left == 0)

    def poll(self) -> Any:
        if self._waits():
            return None
        batch = self._reader.poll()
        if batch is not None and self._left:
            self.__dict__["_left"] -= 1
        return batch

    @property
    def finished(self) -> bool:
        return bool(self._reader.finished) and self._over.is_set()

    async def wait(self) -> None:
        await (self._over.wait() if self._waits() else self._reader.wait())


@contextlib.contextmanager
def sources_held(over: Over, batches: int | None = None) -> Iterator[None]:
    """Hold every source of the jobs that run in this process until `over` is set.

    A fresh subtask without splits ends at once nevertheless, because checkpoints must include such
    subtasks.
    """
    build = SourceSubtask.__init__

    def held(
        subtask: Any,
        env: Any,
        outputs: Any,
        fresh_splits: tuple[bytes, ...] | None,
        ledger: LedgerStart | None = None,
    ) -> None:
        build(subtask, env, outputs, fresh_splits, ledger)
        if fresh_splits != ():
            subtask._reader = HeldReader(subtask._reader, over, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SourceSubtask, "__init__", held)
        yield


class Wrapped(Source):
    """A source with a reader of its own that otherwise behaves like the wrapped one."""

    def __init__(self, source: Source) -> None:
        self._source = source
        for name in (
            "schema", "row_type", "bounded", "rejected_schema", "needs_storage", "has_history",
            "at_rest", "extras",
        ):  # fmt: skip
            setattr(self, name, getattr(source, name))

    def _around(self, source: Source) -> Source:
        """Return the same wrapper around another source."""
        raise NotImplementedError

    def configure(self, options: Mapping[str, str]) -> Source:
        return self._around(self._source.configure(options))

    async def prepare(self, run: SourceRun) -> Source:
        return self._around(await self._source.prepare(run))

    async def discard(self, run: SourceRun) -> None:
        await self._source.discard(run)

    def splits(self, parallelism: int) -> list[bytes]:
        return self._source.splits(parallelism)

    def latest(self, splits: Sequence[bytes], column: str) -> int | None:
        return self._source.latest(splits, column)

    def with_columns(self, columns: Sequence[str]) -> Source:
        return self._around(self._source.with_columns(columns))

    def describe(self) -> str:
        return self._source.describe()


class Held(Wrapped):
    """A source whose readers are `HeldReader`s, wherever they run."""

    def __init__(self, source: Source, over: Over, batches: int | None = None) -> None:
        super().__init__(source)
        self._over, self._batches = over, batches

    def _around(self, source: Source) -> Source:
        return Held(source, self._over, self._batches)

    def reader(self) -> Any:
        return HeldReader(self._source.reader(), self._over, self._batches)


class Paced(Wrapped):
    """A source that gives at most `batches` batches per subtask between one checkpoint and the next."""

    def __init__(self, source: Source, batches: int) -> None:
        super().__init__(source)
        self.at_rest = False
        self._batches = batches

    def _around(self, source: Source) -> Source:
        return type(self)(source, self._batches)

    def reader(self) -> SourceReader:
        return PacedReader(self._source.reader(), self._batches)


class PacedReader(SourceReader):
    def __init__(self, reader: SourceReader, batches: int) -> None:
        self._reader, self._batches, self._left = reader, batches, batches
        self._more = asyncio.Event()

    def open(self, context: Any, reject: Any) -> None:
        super().open(context, reject)
        self._reader.open(context, reject)

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self._reader.add_splits(splits)

    def poll(self) -> Any:
        batch = self._reader.poll() if self._left else None
        self._left -= batch is not None
        return batch

    async def wait(self) -> None:
        if self._left:
            await self._reader.wait()
        else:
            self._more.clear()
            await self._more.wait()

    @property
    def finished(self) -> bool:
        return self._reader.finished

    def snapshot(self) -> list[bytes]:
        self._left = self._batches
        self._more.set()
        return self._reader.snapshot()

    def close(self) -> None:
        self._reader.close()


class PacedByCompletion(Paced):
    """A source like `Paced` that goes on when a checkpoint is complete, and not when it is taken."""

    def reader(self) -> SourceReader:
        return PacedByCompletionReader(self._source.reader(), self._batches)


class PacedByCompletionReader(PacedReader):
    def snapshot(self) -> list[bytes]:
        return self._reader.snapshot()

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._left = self._batches
        self._more.set()
