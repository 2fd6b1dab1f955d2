"""Mistakes in event time, windows, joins, process functions and calls: each is one problem, at its line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job

Manifest = Callable[..., str]
ProblemsOf = Callable[..., list[str]]

EVENT_TIMES = [
    (
        "{maxOutOfOrder: 1s}",
        "6: eventTime has no column step=`x` | column: a timestamp column, or p",
    ),
    ("{column: at}", "6: eventTime has no maxOutOfOrder step=`x` | maxOutOfOrder: how much later"),
    (
        "{column: at, python: 'twin_steps:at_ms', maxOutOfOrder: 1s}",
        "6: column and python exclude each other step=`x` | keep one",
    ),
    (
        "{column: at, strategy: 'twin_steps:Behind', maxOutOfOrder: 1s}",
        "6: maxOutOfOrder and strategy exclude each other step=`x` | keep one",
    ),
    ("{column: at, strategy: 'twin_steps:Behnd'}", "6: module has no such name name=`Behnd`"),
    (
        "{column: at, strategy: {python: 'twin_steps:FarBehind', arguments: {days: 1}}}",
        "6: class cannot be made with these arguments reference=`twin_steps:FarBehind`",
    ),
    (
        "{column: at, strategy: {python: 'twin_steps:every', arguments: {count: 1}}}",
        "6: not a strategy reference=`twin_steps:every` type=`Count`",
    ),
    (
        "{column: at, strategy: 'twin_steps:START'}",
        "6: not a strategy reference=`twin_steps:START`",
    ),
    ("{python: 'twin_steps:START', maxOutOfOrder: 1s}", "6: not a function reference="),
    (
        "{column: at, maxOutOfOrder: 1s, closeAfter: 1m}",
        "6: eventTime with closeAfter has no name step=`x` | the progress of event time is stored",
    ),
    (
        "{column: at, maxOutOfOrder: 1s, align: all, idleAfter: 1m}",
        "6: eventTime with align has no maxDrift step=`x` | maxDrift: 30s",
    ),
    (
        "{column: at, maxOutOfOrder: 1s, align: all, maxDrift: 1m}",
        "6: eventTime with align has no idleAfter step=`x` | idleAfter: 1m",
    ),
    (
        "{column: at, maxOutOfOrder: 1s, maxDrift: 1m}",
        "6: maxDrift has no effect without align step=`x` | add align",
    ),
    ("{column: at, maxOutOfOrder: 1s, perSplit: maybe}", "6: perSplit must be true or false"),
    (
        "{column: at, maxOutOfOrder: 1s, idelAfter: 1m}",
        "6: unknown field in eventTime field=`idelA",
    ),
    ("{column: at, maxOutOfOrder: 1s, closeAfter: 1m, name: x}", "6: "),
]


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(("event_time", "wanted"), EVENT_TIMES)
def test_a_mistake_in_event_time_is_one_problem(
    event_time: str, wanted: str, manifest: Manifest, problems_of: ProblemsOf
) -> None:
    """The steps behind it are checked as if they had event time."""
    fields = "{generator: {fields: {id: sequence, at: timestamp}, rows: 5}, eventTime: "
    text = manifest(
        "w: {from: x, keyBy: id, window: {tumbling: 1m}, aggregate: {n: count()}}",
        "w",
        sources=f"  sources:\n    x: {fields}{event_time}}}\n",
    )
    found = problems_of(text)
    assert len(found) == 1, found
    assert found[0].startswith(wanted), found[0]


WINDOWS = [
    (
        "{}",
        "window has no kind operator=`x` | use one of tumbling, sliding, cumulative, session, c",
    ),
    ("{offset: 1s}", "window has no kind operator=`x`"),
    (
        "{tumbling: 1m, session: 1m}",
        "window has more than one kind operator=`x`: tumbling, session",
    ),
    ("{sliding: 1m}", "a sliding window has no every | every: a duration"),
    ("{sliding: 1m, every: 10}", "every needs a unit value=`10`"),
    ("{sliding: 1m, every: 2m}", "a sliding window must begin at least once in its size"),
    ("{cumulative: 1d}", "a cumulative window has no step | step: a duration"),
    ("{cumulative: 1d, step: 7h}", "the size of a cumulative window must be a multiple"),
    (
        "{tumbling: 1m, every: 5s}",
        "every has no effect for a tumbling window | remove it; tumbling t",
    ),
    ("{session: 30}", "session must be a duration with a unit such as `30m`, SQL, or `module:func"),
    ("{session: 0s}", "a session needs a gap"),
    ("{session: 5m, zone: Europe/Berlin}", "zone has no effect for a session window"),
    ("{count: 0}", "count must be a number in 1.."),
    (
        "{count: 5, every: 1m}",
        "every of a count window must be a number of records, not the text `",
    ),
    ("{count: 5, allowedLateness: 1m}", "allowedLateness has no effect for a count window"),
    ("{global: some}", "global must be one of all, not the text `some`"),
    (
        "{tumbling: 1d, zone: Europe/Berln}",
        "unknown time zone `Europe/Berln` | did you mean `Europe",
    ),
    ("{tumbling: 1h, zone: Europe/Berlin}", "windows in a time zone are whole days"),
    ("{tumbling: 1m, emitEvery: 0s}", "emit_every must not be 0"),
    ("{tumbling: 1m, time: procesing}", "time must be one of event, processing, not the text `pro"),
    ("{python: 'twin_steps:START'}", "not a window assigner reference=`twin_steps:START`"),
    (
        "{python: {python: 'twin_steps:every', arguments: {count: 1}}}",
        "not a window assigner reference=`twin_steps:every` type=`Count`",
    ),
    (
        "{tumbling: 1m, trigger: {python: 'twin_steps:every', arguments: {size: 1}}}",
        "function cannot be called with these arguments reference=`twin_steps:every`",
    ),
    ("{tumbling: 1m, trigger: 'twin_steps:nothing'}", "module has no such name name=`nothing`"),
    ("{tumbling: 1m, trigger: 'twin_steps:ad_of'}", "trigger= needs an instance of hg.Trigger"),
    ("{tumbling: 1m, triger: 'twin_steps:every_second'}", "unknown field in window field=`triger`"),
]


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(("window", "wanted"), WINDOWS)
def test_a_mistake_in_a_window_is_one_problem(
    window: str, wanted: str, manifest: Manifest, problems_of: ProblemsOf
) -> None:
    operators = f"x: {{from: orders, keyBy: id, window: {window}, reduce: 'twin_steps:larger'}}"
    found = problems_of(manifest(operators, "orders"))
    assert len(found) == 1, found
    assert found[0].startswith(f"16: {wanted}"), found[0]


TABLE = "x: {from: orders, lookup: {key: id, table: {csv: {path: owners.csv}, "
JOIN = "x: {from: orders, keyBy: id, "
OPERATORS = [
    (JOIN + "join: {keyBy: id, within: [0s, 1s]}}", "join has no with | with: the other source or"),
    (
        JOIN + "join: {with: odrers, keyBy: id, within: [0s, 1s]}}",
        "no such stream name=`odrers` | d",
    ),
    (
        JOIN + "join: {with: orders, within: [0s, 1s]}}",
        "join.with has no keyBy operator=`x` | keyBy",
    ),
    (
        "x: {from: orders, join: {with: orders, keyBy: id, within: [0s, 1s]}}",
        "join has no keyBy op",
    ),
    (
        JOIN + "join: {with: orders, keyBy: id}}",
        "join needs either within or a window operator=`x`",
    ),
    (
        JOIN + "window: {tumbling: 1m}, join: {with: orders, keyBy: id, within: [0s, 1s]}}",
        "join needs either within or a window operator=`x`",
    ),
    (
        JOIN + "join: {with: orders, keyBy: id, within: 1s}}",
        "within must be a list of 2 entries, no",
    ),
    (
        JOIN + "join: {with: orders, keyBy: id, within: [-5, 1s]}}",
        "within must be a duration with a",
    ),
    (JOIN + "join: {with: orders, keyBy: id, within: [1s, -1s]}}", "within= ends before it begins"),
    (
        JOIN + "join: {with: orders, keyBy: id, within: [0s, 1s], how: lef}}",
        "how must be one of inne",
    ),
    (
        JOIN + "join: {with: orders, keyBy: idd, within: [0s, 1s]}}",
        "unknown column `idd` in key_by",
    ),
    (
        JOIN + "join: {with: orders, kyBy: id, within: [0s, 1s], suffix: _o}}",
        "unknown field in join field=`kyBy`",
    ),
    (
        JOIN + "joinAsOf: {with: orders, keyBy: id, how: full}}",
        "how must be one of inner, left, not",
    ),
    (
        JOIN + "coGroup: {with: orders, keyBy: id, python: 'twin_steps:together'}}",
        "coGroup has no window operator=`x` | window: {tumbling: 1m}",
    ),
    (
        JOIN + "window: {tumbling: 1m}, coGroup: {with: orders, keyBy: id}}",
        "coGroup has no python | python: a function",
    ),
    (
        "x: {from: orders, process: 'twin_steps:Guard'}",
        "process has no keyBy operator=`x` | keyBy:",
    ),
    (
        "x: {from: orders, keyBy: id, keyWith: 'twin_steps:ad_of', process: 'twin_steps:Guard'}",
        "keyBy and keyWith exclude each other operator=`x` | keep one",
    ),
    (
        "x: {from: orders, keyWith: 'twin_steps:adof', process: 'twin_steps:Guard'}",
        "module has no such name name=`adof`",
    ),
    (
        JOIN + "process: 'twin_steps:Needy'}",
        "class cannot be made without arguments reference=`twin",
    ),
    (JOIN + "process: 'twin_steps:half'}", "process needs a KeyedProcess here, got `function`"),
    (
        JOIN + "process: 'twin_steps:Both'}",
        "a CoProcess is for two keyed streams, not for a keyed stream operator=`x` | connect: {with:",
    ),
    (
        JOIN + "connect: {with: orders, keyBy: id}, process: 'twin_steps:Known'}",
        "a BroadcastProcess is for a keyed stream and a broadcast one, not for two keyed streams",
    ),
    (
        JOIN + "window: {tumbling: 1m}, process: 'twin_steps:Guard'}",
        "a KeyedProcess is for a keyed stream, not for windows operator=`x` | remove connect or wind",
    ),
    (
        JOIN + "window: {tumbling: 1m}, process: 'twin_steps:Count', onError: drop}",
        "onError is not for functions of windows operator=`x` | remove it: what such a function",
    ),
    (
        JOIN + "connect: {broadcast: orders, keyBy: id}, process: 'twin_steps:Known'}",
        "keyBy has no effect for a broadcast stream operator=`x` | remove it",
    ),
    (
        JOIN + "connect: {}, process: 'twin_steps:Both'}",
        "connect needs either with or broadcast operator=`x`",
    ),
    (
        JOIN + "connect: {broadcast: orders}, reduce: 'twin_steps:larger'}",
        "connect has no effect for",
    ),
    (
        JOIN + "aggregate: 'twin_steps:Mean'}",
        "an AggregateFunction needs a window operator=`x` | wi",
    ),
    (
        JOIN + "reduce: 'twin_steps:larger', windowProcess: 'twin_steps:Count'}",
        "windowProcess has no effect with no window operator=`x`",
    ),
    (
        JOIN + "window: {tumbling: 1m}, aggregate: {n: count()}, ttl: 1h}",
        "ttl has no effect for aggregate with a window operator=`x` | remove it: the state of a wi",
    ),
    (JOIN + "aggregate: {ttl: count()}}", "a result cannot be called `ttl` | rename it"),
    (
        JOIN + "aggregate: {queryable: count()}}",
        "a result cannot be called `queryable` | rename it",
    ),
    (
        JOIN + "window: {tumbling: 1m}, reduce: 'twin_steps:larger', queryable: ads}",
        "queryable has no effect for reduce with a window operator=`x` | remove it: of windows, only the "
        "state of aggregates over columns can be queried",
    ),
    (
        JOIN + "window: {tumbling: 1m}, reduce: 'twin_steps:larger', ttl: 1h}",
        "ttl has no effect for reduce with a window operator=`x` | remove it: the state of a window",
    ),
    (
        "x: {from: orders, window: {tumbling: 1m, trigger: 'twin_steps:every_second'}, "
        "reduce: 'twin_steps:larger'}",
        "a window with trigger needs a key operator=`x` | keyBy: [column]",
    ),
    (
        "x: {from: orders, window: {python: 'twin_steps:Hours'}, reduce: 'twin_steps:larger'}",
        "a window with python needs a key operator=`x` | keyBy: [column]",
    ),
    (
        "x: {from: orders, keyWith: 'twin_steps:ad_of', aggregate: {n: count()}}",
        "aggregate needs a key made of columns, and keyWith is a function operator=`x` | make the key",
    ),
    (
        JOIN + "join: {with: orders, keyWith: 'twin_steps:ad_of', within: [0s, 1s]}}",
        "join.with needs a key made of columns, and keyWith is a function operator=`x` | make the key",
    ),
    (
        JOIN + "aggregate: 5}",
        "aggregate must be a mapping such as `{n: count()}`, or `module:Aggrega",
    ),
    ("x: {from: orders, mapAsync: 'twin_steps:half'}", "map_async needs an `async def` function"),
    (
        "x: {from: orders, mapAsync: 'twin_steps:later', onTimeout: drop}",
        "onTimeout must be fail, side_output or `module:function`, not the text `drop`",
    ),
    (
        "x: {from: orders, mapAsync: 'twin_steps:later', onTimeout: side_output}",
        "nobody reads `x.timed_out` | write it to a sink (from: x.timed_out), or do not use side_out",
    ),
    (
        "x: {from: orders, map: 'twin_steps:same', onError: {then: side_output}}",
        "nobody reads `x.failed` | write it to a sink (from: x.failed), or do not use side_output",
    ),
    (
        "x: {from: orders, keyBy: id, mapAsync: 'twin_steps:later', ordered: true}",
        "ordered has no effect with a key operator=`x` | remove it",
    ),
    (
        "x: {from: orders, mapAsync: 'twin_steps:later', retry: {attempts: 0}}",
        "attempts must be a number in 1..1000, not the number `0`",
    ),
    (
        "x: {from: orders, mapAsync: 'twin_steps:later', retry: {onException: 'builtins:OSErorr'}}",
        "module has no such name name=`OSErorr` module=`builtins` | did you mean `OSError`?",
    ),
    (
        "x: {from: orders, mapAsync: 'twin_steps:later', timeout: 1s, "
        "retry: {attempts: 3, delay: 2s}}",
        "the delays before attempt 2 leave no time for it",
    ),
    (
        "x: {from: orders, lookup: {key: id}}",
        "lookup needs either python, postgres or table operator=`x` |",
    ),
    (
        "x: {from: orders, lookup: {key: id, python: 'twin_steps:owner_of', table: {key: id}}, "
        "into: {owner: string}}",
        "lookup needs either python, postgres or table operator=`x`",
    ),
    (
        "x: {from: orders, lookup: {python: 'twin_steps:owner_of'}, into: {owner: string}}",
        "lookup has no key | key: columns of the record",
    ),
    (
        "x: {from: orders, lookup: {key: id, python: 'twin_steps:owner_of'}}",
        "lookup has no into operator=`x` | into: {column: type}",
    ),
    (
        "x: {from: orders, lookup: {key: id, python: 'twin_steps:same'}, into: {owner: string}}",
        "lookup needs an `async def` function",
    ),
    (
        "x: {from: orders, lookup: {key: idd, python: 'twin_steps:owner_of'}, into: {owner: string}}",
        "unknown column `idd` in lookup | did you mean `id`?",
    ),
    (
        "x: {from: orders, lookup: {key: id, how: inner, python: 'twin_steps:owner_of'}, "
        "into: {owner: string}}",
        "how has no effect for a lookup with python operator=`x` | remove it",
    ),
    (
        TABLE + "key: id, schema: {id: long, owner: string}}}, into: {owner: string}}",
        "into has no effect for a lookup in a table operator=`x` | remove it",
    ),
    (
        TABLE + "key: id, schema: {id: long, owner: string}}, cacheFor: 1m}}",
        "cacheFor has no effect for a lookup in a table operator=`x`",
    ),
    (
        TABLE + "schema: {id: long, owner: string}}}}",
        "table has no key | key: columns that records are looked up by",
    ),
    (TABLE + "key: id}}}", "table has no schema table=`x` | schema: {column: type, ...}"),
    (
        "x: {from: orders, lookup: {key: id, table: {key: id}}}",
        "table has no connector table=`x` | name one of csv, json, text, parquet",
    ),
    (
        "x: {from: orders, lookup: {key: id, table: {parquet: {path: not-there.parquet}, key: id}}}",
        "no file found path=`not-there.parquet`",
    ),
    (
        TABLE + "key: idd, schema: {id: long, owner: string}}}}",
        "unknown column `idd` in key of a static table | did you mean `id`?",
    ),
    (
        TABLE + "key: id, schema: {id: string, owner: string}}}}",
        "`event_time` is looked up by (id: int64), and the key of the table is (id: string)",
    ),
    (
        TABLE + "key: id, maxBytes: 5, schema: {id: long, owner: string}}}}",
        "maxBytes must be a size with a unit",
    ),
    (
        TABLE.replace("owners.csv", "owners.csv, rate: 5")
        + "key: id, schema: {id: long, owner: string}}}}",
        "a static table is read from files, not from source=`_Throttled`",
    ),
    (
        "x: {from: orders, map: 'twin_steps:same', onError: dorp}",
        "onError must be one of fail, drop",
    ),
    (
        "x: {from: orders, filter: id > 1, onError: drop}",
        "on_error= is for functions, and this filte",
    ),
    (
        "x: {from: orders, select: id, onError: drop}",
        "onError has no effect for select operator=`x`",
    ),
    (
        "x: {from: orders, python: 'twin_steps:plus_one', within: 1s}",
        "within= limits how long rows wa",
    ),
    ("x: {from: orders, python: 'twin_steps:plus_one', rows: 0}", "rows must be a number in 1.."),
    (
        JOIN + "process: {python: 'twin_steps:Needy', arguments: {limt: 5}}}",
        "class cannot be made with these arguments reference=`twin_steps:Needy` error=`TypeError",
    ),
    (
        JOIN + "match: {pattern: {python: 'twin_steps:rising', arguments: {low: 5}}}}",
        "function cannot be called with these arguments reference=`twin_steps:rising` error=`TypeE",
    ),
    (
        JOIN + "match: {pattern: {python: 'twin_steps:often', arguments: {times: -1}}}}",
        "times(low, high) needs 0 <= low <= high low=`-1` high=`-1`",
    ),
    (
        JOIN + "match: {pattern: {python: 'twin_steps:risen', arguments: {low: 5}}}}",
        "takes no arguments reference=`twin_steps:risen` type=`Pattern` | name a class, or a func",
    ),
    (
        JOIN + "process: {arguments: {limit: 5}}}",
        "a reference has no python | python: a class, or",
    ),
    (
        JOIN + "process: {python: 'twin_steps:Needy', argments: {limit: 5}}}",
        "unknown field in a reference field=`argments` | did you mean `arguments`?",
    ),
    (
        JOIN + "process: {python: 'twin_steps:Needy', arguments: [5]}}",
        "arguments must be a mapping, not a list",
    ),
    (
        JOIN + "match: {pattern: 'twin_steps:risen', afterMatch: skip_to_lst(a)}}",
        "afterMatch must be no_skip, skip_to_next, skip_past_last_event, skip_to_first(stage) or",
    ),
    (
        JOIN + "match: {pattern: 'twin_steps:risen', afterMatch: skip_to_last(hgh)}}",
        "skip_to_last(hgh) names no stage that takes records stage=`hgh` | did you mean `high`?",
    ),
    (
        JOIN + "match: {pattern: 'twin_steps:decided', afterMatch: no_skip}}",
        "the pattern says `skip_to_next` itself operator=`x` | remove afterMatch, or after_match",
    ),
    (JOIN + "match: {select: 'twin_steps:highest'}}", "match has no pattern | pattern: a pat"),
    (JOIN + "match: {pattern: 'twin_steps:rison'}}", "module has no such name name=`rison`"),
    (JOIN + "match: {pattern: 'twin_steps:START'}}", "match needs a pattern, got `datetime`"),
    (JOIN + "match: {pattern: 'twin_steps:risen'}}", "unknown column `amount`"),
    ("x: {from: orders, match: {pattern: 'twin_steps:risen'}}", "match has no keyBy operator=`x`"),
    ("x: {from: orders, iterate: {wait: 1s}}", "iterate has no body | body: a function"),
    (
        "x: {from: orders, iterate: {body: 'twin_steps:ad_of'}}",
        "body of a loop raised error=`AttributeError: ",
    ),
    (
        "x: {from: orders, iterate: {body: 'twin_steps:countdown', whileAny: id > 3}}",
        "whileAny has no effect without maxRounds operator=`x` | add maxRounds, or remove it",
    ),
    (
        "x: {from: orders, iterate: {body: 'twin_steps:countdown', maxRounds: 3, wait: 1s}}",
        "wait has no effect with maxRounds operator=`x` | remove it",
    ),
]


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(("operators", "wanted"), OPERATORS)
def test_a_mistake_in_a_form_is_one_problem(
    operators: str, wanted: str, manifest: Manifest, problems_of: ProblemsOf
) -> None:
    found = problems_of(manifest(operators, "orders"))
    assert len(found) == 1, found
    assert found[0].startswith(f"16: {wanted}"), found[0]


@pytest.mark.usefixtures("steps")
def test_fields_of_a_form_have_lines_of_their_own(
    manifest: Manifest, problems_of: ProblemsOf
) -> None:
    operators = """
    x:
      from: orders
      keyBy: id
      window:
        sliding: 1m
        every: 5
        trigger: twin_steps:none
      coGroup:
        with: oders
        keyBy: id
        python: twin_steps:nobody
    """
    found = problems_of(manifest(operators, "orders"))
    assert [line.partition(" | ")[0][:30] for line in found] == [
        "21: every needs a unit value=`",
        "22: module has no such name na",
        "24: no such stream name=`oders",
        "26: module has no such name na",
    ]


@pytest.mark.usefixtures("steps")
def test_a_side_output_that_is_misspelled_is_one_problem(
    manifest: Manifest, problems_of: ProblemsOf
) -> None:
    operators = "x: {from: orders, map: 'twin_steps:same', onError: side_output}"
    (found,) = problems_of(manifest(operators, "x.faild"))
    assert found.startswith("18: `x` has no side output `faild` | did you mean `failed`?")


@pytest.mark.usefixtures("steps")
def test_joins_of_streams_without_event_time_say_which_field_is_missing(
    manifest: Manifest, problems_of: ProblemsOf
) -> None:
    sources = "  sources:\n    x: {nexmark: {}}\n"
    for form in (
        "join: {with: x, keyBy: auction, within: [0s, 1s]}",
        "joinAsOf: {with: x, keyBy: url}",
    ):
        key = "auction" if "auction" in form else "url"
        found = problems_of(manifest(f"w: {{from: x, keyBy: {key}, {form}}}", "w", sources=sources))
        assert len(found) == 1, found
        assert "needs event time, and `x` has none | eventTime: {column:" in found[0]


@pytest.mark.usefixtures("steps")
def test_a_circle_through_the_second_input_of_a_join_is_found(
    manifest: Manifest, problems_of: ProblemsOf
) -> None:
    operators = "x: {from: orders, keyBy: id, joinAsOf: {with: x, keyBy: id}}"
    (found,) = problems_of(manifest(operators, "orders"))
    assert found.startswith("16: operators read each other in a circle path=`x -> x`")


@pytest.mark.usefixtures("steps")
def test_parallelism_of_a_loop_is_that_of_its_ends(manifest: Manifest) -> None:
    operators = "x: {from: orders, iterate: {body: 'twin_steps:shrink'}, parallelism: 2}"
    nodes = runnable(load_job(manifest(operators, "x"))).graph.nodes
    assert {node.parallelism for node in nodes if node.name == "x"} == {2}
    assert {node.parallelism for node in nodes if node.name == "gone"} == {None}
