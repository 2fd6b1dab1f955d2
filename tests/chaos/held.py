"""Sources of real processes that do not end before what is to happen to their job has happened."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.operators.source import Source, SourceReader

LOOK_S = 0.05


class Held(Source):
    """A source that ends once there is a file `over`, however fast its records are."""

    def __init__(self, source: Source, over: Path) -> None:
        self._source, self._over = source, over
        self.schema, self.row_type = source.schema, source.row_type
        self.bounded, self.rejected_schema = source.bounded, source.rejected_schema
        self.at_rest = source.at_rest

    def configure(self, options: Mapping[str, str]) -> Source:
        return Held(self._source.configure(options), self._over)

    def splits(self, parallelism: int) -> list[bytes]:
        return self._source.splits(parallelism)

    def reader(self) -> SourceReader:
        return HeldReader(self._source.reader(), self._over)

    def with_columns(self, columns: Sequence[str]) -> Source:
        return Held(self._source.with_columns(columns), self._over)

    def describe(self) -> str:
        return self._source.describe()


class HeldReader(SourceReader):
    def __init__(self, reader: SourceReader, over: Path) -> None:
        self._reader, self._over = reader, over
        self.can_pause_splits = reader.can_pause_splits

    def open(self, context: Any, reject: Any) -> None:
        super().open(context, reject)
        self._reader.open(context, reject)

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self._reader.add_splits(splits)

    def poll(self) -> Any:
        self._reader.rows_wanted = self.rows_wanted
        return self._reader.poll()

    async def wait(self) -> None:
        if not self._reader.finished:
            await self._reader.wait()
        while self._reader.finished and not self._over.exists():  # noqa: ASYNC110  a file says so
            await asyncio.sleep(LOOK_S)

    @property
    def finished(self) -> bool:
        return self._reader.finished and self._over.exists()

    def pause_splits(self, splits: frozenset[str]) -> None:
        self._reader.pause_splits(splits)

    def snapshot(self) -> list[bytes]:
        return self._reader.snapshot()

    def close(self) -> None:
        self._reader.close()
