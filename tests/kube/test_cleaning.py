"""Goal: the Job that deletes the state of a deleted StreamJob reaches the storage as its coordinator did.

Method: the very object that the operator makes, in a namespace of restricted pods, with headgate's own
command in the pod: the state is on a volume claim, and on an S3 server whose keys are in a Secret.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from headgate.k8s import objects
from headgate.k8s.objects import Deployment, Settings
from headgate.k8s.pods import state_cleaning_job
from headgate.k8s.spec import Job, parse_job
from headgate.k8s.status import Run, Start
from headgate.testing.servers import versitygw
from headgate.tests.k8s.conftest import RESOURCE
from headgate.tests.k8s.test_delete_state import OTHERS, begun, files
from headgate.tests.k8s.test_delete_state_s3 import KEPT, bucket, options_of
from headgate.tests.k8s.test_delete_state_s3 import begun as begun_s3
from headgate.tests.k8s.test_delete_state_s3 import files as files_s3
from headgate.tests.kube.pods import secret
from headgate.tests.kube.test_install import definitions
from headgate.tests.support.kube.cluster import Cluster, CommandError

Object = dict[str, Any]
CLEAN = "flights-clean"
__all__ = ["bucket", "definitions"]


def accepted(
    cluster: Cluster, namespace: str, address: str, options: Object, **kubernetes: Any
) -> Deployment:
    """A StreamJob in the API server, and its first run. Its manifest is there, too."""
    made = copy.deepcopy(RESOURCE)
    made["metadata"] = {"name": "flights"}
    made["spec"] |= {"checkpoint": {"every": "10s", "storage": address}, "options": options}
    made["spec"]["kubernetes"] = {"image": "headgate:1", **kubernetes}
    cluster.apply(made, namespace=namespace)
    found = cluster.get("sj", "flights", "-n", namespace)
    job = parse_job(found)
    assert isinstance(job, Job), job
    run = Run(1, job.revision, 1, Start("Latest"), "2026-01-01T00:00:00Z")
    of = Deployment("flights", namespace, found["metadata"]["uid"], job, run, Settings())
    cluster.apply(objects.manifest(of), namespace=namespace)
    return of


def clean(cluster: Cluster, of: Deployment) -> str:
    """Return the output of the Job that deletes the state; its pod must be restricted and succeed."""
    cluster.apply(state_cleaning_job(of, CLEAN), namespace=of.namespace)
    try:
        cluster.wait(of.namespace, "condition=Complete", f"job/{CLEAN}")
    except CommandError as error:
        said = cluster.kubectl("logs", f"job/{CLEAN}", "-n", of.namespace)
        raise AssertionError(f"{error}\n{said}") from None
    (pod,) = cluster.get("pods", "-n", of.namespace, "-l", f"job-name={CLEAN}")["items"]
    mounted = [m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]]
    assert not any(path.startswith("/var/run/secrets") for path in mounted)
    return cluster.kubectl("logs", f"job/{CLEAN}", "-n", of.namespace)


def test_state_on_a_volume_goes(cluster: Cluster, namespace: str, definitions: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "state"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "",
        },
    }
    cluster.apply(claim, namespace=namespace)
    cluster.wait(namespace, "jsonpath={.status.phase}=Bound", "pvc/state")
    volume = cluster.get("pvc", "state", "-n", namespace)["spec"]["volumeName"]
    directory = Path(cluster.get("pv", volume)["spec"]["hostPath"]["path"])
    template = {
        "spec": {
            "volumes": [{"name": "state", "persistentVolumeClaim": {"claimName": "state"}}],
            "containers": [
                {"name": "headgate", "volumeMounts": [{"name": "state", "mountPath": "/state"}]}
            ],
        }
    }
    pods = {"podTemplate": template}
    of = accepted(cluster, namespace, "/state", {}, coordinator=pods, workers=pods)
    asyncio.run(begun(str(directory), f"{of.uid}-1"))
    _give_to_the_pods(directory)
    assert "deleted" in clean(cluster, of)
    assert files(directory / "flights") == set(OTHERS)


def _give_to_the_pods(directory: Path) -> None:
    """Do the same as `fsGroup` does to a volume in a cluster."""
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)


def outside(endpoint: str) -> Object:
    """The Service `s3`, which leads to a server of this machine."""
    port = endpoint.rpartition(":")[2]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s3", "annotations": {"headgate.test/port": port}},
        "spec": {"ports": [{"port": 80}]},
    }


@pytest.mark.parametrize("bucket", ["versitygw"], indirect=True)
def test_state_in_s3_goes_with_the_keys_of_the_secret(
    cluster: Cluster, namespace: str, definitions: str, bucket: tuple[str, dict[str, str]]
) -> None:
    """The address of the server is a variable, as in a manifest for several clusters."""
    name, options = bucket
    keys = secret(
        "bucket", AWS_ACCESS_KEY_ID=versitygw.ACCESS, AWS_SECRET_ACCESS_KEY=versitygw.SECRET
    )
    cluster.apply(outside(options["s3.endpoint"]), keys, namespace=namespace)
    of = accepted(
        cluster,
        namespace,
        f"s3://{name}/x",
        options_of("http://${S3_HOST}"),
        env={"S3_HOST": f"s3.{namespace}.svc"},
        storage={"credentialsSecretRef": {"name": "bucket"}},
    )
    asyncio.run(begun_s3(name, options, f"{of.uid}-1"))
    assert "deleted" in clean(cluster, of)
    assert asyncio.run(files_s3(name, options)) == set(KEPT)
