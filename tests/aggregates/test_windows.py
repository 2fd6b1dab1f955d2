"""All aggregates in all windows, through checkpoints, crashes and rescaling, in memory and on disk."""

from __future__ import annotations

import math
import statistics
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import csv_source, parquet_sink
from headgate.testing import harness

T0 = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        pa.field("user", pa.string()),
        pa.field("x", pa.int64()),
        pa.field("f", pa.float64()),
        pa.field("word", pa.string()),
        pa.field("at", pa.timestamp("ms", tz="UTC")),
    ]
)


def present(rows, column):
    return [row[column] for row in rows if row[column] is not None]


def spread(rows):
    values = present(rows, "f")
    return statistics.variance(values) if len(values) > 1 else None


class Near(NamedTuple):
    """An estimate, with the value that it has to be near."""

    value: float


def median(values):
    return Near(sorted(values)[(len(values) - 1) // 2]) if values else None


AGGREGATES = {
    "variance": (hg.variance("f"), spread),
    "first": (hg.first("word"), lambda rows: chosen(rows, "word", "ms", last=False)),
    "last": (hg.last("x"), lambda rows: chosen(rows, "x", "ms", last=True)),
    "least": (hg.min_by("word", "f"), lambda rows: chosen(rows, "word", "f", last=False)),
    "most": (hg.max_by("at", "x"), lambda rows: chosen(rows, "at", "x", last=True)),
    "words": (hg.count_distinct("word"), lambda rows: len(set(present(rows, "word")))),
    "numbers": (hg.count_distinct("x"), lambda rows: len(set(present(rows, "x")))),
    "about": (hg.approx_count_distinct("x"), lambda rows: len(set(present(rows, "x")))),
    "median": (hg.quantile("f", 0.5), lambda rows: median(present(rows, "f"))),
    "all": (hg.collect("word"), lambda rows: present(sorted(rows, key=itemgetter("ms")), "word")),
    "best": (hg.top_n("word", 3, by="x"), lambda rows: top(rows, "word", 3, "x")),
    "least three": (
        hg.top_n("f", 3, ascending=True),
        lambda rows: sorted(present(rows, "f"))[:3],
    ),
    "stddev": (hg.stddev("x", population=True), lambda rows: deviation(present(rows, "x"))),
}


def chosen(rows, column, by, last):
    """Of the rows, in order of arrival."""
    best = None
    for row in rows:
        if row[column] is not None and row[by] is not None:
            if best is not None:
                now, before = (row[by], row["ms"]), (best[by], best["ms"])
            if best is None or (now >= before if last else now < before):
                best = row
    return None if best is None else best[column]


def top(rows, column, n, by):
    """Of the rows, in order of arrival."""
    some = [row for row in rows if row[column] is not None and row[by] is not None]
    return [row[column] for row in sorted(some, key=itemgetter(by, "ms"))[-n:][::-1]]


def deviation(values):
    return statistics.pstdev(values) if values else None


def tumbling(row, rows):
    return [row["ms"] - row["ms"] % 20_000]


def sliding(row, rows):
    first = row["ms"] - row["ms"] % 5_000
    return list(range(first - 15_000, first + 1, 5_000))


def session(row, rows):
    low = row["ms"]
    for time in sorted(
        (other["ms"] for other in rows if other["user"] == row["user"]), reverse=True
    ):
        if time < low < time + 4_000:
            low = time
    return [low]


WINDOWS = {
    "tumbling": (hg.tumbling("20s"), tumbling),
    "sliding": (hg.sliding("20s", every="5s"), sliding),
    "session": (hg.session("4s"), session),
}


BACKENDS = {"hashmap": {}, "rocksdb": {"taskmanager.memory.managed.size": "1mb"}}


def random_rows(seed, count=240):
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        ms = max(0, int(index * 250 + rng.integers(-9_000, 9_000)))
        rows.append(
            {
                "user": f"u{rng.integers(0, 4)}",
                "x": None if rng.random() < 0.2 else int(rng.integers(0, 9)),
                "f": None if rng.random() < 0.2 else 1e6 + float(rng.normal()),
                "word": None if rng.random() < 0.2 else str(rng.integers(0, 30)),
                "ms": ms,
                "at": T0 + timedelta(milliseconds=ms),
            }
        )
    return rows


def job_of(window, backend):
    job = hg.Job("aggregates", options={"state.backend.type": backend, **BACKENDS[backend]})
    job.checkpoint(every="1h", storage="s3://lake/checkpoints")
    read = job.read(csv_source("in/*.csv", SCHEMA), name="in")
    keyed = read.event_time("at", max_out_of_order="20s").key_by("user")
    calls = {name: aggregate for name, (aggregate, _) in AGGREGATES.items()}
    found = keyed.agg(**calls, name="agg") if window is None else (
        keyed.window(window).agg(**calls, name="agg")
    )  # fmt: skip
    found.write(parquet_sink("out", guarantee="exactly_once"), name="out")
    return job


def run(job, rows, rng):
    """Return the results of rows in batches, with checkpoints, a crash and a rescale between."""
    found = []
    with harness(job) as h:
        for number, low in enumerate(range(0, len(rows), 48)):
            part = [{k: v for k, v in row.items() if k != "ms"} for row in rows[low : low + 48]]
            for cut in np.array_split(np.arange(len(part)), int(rng.integers(1, 5))):
                if len(cut):
                    h.push("in", [part[at] for at in cut.tolist()])
            if number in (1, 2):
                h.checkpoint()
            if number == 3:
                h.crash()
                h.rescale(2)
        h.end()
        found += h.drain("out")
    return found


def same(found, expected):
    if isinstance(expected, Near):
        return found is not None and abs(found - expected.value) <= 0.01001 * abs(expected.value)
    if isinstance(expected, float) and found is not None:
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    return found == expected


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("kind", WINDOWS)
def test_windows(kind, backend):
    window, assign = WINDOWS[kind]
    rows = random_rows(7)
    held = {}
    for row in rows:
        for start in assign(row, rows):
            place = row["user"], T0 + timedelta(milliseconds=start)
            held.setdefault(place, []).append(row)
    found = run(job_of(window, backend), rows, np.random.default_rng(3))
    results = {(row["user"], row["window_start"]): row for row in found}
    assert results.keys() == held.keys()
    for place, members in held.items():
        for name, (_, model) in AGGREGATES.items():
            assert same(results[place][name], model(members)), (place, name)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_running(backend):
    rows = random_rows(8)
    last = {row["user"]: row for row in run(job_of(None, backend), rows, np.random.default_rng(4))}
    for user, row in last.items():
        mine = [other for other in rows if other["user"] == user]
        for name, (_, model) in AGGREGATES.items():
            assert same(row[name], model(mine)), (user, name)
