"""Goal: each key is worked on once at a time, in a fair order, and after growing pauses when it fails.

Method: virtual time. A test moves the clock, and nothing waits.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from headgate.k8s.operator.queue import BACKOFF_S, BACKOFF_S_MAX, Key, WorkQueue
from headgate.testing.loop import VirtualLoop


def key(name: str) -> Key:
    return "StreamJob", "air", name


A, B, C = key("a"), key("b"), key("c")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(clock)


def drain(queue: WorkQueue) -> list[Key]:
    """Take and finish all that is due."""
    taken = []
    while (found := queue.take()) is not None:
        taken.append(found)
        queue.done(found)
    return taken


def test_a_key_that_is_added_often_is_worked_on_once(queue: WorkQueue) -> None:
    for _ in range(5):
        queue.add(A)
    assert drain(queue) == [A]


def test_the_one_that_waits_longest_is_first(queue: WorkQueue, clock: Clock) -> None:
    for each in (C, A, B):
        queue.add(each)
        clock.now += 0.001
    queue.add(C)  # it keeps its place
    assert drain(queue) == [C, A, B]


def test_a_key_that_is_always_added_again_does_not_starve_others(
    queue: WorkQueue, clock: Clock
) -> None:
    for each in (A, B, C):
        queue.add(each)
    taken: Counter[Key] = Counter()
    for _ in range(300):
        found = queue.take()
        assert found is not None
        taken[found] += 1
        clock.now += 0.01
        queue.add(found)
        queue.done(found)
    assert set(taken.values()) == {100}


def test_a_change_during_the_work_is_not_missed_and_not_worked_on_beside_it(
    queue: WorkQueue,
) -> None:
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    assert queue.take() is None
    queue.done(A)
    assert queue.take() == A
    queue.done(A)
    assert queue.take() is None


def test_the_earlier_of_two_times_counts(queue: WorkQueue, clock: Clock) -> None:
    queue.add(A, 10)
    queue.add(A, 30)
    queue.add(B, 30)
    queue.add(B, 10)
    clock.now += 9
    assert drain(queue) == []
    clock.now += 2
    assert drain(queue) == [A, B]
    clock.now += 100
    assert drain(queue) == []


def pauses(queue: WorkQueue, clock: Clock, count: int) -> list[float]:
    """Return the waiting times of a key that always fails."""
    found = []
    queue.add(A)
    for _ in range(count):
        while queue.take() is None:
            clock.now += 0.25
        queue.failed(A)
        began = clock.now
        while queue._wait_s():
            clock.now += queue._wait_s() or 0.0
        found.append(clock.now - began)
    return found


def test_pauses_double_up_to_a_bound_and_begin_again_after_a_success(
    queue: WorkQueue, clock: Clock
) -> None:
    expected = [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pauses(queue, clock, 10) == expected
    assert drain(queue) == [A]
    assert pauses(queue, clock, 2) == expected[:2]


def test_a_thousand_failures_are_no_overflow(queue: WorkQueue, clock: Clock) -> None:
    assert pauses(queue, clock, 1000)[-1] == BACKOFF_S_MAX


def test_a_change_ends_the_pause_after_a_failure(queue: WorkQueue, clock: Clock) -> None:
    """A user who corrects the spec does not wait for the pause."""
    pauses(queue, clock, 6)
    assert queue.take() == A
    queue.failed(A)
    assert queue.take() is None
    queue.add(A)
    assert queue.take() == A


def test_the_time_that_the_server_asks_for_is_kept_within_the_bound(
    queue: WorkQueue, clock: Clock
) -> None:
    queue.add(A)
    assert queue.take() == A
    queue.add(A)  # not even a change during the work shortens it
    queue.failed(A, 7.0)
    clock.now += 6.9
    assert queue.take() is None
    clock.now += 0.2
    assert queue.take() == A
    queue.failed(A, 10_000.0)
    clock.now += BACKOFF_S_MAX
    assert queue.take() == A


def test_keys_that_are_done_leave_nothing_behind(queue: WorkQueue) -> None:
    """Names come and go; the queue must not grow with those that there ever were."""
    for number in range(1000):
        queue.add(key(str(number)))
        found = queue.take()
        assert found is not None
        queue.failed(found)
        queue.add(found)
        assert queue.take() == found
        queue.done(found)
    assert (queue._due, queue._working, queue._failures) == ({}, set(), {})


def test_the_age_of_the_oldest_key(queue: WorkQueue, clock: Clock) -> None:
    assert queue.oldest_s() == 0
    queue.add(A, 5)
    assert queue.oldest_s() == 0
    clock.now += 8
    assert queue.oldest_s() == pytest.approx(3)
    queue.add(B)
    assert queue.take() == A
    clock.now += 1
    assert queue.oldest_s() == pytest.approx(1)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop(3)
    asyncio.set_event_loop(made)
    yield made
    made.close()
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("seed", range(5))
def test_many_workers_never_share_a_key_and_miss_none(loop: VirtualLoop, seed: int) -> None:
    queue = WorkQueue(loop.time)
    rng = random.Random(seed)
    working: set[Key] = set()
    wanted: Counter[Key] = Counter()
    """Changes that nobody has begun to work on yet."""

    async def work() -> None:
        while True:
            found = await queue.next()
            assert found not in working
            working.add(found)
            wanted[found] = 0
            await asyncio.sleep(rng.random())
            working.remove(found)
            if rng.random() < 0.3:
                queue.failed(found)
            else:
                queue.done(found)

    async def change() -> None:
        for _ in range(500):
            await asyncio.sleep(rng.random() / 10)
            found = key(str(rng.randrange(12)))
            wanted[found] += 1
            queue.add(found, rng.choice((0.0, 0.0, 3.0)))

    workers = [loop.create_task(work()) for _ in range(8)]
    changing = loop.create_task(change())
    loop.drive(500 + BACKOFF_S_MAX)
    assert changing.done()
    assert not working
    assert not any(wanted.values())
    assert queue.oldest_s() == 0
    for task in workers:
        assert not task.done()
        task.cancel()
    loop.drive(loop.time() + 1)


def test_a_worker_sleeps_until_something_is_due(loop: VirtualLoop) -> None:
    queue = WorkQueue(loop.time)
    found: list[tuple[float, Key]] = []

    async def work() -> None:
        while True:
            taken = await queue.next()
            found.append((loop.time(), taken))
            queue.done(taken)

    task = loop.create_task(work())
    queue.add(A, 40)
    loop.drive(10)
    queue.add(B, 5)
    loop.drive(20)
    queue.add(A)
    loop.drive(1000)
    assert [(round(at, 3), each) for at, each in found] == [(15, B), (20, A)]
    task.cancel()
    loop.drive(1001)


def test_the_first_pause_is_short() -> None:
    assert BACKOFF_S <= 1
