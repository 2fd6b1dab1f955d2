"""Goal: changes of a running StreamJob do not change its result.

Method: the chart with the real operator, on the process kubelet. Every test takes a job that lasts until
the test has done its part, and compares its result with that of one process: nothing is lost or
    duplicated. The tests share a release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from headgate.tests.kube.stream_jobs import (
    StreamJob,
    remove_all,
    started,
)
from headgate.tests.support.kube.cluster import Cluster

STABLE_SOON = {"stabilizationPeriod": "1s"}


@pytest.fixture(autouse=True)
def none_left(cluster: Cluster, air: str) -> Iterator[None]:
    """The jobs of a test that failed do not slow the next one down."""
    yield
    remove_all(cluster, air)


def scaled(job: StreamJob, parallelism: int) -> None:
    """Wait until the job runs with this parallelism, and has as many workers."""
    job.until(
        f"parallelism {parallelism}",
        lambda status: (
            status["parallelism"].get("current") == parallelism
            and status.get("workers") == {"ready": parallelism, "desired": parallelism}
        ),
    )


def test_a_job_is_scaled_suspended_and_resumed(
    cluster: Cluster, air: str, expected: pa.Table
) -> None:
    job = started(cluster, air, "scaled")
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

    job = started(cluster, air, "upgraded", upgrade=rollback("10m"))
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
    good = lambda _: job.condition("Degraded")["status"] == "False"  # noqa: E731
    job.until("the end of Degraded", good)
    job.hurry()
    assert job.result().equals(expected)
