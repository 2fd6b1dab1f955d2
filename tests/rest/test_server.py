"""The REST API of real jobs, over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest

import headgate as hg
from headgate.connectors import Pause, blackhole, from_list
from headgate.errors import HeadgateError, JobError, StateError, UsageError
from headgate.operators.clock import SystemClock
from headgate.runtime.cluster import host
from headgate.runtime.cluster.host import CoordinatorPlace, host_coordinator
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.coordinator.views import masked
from headgate.runtime.job import runnable
from headgate.runtime.options.registry import Options
from headgate.runtime.rest import answers, openapi
from headgate.runtime.rest.client import RestClient
from headgate.runtime.rest.routes import ROUTES, Route
from headgate.runtime.rest.server import LateHttp, RestServer
from headgate.runtime.storage.open_store import open_store

DOCUMENT = Path(hg.__file__).parent / "docs" / "openapi.json"
ELSEWHERE = {"changes", "events", "owners", "query", "rows", "scan"}
"""Tests of their own look at these."""
LOOKS = [route for route in ROUTES if route.method == "GET" and route.name not in ELSEWHERE]
Run = Callable[..., Any]


def valid(route: Route, status: int, body: Any) -> None:
    """Raise unless the OpenAPI document has this answer."""
    document = openapi.document()
    responses = document["paths"][route.path][route.method.lower()]["responses"]
    media, *_ = responses[str(status)]["content"].values()
    schema = {**media["schema"], "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(body)


def filled(route: Route) -> str:
    return route.path.format(vertex=0, checkpoint=1, trigger_id="first")


def test_every_answer_is_as_documented(with_api: Run) -> None:
    async def script(api: Any) -> None:
        async with api.client() as client:
            assert await client.carry_out(answers.CheckpointCommand(trigger_id="first"))
        for route in LOOKS:
            status, headers, body = await api.ask("GET", filled(route))
            assert (route.name, status) == (route.name, 200)
            assert headers["Content-Type"] == "application/json"
            assert headers["Cache-Control"] == "no-store"
            valid(route, status, body)
            if route.parameters:
                missing = route.path.format(vertex=99, checkpoint=99, trigger_id="other")
                status, headers, body = await api.ask("GET", missing)
                assert status == 404
                assert headers["Content-Type"] == "application/problem+json"
                valid(route, status, body)

    with_api(script)


def test_the_document_is_valid_and_the_committed_one_is_current() -> None:
    openapi_spec_validator.validate(json.loads(openapi.text()))
    command = "python -m headgate.runtime.rest.openapi > docs/openapi.json"
    assert DOCUMENT.read_text() == openapi.text(), command


def test_what_the_client_sees(with_api: Run) -> None:
    async def script(api: Any) -> None:
        async with api.client() as client:
            assert await client.healthy()
            assert await client.ready()
            job = await client.job()
            told = await api.job.status()
            assert (job.name, job.status, job.parallelism) == ("clicks", "RUNNING", 2)
            assert job.run == told["run"]
            assert [each.name for each in await client.vertices()] == [
                each["name"] for each in told["vertices"]
            ]
            subtasks = await client.subtasks(0)
            assert [each.index for each in subtasks] == [0, 1]
            live = {worker.worker for worker in job.workers}
            assert {each.worker for each in subtasks} <= live
            plan = await client.plan()
            assert [(edge.source, edge.target) for edge in plan.edges] == [(0, 1)]
            assert "hash(user)" in plan.text
            assert plan.edges[0].partitioning == "hash(user)"
            config = await client.config()
            assert config.options["rest.port"] == answers.OptionAnswer(value="0", explicit=True)
            assert not config.options["parallelism.default"].explicit
            assert [step.step for step in await client.watermarks()] == ["event_time"]
            assert await client.backpressure() == []
            assert (await client.exceptions()).exceptions == []
            names = {sample.name for sample in (await client.metrics()).samples}
            assert any(name.startswith("headgate_") for name in names)
            with pytest.raises(HeadgateError, match="no such vertex"):
                await client.subtasks(7)

    with_api(script, **{"rest.port": "0"})


def test_the_control_port_has_the_same_views(with_api: Run) -> None:
    async def script(api: Any) -> None:
        for verb, arguments in (("subtasks", {"vertex": 1}), ("config", {}), ("plan", {})):
            told = await api.job.request(verb, **arguments)
            path = f"vertices/1/{verb}" if arguments else verb
            _, _, body = await api.ask("GET", f"/v1/job/{path}")
            if verb != "subtasks":  # their figures move on
                assert body == told
            else:
                assert [each["worker"] for each in body["subtasks"]] == [
                    each["worker"] for each in told["subtasks"]
                ]

    with_api(script)


def test_secrets_of_the_configuration_are_masked() -> None:
    assert masked("s3.secret-key", "x") == masked("some.password", "y") == "******"
    assert (
        masked("s3.access-key", "x")
        == masked("x.api-key", "x")
        == masked("a.token", "x")
        == "******"
    )
    assert masked("storage", "s3://key:word@bucket/p") == "s3://******@bucket/p"
    assert masked("headgate.control.token-file", "/run/token") == "/run/token"
    assert masked("key.column", "user") == "user"


def test_the_same_trigger_is_one_operation(with_api: Run) -> None:
    async def script(api: Any) -> None:
        path, body = "/v1/job/checkpoint", {"triggerId": "nightly-1"}
        many = await asyncio.gather(*(api.ask("POST", path, json=body) for _ in range(5)))
        assert {status for status, _, _ in many} == {202}
        assert {headers["Location"] for _, headers, _ in many} == {"/v1/operations/nightly-1"}
        async with api.client() as client:
            done = await client.operation("nightly-1", wait_s=60)
            assert done.status == "COMPLETED"
            assert done.result is not None
            assert done.result["checkpoint"] == 1
            assert (await client.job()).last_checkpoint == 1
            detail = await client.checkpoint_detail(1)
            assert detail.status == "COMPLETED"
            assert len(detail.subtasks) == 4
        route = next(route for route in ROUTES if route.name == "checkpoint")
        status, _, answer = await api.ask("POST", path, json=body)
        assert (status, answer["status"]) == (202, "COMPLETED")
        valid(route, 202, answer)
        status, _, answer = await api.ask("POST", "/v1/job/cancel", json=body)
        assert status == 409
        assert "another operation" in answer["detail"]
        valid(route, 409, answer)

    assert with_api(script).completed == 2  # this one, and the last one of the job


WRONG_BODIES = [
    ("checkpoint", b"", "Input data was truncated"),
    ("checkpoint", b"{}", "triggerId"),
    ("checkpoint", b"[]", "object"),
    ("checkpoint", b'{"triggerId": "a/b"}', "regex"),
    ("checkpoint", b'{"triggerId": "a", "drain": true}', "drain"),
    ("rescale", b'{"triggerId": "a"}', "parallelism"),
    ("rescale", b'{"triggerId": "a", "parallelism": 0}', "parallelism"),
    ("savepoint", b'{"triggerId": "a", "savepoint": "here"}', "savepoint"),
    ("dispose", b'{"triggerId": "a", "path": "../x"}', "path"),
]


def test_a_wrong_body_is_refused(with_api: Run) -> None:
    async def script(api: Any) -> None:
        for verb, body, says in WRONG_BODIES:
            status, headers, answer = await api.ask("POST", f"/v1/job/{verb}", data=body)
            assert (verb, body, status) == (verb, body, 400)
            assert headers["Content-Type"] == "application/problem+json"
            assert says in answer["detail"]

    with_api(script)


def test_a_refused_operation_says_what_the_cli_says(with_api: Run) -> None:
    async def script(api: Any) -> None:
        with pytest.raises(UsageError) as told:
            await api.job.request("savepoint")
        async with api.client() as client:
            with pytest.raises(UsageError) as refused:
                await client.carry_out(answers.SavepointCommand(trigger_id="s"))
            assert str(refused.value) == str(told.value)
            operation = await client.operation("s")
            assert operation.status == "FAILED"
            assert operation.problem is not None
            assert operation.problem.detail == str(told.value)

    with_api(script)


def test_nothing_that_the_coordinator_shows_is_lost_on_the_way(with_api: Run) -> None:
    """Those who have the coordinator in their own process see the same as those who ask by HTTP."""

    async def script(api: Any) -> None:
        api.job.kill(random.Random(0))
        await api.job.until("recovered")
        await api.job.request("checkpoint")
        async with api.client() as client:
            there = await client.request("status")
            here = await api.job.request("status")
            assert here["exceptions"]
            assert here["event_time"]
            assert there.keys() == here.keys()
            for key in ("exceptions", "event_time", "workers", "vertices"):
                assert [each.keys() for each in there[key]] == [each.keys() for each in here[key]]
            assert there["exceptions"] == here["exceptions"]
            assert (await client.status()).exceptions[0].kind == here["exceptions"][0]["kind"]
            for given in ({}, {"id": 1}):
                there = await client.request("checkpoints", **given)
                assert there == json.loads(
                    json.dumps(await api.job.request("checkpoints", **given))
                )

    with_api(script)


def test_a_run_is_handed_over(with_api: Run) -> None:
    async def script(api: Any) -> None:
        async with api.client() as client:
            assert (await client.request("hand-over"))["status"] == "HANDED_OVER"
        await api.job.task

    assert with_api(script).outcome.status == "HANDED_OVER"


def test_savepoint_and_disposal(with_api: Run, tmp_path: Path) -> None:
    async def script(api: Any) -> None:
        async with api.client() as client:
            command = answers.SavepointCommand(trigger_id="s", savepoint=str(tmp_path / "sp"))
            address = (await client.carry_out(command))["savepoint"]
            (made,) = (tmp_path / "sp").iterdir()
            assert address.endswith(made.name)
            gone = await client.carry_out(answers.DisposeCommand(trigger_id="d", path=address))
            assert gone == {"path": address, "job": "clicks"}
            assert not [path for path in made.rglob("*") if path.is_file()]
            with pytest.raises(StateError):
                await client.carry_out(answers.DisposeCommand(trigger_id="d2", path=address))

    with_api(script)


def test_rescale_and_stop_with_events_to_the_end(with_api: Run) -> None:
    seen: list[str] = []

    async def script(api: Any) -> None:
        async def follow() -> None:
            async with api.client() as watcher:
                async for event in watcher.events():
                    seen.append(event.kind)
                    if event.kind == "ended":
                        assert json.loads(event.body)["status"] == "SUSPENDED"

        async with api.client() as client:
            following = asyncio.ensure_future(follow())
            done = await client.carry_out(answers.RescaleCommand(trigger_id="r", parallelism=1))
            assert done["parallelism"] == 1
            assert (await client.plan()).parallelism == 1
            stopped = await client.carry_out(answers.StopCommand(trigger_id="end"))
            assert stopped["status"] == "SUSPENDED"
            await api.job.task
            assert not await client.ready()
            assert await client.healthy()
            with pytest.raises(JobError, match="the job has ended"):
                await client.carry_out(answers.CancelCommand(trigger_id="late"))
        await api.server.close()
        await following

    assert with_api(script).outcome.status == "SUSPENDED"
    assert {"status", "rescaling", "rescaled", "ended"} <= set(seen)
    assert seen.index("rescaled") < seen.index("ended")


def test_a_job_that_is_not_running_is_not_ready(lab: Any, with_api: Run) -> None:
    async def script(api: Any) -> None:
        api.job.coordinator._context.set_status("RESTARTING")
        status, _, body = await api.ask("GET", "/readyz", token=None)
        assert (status, body["detail"]) == (503, "the job is RESTARTING")
        status, _, _ = await api.ask("GET", "/healthz", token=None)
        assert status == 200
        api.job.coordinator._context.set_status("RUNNING")

    with_api(script)


def hosted(job: hg.Job, use: Callable[[JobCoordinator], Any]) -> Any:
    """Run a job under a hosted coordinator, with `use` beside it."""

    async def main() -> Any:
        cluster = InProcessCluster(clock=SystemClock(), open_store=open_store)
        using: list[asyncio.Task[Any]] = []
        try:
            async with asyncio.timeout(120):
                await host_coordinator(
                    runnable(job).spec(),
                    cluster,
                    CoordinatorPlace(SystemClock(), "test"),
                    open_store=open_store,
                    on_listening=lambda c: using.append(asyncio.ensure_future(use(c))),
                )
                return await using[0]
        finally:
            await cluster.close()

    return asyncio.run(main())


def test_a_hosted_job_has_its_api_where_the_options_say(
    lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))

    async def use(coordinator: JobCoordinator) -> str:
        async with RestClient(coordinator.rest_url, coordinator.server.token) as client:
            assert await client.healthy()
            # The answer to this comes before the API is closed.
            cancelled = await client.carry_out(answers.CancelCommand(trigger_id="c"))
            assert coordinator.clients.view("status")["rest"] == coordinator.rest_url
            return str(cancelled["status"])

    job = hg.Job("hosted", options={"rest.port": "0"})
    source = from_list([{"a": 1}, Pause("1h")], schema={"a": "int64"})
    job.read(source, name="in").write(blackhole(), name="out")
    assert hosted(job, use) == "CANCELED"


def test_a_client_learns_how_its_operation_ended_though_the_job_has_ended_before_it_asked(
    lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))

    async def use(coordinator: JobCoordinator) -> str:
        token = coordinator.server.token
        async with RestClient(coordinator.rest_url, token) as client:
            await client.begin(answers.CancelCommand(trigger_id="c"))
            async for event in client.events():
                if event.kind == "ended":
                    break
        await asyncio.sleep(0.5)
        async with RestClient(coordinator.rest_url, token) as client:
            return (await client.operation("c")).status.value

    job = hg.Job("hosted", options={"rest.port": "0"})
    source = from_list([{"a": 1}, Pause("1h")], schema={"a": "int64"})
    job.read(source, name="in").write(blackhole(), name="out")
    assert hosted(job, use) == "COMPLETED"


def test_an_answer_to_a_repeated_request_tells_the_end_as_well(
    lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then the API closes at once: the time-out would be longer than this test may take."""
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))

    async def use(coordinator: JobCoordinator) -> str:
        async with RestClient(coordinator.rest_url, coordinator.server.token) as client:
            command = answers.CancelCommand(trigger_id="c")
            answer = await client.begin(command)
            while answer.ended_ms is None:
                await asyncio.sleep(0.01)
                answer = await client.begin(command)
            return answer.status.value

    options = {"rest.port": "0", "headgate.rest.close-timeout": "1h"}
    job = hg.Job("hosted", options=options)
    source = from_list([{"a": 1}, Pause("1h")], schema={"a": "int64"})
    job.read(source, name="in").write(blackhole(), name="out")
    assert hosted(job, use) == "COMPLETED"


def test_a_port_that_is_taken_is_an_error_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        job = hg.Job(
            "hosted", options={"rest.port": port, "headgate.listener.port-patience": "0 s"}
        )
        source = from_list([{"a": 1}], schema={"a": "int64"})
        job.read(source, name="in").write(blackhole(), name="out")
        with pytest.raises(JobError, match=r"taken option=`rest\.port`"):
            hosted(job, lambda _: asyncio.sleep(0))


def test_after_a_takeover_the_port_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator before may still hold it, and the job must go on."""
    monkeypatch.setattr(host, "REST_RETRY_S", 0.01)

    async def main() -> None:
        taken = socket.create_server(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        coordinator: Any = SimpleNamespace(rest_url="", rest_addresses=())
        options = Options({"rest.port": str(port), "headgate.listener.port-patience": "0 s"})
        rest = RestServer(coordinator, "token", options, SystemClock())
        opening = await host._open_port(rest, coordinator, "127.0.0.1", takes_over=True)
        assert opening is not None
        while "trying again" not in caplog.text:  # noqa: ASYNC110  a line in the log is no event
            await asyncio.sleep(0)
        assert coordinator.rest_url == ""
        taken.close()
        async with asyncio.timeout(60):
            await opening
        assert coordinator.rest_url == f"http://127.0.0.1:{port}"
        assert coordinator.rest_addresses == (f"tcp:127.0.0.1:{port}",)
        await rest.close()

    asyncio.run(main())


def test_what_arrives_before_http_is_loaded_waits() -> None:
    calls: list[str] = []

    class Http(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            calls.append(data.decode())

    async def main() -> None:
        loaded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        transport: Any = SimpleNamespace(
            is_closing=lambda: False,
            pause_reading=lambda: calls.append("pause"),
            resume_reading=lambda: calls.append("resume"),
        )
        late = LateHttp(lambda: loaded)
        late.connection_made(transport)
        await asyncio.sleep(0)
        late.data_received(b"GET ")
        loaded.set_result(Http)
        late.data_received(b"/ HTTP")
        assert late._opening is not None
        await late._opening
        late.data_received(b"/1.1")
        assert calls == ["pause", "pause", "GET / HTTP", "resume", "/1.1"]

    asyncio.run(main())


def test_a_connection_that_comes_too_late_to_be_served_ends() -> None:
    async def main() -> None:
        rest = RestServer(SimpleNamespace(), "token", Options({"rest.port": "0"}), SystemClock())
        await rest.listen()
        await rest.close()
        aborted = asyncio.Event()
        transport: Any = SimpleNamespace(abort=aborted.set)
        LateHttp(rest._http).connection_made(transport)
        async with asyncio.timeout(60):
            await aborted.wait()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "host"), [(None, "127.0.0.1"), ("jobs.localhost, other", "jobs.localhost")]
)
def test_the_address_that_clients_are_told_is_one_that_they_may_ask_for(
    address: str | None, host: str
) -> None:
    texts = {"rest.port": "0", "rest.bind-address": "0.0.0.0"}
    options = Options({**texts, **({} if address is None else {"rest.address": address})})

    async def main() -> None:
        rest = RestServer(SimpleNamespace(), "token", options, SystemClock())
        await rest.listen()
        port = rest.url.rpartition(":")[2]
        assert rest.url == f"http://{host}:{port}"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        name = rest.url.removeprefix("http://")
        writer.write(f"GET /healthz HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await rest.close()

    asyncio.run(main())


def test_a_savepoint_that_the_job_would_need_is_not_deleted(
    lab: Any, make_job: Callable[[], hg.Job], tmp_path: Path
) -> None:
    taken: list[str] = []

    async def take(job: Any) -> None:
        await job.until("status", status="RUNNING")
        taken.append((await job.request("savepoint", savepoint=str(tmp_path)))["savepoint"])

    async def dispose(job: Any) -> None:
        await job.until("status", status="RUNNING")
        (tmp_path / "link").symlink_to(taken[0])
        for path in (taken[0], f"file://{taken[0]}/", str(tmp_path / "link")):
            with pytest.raises(UsageError, match="began with this savepoint"):
                await job.request("dispose", path=path)
        await job.request("checkpoint")
        assert (await job.request("dispose", path=taken[0]))["job"] == "clicks"

    lab.run(make_job(), take, batches=2)
    lab.run(make_job(), dispose, batches=2, restore_from=taken[0])
