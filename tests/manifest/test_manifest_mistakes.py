"""Every mistake is found, each once, with its line and what to do; nothing is started."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from headgate.errors import ManifestErrors, UsageError
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job

TEN = Path(__file__).parent / "ten_mistakes.yaml"
Manifest = Callable[..., str]
ProblemsOf = Callable[..., list[str]]


def test_ten_mistakes_are_ten_located_errors_and_nothing_is_started(tmp_path: Path) -> None:
    """The file has one of each kind; no mistake hides another, and none is reported twice."""
    out = tmp_path / "out"
    with pytest.raises(ManifestErrors) as caught:
        load_job(TEN, env={}, variables={"OUT": str(out)})
    assert str(caught.value) == "\n".join(
        [
            "10 mistakes in the manifest:",
            "name must be a name of at most 63 lower-case letters, digits and `-`, "
            "not the text `Ten_Mistakes`",
            f"  at {TEN}:4",
            "  it names Kubernetes objects too (DNS-1123 label)",
            "unknown field in spec field=`paralelism`",
            f"  at {TEN}:6",
            "  did you mean `parallelism`? fields: parallelism, maxParallelism, checkpoint, restart, "
            "resources, options, kubernetes, sources, operators, sinks",
            "every must be a duration with a unit such as `10s`, not the number `10`",
            f"  at {TEN}:8",
            '  write a number with a unit, such as "30s", "5m", "1h 30m" or "100ms"',
            "environment variable is not set name=`NOWHERE`",
            f"  at {TEN}:9",
            "  set it, or write ${NOWHERE:-default}",
            "unknown option key=`heartbeat.intervall`",
            f"  at {TEN}:11",
            "  did you mean `heartbeat.interval`?",
            "unknown column `prise` in filter",
            f"  at {TEN}:21",
            "  did you mean `price`? columns: id, price, at",
            "column `price` is a float, and floats are no keys type=`double`",
            f"  at {TEN}:24",
            "  " + caught.value.problems[6].fix,
            "no such stream name=`payed`",
            f"  at {TEN}:28",
            "  did you mean `paid`? streams: orders, paid, by_price, by_id, round, trip",
            "operators read each other in a circle path=`round -> trip -> round`",
            f"  at {TEN}:31",
            "  let one of them read something else",
            "sink has no guarantee sink=`out`",
            f"  at {TEN}:38",
            "  guarantee: exactly_once | at_least_once | none",
        ]
    )
    assert not out.exists()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


OPERATORS = [
    ("x: {from: orders}", "16: operator has no verb operator=`x` | use one of filter, select"),
    ("x: {filter: id > 1}", "16: operator has no input operator=`x` | from: a source"),
    (
        "x: {from: orders, fliter: id > 1}",
        "16: unknown field in operator field=`fliter` | did you mean `f",
    ),
    ("x:\n  from: orders\n  filter: id > 1\n  select: id", "19: operator has more than one verb"),
    ("x: {from: orders, filter: id >}", "16: cannot read the expression"),
    ("x: {from: orders, filter: sum(id) > 3}", "16: "),
    (
        "x:\n  from: orders\n  select:\n  - id\n  - prize * 2 AS p",
        "20: unknown column `prize` in select",
    ),
    (
        "x: {from: orders, filter: id > 1, window: {tumbling: 1m}}",
        "16: window has no effect for filter",
    ),
    (
        "x: {from: orders, filter: id > 1, keyBy: id}",
        "16: keyBy has no effect for filter operator=`x` | ",
    ),
    ("x: {from: orders, aggregate: {n: count()}}", "16: aggregate has neither keyBy nor window"),
    (
        "x: {from: orders, keyBy: idd, aggregate: {n: count()}}",
        "16: unknown column `idd` in key_by",
    ),
    (
        "x: {from: orders, keyBy: id, aggregate: {}}",
        "16: aggregate must be at least one entry, not an e",
    ),
    (
        "x: {from: orders, keyBy: [], aggregate: {n: count()}}",
        "16: keyBy must be a list with at least",
    ),
    (
        "x: {from: orders, keyBy: id, aggregate: {n: total}}",
        "16: not an aggregate text=`total` | write",
    ),
    (
        "x: {from: orders, keyBy: id, aggregate: {n: sum(prize)}}",
        "16: unknown column `prize` in sum(pr",
    ),
    (
        "x: {from: orders, keyBy: id, aggregate: {name: count()}}",
        "16: a result cannot be called `name`",
    ),
    (
        "x: {from: orders, window: {tumbling: 0s}, aggregate: {n: count()}}",
        "16: a window needs a size",
    ),
    (
        "x: {from: orders, window: {tumbling: 1m, offset: 2m}, aggregate: {n: count()}}",
        "16: the offset of",
    ),
    (
        "x: {from: orders, window: {tumblng: 1m}, aggregate: {n: count()}}",
        "16: unknown field in window",
    ),
    (
        "x: {from: orders, python: 'nowhere_at_all:f'}",
        "16: module cannot be imported module=`nowhere_at",
    ),
    (
        "x: {from: orders, python: 'user_jobs:add_county'}",
        "16: module has no such name name=`add_county`",
    ),
    (
        "x: {from: orders, map: 'user_jobs:not_a_function'}",
        "16: not a function reference=`user_jobs:not_",
    ),
    (
        "x: {from: orders, map: 'user_jobs'}",
        "16: map must be `module:name`, not the text `user_jobs` | su",
    ),
    (
        "x: {from: orders, map: 'user_jobs:twice', into: {a: strin}}",
        "16: a must be a column type, not the",
    ),
    ("x: {from: orders, map: 'user_jobs:twice', into: {}}", "16: into must be at least one entry"),
    (
        "x: {from: orders, map: 'user_jobs:twice', into: order}",
        "16: no such source name=`order` | did",
    ),
    (
        "x: {from: orders, map: 'user_jobs:twice', into: 'user_jobs:twice'}",
        "16: not a class reference=",
    ),
    (
        "x: {from: orders, python: 'user_jobs:add_country', into: {a: long}, adds: {b: long}}",
        "16: into and adds exclude each other",
    ),
    (
        "x: {from: orders, reduce: 'user_jobs:larger'}",
        "16: reduce has no keyBy operator=`x` | keyBy:",
    ),
    (
        "x: {union: [orders, oders]}",
        "16: no such stream name=`oders` | did you mean `orders`? streams: ",
    ),
    ("x: {union: [orders, x]}", "16: operators read each other in a circle path=`x -> x`"),
    ("x: {from: out0, filter: id > 1}", "16: a sink cannot be read name=`out0`"),
    ("x: {from: orders.late, filter: id > 1}", "16: `orders` has no side output `late`"),
    (
        "x: {from: orders.rejected, filter: id > 1}",
        "16: nothing comes out of `orders.rejected` onBad",
    ),
    (
        "x: {from: orders, filter: id > 1, parallelism: 0}",
        "16: parallelism must be a number in 1..32768",
    ),
    (
        "x: {from: orders, filter: id > 1, parallelism: two}",
        "16: parallelism must be a whole number, not",
    ),
    (
        "x: {from: orders, filter: id > 1, partition: broadcst}",
        "16: partition must be one of rebalance",
    ),
    (
        "x: {from: orders, keyBy: id, partition: rebalance, aggregate: {n: count()}}",
        "16: partition has no effect with a key operator=`x` | remove it: all records of a key go",
    ),
    (
        "x: {from: orders, filter: id > 1, chaining: always}",
        "16: chaining must be one of head, never, not",
    ),
    (
        "x.y: {from: orders, filter: id > 1}",
        "16: a key must be a name of letters, digits, `-` and `_`",
    ),
    (
        "orders: {from: orders, filter: id > 1}",
        "16: name is used twice name=`orders` | it is used in l",
    ),
    ("x: [1]", "16: x must be a mapping, not a list | "),
]


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(("operators", "wanted"), OPERATORS)
def test_a_mistake_in_an_operator_is_one_problem(
    operators: str, wanted: str, manifest: Manifest, problems_of: ProblemsOf
) -> None:
    found = problems_of(manifest(operators, "orders"))
    assert len(found) == 1, found
    assert found[0].startswith(wanted), found[0]


SPECS = [
    (
        "checkpoint: {every: 1s}",
        "5: checkpoint has no storage | storage: a directory or s3://bucket/prefix",
    ),
    ("checkpoint: {every: 0s, storage: x}", "5: checkpoint(every=...) must be positive"),
    (
        "checkpoint: {evry: 1s, storage: x}",
        "5: unknown field in checkpoint field=`evry` | did you mean `every`?",
    ),
    (
        "restart: {strategy: none, attempts: 3}",
        "5: strategy `none` has no attempts | remove one of them",
    ),
    (
        "restart: {strategy: exponential}",
        "5: strategy must be one of fixed-delay, failure-rate, exponential-delay, none, not the text",
    ),
    (
        "restart: {strategy: failure-rate, maxBackoff: 3s}",
        "5: strategy `failure-rate` has no maxBackoff | remove one of them",
    ),
    (
        "restart: {strategy: exponential-delay, jitterFactor: 2}",
        "5: a restart jitter must be a number in 0..1",
    ),
    ("options: {heartbeat.timeout: 5}", "5: bad option value key=`heartbeat.timeout` value=`5` | "),
    ("options: {heartbeat.timeout: 1s}", "5: heartbeat timeout is not above the interval"),
    ("options: {metrics.port: [1]}", "5: metrics.port must be a single value, not a list | "),
    (
        "options:\n  parallelism.default: 3\nparallelism: 2",
        "6: option and field set the same key=`parallel",
    ),
    (
        "checkpoint: {every: 1s, storage: x}\noptions:\n  state.checkpoints.dir: y",
        "7: option and field set the same key=`state.checkpoints.dir` field=`checkpoint.storage` | line",
    ),
    ("parallelism: 40000", "5: parallelism must be a number in 1..32768, not the number `40000`"),
    (
        "template: {}",
        "5: unknown field in spec field=`template` | fields: parallelism, maxParallelism",
    ),
]


@pytest.mark.parametrize(("spec", "wanted"), SPECS)
def test_a_mistake_in_the_spec_is_one_problem(
    spec: str, wanted: str, manifest: Manifest, problems_of: ProblemsOf
) -> None:
    found = problems_of(manifest("", "orders", spec=spec + "\n"))
    assert len(found) == 1, found
    assert found[0].startswith(wanted), found[0]


SOURCES = [
    (
        "x: {pubsub: {topic: t}}",
        "6: unknown field in source field=`pubsub` | fields: generator, nexmark",
    ),
    (
        "x: {schema: {a: long}}",
        "6: source has no connector source=`x` | name one of generator, nexmark",
    ),
    (
        "x: {csv: {path: a}, json: {path: b}, schema: {a: long}}",
        "6: source has more than one connector",
    ),
    ("x: {csv: {path: a}}", "6: source has no schema source=`x` | schema: {column: type, ...}"),
    (
        "x: {csv: {pat: a}, schema: {a: long}}",
        "6: unknown field in csv field=`pat` | did you mean `path`?",
    ),
    ("x: {csv: , schema: {a: long}}", "6: csv has no path | path: a file, a directory or a glob"),
    (
        "x: {csv: {path: a}, schema: {a: lnog}}",
        "6: a must be a column type, not the text `lnog` | did you",
    ),
    ("x: {csv: {path: 'ftp://a'}, schema: {a: long}}", "6: "),
    (
        "x: {nexmark: {kind: bids}}",
        "6: kind must be one of bid, auction, person, not the text `bids` | did",
    ),
    (
        "x: {nexmark: {}, schema: {a: long}}",
        "6: nexmark makes its own schema source=`x` | remove schema",
    ),
    (
        "x: {nexmark: {}, onBadRecord: drop}",
        "6: nexmark has no unreadable records source=`x` | remove",
    ),
    ("x: {generator: {}}", "6: generator needs either fields or function"),
    ("x: {generator: {fields: {a: {kind: itn}}}}", "6: not a generator field field=`a`"),
    (
        "x: {nexmark: {}, eventTime: {column: datetime, maxOutOfOrder: 1s}}",
        "6: unknown column `datetime` in event_time | did you mean `date_time`?",
    ),
    ("x: {nexmark: {}, eventTime: {column: date_time}}", "6: eventTime has no maxOutOfOrder"),
    (
        "x: {nexmark: {}, eventTime: {column: url, maxOutOfOrder: 1s}}",
        "6: column `url` has no event times",
    ),
    (
        "x: {csv: {path: a}, schema: {a: long}, onBadRecord: side_output}",
        "6: nobody reads `x.rejected` | write it to a sink (from: x.rejected), or say onBadRecord: drop",
    ),
]


@pytest.mark.parametrize(("source", "wanted"), SOURCES)
def test_a_mistake_in_a_source_is_one_problem(
    source: str, wanted: str, manifest: Manifest, problems_of: ProblemsOf
) -> None:
    found = problems_of(manifest("", "x", sources=f"  sources:\n    {source}\n"))
    assert len(found) == 1, found
    assert found[0].startswith(wanted), found[0]


SINKS = [
    (
        "y: {from: orders}",
        "18: sink has no connector sink=`y` | name one of parquet, csv, json, text, print",
    ),
    (
        "y: {parquet: {path: a}, guarantee: none}",
        "18: sink has no from | from: the source or operator it",
    ),
    (
        "y: {from: orders, parquet: {path: a}, guarantee: exactly}",
        "18: guarantee must be one of exactly_",
    ),
    (
        "y: {from: orders, parquet: {path: a}, guarantee: exactly_once}",
        "18: sink `y` promises exactly_once, but the job takes no checkpoints | add checkpoint: {every:",
    ),
    (
        "y: {from: oders, blackhole: }",
        "18: no such stream name=`oders` | did you mean `orders`? streams: o",
    ),
    ("y: {from: orders, print: {width: 3}, guarantee: none}", "18: width must be a number in 20.."),
    (
        "y: {from: orders, prnt: {}, guarantee: none}",
        "18: unknown field in sink field=`prnt` | did you me",
    ),
    (
        "y: {from: orders, csv: {path: a, rate: 5}, guarantee: none}",
        "18: unknown field in csv field=`rate`",
    ),
    (
        "y: {from: orders, blackhole: {}, guarantee: none, name: z}",
        "18: unknown field in sink field=`nam",
    ),
]


@pytest.mark.parametrize(("sink", "wanted"), SINKS)
def test_a_mistake_in_a_sink_is_one_problem(
    sink: str, wanted: str, manifest: Manifest, problems_of: ProblemsOf
) -> None:
    found = problems_of(manifest("", "orders", sinks=sink + "\n"))
    assert len(found) == 1, found
    assert found[0].startswith(wanted), found[0]


def test_parallelism_above_the_key_groups_is_found_at_each_step(
    manifest: Manifest, problems_of: ProblemsOf
) -> None:
    operators = """
    a: {from: orders, filter: id > 1, parallelism: 200}
    b: {from: a, filter: id > 1, parallelism: 201}
    """
    found = problems_of(manifest(operators, "b", spec="maxParallelism: 128\n"))
    assert [line[:44] for line in found] == [
        "17: parallelism is above the number of key g",
        "18: parallelism is above the number of key g",
    ]


def test_an_empty_document_names_what_is_missing(problems_of: ProblemsOf) -> None:
    found = problems_of("kind: Job\n")
    assert [line.partition(" | ")[0] for line in found] == [
        "1: kind must be one of StreamJob, not the text `Job`",
        "1: the manifest has no apiVersion",
        "1: the manifest has no metadata",
        "1: the manifest has no spec",
    ]
    assert problems_of("5\n") == ["1: the manifest must be a mapping, not the number `5` | "]


def test_two_windows_and_aggregates_wrong_in_two_ways_each_are_all_reported(
    manifest: Manifest, problems_of: ProblemsOf
) -> None:
    operators = """
    a:
      from: orders
      keyBy:
      - id
      - idd
      aggregate:
        n: count()
        x: sum(prise)
        y: avg(at)
    b:
      from: a
      filter: "anything > 1"
    """
    found = problems_of(manifest(operators, "b"))
    assert [line.partition(" | ")[0].partition(" in ")[0] for line in found[:2]] == [
        "20: unknown column `idd`",
        "23: unknown column `prise`",
    ]
    assert found[2].startswith("24: ")
    assert len(found) == 3


def test_what_depends_on_a_mistake_is_not_reported_but_its_own_mistakes_are(
    manifest: Manifest, problems_of: ProblemsOf
) -> None:
    operators = """
    a: {from: orders, select: ["prize AS p"]}
    b: {from: a, filter: "p > 1"}
    c: {from: b, keyBy: p, aggregate: {n: cuont()}}
    """
    found = problems_of(manifest(operators, "c"))
    assert [line[:20] for line in found] == ["16: unknown column `", "18: unknown aggregat"]


def test_a_window_without_event_time_is_refused(
    manifest: Manifest, problems_of: ProblemsOf
) -> None:
    sources = "  sources:\n    x: {nexmark: {}}\n"
    operators = "w: {from: x, window: {tumbling: 1m}, aggregate: {n: count()}}"
    found = problems_of(manifest(operators, "w", sources=sources))
    assert len(found) == 1
    assert found[0].startswith(
        "8: a window needs event time, and `x` has none | eventTime: {column: "
    )


def test_options_count_when_the_whole_is_checked(manifest: Manifest, tmp_path: Path) -> None:
    """Checkpoints may be asked for by options alone."""
    spec = f"options: {{execution.checkpointing.dir: {tmp_path}, execution.checkpointing.interval: 1s}}\n"
    text = manifest(
        "",
        sinks=f"y: {{from: orders, parquet: {{path: {tmp_path}}}, guarantee: exactly_once}}\n",
        spec=spec,
    )
    settings = runnable(load_job(text)).spec().checkpoint
    assert settings is not None
    assert settings.every_ms == 1000


def test_aliases_written_out_have_a_bound(manifest: Manifest, problems_of: ProblemsOf) -> None:
    aliases = ["f0: &f0 x"] + [f"f{i}: &f{i} [*f{i - 1}, *f{i - 1}]" for i in range(1, 60)]
    fields = "{" + ", ".join(aliases) + "}"
    sources = f"  sources:\n    x: {{generator: {{fields: {fields}}}}}\n"
    found = problems_of(manifest("", "x", sources=sources))
    assert "6: f59 must be a value of at most 100000 parts, its aliases written out | " in found


def test_a_module_that_ends_the_program_is_a_problem(
    manifest: Manifest, problems_of: ProblemsOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_the_program.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = problems_of(manifest("x: {from: orders, map: 'ends_the_program:f'}", "orders"))
    assert found.startswith(
        "16: module cannot be imported module=`ends_the_program` error=`SystemE"
    )


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="manifest cannot be read"):
        load_job(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_job(tmp_path / "latin.yaml")


def test_variables_win_over_the_environment(manifest: Manifest) -> None:
    text = manifest("", "orders", spec="parallelism: ${N}\n")
    assert load_job(text, env={"N": "2"}).parallelism == 2
    assert load_job(text, env={"N": "2"}, variables={"N": "3"}).parallelism == 3


def test_a_stream_nobody_reads_is_a_warning(
    manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    load_job(manifest("spare: {from: orders, filter: id > 1}", "orders"))
    assert [record.getMessage() for record in caplog.records] == [
        "nobody reads `spare` at manifest:16"
    ]
