"""Metrics of one process, with Flink's names, as Prometheus text.

A counter is a plain Python int that one subtask adds to; reading happens only when somebody scrapes.
Names: `headgate_taskmanager_job_task_<name>`, `..._task_operator_<name>`, `headgate_jobmanager_job_<name>`
(features.md section 4), with the labels job_name, task_name, operator_name, subtask_index, worker.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...operators.base import Metrics

LOOPBACK = "127.0.0.1"
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


class PlainCounter:
    """A metric that only grows; belongs to one thread."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """Add `amount`."""
        self.value += amount


@dataclass(slots=True)
class Scope:
    """The metrics of one thing that has labels: an operator subtask, a task, or a job."""

    prefix: str
    labels: dict[str, str]
    counters: dict[str, PlainCounter] = field(default_factory=dict)
    gauges: dict[str, Callable[[], float]] = field(default_factory=dict)

    def counter(self, name: str) -> PlainCounter:
        """The counter `name`; created on first use."""
        return self.counters.setdefault(name, PlainCounter())

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Register a gauge, read when metrics are scraped."""
        self.gauges[name] = read


class MetricsRegistry(Collector):
    """All metrics of this process."""

    def __init__(self, common: Mapping[str, str] | None = None) -> None:
        self.common = dict(common or {})
        self._scopes: list[Scope] = []
        self._lock = threading.Lock()
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    def scope(self, task_name: str, operator_name: str, subtask_index: int) -> Metrics:
        """The scope of one operator subtask."""
        return self.add(
            "taskmanager_job_task_operator",
            task_name=task_name,
            operator_name=operator_name,
            subtask_index=str(subtask_index),
        )

    def add(self, prefix: str, **labels: str) -> Scope:
        """A new scope under `headgate_<prefix>_`."""
        made = Scope(prefix, labels)
        with self._lock:
            self._scopes.append(made)
        return made

    def clear(self) -> None:
        """Forget all scopes: the attempt is over."""
        with self._lock:
            self._scopes.clear()

    def collect(self) -> Iterable[Metric]:
        """For prometheus_client: everything as metric families, values read now."""
        families: dict[str, Metric] = {}
        with self._lock:
            scopes = list(self._scopes)
        for scope in scopes:
            labels = {**self.common, **scope.labels}
            names, values = list(labels), list(labels.values())
            for name, counter in list(scope.counters.items()):
                key = _metric_name(scope.prefix, name)
                family = families.get(key)
                if family is None:
                    family = families[key] = CounterMetricFamily(key, name, labels=names)
                family.add_metric(values, counter.value)  # type: ignore[attr-defined]
            for name, read in list(scope.gauges.items()):
                key = _metric_name(scope.prefix, name)
                family = families.get(key)
                if family is None:
                    family = families[key] = GaugeMetricFamily(key, name, labels=names)
                family.add_metric(values, float(read()))  # type: ignore[attr-defined]
        return families.values()

    def serve(self, port: int, host: str = LOOPBACK) -> int:
        """Open the Prometheus endpoint; returns its port (`port` 0: a free one)."""
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, host, registry)
        return int(self._server.server_port)

    def close(self) -> None:
        """Close the endpoint."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def _metric_name(prefix: str, name: str) -> str:
    return _INVALID.sub("_", f"headgate_{prefix}_{name}")
