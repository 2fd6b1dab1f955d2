"""A second `headgate run` of a job that runs, in processes of their own."""

from __future__ import annotations

import json
import os
import signal

IN_PROCESS = ("--cluster", "in-process")


def test_a_second_run_is_refused_and_leaves_the_first_alone(cli, ticker: str) -> None:
    first = cli.start("run", ticker, *IN_PROCESS)
    first.wait_for("RUNNING")
    assert cli("checkpoint", "ticker").returncode == 0

    second = cli("run", ticker, *IN_PROCESS)
    assert second.returncode == 2
    assert f"the job runs already: process {first.process.pid} on " in second.stderr
    assert "checkpoint 1" in second.stderr
    assert "--take-over" in second.stderr

    (job,) = json.loads(cli("list", "--json").stdout)
    assert (job["pid"], job["status"]) == (first.process.pid, "RUNNING")
    assert cli("checkpoint", "ticker").stdout.startswith("job ticker: checkpoint 2 completed")

    third = cli.start("run", ticker, *IN_PROCESS, "--take-over")
    third.wait_for(f"takes the job over from process {first.process.pid} on ")
    third.wait_for("restored checkpoint 2")
    code, text = first.end()
    assert code == 1
    assert "a newer coordinator owns the job" in text
    third.wait_for("RUNNING")
    third.interrupt()
    assert third.end()[0] == 0


def test_a_run_after_a_kill_goes_on_at_once(cli, ticker: str) -> None:
    first = cli.start("run", ticker, *IN_PROCESS)
    first.wait_for("RUNNING")
    assert cli("checkpoint", "ticker").returncode == 0
    os.killpg(first.process.pid, signal.SIGKILL)
    first.end()

    second = cli.start("run", ticker, *IN_PROCESS)
    second.wait_for(f"the former run is dead (process {first.process.pid} on ")
    second.wait_for("restored checkpoint 1")
    second.wait_for("RUNNING")
    second.interrupt()
    assert second.end()[0] == 0
