"""Goal: a job in pods comes to the right result while its pods, its nodes and the operator are killed.

Method: ten kills by a seed, in rounds; those of a round come together, and the next round begins when the
job has completed checkpoints again. The oracle is the same job in one process.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

import pyarrow as pa

from headgate.tests.kube.stream_jobs import (
    LOOK_S,
    STEP_S_MAX,
    Object,
    StreamJob,
    explain,
    started,
)
from headgate.tests.support.kube.cluster import Cluster

SEED = 7
ROUNDS = (
    ("kill worker", "kill operator"),
    ("kill head",),
    ("delete worker", "kill worker"),
    ("drain",),
    ("kill worker", "kill head"),
    ("delete head", "delete operator"),
)
"""The pod to kill; if there are several, the seed decides which."""
PROGRESS = 2
"""Checkpoints between two rounds."""


class Killer:
    """Ends processes, pods and nodes of a job, as a seed says."""

    def __init__(self, job: StreamJob) -> None:
        self._job = job
        self._cluster, self._namespace = job.cluster, job.namespace
        self._random = random.Random(SEED)
        self.done: list[str] = []

    def __call__(self, kind: str) -> None:
        """Carry out an entry of `ROUNDS`."""
        verb, _, whose = kind.partition(" ")
        how: dict[str, Callable[[Object], None]] = {
            "kill": self._kill,
            "delete": self._delete,
            "drain": self._drain,
        }
        pods = sorted(self._running(whose), key=lambda pod: str(pod["metadata"]["name"]))
        how[verb](self._random.choice(pods))
        self.done.append(kind)

    def _running(self, whose: str) -> list[Object]:
        """Return the pods of a role, or of all, whose process runs, as soon as there is one."""
        deadline = time.monotonic() + STEP_S_MAX
        while True:
            pods = self._operators() if whose == "operator" else self._job.pods(whose)
            if found := [pod for pod in pods if _process(pod)]:
                return found
            assert time.monotonic() < deadline, explain(self._cluster, self._namespace)
            time.sleep(LOOK_S)

    def _operators(self) -> list[Object]:
        label = "app.kubernetes.io/name=headgate-operator"
        items = self._cluster.listed(self._namespace, "pods", label)
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def _kill(self, pod: Object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.kill(_process(pod), signal.SIGKILL)

    def _delete(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        self._cluster.kubectl("delete", "pod", name, "-n", self._namespace, "--wait=false")

    def _drain(self, pod: Object) -> None:
        node = pod["spec"]["nodeName"]
        selected = f"--pod-selector=headgate.io/job={self._job.name}"
        try:
            self._cluster.kubectl("drain", node, selected, "--delete-emptydir-data")
        finally:
            self._cluster.kubectl("uncordon", node)


def _process(pod: Object) -> int:
    """Return the id of the first process of the pod's container; 0 if it does not run."""
    statuses = pod["status"].get("containerStatuses", ())
    if not any("running" in status["state"] for status in statuses):
        return 0
    return int(statuses[0]["containerID"].removeprefix("process://") or 0)


def test_ten_kills_change_nothing(cluster: Cluster, operated: str, expected: pa.Table) -> None:
    job = started(cluster, operated, "killed")
    kill = Killer(job)
    for together in ROUNDS:
        before = int(job.status()["checkpoint"]["id"])
        for kind in together:
            kill(kind)
        job.until(
            f"checkpoints behind {kill.done}",
            lambda status: int(status["checkpoint"]["id"]) >= before + PROGRESS,  # noqa: B023
        )
    assert len(kill.done) == 10
    assert job.status()["run"]["number"] == 1, "the run went on, and no other one began"
    job.hurry()
    assert job.result().equals(expected)
    assert job.condition("StateFound") == {}, "its state is all its own"
