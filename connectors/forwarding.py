"""The bases of sources that change one thing about another source, and of their readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..operators.base import OperatorContext
from ..operators.connections import check_connection
from ..operators.elements import Batch
from ..operators.source import Source, SourceReader, SourceRun


class ForwardingSource(Source):
    """Forwards calls to another source.

    A subclass implements `around`, `reader` and `describe`, and changes what differs.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.schema = source.schema
        self.row_type = source.row_type
        self.bounded = source.bounded
        self.rejected_schema = source.rejected_schema
        self.needs_storage = source.needs_storage
        self.has_history = source.has_history
        self.discovers = source.discovers
        self.discover_every_ms = source.discover_every_ms
        self.splits_end = source.splits_end
        self.splits_have_parents = source.splits_have_parents
        self.stop_after_idle_ms = source.stop_after_idle_ms
        self.replays = source.replays
        self.needs_checkpoints = source.needs_checkpoints
        self.extras = source.extras

    def around(self, source: Source) -> Source:
        """Return the same change of another source, which is this one configured, prepared or narrowed."""
        raise NotImplementedError

    def configure(self, options: Mapping[str, str]) -> Source:
        return self.around(self._source.configure(options))

    async def prepare(self, run: SourceRun) -> Source:
        return self.around(await self._source.prepare(run))

    async def discard(self, run: SourceRun) -> None:
        await self._source.discard(run)

    def check_connection(self, options: Mapping[str, str]) -> str:
        return check_connection(self._source, options)

    def splits(self, parallelism: int) -> list[bytes]:
        return self._source.splits(parallelism)

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        return self._source.discover(known)

    def split_key(self, split: bytes) -> str:
        return self._source.split_key(split)

    def split_parents(self, split: bytes) -> Sequence[str]:
        return self._source.split_parents(split)

    def split_share(self, key: str) -> int:
        return self._source.split_share(key)

    def latest(self, splits: Sequence[bytes], column: str) -> int | None:
        return self._source.latest(splits, column)

    def with_columns(self, columns: Sequence[str]) -> Source:
        return self.around(self._source.with_columns(columns))


class ForwardingReader(SourceReader):
    """Forwards all calls to another reader. A subclass changes what differs."""

    def __init__(self, reader: SourceReader) -> None:
        self._reader = reader
        self.can_pause_splits = reader.can_pause_splits

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._reader.open(context, reject)

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self._reader.add_splits(splits)

    def poll(self) -> Batch | None:
        self._reader.rows_wanted = self.rows_wanted
        batch = self._reader.poll()
        # A hybrid source has one reader for its history, and then another.
        self.can_pause_splits = self._reader.can_pause_splits
        self.held_back = self._reader.held_back
        return batch

    async def wait(self) -> None:
        await self._reader.wait()

    @property
    def finished(self) -> bool:
        return self._reader.finished

    def snapshot(self) -> list[bytes]:
        return self._reader.snapshot()

    def lag_records(self) -> Mapping[str, int] | None:
        return self._reader.lag_records()

    def lag_bytes(self) -> int | None:
        return self._reader.lag_bytes()

    def lag_s(self) -> float | None:
        return self._reader.lag_s()

    def pause_splits(self, splits: frozenset[str]) -> None:
        self._reader.pause_splits(splits)

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        self._reader.begin_checkpoint(checkpoint_id)

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._reader.on_checkpoint_complete(checkpoint_id)

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._reader.on_checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        self._reader.close()
