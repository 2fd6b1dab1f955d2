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
from typing import Any, Protocol

from headgate.testing.servers.process import HeldPort
from headgate.tests.k8s.conftest import RESOURCE
from headgate.tests.support.kube import control_plane
from headgate.tests.support.kube.cluster import Cluster

Object = dict[str, Any]
WAIT_S_MAX = 180.0
PATIENT = """
from headgate.k8s.operator import lease
from headgate.runtime.cli import main

# A slow machine may pause the leader, which is no reason to replace it.
lease.LEASE_S, lease.RENEW_DEADLINE_S = 900, 800.0
main()
"""
"""The command of headgate, with longer times of the Lease."""
LOST = "no longer leads"


class Operator:
    """A process of the operator for one namespace.

    Args:
        real_lease: True if the times of its Lease are those of the product, False if they are longer.
    """

    def __init__(
        self, cluster: Cluster, namespace: str, name: str, log: Path, *, real_lease: bool = False
    ) -> None:
        self._ports = HeldPort(), HeldPort()
        self.health, self.metrics = (each.number for each in self._ports)
        self.log, self.cluster = log, cluster
        headgate = str(Path(sys.executable).with_name("headgate"))
        self._command = [
            *([headgate] if real_lease else [sys.executable, "-c", PATIENT]),
            *("k8s", "operator", "--watch-namespaces", namespace),
            *("--default-image", "registry.test/missing:1"),
            *("--health-port", str(self.health), "--metrics-port", str(self.metrics)),
            *("--leader-elect", "--lease-name", "operator"),
        ]
        own = {"POD_NAME": name, "POD_NAMESPACE": namespace}
        self._environment = {**os.environ, **control_plane.environment(cluster.plane), **own}
        self.process = self._started()
        self._lost = 0

    def _started(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                control_plane.bound_to_us(self._command),
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def read(self, port: int, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def until(self, what: str, seen: Callable[[], bool]) -> None:
        """Wait until something is seen; a failure shows the operator's log.

        An operator that has lost its Lease is started again, as Kubernetes does.
        """
        deadline = time.monotonic() + WAIT_S_MAX
        while not seen():
            if self.process.poll() is not None and self.log.read_text().count(LOST) > self._lost:
                self._lost += 1
                self.process = self._started()
            if time.monotonic() > deadline or self.process.poll() is not None:
                seen_last = self.cluster.kubectl("get", "sj,pods,sts,deploy", "-A", "-o", "yaml")
                log = self.log.read_text()[-3000:]
                raise AssertionError(f"{what} did not come: {log}\n{seen_last[-9000:]}")
            time.sleep(0.1)

    def stop(self) -> int:
        """End it as Kubernetes does, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=WAIT_S_MAX)

    def close(self) -> None:
        """End it, if it still runs, and give its ports back."""
        control_plane.stop(self.process)
        for port in self._ports:
            port.release()


class Start(Protocol):
    """Starts an operator of this name."""

    def __call__(self, name: str, *, real_lease: bool = False) -> Operator: ...


def stream_job(**spec: Any) -> Object:
    made = copy.deepcopy(RESOURCE)
    made["metadata"] = {"name": "flights"}
    made["spec"] |= spec
    return made


def phase(cluster: Cluster, namespace: str) -> str:
    job = cluster.find(namespace, "sj/flights")
    return "" if job is None else str(job.get("status", {}).get("phase", ""))


def holder(cluster: Cluster, namespace: str) -> str:
    lease = cluster.find(namespace, "lease/operator")
    return "" if lease is None else str(lease["spec"].get("holderIdentity", ""))
