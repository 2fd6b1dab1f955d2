"""The range of event time: what is outside is a bad record; at both ends everything works."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import (
    collect,
    csv_sink,
    from_list,
    json_sink,
    parquet_sink,
    parquet_source,
)
from headgate.errors import (
    BadRecordError,
    DataError,
    ManifestErrors,
    UsageError,
    UserCodeError,
)
from headgate.operators.time_range import (
    EVENT_TIME_MAX_MS,
    EVENT_TIME_MIN_MS,
    INSTANT_MAX_MS,
    INSTANT_MIN_MS,
)
from headgate.runtime.manifest import load_job
from headgate.testing import harness

FIRST = datetime(1000, 1, 1, tzinfo=UTC)
LAST = datetime(8999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
BAD = [2**63 - 1, -(2**63), EVENT_TIME_MAX_MS + 1, EVENT_TIME_MIN_MS - 1]


@pytest.fixture
def run_job(tmp_path):
    """Runs a job in this process, without Ray."""

    def run(job):
        job.checkpoint(every="10s", storage=str(tmp_path / "checkpoints"))
        job.run(cluster="in-process")

    return run


def test_the_range_is_that_of_the_years_1000_to_8999():
    ms = timedelta(milliseconds=1)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert ((FIRST - epoch) // ms, (LAST - epoch) // ms) == (EVENT_TIME_MIN_MS, EVENT_TIME_MAX_MS)
    assert (datetime.min.replace(tzinfo=UTC) - epoch) // ms == INSTANT_MIN_MS
    assert (datetime.max.replace(tzinfo=UTC) - epoch) // ms == INSTANT_MAX_MS


def push_all(job, *records):
    with harness(job) as h:
        h.push("in", *records)
        h.end()


def job_of(when="at", kind="int64", **how):
    job = hg.Job("range")
    rows = job.read(from_list([], schema={"k": "string", "at": kind}), name="in")
    timed = rows.event_time(when, max_out_of_order="0s", **how)
    if how.get("on_error") == "side_output":
        timed.failed.write(collect(guarantee="none"), name="dead")
    hours = timed.key_by("k").window(hg.tumbling("1h")).agg(n=hg.count(), name="hours")
    hours.write(collect(guarantee="none"), name="out")
    hours.late.write(collect(guarantee="none"), name="late")
    return job


# --- records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("time", BAD)
def test_a_time_out_of_range_is_a_bad_record_with_column_and_value(time):
    with pytest.raises(BadRecordError, match=f"out of range column=`at` value=`{time}`"):
        push_all(job_of(), {"k": "a", "at": 5}, {"k": "a", "at": time})


@pytest.mark.parametrize("bad", [*BAD, None])
@pytest.mark.parametrize(
    "when",
    ["at", lambda record: record.at, lambda record: {5: 5, 7: 7}[record.at]],
    ids=["column", "function", "raises"],
)
@pytest.mark.parametrize("policy", ["drop", "side_output"])
def test_the_policy_says_what_becomes_of_it(bad, when, policy):
    with harness(job_of(when, on_error=policy)) as h:
        h.push("in", {"k": "a", "at": 5}, {"k": "b", "at": bad}, {"k": "a", "at": 7})
        h.push("in", {"k": "b", "at": bad})
        h.end()
        assert [(row["k"], row["n"]) for row in h.drain("out")] == [("a", 2)]
        assert h.drain("late") == []
        if policy == "side_output":
            letters = h.drain("dead")
            assert [letter["record"] for letter in letters] == [{"k": "b", "at": bad}] * 2
            assert {letter["event_time"] for letter in letters} == {None}


def test_a_function_that_returns_a_time_out_of_range_names_the_record():
    with pytest.raises(UserCodeError, match=r"returned 9223372036854775807, which is out of range"):
        push_all(job_of(lambda record: record.at), {"k": "a", "at": 2**63 - 1})


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("value", [2**63 - 1, -(2**63)])
def test_every_unit_is_checked_before_it_could_overflow(unit, value):
    job = hg.Job("units")
    schema = pa.schema([("k", pa.string()), ("at", pa.timestamp(unit, "UTC"))])
    rows = job.read(from_list([], schema=schema), name="in")
    timed = rows.event_time("at", max_out_of_order="0s")
    timed.write(collect(guarantee="none"), name="out")
    batch = pa.record_batch([["a"], pa.array([value], schema.field("at").type)], schema=schema)
    with pytest.raises(BadRecordError, match="event time is out of range column=`at`"):
        push_all(job, batch)


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: range}}
spec:
  sources:
    rows:
      json: {{path: {path}/in.json}}
      schema: {{k: string, at: long}}
      eventTime: {{column: at, maxOutOfOrder: 0s, onError: {policy}}}
  sinks:
    out: {{from: rows, json: {{path: {path}/out}}, guarantee: none}}
    {more}
"""
DEAD = "dead: {{from: rows.failed, json: {{path: {path}/dead}}, guarantee: none}}"


def manifest_of(tmp_path, policy, more=""):
    (tmp_path / "in.json").write_text(f'{{"k": "a", "at": 5}}\n{{"k": "b", "at": {2**63 - 1}}}\n')
    text = MANIFEST.format(path=tmp_path, policy=policy, more=more.format(path=tmp_path))
    (tmp_path / "job.yaml").write_text(text)
    return load_job(tmp_path / "job.yaml")


def test_a_manifest_says_it_with_on_error(tmp_path, run_job):
    run_job(manifest_of(tmp_path, "side_output", DEAD))
    assert lines_of(tmp_path / "out", "json") == ['{"k":"a","at":5}']
    (letter,) = lines_of(tmp_path / "dead", "json")
    assert json.loads(letter)["record"] == {"k": "b", "at": 2**63 - 1}
    assert "out of range column=`at`" in json.loads(letter)["error"]


def test_a_manifest_whose_records_without_time_nobody_reads_is_refused(tmp_path):
    with pytest.raises(ManifestErrors, match="nobody reads `rows.failed`"):
        manifest_of(tmp_path, "side_output")


# --- both ends, through windows, functions and sinks -----------------------------------------------

WINDOWS = {
    "tumbling": hg.tumbling("36500d"),
    "sliding": hg.sliding("36500d", "18250d"),
    "cumulative": hg.cumulative("36500d", "18250d"),
    "session": hg.session("36500d"),
}
SINKS = {"json": json_sink, "csv": csv_sink, "parquet": parquet_sink}
ENDS = pytest.mark.parametrize("moment", [FIRST, LAST], ids=["first", "last"])


def lines_of(path, format):
    (file,) = path.glob("*")
    if format == "parquet":
        return pq.read_table(file).to_pylist()
    return file.read_text().splitlines()


@ENDS
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Pacific/Kiritimati", None])
@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_sinks_of_every_format_hold_both_ends(tmp_path, run_job, moment, zone, unit):
    schema = pa.schema([("k", pa.string()), ("at", pa.timestamp(unit, zone))])
    moment = moment.replace(microsecond=0) if unit == "s" else moment
    job = hg.Job("ends")
    timed = job.read(from_list([{"k": "a", "at": moment}], schema=schema), name="in")
    timed = timed.event_time("at").map(lambda row: row, into=schema, name="as objects")
    for format, sink in SINKS.items():
        timed.write(sink(str(tmp_path / format), guarantee="none"), name=format)
    run_job(job)
    (row,) = lines_of(tmp_path / "parquet", "parquet")
    assert (row["at"] if zone else row["at"].replace(tzinfo=UTC)) == moment
    (line,) = lines_of(tmp_path / "json", "json")
    read = datetime.fromisoformat(json.loads(line)["at"])
    # Zones of long ago have offsets with seconds, which ISO 8601 cuts to minutes.
    assert abs((read if zone else read.replace(tzinfo=UTC)) - moment) < timedelta(minutes=1)
    assert re.match(r'"a",(0999|1000|8999|9000)-\d\d-\d\d ', lines_of(tmp_path / "csv", "csv")[1])


@ENDS
@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("format", SINKS)
def test_windows_at_both_ends_have_bounds_that_all_can_hold(
    tmp_path, run_job, moment, kind, format
):
    job = hg.Job("ends")
    rows = [{"k": "a", "at": moment}]
    timed = job.read(from_list(rows, schema={"k": "string", "at": "timestamp"}), name="in")
    windows = timed.event_time("at").key_by("k").window(WINDOWS[kind])
    made = windows.agg(n=hg.count(), name="w")
    again = made.map(lambda row: row, into=made.schema, name="as objects")
    again.write(SINKS[format](str(tmp_path / "out"), guarantee="none"), name="out")
    found = windows.process(Bounds(), name="p", into={"start": "timestamp", "end": "timestamp"})
    shown = collect(guarantee="none")
    found.write(shown, name="shown")
    run_job(job)
    assert len(lines_of(tmp_path / "out", format)) >= 1
    assert all(row["start"] <= moment < row["end"] for row in shown.rows)
    assert shown.rows


class Bounds(hg.WindowProcess):
    def on_window(self, key, window, records, ctx):
        yield {"start": window.start_at, "end": window.end_at}


def test_nanoseconds_end_within_the_range():
    job = hg.Job("nanoseconds")
    schema = pa.schema([("at", pa.timestamp("ns", "UTC"))])
    rows = job.read(from_list([], schema=schema), name="in").event_time("at")
    rows.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        batch = pa.record_batch(
            [
                pa.array(
                    [(2**63 - 1) // 1_000 * 1_000, -(2**63) // 1_000 * 1_000 + 1_000],
                    schema.types[0],
                )
            ],
            schema,
        )
        h.push("in", batch)
        h.end()
        assert len(h.drain("out")) == 2


# --- what is derived of it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: hg.tumbling("36526d"),
        lambda: hg.session("40000d"),
        lambda: hg.tumbling("1h", allowed_lateness="99999d"),
        lambda: hg.evictors.Time("40000d"),
        lambda: hg.WatermarkStrategy.bounded("40000d"),
    ],
)
def test_durations_are_at_most_a_hundred_years(make):
    with pytest.raises(UsageError, match="give at most 36525d"):
        make()


class Sets(hg.KeyedProcess):
    def on_record(self, record, ctx):
        ctx.event_time.at(record.at)

    def on_timer(self, timer, ctx):
        return [timer.timestamp]


def test_a_timer_out_of_the_years_1_to_9999_is_an_error_of_the_record():
    job = hg.Job("timers")
    rows = job.read(from_list([], schema={"k": "string", "at": "int64"}), name="in")
    timed = rows.event_time(lambda record: 5)
    made = timed.key_by("k").process(Sets(), name="p", on_error="side_output")
    made.write(collect(guarantee="none"), name="out")
    made.failed.write(collect(guarantee="none"), name="dead")
    with harness(job) as h:
        for at in (INSTANT_MAX_MS, INSTANT_MAX_MS + 1, 2**63 - 1, INSTANT_MIN_MS - 1):
            h.push("in", {"k": str(at), "at": at})
        h.end()
        assert h.drain("out") == [INSTANT_MAX_MS]
        letters = h.drain("dead")
        assert [letter.record.at for letter in letters] == [
            INSTANT_MAX_MS + 1,
            2**63 - 1,
            INSTANT_MIN_MS - 1,
        ]
        assert "lies in the years 1 to 9999" in letters[0].error


class Leaps(hg.WatermarkGenerator):
    def on_batch(self, times):
        return INSTANT_MAX_MS + 1


def test_a_watermark_of_the_users_generator_out_of_range_is_refused():
    with pytest.raises(UserCodeError, match="which is not a watermark"):
        push_all(job_of_strategy(hg.WatermarkStrategy.custom(Leaps)), {"k": "a", "at": 5})


def job_of_strategy(strategy):
    job = hg.Job("strategy")
    rows = job.read(from_list([], schema={"k": "string", "at": "int64"}), name="in")
    rows.event_time("at", strategy=strategy).write(collect(guarantee="none"), name="out")
    return job


class Endless(hg.WindowAssigner):
    def assign(self, record, timestamp):
        return [hg.Window(0, 2**62)]


@pytest.mark.parametrize(
    ("window", "what"),
    [
        (Endless(), "assign gave a window out of the years 1 to 9999"),
        (hg.session(lambda record: 2**60), "the gap of a session must be a duration"),
    ],
)
def test_windows_of_the_users_functions_are_checked(window, what):
    job = hg.Job("windows")
    rows = job.read(from_list([], schema={"k": "string", "at": "int64"}), name="in")
    keyed = rows.event_time("at").key_by("k")
    keyed.window(window).process(Bounds(), name="w").write(collect(guarantee="none"), name="out")
    with pytest.raises(UserCodeError, match=what):
        push_all(job, {"k": "a", "at": 5})


# --- columns that are not event time ---------------------------------------------------------------


def far_future(job, path):
    """A stream with a time in the year 300,000."""
    end = pa.array([300_000 * 31_556_952_000], pa.timestamp("ms", "UTC"))
    path.mkdir()
    pq.write_table(pa.table({"end": end}), path / "far.parquet")
    return job.read(parquet_source(str(path / "*.parquet")), name="in")


@pytest.mark.parametrize("format", ["json", "csv"])
def test_text_files_refuse_times_that_text_cannot_hold(tmp_path, run_job, format):
    job = hg.Job("far")
    rows = far_future(job, tmp_path / "in")
    rows.write(SINKS[format](str(tmp_path / "out"), guarantee="none"), name="out")
    with pytest.raises(DataError, match="a time has no form in text column=`end` value="):
        run_job(job)


def test_a_time_that_no_datetime_can_hold_fails_once_and_names_the_column(tmp_path, run_job):
    job = hg.Job("far")
    rows = far_future(job, tmp_path / "in")
    rows.map(lambda row: row.end, name="m").write(collect(guarantee="none"), name="out")
    with pytest.raises(DataError, match="cannot be a Python object column=`end` value="):
        run_job(job)


def test_a_list_with_a_record_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="does not fit the columns"):
        hg.Job("list").read(from_list([{"a": 1}, {"b": 2}], schema={"a": "int64"}), name="in")
