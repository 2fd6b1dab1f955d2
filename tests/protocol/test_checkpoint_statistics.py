"""The sentence about a checkpoint names the subtask and the phase that took the time."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.runtime.coordinator.views import describe_checkpoints
from headgate.runtime.protocol.checkpoints.statistics import (
    CheckpointHistory,
    CheckpointRecord,
    SubtaskPart,
    explain,
)

EVERYONE = [("read", 0), ("map", 0), ("map", 1), ("write", 0)]
QUICK: dict[str, float] = {
    "start_delay_ms": 1,
    "alignment_ms": 1,
    "sync_ms": 1,
    "async_ms": 1,
}


def part(task: str, index: int, ack_ms: float = 5, **fields: Any) -> SubtaskPart:
    sizes = {"written_bytes": 10, "state_bytes": 30}
    return SubtaskPart(task=task, index=index, ack_ms=ack_ms, **{**QUICK, **sizes, **fields})


def completed(duration_ms: int, *slow: SubtaskPart) -> CheckpointRecord:
    history = CheckpointHistory(3)
    history.started(CheckpointRecord(7, "checkpoint", 1000, EVERYONE))
    named = {(each.task, each.index) for each in slow}
    for task, index in EVERYONE:
        if (task, index) not in named:
            history.acknowledged(7, part(task, index))
    for each in slow:
        history.acknowledged(7, each)
    history.completed(7, 1000 + duration_ms)
    record = history.record(7)
    assert record is not None
    return record


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("start_delay_ms", "its first barrier came after 9s"),
        ("alignment_ms", "it waited 9s for the barriers of its other inputs"),
        ("sync_ms", "its synchronous part took 9s"),
        ("async_ms", "writing its 10 bytes took 9s"),
    ],
)
def test_a_slow_checkpoint(phase: str, words: str) -> None:
    record = completed(9100, part("map", 1, 9050, **{phase: 9000}))
    assert explain(record).startswith("took 9s 100ms; `map` (1) was last: " + words)


def test_a_checkpoint_whose_publication_was_slow() -> None:
    assert explain(completed(9005)) == "took 9s 5ms, of which 9s went into publishing it"


def test_a_failed_checkpoint_names_who_had_not_acknowledged_upstream_first() -> None:
    history = CheckpointHistory(3)
    history.started(CheckpointRecord(1, "checkpoint", 0, EVERYONE))
    history.acknowledged(1, part("map", 0))
    history.acknowledged(1, part("read", 0))
    history.failed(1, 600_000, "not every subtask acknowledged before the timeout")
    (record,) = history.records
    assert explain(record) == (
        "failed: not every subtask acknowledged before the timeout; "
        "2 of 4 subtasks had not acknowledged: `map` (1), `write` (0); look at the first of them"
    )


def test_late_and_repeated_acknowledgements_change_nothing() -> None:
    record = completed(100)
    history = CheckpointHistory(3)
    history.started(record)
    history.acknowledged(7, part("map", 0, 50_000))
    assert len(record.parts) == len(EVERYONE)
    assert record.last is not None
    assert record.last.ack_ms == 5


def test_only_so_many_ended_ones_are_kept_and_all_that_are_under_way() -> None:
    history = CheckpointHistory(2)
    for id_ in range(1, 8):
        history.started(CheckpointRecord(id_, "checkpoint", 0, EVERYONE))
    for id_ in (2, 3, 5, 6):
        history.failed(id_, 10, "no")
    assert [record.checkpoint_id for record in history.records] == [1, 4, 5, 6, 7]


def test_the_report_adds_up() -> None:
    history = CheckpointHistory(10)
    for id_, duration_ms in ((1, 100), (2, 300), (3, 200)):
        history.started(CheckpointRecord(id_, "checkpoint", 1000, EVERYONE))
        for task, index in EVERYONE:
            unaligned = (task, index) == ("write", 0)
            persisted = {"unaligned": True, "persisted_bytes": 4} if unaligned else {}
            history.acknowledged(id_, part(task, index, processed_bytes=2, **persisted))
        history.completed(id_, 1000 + duration_ms)
    found = describe_checkpoints(history)
    assert [row["id"] for row in found["history"]] == [1, 2, 3]
    row = found["history"][0]
    assert (row["checkpointed_size"], row["state_size"]) == (40, 120)
    assert (row["processed_data"], row["persisted_data"], row["unaligned_subtasks"]) == (8, 4, 1)
    spread = found["summary"]["end_to_end_duration"]
    assert (spread["min"], spread["avg"], spread["p50"], spread["max"]) == (100, 200, 200, 300)
    one = describe_checkpoints(history, 2)
    assert [p["unaligned_checkpoint"] for p in one["subtasks"]] == [False, False, False, True]
    assert describe_checkpoints(history, 99) == {}
