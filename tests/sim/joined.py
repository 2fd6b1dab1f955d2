"""Jobs that join two streams of columns in event time: by interval, in windows, and with versions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import headgate as hg

from .outside import WORLDS, Numbers, World, time_of

KEYS: Final = 7
"""Each key has numbers of all splits."""
WINDOW_MS: Final = 400
NEAR_MS: Final = (-300, -20)
"""The right row of a pair is between these times from the left one, in ms."""
NONE: Final = -1
Pair = tuple[int, int, int]
"""A key, a left number and a right number; `NONE` for a row that has met nothing."""


def joined(job: hg.Job, token: str) -> Any:
    """All numbers with every third of them. Which join it is, the seed decides, not drawn from it."""
    left = _numbers(job, token, "numbers", "number")
    right = _numbers(job, token, "more-numbers", "other").filter("other % 3 = 0", name="thirds")
    keyed, others = left.key_by("key"), right.key_by("key")
    match JOINS[WORLDS[token].seed % len(JOINS)]:
        case "interval":
            near = tuple(f"{ms}ms" for ms in NEAR_MS)
            pairs = keyed.join(others, within=near, how="full", suffix="_other", name="join")
        case "window":
            windows = keyed.window(hg.tumbling(f"{WINDOW_MS}ms"))
            pairs = windows.join(others, how="full", suffix="_other", name="join")
        case _:
            pairs = keyed.join_as_of(others, how="left", suffix="_other", name="join")
    known = [f"coalesce({name}, {NONE}) AS {name}" for name in ("number", "other")]
    return pairs.select("key", *known, name="pairs")


def _numbers(job: hg.Job, token: str, source: str, name: str) -> Any:
    """A stream of numbers in a column of this name; none is late."""
    numbers = job.read(Numbers(token, columns=True), name=source)
    renamed = numbers.select(
        f"number % {KEYS} AS key", f"number AS {name}", "at", name=f"keys of {source}"
    )
    return renamed.event_time("at", max_out_of_order="130ms", name=f"time of {source}")


def check_joined(world: World, record: tuple[Any, ...]) -> None:
    """A pair is one of those that there are, and comes once."""
    if record not in expected_pairs(world.rows, world.seed % len(JOINS)):
        raise world.violated(f"these do not belong together: {record}")
    if record in world.by_key.get(record[0], ()):
        raise world.violated(f"visible twice: {record}")


def missing_joined(world: World) -> list[Any]:
    """Pairs that are not visible."""
    return sorted(expected_pairs(world.rows, world.seed % len(JOINS)) - set(world.visible))


def _near(left: int, right: int) -> bool:
    return NEAR_MS[0] <= time_of(right) - time_of(left) <= NEAR_MS[1]


def _in_one_window(left: int, right: int) -> bool:
    return time_of(left) // WINDOW_MS == time_of(right) // WINDOW_MS


def _all_pairs(meets: Callable[[int, int], bool], rows: int) -> set[Pair]:
    """Return the pairs of rows that meet, and the rows that meet none."""
    found = {
        (left % KEYS, left, right)
        for left in range(rows)
        for right in range(left % KEYS, rows, KEYS)
        if right % 3 == 0 and meets(left, right)
    }
    lefts, rights = {pair[1] for pair in found}, {pair[2] for pair in found}
    found |= {(left % KEYS, left, NONE) for left in range(rows) if left not in lefts}
    found |= {(n % KEYS, NONE, n) for n in range(0, rows, 3) if n not in rights}
    return found


def _newest(rows: int) -> set[Pair]:
    """Return each row with the newest one that is not later."""
    found = set()
    for left in range(rows):
        rights = range(left % KEYS, rows, KEYS)
        before = [n for n in rights if n % 3 == 0 and time_of(n) <= time_of(left)]
        found.add((left % KEYS, left, max(before, key=time_of, default=NONE)))
    return found


JOINS: Final = ("interval", "window", "as of")
_EXPECTED: Final[dict[str, Callable[[int], set[Pair]]]] = {
    "interval": partial(_all_pairs, _near),
    "window": partial(_all_pairs, _in_one_window),
    "as of": _newest,
}


@cache
def expected_pairs(rows: int, which: int) -> set[Pair]:
    """Return all rows of the result of one of the joins."""
    return _EXPECTED[JOINS[which]](rows)
