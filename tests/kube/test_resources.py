"""Goal: a real API server accepts the resource definitions, and the operator's objects of a StreamJob.

It checks what no test without it can: whether the schemas are structural, what CEL says, and every field of
the objects, which is refused if it is unknown (`--validate=strict`).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headgate.k8s import objects
from headgate.k8s.modes import MODES, pod_makers
from headgate.k8s.objects import Deployment, Settings
from headgate.k8s.pods import runtime_of, savepoint_cleaning_job, state_cleaning_job
from headgate.k8s.spec import Job, parse_job
from headgate.k8s.status import Run, Start
from headgate.tests.k8s.conftest import RESOURCE
from headgate.tests.kube.charts import CRDS
from headgate.tests.support.kube.cluster import Cluster, CommandError

EXAMPLES = sorted((CRDS.parents[1] / "k8s" / "examples").glob("*.yaml"))
STRICT = ("apply", "--server-side", "--validate=strict", "-f", "-")
Object = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def definitions(api_server: Cluster) -> None:
    files = str(CRDS / "templates")
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", files)
    for name in ("streamjobs", "streamsnapshots"):
        api_server.established(f"{name}.headgate.io")
        # A schema that is not structural is taken, with this condition, and then not used.
        conditions = api_server.get("crd", f"{name}.headgate.io")["status"]["conditions"]
        assert [each for each in conditions if each["type"] == "NonStructuralSchema"] == []


def stream_job(name: str = "flights", **kubernetes: Any) -> Object:
    made = copy.deepcopy(RESOURCE)
    made["metadata"] = {"name": name}
    made["spec"]["kubernetes"] = {"image": "headgate:1", **kubernetes}
    return made


def apply(cluster: Cluster, made: Object, namespace: str, *arguments: str) -> str:
    return cluster.kubectl(*STRICT, "-n", namespace, *arguments, stdin=json.dumps(made))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_taken(api_server: Cluster, namespace: str, path: Path) -> None:
    taken = api_server.kubectl(*STRICT[:-1], str(path), "--dry-run=server", "-n", namespace)
    assert "streamjob" in taken
    for made in yaml.safe_load_all(path.read_text()):
        if made["kind"] == "StreamJob":
            identity = {"namespace": namespace, "uid": "u", "generation": 1}
            assert isinstance(parse_job({**made, "metadata": made["metadata"] | identity}), Job)


def test_a_stream_job_is_taken_listed_and_scaled(api_server: Cluster, namespace: str) -> None:
    apply(api_server, stream_job(), namespace)
    status = {"phase": "Running", "parallelism": {"current": 3}, "selector": "a=b"}
    status["conditions"] = [
        {"type": "Ready", "status": "True", "reason": "Running", "message": "",
         "lastTransitionTime": "2026-01-01T00:00:00.123Z", "observedGeneration": 1}
    ]  # fmt: skip
    patch = json.dumps({"status": status})
    command = ("patch", "sj", "flights", "-n", namespace, "--type=merge", "-p")
    api_server.kubectl(*command, patch, "--subresource=status")
    api_server.kubectl("wait", "-n", namespace, "--for=condition=Ready", "sj/flights")
    listed = api_server.kubectl("get", "sj", "-n", namespace)
    header, row = listed.splitlines()
    assert header.split() == [
        "NAME",
        "PHASE",
        "READY",
        "PARALLELISM",
        "CHECKPOINT",
        "RESTARTS",
        "AGE",
    ]
    assert row.split()[:4] == ["flights", "Running", "True", "3"]
    api_server.kubectl("scale", "sj/flights", "-n", namespace, "--replicas=5")
    found = api_server.get("sj", "flights", "-n", namespace)
    assert found["spec"]["parallelism"] == 5
    assert found["metadata"]["generation"] == 2
    assert found["spec"]["sources"] == RESOURCE["spec"]["sources"]
    explained = api_server.kubectl("explain", "streamjob.spec.kubernetes.upgrade.fallback")
    assert "use the last completed checkpoint (default)" in " ".join(explained.split())


@pytest.mark.parametrize(
    ("kubernetes", "spec", "said"),
    [
        ({"restore": {"nonce": 1}}, {}, "restore needs path or snapshotRef"),
        ({"code": {}}, {}, "code needs configMapRef or archive"),
        ({"ray": {"mode": "External"}}, {}, "ray.address belongs to mode External"),
        ({"ray": {"version": "2.60"}}, {}, "ray.version belongs to mode KubeRay"),
        ({}, {"maxParallelism": 2}, "parallelism must not be larger than maxParallelism"),
        ({}, {"parallelism": 0}, "should be greater than or equal to 1"),
        ({"state": "Paused"}, {}, 'supported values: "Running", "Suspended"'),
        ({"imagge": "x"}, {}, "imagge"),
        ({"workers": {"resources": {"requests": {"cpu": True}}}}, {}, "cpu"),
    ],
)
def test_a_mistake_is_refused(
    api_server: Cluster, namespace: str, kubernetes: Any, spec: Any, said: str
) -> None:
    made = stream_job(**kubernetes)
    made["spec"] |= spec
    with pytest.raises(CommandError, match=said):
        apply(api_server, made, namespace)


def test_the_name_leaves_room_for_those_of_its_objects(api_server: Cluster, namespace: str) -> None:
    with pytest.raises(CommandError, match="at most 45 characters"):
        apply(api_server, stream_job("x" * 46), namespace)
    apply(api_server, stream_job("x" * 45), namespace)


def test_a_snapshot_cannot_change_its_job(api_server: Cluster, namespace: str) -> None:
    made = {
        "apiVersion": "headgate.io/v1alpha1",
        "kind": "StreamSnapshot",
        "metadata": {"name": "monday"},
        "spec": {"jobRef": {"name": "flights"}, "deletionPolicy": "Delete"},
    }
    apply(api_server, made, namespace)
    changed = {**made, "spec": {"jobRef": {"name": "other"}}}
    with pytest.raises(CommandError, match="a snapshot cannot change its job"):
        apply(api_server, changed, namespace)
    with pytest.raises(CommandError, match="a checkpoint belongs to its job"):
        apply(api_server, {**made, "spec": {**made["spec"], "type": "Checkpoint"}}, namespace)


FULL: Object = {
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "default",
    "env": {"LEVEL": "3", "PASSWORD": {"name": "broker", "key": "password"}},
    "code": {"configMapRef": {"name": "steps"}},
    "storage": {"credentialsSecretRef": {"name": "bucket"}},
    "workers": {"slots": 2, "resources": {"requests": {"cpu": "1.5"}, "limits": {"cpu": 2}}},
    "restore": {"path": "s3://bucket/savepoint"},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_object_of_a_job_is_taken(
    api_server: Cluster, namespace: str, mode: str, request: pytest.FixtureRequest
) -> None:
    """The namespace requires restricted pods; a warning would show an object with other pods."""
    if mode == "KubeRay":
        request.getfixturevalue("kuberay")
    address = {"address": "ray.other:6379"} if mode == "External" else {}
    resource = stream_job(**FULL, ray={"mode": mode, **address})
    apply(api_server, resource, namespace)
    found = api_server.get("sj", "flights", "-n", namespace)
    job = parse_job(found)
    assert isinstance(job, Job), job
    run = Run(1, job.revision, 3, Start("Path", "s3://bucket/savepoint"), "2026-01-01T00:00:00Z")
    settings = Settings(metrics_from={"kubernetes.io/metadata.name": "monitoring"})
    uid = found["metadata"]["uid"]
    of = Deployment("flights", namespace, uid, job, run, settings)
    owner, runtime = objects.owner("flights", uid), runtime_of(job, settings)
    made = [
        objects.manifest(of),
        objects.token(of),
        *objects.supporting(of),
        *pod_makers(of),
        state_cleaning_job(of, "flights-clean"),
        savepoint_cleaning_job("x", namespace, "flights", owner, runtime, "s3://bucket/savepoint"),
    ]
    for each in made:
        apply(api_server, each, namespace, "--warnings-as-errors")
        api_server.get(each["kind"], each["metadata"]["name"], "-n", namespace)
    assert len(made) == {"Managed": 9, "External": 7, "KubeRay": 8}[mode]
