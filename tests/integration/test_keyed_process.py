"""A process function with every kind of state, in whole jobs that fail: nothing lost, nothing twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, numbers

ROWS = 1000


class Summary(msgspec.Struct):
    count: int
    last: int = -1


class Everything(hg.KeyedProcess[int, int, dict[str, Any]]):
    total = hg.ValueState[int](default=0)
    summary = hg.ValueState[Summary](ttl="1d")
    recent = hg.ListState[int]()
    parities = hg.MapState[bool, int]()
    greatest = hg.ReducingState[int](max)
    seen = hg.OperatorListState[int]()

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[dict[str, Any]]:
        self.total.set(self.total.get() + record)
        summary = self.summary.get() or Summary(0)
        summary.count += 1
        summary.last = record
        self.summary.set(summary)
        self.recent.update([*self.recent.get()[-2:], record])
        even = record % 2 == 0
        self.parities.put(even, (self.parities.get(even) or 0) + 1)
        self.greatest.add(record)
        self.seen.update([sum(self.seen.get()) + 1])
        yield {
            "key": ctx.key,
            "total": self.total.get(),
            "count": summary.count,
            "recent": self.recent.get(),
            "parities": sum(self.parities.values()),
            "greatest": self.greatest.get(),
            "seen": sum(self.seen.get()),
        }


@pytest.mark.parametrize("fault", ["none", "kills"])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_keyed_process(lab: Any, faults: Any, parallelism: int, fault: str) -> None:
    job = hg.Job("process", parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=20, delay="10ms")
    sink = collect(guarantee="exactly_once")
    rate = None if fault == "none" else 2000
    (
        job.read(numbers(ROWS, rate=rate, batch_rows=20, splits=1), name="numbers", parallelism=1)
        .key_with(lambda n: n % 7)
        .process(Everything(), name="everything")
        .write(sink, name="out", parallelism=1)
    )
    ran = lab.run(job, faults.kills(parallelism, 3) if fault == "kills" else None)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == (3 if fault == "kills" else 0)
    by_key: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in sink.rows:
        by_key[row["key"]].append(row)
    for key, rows in by_key.items():
        numbers_of_key = list(range(key, ROWS, 7))
        assert len(rows) == len(numbers_of_key)
        for index, row in enumerate(rows):
            so_far = numbers_of_key[: index + 1]
            assert row["total"] == sum(so_far)
            assert row["count"] == row["parities"] == len(so_far)
            assert row["recent"] == so_far[-3:]
            assert row["greatest"] == so_far[-1]
    assert len(by_key) == 7
    # The counts of the subtasks: each record counted once by one of them.
    last = {}
    for row in sink.rows:
        last[row["seen"]] = last.get(row["seen"], 0) + 1
    assert sum(last.values()) == ROWS
    if parallelism == 1:
        assert sorted(last) == list(range(1, ROWS + 1))
