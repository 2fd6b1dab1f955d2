"""StreamJobs in pods: a release with the real operator, a job that lasts, and its expected result."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import yaml

import headgate
from headgate.tests.kube.charts import CHART, headgate_command
from headgate.tests.support.commands import ended_with
from headgate.tests.support.kube.cluster import Cluster, CommandError

Object = dict[str, Any]
EXAMPLES = Path(headgate.__file__).parent / "k8s" / "examples"
OPERATOR = "deployment/streams-headgate"
STEP_S_MAX = 600
"""The longest wait for one step of a test, such as the start of a job."""
LOOK_S = 0.3
POLLED = "operator.pollSeconds=1"
"""The setting of releases whose jobs run: tests wait for what the status says of them."""
PACED = "headgate.tests.kube.paced"


@contextlib.contextmanager
def released(cluster: Cluster, namespace: str, *more: str) -> Iterator[str]:
    """Install an operator for a namespace, possibly with more settings; the definitions exist."""
    settings = f"crds.install=false,image.repository=headgate,watchNamespaces={{{namespace}}}"
    settings += f",{POLLED}"
    wait = ("--wait", "--timeout", "10m")
    values = ("--set", ",".join((settings, *more)))
    cluster.helm("install", "streams", str(CHART), "-n", namespace, *values, *wait)
    try:
        yield namespace
    finally:
        remove_all(cluster, namespace)
        cluster.helm("uninstall", "streams", "-n", namespace, *wait)


def remove_all(cluster: Cluster, namespace: str) -> None:
    """Delete all StreamJobs of a namespace, without a last savepoint."""
    for found in cluster.get("streamjobs", "-n", namespace)["items"]:
        remove(cluster, namespace, found["metadata"]["name"])


def remove(cluster: Cluster, namespace: str, job: str) -> None:
    """Delete a StreamJob without a last savepoint."""
    quick = json.dumps({"spec": {"kubernetes": {"deletion": {"policy": "Abort"}}}})
    cluster.kubectl("patch", "sj", job, "-n", namespace, "--type=merge", "-p", quick)
    cluster.kubectl("delete", "sj", job, "-n", namespace, "--timeout=600s")


def example(name: str) -> list[Object]:
    """Return the objects of an example; the StreamJob is the last one."""
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def lasting(name: str, **kubernetes: Any) -> list[Object]:
    """Return the job of the docs with its own name and volume; it ends only after `StreamJob.hurry`.

    Args:
        name: the name of the StreamJob and of its volume claim.
        kubernetes: more fields of the section.
    """
    claim, job = example("flights.yaml")
    claim["metadata"]["name"] = job["metadata"]["name"] = name
    spec = json.loads(
        json.dumps(job["spec"]).replace('"claimName": "flights"', f'"claimName": "{name}"')
    )
    generator = spec["sources"]["flights"]["generator"]
    del generator["rate"]
    # The steps become slower and slower, so this is enough for hours.
    generator |= {"rows": 500_000, "batchRows": 100}
    spec["operators"]["paced"] = {"from": "flights", "python": f"{PACED}:slow"}
    spec["operators"]["delays"]["from"] = "paced"
    spec["kubernetes"] |= kubernetes
    return [claim, {**job, "spec": spec}]


class StreamJob:
    """A StreamJob of a test, with the questions of the test about it."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    def get(self) -> Object:
        found = self.cluster.find(self.namespace, f"sj/{self.name}")
        assert found is not None, f"there is no StreamJob {self.name}"
        return found

    def status(self) -> Object:
        found: Object = self.get().get("status", {})
        return found

    def phase(self) -> str:
        return str(self.status().get("phase", ""))

    def condition(self, type_: str) -> Object:
        found = self.status().get("conditions", ())
        return next((each for each in found if each["type"] == type_), {})

    def patch(self, **spec: Any) -> None:
        """Change the spec by a merge patch."""
        text = json.dumps({"spec": spec})
        self.cluster.kubectl(
            "patch", "sj", self.name, "-n", self.namespace, "--type=merge", "-p", text
        )

    def until(
        self, what: str, seen: Callable[[Object], object], seconds: float = STEP_S_MAX
    ) -> Object:
        """Wait until the status satisfies `seen`, and return it."""
        deadline = time.monotonic() + seconds
        while not seen(status := self.status()):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{self.name}: {what} did not come\n{explain(self.cluster, self.namespace)}"
                )
            time.sleep(LOOK_S)
        return status

    def until_running(self, run: int) -> Object:
        """Wait until this run has completed a checkpoint."""
        return self.until(
            f"a checkpoint of run {run}",
            lambda status: (
                status.get("phase") == "Running"
                and status["run"]["number"] == run
                and status["run"].get("checkpointed")
            ),
        )

    def until_phase(self, phase: str) -> Object:
        return self.until(f"phase {phase}", lambda status: status.get("phase") == phase)

    def pods(self, component: str = "") -> list[Object]:
        """Return the pods of the job that are not terminating: all, or those of its `head` or `worker`."""
        labels = f"headgate.io/job={self.name}"
        labels += f",headgate.io/role={component}" * bool(component)
        found = self.cluster.listed(self.namespace, "pods", labels)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def until_no_pods(self) -> None:
        """Wait until all pods end: Kubernetes itself removes those of an object that is deleted."""
        deadline = time.monotonic() + STEP_S_MAX
        while left := self.pods():
            if time.monotonic() > deadline:
                names = [pod["metadata"]["name"] for pod in left]
                raise AssertionError(f"{names} stay\n{explain(self.cluster, self.namespace)}")
            time.sleep(LOOK_S)

    def head(self) -> str:
        """The uid of the head's pod."""
        (pod,) = self.pods("head")
        return str(pod["metadata"]["uid"])

    @property
    def volume(self) -> Path:
        return volume(self.cluster, self.namespace, self.name)

    def hurry(self) -> None:
        """Let the data end."""
        (self.volume / "hurry").touch()

    def result(self) -> pa.Table:
        """Wait for the end, and return the result."""
        self.until_phase("Finished")
        return rows(self.volume / "delays")


def started(cluster: Cluster, namespace: str, name: str, **kubernetes: Any) -> StreamJob:
    """Apply a job that lasts, and wait until it has a checkpoint."""
    cluster.apply(*lasting(name, **kubernetes), namespace=namespace)
    job = StreamJob(cluster, namespace, name)
    job.until_running(1)
    return job


def volume(cluster: Cluster, namespace: str, claim: str) -> Path:
    """Return the directory of a volume claim."""
    found = cluster.get("pvc", claim, "-n", namespace)
    directory = cluster.get("pv", found["spec"]["volumeName"])["spec"]["hostPath"]["path"]
    return Path(directory)


def in_one_process(job: Object, directory: Path) -> pa.Table:
    """Return the result of the job, run here without Kubernetes and without pauses."""
    text = (
        json.dumps(job).replace("/data/", f"{directory}/").replace(f"{PACED}:slow", f"{PACED}:fast")
    )
    plain = json.loads(text)
    for source in plain["spec"]["sources"].values():
        for kind in source.values():
            if isinstance(kind, dict):
                for pace in ("rate", "batchRows"):
                    kind.pop(pace, None)
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(plain))
    ran = headgate_command("run", "--cluster", "in-process", str(path))
    ended_with(ran, 0)
    return rows(directory / "delays")


def rows(directory: Path) -> pa.Table:
    table = ds.dataset(directory, format="parquet").to_table()
    return table.sort_by([(name, "ascending") for name in table.column_names])


def explain(cluster: Cluster, namespace: str) -> str:
    """Return all information about jobs that did not end."""
    said = [cluster.kubectl("get", "sj,ss,pods,sts,deploy", "-n", namespace, "-o", "wide")]
    said.append(cluster.kubectl("describe", "sj", "-n", namespace)[-6000:])
    for pod in cluster.get("pods", "-n", namespace)["items"]:
        name = pod["metadata"]["name"]
        for which in ((), ("--previous",)):
            try:
                log = cluster.kubectl("logs", name, "-n", namespace, "--tail=40", *which)
            except CommandError as error:
                log = str(error)[-300:]
            said.append(f"--- {name} {which}\n{log}")
    return "\n".join(said)
