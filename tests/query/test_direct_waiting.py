"""Direct reads that wait: for a subtask that is busy or dropped, for one slice, or for their client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headgate.errors import ExchangeError
from headgate.runtime.exchange.wire import HEADER_BYTES, FrameKind, Header, unpack_header
from headgate.runtime.listening import ListenerLimits
from headgate.runtime.reads.wire import (
    LIVE_NOW,
    READS_VERSION,
    ReadAnswer,
    ReadHello,
    ReadRequest,
    ReadWelcome,
    ticket_of,
)
from headgate.runtime.worker.direct_reads import DirectReads
from headgate.state.keyed.keys import encode_key
from headgate.state.queryable import NotKept
from headgate.tests.support.operators import ManualClock

TOKEN = "the token of the job"


class Subtask:
    """A subtask whose mails wait until `work`, unless it is `at_rest`; each value takes 3 ms to read."""

    at_rest = False

    def __init__(self, index: int, clock: ManualClock) -> None:
        self.env = SimpleNamespace(vertex=SimpleNamespace(id=0), index=index, options={})
        self.committed = 0
        self.awaits = SimpleNamespace(done=lambda: False)
        operator = SimpleNamespace(query_many=self._read)
        self.chain = SimpleNamespace(operators=[SimpleNamespace(name="step", operator=operator)])
        self.mails: list[Any] = []
        self.calls: list[list[Any]] = []
        self._clock = clock

    def _read(self, state: str, keys: Sequence[Any], checkpoint_id: int) -> Iterator[Any]:
        self.calls.append(list(keys))
        if checkpoint_id > 5:
            raise NotKept
        for key in keys:
            self._clock.advance(3)
            yield {"key": key, "at": checkpoint_id}

    def put_mail(self, mail: Any) -> None:
        self.mails.append(mail)

    def run_at_rest(self, work: Any) -> bool:
        if self.at_rest:
            work()
        return self.at_rest

    def work(self) -> None:
        mails, self.mails = self.mails, []
        for mail in mails:
            mail()


class End:
    """The worker's end of a connection."""

    def __init__(self) -> None:
        self.writable = True
        self.reads = True
        self.sent: list[tuple[FrameKind, bytes]] = []

    def write(self, parts: list[Any]) -> None:
        data = b"".join(parts)
        while data:
            header = unpack_header(data)
            end = HEADER_BYTES + header.length
            self.sent.append((header.kind, data[HEADER_BYTES:end]))
            data = data[end:]

    def establish(self, payload_bytes_max: int = 0) -> None:
        self.payload_bytes_max = payload_bytes_max

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    @property
    def answers(self) -> list[tuple[int, str, int]]:
        found = [msgspec.msgpack.decode(data, type=ReadAnswer) for _, data in self.sent[1:]]
        return [(answer.number, answer.outcome.value, answer.checkpoint) for answer in found]


class Regions(list[Any]):
    def of_attempt(self, attempt: int) -> list[Any]:
        return list(self) if attempt == 7 else []


class Worker:
    """A worker with two subtasks in two regions."""

    def __init__(self, *, started: bool = True, **limits: int) -> None:
        self.clock = ManualClock()
        self.subtasks = [Subtask(index, self.clock) for index in range(2)]
        self.regions: Any = Regions(
            SimpleNamespace(region=index, started=started, subtasks=[subtask])
            for index, subtask in enumerate(self.subtasks)
        )
        self.authenticated: list[Any] = []
        self.hub: Any = SimpleNamespace(
            limits=ListenerLimits(**limits), refused=0, authenticated=self.authenticated.append
        )
        self.reads = DirectReads("w", self.regions, self.hub, TOKEN, self.clock)

    def connect(self, end: Any, ticket: str = "", version: int = READS_VERSION) -> Any:
        hello = ReadHello(version, ticket or ticket_of(TOKEN), "w")
        return self.hub.admit_reader(msgspec.msgpack.encode(hello), end)

    def ask(self, client: Any, number: int, keys: int = 1, **more: Any) -> None:
        named = tuple(encode_key(f"{number}.{key}") for key in range(keys))
        asked = ReadRequest(number, 7, 0, 0, "step", "state", LIVE_NOW, named)
        payload = msgspec.msgpack.encode(msgspec.structs.replace(asked, **more))
        client.received(Header(len(payload), FrameKind.READ, 0, 0, 0, 0), payload)


async def turn() -> None:
    await asyncio.sleep(0)


def test_what_waits_is_read_together_and_a_barrier_waits_for_one_slice() -> None:
    """A slice is 5 ms, so two values of 3 ms are read in it; then what has come meanwhile is next."""

    async def main() -> None:
        worker, ends = Worker(), [End(), End()]
        clients = [worker.connect(end) for end in ends]
        subtask, barriers = worker.subtasks[0], list[int]()
        for number in range(4):
            worker.ask(clients[number % 2], number)
        assert len(subtask.mails) == 1
        subtask.put_mail(lambda: barriers.append(sum(len(end.answers) for end in ends)))
        subtask.work()
        assert subtask.calls == [["0.0", "1.0", "2.0", "3.0"]]
        assert barriers == [2]
        assert not subtask.mails  # the rest comes behind the next step of the subtask
        await turn()
        subtask.work()
        assert [end.answers for end in ends] == [
            [(0, "read", 0), (2, "read", 0)],
            [(1, "read", 0), (3, "read", 0)],
        ]
        worker.ask(clients[0], 4)
        subtask.work()
        assert ends[0].answers[-1] == (4, "read", 0)

    asyncio.run(main())


def test_a_subtask_that_waits_is_not_woken_up() -> None:
    """Requests that arrive in one turn of the event loop are read at its end, one slice per turn."""

    async def main() -> None:
        worker, ends = Worker(), [End(), End()]
        clients = [worker.connect(end) for end in ends]
        subtask = worker.subtasks[0]
        subtask.at_rest = True
        for number in range(3):
            worker.ask(clients[number % 2], number)
        assert not subtask.calls
        await turn()
        assert subtask.calls == [["0.0", "1.0", "2.0"]]
        assert [len(end.answers) for end in ends] == [1, 1]
        subtask.at_rest = False  # a record has arrived, and is processed before the next slice
        await turn()
        assert [len(end.answers) for end in ends] == [1, 1]
        subtask.work()
        assert [len(end.answers) for end in ends] == [2, 1]

    asyncio.run(main())


def test_requests_of_several_keys_are_not_divided() -> None:
    async def main() -> None:
        worker, end = Worker(), End()
        client = worker.connect(end)
        worker.ask(client, 1, keys=4)
        worker.ask(client, 2)
        worker.subtasks[0].work()
        assert end.answers == [(1, "read", 0)]
        await turn()
        worker.subtasks[0].work()
        assert end.answers == [(1, "read", 0), (2, "read", 0)]

    asyncio.run(main())


def test_levels() -> None:
    """A client that has seen a later checkpoint than the subtask gets that one, if it is here."""
    worker, end = Worker(), End()
    client = worker.connect(end)
    worker.ask(client, 1, checkpoint=0)
    worker.subtasks[0].work()
    worker.subtasks[0].committed = 3
    for number, seen in ((2, 0), (3, 2), (4, 4), (5, 6)):
        worker.ask(client, number, checkpoint=seen)
        worker.clock.advance(10)
        worker.subtasks[0].work()
        asyncio.run(turn())
    assert end.answers == [
        (1, "not_kept", 0),
        (2, "read", 3),
        (3, "read", 3),
        (4, "read", 4),
        (5, "not_kept", 0),
    ]


def test_subtasks_that_are_elsewhere_or_go() -> None:
    worker, end = Worker(), End()
    client = worker.connect(end)
    worker.ask(client, 1, attempt=6)
    worker.ask(client, 2, index=5)
    worker.ask(client, 3)
    worker.ask(client, 4, index=1)
    worker.reads.refuse_waiting([1])
    assert end.answers == [(number, "elsewhere", 0) for number in (1, 2, 4)]
    worker.subtasks[0].work()
    assert end.answers[-1] == (3, "read", 0)
    worker.ask(client, 5)
    worker.reads.refuse_waiting(None)
    worker.subtasks[0].work()
    assert end.answers[4:] == [(5, "elsewhere", 0)]
    worker.subtasks[0].awaits = SimpleNamespace(done=lambda: True)
    worker.ask(client, 6)
    starting = Worker(started=False)
    other = End()
    starting.ask(starting.connect(other), 7)
    assert end.answers[-1] == (6, "elsewhere", 0)
    assert other.answers == [(7, "starting", 0)]


def test_clients_that_do_not_read_or_wait_too_long() -> None:
    worker, slow, late = Worker(), End(), End()
    worker.ask(worker.connect(slow), 1)
    worker.ask(worker.connect(late), 2)
    slow.writable = False
    worker.clock.advance(6_000)
    worker.subtasks[0].work()
    assert worker.subtasks[0].calls == []
    assert (slow.answers, late.answers) == ([(1, "busy", 0)], [(2, "busy", 0)])


def test_unanswered_keys_are_bounded() -> None:
    async def main() -> None:
        worker, end = Worker(unanswered_keys_max=4), End()
        client = worker.connect(end)
        for number in range(3):
            worker.ask(client, number)
        assert end.reads
        worker.ask(client, 3)
        assert not end.reads
        worker.subtasks[0].work()
        assert len(end.answers) == 2
        assert end.reads
        with pytest.raises(ExchangeError, match="1 to 250 keys"):
            worker.ask(client, 4, keys=251)

    asyncio.run(main())


def test_who_is_welcome() -> None:
    worker = Worker(read_clients_max=1, read_request_max_bytes=5_000)
    refusals = []
    for ticket, version in (("wrong", READS_VERSION), (TOKEN, READS_VERSION), ("", 9)):
        end = End()
        assert worker.connect(end, ticket, version) is None
        refusals.append(msgspec.msgpack.decode(end.sent[0][1], type=ReadWelcome).refusal)
    assert refusals == ["wrong ticket", "wrong ticket", "other version version=`9` ours=`3`"]
    first, second = End(), End()
    client = worker.connect(first)
    assert worker.connect(second) is None
    assert msgspec.msgpack.decode(second.sent[0][1], type=ReadWelcome).refusal == "too many clients"
    assert (worker.authenticated, first.payload_bytes_max) == ([first], 5_000)
    client.closed()
    assert worker.connect(second) is not None
    assert worker.hub.refused == 4
