"""A manifest and the same job in Python make the same graph."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.api.job_definition import WrittenJob, definition_of
from headgate.connectors.files.sink import json_sink, parquet_sink
from headgate.connectors.files.source import csv_source
from headgate.connectors.generator import generator
from headgate.connectors.nexmark import nexmark
from headgate.connectors.sinks import blackhole
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job
from headgate.tests.support.modules import load

EXAMPLES = Path(hg.__file__).parent / "examples"
Shape = Callable[[WrittenJob], list[Any]]

WIDE = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: wide, labels: {team: ads}, annotations: {note: 5}}
spec:
  parallelism: 2
  maxParallelism: 64
  checkpoint:
    {every: 30s, storage: /tmp/ck, timeout: 5m, minPause: 1s, maxConcurrent: 1, tolerableFailures: 2,
     retain: 3}
  restart: {attempts: 5, delay: 2s}
  options: {heartbeat.interval: 1s, metrics.port: 9249}
  sources:
    orders:
      generator:
        fields: {id: sequence, price: float, at: timestamp}
        rows: 100
        batchRows: 10
      eventTime: {column: at, maxOutOfOrder: 10s, idleAfter: 1m}
      parallelism: 1
    lines:
      csv: {path: /tmp/in, delimiter: ";", splitBytes: 1mb}
      schema: {id: long, price: double, at: timestamp}
      onBadRecord: side_output
      eventTime: {column: at, maxOutOfOrder: 1h}
    bids: {nexmark: {kind: bid, events: 5}}
  operators:
    late_one: {from: per_id.late, select: [id]}          # order in the file does not matter
    both: {union: [lines, orders_only]}
    orders_only: {from: orders, filter: "price > 0.5"}
    enriched: {from: both, partition: rebalance, python: "user_jobs:add_country", adds: {country: string}}
    totals:
      from: enriched
      map: "user_jobs:to_total"
      into: "user_jobs:Total"
      parallelism: 3
      eventTime: {column: id, maxOutOfOrder: 0s}
    twice: {from: enriched, flatMap: "user_jobs:twice", chaining: head}
    best: {from: enriched, keyBy: [id], reduce: "user_jobs:larger"}
    running:
      {from: bids, keyBy: [auction, bidder], aggregate: {n: count(), top: max(price)}, chaining: never}
    per_id:
      from: orders
      keyBy: id
      window: {tumbling: 1m, offset: 5s, allowedLateness: 5m}
      aggregate: {n: count(), mean: avg(price), low: "bottom_n(id, 2, by=price)"}
      parallelism: 4
    whole: {from: orders, window: {tumbling: 1m}, aggregate: {n: count()}}
  sinks:
    lake: {from: per_id, parquet: {path: /tmp/lake, rollEvery: 1m}, guarantee: exactly_once}
    bad: {from: lines.rejected, json: {path: /tmp/bad}, guarantee: at_least_once, parallelism: 1}
    late: {from: late_one, partition: global, blackhole: {}}
    a: {from: totals, blackhole: }
    b: {from: twice, blackhole: }
    c: {from: best, blackhole: }
    d: {from: running, blackhole: }
    e: {from: whole, blackhole: }
"""


def wide_twin() -> hg.Job:
    """The same in Python, in the order of the manifest's dependencies."""
    import user_jobs  # made by the fixture

    job = hg.Job(
        "wide",
        parallelism=2,
        max_parallelism=64,
        options={"heartbeat.interval": "1s", "metrics.port": "9249"},
    )
    job.checkpoint(
        every="30s",
        storage="/tmp/ck",
        timeout="5m",
        min_pause="1s",
        max_concurrent=1,
        tolerable_failures=2,
        retain=3,
    )
    job.restart(attempts=5, delay="2s")
    made = generator(
        {"id": "sequence", "price": "float", "at": "timestamp"}, rows=100, batch_rows=10
    )
    orders = job.read(made, name="orders", parallelism=1)
    orders = orders.event_time("at", max_out_of_order="10s", idle_after="1m").parallel(1)
    schema = {"id": "long", "price": "double", "at": "timestamp"}
    lines = job.read(
        csv_source(
            "/tmp/in", schema, delimiter=";", split_bytes="1mb", on_bad_record="side_output"
        ),
        name="lines",
    )
    rejected = lines.rejected
    lines = lines.event_time("at", max_out_of_order="1h")
    bids = job.read(nexmark("bid", events=5), name="bids")
    orders_only = orders.filter("price > 0.5", name="orders_only")
    running = (
        bids.key_by("auction", "bidder")
        .agg(n=hg.count(), top=hg.max("price"), name="running")
        .disable_chaining()
    )
    per_id = (
        orders.key_by("id")
        .window(hg.tumbling("1m", offset="5s", allowed_lateness="5m"))
        .agg(
            n=hg.count(),
            mean=hg.avg("price"),
            low=hg.top_n("id", 2, by="price", ascending=True),
            name="per_id",
        )
        .parallel(4)
    )
    whole = orders.window(hg.tumbling("1m")).agg(n=hg.count(), name="whole")
    late_one = per_id.late.select("id", name="late_one")
    both = lines.union(orders_only, name="both")
    country = pa.schema([*orders.schema, pa.field("country", pa.string())])
    enriched = both.rebalance().map_batches(user_jobs.add_country, into=country, name="enriched")
    totals = enriched.map(user_jobs.to_total, into=user_jobs.Total, name="totals").parallel(3)
    totals = totals.event_time("id", max_out_of_order="0s").parallel(3)
    twice = enriched.flat_map(user_jobs.twice, name="twice").start_new_chain()
    best = enriched.key_by("id").reduce(user_jobs.larger, name="best")
    per_id.write(parquet_sink("/tmp/lake", roll_every="1m", guarantee="exactly_once"), name="lake")
    bad = json_sink("/tmp/bad", guarantee="at_least_once")
    rejected.write(bad, name="bad", parallelism=1)
    late_one.to_one().write(blackhole(), name="late")
    for stream, name in zip([totals, twice, best, running, whole], "abcde", strict=True):
        stream.write(blackhole(), name=name)
    return job


def by_name(nodes: list[Any]) -> list[Any]:
    return sorted(nodes, key=lambda node: node["name"])


@pytest.mark.usefixtures("user_code")
def test_everything_a_manifest_can_say_equals_its_python_twin(shape: Shape) -> None:
    job, twin = load_job(WIDE), wide_twin()
    assert job.labels == {"team": "ads"}
    assert by_name(shape(job)) == by_name(shape(twin))
    assert definition_of(job).checkpoint_settings == definition_of(twin).checkpoint_settings
    assert definition_of(job).restart_settings == definition_of(twin).restart_settings
    for attribute in ("name", "parallelism", "max_parallelism", "options"):
        assert getattr(job, attribute) == getattr(twin, attribute)


@pytest.mark.usefixtures("user_code")
def test_nodes_originate_from_their_lines() -> None:
    job = load_job(WIDE)
    origins = {node.name: str(node.origin) for node in definition_of(job).graph.nodes}
    lines = WIDE.splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "orders_only:" in text)
    assert origins["orders_only"] == f"manifest:{line}  {lines[line - 1].strip()}"


UNSORTED = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: unsorted}
spec:
  sources:
    numbers: {generator: {fields: {n: sequence}, rows: 10}}
  operators:
    all: {union: [delta, beta, gamma, alpha]}
    alpha: {from: numbers, filter: n > 0}
    beta: {from: numbers, filter: n > 0}
    gamma: {from: numbers, filter: n > 0}
    delta: {from: numbers, filter: n > 0}
  sinks:
    out: {from: all, blackhole: }
"""


@pytest.mark.parametrize("hash_seed", ["0", "1", "2"])
def test_the_order_of_nodes_does_not_depend_on_the_process(hash_seed: str) -> None:
    script = (
        "import sys\nfrom headgate.runtime.job import runnable\n"
        "from headgate.runtime.manifest import load_job\n"
        "print(*(node.name for node in runnable(load_job(sys.argv[1])).graph.nodes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, UNSORTED],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert done.stdout == "numbers delta beta gamma alpha all out\n", done.stderr


def test_the_flights_example_equals_its_python_twin(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flights = pa.table(
        {
            "origin": ["JFK", "LGA"],
            "dep_delay": [2.0, None],
            "time_hour": pa.array([0, 3_600_000], pa.timestamp("ms", tz="UTC")),
            "carrier": ["AA", "DL"],
        }
    )
    pq.write_table(flights, tmp_path / "flights.parquet")
    monkeypatch.setenv("FLIGHTS", str(tmp_path / "flights.parquet"))
    job = load_job(EXAMPLES / "flights.yaml")
    twin = load(EXAMPLES / "flights.py").job
    assert shape(job) == shape(twin)
    spec, twin_spec = runnable(job).spec(), runnable(twin).spec()
    assert (spec.name, spec.checkpoint, spec.restart, spec.options) == (
        twin_spec.name,
        twin_spec.checkpoint,
        twin_spec.restart,
        twin_spec.options,
    )
