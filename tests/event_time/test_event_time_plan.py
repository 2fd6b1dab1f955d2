"""A wrong event_time step is reported at the line where it is written."""

from __future__ import annotations

import pytest

import headgate as hg
from headgate.api.stream import Stream, output_of
from headgate.connectors import from_list
from headgate.connectors.files.source import files_source
from headgate.errors import PlanError, UsageError
from headgate.operators.base import Operator
from headgate.operators.graph import Node
from headgate.operators.origin import capture_origin

SCHEMA = {"k": "string", "at": "int64"}


def stream(**options):
    source = from_list([], schema=SCHEMA)
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
        ({"max_drift": "1s"}, "max_drift has no effect without align", "align="),
        ({"align_every": "1s"}, "align_every has no effect without align", "align="),
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


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (ALIGNED, "it cannot be aligned group=`g`"),
        ({"wait_for_queued": True}, "it cannot wait for queued splits"),
    ],
)
def test_in_another_subtask_what_needs_the_source_fails_with_the_line(arguments, what):
    job = hg.Job("plan")
    rows = job.read(from_list([], schema=SCHEMA), name="in")
    timed = rows.event_time("at", **arguments, name="times").start_new_chain()
    timed.write(hg.connectors.blackhole(), name="out")
    with pytest.raises(PlanError, match=f"`times` does not run with a source: {what}") as caught:
        job.run()
    assert "test_event_time_plan.py" in caught.value.where


UNCHAINED = {"pipeline.operator-chaining.enabled": "false"}


def vertices(rows):
    rows.write(hg.connectors.blackhole(), name="out")
    return [vertex.name for vertex in output_of(rows).job.spec().plan.vertices]


@pytest.mark.parametrize(
    "arguments", [{}, {"wait_for_queued": True}, {**ALIGNED, "per_split": False}]
)
def test_without_chaining_the_time_of_splits_stays_in_the_subtask_of_the_source(arguments):
    kept = stream(options=UNCHAINED).map(lambda row: row.at, name="at")
    timed = kept.event_time(lambda at: at, **arguments, name="times").map(str, name="text")
    assert vertices(timed) == ["in -> at -> times", "text", "out"]


@pytest.mark.parametrize(
    "timed",
    [
        lambda rows: rows.event_time("at", per_split=False, name="times"),
        lambda rows: rows.rebalance().event_time("at", name="times"),
        lambda rows: rows.event_time("at", name="times").start_new_chain(),
    ],
)
def test_without_chaining_other_event_time_has_its_own_subtasks(timed):
    assert vertices(timed(stream(options=UNCHAINED))) == ["in", "times", "out"]


@pytest.mark.parametrize("chaining", ["true", "false"])
def test_splits_that_are_ahead_of_others_make_nothing_late(tmp_path, chaining):
    """The splits are read by turns, and one is far ahead."""
    options = {
        "pipeline.operator-chaining.enabled": chaining,
        "pipeline.auto-watermark-interval": "0 ms",
        "execution.buffer-timeout.interval": "0 ms",
    }
    job = hg.Job("turns", parallelism=1, options=options)
    job.checkpoint(every="1h", storage=str(tmp_path))
    sink = hg.connectors.collect()
    (
        job.read(hg.connectors.numbers(40, batch_rows=5, splits=2), name="in")
        .map(lambda n: {"at": n + (0 if n // 5 % 2 else 10_000)}, into={"at": "int64"})
        .event_time("at", name="times")
        .window(hg.tumbling("5ms"))
        .agg(numbers=hg.count(), name="windows")
        .write(sink, name="out")
    )
    job.run()
    assert sum(row["numbers"] for row in sink.rows) == 40


async def later(row):
    return row


@pytest.mark.parametrize(
    ("behind", "arguments"),
    [
        (lambda rows: rows, {"per_split": False}),
        (lambda rows: rows.rebalance(), {}),
        (lambda rows: rows.map(later, into=SCHEMA), {}),
        (lambda rows: rows.filter("at > 0").disable_chaining(), {}),
        (lambda rows: rows.filter("at > 0").start_new_chain(), {}),
    ],
)
def test_queued_splits_are_waited_for_where_they_are_known(behind, arguments):
    with pytest.raises(
        PlanError, match="event_time can wait for queued splits only where"
    ) as caught:
        behind(stream()).event_time("at", wait_for_queued=True, **arguments)
    assert "test_event_time_plan.py" in caught.value.where


def per_split(timed):
    return output_of(timed).node.watermarks.per_split


class Collecting(Operator):
    """Sends records on when it pleases."""


def test_splits_are_known_behind_steps_that_pass_batches_on():
    rows = stream()
    assert per_split(rows.event_time("at"))
    passed = rows.filter("at > 0").select("at").map_batches(lambda batch: batch)
    assert per_split(passed.event_time("at"))
    assert not per_split(rows.event_time("at", per_split=False))


def test_splits_are_not_known_behind_side_outputs_and_steps_that_collect(tmp_path):
    rows = stream()
    collecting = Node(
        name="",
        kind="collecting",
        origin=capture_origin(),
        inputs=(output_of(rows).as_input(),),
        factory=Collecting,
        schema=rows.schema,
    )
    collected = Stream(output_of(rows).add(collecting))
    assert not per_split(collected.event_time("at"))
    assert not per_split(collected.filter("at > 0").event_time("at"))
    (tmp_path / "a.csv").write_text("at\n")
    files = files_source(
        str(tmp_path), format="csv", schema={"at": "int64"}, on_bad_record="side_output"
    )
    rejected = hg.Job("rejected").read(files, name="in").rejected
    assert not per_split(rejected.event_time("offset"))
    assert not per_split(rejected.filter('"offset" > 0').event_time("offset"))
