"""Goal: what is done to a StreamJob while it runs changes nothing in its result.

Method: the chart with the real operator, on the process kubelet. Every test takes a job that lasts until
the test has done its part, and compares its result with that of one process: nothing is lost, and nothing
is there twice. The tests share a release.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headgate.tests.kube.charts import CRDS
from headgate.tests.kube.stream_jobs import (
    StreamJob,
    in_one_process,
    lasting,
    released,
    remove_all,
    rows,
)
from headgate.tests.support.kube.cluster import Cluster

pytestmark = pytest.mark.timeout(900)
STABLE_SOON = {"stabilizationPeriod": "1s"}


@pytest.fixture(scope="module")
def air(cluster: Cluster) -> Iterator[str]:
    """The namespace of all jobs here, with its operator."""
    release = ("headgate-crds", str(CRDS), "-n", "kube-system")
    cluster.helm("upgrade", "--install", *release, "--take-ownership")
    with cluster.namespace("air") as namespace, released(cluster, namespace):
        yield namespace


@pytest.fixture(autouse=True)
def none_left(cluster: Cluster, air: str) -> Iterator[None]:
    """The jobs of a test that failed do not slow the next one down."""
    yield
    remove_all(cluster, air)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The result of every job here, from one process."""
    _, job = lasting("expected")
    return in_one_process(job, tmp_path_factory.mktemp("expected"))


def start(cluster: Cluster, namespace: str, name: str, **kubernetes: Any) -> StreamJob:
    """Apply a job that lasts, and wait until it has a checkpoint."""
    cluster.apply(*lasting(name, **kubernetes), namespace=namespace)
    job = StreamJob(cluster, namespace, name)
    job.until_running(1)
    return job


def scaled(job: StreamJob, parallelism: int) -> None:
    """Wait until the job runs with this parallelism, and has as many workers."""
    job.until(
        f"parallelism {parallelism}",
        lambda status: (
            status["parallelism"].get("current") == parallelism
            and status["workers"] == {"ready": parallelism, "desired": parallelism}
        ),
    )


def test_a_job_is_scaled_suspended_and_resumed(
    cluster: Cluster, air: str, expected: pa.Table
) -> None:
    job = start(cluster, air, "scaled")
    run, head = job.status()["run"], job.head()
    cluster.kubectl("scale", "sj", job.name, "--replicas=4", "-n", air)
    scaled(job, 4)
    job.patch(parallelism=1)
    scaled(job, 1)
    status = job.status()
    assert status["run"]["number"] == run["number"]
    assert status["run"]["revision"] == run["revision"]
    assert job.head() == head

    job.patch(kubernetes={"state": "Suspended"})
    job.until_phase("Suspended")
    assert job.pods() == []
    job.patch(kubernetes={"state": "Running"})
    job.until_running(2)
    job.hurry()
    assert job.result().equals(expected)


def test_bad_revisions_are_rolled_back_with_state_and_a_good_one_goes_on(
    cluster: Cluster, air: str, expected: pa.Table
) -> None:
    """The runs: 1, bad, 3, bad, 5, and 6 with what was meant."""

    def rollback(deadline: str) -> Any:
        return {"mode": "Savepoint", "rollback": {**STABLE_SOON, "progressDeadline": deadline}}

    job = start(cluster, air, "upgraded", upgrade=rollback("10m"))
    first = job.until("a stable revision", lambda status: "stable" in status)["run"]["revision"]

    # The deadline is over when the pods have said what is wrong, and not before.
    job.patch(kubernetes={"image": "registry.test/missing:1"})
    job.until("the words of the pod", lambda status: "failed to pull" in status.get("message", ""))
    job.patch(kubernetes={"upgrade": rollback("1s")})
    job.until("another revision", lambda status: status["run"]["number"] == 3)
    job.patch(kubernetes={"upgrade": rollback("10m")})
    assert job.until_running(3)["run"]["revision"] == first
    degraded = job.condition("Degraded")
    assert degraded["reason"] == "RolledBack"
    assert "registry.test/missing:1" in degraded["message"]

    results = {"results": {"parquet": {"path": "/data/${FOLDER}"}}}
    job.patch(kubernetes={"image": None}, sinks=results)
    assert job.until_running(5)["run"]["revision"] == first
    message = job.condition("Degraded")["message"]
    assert message.startswith("the job cannot begin: ")
    assert "FOLDER" in message

    job.patch(kubernetes={"env": {"FOLDER": "delays"}})
    assert job.until_running(6)["run"]["revision"] != first
    assert job.condition("Degraded")["status"] == "False"
    job.hurry()
    assert job.result().equals(expected)


def test_a_job_that_was_deleted_goes_on_when_it_is_applied_again(
    cluster: Cluster, air: str, expected: pa.Table
) -> None:
    job = start(cluster, air, "deleted")
    cluster.kubectl("delete", "sj", job.name, "-n", air, "--timeout=170s")
    assert job.pods() == []
    again = start(cluster, air, "deleted")
    assert again.condition("StateFound")["status"] == "True"
    assert "goes on with it: checkpoint" in again.condition("StateFound")["message"]
    again.hurry()
    assert again.result().equals(expected)

    # From the beginning is another matter: the result of before is not to be mixed with that.
    cluster.kubectl("delete", "sj", job.name, "-n", air, "--timeout=170s")
    cluster.apply(*lasting("deleted", upgrade={"mode": "Stateless"}), namespace=air)
    message = job.until_phase("Failed")["message"]
    assert message.startswith("the job cannot begin: ")
    assert "/data/delays" in message
    assert "Local node IP" not in message, "this is of the log of Ray"
    assert job.status()["run"]["number"] == 1
    assert rows(job.volume / "delays").equals(expected)


def snapshot(name: str, job: str) -> Any:
    return {
        "apiVersion": "headgate.io/v1alpha1",
        "kind": "StreamSnapshot",
        "metadata": {"name": name},
        "spec": {"jobRef": {"name": job}, "deletionPolicy": "Delete"},
    }


def kill_operator(cluster: Cluster, namespace: str) -> None:
    """SIGKILL; the kubelet starts it again."""
    labels = "app.kubernetes.io/component=operator"
    (pod,) = cluster.get("pods", "-n", namespace, "-l", labels)["items"]
    os.kill(cluster.pid(namespace, pod["metadata"]["name"]), signal.SIGKILL)


def test_savepoints_and_an_operator_that_is_killed(
    cluster: Cluster, air: str, expected: pa.Table
) -> None:
    """The operator is killed during a savepoint and an upgrade; both come to their end, once."""
    job = start(cluster, air, "saved")
    cluster.apply(snapshot("monday", job.name), namespace=air)
    cluster.wait(air, "jsonpath={.status.phase}=Running", "ss/monday")
    kill_operator(cluster, air)
    cluster.wait(air, "jsonpath={.status.phase}=Completed", "ss/monday", seconds=170)
    status = cluster.get("ss", "monday", "-n", air)["status"]
    assert status["attempts"] == 1
    savepoint = job.volume / Path(status["path"]).relative_to("/data")
    assert [each.name for each in savepoint.parent.iterdir()] == [savepoint.name]

    # Another job begins with it, and writes to another place of the same volume.
    _, clone = lasting("cloned", restore={"snapshotRef": {"name": "monday"}, "nonce": 1})
    text = json.dumps(clone).replace('"claimName": "cloned"', '"claimName": "saved"')
    cluster.apply(json.loads(text.replace("/data/delays", "/data/cloned")), namespace=air)

    job.patch(kubernetes={"env": {"ANOTHER": "revision"}})
    job.until("the upgrade", lambda status: status["phase"] == "Upgrading")
    kill_operator(cluster, air)
    job.until_running(2)
    cloned = StreamJob(cluster, air, "cloned")
    assert cloned.until_running(1)["run"]["start"] == {"kind": "Path", "path": status["path"]}
    job.hurry()
    assert job.result().equals(expected)
    assert job.status()["run"]["number"] == 2
    cloned.until_phase("Finished")
    # It has written all windows that had not been written when the savepoint was taken.
    found = rows(job.volume / "cloned")
    left = pc.greater_equal(expected["window_start"], pc.min(found["window_start"]))
    assert found.equals(expected.filter(left))

    for name in (job.name, cloned.name):
        cluster.kubectl("delete", "sj", name, "-n", air, "--timeout=170s")
    assert savepoint.exists()
    cluster.kubectl("delete", "ss", "monday", "-n", air, "--timeout=170s")
    assert not savepoint.exists()
