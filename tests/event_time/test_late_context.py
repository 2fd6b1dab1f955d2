"""Late records with context: how late they are, and the last window they would have been in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.runtime.manifest import load_job
from headgate.testing import harness

T0 = datetime(2026, 3, 1, tzinfo=UTC)
SCHEMA = {"k": "string", "n": "int64", "gap_ms": "int64", "at": "timestamp"}
NOW = T0 + timedelta(hours=2)


def at(minutes):
    return T0 + timedelta(minutes=minutes)


def record(minutes, n=0):
    return {"k": "a", "n": n, "gap_ms": 120_000 + n, "at": at(minutes)}


def timed(job, name="rows"):
    return job.read(from_list([], schema=SCHEMA), name=name).event_time("at")


def counted(window):
    return lambda keyed: keyed.window(window).agg(n=hg.count(), name="step")


def handled(window):
    return lambda keyed: keyed.window(window).reduce(lambda one, other: one, name="step")


BERLIN = hg.tumbling("1d", zone="Europe/Berlin")
STEPS = {
    "tumbling": (counted(hg.tumbling("10m")), 10, 20),
    "tumbling, lateness": (counted(hg.tumbling("10m", allowed_lateness="5m")), 10, 20),
    "tumbling, early": (counted(hg.tumbling("10m", emit_rows=1)), 10, 20),
    "sliding": (counted(hg.sliding("20m", "5m")), 15, 35),
    "sliding, paired": (counted(hg.sliding("15m", "10m")), 10, 25),
    "cumulative": (counted(hg.cumulative("30m", "10m")), 0, 30),
    "session": (counted(hg.session("10m")), 17, 27),
    "session by record": (counted(hg.session("gap_ms")), 17, 19),
    "records in tumbling": (handled(hg.tumbling("10m")), 10, 20),
    "records in sliding": (handled(hg.sliding("20m", "5m")), 15, 35),
    "records in sessions": (handled(hg.session("10m")), 17, 27),
    "pattern": (
        lambda keyed: keyed.match(hg.cep.begin("x").where("n > 9"), name="step"),
        None,
        None,
    ),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_late_record_says_how_late_it_is_and_for_which_window(kind):
    make, start, end = STEPS[kind]
    job = hg.Job("late")
    step = make(timed(job).key_by("k"))
    step.write(collect(guarantee="none"), name="out")
    step.late.write(collect(guarantee="none"), name="late")
    step.late_with_context.write(collect(guarantee="none"), name="why")
    with harness(job) as h:
        h.push("rows", record(110))
        h.advance_watermark("rows", NOW)
        h.push("rows", record(17), record(130))
        h.end()
        assert h.drain("late") == [record(17)]
        assert h.drain("why") == [
            {
                "record": record(17),
                "event_time": at(17),
                "lateness_ms": 103 * 60_000,
                "window_start": None if start is None else at(start),
                "window_end": None if end is None else at(end),
                "operator": "step",
            }
        ]
    assert step.late_with_context.has_event_time


def test_days_of_a_time_zone():
    job = hg.Job("late")
    step = counted(BERLIN)(timed(job).key_by("k"))
    step.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.advance_watermark("rows", T0 + timedelta(days=40))
        h.push("rows", record(28 * 24 * 60 + 1))  # the day in March with 23 hours
        (why,) = h.drain("step.late_with_context")
        assert why["window_end"] - why["window_start"] == timedelta(hours=23)


JOINS = {
    "interval": lambda one, two: one.join(two, within=("0s", "1s"), suffix="_2", name="step"),
    "as of": lambda one, two: one.join_as_of(two, suffix="_2", name="step"),
    "windowed": lambda one, two: one.window(hg.tumbling("10m")).join(two, suffix="_2", name="step"),
}


@pytest.mark.parametrize("kind", JOINS)
def test_both_inputs_of_joins(kind):
    job = hg.Job("late")
    step = JOINS[kind](timed(job, "one").key_by("k"), timed(job, "two").key_by("k"))
    step.write(collect(guarantee="none"), name="out")
    step.late_with_context.write(collect(guarantee="none"), name="why")
    step.side("late_other_with_context").write(collect(guarantee="none"), name="why other")
    window = (at(10), at(20)) if kind == "windowed" else (None, None)
    with harness(job) as h:
        h.push("one", record(115))
        h.push("two", record(115))
        for name in ("one", "two"):
            h.advance_watermark(name, NOW)
        h.push("one", record(17, 1))
        h.push("two", record(18, 2))
        for name, n, minute in (("why", 1, 17), ("why other", 2, 18)):
            (why,) = h.drain(name)
            assert why["record"] == record(minute, n)
            assert why["lateness_ms"] == (120 - minute) * 60_000
            assert (why["window_start"], why["window_end"]) == window


def test_records_that_are_python_objects():
    job = hg.Job("objects")
    rows = job.read(from_list([]), name="rows").event_time(lambda pair: pair[1])
    step = rows.key_with(lambda pair: pair[0]).window(hg.tumbling("10s")).reduce(max, name="step")
    step.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.advance_watermark("rows", 60_000)
        h.push("rows", ("a", 12_000))
        (why,) = h.drain("step.late_with_context")
    assert why == hg.LateRecord(
        record=("a", 12_000),
        event_time=datetime(1970, 1, 1, 0, 0, 12, tzinfo=UTC),
        lateness_ms=48_000,
        window_start=datetime(1970, 1, 1, 0, 0, 10, tzinfo=UTC),
        window_end=datetime(1970, 1, 1, 0, 0, 20, tzinfo=UTC),
        operator="step",
    )


@pytest.mark.parametrize(
    ("sides", "dropped"),
    [((), 1), (("late",), 0), (("late_with_context",), 0), (("late", "late_with_context"), 0)],
)
def test_a_record_that_one_of_both_streams_has_is_not_dropped(sides, dropped):
    rows = [record(minutes) for minutes in (0, 100, 0)]
    options = {"pipeline.auto-watermark-interval": "0 ms"}
    job = hg.Job("dropped", options=options)
    source = from_list(rows, schema=SCHEMA, batch_rows=1)
    step = counted(hg.tumbling("10m"))(job.read(source, name="rows").event_time("at").key_by("k"))
    step.write(collect(guarantee="none"), name="out")
    found = {side: collect(guarantee="none") for side in sides}
    for side, sink in found.items():
        step.side(side).write(sink, name=side)
    outcome = job.run(cluster="in-process")
    assert sum(each.count for each in outcome.dropped) == dropped
    assert all(len(sink.rows) == 1 for sink in found.values())


@pytest.mark.parametrize("kind", [hg.tumbling("10m"), hg.sliding("10m", "5m"), hg.session("10m")])
def test_lateness_is_known_right_after_a_restore(kind):
    job = hg.Job("restored")
    step = counted(kind)(timed(job).key_by("k"))
    step.write(collect(guarantee="none"), name="out")
    with harness(job, parallelism=2) as h:
        h.push("rows", record(110))
        h.advance_watermark("rows", NOW)
        h.checkpoint()
        h.crash()
        h.rescale(1)
        h.push("rows", record(17))
        (why,) = h.drain("step.late_with_context")
        assert why["lateness_ms"] == 103 * 60_000


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: late}
spec:
  sources:
    rows:
      json: {path: in/*.json}
      schema: {k: string, at: timestamp}
      eventTime: {column: at, maxOutOfOrder: 0s}
  operators:
    step: {from: rows, keyBy: k, window: {tumbling: 10m}, aggregate: {n: count()}}
    very_late: {from: step.late_with_context, filter: lateness_ms > 60000}
  sinks:
    out: {from: step, json: {path: out}, guarantee: none}
    late: {from: very_late, json: {path: late}, guarantee: none}
"""


def test_a_manifest_reads_it_by_name(tmp_path):
    (tmp_path / "job.yaml").write_text(MANIFEST)
    assert "step.late_with_context" in str(load_job(tmp_path / "job.yaml").explain())
