"""The ways to make the Ray cluster of a job: a function for each `ray.mode`, from a run to its objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    labels,
    owned,
    ray_name,
    selector,
    workers_name,
)
from .pods import GCS_VOLUME, POD_IP_VARIABLE, PROBES, head_pod, worker_pod
from .ray_node import start_head
from .spec import WorkerGroup

Mode: TypeAlias = Callable[[Deployment], list[dict[str, Any]]]
"""The kinds of objects that make pods; the one with the head comes first."""
OWN_COMMANDS: Final = "ray.io/overwrite-container-cmd"
"""Annotation: KubeRay leaves the commands of containers as they are."""


def managed(deployment: Deployment) -> list[dict[str, Any]]:
    """Make a StatefulSet with Ray's head and the coordinator, and a Deployment for each worker group."""
    groups = deployment.job.groups.values()
    return [_head(deployment), *(_workers(deployment, group) for group in groups)]


def external(deployment: Deployment) -> list[dict[str, Any]]:
    """Make one pod that joins an existing Ray cluster; workers run on the nodes of that cluster."""
    return [_head(deployment, deployment.job.kubernetes.ray.address or "")]


def kuberay(deployment: Deployment) -> list[dict[str, Any]]:
    """Make a RayCluster, and one pod that joins it."""
    name = ray_name(deployment.name)
    return [
        _head(deployment, f"{ray_head_service(name)}:{ports.RAY_GCS.number}"),
        _ray_cluster(deployment, name),
    ]


MODES: Final[dict[str, Mode]] = {"Managed": managed, "External": external, "KubeRay": kuberay}


def pod_makers(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the objects that make the pods of this run. They have its revision and its number."""
    made = MODES[deployment.job.kubernetes.ray.mode](deployment)
    own = {REVISION: deployment.run.revision, RUN: deployment.run_id}
    for each in made:
        each["metadata"]["annotations"] |= own
    return made


def _head(deployment: Deployment, ray_address: str = "") -> dict[str, Any]:
    spec: dict[str, Any] = {
        "replicas": 1,
        "serviceName": head_name(deployment.name),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selector(deployment.name, HEAD)},
        "template": head_pod(deployment, ray_address),
    }
    if deployment.job.kubernetes.ray.gcs_storage.type == "RocksDB":
        spec["volumeClaimTemplates"] = [_gcs_claim(deployment)]
        # A new run does not need the nodes and actors of the former run in Ray's control store.
        spec["persistentVolumeClaimRetentionPolicy"] = {
            "whenDeleted": "Delete",
            "whenScaled": "Delete",
        }
    return owned(
        deployment,
        "apps/v1",
        "StatefulSet",
        head_name(deployment.name),
        role=HEAD,
        spec=spec,
    )


def _gcs_claim(deployment: Deployment) -> dict[str, Any]:
    """Return the claim of the volume of Ray's control store, which only one head at a time has open."""
    storage = deployment.job.kubernetes.ray.gcs_storage
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": storage.size}},
    }
    if storage.storage_class_name:
        spec["storageClassName"] = storage.storage_class_name
    metadata = {"name": GCS_VOLUME, "labels": labels(deployment.name, HEAD)}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _workers(deployment: Deployment, group: WorkerGroup) -> dict[str, Any]:
    return owned(
        deployment,
        "apps/v1",
        "Deployment",
        workers_name(deployment.name, group.name),
        role=WORKER,
        spec={
            "replicas": group.needed(deployment.run.parallelism),
            # It has pods of one run only: a new run has a new Deployment.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": deployment.workers_selector(group.name)},
            "template": worker_pod(deployment, group),
        },
    )


def _ray_cluster(deployment: Deployment, name: str) -> dict[str, Any]:
    """Return a RayCluster: Ray's head, and the same workers as with `Managed`, in pods made by KubeRay.

    KubeRay uses our commands and probes. With its own ones the ports would not be those of the table,
    workers could not leave in good order, and probes would need programs that the image does not have.
    """
    spec: dict[str, Any] = {
        "enableInTreeAutoscaling": False,
        # Our pods have the token of the job in a file. KubeRay would put it into a variable, and only if it
        # knows the version of Ray.
        "authOptions": {"mode": "disabled"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": _ray_head_pod(deployment),
        },
        "workerGroupSpecs": [
            _ray_group(deployment, group, ray_head_service(name))
            for group in deployment.job.groups.values()
        ],
    }
    if deployment.job.kubernetes.ray.version:
        spec["rayVersion"] = deployment.job.kubernetes.ray.version
    made = owned(deployment, "ray.io/v1", "RayCluster", name, spec=spec)
    made["metadata"]["annotations"][OWN_COMMANDS] = "true"
    return made


def _ray_group(deployment: Deployment, group: WorkerGroup, ray_head: str) -> dict[str, Any]:
    return {
        "groupName": group.name,
        **_amount(group.needed(deployment.run.parallelism)),
        "rayStartParams": {"num-cpus": "0"},
        "template": worker_pod(deployment, group, ray_head),
    }


def ray_head_service(ray_cluster: str) -> str:
    """Return the name of the Service that KubeRay makes for the head of a RayCluster."""
    return f"{ray_cluster}-head-svc"


def _ray_head_pod(deployment: Deployment) -> dict[str, Any]:
    """Return the pod of Ray's head alone, with the resources and the template of the coordinator's pod."""
    template = head_pod(deployment)
    container = template["spec"]["containers"][0]
    listens = {"tcpSocket": {"port": ports.RAY_GCS.number}}
    container |= {
        "command": start_head(f"$({POD_IP_VARIABLE})"),
        # KubeRay's Service has the ports of this list.
        "ports": [{"name": "gcs-server", "containerPort": ports.RAY_GCS.number}],
        **{name: container[name] | listens for name in PROBES},
    }
    for name in PROBES:
        container[name].pop("httpGet")
    # The Service of the job leads to another pod, the one with the coordinator.
    del template["metadata"]["labels"][ROLE]
    return template


def with_replicas(
    groups: Sequence[Mapping[str, Any]], replicas: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the worker groups of a RayCluster with other replicas.

    Args:
        groups: all groups, because the list is written as a whole.
        replicas: by name of a slot sharing group; none for a group that the job does not have.
    """
    return [{**group, **_amount(replicas.get(group["groupName"], 0))} for group in groups]


def _amount(replicas: int) -> dict[str, int]:
    return {"replicas": replicas, "minReplicas": replicas, "maxReplicas": replicas}


def workers_of(child: Mapping[str, Any]) -> int:
    """Return the number of workers that an object should make."""
    if child["kind"] == "Deployment":
        return int(child["spec"].get("replicas", 0))
    groups = child["spec"]["workerGroupSpecs"] if child["kind"] == "RayCluster" else ()
    return sum(group.get("replicas", 0) for group in groups)
