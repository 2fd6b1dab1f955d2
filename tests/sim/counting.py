"""Jobs that number the records of each key: what is lost, doubled or out of order shows at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import headgate as hg
from headgate.operators.base import OperatorContext

from .outside import KEYS, SPLITS, WORLDS, GrowingNumbers, Ledger, Numbers, World

RULES = 40
PER_KEY = 12
"""The numbers of one key where new keys come all the time."""


class Counted(hg.KeyedProcess[int, int, tuple[int, int, int]]):
    """Numbers the records of each key."""

    count = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[tuple[int, int, int]]:
        count = self.count.get() + 1
        self.count.set(count)
        yield record % KEYS, count, record


class CountedForClients(Counted):
    """The same with a count that clients read while the job runs.

    Attributes:
        counted: the counts of the keys that this copy has seen.
    """

    count = hg.ValueState[int](default=0, queryable=hg.Queryable("count", committed=True))

    def __init__(self) -> None:
        self.counted: dict[int, int] = {}

    def open(self, ctx: OperatorContext) -> None:
        self._world, self._place = WORLDS["sim"], (ctx.attempt, ctx.subtask_index)

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[tuple[int, int, int]]:
        for result in super().on_record(record, ctx):
            self.counted[result[0]] = result[1]
            self._world.live.setdefault(self._place[0], {})[result[0]] = result[1]
            yield result

    def close(self) -> None:
        self._world.closed.add(self._place)


class CountedAgain(hg.KeyedProcess[int, tuple[int, int, int], tuple[int, int, int, int]]):
    """Numbers what comes in behind the first count."""

    count = hg.ValueState[int](default=0)

    def on_record(
        self, record: tuple[int, int, int], ctx: hg.Context[int]
    ) -> Iterator[tuple[int, int, int, int]]:
        count = self.count.get() + 1
        self.count.set(count)
        key, first, number = record
        yield key, count, number, first


class Trouble:
    """A function of the user's that raises now and then."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, record: Any) -> Any:
        world = WORLDS[self._token]
        world.perhaps_fail(world.faults.map_rate, "user error")
        return record


class Asked:
    """A service that takes its time, and fails now and then."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def __call__(self, record: Any) -> Any:
        world = WORLDS[self._token]
        await asyncio.sleep(world.rng.expovariate(1 / 0.02))
        world.perhaps_fail(world.faults.map_rate, "the service fails")
        return record


def key_of(number: int) -> int:
    """Of a number."""
    return number % KEYS


def first_of(record: tuple[int, ...]) -> int:
    """The key is in front."""
    return record[0]


# -- one count ----------------------------------------------------------------------------------------


def count(job: hg.Job, token: str) -> Any:
    """One shuffle, in front of the count."""
    numbers = job.read(Numbers(token), name="numbers").map(Trouble(token), name="trouble")
    return numbers.key_with(key_of).process(Counted(), name="count")


def queried(job: hg.Job, token: str) -> Any:
    """The same count, which clients read."""
    numbers = job.read(Numbers(token), name="numbers").map(Trouble(token), name="trouble")
    return numbers.key_with(key_of).process(CountedForClients(), name="count")


def growing(job: hg.Job, token: str) -> Any:
    """A count of splits that become more while the job runs."""
    return _growing(job, token).key_with(key_of).process(Counted(), name="count")


def growing_regions(job: hg.Job, token: str) -> Any:
    """The same without an exchange: subtasks restart on their own."""
    return _growing(job, token).map(alone, name="alone")


def _growing(job: hg.Job, token: str) -> Any:
    job.options["headgate.source.discovery-interval"] = "150ms"
    world = WORLDS[token]
    world.listing_rate = world.rng.choice((0.8, 1.0))
    world.growth_rate = world.rng.choice((0.05, 0.3))
    numbers = job.read(GrowingNumbers(token), name="numbers")
    return numbers.map(Trouble(token), name="trouble")


def asked(job: hg.Job, token: str) -> Any:
    """The same behind calls of a service; the records under way are state."""
    numbers = job.read(Numbers(token), name="numbers")
    answers = numbers.map_async(Asked(token), name="ask", max_in_flight=20, timeout="10m")
    return answers.key_with(key_of).process(Counted(), name="count")


def asked_by_key(job: hg.Job, token: str) -> Any:
    """The calls of a key are one behind the other, and stay with it."""
    numbers = job.read(Numbers(token), name="numbers").key_with(key_of)
    answers = numbers.map_async(Asked(token), name="ask", max_in_flight=20, timeout="10m")
    return answers.key_with(key_of).process(Counted(), name="count")


def check_asked(world: World, record: tuple[int, ...]) -> None:
    """Check that counts of each key are dense, and numbers come once; rescaled jobs have no order."""
    key, count, number = record
    seen = world.by_key.get(key, [])
    if key != key_of(number) or count != len(seen) + 1:
        raise world.violated(f"out of place: {record}, {len(seen)} of the key are visible")
    check_once(world, record)


def check_count(world: World, record: tuple[int, ...]) -> None:
    """Check that the numbers of each key come in order, once, and with the right count."""
    key, count, number = record
    wanted = len(world.by_key.get(key, ())) + 1
    if (key, count, number) != (key_of(number), wanted, key + (wanted - 1) * KEYS):
        raise world.violated(f"out of place: {record}, wanted number {wanted} of the key")


def alone(number: int) -> tuple[int, int, int]:
    """Return the result of a count for a number, without a state."""
    return key_of(number), number // KEYS + 1, number


def regions(job: hg.Job, token: str) -> Any:
    """A count of some splits; the others go through subtasks without a channel in between."""
    rest = job.read(Numbers(token, range(2, SPLITS)), name="others")
    rest = rest.map(Trouble(token), name="trouble beside").map(alone, name="alone")
    rest.write(Ledger(token), name="out beside")
    numbers = job.read(Numbers(token, range(2)), name="numbers")
    counted = numbers.map(Trouble(token), name="trouble").key_with(key_of)
    return counted.process(Counted(), name="count")


# -- a reduce -----------------------------------------------------------------------------------------


def numbered(number: int) -> tuple[int, int, int]:
    """Return a number with its key as the first of it. New keys come all the time."""
    return number // PER_KEY, 1, number


def next_of(value: tuple[int, int, int], record: tuple[int, int, int]) -> tuple[int, int, int]:
    """Count the numbers of a key."""
    return value[0], value[1] + 1, record[2]


def reduced(job: hg.Job, token: str) -> Any:
    """A count of each key's numbers by a function of two records."""
    numbers = job.read(Numbers(token), name="numbers").map(Trouble(token), name="trouble")
    keyed = numbers.map(numbered, name="numbered").key_with(first_of)
    return keyed.reduce(next_of, name="reduce")


def check_reduced(world: World, record: tuple[int, ...]) -> None:
    """Check that the count of each key is dense, and that each number comes once."""
    seen = world.by_key.get(record[0], [])
    if record[0] != record[2] // PER_KEY or record[1] != len(seen) + 1:
        raise world.violated(f"out of place: {record}, {len(seen)} of the key are visible")
    check_once(world, record)


# -- two counts ---------------------------------------------------------------------------------------


def shuffles(job: hg.Job, token: str) -> Any:
    """Three shuffles; the second loses the order, but nothing else."""
    return (
        job.read(Numbers(token), name="numbers")
        .key_with(key_of)
        .process(Counted(), name="count")
        .rebalance()
        .map(Trouble(token), name="trouble")
        .key_with(first_of)
        .process(CountedAgain(), name="again")
    )


def check_shuffles(world: World, record: tuple[int, ...]) -> None:
    """The first count must be right; the second dense and in order; no number may come twice."""
    key, second, number, first = record
    seen = world.by_key.get(key, [])
    if first != number // KEYS + 1 or key != key_of(number):
        raise world.violated(f"the first step counted wrong: {record}")
    if second != len(seen) + 1:
        raise world.violated(f"out of place: {record}, {len(seen)} of the key are visible")
    check_once(world, record)


def check_once(world: World, record: tuple[int, ...]) -> None:
    """Each number comes once."""
    if any(record[2] == other[2] for other in world.by_key.get(record[0], ())):
        raise world.violated(f"visible twice: {record}")


# -- two inputs ---------------------------------------------------------------------------------------


def union(job: hg.Job, token: str) -> Any:
    """Two sources in one stream; of each the order stays."""
    first = job.read(Numbers(token), name="numbers")
    second = job.read(Numbers(token, part=1), name="more-numbers")
    both = first.union(second).map(Trouble(token), name="trouble")
    return both.key_with(key_of).process(Counted(), name="count")


def hybrid(job: hg.Job, token: str) -> Any:
    """A source and then another one, in front of the count."""
    return _past_and_live(job, token).key_with(key_of).process(Counted(), name="count")


def hybrid_regions(job: hg.Job, token: str) -> Any:
    """The same without an exchange: subtasks restart on their own, and still wait for each other."""
    return _past_and_live(job, token).map(alone, name="alone")


def _past_and_live(job: hg.Job, token: str) -> Any:
    """In some worlds there are no checkpoints in the backlog."""
    history = Numbers(token)
    history.bounded = True
    if WORLDS[token].rng.random() < 0.5:
        job.options["execution.checkpointing.interval-during-backlog"] = "0s"
    both = job.read(hg.hybrid_source(history, Numbers(token, part=1)), name="numbers")
    return both.map(Trouble(token), name="trouble")


def check_union(world: World, record: tuple[int, ...]) -> None:
    """The count is dense; of each source the numbers come in order."""
    key, count, number = record
    seen = world.by_key.get(key, [])
    part = number // world.rows
    before = sum(other[2] // world.rows == part for other in seen)
    place = next(n for n in range(part * world.rows, number + 1) if n % KEYS == key)
    if count != len(seen) + 1 or number != place + before * KEYS:
        raise world.violated(f"out of place: {record}, {len(seen)} of the key are visible")


class Pairs(hg.CoProcess[int, int, int, tuple[int, int, int]]):
    """Waits for the other half of each number."""

    waiting = hg.MapState[int, int]()

    def on_first(self, record: int, ctx: hg.Context[int]) -> Iterator[tuple[int, int, int]]:
        yield from self._met(record, 1)

    def on_second(self, record: int, ctx: hg.Context[int]) -> Iterator[tuple[int, int, int]]:
        yield from self._met(record, 2)

    def _met(self, record: int, side: int) -> Iterator[tuple[int, int, int]]:
        other = self.waiting.get(record)
        if other is None:
            self.waiting.put(record, side)
        else:
            self.waiting.remove(record)
            yield record % KEYS, other + side, record


def pairs(job: hg.Job, token: str) -> Any:
    """Two sources of the same numbers; each number waits for itself."""
    first = job.read(Numbers(token), name="numbers").map(Trouble(token), name="trouble")
    second = job.read(Numbers(token), name="same-numbers")
    both = first.key_with(key_of).connect(second.key_with(key_of))
    return both.process(Pairs(), name="pairs")


def check_pairs(world: World, record: tuple[int, ...]) -> None:
    """Check that a pair has one record of both sides, and that each number comes once."""
    if record[1] != 3 or record[0] != key_of(record[2]):
        raise world.violated(f"a number met itself: {record}")
    check_once(world, record)


class Ruled(hg.BroadcastProcess[int, int, int, tuple[int, int, int, int]]):
    """Numbers the records of each key; says how many rules it knows."""

    count = hg.ValueState[int](default=0)
    rules = hg.BroadcastState[int, int]()

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[tuple[int, int, int, int]]:
        count = self.count.get() + 1
        self.count.set(count)
        yield record % KEYS, count, record, sum(1 for _ in self.rules.values())

    def on_broadcast(self, record: int, ctx: hg.BroadcastContext[int]) -> None:
        self.rules.put(record, record)


def ruled(job: hg.Job, token: str) -> Any:
    """A count, beside rules that all subtasks learn."""
    rules = job.read(Numbers(token, rows=RULES), name="rules").broadcast()
    numbers = job.read(Numbers(token), name="numbers").map(Trouble(token), name="trouble")
    return numbers.key_with(key_of).connect(rules).process(Ruled(), name="count")


def check_ruled(world: World, record: tuple[int, ...]) -> None:
    """As a count; and of each key, what is known is never forgotten."""
    known = [other[3] for other in world.by_key.get(record[0], ())][-1:]
    if not (known or [0])[0] <= record[3] <= RULES:
        raise world.violated(f"rules were forgotten: {record}, {known} before")
    check_count(world, record[:3])
