"""Goal: a job on an external Ray cluster runs, is changed and ends, and leaves nothing there.

Method: a Ray with a token in pods that the operator does not know, on the process kubelet. The job's
only pod joins it. The tests share that Ray. The oracle is the same job in one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from headgate.tests.kube.rays import TOKEN, hosted_workers, start_ray
from headgate.tests.kube.stream_jobs import (
    LOOK_S,
    StreamJob,
    explain,
    lasting,
    remove,
    remove_all,
    rows,
    volume,
)
from headgate.tests.support.kube.cluster import Cluster

CLAIM = "guests"
RELEASE_S_MAX = 300
"""A worker's process ends within this time after its job."""


@pytest.fixture(scope="module")
def address(cluster: Cluster, air: str) -> str:
    """The address of a Ray with two workers, whose pods have the volume of all jobs."""
    claim, _ = lasting(CLAIM)
    cluster.apply(claim, namespace=air)
    return start_ray(cluster, air, 2, CLAIM)


@pytest.fixture(autouse=True)
def none_left(cluster: Cluster, air: str) -> Iterator[None]:
    """The job of a test that failed does not take the slots of the next one."""
    yield
    remove_all(cluster, air)


def external(cluster: Cluster, namespace: str, name: str, address: str) -> StreamJob:
    """Start a job on that Ray."""
    _, job = lasting(name)
    text = json.dumps(job).replace(f'"claimName": "{name}"', f'"claimName": "{CLAIM}"')
    job = json.loads(text.replace("/data/delays", f"/data/{name}"))
    ray: dict[str, Any] = {"mode": "External", "tokenSecretRef": {"name": TOKEN}}
    job["spec"]["kubernetes"] |= {"ray": {**ray, "address": address}}
    cluster.apply(job, namespace=namespace)
    made = StreamJob(cluster, namespace, name)
    made.until_running(1)
    return made


def hosts(job: StreamJob, *more: str) -> dict[str, int]:
    """Return the number of the job's workers in each pod of Ray, and in more pods."""
    return {
        pod: len(hosted_workers(job.cluster, job.namespace, pod))
        for pod in ("head-0", "worker-0", "worker-1", *more)
    }


def until_released(job: StreamJob) -> None:
    """Wait until no pod of Ray has a worker's process."""
    deadline = time.monotonic() + RELEASE_S_MAX
    while any(found := hosts(job).values()):
        assert time.monotonic() < deadline, (found, explain(job.cluster, job.namespace))
        time.sleep(LOOK_S)


def test_a_job_on_the_ray_of_somebody_else_is_changed_and_leaves_it(
    cluster: Cluster, air: str, address: str, expected: pa.Table
) -> None:
    job = external(cluster, air, "guest", address)
    hosted = hosts(job, "guest-head-0")
    assert hosted["worker-0"] + hosted["worker-1"] == 2
    # Neither on the head of Ray nor in the pod of the coordinator.
    assert hosted["head-0"] == hosted["guest-head-0"] == 0
    assert {pod["metadata"]["name"] for pod in job.pods()} == {"guest-head-0"}

    job.patch(kubernetes={"env": {"LEVEL": "3"}})
    job.until_running(2)
    job.patch(kubernetes={"state": "Suspended"})
    job.until_phase("Suspended")
    until_released(job)
    job.patch(kubernetes={"state": "Running"})
    job.until_running(3)

    job.patch(parallelism=1)
    job.until("a rescale", lambda status: status["parallelism"]["current"] == 1)
    directory = volume(cluster, air, CLAIM)
    (directory / "hurry").touch()
    job.until_phase("Finished")
    assert rows(directory / "guest").equals(expected)
    (directory / "hurry").unlink()
    until_released(job)


def test_a_deleted_job_leaves_the_ray_of_somebody_else(
    cluster: Cluster, air: str, address: str
) -> None:
    job = external(cluster, air, "deleted", address)
    assert sum(hosts(job).values()) == 2
    remove(cluster, air, "deleted")
    until_released(job)
