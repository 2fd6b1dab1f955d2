"""`headgate run` and the verbs that talk to a running job, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from headgate.tests.cli.conftest import COMMAND, WAIT_S
from headgate.tests.support.commands import ended_with

IN_PROCESS = ("--cluster", "in-process")


def test_list_checkpoint_stop_and_resume(cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("starts fresh")
    run.wait_for("RUNNING")

    (job,) = json.loads(cli("list", "--json").stdout)
    assert job["name"] == "ticker"
    assert job["status"] == "RUNNING"
    assert job["parallelism"] == 1
    assert job["restarts"] == 0
    assert job["last_checkpoint"] is None
    assert job["cluster"] == "in-process"
    assert job["pid"] == run.process.pid
    table = cli("list").stdout
    assert "ticker  RUNNING" in table

    taken = cli("checkpoint", "ticker")
    assert taken.stdout.startswith("job ticker: checkpoint 1 completed in ")
    while (asked := cli("query", "ticker", "counts", "u1", "--json")).returncode:
        assert "did not answer within" in asked.stderr  # on a machine that is very slow
    answer = json.loads(asked.stdout)
    assert (answer["job"], answer["state"], answer["key"]) == ("ticker", "counts", "u1")
    assert answer["level"] == "live"
    assert json.loads(cli("list", "--json").stdout)[0]["last_checkpoint"] == 1

    history = json.loads(cli("checkpoints", "ticker", "--json").stdout)["history"]
    assert [(row["id"], row["status"]) for row in history] == [(1, "COMPLETED")]
    assert cli("history", "ticker").stdout == "job ticker: no failure since its coordinator began\n"
    shown = cli("checkpoints", "ticker").stdout
    assert "COMPLETED" in shown
    assert "1: took " in shown
    part, *_ = json.loads(cli("checkpoints", "ticker", "1", "--json").stdout)["subtasks"]
    assert part["index"] == 0
    assert part["task"] in cli("checkpoints", "ticker", "1").stdout
    ended_with(cli("checkpoints", "ticker", "9"), 1)

    stopped = cli("stop", "ticker")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout.startswith("job ticker stopped with checkpoint 2 (")
    code, text = run.end()
    assert code == 0
    assert "job ticker stopped after" in text
    assert "last checkpoint 2, run it again to resume from there" in text
    assert cli("list").stdout == "no job runs on this machine\n"

    again = cli.start("run", ticker, *IN_PROCESS)
    again.wait_for("job ticker resumes from checkpoint 2")
    again.wait_for("restored checkpoint 2")
    again.wait_for("RUNNING")
    assert cli("cancel", "ticker").stdout == "job ticker cancelled; its last checkpoint is 2\n"
    assert again.end()[0] == 130

    fresh = cli.start("run", ticker, *IN_PROCESS, "--fresh")
    fresh.wait_for("starts fresh, as asked; checkpoint 2 is ignored")
    fresh.wait_for("RUNNING")
    fresh.interrupt()
    assert fresh.end()[0] == 0


def test_one_interrupt_takes_a_final_checkpoint(cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    run.interrupt()
    run.wait_for("stopping with a final checkpoint (press Ctrl-C again to stop at once)")
    code, text = run.end()
    assert code == 0
    assert "checkpoint 1 completed" in text
    assert "last checkpoint 1, run it again" in text
    assert text.count("stopping with a final checkpoint") == 1


def test_terminate_takes_a_final_checkpoint(cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    os.kill(run.process.pid, signal.SIGTERM)
    code, text = run.end()
    assert code == 0
    assert "checkpoint 1 completed" in text


SLOW = """\
import asyncio
import headgate as hg

async def sleep(n):
    await asyncio.sleep(600)
    return n

job = hg.Job("slow")
job.checkpoint(every="1h", storage="checkpoints")
numbers = job.read(hg.connectors.numbers(), name="numbers")
numbers.map(sleep).write(hg.connectors.blackhole(guarantee="exactly_once"), name="out")
"""


def test_two_interrupts_cancel_at_once(cli) -> None:
    """The calls in flight take minutes, so a final checkpoint cannot be what ends the job."""
    run = cli.start("run", cli.write("slow.py", SLOW), *IN_PROCESS)
    run.wait_for("RUNNING")
    run.interrupt()
    run.wait_for("stopping with a final checkpoint")
    run.interrupt()
    run.wait_for("stopping at once")
    code, text = run.end()
    assert code == 130
    assert "job slow cancelled" in text
    assert "completed" not in text


def test_interrupts_of_a_job_without_checkpoints(cli) -> None:
    script = SLOW.replace('job.checkpoint(every="1h", storage="checkpoints")\n', "")
    script = script.replace("exactly_once", "none").replace("600", "0.01")
    run = cli.start("run", cli.write("slow.py", script), *IN_PROCESS)
    run.wait_for("RUNNING")
    run.interrupt()
    run.wait_for("stopping (press Ctrl-C again")
    assert run.end()[0] == 0


def test_a_dead_record_is_pruned(cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    run.process.kill()
    run.process.wait()
    records = Path(cli.directory, "run")
    assert list(records.glob("job-*.json"))
    gone = cli("stop", "ticker")
    ended_with(gone, 1)
    assert gone.stderr == (
        "error: no such job runs on this machine name=`ticker`\n"
        "  no job runs here; --storage or --cluster find jobs that run elsewhere\n"
    )
    assert not list(records.glob("job-*.json"))


def test_the_name_of_a_running_job_is_suggested(cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    wrong = cli("checkpoint", "tikker")
    ended_with(wrong, 1)
    assert "name=`tikker`\n  running jobs: ticker\n" in wrong.stderr


def test_a_job_without_checkpoints_refuses_one(cli) -> None:
    script = SLOW.replace('job.checkpoint(every="1h", storage="checkpoints")\n', "")
    script = script.replace("exactly_once", "none").replace("600", "0.01")
    run = cli.start("run", cli.write("slow.py", script), *IN_PROCESS)
    run.wait_for("RUNNING")
    refused = cli("checkpoint", "slow")
    ended_with(refused, 2)
    assert "error: the job takes no checkpoints" in refused.stderr


BOUNDED = """\
import headgate as hg

job = hg.Job("bounded")
numbers = job.read(hg.connectors.numbers(1234), name="numbers")
numbers.filter(lambda n: n % 2 == 0).write(hg.connectors.blackhole(), name="out")
"""


def test_the_summary_has_exact_counts(cli) -> None:
    done = cli("run", cli.write("bounded.py", BOUNDED), *IN_PROCESS)
    ended_with(done, 0)
    assert "job bounded finished after" in done.stderr
    assert "read 1,234 records" in done.stderr
    assert "wrote 617" in done.stderr
    assert done.stdout == ""


def test_a_failing_function_is_shown_with_its_place(cli) -> None:
    script = BOUNDED.replace("lambda n: n % 2 == 0", "lambda n: 1 / (n - 7)")
    done = cli("run", cli.write("bounded.py", script), *IN_PROCESS)
    ended_with(done, 1)
    assert "ZeroDivisionError" in done.stderr
    assert f"raised in {cli.directory}/bounded.py:5 (<lambda>)" in done.stderr
    assert "Traceback" not in done.stderr


LATE = """\
import headgate as hg
from headgate.connectors import Pause, blackhole, from_list

rows = [{"k": "a", "at": at} for at in (0, 100_000, 0, 1, 100_001)]
job = hg.Job("late", options={"pipeline.auto-watermark-interval": "0 ms"})
source = from_list([*rows, *PAUSE], schema={"k": "string", "at": "int64"}, batch_rows=1)
windows = job.read(source, name="in").event_time("at").key_by("k").window(hg.tumbling("10s"))
windows.agg(n=hg.count(), name="counts").write(blackhole(), name="out")
"""
SENTENCE = "step `counts` has dropped 2 late records; to keep them: read its stream `.late`"


def test_what_was_dropped_is_in_the_final_line(cli) -> None:
    done = cli("run", cli.write("late.py", LATE.replace("*PAUSE", "")), *IN_PROCESS)
    ended_with(done, 0)
    *_, final = done.stderr.splitlines()
    assert "job late finished after" in final
    assert final.endswith(", DROPPED 2 late records in counts")
    assert done.stderr.count(SENTENCE) == 1


def test_what_was_dropped_is_in_the_list(cli) -> None:
    run = cli.start("run", cli.write("late.py", LATE.replace("*PAUSE", 'Pause("1h")')), *IN_PROCESS)
    run.wait_for(SENTENCE)
    (job,) = json.loads(cli("list", "--json").stdout)
    (dropped,) = job["dropped"]
    assert (dropped["step"], dropped["kind"], dropped["count"]) == ("counts", "late", 2)
    assert dropped["text"] == "2 late records"
    assert "allowed_lateness" in dropped["fix"]
    assert f"late: {SENTENCE}" in cli("list").stdout
    cli("cancel", "late")
    assert run.end()[1].splitlines()[-1].endswith("DROPPED 2 late records in counts")


def test_json_lines(cli) -> None:
    cli.environment["HEADGATE_LOG_FORMAT"] = "json"
    done = cli("run", cli.write("bounded.py", BOUNDED), *IN_PROCESS)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"RUNNING", "FINISHED"} <= {
        line["body"]["status"] for line in lines if line["event"] == "status"
    }
    assert all(line["job"] == "bounded" and line["time_ms"] > 0 for line in lines)


def test_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys; import headgate.runtime.cli.app; "
        "print([m for m in ('ray', 'polars', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n"


def test_the_log_of_a_running_job_is_printed_and_followed(cli, ticker: str) -> None:
    run = cli.start("run", ticker, "--cluster", "in-process")
    run.wait_for("RUNNING")
    printed = cli("logs", "ticker")
    ended_with(printed, 0)
    assert "job ticker is RUNNING" in printed.stdout
    assert "job ticker" not in cli("logs", "ticker", "--level", "error").stdout
    ended_with(cli("checkpoint", "take", "ticker"), 0)
    (newest,) = cli("logs", "ticker", "-n", "1", "--json").stdout.splitlines()
    assert json.loads(newest)["message"].startswith("checkpoint 1 completed")
    following = subprocess.Popen(
        [*COMMAND, "logs", "ticker", "--follow"],
        cwd=cli.directory,
        env=cli.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    assert "INFO coordinator headgate.job" in following.stdout.readline()
    ended_with(cli("stop", "ticker"), 0)
    _, said = following.communicate(timeout=WAIT_S)
    ended_with(following, 0)
    assert "job ticker ended: SUSPENDED" in said
    assert run.end()[0] == 0
    wrong = cli("logs", "ticker", "--level", "loud")
    ended_with(wrong, 2)
    assert "use one of debug, info, warning, error" in wrong.stderr
