"""Metrics of one process. `endpoint.py` serves them as Prometheus text.

A counter is a plain Python number that one subtask adds to. Metrics are read when they are scraped, in the
endpoint's thread: so a gauge may only look at single values, never walk over what the job changes.
Names are those of catalogue.py, without `headgate_` and `_total`.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from ...errors import UsageError
from ...operators.base import Counter, Histogram, Metrics
from .catalogue import BY_NAME, LATENCIES, PREFIX, USER_PREFIX, Kind, Merge

USER_SERIES_MAX: Final = 1000
SUBTASK_LABELS_MAX: Final = 64
OTHER: Final = "other"
"""The value of a user's labels in the series for all that is beyond the bound."""
_INVALID: Final = re.compile(r"[^a-zA-Z0-9_]")
_LABEL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
_RESERVED: Final = frozenset({"job_name", "task", "operator", "subtask", "le"})
_MERGE: Final[Mapping[Merge, Callable[[float, float], float]]] = {
    "sum": lambda a, b: a + b,
    "max": max,
    "min": min,
}
T = TypeVar("T")
_log = logging.getLogger("headgate.metrics")
NO_LABELS: Final[Mapping[str, str]] = {}


class PlainCounter:
    """A metric that only grows; belongs to one thread."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`."""
        self.value += amount


class PlainHistogram:
    """Counts values by their size; belongs to one thread."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value`."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Series(msgspec.Struct, frozen=True):
    """One line of a scrape, or of a histogram several."""

    name: str
    kind: Kind
    labels: dict[str, str]
    read: Callable[[], float | None] | None
    histogram: PlainHistogram | None = None
    split: Callable[[], Mapping[str, float] | None] | None = None
    """The values of several lines that differ in the label `split`."""


class Scope(msgspec.Struct):
    """The metrics of one thing that has labels: an operator subtask, a task, or a job.

    Attributes:
        labels: that all its metrics have.
        user_series_max: how many series users may make in it.
    """

    labels: dict[str, str]
    user_series_max: int = USER_SERIES_MAX
    _series: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = msgspec.field(
        default_factory=dict
    )
    _counters: dict[tuple[str, tuple[tuple[str, str], ...]], PlainCounter] = msgspec.field(
        default_factory=dict
    )
    _user_series: int = 0

    def counter(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> PlainCounter:
        """The counter `name`; created on first use."""
        key = self._key(name, labels)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = PlainCounter()
            self._add(key, "counter", lambda: counter.value)
        return counter

    def count(
        self, name: str, read: Callable[[], float], labels: Mapping[str, str] = NO_LABELS
    ) -> None:
        """Register a counter that is kept elsewhere, and read when metrics are scraped."""
        self._add(self._key(name, labels), "counter", read)

    def gauge(
        self, name: str, read: Callable[[], float | None], labels: Mapping[str, str] = NO_LABELS
    ) -> None:
        """Register a gauge, read when metrics are scraped; None and NaN: there is no value now."""
        self._add(self._key(name, labels), "gauge", read)

    def splits(self, name: str, read: Callable[[], Mapping[str, float] | None]) -> None:
        """Register a gauge with a value for each split of a source, by their names."""
        key = self._key(name, NO_LABELS)
        self._series[key] = Series(key[0], "gauge", self._labels(key), None, split=read)

    def histogram(
        self,
        name: str,
        buckets: Sequence[float] | None = None,
        labels: Mapping[str, str] = NO_LABELS,
    ) -> PlainHistogram:
        """The histogram `name`; created on first use. `buckets` are ascending upper bounds.

        Raises:
            UsageError: the bounds do not ascend.
        """
        key = self._key(name, labels)
        known = self._series.get(key)
        if known is not None and known.histogram is not None:
            return known.histogram
        if buckets is None:
            buckets = BY_NAME[key[0]].buckets if key[0] in BY_NAME else LATENCIES
        if list(buckets) != sorted(set(buckets)) or not buckets:
            raise UsageError(
                f"the buckets of a histogram ascend metric=`{name}` buckets=`{list(buckets)}`"
            )
        made = PlainHistogram(buckets)
        self.distribution(name, made, labels)
        return made

    def distribution(
        self, name: str, histogram: PlainHistogram, labels: Mapping[str, str] = NO_LABELS
    ) -> None:
        """Register a histogram that is kept elsewhere."""
        key = self._key(name, labels)
        self._series[key] = Series(key[0], "histogram", self._labels(key), None, histogram)

    def series(self) -> list[Series]:
        """All series now."""
        return list(self._series.values())

    def forget(self) -> None:
        """Forget all series."""
        self._series.clear()
        self._counters.clear()

    def counts(self) -> dict[str, float]:
        """The values of all counters without labels of their own, by name."""
        return {
            name: each.read() or 0
            for (name, labels), each in self._series.items()
            if each.kind == "counter" and each.read is not None and not labels
        }

    def _add(
        self,
        key: tuple[str, tuple[tuple[str, str], ...]],
        kind: Kind,
        read: Callable[[], float | None],
    ) -> None:
        self._series[key] = Series(key[0], kind, self._labels(key), read)

    def _labels(self, key: tuple[str, tuple[tuple[str, str], ...]]) -> dict[str, str]:
        return {**self.labels, **dict(key[1])}

    def _key(self, name: str, labels: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The name that is not the engine's gets the prefix of users' metrics, and counts as theirs."""
        if name in BY_NAME:
            return name, tuple(labels.items())
        clean = _INVALID.sub("_", name).removesuffix("_total")
        full = clean if clean.startswith(USER_PREFIX) else USER_PREFIX + clean
        key = full, tuple(sorted((str(k), str(v)) for k, v in labels.items()))
        if key in self._series:
            return key
        for label in labels:
            if not _LABEL.fullmatch(label) or label in _RESERVED:
                raise UsageError(
                    f"a metric cannot have this label metric=`{name}` label=`{label}`",
                    fix="use letters, digits and `_`, beginning with a letter, and none of "
                    + ", ".join(f"`{taken}`" for taken in sorted(_RESERVED)),
                )
        if self._user_series < self.user_series_max:
            self._user_series += 1
            return key
        if self._user_series == self.user_series_max:
            self._user_series += 1
            _log.warning(
                "too many series of metrics: the rest counts as `%s` metric=`%s` operator=`%s` "
                "metrics.user-series-max=`%s`",
                OTHER,
                name,
                self.labels.get("operator", ""),
                self.user_series_max,
            )
        return full, tuple((label, OTHER) for label, _ in key[1])


class UserMetrics:
    """A scope for a user's function: no metric that it makes is taken for one of the engine's."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def counter(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> Counter:
        """See `Metrics`."""
        return self._metrics.counter(USER_PREFIX + name, labels)

    def gauge(
        self, name: str, read: Callable[[], float | None], labels: Mapping[str, str] = NO_LABELS
    ) -> None:
        """See `Metrics`."""
        self._metrics.gauge(USER_PREFIX + name, read, labels)

    def histogram(
        self,
        name: str,
        buckets: Sequence[float] | None = None,
        labels: Mapping[str, str] = NO_LABELS,
    ) -> Histogram:
        """See `Metrics`."""
        return self._metrics.histogram(USER_PREFIX + name, buckets, labels)


class MetricsGroup:
    """Scopes that come and go together: those of an attempt on a worker, or of a coordinator."""

    def __init__(
        self,
        registry: MetricsRegistry,
        labels: dict[str, str],
        *,
        user_series_max: int = USER_SERIES_MAX,
    ) -> None:
        self._registry = registry
        self._labels = labels
        self._user_series_max = user_series_max
        self._scopes: dict[tuple[tuple[str, str], ...], Scope] = {}

    def add(self, **labels: str) -> Scope:
        """The scope with these labels; the same one if asked twice."""
        key = tuple(labels.items())
        scope = self._scopes.get(key)
        if scope is None:
            shown = {name: value for name, value in labels.items() if not name.startswith("_")}
            scope = Scope({**self._labels, **shown}, self._user_series_max)
            self._scopes[key] = scope
        return scope

    def task(self, task: str, subtask: int, *, labelled: bool = True) -> Scope:
        """The scope of one task subtask; `labelled`: its series have the label `subtask`."""
        return self.add(task=task, **_subtask(subtask, labelled))

    def operator(self, task: str, operator: str, subtask: int, *, labelled: bool = True) -> Scope:
        """The scope of one operator subtask."""
        return self.add(task=task, operator=operator, **_subtask(subtask, labelled))

    def scopes(self) -> list[Scope]:
        """All scopes now."""
        return list(self._scopes.values())

    def close(self) -> None:
        """Forget all scopes, and all that their series read. Safe to call twice."""
        self._registry.drop(self)
        for scope in self.scopes():
            scope.forget()
        self._scopes.clear()


def _subtask(index: int, labelled: bool) -> dict[str, str]:
    """A name that begins with `_` tells scopes apart and is no label of theirs."""
    return {"subtask" if labelled else "_subtask": str(index)}


class Sample(msgspec.Struct, frozen=True):
    """One number of a metric, under the name that Prometheus gives it."""

    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True):
    """A metric with its values of now."""

    name: str
    help: str
    kind: Kind
    samples: list[Sample]


class MetricsRegistry:
    """All metrics of this process."""

    def __init__(self) -> None:
        self._groups: list[MetricsGroup] = []
        self._lock = threading.Lock()
        self._complained: set[str] = set()

    def group(self, *, user_series_max: int = USER_SERIES_MAX, **labels: str) -> MetricsGroup:
        """A new group; its scopes all have `labels`."""
        made = MetricsGroup(self, labels, user_series_max=user_series_max)
        with self._lock:
            self._groups.append(made)
        return made

    def drop(self, group: MetricsGroup) -> None:
        """Forget a group."""
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)

    @property
    def job_names(self) -> set[str]:
        """The jobs that have metrics now."""
        with self._lock:
            return {name for group in self._groups if (name := group._labels.get("job_name"))}

    def collect(self) -> list[MetricFamily]:
        """Return all metrics, with the values of now."""
        with self._lock:
            groups = list(self._groups)
        families: dict[str, _Family] = {}
        for scope in (scope for group in groups for scope in group.scopes()):
            for series in scope.series():
                family = families.setdefault(series.name, _Family(series.name, series.kind))
                if family.kind != series.kind:
                    self._complain(
                        series.name,
                        f"one metric is a {family.kind} here and a {series.kind} there, which is not shown",
                    )
                elif series.histogram is not None:
                    family.observe(series.labels, series.histogram)
                elif series.split is not None:
                    for split, value in (self._read(series.name, series.split) or {}).items():
                        family.add({**series.labels, "split": split}, value)
                else:
                    assert series.read is not None
                    family.add(series.labels, self._read(series.name, series.read))
        return [family.collected() for family in families.values() if family.values]

    def _read(self, name: str, read: Callable[[], T | None]) -> T | None:
        """A gauge may call user code: one that fails must not take all others with it."""
        try:
            return read()
        except Exception as error:
            self._complain(name, f"a metric could not be read: {type(error).__name__}: {error}")
            return None

    def _complain(self, name: str, text: str) -> None:
        """Once for each metric: scrapes come every few seconds."""
        if name not in self._complained:
            self._complained.add(name)
            _log.warning("%s name=`%s`", text, PREFIX + name)


class _Family:
    """One metric while it is collected: series with the same labels become one."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.kind = kind
        self._name = name
        doc = BY_NAME.get(name)
        self._help = doc.help if doc is not None else f"A metric of the user: {name}."
        self._merge = _MERGE[doc.merge if doc is not None else "sum"]
        self.values: dict[tuple[tuple[str, str], ...], float | PlainHistogram] = {}

    def add(self, labels: dict[str, str], value: float | None) -> None:
        if value is None or math.isnan(value):
            return
        key = tuple(labels.items())
        before = self.values.get(key)
        self.values[key] = value if before is None else self._merge(float(before), value)  # type: ignore[arg-type]

    def observe(self, labels: dict[str, str], histogram: PlainHistogram) -> None:
        total = self.values.setdefault(tuple(labels.items()), PlainHistogram(histogram.bounds))
        assert isinstance(total, PlainHistogram)
        if total.bounds == histogram.bounds:
            counts = list(histogram.counts)
            total.counts = [a + b for a, b in zip(total.counts, counts, strict=True)]
            total.sum += histogram.sum

    def collected(self) -> MetricFamily:
        full = PREFIX + self._name
        samples: list[Sample] = []
        for key, value in self.values.items():
            labels = dict(key)
            if isinstance(value, PlainHistogram):
                samples += _samples_of(value, full, labels)
            else:
                # A counter's sample ends in `_total`, as Prometheus wants it.
                sample = f"{full}_total" if self.kind == "counter" else full
                samples.append(Sample(sample, labels, value))
        return MetricFamily(full, self._help, self.kind, samples)


def _bound_text(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else repr(float(bound))


def _samples_of(histogram: PlainHistogram, full: str, labels: dict[str, str]) -> Iterator[Sample]:
    total = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        total += count
        yield Sample(f"{full}_bucket", {**labels, "le": _bound_text(bound)}, total)
    yield Sample(f"{full}_count", labels, total)
    yield Sample(f"{full}_sum", labels, histogram.sum)
