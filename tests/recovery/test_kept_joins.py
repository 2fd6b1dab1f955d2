"""Jobs with joins of which workers die: what the others keep in memory leads to the batch answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import headgate as hg
from headgate.operators.joins import side as join_side
from headgate.tests.support.kept import ROWS, SCRIPTS, Scene, key_of

NEAR_MS = (-60, -5)
"""The right row of a pair is between these times from the left one, in ms."""
WINDOW_MS = 100
NONE = -1


def _thirds(timed: Any, name: str) -> Any:
    few = timed.filter("n % 3 = 0", name=f"thirds of {name}")
    return few.select("n AS m", "k", name=f"right of {name}").key_by("k")


def interval(timed: Any) -> Any:
    near = tuple(f"{ms}ms" for ms in NEAR_MS)
    right = _thirds(timed, "interval")
    return timed.key_by("k").join(right, within=near, how="full", name="interval")


def window(timed: Any) -> Any:
    windows = timed.key_by("k").window(hg.tumbling(f"{WINDOW_MS}ms"))
    return windows.join(_thirds(timed, "window"), how="full", name="window")


def as_of(timed: Any) -> Any:
    return timed.key_by("k").join_as_of(_thirds(timed, "as_of"), how="left", name="as_of")


JOINS = {"interval": interval, "window": window, "as_of": as_of}


def _plain(row: Any) -> tuple[int, ...]:
    return row["k"], *(NONE if row[name] is None else row[name] for name in ("n", "m"))


def _near(left: int, right: int) -> bool:
    return NEAR_MS[0] <= right - left <= NEAR_MS[1]


def _together(left: int, right: int) -> bool:
    return left // WINDOW_MS == right // WINDOW_MS


def batch_answer(name: str) -> list[tuple[int, ...]]:
    """Return the rows of a join, computed one by one."""
    by_key: dict[int, list[int]] = {}
    for n in range(ROWS):
        by_key.setdefault(key_of(n), []).append(n)
    if name == "as_of":
        return sorted(
            (key, n, max((m for m in ns if m % 3 == 0 and m <= n), default=NONE))
            for key, ns in by_key.items()
            for n in ns
        )
    return sorted(_pairs(by_key, _near if name == "interval" else _together))


def _pairs(
    by_key: dict[int, list[int]], meets: Callable[[int, int], bool]
) -> list[tuple[int, int, int]]:
    found = [
        (key, n, m)
        for key, ns in by_key.items()
        for n in ns
        for m in ns
        if m % 3 == 0 and meets(n, m)
    ]
    lefts, rights = {pair[1] for pair in found}, {pair[2] for pair in found}
    found += [(key_of(n), n, NONE) for n in range(ROWS) if n not in lefts]
    found += [(key_of(m), NONE, m) for m in range(0, ROWS, 3) if m not in rights]
    return found


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are moved, and keys are forgotten, when there are few of them."""
    monkeypatch.setattr(join_side, "DEAD_MIN", 16)
    monkeypatch.setattr(join_side, "FORGET_MIN", 16)


@pytest.mark.parametrize("parallelism", [2, 3])
@pytest.mark.parametrize(("script", "kills"), SCRIPTS)
def test_rows_of_joins_are_taken_over(lab: Any, script: Any, kills: int, parallelism: int) -> None:
    Scene(lab, parallelism, JOINS, _plain, batch_answer).run(script, kills)
