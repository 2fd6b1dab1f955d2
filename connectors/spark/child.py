"""The process that Spark runs in: `python -m headgate.connectors.spark.child`, started by `process.py`.

It reads one task from standard input, reports the outcome on standard output, and dies together with the
process that holds the other end of its standard input. What Spark and the user's code print goes to the
log. An error is reported as one sentence: its root cause, and not the stack of stages above it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import cloudpickle
import msgspec
import pyarrow as pa

from ...errors import HeadgateError, UsageError
from ..prepared.declared import check_declared
from .schema import arrow_schema
from .task import SIZE, Done, Failed, Message, Progress, SparkPlan, Task

# --- failures --------------------------------------------------------------------------------------


DETAIL_MAX: Final = 20_000
"""The number of characters of Spark's error that are kept."""
_SENTENCE_MAX: Final = 400
_CAUSES_MAX: Final = 50
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+\s*$", re.MULTILINE)
"""A code at the end of Spark's own messages, for programs."""


class QueryRaised(Exception):
    """The user's query function raised `__cause__`."""


def failure_of(error: BaseException) -> Failed:
    """Return the message for an error of the query, of Spark, or of headgate."""
    if isinstance(error, HeadgateError):
        return Failed(error.message, error.fix, usage=isinstance(error, UsageError))
    raised = isinstance(error, QueryRaised)
    cause = error.__cause__ if raised and error.__cause__ is not None else error
    detail = "".join(traceback.format_exception(cause))[-DETAIL_MAX:]
    from pyspark.errors import AnalysisException, PySparkException

    if isinstance(cause, AnalysisException):
        return Failed(
            f"Spark refuses the query: {_sentence(str(cause))}", detail=detail, usage=True
        )
    if raised and not isinstance(cause, PySparkException):
        return Failed(
            f"the query function raised {type(cause).__name__}: {cause}{_place(cause)}",
            detail=detail,
        )
    return Failed(f"Spark failed: {_root_cause(cause)}", detail=detail)


def _place(error: BaseException) -> str:
    """Return the innermost line of the user's code, that is, outside of pyspark."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/pyspark/" not in frame.filename and "/py4j/" not in frame.filename:
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def _root_cause(error: BaseException) -> str:
    """Return the deepest cause that Java knows; without Java, the message itself."""
    throwable: Any = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
    if throwable is None or not hasattr(throwable, "getCause"):
        return _sentence(str(error))
    for _ in range(_CAUSES_MAX):
        cause = throwable.getCause()
        if cause is None:
            break
        throwable = cause
    text = _STATE.sub("", str(throwable.getMessage() or throwable.getClass().getName()))
    # An error of a Python worker begins with its traceback; the exception is in the last line.
    if "Traceback (most recent call last)" in text:
        return _sentence(text.strip().splitlines()[-1])
    return _sentence(text)


def _sentence(text: str) -> str:
    """Return the first paragraph as one line of limited length."""
    first = re.split(r"\n\s*\n|\n== |;\n|\nJVM stacktrace|\n\tat ", text.strip(), maxsplit=1)[0]
    one_line = " ".join(_STATE.sub("", first).split())
    return one_line if len(one_line) <= _SENTENCE_MAX else f"{one_line[:_SENTENCE_MAX]}..."


# --- the process -----------------------------------------------------------------------------------


PROGRESS_S: Final = 3.0
Say = Callable[[Message], None]

_DEFAULTS: Final = {
    "spark.log.level": "WARN",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
}
_LOCAL_DEFAULTS: Final = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
_FORMAT: Final = {
    # With these settings every value comes out of the file as it went in, whatever settings the user
    # reads with.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.writeLegacyFormat": "false",
}


def perform(task: Task, spark: Any, say: Say) -> Done:
    """Analyse the query of `task`, and write its result if it has a target.

    Raises:
        UsageError: the query cannot be read as declared; nothing was run.
        Exception: the error of Spark or of the user's function.
    """
    for key, value in _FORMAT.items():
        spark.conf.set(key, value)
    frame = build_frame(task.plan, spark)
    schema = str(frame.schema.json())
    columns = arrow_schema(schema)
    if task.declared is not None:
        declared = pa.ipc.read_schema(pa.py_buffer(task.declared))
        check_declared(declared, columns, "Spark", "query")
        frame = frame.select([f"`{name.replace('`', '``')}`" for name in declared.names])
    if task.target:
        with _progress(spark, say):
            frame.write.parquet(task.target)
    return Done(schema)


def build_frame(plan: SparkPlan, spark: Any) -> Any:
    """Return the DataFrame of a plan, which is analysed but not run.

    Raises:
        QueryRaised: the user's function raised its cause.
        UsageError: the function returned no DataFrame, or one without end.
    """
    if plan.sql:
        frame = spark.sql(plan.sql)
    elif plan.table:
        frame = spark.table(plan.table)
    elif plan.function:
        frame = _call(plan.function, spark)
    else:
        reader = spark.read.options(**plan.options)
        if plan.format:
            reader = reader.format(plan.format)
        frame = reader.load(plan.path) if plan.path else reader.load()
    if frame.isStreaming:
        raise UsageError(
            "a Spark source is bounded, and this DataFrame has no end",
            fix="read with spark.read instead of spark.readStream",
        )
    return frame


def _call(pickled: bytes, spark: Any) -> Any:
    try:
        frame = cloudpickle.loads(pickled)(spark)
    except Exception as error:
        raise QueryRaised from error
    if not hasattr(frame, "isStreaming"):
        raise UsageError(
            f"the query function must return a DataFrame, and returned `{type(frame).__name__}`"
        )
    return frame


def open_session(task: Task) -> Any:
    """Return the session that the plan asks for."""
    from pyspark.sql import SparkSession

    plan = task.plan
    builder: Any = SparkSession.builder
    if plan.master.startswith("sc://"):
        builder = builder.remote(plan.master)
        defaults = {key: _DEFAULTS[key] for key in _DEFAULTS if key.startswith("spark.sql.")}
    else:
        builder = builder.master(plan.master).appName(task.name)
        defaults = dict(_DEFAULTS)
    if plan.master.startswith("local"):
        defaults |= _LOCAL_DEFAULTS
        defaults["spark.local.dir"] = task.scratch
        defaults["spark.sql.warehouse.dir"] = os.path.join(task.scratch, "warehouse")
    for key, value in {**defaults, **plan.conf}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@contextmanager
def _progress(spark: Any, say: Say) -> Iterator[None]:
    """Report every few seconds how many tasks are done."""
    stopped = threading.Event()
    tasks = _classic_tasks(spark) if hasattr(spark, "_jsparkSession") else _connect_tasks(spark)

    def watch() -> None:
        last = ""
        while not stopped.wait(PROGRESS_S):
            text = tasks()
            if text not in ("", last):
                say(Progress(text))
                last = text

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _classic_tasks(spark: Any) -> Callable[[], str]:
    tracker = spark.sparkContext.statusTracker()

    def tasks() -> str:
        stages = [tracker.getStageInfo(stage) for stage in sorted(tracker.getActiveStageIds())]
        known = [stage for stage in stages if stage is not None]
        return ", ".join(
            f"stage {stage.stageId}: {stage.numCompletedTasks:,} of {stage.numTasks:,} tasks done"
            for stage in known
        )

    return tasks


def _connect_tasks(spark: Any) -> Callable[[], str]:
    newest = [""]

    def report(stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:
        total = sum(stage.num_tasks for stage in stages or ())
        finished = sum(stage.num_completed_tasks for stage in stages or ())
        newest[0] = f"{finished:,} of {total:,} tasks done"

    spark.registerProgressHandler(report)
    return lambda: newest[0]


def main() -> None:
    """Run the one task of this process."""
    # From here on, output of any code, also of Java, is kept apart from our messages.
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lock = threading.Lock()

    def say(message: Message) -> None:
        with lock:
            channel.write(msgspec.json.encode(message) + b"\n")

    size = SIZE.unpack(sys.stdin.buffer.read(SIZE.size))[0]
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=Task)
    threading.Thread(target=_die_with_parent, args=(task,), daemon=True).start()
    try:
        spark = open_session(task)
        say(Progress(f"Spark {spark.version} has started"))
        done = perform(task, spark, say)
        spark.stop()
    except BaseException as error:
        say(failure_of(error))
        raise
    say(done)


def _die_with_parent(task: Task) -> None:
    """Wait for the end of standard input, at which the parent no longer waits for this process, and end
    it.
    """
    while os.read(0, 4096):
        pass
    for directory in (task.scratch, task.target.removeprefix("file://")):
        if os.path.isabs(directory):
            shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
