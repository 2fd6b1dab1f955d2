"""Goal: pods listen only on documented ports, and give strangers no information.

Method: every TCP port from 1 to 65535 of the pod is tried from another pod, and its sockets are listed from
inside. The nodes of these tests have no network policies, so a pod sees all that listens.
"""

from __future__ import annotations

import json
from typing import Any

from headgate.tests.kube.pods import container, pod
from headgate.tests.kube.test_install import definitions
from headgate.tests.kube.test_rights import Installed, installed
from headgate.tests.support.kube.cluster import Cluster

Object = dict[str, Any]
__all__ = ["definitions", "installed"]
SCAN = """
import errno, json, os, socket, sys

def is_open(host, port):
    with socket.socket() as one:
        one.settimeout(120)
        number = one.connect_ex((host, port))
    if number not in (0, errno.ECONNREFUSED):
        raise OSError(number, os.strerror(number), f"port {port}")
    return number == 0

print(json.dumps([port for port in range(1, 65536) if is_open(sys.argv[1], port)]))
"""
"""Prints the ports of a host that take connections. A port that does not answer at all is an error."""
ASK = """
import http.client, json, sys
host, port, *paths = sys.argv[1:]
found = {}
for path in paths:
    for method in ("GET", "POST", "PUT", "DELETE"):
        try:
            connection = http.client.HTTPConnection(host, int(port), timeout=120)
            connection.request(method, path)
            answer = connection.getresponse()
            answer.read()
            found[f"{method} {path}"] = answer.status
        except Exception as error:
            found[f"{method} {path}"] = type(error).__name__
print(json.dumps(found))
"""
"""Prints the answer to each method and path, without a token."""
PATHS = (
    *("/", "/healthz", "/readyz", "/metrics", "/debug/pprof/", "/debug/vars", "/config", "/logs"),
    *("/api", "/v1/job", "/v1/openapi.json", "/../etc/passwd", "/%2e%2e/etc/passwd", "/apis/x"),
)


def scanner(cluster: Cluster, namespace: str) -> str:
    """A pod from which others are looked at."""
    cluster.apply(pod("scanner", container("sleep", "infinity")), namespace=namespace)
    cluster.wait(namespace, "condition=Ready", "pod/scanner")
    return "scanner"


def listening(cluster: Cluster, namespace: str, name: str) -> set[int]:
    """Return the TCP ports of a pod that take connections at the address of the pod."""
    address = cluster.get("pod", name, "-n", namespace)["status"]["podIP"]
    said = cluster.inside(namespace, "scanner", "python", "-c", SCAN, address)
    return set(json.loads(said))


def asked(cluster: Cluster, namespace: str, name: str, port: int) -> dict[str, Any]:
    address = cluster.get("pod", name, "-n", namespace)["status"]["podIP"]
    answers: dict[str, Any] = json.loads(
        cluster.inside(namespace, "scanner", "python", "-c", ASK, address, str(port), *PATHS)
    )
    return answers


def sockets(cluster: Cluster, namespace: str, name: str) -> set[tuple[str, str]]:
    """Return protocol and address of all listening sockets in a pod, with loopback and all UDP sockets."""
    found = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        lines = cluster.inside(namespace, name, "cat", f"/proc/net/{protocol}").splitlines()[1:]
        for line in lines:
            _, local, _, state, *_ = line.split()
            if protocol.startswith("udp") or state == "0A":
                address, _, port = local.partition(":")
                found.add((protocol, f"{address}:{int(port, 16)}"))
    return found


def test_the_operator_answers_probes_and_metrics_and_nothing_else(installed: Installed) -> None:
    cluster, namespace = installed.cluster, installed.namespace
    scanner(cluster, namespace)
    selector = ("-l", "app.kubernetes.io/component=operator")
    (operator,) = cluster.get("pods", "-n", namespace, *selector)["items"]
    name = operator["metadata"]["name"]
    declared = {each["containerPort"] for each in operator["spec"]["containers"][0]["ports"]}
    assert listening(cluster, namespace, name) == declared == {8080, 8081}
    # Nothing hides on loopback either: what is in the pod listens on its address only.
    inside = sockets(cluster, namespace, name)
    assert {each.rpartition(":")[2] for _, each in inside} == {"8080", "8081"}
    assert not any(protocol.startswith("udp") for protocol, _ in inside)
    for port, open_ in ((8081, {"/healthz", "/readyz"}), (8080, {"/metrics"})):
        answers = asked(cluster, namespace, name, port)
        assert {each for each, status in answers.items() if status == 200} == {
            f"GET {path}" for path in open_
        }
        assert {answers[each] for each in answers if answers[each] != 200} <= {404, 405}
