"""Jobs in event time: windows of columns, timers of keys."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import headgate as hg

from .counting import PER_KEY, Trouble, key_of
from .outside import KEYS, WORLDS, Numbers, World, time_of

WINDOW_MS = 1000
GAP_MS = 120
"""The gap of sessions: some numbers of a key are further apart, and others are not."""
DELAY_MS = 300
"""`Delayed` keeps numbers for this time: there are dozens of timers in each second of a job."""
SESSION_KEYS = 7
"""The keys of sessions, each of which has numbers of all splits."""
OVERLAPPING: Final = (
    (hg.sliding("1s", "250ms", allowed_lateness="1s"), 250, (1000,)),
    (hg.cumulative("1s", "250ms", allowed_lateness="1s"), 1000, (250, 500, 750, 1000)),
)
"""Windows made of panes: how far apart they begin, and how long they are, in ms."""


def windows(job: hg.Job, token: str, queryable: str | hg.Queryable = "") -> Any:
    """Tumbling windows. Watermarks are early: what comes behind them makes a window fire again."""
    return (
        job.read(Numbers(token, columns=True), name="numbers")
        .event_time("at", max_out_of_order="50ms", name="time")
        .key_by("key")
        .window(hg.tumbling(f"{WINDOW_MS}ms", allowed_lateness="1s"))
        .agg(numbers=hg.count(), total=hg.sum("number"), name="windows", queryable=queryable)
        .select("key", "window_start", "numbers", "total")
    )


def queried_windows(job: hg.Job, token: str) -> Any:
    """The same windows, which clients read."""
    return windows(job, token, hg.Queryable("windows", committed=True))


def check_windows(world: World, record: tuple[Any, ...]) -> None:
    """A window that fires again has more in it, and never too much."""
    key, start, numbers, _ = record
    before = [other[2] for other in world.by_key.get(key, ()) if other[1] == start]
    wanted = expected_windows(world.rows).get((key, ms_of(start)), (0, 0))
    if not max(before, default=0) < numbers <= wanted[0]:
        raise world.violated(f"a window of {wanted} fired behind {before}: {record}")


def missing_windows(world: World) -> list[Any]:
    """Windows that are not, or did not become, what they must."""
    last = {(record[0], ms_of(record[1])): record[2:] for record in world.visible}
    wanted = expected_windows(world.rows)
    return sorted(window for window in wanted if last.get(window) != wanted[window])


def ms_of(start: Any) -> int:
    """Return a bound of a window in ms since 1970."""
    return round(1000 * start.timestamp())


@cache
def expected_windows(rows: int) -> dict[tuple[int, int], tuple[int, int]]:
    """By key and start: how many numbers, and their sum."""
    counts, totals = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for number in range(rows):
        window = (key_of(number), time_of(number) // WINDOW_MS * WINDOW_MS)
        counts[window] += 1
        totals[window] += number
    return {window: (counts[window], totals[window]) for window in counts}


def _which(world: World) -> int:
    """Return which of the overlapping windows a job has: its seed decides, not drawn from it."""
    return world.seed % len(OVERLAPPING)


def panes(job: hg.Job, token: str) -> Any:
    """Sliding or cumulative windows, of which the seed decides. They fire again as tumbling ones do."""
    window, _, _ = OVERLAPPING[_which(WORLDS[token])]
    return (
        job.read(Numbers(token, columns=True), name="numbers")
        .event_time("at", max_out_of_order="50ms", name="time")
        .key_by("key")
        .window(window)
        .agg(numbers=hg.count(), total=hg.sum("number"), name="panes")
        .select("key", "window_start", "window_end", "numbers", "total")
    )


def check_panes(world: World, record: tuple[Any, ...]) -> None:
    """As of tumbling windows."""
    key, start, end, numbers, _ = record
    before = [other[3] for other in world.by_key.get(key, ()) if other[1:3] == (start, end)]
    wanted = expected_panes(world.rows, _which(world)).get((key, ms_of(start), ms_of(end)), (0, 0))
    if not max(before, default=0) < numbers <= wanted[0]:
        raise world.violated(f"a window of {wanted} fired behind {before}: {record}")


def missing_panes(world: World) -> list[Any]:
    """As of tumbling windows."""
    last = {(key, ms_of(start), ms_of(end)): rest for key, start, end, *rest in world.visible}
    wanted = expected_panes(world.rows, _which(world))
    return sorted(window for window in wanted if last.get(window) != wanted[window])


@cache
def expected_panes(rows: int, which: int) -> dict[tuple[int, int, int], list[int]]:
    """By key, start and end: how many numbers, and their sum."""
    found = defaultdict[tuple[int, int, int], list[int]](lambda: [0, 0])
    _, every, lengths = OVERLAPPING[which]
    for number in range(rows):
        time = time_of(number)
        for length in lengths:
            for start in range(time // every * every, time - length, -every):
                of_window = found[key_of(number), start, start + length]
                of_window[0] += 1
                of_window[1] += number
    return dict(found)


def sessions(job: hg.Job, token: str) -> Any:
    """Sessions. They fire again as windows do, and are extended and merged by what comes late."""
    return (
        job.read(Numbers(token, columns=True), name="numbers")
        .select(f"number % {SESSION_KEYS} AS key", "number", "at", name="keys")
        .event_time("at", max_out_of_order="50ms", name="time")
        .key_by("key")
        .window(hg.session(f"{GAP_MS}ms", allowed_lateness="1s"))
        .agg(numbers=hg.count(), total=hg.sum("number"), name="sessions")
        .select("key", "window_start", "window_end", "numbers", "total")
    )


def check_sessions(world: World, record: tuple[Any, ...]) -> None:
    """A result is of a part of one session, and of more each time."""
    key, start, end, numbers, _ = record
    bounds = ms_of(start), ms_of(end)
    before = [other[3] for other in world.by_key.get(key, ()) if other[1:3] == (start, end)]
    for first, last, *wanted in expected_sessions(world.rows)[key]:
        if first <= bounds[0] and bounds[1] <= last:
            if max(before, default=0) < numbers <= wanted[0]:
                return
            raise world.violated(f"a session of {wanted} fired behind {before}: {record}")
    raise world.violated(f"there is no such session: {record}")


def missing_sessions(world: World) -> list[Any]:
    """Sessions of which the last result is not that of the whole."""
    last = {(key, ms_of(start), ms_of(end)): rest for key, start, end, *rest in world.visible}
    return sorted(
        (key, *bounds)
        for key, sessions in expected_sessions(world.rows).items()
        for *bounds, numbers, total in sessions
        if last.get((key, *bounds)) != [numbers, total]
    )


@cache
def expected_sessions(rows: int) -> dict[int, list[list[int]]]:
    """By key, start, end, how many numbers, and their sum of each session."""
    found = defaultdict[int, list[list[int]]](list)
    for number in sorted(range(rows), key=time_of):
        time, of_key = time_of(number), found[number % SESSION_KEYS]
        if not of_key or of_key[-1][1] < time:
            of_key.append([time, 0, 0, 0])
        of_key[-1][1:] = [time + GAP_MS, of_key[-1][2] + 1, of_key[-1][3] + number]
    return dict(found)


def running(job: hg.Job, token: str) -> Any:
    """Running aggregates: their present results, again with each batch. New keys come all the time."""
    return (
        job.read(Numbers(token, columns=True), name="numbers")
        .select(f"number // {PER_KEY} AS key", "number", name="keys")
        .key_by("key")
        .agg(
            numbers=hg.count(),
            total=hg.sum("number"),
            different=hg.count_distinct("number"),
            name="running",
        )
    )


def check_running(world: World, record: tuple[Any, ...]) -> None:
    """Each number is counted once, and the results of a key grow."""
    key, numbers, _, different = record
    before = max((other[1] for other in world.by_key.get(key, ())), default=0)
    wanted = expected_totals(world.rows)[key]
    if not before < numbers == different <= wanted[0]:
        raise world.violated(f"a result of {wanted} behind {before}: {record}")


def missing_running(world: World) -> list[Any]:
    """Keys whose last result is not what it must be."""
    last = {record[0]: record[1:3] for record in world.visible}
    wanted = expected_totals(world.rows)
    return sorted(key for key in wanted if last.get(key) != wanted[key])


@cache
def expected_totals(rows: int) -> dict[int, tuple[int, int]]:
    """By key: how many numbers, and their sum."""
    counts, totals = Counter[int](), Counter[int]()
    for number in range(rows):
        counts[number // PER_KEY] += 1
        totals[number // PER_KEY] += number
    return {key: (counts[key], totals[key]) for key in counts}


class Sorted(hg.KeyedProcess[int, int, tuple[int, int, int]]):
    """Lets the numbers of each key go in the order of event time, a timer for each."""

    waiting = hg.MapState[int, int]()
    count = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: hg.Context[int]) -> None:
        self.waiting.put(record, record)
        ctx.event_time.at(time_of(record), tag=f"{record:06}")

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[tuple[int, int, int]]:
        number = int(timer.tag)
        if self.waiting.get(number) is not None:
            self.waiting.remove(number)
            self.count.set(self.count.get() + 1)
            yield ctx.key, self.count.get(), number


class Delayed(hg.KeyedProcess[int, int, tuple[int, int, int]]):
    """Keeps each number for a while, by the clock of the machine: so some are always about to go."""

    waiting = hg.MapState[int, int]()
    count = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: hg.Context[int]) -> None:
        self.waiting.put(record, record)
        ctx.processing_time.after(f"{DELAY_MS}ms", tag=f"{record:06}")

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[tuple[int, int, int]]:
        number = int(timer.tag)
        self.waiting.remove(number)
        self.count.set(self.count.get() + 1)
        yield ctx.key, self.count.get(), number


def delayed(job: hg.Job, token: str) -> Any:
    """Numbers that go when timers of the machine's clock say so, and not when records come."""
    return (
        job.read(Numbers(token), name="numbers")
        .map(Trouble(token), name="trouble")
        .key_with(key_of)
        .process(Delayed(), name="delay")
    )


def check_delayed(world: World, record: tuple[int, ...]) -> None:
    """Check that each number of a key comes once, whenever it comes."""
    key, count, number = record
    before = world.by_key.get(key, ())
    if count != len(before) + 1 or key != key_of(number):
        raise world.violated(f"number {count} of its key behind {len(before)}: {record}")
    if any(other[2] == number for other in before):
        raise world.violated(f"a number came again: {record}")


def timers(job: hg.Job, token: str) -> Any:
    """Sorting by event time: state comes and goes, timers with it."""
    return (
        job.read(Numbers(token), name="numbers")
        .event_time(time_of, max_out_of_order="130ms", name="time")
        .map(Trouble(token), name="trouble")
        .key_with(key_of)
        .process(Sorted(), name="sort")
    )


def check_timers(world: World, record: tuple[int, ...]) -> None:
    """Check that the numbers of each key come in the order of their times."""
    key, count, number = record
    place = len(world.by_key.get(key, ()))
    order = expected_order(world.rows)[key]
    if count != place + 1 or number != order[place]:
        raise world.violated(f"out of order: {record}, wanted {order[place]}")


@cache
def expected_order(rows: int) -> dict[int, list[int]]:
    """The numbers of each key by time."""
    order: dict[int, list[int]] = defaultdict(list)
    for number in sorted(range(rows), key=lambda number: (time_of(number), number)):
        order[number % KEYS].append(number)
    return order
