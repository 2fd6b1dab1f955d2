"""Runs a bounded job on Spark: splits, DataFrames, one Spark job for all sinks, and the commit.

Everything that sinks write is durable but invisible until the Spark job has succeeded; then it is
committed, sink by sink. If anything fails before that, nothing becomes visible. Data that a source prepares
is in a directory meanwhile.
"""

from __future__ import annotations

import asyncio
import copy
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...connectors.spark.java import check_pyspark, find_java
from ...errors import HeadgateError, JobError, UsageError
from ...operators.base import OperatorContext
from ...operators.clock import SystemClock
from ...operators.drops import dropped_text, how_to_keep
from ...operators.graph import Graph, Node
from ...operators.sink import EpochOutput, GlobalCommit, Guarantee, Sink
from ...operators.source import SourceRun
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import CommitPermit
from ..coordinator.output import begin_output, check_output, delete_output
from ..coordinator.sources import SourceDirectory
from ..observe.metrics import MetricsGroup, MetricsRegistry
from ..options.execution import RUNTIME_MODE, SPARK_MASTER
from ..options.registry import Options
from ..options.state import LOCAL_DIRS
from ..plan import JobSpec, PhysicalPlan, make_plan
from ..protocol.drops import Dropped
from ..protocol.failures import as_headgate_error
from ..protocol.job_result import JobOutcome
from ..storage.open_store import open_store_at
from ..task.concurrency import MailboxTimers
from .blocks import BLOCKS_PER_BATCH, RESULT
from .stage import Frames, make_frames, unpacked
from .subtask import COMMIT, DROPPED

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
_log = logging.getLogger("headgate.batch")


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


def run_batch(spec: JobSpec) -> JobOutcome:
    """Run the job to its end and return its outcome.

    Raises:
        UsageError: Spark, or Java, is missing or of the wrong kind; nothing was run.
        JobError: a source could not be cut into splits, or not be made.
    """
    options = Options(spec.options)
    plan = batch_plan(spec)
    batch = replace(spec, name=plan.job_name)
    asyncio.run(check_output(batch, spec.graph))
    if spec.checkpoint is not None:
        _log.info("job %s runs as a batch: no checkpoints are taken", spec.name)
    with (
        source_splits(plan, spec, _scratch(options)) as splits,
        spark_session(options, spec.name) as session,
    ):
        counters = _counters(session)
        frames = _frames(plan, session, splits, options, spec.run, counters.add)
        try:
            results = frames.results.collect()
        except Exception as error:
            failure = unpacked(str(error)) or JobError(
                f"Spark failed: {type(error).__name__}: {str(error)[:2_000]}"
            )
            return JobOutcome("FAILED", failure.message, failure)
        finally:
            for frame in frames.shared:
                frame.unpersist()
        totals = Counter(counters.value)
    written: dict[int, list[bytes]] = {}
    for row in sorted(results, key=lambda row: (row.edge, row.target, row.seq)):
        written.setdefault(RESULT - row.edge, []).append(bytes(row.payload))
    try:
        # Not before: a batch that fails must not touch earlier output.
        replaced = asyncio.run(begin_output(batch, spec.graph, _log.info)) or {}
        asyncio.run(_commit(plan, written, options))
        asyncio.run(delete_output(batch, spec.graph, replaced, replaced, _log.info))
    except HeadgateError as error:
        return JobOutcome("FAILED", error.message, error)
    for name, count in sorted(totals.items()):
        _log.info("job %s: %s %d", spec.name, name, count)
    parts = {name: name.rpartition(DROPPED) for name in sorted(totals) if DROPPED in name}
    dropped = tuple(Dropped(s, kind, totals[name]) for name, (s, _, kind) in parts.items())
    for each in dropped:
        text = dropped_text(each.kind, each.count)
        _log.warning("step `%s` has dropped %s; %s", each.step, text, how_to_keep(each.kind))
    return JobOutcome("FINISHED", "all data was processed", dropped=dropped)


def explain_batch(spec: JobSpec) -> str:
    """Return Spark's plan of the job. Spark is started for it; no source is read."""
    options = Options(spec.options)
    plan = batch_plan(spec)
    splits: dict[str, list[bytes]] = {v.head.name: [] for v in plan.vertices}
    with spark_session(options, spec.name) as session:
        frames = _frames(plan, session, splits, options, spec.run, lambda counters: None)
        with redirect_stdout(io.StringIO()) as shown:  # Spark prints the plan
            frames.results.explain(mode="formatted")
        return shown.getvalue().rstrip()


def batch_plan(spec: JobSpec) -> PhysicalPlan:
    """Return the physical plan, with sinks that keep their output invisible where they can."""
    # Spark places its tasks itself, so slot sharing groups would only cut chains.
    nodes = {
        id(node): replace(node, sink=_staged(node.sink), slot_sharing_group=None)
        for node in spec.graph.nodes
    }
    for node in nodes.values():
        node.inputs = tuple(replace(input_, node=nodes[id(input_.node)]) for input_ in node.inputs)
    return make_plan(
        Graph(list(nodes.values())),
        # No job can have this name, so uncommitted output of the streaming job stays untouched.
        job_name=f"{spec.name}@batch",
        parallelism=spec.parallelism,
        max_parallelism=spec.max_parallelism,
        chaining=spec.chaining,
    )


def _staged(sink: Sink | None) -> Sink | None:
    if sink is None or Guarantee.EXACTLY_ONCE not in sink.guarantees:
        return sink
    staged = copy.copy(sink)
    staged.guarantee = Guarantee.EXACTLY_ONCE
    return staged


def _frames(
    plan: PhysicalPlan,
    session: Any,
    splits: Mapping[str, list[bytes]],
    options: Options,
    name: str,
    count: Any,
) -> Frames:
    # Also if AUTOMATIC resulted in batch.
    effective = options.effective() | {RUNTIME_MODE.key: "BATCH"}
    attempt = _attempt()
    run = _name_of_run(name, attempt)
    return make_frames(plan, session, splits, effective, attempt, run, _scratch(options), count)


def _scratch(options: Options) -> str | None:
    """Return the first directory for temporary files; None: the system's."""
    return (options.get(LOCAL_DIRS) or "").split(",")[0].strip() or None


def _attempt() -> int:
    """Return a number that grows from run to run: sinks delete uncommitted output of older runs."""
    return SystemClock().now_ms() // 1_000


def _name_of_run(name: str, attempt: int) -> str:
    """Return a name that no other run has: some begin in the same second, and one can be repeated."""
    return f"{name}-{attempt}"


def _counters(session: Any) -> Any:
    """Return an accumulator of the counters of all subtasks.

    A task that Spark repeats counts again.
    """
    from pyspark.accumulators import AccumulatorParam

    class Sums(AccumulatorParam):  # type: ignore[misc, unused-ignore]
        def zero(self, value: dict[str, int]) -> dict[str, int]:
            return {}

        def addInPlace(self, one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
            return dict(Counter(one) + Counter(other))

    return session.sparkContext.accumulator({}, Sums())


async def _commit(plan: PhysicalPlan, written: Mapping[int, list[bytes]], options: Options) -> None:
    """Commit the output of each sink."""
    with ThreadPoolExecutor(1, thread_name_prefix="commit") as threads:
        for vertex in plan.vertices:
            for node in vertex.nodes:
                if node.sink is None or node.id not in written:
                    continue
                permit = CommitPermit(plan.job_name, 0, COMMIT)
                if node.sink.commits_globally:
                    epoch = EpochOutput(COMMIT, tuple(written[node.id]))
                    commit = GlobalCommit(
                        plan.job_name, node.name, options.effective(), permit, (epoch,)
                    )
                    await asyncio.to_thread(node.sink.commit_globally, commit)
                    continue
                writer = node.sink.writer()
                writer.open(_context(plan, node, options, threads))
                try:
                    await asyncio.to_thread(writer.prepare)
                    await asyncio.to_thread(writer.commit, written[node.id], permit)
                finally:
                    writer.close()


def _context(
    plan: PhysicalPlan, node: Node, options: Options, threads: ThreadPoolExecutor
) -> OperatorContext:
    loop = asyncio.get_running_loop()
    return OperatorContext(
        job_name=plan.job_name,
        operator_name=node.name,
        subtask_index=0,
        parallelism=1,
        max_parallelism=plan.max_parallelism,
        attempt=0,
        key_groups=KeyGroupRange(0, plan.max_parallelism),
        clock=SystemClock(),
        timers=MailboxTimers(lambda mail: None),
        metrics=MetricsGroup(MetricsRegistry(), {}).operator("commit", node.name, 0),
        logger=_log,
        run_in_thread=lambda call: loop.run_in_executor(threads, call),
        options=options.effective(),
    )


@contextmanager
def source_splits(
    plan: PhysicalPlan, spec: JobSpec, scratch: str | None
) -> Iterator[dict[str, list[bytes]]]:
    """Yield the splits of each source, by name, for as long as the job runs.

    Args:
        scratch: the parent of the directory; None: the system's place.

    Raises:
        UserCodeError: a source could not be divided.
        HeadgateError: an error of the source.
    """
    if scratch is not None:
        Path(scratch).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headgate-batch-sources-", dir=scratch) as directory:
        yield asyncio.run(_cut_all(plan, spec, directory))


async def _cut_all(plan: PhysicalPlan, spec: JobSpec, directory: str) -> dict[str, list[bytes]]:
    store = open_store_at(directory, spec.options)
    await store.open()
    try:
        return {
            vertex.head.name: await _cut(
                vertex.head,
                vertex.parallelism,
                spec,
                SourceDirectory(store, directory, vertex.head.name),
            )
            for vertex in plan.vertices
            if vertex.head.source is not None
        }
    finally:
        await store.close()


async def _cut(
    node: Node, parallelism: int, spec: JobSpec, storage: SourceDirectory
) -> list[bytes]:
    source = node.source
    assert source is not None  # the caller has checked
    run = SourceRun(
        job=spec.name,
        run=spec.run,
        source=node.name,
        where=str(node.origin),
        options=Options(spec.options).effective(),
        storage=storage,
        announce=lambda text: _log.info("%s: %s", node.name, text),
    )
    try:
        prepared = await source.configure(run.options).prepare(run)
        return await asyncio.to_thread(prepared.splits, parallelism)
    except HeadgateError:
        raise
    except Exception as error:
        what = f"source `{node.name}` cannot be cut into splits"
        raise as_headgate_error(error, what, str(node.origin)) from error
