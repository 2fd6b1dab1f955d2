"""Goal: a Ray cluster runs in pods as restricted as those of a job, with the same fixed ports in each.

Method: a head and workers as Ray's own command starts them, on the process kubelet. This does not
test the operator, but the environment that jobs need.
"""

from __future__ import annotations

from headgate.k8s.ports import RAY_GCS
from headgate.tests.kube.pods import stateful_set
from headgate.tests.kube.rays import HEAD, LISTENS, SERVICE, ray_pod
from headgate.tests.support.kube.cluster import Cluster


def test_a_head_and_its_workers_in_pods(cluster: Cluster, namespace: str) -> None:
    cluster.apply(
        SERVICE,
        stateful_set("head", 1, ray_pod(*HEAD, readinessProbe=LISTENS)),
        namespace=namespace,
    )
    cluster.wait(namespace, "jsonpath={.status.readyReplicas}=1", "statefulset/head")
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
