"""throttle: the rate on a clock moved by hand, after stalls, with rejected records, in several subtasks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headgate.connectors import from_list, numbers, throttle
from headgate.connectors.registry import SOURCES
from headgate.errors import UsageError
from headgate.operators.base import OperatorContext
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.source import Source, SourceReader
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import make_context, open_reader, read_all
from headgate.tests.support.clocks import MovedClock


class FakeClock(MovedClock):
    """Time that passes only in `asyncio.sleep`."""

    def __init__(self) -> None:
        super().__init__(1000.0)

    async def sleep(self, delay: float) -> None:
        self.now_s += delay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(asyncio, "sleep", clock.sleep)
    return clock


def opened(source: Source, clock: FakeClock, parallelism: int = 1) -> SourceReader:
    return open_reader(source, source.splits(1), make_context(clock=clock, parallelism=parallelism))


def let_through(reader: SourceReader) -> int:
    """Records that may go right now."""
    rows = 0
    while (batch := reader.poll()) is not None:
        rows += len(batch)
    return rows


def test_the_rate_holds(clock: FakeClock) -> None:
    source = throttle(numbers(1000, batch_rows=20), 100)

    async def run() -> list[float]:
        reader, starts = opened(source, clock), []
        while not reader.finished:
            if reader.poll() is None:
                await reader.wait()
            else:
                starts.append(clock.now_s - 1000)
        return starts

    assert asyncio.run(run()) == pytest.approx([number / 5 for number in range(50)])


def test_each_subtask_has_its_share(clock: FakeClock) -> None:
    reader = opened(throttle(numbers(1000, batch_rows=1), 100), clock, parallelism=4)
    assert let_through(reader) == 1
    clock.now_s += 0.201
    assert let_through(reader) == 5


def test_a_stall_is_not_made_up_for_by_a_burst(clock: FakeClock) -> None:
    reader = opened(throttle(numbers(100_000, batch_rows=1), 100), clock)
    assert let_through(reader) == 1
    clock.now_s += 3600
    assert let_through(reader) <= 101
    clock.now_s += 1
    assert let_through(reader) == pytest.approx(100, abs=1)


class Refusing(Source):
    """Its reader rejects nine records of ten."""

    rejected_schema = None

    def splits(self, parallelism: int) -> list[bytes]:
        return [b""]

    def reader(self) -> SourceReader:
        return _RefusingReader()


class _RefusingReader(SourceReader):
    finished = False

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)

    def add_splits(self, splits: Sequence[bytes]) -> None: ...

    def poll(self) -> Batch | None:
        self.reject(ObjectBatch(["bad"] * 9))
        return ObjectBatch(["good"])


def test_rejected_records_count(clock: FakeClock) -> None:
    reader = opened(throttle(Refusing(), 100), clock)
    good = 0
    for _ in range(1000):
        good += let_through(reader)
        clock.now_s += 0.01
    assert good == pytest.approx(
        100, abs=2
    )  # ten seconds of a hundred records, a tenth of them good


def test_all_records_come(clock: FakeClock) -> None:
    assert asyncio.run(read_all(throttle(from_list(list("abc"), batch_rows=1), 1000))) == [
        "a", "b", "c",
    ]  # fmt: skip


@pytest.mark.parametrize("rate", [0, -1, math.inf, math.nan, "10", True, None])
def test_a_rate_is_a_positive_number(rate: Any) -> None:
    with pytest.raises(UsageError, match="above 0 records/s, and finite rate="):
        throttle(numbers(1), rate)


def test_every_source_of_a_manifest_has_a_rate_and_an_end() -> None:
    lacking = {name for name, each in SOURCES.items() if "rate" not in each.fields.fields}
    assert lacking == set()
    assert all("stopAfterIdle" in each.fields.fields for each in SOURCES.values())


def test_a_hybrid_source_of_a_manifest_is_slowed_down_as_a_whole() -> None:
    job = load_job(
        """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: slow}
spec:
  sources:
    both:
      hybrid:
        history: {generator: {fields: {n: sequence}, rows: 10}}
        live: {generator: {fields: {n: sequence}}}
        rate: 50
        stopAfterIdle: 1m
  sinks: {out: {from: both, print: {}}}
"""
    )
    (node,) = runnable(job).graph.sources()
    assert node.source is not None
    described = node.source.describe()
    assert described.endswith("at 50 records/s until idle for 1m"), described
    assert node.source.stop_after_idle_ms == 60_000
