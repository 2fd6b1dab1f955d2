"""The steps of a user on a real node, and what the containers are like while a job runs."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from headgate.tests.kube.charts import CHART, CRDS
from headgate.tests.kube.stream_jobs import StreamJob, example, explain, in_one_process, rows
from headgate.tests.support.kube.cluster import Cluster
from headgate.tests.support.kube.node import machine
from headgate.tests.support.kube.node.configuration import CGROUPS

Object = dict[str, Any]
NAMESPACE = "streams"
WAIT = ("--wait", "--timeout", "5m")
SLOW_ROWS = 5_000
"""Rows per second of the job whose worker is killed: it lasts a minute."""
MEBIBYTE = 1 << 20


class Steps:
    """Prints what was done, with the seconds that it took."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def done(self, what: str) -> None:
        now = time.monotonic()
        print(f"==> {what}: {now - self._since:.0f} s", flush=True)
        self._since = now


def run(cluster: Cluster, directory: Path, image: str) -> None:
    """Make all steps; raises AssertionError where something is not as it has to be."""
    steps = Steps()
    repository, _, tag = image.rpartition(":")
    with cluster.namespace(NAMESPACE):
        cluster.helm("install", "headgate-crds", str(CRDS), "-n", "kube-system", *WAIT)
        settings = (
            f"crds.install=false,image.repository={repository},watchNamespaces={{{NAMESPACE}}}"
        )
        values = ("--set", settings, "--set-string", f"image.tag={tag}")
        cluster.helm("install", "headgate", str(CHART), "-n", NAMESPACE, *values, *WAIT)
        steps.done("both charts are installed, the operator is ready")
        try:
            _the_example(cluster, directory, steps)
            _a_killed_worker(cluster, directory, steps)
        except AssertionError:
            print(explain(cluster, NAMESPACE), flush=True)
            raise
        cluster.helm("uninstall", "headgate", "-n", NAMESPACE, *WAIT)
        steps.done("the chart is removed")


def _the_example(cluster: Cluster, directory: Path, steps: Steps) -> None:
    claim, job = _fitting(example("flights.yaml"))
    data = _volume(cluster, directory, "flights")
    cluster.apply(claim, job, namespace=NAMESPACE)
    flights = StreamJob(cluster, NAMESPACE, "flights")
    flights.until_phase("Running")
    steps.done("the example is Running")
    flights.until_phase("Finished")
    steps.done("the example is Finished")
    found = rows(data / "delays")
    assert found.equals(in_one_process(job, _new(directory / "expected"))), "other output"
    print(f"    {found.num_rows} rows, equal to those of one process", flush=True)


def _a_killed_worker(cluster: Cluster, directory: Path, steps: Steps) -> None:
    claim, job = _fitting(
        json.loads(json.dumps(example("flights.yaml")).replace('"flights"', '"killed"'))
    )
    generator = next(iter(job["spec"]["sources"].values()))["generator"]
    generator["rate"] = SLOW_ROWS
    job["spec"]["kubernetes"]["workers"]["resources"] |= {"limits": {"cpu": 2}}
    data = _volume(cluster, directory, "killed")
    cluster.apply(claim, job, namespace=NAMESPACE)
    killed = StreamJob(cluster, NAMESPACE, "killed")
    killed.until_running(1)
    steps.done("a slower job has a checkpoint")
    for role in ("head", "worker"):
        for pod in killed.pods(role):
            print(f"    {_checked(directory, pod)}", flush=True)
    one = killed.pods("worker")[0]
    os.kill(_pid(directory, one), signal.SIGKILL)
    killed.until("a restart of the job", lambda status: status["job"].get("restarts"))
    steps.done("a worker's container was killed, the job has noticed")
    killed.until_phase("Finished")
    steps.done("the slower job is Finished")
    found = rows(data / "delays")
    assert found.equals(in_one_process(job, _new(directory / "expected-killed"))), "other output"
    print(f"    {found.num_rows} rows, equal to those of one process", flush=True)


def _fitting(made: list[Object]) -> list[Object]:
    """The example on a machine that may have two cores only."""
    claim, job = copy.deepcopy(made)
    job["spec"]["kubernetes"]["workers"]["resources"] = {"requests": {"cpu": "250m"}}
    return [claim, job]


def _volume(cluster: Cluster, directory: Path, name: str) -> Path:
    """A volume of this machine for a claim of that name; any user may write there."""
    path = _new(directory / "volumes" / name)
    path.chmod(0o777)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": str(path)},
            "claimRef": {"namespace": NAMESPACE, "name": name},
        },
    }
    cluster.apply(volume, namespace=NAMESPACE)
    return path


def _new(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _pid(directory: Path, pod: Object) -> int:
    """The process of a pod's container."""
    (status,) = pod["status"]["containerStatuses"]
    wanted = status["containerID"].removeprefix("containerd://")
    lines = machine.containerd_command(directory, "tasks", "list").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(wanted))


def _checked(directory: Path, pod: Object) -> str:
    """Check what the kernel says of a pod's container; raises AssertionError if it is not restricted."""
    process = Path("/proc", str(_pid(directory, pod)))
    told = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    assert told["Uid"].split() == ["10001"] * 4, told["Uid"]
    assert told["Gid"].split() == ["10001"] * 4, told["Gid"]
    assert int(told["CapEff"], 16) == int(told["CapBnd"], 16) == 0, told
    assert (told["NoNewPrivs"], told["Seccomp"]) == ("1", "2"), told
    mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    (root,) = (each for each in mounts if each[4] == "/")
    assert "ro" in root[5].split(","), root
    assert not (process / "root/var/run/secrets/kubernetes.io").exists()
    (container,) = pod["spec"]["containers"]
    resources = container["resources"]
    groups = _cgroups(process)
    memory = int((groups["memory"] / "memory.limit_in_bytes").read_text())
    shares = int((groups["cpu"] / "cpu.shares").read_text())
    quota = int((groups["cpu"] / "cpu.cfs_quota_us").read_text())
    assert memory == _mebibytes(resources["limits"]["memory"]) * MEBIBYTE, memory
    assert shares == _millicores(resources["requests"]["cpu"]) * 1024 // 1000, shares
    limit = resources["limits"].get("cpu")
    assert quota == (-1 if limit is None else _millicores(limit) * 100), quota
    name = pod["metadata"]["name"]
    return (
        f"{name}: user 10001, no capabilities, seccomp, read-only root, no token; "
        f"memory {memory // MEBIBYTE} MiB, cpu.shares {shares}, cfs_quota_us {quota}"
    )


def _cgroups(process: Path) -> dict[str, Path]:
    """The directory of a process in each hierarchy of the first version of cgroups."""
    found = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for each in filter(None, controllers.split(",")):
            found[each] = CGROUPS / each / path.lstrip("/")
    return found


def _mebibytes(text: str) -> int:
    return int(text[:-2]) * {"Mi": 1, "Gi": 1024}[text[-2:]]


def _millicores(text: str) -> int:
    return int(text[:-1]) if text.endswith("m") else int(text) * 1000
