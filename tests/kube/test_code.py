"""Goal: the code that `kubernetes.code` names is on the module path of the pods of a job.

Method: the pod of a worker as the operator makes it, restricted, but with a command that imports the code.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate.k8s.objects import Deployment
from headgate.k8s.pods import worker_pod
from headgate.runtime.storage.open_store import open_store_at
from headgate.testing.servers import versitygw
from headgate.tests.k8s.test_code import PACKAGE, zipped
from headgate.tests.k8s.test_delete_state_s3 import options_of
from headgate.tests.kube.pods import config_map, secret
from headgate.tests.kube.test_cleaning import accepted, bucket, outside
from headgate.tests.kube.test_install import definitions
from headgate.tests.support.kube.cluster import Cluster

Object = dict[str, Any]
__all__ = ["bucket", "definitions"]


def said(cluster: Cluster, of: Deployment, ask: str) -> str:
    """Return the output of Python in a pod of a worker."""
    cluster.apply(secret(of.token_secret, auth_token="x"), namespace=of.namespace)
    template = worker_pod(of, of.job.groups["default"])
    (container,) = template["spec"]["containers"]
    dropped = ("startupProbe", "livenessProbe", "readinessProbe")
    plain = {name: value for name, value in container.items() if name not in dropped}
    spec = template["spec"] | {"restartPolicy": "Never"}
    spec["containers"] = [plain | {"command": ["python", "-c", ask]}]
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
    cluster.apply(made, namespace=of.namespace)
    cluster.wait(of.namespace, "jsonpath={.status.phase}=Succeeded", "pod/one")
    return cluster.kubectl("logs", "one", "-c", "headgate", "-n", of.namespace)


def test_files_of_a_config_map(cluster: Cluster, namespace: str, definitions: str) -> None:
    cluster.apply(config_map("steps", **{"steps.py": "answer = 42"}), namespace=namespace)
    code = {"configMapRef": {"name": "steps"}}
    of = accepted(cluster, namespace, "s3://bucket/x", {}, code=code)
    assert said(cluster, of, "import steps; print(steps.answer)") == "42\n"


@pytest.mark.parametrize("bucket", ["versitygw"], indirect=True)
def test_a_zip_file_in_s3(
    cluster: Cluster, namespace: str, definitions: str, bucket: tuple[str, dict[str, str]]
) -> None:
    name, options = bucket

    async def upload() -> None:
        store = open_store_at(f"s3://{name}/code", options)
        await store.open(writable=False)
        await store.put("clicks-7.zip", zipped(PACKAGE))
        await store.close()

    asyncio.run(upload())
    keys = secret(
        "bucket", AWS_ACCESS_KEY_ID=versitygw.ACCESS, AWS_SECRET_ACCESS_KEY=versitygw.SECRET
    )
    cluster.apply(outside(options["s3.endpoint"]), keys, namespace=namespace)
    of = accepted(
        cluster,
        namespace,
        f"s3://{name}/x",
        options_of(f"http://s3.{namespace}.svc"),
        code={"archive": f"s3://{name}/code/clicks-7.zip"},
        storage={"credentialsSecretRef": {"name": "bucket"}},
    )
    assert said(cluster, of, "import clicks; print(clicks.answer)") == "42\n"
