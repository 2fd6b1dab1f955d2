"""The session of Spark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from headgate.connectors.spark.child import open_session
from headgate.connectors.spark.java import find_java
from headgate.connectors.spark.task import SparkPlan, Task

CONF = {
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One session for all tests of a process, also for those of other directories."""
    pytest.importorskip("pyspark", reason="needs headgate[spark]")
    import headgate.spark

    scratch = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAVA_HOME", find_java().home_for_spark(scratch))
        environment.setenv("PYSPARK_PYTHON", sys.executable)
        for name in (
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
        ):  # Java starts before `s3_server`
            environment.setenv(name, "testing")
        plan = SparkPlan(master="local[2]", conf=CONF)
        session = open_session(Task(plan, "tests", scratch=str(scratch)))
        headgate.spark.register(session)
        yield session
        context = type(session.sparkContext)
        if context._gateway is None:
            return
        session.stop()
        # Not only the session: Java itself goes with the pipe it reads from.
        context._gateway.shutdown()
        context._gateway.proc.stdin.close()
        context._gateway.proc.wait()
        context._gateway = context._jvm = None
