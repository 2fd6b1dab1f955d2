"""A handle on a running cluster of the tests: kubectl, helm, and nodes whose containers are processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from headgate.tests.support.kube import control_plane
from headgate.tests.support.kube.control_plane import (
    Connection,
    ControlPlane,
    bound_to_us,
    stop,
)
from headgate.tests.support.kube.programs import Programs

Object = dict[str, Any]
IMAGES = ("headgate:*", "registry.test/headgate:*")
"""Patterns of the images that exist; any other cannot be pulled. In the image `PATTERN=DIRECTORY` the
programs of a directory come before all others."""
COMMAND_S_MAX = 900
WAIT_S_MAX = 300
"""How long tests wait for what is to come: a loaded machine is much slower than an idle one."""
NOT_SENT = "TLS handshake timeout"
"""With this error, which comes after ten seconds, kubectl has sent no request."""
GROUPS = {
    "api/v1": ("pods", "secrets", "services", "persistentvolumeclaims"),
    "apis/apps/v1": ("deployments", "statefulsets"),
    "apis/coordination.k8s.io/v1": ("leases",),
    "apis/headgate.io/v1alpha1": ("streamjobs", "streamsnapshots"),
    "apis/networking.k8s.io/v1": ("networkpolicies",),
    "apis/policy/v1": ("poddisruptionbudgets",),
}
SHORT = {
    "deploy": "deployments",
    "netpol": "networkpolicies",
    "networkpolicy": "networkpolicies",
    "pdb": "poddisruptionbudgets",
    "pvc": "persistentvolumeclaims",
    "sj": "streamjobs",
    "ss": "streamsnapshots",
    "sts": "statefulsets",
    "svc": "services",
}
"""The kinds of `Cluster.find`: other names than their plurals without an s, and their API groups."""
_numbers = itertools.count(1)


class CommandError(Exception):
    """A command that failed. The text is its output."""


@dataclass
class Cluster:
    """A control plane and, after `start_nodes`, nodes."""

    programs: Programs
    plane: ControlPlane
    _nodes: subprocess.Popen[bytes] | None = field(default=None)
    _threads: threading.local = field(default_factory=threading.local)

    def kubectl(self, *arguments: str, stdin: str | None = None, token: str | None = None) -> str:
        """Return the output of kubectl, with the rights of `token` or else of an administrator.

        Raises:
            CommandError: kubectl failed.
        """
        config = [] if token is None else ["--kubeconfig", str(self.kubeconfig(token))]
        deadline = time.monotonic() + WAIT_S_MAX
        while True:
            try:
                return self._run([str(self.programs.kubectl), *config, *arguments], stdin)
            except CommandError as error:
                if NOT_SENT not in str(error) or time.monotonic() > deadline:
                    raise

    def kubeconfig(self, token: str) -> Path:
        """Return a kubeconfig file for the holder of a token."""
        path = self.plane.directory / f"kubeconfig-{next(_numbers)}"
        path.touch(mode=0o600)
        path.write_text(control_plane.kubeconfig(self.plane, token))
        return path

    def helm(self, *arguments: str, stdin: str | None = None) -> str:
        """Return the output of helm.

        Raises:
            CommandError: helm failed.
        """
        return self._run([str(self.programs.helm), *arguments], stdin)

    def _run(self, command: list[str], stdin: str | None, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            command,
            input=stdin,
            env=env or control_plane.environment(self.plane),
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        if done.returncode:
            raise CommandError(
                f"{Path(command[0]).name} {' '.join(command[1:])}: {done.stderr}{done.stdout}"
            )
        return done.stdout

    def get(self, *arguments: str) -> Object:
        """Return the object of `kubectl get`; several are in its list `items`."""
        found: Object = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def find(self, namespace: str, what: str) -> Object | None:
        """Return the object `KIND/NAME` of a namespace; None if there is none."""
        kind, _, name = what.partition("/")
        return self._connection.get(f"{_path(namespace, kind)}/{name}")

    def listed(self, namespace: str, kind: str, selector: str = "") -> list[Object]:
        """Return the objects of a kind, possibly only those with some labels (`NAME=VALUE,...`)."""
        query = urlencode({"labelSelector": selector} if selector else {})
        found = self._connection.get(f"{_path(namespace, kind)}?{query}")
        assert found is not None, f"there is no kind {kind}"
        items: list[Object] = found["items"]
        return items

    @property
    def _connection(self) -> Connection:
        """The connection of this thread."""
        if not hasattr(self._threads, "connection"):
            self._threads.connection = Connection(self.plane)
        made: Connection = self._threads.connection
        return made

    def apply(self, *objects: Object, namespace: str) -> None:
        """Apply objects to a namespace with `kubectl apply`."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=text)

    def wait(self, namespace: str, condition: str, *what: str, seconds: int = WAIT_S_MAX) -> None:
        """Wait for a condition with `kubectl wait --for=CONDITION`."""
        self.kubectl("wait", "-n", namespace, f"--for={condition}", f"--timeout={seconds}s", *what)

    def established(self, crd: str) -> None:
        """Wait until objects of a resource definition can be made."""
        plural = crd.partition(".")[0]
        # Without this `--for=condition` could come before there are any conditions, and fail.
        for what in (
            f"jsonpath={{.status.acceptedNames.plural}}={plural}",
            "condition=Established",
        ):
            self.kubectl("wait", f"--for={what}", f"crd/{crd}", f"--timeout={WAIT_S_MAX}s")

    def token(self, namespace: str, account: str) -> str:
        """Return a token of a service account."""
        return self.kubectl("create", "token", account, "--namespace", namespace).strip()

    def pid(self, namespace: str, pod: str, container: str | None = None) -> int:
        """Return the process id, on this machine, of a container, as soon as it runs."""
        deadline = time.monotonic() + WAIT_S_MAX
        while True:
            found = (self.find(namespace, f"pod/{pod}") or {}).get("status", {})
            for one in found.get("containerStatuses", ()):
                if container in (None, one["name"]) and "running" in one["state"]:
                    return int(one["containerID"].removeprefix("process://"))
            assert time.monotonic() < deadline, f"no container of pod {pod} runs: {found}"
            time.sleep(0.1)

    def inside(self, namespace: str, pod: str, *command: str) -> str:
        """Return the output of a command in a pod, with the user and variables of the pod's process.

        Raises:
            CommandError: it failed.
        """
        process = Path(f"/proc/{self.pid(namespace, pod)}")
        pairs = process.joinpath("environ").read_bytes().decode().split("\0")
        user = str(process.stat().st_uid)
        namespaces = ("--mount", "--pid", "--ipc", "--uts", "--net", "--root", "--wd")
        enter = ["nsenter", "--target", process.name, *namespaces, "-S", user, "-G", user]
        return self._run([*enter, "--", *command], None, dict(p.split("=", 1) for p in pairs if p))

    @contextlib.contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """Make a namespace in which every pod must be restricted, for the time of the block."""
        enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
        made = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": enforced},
        }
        deadline = time.monotonic() + control_plane.START_S_MAX
        while True:
            try:
                self.kubectl("create", "-f", "-", stdin=json.dumps(made))
                break
            except (
                CommandError
            ) as error:  # one of this name, of an earlier file, may still be going
                if "is being deleted" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)
        # Without its service account no pod is admitted.
        self.wait(name, "create", "serviceaccount/default")
        yield name
        # The pods end while the next test begins.
        self.kubectl("delete", "namespace", name, "--wait=false")

    def start_nodes(self, *names: str, images: tuple[str, ...] = IMAGES, cpu: str = "8") -> None:
        """Start the process kubelet, and wait until its nodes are ready."""
        directory = self.plane.directory / f"kubelet-{next(_numbers)}"
        directory.mkdir()
        command = [
            *(sys.executable, "-m", "headgate.tests.support.kube.kubelet"),
            *("--server", self.plane.server, "--ca-file", str(self.plane.ca_file)),
            *("--directory", str(directory), "--cpu", cpu),
            *(part for name in names for part in ("--node", name)),
            *(part for image in images for part in ("--image", image)),
        ]
        log = self.plane.directory / "kubelet.log"
        with log.open("ab") as output:
            self._nodes = subprocess.Popen(
                bound_to_us(command),
                env={**os.environ, "KUBELET_TOKEN": self.plane.token},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + control_plane.START_S_MAX
        while not (directory / "ready").exists():
            if self._nodes.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the process kubelet did not start: {log.read_text()[-3000:]}")
            time.sleep(0.05)

    def stop_nodes(self) -> None:
        """End the process kubelet, and with it the processes of all pods."""
        if self._nodes is not None:
            stop(self._nodes)
            self._nodes = None


def _path(namespace: str, kind: str) -> str:
    plural = SHORT.get(kind) or f"{kind.removesuffix('s')}s"
    group = next(group for group, plurals in GROUPS.items() if plural in plurals)
    return f"/{group}/namespaces/{namespace}/{plural}"


@contextlib.contextmanager
def running(programs: Programs, directory: Path) -> Iterator[Cluster]:
    """Run a cluster without nodes for the time of the block. It never leaves a process behind."""
    with control_plane.running(programs, directory) as plane:
        cluster = Cluster(programs, plane)
        try:
            yield cluster
        finally:
            cluster.stop_nodes()
