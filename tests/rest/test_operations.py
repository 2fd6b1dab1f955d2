"""The registry of operations, the checks at the gate, and the queue of events: without I/O."""

from __future__ import annotations

import asyncio

import pytest

from headgate.errors import InternalError, JobError, JobNotReady, StorageError, UsageError
from headgate.runtime.control.job_client import EventQueue, PublishedEvent
from headgate.runtime.rest.answers import (
    RequestProblem,
    error_of,
    problem,
    problem_of,
)
from headgate.runtime.rest.evidence import decode_event, encode_event
from headgate.runtime.rest.requests import Operations, allowed_names, check_names, check_token


def status_of(error: pytest.ExceptionInfo[RequestProblem]) -> int:
    return error.value.problem.status


def test_an_operation_begins_once() -> None:
    operations = Operations(3)
    first, new = operations.begin("a", "stop", {"drain": True}, 1)
    again, new_again = operations.begin("a", "stop", {"drain": True}, 2)
    assert (new, new_again) == (True, False)
    assert again == first == operations.find("a")
    operations.complete("a", {"checkpoint": 3}, 5)
    done, new = operations.begin("a", "stop", {"drain": True}, 6)
    assert not new
    assert (done.status, done.result, done.began_ms, done.ended_ms) == (
        "COMPLETED", {"checkpoint": 3}, 1, 5,
    )  # fmt: skip


def test_an_operation_that_the_job_was_not_ready_for_may_be_sent_again() -> None:
    operations = Operations(3)
    operations.begin("a", "stop", {}, 1)
    operations.fail("a", problem_of(JobNotReady("the job is starting")), 2)
    assert operations.find("a").status == "FAILED"
    again, new = operations.begin("a", "stop", {}, 3)
    assert (new, again.status, again.began_ms) == (True, "IN_PROGRESS", 3)
    operations.fail("a", problem_of(JobError("no")), 4)
    _, new = operations.begin("a", "stop", {}, 5)
    assert not new


@pytest.mark.parametrize(
    ("verb", "arguments"), [("cancel", {"drain": True}), ("stop", {"drain": False}), ("stop", {})]
)
def test_an_id_is_that_of_one_operation(verb: str, arguments: dict[str, object]) -> None:
    operations = Operations(3)
    operations.begin("a", "stop", {"drain": True}, 1)
    with pytest.raises(RequestProblem) as refused:
        operations.begin("a", verb, arguments, 2)
    assert status_of(refused) == 409


def test_the_oldest_that_has_ended_is_forgotten_and_none_that_goes_on() -> None:
    operations = Operations(3)
    for name in "abc":
        operations.begin(name, "checkpoint", {}, 1)
    with pytest.raises(RequestProblem) as full:
        operations.begin("d", "checkpoint", {}, 2)
    assert status_of(full) == 503
    operations.fail("c", problem(409, "no"), 3)
    operations.complete("b", {}, 4)
    operations.begin("d", "checkpoint", {}, 5)
    with pytest.raises(RequestProblem) as gone:
        operations.find("b")
    assert status_of(gone) == 404
    assert operations.find("c").problem == problem(409, "no")


HOSTS = ["127.0.0.1:8081", "localhost", "LOCALHOST:1", "[::1]:8081", "10.1.2.3", "jobs.example:80"]


@pytest.mark.parametrize("host", HOSTS)
def test_names_that_a_request_may_be_for(host: str) -> None:
    names = allowed_names("jobs.example, other.example")
    check_names(host, None, names)
    check_names(host, f"http://{host}", names)


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "127.0.0.1.evil.example", "localhost.evil", "[::1", "a@b:80"]
)
def test_a_rebound_name_is_refused(host: str | None) -> None:
    with pytest.raises(RequestProblem) as refused:
        check_names(host, None, allowed_names("jobs.example"))
    assert status_of(refused) == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:8082", ""])
def test_pages_of_other_sites_are_refused(origin: str) -> None:
    with pytest.raises(RequestProblem) as refused:
        check_names("127.0.0.1:8081", origin, frozenset())
    assert status_of(refused) == 403


@pytest.mark.parametrize(
    "shown",
    [None, "", "Bearer", "Bearer ", "Bearer secre", "Bearer sécret", "Basic secret", "secret"],
)
def test_a_wrong_token_is_refused(shown: str | None) -> None:
    with pytest.raises(RequestProblem) as refused:
        check_token(shown, "secret")
    assert status_of(refused) == 401


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    check_token("bearer secret", "secret")
    assert compared == [(b"secret", b"secret")]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("no", where="f.py:1", fix="do that"), 400),
        (JobError("no"), 409),
        (StorageError("no", where="s3://b"), 503),
        (InternalError("no"), 500),
    ],
)
def test_an_error_travels_as_a_problem_and_back(error: JobError, status: int) -> None:
    found = problem_of(error)
    assert (found.status, found.detail) == (status, str(error))
    back = error_of(found)
    assert type(back) is type(error)
    assert str(back) == str(error)


def event(number: int) -> PublishedEvent:
    return PublishedEvent(kind="status", text=str(number))


def test_a_client_that_is_too_slow_is_told_so_and_gets_no_more() -> None:
    async def main() -> None:
        queue = EventQueue(2)
        for number in range(5):  # what is replayed does not count
            queue.put(event(number)) if number < 2 else None
        queue.replayed()
        for number in range(10):
            queue.put(event(number))
        last = await queue.next()
        assert last is not None
        assert last.kind == "overrun"
        assert "5 events were dropped" in last.text
        assert await queue.next() is None

    asyncio.run(main())


def test_what_waits_when_the_job_ends_is_still_handed_out() -> None:
    async def main() -> None:
        queue = EventQueue(5)
        queue.put(event(1))
        queue.close()
        queue.put(event(2))
        assert await queue.next() == event(1)
        assert await queue.next() is None

    asyncio.run(main())


def test_an_event_travels_and_comes_back() -> None:
    there = PublishedEvent(
        kind="ended", text="over\nand out", body=b'{"status":\n"FAILED"}', at_ms=17
    )
    sent = encode_event(there)
    assert (
        sent
        == b'event: ended\ndata: {"text":"over\\nand out","body":{"status":"FAILED"},"at_ms":17}\n\n'
    )
    kind, data = (line.partition(": ")[2] for line in sent.decode().splitlines()[:2])
    back = decode_event(kind, data)
    assert back == PublishedEvent(
        kind="ended", text="over\nand out", body=b'{"status":"FAILED"}', at_ms=17
    )
    with pytest.raises(JobError, match="no event of a REST API"):
        decode_event("ended", "[]")
