"""Intervals of many keys merged at once against a loop; also where keys and times need over 62 bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import PlanError, UsageError
from headgate.operators.windows.sessions.intervals import merge_intervals
from headgate.operators.windows.sessions.table import Deadlines, superseded
from headgate.operators.windows.sessions.window import session

FAR = 2**61
interval = st.tuples(
    st.integers(0, 4),
    st.integers(-30, 30) | st.sampled_from([-FAR, FAR, -FAR + 5, FAR + 3]),
    st.integers(1, 12),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(interval, min_size=1, max_size=30))
def test_components_are_those_of_a_loop(intervals):
    keys, starts, gaps = (np.array(column, np.int64) for column in zip(*intervals, strict=True))
    merged = merge_intervals(keys, starts, starts + gaps)
    expected: list[list[int]] = []
    for key, start, gap in sorted(intervals):
        if expected and expected[-1][0] == key and start <= expected[-1][2]:
            expected[-1][2] = max(expected[-1][2], start + gap)
        else:
            expected.append([key, start, start + gap])
    found = zip(merged.keys.tolist(), merged.starts.tolist(), merged.ends.tolist(), strict=True)
    assert list(map(list, found)) == expected
    for (key, start, gap), number in zip(intervals, merged.component.tolist(), strict=True):
        one = expected[number]
        assert one[0] == key
        assert one[1] <= start < start + gap <= one[2]


@settings(max_examples=200, deadline=None)
@given(st.lists(interval, max_size=20, unique_by=lambda row: row[:2]))
def test_superseded_rows_are_those_within_another_of_their_key(intervals):
    columns = list(zip(*intervals, strict=True)) or [(), (), ()]
    keys, starts, gaps = (np.array(column, np.int64) for column in columns)
    mask = superseded(keys, starts, starts + gaps)
    for row, (key, start, gap) in enumerate(intervals):
        within = any(
            other != row and k == key and s <= start and start + gap <= s + g
            for other, (k, s, g) in enumerate(intervals)
        )
        assert mask[row] == within


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(-50, 90)), max_size=9), max_size=6),
)
def test_a_slot_is_looked_at_no_later_than_its_earliest_deadline(width, rounds):
    deadlines, wanted, now = Deadlines(width), {}, -60
    for entries in rounds:
        entries = list(dict(entries).items())
        slots, times = (np.array([e[i] for e in entries], np.int64) for i in range(2))
        deadlines.add(slots, times)
        for slot, time in entries:
            wanted[slot] = min(time, wanted.get(slot, time))
        now += 25
        popped = deadlines.pop(now).tolist()
        assert popped == sorted(set(popped))
        assert {slot for slot, time in wanted.items() if time <= now} <= set(popped) <= set(wanted)
        for slot in popped:
            del wanted[slot]


@pytest.mark.parametrize("gap", ["0s", "5 apples", "10", 5, ""])
def test_gaps_that_make_no_sense_are_refused(gap):
    with pytest.raises((PlanError, UsageError)):
        session(gap)


def test_a_session_says_what_it_is():
    assert session("30m").describe() == "session 30m"
    assert session("gap_ms * 2", allowed_lateness="1m").describe() == (
        "session by gap_ms * 2, allowed lateness 1m"
    )
