"""The range of event time in joins, expiring state and patterns: both ends, and durations that overflow."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import BadRecordError, HeadgateError, UsageError
from headgate.operators.durations import parse_duration
from headgate.operators.time_range import DURATION_MAX_MS, EVENT_TIME_MAX_MS, EVENT_TIME_MIN_MS
from headgate.state.keyed.ttl import Expiry
from headgate.testing import harness

FIRST = datetime(1000, 1, 1, tzinfo=UTC)
LAST = datetime(8999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
MS = timedelta(milliseconds=1)
CENTURY = timedelta(days=36_525)
SCHEMA = {"k": "string", "n": "int64", "at": "timestamp"}
ENDS = pytest.mark.parametrize("moment", [FIRST, LAST], ids=["first", "last"])


def row(n, moment):
    return {"k": "a", "n": n, "at": moment}


def keyed(job, name):
    rows = job.read(from_list([], schema=SCHEMA), name=name)
    return rows.event_time("at", max_out_of_order="36525d").key_by("k")


def inside(moment, by):
    """A time at this distance from an end of the range, inside of it."""
    return moment + by if moment == FIRST else moment - by


def results(make, ones, twos, crash=False):
    """Return the results of a join of both sides; with `crash` from a checkpoint half-way."""
    job = hg.Job("range")
    made = make(keyed(job, "one"), keyed(job, "two"))
    made.write(collect(guarantee="exactly_once"), name="out")
    job.checkpoint(every="1h", storage="memory://x")
    with harness(job) as h:
        h.push("one", *ones)
        h.push("two", *twos)
        if crash:
            h.checkpoint()
            h.crash()
        h.end()
        assert h.drain("step.late") == h.drain("step.late_other") == []
        return h.drain("out")


# --- interval joins --------------------------------------------------------------------------------

CENTURIES = ("-36525d", "36525d")


@ENDS
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("how", ["inner", "full"])
def test_an_interval_of_a_century_to_both_sides(moment, how, crash):
    def make(one, two):
        return one.join(two, within=CENTURIES, how=how, suffix="_2", name="step")

    far = inside(moment, CENTURY)
    too_far = inside(moment, CENTURY + MS)
    found = results(make, [row(1, moment)], [row(2, far), row(3, too_far), row(4, moment)], crash)
    pairs = {(found_row["n"], found_row["n_2"]) for found_row in found}
    assert pairs == {(1, 2), (1, 4)} | ({(None, 3)} if how == "full" else set())


@ENDS
def test_an_interval_that_lies_wholly_beyond_an_end_meets_nothing(moment):
    def make(one, two):
        beyond = ("-36525d", "-1ms") if moment == FIRST else ("1ms", "36525d")
        return one.join(two, within=beyond, how="left", suffix="_2", name="step")

    found = results(make, [row(1, moment)], [row(2, moment)])
    assert [(each["n"], each["n_2"]) for each in found] == [(1, None)]


@pytest.mark.parametrize(
    "within",
    [
        ("0s", "36526d"),
        ("-36526d", "0s"),
        ("0s", "99999999999999999999d"),
        ("-" + "9" * 5_000 + "d", "0s"),
        (timedelta.min, timedelta(0)),
        (timedelta(0), timedelta(days=999_999_999)),
    ],
)
def test_bounds_of_more_than_a_century_are_refused(within):
    job = hg.Job("refused")
    one, two = keyed(job, "one"), keyed(job, "two")
    with pytest.raises(UsageError, match="give at most 36525d") as error:
        one.join(two, within=within, suffix="_2", name="step")
    assert "test_time_range_of_steps.py" in error.value.where


# --- as-of joins -----------------------------------------------------------------------------------


@ENDS
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("valid_for", [None, "36525d", "1ms"])
def test_versions_at_both_ends(moment, valid_for, crash):
    def make(one, two):
        return one.join_as_of(two, how="left", valid_for=valid_for, suffix="_2", name="step")

    ones = [row(1, inside(moment, CENTURY)), row(2, moment), row(3, inside(moment, 2 * CENTURY))]
    version = inside(moment, CENTURY)
    found = {each["n"]: each["n_2"] for each in results(make, ones, [row(9, version)], crash)}
    behind = 3 if moment == FIRST else 2
    before = 2 if moment == FIRST else 3
    assert found == {1: 9, behind: 9 if valid_for is None else None, before: None}


@ENDS
def test_a_version_is_valid_up_to_the_last_millisecond(moment):
    def make(one, two):
        return one.join_as_of(two, valid_for="36525d", suffix="_2", name="step")

    version = moment if moment == FIRST else moment - CENTURY
    ones = [row(1, version + CENTURY - MS), row(2, version + CENTURY)]
    assert [each["n"] for each in results(make, ones, [row(9, version)])] == [1]


@pytest.mark.parametrize("valid_for", ["36526d", "9" * 5_000 + "d", timedelta(days=999_999_999)])
def test_a_validity_of_more_than_a_century_is_refused(valid_for):
    job = hg.Job("refused")
    with pytest.raises(UsageError, match="give at most 36525d"):
        keyed(job, "one").join_as_of(
            keyed(job, "two"), valid_for=valid_for, suffix="_2", name="step"
        )


# --- window joins ----------------------------------------------------------------------------------


@ENDS
@pytest.mark.parametrize(
    "window",
    [hg.tumbling("36500d"), hg.sliding("36500d", "18250d"), hg.cumulative("36500d", "18250d")],
)
def test_windows_of_joins_at_both_ends(moment, window):
    def make(one, two):
        return one.window(window).join(two, suffix="_2", name="step")

    found = results(make, [row(1, moment)], [row(2, moment)])
    assert {(each["n"], each["n_2"]) for each in found} == {(1, 2)}


@pytest.mark.parametrize("side", ["one", "two"])
@pytest.mark.parametrize(
    "time", [EVENT_TIME_MIN_MS - 1, EVENT_TIME_MAX_MS + 1, 2**63 - 1, -(2**63)]
)
def test_times_beyond_are_bad_records_before_they_come_to_a_join(time, side):
    job = hg.Job("beyond")
    schema = {"k": "string", "at": "int64"}
    one, two = (
        job.read(from_list([], schema=schema), name=name).event_time("at").key_by("k")
        for name in ("one", "two")
    )
    made = one.join(two, within=CENTURIES, suffix="_2", name="step")
    made.write(collect(guarantee="none"), name="out")
    with pytest.raises(BadRecordError, match="out of range column=`at`"):
        push(job, side, {"k": "a", "at": time})


def push(job, source, *records):
    with harness(job) as h:
        h.push(source, *records)
        h.end()


# --- state that expires ----------------------------------------------------------------------------


def remembers(**ttl):
    class Remembers(hg.KeyedProcess):
        seen = hg.ValueState[int](default=0, ttl=hg.StateTtl(**ttl))
        items = hg.ListState[int](ttl=hg.StateTtl(**ttl))
        table = hg.MapState[str, int](ttl=hg.StateTtl(**ttl))

        def on_record(self, record, ctx):
            before = self.seen.get(), list(self.items), dict(self.table.items())
            self.seen.set(record.n)
            self.items.add(record.n)
            self.table.put(str(record.n), record.n)
            return [before]

    return Remembers()


def ttl_job(**ttl):
    job = hg.Job("ttl")
    rows = job.read(from_list([], schema=SCHEMA), name="one").event_time(
        "at", max_out_of_order="0s"
    )
    rows.key_by("k").process(remembers(**ttl), name="step").write(
        collect(guarantee="exactly_once"), name="out"
    )
    job.checkpoint(every="1h", storage="memory://x")
    return job


NOTHING = (0, [], {})


@ENDS
@pytest.mark.parametrize("crash", [False, True])
def test_state_that_lives_a_century_of_event_time(moment, crash):
    start = moment if moment == FIRST else moment - CENTURY
    with harness(ttl_job(after="36525d", time="event")) as h:
        h.push("one", row(1, start))
        h.advance_watermark("one", start + CENTURY - MS)
        if crash:
            h.checkpoint()
            h.crash()
        h.push("one", row(2, start + CENTURY))
        h.end()
        assert h.drain("out") == [NOTHING, (1, [1], {"1": 1})]


@ENDS
def test_state_that_lives_a_millisecond_of_event_time(moment):
    start = moment if moment == FIRST else moment - MS
    with harness(ttl_job(after="1ms", time="event")) as h:
        h.push("one", row(1, start))
        h.advance_watermark("one", start + MS)
        h.push("one", row(2, start + MS))
        h.end()
        assert h.drain("out") == [NOTHING, NOTHING]


class Clock:
    def __init__(self, ms):
        self.ms = ms

    def now(self):
        return self.ms

    use = passed = now


@pytest.mark.parametrize("ms", [-(2**63), EVENT_TIME_MIN_MS, EVENT_TIME_MAX_MS, 2**63 - 1])
def test_the_bound_of_what_has_expired_fits_in_64_bits(ms):
    expiry = Expiry(DURATION_MAX_MS, hg.StateTtl(CENTURY), Clock(ms))
    assert -(2**63) <= expiry.dead_until() == expiry.all_dead_until() <= 2**63 - 1


@pytest.mark.parametrize(
    "after", ["36526d", "9" * 5_000 + "d", timedelta(days=999_999_999), CENTURY + MS]
)
def test_a_life_of_more_than_a_century_is_refused(after):
    with pytest.raises(HeadgateError, match="give at most 36525d"):
        ttl_job(after=after)


# --- patterns --------------------------------------------------------------------------------------


def pattern_job(within, between="ends"):
    job = hg.Job("pattern")
    pattern = hg.cep.begin("one").where("n = 1").followed_by("two").where("n = 2")
    found = keyed(job, "one").match(
        pattern.within(within, between=between),
        select=lambda match: (match.start, match.end),
        name="step",
    )
    found.write(collect(guarantee="exactly_once"), name="out")
    found.timed_out.write(collect(guarantee="exactly_once"), name="timed out")
    job.checkpoint(every="1h", storage="memory://x")
    return job


@ENDS
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("between", ["ends", "neighbours"])
def test_a_pattern_within_a_century(moment, between, crash):
    start = moment if moment == FIRST else moment - CENTURY
    for end, matches in ((start + CENTURY - MS, 1), (start + CENTURY, 0)):
        with harness(pattern_job("36525d", between)) as h:
            h.push("one", row(1, start))
            if crash:
                h.checkpoint()
                h.crash()
            h.push("one", row(2, end))
            h.end()
            assert len(h.drain("out")) == matches
            assert len(h.drain("timed out")) == 1 - matches


@ENDS
def test_a_pattern_whose_time_ends_beyond_the_range(moment):
    with harness(pattern_job("36525d")) as h:
        h.push("one", row(1, moment))
        h.end()
        (match,) = h.drain("timed out")
        assert [each.n for each in match["one"]] == [1]


@pytest.mark.parametrize("within", ["36526d", "9" * 5_000 + "d", timedelta(days=999_999_999)])
def test_a_pattern_within_more_than_a_century_is_refused(within):
    with pytest.raises(HeadgateError, match="give at most 36525d"):
        pattern_job(within)


# --- durations -------------------------------------------------------------------------------------


def test_leading_zeros_are_no_digits_too_many():
    assert parse_duration("0" * 5_000 + "7d") == 7 * 86_400_000


@pytest.mark.parametrize("longest", [DURATION_MAX_MS, None])
def test_a_duration_of_any_number_of_digits_is_refused_in_a_short_message(longest):
    for digits in (19, 20, 21, 4_301, 100_000):
        with pytest.raises(UsageError, match="too long") as error:
            parse_duration("9" * digits + "ms", "gap", longest_ms=longest)
        assert len(str(error.value)) < 200
