"""Each verb of the operator, in a cluster where nothing fails by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import to_builtins

from headgate.k8s import actions as act
from headgate.k8s.conditions import deadline_ms
from headgate.k8s.modes import workers_of
from headgate.k8s.objects import CONTENT, Settings
from headgate.k8s.reconcile import reconcile
from headgate.k8s.status import RESTING, StreamJobStatus
from headgate.tests.k8s.conftest import IN_GROUPS, RESOURCE
from headgate.tests.k8s.model.cluster import Cluster
from headgate.tests.k8s.model.operator import JOB_KEY, Operator

HOUR_MS = 3_600_000
MINUTE_MS = 60_000


class Always:
    """Not random: controllers, kubelet and jobs always do their part, and nothing fails by itself."""

    def random(self) -> float:
        return 0.31

    def randrange(self, start: int, stop: int | None = None) -> int:
        return start if stop is not None else start - 1

    def choice(self, items: Any) -> Any:
        return items[0]


class World:
    """One StreamJob, and the operator."""

    def __init__(self, spec: dict[str, Any] | None = None, **kubernetes: Any) -> None:
        self.cluster = Cluster(Always())  # type: ignore[arg-type]
        self.operator = Operator(self.cluster)
        self.actions: list[act.Action] = []
        made = copy.deepcopy(RESOURCE)
        made["spec"] |= spec or {}
        made["spec"]["kubernetes"] = {"image": "good-1", **kubernetes}
        self.cluster.put(made)

    @property
    def job(self) -> dict[str, Any]:
        return self.cluster.objects[JOB_KEY]

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.job.get("status", {})
        return status

    def condition(self, type_: str) -> dict[str, Any]:
        (found,) = (each for each in self.status["conditions"] if each["type"] == type_)
        return found

    def events(self) -> list[str]:
        return [each.reason for each in self.actions if isinstance(each, act.EmitEvent)]

    def done(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.actions if isinstance(each, kind)]

    def change(self, kubernetes: dict[str, Any] | None = None, **spec: Any) -> None:
        changed = self.job["spec"] | spec
        changed["kubernetes"] = changed["kubernetes"] | (kubernetes or {})
        self.cluster.put({**self.job, "spec": changed}, spec_changed=True)

    def step(self, after_ms: int = 1_000) -> None:
        self.cluster.now_ms += after_ms
        self.cluster.work()
        if JOB_KEY in self.cluster.objects:
            self.operator.step()
            self.actions += self.operator.last_actions

    def until(self, what: Callable[[], Any], steps_max: int = 300) -> World:
        """Let time pass until this is so."""
        for _ in range(steps_max):
            if what():
                return self
            self.step()
        raise AssertionError(f"{self.status}\n" + "\n".join(self.cluster.trace[-30:]))

    def running(self) -> World:
        return self.until(lambda: self.status.get("phase") == "Running")

    def phase(self, phase: str) -> World:
        return self.until(lambda: self.status.get("phase") == phase)

    def stable(self) -> World:
        self.running().step(6 * 60_000)
        return self.until(lambda: "stable" in self.status)

    def process(self) -> Any:
        return self.cluster.coordinator()

    def head(self) -> dict[str, Any]:
        return self.cluster.objects["StatefulSet", "flights-head"]

    def command(self) -> list[str]:
        command: list[str] = self.head()["spec"]["template"]["spec"]["containers"][0]["command"]
        return command


def test_a_new_job_gets_its_objects_and_runs() -> None:
    world = World()
    world.step()
    names = {
        (each.object["kind"], each.object["metadata"]["name"]) for each in world.done(act.Create)
    }
    run = world.status["run"]
    assert names == {
        ("ConfigMap", f"flights-{run['revision']}"),
        ("Secret", "flights-token"),
        ("Service", "flights-head"),
        ("NetworkPolicy", "flights"),
        ("PodDisruptionBudget", "flights-workers"),
        ("StatefulSet", "flights-head"),
        ("Deployment", "flights-workers"),
    }
    assert isinstance(world.actions[0], act.SetStatus)
    assert world.actions[1] == act.AddFinalizer("headgate.io/state")
    (token,) = (each for each in world.done(act.Create) if each.token_key)
    assert token.object["kind"] == "Secret"
    assert world.status["phase"] == "Deploying"
    world.running()
    assert world.condition("Ready")["status"] == "True"
    assert world.condition("Ready")["observedGeneration"] == 1
    assert world.status["observedGeneration"] == 1
    assert world.status["parallelism"] == {"configured": 3, "current": 3}
    assert world.status["selector"] == "headgate.io/job=flights,headgate.io/role=worker"
    assert world.process().run_id == "u-1-1"


def test_at_rest_nothing_is_done() -> None:
    world = World().stable()
    world.step()
    world.actions.clear()
    world.process().position = 0
    now = act.Requeue(15_000)
    world.operator.look()
    before = world.operator.view
    status = StreamJobStatus()
    result = reconcile(world.job, _status(world), before, world.cluster.now_ms, Settings())
    assert result.actions == (now,)
    assert status == StreamJobStatus()


@pytest.mark.parametrize(
    ("poll_ms", "rest_ms", "change_ms"), [(60_000, 60_000, 2_000), (1_000, 1_000, 1_000)]
)
def test_jobs_are_polled_as_often_as_the_operator_was_told(
    poll_ms: int, rest_ms: int, change_ms: int
) -> None:
    world = World().stable()
    world.step()
    world.operator.look()
    seen, now_ms, settings = world.operator.view, world.cluster.now_ms, Settings(poll_ms=poll_ms)
    result = reconcile(world.job, _status(world), seen, now_ms, settings)
    assert result.actions[-1] == act.Requeue(rest_ms)
    seen = replace(seen, job=None)  # it does not answer
    result = reconcile(world.job, _status(world), seen, now_ms, settings)
    assert result.actions[-1] == act.Requeue(change_ms)


def _status(world: World) -> StreamJobStatus:
    from msgspec import convert

    return convert(world.status, StreamJobStatus)


def test_an_upgrade_stops_with_a_checkpoint_and_goes_on_from_it() -> None:
    world = World().stable()
    world.process().position = 500
    world.change({"image": "good-2"})
    world.phase("Upgrading").running()
    assert world.done(act.CallJob)[0].verb == "stop"
    assert world.done(act.CallJob)[0].arguments == {"savepoint": False}
    assert world.status["run"]["number"] == 2
    assert world.status["run"]["start"]["kind"] == "Latest"
    assert world.cluster.storage.claims[-1] == ("u-1-2", world.cluster.storage.claims[-1][1])
    assert world.cluster.storage.claims[-1][1] >= 500
    assert "--start" in world.command()


def test_an_upgrade_with_a_savepoint_begins_with_it() -> None:
    world = World(
        upgrade={"mode": "Savepoint"}, savepoints={"directory": "s3://b/sp", "format": "Native"}
    ).stable()
    world.change({"image": "good-2"})
    world.phase("Upgrading").running()
    (call,) = {each.trigger_id: each for each in world.done(act.CallJob)}.values()
    assert call.arguments == {"savepoint": True, "native": True, "directory": "s3://b/sp"}
    path = world.status["savepoint"]["path"]
    assert world.command()[-2:] == ["--path", path]
    assert "SavepointTaken" in world.events()


def test_a_stateless_upgrade_begins_with_nothing() -> None:
    world = World(upgrade={"mode": "Stateless"}).stable()
    world.cluster.allowed.add("nothing")
    world.change({"image": "good-2"})
    world.phase("Upgrading").running()
    assert world.status["run"]["start"]["kind"] == "Nothing"


def test_a_job_that_cannot_be_stopped_is_left_alone_with_fallback_fail() -> None:
    world = World(upgrade={"fallback": "Fail", "timeout": "1m"}).stable()
    world.process().wants = {}
    world.process().call = lambda *_: None  # the request gets lost
    world.change({"image": "good-2"})
    world.until(lambda: "held" in world.status)
    assert world.status["phase"] == "Running"
    assert world.condition("Stalled")["status"] == "True"
    assert "upgrade.fallback is Fail" in world.condition("Stalled")["message"]
    world.until(lambda: world.status.get("held", {}).get("attempts") == 3, 2_000)
    calls = len(world.done(act.CallJob))
    for _ in range(200):
        world.step()
    assert len(world.done(act.CallJob)) == calls
    assert world.status["run"]["number"] == 1


def test_the_fallback_refuses_a_checkpoint_that_is_too_old() -> None:
    world = World(upgrade={"maxCheckpointAge": "2m", "timeout": "1m"}).stable()
    process = world.process()
    process.call = lambda *_: None
    process.tick = lambda *_: None  # it takes no checkpoint any more
    world.change({"image": "good-2"})
    world.step(10 * 60_000)
    world.until(lambda: "held" in world.status)
    assert "upgrade.maxCheckpointAge is 2m" in world.status["held"]["reason"]


def test_without_that_bound_the_last_checkpoint_is_used() -> None:
    world = World(upgrade={"timeout": "1m"}).stable()
    world.process().call = lambda *_: None
    world.change({"image": "good-2"})
    world.phase("Upgrading").running()
    assert "NoSavepoint" in world.events()
    assert world.status["run"]["number"] == 2


def test_a_bad_image_is_rolled_back_with_state_and_not_tried_again() -> None:
    world = World(upgrade={"rollback": {"progressDeadline": "2m"}}).stable()
    first = world.status["run"]["revision"]
    world.change({"image": "bad-pull"})
    world.phase("Upgrading").until(lambda: world.status["run"]["number"] == 2)
    world.until(lambda: "ImagePullBackOff: no such image" in world.status.get("message", ""))
    world.phase("RollingBack").running()
    assert world.status["run"]["revision"] == first
    assert world.status["run"]["start"]["kind"] == "Latest"
    assert world.condition("Degraded")["reason"] == "RolledBack"
    assert "ImagePullBackOff" in world.condition("Degraded")["message"]
    number = world.status["run"]["number"]
    for _ in range(300):
        world.step()
    assert world.status["run"]["number"] == number
    world.change({"image": "good-2"})
    world.phase("Upgrading").running()
    assert world.condition("Degraded")["status"] == "False"


def test_without_rollback_a_bad_image_stalls_with_the_words_of_the_pod() -> None:
    world = World(upgrade={"rollback": {"enabled": False}}).stable()
    world.change({"image": "bad-pull"})
    world.phase("Upgrading").until(lambda: world.status["run"]["number"] == 2)
    world.step(40 * 60_000)
    world.until(lambda: world.condition("Stalled")["status"] == "True")
    message = world.condition("Stalled")["message"]
    assert message.startswith("Upgrading for more than")
    assert "pod flights-head-0: ImagePullBackOff: no such image" in message


def test_a_revision_whose_head_can_never_begin_is_rolled_back_at_once_with_its_words() -> None:
    world = World().stable()
    first = world.status["run"]["revision"]
    world.change({"image": "bad-manifest"})
    world.phase("Upgrading").until(lambda: world.status["run"]["number"] == 2)
    world.until(lambda: "rejected" in world.status, steps_max=30).running()
    assert world.status["run"]["revision"] == first
    assert world.condition("Degraded")["reason"] == "RolledBack"
    reason = "the job cannot begin: the variable FARE is not set"
    assert world.condition("Degraded")["message"] == reason


@pytest.mark.parametrize("strategy", ["Never", "ExponentialDelay"])
def test_a_job_whose_head_can_never_begin_fails_at_once_with_its_words(strategy: str) -> None:
    world = World(image="bad-manifest", restartPolicy={"strategy": strategy})
    world.until(lambda: "ended" in world.status.get("run", {}), steps_max=60)
    assert not world.cluster.pods()
    for _ in range(20):
        world.step()
    assert world.status["run"]["number"] == 1
    assert world.status["message"] == "the job cannot begin: the variable FARE is not set"
    assert world.condition("Degraded")["message"] == world.status["message"]
    world.change({"image": "good-1"})
    world.running()


def test_a_suspended_job_has_no_pods_and_resumes_where_it_was() -> None:
    world = World().stable()
    world.process().position = 700
    world.change({"state": "Suspended"})
    world.phase("Suspending").phase("Suspended")
    world.until(lambda: not world.cluster.pods())
    assert ("StatefulSet", "flights-head") not in world.cluster.objects
    world.change({"state": "Running"})
    world.running()
    assert world.cluster.storage.claims[-1][1] >= 700


@pytest.mark.parametrize(
    ("mode", "maker"),
    [("Managed", ("Deployment", "flights-workers")), ("KubeRay", ("RayCluster", "flights-ray"))],
)
def test_a_rescale_leaves_the_pods_of_the_head_alone(mode: str, maker: tuple[str, str]) -> None:
    world = World(workers={"slots": 2}, ray={"mode": mode}).stable()
    head = world.head()["metadata"]["uid"]
    world.change(parallelism=8)
    world.until(lambda: world.process().parallelism == 8)
    world.until(lambda: world.status["parallelism"]["current"] == 8)
    assert workers_of(world.cluster.objects[maker]) == 4
    world.until(lambda: world.status["workers"] == {"ready": 4, "desired": 4})
    world.change(parallelism=2)
    world.until(lambda: world.status["parallelism"]["current"] == 2)
    world.until(lambda: workers_of(world.cluster.objects[maker]) == 1)
    assert world.head()["metadata"]["uid"] == head
    assert world.status["run"]["number"] == 1
    assert world.events().count("Rescaled") == 2


@pytest.mark.parametrize("mode", ["Managed", "KubeRay"])
def test_a_rescale_is_one_of_all_groups(mode: str) -> None:
    """The operator waits for the workers of each of them, and takes none away before it is done."""
    world = World(spec=IN_GROUPS, ray={"mode": mode}).stable()
    names = ("flights-workers", "flights-workers-gpu")

    def replicas() -> list[int]:
        children = world.cluster.objects
        if mode == "KubeRay":
            groups = children["RayCluster", "flights-ray"]["spec"]["workerGroupSpecs"]
            return [each["replicas"] for each in groups]
        return [children["Deployment", each]["spec"]["replicas"] for each in names]

    start = world.process().parallelism
    assert replicas() == [start, start]
    world.change(parallelism=6)
    world.until(lambda: world.status["parallelism"]["current"] == 6)
    assert replicas() == [6, 6]
    assert world.status["workers"]["desired"] == 12
    world.change(parallelism=1)
    world.until(lambda: world.status["parallelism"]["current"] == 1)
    world.until(lambda: replicas() == [1, 1])


def test_a_rescale_that_fails_is_tried_three_times() -> None:
    world = World().stable()
    process = world.process()

    def refuse(trigger: str, *_: Any) -> None:
        process.operations[trigger] = act.Operation("failed", error="max parallelism is 3")

    process.call = refuse
    world.change(parallelism=4)
    world.until(lambda: world.condition("Stalled")["status"] == "True", 1_000)
    assert "the rescale to 4 failed: max parallelism is 3" in world.condition("Stalled")["message"]
    assert len({each.trigger_id for each in world.done(act.CallJob)}) == 3
    assert world.status["phase"] == "Running"


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [("SavepointThenStop", {"savepoint": True, "native": False}), ("Stop", {"savepoint": False})],
)
def test_a_deleted_job_saves_its_state_and_leaves_it(policy: str, arguments: Any) -> None:
    world = World(deletion={"policy": policy}).stable()
    assert world.status["onDeletion"] == f"{policy}; keeps checkpoints, keeps savepoints"
    world.cluster.delete(*JOB_KEY)
    world.until(lambda: JOB_KEY not in world.cluster.objects)
    assert world.done(act.CallJob)[0].arguments == arguments
    assert world.cluster.storage.claims
    assert not world.cluster.pods()
    assert [key for key in world.cluster.objects if key[0] == "Job"] == []


def test_state_is_deleted_only_when_the_policy_says_so() -> None:
    world = World(deletion={"policy": "Abort", "stateRetention": "Delete"}).stable()
    world.cluster.delete(*JOB_KEY)
    world.until(lambda: JOB_KEY not in world.cluster.objects)
    assert world.done(act.CallJob) == []
    assert not world.cluster.storage.claims
    assert "StateDeleted" in world.events()


def test_the_same_name_again_goes_on_with_the_state_and_says_so() -> None:
    world = World().stable()
    world.process().position = 900
    world.cluster.delete(*JOB_KEY)
    world.until(lambda: JOB_KEY not in world.cluster.objects)
    made = copy.deepcopy(RESOURCE)
    made["metadata"]["uid"] = "u-2"
    world.cluster.put(made)
    world.running()
    assert world.condition("StateFound")["status"] == "True"
    assert "StateFound" in world.events()
    assert world.cluster.storage.claims[-1][0] == "u-2-1"
    assert world.cluster.storage.claims[-1][1] >= 900


def test_pods_do_not_begin_with_the_token_of_an_earlier_stream_job() -> None:
    world = World()
    made = {
        "kind": "Secret",
        "metadata": {"name": "flights-token", "labels": {"headgate.io/job": "flights"}},
    }
    world.cluster.put(made)  # orphaned: nobody collects it
    for _ in range(10):
        world.step()
    assert ("StatefulSet", "flights-head") not in world.cluster.objects
    assert (
        "Secret flights-token of an earlier StreamJob has to be deleted" in world.status["message"]
    )
    del world.cluster.objects["Secret", "flights-token"]
    world.running()


def test_a_restore_happens_once_per_nonce() -> None:
    world = World().stable()
    world.cluster.storage.savepoints["s3://b/old"] = 1
    world.cluster.allowed.add("s3://b/old")
    world.change({"restore": {"path": "s3://b/old", "nonce": 1}})
    world.phase("Upgrading").running()
    assert world.status["run"]["start"] == {"kind": "Path", "path": "s3://b/old"}
    for _ in range(50):
        world.step()
    assert world.status["run"]["number"] == 2
    world.change({"restore": {"path": "s3://b/old", "nonce": 2}})
    world.until(lambda: world.status["restoreNonce"] == 2)
    assert "RestoreRefused" in world.events()
    assert world.status["run"]["number"] == 2


def test_a_restore_waits_for_its_snapshot() -> None:
    world = World(restore={"snapshotRef": {"name": "monday"}})
    world.step()
    world.step()
    assert world.status["message"] == "there is no StreamSnapshot monday"
    assert "run" not in world.status
    world.cluster.storage.savepoints["s3://b/old"] = 1
    world.cluster.allowed.add("s3://b/old")
    made = {"kind": "StreamSnapshot", "metadata": {"name": "monday", "uid": "s", "finalizers": []}}
    # It is one of another job.
    spec, status = {"jobRef": {"name": "clicks"}}, {"phase": "Completed", "path": "s3://b/old"}
    world.cluster.put({**made, "spec": spec, "status": status})
    world.running()
    assert world.status["run"]["start"] == {"kind": "Path", "path": "s3://b/old"}


def test_a_paused_job_is_left_alone() -> None:
    world = World().stable()
    metadata = {**world.job["metadata"], "annotations": {"headgate.io/paused": "true"}}
    world.cluster.put({**world.job, "metadata": metadata})
    world.change({"image": "good-2"})
    world.cluster.delete("Service", "flights-head")
    world.actions.clear()
    for _ in range(20):
        world.step()
    kinds = {type(each) for each in world.actions}
    assert kinds <= {act.SetStatus, act.Requeue}
    assert world.condition("Progressing")["reason"] == "Paused"
    assert world.status["observedGeneration"] == 1


def test_a_wrong_spec_leaves_the_job_as_it_runs() -> None:
    world = World().stable()
    world.change({"imagge": "x"})
    for _ in range(5):
        world.step()
    assert world.condition("Accepted")["status"] == "False"
    assert world.condition("Accepted")["message"].startswith(
        "spec.kubernetes.imagge: unknown field"
    )
    assert world.status["phase"] == "Running"
    world.cluster.delete("Service", "flights-head")
    world.until(lambda: ("Service", "flights-head") in world.cluster.objects)


def test_a_new_operator_leaves_running_pods_alone_and_updates_what_is_around_them() -> None:
    world = World().stable()
    head = dict(world.head())
    changed = copy.deepcopy(head)
    changed["spec"]["template"]["spec"]["containers"][0]["command"].append("--of-an-older-operator")
    changed["metadata"]["annotations"][CONTENT] = "other"
    world.cluster.put(changed)
    service = copy.deepcopy(world.cluster.objects["Service", "flights-head"])
    service["metadata"]["annotations"][CONTENT] = "other"
    world.cluster.put(service)
    world.actions.clear()
    for _ in range(5):
        world.step()
    assert [each.object["kind"] for each in world.done(act.Replace)] == ["Service"]
    assert "--of-an-older-operator" in world.command()


def test_a_finished_job_ends_without_pods() -> None:
    world = World().stable()
    world.process().end("FINISHED", world.cluster.now_ms)
    world.phase("Finished").until(lambda: not world.cluster.pods())
    assert world.condition("Ready")["status"] == "False"
    for _ in range(20):
        world.step()
    assert world.status["run"]["number"] == 1


def test_a_failed_job_stays_failed_unless_the_policy_restarts_it() -> None:
    world = World().stable()
    world.process().end("FAILED", world.cluster.now_ms)
    world.phase("Failed").until(lambda: "transition" not in world.status)
    assert world.status["message"] == "the job failed"
    world = World(restartPolicy={"strategy": "ExponentialDelay", "maxAttempts": 2}).stable()
    for attempt in (1, 2):
        world.process().end("FAILED", world.cluster.now_ms)
        world.phase("Restarting").running()
        assert world.status["restarts"] == attempt
        assert world.status["run"]["start"]["kind"] == "Latest"
    world.process().end("FAILED", world.cluster.now_ms)
    world.phase("Failed")


def test_a_lost_head_is_the_same_run_again() -> None:
    world = World().stable()
    world.cluster.processes.clear()
    del world.cluster.objects["Pod", "flights-head-0"]
    world.operator.step()
    assert world.status["phase"] == "Degraded"
    assert world.condition("Ready")["status"] == "False"
    world.running()
    assert world.status["run"]["number"] == 1
    assert world.cluster.storage.claims[-1][0] == "u-1-1"


def test_periodic_savepoints_are_kept_in_number() -> None:
    world = World(savepoints={"every": "10m", "retain": 2}).running()
    for _ in range(120):
        world.step(60_000)
    snapshots = [
        each for (kind, _), each in world.cluster.objects.items() if kind == "StreamSnapshot"
    ]
    completed = [each for each in snapshots if each["status"]["phase"] == "Completed"]
    assert 2 <= len(completed) <= 3
    assert len(world.cluster.storage.savepoints) <= 4


def until_time(world: World, text: str, step_ms: int = 10 * MINUTE_MS) -> None:
    """Let time pass until this moment in UTC."""
    until_ms = minute(text) * MINUTE_MS
    while world.cluster.now_ms < until_ms:
        world.step(min(step_ms, until_ms - world.cluster.now_ms))


def minute(text: str) -> int:
    """A moment of November 2023 in UTC, as minutes since 1970. Worlds begin on the 14th at 22:13."""
    at = datetime.strptime(f"2023-11-{text}", "%Y-%m-%d %H:%M").replace(tzinfo=UTC)
    return int(at.timestamp()) // 60


def periodic(world: World) -> list[str]:
    found = [each for (kind, _), each in world.cluster.objects.items() if kind == "StreamSnapshot"]
    assert all(each["spec"]["deletionPolicy"] == "Delete" for each in found)
    return sorted(each["metadata"]["name"] for each in found)


def test_savepoints_are_taken_by_a_schedule() -> None:
    schedule = {"schedule": "30 2 * * *", "timeZone": "Europe/Berlin", "retain": 9}
    world = World(savepoints=schedule).running()
    until_time(world, "15 01:29")
    assert periodic(world) == []
    until_time(world, "17 01:40")
    nights = ("15 01:30", "16 01:30", "17 01:30")
    assert periodic(world) == [f"flights-{minute(night)}" for night in nights]


def test_a_schedule_does_not_begin_with_a_savepoint_of_hours_ago() -> None:
    world = World().running()
    until_time(world, "15 04:00")
    world.change({"savepoints": {"schedule": "30 1 * * *"}})
    until_time(world, "16 01:20")
    assert periodic(world) == []
    until_time(world, "16 01:40")
    assert periodic(world) == [f"flights-{minute('16 01:30')}"]


@pytest.mark.parametrize("savepoints", [{"every": "2h"}, {"schedule": "0 */2 * * *"}])
def test_a_savepoint_that_is_due_while_the_job_restarts_is_taken_when_it_runs(
    savepoints: dict[str, str],
) -> None:
    world = World(savepoints=savepoints).running()
    until_time(world, "14 23:59")
    world.process().state = "RESTARTING"
    until_time(world, "15 00:02")
    assert periodic(world) == []
    world.process().state = "RUNNING"
    world.step()
    assert len(periodic(world)) == 1


def test_every_phase_but_the_resting_ones_has_a_deadline() -> None:
    from typing import get_args

    from headgate.k8s.context import Context
    from headgate.k8s.status import Phase

    for phase in get_args(Phase):
        status = StreamJobStatus(phase=phase)
        context = Context(RESOURCE, status, act.Observed(), 0, Settings())
        assert bool(deadline_ms(context)) == (phase not in RESTING), phase


def test_the_result_is_data() -> None:
    world = World()
    result = reconcile(world.job, StreamJobStatus(), act.Observed(), 0, Settings())
    assert all(isinstance(each, act.Action) for each in result.actions)
    to_builtins(result.status)


def test_a_checkpoint_of_its_own_is_no_state_that_was_found() -> None:
    world = World().stable()
    process = world.process()
    assert process.checkpoint(world.cluster.now_ms)
    process.restored = "checkpoint 3"  # a new coordinator of the run counts its restarts from 0
    for _ in range(3):
        world.step(60_000)
    assert world.status["checkpoint"]["id"] > 0
    assert "StateFound" not in world.events()
