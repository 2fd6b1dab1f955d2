"""Goal: slot sharing groups of a StreamJob have pods of their own, and its result is that of one process.

Method: as in test_changes.py. A pod of a group is killed, and then the job is scaled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from headgate.k8s.objects import GROUP
from headgate.tests.kube.stream_jobs import StreamJob, lasting, remove_all
from headgate.tests.support.kube.cluster import Cluster

NAME = "grouped"


@pytest.fixture(autouse=True)
def none_left(cluster: Cluster, air: str) -> Iterator[None]:
    """The job of a test that failed does not slow the next one down."""
    yield
    remove_all(cluster, air)


def in_groups() -> list[dict[str, Any]]:
    """The job that lasts, with its windows and its sink in a group of their own."""
    claim, job = lasting(NAME)
    spec = json.loads(json.dumps(job["spec"]))
    spec["resources"] = {"windows": {"cpu": 0.1, "memory": "256Mi"}}
    spec["operators"]["delays"]["slotSharingGroup"] = "windows"
    template = spec["kubernetes"]["workers"]["podTemplate"]
    spec["kubernetes"]["workerGroups"] = {"windows": {"podTemplate": template}}
    return [claim, {**job, "spec": spec}]


def pods_by_group(job: StreamJob) -> Counter[str]:
    return Counter(pod["metadata"]["labels"][GROUP] for pod in job.pods("worker"))


def test_a_job_with_two_groups_is_scaled_and_loses_a_pod(
    cluster: Cluster, air: str, expected: pa.Table
) -> None:
    cluster.apply(*in_groups(), namespace=air)
    job = StreamJob(cluster, air, NAME)
    job.until_running(1)
    complete = lambda status: status.get("workers") == {"ready": 4, "desired": 4}  # noqa: E731
    job.until("all workers", complete)
    assert pods_by_group(job) == {"default": 2, "windows": 2}
    (requests,) = {
        json.dumps(pod["spec"]["containers"][0]["resources"]["requests"], sort_keys=True)
        for pod in job.pods("worker")
        if pod["metadata"]["labels"][GROUP] == "windows"
    }
    assert json.loads(requests) == {"cpu": "100m", "memory": str(256 << 20)}

    (victim, *_) = (
        pod["metadata"]["name"]
        for pod in job.pods("worker")
        if pod["metadata"]["labels"][GROUP] == "windows"
    )
    cluster.kubectl("delete", "pod", victim, "-n", air, "--force", "--grace-period=0")
    job.until("a restart", lambda status: status.get("job", {}).get("restarts"))
    job.until("all workers", complete)
    job.until_phase("Running")

    job.patch(parallelism=1)
    job.until(
        "parallelism 1",
        lambda status: (
            status["parallelism"].get("current") == 1
            and status.get("workers") == {"ready": 2, "desired": 2}
        ),
    )
    assert pods_by_group(job) == {"default": 1, "windows": 1}
    assert job.status()["run"]["number"] == 1
    job.hurry()
    assert job.result().equals(expected)
