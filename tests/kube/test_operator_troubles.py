"""Goal: the operator recovers from failures of its leader, its watches and its connections.

Method: a real API server. Where its own times would be long, the operator's controller runs in the test,
with shorter ones; no test depends on how long something takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("kubernetes_asyncio", reason="pip install 'headgate[k8s]'")

from headgate.k8s.actions import CallJob, JobReport
from headgate.k8s.objects import Settings
from headgate.k8s.operator.api import Api, ApiError, Patience
from headgate.k8s.operator.controller import Controller
from headgate.k8s.operator.endpoints import serving
from headgate.k8s.operator.informer import Informer
from headgate.k8s.operator.kinds import STREAM_JOB, Kind
from headgate.k8s.operator.lease import LEASE_S
from headgate.k8s.operator.metrics import Metrics
from headgate.operators.clock import SystemClock
from headgate.testing.servers.process import HeldPort
from headgate.tests.kube.operators import (
    WAIT_S_MAX,
    Object,
    Start,
    holder,
    phase,
    stream_job,
)
from headgate.tests.kube.test_operator import definitions, start
from headgate.tests.support.kube import control_plane
from headgate.tests.support.kube.cluster import Cluster
from headgate.tests.support.kube.proxies import Wire

__all__ = ["definitions", "start"]
SHORT = Patience(request_s=2, watch_s=2, margin_s=1)


class NoCoordinators:
    """Coordinators of which none answers."""

    async def report(self, namespace: str, job: str) -> JobReport | None:
        return None

    async def call(self, namespace: str, job: str, call: CallJob) -> None:
        raise AssertionError("nobody answers, and so nobody is asked for anything")


def at(url: str, cluster: Cluster, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `Api.from_environment` find the API server at another address."""
    config = json.loads(cluster.plane.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = url
    path = directory / "kubeconfig"
    path.write_text(json.dumps(config))
    for name, value in control_plane.environment(cluster.plane).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KUBECONFIG", str(path))


@contextlib.asynccontextmanager
async def operating(api: Api, namespace: str) -> AsyncIterator[Controller]:
    """Run an operator in this process, which leads."""
    controller = Controller(
        api, NoCoordinators(), Settings(), (namespace,), "test", Metrics(), SystemClock()
    )
    task = asyncio.create_task(controller.run())
    try:
        yield controller
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(what: str, seen: Callable[[], Any]) -> None:
    """Wait until something is seen."""
    for _ in range(int(WAIT_S_MAX / 0.1)):
        if await asyncio.to_thread(seen):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{what} did not come")


def test_a_leader_that_is_killed_is_replaced_after_the_lease_duration(
    api_server: Cluster, namespace: str, start: Start
) -> None:
    first = start("one", real_lease=True)
    first.until("the Lease", lambda: holder(api_server, namespace) == "one")
    last: list[Object] = []

    def taken() -> bool:
        lease = api_server.find(namespace, "lease/operator")
        assert lease is not None
        last.append(lease["spec"])
        return str(last[-1]["holderIdentity"]) == "two"

    # The first look comes before the kill, because a slow test may see the lease only after its takeover.
    assert not taken()
    second = start("two", real_lease=True)
    first.process.kill()
    second.until("the takeover", taken)
    renewed = [each["renewTime"] for each in last if each["holderIdentity"] == "one"][-1]
    waited = datetime.fromisoformat(last[-1]["acquireTime"]) - datetime.fromisoformat(renewed)
    assert waited.total_seconds() >= LEASE_S
    assert last[-1]["leaseTransitions"] == 1
    api_server.apply(stream_job(), namespace=namespace)
    second.until("Deploying", lambda: phase(api_server, namespace) == "Deploying")


def test_a_version_that_the_api_server_has_forgotten_is_listed_again(
    api_server: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.apply(stream_job(), namespace=namespace)
    at(api_server.plane.server, api_server, tmp_path, monkeypatch)

    class Behind:
        """The first list is of the time before there was anything, as after a long sleep."""

        def __init__(self, api: Api) -> None:
            self.api, self.lists = api, 0
            self.refused: list[ApiError] = []

        async def list(self, kind: Kind, namespace: str) -> tuple[list[Object], str]:
            self.lists += 1
            return ([], "1") if self.lists == 1 else await self.api.list(kind, namespace)

        async def watch(self, kind: Kind, namespace: str, version: str) -> AsyncIterator[Object]:
            try:
                async for event in self.api.watch(kind, namespace, version):
                    yield event
            except ApiError as error:
                self.refused.append(error)
                raise

    async def main() -> None:
        async with await Api.from_environment(SHORT) as api:
            changed: list[Any] = []
            behind = Behind(api)
            informer = Informer(
                behind, STREAM_JOB, namespace, changed.append, SystemClock().monotonic
            )
            task = asyncio.create_task(informer.run())
            await until("the StreamJob", lambda: informer.get(namespace, "flights"))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert [each.status for each in behind.refused[:1]] == [410]
            assert behind.lists == 2
            assert [each["metadata"]["name"] for each in changed] == ["flights"]
            assert informer.trouble == ""

    asyncio.run(main())


def test_a_connection_that_is_half_dead_is_noticed_and_given_up(
    api_server: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing shows that it is dead: bytes vanish, and no connection is closed."""

    async def main() -> None:
        wire = Wire(api_server.plane.port)
        async with contextlib.AsyncExitStack() as stack:
            health, metrics = (stack.enter_context(HeldPort()) for _ in range(2))
            await stack.enter_async_context(wire.open())
            at(f"https://127.0.0.1:{wire.port}", api_server, tmp_path, monkeypatch)
            api = await stack.enter_async_context(await Api.from_environment(SHORT))
            controller = await stack.enter_async_context(operating(api, namespace))
            ports = ("127.0.0.1", health, metrics)
            await stack.enter_async_context(
                serving(*ports, controller.watches, lambda: b"", silence_s_max=8)
            )
            session = await stack.enter_async_context(aiohttp.ClientSession())

            async def healthz() -> tuple[int, str]:
                async with session.get(f"http://127.0.0.1:{health}/healthz") as answer:
                    return answer.status, await answer.text()

            async def until_healthz(status: int, line: str) -> None:
                """Wait until an answer has the status and, in one line, the expression `line`."""
                for _ in range(int(WAIT_S_MAX / 0.1)):
                    seen, text = await healthz()
                    if seen == status and re.search(f"^{line}$", text, re.MULTILINE):
                        return
                    await asyncio.sleep(0.1)
                raise AssertionError(f"/healthz did not become {status} with {line!r}: {text}")

            (jobs,) = [each for each in controller.informers if each.kind == STREAM_JOB]
            await until("the first list", jobs.synced.is_set)
            await until_healthz(200, "ok")
            wire.swallows = True
            await asyncio.to_thread(api_server.apply, stream_job(), namespace=namespace)
            # Other watches may be silent earlier, and a watch may be silent before its request fails.
            news = f"there was no news of streamjobs in {namespace} for [0-9]+ s"
            await until_healthz(503, f"{news}: the API server does not answer: TimeoutError")
            assert jobs.get(namespace, "flights") is None
            wire.swallows = False
            await until_healthz(200, "ok")
            await until("Deploying", lambda: phase(api_server, namespace) == "Deploying")

    asyncio.run(main())
