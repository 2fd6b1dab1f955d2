"""The operator as a process, and the questions of tests to its cluster."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headgate.tests.k8s.conftest import RESOURCE
from headgate.tests.support.kube import control_plane
from headgate.tests.support.kube.cluster import Cluster, CommandError

Object = dict[str, Any]
WAIT_S_MAX = 60.0


class Operator:
    """A process of the operator for one namespace."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, log: Path) -> None:
        self.health, self.metrics = control_plane._free_ports(2)
        self.log, self.cluster = log, cluster
        command = [
            *(str(Path(sys.executable).with_name("headgate")), "k8s", "operator"),
            *("--watch-namespaces", namespace, "--default-image", "registry.test/missing:1"),
            *("--health-port", str(self.health), "--metrics-port", str(self.metrics)),
            *("--leader-elect", "--lease-name", "operator"),
        ]
        own = {"POD_NAME": name, "POD_NAMESPACE": namespace}
        environment = {**control_plane.environment(cluster.plane), **own}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                control_plane.bound_to_us(command),
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def read(self, port: int, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def until(self, what: str, seen: Callable[[], bool]) -> None:
        """Wait until something is seen; a failure shows the operator's log."""
        deadline = time.monotonic() + WAIT_S_MAX
        while not seen():
            if time.monotonic() > deadline or self.process.poll() is not None:
                seen_last = self.cluster.kubectl("get", "sj,pods,sts,deploy", "-A", "-o", "yaml")
                log = self.log.read_text()[-3000:]
                raise AssertionError(f"{what} did not come: {log}\n{seen_last[-9000:]}")
            time.sleep(0.1)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


def stream_job(**spec: Any) -> Object:
    made = copy.deepcopy(RESOURCE)
    made["metadata"] = {"name": "flights"}
    made["spec"] |= spec
    return made


def found(cluster: Cluster, namespace: str, *what: str) -> Object | None:
    try:
        return cluster.get(*what, "-n", namespace)
    except CommandError:
        return None


def phase(cluster: Cluster, namespace: str) -> str:
    job = found(cluster, namespace, "sj", "flights")
    return "" if job is None else str(job.get("status", {}).get("phase", ""))


def holder(cluster: Cluster, namespace: str) -> str:
    lease = found(cluster, namespace, "lease", "operator")
    return "" if lease is None else str(lease["spec"].get("holderIdentity", ""))
