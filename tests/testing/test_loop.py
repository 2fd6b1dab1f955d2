"""The loop on virtual time: what it promises, and what it relies on in CPython."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from headgate.errors import JobError
from headgate.testing.loop import START_MS, VirtualClock, VirtualLoop
from headgate.testing.run import waiting_tasks


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(seed=1)
    yield loop
    loop.close()


def test_nothing_moves_unless_driven(loop: VirtualLoop) -> None:
    seen: list[str] = []
    loop.call_soon(seen.append, "soon")
    loop.call_later(5.0, seen.append, "later")
    assert seen == []
    loop.drive()
    assert (seen, loop.time()) == (["soon"], 0.0)
    loop.drive()
    assert seen == ["soon"]


def test_time_jumps_from_timer_to_timer(loop: VirtualLoop) -> None:
    seen: list[tuple[str, float]] = []
    for name, delay in (("c", 86_400.0), ("a", 0.2), ("b", 0.3)):
        loop.call_later(delay, lambda name=name: seen.append((name, loop.time())))
    loop.drive(0.3)
    assert seen == [("a", 0.2), ("b", 0.3)]
    loop.drive(400_000.0)
    assert seen[2:] == [("c", 86_400.0)]
    assert loop.time() == 400_000.0


def test_timers_made_on_the_way_fire_on_the_way(loop: VirtualLoop) -> None:
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(loop.time())
        loop.call_later(0.1, tick)

    tick()
    loop.drive(10.0)
    assert len(ticks) == 101
    assert ticks[-1] == pytest.approx(10.0)


def test_timers_fire_after_a_year(loop: VirtualLoop) -> None:
    year_s = 31_557_600.0
    loop.drive(year_s)
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(loop.time())
        loop.call_later(0.1, tick)

    tick()
    loop.drive(year_s + 10)
    assert len(ticks) == 101


def test_the_wall_clock_shows_whole_milliseconds(loop: VirtualLoop) -> None:
    clock = VirtualClock(loop)
    shown: list[int] = []

    def tick() -> None:
        shown.append(clock.now_ms() - START_MS)
        loop.call_later(0.001, tick)

    tick()
    loop.drive(1.0)
    assert shown == list(range(1001))


def test_work_for_threads_runs_here(loop: VirtualLoop) -> None:
    async def work() -> tuple[int, bool]:
        ident = await asyncio.to_thread(threading.get_ident)
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        return ident, True

    task = loop.create_task(work())
    loop.drive()
    assert task.result() == (threading.get_ident(), True)


def test_work_that_was_cancelled_before_its_turn_is_not_done(loop: VirtualLoop) -> None:
    done: list[int] = []
    loop.run_in_executor(None, done.append, 1).cancel()
    loop.drive()
    assert done == []


def _order(seed: int) -> str:
    loop = VirtualLoop(seed)
    seen: list[str] = []

    async def say(name: str) -> None:
        for _ in range(2):
            seen.append(name)
            await asyncio.sleep(0)

    for name in "abcdef":
        loop.create_task(say(name))
    loop.drive()
    loop.close()
    return "".join(seen)


def test_the_seed_decides_whose_turn_it_is() -> None:
    """Pins that tasks are found in the queue of what is ready, both at their start and woken up."""
    orders = [_order(seed) for seed in range(20)]
    assert orders == [_order(seed) for seed in range(20)]
    assert len({order[:6] for order in orders}) > 10
    assert len({order[6:] for order in orders}) > 10
    assert all(sorted(order) == sorted("abcdef" * 2) for order in orders)


def test_woken_tasks_take_turns_by_the_seed() -> None:
    def woken(seed: int) -> str:
        loop = VirtualLoop(seed)
        seen: list[str] = []
        events = [asyncio.Event() for _ in range(6)]

        async def wait(name: str, event: asyncio.Event) -> None:
            await event.wait()
            seen.append(name)

        for name, event in zip("abcdef", events, strict=True):
            loop.create_task(wait(name, event))
        loop.drive()
        for event in events:
            event.set()
        loop.drive()
        loop.close()
        return "".join(seen)

    assert len({woken(seed) for seed in range(20)}) > 10


def test_plain_callbacks_keep_their_order(loop: VirtualLoop) -> None:
    seen: list[int] = []

    async def nothing() -> None: ...

    for number in range(50):
        loop.call_soon(seen.append, number)
        loop.create_task(nothing())
    loop.drive()
    assert seen == list(range(50))


def test_running_in_circles_is_an_error(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.testing.loop.ROUNDS_MAX", 1_000)

    rounds: list[asyncio.Handle] = []

    def circle() -> None:
        rounds.append(loop.call_soon(circle))

    circle()
    with pytest.raises(JobError, match="does not come to rest"):
        loop.drive()
    rounds[-1].cancel()
    loop.drive()
    assert 1_000 <= len(rounds) <= 1_010


def test_tasks_say_where_they_wait(loop: VirtualLoop) -> None:
    async def inner() -> None:
        await asyncio.sleep(3)  # waits here

    async def outer() -> None:
        await inner()

    task = loop.create_task(outer(), name="the task")
    loop.drive()
    text = waiting_tasks(loop)
    assert text.startswith(f"the task: {__file__}:")
    assert text.endswith("await asyncio.sleep(3)  # waits here")
    task.cancel()
    loop.drive()
    assert waiting_tasks(loop) == "nothing"
