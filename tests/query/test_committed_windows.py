"""Windows as of checkpoints: random records, watermarks, checkpoints that complete or not, and failures.

Each checkpoint has a copy of the model, that of `test_windows.py` or `test_more_windows.py`. So many
keys come now and then that windows get tables of their own, or lie on disk.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import JobNotReady
from headgate.state.keyed.base import ABSENT
from headgate.state.queryable import NotKept
from headgate.tests.support.subtasks import Step, steps, streams

from .test_committed import tell
from .test_more_windows import CLOCKED, DISK, SESSIONS, add
from .test_windows import KINDS, MINUTE, SCHEMA, USERS, by_user, push, shown, windows_of

__all__ = ["steps"]
Steps = Callable[..., Step]
Model = dict[Any, list[int]]
AGGREGATES: dict[str, Any] = {"n": hg.count(), "top": hg.max("n"), "total": hg.sum("n")}
ONE = "one"
ALL = {**KINDS, **{f"session {kind}": window for kind, window in SESSIONS.items()}}


def made(window: Any, *, keyed: bool = True) -> Any:
    queryable = hg.Queryable("agg", committed=True)
    if keyed:
        return by_user().window(window).agg(**AGGREGATES, name="agg", queryable=queryable)
    columns = streams()[0].map(lambda record: record, into=SCHEMA)
    timed = columns.event_time("t", max_out_of_order="1h")
    return timed.window(window).agg(**AGGREGATES, name="agg", queryable=queryable)


def answers(step: Step, users: list[str], checkpoint_id: int) -> dict[str, Any]:
    """Return what the owners answer for keys that are asked for together."""
    found: dict[str, Any] = {}
    for owner, operator in enumerate(step.operators):
        mine = [user for user in users if step._owner(user) == owner]
        found |= zip(mine, operator.query_many("agg", mine, checkpoint_id), strict=True)
    return found


def scans(step: Step, checkpoint_id: int) -> Iterator[dict[str, Any]]:
    """Begin scans of all subtasks, then yield the windows of users that they find; each key comes once."""
    begun = [operator.scan("agg", checkpoint_id) for operator in step.operators]
    first = [next(scan.pieces, []) for scan in begun]
    yield {}
    found: dict[str, Any] = {}
    for operator, scan, piece in zip(step.operators, begun, first, strict=True):
        keys = [*piece, *(key for each in scan.pieces for key in each)]
        assert len(keys) == len(set(keys))
        mine = [key for key in keys if key in USERS]
        found |= zip(mine, operator.query_many("agg", mine, checkpoint_id), strict=True)
        scan.close()
    yield {user: value for user, value in found.items() if value is not ABSENT}


class Case:
    """A step, its model, and a model for each checkpoint. Without keys all records are of `ONE`."""

    def __init__(self, make: Steps, kind: str, rng: random.Random, *, keyed: bool = True) -> None:
        self.rng, self.kind, self.window, self.keyed = rng, kind, ALL[kind], keyed
        self.lateness = self.window.allowed_lateness_ms
        self.step = make(made(self.window, keyed=keyed), self._parallelism(), options=DISK)
        self.model: Model = {}
        self.watermark, self.next_id, self.newest = 0, 1, 0
        self.models: dict[int, tuple[Model, int]] = {}
        self.stored: dict[int, Any] = {}
        self.pending: list[int] = []
        self.step.watermark(0)

    def _parallelism(self) -> int:
        return self.rng.choice((1, 2, 3)) if self.keyed else 1

    def move(self, watermark: int) -> None:
        self.watermark = watermark
        self.step.watermark(watermark)
        for key in [key for key in self.model if key[2] - 1 + self.lateness <= watermark]:
            del self.model[key]

    def add(self, rows: list[tuple[str, int, int]]) -> None:
        push(self.step, rows, "user" if self.keyed else None)
        for user, n, time in rows if self.keyed else [(ONE, *row[1:]) for row in rows]:
            if self.kind.startswith("session"):
                add(self.model, user, n, time)
                continue
            for start, end in windows_of(time, self.kind):
                if end - 1 + self.lateness > self.watermark:
                    self.model.setdefault((user, start, end), []).append(n)

    def cut(self) -> None:
        model = {key: list(numbers) for key, numbers in self.model.items()}
        self.models[self.next_id] = model, self.watermark
        self.stored[self.next_id] = self.step.checkpoint(self.next_id)
        self.pending.append(self.next_id)
        self.next_id += 1

    def complete(self) -> None:
        self.newest = self.rng.choice(self.pending)
        self.pending = [id_ for id_ in self.pending if id_ > self.newest]
        tell(self.step, self.newest, complete=True)

    def fail(self) -> None:
        newest = self.newest
        self.step.restore(self.stored[newest], self._parallelism(), checkpoint_id=newest)
        model, self.watermark = self.models[self.newest]
        self.model, self.pending = {key: list(n) for key, n in model.items()}, []
        self.step.watermark(self.watermark)

    def some(self) -> list[tuple[str, int, int]]:
        early = 1 if self.kind.startswith("session") else -3 * MINUTE
        return [
            (
                self.rng.choice(USERS),
                self.rng.randrange(100),
                max(0, self.watermark + self.rng.randrange(early, 6 * MINUTE)),
            )
            for _ in range(self.rng.choice((1, 5, 100)))
        ]

    def many(self) -> None:
        """Push records of many keys, which are not in the model."""
        time = self.watermark + self.rng.choice((0, 3)) * MINUTE + 1
        push(self.step, [(f"other{n}", n, time) for n in range(self.rng.randrange(600, 4_000))])

    def turn(self) -> None:
        match self.rng.randrange(14):
            case 0 | 1:
                self.cut()
            case 2 if self.pending:
                self.complete()
            case 3 if self.pending:
                lost = self.rng.choice(self.pending)
                self.pending.remove(lost)
                tell(self.step, lost, complete=False)
            case 4 if self.newest and self.rng.random() < 0.3:
                self.fail()
            case 5 | 6 | 7:
                self.move(self.watermark + self.rng.choice((1_000, MINUTE, 2 * MINUTE)))
            case 8 if self.keyed and self.rng.random() < 0.5:
                self.many()
            case _:
                self.add(self.some())

    def wanted(self, checkpoint_id: int, users: list[str]) -> dict[str, Any]:
        model, watermark = self.model, self.watermark
        if checkpoint_id:
            model, watermark = self.models[checkpoint_id]
        return {user: shown(model, user, watermark, self.lateness) for user in users}


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_the_checkpoint(steps: Steps, kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    case = Case(steps, kind, rng)
    for _ in range(60):
        case.turn()
        asked = [*rng.sample(USERS, 3), "nobody"]
        assert answers(case.step, asked, 0) == case.wanted(0, asked)
        if case.newest:
            assert answers(case.step, asked, case.newest) == case.wanted(case.newest, asked)
        if case.newest and rng.random() < 0.2:
            held, scan = case.newest, scans(case.step, case.newest)
            assert next(scan) == {}
            for _ in range(rng.randrange(3)):
                case.move(case.watermark + rng.choice((0, MINUTE)))
                case.add(case.some())
                case.cut()
                case.complete()
            wanted = case.wanted(held, USERS)
            assert next(scan) == {u: value for u, value in wanted.items() if value is not ABSENT}


@pytest.mark.parametrize("kind", ALL)
def test_windows_without_keys(steps: Steps, kind: str) -> None:
    case = Case(steps, kind, random.Random(kind), keyed=False)
    for _ in range(100):
        case.turn()
        (operator,) = case.step.operators
        for checkpoint_id in {0, case.newest}:
            wanted = case.wanted(checkpoint_id, [ONE])[ONE]
            assert operator.query_many("agg", [(), ()], checkpoint_id) == [wanted, wanted]
            scan = operator.scan("agg", checkpoint_id)
            assert [key for piece in scan.pieces for key in piece] == [()]
            scan.close()


def test_what_had_expired_at_the_checkpoint_does_not_come_back(steps: Steps) -> None:
    """Its rows are still there, beside those of a key that has many records."""
    step = steps(made(ALL["tumbling"]))
    (operator,) = step.operators
    push(step, [("u0", 1, 1_000), ("u0", 2, 3 * MINUTE)])
    step.watermark(MINUTE)
    step.checkpoint(1)
    then = operator.query("agg", "u0", 0)
    assert [window["n"] for window in then] == [1]
    push(step, [("u0", 3, 3 * MINUTE)] * 50)
    assert operator.query("agg", "u0", 1) == then


@pytest.mark.parametrize("kind", CLOCKED)
def test_windows_of_processing_time(steps: Steps, kind: str) -> None:
    rng = random.Random(kind)
    step = steps(made(CLOCKED[kind]), 2)
    model: Model = {}
    models: dict[int, tuple[Model, int]] = {}
    size = CLOCKED[kind].size_ms
    for number in range(1, 80):
        match rng.randrange(6):
            case 0:
                models[number] = {key: list(n) for key, n in model.items()}, step.clock.now_ms() - 1
                step.checkpoint(number)
                tell(step, number, complete=True)
            case 1:
                step.clock.advance(rng.choice((1_000, MINUTE // 2, 2 * MINUTE)))
            case _:
                user, now = rng.choice(USERS), step.clock.now_ms()
                push(step, [(user, number, 0)])
                for start in range(now - now % MINUTE, now - size, -MINUTE):
                    model.setdefault((user, start, start + size), []).append(number)
        if models:
            newest = max(models)
            wanted = {user: shown(models[newest][0], user, models[newest][1], 0) for user in USERS}
            assert answers(step, USERS, newest) == wanted


@pytest.mark.parametrize("kind", ["tumbling", "sliding", "session at once"])
def test_old_windows_are_bounded(steps: Steps, kind: str) -> None:
    """With more than that, there is no answer until the next checkpoint; and never a wrong one."""
    step = steps(made(ALL[kind]), options={"headgate.queries.committed-max": "2 kb"})
    (operator,) = step.operators
    step.watermark(0)
    push(step, [(user, 1, 1_000) for user in USERS])
    step.checkpoint(1)
    push(step, [("u0", 2, 1_000)])
    assert operator.query("agg", "u0", 1) != operator.query("agg", "u0", 0)
    push(step, [(f"more {n}", 1, 1_000) for n in range(200)])
    with pytest.raises(NotKept):
        operator.query("agg", "u1", 1)
    now = operator.query("agg", "u0", 0)
    step.checkpoint(2)
    tell(step, 2, complete=True)
    push(step, [("u0", 3, 1_000)])
    assert operator.query("agg", "u0", 2) == now != operator.query("agg", "u0", 0)
    step.watermark(9 * MINUTE)  # all windows expire, and their results are too many
    with pytest.raises(NotKept):
        operator.query("agg", "u0", 2)
    assert operator.query("agg", "u0", 0) is ABSENT
    step.checkpoint(3)
    assert operator.query("agg", "u0", 3) is ABSENT


@pytest.mark.parametrize("kind", ["tumbling", "sliding", "session at once"])
def test_windows_that_are_only_live_keep_nothing(steps: Steps, kind: str) -> None:
    step = steps(by_user().window(ALL[kind]).agg(n=hg.count(), name="agg", queryable="agg"))
    push(step, [("u0", 1, 1_000)])
    step.checkpoint(1)
    (operator,) = step.operators
    for ask in (lambda: operator.query("agg", "u0", 1), lambda: operator.scan("agg", 1)):
        with pytest.raises(NotKept):
            ask()


def test_windows_of_a_job_at_one_checkpoint(lab: Any) -> None:
    """Those of all keys together have as many records as the one without keys, through failures."""
    rows = [{"user": f"u{n % 7}", "t": n * 100} for n in range(1_000)]
    job = hg.Job("clicks", parallelism=2)
    job.checkpoint(every="20ms", storage=lab.storage)
    job.restart(hg.fixed_delay(attempts=10, delay="1ms"))
    source = from_list(rows, schema={"user": "string", "t": "int64"}, batch_rows=20)
    read = job.read(source, name="in").event_time("t", max_out_of_order="0s")
    hours = {"n": hg.count(), "queryable": hg.Queryable("hours", committed=True)}
    read.key_by("user").window(hg.tumbling("1h")).agg(**hours, name="hours").write(
        blackhole(), name="out"
    )
    every = {"n": hg.count(), "queryable": hg.Queryable("every", committed=True)}
    read.window(hg.tumbling("1h")).agg(**every, name="every").write(blackhole(), name="out-2")
    seen: dict[str, dict[int, int]] = {"hours": {}, "every": {}}

    async def read_all(job: Any, state: str) -> int:
        page = await job.request("scan", state=state, level="committed")
        count = sum(window["n"] for row in page["rows"] for window in row["value"])
        assert seen[state].setdefault(page["checkpoint"], count) == count
        return count

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        killed = False
        while (
            min(max(each.values(), default=0) for each in seen.values()) < len(rows)
            or not seen["hours"].keys() & seen["every"].keys()
        ):
            await asyncio.sleep(0.005)
            for state in seen:
                try:
                    await read_all(job, state)
                except JobNotReady:
                    continue
            if seen["hours"] and not killed:
                killed = True
                job.kill(random.Random(1))
        while True:
            try:
                answer = await job.request("query", state="every", key="[]", level="committed")
                arrow = await job.request("scan", state="every", arrow=True)
                break
            except JobNotReady:  # all had been read before the failure
                await asyncio.sleep(0.005)
        assert (answer["key"], answer["value"][0]["n"]) == ([], len(rows))
        (row,) = pa.ipc.open_stream(arrow["stream"]).read_all().to_pylist()
        assert json.loads(row["value"])[0]["n"] == len(rows)

    assert lab.run(job, script).outcome.status == "FINISHED"
    both = seen["hours"].keys() & seen["every"].keys()
    assert both
    assert all(seen["hours"][each] == seen["every"][each] for each in both)
