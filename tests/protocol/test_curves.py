"""Goal: curves are bounded, and rates survive restarts and changes of the plan."""

from __future__ import annotations

from headgate.runtime.protocol.curves import Curves, EdgeSample, VertexSample, rates


def sampled(curves: Curves, at_ms: int, records: int, vertex: int = 0) -> None:
    curves.sample(
        at_ms,
        {vertex: VertexSample(records, 2 * records, 500, 100, 400)},
        {0: EdgeSample(records, 8 * records)},
    )


def test_only_the_last_samples_are_kept() -> None:
    curves = Curves(10)
    for second in range(100):
        sampled(curves, 1000 * second, second)
    assert curves.at_ms == [1000 * second for second in range(90, 100)]
    assert [sample.records_in for sample in curves.of(0)] == list(range(90, 100))
    assert curves.of(0)[0] == VertexSample(90, 180, 500, 100, 400)
    assert curves.of(7) == []


def test_without_a_history_there_are_still_rates() -> None:
    curves = Curves(0)
    for second in range(10):
        sampled(curves, 1000 * second, 3 * second)
    assert (curves.at_ms, curves.of(0)) == ([], [])
    assert curves.vertex_rates(0) == (3.0, 6.0)
    assert curves.edge_rates(0) == (3.0, 24.0)


def test_a_rate_is_that_of_the_last_seconds() -> None:
    curves = Curves(100)
    assert curves.vertex_rates(0) == (0.0, 0.0)
    sampled(curves, 0, 1_000_000)
    assert curves.vertex_rates(0) == (0.0, 0.0)
    for second in range(1, 20):
        sampled(curves, 1000 * second, 1_000_000 + (100 if second > 10 else 1) * second)
    assert curves.vertex_rates(0)[0] == 100.0
    assert curves.edge_rates(5) == (0.0, 0.0)


def test_counters_that_begin_again_do_not_count_backwards() -> None:
    curves = Curves(100)
    for at_ms, records in ((0, 100), (1000, 200), (2000, 0), (3000, 50)):
        sampled(curves, at_ms, records)
    assert curves.vertex_rates(0)[0] == 50.0
    assert rates([100, 200, 0, 50], [0, 1000, 2000, 4000]) == [None, 100.0, 0.0, 25.0]
    assert rates([], []) == []


def test_another_plan_begins_the_history_again() -> None:
    curves = Curves(100)
    sampled(curves, 0, 100)
    sampled(curves, 1000, 200, vertex=1)
    assert curves.at_ms == [1000]
    assert curves.of(0) == []


def test_a_clock_that_goes_back_adds_nothing() -> None:
    curves = Curves(100)
    for at_ms in (1000, 1000, 500):
        sampled(curves, at_ms, at_ms)
    assert curves.at_ms == [1000]
