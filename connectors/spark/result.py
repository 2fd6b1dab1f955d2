"""Lets Spark write the result of a query into the storage of the job."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa

from ...errors import UsageError
from ...operators.source import SourceRun, SourceStorage
from ..files import locations
from ..files.verified import measure_parquet
from ..prepared.result import ResultKind, directory_on_the_way, local_directory
from .process import SparkProcess
from .task import SparkQuery, Task

SPARK: Final = ResultKind("Spark", "a Spark query", "the query runs again")


@dataclass(frozen=True)
class SparkResult:
    """Makes the result of a query; a `ResultMaker`."""

    query: SparkQuery
    kind = SPARK

    def fingerprint(self) -> str:
        return self.query.shipped().fingerprint()

    def describe(self) -> str:
        return self.query.describe()

    def check(self, storage: SourceStorage, run: SourceRun) -> None:
        """Refuse a directory of this machine for a Spark elsewhere."""
        query = self.query
        if query.runs_here or locations.parse_location(storage.address).scheme != "file":
            return
        raise UsageError(
            f"Spark elsewhere cannot write into a directory of this machine "
            f"master=`{query.plan.master}` storage=`{storage.address}`",
            where=run.where,
            fix="keep the job's checkpoints on S3, which both reach, or run Spark here: "
            'master="local[*]"',
        )

    async def make(
        self, schema: pa.Schema, attempt: str, storage: SourceStorage, run: SourceRun
    ) -> dict[str, list[str]]:
        """Let Spark write the result; see `ResultMaker`."""
        declared = schema.serialize().to_pybytes()
        task = Task(self.query.shipped(), f"headgate-{run.job}-{run.source}", declared)
        return await _make(self.query, task, attempt, storage, run)


async def _make(
    query: SparkQuery, task: Task, attempt: str, storage: SourceStorage, run: SourceRun
) -> dict[str, list[str]]:
    """Let Spark write the result below `attempt`; return the checksums, by name, of files that were on
    this machine.
    """
    measured: dict[str, list[str]] = {}
    location = locations.parse_location(f"{storage.address}/{attempt}")
    if location.scheme == "file":
        await _run(task, f"file://{location.path}", run)
    elif not query.runs_here:
        await _run(task, f"s3a://{location.path}", run)
    else:
        # Spark would need Hadoop's client of S3 for it, which pyspark does not bring.
        with directory_on_the_way(run) as directory:
            await _run(task, f"file://{directory}/result", run)
            local = locations.filesystem("file", {})
            for path in sorted((directory / "result").glob("*.parquet")):
                measured[path.name] = await asyncio.to_thread(measure_parquet, local, str(path))
                await storage.upload(f"{attempt}/{path.name}", path)
    return measured


async def _run(task: Task, target: str, run: SourceRun) -> None:
    """Run the task in a process. A cancelled call leaves neither the process nor Java behind."""
    loop = asyncio.get_running_loop()

    def announce(text: str) -> None:
        loop.call_soon_threadsafe(run.announce, text)

    task = msgspec.structs.replace(task, target=target)
    process = SparkProcess(task, local_directory(run) or "", run.where, announce)
    # This does not use the loop's own threads, as the thread is busy for as long as the query runs.
    with ThreadPoolExecutor(1, "headgate-spark") as thread:
        running = loop.run_in_executor(thread, process.run)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            process.kill()
            await asyncio.wait([running])
            running.exception()  # looks at the error, so that asyncio does not report it
            raise
