"""The operator's shell as the model has it: lagging views, actions that fail or only seem to, restarts."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headgate.k8s import actions as act
from headgate.k8s.objects import Settings
from headgate.k8s.reconcile import reconcile
from headgate.k8s.snapshots import SnapshotView, cleaning_name, reconcile_snapshot
from headgate.k8s.status import StreamJobStatus, StreamSnapshotStatus, paths_in_use

from .cluster import Broken, Cluster, Conflict

JOB_KEY = ("StreamJob", "flights")
STATUSES: dict[str, Any] = {"StreamJob": StreamJobStatus, "StreamSnapshot": StreamSnapshotStatus}


class Failed(Exception):
    """The API server or the coordinator did not answer, or said 500: it may have happened."""


@dataclass
class Operator:
    """One process of the operator.

    `faults` is how often something fails; `lag` how often a part of its view is not brought up to date.
    """

    cluster: Cluster
    faults: float = 0.0
    lag: float = 0.0
    view: act.Observed = field(default_factory=act.Observed)
    resources: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    deposed: bool = False
    """Another one leads, and this one does not know it: its view of the resources stands still."""
    late: list[tuple[dict[str, Any], tuple[act.Action, ...]]] = field(default_factory=list)
    """Actions of an operator that stands still in the middle of a list."""
    last_actions: list[act.Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.view = self.cluster.view()

    def look(self) -> None:
        """Bring the views up to date, each by itself, or not."""
        now, draw = self.cluster.view(), self.cluster.random.random
        if not self.deposed:
            kinds = ("StreamJob", "StreamSnapshot")
            self.resources = {
                key: each for key, each in self.cluster.objects.items() if key[0] in kinds
            }
        children = now.children if draw() >= self.lag else self.view.children
        pods = now.pods if draw() >= self.lag else self.view.pods
        snapshots = now.snapshots if draw() >= self.lag else self.view.snapshots
        coordinator = self.cluster.coordinator()
        answers = coordinator is not None and draw() >= self.faults
        job = coordinator.report() if coordinator is not None and answers else None
        self.view = act.Observed(children, pods, snapshots, now.restored, job)

    def step(self) -> None:
        """Reconcile everything once. An operator that stands still goes on first, or does nothing."""
        if self.late and self.cluster.random.random() < 0.7:
            return
        self.catch_up()
        self.look()
        self.last_actions = []
        for key in sorted(self.resources):
            self._reconcile(self.resources[key])

    def _reconcile(self, resource: dict[str, Any]) -> None:
        kind, now_ms = resource["kind"], self.cluster.now_ms
        status = msgspec.convert(resource.get("status", {}), STATUSES[kind])
        before = msgspec.to_builtins(status)
        result: Any
        if kind == "StreamJob":
            result = reconcile(resource, status, self.view, now_ms, Settings())
        else:
            cleaning = self.view.children.get(("Job", cleaning_name(resource["metadata"]["name"])))
            view = _view(self.resources.get(JOB_KEY), self.view.job, cleaning)
            result = reconcile_snapshot(resource, status, view, now_ms, Settings())
        if msgspec.to_builtins(status) != before:
            raise Broken("reconcile has changed the status that it was given")
        self.last_actions += result.actions
        self._execute(resource, result.actions)

    def _execute(self, resource: dict[str, Any], actions: tuple[act.Action, ...]) -> None:
        """One action after the other, until one fails."""
        draw = self.cluster.random.random
        for index, action in enumerate(actions):
            if index and draw() < self.faults / 10:
                self.late.append((resource, actions[index:]))
                return
            try:
                if draw() < self.faults:
                    raise Failed  # nothing happened
                self._do(resource, action)
                if draw() < self.faults:
                    raise Failed  # it happened
            except (Failed, Conflict):
                return

    def catch_up(self) -> None:
        """Go on where it stood still."""
        while self.late:
            resource, actions = self.late.pop()
            for action in actions:
                try:
                    self._do(resource, action, late=True)
                except (Failed, Conflict):
                    break

    def _do(self, resource: dict[str, Any], action: act.Action, *, late: bool = False) -> None:
        cluster = self.cluster
        key = (resource["kind"], resource["metadata"]["name"])
        match action:
            case act.SetStatus(status):
                self._set_status(key, resource, status)
            case act.AddFinalizer(name):
                self._finalizers(key, resource, lambda names: [*names, name])
            case act.RemoveFinalizer(name):
                self._remove_finalizer(key, resource, name)
            case act.Create(made):
                if made["kind"] == "Job":
                    self._check_cleaning(resource, made["metadata"]["name"], late)
                with contextlib.suppress(Conflict):  # that it exists already is no failure
                    cluster.create(dict(made))
            case act.Replace(made, version):
                found = cluster.get(made["kind"], made["metadata"]["name"])
                if found is None or found["metadata"]["resourceVersion"] != version:
                    raise Conflict
                cluster.put({**found, **made, "metadata": found["metadata"] | made["metadata"]})
            case act.Scale(kind, name, spec, version):
                cluster.change(kind, name, version, **spec)
            case act.Delete(_, name, uid, True):
                cluster.force(name, uid)
            case act.Delete(kind, name, uid):
                self._delete(kind, name, uid)
            case act.EmitEvent(_, reason, message):
                cluster.tell(f"event {reason}: {message}"[:200])
            case act.CallJob(run_id, verb, trigger, arguments):
                self._call(run_id, verb, trigger, dict(arguments))

    def _current(self, key: tuple[str, str], resource: dict[str, Any]) -> dict[str, Any]:
        found = self.cluster.get(*key)
        if found is None or found["metadata"]["uid"] != resource["metadata"]["uid"]:
            raise Conflict
        return found

    def _set_status(self, key: tuple[str, str], resource: dict[str, Any], status: Any) -> None:
        found = self._current(key, resource)
        if found["metadata"]["resourceVersion"] != resource["metadata"]["resourceVersion"]:
            raise Conflict
        written = msgspec.to_builtins(status)
        if written == found.get("status", {}):
            return
        before, after = found.get("status", {}), written
        if before.get("phase") != after.get("phase"):
            self.cluster.tell(f"{key[1]}: {after.get('phase')} ({after.get('message', '')})"[:200])
        if key[0] == "StreamJob":
            _check_runs(before.get("run"), after.get("run"))
        stored = self.cluster.put({**found, "status": written})
        resource["metadata"] = stored["metadata"]

    def _finalizers(self, key: Any, resource: dict[str, Any], change: Any) -> None:
        found = self._current(key, resource)
        metadata = found["metadata"]
        names = change(list(metadata.get("finalizers", [])))
        self.cluster.put({**found, "metadata": {**metadata, "finalizers": names}})

    def _remove_finalizer(self, key: Any, resource: dict[str, Any], name: str) -> None:
        cluster = self.cluster
        if key[0] == "StreamJob" and cluster.pods():
            raise Broken("the StreamJob is let go while it has pods")
        self._finalizers(key, resource, lambda names: [each for each in names if each != name])
        found = cluster.objects[key]
        if "deletionTimestamp" in found["metadata"] and not found["metadata"]["finalizers"]:
            cluster.tell(f"{key[1]} is gone")
            del cluster.objects[key]

    def _check_cleaning(self, resource: dict[str, Any], name: str, late: bool) -> None:
        """State is only deleted where a policy says so, of something that is being deleted."""
        found = self.cluster.get(resource["kind"], resource["metadata"]["name"])
        if found is None or found["metadata"]["uid"] != resource["metadata"]["uid"]:
            return  # made late: what it would delete is deleted, or not its own
        if "deletionTimestamp" not in found["metadata"]:
            raise Broken(f"state is deleted of something that is not: {name}")
        if resource["kind"] == "StreamSnapshot":
            policy = found["spec"].get("deletionPolicy", "Retain")
            job = self.cluster.get(*JOB_KEY)
            status = (job or {}).get("status", {})
            used = paths_in_use(msgspec.convert(status, StreamJobStatus))
            if not late and found["status"]["path"] in used:
                raise Broken(f"a savepoint is deleted that a run may begin with: {name}")
        else:
            deletion = found["spec"].get("kubernetes", {}).get("deletion", {})
            policy = deletion.get("stateRetention", "Retain")
        if policy != "Delete":
            raise Broken(f"state is deleted that the policy keeps: {name}")

    def _delete(self, kind: str, name: str, uid: str) -> None:
        found = self.cluster.get(kind, name)
        same = found is not None and found["metadata"]["uid"] == uid
        if kind in ("StatefulSet", "Deployment") and same:
            own = [
                pod
                for pod in self.cluster.pods()
                if pod["metadata"]["ownerReferences"][0]["uid"] == uid
            ]
            if own:
                raise Broken(f"{kind} {name} is deleted while it has pods")
        self.cluster.delete(kind, name, uid)

    def _call(self, run_id: str, verb: str, trigger: str, arguments: dict[str, Any]) -> None:
        cluster = self.cluster
        process = cluster.coordinator()
        if process is None or process.run_id != run_id or process.state != "RUNNING":
            raise Failed
        if trigger not in process.operations:
            cluster.tell(f"{verb} of {run_id}, trigger {trigger}")
        ends_ms = cluster.now_ms + cluster.random.randrange(1_000, 20_000)
        process.call(trigger, verb, copy.deepcopy(arguments), ends_ms)


def _view(job: act.Object | None, report: act.JobReport | None, cleaning: Any) -> SnapshotView:
    return SnapshotView(job, report, cleaning, () if job is None else (job,))


def _check_runs(before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
    """Numbers of runs only grow, and a run does not change what it was started with."""
    if before is None or after is None:
        return
    if after["number"] < before["number"]:
        raise Broken(f"run {after['number']} after run {before['number']}")
    fixed = ("revision", "start", "startedAt")
    if after["number"] == before["number"] and any(before[name] != after[name] for name in fixed):
        raise Broken(f"run {after['number']} is another one now")
