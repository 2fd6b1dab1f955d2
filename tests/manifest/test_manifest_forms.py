"""Event time, windows, joins, process functions and calls in YAML: the graph and the rows of Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

import headgate as hg
from headgate.api.job_definition import WrittenJob, definition_of
from headgate.api.stream import output_of
from headgate.connectors.files.sink import json_sink
from headgate.connectors.files.source import csv_source, json_source
from headgate.runtime.manifest import load_job

Shape = Callable[[WrittenJob], list[Any]]
Rows = list[list[dict[str, Any]]]

HEAD = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: forms}}
spec:
  parallelism: {parallelism}
  sources:
    orders:
      json: {{path: {folder}/orders.json}}
      schema: "twin_steps:Order"
      eventTime: {event_time}
    rates:
      json: {{path: {folder}/rates.json}}
      schema: "twin_steps:Rate"
      eventTime: {{column: at, maxOutOfOrder: 10m}}
  operators:
{operators}
  sinks:
{sinks}
"""
PLAIN_TIME = "{column: at, maxOutOfOrder: 10m}"


@pytest.fixture
def folder(steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with files of orders and rates, sorted by time, and of the owners of two ads."""
    (tmp_path / "owners.csv").write_text("ad;owner;amount\na;ann;1\nb;bob;2\nb;ben;3\n")
    monkeypatch.chdir(tmp_path)
    for name, made in (
        ("orders", [steps.order(number) for number in range(120)]),
        ("rates", [steps.rate(number) for number in range(60)]),
    ):
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in made)
        (tmp_path / f"{name}.json").write_bytes(lines)
    return tmp_path


@dataclass(frozen=True)
class Form:
    """A form of a manifest, and the same step in Python.

    Attributes:
        operators: the YAML; the results are those of `x`.
        twin: makes them of the module of steps, the orders and the rates.
        side: a side output of `x` that is written as well; it has records.
        event_time: of the orders.
        timed: the same in Python.
    """

    operators: str
    twin: Callable[[Any, Any, Any], Any]
    side: str = ""
    event_time: str = PLAIN_TIME
    timed: Callable[[Any, Any], Any] = lambda steps, orders: orders.event_time(
        "at", max_out_of_order="10m"
    )


def counted(window: str, made: Callable[[], Any]) -> Form:
    """A form of `window`."""
    return Form(
        f"x: {{from: orders, keyBy: ad, window: {window}, aggregate: {{n: count(), s: sum(amount)}}}}",
        lambda steps, orders, rates: (
            orders.key_by("ad").window(made()).agg(n=hg.count(), s=hg.sum("amount"), name="x")
        ),
    )


def hourly(steps: Any, orders: Any, rates: Any) -> Any:
    return orders.key_by("ad").window(hg.tumbling("1h")).agg(n=hg.count(), name="x")


HOURLY = "x: {from: orders, keyBy: ad, window: {tumbling: 1h}, aggregate: {n: count()}}"
INTO = 'into: "twin_steps:Result"'

EVENT_TIMES = {
    "function": Form(
        HOURLY,
        hourly,
        event_time='{python: "twin_steps:at_ms", maxOutOfOrder: 10m, perSplit: false, name: times}',
        timed=lambda steps, orders: orders.event_time(
            steps.at_ms, max_out_of_order="10m", per_split=False, name="times"
        ),
    ),
    "generator": Form(
        HOURLY,
        hourly,
        event_time='{column: at, strategy: "twin_steps:Behind", idleAfter: 1h}',
        timed=lambda steps, orders: orders.event_time(
            "at", strategy=hg.WatermarkStrategy.custom(steps.Behind), idle_after="1h"
        ),
    ),
    "generator with arguments": Form(
        HOURLY,
        hourly,
        event_time='{column: at, strategy: {python: "twin_steps:FarBehind", arguments: {hours: 2}}}',
        timed=lambda steps, orders: orders.event_time(
            "at", strategy=hg.WatermarkStrategy.custom(partial(steps.FarBehind, hours=2))
        ),
    ),
    "queued": Form(
        HOURLY,
        hourly,
        event_time="{column: at, maxOutOfOrder: 10m, waitForQueued: true}",
        timed=lambda steps, orders: orders.event_time(
            "at", max_out_of_order="10m", wait_for_queued=True
        ),
    ),
    "strategy": Form(
        HOURLY,
        hourly,
        event_time='{column: at, strategy: "twin_steps:strategy"}',
        timed=lambda steps, orders: orders.event_time("at", strategy=steps.strategy),
    ),
    "closing and aligned": Form(
        HOURLY,
        hourly,
        event_time="{column: at, maxOutOfOrder: 10m, closeAfter: 1h, name: times, align: all, "
        "maxDrift: 1d, alignEvery: 2s, idleAfter: 1h}",
        timed=lambda steps, orders: orders.event_time(
            "at",
            max_out_of_order="10m",
            close_after="1h",
            name="times",
            align="all",
            max_drift="1d",
            align_every="2s",
            idle_after="1h",
        ),
    ),
}
WINDOWS = {
    "sliding": counted(
        "{sliding: 1h, every: 15m, offset: 5m, allowedLateness: 1m}",
        lambda: hg.sliding("1h", "15m", offset="5m", allowed_lateness="1m"),
    ),
    "days of a zone": counted(
        "{tumbling: 1d, zone: Europe/Berlin, offset: 3h}",
        lambda: hg.tumbling("1d", zone="Europe/Berlin", offset="3h"),
    ),
    "cumulative": counted("{cumulative: 1d, step: 1h}", lambda: hg.cumulative("1d", "1h")),
    "session": counted("{session: 20m}", lambda: hg.session("20m")),
    "count": counted("{count: 10, every: 4}", lambda: hg.count_window(10, 4)),
    "global": counted("{global: all}", hg.global_window),
    "early": Form(
        "x: {from: orders, keyBy: ad, window: {tumbling: 1h, emitRows: 1000, emitEvery: 1h}, "
        "aggregate: {n: count()}}",
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("1h", emit_rows=1000, emit_every="1h"))
            .agg(n=hg.count(), name="x")
        ),
    ),
    "session by a function": Form(
        'x: {from: orders, keyBy: ad, window: {session: "twin_steps:gap"}, '
        'reduce: "twin_steps:larger"}',
        lambda steps, orders, rates: (
            orders.key_by("ad").window(hg.session(steps.gap)).reduce(steps.larger, name="x")
        ),
    ),
    "assigner": Form(
        'x: {from: orders, keyWith: "twin_steps:ad_of", window: {python: "twin_steps:Hours"}, '
        f'process: "twin_steps:Count", {INTO}}}',
        lambda steps, orders, rates: (
            orders.key_with(steps.ad_of)
            .window(steps.Hours())
            .process(steps.Count(), into=steps.Result, name="x")
        ),
    ),
    "assigner and trigger with arguments": Form(
        "x: {from: orders, keyBy: ad, "
        'window: {python: {python: "twin_steps:Long", arguments: {hours: 3}}, '
        'trigger: {python: "twin_steps:every", arguments: {count: 2}}}, '
        f'process: "twin_steps:Count", {INTO}}}',
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .window(steps.Long(3), trigger=steps.every(2))
            .process(steps.Count(), into=steps.Result, name="x")
        ),
    ),
    "trigger and evictor": Form(
        "x: {from: orders, keyBy: ad, "
        'window: {global: all, trigger: "twin_steps:every_second", evictor: "twin_steps:last_one"}, '
        f'process: "twin_steps:Count", {INTO}}}',
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .window(hg.global_window(), trigger=steps.every_second, evictor=steps.last_one)
            .process(steps.Count(), into=steps.Result, name="x")
        ),
    ),
    "aggregate with a time to live": Form(
        "x: {from: orders, keyBy: ad, aggregate: {n: count()}, ttl: 1h, queryable: ads}",
        lambda steps, orders, rates: orders.key_by("ad").agg(
            n=hg.count(), name="x", ttl="1h", queryable="ads"
        ),
    ),
    "windows that clients read": Form(
        "x: {from: orders, keyBy: ad, window: {tumbling: 1h}, aggregate: {n: count()}, queryable: ads}",
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("1h"))
            .agg(n=hg.count(), name="x", queryable="ads")
        ),
    ),
    "sessions that clients read": Form(
        "x: {from: orders, keyBy: ad, window: {session: 1h}, aggregate: {n: count()}, queryable: ads}",
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .window(hg.session("1h"))
            .agg(n=hg.count(), name="x", queryable="ads")
        ),
    ),
    "aggregate as of checkpoints": Form(
        "x: {from: orders, keyBy: ad, aggregate: {n: count()}, "
        "queryable: {name: ads, committed: true}}",
        lambda steps, orders, rates: orders.key_by("ad").agg(
            n=hg.count(), name="x", queryable=hg.Queryable("ads", committed=True)
        ),
    ),
    "reduce with a time to live": Form(
        'x: {from: orders, keyBy: ad, reduce: "twin_steps:larger", ttl: 1h, queryable: "ads"}',
        lambda steps, orders, rates: orders.key_by("ad").reduce(
            steps.larger, name="x", ttl="1h", queryable="ads"
        ),
    ),
    "window process": Form(
        "x: {from: orders, keyBy: ad, window: {tumbling: 1h}, "
        f'reduce: "twin_steps:larger", windowProcess: "twin_steps:Count", {INTO}}}',
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("1h"))
            .reduce(steps.larger, steps.Count(), into=steps.Result, name="x")
        ),
    ),
    "aggregate function": Form(
        "x: {from: orders, keyBy: ad, window: {tumbling: 1h}, "
        f'aggregate: "twin_steps:Mean", {INTO}}}',
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("1h"))
            .aggregate(steps.Mean(), into=steps.Result, name="x")
        ),
    ),
}
JOINS = {
    "interval": Form(
        "x: {from: orders, keyBy: ad, "
        "join: {with: rates, keyBy: ad, within: [-10m, 5m], how: full, suffix: _rate}}",
        lambda steps, orders, rates: orders.key_by("ad").join(
            rates.key_by("ad"), within=("-10m", "5m"), how="full", suffix="_rate", name="x"
        ),
    ),
    "window": Form(
        "x: {from: orders, keyBy: ad, window: {tumbling: 30m}, "
        "join: {with: rates, keyBy: ad, how: left, suffix: _rate}}",
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("30m"))
            .join(rates.key_by("ad"), how="left", suffix="_rate", name="x")
        ),
    ),
    "as of": Form(
        "x: {from: orders, keyBy: ad, "
        "joinAsOf: {with: rates, keyBy: ad, how: left, validFor: 30d, suffix: _rate}}",
        lambda steps, orders, rates: orders.key_by("ad").join_as_of(
            rates.key_by("ad"), how="left", valid_for="30d", suffix="_rate", name="x"
        ),
    ),
    "co-group": Form(
        "x: {from: orders, keyBy: ad, window: {sliding: 1h, every: 30m}, "
        f'coGroup: {{with: rates, keyBy: ad, python: "twin_steps:together"}}, {INTO}}}',
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .window(hg.sliding("1h", "30m"))
            .co_group(rates.key_by("ad"), steps.together, into=steps.Result, name="x")
        ),
    ),
}
OWNERS = {"ad": "string", "owner": "string", "amount": "double"}
LOOKUPS = {
    "service": Form(
        'x: {from: orders, lookup: {key: ad, python: "twin_steps:owner_of", suffix: _ad, '
        "cacheRows: 5, cacheFor: 1h}, into: {owner: string, amount: long}, timeout: 5m, "
        "maxInFlight: 3, ordered: false, onError: drop, "
        'retry: {attempts: 2, onException: "builtins:OSError"}}',
        lambda steps, orders, rates: orders.lookup(
            "ad",
            steps.owner_of,
            into={"owner": "string", "amount": "long"},
            suffix="_ad",
            cache_rows=5,
            cache_for="1h",
            timeout="5m",
            max_in_flight=3,
            ordered=False,
            on_error="drop",
            retry=hg.Retry(attempts=2, on_exception=OSError),
            name="x",
        ),
    ),
    "service of two columns": Form(
        'x: {from: orders, lookup: {key: [ad, id], python: "twin_steps:owner_of_order"}, '
        "into: {owner: string}}",
        lambda steps, orders, rates: orders.lookup(
            ("ad", "id"), steps.owner_of_order, into={"owner": "string"}, name="x"
        ),
    ),
    "table": Form(
        "x: {from: orders, lookup: {key: ad, how: inner, suffix: _ad, "
        'table: {csv: {path: owners.csv, delimiter: ";"}, key: ad, duplicates: last, '
        "schema: {ad: string, owner: string, amount: double}, maxBytes: 1mb}}}",
        lambda steps, orders, rates: orders.lookup(
            "ad",
            hg.static_table(
                csv_source("owners.csv", OWNERS, delimiter=";"),
                key="ad",
                duplicates="last",
                max_bytes="1mb",
            ),
            how="inner",
            suffix="_ad",
            name="x",
        ),
    ),
    "table of two columns": Form(
        "x: {from: orders, lookup: {key: [ad, amount], "
        'table: {csv: {path: owners.csv, delimiter: ";"}, key: [ad, amount], columns: owner, '
        "schema: {ad: string, owner: string, amount: long}}}}",
        lambda steps, orders, rates: orders.lookup(
            ("ad", "amount"),
            hg.static_table(
                csv_source("owners.csv", {**OWNERS, "amount": "long"}, delimiter=";"),
                key=("ad", "amount"),
                columns=["owner"],
            ),
            name="x",
        ),
    ),
}
PROCESSES = {
    "keyed": Form(
        f'x: {{from: orders, keyBy: ad, process: "twin_steps:Guard", {INTO}}}',
        lambda steps, orders, rates: orders.key_by("ad").process(
            steps.Guard(), into=steps.Result, name="x"
        ),
        side="small",
    ),
    "failing": Form(
        'x: {from: orders, keyBy: ad, process: "twin_steps:Refusing", '
        f"onError: {{then: side_output, retries: 2}}, {INTO}}}",
        lambda steps, orders, rates: orders.key_by("ad").process(
            steps.Refusing(),
            into=steps.Result,
            name="x",
            on_error=hg.OnError("side_output", retries=2),
        ),
        side="failed",
    ),
    "with arguments": Form(
        'x: {from: orders, keyBy: ad, process: {python: "twin_steps:Needy", '
        f"arguments: {{limit: 7, names: [a, b]}}}}, {INTO}}}",
        lambda steps, orders, rates: orders.key_by("ad").process(
            steps.Needy(7, names=["a", "b"]), into=steps.Result, name="x"
        ),
    ),
    "batches": Form(
        'x: {from: orders, keyBy: ad, process: "twin_steps:First"}',
        lambda steps, orders, rates: orders.key_by("ad").process(steps.First(), name="x"),
    ),
    "connected": Form(
        'x: {from: orders, keyBy: ad, connect: {with: rates, keyWith: "twin_steps:ad_of"}, '
        f'process: "twin_steps:Both", {INTO}}}',
        lambda steps, orders, rates: (
            orders.key_by("ad")
            .connect(rates.key_with(steps.ad_of))
            .process(steps.Both(), into=steps.Result, name="x")
        ),
    ),
    "broadcast": Form(
        'x: {from: orders, keyWith: "twin_steps:ad_of", connect: {broadcast: rates}, '
        f'process: "twin_steps:Known", {INTO}}}',
        lambda steps, orders, rates: (
            orders.key_with(steps.ad_of)
            .connect(rates.broadcast())
            .process(steps.Known(), into=steps.Result, name="x")
        ),
    ),
}
CALLS = {
    "async": Form(
        'x: {from: orders, mapAsync: "twin_steps:score", timeout: 5m, ordered: false, '
        'maxInFlight: 200, onTimeout: "twin_steps:fallback", onError: drop, '
        "retry: {attempts: 2, delay: 1ms, factor: 2, longest: 1s, "
        f'onException: ["builtins:ValueError", "builtins:OSError"]}}, {INTO}}}',
        lambda steps, orders, rates: orders.map_async(
            steps.score,
            timeout="5m",
            ordered=False,
            max_in_flight=200,
            on_timeout=steps.fallback,
            on_error="drop",
            retry=hg.Retry(
                attempts=2,
                delay="1ms",
                factor=2,
                longest="1s",
                on_exception=(ValueError, OSError),
            ),
            into=steps.Result,
            name="x",
        ),
    ),
    "timed out": Form(
        'x: {from: orders, mapAsync: "twin_steps:endless", timeout: 20ms, maxInFlight: 200, '
        f"onTimeout: side_output, onError: fail, {INTO}}}",
        lambda steps, orders, rates: orders.map_async(
            steps.endless,
            timeout="20ms",
            max_in_flight=200,
            on_timeout="side_output",
            on_error="fail",
            into=steps.Result,
            name="x",
        ),
        side="timed_out",
    ),
    "dead letters": Form(
        'x: {from: orders, map: "twin_steps:half", '
        f"onError: {{then: side_output, retries: 1}}, {INTO}}}",
        lambda steps, orders, rates: orders.map(
            steps.half, on_error=hg.OnError("side_output", retries=1), into=steps.Result, name="x"
        ),
        side="failed",
    ),
    "micro-batches": Form(
        'x: {from: orders, python: "twin_steps:plus_one", rows: 16, within: 1s, onError: drop}',
        lambda steps, orders, rates: orders.map_batches(
            steps.plus_one, rows=16, within="1s", on_error="drop", name="x"
        ),
    ),
    "filter": Form(
        'x: {from: orders, filter: "twin_steps:is_odd", onError: drop}',
        lambda steps, orders, rates: orders.filter(steps.is_odd, on_error="drop", name="x"),
    ),
}
PATTERNS = {
    "pattern with arguments": Form(
        'x: {from: orders, keyBy: ad, match: {pattern: {python: "twin_steps:rising", '
        "arguments: {low: 4, high: 6}}, afterMatch: skip_to_last(low), "
        f'select: "twin_steps:highest"}}, {INTO}}}',
        lambda steps, orders, rates: orders.key_by("ad").match(
            steps.rising(4, 6, after_match=hg.cep.skip_to_last("low")),
            select=steps.highest,
            into=steps.Result,
            name="x",
        ),
    ),
    "pattern": Form(
        "x: {from: orders, keyBy: ad, "
        f'match: {{pattern: "twin_steps:risen", select: "twin_steps:highest"}}, {INTO}}}',
        lambda steps, orders, rates: orders.key_by("ad").match(
            steps.risen, select=steps.highest, into=steps.Result, name="x"
        ),
    ),
}
LOOPS = {
    "loop": Form(
        'x: {from: orders, iterate: {body: "twin_steps:countdown", wait: 10ms}}',
        lambda steps, orders, rates: orders.iterate(steps.countdown, name="x", wait="10ms"),
    ),
    "rounds": Form(
        'x: {from: orders, iterate: {body: "twin_steps:countdown", maxRounds: 5, '
        'whileAny: "amount > 2"}}',
        lambda steps, orders, rates: orders.iterate_rounds(
            steps.countdown, name="x", max_rounds=5, while_any="amount > 2"
        ),
    ),
}
FORMS = EVENT_TIMES | WINDOWS | JOINS | LOOKUPS | PROCESSES | CALLS | PATTERNS | LOOPS


def settings(job: WrittenJob) -> list[Any]:
    """Return the settings of time in the graph, without the functions that make generators."""
    return sorted(
        str(structs.replace(node.watermarks, strategy=replace(node.watermarks.strategy, make=None)))
        for node in definition_of(job).graph.nodes
        if node.watermarks is not None
    )


def of_yaml(form: Form, folder: Path, out: Path, parallelism: int) -> Any:
    sinks = [f"    out: {{from: x, json: {{path: {out}/out}}, guarantee: none}}"]
    operators = [f"    {form.operators}"]
    reads_rates = any(word in form.operators for word in ("with: rates", "broadcast: rates"))
    if form.side:
        operators.append(f"    aside: {{from: x.{form.side}, map: 'twin_steps:named', {INTO}}}")
        sinks.append(f"    aside_out: {{from: aside, json: {{path: {out}/side}}, guarantee: none}}")
    if not reads_rates:
        sinks.append("    unused: {from: rates, blackhole: }")
    return load_job(
        HEAD.format(
            parallelism=parallelism,
            folder=folder,
            event_time=form.event_time,
            operators="\n".join(operators),
            sinks="\n".join(sinks),
        )
    )


def of_python(form: Form, steps: Any, folder: Path, out: Path, parallelism: int) -> Any:
    job = hg.Job("forms", parallelism=parallelism)
    orders = job.read(json_source(f"{folder}/orders.json", steps.Order), name="orders")
    orders = form.timed(steps, orders)
    rates = job.read(json_source(f"{folder}/rates.json", steps.Rate), name="rates")
    rates = rates.event_time("at", max_out_of_order="10m")
    x = form.twin(steps, orders, rates)
    if form.side:
        aside = x.side(form.side).map(steps.named, into=steps.Result, name="aside")
    x.write(json_sink(f"{out}/out", guarantee="none"), name="out")
    if form.side:
        aside.write(json_sink(f"{out}/side", guarantee="none"), name="aside_out")
    inputs = output_of(x).node.inputs
    if not any(i.node.name == "rates" or "event_time" in i.node.name for i in inputs[1:]):
        rates.write(hg.connectors.blackhole(), name="unused")
    return job


def written(out: Path) -> Rows:
    """The rows of both sinks, sorted."""
    return [
        sorted(
            (json.loads(line) for file in (out / name).rglob("*.json*") for line in file.open()),
            key=lambda row: json.dumps(row, sort_keys=True),
        )
        for name in ("out", "side")
    ]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_is_the_graph_of_its_twin(
    form: Form, steps: Any, folder: Path, shape: Shape, tmp_path: Path
) -> None:
    job = of_yaml(form, folder, tmp_path, 2)
    twin = of_python(form, steps, folder, tmp_path, 2)
    by_name = [sorted(shape(each), key=lambda node: str(node["name"])) for each in (job, twin)]
    assert by_name[0] == by_name[1]
    assert settings(job) == settings(twin)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_gives_the_rows_of_its_twin(
    form: Form, steps: Any, folder: Path, tmp_path: Path
) -> None:
    rows: list[Rows] = []
    for parallelism in (1, 2):
        for kind in ("yaml", "python"):
            out = tmp_path / f"{kind}{parallelism}"
            if kind == "yaml":
                job = of_yaml(form, folder, out, parallelism)
            else:
                job = of_python(form, steps, folder, out, parallelism)
            assert job.run().status == "FINISHED"
            rows.append(written(out))
    assert rows[0][0] or form.side
    assert bool(rows[0][1]) == bool(form.side)
    assert rows == [rows[0]] * 4


def test_windows_of_the_machines_clock_are_the_graph_of_their_twin(
    steps: Any, folder: Path, shape: Shape, tmp_path: Path
) -> None:
    form = counted(
        "{tumbling: 10s, time: processing}", lambda: hg.tumbling("10s", time="processing")
    )
    test_a_form_is_the_graph_of_its_twin(form, steps, folder, shape, tmp_path)
