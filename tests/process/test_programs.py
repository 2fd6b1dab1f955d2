"""Random programs of state operations give what a plain model gives, on every way to the state.

The records say what the function does with its states. There is a short way to values in memory, another
one with RocksDB, and longer ones where values expire, are read by clients, or are taken back after an
error. On each of them the results, the states and the timers must be those of the model, which takes one
record at a time, through checkpoints that are written later, restores at other parallelisms, and calls
that fail in the middle of a batch.
"""

from __future__ import annotations

import copy
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import headgate as hg
from headgate.errors import UserCodeError
from headgate.operators.elements import WATERMARK_MIN
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keyed.base import ABSENT
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import CommitPermit
from headgate.tests.support.subtasks import MAX_PARALLELISM, Step

LIVES = 40 if os.environ.get("HEADGATE_THOROUGH") else 1
KEYS: dict[str, list[Any]] = {
    "ints": [0, -1, 250, 251, 502, 2**40],
    "texts": ["", "a", "b", "key" * 9, "é", "z"],
    "mixed": [("a", 1), ("a", True), None, 1, "1", b"1"],
}
SCALARS = ("number", "ratio", "text")


class Total:
    """An accumulator that changes in place."""

    def create(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], value: int) -> list[int]:
        accumulator.append(value)
        return accumulator

    def result(self, accumulator: list[int]) -> int:
        return sum(accumulator)


class Program:
    """The operations, on handles of states or on those of the model, which have the same methods."""

    number: Any
    ratio: Any
    text: Any
    items: Any
    elements: Any
    entries: Any
    added: Any
    total: Any

    def run(self, operations: Iterable[tuple[Any, ...]], ctx: Any) -> Iterator[Any]:
        for name, *given in operations:
            result = getattr(self, name)(ctx, *given)
            if result is not None:
                yield result

    def count(self, ctx: Any, step: int) -> None:
        self.number.set(self.number.get() + step)

    def divide(self, ctx: Any, by: float) -> None:
        self.ratio.set((self.ratio.get() or 1.0) / by)

    def write(self, ctx: Any, text: str | None) -> None:
        self.text.set(text)

    def append(self, ctx: Any, value: int) -> None:
        self.items.get().append(-1)  # of a copy
        self.items.set([*self.items.get(), value])

    def extend(self, ctx: Any, values: list[int]) -> None:
        self.elements.add_all(values)

    def replace(self, ctx: Any, values: list[int]) -> None:
        self.elements.update(values)

    def put(self, ctx: Any, entry: str, value: int) -> None:
        self.entries.put(entry, value)

    def remove(self, ctx: Any, entry: str) -> None:
        self.entries.remove(entry)

    def add(self, ctx: Any, value: int) -> None:
        self.added.add(value)
        self.total.add(value)

    def forget(self, ctx: Any, state: str) -> None:
        getattr(self, state).clear()

    def remind(self, ctx: Any, delay: int, tag: str) -> None:
        ctx.event_time.at(ctx.timestamp + delay, tag=tag)

    def cancel(self, ctx: Any, tag: str) -> None:
        ctx.event_time.cancel(tag)

    def fail(self, ctx: Any) -> None:
        raise ValueError("as told")

    def show(self, ctx: Any) -> Any:
        scalars = [(getattr(self, name).get(), getattr(self, name).exists()) for name in SCALARS]
        entries = sorted(self.entries.items()), "a" in self.entries, self.entries.is_empty()
        return (
            ctx.key, ctx.timestamp, ctx.watermark, *scalars, self.items.get(), list(self.elements),
            entries, self.added.get(), self.total.get(),
        )  # fmt: skip

    def due(self, tag: str, ctx: Any) -> Iterator[Any]:
        """Handle a timer."""
        self.number.set(self.number.get() + 1)
        yield tag, self.show(ctx)
        if tag == "again" and self.number.get() % 3:
            ctx.event_time.at(ctx.timestamp + 4, tag=tag)


class Plan(Program, hg.KeyedProcess[Any, Any, Any]):
    """Runs the program of each record, in one of the forms that results have."""

    late = hg.SideOutput[Any]()

    def on_record(self, record: Any, ctx: hg.Context[Any]) -> Any:
        _, form, operations = record
        made = self.run(operations, ctx)
        if form == "generator":
            return made
        results = list(made)
        if form == "side":
            for result in results:
                ctx.emit(self.late, result)
            return None
        return None if not results else tuple(results) if form == "tuple" else results

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[Any]) -> Iterator[Any]:
        yield from self.due(timer.tag, ctx)


def plan(**given: Any) -> Any:
    """Return a function whose states are declared with these arguments, such as a time to live."""

    def named(name: str) -> dict[str, Any]:
        return {each: name if value is ... else value for each, value in given.items()}

    class Declared(Plan):
        number = hg.ValueState[int](default=0, **named("number"))
        ratio = hg.ValueState[float](**named("ratio"))
        text = hg.ValueState[str | None](default="none", **named("text"))
        items = hg.ValueState[list[int]](default=[7], **named("items"))
        elements = hg.ListState[int](**named("elements"))
        entries = hg.MapState[str, int](**named("entries"))
        added = hg.ReducingState[int](lambda a, b: a + b, **named("added"))
        total = hg.AggregatingState[int, list[int], int](Total, **named("total"))

    return Declared()


class ModelValue:
    """A value of one key."""

    def __init__(self, default: Any = None) -> None:
        self.default, self.values = default, []

    def get(self) -> Any:
        return copy.deepcopy(self.values[0] if self.values else self.default)

    def set(self, value: Any) -> None:
        self.values = [value]

    def add(self, value: int) -> None:
        self.set(value + (self.get() or 0))

    def clear(self) -> None:
        self.values = []

    def exists(self) -> bool:
        return bool(self.values)


class ModelList(list[int]):
    add_all = list.extend

    def update(self, values: list[int]) -> None:
        self[:] = values


class ModelMap(dict[str, int]):
    put = dict.__setitem__

    def remove(self, entry: str) -> None:
        self.pop(entry, None)

    def is_empty(self) -> bool:
        return not self


class ModelTimers(dict[str, int]):
    def at(self, when: int, *, tag: str) -> None:
        self[tag] = when

    def cancel(self, tag: str) -> None:
        self.pop(tag, None)


class ModelKey(Program):
    """The states, the timers and the context of one key."""

    def __init__(self, key: Any, watermark: int) -> None:
        self.key, self.watermark = key, watermark
        self.timestamp: int | None = None
        self.number, self.ratio = ModelValue(0), ModelValue()
        self.text, self.items = ModelValue("none"), ModelValue([7])
        self.elements, self.entries = ModelList(), ModelMap()
        self.added, self.total = ModelValue(), ModelValue()
        self.event_time = ModelTimers()

    def on_record(self, operations: Any, timestamp: int | None) -> list[Any]:
        self.timestamp = timestamp
        return list(self.run(operations, self))

    def on_watermark(self, watermark: int) -> list[Any]:
        self.watermark = watermark
        found: list[Any] = []
        while due := [(at, tag) for tag, at in self.event_time.items() if at <= watermark]:
            self.timestamp, tag = min(due)
            del self.event_time[tag]
            found += list(self.due(tag, self))
        return found


def operations(rng: random.Random, timed: bool, fails: float) -> list[tuple[Any, ...]]:
    """Return the program of one record."""
    makers: list[Callable[[], tuple[Any, ...]]] = [
        lambda: ("count", rng.choice([1, -3, 2**29, 2**40])),
        lambda: ("count", 1),
        lambda: ("divide", rng.choice([2.0, 0.5])),
        lambda: ("write", rng.choice([None, "", "some text"])),
        lambda: ("append", rng.randrange(9)),
        lambda: ("extend", [rng.randrange(9) for _ in range(rng.randrange(3))]),
        lambda: ("replace", [rng.randrange(9)]),
        lambda: ("put", rng.choice("abc"), rng.randrange(9)),
        lambda: ("remove", rng.choice("abc")),
        lambda: ("add", rng.randrange(9)),
        lambda: (
            "forget",
            rng.choice([*SCALARS, "items", "elements", "entries", "added", "total"]),
        ),
        lambda: ("show",),
    ]
    if timed:
        makers.append(lambda: ("remind", rng.randrange(-5, 30), rng.choice(["", "x", "again"])))
        makers.append(lambda: ("cancel", rng.choice(["", "x", "again"])))
    found = [rng.choice(makers)() for _ in range(rng.randrange(5))]
    if rng.random() < fails:
        found.append(("fail",))
    return [*found, ("show",)]


class Life:
    """One random life of a step beside its model."""

    def __init__(
        self, step: Step, keys: list[Any], rng: random.Random, *, timed: bool, drops: bool
    ) -> None:
        self.step, self.some, self.rng, self.timed, self.drops = step, keys, rng, timed, drops
        self.now, self.watermark, self.checkpoints = 0, WATERMARK_MIN, 0
        self.model: dict[str, ModelKey] = {}
        self.stored: tuple[Any, ...] = ()
        self.checkpoint()

    def of(self, key: Any) -> ModelKey:
        """Return the model of a key; Python values that are equal may be different keys."""
        return self.model.setdefault(repr(key), ModelKey(key, self.watermark))

    def batch(self) -> None:
        rng = self.rng
        count = rng.choice([0, 1, 5, 20, 60])
        fails = rng.choice([0.0, 0.0, 0.2 if self.drops else 1 / count if count else 0.0])
        records: list[Any] = []
        for key in rng.choices(self.some, k=count):
            form = rng.choice(["generator", "list", "tuple", "side"])
            records.append((key, form, operations(rng, self.timed, fails)))
        self.now += 3
        times = [self.now + rng.randrange(-5, 5) for _ in records] if self.timed else None
        failing = [record for record in records if ("fail",) in record[2]]
        if failing and not self.drops:
            with pytest.raises(UserCodeError, match="as told"):
                self.step.push(records, times, key=lambda record: record[0])
            self.restore()
            return
        self.step.push(records, times, key=lambda record: record[0])
        main, side = defaultdict(list), defaultdict(list)
        for place, (key, form, program) in enumerate(records):
            if ("fail",) not in program:
                made = self.of(key).on_record(program, times[place] if times else None)
                (side if form == "side" else main)[repr(key)] += made
        self.compare("main", main)
        self.compare("late", side)

    def compare(self, kind: str, expected: dict[str, list[Any]]) -> None:
        found = defaultdict(list)
        for result, time in self.step.take(kind):
            shown = result[-1] if isinstance(result[0], str) and len(result) == 2 else result
            assert time == (shown[1] if self.timed else None)
            found[repr(shown[0])].append(result)
        assert dict(found) == {key: made for key, made in expected.items() if made}

    def time(self) -> None:
        if not self.timed:
            return
        self.watermark = max(self.watermark + 1, self.now - self.rng.randrange(10))
        self.step.watermark(self.watermark)
        expected = {}
        for key in self.model.values():
            expected[repr(key.key)] = key.on_watermark(self.watermark)
        self.compare("main", expected)

    def checkpoint(self) -> None:
        """Begin a checkpoint; what it has is written later."""
        self.checkpoints += 1
        cut = self.step.cut(self.checkpoints)
        if self.stored:
            self.step.drop(self.stored[1])
        self.stored = self.checkpoints, cut, copy.deepcopy(self.model), self.watermark, self.now
        if self.rng.random() < 0.5:
            for operator in self.step.operators:
                operator.on_checkpoint_complete(CommitPermit("job", 1, self.checkpoints))

    def restore(self) -> None:
        """Go back to the newest checkpoint, with what it says and nothing that came later."""
        number, cut, model, self.watermark, self.now = self.stored
        for kind in ("main", "late"):
            self.step.take(kind)
        parallelism = self.rng.choice([1, 2, 3])
        self.step.restore(self.step.stored(cut), parallelism, checkpoint_id=number)
        self.model, self.stored = model, ()
        self.checkpoint()

    def query(self) -> None:
        """Read one state of one key, as clients do between two batches."""
        key = self.rng.choice(self.some)
        group = key_group_of(hash_key(key), MAX_PARALLELISM)
        for index, operator in enumerate(self.step.operators):
            if group in key_group_range(index, self.step.parallelism, MAX_PARALLELISM):
                expected = self.of(key).number
                found = operator.query("number", key)
                assert found == (expected.get() if expected.exists() else ABSENT)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "short": ({}, {}, {}),
    "hardly any held": ({}, {}, {"headgate.state.rocksdb.held-values-max": "2kb"}),
    "expiring": ({"ttl": "1d"}, {}, {}),
    "read by clients": ({"queryable": ...}, {}, {}),
    "taken back": ({}, {"on_error": hg.OnError("drop")}, {}),
    "taken back and expiring": ({"ttl": "1d"}, {"on_error": hg.OnError("drop", retries=1)}, {}),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_the_state_gives_what_the_model_gives(
    steps: Any, world: Any, way: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared, given, options = WAYS[way]
    for seed in range(LIVES):
        rng = random.Random(f"{way} {kind} {seed}")
        monkeypatch.setattr(
            "headgate.operators.per_record.base.PER_RECORD_ROWS", rng.choice([7, 8_192])
        )
        monkeypatch.setattr(
            "headgate.operators.process.emitter.PER_RECORD_ROWS", rng.choice([3, 8_192])
        )
        timed = rng.random() < 0.7
        (stream,) = world.sources(event_time=timed)
        keyed = stream.key_with(lambda record: record[0])
        step = steps(keyed.process(plan(**declared), name="p", **given), options=options)
        life = Life(step, KEYS[kind], rng, timed=timed, drops="on_error" in given)
        for _ in range(25):
            getattr(life, rng.choice([*["batch"] * 4, "time", "checkpoint", "query"]))()
        life.restore()
        life.batch()
