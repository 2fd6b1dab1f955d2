"""A second `headgate run` of a job that runs, in processes of their own."""

from __future__ import annotations

import json
import os
import signal

import pytest

from headgate.tests.cli.conftest import TICKER
from headgate.tests.support.commands import ended_with

FILES = "from: ticks, json: {path: out}"
IN_PROCESS = ("--cluster", "in-process")


def test_a_second_run_is_refused_and_leaves_the_first_alone(cli, ticker: str) -> None:
    first = cli.start("run", ticker, *IN_PROCESS)
    first.wait_for("RUNNING")
    ended_with(cli("checkpoint", "ticker"), 0)

    second = cli("run", ticker, *IN_PROCESS)
    ended_with(second, 2)
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
    ended_with(cli("checkpoint", "ticker"), 0)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.end()

    second = cli.start("run", ticker, *IN_PROCESS)
    second.wait_for(f"the former run is dead (process {first.process.pid} on ")
    second.wait_for("restored checkpoint 1")
    second.wait_for("RUNNING")
    second.interrupt()
    assert second.end()[0] == 0


@pytest.mark.ray
def test_on_a_shared_cluster_a_run_is_refused_or_takes_over(cli, shared_ray: str) -> None:
    """The first run ends, the new one goes on from its newest checkpoint, and each record is there once."""
    job = cli.write("job.yaml", TICKER.replace("from: counts, blackhole: {}", FILES))
    cluster = ("--cluster", shared_ray)
    first = cli.start("run", job, *cluster)
    first.wait_for("RUNNING")
    assert cli("checkpoint", "ticker").stdout.startswith("job ticker: checkpoint 1 completed")

    second = cli("run", job, *cluster)
    ended_with(second, 1)
    assert "a job of this name runs on the cluster already name=`ticker`" in second.stderr
    assert "--take-over" in second.stderr
    assert cli("checkpoint", "ticker").stdout.startswith("job ticker: checkpoint 2 completed")

    third = cli.start("run", job, *cluster, "--take-over")
    third.wait_for("takes the job over from process ")
    third.wait_for("restored checkpoint 2")
    code, text = first.end()
    assert code == 1
    assert "the coordinator was removed from the cluster" in text
    assert "--take-over" in text
    third.wait_for("RUNNING")
    ended_with(cli("stop", "ticker"), 0)
    assert third.end()[0] == 0

    lines = [line for file in (cli.directory / "out").glob("part-*") for line in file.open()]
    numbers = sorted(json.loads(line)["n"] for line in lines)
    assert numbers == list(range(len(numbers)))
    assert numbers
