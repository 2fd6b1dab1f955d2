"""What is kept for reads as of a checkpoint, or for going back to it, is not kept for savepoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, event_time, generator, sequence
from headgate.runtime.job import runnable
from headgate.state.queryable import CommittedPoints
from headgate.tests.support.lab import Lab

SAVEPOINTS = 4


class Last(hg.KeyedProcess[Any, Any, Any]):
    last = hg.ValueState[int](queryable=hg.Queryable("last", committed=True))

    def on_record(self, record: Any, ctx: Any) -> Any:
        self.last.set(record[1])
        yield record


def make_job(lab: Lab, *, storage: bool) -> hg.Job:
    """A job with all kinds of states that clients read, and that survivors of a failure keep."""
    job = hg.Job("job")
    if storage:
        job.checkpoint(every="1h", storage=lab.storage)
    runnable(job).override({"headgate.recovery.keep-state": "true"})

    def named(name: str) -> Any:
        return {"name": name, "queryable": hg.Queryable(name, committed=True)}

    fields = {"n": sequence(), "at": event_time(every="10ms")}
    numbers = job.read(generator(fields, rate=2000), name="numbers")
    keyed = numbers.select("n % 10 AS key", "n", "at", name="keys")
    keyed.key_by("key").agg(count=hg.count(), **named("running")).write(blackhole(), name="a")
    timed = keyed.event_time("at", max_out_of_order="1s", name="time").key_by("key")
    timed.window(hg.tumbling("1m")).agg(count=hg.count(), **named("windows")).write(
        blackhole(), name="b"
    )
    joined = timed.join(timed, within=("0s", "50ms"), suffix="_other", name="joined")
    joined.write(blackhole(), name="e")
    pairs = numbers.map(lambda r: (r.n % 10, r.n), name="pairs")
    by_key = pairs.key_with(lambda pair: pair[0])
    by_key.process(Last(), name="last").write(blackhole(), name="c")
    by_key.reduce(lambda a, b: b, **named("reduced")).write(blackhole(), name="d")
    return job


@pytest.mark.parametrize("storage", [True, False])
def test_no_point_is_kept_for_a_savepoint(
    lab: Lab, storage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[CommittedPoints[Any]] = []
    begin = CommittedPoints.__init__

    def noted(self: CommittedPoints[Any], *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(CommittedPoints, "__init__", noted)
    taken: list[int] = []

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        if storage:
            taken.append((await job.request("checkpoint"))["checkpoint"])
        for _ in range(SAVEPOINTS):
            await job.tick()
            await job.request("savepoint", savepoint=str(lab.path))
        kept = [points.checkpoints for points in made]
        assert len(kept) >= 4
        assert all(found == frozenset(taken) for found in kept), kept
        await job.request("cancel")

    lab.run(make_job(lab, storage=storage), script)
    assert len(list(Path(lab.path).glob("*/_metadata"))) == SAVEPOINTS
