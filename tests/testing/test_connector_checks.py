"""Goal: the conformance kit finds connectors that break their promises, and passes those that do not.

Method: a connector over a directory has a planted mistake for each check.
"""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import SkipTest

import pytest

from headgate.errors import UsageError
from headgate.testing.connectors import (
    Check,
    Feature,
    SinkCase,
    SourceCase,
    acknowledging_checks,
    connector_tests,
    reading,
    sink_checks,
    source_checks,
)
from headgate.tests.testing.basket import BasketCase
from headgate.tests.testing.counter import CounterSinkCase, CounterSourceCase
from headgate.tests.testing.shelf import PlainShelfCase, ShelfSinkCase, ShelfSourceCase
from headgate.tests.testing.ticker import TickerCase

SOURCE_BUGS = {
    "resumes_behind_every_record": ["one record behind"],
    "an_empty_place_ends_at_once": ["a record from nowhere"],
    "splits_move_to_other_subtasks": ["belongs to subtask 0"],
    "waits_for_records": ["ends when nothing is there"],
    "bad_records_follow_their_policy": ["drops the neighbour"],
    "tells_how_much_is_left": ["one too many left"],
    "confirms_completed_checkpoints_only": ["confirms at the barrier", "confirms what it has read"],
    "nothing_is_lost_after_any_crash": [
        "acknowledges at the barrier",
        "acknowledges at the end",
        "takes an abort for a completion",
        "acknowledges nothing",
    ],
    "a_killed_process_loses_nothing": [
        "acknowledges when it takes",
        "acknowledges what it has taken",
    ],
    "holds_a_bounded_number_of_messages": ["takes any number"],
    "messages_outlive_their_server": ["ends when the server is away"],
    "messages_outlive_broken_connections": [
        "acknowledges when it takes",
        "a raw error",
    ],
    "reads_what_comes_once_in_order": ["says that it replays", "each twice"],
    "a_restart_reads_what_comes_later": ["one record behind", "forgets its split"],
    "reads_on_when_the_server_is_back": ["ends when the server is away", "a raw error"],
    "reads_on_when_connections_break": [
        "takes a part for all",
        "one record behind",
        "a raw error",
    ],
    "a_server_may_die": ["ends when the server is away"],
    "a_connection_may_break": [
        "takes a part for all",
        "begins again",
        "a raw error",
    ],
    "says_what_is_wrong": ["takes any password", "a raw error", "shows the password"],
    "its_connection_can_be_checked": [
        "takes any password",
        "a raw error",
        "shows the password",
        "shows the password at the check",
        "says nothing",
        "confirms at the check",
    ],
    "tells_no_secrets": ["shows the password"],
}
SINK_BUGS = {
    "once_without_a_crash": ["forgets the last record", "one file for all"],
    "once_after_any_crash": ["visible at once", "copies again", "writes at the end"],
    "once_after_any_two_crashes": ["commits the newest only"],
    "committed_by_two_at_once": ["looks before it copies"],
    "several_checkpoints_under_way": ["commits the newest only"],
    "committables_move_to_other_subtasks": ["commits its own only"],
    "a_process_may_be_killed": ["keeps drafts in memory"],
    "nothing_is_left_open": ["leaves drafts"],
    "a_rescale_leaves_nothing_open": [
        "leaves drafts",
        "leaves drafts of others",
        "takes drafts for dead that are not",
        "commits its own only",
    ],
    "a_savepoint_outlives_a_failure": [
        "takes what is gone for committed",
        "commits once in a run",
        "knows no way out",
    ],
    "a_savepoint_is_committed_once": ["copies again"],
    "once_if_the_server_dies": ["does not see that the server is away"],
    "once_if_a_connection_breaks": ["sends it again", "takes silence for success"],
    "nothing_is_lost_if_the_server_dies": ["does not see that the server is away"],
    "nothing_is_lost_if_a_connection_breaks": ["takes silence for success"],
    "nothing_is_lost": ["writes at the end"],
    "says_what_is_wrong": ["takes any password", "a raw error", "shows the password"],
    "its_connection_can_be_checked": [
        "takes any password",
        "a raw error",
        "shows the password",
        "shows the password at the check",
        "says nothing",
        "writes at the check",
        "leaves a draft at the check",
    ],
    "tells_no_secrets": ["shows the password"],
}


def bugs(checks: list[Any], planted: dict[str, list[str]]) -> list[Any]:
    return [
        pytest.param(check, bug, id=f"{check.name}-{bug}")
        for check in checks
        for bug in planted[check.name]
    ]


def source_case(check: Check[Any], bug: str = "") -> SourceCase:
    """The connector of a check: one with a network if connections are to break."""
    if Feature.ACKNOWLEDGES in check.needs:
        return BasketCase(bug)
    if Feature.UNREPEATED in check.needs:
        return TickerCase(bug)
    return CounterSourceCase(bug) if Feature.CUTS in check.needs else ShelfSourceCase(bug)


def sink_case(check: Check[Any], bug: str = "") -> SinkCase:
    if Feature.AT_LEAST_ONCE in check.unless:
        return PlainShelfCase(bug)
    return CounterSinkCase(bug) if Feature.CUTS in check.needs else ShelfSinkCase(bug)


@pytest.mark.parametrize("check", source_checks(), ids=lambda check: check.name)
def test_a_good_source_passes(check: Check[Any]) -> None:
    asyncio.run(check.run(source_case(check)))


@pytest.mark.parametrize(
    "check",
    [each for each in source_checks() if each.applies_to(BasketCase)],
    ids=lambda check: check.name,
)
def test_a_good_source_that_acknowledges_passes(check: Check[Any]) -> None:
    asyncio.run(check.run(BasketCase()))


@pytest.mark.parametrize(
    "check",
    [each for each in source_checks() if each.applies_to(TickerCase)],
    ids=lambda check: check.name,
)
def test_a_good_source_of_records_that_come_once_passes(check: Check[Any]) -> None:
    asyncio.run(check.run(TickerCase()))


@pytest.mark.parametrize("bug", ["acknowledges at the barrier", "acknowledges what it has taken"])
def test_an_early_acknowledgement_is_found(bug: str) -> None:
    (check,) = [e for e in source_checks() if e.name == "confirms_completed_checkpoints_only"]
    with pytest.raises(AssertionError, match="confirmed"):
        asyncio.run(check.run(BasketCase(bug)))


@pytest.mark.parametrize("check", sink_checks(), ids=lambda check: check.name)
def test_a_good_sink_passes(check: Check[Any]) -> None:
    asyncio.run(check.run(sink_case(check)))


@pytest.mark.parametrize(("check", "bug"), bugs(source_checks(), SOURCE_BUGS))
def test_a_mistake_of_a_source_is_found(
    check: Check[Any], bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Feature.ACKNOWLEDGES in check.needs:  # a message that is lost does not come, ever
        monkeypatch.setattr(reading, "CALL_S_MAX", 5.0)
        monkeypatch.setattr(acknowledging_checks, "LOOKS_MAX", 50)
    with pytest.raises(AssertionError, match=r".+"):
        asyncio.run(check.run(source_case(check, bug)))


@pytest.mark.parametrize(("check", "bug"), bugs(sink_checks(), SINK_BUGS))
def test_a_mistake_of_a_sink_is_found(check: Check[Any], bug: str) -> None:
    with pytest.raises(AssertionError, match=r".+"):
        asyncio.run(check.run(sink_case(check, bug)))


def test_they_are_functions_of_one_test_each() -> None:
    made = connector_tests(ShelfSinkCase)
    assert "test_sink_once_after_any_crash" in made
    assert "test_sink_once_after_any_two_crashes" not in made
    assert "test_sink_once_after_any_two_crashes" in connector_tests(ShelfSinkCase, thorough=True)
    assert (made["test_sink_tells_no_secrets"].__doc__ or "").startswith("Neither `repr` nor")
    made["test_sink_tells_no_secrets"]()


def test_what_a_connector_cannot_do_is_skipped() -> None:
    class Less(ShelfSourceCase):
        features = frozenset({Feature.LAG})

    with pytest.raises(SkipTest, match="waits for records"):
        connector_tests(Less)["test_source_waits_for_records"]()


def test_only_cases_have_tests() -> None:
    with pytest.raises(UsageError, match="takes a case of a source or of a sink"):
        connector_tests(lambda: ShelfSinkCase())
