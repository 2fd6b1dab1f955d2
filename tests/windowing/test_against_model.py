"""Windows of records against a model with one list per window: triggers, merges, lateness, restarts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.operators.windows.late import LATE, LATE_COUNTER

FOREVER = 2**62


def key_of(record):
    return record[0]


@dataclass
class Open:
    """One window of the model."""

    start: int
    end: int
    records: list = field(default_factory=list)
    count: int = 0
    next: int | None = None
    end_armed: bool = False
    next_armed: bool = False

    @property
    def last(self):
        return self.end - 1


class Model:
    """The rules of windows in their plainest form: every window is looked at every time."""

    def __init__(self, assign, merging, trigger, lateness, evictor):
        self.assign, self.merging, self.trigger = assign, merging, trigger
        self.lateness, self.evictor = lateness, evictor
        self.watermark = -(2**63)
        self.windows: dict[str, list[Open]] = {}
        self.results, self.late = [], []

    def gone(self, end):
        return end - 1 + self.lateness <= self.watermark

    def push(self, record, time):
        held = self.windows.setdefault(record[0], [])
        taken = False
        for start, end in self.assign(record, time):
            one = self.merged(held, start, end) if self.merging else self.plain(held, start, end)
            if one is None:
                continue
            taken = True
            one.records.append((record, time))
            self.on_element(record[0], one, time)
        if not taken:
            self.late.append((record, time))

    def plain(self, held, start, end):
        if self.gone(end):
            return None
        for one in held:
            if (one.start, one.end) == (start, end):
                return one
        held.append(Open(start, end))
        return held[-1]

    def merged(self, held, start, end):
        met = sorted((o for o in held if o.start <= end and start <= o.end), key=lambda o: o.start)
        whole = min([start, *(o.start for o in met)]), max([end, *(o.end for o in met)])
        if self.gone(whole[1]):
            return None
        if len(met) == 1 and (met[0].start, met[0].end) == whole:
            return met[0]
        one = Open(*whole, [r for o in met for r in o.records], sum(o.count for o in met))
        if met:
            one.end_armed = self.trigger[0] in ("end", "continuous") and one.last > self.watermark
            times = [o.next for o in met if o.next is not None]
            if self.trigger[0] == "continuous" and times:
                one.next = min(*times, one.last)
                one.next_armed = one.next < one.last
        for other in met:
            held.remove(other)
        held.append(one)
        return one

    def on_element(self, key, one, time):
        kind, size = self.trigger
        if kind in ("count", "purging"):
            one.count += 1
            if one.count >= size:
                one.count = 0
                self.fire(key, one)
            return
        if one.last <= self.watermark:
            self.fire(key, one)
            return
        one.end_armed = True
        if kind == "continuous" and one.next is None:
            self.set_next(one, time - time % size + size)

    def set_next(self, one, time):
        one.next = min(time, one.last)
        one.next_armed = one.next < one.last

    def fire(self, key, one):
        if not one.records:
            return
        kept = one.records
        if self.evictor:
            kept = kept[-self.evictor :]
            one.records = list(kept)
        self.results.append(((key, one.start, one.end, [r[1] for r, _ in kept]), one.last))
        if self.trigger[0] == "purging":
            one.records = []

    def advance(self, watermark):
        self.watermark = watermark
        for key, held in self.windows.items():
            while due := sorted(self.due(held), key=lambda found: found[:3]):
                time, order, _, one = due[0]
                if order == 2:
                    held.remove(one)
                elif order == 1:
                    one.end_armed = False
                    self.fire(key, one)
                else:
                    one.next_armed = False
                    if time == one.next:
                        self.set_next(one, time + self.trigger[1])
                        self.fire(key, one)

    def due(self, held):
        for number, one in enumerate(held):
            for time, order, armed in (
                (one.next, 0, one.next_armed),
                (one.last, 1, one.end_armed),
                (one.last + self.lateness, 2, True),
            ):
                if armed and time <= self.watermark:
                    yield time, order, number, one


class Collect(hg.WindowProcess):
    def on_window(self, key, window, records, ctx):
        yield key, window.start, window.end, [record[1] for record in records]


class ListOf(hg.AggregateFunction):
    def create(self):
        return []

    def add(self, accumulator, value):
        return [*accumulator, value]

    def result(self, accumulator):
        return accumulator

    def merge(self, first, second):
        return first + second


class Spread(hg.WindowProcess):
    """Behind an aggregate: its one result is the list of records."""

    def on_window(self, key, window, records, ctx):
        (only,) = records
        yield key, window.start, window.end, [record[1] for record in only]


def setup_of(random):
    """`(window, its model's assign, merging, lateness)`."""
    kind = random.choice(["tumbling", "sliding", "session", "dynamic"])
    size, lateness = random.randint(1, 8), random.choice([0, 0, 2, 5])
    late = f"{lateness}ms"
    if kind == "tumbling":
        made = hg.tumbling(f"{size}ms", allowed_lateness=late)
        return made, lambda r, t: [(t - t % size, t - t % size + size)], False, lateness
    if kind == "sliding":
        every = random.randint(1, size)
        made = hg.sliding(f"{size}ms", f"{every}ms", allowed_lateness=late)

        def windows(record, time):
            return [(s, s + size) for s in range(time - time % every, time - size, -every)]

        return made, windows, False, lateness
    if kind == "session":
        made = hg.session(f"{size}ms", allowed_lateness=late)
        return made, lambda r, t: [(t, t + size)], True, lateness
    made = hg.session(lambda record: record[2], allowed_lateness=late)
    return made, lambda r, t: [(t, t + r[2])], True, lateness


def history_of(random):
    """Lists of (record, time), watermarks, and restarts at a parallelism; time goes on, some are late."""
    history, now = [], 0
    for _ in range(random.randint(3, 14)):
        what = random.random()
        if what < 0.55:
            history.append(
                [
                    ((random.choice("aab"), random.randint(0, 99), random.randint(1, 9)), time)
                    for time in (now + random.randint(-14, 10) for _ in range(random.randint(1, 6)))
                ]
            )
        elif what < 0.9:
            now += random.randint(1, 9)
            history.append(now)
        else:
            history.append(("restart", random.randint(1, 3)))
    return history


def trigger_of(kind, size):
    return {
        "end": lambda: None,
        "count": lambda: hg.triggers.Count(size),
        "purging": lambda: hg.triggers.Purging(hg.triggers.Count(size)),
        "continuous": lambda: hg.triggers.ContinuousEventTime(f"{size}ms"),
    }[kind]()


FORMS = ["process", "aggregate", "evictor", "aggregate with evictor"]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_equals_a_list_per_window(world, form, random):
    # One source of chance: examples that hypothesis varies from each other are too much alike.
    window, assign, merging, lateness = setup_of(random)
    trigger = random.choice(["end", "count", "purging", "continuous"]), random.randint(1, 4)
    history = history_of(random)
    evictor = 2 if "evictor" in form else 0
    windows = (
        world.stream()
        .key_with(key_of)
        .window(
            window,
            trigger=trigger_of(*trigger),
            evictor=hg.evictors.Count(evictor) if evictor else None,
        )
    )
    if "aggregate" in form:
        stream = windows.aggregate(ListOf(), Spread(), name="w")
    else:
        stream = windows.process(Collect(), name="w")
    step, model = world.Step(stream, 2), Model(assign, merging, trigger, lateness, evictor)
    for action in history:
        if isinstance(action, list):
            step.push([r for r, _ in action], [t for _, t in action], key=key_of)
            for record, time in action:
                model.push(record, time)
        elif isinstance(action, tuple):
            step.restart(action[1])
        elif action > model.watermark:
            step.watermark(action)
            model.advance(action)
    step.watermark(FOREVER)
    model.advance(FOREVER)
    assert sorted(step.take()) == sorted(model.results)
    assert sorted(step.take(LATE)) == sorted(model.late)
    assert step.metrics.counts.get(LATE_COUNTER, 0) == len(model.late)
    tables = [table for o in step.operators for table in tables_of(o)]
    assert all(table.num_rows == 0 for table in tables), (
        "something is kept of windows that are gone"
    )


def tables_of(operator):
    snapshot = operator.snapshot(9)
    return [cut.make(None) for name, cut in snapshot.tables.items() if name != "window_watermark"]
