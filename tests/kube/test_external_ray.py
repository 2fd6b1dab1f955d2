"""Goal: a job on an external Ray cluster runs, is changed and ends, and leaves nothing there.

Method: a Ray with a token in pods that the operator does not know, on the process kubelet. The job's
only pod joins it. The oracle is the same job in one process.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa

from headgate.tests.kube.rays import TOKEN, hosted_workers, start_ray
from headgate.tests.kube.stream_jobs import LOOK_S, StreamJob, explain, lasting, remove
from headgate.tests.support.kube.cluster import Cluster

RELEASE_S_MAX = 300
"""A worker's process ends within this time after its job."""


def external(cluster: Cluster, namespace: str, name: str) -> StreamJob:
    """Start a Ray with two workers, and a job on it."""
    claim, job = lasting(name)
    cluster.apply(claim, namespace=namespace)
    ray: dict[str, Any] = {"mode": "External", "tokenSecretRef": {"name": TOKEN}}
    ray["address"] = start_ray(cluster, namespace, 2, name)
    job["spec"]["kubernetes"] |= {"ray": ray}
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
    cluster: Cluster, operated: str, expected: pa.Table
) -> None:
    job = external(cluster, operated, "guest")
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
    job.hurry()
    assert job.result().equals(expected)
    until_released(job)


def test_a_deleted_job_leaves_the_ray_of_somebody_else(cluster: Cluster, operated: str) -> None:
    job = external(cluster, operated, "deleted")
    assert sum(hosts(job).values()) == 2
    remove(cluster, operated, "deleted")
    until_released(job)
