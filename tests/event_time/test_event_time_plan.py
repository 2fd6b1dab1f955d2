"""What is wrong with an event_time step is said where it is written."""

from __future__ import annotations

import pytest

import headgate as hg
from headgate.connectors import from_list
from headgate.errors import PlanError, UsageError


def stream(**options):
    source = from_list([], schema={"k": "string", "at": "int64"})
    return hg.Job("plan", **options).read(source, name="in")


@pytest.mark.parametrize(
    ("arguments", "message", "fix"),
    [
        (
            {"strategy": hg.WatermarkStrategy.monotonous(), "max_out_of_order": "1s"},
            "event_time has both a strategy and max_out_of_order",
            "give one",
        ),
        ({"strategy": "bounded"}, "strategy is no hg.WatermarkStrategy type=`str`", "custom("),
        ({"max_drift": "1s"}, "max_drift has no meaning without align", "align="),
        ({"align_every": "1s"}, "align_every has no meaning without align", "align="),
        ({"close_after": "1s"}, "event_time with close_after has no name", "name="),
        ({"align": "g"}, "alignment needs max_drift group=`g`", "max_drift="),
        ({"align": "", "max_drift": "1s"}, "align is not the name of a group", ""),
        ({"align": "g", "max_drift": "1s"}, "alignment needs idle_after group=`g`", "idle_after="),
        (
            {"align": "g", "max_drift": "1s", "align_every": "0s", "idle_after": "1m"},
            "align_every must be above 0",
            "1s",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments, message, fix):
    with pytest.raises(PlanError) as caught:
        stream().event_time("at", **arguments)
    assert caught.value.message.startswith(message)
    assert fix in caught.value.fix
    assert "test_event_time_plan.py" in caught.value.where


@pytest.mark.parametrize("name", ["max_out_of_order", "idle_after", "close_after"])
def test_durations_have_units(name):
    with pytest.raises(UsageError, match=f"{name} needs a unit"):
        stream().event_time("at", **{name: 5})


ALIGNED = {"align": "g", "max_drift": "1s", "idle_after": "1m"}


@pytest.mark.parametrize(
    "behind",
    [
        lambda rows: rows.rebalance(),
        lambda rows: rows.union(rows),
        lambda rows: rows.rebalance().filter("at > 0"),
    ],
)
def test_alignment_needs_a_source_in_the_same_subtask(behind):
    with pytest.raises(PlanError, match="alignment stops sources, and there is none right before"):
        behind(stream()).event_time("at", **ALIGNED)


def test_alignment_behind_steps_of_the_same_subtask():
    timed = stream().filter("at > 0").map(lambda row: row.at).event_time(lambda at: at, **ALIGNED)
    assert timed.has_event_time


def test_members_of_a_group_agree():
    rows = stream()
    rows.event_time("at", **ALIGNED, name="first")
    rows.event_time("at", **ALIGNED, name="second")
    with pytest.raises(PlanError, match="another max_drift or align_every in `first`"):
        rows.event_time("at", **{**ALIGNED, "max_drift": "2s"})


def test_without_chaining_an_aligned_job_fails_with_the_line():
    rows = stream(options={"pipeline.operator-chaining.enabled": "false"})
    timed = rows.event_time("at", **ALIGNED, name="times")
    timed.write(hg.connectors.blackhole(), name="out")
    with pytest.raises(PlanError, match="`times` does not run with a source") as caught:
        rows._job.run()
    assert "test_event_time_plan.py" in caught.value.where
