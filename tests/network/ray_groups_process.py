"""Runs a job with two slot sharing groups on a Ray cluster; in a process of its own, as Ray needs.

Prints one line of JSON: where the steps of each group ran, which GPUs they saw, and what they waited for.
"""

from __future__ import annotations

import asyncio
import json
import os
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

MEMORY = 200 << 20


def make_job(directory: Path) -> hg.Job:
    """Each step leaves a file that is named by the step, its node, and the GPUs that it may use."""

    def leave(step: str) -> Any:
        def leave_name(value: int) -> int:
            node = ray.get_runtime_context().get_node_id()
            (directory / f"{step} {node} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}").touch()
            return value

        return leave_name

    apart = [each for value in range(10) for each in (value, Pause("100ms"))]
    job = hg.Job(
        "groups",
        parallelism=1,
        options={"taskmanager.bind-host": "0.0.0.0"},
        resources={"gpu": hg.Resources(cpu=0.5, memory="100mb", gpu=1, custom={"disk": 1})},
    )
    records = job.read(from_list(apart), name="numbers").map(leave("plain"), name="plain")
    model = records.rebalance().map(leave("model"), name="model").slot_sharing_group("gpu")
    model.write(blackhole(), name="out")
    return job


def main(directory: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False})
    cluster.add_node(num_cpus=1)
    waiting: list[str] = []
    nodes: list[str] = []

    def seen(event: PublishedEvent) -> None:
        if event.kind == "waiting":
            waiting.append(event.text)
            if not nodes:
                more = cluster.add_node(
                    num_cpus=1, num_gpus=1, memory=MEMORY, resources={"disk": 1}
                )
                nodes.append(more.node_id)

    job = runnable(make_job(directory)).spec()
    outcome = asyncio.run(launch(job, cluster.address, on_event=seen))
    found = {"status": outcome.status, "waiting": waiting, "nodes": nodes}
    found["left"] = sorted(path.name.split(" ") for path in directory.iterdir())
    cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
