"""Sessions and windows of processing time, as clients read them: in memory, on disk, after rescales."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import headgate as hg
from headgate.state.keyed.base import ABSENT
from headgate.tests.support.subtasks import Step, steps

from .test_windows import MINUTE, USERS, answers, by_user, push, scanned, shown

__all__ = ["steps"]
Steps = Callable[..., Step]
GAP = MINUTE
SESSIONS: dict[str, Any] = {
    "at once": hg.session("1m"),
    "with lateness": hg.session("1m", allowed_lateness="90s"),
}
CLOCKED: dict[str, Any] = {
    "tumbling": hg.tumbling("1m", time="processing"),
    "sliding": hg.sliding("3m", every="1m", time="processing"),
}
DISK = {"taskmanager.memory.managed.size": "256kb"}
Sessions = dict[tuple[str, int, int], list[int]]


def made(window: Any) -> Any:
    aggregates: dict[str, Any] = {"n": hg.count(), "top": hg.max("n"), "total": hg.sum("n")}
    return by_user().window(window).agg(**aggregates, name="agg", queryable="agg")


def add(model: Sessions, user: str, n: int, time: int) -> None:
    """Add a record to the session that it makes or extends, which may join others."""
    start, end, numbers = time, time + GAP, [n]
    for of, low, high in list(model):
        if of == user and low <= end and start <= high:
            numbers += model.pop((of, low, high))
            start, end = min(start, low), max(end, high)
    model[user, start, end] = numbers


@pytest.mark.parametrize("kind", SESSIONS)
def test_the_sessions_of_a_key(steps: Steps, kind: str) -> None:
    rng = random.Random(kind)
    step = steps(made(SESSIONS[kind]), rng.choice((1, 2, 3)), options=DISK)
    model: Sessions = {}
    lateness, watermark, others = SESSIONS[kind].allowed_lateness_ms, 0, set[str]()
    step.watermark(watermark)
    for _ in range(60):
        match rng.randrange(12):
            case 0 if rng.random() < 0.5:
                step.restart(rng.choice((1, 2, 3)))
            case 1 | 2 | 3:
                watermark += rng.choice((1_000, MINUTE, 2 * MINUTE))
                step.watermark(watermark)
                for key in [key for key in model if key[2] - 1 + lateness <= watermark]:
                    del model[key]
            case 4:
                # Many keys, whose sessions so lie on disk.
                numbers, time = range(rng.randrange(3_000, 6_000)), watermark + 5 * MINUTE
                push(step, [(f"other{n}", n, time) for n in numbers])
                others |= {f"other{n}" for n in numbers}
            case _:
                rows = [
                    (
                        rng.choice(USERS),
                        rng.randrange(100),
                        watermark + 1 + rng.randrange(9 * MINUTE),
                    )
                    for _ in range(rng.choice((1, 5, 20)))
                ]
                push(step, rows)
                for row in rows:
                    add(model, *row)
        wanted = {user: shown(model, user, watermark, lateness) for user in [*USERS, "nobody"]}
        assert answers(step, [*wanted, "u0", "u0"]) == wanted
        if rng.random() < 0.3:
            found = scanned(step)
            assert {user for user in found if user not in wanted} <= others
            assert {user: found.get(user, ABSENT) for user in wanted} == wanted


@pytest.mark.parametrize("kind", CLOCKED)
def test_windows_of_processing_time(steps: Steps, kind: str) -> None:
    rng = random.Random(kind)
    step = steps(made(CLOCKED[kind]), rng.choice((1, 2, 3)))
    model: Sessions = {}
    size = CLOCKED[kind].size_ms
    for number in range(60):
        match rng.randrange(8):
            case 0 if rng.random() < 0.5:
                step.restart(rng.choice((1, 2, 3)))
            case 1 | 2:
                step.clock.advance(rng.choice((1_000, MINUTE // 2, 2 * MINUTE)))
            case _:
                user, now = rng.choice(USERS), step.clock.now_ms()
                push(step, [(user, number, 0)])
                for start in range(now - now % MINUTE, now - size, -MINUTE):
                    model.setdefault((user, start, start + size), []).append(number)
        wanted = {user: shown(model, user, step.clock.now_ms() - 1, 0) for user in USERS}
        assert answers(step, USERS) == wanted
        assert scanned(step) == {u: value for u, value in wanted.items() if value is not ABSENT}
