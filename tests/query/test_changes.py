"""Clients that follow keys: each change comes once, over failures, takeovers and rescales."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from typer.testing import CliRunner

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import JobNotReady, StateNotFound, UsageError
from headgate.runtime.cli.app import app
from headgate.runtime.control.job_client import HungUp
from headgate.runtime.protocol.changes import Position, digest_of
from headgate.runtime.query import AsyncQueryClient
from headgate.runtime.rest.following import ChangesReader
from headgate.runtime.rest.routes import ROUTES
from headgate.tests.rest.conftest import QUERY_TOKEN, serving
from headgate.tests.rest.test_server import valid

from .conftest import ROWS, as_of, model, queryable_job
from .test_jobs import at_rest

FAST = {"headgate.queries.changes-interval": "5ms"}


# --- decisions -----------------------------------------------------------------------------------


def digests(*values: Any) -> tuple[str, ...]:
    return tuple(
        digest_of(f"k{n}", value is not None, value, is_map=False) for n, value in enumerate(values)
    )


def test_a_position_says_which_values_are_others() -> None:
    nothing = Position()
    assert nothing.changed(digests(1, None)) == [0, 1]
    known = Position("run.1", 7, digests(1, None, {"a": 1, "b": 2}))
    assert Position.decode(known.encode()) == known
    assert known.changed(digests(1, None, {"b": 2, "a": 1})) == []
    assert known.changed(digests(None, None, {"b": 2, "a": 1})) == [0]
    assert known.changed(digests(1, 0, {"b": 2})) == [1, 2]
    assert known.changed(digests(1)) == [0]
    assert known.changed(tuple(reversed(known.digests))) == [0, 2]
    assert known.is_as_of("run.1", 7)
    assert not known.is_as_of("run.1", 6)
    assert not known.is_as_of("run.2", 7)
    assert not nothing.is_as_of("", 0)
    assert Position.decode("") == nothing


@pytest.mark.parametrize(
    "text", ["7", "a.7", "run.x.12345678", "run.7.", "run.7.1234567", "run.-7.12345678"]
)
def test_other_texts_are_no_position(text: str) -> None:
    with pytest.raises(ValueError):
        Position.decode(text)


def test_the_order_of_the_entries_of_a_map_does_not_count() -> None:
    one, other = {"key": 1, "value": "a"}, {"key": 2, "value": "b"}
    found = [
        digest_of("k", True, each, is_map=True) for each in ([one, other], [other, one], [one])
    ]
    assert found[0] == found[1] != found[2]
    assert digest_of("k", True, [1, 2], is_map=False) != digest_of("k", True, [2, 1], is_map=False)
    assert digest_of("k", True, None, is_map=False) != digest_of("k", False, None, is_map=False)


def test_the_position_moves_once_the_whole_event_is_here() -> None:
    reader = ChangesReader("a")
    assert reader.read("id: b") is None
    assert reader.after == "a"
    assert reader.read(": no change") is None
    reader.read("")
    assert reader.after == "b"
    reader.read("event: ended")
    reader.read("data: {}")
    assert reader.ended


# --- jobs ----------------------------------------------------------------------------------------


class Seen:
    """What one client has been told of users' sums."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.checkpoints: list[int] = []
        self.some = asyncio.Event()

    def take(self, change: Any) -> None:
        """Take the next event: each row is another value, and none is older than the one before."""
        assert change.checkpoint is not None
        assert change.since is None or change.since <= change.checkpoint
        self.checkpoints.append(change.checkpoint)
        self.some.set()
        for row in change.rows:
            count = row.value["count"] if row.found else 0
            assert self.counts.get(row.key, -1) < count
            if row.found:
                mine = [each for each in ROWS if each["user"] == row.key][:count]
                assert row.value == model(mine)[row.key]["sums"]
            self.counts[row.key] = count


@pytest.mark.parametrize("parallelism", [1, 2])
def test_each_change_comes_once(lab: Any, parallelism: int) -> None:
    """Through the death of a worker, the crash of the coordinator, and a rescale, to the newest values."""
    served: list[Any] = []
    seen, expected = Seen(), {user: each["sums"]["count"] for user, each in model(ROWS).items()}

    async def connect() -> Any:
        if not served:
            raise HungUp
        return await served[-1].client().__aenter__()

    async def follow() -> None:
        async with AsyncQueryClient(connect, 60) as client:
            async for change in client.follow("sums", *expected):
                seen.take(change)
                if seen.counts == expected:
                    return

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job, **FAST) as first:
            served.append(first)
            following = asyncio.get_running_loop().create_task(follow())
            await seen.some.wait()
            assert list(seen.counts) == list(expected)
            job.kill(random.Random(1))
            await job.checkpoint()
            served.clear()
            await first.server.close()
        await job.crash_coordinator()
        async with serving(job, **FAST) as second:
            served.append(second)
            await at_rest(job, {"u1": {"sums": model(ROWS)["u1"]["sums"]}})
            await job.request("rescale", parallelism=3)
            await following
        assert seen.checkpoints == sorted(set(seen.checkpoints))

    assert lab.run(queryable_job(lab, parallelism), script).outcome.status == "FINISHED"


def test_a_client_goes_on_behind_an_event(lab: Any) -> None:
    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        expected = model(ROWS)["u1"]["sums"]
        async with (
            serving(job, **FAST) as api,
            AsyncQueryClient(api.client().__aenter__, 60) as client,
        ):
            async for change in client.follow("sums", "u1", "nobody"):
                if change.rows[0].value == expected:
                    break
            again = client.follow("sums", "u1", "nobody", after=change.id)
            more = asyncio.ensure_future(anext(again))
            await job.checkpoint()
            await job.checkpoint()
            await asyncio.sleep(0.05)
            assert not more.done()
            more.cancel()
            other = await anext(client.follow("sums", "u1", "u2", after=change.id))
            assert [row.key for row in other.rows] == ["u2"]
            live = client.follow("latest", "u1", level="live")
            first = await anext(live)
            assert (first.level, first.checkpoint, first.since) == ("live", None, None)

    lab.run(queryable_job(lab), script)


def test_changes_over_http(lab: Any) -> None:
    (route,) = [route for route in ROUTES if route.name == "changes"]

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        await job.checkpoint()
        path = "/v1/job/state/sums/changes?key=u1"
        async with serving(job, **FAST, **{"headgate.queries.subscriptions-max": "1"}) as api:
            for wrong, status in (("", 400), ("?key=u1&level=some", 400)):
                answered, _, body = await api.ask("GET", f"/v1/job/state/sums/changes{wrong}")
                assert answered == status
                valid(route, status, body)
            bad = {"headers": {"Last-Event-ID": "42"}}
            assert (await api.ask("GET", path, **bad))[0] == 400
            assert (await api.ask("GET", "/v1/job/state/latest/changes?key=u1"))[0] == 400
            assert (await api.ask("GET", "/v1/job/state/none/changes?key=u1"))[0] == 404
            assert (await api.ask("GET", path, token="wrong"))[0] == 401
            headers = {"Authorization": f"Bearer {QUERY_TOKEN}"}
            async with api.session.get(api.url + path, headers=headers) as response:
                assert response.status == 200
                assert response.content_type == "text/event-stream"
                lines = [(await response.content.readline()).decode().rstrip("\n") for _ in "123"]
                assert [line.partition(": ")[0] for line in lines] == ["id", "event", "data"]
                found = json.loads(lines[2].removeprefix("data: "))
                assert lines[0] == f"id: {found['id']}"
                assert [row["key"] for row in found["rows"]] == ["u1"]
                assert (await api.ask("GET", path))[0] == 503

    lab.run(queryable_job(lab), script)


def test_the_end_of_the_job_ends_the_changes(lab: Any) -> None:
    """Also a state that expires or is cleared says so."""
    job = hg.Job("odd", options=FAST)
    job.checkpoint(every="20ms", storage=lab.storage)
    schema = {"user": "string", "n": "int64"}
    rows = job.read(from_list([{"user": "a", "n": 3}], schema=schema), name="in")
    short = rows.key_by("user").agg(
        n=hg.sum("n"), name="one", queryable=hg.Queryable("sums", committed=True), ttl="300ms"
    )
    short.write(blackhole(), name="out")

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with (
            serving(job, **FAST) as api,
            AsyncQueryClient(api.client().__aenter__, 60) as client,
        ):
            told = []
            changes = client.follow("sums", "a")
            async for change in changes:
                told.append(change.rows[0].value)
                if len(told) > 1 and not change.rows[0].found:
                    break
            assert told[-2:] == [{"n": 3}, None]
            changes = client.follow("sums", "a")
            await anext(changes)
            await job.request("stop")
            with pytest.raises(StopAsyncIteration):
                await anext(changes)

    lab.run(job, script)


def test_a_wrong_name_or_key_is_an_error(lab: Any) -> None:
    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with (
            serving(job, **FAST) as api,
            AsyncQueryClient(api.client().__aenter__, 60) as client,
        ):
            with pytest.raises(StateNotFound):
                await anext(client.follow("sum", "u1"))
            with pytest.raises(UsageError, match="type=`int`"):
                await anext(client.follow("sums", 1))
            with pytest.raises(UsageError, match="read live only"):
                await anext(client.follow("latest", "u1"))

    lab.run(queryable_job(lab), script)


def test_a_job_without_checkpoints_has_no_changes_of_them(lab: Any) -> None:
    job = hg.Job("clicks", parallelism=1)
    source = from_list(ROWS, schema={"user": "string", "n": "int64"}, batch_rows=50)
    counted = (
        job.read(source, name="in")
        .key_by("user")
        .agg(count=hg.count(), name="counts", queryable=as_of("counts"))
    )
    counted.write(blackhole(), name="out")

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with (
            serving(job, **FAST) as api,
            AsyncQueryClient(api.client().__aenter__, 60) as client,
        ):
            with pytest.raises(UsageError, match="takes no checkpoints"):
                await anext(client.follow("counts", "u1"))
            with pytest.raises(UsageError, match="takes no checkpoints"):
                await client.get("counts", "u1", level="committed")

    lab.run(job, script)


def test_patience_ends() -> None:
    class NeverReady:
        async def states(self) -> Any:
            return []

        async def changes(self, *given: Any) -> Any:
            raise JobNotReady("the job is RESTARTING")
            yield

        async def close(self) -> None: ...

    async def connect() -> Any:
        return NeverReady()

    async def ask() -> None:
        async with AsyncQueryClient(connect, 0.2) as client:
            await anext(client.follow("totals", "alice"))

    with pytest.raises(JobNotReady, match="RESTARTING"):
        asyncio.run(ask())


def test_follow_is_for_one_key() -> None:
    done = CliRunner().invoke(app, ["query", "clicks", "sums", "--all", "--follow"])
    assert isinstance(done.exception, UsageError)
