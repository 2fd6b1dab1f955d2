"""The display of a run, from announcements made up here."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from headgate.runtime.cli.live import LiveReporter
from headgate.runtime.cli.progress import LineReporter, RunProgress, short
from headgate.runtime.control.job_client import PublishedEvent

NOW_MS = 1_000_000


def vertex(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "parallelism": 2, "records_in": 0, "records_out": 0, "records_read": 0,
        "records_written": 0, "busy": 0, "full": 0, "idle": 1000,
        "backpressured": 0, "watermark": None,
    } | changes  # fmt: skip


def body(*vertices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "attempt": 65_537, "status": "RUNNING", "restarts": 0, "last_checkpoint": 3,
        "last_checkpoint_ms": 12, "last_checkpoint_at_ms": NOW_MS - 4_200, "vertices": vertices,
        "backpressure": [],
    } | changes  # fmt: skip


def counted(records: int) -> dict[str, Any]:
    source = vertex("source", records_in=records, records_read=records, records_out=records * 2)
    sink = vertex(
        "sink", records_in=records * 2, records_written=records, busy=700, watermark=NOW_MS - 1_500
    )
    return body(source, sink)


def test_rates_lag_and_totals() -> None:
    progress = RunProgress()
    for second in range(4):
        progress.update(counted(second * 100), NOW_MS, 10.0 + second)
    source, sink = progress.vertices
    assert (source.in_per_second, source.out_per_second) == (100, 200)
    assert (sink.in_per_second, sink.out_per_second, sink.records_out) == (200, 100, 300)
    assert (source.lag_ms, sink.lag_ms) == (None, 1_500)
    assert progress.line(NOW_MS) == (
        "read 300 (100/s), wrote 300 (100/s), busy 70% in sink, lag 1s, "
        "checkpoint 3 (12 ms, 4s ago)"
    )


def test_rates_begin_anew_with_an_attempt() -> None:
    progress = RunProgress()
    progress.update(counted(1_000), NOW_MS, 10.0)
    progress.update(counted(50) | {"attempt": 65_538, "restarts": 1}, NOW_MS, 11.0)
    assert progress.read_per_second == 0
    progress.update(counted(90) | {"attempt": 65_538, "restarts": 1}, NOW_MS, 12.0)
    assert progress.read_per_second == 40


DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("watermark", "shown", "in_line"),
    [
        (NOW_MS - 2_000, "2s", "lag 2s"),
        (NOW_MS - DAY_MS, "1d", "lag 1d"),
        (NOW_MS + 5_000, "0s", "lag 0s"),
        (-DAY_MS * 365, "at 1969-01-01 00:00", "event time at 1969-01-01 00:00"),
        (4_102_444_800_000, "at 2100-01-01 00:00", "event time at 2100-01-01 00:00"),
        (-(10**15), f"at {-(10**15)} ms", f"event time at {-(10**15)} ms"),
    ],
)
def test_event_time_far_from_the_clock_is_shown_as_it_is(
    watermark: int, shown: str, in_line: str
) -> None:
    progress = RunProgress()
    progress.update(body(vertex("a", watermark=watermark)), NOW_MS, 1.0)
    assert progress.vertices[0].time_text == shown
    assert f", {in_line}" in progress.line(NOW_MS)


@pytest.mark.parametrize("watermark", [-(2**63), 2**63 - 1])
def test_no_lag_before_the_first_event_and_after_the_last(watermark: int) -> None:
    progress = RunProgress()
    progress.update(body(vertex("a", watermark=watermark)), NOW_MS, 1.0)
    assert progress.lag_ms is None


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(0, "0s"), (461, "461ms"), (1_999, "1s"), (90_061_000, "1d 1h")]
)
def test_short_durations(milliseconds: int, text: str) -> None:
    assert short(milliseconds) == text


def event(kind: str, text: str, **detail: Any) -> PublishedEvent:
    return PublishedEvent(kind=kind, text=text, body=json.dumps(detail).encode())


def test_lines_are_written_for_events_but_not_for_each_second() -> None:
    lines: list[str] = []
    reporter = LineReporter("j", write=lines.append, as_json=False)
    reporter.event(event("failure", "map (0): broken", where="map (0)"))
    for _ in range(3):
        reporter.event(event("progress", "", **counted(5)))
    reporter.event(event("ended", "job ended: FAILED"))
    assert [line.split(" ", 1)[1] for line in lines] == ["map (0): broken"]
    assert reporter.progress.read == 5


def test_the_table_on_a_terminal() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    with LiveReporter("clicks", console) as reporter:
        reporter.event(event("status", "job clicks is RUNNING", status="RUNNING"))
        reporter.event(event("progress", "", **counted(1234)))
        reporter.event(event("checkpoint", "checkpoint 3 completed", status="COMPLETED"))
        reporter.event(event("failure", "map (0): broken", where="map (0)"))
    text = written.getvalue()
    assert "clicks RUNNING  attempt 1, restarts 0  checkpoint 3 (12 ms" in text
    assert "1,234" in text
    assert "70%" in text
    assert "map (0): broken" in text
    assert "checkpoint 3 completed" not in text


def test_full_and_held_up_are_told_apart_from_busy() -> None:
    calls = vertex("calls", busy=30, full=900, idle=70)
    source = vertex("source", busy=100, idle=0, backpressured=900)
    progress = RunProgress()
    progress.update(body(source, calls), NOW_MS, 1.0)
    assert "busy 10% in source, full 90% in calls, backpressured 90% in source" in progress.line(
        NOW_MS
    )
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    with LiveReporter("clicks", console) as reporter:
        reporter.event(event("progress", "", **body(source, calls)))
    rows = [line.split() for line in written.getvalue().splitlines()]
    titles = next(row for row in rows if "vertex" in row)
    row = next(row for row in rows if "calls" in row)
    shown = dict(zip(reversed(titles), reversed(row), strict=False))
    assert (shown["busy"], shown["full"], shown["idle"], shown["backpr."]) == (
        "3%",
        "90%",
        "7%",
        "0%",
    )


SENTENCE = "`in` is backpressured (HIGH, 92 %) because of `slow` (2/4), busy 99 %"


def test_a_line_says_who_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 15.0])
    monkeypatch.setattr("headgate.runtime.cli.progress.time.monotonic", lambda: next(now))
    lines: list[str] = []
    reporter = LineReporter("j", write=lines.append, as_json=False)
    told = counted(5) | {"backpressure": [{"sentence": SENTENCE}]}
    reporter.event(event("progress", "", **told))
    assert lines == []
    reporter.event(event("progress", "", **told))
    assert [line.split(" ", 1)[1] for line in lines] == [
        "read 5 (0/s), wrote 5 (0/s), busy 70% in sink, " + lines[0].split("in sink, ")[1],
        SENTENCE,
    ]


def test_the_table_says_who_is_slow() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    with LiveReporter("clicks", console) as reporter:
        reporter.event(
            event("progress", "", **counted(5) | {"backpressure": [{"sentence": SENTENCE}]})
        )
    assert SENTENCE in written.getvalue()
