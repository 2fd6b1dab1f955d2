"""A subtask between two channels and an output: what it does about barriers, and what it says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.operators.clock import SystemClock
from headgate.operators.elements import CheckpointBarrier, CheckpointOptions, ObjectBatch
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate
from headgate.runtime.exchange.partition import PartitionStats
from headgate.runtime.task.chain import NodePartition
from headgate.runtime.task.environment import SnapshotTiming
from headgate.runtime.task.input_subtask import InputSubtask
from headgate.tests.support.clocks import MovedClock
from headgate.tests.support.tasks import planned, task_environment

Run = Callable[[Awaitable[Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine on a fresh loop of either kind: workers have uvloop's."""

    def run(coroutine: Awaitable[Any]) -> Any:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(coroutine, 120))

    return run


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


class Outlet:
    """A barrier that waits in line."""

    def __init__(self, barrier: CheckpointBarrier) -> None:
        self.barrier = barrier
        self.overtook = asyncio.Event()

    def overtake(self) -> None:
        self.overtook.set()


class Output:
    """A result partition in which every barrier waits in line."""

    backlogged = False

    def __init__(self) -> None:
        self.barrier = CheckpointBarrier(0, 0, CheckpointOptions())
        self.barriers: list[Outlet] = []

    def emit(self, batch: ObjectBatch) -> None: ...

    def broadcast(self, element: Any) -> None:
        if isinstance(element, CheckpointBarrier):
            self.barrier = element

    def outgoing_barrier(self, checkpoint_id: int) -> Outlet:
        self.barriers.append(Outlet(self.barrier))
        return self.barriers[-1]

    def set_listener(self, wake: Any) -> None: ...

    def flush_due(self, now: float) -> bool:
        return False

    def next_flush(self) -> float | None:
        return None

    def stats(self) -> PartitionStats:
        return PartitionStats()

    def close(self) -> None: ...


class Reports:
    def __init__(self) -> None:
        self.timings: dict[int, SnapshotTiming] = {}
        self.acknowledged = asyncio.Event()

    def acked(self, checkpoint_id: int, snapshots: Any, timing: SnapshotTiming) -> None:
        self.timings[checkpoint_id] = timing
        self.acknowledged.set()

    def declined(self, checkpoint_id: int, reason: str, text: str) -> None: ...


class Step:
    """A map, played by hand."""

    def __init__(
        self,
        path: Path,
        threads: ThreadPoolExecutor,
        function: Callable[[int], int] = abs,
        clock: Any = None,
    ) -> None:
        job = hg.Job("barriers", options={"pipeline.operator-chaining.enabled": "false"})
        job.read(numbers(1), name="in").map(function, name="step").write(
            collect(guarantee="none"), name="out"
        )
        plan, vertex = planned(job, "step")
        self.gate = InputGate([InputChannelSpec(number, 0) for number in (0, 1)])
        for channel in (0, 1):
            sender: Any = SimpleNamespace(add_credits=lambda count: None)
            self.gate.open(self.gate.attach(channel, sender))
        self.reports, self.out = Reports(), Output()
        env = task_environment(
            plan,
            vertex,
            path / "local",
            threads,
            clock=clock or SystemClock(),
            reports=self.reports,
        )
        node = vertex.head
        outputs = {node.id: [NodePartition(None, self.out)]}
        self.subtask = InputSubtask(env, outputs, self.gate)

    async def open(self) -> None:
        await self.subtask.prepare(None, False)

    async def read_all(self) -> None:
        while await self.subtask.step():
            pass


def test_what_was_processed_while_aligning_is_told(
    run: Run, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    async def play() -> dict[int, int]:
        step = Step(tmp_path, threads)
        await step.open()
        for checkpoint_id, records in ((1, 3), (2, 0)):
            barrier = CheckpointBarrier(checkpoint_id, 0, CheckpointOptions())
            step.gate.receive(0, ObjectBatch([1, 2]), 0)  # before the first barrier: no alignment
            await step.read_all()
            step.gate.receive_control(0, barrier)
            await step.read_all()
            if records:
                step.gate.receive(1, ObjectBatch([7] * records), 0)
                await step.read_all()
            step.reports.acknowledged.clear()
            step.gate.receive_control(1, barrier)
            await step.read_all()
            await step.reports.acknowledged.wait()
        await step.subtask.cancel()
        return {id_: timing.processed_bytes for id_, timing in step.reports.timings.items()}

    assert run(play()) == {1: 3 * 64, 2: 0}


def test_what_was_processed_for_a_checkpoint_given_up_counts_for_no_other(
    run: Run, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    async def play() -> int:
        step = Step(tmp_path, threads)
        await step.open()
        first, second = (CheckpointBarrier(id_, 0, CheckpointOptions()) for id_ in (1, 2))
        step.gate.receive_control(0, first)
        await step.read_all()
        step.gate.receive(1, ObjectBatch([7, 7, 7]), 0)
        await step.read_all()
        for position in (1, 0):  # the other one never sent the first barrier
            step.gate.receive_control(position, second)
            await step.read_all()
        await step.reports.acknowledged.wait()
        await step.subtask.cancel()
        return step.reports.timings[2].processed_bytes

    assert run(play()) == 0


def test_barriers_in_line_overtake_once_their_checkpoint_is_too_old(
    run: Run, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """One after the other, also where each is overdue when it comes."""

    async def play() -> None:
        step = Step(tmp_path, threads)
        await step.open()
        for checkpoint_id in (1, 2):
            options = CheckpointOptions(aligned_timeout_ms=50)
            step.out.barrier = barrier = CheckpointBarrier(checkpoint_id, 0, options)
            assert step.subtask.in_flight(barrier) is not None
            await step.out.barriers[-1].overtook.wait()
        await step.subtask.cancel()

    run(play())


@pytest.mark.parametrize(("slice_s", "through"), [(0.02, True), (0.001, False)])
def test_others_get_through_behind_a_long_slice(
    run: Run, tmp_path: Path, threads: ThreadPoolExecutor, slice_s: float, through: bool
) -> None:
    """Work of several turns of the event loop does not take as many slices; short ones are soon over."""
    clock, done, both, seen = MovedClock(100.0), asyncio.Event(), asyncio.Event(), []

    def later(turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(later, turns - 1)
        else:
            done.set()

    def work(number: int) -> int:
        clock.now_s += slice_s
        seen.append(done.is_set())
        if number == 1:
            later(5)
            step.gate.receive(0, ObjectBatch([2]), 0)  # not earlier, or both would share a slice
        else:
            both.set()
        return number

    step: Step

    async def play() -> None:
        nonlocal step
        step = Step(tmp_path, threads, work, clock)
        await step.open()
        step.gate.receive(0, ObjectBatch([1]), 0)
        step.subtask.start()
        await both.wait()
        await step.subtask.cancel()

    run(play())
    assert seen == [False, through]


def test_partly_filled_buffers_leave_in_time_while_another_channel_takes_nothing(
    run: Run, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    async def play() -> None:
        step, flushed = Step(tmp_path, threads), asyncio.Event()
        step.out.backlogged = True
        step.out.next_flush = lambda: None if flushed.is_set() else 0.0  # type: ignore[method-assign]
        step.out.flush_due = lambda now: not flushed.is_set()  # type: ignore[method-assign]
        step.out.flush = flushed.set  # type: ignore[attr-defined]
        await step.open()
        step.subtask.start()
        await flushed.wait()
        await step.subtask.cancel()

    run(play())
