"""The operator's handling of a StreamSnapshot."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headgate.k8s import actions as act
from headgate.k8s.objects import Settings
from headgate.k8s.pod_troubles import refusal, refused_pods, trouble, troubles
from headgate.k8s.snapshots import SnapshotView, reconcile_snapshot
from headgate.k8s.status import Runtime, StreamSnapshotStatus, rfc3339
from headgate.tests.k8s.conftest import RESOURCE

NOW_MS = 1_700_000_000_000
FINALIZER = "headgate.io/snapshot"


def snapshot(deleted: bool = False, **spec: Any) -> dict[str, Any]:
    metadata = {
        "name": "monday",
        "namespace": "air",
        "uid": "s-1",
        "generation": 2,
        "finalizers": [FINALIZER],
    }
    if deleted:
        metadata["deletionTimestamp"] = rfc3339(NOW_MS)
    said = {"jobRef": {"name": "flights"}, **spec}
    return {
        "apiVersion": "headgate.io/v1alpha1",
        "kind": "StreamSnapshot",
        "metadata": metadata,
        "spec": said,
    }


def view(state: str = "RUNNING", **operations: act.Operation) -> SnapshotView:
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["kubernetes"] = {"image": "flights:7", "serviceAccountName": "sa"}
    named = {name.replace("_", "-"): each for name, each in operations.items()}
    report = act.JobReport("u-1-1", state, 3, operations=named)
    return SnapshotView(resource, report, jobs=(resource,))


def decided(
    resource: dict[str, Any], status: StreamSnapshotStatus, seen: SnapshotView, now_ms: int = NOW_MS
) -> tuple[list[act.Action], StreamSnapshotStatus]:
    result = reconcile_snapshot(resource, status, seen, now_ms, Settings())
    kept = [each for each in result.actions if not isinstance(each, act.Requeue | act.SetStatus)]
    assert not kept or isinstance(result.actions[0], act.SetStatus)
    return kept, result.status


def test_an_attempt_is_written_down_before_the_job_is_asked() -> None:
    actions, status = decided(snapshot(), StreamSnapshotStatus(), view())
    assert actions == []
    assert (status.phase, status.attempts) == ("Running", 1)
    assert status.runtime == Runtime(image="flights:7", service_account_name="sa")
    actions, status = decided(snapshot(), status, view())
    assert actions == [act.CallJob("u-1-1", "savepoint", "s-1-1", {"native": False})]
    actions, status = decided(snapshot(), status, view(s_1_1=act.Operation("running")))
    assert actions == []
    done = act.Operation("completed", path="s3://b/sp", size_bytes=7, checkpoint_id=3)
    actions, status = decided(snapshot(), status, view(s_1_1=done))
    assert (status.phase, status.path, status.size_bytes) == ("Completed", "s3://b/sp", 7)
    assert status.conditions[0].status == "True"
    assert status.conditions[0].observed_generation == 2
    assert decided(snapshot(), status, view(s_1_1=done)) == ([], status)


@pytest.mark.parametrize(
    ("spec", "verb", "arguments"),
    [
        ({"type": "Checkpoint"}, "checkpoint", {}),
        ({"format": "Native", "directory": "s3://d"}, "savepoint", {"native": True, "directory": "s3://d"}),
        ({"stopJob": True}, "stop", {"savepoint": True, "native": False}),
    ],
)  # fmt: skip
def test_what_is_asked_of_the_job(spec: Any, verb: str, arguments: Any) -> None:
    status = StreamSnapshotStatus(phase="Running", attempts=1)
    (call,), _ = decided(snapshot(**spec), status, view())
    assert isinstance(call, act.CallJob)
    assert (call.verb, call.arguments) == (verb, arguments)


def test_attempts_are_bounded_and_have_pauses() -> None:
    resource, status, now_ms = snapshot(backoffLimit=1), StreamSnapshotStatus(), NOW_MS
    failed = act.Operation("failed", error="no space")
    _, status = decided(resource, status, view(), now_ms)
    _, status = decided(resource, status, view(s_1_1=failed), now_ms)
    assert status.phase == "Pending"
    assert status.message == "attempt 1 failed: no space"
    _, status = decided(resource, status, view(), now_ms + 9_000)
    assert status.phase == "Pending"
    _, status = decided(resource, status, view(), now_ms + 10_000)
    assert (status.phase, status.attempts) == ("Running", 2)
    actions, status = decided(resource, status, view(s_1_2=failed), now_ms + 11_000)
    assert (status.phase, status.message) == ("Failed", "no space")
    assert [type(each) for each in actions] == [act.EmitEvent]


def test_a_request_that_is_wrong_is_not_made_again() -> None:
    status = StreamSnapshotStatus(phase="Running", attempts=1)
    wrong = act.Operation("failed", error="nobody says where savepoints go", lasting=True)
    actions, status = decided(snapshot(backoffLimit=5), status, view(s_1_1=wrong))
    assert (status.phase, status.message) == ("Failed", "nobody says where savepoints go")
    assert [type(each) for each in actions] == [act.EmitEvent]


def test_it_waits_for_a_job_that_runs() -> None:
    _, status = decided(snapshot(), StreamSnapshotStatus(), SnapshotView())
    assert status.message == "there is no StreamJob flights"
    _, status = decided(snapshot(), status, view("RESTARTING"))
    assert (status.phase, status.message) == ("Pending", "the job is RESTARTING")


def test_a_job_that_ended_meanwhile_abandons_it() -> None:
    status = StreamSnapshotStatus(phase="Running", attempts=1)
    _, ended = decided(snapshot(), status, view("SUSPENDED"))
    assert ended.phase == "Abandoned"
    _, waiting = decided(snapshot(), status, view("RESTARTING"))
    assert waiting.phase == "Running"


DONE = StreamSnapshotStatus(
    phase="Completed", path="s3://b/sp", completed_at=rfc3339(NOW_MS), runtime=Runtime(image="x")
)


def test_files_stay_unless_they_are_to_go() -> None:
    actions, _ = decided(snapshot(deleted=True), DONE, SnapshotView())
    assert actions == [act.RemoveFinalizer(FINALIZER)]


def test_files_are_deleted_without_the_job() -> None:
    resource = snapshot(deleted=True, deletionPolicy="Delete")
    (create,), status = decided(resource, DONE, SnapshotView())
    assert isinstance(create, act.Create)
    container = create.object["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["headgate", "savepoint", "dispose", "s3://b/sp"]
    assert container["image"] == "x"
    cleaning = {**create.object, "status": {"succeeded": 1}}
    actions, _ = decided(resource, status, SnapshotView(cleaning=cleaning))
    assert actions[-1] == act.RemoveFinalizer(FINALIZER)


def test_files_that_could_not_be_deleted_are_not_forgotten() -> None:
    resource = snapshot(deleted=True, deletionPolicy="Delete")
    (create,), status = decided(resource, DONE, SnapshotView())
    assert isinstance(create, act.Create)
    failed = {"conditions": [{"type": "Failed", "status": "True"}]}
    seen = SnapshotView(cleaning={**create.object, "status": failed})
    actions, status = decided(resource, status, seen)
    assert actions == []
    assert "could not delete s3://b/sp" in status.message
    kept = snapshot(deleted=True, deletionPolicy="Retain")
    assert decided(kept, status, seen)[0] == [act.RemoveFinalizer(FINALIZER)]


def test_the_directory_of_a_savepoint_is_that_of_the_job_unless_it_has_its_own() -> None:
    for own, usual, directory in [
        ({}, "", None),
        ({}, "s3://b/usual", "s3://b/usual"),
        ({"directory": "s3://b/own"}, "s3://b/usual", "s3://b/own"),
    ]:
        seen = view()
        assert seen.job is not None
        if usual:
            seen.job["spec"]["kubernetes"]["savepoints"] = {"directory": usual}
        status = StreamSnapshotStatus(phase="Running", attempts=1)
        (call,), _ = decided(snapshot(**own), status, seen)
        assert call.arguments.get("directory") == directory


def test_a_savepoint_a_run_may_begin_with_is_kept() -> None:
    seen = view()
    assert seen.job is not None
    start = {"kind": "Path", "path": "s3://b/sp"}
    run = {"number": 1, "revision": "r", "parallelism": 1, "startedAt": "", "start": start}
    seen.job["status"] = {"run": run}  # type: ignore[index]
    resource = snapshot(deleted=True, deletionPolicy="Delete")
    actions, status = decided(resource, DONE, seen)
    assert actions == []
    assert status.message == "the job flights may still begin with s3://b/sp"
    run["checkpointed"] = True
    actions, _ = decided(resource, DONE, seen)
    assert [type(each) for each in actions] == [act.Create]


def test_a_savepoint_another_job_is_to_begin_with_is_kept() -> None:
    other = copy.deepcopy(RESOURCE)
    other["metadata"]["name"] = "clone"
    other["spec"]["kubernetes"] = {"restore": {"snapshotRef": {"name": "monday"}, "nonce": 1}}
    seen = SnapshotView(jobs=(other,))
    resource = snapshot(deleted=True, deletionPolicy="Delete")
    actions, status = decided(resource, DONE, seen)
    assert actions == []
    assert status.message == "the job clone may still begin with s3://b/sp"
    other["status"] = {"restoreNonce": 1}
    actions, _ = decided(resource, DONE, seen)
    assert [type(each) for each in actions] == [act.Create]


def test_an_old_one_is_deleted() -> None:
    resource = snapshot(ttlAfterFinished="1h")
    assert decided(resource, DONE, SnapshotView(), NOW_MS + 3_599_000)[0] == []
    actions, _ = decided(resource, DONE, SnapshotView(), NOW_MS + 3_600_000)
    assert actions == [act.Delete("StreamSnapshot", "monday", "s-1")]


def test_a_wrong_one_fails_with_the_path_of_the_mistake() -> None:
    _, status = decided(snapshot(typ="Savepoint"), StreamSnapshotStatus(), view())
    assert status.phase == "Failed"
    assert status.message.startswith("spec.typ: unknown field in spec")


def waiting(reason: str, message: str = "", last: Any = None) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    container = {"state": state, "lastState": {"terminated": last} if last else {}}
    return {"metadata": {"name": "p"}, "status": {"containerStatuses": [container]}}


def test_pods_say_themselves_what_is_wrong() -> None:
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: insufficient memory",
    }
    pod = {"metadata": {"name": "p"}, "status": {"conditions": [unscheduled]}}
    assert trouble(pod) == "Unschedulable: 0/3 nodes are available: insufficient memory"
    assert trouble(waiting("ContainerCreating")) == ""
    assert trouble(waiting("ErrImagePull", "not found")) == "ErrImagePull: not found"
    crashed = waiting("CrashLoopBackOff", "back-off 5m0s", {"reason": "OOMKilled", "exitCode": 137})
    assert (
        trouble(crashed) == "CrashLoopBackOff: back-off 5m0s; before that: OOMKilled, exit code 137"
    )
    assert troubles([pod, crashed]).startswith("pod p: Unschedulable")
    assert troubles([{"metadata": {"name": "p"}}]) == ""


@pytest.mark.parametrize("state", ["state", "lastState"])
def test_only_exit_code_2_of_our_own_container_is_a_refusal(state: str) -> None:
    def ended(name: str, code: int, **said: str) -> dict[str, Any]:
        return {"name": name, state: {"terminated": {"exitCode": code, **said}}}

    def pod(*containers: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"name": "p"}, "status": {"containerStatuses": containers}}

    others = (ended("sidecar", 2, message="usage"), ended("headgate", 1, message="no answer"))
    assert refusal(pod(*others)) == ""
    assert refusal(pod(ended("headgate", 2, message="no FARE\n"))) == "no FARE"
    assert "its log says why" in refusal(pod(ended("headgate", 2)))


def maker(kind: str, wanted: int, **status: Any) -> dict[str, Any]:
    metadata = {"name": f"flights-{kind[0]}", "uid": kind}
    return {"kind": kind, "metadata": metadata, "spec": {"replicas": wanted}, "status": status}


def refused(uid: str, note: str, **times: Any) -> dict[str, Any]:
    return {"regarding": {"uid": uid}, "reason": "FailedCreate", "note": note, **times}


def test_a_deployment_says_itself_that_its_pods_are_refused() -> None:
    says = {"type": "ReplicaFailure", "reason": "FailedCreate", "message": "exceeded quota: small"}
    other = {"type": "Available", "status": "False", "reason": "Minimum", "message": "no"}
    failing = maker("Deployment", 2, conditions=[other, says | {"status": "True"}])
    assert (
        refused_pods([failing], []) == "Deployment flights-D: FailedCreate: exceeded quota: small"
    )
    over = maker("Deployment", 2, conditions=[other, says | {"status": "False"}])
    assert refused_pods([over], []) == ""


def test_of_a_stateful_set_the_newest_event_says_it() -> None:
    events = [
        refused("StatefulSet", "quota a", deprecatedLastTimestamp="2026-01-01T10:00:00Z"),
        refused("StatefulSet", "webhook b", series={"lastObservedTime": "2026-01-01T10:05:00.5Z"}),
        refused("another", "quota c", eventTime="2026-01-01T11:00:00.000000Z"),
    ]
    empty = maker("StatefulSet", 1)
    assert refused_pods([empty], events) == "StatefulSet flights-S: FailedCreate: webhook b"
    assert refused_pods([empty], events[2:]) == ""
    assert refused_pods([maker("StatefulSet", 1, replicas=1)], events) == ""
    assert refused_pods([maker("StatefulSet", 0)], events) == ""
