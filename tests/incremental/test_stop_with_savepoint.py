"""Between the savepoint of a stop and the last checkpoint behind it nothing happens any more."""

from __future__ import annotations

from typing import Any

import headgate as hg
from headgate.connectors import collect, generator, sequence
from headgate.runtime.job import runnable

ROWS = 2_000
WINDOW_MS = 2


def make_job(storage: str, sink: Any, rate: float | None) -> hg.Job:
    job = hg.Job("job", parallelism=2, max_parallelism=12)
    job.checkpoint(every="1h", storage=storage)
    runnable(job).override({"pipeline.auto-watermark-interval": "50 ms"})
    rows = generator({"n": sequence()}, rows=ROWS, rate=rate, batch_rows=10)
    (
        job.read(rows, name="rows")
        .event_time("n", max_out_of_order="20ms")
        .window(hg.tumbling(f"{WINDOW_MS}ms"))
        .agg(c=hg.count(), name="windows")
        .write(sink, name="out")
    )
    return job


def test_event_time_stands_still(plain_lab: Any) -> None:
    """A watermark behind the savepoint would close windows: they would be in the output of the last
    checkpoint, and again in that of the job that goes on from the savepoint."""
    sink, taken = collect(guarantee="exactly_once"), []

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        while not (await job.request("checkpoint"))["checkpoint"] > 3:
            await job.tick()
        driver = job.coordinator._context.checkpoints
        write = driver._write_savepoint

        async def slowly(*arguments: Any) -> None:
            for _ in range(4):
                await job.tick()  # in which watermarks would become due
            await write(*arguments)

        driver._write_savepoint = slowly
        taken.append((await job.request("stop", savepoint=str(plain_lab.path)))["savepoint"])

    assert plain_lab.run(make_job(plain_lab.storage, sink, 500), script).outcome.status == (
        "SUSPENDED"
    )
    ran = plain_lab.run(make_job(plain_lab.storage, sink, None), restore_from=taken[0])
    assert ran.outcome.status == "FINISHED"
    starts = sorted(int(row["window_start"].timestamp() * 1000) for row in sink.rows)
    assert starts == list(range(0, ROWS, WINDOW_MS))
    assert {row["c"] for row in sink.rows} == {WINDOW_MS}
