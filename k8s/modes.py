"""Who makes the Ray cluster: one function per `ray.mode`, from a run to the objects that make its pods."""

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
"""The objects that make pods, the one with the head first."""
OWN_COMMANDS: Final = "ray.io/overwrite-container-cmd"
"""Annotation: KubeRay leaves the commands of containers as they are."""


def managed(deployment: Deployment) -> list[dict[str, Any]]:
    """A StatefulSet with Ray's head and the coordinator, and a Deployment of workers for each group."""
    groups = deployment.job.groups.values()
    return [_head(deployment), *(_workers(deployment, group) for group in groups)]


def external(deployment: Deployment) -> list[dict[str, Any]]:
    """One pod that joins a Ray cluster of somebody else; workers run on the nodes of that cluster."""
    return [_head(deployment, deployment.job.kubernetes.ray.address or "")]


def kuberay(deployment: Deployment) -> list[dict[str, Any]]:
    """A RayCluster, and one pod that joins it."""
    name = ray_name(deployment.name)
    return [
        _head(deployment, f"{ray_head_service(name)}:{ports.RAY_GCS.number}"),
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
    spec: dict[str, Any] = {
        "replicas": 1,
        "serviceName": head_name(deployment.name),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selector(deployment.name, HEAD)},
        "template": head_pod(deployment, ray_address),
    }
    if deployment.job.kubernetes.ray.gcs_storage.type == "RocksDB":
        spec["volumeClaimTemplates"] = [_gcs_claim(deployment)]
        # A new run has no use for what Ray knew of the nodes and actors of the one before.
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
    """The volume of Ray's control store; only one head at a time has it open."""
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
            # Pods of one run only: a new run has a new Deployment.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": deployment.workers_selector(group.name)},
            "template": worker_pod(deployment, group),
        },
    )


def _ray_cluster(deployment: Deployment, name: str) -> dict[str, Any]:
    """The head of Ray, and the same workers as in a cluster of ours, in pods that KubeRay makes.

    KubeRay leaves the commands and the probes to us. With its own ones the ports would not be those of the
    table, workers could not leave in good order, and probes would need more than is in the image.
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
    """The Service that KubeRay makes for the head of a RayCluster."""
    return f"{ray_cluster}-head-svc"


def _ray_head_pod(deployment: Deployment) -> dict[str, Any]:
    """The pod with Ray's head alone. It has the resources and the template of the coordinator's pod."""
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
    # The Service of the job leads to the pod with the coordinator, which is another one.
    del template["metadata"]["labels"][ROLE]
    return template


def with_replicas(
    groups: Sequence[Mapping[str, Any]], replicas: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The worker groups of a RayCluster with other replicas.

    Args:
        groups: all of them, as a list is written as a whole.
        replicas: by name of a slot sharing group; none for a group that the job does not have.
    """
    return [{**group, **_amount(replicas.get(group["groupName"], 0))} for group in groups]


def _amount(replicas: int) -> dict[str, int]:
    return {"replicas": replicas, "minReplicas": replicas, "maxReplicas": replicas}


def workers_of(child: Mapping[str, Any]) -> int:
    """How many workers an object is to make."""
    if child["kind"] == "Deployment":
        return int(child["spec"].get("replicas", 0))
    groups = child["spec"]["workerGroupSpecs"] if child["kind"] == "RayCluster" else ()
    return sum(group.get("replicas", 0) for group in groups)
