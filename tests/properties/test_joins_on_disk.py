"""Joins whose rows are on disk send what those in memory send, whatever happens to their checkpoints.

`tests/support/twins.py` says how.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.operators.joins.spilling import RowDelta
from headgate.tests.support.twins import Twins

LEFT = {"k": "string", "n": "long", "a": "long", "word": "string"}
RIGHT = {"k": "string", "n": "long", "b": "long", "price": "double"}
ON_DISK = {"state.backend.type": "rocksdb", "taskmanager.memory.managed.size": "24kb"}
OPTIONS = {"headgate.task.slice": "1h"}
LIVES = 12 if os.environ.get("HEADGATE_THOROUGH") else 2
LATE = {"allowed_lateness": "30ms"}


def together(key: Any, left: list[Any], right: list[Any]) -> Iterable[Any]:
    yield key, [(row.a, row.word) for row in left], [(row.b, row.price) for row in right]


def joined(window: Any, how: Any) -> Callable[[Any, Any], Any]:
    return lambda left, right: left.window(window).join(right, how=how, suffix="_2", name="step")


def grouped(window: Any) -> Callable[[Any, Any], Any]:
    return lambda left, right: left.window(window).co_group(right, together, name="step")


def as_of(how: Any, **options: Any) -> Callable[[Any, Any], Any]:
    return lambda left, right: left.join_as_of(right, how=how, suffix="_2", name="step", **options)


JOINS: dict[str, tuple[tuple[str, ...], Callable[[Any, Any], Any]]] = {
    "interval": (
        ("k",),
        lambda left, right: left.join(
            right, within=("-60ms", "30ms"), how="full", suffix="_2", name="step"
        ),
    ),
    "tumbling": (("n",), joined(hg.tumbling("50ms"), "left")),
    "tumbling, lateness": (("k",), joined(hg.tumbling("50ms", **LATE), "full")),
    "sliding": (("k", "n"), joined(hg.sliding("70ms", "20ms"), "full")),
    "sliding, lateness": (("n",), joined(hg.sliding("60ms", "20ms", **LATE), "right")),
    "days": (("k",), joined(hg.cumulative("1d", "1h", zone="Europe/Berlin"), "inner")),
    "as of": (("k",), as_of("left")),
    "as of, inner": (("k", "n"), as_of("inner")),
    "as of, valid for": (("n",), as_of("left", valid_for="40ms")),
    "co-group": (("n",), grouped(hg.tumbling("50ms"))),
    "co-group, lateness": (("k",), grouped(hg.sliding("70ms", "20ms", **LATE))),
}
SCALE = {"days": 120_000}
"""Milliseconds of a unit of time; else 1."""


def job_of(name: str) -> hg.Job:
    keys, step = JOINS[name]
    job = hg.Job("joins", max_parallelism=12)
    job.options["pipeline.operator-chaining.enabled"] = "false"
    left, right = (
        job.read(from_list([], schema=schema), name=side).event_time(time).key_by(*keys)
        for side, schema, time in (("left", LEFT, "a"), ("right", RIGHT, "b"))
    )
    step(left, right).write(blackhole(guarantee="none"), name="out")
    return job


class JoinTwins(Twins):
    """Two lives of a join."""

    def rows(self, tables: dict[str, list[dict[str, Any]]]) -> list[str]:
        """Rows without their numbers, and without what a restore would leave out."""
        bounds = {row["key_group"]: row for row in tables["time"]}
        return sorted(
            f"{name} { ({key: value for key, value in row.items() if key != '_row'}) }"
            for name, rows in tables.items()
            for row in rows
            if name == "time" or row["_time"] >= bounds[row["key_group"]][f"{name}_gone_before"]
        )


@pytest.mark.parametrize("name", JOINS)
def test_rows_on_disk_are_joined_like_those_in_memory(
    new_life: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, freeze = [], RowDelta.freeze

    def noted(delta: Any) -> None:
        flushed.append(delta.size)
        freeze(delta)

    monkeypatch.setattr(RowDelta, "freeze", noted)
    sent = 0
    for seed in range(LIVES):
        job = job_of(name)
        lives = new_life(job, OPTIONS), new_life(job, {**OPTIONS, **ON_DISK})
        twins = JoinTwins(
            JOINS[name][0],
            lives,
            random.Random(seed),
            ordered=name.startswith("as of"),
            inputs=2,
            scale=SCALE.get(name, 1),
        )
        asyncio.run(twins.run())
        sent += twins.sent
    assert sent > 100 * LIVES
    assert len(flushed) > 5 * LIVES
