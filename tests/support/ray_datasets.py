"""Datasets that answer as those of Ray do, without Ray, and the runs of jobs that read them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headgate.connectors import ray_dataset_source
from headgate.connectors.functions.loop_thread import in_thread
from headgate.operators.source import Source, SourceRun
from headgate.runtime.coordinator.sources import SourceDirectory
from headgate.runtime.storage.local import LocalStore
from headgate.testing.connectors import SourceCase

from .connector_cases import SCHEMA, Directory, Rows

_numbers = itertools.count()


class FakeDataset:
    """The methods of a Ray Dataset that the source uses, over blocks in memory."""

    def __init__(self, blocks: Sequence[pa.Table]) -> None:
        self._blocks = list(blocks)

    def schema(self) -> Any:
        if not self._blocks:
            return None
        found = self._blocks[0].schema
        return SimpleNamespace(names=found.names, types=found.types)

    def iter_batches(self, *, batch_size: int | None, batch_format: str) -> Iterator[pa.Table]:
        assert (batch_size, batch_format) == (None, "pyarrow")
        return iter(self._blocks)


@asynccontextmanager
async def running(storage: Path, run: str = "r1") -> AsyncIterator[tuple[SourceRun, list[str]]]:
    """A run of a job with one source, and what it announces."""
    said: list[str] = []
    store = LocalStore(storage / "j")
    await store.open()
    place = SourceDirectory(store, str(store.describe()), "history")
    try:
        yield SourceRun("j", run, "history", "job.py:7", {}, place, said.append), said
    finally:
        await store.close()


async def prepared(source: Any, storage: Path, run: str = "r1") -> Any:
    """Return the source with the result that it has made in a run."""
    async with running(storage, run) as (context, _):
        return await source.prepare(context)


class RayDatasetCase(Rows, Directory, SourceCase):
    """The rows of Parquet files, one block each, which were put into the storage of the job."""

    def put(self, place: Path, records: Sequence[Any]) -> None:
        if records:
            (place / "rows").mkdir(exist_ok=True)
            table = pa.Table.from_pylist(list(records), schema=SCHEMA)
            pq.write_table(table, place / "rows" / f"{next(_numbers):06}.parquet")

    def source(self, place: Path) -> Source:
        files = sorted((place / "rows").glob("*.parquet"))
        dataset = FakeDataset([pq.read_table(path) for path in files])
        source = ray_dataset_source(dataset, SCHEMA, batch_rows=1, split_bytes="64b")
        made: Source = in_thread(lambda: prepared(source, place / "storage"))
        return made
