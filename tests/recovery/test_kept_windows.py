"""Jobs with windows of which workers die: what the others keep in memory leads to the batch answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest

import headgate as hg
from headgate.operators.windows import tumbling
from headgate.operators.windows.panes import table as pane_table
from headgate.operators.windows.sessions import table as session_table
from headgate.tests.support.kept import ROWS, SCRIPTS, Scene, key_of

WINDOWS = {
    "tumbling": hg.tumbling("500ms"),
    "sliding": hg.sliding("600ms", "200ms"),
    "cumulative": hg.cumulative("800ms", "200ms"),
    "session": hg.session("9ms"),
}
SPANS_MS = {
    "tumbling": (500, [500]),
    "sliding": (200, [600]),
    "cumulative": (800, [200, 400, 600, 800]),
}
"""The distance between the starts of windows, and their lengths."""
GAP_MS = 9
"""Some keys have rows that are nearer to each other, and sessions that last long, others have not."""


def _aggregated(name: str, timed: Any) -> Any:
    windows = timed.key_by("k").window(WINDOWS[name])
    return windows.agg(
        c=hg.count(),
        s=hg.sum("n"),
        d=hg.count_distinct("n"),
        low=hg.min("n"),
        name=name,
    )


def _plain(row: Any) -> tuple[int, ...]:
    bounds = (round(1000 * row[f"window_{bound}"].timestamp()) for bound in ("start", "end"))
    return (row["k"], *bounds, *(row[name] for name in ("c", "s", "d", "low")))


def batch_answer(name: str) -> list[tuple[int, ...]]:
    """Return what the windows of all rows are, computed one by one."""
    found = defaultdict(list)
    if name == "session":
        for key, ns in sessions():
            found[key, ns[0], ns[-1] + GAP_MS] = ns
        return _results(found)
    every, lengths = SPANS_MS[name]
    for n in range(ROWS):
        for length in lengths:
            for start in range(n // every * every, n - length, -every):
                found[key_of(n), start, start + length].append(n)
    return _results(found)


def sessions() -> Iterator[tuple[int, list[int]]]:
    """Yield the key and the rows of each session."""
    last: dict[int, list[int]] = {}
    for n in range(ROWS):
        key = key_of(n)
        if key in last and n - last[key][-1] > GAP_MS:
            yield key, last.pop(key)
        last.setdefault(key, []).append(n)
    yield from last.items()


def _results(found: Mapping[tuple[int, int, int], list[int]]) -> list[tuple[int, ...]]:
    return sorted((*window, len(ns), sum(ns), len(ns), min(ns)) for window, ns in found.items())


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panes and sessions are moved, and windows get groups of their own, with few keys."""
    monkeypatch.setattr(pane_table, "DEAD_MIN", 16)
    monkeypatch.setattr(tumbling, "SMALL_ROWS", 8)
    monkeypatch.setattr(session_table, "_DEAD_MIN", 16)


@pytest.mark.parametrize("parallelism", [2, 3, 4])
@pytest.mark.parametrize(("script", "kills"), SCRIPTS)
def test_windows_are_taken_over(lab: Any, script: Any, kills: int, parallelism: int) -> None:
    steps = {name: partial(_aggregated, name) for name in WINDOWS}
    Scene(lab, parallelism, steps, _plain, batch_answer).run(script, kills)
