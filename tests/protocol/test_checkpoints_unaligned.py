"""Unaligned checkpoints in the coordinator: options of triggers, and the order of requests."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.errors import OptionError
from headgate.operators.elements import CheckpointOptions
from headgate.runtime.protocol.checkpoints.coordinator import (
    CheckpointCoordinator,
    Discard,
    NotifyAborted,
    NotifyComplete,
    Phase,
    Publish,
    RequestDone,
    StartCheckpoint,
    WakeAt,
)
from headgate.runtime.protocol.checkpoints.settings import CheckpointRules
from headgate.runtime.protocol.failures import CheckpointFailure
from headgate.runtime.protocol.ids import SubtaskId

A, B = SubtaskId(0, 0), SubtaskId(1, 0)
F = CheckpointFailure
UNALIGNED = CheckpointOptions(unaligned=True)
LATER = CheckpointOptions(aligned_timeout_ms=70)
SAVEPOINT = CheckpointOptions(savepoint="s")
STOP = CheckpointOptions(stop=True)


class Harness:
    """A job with unaligned checkpoints; invariants are checked after every event."""

    def __init__(self, **settings: Any) -> None:
        defaults = {"interval_ms": 100, "timeout_ms": 1000, "incremental": False, "unaligned": True}
        self.coordinator = CheckpointCoordinator[str](CheckpointRules(**defaults | settings))
        self.start([A, B], 1, 0)

    def __getattr__(self, event: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            decisions = getattr(self.coordinator, event)(*args, **kwargs)
            self.coordinator.validate()
            return decisions

        return call

    def ack_all(self, id_: int, now_ms: int) -> list[Any]:
        self.acked(id_, {A: "a"}, now_ms)
        return self.acked(id_, {B: "b"}, now_ms)

    def complete(self, id_: int, now_ms: int) -> list[Any]:
        self.ack_all(id_, now_ms)
        return self.published(id_, now_ms)


def triggers(decisions: list[Any]) -> list[StartCheckpoint]:
    return [item for item in decisions if isinstance(item, StartCheckpoint)]


# -- the options of triggers ----------------------------------------------------------------------


def test_plain_checkpoints_are_unaligned_at_once_or_later() -> None:
    assert triggers(Harness().tick(100)) == [StartCheckpoint(1, 100, UNALIGNED)]
    assert triggers(Harness(aligned_timeout_ms=70).tick(100)) == [StartCheckpoint(1, 100, LATER)]
    assert triggers(Harness().request(50, token="t")) == [StartCheckpoint(1, 50, UNALIGNED)]


def test_a_timeout_alone_changes_nothing() -> None:
    job = Harness(unaligned=False, aligned_timeout_ms=70)
    assert triggers(job.tick(100)) == [StartCheckpoint(1, 100, CheckpointOptions())]


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"savepoint": "s"}, SAVEPOINT),
        ({"savepoint": "s", "stop": True}, CheckpointOptions(savepoint="s", stop=True)),
        ({"stop": True}, STOP),
        ({"final": True}, CheckpointOptions()),
    ],
)
def test_savepoints_and_the_last_checkpoint_are_aligned(
    asked: dict[str, Any], options: CheckpointOptions
) -> None:
    assert triggers(Harness().request(10, token="t", **asked)) == [StartCheckpoint(1, 10, options)]


def test_the_last_checkpoint_behind_a_savepoint_is_aligned() -> None:
    job = Harness()
    job.request(10, token="t", savepoint="s", stop=True)
    assert triggers(job.complete(1, 20)) == [StartCheckpoint(2, 20, STOP)]


def test_unaligned_checkpoints_are_incremental_too() -> None:
    job = Harness(incremental=True)
    job.tick(100)
    job.complete(1, 110)
    assert triggers(job.tick(200)) == [
        StartCheckpoint(2, 200, CheckpointOptions(base=1, unaligned=True))
    ]


# -- one at a time --------------------------------------------------------------------------------


def test_a_savepoint_waits_for_a_checkpoint_and_goes_before_the_next() -> None:
    job = Harness()
    job.tick(100)
    assert job.request(110, token="asked") == []
    assert job.request(120, token="s", savepoint="s") == []
    assert triggers(job.tick(300)) == []
    assert triggers(job.ack_all(1, 310)) == []
    assert job.published(1, 320) == [
        NotifyComplete(1),
        StartCheckpoint(2, 320, SAVEPOINT),
        WakeAt(1320),
    ]
    assert triggers(job.tick(500)) == []
    job.ack_all(2, 510)
    assert job.published(2, 520)[:2] == [RequestDone("s", 2), StartCheckpoint(3, 520, UNALIGNED)]
    assert job.complete(3, 530)[:3] == [
        NotifyComplete(3),
        RequestDone("asked", 3),
        StartCheckpoint(4, 530, UNALIGNED),
    ]


def test_a_savepoint_goes_on_when_the_checkpoint_before_it_fails() -> None:
    job = Harness(tolerable_failures=1)
    job.tick(100)
    job.request(110, token="s", savepoint="s")
    decisions = job.declined(1, A, F.IO, 120)
    assert triggers(decisions) == [StartCheckpoint(2, 120, SAVEPOINT)]
    assert triggers(job.declined(2, A, F.IO, 200)) == [StartCheckpoint(3, 200, UNALIGNED)]


def test_aligned_checkpoints_do_not_wait_for_savepoints() -> None:
    job = Harness(unaligned=False)
    job.tick(100)
    assert triggers(job.request(110, token="s", savepoint="s"))[0].options == SAVEPOINT


# -- the end of a job -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked", [{"stop": True}, {"final": True}, {"stop": True, "savepoint": "s"}]
)
def test_the_last_checkpoint_waits_for_nothing_and_subsumes_what_is_under_way(
    asked: dict[str, Any],
) -> None:
    job = Harness()
    job.tick(100)
    job.acked(1, {A: "a"}, 105)
    decisions = job.request(110, token="end", **asked)
    assert decisions[:2] == [Discard(1, UNALIGNED, ("a",)), NotifyAborted(1, F.SUBSUMED)]
    assert [trigger.checkpoint_id for trigger in triggers(decisions)] == [2]
    assert job.acked(1, {B: "b"}, 120) == [Discard(1, UNALIGNED, ("b",))]
    assert job.declined(1, B, F.SUBSUMED, 130) == []
    assert job.coordinator.phase is Phase.ENDING


def test_what_is_being_published_completes_while_the_job_ends() -> None:
    job = Harness()
    job.tick(100)
    job.ack_all(1, 105)
    assert triggers(job.request(110, token="end", stop=True)) == [StartCheckpoint(2, 110, STOP)]
    assert NotifyComplete(1) in job.published(1, 120)
    assert RequestDone("end", 2) in job.complete(2, 130)


def test_an_aligned_one_is_left_alone() -> None:
    job = Harness(unaligned=False)
    job.tick(100)
    job.request(110, token="end", stop=True)
    assert job.coordinator.pending_ids == (1, 2)


def test_after_a_final_checkpoint_that_failed_they_are_unaligned_again() -> None:
    job = Harness(tolerable_failures=1)
    job.request(10, token="end", final=True)
    job.declined(1, A, F.IO, 20)
    assert triggers(job.tick(100)) == [StartCheckpoint(2, 100, UNALIGNED)]
    (published,) = [item for item in job.ack_all(2, 110) if isinstance(item, Publish)]
    assert published.options == UNALIGNED


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"exactly_once": False}, "execution.checkpointing.mode=`AT_LEAST_ONCE`"),
        ({"max_concurrent": 3}, "execution.checkpointing.max-concurrent-checkpoints=`3`"),
    ],
)
def test_what_does_not_go_together_is_refused_with_both_keys(
    settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(OptionError) as caught:
        CheckpointRules(100, unaligned=True, **settings)
    assert "execution.checkpointing.unaligned.enabled=`true`" in str(caught.value)
    assert key in str(caught.value)
    CheckpointRules(100, unaligned=False, **settings)


def test_a_timeout_is_not_negative() -> None:
    with pytest.raises(OptionError, match="setting=`aligned_timeout_ms` value=`-1`"):
        CheckpointRules(100, unaligned=True, aligned_timeout_ms=-1)
