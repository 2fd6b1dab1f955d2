"""Goal: the example does what it says.

Method: its steps, on the session of the tests; the totals of all flights by plain Python.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from headgate.tests.support.modules import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_state.py"


def totals(*parts: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for flight in (flight for part in parts for flight in part):
        found[flight["origin"], flight["dest"]].append(flight["delay"])
    return {route: (len(delays), sum(delays)) for route, delays in found.items()}


def test_a_corrected_job_goes_on_with_what_is_right(spark: Any, tmp_path: Path) -> None:
    example = load(EXAMPLE)
    taken = example.first_half(str(tmp_path))
    worst = example.most_delayed(example.totals_of(spark, taken)).collect()
    assert len(worst) == 10
    assert {row.origin for row in worst[:6]} == {example.WRONG}
    repaired = example.corrected(spark, taken, str(tmp_path))
    later = example.make_flights(2_000, seed=2)
    seconds = example.make_flights(2_000, seed=1, factor=60)
    assert example.second_half(taken) == totals(seconds, later)
    assert example.second_half(repaired) == totals(example.make_flights(2_000, seed=1), later)
