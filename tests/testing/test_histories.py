"""Random histories of records, checkpoints, crashes and rescales come to what plain Python comes to."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.testing import Harness, harness

QUIET = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FATES = [("checkpoint",), ("crash",), ("rescale", 1), ("rescale", 2), ("rescale", 3), ("wait",)]


def befall(h: Harness, fate: tuple[Any, ...], parallelism: int) -> int:
    """Have something happen to the job; the parallelism it has then."""
    if fate[0] == "checkpoint":
        h.checkpoint()
    elif fate[0] == "crash":
        h.crash()
    elif fate[0] == "wait":
        h.advance_time("10m")
    elif fate[1] != parallelism:
        h.rescale(fate[1])
        return int(fate[1])
    return parallelism


@QUIET
@given(
    seed=st.integers(0, 1000),
    happenings=st.lists(
        st.one_of(
            st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 9)), max_size=4),
            st.sampled_from(FATES),
        ),
        max_size=12,
    ),
)
def test_state_per_key(spending_job: Any, seed: int, happenings: list[Any]) -> None:
    expected, totals = [], defaultdict(list)
    parallelism = 2
    found: list[Any] = []
    with harness(spending_job(), seed=seed, parallelism=parallelism) as h:
        for happening in happenings:
            if isinstance(happening, tuple):
                parallelism = befall(h, happening, parallelism)
            else:
                h.push("payments", happening)
                for user, amount in happening:
                    totals[user].append(amount)
                    expected.append((user, sum(totals[user]), len(totals[user])))
            found += h.drain("out")
        h.end()
        found += h.drain("out")
    # One push may go to several subtasks at once: the order of each key is what is kept.
    for user in "abcde":
        assert [row for row in found if row[0] == user] == [e for e in expected if e[0] == user]
    assert len(found) == len(expected)


@QUIET
@given(
    seed=st.integers(0, 1000),
    happenings=st.lists(
        st.one_of(
            st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400)), max_size=4),
            st.integers(0, 400),
            st.sampled_from(FATES[:-1]),
        ),
        max_size=12,
    ),
)
def test_windows(windows_job: Any, click: Any, t0: Any, seed: int, happenings: list[Any]) -> None:
    """`n` is a second that a watermark declares; records behind it are late for good."""
    windows: dict[tuple[str, int], list[int]] = defaultdict(list)
    late: set[tuple[str, int]] = set()
    now = -1
    parallelism = 2
    # No timer moves, and no record is late enough for a watermark of the job's own that ends a window, so
    # those that are declared are the only ones.
    with harness(windows_job(max_out_of_order="10m"), seed=seed, parallelism=parallelism) as h:
        for happening in happenings:
            if isinstance(happening, tuple):
                parallelism = befall(h, happening, parallelism)
            elif isinstance(happening, int):
                now = max(now, happening)
                h.advance_watermark("clicks", t0 + timedelta(seconds=now))
            else:
                h.push("clicks", [click(u, s, t0 + timedelta(seconds=s)) for u, s in happening])
                for user, second in happening:
                    if now >= 0 and 1000 * now >= (second // 60 + 1) * 60_000 - 1:
                        late.add((user, second))
                    else:
                        windows[user, second // 60].append(second)
        dropped = {(row["user"], row["amount"]) for row in h.drain("counts.late")}
        h.end()
        found = sorted((row.user, row.n, row.total) for row in h.drain("out"))
    assert found == sorted((user, len(s), sum(s)) for (user, _), s in windows.items())
    assert dropped == late


@pytest.mark.parametrize("seed", range(5))
def test_the_harness_itself_forgets_nothing(spending_job: Any, seed: int) -> None:
    """All fates in one history, twice."""
    payments = [("ann", n) for n in range(2 * len(FATES))]
    parallelism = 2
    with harness(spending_job(), seed=seed, parallelism=parallelism) as h:
        for payment, fate in zip(payments, FATES * 2, strict=True):
            h.push("payments", payment)
            parallelism = befall(h, fate, parallelism)
        h.end()
        assert [row[2] for row in h.drain("out")] == list(range(1, len(payments) + 1))
