"""The size of buffers as throughput changes: Flink's numbers, and what holds for any course of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headgate.runtime.protocol.debloating import BufferDebloater, DebloatSettings

FLINK = DebloatSettings(size_max=32_768)


def told(start: int, throughput: int, buffers: int, periods: int = 100) -> list[tuple[int, int]]:
    """Return the sizes announced to senders by period, at a steady throughput in bytes per second."""
    debloater = BufferDebloater(FLINK, start)
    sizes = []
    for period in range(1, periods + 1):
        debloater.consumed(throughput // 5)
        size = debloater.period_over(200, 0, buffers)
        if size is not None:
            sizes.append((period, size))
    return sizes


def test_shrinks_as_flink_does() -> None:
    """The ideal is 10,000: the last step towards it is within the threshold."""
    assert told(32_768, 200_000, 20) == [(5, 23_804), (11, 17_572), (20, 13_076)]


def test_grows_as_flink_does() -> None:
    sizes = [size for _, size in told(1024, 200_000, 20)]
    assert sizes == [1345, 1767, 2322, 3051, 4008, 5266, 6828, 8575]


def test_limits_are_reached() -> None:
    assert told(1024, 1_000_000_000, 1)[-1] == (39, 32_768)
    assert told(32_768, 0, 20)[-1] == (49, 256)


def test_time_without_input_does_not_count() -> None:
    busy, idle = BufferDebloater(FLINK), BufferDebloater(FLINK)
    for _ in range(20):
        busy.consumed(40_000)
        idle.consumed(40_000)
        assert busy.period_over(200, 0, 20) == idle.period_over(399, 199, 20)
    assert idle.announced < FLINK.size_max


def test_a_long_period_counts_as_several() -> None:
    """A call that takes seconds lets no period end in between."""
    short, long = BufferDebloater(FLINK), BufferDebloater(FLINK)
    sizes = []
    for _ in range(10):
        short.consumed(40_000)
        sizes.append(short.period_over(200, 0, 20))
    long.consumed(400_000)
    assert long.period_over(2000, 0, 20) == 18_369
    assert [size for size in sizes if size] == [23_804]
    for debloater in (short, long):
        debloater.consumed(0)
        debloater.period_over(10**9, 0, 20)
        assert debloater.announced == FLINK.size_min


def test_nothing_to_measure_keeps_the_last_throughput() -> None:
    debloater = BufferDebloater(FLINK)
    debloater.consumed(2_000)
    debloater.period_over(200, 0, 10)
    assert debloater.time_to_consume_ms > 25_000
    for idle_ms, buffers in (
        (200, 0),  # no time at all
        (199, 0),  # a watermark's worth of it
        (0, 0),  # the end of a large window
        (150, 10),  # channels are blocked, and there is mail
    ):
        debloater.period_over(200, idle_ms, buffers)
        assert 2_000 < debloater.time_to_consume_ms / max(1, buffers) < 4_000
    debloater.period_over(200, 0, 10)
    assert debloater.time_to_consume_ms > 1_000_000


def test_before_the_first_record_the_size_stays() -> None:
    debloater = BufferDebloater(FLINK)
    assert [debloater.period_over(200, 199, 0) for _ in range(100)] == [None] * 100
    assert (debloater.announced, debloater.time_to_consume_ms) == (32_768, 0)


def test_a_longer_target_makes_larger_buffers() -> None:
    sizes = []
    for target_ms in (500, 1000, 2000):
        debloater = BufferDebloater(replace(FLINK, target_ms=target_ms, threshold_percentages=1))
        for _ in range(200):
            debloater.consumed(20_000)
            debloater.period_over(200, 0, 20)
        sizes.append(debloater.announced)
    assert sizes == pytest.approx([2_500, 5_000, 10_000], rel=0.01)


@given(
    periods=st.lists(
        st.tuples(
            st.integers(0, 10**9), st.floats(0, 10_000), st.floats(0, 1), st.integers(0, 500)
        ),
        max_size=200,
    ),
    size_min=st.integers(1, 1000),
    span=st.integers(0, 2**21),
    samples=st.integers(1, 50),
    threshold=st.integers(1, 100),
)
def test_any_course_of_events(
    periods: list[tuple[int, float, float, int]],
    size_min: int,
    span: int,
    samples: int,
    threshold: int,
) -> None:
    """Sizes stay within their limits, and no sender is bothered for less than the threshold."""
    settings = DebloatSettings(
        size_max=size_min + span,
        size_min=size_min,
        samples=samples,
        threshold_percentages=threshold,
    )
    debloater = BufferDebloater(settings)
    for size_bytes, elapsed_ms, idle_share, buffers in periods:
        debloater.consumed(size_bytes)
        before = debloater.announced
        size = debloater.period_over(elapsed_ms, elapsed_ms * idle_share, buffers)
        assert debloater.time_to_consume_ms >= 0
        if size is None:
            assert debloater.announced == before
            continue
        assert size == debloater.announced != before
        assert settings.size_min <= size <= settings.size_max
        at_limit = size in (settings.size_min, settings.size_max)
        assert at_limit or abs(size - before) >= before * threshold // 100


@given(throughput=st.integers(1_000, 10**8), buffers=st.integers(1, 100))
def test_steady_throughput_leads_to_the_target(throughput: int, buffers: int) -> None:
    """Within the threshold, and within the limits, the buffers in use are worth the target."""
    settings = DebloatSettings(size_max=1 << 20, threshold_percentages=10)
    debloater = BufferDebloater(settings)
    for _ in range(400):
        debloater.consumed(throughput // 5)
        debloater.period_over(200, 0, buffers)
    ideal = min(max(throughput / buffers, settings.size_min), settings.size_max)
    assert debloater.announced == pytest.approx(ideal, rel=0.12, abs=2)
