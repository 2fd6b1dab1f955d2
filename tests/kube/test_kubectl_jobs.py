"""Goal: the verbs of `kubectl headgate` do what they say, with the real operator and real pods."""

from __future__ import annotations

import json
from pathlib import Path

from headgate.tests.kube.stream_jobs import example, explain
from headgate.tests.kube.test_kubectl import Plugin
from headgate.tests.support.kube.cluster import Cluster


def test_a_job_is_looked_at_saved_suspended_and_resumed(
    cluster: Cluster, operated: str, tmp_path: Path
) -> None:
    claim, job = example("flights.yaml")
    # It must not end before the test does.
    job["spec"]["sources"]["flights"]["generator"] |= {"rows": 1_000_000_000, "rate": 1000}
    # Nor may the history have lost the savepoint when it is looked at.
    job["spec"]["checkpoint"]["every"] = "5s"
    cluster.apply(claim, job, namespace=operated)
    plugin = Plugin(cluster, operated, tmp_path)
    running = plugin.run("resume", "flights", "--wait", "--timeout", "600s")
    assert running.returncode == 0, running.stderr + explain(cluster, operated)

    shown = plugin.says("status", "flights")
    for text in ("flights-head-0", "flights-workers-", "Ready", "state wanted"):
        assert text in shown
    asked = plugin.says("savepoint", "flights", "--directory", "/data/savepoints", "--wait")
    assert asked.startswith("/data/savepoints/savepoint-flights-")
    assert asked.strip() in plugin.says("snapshots", "flights")
    answer = json.loads(plugin.says("checkpoints", "flights", "-o", "json"))
    assert any(each["is_savepoint"] for each in answer["history"])
    assert "[flights-head-0]" in plugin.says("logs", "flights", "--role", "head", "--tail", "5")

    plugin.says("suspend", "flights", "--wait", "--timeout", "600s")
    assert "no head" in plugin.refuses("logs", "flights")
    seen = json.loads(plugin.says("status", "flights", "-o", "json"))
    assert (seen["phase"], seen["pods"]) == ("Suspended", [])
    assert seen["checkpoint"]["id"] > 0
