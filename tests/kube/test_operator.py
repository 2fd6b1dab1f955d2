"""Goal: the process of the operator carries out the decisions of `reconcile` on a real API server.

Method: `headgate k8s operator` with the rights of an administrator. The image of the pods does not
exist, so none runs, also where nodes are: this is about objects, statuses, events, the Lease and the ports.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.tests.kube.charts import CRDS
from headgate.tests.kube.operators import (
    Object,
    Operator,
    Start,
    holder,
    phase,
    stream_job,
)
from headgate.tests.support.kube import control_plane
from headgate.tests.support.kube.cluster import Cluster


@pytest.fixture(scope="module", autouse=True)
def definitions(api_server: Cluster) -> None:
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS / "templates"))
    for name in ("streamjobs", "streamsnapshots"):
        api_server.established(f"{name}.headgate.io")


@pytest.fixture
def start(api_server: Cluster, namespace: str, tmp_path: Path) -> Iterator[Start]:
    """Starts an operator of this name for the test's namespace."""
    started: list[Operator] = []

    def make(name: str, *, real_lease: bool = False) -> Operator:
        log = tmp_path / f"{name}.log"
        started.append(Operator(api_server, namespace, name, log, real_lease=real_lease))
        return started[-1]

    yield make
    for one in started:
        one.close()


def test_a_stream_job_is_deployed_changed_and_deleted(
    api_server: Cluster, namespace: str, start: Start
) -> None:
    operator = start("one")
    api_server.apply(stream_job(), namespace=namespace)
    operator.until("Deploying", lambda: phase(api_server, namespace) == "Deploying")
    made = (
        "statefulset/flights-head",
        "deployment/flights-workers",
        "service/flights-head",
        "networkpolicy/flights",
        "pdb/flights-workers",
    )
    for each in made:
        operator.until(each, lambda each=each: api_server.find(namespace, each) is not None)
    secret = api_server.get("secret", "flights-token", "-n", namespace)
    assert len(base64.b64decode(secret["data"]["auth_token"])) == 64
    job = api_server.get("sj", "flights", "-n", namespace)
    assert job["metadata"]["finalizers"] == ["headgate.io/state"]
    accepted = [each for each in job["status"]["conditions"] if each["type"] == "Accepted"]
    assert [each["status"] for each in accepted] == ["True"]

    def events() -> set[str]:
        """The names of the objects about which the operator has made events."""
        listed = api_server.get("events.events.k8s.io", "-n", namespace)["items"]
        ours = [e for e in listed if e.get("reportingController") == "headgate.io/operator"]
        return {e["regarding"]["name"] for e in ours}

    operator.until("events", lambda: bool(events()))
    assert events() == {"flights"}

    missing = f"rayclusters in {namespace} are not watched: GET /apis/ray.io/v1/"
    healthy = lambda: operator.read(operator.health, "/healthz").startswith(f"ok\n{missing}")  # noqa: E731
    operator.until("health", healthy)
    reconciled = 'headgate_operator_reconciles_total{kind="StreamJob",outcome="success"}'
    counted = lambda: reconciled in operator.read(operator.metrics, "/metrics")  # noqa: E731
    operator.until("a reconciliation without a conflict", counted)
    assert "headgate_operator_leader 1.0" in operator.read(operator.metrics, "/metrics")

    api_server.kubectl("delete", "sj", "flights", "-n", namespace, "--wait=false")
    gone = lambda: api_server.find(namespace, "sj/flights") is None  # noqa: E731
    operator.until("the end of the StreamJob", gone)
    assert operator.stop() == 0, operator.log.read_text()


def test_a_wrong_spec_is_told_and_a_corrected_one_is_deployed(
    api_server: Cluster, namespace: str, start: Start
) -> None:
    operator = start("one")
    wrong = stream_job(sinks={"out": {"from": "nothing", "print": {}}})
    wrong["spec"]["sinks"]["out"]["prnt"] = {}
    api_server.apply(wrong, namespace=namespace)
    api_server.wait(namespace, "condition=Accepted=False", "sj/flights")
    assert api_server.find(namespace, "statefulset/flights-head") is None
    api_server.apply(stream_job(), namespace=namespace)
    operator.until("Deploying", lambda: phase(api_server, namespace) == "Deploying")


def test_pods_that_a_quota_refuses_are_told_until_there_is_room(
    api_server: Cluster, namespace: str, start: Start
) -> None:
    api_server.kubectl("create", "quota", "none", "--hard=pods=0", "-n", namespace)
    api_server.wait(namespace, "jsonpath={.status.hard.pods}=0", "quota/none")
    operator = start("one")
    api_server.apply(stream_job(), namespace=namespace)

    messages = [""]

    def message() -> str:
        job = api_server.find(namespace, "sj/flights")
        messages.append("" if job is None else str(job.get("status", {}).get("message", "")))
        return messages[-1]

    told = lambda: message().startswith("StatefulSet flights-head: FailedCreate: ")  # noqa: E731
    operator.until("the refusal of the head", told)
    assert "exceeded quota: none" in messages[-1]
    api_server.kubectl("delete", "quota", "none", "-n", namespace)
    operator.until("room", lambda: "FailedCreate" not in message())
    made = lambda: api_server.find(namespace, "pod/flights-head-0") is not None  # noqa: E731
    operator.until("the pod of the head", made)


def test_the_lease_is_released_and_the_next_operator_leads(
    api_server: Cluster, namespace: str, start: Start
) -> None:
    first = start("one")
    first.until("the Lease", lambda: holder(api_server, namespace) == "one")
    second = start("two")
    second.until("its ports", lambda: _is_ready(second))
    assert "headgate_operator_leader 0.0" in second.read(second.metrics, "/metrics")
    assert holder(api_server, namespace) == "one"
    assert first.stop() == 0
    second.until("the takeover", lambda: holder(api_server, namespace) == "two")
    # The one that takes over goes on with what it finds.
    api_server.apply(stream_job(), namespace=namespace)
    second.until("Deploying", lambda: phase(api_server, namespace) == "Deploying")
    assert second.stop() == 0
    assert holder(api_server, namespace) == ""


def _is_ready(operator: Operator) -> bool:
    try:
        return operator.read(operator.health, "/readyz") == "ok\n"
    except OSError:
        return False


def test_a_status_is_not_written_over_a_change_that_was_not_seen(
    api_server: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here, so that the tests beside this one need no kubernetes_asyncio.
    from headgate.k8s.operator.api import Api, ApiError
    from headgate.k8s.operator.kinds import STREAM_JOB

    api_server.apply(stream_job(), namespace=namespace)
    before = api_server.get("sj", "flights", "-n", namespace)
    api_server.kubectl("scale", "sj/flights", "-n", namespace, "--replicas=5")
    now = api_server.get("sj", "flights", "-n", namespace)
    for name, value in control_plane.environment(api_server.plane).items():
        monkeypatch.setenv(name, value)

    def status_of(seen: Object) -> Object:
        version = {"resourceVersion": seen["metadata"]["resourceVersion"]}
        return {"metadata": version, "status": {"phase": "Pending"}}

    async def write() -> None:
        async with await Api.from_environment() as api:

            async def put(seen: Object) -> Object:
                where = (namespace, "flights")
                return await api.merge(STREAM_JOB, *where, status_of(seen), subresource="status")

            with pytest.raises(ApiError) as stale:
                await put(before)
            assert stale.value.status == 409
            written = await put(now)
            # The same once more, of the old version, is refused although it would change nothing.
            with pytest.raises(ApiError) as same:
                await put(now)
            assert same.value.status == 409
            await put(written)
            gone = {name: now[name] for name in ("apiVersion", "kind")}
            names = ("namespace", "uid", "resourceVersion")
            gone["metadata"] = {"name": "gone"} | {name: now["metadata"][name] for name in names}
            with pytest.raises(ApiError) as missing:
                await api.apply(gone, STREAM_JOB)  # an apply would make what is not there
            assert missing.value.status in (404, 409)

    asyncio.run(write())
    assert json.dumps(before["spec"]) != json.dumps(now["spec"])
