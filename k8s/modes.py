"""Who makes the Ray cluster: one function per `ray.mode`, from a run to the objects that make its pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from . import ports
from .objects import (
    HEAD,
    REVISION,
    ROLE,
    RUN,
    WORKER,
    Deployment,
    head_name,
    owned,
    ray_name,
    selector,
    workers_name,
)
from .pods import head_pod, merged, worker_pod
from .ray_node import SLOT_RESOURCE

Mode: TypeAlias = Callable[[Deployment], list[dict[str, Any]]]
"""The objects that make pods, the one with the head first."""


def managed(deployment: Deployment) -> list[dict[str, Any]]:
    """A StatefulSet with Ray's head and the coordinator, and a Deployment of workers."""
    return [_head(deployment), _workers(deployment)]


def external(deployment: Deployment) -> list[dict[str, Any]]:
    """One pod that joins a Ray cluster of somebody else; workers run on the nodes of that cluster."""
    return [_head(deployment, deployment.job.kubernetes.ray.address or "")]


def kuberay(deployment: Deployment) -> list[dict[str, Any]]:
    """A RayCluster, and one pod that joins it."""
    name = ray_name(deployment.name)
    return [
        _head(deployment, f"{name}-head-svc:{ports.RAY_GCS.number}"),
        _ray_cluster(deployment, name),
    ]


MODES: Final[dict[str, Mode]] = {"Managed": managed, "External": external, "KubeRay": kuberay}


def pod_makers(deployment: Deployment) -> list[dict[str, Any]]:
    """The objects that make the pods of this run. They carry its revision and its number."""
    made = MODES[deployment.job.kubernetes.ray.mode](deployment)
    own = {REVISION: deployment.run.revision, RUN: deployment.run_id}
    for each in made:
        each["metadata"]["annotations"] |= own
    return made


def _head(deployment: Deployment, ray_address: str = "") -> dict[str, Any]:
    return owned(
        deployment,
        "apps/v1",
        "StatefulSet",
        head_name(deployment.name),
        role=HEAD,
        spec={
            "replicas": 1,
            "serviceName": head_name(deployment.name),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": selector(deployment.name, HEAD)},
            "template": head_pod(deployment, ray_address),
        },
    )


def _workers(deployment: Deployment) -> dict[str, Any]:
    return owned(
        deployment,
        "apps/v1",
        "Deployment",
        workers_name(deployment.name),
        role=WORKER,
        spec={
            "replicas": deployment.job.kubernetes.workers.needed(deployment.run.parallelism),
            # Pods of one run only: a new run has a new Deployment.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": selector(deployment.name, WORKER)},
            "template": worker_pod(deployment),
        },
    )


def _ray_cluster(deployment: Deployment, name: str) -> dict[str, Any]:
    """KubeRay starts Ray in these pods itself, so that they have no command and no probes of ours."""
    kubernetes = deployment.job.kubernetes
    replicas = kubernetes.workers.needed(deployment.run.parallelism)
    spec: dict[str, Any] = {
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token", "secretName": deployment.token_secret},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "include-dashboard": "false"},
            "template": _ray_pod(head_pod(deployment), "ray-head"),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": replicas,
                "minReplicas": replicas,
                "maxReplicas": replicas,
                "rayStartParams": {
                    "num-cpus": "0",
                    "resources": f'"{{\\"{SLOT_RESOURCE}\\": {kubernetes.workers.slots}}}"',
                },
                "template": _ray_pod(worker_pod(deployment), "ray-worker"),
            }
        ],
    }
    if kubernetes.ray.version:
        spec["rayVersion"] = kubernetes.ray.version
    return owned(deployment, "ray.io/v1", "RayCluster", name, spec=spec)


def _ray_pod(template: dict[str, Any], container_name: str) -> dict[str, Any]:
    """A template of ours as KubeRay wants it: another container name, without what it adds itself."""
    pod = merged(template, {})
    container, *others = pod["spec"]["containers"]
    dropped = ("command", "ports", "startupProbe", "livenessProbe", "readinessProbe")
    kept = {name: value for name, value in container.items() if name not in dropped}
    kept["env"] = [each for each in kept["env"] if not each["name"].startswith("RAY_AUTH")]
    spec = {name: value for name, value in pod["spec"].items() if name != "containers"}
    spec["containers"] = [kept | {"name": container_name}, *others]
    # The head of the Ray cluster is not the pod with the coordinator, which the Service leads to.
    labels = {name: value for name, value in pod["metadata"]["labels"].items() if name != ROLE}
    return {"metadata": {**pod["metadata"], "labels": labels}, "spec": spec}
