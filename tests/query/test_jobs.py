"""Queries of running jobs: what is read is the state, whatever happens to the job."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import JobError, JobNotReady, PlanError, StateError, StateNotFound, UsageError

from .conftest import ROWS, model, queryable_job, shown

STATES = sorted(model(ROWS[:1])["u0"])


async def read(job: Any, state: str, key: str) -> dict[str, Any]:
    """Ask until the job is ready to answer."""
    while True:
        try:
            return await job.request("query", state=state, key=key)
        except JobNotReady:
            await asyncio.sleep(0.01)


async def becomes(job: Any, state: str, key: str, value: Any) -> None:
    """Return once a state has this value."""
    while True:
        if shown(await read(job, state, key)) == value:
            return
        await asyncio.sleep(0.01)


async def at_rest(job: Any, expected: dict[str, dict[str, Any]]) -> None:
    """Return once each state has all that it is to have; live values only grow until then."""
    for user, states in expected.items():
        for state, value in states.items():
            await becomes(job, state, user, value)


async def look_around(job: Any, seed: int, over: asyncio.Event) -> int:
    """Query random states until `over`, also while the job restarts; return how many were answered."""
    rng = random.Random(seed)
    expected, answered = model(ROWS), 0
    while not over.is_set():
        user, state = rng.choice(list(expected)), rng.choice(STATES)
        try:
            answer = await job.request("query", state=state, key=user)
        except JobNotReady:
            await asyncio.sleep(0.005)
            continue
        answered += 1
        assert answer["level"] == "live"
        assert (answer["state"], answer["key"]) == (state, user)
        if state == "sums" and answer["found"]:
            assert answer["value"]["count"] <= expected[user]["sums"]["count"]
        await asyncio.sleep(0)
    return answered


@pytest.mark.parametrize(
    "options",
    [
        {"state.backend.type": "hashmap"},
        {"state.backend.type": "rocksdb"},
        {"state.backend.type": "hashmap", "execution.checkpointing.unaligned": "true"},
    ],
)
def test_live_answers_are_the_state(lab: Any, options: dict[str, str]) -> None:
    """Through checkpoints, the death of a worker, a crash of the coordinator, and a rescale."""

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        over = asyncio.Event()
        asking = asyncio.get_running_loop().create_task(look_around(job, 1, over))
        try:
            await job.checkpoint()
            job.kill(random.Random(1))
            await job.checkpoint()
            await at_rest(job, model(ROWS))
            attempts = {(await read(job, "sums", "u1"))["attempt"]}
            await job.crash_coordinator()
            await at_rest(job, model(ROWS))
            await job.request("rescale", parallelism=3)
            await at_rest(job, model(ROWS))
            answers = [await read(job, "latest", user) for user in model(ROWS)]
            assert {answer["subtask"] for answer in answers} == {0, 1, 2}
            assert answers[0]["attempt"] not in attempts
            assert answers[0]["run"] == job.spec.run
        finally:
            over.set()
            assert await asking

    made = queryable_job(lab, **options)
    assert lab.run(made, script).outcome.status == "FINISHED"


COMMITTED = sorted(set(STATES) - {"latest"})


def sums(rows: dict[str, Any]) -> int:
    """Return how many rows are in the sums of all users, each of which is of the first ones of its user."""
    for user, row in rows.items():
        mine = [each for each in ROWS if each["user"] == user][: row["count"]]
        assert row == model(mine)[user]["sums"]
    return sum(row["count"] for row in rows.values())


async def read_committed(
    job: Any, found: dict[int, dict[str, Any]], over: asyncio.Event, seed: int
) -> None:
    """Read all users of random states as of checkpoints until `over`."""
    rng, users = random.Random(seed), sorted(model(ROWS))
    while not over.is_set():
        state = rng.choice(COMMITTED)
        try:
            answer = await job.request("rows", state=state, keys=users, level="committed")
        except JobNotReady:
            await asyncio.sleep(0.005)
            continue
        assert answer["level"] == "committed"
        rows = {row["key"]: shown({**answer, **row}) for row in answer["rows"] if row["found"]}
        same = found.setdefault(answer["checkpoint"], {}).setdefault(state, rows)
        assert same == rows
        await asyncio.sleep(0)


async def reaches(found: dict[int, dict[str, Any]], checkpoint: int) -> None:
    """Return once a client has read this checkpoint or a later one."""
    while True:
        if max(found, default=0) >= checkpoint:
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"state.backend.type": "hashmap"},
        {"state.backend.type": "rocksdb"},
        {"state.backend.type": "hashmap", "execution.checkpointing.unaligned": "true"},
    ],
)
def test_committed_answers_are_those_of_one_checkpoint(lab: Any, options: dict[str, str]) -> None:
    """All users of all states, whichever subtask has them, are as after the same rows."""
    found: dict[int, dict[str, Any]] = {}

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        over = asyncio.Event()
        work = read_committed(job, found, over, 1)
        asking = asyncio.get_running_loop().create_task(work)
        try:
            await job.checkpoint()
            job.kill(random.Random(2))
            await job.checkpoint()
            await job.crash_coordinator()
            await job.checkpoint()
            await job.request("rescale", parallelism=3)
            await at_rest(job, model(ROWS))
            done = await job.checkpoint()
            await reaches(found, done)
        finally:
            over.set()
            await asking

    made = queryable_job(lab, **options)
    assert lab.run(made, script).outcome.status == "FINISHED"
    assert len(found) > 3
    through = 0
    for _, states in sorted(found.items()):
        totals = [sums(rows) for state, rows in states.items() if "sums" in state]
        if "execution.checkpointing.unaligned" in options:
            continue  # the cuts of two subtasks may lie behind different rows
        assert len(set(totals)) <= 1
        assert not totals or totals[0] >= through
        through = max([through, *totals])
        expected = model(ROWS[:through])
        for state, rows in states.items() if totals else ():
            assert rows == {user: values[state] for user, values in expected.items()}


def test_a_job_that_becomes_queryable_resumes_from_an_old_savepoint(lab: Any) -> None:
    taken: list[str] = []

    def job(queryable: str) -> hg.Job:
        made = hg.Job("sums", parallelism=2)
        made.checkpoint(every="1h", storage=lab.storage)
        source = from_list(ROWS, schema={"user": "string", "n": "int64"}, batch_rows=50)
        by_user = made.read(source, name="in").key_by("user")
        by_user.agg(count=hg.count(), name="sums", queryable=queryable).write(
            blackhole(), name="out"
        )
        return made

    async def stop(running: Any) -> None:
        await running.until("status", status="RUNNING")
        done = await running.request("stop", savepoint=str(lab.path))
        taken.append(done["savepoint"])

    async def ask(running: Any) -> None:
        await running.until("status", status="RUNNING")
        for user, states in model(ROWS).items():
            await becomes(running, "counts", user, {"count": states["sums"]["count"]})

    lab.run(job(""), stop, batches=2)
    lab.run(job("counts"), ask, restore_from=taken[0])


def test_what_cannot_be_answered_is_told_apart(lab: Any) -> None:
    async def script(job: Any) -> None:
        with pytest.raises(JobNotReady):
            await job.request("query", state="sums", key="u1")
        await job.until("status", status="RUNNING")
        absent = await read(job, "sums", "nobody")
        assert (absent["found"], absent["value"]) == (False, None)
        with pytest.raises(StateNotFound, match="state=`sum`") as unknown:
            await job.request("query", state="sum", key="u1")
        assert "did you mean `sums`?" in unknown.value.fix
        with pytest.raises(StateNotFound):
            await job.request("query", state="hidden", key="u1")
        with pytest.raises(UsageError, match="has no key"):
            await job.request("query", state="sums")
        states = (await job.request("states"))["states"]
        assert sorted(each["name"] for each in states) == STATES
        assert {json.dumps(each["key"]) for each in states} == {'{"user": "str"}'}

    assert lab.run(queryable_job(lab), script).outcome.status == "FINISHED"


class Large(hg.KeyedProcess[Any, Any, Any]):
    """Keeps a large value, and one that is not plain data."""

    large = hg.ListState[str](queryable="large")
    odd = hg.ValueState(queryable="odd")

    def on_record(self, record: Any, ctx: Any) -> None:
        self.large.update(["x" * 1_000] * 20)
        self.odd.set(object())


def test_bounds(lab: Any) -> None:
    job = hg.Job(
        "large",
        options={
            "headgate.queries.answer-max": "10 kb",
            "headgate.queries.waiting-max": "1",
            "headgate.queries.timeout": "60 s",
        },
    )
    rows = job.read(from_list([{"n": 1}], schema={"n": "int64"}), name="in")
    rows.key_by("n").process(Large(), name="large").write(blackhole(), name="out")

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        with pytest.raises(JobError, match=r"headgate\.queries\.answer-max=`10240`"):
            await becomes(running, "large", "1", "which is never read")
        with pytest.raises(StateError, match="has no form in JSON"):
            await read(running, "odd", "1")
        with pytest.raises(UsageError, match="of type int"):
            await read(running, "odd", "one")
        asked = [running.request("query", state="odd", key=str(n)) for n in (2, 3)]
        both = await asyncio.gather(*asked, return_exceptions=True)
        (refused,) = [each for each in both if not isinstance(each, dict)]
        assert isinstance(refused, JobNotReady)
        assert "headgate.queries.waiting-max" in refused.message

    assert lab.run(job, script).outcome.status == "FINISHED"


def test_what_is_refused_before_a_job_runs() -> None:
    job = hg.Job("twice")
    rows = job.read(from_list([{"n": 1}], schema={"n": "int64"}), name="in").key_by("n")
    rows.agg(count=hg.count(), name="one", queryable="counts").write(blackhole(), name="out")
    with pytest.raises(PlanError, match="two states are queryable as `counts`"):
        rows.agg(count=hg.count(), name="two", queryable="counts")
    with pytest.raises(PlanError, match="`queryable` is the name"):
        rows.agg(queryable=hg.count(), name="three")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="cannot be the name"):
        rows.reduce(lambda one, _: one, name="four", queryable="a/b")

    class OfWindows(hg.WindowProcess[Any, Any, Any]):
        seen = hg.ValueState[int](queryable="seen")

        def on_window(self, key: Any, records: Any, ctx: Any) -> None: ...

    with pytest.raises(PlanError, match="windows cannot be queried"):
        rows.window(hg.count_window(3)).process(OfWindows(), name="five")
