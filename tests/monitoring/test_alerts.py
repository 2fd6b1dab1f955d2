"""Each alert fires when it should and is silent when it should, by `promtool test rules`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from headgate.k8s.monitoring.alerts import ALERTS, THRESHOLDS, Threshold, rules
from headgate.tests.support.commands import ended_with
from headgate.tests.support.prometheus import promtool

J: Final = 'namespace="n",job_name="j"'
S: Final = J + ',task="t",subtask="0"'
S1: Final = J + ',task="t",subtask="1"'


@dataclass(frozen=True)
class Case:
    """Series, a value a minute, that make an alert fire after an hour, and such that do not."""

    firing: dict[str, str]
    silent: dict[str, str]


CASES: Final = {
    "HeadgateJobNotRunning": Case(
        {f'headgate_job_state{{{J},state="running"}}': "1x30 0x30"},
        {f'headgate_job_state{{{J},state="running"}}': "0x50 1x10"},
    ),
    "HeadgateJobFailed": Case(
        {f'headgate_job_phase{{{J},phase="Failed"}}': "1x60"},
        {f'headgate_job_phase{{{J},phase="Failed"}}': "0x60"},
    ),
    "HeadgateJobStalled": Case(
        {f'headgate_job_condition{{{J},condition="Stalled"}}': "0x30 1x30"},
        {
            f'headgate_job_condition{{{J},condition="Stalled"}}': "0x57 1x3",
            f'headgate_job_condition{{{J},condition="Ready"}}': "1x60",
        },
    ),
    "HeadgateJobRolledBack": Case(
        {f'headgate_job_transitions_total{{{J},transition="rollback"}}': "0x50 1x10"},
        {
            f'headgate_job_transitions_total{{{J},transition="rollback"}}': "1x60",
            f'headgate_job_transitions_total{{{J},transition="upgrade"}}': "0x50 1x10",
        },
    ),
    "HeadgateSnapshotFailed": Case(
        {f'headgate_job_snapshots_total{{{J},outcome="failed"}}': "0x50 1x10"},
        {
            f'headgate_job_snapshots_total{{{J},outcome="failed"}}': "1x60",
            f'headgate_job_snapshots_total{{{J},outcome="completed"}}': "0x50 1x10",
        },
    ),
    "HeadgateJobRestartLoop": Case(
        {f"headgate_job_restarts_total{{{J}}}": "0+1x60"},
        {f"headgate_job_restarts_total{{{J}}}": "0x30 1x30"},
    ),
    "HeadgateCoordinatorRestartLoop": Case(
        {
            f'headgate_coordinator_generation{{{J},instance="a"}}': "1x50 2x2 _x8",
            f'headgate_coordinator_generation{{{J},instance="b"}}': "_x53 3x2 4x2 5x3",
        },
        {f'headgate_coordinator_generation{{{J},instance="a"}}': "1x50 2x10"},
    ),
    "HeadgateNoData": Case(
        {
            f"headgate_source_records_total{{{S}}}": "0+60x20 1200x40",
            f"headgate_source_lag_records{{{S}}}": "5x60",
        },
        {
            f"headgate_source_records_total{{{S}}}": "0+60x20 1200x40",
            f"headgate_source_lag_records{{{S}}}": "0x60",
        },
    ),
    "HeadgateCheckpointStale": Case(
        {
            f"headgate_checkpoint_last_completed_timestamp_seconds{{{J}}}": "60+60x30 1860x30",
            f"headgate_checkpoint_interval_seconds{{{J}}}": "10x60",
        },
        {
            f"headgate_checkpoint_last_completed_timestamp_seconds{{{J}}}": "0+60x60",
            f"headgate_checkpoint_interval_seconds{{{J}}}": "10x60",
        },
    ),
    "HeadgateCheckpointsFailing": Case(
        {
            f'headgate_checkpoints_total{{{J},outcome="failed"}}': "0+1x60",
            f'headgate_checkpoints_total{{{J},outcome="completed"}}': "0+1x60",
        },
        {
            f'headgate_checkpoints_total{{{J},outcome="failed"}}': "0x50 1x10",
            f'headgate_checkpoints_total{{{J},outcome="completed"}}': "0+6x60",
        },
    ),
    "HeadgateCheckpointSlow": Case(
        {
            f'headgate_checkpoint_duration_seconds_bucket{{{J},le="100.0"}}': "0x60",
            f'headgate_checkpoint_duration_seconds_bucket{{{J},le="300.0"}}': "0+1x60",
            f'headgate_checkpoint_duration_seconds_bucket{{{J},le="+Inf"}}': "0+1x60",
            f"headgate_checkpoint_timeout_seconds{{{J}}}": "500x60",
        },
        {
            f'headgate_checkpoint_duration_seconds_bucket{{{J},le="100.0"}}': "0+1x60",
            f'headgate_checkpoint_duration_seconds_bucket{{{J},le="300.0"}}': "0+1x60",
            f'headgate_checkpoint_duration_seconds_bucket{{{J},le="+Inf"}}': "0+1x60",
            f"headgate_checkpoint_timeout_seconds{{{J}}}": "500x60",
        },
    ),
    "HeadgateStorageFailing": Case(
        {
            f'headgate_storage_requests_total{{{J},operation="write",outcome="ok"}}': "0+60x60",
            f'headgate_storage_requests_total{{{J},operation="write",outcome="throttled"}}': "0+60x60",
            f'headgate_storage_requests_total{{{J},operation="write",outcome="failed"}}': "0x60",
        },
        {
            f'headgate_storage_requests_total{{{J},operation="write",outcome="ok"}}': "0+60x60",
            f'headgate_storage_requests_total{{{J},operation="read",outcome="failed"}}': "0+1x60",
        },
    ),
    "HeadgateLagGrowing": Case(
        {f'headgate_source_lag_records{{{J},operator="o"}}': "0+1000x60"},
        {f'headgate_source_lag_records{{{J},operator="o"}}': "90000-1000x60"},
    ),
    "HeadgateWatermarkStalled": Case(
        {
            f"headgate_task_watermark_timestamp_seconds{{{S}}}": "500x60",
            f"headgate_task_records_in_total{{{S}}}": "0+60x60",
        },
        {
            f"headgate_task_watermark_timestamp_seconds{{{S}}}": "500x60",
            f"headgate_task_records_in_total{{{S}}}": "60x60",
        },
    ),
    "HeadgateBackpressure": Case(
        {f'headgate_task_time_seconds_total{{{S},state="backpressured"}}': "0+55x60"},
        {f'headgate_task_time_seconds_total{{{S},state="backpressured"}}': "0+30x60"},
    ),
    "HeadgateSkew": Case(
        {
            f"headgate_task_records_in_total{{{S}}}": "0+60000x60",
            **{
                f'headgate_task_records_in_total{{{J},task="t",subtask="{n}"}}': "0+60x60"
                for n in range(1, 8)
            },
        },
        {
            f"headgate_task_records_in_total{{{S}}}": "0+60000x60",
            f"headgate_task_records_in_total{{{S1}}}": "0+30000x60",
        },
    ),
    "HeadgateCallStuck": Case(
        {f"headgate_task_call_seconds{{{S}}}": "0+60x60"},
        {f"headgate_task_call_seconds{{{S}}}": "0.1x60"},
    ),
    "HeadgateSinkNotCommitting": Case(
        {
            f'headgate_sink_uncommitted_seconds{{{J},operator="o"}}': "0+60x60",
            f"headgate_checkpoint_interval_seconds{{{J}}}": "10x60",
        },
        {
            f'headgate_sink_uncommitted_seconds{{{J},operator="o"}}': "200x60",
            f"headgate_checkpoint_interval_seconds{{{J}}}": "10x60",
        },
    ),
    "HeadgateRecordsDropped": Case(
        {f'headgate_dropped_records_total{{{J},operator="o"}}': "0x55 3x5"},
        {f'headgate_dropped_records_total{{{J},operator="o"}}': "3x60"},
    ),
    "HeadgateMemoryHigh": Case(
        {
            f"headgate_process_resident_memory_bytes{{{J}}}": "95x60",
            f"headgate_process_memory_limit_bytes{{{J}}}": "100x60",
        },
        {
            f"headgate_process_resident_memory_bytes{{{J}}}": "80x60",
            f"headgate_process_memory_limit_bytes{{{J}}}": "100x60",
        },
    ),
    "HeadgateOperatorNoLeader": Case(
        {'headgate_operator_leader{pod="a"}': "0x60"},
        {'headgate_operator_leader{pod="a"}': "1x60", 'headgate_operator_leader{pod="b"}': "0x60"},
    ),
    "HeadgateOperatorReconcileErrors": Case(
        {
            'headgate_operator_reconciles_total{kind="StreamJob",outcome="error"}': "0+10x60",
            'headgate_operator_reconciles_total{kind="StreamJob",outcome="done"}': "0+10x60",
        },
        {
            'headgate_operator_reconciles_total{kind="StreamJob",outcome="error"}': "0x60",
            'headgate_operator_reconciles_total{kind="StreamJob",outcome="done"}': "0+10x60",
        },
    ),
    "HeadgateOperatorWatchStale": Case(
        {'headgate_operator_watch_last_event_timestamp_seconds{resource="streamjobs"}': "0x60"},
        {'headgate_operator_watch_last_event_timestamp_seconds{resource="streamjobs"}': "0+60x60"},
    ),
}


def test_each_alert_has_a_case() -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}


def written(series: dict[str, str]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
    }


def asked(name: str, fires: bool, labels: str = "") -> dict[str, Any]:
    """Ask, behind the hour, by `ALERTS{...}`, so that labels and texts need not be repeated here."""
    question = f'count(ALERTS{{alertname="{name}",alertstate="firing"{labels}}})'
    samples = [{"value": 1}] if fires else []
    return {"expr": question, "eval_time": "60m", "exp_samples": samples}


def firing(name: str, series: dict[str, str], fires: bool) -> dict[str, Any]:
    """A test of promtool."""
    title = f"{name} {'fires' if fires else 'is silent'}"
    return {**written(series), "name": title, "promql_expr_test": [asked(name, fires)]}


def check(directory: Path, made: dict[str, Any], tests: list[dict[str, Any]]) -> None:
    (directory / "rules.yaml").write_text(yaml.safe_dump(made))
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (directory / "test.yaml").write_text(yaml.safe_dump(whole))
    ran = promtool("test", "rules", str(directory / "test.yaml"))
    ended_with(ran, 0)


def test_alerts_fire_and_are_silent(tmp_path: Path) -> None:
    tests = [firing(name, case.firing, True) for name, case in CASES.items()]
    tests += [firing(name, case.silent, False) for name, case in CASES.items()]
    check(tmp_path, rules(), tests)


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda each: each.name)
def test_a_higher_threshold_silences_its_alert_and_no_other(
    tmp_path: Path, threshold: Threshold
) -> None:
    higher = {threshold.name: 1.0 if threshold.is_share else threshold.default * 1e4 + 1e4}
    silenced = {alert.name for alert in ALERTS if f"<{threshold.name}>" in alert.condition}
    assert len(silenced) == 1
    series: dict[str, str] = {}
    expected = []
    for name, case in CASES.items():
        # All live side by side, each in a job of its own; the series of the operator are in none.
        own = f'job_name="{name}"'
        of_job = any(J in text for text in case.firing)
        series |= {text.replace(J, f'namespace="n",{own}'): v for text, v in case.firing.items()}
        expected.append(asked(name, name not in silenced, f",{own}" * of_job))
    check(tmp_path, rules(higher), [{**written(series), "promql_expr_test": expected}])
