"""Reading resources: the section `kubernetes` in a local file and in the API server, and its mistakes."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import yaml

from headgate.api.job_definition import definition_of
from headgate.api.manifest.fields import Items, Section
from headgate.api.manifest.kubernetes_model import KUBERNETES
from headgate.errors import ManifestErrors
from headgate.k8s.snapshot_spec import SNAPSHOT_SPEC, Snapshot, parse_snapshot
from headgate.k8s.spec import Job, Kubernetes, Ref, SecretKey, parse_job
from headgate.runtime.manifest import load_job

TEXT = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: flights}
spec:
  parallelism: 2
  checkpoint: {every: 10s, storage: "${BUCKET:-s3://b/x}"}
  kubernetes:
    image: registry/flights:7
    imagePullSecrets: [{name: registry}]
    env: {LEVEL: 3, PASSWORD: {name: broker, key: password}}
    workers: {slots: 2, resources: {requests: {cpu: 1, memory: 2Gi}}, podTemplate: {spec: {x: 1}}}
    upgrade: {mode: Savepoint, rollback: {enabled: false}}
    restore: {snapshotRef: {name: monday}, nonce: 3}
  sources:
    numbers: {generator: {fields: {n: sequence}, rows: 10}}
  sinks:
    out: {from: numbers, print: {}}
"""


@pytest.fixture
def resource() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(TEXT)
    return read


def parsed(resource: dict[str, Any]) -> Job:
    job = parse_job(resource)
    assert isinstance(job, Job), job
    return job


def mistakes(resource: dict[str, Any]) -> list[str]:
    found = parse_job(resource)
    assert isinstance(found, list)
    return [str(each) for each in found]


def test_a_local_run_takes_the_file_as_it_is() -> None:
    without = yaml.safe_load(TEXT)
    del without["spec"]["kubernetes"]
    job, plain = (definition_of(load_job(each)) for each in (TEXT, yaml.safe_dump(without)))
    assert [node.name for node in job.graph.nodes] == [node.name for node in plain.graph.nodes]
    assert job.options == plain.options


def test_a_local_run_checks_the_form_and_names_the_line() -> None:
    wrong = TEXT.replace("mode: Savepoint", "mod: Savepoint").replace("cpu: 1", "cpu: one")
    wrong = wrong.replace("snapshotRef: {name: monday}, ", "")
    with pytest.raises(ManifestErrors) as error:
        load_job(wrong)
    found = [str(each) for each in error.value.problems]
    assert len(found) == 3
    assert "unknown field in upgrade field=`mod`" in str(error.value)
    assert "cpu must be an amount such as `500m` or `2Gi`" in str(error.value)
    assert "restore needs path or snapshotRef" in str(error.value)
    assert "manifest:12" in str(error.value)


def test_the_section_has_types_and_defaults(resource: dict[str, Any]) -> None:
    job = parsed(resource)
    assert job.parallelism == 2
    section = job.kubernetes
    assert section.env == {"LEVEL": "3", "PASSWORD": SecretKey("broker", "password")}
    assert section.workers.resources.requests == {"cpu": "1", "memory": "2Gi"}
    assert section.workers.pod_template == {"spec": {"x": 1}}
    assert [job.groups["default"].needed(each) for each in (1, 2, 3)] == [1, 1, 2]
    assert section.upgrade.mode == "Savepoint"
    assert not section.upgrade.rollback.enabled
    assert section.deletion.policy == "SavepointThenStop"
    assert section.deletion.state_retention == "Retain"
    assert section.restore is not None
    assert section.restore.nonce == 3


def test_a_job_needs_no_section(resource: dict[str, Any]) -> None:
    del resource["spec"]["kubernetes"]
    assert parsed(resource).kubernetes == Kubernetes()


def test_mistakes_name_the_path(resource: dict[str, Any]) -> None:
    spec = resource["spec"]
    spec["kubernetes"]["upgrade"]["mod"] = "Savepoint"
    spec["kubernetes"]["ray"] = {"mode": "External"}
    spec["kubernetes"]["imagePullSecrets"].append({"nam": "x"})
    spec["checkpoint"]["every"] = "10 apples"
    spec["sinks"]["out"]["fro"] = "x"
    resource["metadata"]["name"] = "x" * 46
    found = mistakes(resource)
    paths = [each.partition(": ")[0] for each in found]
    assert paths == [
        "metadata.name",
        "spec.checkpoint.every",
        "spec.kubernetes.imagePullSecrets[1].nam",
        "spec.kubernetes.upgrade.mod",
        "spec.kubernetes.ray",
        "spec.sinks.out.fro",
    ]
    assert "did you mean `mode`?" in found[3]


def test_variables_belong_to_the_pods(resource: dict[str, Any]) -> None:
    resource["spec"]["sources"]["numbers"]["generator"]["rows"] = "${ROWS}"
    template = {"spec": {"nodeName": "${NODE}"}}
    resource["spec"]["kubernetes"]["workers"]["podTemplate"] = template
    parsed(resource)
    resource["spec"]["kubernetes"]["image"] = "flights:${TAG}"
    (found,) = mistakes(resource)
    assert found.startswith("spec.kubernetes.image: variables cannot be used in the section")


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("code", {}),
        ("code", {"configMapRef": {"name": "a"}, "archive": "s3://b/x.zip"}),
        ("ray", {"address": "ray:6379"}),
        ("ray", {"version": "2.60"}),
        ("restore", {"path": "s3://b/x", "snapshotRef": {"name": "a"}}),
        ("restore", {"nonce": 1}),
        ("ray", {"mode": "KubeRay", "gcsStorage": {"type": "RocksDB"}}),
        ("savepoints", {"every": "1h", "schedule": "0 * * * *"}),
        ("savepoints", {"every": "1h", "timeZone": "UTC"}),
    ],
)
def test_fields_that_do_not_go_together(
    resource: dict[str, Any], section: str, value: dict[str, Any]
) -> None:
    resource["spec"]["kubernetes"][section] = value
    (found,) = mistakes(resource)
    assert found.startswith(f"spec.kubernetes.{section}: ")


@pytest.mark.parametrize("storage", [{"size": "1Gi"}, {"type": "Memory", "storageClassName": "x"}])
def test_a_control_store_in_memory_has_no_volume(
    resource: dict[str, Any], storage: dict[str, Any]
) -> None:
    resource["spec"]["kubernetes"]["ray"] = {"gcsStorage": storage}
    (found,) = mistakes(resource)
    assert found.startswith("spec.kubernetes.ray.gcsStorage: ")


@pytest.mark.parametrize(
    ("savepoints", "said"),
    [
        ({"schedule": "0 3 31 2 *"}, "schedule must be a cron expression"),
        ({"schedule": "0 3 * *"}, "minute, hour, day of the month"),
        (
            {"schedule": "0 3 * * *", "timeZone": "Europe/Berln"},
            "did you mean `Europe/Berlin`?",
        ),
    ],
)
def test_a_schedule_that_nobody_understands(
    resource: dict[str, Any], savepoints: dict[str, Any], said: str
) -> None:
    resource["spec"]["kubernetes"]["savepoints"] = savepoints
    (found,) = mistakes(resource)
    assert found.startswith(f"spec.kubernetes.savepoints.{max(savepoints)}: ")
    assert said in found


def mounted(path: str) -> dict[str, Any]:
    mounts = [{"name": "state", "mountPath": path}]
    return {"podTemplate": {"spec": {"containers": [{"name": "headgate", "volumeMounts": mounts}]}}}


@pytest.mark.parametrize(
    "storage", ["checkpoints", "/tmp/checkpoints", "file:///state/x", "memory://x"]
)
def test_state_that_goes_with_its_pod_is_refused(resource: dict[str, Any], storage: str) -> None:
    resource["spec"]["checkpoint"]["storage"] = storage
    (found,) = mistakes(resource)
    assert found.startswith(
        f"spec.checkpoint.storage: the directory `{storage}` is deleted with its pod"
    )
    resource["spec"]["kubernetes"] |= {"coordinator": mounted("/state")}
    mistakes(resource)


@pytest.mark.parametrize("storage", ["/state", "/state/x", "file:///state/x", "s3a://b/x", "${X}"])
def test_state_on_a_volume_or_in_a_bucket_is_fine(resource: dict[str, Any], storage: str) -> None:
    resource["spec"]["checkpoint"]["storage"] = storage
    both = {"coordinator": mounted("/state"), "workers": mounted("/state/")}
    resource["spec"]["kubernetes"] |= both
    parsed(resource)


STANDBY = "headgate.coordinator.standby"


@pytest.mark.parametrize("value", [1, "1", "2"])
@pytest.mark.parametrize("mode", ["Managed", "KubeRay"])
def test_a_standby_coordinator_is_refused_in_words_of_its_own(
    resource: dict[str, Any], mode: str, value: object
) -> None:
    resource["spec"]["options"] = {STANDBY: value}
    resource["spec"]["kubernetes"]["ray"] = {"mode": mode}
    (found,) = mistakes(resource)
    assert found.startswith(
        f"spec.options.{STANDBY}: there is no standby coordinator on Kubernetes, found `{value}`"
    )
    assert "leave the option out" in found


@pytest.mark.parametrize("value", [0, "0", "${STANDBY}"])
def test_no_standby_coordinator_is_fine(resource: dict[str, Any], value: object) -> None:
    resource["spec"]["options"] = {STANDBY: value, "rest.port": "8081"}
    parsed(resource)


def test_the_slots_of_a_worker_are_those_of_its_pod(resource: dict[str, Any]) -> None:
    resource["spec"]["options"] = {"taskmanager.numberOfTaskSlots": 4}
    (found,) = mistakes(resource)
    assert found.startswith("spec.options.taskmanager.numberOfTaskSlots: the slots of a worker")
    assert "write workers.slots" in found


def fields_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of a struct and of the structs in it, as a table has them."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        below = [
            each
            for each in (field.type, *getattr(field.type, "__args__", ()))
            if isinstance(each, type) and issubclass(each, msgspec.Struct)
        ]
        known = below and field.encode_name != "env" and "list" not in str(field.type)
        found[field.encode_name] = fields_of(below[0]) if known else None
    return found


def fields_in(section: Section) -> dict[str, Any]:
    kinds = {
        name: field.kind.item if isinstance(field.kind, Items) else field.kind
        for name, field in section.fields.items()
    }
    return {
        name: fields_in(kind) if isinstance(kind, Section) else None for name, kind in kinds.items()
    }


@pytest.mark.parametrize(
    ("struct", "section"), [(Kubernetes, KUBERNETES), (Snapshot, SNAPSHOT_SPEC)]
)
def test_types_and_tables_have_the_same_fields(
    struct: type[msgspec.Struct], section: Section
) -> None:
    assert fields_of(struct) == fields_in(section)


def test_defaults_are_those_the_tables_name() -> None:
    upgrade = Kubernetes().upgrade
    said = KUBERNETES.fields["upgrade"].kind.fields  # type: ignore[attr-defined]
    assert f"default {upgrade.timeout}" in said["timeout"].doc
    rollback = said["rollback"].kind.fields
    assert f"default {upgrade.rollback.progress_deadline}" in rollback["progressDeadline"].doc
    assert f"default {upgrade.rollback.stabilization_period}" in rollback["stabilizationPeriod"].doc
    policy = Kubernetes().restart_policy
    said = KUBERNETES.fields["restartPolicy"].kind.fields  # type: ignore[attr-defined]
    for field in ("initial_backoff", "max_backoff", "max_attempts", "reset_after"):
        name = msgspec.structs.fields(type(policy))
        (encoded,) = (each.encode_name for each in name if each.name == field)
        assert f"default {getattr(policy, field)}" in said[encoded].doc


def test_only_what_pods_depend_on_makes_a_new_revision(resource: dict[str, Any]) -> None:
    def revision(path: str, value: Any) -> str:
        changed = copy.deepcopy(resource)
        *above, last = path.split(".")
        at = changed["spec"]
        for name in above:
            at = at.setdefault(name, {})
        at[last] = value
        return parsed(changed).revision

    same = {
        revision("parallelism", 4),
        revision("kubernetes.state", "Suspended"),
        revision("kubernetes.upgrade.mode", "Stateless"),
        revision("kubernetes.savepoints.every", "1h"),
        revision("kubernetes.workers.replicas", 9),
        revision("kubernetes.deletion.policy", "Abort"),
    }
    assert same == {parsed(resource).revision}
    others = [
        revision("kubernetes.image", "registry/flights:8"),
        revision("kubernetes.workers.slots", 1),
        revision("checkpoint.every", "20s"),
        revision("options", {"heartbeat.timeout": "60s"}),
        revision("sources.numbers.generator.rows", 11),
    ]
    assert len({*others, *same}) == 6


def test_a_snapshot_is_read() -> None:
    read = parse_snapshot({"spec": {"jobRef": {"name": "flights"}}})
    assert read == Snapshot(job_ref=Ref("flights"))
    found = parse_snapshot({"spec": {"jobref": {"name": "x"}}})
    assert [str(each) for each in found] == [  # type: ignore[attr-defined]
        "spec.jobref: unknown field in spec field=`jobref`; did you mean `jobRef`? fields: "
        "jobRef, type, format, directory, stopJob, deletionPolicy, backoffLimit, ttlAfterFinished"
    ]
