"""Lateness does not depend on batches, pace, or how files are dealt to subtasks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import headgate as hg
from headgate.connectors import Pause, collect, csv_source, from_list, generator, throttle
from headgate.operators.watermarks import operator
from headgate.operators.watermarks.strategy import WatermarkAlignmentGroup

MINUTE_MS = 60_000
PLACES = 64
"""Rows between two watermarks, instead of 65,536: tests shall be quick."""


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(operator, "ROWS_PER_WATERMARK", PLACES)


def counted(source, parallelism=1, options=None, **event_time):
    """Rows per key and window of a minute, and how many were late."""
    job = hg.Job("counts", parallelism=parallelism, options=options or {})
    counts = (
        job.read(source, name="in")
        .event_time("at", **event_time)
        .key_by("k")
        .window(hg.tumbling("1m"))
        .agg(n=hg.count(), name="counts")
    )
    out, late = collect(guarantee="none"), collect(guarantee="none")
    counts.write(out, name="out")
    counts.late.write(late, name="late")
    job.run()
    windows = Counter({(row["k"], row["window_start"]): row["n"] for row in out.rows})
    return windows, len(late.rows)


def write(path, rows):
    path.write_text("k,at\n" + "".join(f"{key},{at}\n" for key, at in rows))


def test_files_whose_times_overlap_lose_nothing(tmp_path, few_rows):
    rng = random.Random(3)
    for number in range(3):
        times = sorted(rng.randrange(60 * MINUTE_MS) for _ in range(400))
        write(tmp_path / f"log-{number}.csv", [(f"u{at % 5}", at) for at in times])
    source = csv_source(str(tmp_path), {"k": "string", "at": "int64"}, batch_rows=50)
    for parallelism in (1, 2):
        windows, late = counted(source, parallelism, max_out_of_order="1m")
        assert (windows.total(), late) == (1200, 0)
    _, late = counted(source, 1, max_out_of_order="1m", wait_for_queued=False)
    assert late > 0


def by_symbol(path, symbols, rows):
    """Each symbol's rows in order, one symbol behind the other: far more out of order than a minute."""
    write(path, [(f"s{s}", n * MINUTE_MS // 2) for s in range(symbols) for n in range(rows)])


def test_a_file_sorted_by_symbol_is_counted_in_full_while_it_is_short(tmp_path):
    by_symbol(tmp_path / "ticks.csv", 5, 112)
    source = csv_source(str(tmp_path), {"k": "string", "at": "int64"}, batch_rows=7)
    windows, late = counted(source, max_out_of_order="1m")
    assert (windows.total(), late) == (560, 0)


@pytest.mark.parametrize("options", [{}, {"headgate.task.slice": "1 ms"}])
def test_what_is_late_does_not_depend_on_batches(tmp_path, few_rows, options):
    by_symbol(tmp_path / "ticks.csv", 5, 112)
    options = {**options, "pipeline.auto-watermark-interval": "1 ms"}

    def run(batch_rows):
        source = csv_source(str(tmp_path), {"k": "string", "at": "int64"}, batch_rows=batch_rows)
        return counted(source, options=options, max_out_of_order="1m")

    first = run(1)
    assert first[1] > 0
    assert all(run(rows) == first for rows in (3, 64, 100, 8192))


def test_what_is_late_does_not_depend_on_the_pace(few_rows):
    rows = [{"k": f"s{s}", "at": n * MINUTE_MS} for s in range(3) for n in range(100)]
    source = from_list(rows, schema={"k": "string", "at": "int64"}, batch_rows=10)
    options = {"pipeline.auto-watermark-interval": "1 ms", "headgate.task.slice": "1 ms"}
    results = [counted(source, options=options)]
    results.append(counted(source))
    results.append(counted(source, options={"execution.buffer-timeout": "0 ms"}))
    assert results[0][1] > 0
    assert results[0] == results[1] == results[2]


def test_watermarks_have_their_places_between_rows(step, few_rows):
    def events(*sizes):
        run = step(at_rest=True)
        run.splits.opened("a", queued=True)
        at = 0
        for size in sizes:
            run.read("a", *range(at, at + size)).wait(10_000)
            at += size
        flat = []
        for kind, value in run.events:
            flat += value if kind == "records" else [(kind, value)]
        return flat

    whole = events(200)
    assert whole == events(*[1] * 200) == events(63, 2, 70, 65)
    assert [value[1] for value in whole if isinstance(value, tuple)] == [62, 126, 190]


def test_the_end_of_a_split_is_a_place_and_the_next_begins_anew(step, few_rows):
    def watermarks(first):
        run = step(at_rest=True)
        run.splits.opened("a", queued=True)
        run.splits.opened("b", queued=True)
        run.read("a", *range(first), last=True)
        begun = len(run.watermarks)
        run.read("b", *range(1_000, 1_100), last=True)
        return run.watermarks[begun:]

    assert watermarks(10)[-2:] == watermarks(60)[-2:] == [1_062, 1_098]


def test_places_stay_where_they_are_over_a_restore(step, few_rows):
    times = [(7 * n) % 300 for n in range(300)]
    whole = step(at_rest=True)
    whole.splits.opened("a", queued=True)
    for at in times:
        whole.read("a", at)
    for cut in range(1, 300, 37):
        before, after = step(at_rest=True), step(at_rest=True)
        before.splits.opened("a", queued=True)
        for at in times[:cut]:
            before.read("a", at)
        after.restored_from(before)
        after.splits.opened("a", queued=True)
        for at in times[cut:]:
            after.read("a", at)
        watermarks = before.watermarks + [w for w in after.watermarks if w not in before.watermarks]
        assert watermarks == whole.watermarks


def test_data_at_rest_is_never_silent(step):
    run = step(at_rest=True, idle_after_ms=1_000)
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("a", 500).wait(60_000)
    assert run.signals == []


def test_sources_that_wait_for_each_other_go_by_the_clock(step):
    alignment = WatermarkAlignmentGroup("g", 100, 1_000)
    run = step(at_rest=True, idle_after_ms=90_000, alignment=alignment)
    run.splits.opened("a")
    run.read("a", 500).wait(1_000)
    assert run.watermarks == [499]


def test_who_has_all_its_records_says_so(tmp_path):
    write(tmp_path / "a.csv", [("a", 1)])
    files = csv_source(str(tmp_path), {"k": "string", "at": "int64"})
    assert files.at_rest
    assert from_list([1]).at_rest
    assert generator({"n": "sequence"}, rows=5).at_rest
    assert not generator({"n": "sequence"}, rows=5, rate=10).at_rest
    assert not generator({"n": "sequence"}).at_rest
    assert not from_list([1, Pause("1s")]).at_rest
    assert not throttle(files, 10).at_rest


def test_explain_says_who_waits(tmp_path):
    write(tmp_path / "a.csv", [("a", 1)])
    job = hg.Job("explained")
    read = job.read(csv_source(str(tmp_path), {"k": "string", "at": "int64"}), name="in")
    read.event_time("at", name="waits").write(collect(guarantee="none"), name="one")
    read.event_time("at", wait_for_queued=False, name="goes on").write(
        collect(guarantee="none"), name="two"
    )
    lines = [line for line in job.explain().splitlines() if "in order" in line]
    assert ["waiting for queued splits" in line for line in lines] == [True, False]
