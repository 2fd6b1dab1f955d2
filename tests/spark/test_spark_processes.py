"""Spark has a process of its own, and nothing of it is left, however it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import headgate as hg
from headgate.connectors import collect
from headgate.connectors.spark import process as spark_process
from headgate.connectors.spark.java import Java
from headgate.connectors.spark.process import SparkProcess
from headgate.connectors.spark.source import _run
from headgate.connectors.spark.task import SparkPlan, Task
from headgate.errors import SourceError
from headgate.operators.source import SourceRun

from .conftest import SMALL

PLAN = SparkPlan(sql="SELECT 1 id")
GIVE_UP_S = 240.0
"""Only a test that fails waits so long."""


def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_job_starts_spark_and_leaves_none(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    pids = tmp_path / "pids"

    def query(spark: Any) -> Any:
        from pyspark.sql.functions import udf

        pids.write_text(json.dumps([os.getpid(), spark._jvm.ProcessHandle.current().pid()]))

        def note(number):  # type: ignore[no-untyped-def]  # in a worker of Python, a child of Java
            (pids.parent / f"worker-{os.getpid()}").touch()
            return number

        return spark.range(0, 8, 1, 1).select(udf(note, "bigint")("id").alias("id"))

    job = hg.Job("alone", options={"io.tmp.dirs": str(tmp_path / "tmp")})
    job.checkpoint(every="1h", storage=str(tmp_path / "storage"))
    sink = collect(guarantee="exactly_once")
    source = hg.spark_source(query=query, schema={"id": "long"}, master="local[1]", conf=SMALL)
    job.read(source, name="history").write(sink, name="out")
    assert job.run().status == "FINISHED"
    assert sorted(row["id"] for row in sink.rows) == list(range(8))
    workers = [int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*")]
    child, java = json.loads(pids.read_text())
    assert gone(child), "it was gone before the job went on"
    # Java was killed then; how long the system takes to free its memory is not up to the job.
    wait_until(lambda: gone(java), "Java is left")
    assert workers, "the function was called in a worker"
    for pid in workers:
        wait_until(lambda pid=pid: gone(pid), "a worker of Python is left")
    log = next((tmp_path / "tmp").rglob("headgate-alone-history.log"))
    assert [path for path in log.parent.iterdir() if path != log] == [], "no temporary files"
    assert " INFO " not in log.read_text()


PARENT = """
import sys
from headgate.connectors.spark.task import Task
from headgate.connectors.spark.process import SparkProcess
from headgate.connectors.spark.task import SparkQuery, SparkPlan

target = sys.argv[1]

def query(spark):
    import os, pathlib, time
    pids = f"{os.getpid()} {spark._jvm.ProcessHandle.current().pid()}"
    draft = pathlib.Path(target + ".draft")
    draft.write_text(pids)
    draft.rename(target)
    time.sleep(3600)

conf = dict(pair.split("=", 1) for pair in sys.argv[3:])
plan = SparkQuery(SparkPlan(master="local[1]", conf=conf), query).shipped()
SparkProcess(Task(plan, "orphan"), sys.argv[2], "job.py:7", print).run()
"""


def test_spark_dies_with_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    pids, scratch = tmp_path / "pids", tmp_path / "tmp"
    conf = [f"{key}={value}" for key, value in SMALL.items()]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, pids, scratch, *conf], env=dict(os.environ)
    )
    try:
        wait_until(lambda: pids.exists() or parent.poll() is not None, "Spark did not start")
        assert parent.poll() is None
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: gone(pid), "a process of Spark is left")
    assert [path.name for path in scratch.glob("*/*")] == ["orphan.log"]


@pytest.fixture
def false_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The shell script that runs in place of the child."""

    def be(script: str) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(spark_process.sys, "executable", str(program))
        monkeypatch.setattr(spark_process, "check_pyspark", lambda: None)
        monkeypatch.setattr(spark_process, "find_java", lambda: Java("/none"))

    return be


def test_a_job_that_is_cancelled_takes_spark_with_it(
    tmp_path: Path, false_spark: Callable[[str], None]
) -> None:
    # Its grandchild stands for Java, and holds no pipe of ours open.
    false_spark(f"sleep 3600 </dev/null >/dev/null & echo $! > {tmp_path}/draft; "
                f"mv {tmp_path}/draft {tmp_path}/pid; cat >/dev/null")  # fmt: skip
    options = {"io.tmp.dirs": str(tmp_path / "tmp")}
    run = SourceRun("j", "r", "history", "job.py:7", options, None, lambda text: None)

    async def cancel() -> None:
        running = asyncio.create_task(_run(Task(PLAN, "cancelled"), "", run))
        await asyncio.to_thread(wait_until, (tmp_path / "pid").exists, "it did not start")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    wait_until(lambda: gone(int((tmp_path / "pid").read_text())), "Java is left")
    assert [
        thread.name for thread in threading.enumerate() if "headgate-spark" in thread.name
    ] == []


def test_a_spark_that_dies_is_said_with_what_to_do(
    tmp_path: Path, false_spark: Callable[[str], None]
) -> None:
    false_spark('echo \'{"type":"progress","text":"half"}\'; echo last words >&2; kill -9 $$')
    said: list[str] = []
    process = SparkProcess(Task(PLAN, "dies"), str(tmp_path / "tmp"), "job.py:7", said.append)
    with pytest.raises(
        SourceError, match=r"ended without a result status=`9` log=`(.*)`"
    ) as caught:
        process.run()
    assert "spark.driver.memory" in caught.value.fix
    assert said[-1] == "half"
    assert process.log.read_text() == "last words\n"
    assert str(process.log) in said[0]


def test_an_analysis_that_does_not_end_is_ended(false_spark: Callable[[str], None]) -> None:
    """Its master is not there, for instance: `headgate validate` would wait for ever."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    false_spark("sleep 600")
    with pytest.raises(
        SourceError, match=r"in time analysis_timeout=`100ms` master=`local"
    ) as caught:
        hg.spark_source(sql="SELECT 1 id", analysis_timeout="100ms")
    assert "declare a schema" in caught.value.fix
    assert "test_spark_processes.py" in caught.value.where
    left = {child.pid for child in psutil.Process().children(recursive=True)}
    assert left <= before
