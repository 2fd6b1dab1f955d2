"""Values as of checkpoints: random writes, checkpoints that complete or not, failures, and rescales."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.operators.queries import QueriedEntries
from headgate.state.keyed.base import ABSENT
from headgate.state.queryable import CommittedPoints, NotKept, OldByKey, OldEntries
from headgate.state.snapshot import CommitPermit
from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]
Steps = Callable[..., Step]
SCHEMA = pa.schema([pa.field("user", pa.string()), pa.field("n", pa.int64())])
USERS = [f"u{n}" for n in range(7)]
TTL_MS = 500


def committed(name: str) -> hg.Queryable:
    return hg.Queryable(name, committed=True)


class Remember(hg.KeyedProcess[str, Any, Any]):
    """Writes, appends and removes, as the number says."""

    last = hg.ValueState[int](queryable=committed("last"))
    some = hg.ListState[int](queryable=committed("some"))
    each = hg.MapState[str, list[int]](queryable=committed("each"))

    def on_record(self, record: Any, ctx: Any) -> None:
        n = record.n
        if n % 11 == 0:
            self.last.clear()
            self.some.clear()
        elif n % 13 == 0:
            self.each.clear()
        elif n % 5 == 0:
            self.each.remove(str(n % 4))
            self.some.update([n])
        else:
            self.last.set(n)
            self.some.add(n)
            self.each.put(str(n % 4), [*(self.each.get(str(n % 4)) or []), n][-3:])


def remember(model: dict[str, Any], user: str, n: int) -> None:
    """Do to the model what `Remember` does."""
    last, some, each = (model.setdefault(f"{user} {name}", {}) for name in "lse")
    if n % 11 == 0:
        last.clear()
        some.clear()
    elif n % 13 == 0:
        each.clear()
    elif n % 5 == 0:
        each.pop(str(n % 4), None)
        some.clear()
        some[0] = n
    else:
        last[0] = n
        some[len(some)] = n
        each[str(n % 4)] = [*each.get(str(n % 4), []), n][-3:]


def remembered(model: dict[str, Any], user: str) -> dict[str, Any]:
    last, some, each = (model.get(f"{user} {name}", {}) for name in "lse")
    return {
        "last": last.get(0, ABSENT),
        "some": list(enumerate(some.values())),
        "each": sorted(each.items()),
    }


def add(model: dict[str, Any], user: str, n: int) -> None:
    count, top, total = model.get(user, (0, n, 0))
    model[user] = (count + 1, max(top, n), total + n)


def running(model: dict[str, Any], user: str) -> dict[str, Any]:
    names = ("n", "top", "total")
    found = model.get(user)
    return {"running": ABSENT if found is None else dict(zip(names, found, strict=True))}


def reduced(model: dict[str, Any], user: str) -> dict[str, Any]:
    found = model.get(user)
    return {"reduce": ABSENT if found is None else {"user": user, "n": found[2]}}


def plus(one: Any, other: Any) -> Any:
    return type(one)(user=one.user, n=one.n + other.n)


def by_user() -> Any:
    (stream,) = streams()
    return stream.map(lambda record: record, into=SCHEMA).key_by("user")


def summed(**arguments: Any) -> Any:
    aggregates: dict[str, Any] = {"n": hg.count(), "top": hg.max("n"), "total": hg.sum("n")}
    return by_user().agg(**aggregates, name="agg", queryable=committed("agg"), **arguments)


def whole() -> Any:
    aggregates: dict[str, Any] = {"n": hg.count(), "top": hg.max("n"), "total": hg.sum("n")}
    window = by_user().window(hg.global_window(emit_rows=3))
    return window.agg(**aggregates, name="agg", queryable=committed("agg"))


MADE: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "process": (
        lambda: by_user().process(Remember(), name="p"),
        remember,
        remembered,
    ),
    "running": (summed, add, running),
    "global window": (whole, add, running),
    "running with a ttl": (lambda: summed(ttl="1h"), add, running),
    "reduce": (
        lambda: by_user().reduce(plus, name="r", queryable=committed("r")),
        add,
        reduced,
    ),
    "reduce with a ttl": (
        lambda: by_user().reduce(plus, name="r", queryable=committed("r"), ttl="1h"),
        add,
        reduced,
    ),
}


def push(step: Step, *rows: tuple[str, int]) -> None:
    names = ["user", "n"]
    data = pa.RecordBatch.from_pylist([dict(zip(names, row, strict=True)) for row in rows], SCHEMA)
    step.push_columns(data, None, key="user")


def query(step: Step, state: str, user: str, checkpoint_id: int) -> Any:
    operator = step.operators[step._owner(user)]
    found = operator.query(state, user, checkpoint_id)
    if not isinstance(found, QueriedEntries):
        return found
    entries = list(found.entries)
    return sorted(entries) if found.is_map else [(n, v) for n, (_, v) in enumerate(entries)]


def tell(step: Step, checkpoint_id: int, *, complete: bool) -> None:
    for operator in step.operators:
        if complete:
            operator.on_checkpoint_complete(CommitPermit("job", 1, checkpoint_id))
        else:
            operator.on_checkpoint_aborted(checkpoint_id)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("seed", range(6))
def test_answers_are_those_of_the_checkpoint(steps: Steps, kind: str, seed: int) -> None:
    make, write, shown = MADE[kind]
    rng = random.Random(f"{kind} {seed}")
    step = steps(make(), rng.choice((1, 2, 3)))
    model: dict[str, Any] = {}
    newest, stored, pending, next_id = 0, None, {}, 1
    models: dict[int, dict[str, Any]] = {}
    for _ in range(150):
        match rng.randrange(12):
            case 0 | 1:
                models[next_id] = copy.deepcopy(model)
                pending[next_id] = step.checkpoint(next_id)
                next_id += 1
            case 2 if pending:
                done = rng.choice(list(pending))
                stored, newest = pending[done], done
                pending = {id_: each for id_, each in pending.items() if id_ > done}
                tell(step, done, complete=True)
            case 3 if pending:
                lost = rng.choice(list(pending))
                del pending[lost]
                tell(step, lost, complete=False)
            case 4 if stored is not None and rng.random() < 0.3:
                step.restore(stored, rng.choice((1, 2, 3)), checkpoint_id=newest)
                model, pending = copy.deepcopy(models[newest]), {}
            case 5:
                step.clock.advance(rng.choice((10, 1_000)))
            case _:
                rows = [(rng.choice(USERS), rng.randrange(100)) for _ in range(rng.randint(1, 6))]
                push(step, *rows)
                for row in rows:
                    write(model, *row)
        for user in rng.sample(USERS, 2):
            for state, now in shown(model, user).items():
                assert query(step, state, user, 0) == now
                if newest:
                    then = shown(models[newest], user)[state]
                    assert query(step, state, user, newest) == then


def test_what_has_expired_is_not_shown(steps: Steps) -> None:
    step = steps(summed(ttl="1s"))
    push(step, ("a", 1), ("b", 1))
    step.checkpoint(1)
    step.clock.advance(900)
    push(step, ("a", 2))
    assert query(step, "running", "a", 1) == {"n": 1, "top": 1, "total": 1}
    assert query(step, "running", "b", 1) == {"n": 1, "top": 1, "total": 1}
    step.clock.advance(100)
    assert query(step, "running", "a", 0) == {"n": 2, "top": 2, "total": 3}
    assert query(step, "running", "a", 1) is ABSENT
    assert query(step, "running", "b", 1) is ABSENT


@pytest.mark.parametrize("kind", MADE)
def test_old_values_are_bounded(steps: Steps, kind: str) -> None:
    """With more than that, there is no answer until the next checkpoint; and never a wrong one."""
    step = steps(MADE[kind][0](), options={"headgate.queries.committed-max": "1 kb"})
    (state, *_) = [info.name for info in step.operators[0].states()]
    push(step, *[(user, 1) for user in USERS])
    step.checkpoint(1)
    push(step, ("u0", 2))
    assert query(step, state, "u0", 1) != query(step, state, "u0", 0)
    push(step, *[(f"more {n}", 1) for n in range(100)])
    with pytest.raises(NotKept):
        query(step, state, "u1", 1)
    now = query(step, state, "u0", 0)
    step.checkpoint(2)
    tell(step, 2, complete=True)
    push(step, ("u0", 3))
    assert query(step, state, "u0", 2) == now != query(step, state, "u0", 0)


def test_a_global_window_without_keys(steps: Steps) -> None:
    records = streams()[0].map(lambda record: record, into=SCHEMA)
    step = steps(
        records.window(hg.global_window()).agg(n=hg.count(), name="agg", queryable=committed("all"))
    )
    (operator,) = step.operators

    def push_all(*numbers: int) -> None:
        step.push_columns(
            pa.RecordBatch.from_pylist([{"user": "", "n": n} for n in numbers], SCHEMA)
        )

    step.checkpoint(1)
    assert operator.query("whole", (), 0) is operator.query("whole", (), 1) is ABSENT
    push_all(1, 2, 3)
    assert operator.query("whole", (), 1) is ABSENT
    stored = step.checkpoint(2)
    push_all(4)
    push_all(5)
    tell(step, 2, complete=True)
    assert list(operator.query_many("whole", [(), ()], 2)) == [{"n": 3}] * 2
    assert list(operator.query_many("whole", [()], 0)) == [{"n": 5}]
    assert [*operator.scan("whole", 2).pieces] == [[()]]
    step.restore(stored, checkpoint_id=2)
    push_all(6)
    assert step.operators[0].query("whole", (), 2) == {"n": 3}


def test_a_state_that_is_only_live_keeps_nothing(steps: Steps) -> None:
    made = by_user().agg(n=hg.count(), name="agg", queryable="agg")
    step = steps(made)
    push(step, ("a", 1))
    step.checkpoint(1)
    with pytest.raises(NotKept):
        query(step, "running", "a", 1)


def test_points() -> None:
    points = CommittedPoints(OldByKey, 1_000)
    assert points.newest is None
    points.cut(1)
    points.cut(2)
    assert points.newest is not None
    points.newest.keep("a", 1)
    points.aborted(2)
    assert [each.values for each in points.since(1)] == [{"a": 1}]
    points.aborted(2)
    points.completed(7)
    assert points.newest is None
    with pytest.raises(NotKept):
        points.since(1)
    points.restored(7)
    points.grew()
    assert points.since(7) == [points.newest]


def test_old_values_of_entries_join() -> None:
    before, later = OldEntries(), OldEntries()
    before.keep("a", 1, "first")
    later.keep("a", 1, "second")
    later.keep("a", 2, ("pair", b"12"))
    before.absorb(later)
    assert before.values == {"a": {1: "first", 2: ("pair", b"12")}}
    assert before.nbytes > 300
