"""Goal: a job whose Ray cluster KubeRay makes runs, is changed and ends as others do.

Method: KubeRay's own operator beside ours, on the process kubelet. It makes the pods of the RayCluster that
our operator describes. The oracle is the same job in one process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pyarrow as pa
import pytest

from headgate.tests.kube.stream_jobs import StreamJob, released, started
from headgate.tests.support.kube import control_plane
from headgate.tests.support.kube.cluster import Cluster
from headgate.tests.support.kube.control_plane import bound_to_us
from headgate.tests.support.kube.programs import KubeRay

WITHOUT_NAMES = {"ENABLE_INIT_CONTAINER_INJECTION": "false"}
"""Its init container asks Ray about Ray's head by a name, which Ray looks up in a DNS only, not in a hosts
file. The process kubelet has no DNS. Our workers wait for the head themselves."""


@contextlib.contextmanager
def running(kuberay: KubeRay, cluster: Cluster, namespace: str) -> Iterator[None]:
    """Run KubeRay's operator for a namespace, for the time of the block, without open ports."""
    command = [
        *(str(kuberay.operator), "--watch-namespace", namespace),
        *("--metrics-addr=0", "--health-probe-bind-address=0", "--enable-leader-election=false"),
    ]
    env = control_plane.environment(cluster.plane)
    with (cluster.plane.directory / "kuberay.log").open("ab") as log:
        operator = subprocess.Popen(
            bound_to_us(command),
            env={**env, **WITHOUT_NAMES},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        control_plane.stop(operator)


@pytest.fixture
def with_kuberay(
    cluster: Cluster, namespace: str, definitions: None, kuberay: KubeRay
) -> Iterator[str]:
    """A namespace with both operators."""
    with running(kuberay, cluster, namespace), released(cluster, namespace, "rbac.kubeRay=true"):
        yield namespace


def ray_pods(job: StreamJob, kind: str) -> list[str]:
    """Return the pods of KubeRay for a job that are not terminating: the `head`, or each `worker`."""
    pods = [pod["metadata"] for pod in job.pods()]
    return [each["name"] for each in pods if each["labels"].get("ray.io/node-type") == kind]


def test_a_job_in_the_pods_of_kuberay_is_changed_killed_and_finishes(
    cluster: Cluster, with_kuberay: str, expected: pa.Table
) -> None:
    job = started(cluster, with_kuberay, "rays", ray={"mode": "KubeRay"})
    assert len(ray_pods(job, "head")) == 1
    assert len(ray_pods(job, "worker")) == 2
    job.until(
        "two ready workers", lambda status: status.get("workers") == {"ready": 2, "desired": 2}
    )

    job.patch(parallelism=3)
    job.until("a rescale", lambda status: status["parallelism"]["current"] == 3)
    assert len(ray_pods(job, "worker")) == 3
    assert job.status()["run"]["number"] == 1

    job.patch(kubernetes={"env": {"LEVEL": "3"}})
    job.until_running(2)
    (head,) = ray_pods(job, "head")
    epoch = job.until("an epoch", lambda status: status.get("job", {}).get("epoch"))["job"]["epoch"]
    os.kill(cluster.pid(with_kuberay, head), signal.SIGKILL)
    job.until(
        "another coordinator",
        lambda status: (
            status.get("job", {}).get("epoch", 0) > epoch and status["phase"] == "Running"
        ),
    )

    job.patch(kubernetes={"state": "Suspended"})
    job.until_phase("Suspended")
    cluster.wait(with_kuberay, "delete", "rayclusters", "--all")
    job.patch(kubernetes={"state": "Running"})
    job.until_running(3)
    job.hurry()
    assert job.result().equals(expected)
    job.until_no_pods()
