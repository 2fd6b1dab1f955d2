"""Pods of Ray that our operator does not make, and their processes."""

from __future__ import annotations

from typing import Any

from headgate.k8s.ports import RAY_GCS, RAY_NODE, RAY_OBJECTS, RAY_WORKERS
from headgate.k8s.ray_node import worker_processes
from headgate.tests.kube.pods import container, pod_spec, secret, stateful_set
from headgate.tests.support.kube.cluster import Cluster

Object = dict[str, Any]
PORTS = (
    f"--node-manager-port={RAY_NODE.number}",
    f"--object-manager-port={RAY_OBJECTS.number}",
    f"--min-worker-port={RAY_WORKERS.number}",
    f"--max-worker-port={RAY_WORKERS.last}",
)
START = ("ray", "start", "--block", "--node-ip-address=$(POD_IP)", "--object-store-memory=80000000")
HEAD = ("--head", f"--port={RAY_GCS.number}", "--num-cpus=0", "--include-dashboard=false")
SERVICE: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "head"},
    "spec": {
        "selector": {"app": "head"},
        "publishNotReadyAddresses": True,
        "ports": [{"port": RAY_GCS.number}],
    },
}
LISTENS = {"tcpSocket": {"port": RAY_GCS.number}, "periodSeconds": 1, "timeoutSeconds": 5}
TOKEN = "ray-token"
"""The Secret of a cluster that asks for a token."""
TOKEN_PATH = "/run/ray"
CLAIM_PATH = "/data"


def ray_pod(*arguments: str, token: bool = False, claim: str = "", **more: Any) -> Object:
    """Return a pod of Ray, as restricted as those of a job.

    Args:
        arguments: the arguments of `ray start`.
        token: True if it asks for the token of the Secret.
        claim: a volume claim that is mounted at `CLAIM_PATH`.
        more: more fields of the container.
    """
    volumes: list[Object] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    env: list[Object] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": "/tmp"},
        {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
    ]
    if token:
        volumes.append({"name": "token", "secret": {"secretName": TOKEN}})
        mounts.append({"name": "token", "mountPath": TOKEN_PATH})
        env.append({"name": "RAY_AUTH_MODE", "value": "token"})
        env.append({"name": "RAY_AUTH_TOKEN_PATH", "value": f"{TOKEN_PATH}/auth_token"})
    if claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "data", "mountPath": CLAIM_PATH})
    one = container(
        *(*START, *PORTS, *arguments),
        env=env,
        ports=[{"containerPort": RAY_GCS.number}],
        volumeMounts=mounts,
        **more,
    )
    user = {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001, "runAsNonRoot": True}
    security = {**user, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = pod_spec(one, volumes=volumes, automountServiceAccountToken=False)
    return {**pod, "securityContext": security}


def start_ray(cluster: Cluster, namespace: str, workers: int, claim: str) -> str:
    """Start a Ray that asks for a token, whose pods have the volume of a job. Return its address."""
    head = ray_pod(*HEAD, token=True, claim=claim, readinessProbe=LISTENS)
    cluster.apply(
        secret(TOKEN, auth_token="a-token-of-somebody-else-0123456789"),
        SERVICE,
        stateful_set("head", 1, head),
        namespace=namespace,
    )
    cluster.wait(namespace, "jsonpath={.status.readyReplicas}=1", "statefulset/head")
    worker = ray_pod(
        *(f"--address=$(HEAD_SERVICE_HOST):{RAY_GCS.number}", "--num-cpus=1"),
        token=True,
        claim=claim,
        readinessProbe={"tcpSocket": {"port": RAY_NODE.number}, "periodSeconds": 1},
    )
    workers_set = stateful_set("worker", workers, worker)
    workers_set["spec"]["podManagementPolicy"] = "Parallel"
    cluster.apply(workers_set, namespace=namespace)
    ready = f"jsonpath={{.status.readyReplicas}}={workers}"
    cluster.wait(namespace, ready, "statefulset/worker")
    return f"head.{namespace}.svc:{RAY_GCS.number}"


def hosted_workers(cluster: Cluster, namespace: str, pod: str) -> list[int]:
    """Return the processes of headgate's workers in a pod of Ray, as they are numbered on this machine."""
    return worker_processes(cluster.pid(namespace, pod))
