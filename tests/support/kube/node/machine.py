"""A cluster of one node that is real: kubelet, containerd and runc, kube-proxy, a scheduler, and DNS.

All of it runs in namespaces of its own, as `inside` makes them: no other network can be reached from there
or reaches it, and when the first process ends the kernel ends all others, containers too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headgate.tests.support.kube.cluster import Cluster
from headgate.tests.support.kube.control_plane import (
    ADVERTISED,
    ControlPlane,
    is_ok,
    run_process,
)
from headgate.tests.support.kube.control_plane import running as control_plane
from headgate.tests.support.kube.node import configuration
from headgate.tests.support.kube.node.packages import environment
from headgate.tests.support.kube.programs import Programs

NETWORK = (
    "ip link set lo up",
    "ip link add machine type bridge",
    f"ip addr add {ADVERTISED}/24 dev machine",
    "ip link set machine up",
    "ip route add default dev machine",
    "sysctl -qw net.ipv4.ip_forward=1",
    "sysctl -qw net.bridge.bridge-nf-call-iptables=1",
)
"""The address that the API server advertises is one of this machine here."""
PRIVATE = ("/run", "/var/log")
"""Directories in which programs leave files at fixed places."""
LOOK_S = 0.3


def inside(module: str, *arguments: str) -> None:
    """Run a module in new network, process and mount namespaces; returns when it has ended."""
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run([*command, sys.executable, "-m", module, *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


@contextlib.contextmanager
def running(
    programs: Programs, node_programs: dict[str, Path], unpacked: Path, directory: Path
) -> Iterator[Cluster]:
    """The cluster for the time of the block, with data and logs in `directory`."""
    for path in PRIVATE:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
    for command in NETWORK:
        subprocess.run(command.split(), check=True)
    env = environment(unpacked)
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(control_plane(programs, directory, ADVERTISED))
        cluster = Cluster(programs, plane)
        stack.enter_context(_names(plane, directory, env))
        stack.enter_context(_containerd(directory, unpacked, env))
        stack.enter_context(_scheduler(node_programs, plane))
        stack.enter_context(_kubelet(node_programs, plane, env))
        stack.enter_context(_kube_proxy(node_programs, plane, env))
        cluster.kubectl("wait", "--for=create", f"node/{configuration.NAME}", "--timeout=60s")
        cluster.kubectl(
            "wait", "--for=condition=Ready", f"node/{configuration.NAME}", "--timeout=120s"
        )
        yield cluster


def containerd_command(directory: Path, *arguments: str) -> str:
    """Return the output of containerd's own command line about the containers of Kubernetes."""
    socket = str(configuration.socket(directory))
    command = ["ctr", "--address", socket, "--namespace", "k8s.io", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout


def _containerd(
    directory: Path, unpacked: Path, env: dict[str, str]
) -> contextlib.AbstractContextManager[None]:
    config = directory / "containerd.toml"
    config.write_text(configuration.containerd(directory, unpacked))
    (directory / "cni").mkdir()
    (directory / "cni" / "pods.conflist").write_text(configuration.cni(directory))
    os.environ.update({name: env[name] for name in ("PATH", "LD_LIBRARY_PATH")})  # for ctr
    command = ["containerd", "--config", str(config)]
    socket = configuration.socket(directory)
    # As a kubelet does for the cgroup of its pods. Otherwise all pods together count as one process.
    configuration.ALL_PODS.mkdir(exist_ok=True)
    (configuration.ALL_PODS / "cpu.shares").write_text(str(1024 * (os.cpu_count() or 1)))
    return run_process("containerd", command, directory, socket.exists, env)


def _scheduler(
    programs: dict[str, Path], plane: ControlPlane
) -> contextlib.AbstractContextManager[None]:
    command = [str(programs["kube-scheduler"]), f"--kubeconfig={plane.kubeconfig}"]
    command += ["--leader-elect=false", "--secure-port=0"]
    return run_process("kube-scheduler", command, plane.directory, lambda: True)


def _kube_proxy(
    programs: dict[str, Path], plane: ControlPlane, env: dict[str, str]
) -> contextlib.AbstractContextManager[None]:
    config = plane.directory / "kube-proxy.json"
    config.write_text(configuration.kube_proxy(plane.kubeconfig))
    command = [str(programs["kube-proxy"]), f"--config={config}"]
    # Its health depends on the node, which comes later.
    return run_process("kube-proxy", command, plane.directory, lambda: True, env)


def _kubelet(
    programs: dict[str, Path], plane: ControlPlane, env: dict[str, str]
) -> contextlib.AbstractContextManager[None]:
    config = plane.directory / "kubelet.json"
    config.write_text(configuration.kubelet(plane.directory))
    command = [
        *(str(programs["kubelet"]), f"--config={config}", f"--kubeconfig={plane.kubeconfig}"),
        *(f"--root-dir={plane.directory}/kubelet", f"--cert-dir={plane.directory}/kubelet-pki"),
        *(f"--hostname-override={configuration.NAME}", f"--node-ip={ADVERTISED}"),
    ]
    ready = "http://127.0.0.1:10248/healthz"
    return run_process("kubelet", command, plane.directory, lambda: is_ok(ready), env)


@contextlib.contextmanager
def _names(plane: ControlPlane, directory: Path, env: dict[str, str]) -> Iterator[None]:
    """The DNS of the cluster: dnsmasq, and a thread that tells it of the services that there are."""
    hosts = directory / "hosts"
    hosts.touch()
    command = [
        *("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=root"),
        *("--no-resolv", "--no-hosts", f"--addn-hosts={hosts}", "--local=/cluster.local/"),
        *(f"--listen-address={ADVERTISED}", "--bind-interfaces"),
    ]
    ended = threading.Event()
    server = subprocess.Popen(command, env=env)

    def follow() -> None:
        while not ended.wait(LOOK_S):
            text = _hosts(plane)
            if text != hosts.read_text():
                hosts.write_text(text)
                server.send_signal(signal.SIGHUP)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        server.kill()
        server.wait()


def _hosts(plane: ControlPlane) -> str:
    """A hosts file with the name of each service that has an address."""
    request = urllib.request.Request(
        f"{plane.server}/api/v1/services", headers={"Authorization": f"Bearer {plane.token}"}
    )
    with urllib.request.urlopen(request, timeout=10, context=plane.context()) as answer:
        services: list[dict[str, Any]] = json.load(answer)["items"]
    return "".join(
        f"{each['spec']['clusterIP']} "
        f"{each['metadata']['name']}.{each['metadata']['namespace']}.svc.cluster.local\n"
        for each in services
        if each["spec"].get("clusterIP") not in (None, "", "None")
    )
