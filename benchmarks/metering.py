"""A source and a sink that note when records passed, so that a job's steady part can be cut out.

Each subtask writes one small JSON file when its part is over. Times are `time.monotonic()`, which all
processes of a machine share; beside them stands the processor time of the subtask's process. The cost is
four clock reads per batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headgate.operators.base import OperatorContext
from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.operators.source import Source, SourceReader

WARM_SHARE = 0.25
"""This share of the records passes before the clock starts."""


class MeteredSource(Source):
    """Another source, watched. `name` tells it from the other sources of the job."""

    def __init__(self, inner: Source, directory: str, name: str = "source") -> None:
        self._inner = inner
        self._directory = directory
        self._name = name
        self.schema = inner.schema
        self.row_type = inner.row_type
        self.bounded = inner.bounded
        self.at_rest = inner.at_rest
        self.rejected_schema = inner.rejected_schema

    def splits(self, parallelism: int) -> list[bytes]:
        return self._inner.splits(parallelism)

    def reader(self) -> SourceReader:
        return _MeteredReader(self._inner.reader(), self._directory, self._name)

    def configure(self, options: Mapping[str, str]) -> MeteredSource:
        return MeteredSource(self._inner.configure(options), self._directory, self._name)

    def with_columns(self, columns: Sequence[str]) -> MeteredSource:
        return MeteredSource(self._inner.with_columns(columns), self._directory, self._name)

    def describe(self) -> str:
        return self._inner.describe()


class _MeteredReader(SourceReader):
    def __init__(self, inner: SourceReader, directory: str, name: str) -> None:
        self._inner = inner
        self._directory = directory
        self._name = name
        self._marks: list[tuple[float, int, float]] = []
        self._rows = 0
        self._written = False

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._inner.open(context, reject)

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self._inner.add_splits(splits)

    def poll(self) -> Batch | None:
        before, cpu = time.monotonic(), time.process_time()
        batch = self._inner.poll()
        if batch is not None:
            # At this moment all earlier rows have left the chain of the source.
            self._marks.append((before, self._rows, cpu))
            self._rows += len(batch)
        return batch

    async def wait(self) -> None:
        await self._inner.wait()

    @property
    def finished(self) -> bool:
        done = self._inner.finished
        if done and not self._written:
            self._written = True
            body = {"marks": self._marks, "rows": self._rows}
            _write(self._directory, f"source-{self._name}", self.context.subtask_index, body)
        return done

    def snapshot(self) -> list[bytes]:
        return self._inner.snapshot()

    def close(self) -> None:
        self._inner.close()


class TallySink(Sink):
    """Counts records and forgets them. With `sums`, it also adds up numeric columns and squares."""

    guarantees = frozenset(Guarantee)
    guarantee = Guarantee.NONE

    def __init__(self, directory: str, sums: bool) -> None:
        self._directory = directory
        self._sums = sums

    def writer(self) -> SinkWriter:
        return _TallyWriter(self._directory, self._sums)

    def describe(self) -> str:
        return "tally()"


class _TallyWriter(SinkWriter):
    def __init__(self, directory: str, sums: bool) -> None:
        self._directory = directory
        self._with_sums = sums
        self._rows = 0
        self._sums: dict[str, float] = {}

    def write(self, batch: Batch) -> None:
        self._rows += len(batch)
        if self._with_sums:
            for name, value in _sums_of(batch).items():
                self._sums[name] = self._sums.get(name, 0) + value

    def finish(self) -> None:
        at, cpu = time.monotonic(), time.process_time()
        body = {"at": at, "cpu": cpu, "rows": self._rows, "sums": self._sums}
        _write(self._directory, "sink", self.context.subtask_index, body)


def _sums_of(batch: Batch) -> dict[str, float]:
    if not isinstance(batch, ColumnBatch):  # (key, running count) tuples
        return {"n": sum(record[1] for record in batch.records)}
    sums: dict[str, float] = {}
    for field, column in zip(batch.data.schema, batch.data.columns, strict=True):
        if pa.types.is_integer(field.type) or pa.types.is_decimal(field.type):
            sums[field.name] = float(pc.sum(column).as_py() or 0)
        if pa.types.is_integer(field.type):
            sums[f"{field.name}^2"] = float(pc.sum(pc.multiply(column, column)).as_py() or 0)
    return sums


def _write(directory: str, kind: str, index: int, body: dict[str, Any]) -> None:
    Path(directory, f"{kind}-{index}.json").write_text(json.dumps(body))


@dataclass(frozen=True, slots=True)
class Steady:
    """The part of a job behind its warm-up, and what came out of the whole job."""

    began: float
    ended: float
    events: int
    rows_out: int
    sums: dict[str, float]
    cpu_s: float
    """Processor time of the process; means nothing unless the whole job ran in one."""


def read_marks(directory: str) -> Steady:
    """Return the notes of the metered source and sink of a finished job.

    The clock starts when the slowest source subtask has read `WARM_SHARE` of its rows and stops when
    the last sink subtask has all its records. Records under way at the start are counted as if they
    had been finished, so the rate errs on the low side.

    Raises:
        RuntimeError: the job did not run to its end. A signal may have stopped it, which is no error of
            the job: SIGTERM, as `timeout` sends it, counts as Ctrl-C.
    """
    sources = [json.loads(path.read_text()) for path in Path(directory).glob("source-*.json")]
    sinks = [json.loads(path.read_text()) for path in Path(directory).glob("sink-*.json")]
    if not sinks or not any(source["marks"] for source in sources):
        raise RuntimeError(
            f"the job did not run to its end, so there is nothing to measure sources=`{len(sources)}` "
            f"sinks=`{len(sinks)}`: it was stopped, by Ctrl-C or `timeout` for instance, or read no record"
        )
    began = max(_warm_at(source) for source in sources if source["marks"])
    warm = sum(_rows_at(source, began) for source in sources)
    sums: dict[str, float] = {}
    for sink in sinks:
        for name, value in sink["sums"].items():
            sums[name] = sums.get(name, 0) + value
    return Steady(
        began=began,
        ended=max(sink["at"] for sink in sinks),
        events=sum(source["rows"] for source in sources) - warm,
        rows_out=sum(sink["rows"] for sink in sinks),
        sums=sums,
        cpu_s=max(sink["cpu"] for sink in sinks)
        - max(_cpu_at(source, began) for source in sources),
    )


def _warm_at(source: dict[str, Any]) -> float:
    enough = source["rows"] * WARM_SHARE
    last: float = source["marks"][-1][0]
    return next((at for at, rows, _ in source["marks"] if rows >= enough), last)


def _rows_at(source: dict[str, Any], at: float) -> int:
    return max((rows for time_, rows, _ in source["marks"] if time_ <= at), default=0)


def _cpu_at(source: dict[str, Any], at: float) -> float:
    return max((cpu for time_, _, cpu in source["marks"] if time_ <= at), default=0.0)
