"""Processor time, memory and open files of this process, with the label of the job that it works for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .catalogue import BY_NAME, PREFIX
from .metrics import MetricsRegistry

CGROUP_FILES: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""The paths of the second and the first version of control groups, as a container sees its own."""
NO_LIMIT_BYTES: Final = 1 << 60
"""The first version writes a number about this large where there is no limit."""


class ProcessMetrics(Collector):
    """The figures of `ProcessCollector` of prometheus_client, once for each job of the registry."""

    def __init__(self, metrics: MetricsRegistry) -> None:
        self._metrics = metrics
        self._found = ProcessCollector(namespace=PREFIX.rstrip("_"), registry=None)

    def collect(self) -> Iterable[Metric]:
        """The figures of this process as metric families; prometheus_client calls this."""
        jobs = sorted(self._metrics.job_names)
        for found in self._found.collect():
            doc = BY_NAME[found.name.removeprefix(PREFIX)]
            family = CounterMetricFamily if doc.kind == "counter" else GaugeMetricFamily
            metric = family(found.name, doc.help, labels=["job_name"])
            for sample in found.samples:
                for job in jobs:
                    metric.add_metric([job], sample.value)
            yield metric
        limit = memory_limit_bytes()
        if limit is not None:
            doc = BY_NAME["process_memory_limit_bytes"]
            metric = GaugeMetricFamily(doc.sample, doc.help, labels=["job_name"])
            for job in jobs:
                metric.add_metric([job], limit)
            yield metric

    def describe(self) -> Iterable[Metric]:
        """Nothing: no metric is known before it exists; prometheus_client calls this."""
        return ()


def memory_limit_bytes(files: Iterable[Path] = CGROUP_FILES) -> int | None:
    """The memory limit of the container around this process; None: there is none."""
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < NO_LIMIT_BYTES:
            return int(text)
    return None
