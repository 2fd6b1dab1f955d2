"""The places of a job's workers on a Ray cluster of several nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def run(process: str, tmp_path: Path) -> dict[str, Any]:
    """Return the findings of a process of this directory."""
    left = tmp_path / "left"
    left.mkdir()
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, HERE / process, left],
        env=environment | {"HEADGATE_RUN_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert found["status"] == "FINISHED"
    return found


@pytest.mark.ray
def test_workers_wait_for_slots_on_nodes_that_host_workers(tmp_path: Path) -> None:
    """The head and a coordinator have slots to spare, one other node has one: another is waited for."""
    found = run("ray_nodes_process.py", tmp_path)
    assert len(found["hosts"]) == 2
    assert len(found["avoided"]) == 2
    assert not {*found["avoided"]} & {*found["hosts"]}
    assert "a worker has not started yet" in found["waiting"][0]
    assert "resource=`slot` needed_on_one_node=`1` free=`0` of=`1`" in found["waiting"][0]


@pytest.mark.ray
def test_a_group_runs_where_its_resources_are(tmp_path: Path) -> None:
    """No node has a GPU until the job says that it waits for one."""
    found = run("ray_groups_process.py", tmp_path)
    waiting = found["waiting"][0]
    assert "no node has enough for a worker of the slot sharing group group=`gpu`" in waiting
    assert "resource=`GPU` needed_on_one_node=`1` largest_node=`0`" in waiting
    assert "resource=`disk` needed_on_one_node=`1` largest_node=`0`" in waiting
    assert "resource=`CPU`" not in waiting
    assert "start nodes with `ray start --resources='{\"disk\": 1}'`" in waiting
    (model,) = ((node, gpus) for step, node, gpus in found["left"] if step == "model")
    assert model == (found["nodes"][0], "0"), "it sees the GPU of its node"
    (plain,) = (gpus for step, _, gpus in found["left"] if step == "plain")
    assert not plain
