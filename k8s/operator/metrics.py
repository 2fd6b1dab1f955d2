"""The operator's metrics about itself, and about the resources that it watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..actions import Object
from ..status import Phase, Verb, since_1970_ms

PHASES: Final[tuple[str, ...]] = get_args(Phase)
TRANSITIONS: Final = tuple(verb.lower() for verb in get_args(Verb))
OUTCOMES: Final = ("completed", "failed", "abandoned")
"""Phases in which a StreamSnapshot ends."""
_JOB: Final = ("namespace", "job_name")
_Job = tuple[str, str]


@dataclass(slots=True)
class _JobFigures:
    """The figures of one StreamJob.

    Attributes:
        status: the status that was seen last.
        deadline_ms: the time when its phase has lasted too long, since 1970; 0: never.
        transitions: the number of each kind that has begun since this process leads.
    """

    status: Object = field(default_factory=dict)
    deadline_ms: int = 0
    transitions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRANSITIONS, 0))
    snapshots: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))


class Resources(Collector):
    """Metrics of StreamJobs and StreamSnapshots, made from their statuses when metrics are read.

    A counter begins at 0 when this process begins to lead. It counts changes that this process makes or
    sees, and nothing in the first list. The series of a StreamJob end when it is deleted.
    """

    def __init__(self) -> None:
        self._jobs: dict[_Job, _JobFigures] = {}
        self._ended: dict[_Job, bool] = {}
        """By namespace and name of a StreamSnapshot: whether it had ended when it was seen last."""

    def job(self, resource: Object, *, first: bool) -> None:
        """Note a StreamJob that was seen, with `first` in the first list."""
        metadata, status = resource["metadata"], resource.get("status", {})
        key = (metadata["namespace"], metadata["name"])
        figures = self._jobs.setdefault(key, _JobFigures())
        now, before = _transition(status), _transition(figures.status)
        if now != before and now and not first:
            figures.transitions[now[0].lower()] += 1
        figures.status = status

    def deadline(self, namespace: str, name: str, deadline_ms: int) -> None:
        """Note when the phase of a StreamJob has lasted too long, since 1970; 0: never."""
        figures = self._jobs.get((namespace, name))
        if figures is not None:
            figures.deadline_ms = deadline_ms

    def job_gone(self, namespace: str, name: str) -> None:
        """Note that a StreamJob no longer exists."""
        self._jobs.pop((namespace, name), None)

    def snapshot(self, resource: Object, *, first: bool) -> None:
        """Note a StreamSnapshot that was seen, with `first` in the first list."""
        metadata = resource["metadata"]
        key = (metadata["namespace"], metadata["name"])
        outcome = str(resource.get("status", {}).get("phase", "")).lower()
        ended = outcome in OUTCOMES
        if ended and not self._ended.get(key) and not first:
            figures = self._jobs.get((metadata["namespace"], resource["spec"]["jobRef"]["name"]))
            if figures is not None:
                figures.snapshots[outcome] += 1
        self._ended[key] = ended

    def snapshot_gone(self, namespace: str, name: str) -> None:
        """Note that a StreamSnapshot no longer exists."""
        self._ended.pop((namespace, name), None)

    def collect(self) -> Iterable[Metric]:
        """Return the series of all StreamJobs."""
        phase = GaugeMetricFamily(
            "headgate_job_phase",
            "1 for the phase that the StreamJob is in, and 0 for each other one",
            labels=(*_JOB, "phase"),
        )
        since = GaugeMetricFamily(
            "headgate_job_phase_since_timestamp_seconds",
            "When the StreamJob entered the phase that it is in",
            labels=_JOB,
        )
        deadline = GaugeMetricFamily(
            "headgate_job_phase_deadline_timestamp_seconds",
            "When the phase will have lasted too long; phases at rest have none",
            labels=_JOB,
        )
        condition = GaugeMetricFamily(
            "headgate_job_condition",
            "1 if a condition of the StreamJob is true, 0 if it is false; absent while it is unknown",
            labels=(*_JOB, "condition"),
        )
        transitions = CounterMetricFamily(
            "headgate_job_transitions",
            "Changes from one run to the next, or to none, that the operator began",
            labels=(*_JOB, "transition"),
        )
        snapshots = CounterMetricFamily(
            "headgate_job_snapshots",
            "StreamSnapshots that have ended, by outcome: completed, failed or abandoned",
            labels=(*_JOB, "outcome"),
        )
        for key, figures in self._jobs.items():
            status = figures.status
            for name in PHASES:
                phase.add_metric((*key, name), float(status.get("phase", "Pending") == name))
            if status.get("phaseSince"):
                since.add_metric(key, since_1970_ms(status["phaseSince"]) / 1000)
            if figures.deadline_ms:
                deadline.add_metric(key, figures.deadline_ms / 1000)
            for each in status.get("conditions", ()):
                if each["status"] != "Unknown":
                    condition.add_metric((*key, each["type"]), float(each["status"] == "True"))
            for name, count in figures.transitions.items():
                transitions.add_metric((*key, name), count)
            for name, count in figures.snapshots.items():
                snapshots.add_metric((*key, name), count)
        return phase, since, deadline, condition, transitions, snapshots


class Metrics:
    """The metrics of one process of the operator."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.resources = Resources()
        self._registry.register(self.resources)
        self._reconciles = Counter(
            "headgate_operator_reconciles",
            "Reconciliations, by kind of resource and outcome: success, conflict or error",
            ("kind", "outcome"),
            registry=self._registry,
        )
        for kind in ("StreamJob", "StreamSnapshot"):
            for outcome in ("success", "conflict", "error"):
                # The rate of errors is known to be 0 before there is one.
                self._reconciles.labels(kind, outcome)
        self._seconds = Histogram(
            "headgate_operator_reconcile_seconds",
            "Duration of reconciliations",
            ("kind",),
            registry=self._registry,
        )
        self._last_event = Gauge(
            "headgate_operator_watch_last_event_timestamp_seconds",
            "When the API server last said something about a kind of resource",
            ("resource",),
            registry=self._registry,
        )
        self._leader = Gauge(
            "headgate_operator_leader",
            "1 while this process leads, else 0",
            registry=self._registry,
        )
        self._oldest = Gauge(
            "headgate_operator_queue_oldest_seconds",
            "How long the oldest key of the work queue is overdue",
            ("queue",),
            registry=self._registry,
        )

    def reconciled(self, kind: str, outcome: str, seconds: float) -> None:
        """Count a reconciliation."""
        self._reconciles.labels(kind, outcome).inc()
        self._seconds.labels(kind).observe(seconds)

    def watch_kind(self, resource: str, heard_s: Callable[[], float]) -> None:
        """Show the time of the API server's last message about a kind, in seconds since 1970."""
        self._last_event.labels(resource).set_function(heard_s)

    def leads(self, leads: bool) -> None:
        """Note whether this process leads."""
        self._leader.set(leads)

    def watch_queue(self, oldest_s: Callable[[], float]) -> None:
        """Read the age of the queue's oldest key with the metrics."""
        self._oldest.labels("resources").set_function(oldest_s)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _transition(status: Object) -> tuple[Any, Any] | None:
    """Return the identity of a transition."""
    found = status.get("transition")
    return (found["verb"], found["startedAt"]) if found else None
