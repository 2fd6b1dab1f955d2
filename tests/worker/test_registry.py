"""What coordinators leave in the run directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import headgate as hg
from headgate.connectors import blackhole, numbers
from headgate.runtime.control import registry


def test_the_sockets_of_a_killed_coordinator_go_when_its_job_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = registry.rest_socket_path("again", dead.pid)
    for path in (left, registry.socket_path("again", dead.pid)):
        Path(path).touch()
    registry.register(
        registry.JobRecord(
            name="again",
            addresses=[f"unix:{left}", "tcp:127.0.0.1:1"],
            token="secret",
            pid=dead.pid,
            started_ms=0,
            cluster="local",
        )
    )
    job = hg.Job("again", parallelism=1)
    job.read(numbers(10), name="numbers").write(blackhole(), name="out")
    assert job.run().status == "FINISHED"
    assert list(tmp_path.iterdir()) == []
