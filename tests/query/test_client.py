"""`headgate.query`: clients for scripts and for asyncio, in front of jobs that fail and end."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import JobNotReady, StateNotFound, UsageError
from headgate.operators.queries import QueryableState, parse_key, write_key
from headgate.runtime.query import AsyncQueryClient
from headgate.state.keyed.keys import OPAQUE_KEYS, KeyShape, keys_of_columns, keys_of_type
from headgate.tests.rest.conftest import QUERY_TOKEN, serving

from .conftest import ROWS, model, queryable_job


def of_columns(**types: pa.DataType) -> QueryableState:
    fields = [pa.field(name, type_) for name, type_ in types.items()]
    return QueryableState("totals", "total", "value", keys_of_columns(fields), tuple(types))


def of_type(keys: KeyShape) -> QueryableState:
    return QueryableState("totals", "total", "value", keys)


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
KEYS = [
    (of_columns(user=pa.string()), "alice"),
    (of_columns(user=pa.string()), '"quoted"'),
    (of_columns(user=pa.string()), "42"),
    (of_columns(n=pa.int64()), -42),
    (of_columns(n=pa.bool_()), True),
    (of_columns(n=pa.binary()), b"\x00\xff"),
    (of_columns(n=pa.date32()), date(2026, 1, 31)),
    (of_columns(n=pa.timestamp("us", tz="UTC")), NOON),
    (of_columns(n=pa.decimal128(10, 2)), Decimal("-12.5")),
    (of_columns(user=pa.string(), n=pa.int64(), at=pa.date32()), ("a", 3, date(2026, 1, 31))),
    (of_columns(user=pa.string(), n=pa.int64()), (None, 3)),
    (of_type(keys_of_type(UUID)), UUID(int=7)),
    (of_type(keys_of_type(tuple[str, int])), ("a", 3)),
    (of_type(OPAQUE_KEYS), "alice"),
    (of_type(OPAQUE_KEYS), 42),
    (of_type(OPAQUE_KEYS), None),
    (of_type(OPAQUE_KEYS), ("a", (1, True))),
]


@pytest.mark.parametrize(("state", "key"), KEYS)
def test_the_job_reads_the_key_that_a_client_writes(state: QueryableState, key: Any) -> None:
    found = parse_key(state, write_key(state.name, state.key_types or None, key))
    assert found == key
    assert type(found) is type(key)


def test_other_forms_of_keys() -> None:
    both = of_columns(user=pa.string(), n=pa.int64())
    assert parse_key(both, write_key("t", both.key_types, {"n": 3, "user": "a"})) == ("a", 3)
    number = of_columns(n=pa.int64())
    assert parse_key(number, write_key("t", number.key_types, np.int32(3))) == 3


@pytest.mark.parametrize(
    ("types", "key"),
    [
        ({"user": "str"}, 42),
        ({"user": "str"}, None),
        ({"user": "str"}, "\ud800"),
        ({"n": "int"}, "42"),
        ({"n": "int"}, True),
        ({"n": "int"}, 1.5),
        ({"at": "datetime"}, datetime(2026, 1, 31)),
        ({"at": "date"}, NOON),
        ({"user": "str", "n": "int"}, "alice"),
        ({"user": "str", "n": "int"}, ("alice", object())),
        (None, 1.5),
        (None, {"a": 1}),
    ],
)
def test_a_key_of_another_type_is_refused(types: dict[str, str] | None, key: Any) -> None:
    with pytest.raises(UsageError, match="not a key of the state state=`totals`"):
        write_key("totals", types, key)


def test_a_client_goes_on_through_failures_and_takeovers(lab: Any) -> None:
    """The client finds each next coordinator, as one does that looks the job up."""
    served: list[Any] = []

    async def connect() -> Any:
        return await served[-1].client().__aenter__()

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        expected = model(ROWS)
        async with serving(job) as first:
            served.append(first)
            async with AsyncQueryClient(connect, 60) as client:
                assert "sums" in {each.name for each in await client.states()}
                await job.checkpoint()
                asked = [client.get("sums", user) for user in expected]
                job.kill(random.Random(1))
                assert len(await asyncio.gather(*asked)) == len(expected)
                await first.server.close()
                await job.crash_coordinator()
                async with serving(job) as second:
                    served.append(second)
                    while True:
                        found = [await client.get("sums", user) for user in expected]
                        if found == [states["sums"] for states in expected.values()]:
                            break
                    answer = await client.query("sums", "nobody")
                    assert (answer.found, answer.value) == (False, None)
                    assert await client.get("sums", "nobody", "none") == "none"
                    with pytest.raises(StateNotFound, match="state=`sum`"):
                        await client.get("sum", "u1")
                    with pytest.raises(UsageError, match="type=`int`"):
                        await client.get("sums", 1)
        with pytest.raises(UsageError, match="client is closed"):
            await client.get("sums", "u1")

    assert lab.run(queryable_job(lab), script).outcome.status == "FINISHED"


def test_patience_ends() -> None:
    class NeverReady:
        async def states(self) -> Any:
            raise JobNotReady("the job is RESTARTING")

        async def close(self) -> None: ...

    async def connect() -> Any:
        return NeverReady()

    async def ask() -> None:
        async with AsyncQueryClient(connect, 0.2) as client:
            await client.get("totals", "alice")

    with pytest.raises(JobNotReady, match="RESTARTING"):
        asyncio.run(ask())


def test_the_client_for_scripts(lab: Any) -> None:
    """In a thread, as for a caller without a loop; the caller in front has one that runs."""

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job) as api:
            found: dict[str, Any] = {}

            def use() -> None:
                with hg.query.connect(
                    "clicks", url=api.url, token=api.token, patience="60s"
                ) as client:
                    while "value" not in found:
                        answer = client.query("sums", "u1")
                        if answer.found:
                            found["value"] = client.get("sums", "u1")
                    found["states"] = {each.name for each in client.states()}
                client.close()
                with pytest.raises(UsageError, match="client is closed"):
                    client.get("sums", "u1")
                with pytest.raises(UsageError, match="token"):
                    hg.query.connect("clicks", url=api.url, token="wrong")
                with hg.query.connect("clicks", url=api.url, token=QUERY_TOKEN) as client:
                    assert client.get("sums", "nobody", default=7) == 7

            await asyncio.to_thread(use)
            assert found["value"]["count"] > 0
            assert "latest" in found["states"]
            assert "headgate-query" not in {thread.name for thread in threading.enumerate()}

    lab.run(queryable_job(lab), script)


def test_arguments_are_checked() -> None:
    with pytest.raises(UsageError, match="needs the token"):
        hg.query.connect("clicks", url="http://127.0.0.1:1")
    with pytest.raises(UsageError, match="goes with url="):
        hg.query.connect("clicks", token="secret")
    with pytest.raises(UsageError, match="patience"):
        hg.query.connect_async("clicks", patience="soon")


def test_it_is_loaded_when_it_is_used() -> None:
    code = (
        "import sys, headgate; assert 'headgate.runtime.query' not in sys.modules; headgate.query"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
