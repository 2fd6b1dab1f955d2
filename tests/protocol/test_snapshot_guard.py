"""May a snapshot be taken: order, and abort notices that overtake their barrier."""

from __future__ import annotations

from headgate.runtime.protocol.barriers.handler import (
    ABORTED_IDS_MAX,
    SnapshotGuard,
    SnapshotVerdict,
)

TAKE, CANCEL, IGNORE = SnapshotVerdict.TAKE, SnapshotVerdict.CANCEL, SnapshotVerdict.IGNORE


def test_each_checkpoint_is_taken_once_and_in_order() -> None:
    guard = SnapshotGuard()
    assert [guard.on_trigger(id_) for id_ in (1, 1, 3, 2, 4)] == [TAKE, IGNORE, TAKE, IGNORE, TAKE]


def test_an_abort_notice_ahead_of_the_barrier_cancels() -> None:
    guard = SnapshotGuard()
    guard.on_abort_notice(2)
    assert [guard.on_trigger(id_) for id_ in (1, 2, 3)] == [TAKE, CANCEL, TAKE]


def test_an_abort_notice_behind_the_snapshot_changes_nothing() -> None:
    guard = SnapshotGuard()
    guard.on_trigger(1)
    guard.on_abort_notice(1)
    assert guard.on_trigger(2) is TAKE


def test_what_was_declined_is_never_taken_nor_anything_older() -> None:
    guard = SnapshotGuard()
    guard.on_declined(2)
    guard.on_declined(1)
    assert [guard.on_trigger(id_) for id_ in (1, 2, 3)] == [IGNORE, IGNORE, TAKE]


def test_notices_are_bounded_and_the_oldest_is_forgotten() -> None:
    guard = SnapshotGuard()
    for id_ in range(1, ABORTED_IDS_MAX + 2):
        guard.on_abort_notice(id_)
    assert [guard.on_trigger(id_) for id_ in (1, 2)] == [TAKE, CANCEL]
