"""Goal: the state of a StreamJob outlives it, and its savepoints have the right content.

Method: that of test_changes.py. The tests share a release.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headgate.runtime.protocol import names
from headgate.tests.kube.stream_jobs import (
    LOOK_S,
    STEP_S_MAX,
    StreamJob,
    explain,
    lasting,
    remove_all,
    rows,
    started,
    volume,
)
from headgate.tests.support.kube.cluster import Cluster

STABLE_SOON = {"stabilizationPeriod": "1s"}


@pytest.fixture(autouse=True)
def none_left(cluster: Cluster, air: str) -> Iterator[None]:
    """The jobs of a test that failed do not slow the next one down."""
    yield
    remove_all(cluster, air)


def test_a_job_that_was_deleted_goes_on_when_it_is_applied_again(
    cluster: Cluster, air: str, expected: pa.Table
) -> None:
    job = started(cluster, air, "deleted")
    cluster.kubectl("delete", "sj", job.name, "-n", air, "--timeout=600s")
    job.until_no_pods()
    again = started(cluster, air, "deleted")
    assert again.condition("StateFound")["status"] == "True"
    assert "goes on with it: checkpoint" in again.condition("StateFound")["message"]
    again.hurry()
    assert again.result().equals(expected)

    # From the beginning is another matter: the result of before is not to be mixed with that.
    cluster.kubectl("delete", "sj", job.name, "-n", air, "--timeout=600s")
    cluster.apply(*lasting("deleted", upgrade={"mode": "Stateless"}), namespace=air)
    message = job.until_phase("Failed")["message"]
    assert message.startswith("the job cannot begin: ")
    assert "/data/delays" in message
    assert "Local node IP" not in message, "this is of the log of Ray"
    assert job.status()["run"]["number"] == 1
    assert rows(job.volume / "delays").equals(expected)


def test_a_head_waits_for_a_storage_that_is_away_and_not_for_one_that_is_damaged(
    cluster: Cluster, air: str
) -> None:
    claim, manifest = lasting("unread")
    cluster.apply(claim, namespace=air)
    cluster.wait(air, "jsonpath={.status.phase}=Bound", "pvc/unread")
    log = volume(cluster, air, "unread") / "checkpoints" / names.job_dir("unread") / "log"
    log.parent.mkdir(parents=True, mode=0o777)
    log.write_text("this is no directory")
    cluster.apply(manifest, namespace=air)
    job = StreamJob(cluster, air, "unread")
    job.until("the words of the head", lambda status: str(log.name) in status.get("message", ""))
    log.unlink()
    for each in (log.parent, log.parent.parent):
        each.chmod(0o777)
    job.until_running(1)

    job.patch(kubernetes={"state": "Suspended"})
    job.until_phase("Suspended")
    max(log.glob("*.json")).write_text("{}")
    job.patch(kubernetes={"state": "Running"})
    message = job.until_phase("Failed")["message"]
    assert message.startswith("the job cannot begin: ")
    assert "log/" in message
    job.until_no_pods()


def snapshot(name: str, job: str) -> Any:
    return {
        "apiVersion": "headgate.io/v1alpha1",
        "kind": "StreamSnapshot",
        "metadata": {"name": name},
        "spec": {"jobRef": {"name": job}, "deletionPolicy": "Delete"},
    }


def until_begun(cluster: Cluster, namespace: str, name: str) -> None:
    """Wait until a savepoint is being taken, or is complete already."""
    deadline = time.monotonic() + STEP_S_MAX
    phases = ("Running", "Completed")
    while (cluster.find(namespace, f"ss/{name}") or {}).get("status", {}).get(
        "phase"
    ) not in phases:
        assert time.monotonic() < deadline, explain(cluster, namespace)
        time.sleep(LOOK_S)


def kill_operator(cluster: Cluster, namespace: str) -> None:
    """Kill the operator with SIGKILL; the kubelet starts it again."""
    labels = "app.kubernetes.io/component=operator"
    (pod,) = cluster.listed(namespace, "pods", labels)
    os.kill(cluster.pid(namespace, pod["metadata"]["name"]), signal.SIGKILL)


def test_savepoints_and_an_operator_that_is_killed(
    cluster: Cluster, air: str, expected: pa.Table
) -> None:
    """The operator is killed during a savepoint and an upgrade; both come to their end, once."""
    job = started(cluster, air, "saved")
    cluster.apply(snapshot("monday", job.name), namespace=air)
    until_begun(cluster, air, "monday")
    kill_operator(cluster, air)
    cluster.wait(air, "jsonpath={.status.phase}=Completed", "ss/monday")
    status = cluster.get("ss", "monday", "-n", air)["status"]
    assert status["attempts"] == 1
    savepoint = job.volume / Path(status["path"]).relative_to("/data")
    assert [each.name for each in savepoint.parent.iterdir()] == [savepoint.name]

    # Another job begins with it, and writes to another place of the same volume.
    _, clone = lasting("cloned", restore={"snapshotRef": {"name": "monday"}, "nonce": 1})
    text = json.dumps(clone).replace('"claimName": "cloned"', '"claimName": "saved"')
    cluster.apply(json.loads(text.replace("/data/delays", "/data/cloned")), namespace=air)

    job.patch(kubernetes={"env": {"ANOTHER": "revision"}})
    # Usually the upgrade is under way then; a test that was paused may find it done.
    begun = lambda status: status["phase"] == "Upgrading" or status["run"]["number"] == 2  # noqa: E731
    job.until("the upgrade", begun)
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
        cluster.kubectl("delete", "sj", name, "-n", air, "--timeout=600s")
    assert savepoint.exists()
    cluster.kubectl("delete", "ss", "monday", "-n", air, "--timeout=600s")
    assert not savepoint.exists()
