"""The checkpoint coordinator: one test for each rule about when checkpoints start, complete and fail."""

from __future__ import annotations

import pytest

from headgate.errors import InternalError, OptionError
from headgate.operators.elements import CheckpointOptions
from headgate.runtime.protocol.checkpoints import coordinator as checkpoint_requests
from headgate.runtime.protocol.checkpoints.coordinator import (
    CheckpointCoordinator,
    Discard,
    FailJob,
    NotifyAborted,
    NotifyComplete,
    Phase,
    Publish,
    RequestDone,
    RequestFailed,
    StartCheckpoint,
    WakeAt,
)
from headgate.runtime.protocol.checkpoints.settings import CheckpointRules
from headgate.runtime.protocol.failures import CheckpointFailure
from headgate.runtime.protocol.ids import SubtaskId

A, B = SubtaskId(0, 0), SubtaskId(1, 0)
PLAIN, STOP = CheckpointOptions(), CheckpointOptions(stop=True)
F = CheckpointFailure


class Harness:
    """A coordinator whose invariants are checked after every event."""

    def __init__(self, *, start: bool = True, **settings: int | bool | None) -> None:
        settings = {"interval_ms": 100, "timeout_ms": 1000, "incremental": False} | settings
        self.coordinator = CheckpointCoordinator[str](CheckpointRules(**settings))
        if start:
            self.start([A, B], 1, 0)

    def __getattr__(self, event: str):
        def call(*args: object, **kwargs: object):
            decisions = getattr(self.coordinator, event)(*args, **kwargs)
            self.coordinator.validate()
            return decisions

        return call

    def ack(self, id_: int, subtask: SubtaskId, now_ms: int):
        return self.acked(id_, {subtask: f"{id_}/{subtask}"}, now_ms)

    def ack_all(self, id_: int, now_ms: int):
        self.ack(id_, A, now_ms)
        return self.ack(id_, B, now_ms)

    def complete(self, id_: int, now_ms: int):
        self.ack_all(id_, now_ms)
        return self.published(id_, now_ms)


def publish(id_: int, trigger_ms: int, options=PLAIN, final=False) -> Publish[str]:
    acks = {A: f"{id_}/0.0", B: f"{id_}/1.0"}
    return Publish(id_, trigger_ms, options, final, acks)


# -- the life of one checkpoint -------------------------------------------------------------------


def test_the_good_case() -> None:
    job = Harness(start=False)
    assert job.start([A, B], 1, 0) == [WakeAt(100)]
    assert job.tick(99) == [WakeAt(100)]
    assert job.tick(100) == [StartCheckpoint(1, 100, PLAIN), WakeAt(1100)]
    assert job.ack(1, B, 110) == []
    assert job.ack(1, A, 120) == [publish(1, 100)]
    assert list(job.coordinator._pending[1].acks) == [B, A]
    assert job.published(1, 130) == [NotifyComplete(1), WakeAt(200)]
    assert job.tick(200)[0] == StartCheckpoint(2, 200, PLAIN)


def test_publish_lists_acks_in_order_of_subtasks() -> None:
    job = Harness()
    job.tick(100)
    job.ack(1, B, 110)
    (decision,) = job.ack(1, A, 120)
    assert list(decision.acks) == [A, B]


def test_ids_go_on_from_the_job_log_and_are_never_used_twice() -> None:
    job = Harness(start=False)
    job.start([A, B], 8, 0)
    assert job.tick(100)[0] == StartCheckpoint(8, 100, PLAIN)
    job.job_failed(150)
    with pytest.raises(InternalError, match="used twice"):
        job.start([A, B], 8, 200)
    job.start([A, B], 9, 200)
    assert job.tick(300)[0] == StartCheckpoint(9, 300, PLAIN)


def test_duplicate_acks_change_nothing() -> None:
    job = Harness()
    job.tick(100)
    job.ack(1, A, 110)
    assert job.ack(1, A, 111) == []
    assert job.ack(1, B, 112) == [publish(1, 100)]
    assert job.ack(1, B, 113) == []
    job.published(1, 120)
    assert job.ack(1, A, 121) == []  # and above all no Discard: the files are in use


def test_an_ack_of_an_unknown_subtask_tells_the_events() -> None:
    job = Harness()
    job.tick(100)
    with pytest.raises(InternalError, match=r"unknown subtask subtask=`7.0`.*events=.*100ms tick"):
        job.ack(1, SubtaskId(7, 0), 110)


def test_decline_aborts_discards_and_frees_the_place() -> None:
    job = Harness(tolerable_failures=1)
    job.tick(100)
    job.ack(1, A, 110)
    assert job.declined(1, B, F.ASYNC_EXCEPTION, 120) == [
        Discard(1, PLAIN, ("1/0.0",)),
        NotifyAborted(1, F.ASYNC_EXCEPTION),
        WakeAt(200),
    ]
    assert job.tick(200)[0] == StartCheckpoint(2, 200, PLAIN)


def test_a_decline_after_the_ack_or_of_an_unknown_checkpoint_is_ignored() -> None:
    job = Harness()
    job.tick(100)
    job.ack(1, A, 110)
    assert job.declined(1, A, F.IO, 120) == []
    assert job.declined(7, A, F.IO, 120) == []
    assert job.ack(1, B, 130) == [publish(1, 100)]
    assert job.declined(1, B, F.IO, 140) == []


def test_timeout_aborts_and_late_acks_are_discarded() -> None:
    job = Harness(tolerable_failures=5)
    job.tick(100)
    job.ack(1, A, 110)
    assert job.tick(1099) == [WakeAt(1100)]
    decisions = job.tick(1100)
    assert decisions[:2] == [Discard(1, PLAIN, ("1/0.0",)), NotifyAborted(1, F.EXPIRED)]
    assert decisions[2] == StartCheckpoint(2, 1100, PLAIN)
    assert job.ack(1, B, 1200) == [Discard(1, PLAIN, ("1/1.0",))]
    assert job.ack(1, B, 1200) == [Discard(1, PLAIN, ("1/1.0",))]


def test_what_all_have_acknowledged_cannot_expire() -> None:
    job = Harness(interval_ms=None)
    job.request(100, token="t")
    job.ack_all(1, 200)
    assert job.tick(5000) == []
    assert job.published(1, 5001) == [NotifyComplete(1), RequestDone("t", 1)]


def test_late_acks_are_recognised_for_the_last_16_only() -> None:
    job = Harness(tolerable_failures=100, interval_ms=None)
    for id_ in range(1, 18):
        job.request(id_, token="t")
        job.declined(id_, A, F.IO, id_)
    assert job.ack(1, B, 50) == []
    assert job.ack(2, B, 50) == [Discard(2, PLAIN, ("2/1.0",))]


# -- when checkpoints start -----------------------------------------------------------------------


def test_one_at_a_time_and_the_missed_beat_is_caught_up_once() -> None:
    job = Harness()
    job.tick(100)
    assert job.tick(200) == [WakeAt(1100)]
    job.ack_all(1, 450)
    assert job.published(1, 460) == [
        NotifyComplete(1),
        StartCheckpoint(2, 460, PLAIN),
        WakeAt(1460),
    ]
    assert job.complete(2, 470) == [NotifyComplete(2), WakeAt(560)]


def test_min_pause_counts_from_the_last_completion_and_raises_the_interval() -> None:
    job = Harness(min_pause_ms=300, max_concurrent=5)
    assert job.tick(299) == [WakeAt(300)]
    assert job.tick(300)[0] == StartCheckpoint(1, 300, PLAIN)
    assert job.tick(600) == [WakeAt(1300)]  # a pause implies one at a time
    assert job.complete(1, 700) == [NotifyComplete(1), WakeAt(1000)]
    assert job.tick(999) == [WakeAt(1000)]
    assert job.tick(1000)[0] == StartCheckpoint(2, 1000, PLAIN)


def test_a_request_need_not_keep_the_pause() -> None:
    job = Harness(min_pause_ms=300)
    job.tick(300)
    job.complete(1, 350)
    assert job.request(360, token="t")[0] == StartCheckpoint(2, 360, PLAIN)


def test_without_interval_nothing_starts_by_itself() -> None:
    job = Harness(start=False, interval_ms=None)
    assert job.start([A, B], 1, 0) == []
    assert job.tick(10**9) == []
    assert job.request(10**9, token="t")[0] == StartCheckpoint(1, 10**9, PLAIN)


def test_requests_wait_their_turn_ahead_of_the_periodic_one() -> None:
    job = Harness()
    job.tick(100)
    assert job.request(110, token="first") == []
    assert job.request(120, token="second") == []
    job.ack_all(1, 300)
    assert job.published(1, 310)[:2] == [NotifyComplete(1), StartCheckpoint(2, 310, PLAIN)]
    job.ack_all(2, 320)
    assert job.published(2, 330)[:3] == [
        NotifyComplete(2),
        RequestDone("first", 2),
        StartCheckpoint(3, 330, PLAIN),
    ]
    assert job.complete(3, 340)[:3] == [
        NotifyComplete(3),
        RequestDone("second", 3),
        StartCheckpoint(4, 340, PLAIN),
    ]


def test_the_queue_of_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_requests, "REQUESTS_WAITING_MAX", 1)
    job = Harness()
    job.tick(100)
    job.request(110, token="a")
    assert job.request(110, token="b") == [RequestFailed("b", F.TOO_MANY_REQUESTS)]


def test_a_request_while_nothing_runs_is_refused() -> None:
    job = Harness(start=False)
    assert job.request(0, token="t") == [RequestFailed("t", F.NOT_ALL_RUNNING)]


def test_a_clock_that_goes_back_stands_still() -> None:
    job = Harness()
    job.tick(100)
    job.complete(1, 150)
    assert job.request(20, token="t")[0] == StartCheckpoint(2, 150, PLAIN)


# -- several at once ------------------------------------------------------------------------------


def test_a_newer_completion_subsumes_older_ones() -> None:
    job = Harness(max_concurrent=2)
    job.tick(100)
    assert job.tick(200)[0] == StartCheckpoint(2, 200, PLAIN)
    job.ack(1, A, 210)
    assert job.ack_all(2, 220) == [publish(2, 200)]
    assert job.published(2, 230) == [
        NotifyComplete(2),
        Discard(1, PLAIN, ("1/0.0",)),
        NotifyAborted(1, F.SUBSUMED),
        WakeAt(300),
    ]
    assert job.ack(1, B, 240) == [Discard(1, PLAIN, ("1/1.0",))]


def test_entries_are_published_one_at_a_time_in_order() -> None:
    job = Harness(max_concurrent=2)
    job.tick(100)
    job.tick(200)
    assert job.ack_all(1, 210) == [publish(1, 100), WakeAt(1200)]
    assert job.ack_all(2, 220) == []
    assert job.published(1, 230)[:2] == [NotifyComplete(1), publish(2, 200)]
    assert job.published(2, 240)[0] == NotifyComplete(2)


def test_one_that_gets_ready_while_a_newer_is_published_is_subsumed_or_takes_over() -> None:
    for published in (True, False):
        job = Harness(max_concurrent=2, tolerable_failures=1)
        job.tick(100)
        job.tick(200)
        assert job.ack_all(2, 210) == [publish(2, 200)]
        assert job.ack_all(1, 220) == []
        if published:
            assert NotifyAborted(1, F.SUBSUMED) in job.published(2, 230)
        else:
            decisions = job.publish_failed(2, 230)
            assert decisions[:2] == [NotifyAborted(2, F.FINALIZE_FAILURE), publish(1, 100)]


# -- failures that count --------------------------------------------------------------------------


@pytest.mark.parametrize("reason", list(CheckpointFailure))
def test_only_counting_reasons_fail_the_job(reason: CheckpointFailure) -> None:
    job = Harness()
    job.tick(100)
    decisions = job.declined(1, A, reason, 110)
    failed = [item for item in decisions if isinstance(item, FailJob)]
    assert bool(failed) == reason.counts
    assert (job.coordinator.phase is Phase.IDLE) == reason.counts
    if failed:
        assert "checkpoint_id=`1`" in failed[0].message


def test_failures_count_only_in_a_row() -> None:
    job = Harness(interval_ms=None, tolerable_failures=1)
    for id_, good in enumerate([False, True, False, True, False], start=1):
        job.request(id_, token="t")
        if good:
            job.complete(id_, id_)
        else:
            assert NotifyAborted(id_, F.IO) in job.declined(id_, A, F.IO, id_)
    job.request(6, token="t")
    assert job.declined(6, A, F.IO, 6) == [
        NotifyAborted(6, F.IO),
        RequestFailed("t", F.IO),
        FailJob(
            F.IO,
            "too many checkpoints failed: the checkpoint store refused or broke "
            "checkpoint_id=`6` tolerable=`1`",
        ),
    ]


def test_an_older_completion_does_not_forgive_a_newer_failure() -> None:
    job = Harness(max_concurrent=2, tolerable_failures=1)
    job.tick(100)
    job.tick(200)
    job.declined(2, A, F.IO, 210)
    assert NotifyComplete(1) in job.complete(1, 220)
    job.tick(300)
    assert any(isinstance(item, FailJob) for item in job.declined(3, A, F.IO, 310))


def test_failing_the_job_ends_the_attempt_at_once() -> None:
    job = Harness(max_concurrent=2)
    job.tick(100)
    job.tick(200)
    job.request(205, token="waiting")
    job.ack(2, A, 210)
    decisions = job.declined(1, A, F.IO, 220)
    assert decisions[0] == NotifyAborted(1, F.IO)
    assert isinstance(decisions[1], FailJob)
    assert decisions[2:] == [
        Discard(2, PLAIN, ("2/0.0",)),
        NotifyAborted(2, F.JOB_FAILED),
        RequestFailed("waiting", F.JOB_FAILED),
    ]
    assert job.tick(1000) == []
    assert job.job_failed(1000) == []
    assert job.start([A, B], 3, 1000) == [WakeAt(1100)]


def test_several_expire_together_and_the_job_fails_once() -> None:
    job = Harness(max_concurrent=2, timeout_ms=500)
    job.tick(100)
    job.tick(200)
    decisions = job.tick(5000)
    assert [type(item) for item in decisions] == [NotifyAborted, FailJob, NotifyAborted]
    assert decisions[2] == NotifyAborted(2, F.JOB_FAILED)


# -- publication fails ----------------------------------------------------------------------------


def test_after_a_failed_publication_no_file_is_deleted() -> None:
    job = Harness(tolerable_failures=1)
    job.tick(100)
    job.ack_all(1, 110)
    assert job.publish_failed(1, 120) == [
        NotifyAborted(1, F.FINALIZE_FAILURE),
        WakeAt(200),
    ]
    assert job.ack(1, A, 130) == []


def test_an_answer_to_no_publish_decision_is_our_bug() -> None:
    job = Harness()
    job.tick(100)
    for answer in (
        lambda: job.published(1, 110),
        lambda: job.published(9, 110),
        lambda: job.publish_failed(1, 110),
    ):
        with pytest.raises(InternalError, match="answer to no Publish"):
            answer()


# -- the job fails --------------------------------------------------------------------------------


def test_job_failure_aborts_all_but_what_is_being_published() -> None:
    job = Harness(max_concurrent=2)
    job.request(50, token="asked")
    job.tick(100)
    job.ack_all(1, 110)
    job.ack(2, A, 120)
    assert job.job_failed(130) == [
        RequestFailed("asked", F.JOB_FAILED),
        Discard(2, PLAIN, ("2/0.0",)),
        NotifyAborted(2, F.JOB_FAILED),
    ]
    with pytest.raises(InternalError, match="start of a job that runs"):
        job.start([A, B], 3, 140)
    assert job.published(1, 150) == []  # complete, but nobody is left to be told
    assert job.start([A, B], 3, 160) == [WakeAt(260)]
    assert job.ack(1, A, 170) == []


def test_publish_failure_after_the_job_failed_deletes_nothing_either() -> None:
    job = Harness()
    job.tick(100)
    job.ack_all(1, 110)
    job.job_failed(120)
    assert job.publish_failed(1, 130) == [NotifyAborted(1, F.FINALIZE_FAILURE)]
    assert job.ack(1, B, 140) == []


# -- stop and final -------------------------------------------------------------------------------


def test_stop_is_triggered_at_once_and_is_the_last_one() -> None:
    job = Harness()
    job.tick(100)
    job.request(105, token="waiting")
    assert job.request(110, token="stop", stop=True) == [
        RequestFailed("waiting", F.STOPPING),
        StartCheckpoint(2, 110, STOP),
    ]
    assert job.coordinator.phase is Phase.ENDING
    assert job.tick(300) == [WakeAt(1100)]
    assert job.request(310, token="late") == [RequestFailed("late", F.STOPPING)]
    assert job.complete(1, 320) == [NotifyComplete(1)]
    assert job.ack_all(2, 330) == [publish(2, 110, STOP)]
    assert job.published(2, 340) == [NotifyComplete(2), RequestDone("stop", 2)]
    assert job.coordinator.phase is Phase.ENDED
    assert job.tick(9999) == []
    assert job.request(9999, token="late") == [RequestFailed("late", F.STOPPING)]


@pytest.mark.parametrize("reason", [F.IO, F.CANCEL_MARKER])
def test_a_failed_stop_fails_the_job_whatever_is_tolerable(reason: CheckpointFailure) -> None:
    job = Harness(tolerable_failures=9)
    job.request(10, token="stop", stop=True)
    decisions = job.declined(1, A, reason, 20)
    assert decisions[:2] == [NotifyAborted(1, reason), RequestFailed("stop", reason)]
    assert isinstance(decisions[2], FailJob)
    assert job.coordinator.phase is Phase.IDLE


def test_a_final_checkpoint_may_fail_and_be_asked_for_again() -> None:
    job = Harness(tolerable_failures=1, interval_ms=None)
    assert job.request(10, token="final", final=True)[0] == StartCheckpoint(1, 10, PLAIN)
    assert job.declined(1, A, F.IO, 20) == [
        NotifyAborted(1, F.IO),
        RequestFailed("final", F.IO),
    ]
    assert job.coordinator.phase is Phase.RUNNING
    job.request(30, token="again", final=True)
    assert job.ack_all(2, 40) == [publish(2, 30, final=True)]
    assert job.published(2, 50) == [NotifyComplete(2), RequestDone("again", 2)]
    assert job.coordinator.phase is Phase.ENDED


def test_a_job_that_fails_after_its_last_checkpoint_can_start_again() -> None:
    """Its sinks may have failed to commit; the restored attempt commits."""
    job = Harness()
    job.request(10, token="stop", stop=True)
    job.complete(1, 20)
    assert job.job_failed(30) == []
    assert job.start([A, B], 2, 40) == [WakeAt(140)]


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("interval_ms", 9),
        ("timeout_ms", 0),
        ("min_pause_ms", -1),
        ("max_concurrent", 0),
        ("tolerable_failures", -1),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"setting=`{name}` value=`{value}`"):
        CheckpointRules(**({"interval_ms": 100} | {name: value}))


# -- backlogs -------------------------------------------------------------------------------------


def test_a_backlog_has_an_interval_of_its_own() -> None:
    job = Harness(interval_during_backlog_ms=500)
    assert job.backlog(10, True) == [WakeAt(500)]
    assert job.tick(499) == [WakeAt(500)]
    assert job.tick(500)[0] == StartCheckpoint(1, 500, PLAIN)
    assert job.complete(1, 510) == [NotifyComplete(1), WakeAt(1000)]
    assert job.backlog(520, False) == [WakeAt(600)]
    assert job.tick(600)[0] == StartCheckpoint(2, 600, PLAIN)


def test_without_checkpoints_in_a_backlog_one_follows_at_its_end() -> None:
    job = Harness(interval_during_backlog_ms=0)
    assert job.backlog(10, True) == []
    assert job.tick(100) == []
    assert job.tick(5_000) == []
    assert job.backlog(5_001, False)[0] == StartCheckpoint(1, 5_001, PLAIN)
    assert job.complete(1, 5_010) == [NotifyComplete(1), WakeAt(5_101)]


def test_a_short_backlog_delays_nothing() -> None:
    job = Harness(interval_during_backlog_ms=0)
    job.backlog(10, True)
    assert job.backlog(50, False) == [WakeAt(100)]


def test_a_backlog_stops_no_request_and_no_timeout() -> None:
    job = Harness(interval_during_backlog_ms=0)
    job.backlog(10, True)
    assert job.request(20, token="t") == [StartCheckpoint(1, 20, PLAIN), WakeAt(1020)]
    assert NotifyAborted(1, F.EXPIRED) in job.tick(1020)


def test_the_end_of_a_backlog_keeps_to_the_pause_and_to_the_number_at_once() -> None:
    job = Harness(interval_during_backlog_ms=0, min_pause_ms=300)
    job.backlog(0, True)
    job.request(1_000, token="t")
    assert job.backlog(1_100, False) == []  # one is under way
    assert job.complete(1, 1_200)[-1] == WakeAt(1_500)
    assert job.tick(1_500)[0] == StartCheckpoint(2, 1_500, PLAIN)


def test_a_backlog_lasts_beyond_a_failure_until_it_is_said_to_be_over() -> None:
    job = Harness(interval_during_backlog_ms=0)
    job.backlog(10, True)
    job.job_failed(20)
    assert job.start([A, B], 1, 30) == []
    assert job.backlog(40, False) == [WakeAt(130)]


def test_without_an_interval_of_its_own_a_backlog_changes_nothing() -> None:
    job = Harness()
    assert job.backlog(10, True) == []
    assert job.tick(100)[0] == StartCheckpoint(1, 100, PLAIN)


@pytest.mark.parametrize("interval_ms", [None, 501])
def test_checkpoints_are_not_more_frequent_in_a_backlog(interval_ms: int | None) -> None:
    with pytest.raises(OptionError, match="more frequent in a backlog"):
        CheckpointRules(interval_ms, interval_during_backlog_ms=500)
    CheckpointRules(interval_ms, interval_during_backlog_ms=0)


def test_a_backlog_may_end_while_the_job_is_down() -> None:
    job = Harness(interval_during_backlog_ms=0)
    job.backlog(10, True)
    job.job_failed(20)
    assert job.backlog(500, False) == []
    assert job.start([A, B], 1, 1_000) == [WakeAt(1_100)]


def test_the_acknowledgements_of_a_worker_are_one_event() -> None:
    job = Harness(max_concurrent=2)
    job.tick(100)
    assert job.acked(1, {A: "1/0.0", B: "1/1.0"}, 110)[0] == publish(1, 100)
    job.published(1, 110)
    job.tick(200)
    job.ack(2, A, 210)
    again = job.acked(2, {A: "again", B: "2/1.0"}, 220)
    assert again[0] == publish(2, 200), "the first acknowledgement of a subtask counts"


def test_late_acknowledgements_of_a_worker_are_discarded_together() -> None:
    job = Harness()
    job.tick(100)
    job.job_failed(150)
    assert job.acked(1, {A: "a", B: "b"}, 160) == [Discard(1, PLAIN, ("a", "b"))]
