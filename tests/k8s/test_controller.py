"""Goal: a change causes the reconciliations that it should, and no others.

Method: the controller over an API server in memory, on virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("kubernetes_asyncio", reason="pip install 'headgate[k8s]'")

from headgate.k8s.actions import CallJob, CompletedCheckpoint, JobReport
from headgate.k8s.monitoring.evaluate import watched
from headgate.k8s.monitoring.grafana import OPERATOR
from headgate.k8s.objects import Settings
from headgate.k8s.operator.api import ApiError
from headgate.k8s.operator.controller import Controller
from headgate.k8s.operator.informer import OPTIONAL_RETRY_S
from headgate.k8s.operator.metrics import Metrics
from headgate.testing.loop import VirtualClock, VirtualLoop
from headgate.tests.k8s.conftest import RESOURCE
from headgate.tests.k8s.memory_api import MemoryApi
from headgate.tests.support.commands import ended_with
from headgate.tests.support.prometheus import promtool

Object = dict[str, Any]
SOON_S = 0.1
"""Much less than the time between two looks at something that waits."""


@dataclass
class Job:
    """The coordinator of the job; without an answer there is none."""

    answer: JobReport | None = None
    reports: int = 0
    calls: list[CallJob] = field(default_factory=list)
    each_time: Callable[[], None] = lambda: None

    async def report(self, namespace: str, job: str) -> JobReport | None:
        self.reports += 1
        self.each_time()
        return self.answer

    async def call(self, namespace: str, job: str, call: CallJob) -> None:
        self.calls.append(call)


class World:
    """An operator that leads, in a loop that only moves when told to."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(1)
        asyncio.set_event_loop(self.loop)
        self.api, self.job = MemoryApi(), Job()
        self.metrics = Metrics()
        api: Any = self.api
        self.controller = Controller(
            api, self.job, Settings(), (), "one", self.metrics, VirtualClock(self.loop)
        )
        self.task = self.loop.create_task(self.controller.run())

    def run(self, seconds: float = SOON_S) -> None:
        self.loop.drive(self.loop.time() + seconds)
        assert not self.task.done(), self.task

    def found(self, kind: str, name: str) -> Object:
        return self.api.objects[kind, "air", name]

    def close(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self.task)
        self.loop.close()
        asyncio.set_event_loop(None)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.run()
    yield made
    made.close()


def snapshot(**spec: Any) -> Object:
    return {
        "apiVersion": "headgate.io/v1alpha1",
        "kind": "StreamSnapshot",
        "metadata": {"name": "monday", "namespace": "air"},
        "spec": {"jobRef": {"name": "flights"}, **spec},
    }


def test_pods_that_are_refused_are_told_in_the_status(world: World) -> None:
    world.api.put(RESOURCE)
    world.run(1)
    head = world.found("StatefulSet", "flights-head")
    note = 'create Pod flights-head-0 failed: pods "flights-head-0" is forbidden: exceeded quota'
    world.api.put(
        {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": "flights-head.1", "namespace": "air"},
            "regarding": {"uid": head["metadata"]["uid"]},
            "reason": "FailedCreate",
            "note": note,
        }
    )
    world.run(10)
    status = world.found("StreamJob", "flights")["status"]
    assert f"StatefulSet flights-head: FailedCreate: {note}" in status["message"]
    world.api.put(head | {"status": {"replicas": 1}})
    world.run(10)
    assert "FailedCreate" not in world.found("StreamJob", "flights")["status"]["message"]


def head_pod() -> Object:
    labels = {"headgate.io/job": "flights", "headgate.io/run": "u-1-1"}
    metadata = {"name": "flights-head-0", "namespace": "air", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": {}}


def running(checkpoint: int = 0) -> JobReport:
    last = CompletedCheckpoint(checkpoint, 1_767_225_700_000 + checkpoint) if checkpoint else None
    return JobReport("u-1-1", "RUNNING", 3, checkpoint=last)


def started(world: World) -> None:
    """A StreamJob whose first run has a pod, and runs."""
    world.api.put(RESOURCE)
    world.run(1)
    world.api.put(head_pod())
    world.job.answer = running()
    world.run(1)
    assert world.found("StreamJob", "flights")["status"]["phase"] == "Running"


def test_a_stream_job_wakes_the_snapshots_that_wait_for_it(world: World) -> None:
    world.api.put(snapshot())
    world.run(7)
    assert world.found("StreamSnapshot", "monday")["status"]["message"] == (
        "there is no StreamJob flights"
    )
    world.api.put(RESOURCE)
    world.run()
    assert world.found("StreamSnapshot", "monday")["status"]["message"] == "the job does not answer"


def test_a_job_begins_with_the_snapshot_of_another_which_stays_until_then(world: World) -> None:
    made = snapshot(jobRef={"name": "clicks"}, deletionPolicy="Delete")
    status = {"phase": "Completed", "path": "s3://b/sp", "runtime": {"image": "i"}}
    world.api.put(made | {"status": status})
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["kubernetes"] = {"restore": {"snapshotRef": {"name": "monday"}, "nonce": 1}}
    world.api.put(resource)
    world.run(1)
    run = world.found("StreamJob", "flights")["status"]["run"]
    assert run["start"] == {"kind": "Path", "path": "s3://b/sp"}
    leaving = world.found("StreamSnapshot", "monday")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.api.put(leaving)
    world.run(1)
    said = world.found("StreamSnapshot", "monday")["status"]["message"]
    assert said == "the job flights may still begin with s3://b/sp"


def test_what_the_operator_writes_itself_wakes_them_too(world: World) -> None:
    """A savepoint is deleted as soon as the run that began with it has a checkpoint of its own."""
    started(world)
    world.run(40)
    # Not at the time at which both are looked at anyway.
    world.run(7)
    job = world.found("StreamJob", "flights")
    job["status"]["run"]["start"] = {"kind": "Path", "path": "s3://b/sp"}
    world.api.put(job)
    status = {"phase": "Completed", "path": "s3://b/sp", "runtime": {"image": "i"}}
    made = snapshot(deletionPolicy="Delete") | {"status": status}
    world.api.put(made, finalizers=["headgate.io/snapshot"])
    world.run(1)
    world.api.remove("StreamSnapshot", "air", "monday")
    world.run(1)
    waits = world.found("StreamSnapshot", "monday")["status"]["message"]
    assert waits == "the job flights may still begin with s3://b/sp"
    world.job.answer = running(checkpoint=4)
    while not world.found("StreamJob", "flights")["status"]["run"].get("checkpointed"):
        world.run(SOON_S / 2)
    world.run(SOON_S)
    assert ("Job", "air", "monday-dispose") in world.api.objects


def test_a_snapshot_wakes_the_job_that_is_to_be_restored_from_it(world: World) -> None:
    job = copy.deepcopy(RESOURCE)
    job["spec"]["kubernetes"] = {"restore": {"snapshotRef": {"name": "monday"}, "nonce": 1}}
    job["metadata"]["finalizers"] = ["headgate.io/state"]
    world.api.put(snapshot() | {"status": {"phase": "Running", "attempts": 1}})
    world.api.put(job)
    world.run(7)
    assert "run" not in world.found("StreamJob", "flights").get("status", {})
    done = world.found("StreamSnapshot", "monday")
    done["status"] |= {"phase": "Completed", "path": "s3://b/sp"}
    world.api.put(done)
    world.run()
    assert world.found("StreamJob", "flights")["status"]["run"]["start"]["path"] == "s3://b/sp"


def test_the_operators_own_status_does_not_wake_the_job_again(world: World) -> None:
    """Each look at a job that takes many checkpoints finds another one, and writes it down."""
    started(world)
    numbers = iter(range(1, 10**9))

    def each_time() -> None:
        world.job.answer = running(next(numbers))

    world.job.each_time = each_time
    world.run(60)
    before = world.job.reports
    world.run(600)
    assert 600 / 15 - 2 <= world.job.reports - before <= 600 / 15 + 2


def test_a_snapshot_that_has_ended_is_not_looked_at_for_each_change_of_its_job(
    world: World,
) -> None:
    status = {"phase": "Completed", "path": "s3://b/sp"}
    world.api.put(snapshot() | {"status": status}, finalizers=["headgate.io/snapshot"])
    world.run(5)
    world.api.calls.clear()
    reports = world.job.reports
    for parallelism in range(1, 20):
        job = copy.deepcopy(RESOURCE)
        job["spec"]["parallelism"] = parallelism
        world.api.put(job)
        world.run()
    assert world.job.reports == reports
    assert world.api.made("merge status", "StreamSnapshot") == []


def test_a_refused_write_is_tried_again_after_growing_pauses(world: World) -> None:
    world.api.put(RESOURCE, finalizers=["headgate.io/state"])
    world.run(1)
    world.api.refuses = [ApiError(500, "etcd is away")] * 10**6
    world.api.put(replace_spec(world.found("StreamJob", "flights"), parallelism=5))
    world.api.calls.clear()
    world.run(30)
    # After 0.5, 1, 2, 4, 8 and 16 s.
    assert 5 <= len(world.api.calls) <= 8, world.api.calls


def replace_spec(made: Object, **spec: Any) -> Object:
    return {**made, "spec": made["spec"] | spec}


def test_a_server_that_asks_to_wait_is_left_alone(world: World) -> None:
    world.api.put(RESOURCE, finalizers=["headgate.io/state"])
    world.run(1)
    world.api.refuses = [ApiError(429, "too many requests", retry_after_s=20)]
    world.api.put(replace_spec(world.found("StreamJob", "flights"), parallelism=5))
    world.run(1)
    world.api.calls.clear()
    world.run(18)
    assert world.api.calls == []
    world.run(3)
    assert world.api.made("merge status", "StreamJob")


def test_a_job_that_waits_for_kuberay_goes_on_when_it_is_installed() -> None:
    with contextlib.closing(World()) as world:
        world.api.missing = {"RayCluster"}
        _install_kuberay_late(world)


def _install_kuberay_late(world: World) -> None:
    job = copy.deepcopy(RESOURCE)
    job["spec"]["kubernetes"] = {"ray": {"mode": "KubeRay", "version": "2.55.1"}}
    world.api.put(job)
    world.run(100)
    assert ("RayCluster", "air", "flights-ray") not in world.api.objects
    events = [each for key, each in world.api.objects.items() if key[0] == "Event"]
    (refused,) = [each for each in events if each["reason"] == "Refused"]  # once, however often
    assert (refused["type"], refused["regarding"]["name"]) == ("Warning", "flights")
    assert refused["note"] == (
        "RayCluster flights-ray cannot be made: the server could not find the requested resource"
    )
    (watch,) = [each for each in world.controller.watches() if each.missing]
    assert str(watch) == (
        "rayclusters are not watched: the server could not find the requested resource"
    )
    world.api.missing.clear()
    world.run(OPTIONAL_RETRY_S + SOON_S)
    assert ("RayCluster", "air", "flights-ray") in world.api.objects
    assert not [each for each in world.controller.watches() if each.trouble]


def samples(world: World, name: str) -> dict[tuple[str, ...], float]:
    """The series of a metric that are not 0, by the values of their other labels than those of the job."""
    found = {}
    for family in text_string_to_metric_families(world.metrics.text().decode()):
        for each in family.samples:
            if each.name == name and each.value:
                labels = dict(each.labels)
                assert (labels.pop("namespace"), labels.pop("job_name")) == ("air", "flights")
                found[tuple(labels.values())] = each.value
    return found


def test_the_phase_is_one_labelled_gauge_and_has_a_deadline(world: World) -> None:
    world.api.put(RESOURCE)
    world.run(1)
    assert samples(world, "headgate_job_phase") == {("Deploying",): 1}
    text = world.metrics.text().decode()
    assert text.count("headgate_job_phase{") == 13
    (since,) = samples(world, "headgate_job_phase_since_timestamp_seconds").values()
    (deadline,) = samples(world, "headgate_job_phase_deadline_timestamp_seconds").values()
    assert deadline - since == 900  # rollback.progressDeadline
    started(world)
    assert samples(world, "headgate_job_phase") == {("Running",): 1}
    assert samples(world, "headgate_job_phase_deadline_timestamp_seconds") == {}
    assert samples(world, "headgate_job_condition").keys() >= {("Ready",), ("Accepted",)}
    world.api.put(world.found("StreamJob", "flights"), finalizers=[])
    world.api.remove("StreamJob", "air", "flights")
    world.run(1)
    assert "flights" not in world.metrics.text().decode()


def test_upgrades_and_rollbacks_are_counted_once(world: World) -> None:
    started(world)
    assert samples(world, "headgate_job_transitions_total") == {}
    sinks = {"other": {"from": "numbers", "print": {}}}
    world.api.put(replace_spec(world.found("StreamJob", "flights"), sinks=sinks))
    world.run(100)
    assert samples(world, "headgate_job_transitions_total") == {("upgrade",): 1}
    # Somebody else's write of a rollback, such as a leader's before, is seen as well.
    job = copy.deepcopy(world.found("StreamJob", "flights"))
    job["status"]["transition"] |= {"verb": "Rollback", "startedAt": "2026-01-01T00:00:07.000Z"}
    world.api.put(job)
    world.run(100)
    assert samples(world, "headgate_job_transitions_total") == {("upgrade",): 1, ("rollback",): 1}


def test_what_happened_before_this_process_led_is_not_counted() -> None:
    with contextlib.closing(World()) as world:
        transition = {"verb": "Upgrade", "step": "Save", "startedAt": "2026-01-01T00:00:00.000Z"}
        transition["stepStartedAt"] = transition["startedAt"]
        world.api.put(dict(RESOURCE) | {"status": {"transition": transition}})
        world.api.put(snapshot() | {"status": {"phase": "Failed"}})
        world.run(5)
        assert samples(world, "headgate_job_transitions_total") == {}
        assert samples(world, "headgate_job_snapshots_total") == {}


def test_snapshots_that_fail_are_counted(world: World) -> None:
    started(world)
    for name, phase in (("a", "Completed"), ("b", "Failed"), ("c", "Failed"), ("d", "Abandoned")):
        made = snapshot() | {"status": {"phase": "Running", "attempts": 1}}
        world.api.put(made, name=name, finalizers=["headgate.io/snapshot"])
        world.run()
        world.api.put(made | {"status": {"phase": phase}}, name=name)
        world.run()
    assert samples(world, "headgate_job_snapshots_total") == {
        ("completed",): 1,
        ("failed",): 2,
        ("abandoned",): 1,
    }
    world.run(100)
    assert sum(samples(world, "headgate_job_snapshots_total").values()) == 4


def test_promtool_takes_the_metrics(world: World) -> None:
    started(world)
    checked = promtool("check", "metrics", text=world.metrics.text().decode())
    ended_with(checked, 0)


def test_dashboards_and_alerts_use_names_that_are_exported(world: World) -> None:
    started(world)
    exported = set(re.findall(r"^(headgate_\w+)", world.metrics.text().decode(), re.MULTILINE))
    for each in watched():
        if each.needs.startswith(OPERATOR):
            asked = set(re.findall(r"headgate_[a-z0-9_]+", each.expression))
            # One without a deadline is at rest.
            assert asked <= exported | {"headgate_job_phase_deadline_timestamp_seconds"}, each.where
