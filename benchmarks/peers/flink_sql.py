"""Runs the queries as Flink SQL, or with Python functions in PyFlink: JSON requests on stdin, as host.py.

Runs under the interpreter that has `pyflink`, so it imports nothing of headgate. One process is one JVM;
each job gets a mini cluster of its own in it, and its time is the runtime the job's result states.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from pyflink.common import Configuration, Row, Types
from pyflink.datastream import StreamExecutionEnvironment
from pyflink.table import EnvironmentSettings, StreamTableEnvironment, TableEnvironment
from pyflink.table.udf import udf

PARQUET_LAG = "INTERVAL '1' HOUR"
COMPUTED_LAG = "INTERVAL '1' SECOND"
_COLUMNS = "auction BIGINT, bidder BIGINT, price BIGINT, date_time TIMESTAMP(3), extra STRING"


def _configuration(request: dict[str, Any]) -> Configuration:
    nexmark = "tables" in request
    settings = {
        "parallelism.default": str(request["parallelism"]),
        "pipeline.jars": ";".join(f"file://{jar}" for jar in request["jars"]),
        "pipeline.object-reuse": "true",
        "table.local-time-zone": "UTC",
        "python.executable": sys.executable,
        "python.client.executable": sys.executable,
        "taskmanager.memory.process.size": "4g",
        "rest.port": "0",
        "execution.runtime-mode": "BATCH" if request["sums"] and not nexmark else "STREAMING",
    }
    if nexmark:  # as in Nexmark's own configuration
        settings["table.exec.mini-batch.enabled"] = "true"
        settings["table.exec.mini-batch.allow-latency"] = "2 s"
        settings["table.exec.mini-batch.size"] = "50000"
        settings["table.optimizer.distinct-agg.split.enabled"] = "true"
    if request["checkpoint"]:
        settings["execution.checkpointing.interval"] = "1s"
        settings["execution.checkpointing.dir"] = f"file://{request['directory']}"
    configuration = Configuration()
    for name, value in settings.items():
        configuration.set_string(name, value)
    return configuration


def _create_tables(tables: TableEnvironment, request: dict[str, Any]) -> None:
    """As the request's own statements say, or else `bids`."""
    for statement in request.get("tables", ()):
        tables.execute_sql(statement)
    if "tables" not in request:
        _create_bids(tables, request)


def _create_bids(tables: TableEnvironment, request: dict[str, Any]) -> None:
    lag = COMPUTED_LAG if request["source"] == "computed" else PARQUET_LAG
    watermark = f", WATERMARK FOR date_time AS date_time - {lag}" if request["event_time"] else ""
    if request["source"] == "computed":
        options = {"connector": "computed-bids", "rows": str(request["events"])}
    else:
        options = {"connector": "filesystem", "path": request["data"], "format": "parquet"}
    settings = ", ".join(f"'{name}' = '{value}'" for name, value in options.items())
    tables.execute_sql(f"CREATE TABLE bids ({_COLUMNS}{watermark}) WITH ({settings})")


def _insert_sql(tables: TableEnvironment, sql: str) -> Any:
    """Start the query into a blackhole of its own columns."""
    schema = tables.sql_query(sql).get_schema()
    columns = ", ".join(
        f"`{name}` {_type_name(kind)}"
        for name, kind in zip(schema.get_field_names(), schema.get_field_data_types(), strict=True)
    )
    tables.execute_sql(f"CREATE TABLE nowhere ({columns}) WITH ('connector' = 'blackhole')")
    return tables.execute_sql(f"INSERT INTO nowhere {sql}")


def _type_name(kind: Any) -> str:
    name = type(kind).__name__.removesuffix("Type").upper()
    if name == "DECIMAL":
        return f"DECIMAL({kind.precision}, {kind.scale})"
    return {
        "VARCHAR": "STRING",
        "TIMESTAMP": "TIMESTAMP(3)",
        "LOCALZONEDTIMESTAMP": "TIMESTAMP_LTZ(3)",
    }.get(name, name)


def _insert_lambdas(tables: StreamTableEnvironment, query: str) -> Any:
    """Start the query with a Python function per record, in PyFlink's default process mode."""
    if query == "q1":
        tables.create_temporary_function(
            "f", udf(lambda price: price * 0.908, result_type="DOUBLE")
        )
        return _insert_sql(tables, "SELECT auction, bidder, f(price) AS price, date_time FROM bids")
    if query == "q2":
        tables.create_temporary_function(
            "f", udf(lambda auction: auction % 123 == 0, result_type="BOOLEAN")
        )
        return _insert_sql(tables, "SELECT auction, price FROM bids WHERE f(auction)")
    bidders = tables.to_data_stream(tables.sql_query("SELECT bidder FROM bids"))
    pair = Types.ROW_NAMED(["bidder", "n"], [Types.LONG(), Types.LONG()])
    counts = (
        bidders.map(lambda bid: Row(bid[0], 1), pair)
        .key_by(lambda p: p[0], Types.LONG())
        .reduce(lambda a, b: Row(a[0], a[1] + b[1]))
    )
    tables.execute_sql(
        "CREATE TABLE nowhere (bidder BIGINT, n BIGINT) WITH ('connector' = 'blackhole')"
    )
    return tables.from_data_stream(counts).execute_insert("nowhere")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run one job; with `sums` answer with (rows, sum) of the query's result instead of times."""
    configuration = _configuration(request)
    if request["sums"]:
        tables = TableEnvironment.create(
            EnvironmentSettings.new_instance().with_configuration(configuration).build()
        )
        _create_tables(tables, request)
        with tables.execute_sql(request["check_sql"]).collect() as results:
            *_, (rows, *totals) = results  # the last version is the result
        return {"rows_out": rows, "sum": totals[0], "sums": totals}
    tables = StreamTableEnvironment.create(
        StreamExecutionEnvironment.get_execution_environment(configuration)
    )
    _create_tables(tables, request)
    if request["lambdas"]:
        started = _insert_lambdas(tables, request["query"])
    else:
        started = _insert_sql(tables, request["sql"])
    result = started.get_job_client().get_job_execution_result().result()
    ended = time.monotonic()
    seconds = result.get_net_runtime() / 1000
    return {"began": ended - seconds, "ended": ended, "events": request["events"]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the JVM prints must not get between the answers
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(prefix="hg-bench-flink-") as directory:
            try:
                answer = run({**json.loads(line), "directory": str(Path(directory))})
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
