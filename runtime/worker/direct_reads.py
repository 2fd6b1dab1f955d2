"""Direct reads of state at the worker that has it, for clients at its data port.

Requests wait per subtask, and are read between two batches: all that have come meanwhile in one turn, as
most of the cost of a turn does not depend on the number of keys. A subtask that processes reads them as a
mail. One that waits is not woken up: they are read at the end of the turn of the event loop in which they
arrived. A turn takes one slice of time at most, and one request more; batches and barriers come before the
next one.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

import msgspec

from ...errors import ExchangeError
from ...operators.base import Operator
from ...operators.clock import Clock
from ...operators.queried_columns import QueriedColumns
from ...operators.queries import TooLarge, to_json_array
from ...state.keyed.keys import ClientKeys, EncodedKeys, joined_keys, key_count
from ...state.queryable import NotKept
from ..control.messages import StateOutcome
from ..exchange.hub import ExchangeHub
from ..exchange.links import AcceptingEnd, FrameConnection
from ..exchange.wire import FrameKind, Header, Parts, frame
from ..options.network import QUERY_ANSWER_MAX, QUERY_SLICE, QUERY_TIMEOUT
from ..options.registry import Options
from ..reads.wire import (
    KEYS_MAX,
    LIVE_NOW,
    READS_VERSION,
    ReadAnswer,
    ReadHello,
    ReadRequest,
    ReadWelcome,
    ticket_of,
)
from ..task.subtask import Subtask
from .deployment import RunningRegions

_HELLO: Final = msgspec.msgpack.Decoder(ReadHello)
_REQUEST: Final = msgspec.msgpack.Decoder(ReadRequest)
_encode: Final = msgspec.msgpack.Encoder().encode
_KEYS_AT_ONCE: Final = 500
"""About the most keys that are looked up together."""
_COLUMNS_FROM: Final = 8
"""With fewer keys per request, their values are written one by one."""
_Place: TypeAlias = tuple[int, int, int]
"""Attempt, vertex and index of a subtask."""
_Alike: TypeAlias = tuple[str, str, int]
"""The step, the state and the level of requests that can be read together. The level is `LIVE_NOW`, 0 for
the newest checkpoint that the subtask knows to be complete, or the number of a later one."""


class _Client:
    """A client that has shown its ticket; a `ReadClient`."""

    def __init__(self, end: FrameConnection, reads: DirectReads, unanswered_max: int) -> None:
        self.end = end
        self._reads = reads
        self._unanswered_max = unanswered_max
        self._unanswered = 0
        self._paused = False

    def received(self, header: Header, payload: bytes | bytearray) -> None:
        """Take a request; see `ReadClient`."""
        if header.kind is not FrameKind.READ:
            raise ExchangeError(
                f"a client that reads state sent another frame kind=`{header.kind}`"
            )
        request = _REQUEST.decode(payload)
        keys = key_count(request.keys)
        if not 0 < keys <= KEYS_MAX:
            raise ExchangeError(f"a request has 1 to {KEYS_MAX} keys keys=`{keys}`")
        self._unanswered += keys
        if self._unanswered >= self._unanswered_max and not self._paused:
            self._paused = True
            self.end.pause_reading()
        self._reads.take(self, request, keys)

    def answered(self, keys: int) -> None:
        """Note that this many keys wait no more."""
        self._unanswered -= keys
        if self._paused and self._unanswered <= self._unanswered_max // 2:
            self._paused = False
            self.end.resume_reading()

    def closed(self) -> None:
        """Forget the client; see `ReadClient`."""
        self._reads.forget(self)


class _Waiting(msgspec.Struct):
    """A request that waits for its subtask."""

    client: _Client
    number: int
    keys: ClientKeys
    count: int
    deadline: float


class _Queue(msgspec.Struct):
    """The requests that wait for one subtask.

    Attributes:
        subtask: which one.
        by_kind: the requests that are read together, in the order in which they came.
        due: they are read soon.
        answer_bytes_max: the most bytes of values in an answer.
        slice_s: the longest time of a turn.
        timeout_s: the time after which no client waits for an answer any more.
    """

    subtask: Subtask
    answer_bytes_max: int
    slice_s: float
    timeout_s: float
    by_kind: dict[_Alike, deque[_Waiting]] = msgspec.field(default_factory=dict)
    due: bool = False

    @classmethod
    def of(cls, subtask: Subtask) -> _Queue:
        """Return the queue of a subtask, with the limits that the job sets."""
        options = Options(subtask.env.options)
        slice_s, timeout_s = options.get(QUERY_SLICE) / 1000, options.get(QUERY_TIMEOUT) / 1000
        return cls(subtask, options.get(QUERY_ANSWER_MAX), slice_s, timeout_s)

    def add(self, client: _Client, request: ReadRequest, keys: int, now: float) -> None:
        """Let a request for this many keys wait."""
        level = request.checkpoint if request.checkpoint > self.subtask.committed else 0
        kind = (request.operator, request.state, LIVE_NOW if request.checkpoint < 0 else level)
        waiting = self.by_kind.get(kind)
        if waiting is None:
            waiting = self.by_kind[kind] = deque()
        deadline = now + self.timeout_s
        waiting.append(_Waiting(client, request.number, request.keys, keys, deadline))

    def take(self) -> tuple[_Alike, list[_Waiting]]:
        """Take requests that are read together: at least one, if there is one."""
        kind, waiting = next(iter(self.by_kind.items()))
        taken, keys = [waiting.popleft()], 0
        while waiting and (keys := keys + taken[-1].count) < _KEYS_AT_ONCE:
            taken.append(waiting.popleft())
        del self.by_kind[kind]
        if waiting:
            self.by_kind[kind] = waiting  # after the others
        return kind, taken

    def put_back(self, kind: _Alike, waiting: Sequence[_Waiting]) -> None:
        """Let requests that were taken last wait again, before others that came later."""
        self.by_kind.setdefault(kind, deque()).extendleft(reversed(waiting))


class DirectReads:
    """Answers clients that read the state of this worker's subtasks.

    Args:
        worker_id: of the worker.
        regions: its deployments.
        hub: has its data port, and the limits.
        token: of the job.
        clock: of the worker.
    """

    def __init__(
        self, worker_id: str, regions: RunningRegions, hub: ExchangeHub, token: str, clock: Clock
    ) -> None:
        self._worker_id = worker_id
        self._regions = regions
        self._hub = hub
        self._ticket = ticket_of(token).encode()
        self._clock = clock
        self._clients: set[_Client] = set()
        self._queues: dict[_Place, _Queue] = {}
        hub.admit_reader = self.admit

    # -- clients ------------------------------------------------------------------------------------

    def admit(self, hello: bytes | bytearray, end: AcceptingEnd) -> _Client | None:
        """Answer the first frame of a client; None: it is refused."""
        limits = self._hub.limits
        refusal = self._refusal_of(_HELLO.decode(hello))
        welcome = ReadWelcome(refusal, limits.read_request_max_bytes)
        end.write(frame(FrameKind.READ_HELLO, _encode(welcome)))
        if refusal:
            self._hub.refused += 1
            return None
        self._hub.authenticated(end)
        end.establish(limits.read_request_max_bytes)
        client = _Client(end, self, limits.unanswered_keys_max)
        self._clients.add(client)
        return client

    def _refusal_of(self, hello: ReadHello) -> str:
        # Compared in constant time; nothing else is said to strangers.
        if not hmac.compare_digest(hello.ticket.encode(), self._ticket):
            return "wrong ticket"
        if hello.version != READS_VERSION:
            return f"other version version=`{hello.version}` ours=`{READS_VERSION}`"
        if hello.worker_id != self._worker_id:
            return f"this is another worker worker=`{self._worker_id}`"
        if len(self._clients) >= self._hub.limits.read_clients_max:
            return "too many clients"
        return ""

    def forget(self, client: _Client) -> None:
        """Note that a client is gone; its requests are not read any more."""
        self._clients.discard(client)

    # -- requests -----------------------------------------------------------------------------------

    def take(self, client: _Client, request: ReadRequest, keys: int) -> None:
        """Have a request for this many keys wait for its subtask, or refuse it."""
        found = self._find((request.attempt, request.vertex, request.index))
        if isinstance(found, StateOutcome):
            _send([(client, ReadAnswer(request.number, found), keys)])
            return
        found.add(client, request, keys, self._clock.monotonic())
        if not found.due:
            found.due = True
            self._read_soon(found)

    def _find(self, place: _Place) -> _Queue | StateOutcome:
        """Return the queue of a subtask that runs here, or why there is none."""
        queue = self._queues.get(place)
        if queue is None:
            attempt, vertex, index = place
            for deployment in self._regions.of_attempt(attempt):
                for subtask in deployment.subtasks:
                    if (subtask.env.vertex.id, subtask.env.index) == (vertex, index):
                        if not deployment.started:
                            return StateOutcome.STARTING
                        queue = self._queues[place] = _Queue.of(subtask)
        if queue is None or queue.subtask.awaits is None or queue.subtask.awaits.done():
            return StateOutcome.ELSEWHERE
        return queue

    def refuse_waiting(self, regions: Collection[int] | None) -> None:
        """Refuse the requests of subtasks that are dropped; None: of all."""
        dropped = {
            id(subtask)
            for deployment in self._regions
            if regions is None or deployment.region in regions
            for subtask in deployment.subtasks
        }
        for place, queue in list(self._queues.items()):
            if regions is None or id(queue.subtask) in dropped:
                del self._queues[place]
                waiting = [each for group in queue.by_kind.values() for each in group]
                queue.by_kind.clear()
                _send(_refused(waiting, StateOutcome.ELSEWHERE))

    # -- between two batches ------------------------------------------------------------------------

    def _read_soon(self, queue: _Queue) -> None:
        if queue.subtask.at_rest:
            asyncio.get_running_loop().call_soon(self._read_now, queue)
        else:
            queue.subtask.put_mail(partial(self._read, queue))

    def _read_now(self, queue: _Queue) -> None:
        """Read without the mailbox, unless the subtask has work to do by now."""
        read = partial(self._read, queue)
        if not queue.subtask.run_at_rest(read):
            queue.subtask.put_mail(read)

    def _read(self, queue: _Queue) -> None:
        """Read for one slice of time. A request that goes wrong does not fail the subtask."""
        until = self._clock.monotonic() + queue.slice_s
        while queue.by_kind:
            self._read_alike(queue, until)
            if self._clock.monotonic() >= until:
                break
        if queue.by_kind:
            # Behind the batch or barrier that is next.
            asyncio.get_running_loop().call_soon(self._read_now, queue)
        else:
            queue.due = False

    def _read_alike(self, queue: _Queue, until: float) -> None:
        """Read requests that are alike, until they are done or the slice is over."""
        kind, taken = queue.take()
        now = self._clock.monotonic()
        # A client that does not read its answers gets no value until it does.
        wanted = [each for each in taken if now < each.deadline and each.client.end.writable]
        if len(wanted) < len(taken):
            kept = set(map(id, wanted))
            unwanted = [each for each in taken if id(each) not in kept]
            _send(_refused(unwanted, StateOutcome.BUSY))
        if not wanted:
            return
        try:
            done = self._values(queue, kind, wanted, until)
        except Exception:  # it is that of one of them, which gets it below
            done = self._one_by_one(queue, kind, wanted, until)
        if done < len(wanted):
            queue.put_back(kind, wanted[done:])

    def _one_by_one(
        self, queue: _Queue, kind: _Alike, wanted: Sequence[_Waiting], until: float
    ) -> int:
        """Read requests one after the other, since one of them fails; return how many are done."""
        for number, each in enumerate(wanted, 1):
            try:
                self._values(queue, kind, [each], until)
            except TooLarge:
                _send(_refused([each], StateOutcome.TOO_LARGE))
            except NotKept:
                _send(_refused([each], StateOutcome.NOT_KEPT))
            except Exception:
                _send(_refused([each], StateOutcome.FAILED))
            if self._clock.monotonic() >= until:
                return number
        return len(wanted)

    def _values(self, queue: _Queue, kind: _Alike, wanted: Sequence[_Waiting], until: float) -> int:
        """Read the values of requests, and answer them; return how many are done."""
        name, state, level = kind
        checkpoint_id = 0
        if level != LIVE_NOW:
            checkpoint_id = max(level, queue.subtask.committed)
            if not checkpoint_id:
                raise NotKept
        operator = _operator_of(queue.subtask, name)
        keys = EncodedKeys(joined_keys([each.keys for each in wanted]))
        take = _taker(operator.query_many(state, keys, checkpoint_id), len(wanted))
        answers: list[tuple[_Client, ReadAnswer, int]] = []
        for each in wanted:
            found = take(each.count)
            if isinstance(found, QueriedColumns):
                columns, absent = found.sent(queue.answer_bytes_max)
                values: tuple[Any, ...] = b"", absent, columns
            else:
                values = to_json_array(found, queue.answer_bytes_max)
            answer = ReadAnswer(each.number, StateOutcome.READ, checkpoint_id, *values)
            answers.append((each.client, answer, each.count))
            if self._clock.monotonic() >= until:
                break
        _send(answers)
        return len(answers)


def _taker(read: Iterable[Any], requests: int) -> Callable[[int], Iterable[Any]]:
    """Return a function that takes the next values, as a list or columns if all of them are there."""
    if isinstance(read, QueriedColumns):
        if requests == 1:
            return lambda count: read
        if len(read) < _COLUMNS_FROM * requests:
            read = list(read)
    if not isinstance(read, list | QueriedColumns):
        values = iter(read)
        return lambda count: islice(values, count)
    taken = 0

    def take(count: int) -> Iterable[Any]:
        nonlocal taken
        first, taken = taken, taken + count
        return read[first:taken] if isinstance(read, list) else read.part(first, taken)

    return take


def _operator_of(subtask: Subtask, name: str) -> Operator:
    return next(each.operator for each in subtask.chain.operators if each.name == name)


def _refused(
    waiting: Iterable[_Waiting], outcome: StateOutcome
) -> list[tuple[_Client, ReadAnswer, int]]:
    return [(each.client, ReadAnswer(each.number, outcome), each.count) for each in waiting]


def _send(answers: Sequence[tuple[_Client, ReadAnswer, int]]) -> None:
    """Send answers, those of one client at once; each has its number of keys."""
    per_client: dict[_Client, tuple[Parts, int]] = {}
    for client, answer, keys in answers:
        parts = frame(FrameKind.READ_ANSWER, _encode(answer))
        if client in per_client:
            before, count = per_client[client]
            parts, keys = before + parts, count + keys
        per_client[client] = parts, keys
    for client, (parts, keys) in per_client.items():
        client.end.write(parts)
        client.answered(keys)
