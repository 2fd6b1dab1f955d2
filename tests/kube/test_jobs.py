"""Goal: StreamJobs run in pods to the right result.

Method: the chart with the real operator, on the process kubelet; pods run Ray and headgate as in an image.
The oracle is the same job in one process: nothing is lost or duplicated.
"""

from __future__ import annotations

from pathlib import Path

from headgate.tests.kube.stream_jobs import StreamJob, example, in_one_process
from headgate.tests.support.kube.cluster import Cluster


def test_the_first_job_of_the_docs_finishes_with_the_result_of_one_process(
    cluster: Cluster, operated: str, tmp_path: Path
) -> None:
    claim, job = example("flights.yaml")
    cluster.apply(claim, job, namespace=operated)
    found = StreamJob(cluster, operated, "flights").result()
    assert found.equals(in_one_process(job, tmp_path))
