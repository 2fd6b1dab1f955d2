"""Direct reads: clients that ask the worker which has the key, and jobs whose key groups move."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from headgate.errors import JobNotReady, UsageError
from headgate.operators.queries import key_as_plain, parse_key, plain_key, write_key
from headgate.runtime.control.messages import StateOutcome
from headgate.runtime.exchange.links import SCRATCH_BYTES
from headgate.runtime.exchange.wire import FrameKind, frame
from headgate.runtime.query import AsyncQueryClient
from headgate.runtime.reads.client import Moved, Refused, WorkerConnection
from headgate.runtime.reads.wire import (
    LIVE_NOW,
    ReadAnswer,
    ReadRequest,
    ReadWelcome,
    ticket_of,
)
from headgate.runtime.rest.client import RestClient
from headgate.state.hashing import hash_key
from headgate.state.keyed.base import ABSENT
from headgate.state.keyed.keys import encode_key
from headgate.tests.rest.conftest import QUERY_TOKEN, Api, serving

from .conftest import ROWS, model, queryable_job
from .test_client import KEYS
from .test_jobs import COMMITTED, reaches, sums

USERS = sorted(model(ROWS))


@pytest.mark.parametrize(("state", "key"), KEYS)
def test_a_client_places_a_key_as_the_job_does(state: Any, key: Any) -> None:
    types = state.key_types or None
    known = plain_key(types, key)
    read = parse_key(state, write_key("totals", types, key))
    assert known is not ABSENT
    assert (hash_key(known), encode_key(known)) == (hash_key(read), encode_key(read))
    assert key_as_plain(types, known) == key_as_plain(types, read)


@asynccontextmanager
async def reading(api: Api, **more: Any) -> AsyncIterator[AsyncQueryClient]:
    async def connect() -> RestClient:
        return await api.client().__aenter__()

    async with AsyncQueryClient(connect, 60, **more) as client:
        yield client


class NoRest:
    """Makes each read through the coordinator an error, for a block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def refuse(*given: Any, **more: Any) -> Any:
            raise AssertionError("the coordinator was asked for a value")

        monkeypatch.setattr(RestClient, "query", refuse)
        monkeypatch.setattr(RestClient, "rows", refuse)


async def at_rest(client: AsyncQueryClient, expected: dict[str, dict[str, Any]]) -> None:
    """Return once each state has all that it is to have."""
    for user, states in expected.items():
        for state, value in states.items():
            while True:
                answer = await client.query(state, user)
                assert (answer.state, answer.key, answer.level) == (state, user, "live")
                found = answer.value
                if answer.kind == "map" and found is not None:
                    found = {each["key"]: each["value"] for each in found}
                if found == value:
                    break
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_values_come_from_the_owners_whatever_happens(
    lab: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Through the death of a worker, a crash of the coordinator, and a rescale."""

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job) as api, reading(api) as client:
            NoRest(monkeypatch)
            await job.checkpoint()
            asked = [asyncio.ensure_future(client.get("sums", user)) for user in USERS]
            job.kill(random.Random(1))
            await asyncio.gather(*asked)
            await job.checkpoint()
            await at_rest(client, model(ROWS))
            before = await client.query("sums", "u1")
            await job.request("rescale", parallelism=3)
            await at_rest(client, model(ROWS))
            after = [await client.query("latest", user) for user in USERS]
            assert {answer.subtask for answer in after} == {0, 1, 2}
            assert after[0].attempt > before.attempt
            live = await client.query_many("sums", [*USERS, "nobody"])
            assert [row.value for row in live.rows] == [
                *(model(ROWS)[user]["sums"] for user in USERS),
                None,
            ]
            values = await client.get_many("sums", ["nobody", *USERS], 0)
            assert values == [0, *(model(ROWS)[user]["sums"] for user in USERS)]

    made = queryable_job(lab, **{"state.backend.type": backend})
    assert lab.run(made, script).outcome.status == "FINISHED"


def test_committed_answers_are_those_of_their_checkpoint(lab: Any) -> None:
    """Each answer is of one checkpoint of the model, and a client sees no older one than before."""
    found: dict[int, dict[tuple[str, str], Any]] = {}

    async def look(client: AsyncQueryClient, seed: int, over: asyncio.Event) -> None:
        rng, newest = random.Random(seed), dict.fromkeys(COMMITTED, 0)
        while not over.is_set():
            state, user = rng.choice(COMMITTED), rng.choice(USERS)
            answer = await client.query(state, user, level="committed")
            assert answer.checkpoint is not None
            assert answer.checkpoint >= newest[state]
            newest[state] = answer.checkpoint
            of_checkpoint = found.setdefault(answer.checkpoint, {})
            assert of_checkpoint.setdefault((state, user), answer.value) == answer.value
            await asyncio.sleep(0)

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        over = asyncio.Event()
        async with serving(job) as api, reading(api) as one, reading(api) as other:
            await job.checkpoint()
            looking = [
                asyncio.ensure_future(look(client, seed, over))
                for seed, client in enumerate((one, other))
            ]
            for _ in range(3):
                await reaches(found, await job.checkpoint())
            job.kill(random.Random(2))
            await reaches(found, await job.checkpoint())
            await job.request("rescale", parallelism=3)
            await reaches(found, await job.checkpoint())
            over.set()
            await asyncio.gather(*looking)
            whole = await one.query_many("sums", USERS, level="committed")
            rows = {row.key: row.value for row in whole.rows if row.found}
            assert sums(rows) <= len(ROWS)

    assert lab.run(queryable_job(lab), script).outcome.status == "FINISHED"
    assert len(found) > 2
    for values in found.values():
        sums({user: each for (state, user), each in values.items() if state == "sums" and each})


async def dial(api: Api, owner: Any, ticket: str) -> WorkerConnection:
    connection = WorkerConnection(bytearray(SCRATCH_BYTES), owner.worker, ticket)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: connection, owner.host, owner.port)
    return connection


def request(owners: Any, owner: Any, *users: str, **more: Any) -> ReadRequest:
    made = ReadRequest(
        number=0,
        attempt=owner.attempt,
        vertex=owners.vertex,
        index=owner.subtask,
        operator=owners.step,
        state=owners.stored_as,
        checkpoint=LIVE_NOW,
        keys=tuple(map(encode_key, users)),
    )
    return msgspec.structs.replace(made, **more)


def ask(connection: WorkerConnection, asked: ReadRequest) -> list[asyncio.Future[Any]]:
    waiting = [asyncio.get_running_loop().create_future() for _ in asked.keys]
    connection.ask(asked, [(waiter, 1) for waiter in waiting], 10.0)
    return waiting


def test_strangers_and_bad_requests(lab: Any) -> None:
    """A wrong ticket is refused, and so is what is too large, in a moment and for this client alone."""

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job) as api:
            owners = await api.client().__aenter__()
            found = await owners.owners("sums")
            await owners.close()
            assert found.ticket == ticket_of(api.token) != api.token
            first = found.owners[0]
            for ticket in ("", "wrong", api.token, QUERY_TOKEN):
                stranger = await dial(api, first, ticket)
                with pytest.raises(Exception, match="refused the connection: wrong ticket"):
                    await stranger.welcomed
            silent = await dial(api, first, "x" * (17 << 10))
            with pytest.raises(Exception, match="the connection broke"):
                await silent.welcomed
            good = await dial(api, first, found.ticket)
            await good.welcomed
            assert good.request_bytes_max == 256 << 10
            bad = {
                "too many keys": request(found, first, *["u1"] * 251),
                "no keys": request(found, first),
                "too large": request(found, first, "x" * (256 << 10)),
            }
            for name, asked in bad.items():
                connection = await dial(api, first, found.ticket)
                await connection.welcomed
                ask(connection, asked)
                await asyncio.wait_for(connection.closed, 60)
                assert connection.broken, name
            for data in (b"?", b"", encode_key(7)):
                with pytest.raises(Refused):
                    await ask(good, request(found, first, "u1", keys=(data,)))[0]
            with pytest.raises(Refused):
                await ask(good, request(found, first, "u1", operator="nothing"))[0]
            with pytest.raises(JobNotReady, match="have moved"):
                await ask(good, request(found, first, "u1", attempt=first.attempt + 1))[0]
            await ask(good, request(found, first, "u1"))[0]
            good.end(JobNotReady("over"))

    assert lab.run(queryable_job(lab), script).outcome.status == "FINISHED"


def test_requests_of_one_state_are_answered_in_order(lab: Any) -> None:
    """Also when more have come than one connection may have unanswered."""

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job) as api:
            rest = await api.client().__aenter__()
            found = await rest.owners("sums")
            await rest.close()
            first = found.owners[0]
            connection = await dial(api, first, found.ticket)
            await connection.welcomed
            done: list[int] = []
            waiting = []
            for number in range(300):
                for waiter in ask(connection, request(found, first, "u1", "u2")):
                    waiter.add_done_callback(lambda _, number=number: done.append(number))
                    waiting.append(waiter)
            assert len(await asyncio.gather(*waiting)) == 600
            assert done == sorted(done)
            found = [waiter.result().values[0] for waiter in waiting[::2]]
            counts = [value["count"] for value in found if value is not None]
            assert counts == sorted(counts)
            connection.end(JobNotReady("over"))

    made = queryable_job(lab, **{"headgate.queries.unanswered-max": "10"})
    assert lab.run(made, script).outcome.status == "FINISHED"


def test_the_token_for_queries_is_enough(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job) as api:

            async def connect() -> RestClient:
                return await RestClient(api.url, QUERY_TOKEN).__aenter__()

            NoRest(monkeypatch)
            async with AsyncQueryClient(connect, 60) as client:
                assert await client.get("sums", "nobody", 3) == 3
            status, _, _ = await api.ask("GET", "/v1/job/state/sums/owners", token="wrong")
            assert status == 401
            status, _, _ = await api.ask("GET", "/v1/job/state/nothing/owners")
            assert status == 404

    assert lab.run(queryable_job(lab), script).outcome.status == "FINISHED"


@pytest.mark.parametrize("options", [{"headgate.queries.connections-max": "0"}, {}])
def test_where_no_owner_can_be_reached_the_coordinator_answers(
    lab: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    async def nobody(*given: Any) -> Any:
        raise ConnectionRefusedError

    if not options:
        monkeypatch.setattr("headgate.runtime.reads.client.Connections._dial", nobody)

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job) as api, reading(api) as client:
            assert await client.get("sums", "nobody", 3) == 3
            with pytest.raises(UsageError, match="not a key of the state"):
                await client.get("sums", 42)

    assert lab.run(queryable_job(lab, **options), script).outcome.status == "FINISHED"


@pytest.mark.parametrize("values", [b"[1", b"[1, 2]"])
def test_an_answer_that_is_wrong_fails_its_reads(values: bytes) -> None:
    class Transport(asyncio.Transport):
        def writelines(self, list_of_data: Any) -> None:
            pass

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            pass

        def abort(self) -> None:
            pass

    async def script() -> None:
        connection = WorkerConnection(bytearray(SCRATCH_BYTES), "w", "ticket")
        connection.connection_made(Transport())

        def receive(answer: Any) -> None:
            data = b"".join(frame(FrameKind.READ_ANSWER, msgspec.msgpack.encode(answer)))
            connection.get_buffer(-1)[: len(data)] = data
            connection.buffer_updated(len(data))

        receive(ReadWelcome("", 1_000))
        asked = ReadRequest(0, 1, 0, 0, "sums", "running", LIVE_NOW, (encode_key("u1"),))
        waiting = ask(connection, asked) + ask(connection, asked)
        receive(ReadAnswer(0, StateOutcome.READ, 0, values))
        assert connection.broken
        for waiter in waiting:
            with pytest.raises(Moved):
                await asyncio.wait_for(waiter, 10)

    asyncio.run(script())


def test_outcomes_travel() -> None:
    """The names of outcomes are part of the format."""
    data = msgspec.msgpack.encode(ReadAnswer(1, StateOutcome.ELSEWHERE))
    assert msgspec.msgpack.decode(data) == [1, "elsewhere", 0, b"", [], []]
    assert frame(FrameKind.READ_ANSWER, data)[0][4] == FrameKind.READ_ANSWER == 12
