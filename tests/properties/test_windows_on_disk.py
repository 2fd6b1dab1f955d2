"""Windows whose state is on disk send what those in memory send, whatever happens to their checkpoints.

`tests/support/twins.py` says how. Timers do not run, so early results come after a number of rows.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from math import gcd
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.state.runs.spilling_table import SpillingTable
from headgate.tests.support.twins import Twins

LEFT = {"k": "string", "n": "long", "a": "long", "word": "string"}
ON_DISK = {"state.backend.type": "rocksdb", "taskmanager.memory.managed.size": "6kb"}
OPTIONS = {"headgate.task.slice": "1h"}
LIVES = 12 if os.environ.get("HEADGATE_THOROUGH") else 1
LATE = {"allowed_lateness": "30ms"}
WINDOWS: dict[str, tuple[tuple[str, ...], Any]] = {
    "sliding": (("k",), hg.sliding("70ms", "20ms", **LATE)),
    "sliding, early": (("k", "n"), hg.sliding("60ms", "20ms", emit_rows=150, **LATE)),
    "tumbling, early": (("n",), hg.tumbling("50ms", emit_rows=40)),
    "cumulative, early": (("k",), hg.cumulative("80ms", "20ms", emit_rows=400, **LATE)),
    "session": (("n",), hg.session("8ms", **LATE)),
    "count": (("k",), hg.count_window(5)),
    "count, overlapping": (("n",), hg.count_window(9, 6)),
    "count, apart": (("k", "n"), hg.count_window(2, 3)),
    "global": (("k",), hg.global_window()),
    "global, early": (("k", "n"), hg.global_window(emit_rows=130)),
}


def job_of(name: str) -> hg.Job:
    keys, window = WINDOWS[name]
    job = hg.Job("windows", max_parallelism=12)
    job.options["pipeline.operator-chaining.enabled"] = "false"
    rows = job.read(from_list([], schema=LEFT), name="in").event_time("a")
    sums = (
        rows.key_by(*keys)
        .window(window)
        .agg(
            rows=hg.count(), total=hg.sum("a"), least=hg.min("n"), last=hg.max("word"), name="step"
        )
    )
    sums.write(blackhole(guarantee="none"), name="out")
    return job


class WindowTwins(Twins):
    """Two lives of an aggregate over windows."""

    window: Any = None

    def rows(self, tables: dict[str, list[dict[str, Any]]]) -> list[str]:
        bounds = {row["key_group"]: row for row in tables.get("watermark", ())}
        found = [f"time {row}" for name in ("watermark", "time") for row in tables.get(name, ())]
        for name, column in (("panes", "window_start"), ("sessions", "window_end")):
            for row in tables.get(name, ()):
                at = round(row[column].timestamp() * 1_000)
                if at > bounds[row["key_group"]]["gone_through"]:
                    found.append(f"{name} {row}")
        found += [f"whole {row}" for row in tables.get("whole", ())]
        found += [f"counts {row}" for row in self._counts(tables.get("counts", []))]
        return sorted(found)

    def _counts(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Leave out cells that have finished. Where all finish together, numbers restart some time."""
        counts: dict[Any, int] = {}
        for row in rows:
            key = tuple(row[name] for name in self.keys)
            counts[key] = max(counts.get(key, 0), row["__first_row"] + row["__rows"])
        found = []
        for row in rows:
            size, every = self.window.size, self.window.every
            count, first = counts[tuple(row[name] for name in self.keys)], row["__first_row"]
            is_last = first + row["__rows"] == count and count % every
            if is_last or first + gcd(size, every) > (count // every + 1) * every - size:
                found.append(row | {"__first_row": first % every if size <= every else first})
        return found


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_on_disk_send_what_those_in_memory_send(
    new_life: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, start_flush = [], SpillingTable._start_flush

    def noted(table: Any, *, owned_by_cut: bool) -> Any:
        if not owned_by_cut:
            flushed.append(table)
        return start_flush(table, owned_by_cut=owned_by_cut)

    monkeypatch.setattr(SpillingTable, "_start_flush", noted)
    sent = 0
    for seed in range(LIVES):
        job = job_of(name)
        lives = new_life(job, OPTIONS), new_life(job, {**OPTIONS, **ON_DISK})
        keys, window = WINDOWS[name]
        twins = WindowTwins(keys, lives, random.Random(seed))
        twins.window = window
        asyncio.run(twins.run())
        sent += twins.sent
    assert sent > 20 * LIVES
    assert len(flushed) > LIVES
