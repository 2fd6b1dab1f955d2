"""One Spark for all tests of this directory: to start one takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.connectors.spark.child import failure_of, open_session, perform
from headgate.connectors.spark.java import find_java
from headgate.connectors.spark.process import SparkProcess
from headgate.connectors.spark.task import Done, Message, SparkPlan, Task

SMALL = {
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
"""Settings of a Spark that starts quickly."""


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("pyspark")
    scratch = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAVA_HOME", find_java().home_for_spark(scratch))
        environment.setenv("PYSPARK_PYTHON", sys.executable)
        for name in (
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
        ):  # tests/spark_state shares this Java
            environment.setenv(name, "testing")
        plan = SparkPlan(master="local[2]", conf=SMALL)
        spark = open_session(Task(plan, "tests", scratch=str(scratch)))
        context = type(spark.sparkContext)
        yield spark
        if context._gateway is None:  # tests/spark_state has stopped it
            return
        spark.stop()
        # Not only the session: Java itself goes with the pipe it reads from.
        context._gateway.shutdown()
        context._gateway.proc.stdin.close()
        context._gateway.proc.wait()
        context._gateway = context._jvm = None


@pytest.fixture
def asked(session: Any, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Tasks are done by the Spark of the tests instead of a new process; these are the tasks."""
    tasks: list[Task] = []

    def ignore(message: Message) -> None:
        return None

    def run(process: SparkProcess) -> Done:
        tasks.append(process._task)
        try:
            return perform(process._task, session, ignore)
        except Exception as error:
            raise process._failure(failure_of(error)) from None

    monkeypatch.setattr(SparkProcess, "run", run)
    return tasks


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "storage")
