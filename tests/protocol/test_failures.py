"""Failure reasons: which count, that they can travel, and how errors are classified."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from headgate import errors
from headgate.runtime.protocol.failures import CheckpointFailure, FailureKind
from headgate.runtime.protocol.ids import SubtaskId


def test_exactly_these_reasons_count_against_tolerable_failures() -> None:
    counting = {reason.value for reason in CheckpointFailure if reason.counts}
    assert counting == {"expired", "io", "async_exception", "finalize_failure"}


@pytest.mark.parametrize("reason", [*CheckpointFailure, *FailureKind])
def test_each_reason_has_a_sentence_and_travels(reason: CheckpointFailure | FailureKind) -> None:
    assert reason.sentence
    assert not reason.sentence.endswith(".")
    assert pickle.loads(pickle.dumps(reason)) is reason
    encoded = msgspec.msgpack.encode(reason)
    assert msgspec.msgpack.decode(encoded, type=type(reason)) is reason
    assert str(reason) == reason.value


@pytest.mark.parametrize(
    ("error", "kind", "recoverable"),
    [
        (errors.UserCodeError("x"), FailureKind.USER_CODE, True),
        (errors.BadRecordError("x"), FailureKind.BAD_RECORD, False),
        (errors.DataError("x"), FailureKind.DATA, False),
        (errors.ClusterError("x"), FailureKind.CLUSTER, True),
        (errors.JobError("x"), FailureKind.JOB, True),
        (errors.ExchangeError("x"), FailureKind.EXCHANGE, True),
        (errors.FencedError("x"), FailureKind.SUPERSEDED, False),
        (errors.StorageError("x"), FailureKind.STORAGE, True),
        (errors.StateError("x"), FailureKind.STATE, False),
        (errors.PlanError("x"), FailureKind.USAGE, False),
        (errors.InternalError("x"), FailureKind.INTERNAL, True),
    ],
)
def test_errors_are_classified(error: Exception, kind: FailureKind, recoverable: bool) -> None:
    assert FailureKind.of(error) is kind
    assert kind.recoverable is recoverable


def test_subtasks_sort_by_vertex_then_index() -> None:
    subtasks = [SubtaskId(1, 0), SubtaskId(0, 2), SubtaskId(0, 1)]
    assert [str(subtask) for subtask in sorted(subtasks)] == ["0.1", "0.2", "1.0"]
