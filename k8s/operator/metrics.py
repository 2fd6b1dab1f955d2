"""The operator's own metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """The metrics of one process of the operator."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._reconciles = Counter(
            "headgate_operator_reconciles",
            "Reconciliations, by kind of resource and outcome: success, conflict or error",
            ("kind", "outcome"),
            registry=self._registry,
        )
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
        """Ask, whenever metrics are read, when the API server last spoke of a kind: seconds since 1970."""
        self._last_event.labels(resource).set_function(heard_s)

    def leads(self, leads: bool) -> None:
        """This process leads now, or no longer."""
        self._leader.set(leads)

    def watch_queue(self, oldest_s: Callable[[], float]) -> None:
        """Read the age of the queue's oldest key whenever metrics are read."""
        self._oldest.labels("resources").set_function(oldest_s)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
