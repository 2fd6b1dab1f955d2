"""On which checkpoint the next one builds, and which ones must therefore be kept."""

from __future__ import annotations

from typing import Any

from headgate.operators.elements import CheckpointOptions
from headgate.runtime.protocol.checkpoints.coordinator import (
    CheckpointCoordinator,
    Discard,
    NotifyComplete,
    Publish,
    StartCheckpoint,
)
from headgate.runtime.protocol.checkpoints.settings import CheckpointRules
from headgate.runtime.protocol.failures import CheckpointFailure
from headgate.runtime.protocol.ids import SubtaskId

A, B = SubtaskId(0, 0), SubtaskId(1, 0)


class Harness:
    """A coordinator without periodic checkpoints; all events at time 0, invariants checked."""

    def __init__(self, *, base: int = 0, next_id: int = 1, **settings: Any) -> None:
        defaults = {"interval_ms": None, "max_concurrent": 3, "tolerable_failures": 9}
        self.coordinator = CheckpointCoordinator[str](CheckpointRules(**defaults | settings))
        self.start([A, B], next_id, 0, base=base)

    def __getattr__(self, event: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            decisions = getattr(self.coordinator, event)(*args, **kwargs)
            self.coordinator.validate()
            return decisions

        return call

    def trigger(self, **kwargs: Any) -> CheckpointOptions:
        (decision,) = (
            item
            for item in self.request(0, token="t", **kwargs)
            if isinstance(item, StartCheckpoint)
        )
        return decision.options

    def ack_all(self, id_: int) -> list[Any]:
        return self.acked(id_, {A: f"{id_}/a"}, 0) + self.acked(id_, {B: f"{id_}/b"}, 0)

    def complete(self, id_: int) -> list[Any]:
        return self.ack_all(id_) + self.published(id_, 0)

    @property
    def oldest_base(self) -> int | None:
        return self.coordinator.oldest_base


def test_without_an_older_checkpoint_all_is_written() -> None:
    assert Harness().trigger().base == 0


def test_the_restored_checkpoint_is_the_first_base() -> None:
    job = Harness(base=4, next_id=8)
    assert job.trigger().base == 4
    assert job.oldest_base == 4


def test_an_acknowledged_checkpoint_is_no_base_before_it_is_published() -> None:
    job = Harness(base=4, next_id=5)
    job.trigger()
    assert [type(item) for item in job.ack_all(5)] == [Publish]
    assert job.trigger().base == 4
    job.published(5, 0)
    assert job.trigger().base == 5


def test_the_notice_of_completion_goes_out_before_a_barrier_that_names_it() -> None:
    """It may still arrive behind the barrier, which travels with the records: so the barrier says it."""
    job = Harness(max_concurrent=1)
    job.trigger()
    job.request(0, token="next")
    decisions = job.complete(1)
    complete = decisions.index(NotifyComplete(1))
    trigger = decisions.index(StartCheckpoint(2, 0, CheckpointOptions(base=1)))
    assert complete < trigger


def test_what_pending_ones_build_on_is_kept_until_they_are_through() -> None:
    job = Harness(base=4, next_id=5)
    job.trigger()
    job.trigger()
    job.complete(5)
    assert job.oldest_base == 4  # checkpoint 6 began when 5 was not complete
    assert job.trigger().base == 5
    assert job.oldest_base == 4
    job.declined(6, A, CheckpointFailure.IO, 0)
    assert job.oldest_base == 5
    job.complete(7)
    assert job.oldest_base is None


def test_a_publication_without_answer_keeps_its_base() -> None:
    job = Harness(base=4, next_id=5)
    job.trigger()
    job.ack_all(5)
    job.job_failed(0)
    assert job.oldest_base == 4


def test_what_completes_after_the_attempt_is_no_base_of_the_next_unless_restored() -> None:
    job = Harness(base=4, next_id=5)
    job.trigger()
    job.ack_all(5)
    job.job_failed(0)
    job.published(5, 0)
    job.start([A, B], 6, 0, base=0)
    assert job.trigger().base == 0
    job.job_failed(0)
    job.start([A, B], 7, 0, base=5)
    assert job.trigger().base == 5


def test_without_increments_there_is_no_base() -> None:
    job = Harness(base=4, next_id=5, incremental=False)
    assert job.trigger().base == 0
    job.complete(5)
    assert job.trigger().base == 0
    assert job.oldest_base is None


def test_a_discard_says_whose_files_and_what_they_were_written_for() -> None:
    job = Harness(base=4, next_id=5)
    options = job.trigger()
    job.acked(5, {A: "5/a"}, 0)
    decisions = job.job_failed(0)
    assert Discard(5, options, ("5/a",)) in decisions
    assert job.acked(5, {B: "5/b"}, 0) == [Discard(5, options, ("5/b",))]
