"""An operator knows for how long its subtask could not go on because its outputs took nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import headgate as hg
from headgate.connectors import function_sink, numbers
from headgate.runtime.job import runnable
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.task.accounting import Activity
from headgate.runtime.task.environment import TaskEnvironment, TaskSettings
from headgate.runtime.task.local_files import SubtaskDirectory
from headgate.runtime.task.subtask import Subtask


class Clock:
    def __init__(self):
        self.s = 100.0

    def monotonic(self):
        return self.s

    def now_ms(self):
        return round(1_000 * self.s)


def metrics(*_):
    return SimpleNamespace(
        counter=lambda name: SimpleNamespace(inc=lambda amount=1: None),
        gauge=lambda name, read: None,
    )


async def held(path, threads):
    job = hg.Job("held", options={"pipeline.operator-chaining.enabled": "false"})
    times = job.read(numbers(1), name="numbers").event_time(lambda n: n, name="times")
    times.start_new_chain()
    times.write(function_sink(print, guarantee="none"), name="out")
    plan = runnable(job).spec().replan(1, 4)
    (vertex,) = [vertex for vertex in plan.vertices if vertex.head.name == "times"]
    clock = Clock()
    env = TaskEnvironment(
        plan=plan,
        vertex=vertex,
        index=0,
        generation=1,
        attempt=1,
        restored_checkpoint=0,
        options={},
        settings=TaskSettings(),
        clock=clock,
        store=MemoryStore("held", {}),
        store_at=None,
        io_threads=threads,
        transfers=asyncio.Semaphore(1),
        directory=SubtaskDirectory(path),
        reports=None,
        metrics_of=metrics,
    )
    subtask = Subtask(env, {})
    await subtask.prepare(None, False)
    for activity in (Activity.BACKPRESSURED, Activity.BUSY, Activity.BACKPRESSURED, Activity.IDLE):
        subtask.time.switch(activity)
        clock.s += 2 + activity
    subtask.time.switch(Activity.BUSY)
    seconds = subtask.chain.head.operator.context.held_s()
    await subtask.cancel()
    return seconds


def test_time_in_which_outputs_take_nothing_is_told_to_operators(tmp_path):
    with ThreadPoolExecutor(1) as threads:
        assert asyncio.run(held(tmp_path / "local", threads)) == 8.0
