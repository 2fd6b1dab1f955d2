"""Alert rules for Prometheus. Each has a page in docs/runbooks with its cause and the remedies.

A condition has thresholds by name, as `<lagRecords>`. The chart puts its values there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ...errors import UsageError
from .grafana import OPERATOR

RUNBOOKS: Final = "docs/runbooks"
"""The address of the pages in the repository."""
_JOB: Final = "namespace, job_name"


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number that a condition compares with.

    Attributes:
        name: the name in the chart's values, and between `<` and `>` in conditions.
        default: the value that the rules have if none is set.
        meaning: the meaning of a value above it, with its unit.
        is_share: True for a share, from 0 to 1; else it is a number of at least 0.
    """

    name: str
    default: float
    meaning: str
    is_share: bool = False


THRESHOLDS: Final = (
    Threshold("restarts", 3, "restarts of a job in 15 minutes"),
    Threshold("coordinatorRestarts", 2, "new coordinators of a job in 15 minutes"),
    Threshold("rollbacks", 0, "rollbacks of a StreamJob in an hour"),
    Threshold("failedSnapshots", 0, "StreamSnapshots of a job that failed in an hour"),
    Threshold("checkpointAgeIntervals", 5, "age of the last checkpoint, in checkpoint intervals"),
    Threshold("checkpointAgeSeconds", 60, "age of the last checkpoint that is never too old, in seconds"),
    Threshold("failedCheckpoints", 0.3, "share of the checkpoints of 15 minutes that fail", True),
    Threshold(
        "checkpointTimeout", 0.5, "share of the checkpoint timeout that slow checkpoints take", True
    ),
    Threshold("failedRequests", 0.1, "share of the requests to storage that fail, by outcome", True),
    Threshold("lagRecords", 10000, "records that a source is behind, while their number grows"),
    Threshold("backpressure", 0.8, "share of the time that a task waits for those behind it", True),
    Threshold("skew", 4, "records of the busiest subtask, in multiples of the mean"),
    Threshold("callSeconds", 60, "time that one call of a function has taken, in seconds"),
    Threshold("uncommittedIntervals", 10, "time without a commit of a sink, in checkpoint intervals"),
    Threshold(
        "uncommittedSeconds", 300, "time without a commit of a sink that is never too long, in seconds"
    ),
    Threshold("droppedRecords", 0, "records that an operator dropped in 15 minutes"),
    Threshold("memory", 0.9, "share of its memory limit that a process uses", True),
    Threshold("reconcileErrors", 0.1, "share of the operator's reconciliations that fail", True),
    Threshold("watchSilenceSeconds", 600, "time without news of a resource, in seconds"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: the name, in camel case.
        severity: `critical` wakes people up, `warning` can wait for the day, `info` for a quiet hour.
        after: the time for which the condition must hold.
        value: the expression that is watched, which always has a value while a job runs.
        condition: the rest of the expression, which makes `value` an alert.
        summary: one line for a phone, with the labels of `value`.
        needs: why a running job alone has no series for it; empty: it has.
    """

    name: str
    severity: Literal["critical", "warning", "info"]
    after: str
    value: str
    condition: str
    summary: str
    needs: str = ""

    def as_rule(self) -> dict[str, Any]:
        """The rule in the form of Prometheus, except for the names of thresholds."""
        return {
            "alert": self.name,
            "expr": f"{self.value} {self.condition}",
            "for": self.after,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": f"{RUNBOOKS}/{self.name}.md"},
        }


_OF_JOB: Final = "job {{ $labels.namespace }}/{{ $labels.job_name }}"

ALERTS: Final = (
    Alert(
        "HeadgateJobNotRunning",
        "critical",
        "5m",
        f'max by ({_JOB}) (headgate_job_state{{state="running"}})',
        "== 0",
        f"{_OF_JOB} is not running",
    ),
    Alert(
        "HeadgateJobFailed",
        "critical",
        "1m",
        f'max by ({_JOB}) (headgate_job_phase{{phase="Failed"}})',
        "== 1",
        f"{_OF_JOB} has failed for good",
        OPERATOR,
    ),
    Alert(
        "HeadgateJobStalled",
        "critical",
        "5m",
        f'max by ({_JOB}) (headgate_job_condition{{condition="Stalled"}})',
        "== 1",
        f"{_OF_JOB} does not get on, and waits for somebody",
        OPERATOR,
    ),
    Alert(
        "HeadgateJobRolledBack",
        "warning",
        "0m",
        f'sum by ({_JOB}) (increase(headgate_job_transitions_total{{transition="rollback"}}[1h]))',
        "> <rollbacks>",
        f"{_OF_JOB} was rolled back: its new revision did not run in time",
        OPERATOR,
    ),
    Alert(
        "HeadgateSnapshotFailed",
        "warning",
        "0m",
        f'sum by ({_JOB}) (increase(headgate_job_snapshots_total{{outcome="failed"}}[1h]))',
        "> <failedSnapshots>",
        f"{_OF_JOB}: {{{{ $value | humanize }}}} StreamSnapshots have failed in an hour",
        OPERATOR,
    ),
    Alert(
        "HeadgateJobRestartLoop",
        "critical",
        "1m",
        f"sum by ({_JOB}) (increase(headgate_job_restarts_total[15m]))",
        "> <restarts>",
        f"{_OF_JOB} has restarted {{{{ $value | humanize }}}} times in 15 minutes",
    ),
    Alert(
        "HeadgateCoordinatorRestartLoop",
        "critical",
        "1m",
        f"max by ({_JOB}) (max_over_time(headgate_coordinator_generation[15m])) - "
        f"min by ({_JOB}) (min_over_time(headgate_coordinator_generation[15m]))",
        "> <coordinatorRestarts>",
        f"{_OF_JOB} had {{{{ $value }}}} new coordinators in 15 minutes",
    ),
    Alert(
        "HeadgateNoData",
        "warning",
        "15m",
        f"sum by ({_JOB}) (rate(headgate_source_records_total[10m]))",
        f"== 0 and on ({_JOB}) sum by ({_JOB}) (headgate_source_lag_records) > 0",
        f"{_OF_JOB} reads nothing, though records wait",
    ),
    Alert(
        "HeadgateCheckpointStale",
        "critical",
        "2m",
        f"(time() - max by ({_JOB}) (headgate_checkpoint_last_completed_timestamp_seconds))",
        f"> on ({_JOB}) clamp_min(<checkpointAgeIntervals> * "
        f"max by ({_JOB}) (headgate_checkpoint_interval_seconds), <checkpointAgeSeconds>)",
        f"{_OF_JOB}: the last checkpoint is {{{{ $value | humanizeDuration }}}} old",
    ),
    Alert(
        "HeadgateCheckpointsFailing",
        "warning",
        "5m",
        f'sum by ({_JOB}) (increase(headgate_checkpoints_total{{outcome="failed"}}[15m])) / '
        f"(sum by ({_JOB}) (increase(headgate_checkpoints_total[15m])) > 0)",
        "> <failedCheckpoints>",
        f"{_OF_JOB}: {{{{ $value | humanizePercentage }}}} of the checkpoints fail",
    ),
    Alert(
        "HeadgateCheckpointSlow",
        "warning",
        "15m",
        f"histogram_quantile(0.99, sum by ({_JOB}, le) "
        "(rate(headgate_checkpoint_duration_seconds_bucket[30m])))",
        f"> on ({_JOB}) (<checkpointTimeout> * max by ({_JOB}) (headgate_checkpoint_timeout_seconds))",
        f"{_OF_JOB}: checkpoints take {{{{ $value | humanizeDuration }}}}, which is near their timeout",
    ),
    Alert(
        "HeadgateStorageFailing",
        "warning",
        "5m",
        f'sum by ({_JOB}, outcome) (rate(headgate_storage_requests_total{{outcome!="ok"}}[5m])) / '
        f"on ({_JOB}) group_left () (sum by ({_JOB}) (rate(headgate_storage_requests_total[5m])) > 0)",
        "> <failedRequests>",
        f"{_OF_JOB}: {{{{ $value | humanizePercentage }}}} of the requests to storage are "
        "{{ $labels.outcome }}",
    ),
    Alert(
        "HeadgateLagGrowing",
        "warning",
        "15m",
        f"sum by ({_JOB}, operator) (headgate_source_lag_records)",
        f"> <lagRecords> and deriv(sum by ({_JOB}, operator) (headgate_source_lag_records)[15m:1m]) > 0",
        f"{_OF_JOB}: source {{{{ $labels.operator }}}} is {{{{ $value | humanize }}}} records behind",
    ),
    Alert(
        "HeadgateWatermarkStalled",
        "warning",
        "5m",
        f"max by ({_JOB}, task) (delta(headgate_task_watermark_timestamp_seconds[10m]))",
        f"== 0 and on ({_JOB}, task) sum by ({_JOB}, task) "
        "(rate(headgate_task_records_in_total[10m])) > 0",
        f"{_OF_JOB}: event time stands still in {{{{ $labels.task }}}}, though records come",
    ),
    Alert(
        "HeadgateBackpressure",
        "warning",
        "15m",
        f"avg by ({_JOB}, task) "
        '(rate(headgate_task_time_seconds_total{state="backpressured"}[5m]))',
        "> <backpressure>",
        f"{_OF_JOB}: {{{{ $labels.task }}}} waits for those behind it most of the time",
    ),
    Alert(
        "HeadgateSkew",
        "info",
        "30m",
        f"max by ({_JOB}, task) (rate(headgate_task_records_in_total[10m])) / "
        f"(avg by ({_JOB}, task) (rate(headgate_task_records_in_total[10m])) > 10)",
        "> <skew>",
        f"{_OF_JOB}: one subtask of {{{{ $labels.task }}}} has {{{{ $value | humanize }}}} times the mean",
    ),
    Alert(
        "HeadgateCallStuck",
        "warning",
        "1m",
        f"max by ({_JOB}, task) (headgate_task_call_seconds)",
        "> <callSeconds>",
        f"{_OF_JOB}: one call in {{{{ $labels.task }}}} has taken {{{{ $value | humanizeDuration }}}}",
    ),
    Alert(
        "HeadgateSinkNotCommitting",
        "critical",
        "2m",
        f"max by ({_JOB}, operator) (headgate_sink_uncommitted_seconds)",
        f"> on ({_JOB}) group_left clamp_min("
        f"<uncommittedIntervals> * max by ({_JOB}) (headgate_checkpoint_interval_seconds), "
        "<uncommittedSeconds>)",
        f"{_OF_JOB}: sink {{{{ $labels.operator }}}} has committed nothing for "
        "{{ $value | humanizeDuration }}",
    ),
    Alert(
        "HeadgateRecordsDropped",
        "info",
        "0m",
        f"sum by ({_JOB}, operator) (increase(headgate_dropped_records_total[15m]))",
        "> <droppedRecords>",
        f"{_OF_JOB}: {{{{ $labels.operator }}}} has dropped {{{{ $value | humanize }}}} records",
    ),
    Alert(
        "HeadgateMemoryHigh",
        "warning",
        "10m",
        "headgate_process_resident_memory_bytes / headgate_process_memory_limit_bytes",
        "> <memory>",
        f"{_OF_JOB}: process {{{{ $labels.instance }}}} uses "
        "{{ $value | humanizePercentage }} of its memory",
        "processes have a memory limit in containers only",
    ),
    Alert(
        "HeadgateOperatorNoLeader",
        "critical",
        "2m",
        "sum(headgate_operator_leader)",
        "!= 1",
        "the Kubernetes operator has no leader, or more than one",
        OPERATOR,
    ),
    Alert(
        "HeadgateOperatorReconcileErrors",
        "warning",
        "10m",
        'sum by (kind) (rate(headgate_operator_reconciles_total{outcome="error"}[5m])) / '
        "sum by (kind) (rate(headgate_operator_reconciles_total[5m]))",
        "> <reconcileErrors>",
        "the Kubernetes operator fails to reconcile {{ $value | humanizePercentage }} of "
        "{{ $labels.kind }}",
        OPERATOR,
    ),
    Alert(
        "HeadgateOperatorWatchStale",
        "critical",
        "2m",
        "time() - min by (resource) (headgate_operator_watch_last_event_timestamp_seconds)",
        "> <watchSilenceSeconds>",
        "the Kubernetes operator has heard nothing of {{ $labels.resource }} for "
        "{{ $value | humanizeDuration }}",
        OPERATOR,
    ),
)


def template() -> dict[str, Any]:
    """Return the rules with the names of thresholds, for the chart."""
    return {"groups": [{"name": "headgate", "rules": [alert.as_rule() for alert in ALERTS]}]}


def rules(thresholds: Mapping[str, float] | None = None, runbook_url: str = "") -> dict[str, Any]:
    """Return the rules file, which is also the `spec` of a PrometheusRule.

    Args:
        thresholds: values that replace the defaults, by name.
        runbook_url: the address of the pages; alerts then have the annotation `runbook_url`.

    Raises:
        UsageError: there is no such threshold.
    """
    values = {each.name: each.default for each in THRESHOLDS}
    unknown = sorted(set(thresholds or {}) - values.keys())
    if unknown:
        known = ", ".join(values)
        raise UsageError(f"there is no threshold {unknown[0]!r}", fix=f"there are {known}")
    made = template()
    for rule in made["groups"][0]["rules"]:
        for name, value in (values | dict(thresholds or {})).items():
            rule["expr"] = rule["expr"].replace(f"<{name}>", f"{value:g}")
        if runbook_url:
            page = f"{runbook_url.rstrip('/')}/{rule['alert']}.md"
            rule["annotations"]["runbook_url"] = page
    return made
