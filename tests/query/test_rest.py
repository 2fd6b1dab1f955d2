"""Queries over the REST API: answers as documented, texts of keys in addresses, and who may ask."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import JobNotReady, StateNotFound, UsageError
from headgate.runtime.control import registry
from headgate.runtime.options.registry import Options
from headgate.runtime.rest.routes import ROUTES
from headgate.tests.rest.conftest import QUERY_TOKEN, serving
from headgate.tests.rest.test_server import valid

(QUERY,) = [route for route in ROUTES if route.name == "query"]
(ROWS,) = [route for route in ROUTES if route.name == "rows"]
(STATES,) = [route for route in ROUTES if route.name == "states"]
ODD = "a b/c?d=é&+%2F\n"


def odd_job() -> hg.Job:
    job = hg.Job("odd", parallelism=2, options={"headgate.queries.timeout": "60s"})
    schema = {"user": "string", "n": "int64"}
    rows = job.read(from_list([{"user": ODD, "n": 3}], schema=schema), name="in")
    by_user = rows.key_by("user").agg(n=hg.sum("n"), name="one", queryable="sums")
    by_user.write(blackhole(), name="out")
    by_both = rows.key_by("user", "n").agg(times=hg.count(), name="two", queryable="times")
    by_both.write(blackhole(), name="out-2")
    return job


def test_queries_over_http(lab: Any) -> None:
    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job) as api, api.client() as client:
            while True:
                try:
                    if (await client.query("sums", ODD)).found:
                        break
                except JobNotReady:
                    pass
                await asyncio.sleep(0.01)
            status, headers, body = await api.ask("GET", f"/v1/job/state/sums?key={quote(ODD, '')}")
            assert status == 200
            assert headers["Cache-Control"] == "no-store"
            valid(QUERY, status, body)
            group, subtask, attempt = body["key_group"], body["subtask"], body["attempt"]
            assert body == {
                "job": "odd",
                "run": job.spec.run,
                "attempt": attempt,
                "state": "sums",
                "kind": "running",
                "step": "one",
                "subtask": subtask,
                "key": ODD,
                "key_group": group,
                "level": "live",
                "checkpoint": None,
                "found": True,
                "value": {"n": 3},
            }
            assert subtask == group * 2 // 128
            path = "/v1/job/state/sums/rows?key=nobody&key="
            status, _, body = await api.ask("GET", path + quote(ODD, ""))
            valid(ROWS, status, body)
            assert [row["value"] for row in body["rows"]] == [None, {"n": 3}]
            rows = await client.rows("sums", [ODD, ODD])
            assert [row.value for row in rows.rows] == [{"n": 3}, {"n": 3}]
            states, _, listed = await api.ask("GET", "/v1/job/state")
            valid(STATES, states, listed)
            assert [each.name for each in await client.states()] == ["sums", "times"]
            assert listed["states"][1]["key"] == {"user": "str", "n": "int"}
            absent = await client.query("times", '{"user": "nobody", "n": 3}')
            assert (absent.found, absent.value) == (False, None)
            assert absent.key == {"user": "nobody", "n": 3}
            for path, expected, error in (
                ("sum?key=a", 404, "StateNotFound"),
                (f"{quote('a/b', '')}?key=a", 404, "StateNotFound"),
                ("times?key=a", 400, "UsageError"),
                ("times?key=%7B%22n%22%3A3%7D", 400, "UsageError"),
                ("sums", 400, ""),
                ("sums?key=a&key=b", 400, ""),
                ("sums?key=a&level=committed", 400, "UsageError"),
                ("sums?key=a&level=dirty", 400, "UsageError"),
                ("sums/rows", 400, "UsageError"),
                ("sums/rows?" + "&".join(["key=a"] * 251), 400, "UsageError"),
            ):
                status, _, body = await api.ask("GET", f"/v1/job/state/{path}")
                assert (path, status, body["error"]) == (path, expected, error)
                valid(QUERY, status, body)
            with pytest.raises(StateNotFound, match="state=`sum`"):
                await client.query("sum", "a")
            with pytest.raises(UsageError, match="lacks the column `user`"):
                await client.request("query", state="times", key='{"n": 3}')
            for path in (
                "/v1/job/state",
                "/v1/job/state/sums?key=a",
                "/v1/job/state/sums/rows?key=a",
            ):
                assert (await api.ask("GET", path, token=QUERY_TOKEN))[0] == 200
                for token in (None, "wrong"):
                    assert (await api.ask("GET", path, token=token))[0] == 401

    assert lab.run(odd_job(), script).outcome.status == "FINISHED"


def test_the_token_for_queries_is_for_nothing_else(lab: Any) -> None:
    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job) as api:
            for route in ROUTES:
                names = dict.fromkeys(route.parameters, "1")
                path = route.path.format(**names)
                status, _, body = await api.ask(route.method, path, token=QUERY_TOKEN)
                if route.public:
                    assert status in (200, 503)
                elif route.queries:
                    assert status not in (401, 403)
                else:
                    assert (path, status) == (path, 403)
                    assert "for queries of state alone" in body["detail"]
            for method, path in (
                ("GET", "/v1/nowhere"),
                ("POST", "/v1/job/state"),
                ("GET", "/v1/job/state/a/b/c"),
            ):
                assert (await api.ask(method, path, token=QUERY_TOKEN))[0] in (403, 404, 405)

    assert lab.run(odd_job(), script).outcome.status == "FINISHED"


def test_the_file_of_the_token_for_queries(tmp_path: Path) -> None:
    path = tmp_path / "token"
    options = Options({"headgate.queries.token-file": str(path)})
    assert registry.query_token(Options({}), "secret") is None
    with pytest.raises(UsageError, match="cannot be read"):
        registry.query_token(options, "secret")
    path.write_text("the secret of queries\n")
    assert registry.query_token(options, None) == "the secret of queries"
    with pytest.raises(UsageError, match="is the token of the job"):
        registry.query_token(options, "the secret of queries")
