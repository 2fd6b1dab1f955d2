"""Where the workers of a job run on a Ray cluster of several nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROCESS = Path(__file__).with_name("ray_nodes_process.py")


@pytest.mark.ray
def test_workers_wait_for_slots_on_nodes_that_are_not_the_head(tmp_path: Path) -> None:
    """The head has slots to spare, and the only other node has one: a second node is waited for."""
    hosts = tmp_path / "hosts"
    hosts.mkdir()
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, PROCESS, hosts],
        env=environment | {"HEADGATE_RUN_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["status"] == "FINISHED"
    assert len(found["hosts"]) == 2
    assert found["head"] not in found["hosts"]
    assert "a worker has not started yet" in found["waiting"][0]
    assert "resource=`slot` needed_on_one_node=`1` free=`0` of=`1`" in found["waiting"][0]
