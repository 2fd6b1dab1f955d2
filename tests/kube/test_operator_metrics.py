"""Goal: dashboards and alerts of the operator have data.

Method: a real Prometheus scrapes the process of an operator, which has a job on a real API server.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from headgate.k8s.monitoring.boards import OPERATOR_BOARD
from headgate.k8s.monitoring.evaluate import filled, table, watched
from headgate.k8s.monitoring.grafana import OPERATOR
from headgate.tests.kube.operators import WAIT_S_MAX, Start, phase, stream_job
from headgate.tests.kube.test_operator import definitions, start
from headgate.tests.support import dashboards
from headgate.tests.support.kube.cluster import Cluster
from headgate.tests.support.prometheus import Prometheus, serving

__all__ = ["definitions", "start"]


def test_every_expression_about_the_operator_has_a_value(
    api_server: Cluster, namespace: str, start: Start, tmp_path: Path
) -> None:
    operator = start("one")
    api_server.apply(stream_job(), namespace=namespace)
    operator.until("Deploying", lambda: phase(api_server, namespace) == "Deploying")
    expected_rows = [each for each in watched() if each.needs == OPERATOR]
    expected = {each.where: each.expression for each in expected_rows}
    deadline = time.monotonic() + WAIT_S_MAX
    with serving(tmp_path / "prometheus", [f"127.0.0.1:{operator.metrics}"]) as prometheus:
        while expected:
            assert time.monotonic() < deadline, expected
            for where, expression in list(expected.items()):
                if asked_of(prometheus, expression):
                    del expected[where]
        found = prometheus.query('headgate_job_phase{phase="Deploying"} == 1')
        (series,) = [each["metric"] for each in found]
        assert (series["namespace"], series["job_name"]) == (namespace, "flights")
        if table_file := os.environ.get("HEADGATE_MONITORING_TABLE"):
            rows = [(each, asked_of(prometheus, each.expression)) for each in expected_rows]
            Path(table_file).write_text(table(rows))
        if (pictures := dashboards.wanted()) is not None:
            time.sleep(dashboards.SECONDS)
            shown = dashboards.recorded(prometheus, OPERATOR_BOARD, "flights")
            dashboards.draw(OPERATOR_BOARD, shown, pictures)


def asked_of(prometheus: Prometheus, expression: str) -> list[dict[str, Any]]:
    """The series of an expression of a dashboard or an alert."""
    return prometheus.query(filled(expression, namespace=".*", job_name="flights", interval="5s"))
