"""Goal: StreamJobs run in pods to the right result, whatever happens to their pods and to the operator.

Method: the chart with the real operator, on the process kubelet; pods run Ray and headgate as in an image.
The oracle is the same job in one process: nothing is lost, and nothing is there twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import yaml

import headgate
from headgate.tests.kube.charts import CHART, CRDS, headgate_command
from headgate.tests.support.kube.cluster import Cluster, CommandError

Object = dict[str, Any]
EXAMPLES = Path(headgate.__file__).parent / "k8s" / "examples"
OPERATOR = "deployment/streams-headgate"
END_S_MAX = 150


@pytest.fixture(scope="module")
def definitions(api_server: Cluster) -> None:
    api_server.helm("install", "headgate-crds", str(CRDS), "-n", "kube-system", "--take-ownership")


@pytest.fixture
def release(cluster: Cluster, namespace: str, definitions: None) -> Iterator[str]:
    """A namespace with an operator of its own."""
    settings = (
        "--set",
        f"crds.install=false,image.repository=headgate,watchNamespaces={{{namespace}}}",
    )
    wait = ("--wait", "--timeout", "2m")
    cluster.helm("install", "streams", str(CHART), "-n", namespace, *settings, *wait)
    try:
        yield namespace
    finally:
        for job in cluster.get("streamjobs", "-n", namespace)["items"]:
            remove(cluster, namespace, job["metadata"]["name"])
        cluster.helm("uninstall", "streams", "-n", namespace, *wait)


def remove(cluster: Cluster, namespace: str, job: str) -> None:
    """Delete a StreamJob without a last savepoint."""
    quick = json.dumps({"spec": {"kubernetes": {"deletion": {"policy": "Abort"}}}})
    cluster.kubectl("patch", "sj", job, "-n", namespace, "--type=merge", "-p", quick)
    cluster.kubectl("delete", "sj", job, "-n", namespace, "--timeout=120s")


def example(name: str) -> list[Object]:
    """The objects of an example; the StreamJob is the last one."""
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def volume(cluster: Cluster, namespace: str, claim: str) -> Path:
    """The directory behind a volume claim."""
    found = cluster.get("pvc", claim, "-n", namespace)
    directory = cluster.get("pv", found["spec"]["volumeName"])["spec"]["hostPath"]["path"]
    return Path(directory)


def in_one_process(job: Object, directory: Path) -> pa.Table:
    """The result of the job, run here without Kubernetes, and as fast as it can."""
    text = json.dumps(job).replace("/data/", f"{directory}/")
    plain = json.loads(text)
    for source in plain["spec"]["sources"].values():
        for kind in source.values():
            if isinstance(kind, dict):
                kind.pop("rate", None)
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(plain))
    ran = headgate_command("run", "--cluster", "in-process", str(path))
    assert ran.returncode == 0, ran.stderr
    return rows(directory / "delays")


def rows(directory: Path) -> pa.Table:
    table = ds.dataset(directory, format="parquet").to_table()
    return table.sort_by([(name, "ascending") for name in table.column_names])


def explain(cluster: Cluster, namespace: str) -> str:
    """What there is to know about jobs that did not come to their end."""
    said = [cluster.kubectl("get", "sj,pods,sts,deploy", "-n", namespace, "-o", "wide")]
    said.append(cluster.kubectl("describe", "sj", "-n", namespace)[-3000:])
    for pod in cluster.get("pods", "-n", namespace)["items"]:
        name = pod["metadata"]["name"]
        for which in ((), ("--previous",)):
            try:
                log = cluster.kubectl("logs", name, "-n", namespace, "--tail=40", *which)
            except CommandError as error:
                log = str(error)[-300:]
            said.append(f"--- {name} {which}\n{log}")
    return "\n".join(said)


def until_finished(cluster: Cluster, namespace: str, job: str) -> None:
    try:
        finished = "jsonpath={.status.phase}=Finished"
        cluster.wait(namespace, finished, f"sj/{job}", seconds=END_S_MAX)
    except CommandError as error:
        raise AssertionError(f"{error}\n{explain(cluster, namespace)}") from None


def test_the_first_job_of_the_docs_finishes_with_the_result_of_one_process(
    cluster: Cluster, release: str, tmp_path: Path
) -> None:
    claim, job = example("flights.yaml")
    cluster.apply(claim, job, namespace=release)
    until_finished(cluster, release, "flights")
    found = rows(volume(cluster, release, "flights") / "delays")
    assert found.equals(in_one_process(job, tmp_path))
