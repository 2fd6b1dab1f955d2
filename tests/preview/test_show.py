"""A look at a stream: the first rows, without touching storage or sinks, also in a notebook."""

from __future__ import annotations

import asyncio
import logging

import pytest

import headgate as hg
from headgate.connectors import collect, from_list, function_sink, generator, numbers
from headgate.errors import PlanError, UsageError, UserCodeError

ROWS = [{"k": "ab"[n % 2], "at": n * 1_000, "v": n} for n in range(100)]
COLUMNS = {"k": "string", "at": "int64", "v": "int64"}


def read(job, rows=ROWS):
    return job.read(from_list(rows, schema=COLUMNS), name="in")


def printed_rows(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_first_rows_as_a_table(capsys):
    stream = read(hg.Job("look")).select("k", "v * 2 AS twice")
    stream.show(3)
    assert printed_rows(capsys) == [
        ["k:", "string", "twice:", "int64"],
        ["a", "0"],
        ["b", "2"],
        ["a", "4"],
        ["3", "rows;", "there", "may", "be", "more", "(looked", "for", "at", "most", "10s)"],
    ]


def test_all_rows_where_there_are_few(capsys):
    read(hg.Job("look"), ROWS[:2]).show()
    assert printed_rows(capsys)[-1] == ["2", "rows,", "which", "is", "all"]


def test_objects_and_nulls(capsys):
    job = hg.Job("look")
    job.read(from_list([("a", 1), "x" * 100]), name="objects").show()
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines[:2]] == ["record", "('a', 1)"]
    assert lines[2].strip().endswith("…")
    job.read(from_list([{"n": None}], schema={"n": "int64"}), name="nulls").show()
    assert printed_rows(capsys)[1] == ["null"]


def test_windows_and_side_outputs(capsys):
    job = hg.Job("look", parallelism=4)
    keyed = read(job).event_time("at").key_by("k")
    counts = keyed.window(hg.tumbling("10s")).agg(n=hg.count(), name="counts").parallel(2)
    counts.show(50)
    assert len(printed_rows(capsys)) == 22
    counts.late.show()
    assert printed_rows(capsys)[-1] == ["0", "rows,", "which", "is", "all"]


def test_storage_and_sinks_and_other_branches_are_left_alone(tmp_path, capsys):
    written, called = [], []
    job = hg.Job("look", options={"metrics.port": "1"})
    job.checkpoint(every="1ms", storage=str(tmp_path / "checkpoints"))
    stream = read(job)
    stream.write(function_sink(written.append), name="out")
    kept = stream.filter("v > 5")
    stream.map(called.append, into={"n": "int64"}, name="other").write(collect(), name="others")
    before = repr(job), dict(job.options)
    kept.show(2)
    assert (repr(job), job.options) == before
    assert printed_rows(capsys)[1] == ["a", "6000", "6"]
    assert written == called == list(tmp_path.iterdir()) == []


def test_a_stream_without_end_is_cut_off(capsys):
    job = hg.Job("look")
    job.read(numbers(), name="numbers").show(5)
    assert len(printed_rows(capsys)) == 7


def test_what_takes_too_long_is_shown_as_far_as_it_came(capsys):
    job = hg.Job("look")
    job.read(generator({"n": "sequence"}, rate=1), name="slow").filter("n < 0").show(within="300ms")
    assert (
        " ".join(printed_rows(capsys)[-1]) == "0 rows; there may be more (looked for at most 300ms)"
    )


def test_loops_are_run_whole(capsys):
    job = hg.Job("look")
    start = job.read(from_list([3]), name="in")

    def body(stream):
        down = stream.map(lambda n: n - 1)
        return down.filter(lambda n: n > 0), down.filter(lambda n: n == 0)

    start.iterate(body, name="loop").show()
    assert printed_rows(capsys)[1:] == [["0"], ["1", "row,", "which", "is", "all"]]


def test_also_under_a_running_event_loop(capsys):
    async def notebook():
        read(hg.Job("look")).show(1)

    asyncio.run(notebook())
    assert printed_rows(capsys)[1] == ["a", "0", "0"]


def test_a_failing_function_is_named(caplog):
    stream = read(hg.Job("look")).map(lambda row: 1 / 0, into={"n": "int64"}, name="broken")
    with caplog.at_level(logging.DEBUG), pytest.raises(UserCodeError, match="ZeroDivisionError"):
        stream.show()
    assert not [r for r in caplog.records if r.name == "headgate.job"]


def test_what_only_the_preview_does_not_read_is_no_loss(caplog):
    rows = [{"k": "a", "at": at, "v": 0} for at in (0, 100_000, 0)]
    job = hg.Job("look", options={"pipeline.auto-watermark-interval": "0 ms"})
    source = from_list(rows, schema=COLUMNS, batch_rows=1)
    timed = job.read(source, name="in").event_time("at").key_by("k")
    counts = timed.window(hg.tumbling("10s")).agg(n=hg.count(), name="counts")
    counts.late.write(collect(guarantee="none"), name="late")
    counts.show()
    assert not [r for r in caplog.records if "dropped" in r.message]


def test_a_wrong_number(tmp_path):
    with pytest.raises(PlanError, match="from 1"):
        read(hg.Job("look")).show(0)


def test_sources_in_the_storage_of_the_job_are_refused():
    source = from_list([1])
    source.needs_storage = True
    job = hg.Job("look")
    job.checkpoint(every="1s", storage="never made")
    with pytest.raises(UsageError, match="leaves alone"):
        job.read(source, name="in").show()


def test_a_job_and_its_streams_describe_themselves():
    job = hg.Job("clicks", parallelism=2)
    assert repr(job) == "Job clicks: parallelism 2, no checkpoints\n  no steps yet"
    job.checkpoint(every="1s", storage="there")
    stream = read(job)
    timed = stream.event_time("at")
    timed.write(collect(), name="out")
    assert repr(job) == (
        "Job clicks: parallelism 2, checkpoints in there\n"
        "  in (source)  from_list(100 items)  [state]\n"
        "  event_time (event_time) <- in  at\n"
        "  out (sink) <- event_time  collect()  [state]"
    )
    assert repr(stream) == "Stream(in: k string, at int64, v int64)"
    assert repr(timed) == "Stream(event_time: k string, at int64, v int64; event time)"
    assert repr(timed.key_by("k")) == f"KeyedStream(by k of {timed!r})"
    assert repr(job.read(numbers(1), name="n")) == "Stream(n: Python objects)"
