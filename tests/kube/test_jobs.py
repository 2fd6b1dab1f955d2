"""Goal: StreamJobs run in pods to the right result.

Method: the chart with the real operator, on the process kubelet; pods run Ray and headgate as in an image.
The oracle is the same job in one process: nothing is lost, and nothing is there twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.tests.kube.charts import CRDS
from headgate.tests.kube.stream_jobs import StreamJob, example, in_one_process, released
from headgate.tests.support.kube.cluster import Cluster


@pytest.fixture(scope="module")
def definitions(api_server: Cluster) -> None:
    release = ("headgate-crds", str(CRDS), "-n", "kube-system")
    api_server.helm("upgrade", "--install", *release, "--take-ownership")


@pytest.fixture
def release(cluster: Cluster, namespace: str, definitions: None) -> Iterator[str]:
    """A namespace with an operator of its own."""
    with released(cluster, namespace):
        yield namespace


def test_the_first_job_of_the_docs_finishes_with_the_result_of_one_process(
    cluster: Cluster, release: str, tmp_path: Path
) -> None:
    claim, job = example("flights.yaml")
    cluster.apply(claim, job, namespace=release)
    found = StreamJob(cluster, release, "flights").result()
    assert found.equals(in_one_process(job, tmp_path))
