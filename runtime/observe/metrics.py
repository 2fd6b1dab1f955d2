"""Metrics of one process, with Flink's names, as Prometheus text.

A counter is a plain Python int that one subtask adds to. All reading happens when somebody scrapes, in
the endpoint's thread: so a gauge may only look at single values, never walk over what the job changes.
Names: `headgate_<scope>_<name>`, as listed in catalogue.py.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .catalogue import OPERATOR, documentation

_INVALID = re.compile(r"[^a-zA-Z0-9_]")
_log = logging.getLogger("headgate.metrics")


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
    counters: dict[str, Callable[[], int]] = field(default_factory=dict)
    gauges: dict[str, Callable[[], float]] = field(default_factory=dict)
    _own: dict[str, PlainCounter] = field(default_factory=dict)

    def counter(self, name: str) -> PlainCounter:
        """The counter `name`; created on first use."""
        counter = self._own.get(name)
        if counter is None:
            counter = self._own[name] = PlainCounter()
            self.count(name, lambda: counter.value)
        return counter

    def count(self, name: str, read: Callable[[], int]) -> None:
        """Register a counter that somebody keeps already, read when metrics are scraped."""
        self.counters[name] = read

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Register a gauge, read when metrics are scraped."""
        self.gauges[name] = read


class MetricsGroup:
    """Scopes that come and go together: those of an attempt on a worker, or of a coordinator."""

    def __init__(self, registry: MetricsRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._labels = labels
        self._scopes: dict[tuple[str, ...], Scope] = {}

    def add(self, prefix: str, **labels: str) -> Scope:
        """The scope under `headgate_<prefix>_` with these labels; the same one if asked twice."""
        key = (prefix, *labels.values())
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = Scope(prefix, {**self._labels, **labels})
        return scope

    def operator(self, task_name: str, operator_name: str, subtask_index: int) -> Scope:
        """The scope of one operator subtask."""
        return self.add(
            OPERATOR,
            task_name=task_name,
            operator_name=operator_name,
            subtask_index=str(subtask_index),
        )

    def scopes(self) -> list[Scope]:
        """All scopes now."""
        return list(self._scopes.values())

    def close(self) -> None:
        """Forget all scopes. Safe to call twice."""
        self._registry.drop(self)


class MetricsRegistry(Collector):
    """All metrics of this process."""

    def __init__(self) -> None:
        self._groups: list[MetricsGroup] = []
        self._lock = threading.Lock()

    def group(self, **labels: str) -> MetricsGroup:
        """A new group; its scopes all have `labels`."""
        made = MetricsGroup(self, labels)
        with self._lock:
            self._groups.append(made)
        return made

    def drop(self, group: MetricsGroup) -> None:
        """Forget a group."""
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)

    def collect(self) -> Iterable[Metric]:
        """For prometheus_client: everything as metric families, values read now."""
        with self._lock:
            groups = list(self._groups)
        families: dict[str, Metric] = {}
        for scope in (scope for group in groups for scope in group.scopes()):
            for name, count in list(scope.counters.items()):
                _family(families, CounterMetricFamily, scope, name, count)
            for name, read in list(scope.gauges.items()):
                _family(families, GaugeMetricFamily, scope, name, read)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        """For prometheus_client: nothing is known before it is there."""
        return ()


def _family(
    families: dict[str, Metric],
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    scope: Scope,
    name: str,
    read: Callable[[], float],
) -> None:
    full = _INVALID.sub("_", f"headgate_{scope.prefix}_{name}")
    family = families.setdefault(full, kind(full, documentation(scope.prefix, name)))
    # A counter's sample ends in `_total`, as Prometheus wants it.
    sample = f"{full}_total" if kind is CounterMetricFamily else full
    family.add_sample(sample, scope.labels, _value(full, read))


def _value(name: str, read: Callable[[], float]) -> float:
    """A gauge may call user code: one that fails must not take all others with it."""
    try:
        return float(read())
    except Exception as error:
        _log.warning("a gauge could not be read name=`%s`: %s", name, error)
        return math.nan
