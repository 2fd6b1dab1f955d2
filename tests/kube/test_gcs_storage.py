"""Goal: with Ray's control store on a volume, workers outlive a head that is killed.

Method: that of test_kills.py. A head that starts again says in its log whether it goes on with the
running tasks.
"""

from __future__ import annotations

import os
import signal
import time

import pyarrow as pa

from headgate.tests.kube.stream_jobs import LOOK_S, STEP_S_MAX, StreamJob, explain, started
from headgate.tests.support.kube.cluster import Cluster

CLAIM = "ray-gcs-kept-head-0"


def containers(job: StreamJob) -> list[str]:
    """The containers of the workers: a process that is started again has another one."""
    pods = sorted(job.pods("worker"), key=lambda pod: str(pod["metadata"]["name"]))
    return [str(pod["status"]["containerStatuses"][0]["containerID"]) for pod in pods]


def claims(job: StreamJob) -> dict[str, str]:
    """The volume claims of the job, by name, and their uids."""
    found = job.cluster.listed(job.namespace, "pvc")
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}


def test_workers_outlive_a_head_that_is_killed(
    cluster: Cluster, operated: str, expected: pa.Table
) -> None:
    storage = {"type": "RocksDB", "size": "100Mi"}
    job = started(cluster, operated, "kept", ray={"gcsStorage": storage})
    workers, claim = containers(job), claims(job)[CLAIM]
    before = int(job.status()["checkpoint"]["id"])
    os.kill(cluster.pid(operated, "kept-head-0"), signal.SIGKILL)
    job.until(
        "checkpoints under the next coordinator",
        lambda status: (
            status.get("job", {}).get("epoch") == 2
            and int(status["checkpoint"]["id"]) >= before + 2
        ),
    )
    log = cluster.kubectl("logs", "kept-head-0", "-n", operated)
    assert "generation 2 takes over and goes on with attempt" in log, log
    assert containers(job) == workers

    # Another run begins with a volume of its own.
    job.patch(kubernetes={"state": "Suspended"})
    job.until_phase("Suspended")
    deadline = time.monotonic() + STEP_S_MAX
    while CLAIM in claims(job):
        assert time.monotonic() < deadline, explain(cluster, operated)
        time.sleep(LOOK_S)
    job.patch(kubernetes={"state": "Running"})
    job.until_running(2)
    assert claims(job)[CLAIM] != claim
    job.hurry()
    assert job.result().equals(expected)
