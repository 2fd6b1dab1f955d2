"""Jobs that live by themselves: processes killed with `kill -9`, found by those that know the storage.

The job writes numbered rows to files in exactly-once mode, so that what is lost or there twice shows.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.tests.support.commands import ended_with

COUNTING = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: counting}
spec:
  checkpoint: {every: 200ms, storage: checkpoints}
  sources:
    numbers: {generator: {fields: {n: sequence}, rate: 2000, batchRows: 20, rows: ROWS}}
  sinks:
    out: {from: numbers, json: {path: out}, guarantee: exactly_once}
"""
SUBMIT = """\
import os, sys
import headgate as hg
from headgate.runtime.manifest import load_job
from pathlib import Path
handle = hg.submit(load_job(Path("counting.yaml")), cluster="in-process", run_id="from-outside")
print(handle.status()["pid"], flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def counting(cli: Any) -> Iterator[Any]:
    """A job without end; what is left of it in the end is killed."""
    cli.environment["XDG_STATE_HOME"] = str(cli.directory / "state")
    cli.write("counting.yaml", COUNTING.replace("ROWS", "100000000"))
    yield cli
    for row in json.loads(cli("list", "--json").stdout):
        os.kill(row["pid"], signal.SIGKILL)


def rows(cli: Any) -> list[int]:
    out: Path = cli.directory / "out"
    return sorted(
        json.loads(line)["n"]
        for path in out.rglob("*.json")
        if not path.name.startswith((".", "_"))
        for line in path.read_text().splitlines()
    )


def ended(cli: Any, run: str = "from-outside") -> dict[str, Any]:
    """Wait for the end of the run through a handle, as a user would, and return it."""
    program = (
        "import headgate as hg, sys, json\n"
        "from headgate.runtime.handle import FoundJob, JobHandle\n"
        "from headgate.runtime.finding import Where\n"
        "where = Where(storage='checkpoints')\n"
        f"job = FoundJob('counting', {run!r}, where, where)\n"
        f"print(json.dumps(JobHandle('counting', {run!r}, job).wait(600).as_json()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cli.directory,
        env=cli.environment,
        capture_output=True,
        text=True,
        timeout=700,
    )
    ended_with(done, 0)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_job_outlives_the_kill_of_its_submitter(counting: Any) -> None:
    counting.write("counting.yaml", COUNTING.replace("ROWS", "12000"))
    submitter = subprocess.run(
        [sys.executable, "-c", SUBMIT],
        cwd=counting.directory,
        env=counting.environment,
        capture_output=True,
        text=True,
        timeout=700,
    )
    ended_with(submitter, -signal.SIGKILL)
    outcome = ended(counting)
    assert (outcome["status"], outcome["run"]) == ("FINISHED", "from-outside")
    assert rows(counting) == list(range(12000))


def test_another_start_with_the_same_run_id_is_no_second_run(counting: Any) -> None:
    run = ("run", "counting.yaml", "--cluster", "in-process", "--detach", "--run-id", "a")
    first = counting(*run)
    assert (first.returncode, first.stdout) == (0, "a\n"), first.stderr
    assert "job counting has begun on in-process, run a" in first.stderr
    log = Path(first.stderr.splitlines()[-1].rpartition(" logs to ")[2])
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    (job,) = json.loads(counting("list", "--storage", "checkpoints", "--json").stdout)
    assert (job["status"], job["run"]) == ("RUNNING", "a")

    second = counting(*run)
    ended_with(second, 0)
    assert "goes on already" in second.stderr
    other = counting("run", "counting.yaml", "--cluster", "in-process", "--detach", "--run-id", "b")
    ended_with(other, 2)
    assert "the job runs already: process" in other.stderr

    ended_with(counting("checkpoint", "counting", "--storage", "checkpoints"), 0)
    os.kill(job["pid"], signal.SIGKILL)
    third = counting(*run)
    ended_with(third, 0)
    assert "has begun" in third.stderr
    ended_with(counting("stop", "counting"), 0)
    assert ended(counting, "a")["status"] == "SUSPENDED"
    found = rows(counting)
    assert found == list(range(len(found))), "nothing is lost, nothing is there twice"
    assert len(found) > 0
    assert "job counting is SUSPENDED" in log.read_text()
    fourth = counting(*run)
    ended_with(fourth, 0)
    assert "run a of job counting has ended: SUSPENDED" in fourth.stderr
    (only,) = json.loads(
        counting("history", "counting", "--storage", "checkpoints", "--json").stdout
    )
    assert (only["run"], only["status"]) == ("a", "SUSPENDED")


def test_verbs_find_the_job_by_its_storage_with_the_right_to_read_the_token(counting: Any) -> None:
    begun = counting("run", "counting.yaml", "--cluster", "in-process", "--detach")
    ended_with(begun, 0)
    here = counting.environment["HEADGATE_RUN_DIR"]
    counting.environment["HEADGATE_RUN_DIR"] = str(counting.directory / "elsewhere")
    storage = ("--storage", "checkpoints")
    ended_with(counting("checkpoint", "counting"), 1)
    taken = counting("checkpoint", "counting", *storage)
    assert taken.stdout.startswith("job counting: checkpoint"), taken.stderr

    (token,) = (counting.directory / "checkpoints/counting/control").iterdir()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600, "strangers do not read it"
    hidden = token.rename(counting.directory / "hidden")
    refused = counting("stop", "counting", *storage)
    ended_with(refused, 2)
    assert "the token of the job's coordinator cannot be read here" in refused.stderr
    secret = counting.write("secret", json.loads(hidden.read_text())["token"])
    stopped = counting("stop", "counting", *storage, "--token-file", secret)
    assert stopped.stdout.startswith("job counting stopped with checkpoint"), stopped.stderr
    ended_with(counting("stop", "counting", *storage), 1)
    counting.environment["HEADGATE_RUN_DIR"] = here


def test_a_job_that_cannot_begin_is_refused_by_the_command_that_submits_it(counting: Any) -> None:
    (counting.directory / "checkpoints").write_text("no directory")
    refused = counting("run", "counting.yaml", "--cluster", "in-process", "--detach")
    ended_with(refused, 1)
    assert "cannot use a checkpoint path" in refused.stderr
    assert counting("list").stdout == "no job runs on this machine\n"
    ended_with(counting("run", "counting.yaml", "--log-file", "x"), 2)


def test_ctrl_c_of_a_script_stops_its_job_with_a_final_checkpoint(cli: Any) -> None:
    cli.write(
        "script.py",
        """\
import headgate as hg
from headgate.connectors import blackhole, generator

job = hg.Job("script")
job.checkpoint(every="1h", storage="checkpoints")
job.read(generator({"n": "sequence"}, rate=100), name="numbers").write(blackhole(), name="out")

if __name__ == "__main__":
    import logging, sys
    logging.basicConfig(level=logging.INFO)
    outcome = job.run()
    print(outcome.status, outcome.checkpoint, file=sys.stderr)
""",
    )
    script = cli.start_program("script.py")
    script.wait_for("is RUNNING")
    script.interrupt()
    script.wait_for("stopping with a final checkpoint (press Ctrl-C again to stop at once)")
    code, text = script.end()
    assert code == 0
    assert "SUSPENDED 1" in text
    assert "Traceback" not in text


def test_sigterm_leaves_a_run_from_outside_to_its_next_start(counting: Any) -> None:
    run = ("run", "counting.yaml", "--cluster", "in-process", "--run-id", "pod-7")
    first = counting.start(*run)
    first.wait_for("checkpoint 2 completed")
    first.process.send_signal(signal.SIGTERM)
    first.wait_for("leaving the run to its next start, with a checkpoint")
    code, text = first.end()
    assert code == 0
    assert "job counting handed over after" in text
    (left,) = json.loads(
        counting("history", "counting", "--storage", "checkpoints", "--json").stdout
    )
    assert (left["run"], left["status"]) == ("pod-7", None)
    read = rows(counting)
    assert read == list(range(len(read)))
    assert f"read {len(read):,} records" in text, "all that was read is committed"

    second = counting.start(*run)
    second.wait_for(f"restored checkpoint {left['checkpoint']}")
    second.wait_for("checkpoint")
    second.interrupt()
    assert second.end()[0] == 0
    read = rows(counting)
    assert read == list(range(len(read)))
    (stopped,) = json.loads(
        counting("history", "counting", "--storage", "checkpoints", "--json").stdout
    )
    assert (stopped["run"], stopped["status"]) == ("pod-7", "SUSPENDED")


def test_sigterm_before_the_job_runs_waits_for_nothing(cli: Any) -> None:
    cli.write("counting.yaml", COUNTING.replace("ROWS", "100000000"))
    run = cli.start("run", "counting.yaml", "--cluster", "in-process", "--run-id", "a")
    run.wait_for("starts fresh")
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0
    assert "handed over" in text


CLUSTER = """\
import sys
from headgate.runtime.cluster.embedded import embedded_ray, prepare_environment
prepare_environment()
import ray
with embedded_ray():
    print("cluster at", ray.get_runtime_context().gcs_address, file=sys.stderr, flush=True)
    sys.stdin.read()
"""


@pytest.mark.ray
def test_a_job_on_a_cluster_outlives_its_driver_and_is_found_there(counting: Any) -> None:
    counting.environment |= {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_AUTH_MODE": "token"}
    counting.write("cluster.py", CLUSTER)
    ray = counting.start_program("cluster.py", stdin=subprocess.PIPE)
    address = ray.wait_for("cluster at").split()[-1]
    run, place = ("run", "counting.yaml", "--cluster", address), ("--cluster", address)
    driver = counting.start(*run, "--run-id", "a")
    driver.wait_for("checkpoint 2 completed")
    os.killpg(driver.process.pid, signal.SIGKILL)
    driver.end()

    (job,) = json.loads(counting("list", *place, "--json").stdout)
    assert (job["name"], job["status"]) == ("counting", "RUNNING")
    again = counting(*run, "--detach", "--run-id", "a")
    assert (again.returncode, again.stdout) == (0, "a\n"), again.stderr
    assert "goes on already" in again.stderr
    other = counting(*run, "--detach", "--run-id", "b")
    ended_with(other, 1)
    assert "a job of this name runs on the cluster already" in other.stderr
    assert json.loads(counting("list", *place, "--json").stdout)[0]["workers"] == job["workers"]

    follower = counting.start(*run, "--run-id", "a")
    follower.wait_for("checkpoint")
    stopped = counting("stop", "counting", *place)
    assert stopped.stdout.startswith("job counting stopped with checkpoint"), stopped.stderr
    assert follower.end()[0] == 0
    found = rows(counting)
    assert len(found) > 0
    assert found == list(range(len(found)))
    (only,) = json.loads(
        counting("history", "counting", "--storage", "checkpoints", "--json").stdout
    )
    assert (only["run"], only["status"]) == ("a", "SUSPENDED")

    begun = counting(*run, "--detach", "--run-id", "c")
    assert "has begun" in begun.stderr
    ended_with(counting("cancel", "counting", *place), 0)
    ray.process.stdin.close()
    ray.end()


@pytest.mark.ray
def test_sigterm_moves_the_tasks_of_a_worker_process(counting: Any) -> None:
    options = ("-D", "restart-strategy.type=none")
    run = counting.start("run", "counting.yaml", *options)
    run.wait_for("checkpoint 2 completed")
    (job,) = json.loads(counting("list", "--json").stdout)
    (worker,) = job["workers"]
    os.kill(worker["pid"], signal.SIGTERM)
    run.wait_for(f"{worker['worker']} has to leave; its tasks go to another worker")
    run.wait_for("tasks were moved to other workers; the job paused for ")
    (after,) = json.loads(counting("list", "--json").stdout)
    assert after["restarts"] == 0
    assert [each["pid"] for each in after["workers"]] != [worker["pid"]]
    run.wait_for("checkpoint")
    run.interrupt()
    code, text = run.end()
    assert code == 0
    assert "worker lost" not in text
    found = rows(counting)
    assert len(found) > 0
    assert found == list(range(len(found)))
