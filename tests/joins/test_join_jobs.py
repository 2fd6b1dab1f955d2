"""Joins in whole jobs that fail, stop and go on at another parallelism: nothing lost, nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.testing import harness
from headgate.tests.support.held import Paced

ROWS, KEYS = 600, 7
LEFT = {"k": "long", "a": "long"}
RIGHT = {"k": "long", "b": "long"}
LEFTS = [n for n in range(ROWS) if n % 3 == 0]
RIGHTS = [n for n in range(ROWS) if n % 2 == 0]


def together(key: int, left: list[Any], right: list[Any]) -> Any:
    yield {"k": key, "n": len(left), "m": len(right), "last": max([0, *(row.b for row in right)])}


def interval(left: Any, right: Any) -> Any:
    return left.join(right, within=("-21ms", "14ms"), how="full", name="joined")


def window(left: Any, right: Any) -> Any:
    return left.window(hg.tumbling("50ms")).join(right, how="left", name="joined")


def co_group(left: Any, right: Any) -> Any:
    into = {"k": "long", "n": "long", "m": "long", "last": "long"}
    return left.window(hg.sliding("50ms", "25ms")).co_group(
        right, together, into=into, name="joined"
    )


def as_of(left: Any, right: Any) -> Any:
    return left.join_as_of(right, how="left", name="joined")


def expected(kind: Any) -> list[Any]:
    """All rows of the result, without anything of ours."""
    same = [(a, b) for a in LEFTS for b in RIGHTS if a % KEYS == b % KEYS]
    if kind is as_of:
        newest = {a: max((b for x, b in same if x == a and b <= a), default=None) for a in LEFTS}
        return [(a % KEYS, a, b) for a, b in newest.items()]
    if kind is co_group:
        return [
            (key, len(left), len(right), max([0, *right]))
            for start in range(-25, ROWS, 25)
            for key in range(KEYS)
            for left, right in [
                [
                    [n for n in side if start <= n < start + 50 and n % KEYS == key]
                    for side in (LEFTS, RIGHTS)
                ]
            ]
            if left or right
        ]
    if kind is window:
        pairs = [(a, b) for a, b in same if a // 50 == b // 50]
        alone = set(LEFTS) - {a for a, _ in pairs}
        return [*((a % KEYS, a, b) for a, b in pairs), *((a % KEYS, a, None) for a in alone)]
    pairs = [(a, b) for a, b in same if -21 <= b - a <= 14]
    lefts, rights = ({pair[side] for pair in pairs} for side in (0, 1))
    return [
        *((a % KEYS, a, b) for a, b in pairs),
        *((a % KEYS, a, None) for a in LEFTS if a not in lefts),
        *((b % KEYS, None, b) for b in RIGHTS if b not in rights),
    ]


def in_order(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: [(value is None, value or 0) for value in row])


def made(sink: Any) -> list[Any]:
    return [tuple(row.values()) for row in sink.rows]


def job_of(kind: Any, storage: str, parallelism: int, sink: Any) -> Any:
    options = {"pipeline.auto-watermark-interval": "5ms"}
    job = hg.Job("joins", parallelism=parallelism, max_parallelism=12, options=options)
    job.checkpoint(every="50ms", storage=storage)
    job.restart(attempts=20, delay="10ms")
    sides = []
    for name, schema, step in (("left", LEFT, 3), ("right", RIGHT, 2)):
        column = list(schema)[1]
        source = Paced(numbers(ROWS, batch_rows=10, splits=1), 8)
        read = job.read(source, name=name, parallelism=1)
        sides.append(
            read.filter(lambda n, step=step: n % step == 0)
            .map(lambda n, column=column: {"k": n % KEYS, column: n}, into=schema)
            .event_time(column, max_out_of_order="20ms")
            .key_by("k")
        )
    kind(*sides).write(sink, name="out", parallelism=1)
    return job


KINDS = [interval, window, co_group, as_of]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_job_whose_workers_die(lab: Any, faults: Any, kind: Any, parallelism: int) -> None:
    sink = collect(guarantee="exactly_once")
    job = job_of(kind, lab.storage, parallelism, sink)
    ran = lab.run(job, faults.kills(parallelism, 2))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 2
    assert in_order(made(sink)) == in_order(expected(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_goes_on_at_another_parallelism(lab: Any, kind: Any) -> None:
    # One sink for both runs: what the last checkpoint holds is committed again, which must not show.
    storage, sink = lab.storage, collect(guarantee="exactly_once")
    job = job_of(kind, storage, 2, sink)

    async def script(running: Any) -> None:
        await running.checkpoint()
        await running.checkpoint()
        await running.request("stop")

    assert lab.run(job, script).outcome.status == "SUSPENDED"
    again = job_of(kind, storage, 3, sink)
    ran = lab.run(again)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert ran.restores[0] > 0
    assert in_order(made(sink)) == in_order(expected(kind))


def test_late_records_of_both_sides() -> None:
    job = hg.Job("late")
    left, right = (
        job.read(hg.connectors.from_list([], schema=schema), name=name)
        .event_time(column)
        .key_by("k")
        for name, schema, column in (("left", LEFT, "a"), ("right", RIGHT, "b"))
    )
    joined = left.join(right, within=("0s", "10ms"), name="joined")
    for name, stream in (
        ("out", joined),
        ("late", joined.late),
        ("late other", joined.side("late_other")),
    ):
        stream.write(collect(guarantee="none"), name=name)
    with harness(job, parallelism=2) as h:
        h.push("left", {"k": 1, "a": 100}, {"k": 2, "a": 105})
        h.advance_watermark("left", 100)
        h.advance_watermark("right", 105)
        h.push("right", {"k": 1, "b": 100}, {"k": 1, "b": 99}, {"k": 2, "b": 115})
        h.push("left", {"k": 1, "a": 99})
        assert sorted(row["k"] for row in h.drain("out")) == [1, 2]
        assert h.drain("late") == [{"k": 1, "a": 99}]
        assert h.drain("late other") == [{"k": 1, "b": 99}]
