"""The result of a Spark query as a bounded source.

Spark runs once per run of the job, in a process of its own beside the coordinator, and its result is kept
as Parquet in the job's storage. From then on this is the Parquet source: row groups are the splits, the
row within them is the position, and after a restart the same rows are read again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypedDict, Unpack, overload

import msgspec
import pyarrow as pa

from ...errors import SourceError, UsageError
from ...operators.durations import Duration, format_duration, parse_duration
from ...operators.origin import capture_origin
from ...operators.schema import ColumnsLike, SchemaLike, record_class, to_schema
from ...operators.source import BATCH_ROWS, Record, Record_co, SourceRun, SourceStorage
from ..arguments import check_count
from ..bad_records import BadRecordPolicy, parse_policy
from ..files import locations
from ..files.verified import measure_parquet
from ..prepared.result import ResultFiles, ResultKind, directory_on_the_way, local_directory
from ..prepared.source import PreparedSource
from .process import SparkProcess
from .schema import arrow_schema
from .task import LOCAL, SparkQuery, Task, make_query

SPARK: Final = ResultKind("Spark", "a Spark query", "the query runs again")


@dataclass(frozen=True)
class SparkResult:
    """Makes the result of a query; a `ResultMaker`."""

    query: SparkQuery
    kind = SPARK

    def fingerprint(self) -> str:
        return self.query.shipped().fingerprint()

    def describe(self) -> str:
        return self.query.describe()

    def check(self, storage: SourceStorage, run: SourceRun) -> None:
        """Refuse a directory of this machine for a Spark elsewhere."""
        query = self.query
        if query.runs_here or locations.parse_location(storage.address).scheme != "file":
            return
        raise UsageError(
            f"Spark elsewhere cannot write into a directory of this machine "
            f"master=`{query.plan.master}` storage=`{storage.address}`",
            where=run.where,
            fix="keep the job's checkpoints on S3, which both reach, or run Spark here: "
            'master="local[*]"',
        )

    async def make(
        self, schema: pa.Schema, attempt: str, storage: SourceStorage, run: SourceRun
    ) -> dict[str, list[str]]:
        """Let Spark write the result; see `ResultMaker`."""
        declared = schema.serialize().to_pybytes()
        task = Task(self.query.shipped(), f"headgate-{run.job}-{run.source}", declared)
        return await _make(self.query, task, attempt, storage, run)


class SparkSource(PreparedSource[Record_co]):
    """The rows of a Spark query, each read exactly once."""

    extras = ("spark",)

    def __init__(self, query: SparkQuery, files: ResultFiles, keep_result: bool) -> None:
        super().__init__(SparkResult(query), files, keep_result)
        self.query = query

    def describe(self) -> str:
        return f"spark({self.query.describe()})"


class SparkOptions(TypedDict, total=False):
    """The keyword arguments of `spark_source`, which documents them."""

    sql: str | None
    table: str | None
    path: str | None
    format: str | None
    options: Mapping[str, Any] | None
    query: Callable[[Any], Any] | None
    master: str
    conf: Mapping[str, Any] | None
    keep_result: bool
    on_bad_record: BadRecordPolicy
    batch_rows: int
    analysis_timeout: Duration


@overload
def spark_source(
    *, schema: type[Record], **arguments: Unpack[SparkOptions]
) -> SparkSource[Record]: ...
@overload
def spark_source(
    *, schema: ColumnsLike | None = ..., **arguments: Unpack[SparkOptions]
) -> SparkSource: ...
def spark_source(
    *,
    sql: str | None = None,
    table: str | None = None,
    path: str | None = None,
    format: str | None = None,
    options: Mapping[str, Any] | None = None,
    query: Callable[[Any], Any] | None = None,
    schema: SchemaLike | None = None,
    master: str = LOCAL,
    conf: Mapping[str, Any] | None = None,
    keep_result: bool = False,
    on_bad_record: BadRecordPolicy = "fail",
    batch_rows: int = BATCH_ROWS,
    analysis_timeout: Duration = "5m",
) -> SparkSource:
    """Return a bounded source of the result of a Spark query. Needs the extra `headgate[spark]`.

    The query runs once per run of the job, and its result is kept in the job's storage until the job has
    finished. Nothing is run here, but without a `schema` Spark is started to analyse the query.

    Args:
        sql: a SELECT.
        table: the name of a table or view that Spark knows.
        path: the path that `spark.read` reads.
        format: the format of the data at `path`, such as `parquet`, `orc`, `csv`; or one without a path,
            such as `jdbc`.
        options: the options of the format.
        query: a function that takes the SparkSession and returns a DataFrame.
        schema: the columns to read: a Struct class, a `pyarrow.Schema` or {name: type}. Other columns of
            the query are left out. The columns are compared with those of the query before it is run.
        master: where Spark runs: `local[*]`, `local[4]`, `spark://host:port`, `k8s://address`, `yarn`, or
            Spark Connect at `sc://host:port`.
        conf: settings of Spark, such as {"spark.driver.memory": "4g"}.
        keep_result: keep the result when the job has finished or a new run has made another one, for
            savepoints that were taken while it was read.
        on_bad_record: the treatment of a row that does not fit the schema: `fail`, `drop` (counted in
            `headgate_source_record_errors_total`), or `side_output` (`rejected`).
        batch_rows: the most rows of a batch. Batches of long rows have fewer, of about 16 MiB.
        analysis_timeout: how long Spark may take to start and to analyse the query, without a `schema`.

    Raises:
        UsageError: an argument is wrong; without a schema, also if the query is wrong, or pyspark is
            missing.
        SourceError: there is no schema, and Spark failed or took too long.
    """
    made = make_query(
        sql=sql,
        table=table,
        path=path,
        format=format,
        options=options,
        query=query,
        master=master,
        conf=conf,
    )
    policy = parse_policy(on_bad_record)
    check_count("batch_rows", batch_rows, 1)
    within_ms = parse_duration(analysis_timeout, "analysis_timeout")
    columns = to_schema(_analysed(made, within_ms) if schema is None else schema)
    files = ResultFiles(columns, policy, batch_rows, record_class(schema), SPARK)
    return SparkSource(made, files, keep_result)


def _analysed(query: SparkQuery, within_ms: int) -> pa.Schema:
    """Return the columns of a query, from Spark's analysis of it.

    Raises:
        UsageError: the query is wrong, or Spark is missing.
        SourceError: Spark failed, or took longer than `within_ms`.
    """
    task = Task(query.shipped(), "headgate-analysis")
    where = str(capture_origin())
    process = SparkProcess(task, "", where, lambda text: None)
    too_long = threading.Event()

    def give_up() -> None:
        too_long.set()
        process.kill()

    timer = threading.Timer(within_ms / 1000, give_up)
    timer.daemon = True
    timer.start()
    try:
        return arrow_schema(process.run().schema)
    except SourceError as error:
        if not too_long.is_set():
            raise
        raise SourceError(
            f"Spark did not analyse the query in time analysis_timeout=`{format_duration(within_ms)}` "
            f"master=`{query.plan.master}` log=`{process.log}`",
            where=where,
            fix="check that its master can be reached and has room, which its log may show; "
            "declare a schema, which needs no Spark here, or raise analysis_timeout",
        ) from error
    finally:
        timer.cancel()


async def _make(
    query: SparkQuery, task: Task, attempt: str, storage: SourceStorage, run: SourceRun
) -> dict[str, list[str]]:
    """Let Spark write the result below `attempt`; return the checksums, by name, of files that were on
    this machine.
    """
    measured: dict[str, list[str]] = {}
    location = locations.parse_location(f"{storage.address}/{attempt}")
    if location.scheme == "file":
        await _run(task, f"file://{location.path}", run)
    elif not query.runs_here:
        await _run(task, f"s3a://{location.path}", run)
    else:
        # Spark would need Hadoop's client of S3 for it, which pyspark does not bring.
        with directory_on_the_way(run) as directory:
            await _run(task, f"file://{directory}/result", run)
            local = locations.filesystem("file", {})
            for path in sorted((directory / "result").glob("*.parquet")):
                measured[path.name] = await asyncio.to_thread(measure_parquet, local, str(path))
                await storage.upload(f"{attempt}/{path.name}", path)
    return measured


async def _run(task: Task, target: str, run: SourceRun) -> None:
    """Run the task in a process. A cancelled call leaves neither the process nor Java behind."""
    loop = asyncio.get_running_loop()

    def announce(text: str) -> None:
        loop.call_soon_threadsafe(run.announce, text)

    task = msgspec.structs.replace(task, target=target)
    process = SparkProcess(task, local_directory(run) or "", run.where, announce)
    # This does not use the loop's own threads, as the thread is busy for as long as the query runs.
    with ThreadPoolExecutor(1, "headgate-spark") as thread:
        running = loop.run_in_executor(thread, process.run)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            process.kill()
            await asyncio.wait([running])
            running.exception()  # looks at the error, so that asyncio does not report it
            raise
