"""Queries that wait: for a subtask that is busy or dropped, or answers too late; for a lost worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from headgate.operators.selections import Selection
from headgate.runtime.control.messages import (
    AskState,
    EndScan,
    ScanState,
    StateAnswer,
    StateOutcome,
)
from headgate.runtime.coordinator.pending_queries import PendingQueries
from headgate.runtime.worker.queries import StateQueries
from headgate.state.keyed.keys import encode_key
from headgate.state.queryable import KeyScan
from headgate.tests.support.operators import ManualClock


class Subtask:
    """A subtask whose mails wait until `work`."""

    def __init__(self, index: int, values: dict[str, Any]) -> None:
        self.env = SimpleNamespace(vertex=SimpleNamespace(id=0), index=index)
        operator = SimpleNamespace(
            query_many=lambda state, keys, checkpoint_id: (values[key] for key in keys)
        )
        self.chain = SimpleNamespace(operators=[SimpleNamespace(name="step", operator=operator)])
        self._mails: list[Any] = []

    def put_mail(self, mail: Any) -> None:
        self._mails.append(mail)

    def work(self) -> None:
        for mail in self._mails:
            mail()
        self._mails.clear()


class Regions(list[Any]):
    """The deployments of attempt 7."""

    def of_attempt(self, attempt: int) -> list[Any]:
        return list(self) if attempt == 7 else []


class Worker:
    """Two subtasks in two regions, and what is sent to the coordinator."""

    def __init__(self, *, started: bool = True) -> None:
        self.clock = ManualClock()
        self.sent: list[StateAnswer] = []
        self.subtasks = [Subtask(index, {"a": 1, "odd": object()}) for index in range(2)]
        regions: Any = Regions(
            SimpleNamespace(region=index, started=started, subtasks=[subtask])
            for index, subtask in enumerate(self.subtasks)
        )
        send: Any = self.sent.append
        self.queries = StateQueries(regions, send, self.clock)

    def ask(self, query: int, key: str = "a", *, index: int = 0, attempt: int = 7) -> None:
        self.queries.ask(
            AskState(
                attempt=attempt,
                query=query,
                vertex=0,
                index=index,
                operator="step",
                state="state",
                keys=(encode_key(key),),
                bytes_max=100,
                waiting_max=2,
                timeout_ms=1_000,
            )
        )

    def scan(self, query: int, scan: int, *, rows: int = 2, begins: bool = False) -> None:
        self.queries.ask(
            ScanState(
                attempt=7,
                query=query,
                vertex=0,
                index=0,
                operator="step",
                state="state",
                scan=scan,
                begins=begins,
                rows_max=rows,
                keys=Selection(prefix="k").encode(),
                bytes_max=100,
                waiting_max=9,
                timeout_ms=1_000,
                slice_ms=5,
                idle_ms=100,
            )
        )
        self.subtasks[0].work()

    @property
    def outcomes(self) -> list[tuple[int, str]]:
        return [(answer.query, answer.outcome.value) for answer in self.sent]


def test_answers_come_between_batches() -> None:
    worker = Worker()
    worker.ask(1)
    worker.ask(2, "odd")
    assert worker.sent == []
    worker.subtasks[0].work()
    assert worker.outcomes == [(1, "read"), (2, "failed")]
    assert worker.sent[0].values == (b"1",)
    assert "no form in JSON" in worker.sent[1].text


def test_queries_of_a_state_are_read_together() -> None:
    worker = Worker()
    read: list[list[Any]] = []

    def query_many(state: str, keys: list[Any], checkpoint_id: int) -> list[Any]:
        read.append(keys)
        return [{"a": 1, "b": 2}[key] for key in keys]

    worker.subtasks[0].chain.operators[0].operator.query_many = query_many
    worker.ask(1, "a")
    worker.ask(2, "b")
    worker.subtasks[0].work()
    assert (read, worker.outcomes) == ([["a", "b"]], [(1, "read"), (2, "read")])
    assert [answer.values for answer in worker.sent] == [(b"1",), (b"2",)]
    worker.ask(3, "a")
    worker.ask(4, "missing")
    worker.subtasks[0].work()
    assert worker.outcomes[2:] == [(3, "read"), (4, "failed")]


def test_a_scan_is_read_in_slices_and_never_begun_twice() -> None:
    async def script() -> None:
        worker = Worker()
        ended: list[int] = []
        operator = worker.subtasks[0].chain.operators[0].operator
        operator.scan = lambda state, checkpoint: KeyScan(
            iter([["k1", "x"], ["k2", "k3", "y"]]), lambda: ended.append(1)
        )
        operator.query_many = lambda state, keys, checkpoint_id: (int(key[1:]) for key in keys)
        worker.scan(1, 5)
        assert worker.outcomes == [(1, "scan_over")]
        worker.scan(2, 5, rows=0, begins=True)
        worker.scan(3, 5)
        worker.scan(4, 5)
        found = [(answer.values, answer.more) for answer in worker.sent[1:]]
        assert found == [((), True), ((b"1", b"2"), True), ((b"3",), False)]
        assert ended == [1]
        worker.scan(5, 6, begins=True)
        worker.queries.end_scan(EndScan(scan=6))
        worker.scan(6, 6)
        assert (worker.outcomes[-1], ended) == ((6, "scan_over"), [1, 1])
        worker.scan(7, 7, begins=True)
        await asyncio.sleep(0.3)  # longer than a scan may be idle
        worker.scan(8, 7)
        assert (worker.outcomes[-1], ended) == ((8, "scan_over"), [1, 1, 1])
        worker.scan(9, 8, begins=True)
        worker.queries.refuse_waiting([0])
        assert ended == [1, 1, 1, 1]

    asyncio.run(script())


def test_an_error_of_a_query_is_its_answer() -> None:
    worker = Worker()
    worker.ask(1, "missing")
    worker.subtasks[0].work()
    assert (worker.outcomes, worker.sent[0].text) == ([(1, "failed")], "KeyError: 'missing'")


def test_a_busy_subtask_refuses_more() -> None:
    worker = Worker()
    for query in (1, 2, 3):
        worker.ask(query)
    worker.ask(4, index=1)
    assert worker.outcomes == [(3, "busy")]
    worker.subtasks[0].work()
    worker.ask(5)
    worker.subtasks[0].work()
    assert worker.outcomes[1:] == [(1, "read"), (2, "read"), (5, "read")]


def test_nobody_gets_an_answer_that_comes_too_late() -> None:
    worker = Worker()
    worker.ask(1)
    worker.clock.advance(1_000)
    worker.ask(2)
    worker.subtasks[0].work()
    assert worker.outcomes == [(2, "read")]


def test_queries_of_other_attempts_are_refused() -> None:
    worker = Worker()
    worker.ask(1, attempt=6)
    worker.ask(2, index=9)
    assert worker.outcomes == [(1, "elsewhere"), (2, "elsewhere")]
    starting = Worker(started=False)
    starting.ask(1)
    assert starting.outcomes == [(1, "starting")]


def test_queries_of_dropped_subtasks_are_refused_once() -> None:
    worker = Worker()
    worker.ask(1)
    worker.ask(2, index=1)
    worker.queries.refuse_waiting([1])
    assert worker.outcomes == [(2, "elsewhere")]
    worker.subtasks[1].work()  # a mail that is left does nothing
    worker.queries.refuse_waiting(None)
    assert worker.outcomes == [(2, "elsewhere"), (1, "elsewhere")]
    worker.subtasks[0].work()
    assert len(worker.sent) == 2


def test_a_late_answer_to_the_coordinator_before_is_for_nobody() -> None:
    """A worker that another coordinator adopts has queries of the one before in its mailboxes."""

    async def main() -> None:
        before, after = PendingQueries(), PendingQueries()
        number, _ = before.add("a")
        _, answer = after.add("a")
        after.answered(StateAnswer(query=number, outcome=StateOutcome.READ, values=(b"1",)))
        assert not answer.done()

    asyncio.run(main())


def test_queries_end_with_their_worker() -> None:
    async def main() -> None:
        pending = PendingQueries()
        (one, first), (two, second), (three, third) = (pending.add(w) for w in ("a", "b", "b"))
        pending.answered(StateAnswer(query=two, outcome=StateOutcome.READ, values=(b"1",)))
        pending.lost("b")
        assert (await second).outcome is StateOutcome.READ
        assert (await third).outcome is StateOutcome.ELSEWHERE
        assert not first.done()
        pending.lost()
        assert (await first).outcome is StateOutcome.ELSEWHERE
        for number in (one, two, three):
            pending.drop(number)
        assert len(pending) == 0
        pending.answered(StateAnswer(query=one, outcome=StateOutcome.READ))  # nobody waits

    asyncio.run(main())
