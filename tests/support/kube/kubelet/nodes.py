"""Nodes, and the scheduling of pods onto them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from headgate.tests.support.kube.kubelet.api import Api, ApiError
from headgate.tests.support.kube.kubelet.spec import quantity, requests

Object = dict[str, Any]
LEASE_S = 40
PODS_MAX = 110
IGNORED_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""A node that is served here is ready; these taints only lag behind."""


@dataclass(frozen=True)
class Capacity:
    """The resources of each node."""

    cpu: str = "8"
    memory: str = "32Gi"

    def resources(self) -> Object:
        return {"cpu": self.cpu, "memory": self.memory, "pods": str(PODS_MAX)}


async def register(api: Api, name: str, capacity: Capacity, log_port: int) -> None:
    """Make the node, or take over the one that is there, and report it ready."""
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/zone": f"zone-of-{name}",
    }
    metadata = {"name": name, "labels": labels}
    await _unless_there(api, "/api/v1/nodes", {"metadata": metadata})
    await api.patch(f"/api/v1/nodes/{name}/status", {"status": _status(name, capacity, log_port)})
    lease = {"metadata": {"name": name}, "spec": _lease(name)}
    await _unless_there(
        api, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease
    )


async def renew(api: Api, name: str) -> None:
    """The heartbeat of a node."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}"
    await api.patch(path, {"spec": _lease(name)})


async def _unless_there(api: Api, path: str, body: Object) -> None:
    try:
        await api.post(path, body)
    except ApiError as error:
        if error.status != 409:
            raise


def _lease(name: str) -> Object:
    at = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"holderIdentity": name, "leaseDurationSeconds": LEASE_S, "renewTime": at}


def _status(name: str, capacity: Capacity, log_port: int) -> Object:
    at = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "processes"}
    about = ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "kubeProxyVersion")
    return {
        "capacity": capacity.resources(),
        "allocatable": capacity.resources(),
        "addresses": [
            {"type": "InternalIP", "address": "127.0.0.1"},
            {"type": "Hostname", "address": name},
        ],
        "conditions": [{**ready, "lastHeartbeatTime": at, "lastTransitionTime": at}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": log_port}},
        "nodeInfo": {
            **dict.fromkeys(about, ""),
            "containerRuntimeVersion": "process://1",
            "kubeletVersion": "v1.34.2",
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
    }


def choose(pod: Object, nodes: list[Object], bound: list[Object]) -> tuple[str | None, str]:
    """The node for a pod, the one with the fewest pods of those that can take it; or why there is none."""
    reasons: dict[str, int] = {}
    fitting: list[tuple[int, str]] = []
    for node in nodes:
        name = node["metadata"]["name"]
        there = [p for p in bound if p["spec"].get("nodeName") == name and _runs(p)]
        problem = _problem(pod, node, there)
        if problem:
            reasons[problem] = reasons.get(problem, 0) + 1
        else:
            fitting.append((len(there), name))
    if fitting:
        return min(fitting)[1], ""
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return None, f"0/{len(nodes)} nodes are available: {why}."


def _runs(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def _problem(pod: Object, node: Object, there: list[Object]) -> str:
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    taints = [t for t in node["spec"].get("taints", []) if t["key"] not in IGNORED_TAINTS]
    if any(t["effect"] != "PreferNoSchedule" and not _tolerated(t, pod) for t in taints):
        return "node(s) had untolerated taints"
    labels = node["metadata"].get("labels", {})
    if any(labels.get(k) != v for k, v in pod["spec"].get("nodeSelector", {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    asked = [requests(pod), *map(requests, there)]
    for kind in ("cpu", "memory"):
        if sum(one[kind] for one in asked) > quantity(node["status"]["allocatable"][kind]):
            return f"Insufficient {kind}"
    return ""


def _tolerated(taint: Object, pod: Object) -> bool:
    return any(
        toleration.get("key") in (None, taint["key"])
        and toleration.get("effect") in (None, "", taint["effect"])
        and (
            toleration.get("operator") == "Exists"
            or toleration.get("value", "") == taint.get("value", "")
        )
        for toleration in pod["spec"].get("tolerations", [])
    )
