"""An operator knows for how long its subtask could not go on because its outputs took nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import headgate as hg
from headgate.connectors import function_sink, numbers
from headgate.runtime.task.accounting import Activity
from headgate.runtime.task.subtask import Subtask
from headgate.tests.support.clocks import MovedClock
from headgate.tests.support.tasks import planned, task_environment


async def held(path, threads):
    job = hg.Job("held", options={"pipeline.operator-chaining.enabled": "false"})
    times = job.read(numbers(1), name="numbers").event_time(lambda n: n, name="times")
    times.start_new_chain()
    times.write(function_sink(print, guarantee="none"), name="out")
    plan, vertex = planned(job, "times")
    clock = MovedClock(100.0)
    env = task_environment(plan, vertex, path, threads, clock=clock, reports=None)
    subtask = Subtask(env, {})
    await subtask.prepare(None, False)
    for activity in (Activity.BACKPRESSURED, Activity.BUSY, Activity.BACKPRESSURED, Activity.IDLE):
        subtask.time.switch(activity)
        clock.now_s += 2 + activity
    subtask.time.switch(Activity.BUSY)
    seconds = subtask.chain.head.operator.context.held_s()
    await subtask.cancel()
    return seconds


def test_time_in_which_outputs_take_nothing_is_told_to_operators(tmp_path):
    with ThreadPoolExecutor(1) as threads:
        assert asyncio.run(held(tmp_path / "local", threads)) == 8.0
