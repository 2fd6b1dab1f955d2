"""Workers of a job with windows are killed; the others keep their state, and the output is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import generator, parquet_sink, random_int, sequence
from headgate.connectors.rows import RowSource

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
ROWS = 40_000
KEYS = 50
KILLS = 5
WINDOWS = {
    "tumbling": (hg.tumbling("1s"), 1000, (1000,)),
    "sliding": (hg.sliding("1500ms", "500ms"), 500, (1500,)),
    "cumulative": (hg.cumulative("2s", "500ms"), 2000, (500, 1000, 1500, 2000)),
}
"""The window, how far apart its instances begin, and how long they are, in ms."""


def make_rows(rate: float | None) -> RowSource[Any]:
    fields = {"n": sequence(), "k": random_int(0, KEYS)}
    return generator(fields, rows=ROWS, rate=rate, batch_rows=100, seed=7)


def make_job(path: Path) -> hg.Job:
    job = hg.Job("kept", parallelism=3, options={"headgate.recovery.keep-state": "true"})
    job.checkpoint(every="250ms", storage=str(path / "chk"))
    job.restart(attempts=1000, delay="50ms")
    timed = job.read(make_rows(4000), name="rows").event_time("n", max_out_of_order="2s")
    for name, (window, _, _) in WINDOWS.items():
        windows = timed.key_by("k").window(window).agg(c=hg.count(), s=hg.sum("n"), name=name)
        out = parquet_sink(str(path / name), guarantee="exactly_once")
        windows.write(out, name=f"out of {name}")
    return job


def kill_at_random(chaos: Any, event: Any, body: dict[str, Any]) -> None:
    """Kill a worker at a random moment behind a checkpoint, when those of the last restart run again."""
    done = chaos.state
    told = done.setdefault("told", [])
    if event.kind == "recovered":
        told.append(body)
    completed = event.kind == "checkpoint" and body.get("status") == "COMPLETED"
    if completed and done.get("killed", 0) == len(told) < KILLS:
        done["killed"] = len(told) + 1
        # 250 ms is the interval: also right after the next trigger, and in mid-snapshot.
        chaos.later(chaos.rng.uniform(0, 0.3), lambda c: c.kill_worker())


def missing_or_wrong(rows: Path, windows: Path, every: int, lengths: tuple[int, ...]) -> list[Any]:
    """Return what a batch finds and the job does not, and the other way round."""
    answer = f"""
        select k, start, start + length as end_, count(*) as c, sum(n) as s
        from '{rows}', (select unnest({list(lengths)}) as length),
             unnest(range(n // {every} * {every}, n - length, -{every})) as starts(start)
        group by all"""
    output = f"""
        select k, epoch_ms(window_start) as start, epoch_ms(window_end) as end_, c, s
        from '{windows}/*.parquet'"""
    difference = f"(({answer}) except all ({output})) union all (({output}) except all ({answer}))"
    with duckdb.connect() as database:
        return database.execute(difference).fetchall()


def test_windows_of_workers_that_live_are_kept(ring: Any, tmp_path: Path) -> None:
    ran = ring.run(
        make_job(tmp_path),
        kill_at_random,
        seed=1,
        until=lambda chaos: len(chaos.state.get("told", ())) >= KILLS,
    )
    assert len(ran.chaos.kills) == KILLS, ran.chaos.kills
    for told in ran.chaos.state["told"]:
        assert told["lastRestartKeptStateSize"] > 0, told
    pq.write_table(pa.table(make_rows(None).make(0, ROWS).data), tmp_path / "rows.parquet")
    for name, (_, every, lengths) in WINDOWS.items():
        wrong = missing_or_wrong(tmp_path / "rows.parquet", tmp_path / name, every, lengths)
        assert not wrong, (name, wrong[:5])
