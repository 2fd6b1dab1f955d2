"""The ends of former runs, read from the storage by processes that know nothing else."""

from __future__ import annotations

import json
import os
import signal

from headgate.tests.support.commands import ended_with

IN_PROCESS = ("--cluster", "in-process")


def test_history_and_list_need_the_storage_alone(cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    (alive,) = json.loads(cli("list", "--storage", "checkpoints", "--json").stdout)
    assert (alive["status"], alive["pid"], alive["ended_ms"]) == ("RUNNING", run.process.pid, None)
    ended_with(cli("stop", "ticker"), 0)
    run.end()

    second = cli.start("run", ticker, *IN_PROCESS)
    second.wait_for("RUNNING")
    os.killpg(second.process.pid, signal.SIGKILL)
    second.end()

    cli.environment["HEADGATE_RUN_DIR"] = str(cli.directory / "another machine")
    ended_with(cli("history", "ticker"), 1)  # nothing is known of it on this machine
    stopped, killed = json.loads(
        cli("history", "ticker", "--storage", "checkpoints", "--json").stdout
    )
    assert (stopped["status"], stopped["checkpoint"]) == ("SUSPENDED", 1)
    assert 0 < stopped["began_ms"] < stopped["ended_ms"]
    assert stopped["reason"] == "stopped with checkpoint 1"
    assert (killed["status"], killed["checkpoint"], killed["restarts"]) == (None, 1, 0)
    assert killed["run"] != stopped["run"]
    (dead,) = json.loads(cli("list", "--storage", "checkpoints/ticker", "--json").stdout)
    assert (dead["name"], dead["status"], dead["run"]) == ("ticker", "DEAD", killed["run"])

    shown = cli("history", "ticker", "--storage", "checkpoints").stdout
    assert "stopped with checkpoint 1" in shown
    assert "not ended" in shown
    listed = cli("list", "--storage", "checkpoints").stdout
    assert f"{dead['pid']} on {dead['host']}" in listed
    nobody = cli("history", "nobody", "--storage", "checkpoints")
    assert (nobody.returncode, "no job of this name" in nobody.stderr) == (1, True)


def test_why_a_run_failed_is_in_the_history(cli) -> None:
    cli.write(
        "broken.py",
        """\
import headgate as hg
from headgate.connectors import blackhole, generator

def broken(row):
    raise ValueError(f"no {row['n']}")

job = hg.Job("broken")
job.checkpoint(every="1h", storage="checkpoints")
numbers = job.read(generator({"n": "sequence"}, rows=10), name="numbers")
numbers.map(broken, name="broken").write(blackhole(), name="out")
""",
    )
    ended_with(cli("run", "broken.py", *IN_PROCESS, "-D", "restart-strategy.type=none"), 1)
    (run,) = json.loads(cli("history", "broken", "--storage", "checkpoints", "--json").stdout)
    assert run["status"] == "FAILED"
    assert run["failure"]["kind"] == "user_code"
    assert "ValueError: no 0" in run["failure"]["text"]
    text = cli("history", "broken", "--storage", "checkpoints", "--details").stdout
    assert "broken.py" in text
    assert "ValueError: no 0" in text
