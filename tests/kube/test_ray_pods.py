"""Goal: a Ray cluster runs in pods as restricted as those of a job, with the same fixed ports in each.

Method: a head and workers as Ray's own command starts them, on the process kubelet. This is not about the
operator: it says that what jobs need is there.
"""

from __future__ import annotations

from typing import Any

from headgate.k8s.ports import RAY_GCS, RAY_NODE, RAY_OBJECTS, RAY_WORKERS
from headgate.tests.kube.pods import container, pod_spec, stateful_set
from headgate.tests.support.kube.cluster import Cluster

Object = dict[str, Any]
PORTS = (
    f"--node-manager-port={RAY_NODE.number}",
    f"--object-manager-port={RAY_OBJECTS.number}",
    f"--min-worker-port={RAY_WORKERS.number}",
    f"--max-worker-port={RAY_WORKERS.last}",
)
START = ("ray", "start", "--block", "--node-ip-address=$(POD_IP)", "--object-store-memory=80000000")
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


def ray_pod(*arguments: str, **more: Any) -> Object:
    one = container(
        *(*START, *PORTS, *arguments),
        env=[
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOME", "value": "/tmp"},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
        ],
        ports=[{"containerPort": RAY_GCS.number}],
        volumeMounts=[
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        **more,
    )
    volumes = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return pod_spec(one, volumes=volumes, automountServiceAccountToken=False)


def test_a_head_and_its_workers_in_pods(cluster: Cluster, namespace: str) -> None:
    listens = {"tcpSocket": {"port": RAY_GCS.number}, "periodSeconds": 1, "timeoutSeconds": 5}
    head = ("--head", f"--port={RAY_GCS.number}", "--num-cpus=0", "--include-dashboard=false")
    cluster.apply(
        SERVICE,
        stateful_set("head", 1, ray_pod(*head, readinessProbe=listens)),
        namespace=namespace,
    )
    cluster.wait(namespace, "jsonpath={.status.readyReplicas}=1", "statefulset/head", seconds=120)
    # The service's variable, as workers have no names of services to rely on.
    worker = ray_pod(f"--address=$(HEAD_SERVICE_HOST):{RAY_GCS.number}", "--num-cpus=1")
    cluster.apply(stateful_set("worker", 2, worker), namespace=namespace)
    ask = (
        "import os, ray\n"
        f"ray.init(address=os.environ['POD_IP'] + ':{RAY_GCS.number}', log_to_driver=False)\n"
        "where = ray.remote(num_cpus=1)(lambda: os.environ['HOSTNAME'])\n"
        "there = set()\n"
        "while len(there) < 2:\n"
        "    there |= set(ray.get([where.options(scheduling_strategy='SPREAD').remote()"
        " for _ in range(4)]))\n"
        "print(*sorted(there))\n"
    )
    said = cluster.inside(namespace, "head-0", "python", "-c", ask)
    assert said.splitlines()[-1] == "worker-0 worker-1"
