"""Runs a job on a Ray cluster of several nodes of this machine; in a process of its own, as Ray needs.

Prints one line of JSON: the nodes that host no workers, those that hosted subtasks, and what the job said
it waits for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import headgate as hg
from headgate.connectors import Pause, blackhole, from_list
from headgate.runtime.cluster.launch import launch
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.job import runnable
from headgate.runtime.protocol.worker_nodes import NO_WORKERS, NO_WORKERS_LABEL

SLOT = {"slot": 1}


def make_job(directory: Path) -> hg.Job:
    """Two workers; each leaves a file with the name of its node."""

    def leave(value: int) -> int:
        (directory / str(ray.get_runtime_context().get_node_id())).touch()
        return value

    apart = [each for value in range(10) for each in (value, Pause("100ms"))]
    options = {"headgate.ray.slot-resource": "slot", "taskmanager.bind-host": "0.0.0.0"}
    job = hg.Job("nodes", parallelism=2, options=options)
    records = job.read(from_list(apart), name="numbers")
    records.rebalance().map(leave, name="leave").write(blackhole(), name="out")
    return job


def main(directory: Path) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"include_dashboard": False, "resources": {"slot": 8}}
    )
    no_workers = {NO_WORKERS_LABEL: NO_WORKERS}
    cluster.add_node(num_cpus=1, resources={"slot": 8}, labels=no_workers)
    cluster.add_node(num_cpus=1, resources=SLOT)
    waiting: list[str] = []

    def seen(event: PublishedEvent) -> None:
        if event.kind == "waiting":
            if not waiting:
                cluster.add_node(num_cpus=1, resources=SLOT)
            waiting.append(event.text)

    found: dict[str, Any] = {}

    def connected() -> None:
        found["avoided"] = [
            node["NodeID"]
            for node in ray.nodes()
            if "node:__internal_head__" in node["Resources"] or NO_WORKERS_LABEL in node["Labels"]
        ]

    job = runnable(make_job(directory)).spec()
    outcome = asyncio.run(launch(job, cluster.address, on_event=seen, on_connected=connected))
    found |= {"status": outcome.status, "waiting": waiting}
    found["hosts"] = sorted(path.name for path in directory.iterdir())
    cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
