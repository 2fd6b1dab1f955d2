"""Jobs with windows of a number of records, and with windows whose contents functions compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, Final, TypeAlias

import headgate as hg

from .counting import Trouble, key_of
from .outside import KEYS, WORLDS, Numbers, World, time_of
from .timed import (
    GAP_MS,
    SESSION_KEYS,
    WINDOW_MS,
    check_sessions,
    check_windows,
    expected_windows,
    missing_sessions,
    ms_of,
)

Result: TypeAlias = tuple[Any, ...]
PER_COUNTED_KEY = 20
"""The numbers of one key of count windows."""
COUNTED: Final = ((4, 6), (5, 2))
"""The size of count windows, and after how many records the next one is due: some leave records out,
others overlap."""


def _counted_key_of(number: int) -> int:
    """Return a key whose numbers come from one split, in order. New keys come all the time."""
    return key_of(number) + KEYS * (number // (KEYS * PER_COUNTED_KEY))


def _counted(world: World) -> tuple[int, int]:
    """Return the count windows that a job has: its seed decides, not drawn from it."""
    return COUNTED[world.seed % len(COUNTED)]


def counts(job: hg.Job, token: str) -> Any:
    """Windows of a number of records of each key."""
    return (
        job.read(Numbers(token, columns=True), name="numbers")
        .select(
            f"number % {KEYS} + {KEYS} * (number // {KEYS * PER_COUNTED_KEY}) AS key",
            "number",
            name="keys",
        )
        .key_by("key")
        .window(hg.count_window(*_counted(WORLDS[token])))
        .agg(numbers=hg.count(), total=hg.sum("number"), last=hg.max("number"), name="counts")
    )


def check_counts(world: World, record: Result) -> None:
    """Check that the results of each key are those of its numbers in order, each once."""
    key = record[0]
    place = len(world.by_key.get(key, ()))
    wanted = expected_counts(world.rows, *_counted(world))[key]
    if place >= len(wanted) or record != wanted[place]:
        raise world.violated(f"out of place: {record}, wanted {wanted[place : place + 1]}")


def missing_counts(world: World) -> list[Any]:
    """Results that did not come."""
    wanted = expected_counts(world.rows, *_counted(world))
    return [result for key in wanted for result in wanted[key][len(world.by_key.get(key, ())) :]]


@cache
def expected_counts(rows: int, size: int, every: int) -> dict[int, list[Result]]:
    """By key: the key, how many numbers, their sum and the last of them, of each window."""
    numbers, found = defaultdict[int, list[int]](list), defaultdict[int, list[Result]](list)
    for number in range(rows):
        key = _counted_key_of(number)
        numbers[key].append(number)
        if len(numbers[key]) % every == 0:
            last = numbers[key][-size:]
            found[key].append((key, len(last), sum(last), number))
    return dict(found)


# -- functions ----------------------------------------------------------------------------------------


class Summed(hg.WindowProcess[int, int, Result]):
    """Adds up the numbers of a window, and says how often it has fired."""

    fired = hg.per_window(hg.ValueState[int](default=0))

    def on_window(
        self, key: int, window: hg.Window, records: list[int], ctx: hg.WindowContext[int]
    ) -> Iterator[Result]:
        self.fired.set(self.fired.get() + 1)
        yield key, window.start_at, len(records), sum(records), self.fired.get()


class Total(hg.AggregateFunction[int, tuple[int, int], tuple[int, int]]):
    """How many numbers there are, and their sum."""

    def create(self) -> tuple[int, int]:
        return 0, 0

    def add(self, accumulator: tuple[int, int], value: int) -> tuple[int, int]:
        return accumulator[0] + 1, accumulator[1] + value

    def result(self, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator

    def merge(self, first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
        return first[0] + second[0], first[1] + second[1]


class Bounded(hg.WindowProcess[int, tuple[int, int], Result]):
    """Adds the key and the bounds of the window to its result."""

    def on_window(
        self,
        key: int,
        window: hg.Window,
        records: list[tuple[int, int]],
        ctx: hg.WindowContext[int],
    ) -> Iterator[Result]:
        yield key, window.start_at, window.end_at, *records[0]


def _session_key_of(number: int) -> int:
    return number % SESSION_KEYS


def _merges(world: World) -> bool:
    """Return True if the windows of a job are sessions: its seed decides, not drawn from it."""
    return world.seed % 2 == 1


def functions(job: hg.Job, token: str) -> Any:
    """Tumbling windows that keep their numbers, or sessions that add them up, of which the seed decides."""
    timed = (
        job.read(Numbers(token), name="numbers")
        .event_time(time_of, max_out_of_order="50ms", name="time")
        .map(Trouble(token), name="trouble")
    )
    if _merges(WORLDS[token]):
        sessions = hg.session(f"{GAP_MS}ms", allowed_lateness="1s")
        windows = timed.key_with(_session_key_of).window(sessions)
        return windows.aggregate(Total(), Bounded(), name="functions")
    tumbling = hg.tumbling(f"{WINDOW_MS}ms", allowed_lateness="1s")
    return timed.key_with(key_of).window(tumbling).process(Summed(), name="functions")


def check_functions(world: World, record: Result) -> None:
    """As of windows and sessions of columns; and a window knows how often it has fired."""
    if _merges(world):
        check_sessions(world, record)
        return
    key, start, *_, fired = record
    before = [other for other in world.by_key.get(key, ()) if other[1] == start]
    if fired != len(before) + 1:
        raise world.violated(f"a window has fired {len(before)} times before: {record}")
    check_windows(world, record[:-1])


def missing_functions(world: World) -> list[Any]:
    """As of windows and sessions of columns."""
    if _merges(world):
        return missing_sessions(world)
    last = {(record[0], ms_of(record[1])): record[2:4] for record in world.visible}
    wanted = expected_windows(world.rows)
    return sorted(window for window in wanted if last.get(window) != wanted[window])
