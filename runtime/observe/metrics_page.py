"""The page docs/metrics.md, made of the catalogue.

`python -m headgate.runtime.observe.metrics_page` prints it.
"""

from __future__ import annotations

from typing import Final

from .catalogue import (
    CATALOGUE,
    CHECKPOINT_METRICS,
    JOB_METRICS,
    LABELS,
    OPERATOR_METRICS,
    PROCESS_METRICS,
    STORAGE_METRICS,
    TASK_METRICS,
    MetricDoc,
)

_TITLES: Final = {
    "The job": ("From the coordinator.", JOB_METRICS),
    "Checkpoints": ("From the coordinator.", CHECKPOINT_METRICS),
    "Storage of checkpoints": (
        "From the coordinator and the workers, each of its own requests: to S3, or to a directory. They "
        "also count what savepoints at other addresses need. Storage in memory has no requests.",
        STORAGE_METRICS,
    ),
    "Tasks": (
        "From the workers. A task is a chain of operators that run together; its name is those of its "
        "operators, such as `windows -> out`. Counters begin at 0 with each attempt.",
        TASK_METRICS,
    ),
    "Operators": ("From the workers. Counters begin at 0 with each attempt.", OPERATOR_METRICS),
    "Processes": ("From each process of the job. Linux only.", PROCESS_METRICS),
}
_HEAD = """\
# Metrics

<!-- generated: python -m headgate.runtime.observe.metrics_page > docs/metrics.md -->

With the option `metrics.port` set, every process of a job serves its metrics in Prometheus' text format
under `/metrics`. Each process takes the first free port from `metrics.port` on, workers on the machine of
the coordinator the first free one above it; with `metrics.port` 0 all take any free port. A job that runs
in one process has one endpoint. `headgate list --json` shows all addresses under `metrics`:

```
$ headgate run ticker.yaml -D metrics.port=9249 &
$ headgate list --json | jq -r '.[].metrics[].url'
http://127.0.0.1:9249/metrics
http://127.0.0.1:9250/metrics
http://127.0.0.1:9251/metrics
```

Endpoints listen on loopback; `metrics.bind-host` changes that. They have no authentication: let only your
Prometheus reach them. A process that finds no free port says so in its log and runs without.

## Conventions

Names follow the conventions of Prometheus: they begin with `headgate_`, units are seconds and bytes,
counters end in `_total`, and durations are histograms. A value that is not known has no sample, rather than
`-1` or `NaN`. [A table below](#names-in-flink) has Flink's names.

All series have the label `job_name`. Those of tasks and operators also have `task`, `subtask` and, for
operators, `operator`. There is no label for the worker, because its name changes with every restart.
Prometheus adds `instance` by itself, and on Kubernetes `namespace` and `pod`. Elsewhere, give the scrape
job a label `namespace` if jobs of the same name run side by side.

The number of series stays bounded. In a task with more subtasks than `metrics.subtask-labels-max` (64) the
label `subtask` is left out, and each process shows one series for all its subtasks: their sum, or their
maximum or minimum where the tables say so.

## Metrics of your own

Function objects with an `open` method get a context, and connectors get the same one. Its `metrics` makes
counters, gauges and histograms, with labels if you like:

```python
class Enrich:
    def open(self, ctx):
        self.hits = ctx.metrics.counter("cache_lookups", labels={"result": "hit"})
        self.took = ctx.metrics.histogram("lookup_seconds")
        ctx.metrics.gauge("cache_entries", lambda: len(self.cache))
```

They appear as `headgate_user_cache_lookups_total`, `headgate_user_lookup_seconds` and
`headgate_user_cache_entries`, with the labels of their operator. An operator subtask may have
`metrics.user-series-max` (1000) such series. What goes beyond is counted in one series whose own labels are
all `other`, and the log says so once. A gauge whose function fails, or returns None, has no sample.
"""


def markdown() -> str:
    """docs/metrics.md."""
    parts = [_HEAD]
    for title, (text, metrics) in _TITLES.items():
        labels = ", ".join(f"`{label}`" for label in LABELS[metrics[0].scope])
        parts.append(f"\n## {title}\n\n{text} Labels: {labels}, and those in the table.\n")
        parts.append("\n| name | type | labels | meaning |\n|---|---|---|---|\n")
        parts.extend(map(_row, metrics))
    parts.append(
        "\n## Names in Flink\n\nFor those who know Flink's metrics, or have dashboards made for them.\n"
        "\n| Flink | headgate |\n|---|---|\n"
    )
    parts.extend(
        f"| `{name}` | `{metric.sample}` |\n" for metric in CATALOGUE for name in metric.flink
    )
    return "".join(parts)


def _row(metric: MetricDoc) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    merged = ""
    if metric.merge != "sum":
        merged = f" Without `subtask`: the {metric.merge}imum."
    return f"| `{metric.sample}` | {metric.kind} | {labels} | {metric.help}{merged} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
