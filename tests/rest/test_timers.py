"""Goal: the timers that wait are counted by step and subtask, in the REST API and as a metric."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.tests.rest.conftest import serving


class Reminds(hg.KeyedProcess[str, Any, Any]):
    """Sets two timers for each key, far in the future."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
        ctx.event_time.at(record[1] + 10**9, tag="late")
        ctx.processing_time.at(10**14, tag="later")
        yield record

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Any]:
        yield from ()


def test_timers_by_step_and_subtask(lab: Any) -> None:
    job = hg.Job("reminds", parallelism=2)
    records = [(f"user-{number}", number) for number in range(9)]
    (
        job.read(from_list(records), name="in", parallelism=1)
        .event_time(lambda record: record[1], max_out_of_order="0s")
        .key_with(lambda record: record[0])
        .process(Reminds(), name="reminds")
        .write(blackhole(), name="out")
    )

    async def script(running: Any) -> None:
        async with serving(running) as api, api.client() as client:
            while True:
                vertices = await client.vertices()
                told = [await client.subtasks(each.id) for each in vertices]
                waiting = [each.timers for subtasks in told for each in subtasks if each.timers]
                if sum(each["reminds"] for each in waiting) == 18:
                    break
                await asyncio.sleep(0.01)
            assert len(waiting) == 2
            assert all(each.keys() == {"reminds"} for each in waiting)
            samples = running.cluster.metrics.collect()
            pending = [
                sample.value
                for family in samples
                for sample in family.samples
                if sample.name == "headgate_timers_pending"
            ]
            assert sum(pending) == 18

    lab.run(job, script)
