"""The history of failures: the first, those with it, what followed, and how long it took."""

from __future__ import annotations

from headgate.runtime.protocol.failure_history import (
    CONCURRENT_MAX,
    FailureEntry,
    FailureHistory,
)


def entry(time_ms: int, text: str = "boom") -> FailureEntry:
    return FailureEntry(time_ms, "user_code", "map (0)", "worker-1", text)


def test_a_failure_and_the_recovery_from_it() -> None:
    history = FailureHistory(3)
    assert history.recovering_since_ms is None
    history.failed(entry(1_000), attempt=1)
    assert history.recovering_since_ms == 1_000
    history.cancelled(1_200, [entry(1_010, "me too")])
    history.decided("restart 1 in 3s")
    history.waited(4_200)
    history.deployed(5_000, "checkpoint 7")
    history.running(5_050)
    assert history.recovering_since_ms is None
    (record,) = history.records
    assert (record.cancelling_ms, record.waiting_ms, record.deploying_ms) == (200, 3_000, 800)
    assert record.down_ms == 4_050
    assert record.restored == "checkpoint 7"
    assert [also.text for also in record.concurrent] == ["me too"]
    assert record.as_json()["where"] == "map (0)"


def test_a_start_without_a_failure_is_no_story() -> None:
    history = FailureHistory(3)
    history.deployed(10, "checkpoint 1")
    history.running(20)
    assert history.records == []
    history.failed(entry(100), attempt=1)
    history.running(300)
    history.deployed(400, "later")
    assert history.records[0].down_ms == 200
    assert history.records[0].restored == ""


def test_a_restart_that_fails_is_a_story_of_its_own() -> None:
    history = FailureHistory(3)
    history.failed(entry(100), attempt=1)
    history.cancelled(150)
    history.failed(entry(200, "again"), attempt=2)
    history.running(900)
    first, second = history.records
    assert (first.cancelling_ms, first.down_ms) == (50, None)
    assert (second.root.text, second.down_ms) == ("again", 700)


def test_the_history_is_bounded_both_ways() -> None:
    history = FailureHistory(2)
    for number in range(5):
        history.failed(entry(number), attempt=number)
        history.cancelled(number, [entry(number)] * (CONCURRENT_MAX + 4))
    assert [record.attempt for record in history.records] == [3, 4]
    assert len(history.records[0].concurrent) == CONCURRENT_MAX
    assert history.records[0].concurrent_dropped == 4
