"""Rules for event time: no record is late under them in any order of reading, so windows must hold
them all.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from golden_input import MINUTE, ORDERS, Order, to_ms, to_time

import headgate as hg

HALF_HOUR = 30 * MINUTE


def at_ms(record: Any) -> int:
    return to_ms(record.at)


class Behind(hg.WatermarkGenerator):
    """Three hours behind the latest time: more than the disorder of what any subtask reads."""

    def __init__(self) -> None:
        self._latest: int | None = None

    def on_batch(self, times: Any) -> int:
        self._latest = max(int(times.max()), self._latest or 0)
        return self._latest - 3 * 3_600_000


strategy = hg.WatermarkStrategy.bounded("3h")
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "bounded": ("{column: at, maxOutOfOrder: 3h}", {"when": "at", "max_out_of_order": "3h"}),
    "function": (
        '{python: "HERE:at_ms", maxOutOfOrder: 3h, perSplit: false, name: times}',
        {"when": at_ms, "max_out_of_order": "3h", "per_split": False, "name": "times"},
    ),
    "strategy": ('{column: at, strategy: "HERE:strategy"}', {"when": "at", "strategy": strategy}),
    "generator": (
        '{column: at, strategy: "HERE:Behind", idleAfter: 1h}',
        {"when": "at", "strategy": hg.WatermarkStrategy.custom(Behind), "idle_after": "1h"},
    ),
    "queued": (
        "{column: at, maxOutOfOrder: 3h, waitForQueued: true}",
        {"when": "at", "max_out_of_order": "3h", "wait_for_queued": True},
    ),
    "closing": (
        "{column: at, maxOutOfOrder: 3h, closeAfter: 30s, name: times}",
        {"when": "at", "max_out_of_order": "3h", "close_after": "30s", "name": "times"},
    ),
    "aligned": (
        "{column: at, maxOutOfOrder: 3h, align: all, maxDrift: 10d, idleAfter: 1h, name: times}",
        {
            "when": "at",
            "max_out_of_order": "3h",
            "align": "all",
            "max_drift": "10d",
            "idle_after": "1h",
            "name": "times",
        },
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule(golden: Any, rule: str) -> None:
    windows: dict[tuple[str, int], list[Order]] = defaultdict(list)
    for order in ORDERS:
        windows[order.ad, order.ms // HALF_HOUR * HALF_HOUR].append(order)
    text, timed = RULES[rule]
    golden(
        "x: {from: orders, keyBy: ad, window: {tumbling: 30m}, aggregate: {n: count()}}",
        lambda orders, rates: (
            orders.key_by("ad").window(hg.tumbling("30m")).agg(n=hg.count(), name="x")
        ),
        rows=[
            (ad, to_time(start), to_time(start + HALF_HOUR), len(held))
            for (ad, start), held in sorted(windows.items())
        ],
        timed=timed,
        timed_yaml=text,
        ordered=True,
    )
