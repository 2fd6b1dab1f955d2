"""Runs headgate jobs for the benchmark: one JSON request per line of stdin, one answer per line.

A process of its own, so that its memory and CPU time are the run's and nothing else's. With `local`, one
embedded Ray serves all jobs of the process; each job still gets its own coordinator and workers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # as in every worker process

import nexmark_files
import queries
from metering import read_marks

from headgate.runtime.cluster.embedded import embedded_ray, prepare_environment
from headgate.runtime.cluster.process import tune_process


@contextlib.contextmanager
def clustered(kind: str) -> Iterator[None]:
    if kind != "local":
        tune_process()
        yield
        return
    prepare_environment()
    from headgate.runtime.cluster import ray_driver

    with embedded_ray() as directory:
        # Every run would start a Ray of its own, which takes seconds; here they share one.
        ray_driver.embedded_ray = lambda: tempfile.TemporaryDirectory(dir=directory)
        yield


def _job(request: dict[str, Any], directory: str) -> Any:
    name, parallelism = request["query"], request["parallelism"]
    if request.get("suite") == "nexmark":
        return nexmark_files.make_job(
            name, parallelism, request["data"], directory, request["sums"]
        )
    return queries.make_job(
        name,
        request["source"],
        parallelism,
        request["checkpoint"],
        request["events"],
        request["data"],
        directory,
        request["sums"],
        request["slots"],
    )


def run(request: dict[str, Any], cluster: str) -> dict[str, Any]:
    """Run one job and say how its steady part went."""
    with tempfile.TemporaryDirectory(prefix="hg-bench-") as directory:
        job = _job(request, directory)
        gc.collect()  # state that an earlier job left would slow this one down
        outcome = job.run(cluster=cluster)
        steady = read_marks(directory)
    return {
        "began": steady.began,
        "ended": steady.ended,
        "events": steady.events,
        "rows_out": steady.rows_out,
        "sums": steady.sums,
        "checkpoints": outcome.checkpoint,
    }


def main() -> None:
    cluster = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    with clustered(cluster):
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            try:
                answer = run(json.loads(line), cluster)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
