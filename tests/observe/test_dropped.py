"""Whatever a job lets go is told: in the result of the run, in the log, and to those who ask."""

from __future__ import annotations

import asyncio
import logging

import pytest

import headgate as hg
from headgate.connectors import collect, csv_source, from_list
from headgate.runtime.protocol.drops import REMIND_MS, DropLedger, Dropped

EACH_BATCH = {"pipeline.auto-watermark-interval": "0 ms"}
COLUMNS = {"k": "string", "at": "int64"}
TIMES = [0, 100_000, 0, 1, 100_001]
"""The third and the fourth are late."""


def rows(times=TIMES):
    return from_list([{"k": "a", "at": at} for at in times], schema=COLUMNS, batch_rows=1)


def timed(job, times=TIMES, name="in"):
    return job.read(rows(times), name=name).event_time("at")


def window(job, kind):
    return timed(job).key_by("k").window(kind).agg(n=hg.count(), name="step")


def tumbling(job):
    return window(job, hg.tumbling("10s"))


def sliding(job):
    return window(job, hg.sliding("10s", every="5s"))


def session(job):
    return window(job, hg.session("10s"))


def of_records(job):
    windows = timed(job).key_by("k").window(hg.tumbling("10s"))
    return windows.reduce(lambda one, other: one, name="step")


def interval_join(job):
    other = timed(job, [0], "other").key_by("k")
    return timed(job).key_by("k").join(other, within=("0s", "1s"), suffix="_2", name="step")


def pattern(job):
    found = hg.cep.begin("one").where("at >= 0")
    return timed(job).key_by("k").match(found, name="step")


LATE = [tumbling, sliding, session, of_records, interval_join, pattern]


def finish(job, stream):
    stream.write(collect(guarantee="none"), name="out")
    return job.run().dropped


@pytest.mark.parametrize("make", LATE, ids=lambda make: make.__name__)
def test_late_records_of_every_step_are_in_the_result(make):
    job = hg.Job("late", options=EACH_BATCH)
    (dropped,) = finish(job, make(job))
    assert (dropped.step, dropped.kind) == ("step", "late")
    assert dropped.count >= 2 if make is interval_join else dropped.count == 2


@pytest.mark.parametrize("make", LATE, ids=lambda make: make.__name__)
def test_late_records_that_are_read_are_not_dropped(make):
    job = hg.Job("late", options=EACH_BATCH)
    stream = make(job)
    stream.late.write(collect(guarantee="none"), name="late")
    assert finish(job, stream) == ()


def test_unreadable_records(tmp_path):
    (tmp_path / "a.csv").write_text("k,at\na,1\nb,x\nc,y\n")
    for policy, kept in (("drop", False), ("side_output", False), ("side_output", True)):
        job = hg.Job("unreadable")
        read = job.read(csv_source(str(tmp_path), COLUMNS, on_bad_record=policy), name="in")
        if kept:
            read.rejected.write(collect(guarantee="none"), name="rejected")
        assert finish(job, read) == (() if kept else (Dropped("in", "unreadable", 2),))


def test_records_that_a_function_raises_for():
    for policy, kept in (("drop", False), ("side_output", False), ("side_output", True)):
        job = hg.Job("failed")
        made = job.read(from_list([1, 0, 2, 0]), name="in")
        made = made.map(lambda n: 1 / n, name="step", on_error=policy)
        if kept:
            made.failed.write(collect(guarantee="none"), name="failed")
        assert finish(job, made) == (() if kept else (Dropped("step", "failed", 2),))


async def never(record):
    await asyncio.sleep(3_600)


def test_records_whose_calls_do_not_end():
    job = hg.Job("slow")
    made = job.read(from_list([1, 2]), name="in").map_async(
        never, timeout="1ms", on_timeout="side_output", name="step"
    )
    assert finish(job, made) == (Dropped("step", "timed_out", 2),)


class Sorts(hg.KeyedProcess[int, int, int]):
    odd = hg.SideOutput[int]()

    def on_record(self, record, ctx):
        if record % 2:
            ctx.emit(self.odd, record)
        ctx.processing_time.at(2**42)
        return []

    def on_timer(self, timer, ctx):
        return []


def test_side_outputs_that_nothing_reads_and_timers_that_never_come_due():
    job = hg.Job("process")
    made = job.read(from_list([1, 2, 3]), name="in").key_with(lambda n: n)
    made = made.process(Sorts(), name="step")
    assert finish(job, made) == (Dropped("step", "timers", 3), Dropped("step", "unread", 2))


def test_windows_by_the_clock_that_are_open_at_the_end():
    job = hg.Job("clocked")
    read = job.read(rows(), name="in").key_by("k")
    made = read.window(hg.tumbling("1d", time="processing")).agg(n=hg.count(), name="step")
    assert finish(job, made) == (Dropped("step", "open_windows", 1),)


def test_partial_matches_that_time_out_are_no_records():
    job = hg.Job("partial", options=EACH_BATCH)
    found = hg.cep.begin("one").where("at >= 0").next("two").where("at < 0").within("1s")
    made = timed(job, [0, 100_000]).key_by("k").match(found, name="step")
    assert finish(job, made) == ()


def test_it_is_in_the_log_with_the_way_out(caplog):
    job = hg.Job("late", options=EACH_BATCH)
    with caplog.at_level(logging.WARNING, "headgate.job"):
        finish(job, tumbling(job))
    (warning,) = [r for r in caplog.records if "dropped" in r.message]
    assert warning.levelno == logging.WARNING
    assert warning.message == (
        "step `step` has dropped 2 late records; to keep them: read its stream `.late`, or raise "
        "max_out_of_order or allowed_lateness"
    )


# -- the ledger ---------------------------------------------------------------------------------------


def late(count):
    return Dropped("counts", "late", count)


def test_the_first_of_a_kind_is_due_at_once_and_more_after_a_while():
    ledger = DropLedger()
    assert ledger.due(0) == []
    ledger.report(1, 0, [late(2)])
    assert ledger.due(5) == [late(2)]
    ledger.report(1, 1, [late(1)])
    assert ledger.due(6) == []
    assert ledger.due(5 + REMIND_MS) == [late(3)]
    ledger.report(1, 1, [late(9), Dropped("counts", "failed", 1)])
    assert ledger.due(6 + REMIND_MS) == [Dropped("counts", "failed", 1)]
    assert ledger.due(6 + REMIND_MS, at_the_end=True) == [late(11)]
    assert ledger.due(9 * REMIND_MS, at_the_end=True) == []


def test_what_an_attempt_dropped_is_not_forgotten():
    ledger = DropLedger()
    ledger.report(1, 0, [late(2)])
    ledger.report(1, 1, [late(3)])
    ledger.attempt_over([(1, 0)])
    assert ledger.totals == (late(5),)
    ledger.report(1, 0, [late(1)])
    assert ledger.totals == (late(6),)
    ledger.attempt_over()
    ledger.report(1, 0, [])
    assert ledger.totals == (late(6),)
