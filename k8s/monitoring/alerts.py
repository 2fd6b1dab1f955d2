"""Alert rules for Prometheus. Each has a page in docs/runbooks: its cause, where to look, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from .grafana import OPERATOR

RUNBOOKS: Final = "https://github.com/headgate/headgate/blob/main/docs/runbooks/"
_JOB: Final = "namespace, job_name"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: in camel case.
        severity: `critical` wakes somebody, `warning` can wait for the day, `info` for a quiet hour.
        after: how long the condition must hold.
        value: what is watched: an expression that always has a value while a job runs.
        condition: what follows `value`, and makes it an alert.
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

    @property
    def expression(self) -> str:
        """What Prometheus evaluates."""
        return f"{self.value} {self.condition}"

    def as_rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.after,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "runbook_url": f"{RUNBOOKS}{self.name}.md",
            },
        }


_OF_JOB: Final = "job {{ $labels.namespace }}/{{ $labels.job_name }}"

ALERTS: Final = (
    Alert(
        "HeadgateJobNotRunning",
        "critical",
        "5m",
        f'max by ({_JOB}) (headgate_job_state{{state="running"}})',
        "== 0",
        f"{_OF_JOB} has not been running for 5 minutes",
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
        "HeadgateJobRestartLoop",
        "critical",
        "1m",
        f"sum by ({_JOB}) (increase(headgate_job_restarts_total[15m]))",
        "> 3",
        f"{_OF_JOB} has restarted {{{{ $value | humanize }}}} times in 15 minutes",
    ),
    Alert(
        "HeadgateCoordinatorRestartLoop",
        "critical",
        "1m",
        f"max by ({_JOB}) (max_over_time(headgate_coordinator_generation[15m])) - "
        f"min by ({_JOB}) (min_over_time(headgate_coordinator_generation[15m]))",
        "> 2",
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
        f"> on ({_JOB}) clamp_min(5 * max by ({_JOB}) (headgate_checkpoint_interval_seconds), 60)",
        f"{_OF_JOB}: the last checkpoint is {{{{ $value | humanizeDuration }}}} old",
    ),
    Alert(
        "HeadgateCheckpointsFailing",
        "warning",
        "5m",
        f'sum by ({_JOB}) (increase(headgate_checkpoints_total{{outcome="failed"}}[15m])) / '
        f"(sum by ({_JOB}) (increase(headgate_checkpoints_total[15m])) > 0)",
        "> 0.3",
        f"{_OF_JOB}: {{{{ $value | humanizePercentage }}}} of the checkpoints fail",
    ),
    Alert(
        "HeadgateCheckpointSlow",
        "warning",
        "15m",
        f"histogram_quantile(0.99, sum by ({_JOB}, le) "
        "(rate(headgate_checkpoint_duration_seconds_bucket[30m])))",
        f"> on ({_JOB}) (0.5 * max by ({_JOB}) (headgate_checkpoint_timeout_seconds))",
        f"{_OF_JOB}: checkpoints take {{{{ $value | humanizeDuration }}}}, which is near their timeout",
    ),
    Alert(
        "HeadgateLagGrowing",
        "warning",
        "15m",
        f"sum by ({_JOB}, operator) (headgate_source_lag_records)",
        f"> 10000 and deriv(sum by ({_JOB}, operator) (headgate_source_lag_records)[15m:1m]) > 0",
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
        "> 0.8",
        f"{_OF_JOB}: {{{{ $labels.task }}}} waits for those behind it most of the time",
    ),
    Alert(
        "HeadgateSkew",
        "info",
        "30m",
        f"max by ({_JOB}, task) (rate(headgate_task_records_in_total[10m])) / "
        f"(avg by ({_JOB}, task) (rate(headgate_task_records_in_total[10m])) > 10)",
        "> 4",
        f"{_OF_JOB}: one subtask of {{{{ $labels.task }}}} has {{{{ $value | humanize }}}} times the mean",
    ),
    Alert(
        "HeadgateCallStuck",
        "warning",
        "1m",
        f"max by ({_JOB}, task) (headgate_task_call_seconds)",
        "> 60",
        f"{_OF_JOB}: one call in {{{{ $labels.task }}}} has taken {{{{ $value | humanizeDuration }}}}",
    ),
    Alert(
        "HeadgateSinkNotCommitting",
        "critical",
        "2m",
        f"max by ({_JOB}, operator) (headgate_sink_uncommitted_seconds)",
        f"> on ({_JOB}) group_left clamp_min("
        f"10 * max by ({_JOB}) (headgate_checkpoint_interval_seconds), 300)",
        f"{_OF_JOB}: sink {{{{ $labels.operator }}}} has committed nothing for "
        "{{ $value | humanizeDuration }}",
    ),
    Alert(
        "HeadgateRecordsDropped",
        "info",
        "0m",
        f"sum by ({_JOB}, operator) (increase(headgate_dropped_records_total[15m]))",
        "> 0",
        f"{_OF_JOB}: {{{{ $labels.operator }}}} has dropped {{{{ $value | humanize }}}} records",
    ),
    Alert(
        "HeadgateMemoryHigh",
        "warning",
        "10m",
        "headgate_process_resident_memory_bytes / headgate_process_memory_limit_bytes",
        "> 0.9",
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
        "> 0.1",
        "the Kubernetes operator fails to reconcile {{ $value | humanizePercentage }} of "
        "{{ $labels.kind }}",
        OPERATOR,
    ),
    Alert(
        "HeadgateOperatorWatchStale",
        "critical",
        "2m",
        "time() - min by (resource) (headgate_operator_watch_last_event_timestamp_seconds)",
        "> 600",
        "the Kubernetes operator has heard nothing of {{ $labels.resource }} for "
        "{{ $value | humanizeDuration }}",
        OPERATOR,
    ),
)


def rules() -> dict[str, Any]:
    """The rules file, also the `spec` of a PrometheusRule."""
    return {"groups": [{"name": "headgate", "rules": [alert.as_rule() for alert in ALERTS]}]}
