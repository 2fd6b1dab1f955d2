"""The splits of a batch job's sources; data that a source prepares is in a directory meanwhile."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import HeadgateError
from ...operators.graph import Node
from ...operators.source import SourceRun
from ..coordinator.source_runs import SourceStorage
from ..job_spec import JobSpec
from ..options.registry import Options
from ..plan import PhysicalPlan
from ..protocol.failures import as_headgate_error
from ..storage.open_store import open_store_at

_log = logging.getLogger("headgate.batch")


@contextmanager
def source_splits(
    plan: PhysicalPlan, spec: JobSpec, scratch: str | None
) -> Iterator[dict[str, list[bytes]]]:
    """Yield the splits of each source, by name, for as long as the job runs.

    Args:
        scratch: the parent of the directory; None: the system's place.

    Raises:
        UserCodeError: a source could not be divided.
        HeadgateError: an error of the source.
    """
    if scratch is not None:
        Path(scratch).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headgate-batch-sources-", dir=scratch) as directory:
        yield asyncio.run(_cut_all(plan, spec, directory))


async def _cut_all(plan: PhysicalPlan, spec: JobSpec, directory: str) -> dict[str, list[bytes]]:
    store = open_store_at(directory, spec.options)
    await store.open()
    try:
        return {
            vertex.head.name: await _cut(
                vertex.head,
                vertex.parallelism,
                spec,
                SourceStorage(store, directory, vertex.head.name),
            )
            for vertex in plan.vertices
            if vertex.head.source is not None
        }
    finally:
        await store.close()


async def _cut(node: Node, parallelism: int, spec: JobSpec, storage: SourceStorage) -> list[bytes]:
    source = node.source
    assert source is not None  # the caller has checked
    run = SourceRun(
        job=spec.name,
        run=spec.run,
        source=node.name,
        where=str(node.origin),
        options=Options(spec.options).effective(),
        storage=storage,
        announce=lambda text: _log.info("%s: %s", node.name, text),
    )
    try:
        prepared = await source.configure(run.options).prepare(run)
        return await asyncio.to_thread(prepared.splits, parallelism)
    except HeadgateError:
        raise
    except Exception as error:
        what = f"source `{node.name}` cannot be cut into splits"
        raise as_headgate_error(error, what, str(node.origin)) from error
