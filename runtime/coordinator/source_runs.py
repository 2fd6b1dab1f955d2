"""Gives a source that makes data of its own a place in the job's storage, and a way to say how it goes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import final

from ...errors import HeadgateError
from ...operators.graph import Node
from ...operators.source import SourceRun
from ...operators.source import SourceStorage as Contract
from ..protocol import names
from ..storage.base import CheckpointStore, Existed
from ..storage.open_store import join_address
from .context import JobContext

_log = logging.getLogger("headgate.job")


@final
class SourceStorage:
    """See `operators.source.SourceStorage`."""

    def __init__(self, store: CheckpointStore, address: str, source: str) -> None:
        self._store = store
        self._root = names.source_dir(source)
        self._address = f"{address}/{self._root}"

    @property
    def address(self) -> str:
        return self._address

    async def read(self, name: str) -> bytes | None:
        return await self._store.read(f"{self._root}/{name}")

    async def create_if_absent(self, name: str, data: bytes) -> bytes:
        match await self._store.create_if_absent(f"{self._root}/{name}", data):
            case Existed(there):
                return there
        return data

    async def upload(self, name: str, path: Path) -> None:
        await self._store.write_file(f"{self._root}/{name}", path)

    async def names(self, prefix: str) -> list[str]:
        below = len(self._root) + 1
        found = self._store.list_files(f"{self._root}/{prefix}")
        return [name[below:] async for name, _ in found]

    async def delete(self, names: Sequence[str]) -> None:
        await self._store.delete_files([f"{self._root}/{name}" for name in names])


def source_run(job: JobContext, node: Node) -> SourceRun:
    """The run of `job` for its source `node`."""
    storage: Contract | None = None
    checkpoint = job.spec.checkpoint
    if job.store is not None and checkpoint is not None:
        address = join_address(checkpoint.storage, names.job_dir(job.spec.name))
        if address.startswith("file:"):
            address = job.store.describe()  # as a path, without escapes
        storage = SourceStorage(job.store, address, node.name)
    return SourceRun(
        job=job.spec.name,
        run=job.spec.run,
        source=node.name,
        where=str(node.origin),
        options=job.options.effective(),
        storage=storage,
        announce=lambda text: job.publish("source", f"{node.name}: {text}", source=node.name),
        confirm=job.log.confirm if job.log is not None else None,
    )


async def discard_source_data(job: JobContext) -> None:
    """No checkpoint is left that reads what the job's sources made: they may delete it."""
    for node in job.spec.graph.sources():
        if node.source is None or not node.source.needs_storage:
            continue
        try:
            await node.source.discard(source_run(job, node))
        except HeadgateError as error:
            _log.warning("data of source `%s` was not deleted: %s", node.name, error)
