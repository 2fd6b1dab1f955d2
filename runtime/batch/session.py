"""The Spark session of a batch job: the active one, or a new one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ...connectors.spark.java import check_pyspark, find_java
from ...errors import UsageError
from ..options.execution import SPARK_MASTER
from ..options.registry import Options
from .blocks import BLOCKS_PER_BATCH

_SETTINGS: Final = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(BLOCKS_PER_BATCH),
    # The number of a partition is that of a subtask.
    "spark.sql.adaptive.enabled": "false",
}
_OWN: Final = {
    "spark.log.level": "WARN",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_OWN_LOCAL: Final = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}

_JAVA_ENDS_S: Final = 30.0


@contextmanager
def spark_session(options: Options, job: str) -> Iterator[Any]:
    """Return a session with our settings.

    An existing one stays as it is; our own is stopped with its Java.

    Raises:
        UsageError: there is no Spark, no Java for it, or an unsuitable session.
    """
    check_pyspark("batch execution")
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    if not hasattr(DataFrame, "repartitionById"):
        raise UsageError("batch execution needs pyspark 4.1 or newer", fix="pip install -U pyspark")
    active = SparkSession.getActiveSession()
    if active is None and SparkContext._active_spark_context is not None:
        active = SparkSession.builder.getOrCreate()  # that of another thread
    if active is not None:
        yield _settled(active)
        return
    java_was_there = SparkContext._gateway is not None
    scratch = tempfile.mkdtemp(prefix="headgate-batch-")
    before = {name: os.environ.get(name) for name in ("JAVA_HOME", "PYSPARK_PYTHON")}
    os.environ["JAVA_HOME"] = find_java().home_for_spark(Path(scratch))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    master = options.get(SPARK_MASTER)
    settings = _OWN | (_OWN_LOCAL if master.startswith("local") else {})
    builder: Any = SparkSession.builder
    builder = builder.master(master).appName(f"headgate {job}")
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        own = builder.getOrCreate()
        try:
            yield _settled(own)
        finally:
            own.stop()
    finally:
        if not java_was_there:
            _end_java(SparkContext)
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old
        shutil.rmtree(scratch, ignore_errors=True)


def _end_java(context: Any) -> None:
    """Stop the Java process, which Spark leaves running for the next session until Python ends."""
    gateway = context._gateway
    java = getattr(gateway, "proc", None)
    if java is None:
        return  # it did not start, or Python was started by it
    context._gateway = context._jvm = None
    gateway.shutdown()
    java.stdin.close()
    try:
        java.wait(_JAVA_ENDS_S)
    except subprocess.TimeoutExpired:
        java.kill()
        java.wait()


def _settled(session: Any) -> Any:
    """Return a session derived from `session`, with its own settings."""
    if not hasattr(session, "_jsparkSession"):
        raise UsageError(
            "batch execution needs a session of Spark itself, and the active one is of Spark Connect",
            fix="stop that session before the job, or run the job in another process",
        )
    if str(session.conf.get("spark.speculation", "false")).lower() == "true":
        raise UsageError(
            "Spark runs slow tasks twice, and both would write the same files setting=`spark.speculation`",
            fix="set spark.speculation to false",
        )
    beside = session.newSession()
    for key, value in _SETTINGS.items():
        beside.conf.set(key, value)
    return beside
