"""The loop: from a change to a key, then to the observations, to a decision, and to its execution."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

import msgspec

from ...errors import HeadgateError
from ...operators.clock import Clock
from ..actions import Action, Coordinators, JobReport, Object, Observed
from ..objects import JOB, Settings, token_name
from ..pod_troubles import NOT_CREATED, wants_pods
from ..reconcile import reconcile
from ..snapshots import (
    SnapshotView,
    cleaning_name,
    is_at_rest,
    reconcile_snapshot,
    restored_snapshot,
)
from ..status import StreamJobStatus, StreamSnapshotStatus
from .api import Api, ApiError
from .endpoints import WatchHealth
from .execute import Executor
from .informer import Informer
from .kinds import CHILDREN, POD, SECRET, STREAM_JOB, STREAM_SNAPSHOT, WATCHED, Kind
from .metrics import Metrics
from .queue import Key, WorkQueue

WORKERS: Final = 8
"""The number of concurrent reconciliations, each of another resource."""
log = logging.getLogger(__name__)


class Controller:
    """All parts that work while the operator leads."""

    def __init__(
        self,
        api: Api,
        coordinators: Coordinators,
        settings: Settings,
        namespaces: Sequence[str],
        instance: str,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """Prepare the controller; it sends no request yet.

        Args:
            namespaces: the namespaces that are watched; none: the whole cluster.
            instance: the name of this process, for events.
            clock: the clocks of this machine.
        """
        self._api = api
        self._coordinators = coordinators
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._listed = False
        """Everything was listed once, so changes from now on are new."""
        self.queue = WorkQueue(clock.monotonic)
        self.informers = [
            Informer(
                api, kind, namespace, self._changed, clock.monotonic, appeared=self._reconcile_jobs
            )
            for kind in WATCHED
            for namespace in (namespaces or [""])
        ]
        self._executor = Executor(
            api, coordinators, self._written, instance, lambda: micro_time(clock)
        )

    async def run(self) -> None:
        """Watch and reconcile until this is cancelled; no reconciliation begins before all is listed."""
        self._metrics.watch_queue(self.queue.oldest_s)
        async with asyncio.TaskGroup() as group:
            for informer in self.informers:
                group.create_task(informer.run())
                self._metrics.watch_kind(informer.kind.name, partial(self._heard_s, informer.kind))
            for informer in self.informers:
                await informer.synced.wait()
            self._listed = True
            log.info("all resources are listed")
            for _ in range(WORKERS):
                group.create_task(self._work())

    def watches(self) -> list[WatchHealth]:
        """Return the health of each watch."""
        now_s = self._clock.monotonic()
        return [
            WatchHealth(
                each.kind.plural, each.namespace, now_s - each.heard_s, each.trouble, each.missing
            )
            for each in self.informers
        ]

    def _heard_s(self, kind: Kind) -> float:
        """Return the time of the last message to a kind's quietest watch, in seconds since 1970."""
        heard_s = min(informer.heard_s for informer in self.informers if informer.kind == kind)
        return self._clock.now_ms() / 1000 - (self._clock.monotonic() - heard_s)

    async def _work(self) -> None:
        while True:
            await self.reconcile_once(await self.queue.next())

    async def reconcile_once(self, key: Key) -> None:
        """Reconcile one resource, and put it back into the queue."""
        began, outcome = self._clock.monotonic(), "success"
        try:
            after_ms = await self._reconcile(key)
        except HeadgateError as error:
            conflict = isinstance(error, ApiError) and error.status == 409
            outcome = "conflict" if conflict else "error"
            log.log(logging.INFO if conflict else logging.WARNING, "%s %s/%s: %s", *key, error)
            self.queue.failed(key, error.retry_after_s if isinstance(error, ApiError) else 0.0)
        except Exception:
            outcome = "error"
            log.exception("%s %s/%s: this is a mistake in the operator", *key)
            self.queue.failed(key)
        else:
            self.queue.done(key)
            if after_ms is not None:
                self.queue.add(key, after_ms / 1000)
        self._metrics.reconciled(key[0], outcome, self._clock.monotonic() - began)

    async def _reconcile(self, key: Key) -> int | None:
        kind, namespace, name = key
        resource = self._get(kind, namespace, name)
        if resource is None:
            return None
        now_ms = self._clock.now_ms()
        actions: tuple[Action, ...]
        if kind == STREAM_JOB.name:
            job_status = msgspec.convert(resource.get("status", {}), StreamJobStatus)
            observed = await self._observe(resource)
            result = reconcile(resource, job_status, observed, now_ms, self._settings)
            actions = result.actions
            self._metrics.resources.deadline(namespace, name, result.deadline_ms)
        else:
            status = msgspec.convert(resource.get("status", {}), StreamSnapshotStatus)
            view = await self._view(resource)
            decided = reconcile_snapshot(resource, status, view, now_ms, self._settings)
            actions = decided.actions
        return await self._executor.execute(resource, actions)

    async def _observe(self, resource: Object) -> Observed:
        namespace, name = resource["metadata"]["namespace"], resource["metadata"]["name"]
        children = {
            (kind.name, child["metadata"]["name"]): child
            for kind in CHILDREN
            for child in self._all(kind.name, namespace)
            if _job_label(child) == name
        }
        # Secrets are not watched, so the one of the job is requested.
        secret = await self._api.get(SECRET, namespace, token_name(name))
        if secret is not None:
            children["Secret", token_name(name)] = {"kind": "Secret"} | secret
        pods = tuple(pod for pod in self._all(POD.name, namespace) if _job_label(pod) == name)
        snapshots = tuple(
            each
            for each in self._all(STREAM_SNAPSHOT.name, namespace)
            if each["spec"]["jobRef"]["name"] == name
        )
        report: JobReport | None = None
        if pods:
            report = await self._coordinators.report(namespace, name)
        wanted = restored_snapshot(resource)
        restored = self._get(STREAM_SNAPSHOT.name, namespace, wanted) if wanted else None
        refusals: list[Object] = []
        for maker in filter(wants_pods, children.values()):
            uid = str(maker["metadata"]["uid"])
            refusals += await self._api.events(namespace, uid, NOT_CREATED)
        return Observed(children, pods, snapshots, restored, report, tuple(refusals))

    async def _view(self, snapshot: Object) -> SnapshotView:
        namespace, job = snapshot["metadata"]["namespace"], snapshot["spec"]["jobRef"]["name"]
        cleaning = self._get("Job", namespace, cleaning_name(snapshot["metadata"]["name"]))
        resource = self._get(STREAM_JOB.name, namespace, job)
        report = await self._coordinators.report(namespace, job) if resource is not None else None
        jobs = tuple(self._all(STREAM_JOB.name, namespace))
        return SnapshotView(resource, report, cleaning, jobs)

    def _get(self, kind: str, namespace: str, name: str) -> Object | None:
        for informer in self._of(kind, namespace):
            found = informer.get(namespace, name)
            if found is not None:
                return found
        return None

    def _all(self, kind: str, namespace: str) -> Iterable[Object]:
        for informer in self._of(kind, namespace):
            yield from (each for each in informer if each["metadata"]["namespace"] == namespace)

    def _of(self, kind: str, namespace: str) -> Iterable[Informer]:
        for informer in self.informers:
            if informer.kind.name == kind and informer.namespace in ("", namespace):
                yield informer

    def _reconcile_jobs(self) -> None:
        """Reconcile all jobs, because a kind now exists for which they may have waited."""
        for informer in self.informers:
            if informer.kind == STREAM_JOB:
                for job in informer:
                    self._changed(job)

    def _written(self, made: Object) -> None:
        """Take an object that the operator has written; only other resources are reconciled for it.

        Its own reconciliation says when it is due again. If it were due at once, a status that differs
        each time, such as that of a job with many checkpoints, would be written without a pause.
        """
        for informer in self._of(made["kind"], made["metadata"]["namespace"]):
            informer.put(made)
        self._measure(made)
        for key in self._dependents(made):
            self.queue.add(key)

    def _changed(self, made: Object) -> None:
        """Reconcile everything that depends on this object."""
        kind, metadata = made["kind"], made["metadata"]
        if kind in (STREAM_JOB.name, STREAM_SNAPSHOT.name):
            self.queue.add((kind, metadata["namespace"], metadata["name"]))
        self._measure(made)
        for key in self._dependents(made):
            self.queue.add(key)

    def _measure(self, made: Object) -> None:
        """Add a resource to the metrics, or remove it."""
        kind, namespace, name = (
            made["kind"],
            made["metadata"]["namespace"],
            made["metadata"]["name"],
        )
        resources, known = self._metrics.resources, self._get(kind, namespace, name)
        if kind == STREAM_JOB.name and known is None:
            resources.job_gone(namespace, name)
        elif kind == STREAM_JOB.name:
            resources.job(made, first=not self._listed)
        elif kind == STREAM_SNAPSHOT.name and known is None:
            resources.snapshot_gone(namespace, name)
        elif kind == STREAM_SNAPSHOT.name:
            resources.snapshot(made, first=not self._listed)

    def _dependents(self, made: Object) -> Iterable[Key]:
        """Return the other resources whose reconciliation looks at this object."""
        kind, metadata = made["kind"], made["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        if kind == STREAM_SNAPSHOT.name:
            yield STREAM_JOB.name, namespace, made["spec"]["jobRef"]["name"]
        if kind == STREAM_JOB.name:
            for snapshot in self._all(STREAM_SNAPSHOT.name, namespace):
                named = snapshot["metadata"]["name"]
                used = snapshot["spec"]["jobRef"]["name"] == name or named == restored_snapshot(
                    made
                )
                if used and not is_at_rest(snapshot):
                    yield STREAM_SNAPSHOT.name, namespace, named
        for owner in metadata.get("ownerReferences", ()):
            if owner["kind"] == STREAM_SNAPSHOT.name:
                yield owner["kind"], namespace, owner["name"]
        job = _job_label(made)
        if job:
            yield STREAM_JOB.name, namespace, job


def micro_time(clock: Clock) -> str:
    """Return the time of day in the form of Events and Leases."""
    now = datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _job_label(made: Object) -> str:
    return str(made["metadata"].get("labels", {}).get(JOB, ""))
