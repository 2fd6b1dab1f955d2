"""The watermark of an event-time step is sent again after a restore, even if no record follows."""

from __future__ import annotations

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.operators.elements import WATERMARK_MAX
from headgate.operators.splits import WHOLE
from headgate.runtime.job import runnable
from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
)
from headgate.runtime.savepoint.compare import unclaimed_states
from headgate.state.snapshot import HINT, OperatorSnapshot, RestoredState, StateHandle, StateInfo

TICK_MS = 200


def restored(step, *before, open_splits=(), **settings):
    """A step that gets what these had at a checkpoint; splits are opened before it goes on."""
    run = step(**settings)
    items = [item for each in before for item in each.operator.snapshot(1).items["reached"].items]
    run.operator.restore(RestoredState(items={"reached": items}))
    for split in open_splits:
        run.splits.opened(split, queued=True)
    return run


def test_the_last_watermark_is_said_again(step):
    before = step().read(WHOLE, 5_000).wait(TICK_MS)
    assert restored(step, before).wait(0).watermarks == [4_999]
    again = restored(step, restored(step, before)).wait(0)
    assert again.read(WHOLE, 4_000).wait(TICK_MS).watermarks == [4_999]
    assert again.read(WHOLE, 6_000).wait(TICK_MS).watermarks == [4_999, 5_999]


def test_a_watermark_that_was_due_behind_the_barrier_is_sent(step):
    before = step().read(WHOLE, 5_000)
    assert before.watermarks == []
    assert restored(step, before).wait(0).watermarks == [4_999]


def test_without_a_timer_of_its_own_it_is_said_again_too(step):
    options = {"pipeline.auto-watermark-interval": "0s"}
    before = step(options=options).read(WHOLE, 5_000)
    assert restored(step, before, options=options).wait(0).watermarks == [4_999]


def test_each_split_goes_on_from_where_it_was(step):
    before = step()
    for split in ("a", "b"):
        before.splits.opened(split)
    before.read("a", 1_000).read("b", 9_000).wait(TICK_MS)
    run = restored(step, before, open_splits=("a", "b")).wait(TICK_MS)
    assert run.watermarks == [999]
    assert run.read("a", 8_000).wait(TICK_MS).watermarks == [999, 7_999]


def test_a_split_that_had_not_begun_is_waited_for_as_before(step):
    before = step()
    before.splits.opened("a")
    before.splits.opened("b", queued=True)
    before.read("a", 5_000).wait(TICK_MS)
    run = restored(step, before, open_splits=("a", "b")).wait(TICK_MS)
    assert run.watermarks == before.watermarks == [4_999]
    assert run.operator.status().queued_splits == 1


def test_each_subtask_goes_on_from_where_it_was(step):
    slow, fast = (
        step(subtask=(index, 2)).read(WHOLE, at) for index, at in ((0, 1_000), (1, 9_000))
    )
    runs = [restored(step, slow, fast, subtask=(index, 2)).wait(0) for index in (0, 1)]
    assert [run.watermarks for run in runs] == [[999], [8_999]]


def test_at_another_parallelism_the_slowest_that_was_waited_for_decides(step):
    slow, fast = (
        step(subtask=(index, 2)).read(WHOLE, at) for index, at in ((0, 1_000), (1, 9_000))
    )
    assert restored(step, slow, fast).wait(TICK_MS).watermarks == [999]
    slow.operator.on_idle(True)
    assert restored(step, slow, fast).wait(TICK_MS).watermarks == [8_999]
    fast.operator.on_watermark(WATERMARK_MAX)
    assert restored(step, slow, fast).wait(TICK_MS).watermarks == [999]


def test_a_subtask_that_had_ended_says_nothing(step):
    ended, going = step(subtask=(0, 2)), step(subtask=(1, 2)).read(WHOLE, 9_000)
    ended.read(WHOLE, 1_000).operator.on_watermark(WATERMARK_MAX)
    assert restored(step, ended, going, subtask=(0, 2)).wait(TICK_MS).watermarks == []
    assert restored(step, ended, going, subtask=(1, 2)).wait(TICK_MS).watermarks == [8_999]


def test_the_note_of_another_step_is_no_ones(step):
    before = step(of="at clicks").read(WHOLE, 5_000).wait(TICK_MS)
    assert restored(step, before, of="at orders").wait(TICK_MS).watermarks == []
    assert restored(step, before, of="at clicks").wait(TICK_MS).watermarks == [4_999]


def test_what_the_clock_had_moved_is_no_records_doing(step):
    before = step(close_after_ms=1_000).read(WHOLE, 5_000).wait(2_000)
    run = restored(step, before).wait(TICK_MS)
    assert run.watermarks == before.watermarks[-1:] == [4_999 + 2_000]


def job_of(*columns):
    job = hg.Job("notes")
    for column in columns:
        rows = job.read(from_list([], schema={column: "int64"}), name=column)
        rows.event_time(column).write(blackhole(guarantee="none"), name=f"{column}-out")
    return job


def test_steps_without_a_name_are_told_apart_by_what_they_read():
    for columns in (("a", "b"), ("b", "a")):
        plan = runnable(job_of(*columns)).spec().replan(1, 128)
        nodes = [node for vertex in plan.vertices for node in vertex.nodes]
        steps = {node.name: node.factory() for node in nodes if node.kind == "event_time"}
        expected = zip(("event_time", "event_time-2"), columns, strict=True)
        assert {name: step._of for name, step in steps.items()} == {
            name: f"{column} {column}" for name, column in expected
        }


def test_nobody_has_to_claim_a_note():
    handle = StateHandle(
        state="reached",
        kind="items",
        size_bytes=0,
        checksum="",
        rows=0,
        inline=b"",
        redistribution="union",
    )
    for kind, missed in ((HINT, []), ("union", ["event_time.reached"])):
        snapshot = OperatorSnapshot(
            operator="event_time",
            handles=(handle,),
            states=(StateInfo(name="reached", kind=kind),),
        )
        subtask = ManifestSubtask(subtask=0, snapshots=(snapshot,))
        operator = ManifestOperator(name="event_time", parallelism=1, subtasks=(subtask,))
        manifest = Manifest(
            checkpoint_id=1,
            trigger_ms=0,
            completed_ms=0,
            duration_ms=0,
            max_parallelism=128,
            operators=(operator,),
        )
        assert unclaimed_states(manifest, {}) == missed
