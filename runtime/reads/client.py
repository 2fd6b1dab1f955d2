"""The client's side of direct reads: connections to workers, and who has which key.

Keys that callers of one event loop ask for in the same turn of it travel together, in one request per
subtask, state and level.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, TypeAlias, final

import msgspec

from ...errors import ExchangeError, HeadgateError, JobNotReady
from ...operators.durations import format_duration
from ...operators.queries import plain_key
from ...state.hashing import hash_key, key_group_of
from ...state.keyed.base import ABSENT
from ...state.keyed.keys import encode_key
from ...state.keygroups import owner_of
from ..control.job_client import HungUp
from ..control.messages import StateOutcome
from ..exchange.hub import this_host
from ..exchange.links import SCRATCH_BYTES, FrameConnection
from ..exchange.settings import ExchangeSettings
from ..exchange.wire import FrameKind, Header, frame
from ..rest.client import RestClient
from ..rest.state_answers import OwnerAnswer, OwnersAnswer, QueryableAnswer
from .wire import (
    KEYS_MAX,
    LIVE_NOW,
    READS_VERSION,
    ReadAnswer,
    ReadHello,
    ReadRequest,
    ReadWelcome,
)

CONNECT_S: Final = 1.0
"""A worker that cannot be reached within this time is asked through the coordinator, in s."""
UNREACHABLE_S: Final = 30.0
"""For this time no other attempt is made to reach it, in s."""
_REQUEST_BYTES: Final = 32 << 10
"""With this many bytes of keys, a request is sent at once."""
_KEY_BYTES: Final = 8
"""The most bytes that a request needs for a key beside the key itself."""
_ANSWER_BYTES_MAX: Final = 65 << 20
"""The largest answer that is accepted: `headgate.queries.answer-max` cannot be larger."""
_HEAD_BYTES: Final = 1_000
"""The bytes of a request beside its keys and names, at most."""
_WELCOME: Final = msgspec.msgpack.Decoder(ReadWelcome)
_ANSWER: Final = msgspec.msgpack.Decoder(ReadAnswer)
_VALUES: Final = msgspec.json.Decoder(list[Any])
_encode: Final = msgspec.msgpack.Encoder().encode
Level: TypeAlias = str


@final
class Refused(Exception):
    """A worker does not answer a read itself; the coordinator says why, or has the answer."""


@final
class Moved(JobNotReady):
    """The key groups of a key are elsewhere now: the client must ask who has them."""


@final
class ReadValue(NamedTuple):
    """The value of a key, and where it was read."""

    owner: OwnerAnswer
    key_group: int
    checkpoint: int
    found: bool
    value: Any


class _Read(NamedTuple):
    """The answer for one key: the checkpoint, and the value as plain data."""

    checkpoint: int
    found: bool
    value: Any


class WorkerConnection(FrameConnection):
    """A connection to one worker; it is never opened again."""

    def __init__(self, scratch: bytearray, worker_id: str, ticket: str) -> None:
        super().__init__(ExchangeSettings(), scratch)
        self.worker_id = worker_id
        self._hello = ReadHello(READS_VERSION, ticket, worker_id)
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the worker welcomed us; fails if it did not."""
        self.welcomed.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.request_bytes_max = 0
        """The largest request that the worker takes."""
        self._numbers = count()
        self._asked: dict[int, tuple[list[asyncio.Future[_Read]], asyncio.TimerHandle]] = {}

    def connected(self) -> None:
        self.write(frame(FrameKind.READ_HELLO, _encode(self._hello)))

    def ask(
        self, request: ReadRequest, waiting: list[asyncio.Future[_Read]], timeout_s: float
    ) -> None:
        """Send a request; its number is given here. Each of those that wait gets the value of one key."""
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        over = loop.call_later(timeout_s, self._give_up, number, timeout_s)
        self._asked[number] = waiting, over
        payload = _encode(msgspec.structs.replace(request, number=number))
        self.write(frame(FrameKind.READ, payload))

    def _give_up(self, number: int, timeout_s: float) -> None:
        asked, _ = self._asked.pop(number)
        patience = format_duration(round(1000 * timeout_s))
        _fail(asked, JobNotReady(f"the subtask of the key did not answer within {patience}"))

    def end(self, error: Exception) -> None:
        """Close the connection; all requests that wait fail with this error."""
        self.shut_down()
        asked, self._asked = self._asked, {}
        for waiting, over in asked.values():
            over.cancel()
            _fail(waiting, error)

    def frame_received(self, header: Header, payload: bytes | bytearray) -> None:
        if not self.welcomed.done():
            welcome = _WELCOME.decode(payload)
            if welcome.refusal:
                raise ExchangeError(f"the worker refused the connection: {welcome.refusal}")
            self.request_bytes_max = welcome.request_bytes_max
            self.establish(_ANSWER_BYTES_MAX)
            self.welcomed.set_result(None)
            return
        answer = _ANSWER.decode(payload)
        if answer.number not in self._asked:
            return  # it came too late
        asked, over = self._asked[answer.number]
        self._settle(
            asked, answer
        )  # an answer that is wrong breaks off, and these fail with the others
        del self._asked[answer.number]
        over.cancel()

    def _settle(self, asked: list[asyncio.Future[_Read]], answer: ReadAnswer) -> None:
        match answer.outcome:
            case StateOutcome.READ:
                values, absent = _VALUES.decode(answer.values), set(answer.absent)
                if len(values) != len(asked):
                    raise ExchangeError(
                        f"an answer has other values than the request has keys values=`{len(values)}` "
                        f"keys=`{len(asked)}`"
                    )
                for place, (waiter, value) in enumerate(zip(asked, values, strict=True)):
                    if not waiter.done():
                        waiter.set_result(_Read(answer.checkpoint, place not in absent, value))
            case StateOutcome.ELSEWHERE:
                _fail(asked, Moved("the key groups have moved"))
            case StateOutcome.STARTING:
                _fail(asked, JobNotReady("the subtask of the key restarts"))
            case StateOutcome.BUSY:
                _fail(asked, JobNotReady("too many queries wait for an answer"))
            case _:
                _fail(asked, Refused())

    def lost(self, error: ExchangeError) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(error)
        # Perhaps the worker is dead, and then its key groups will move.
        self.end(Moved(f"the connection to the worker broke: {error.message}"))


def _fail(waiting: Sequence[asyncio.Future[_Read]], error: Exception) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # the caller may be gone, and then asyncio would report the error


class _Pending:
    """The keys that are read at one subtask with the next request."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.waiting: list[asyncio.Future[_Read]] = []
        self.size_bytes = 0


class Connections:
    """The connections of a client to workers. Not thread-safe."""

    def __init__(self) -> None:
        self._scratch = bytearray(SCRATCH_BYTES)
        self._by_worker: dict[tuple[str, str, int], asyncio.Task[WorkerConnection]] = {}
        self._unreachable_until: dict[tuple[str, str, int], float] = {}

    async def to(self, owner: OwnerAnswer, ticket: str) -> WorkerConnection:
        """Return a connection to the worker of an owner.

        Raises:
            Refused: it cannot be reached from here, or does not want us.
        """
        place = (owner.worker, owner.host, owner.port)
        loop = asyncio.get_running_loop()
        task = self._by_worker.get(place)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            connection = task.result()
            if not connection.broken:
                return connection
            task = None
        if task is None or task.done():
            if loop.time() < self._unreachable_until.get(place, 0.0):
                raise Refused
            task = self._by_worker[place] = loop.create_task(self._open(owner, ticket))
        try:
            return await asyncio.shield(task)
        except (OSError, TimeoutError, HeadgateError) as error:
            self._unreachable_until[place] = loop.time() + UNREACHABLE_S
            raise Refused from error

    async def _open(self, owner: OwnerAnswer, ticket: str) -> WorkerConnection:
        connection = WorkerConnection(self._scratch, owner.worker, ticket)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._dial(loop, connection, owner)
                await asyncio.shield(connection.welcomed)
        except BaseException:
            connection.shut_down()
            raise
        return connection

    async def _dial(
        self, loop: asyncio.AbstractEventLoop, connection: WorkerConnection, owner: OwnerAnswer
    ) -> None:
        if owner.socket is not None and owner.machine == this_host():
            try:
                await loop.create_unix_connection(lambda: connection, owner.socket)
                return
            except (FileNotFoundError, PermissionError, ConnectionRefusedError):
                pass  # it belongs to another user, or the file system is not shared
        await loop.create_connection(lambda: connection, owner.host, owner.port)

    async def close(self) -> None:
        """Close all connections."""
        tasks, self._by_worker = list(self._by_worker.values()), {}
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, WorkerConnection):
                found.end(JobNotReady("the client is closed"))
                if found.has_socket:
                    await found.closed


class StateReader:
    """Reads one state directly, as long as its key groups are where `owners` says."""

    def __init__(
        self, owners: OwnersAnswer, types: Mapping[str, str] | None, connections: Connections
    ) -> None:
        """
        Args:
            owners: who has the key groups.
            types: of the key columns.
            connections: to the workers.
        """
        self.owners = owners
        self._types = types
        self._connections = connections
        self._timeout_s = owners.timeout_ms / 1000
        self.newest = 0
        """The newest checkpoint that the caller has seen: it sees none that is older."""
        self._pending: dict[tuple[int, bool], _Pending] = {}
        self._room_bytes = _HEAD_BYTES + len(owners.step) * 4 + len(owners.stored_as) * 4

    def place(self, key: Any) -> tuple[bytes, int, OwnerAnswer] | None:
        """Return a key as bytes, its key group, and who has it; None: only the job knows."""
        known = plain_key(self._types, key)
        if known is ABSENT:
            return None
        try:
            group = key_group_of(hash_key(known), self.owners.max_parallelism)
            encoded = encode_key(known)
        except (HeadgateError, UnicodeError, TypeError):
            return None
        owners = self.owners.owners
        return encoded, group, owners[owner_of(group, len(owners), self.owners.max_parallelism)]

    async def read(self, keys: Sequence[Any], level: Level) -> list[ReadValue]:
        """Return the value of each key. Those of level `committed` are all of one checkpoint.

        Raises:
            Moved: the key groups are elsewhere.
            JobNotReady: there is no answer now.
            Refused: the coordinator must be asked.
        """
        placed = [self.place(key) for key in keys]
        known = [each for each in placed if each is not None]
        committed = level == "committed"
        several = len({owner.subtask for _, _, owner in known}) > 1
        if len(known) < len(placed) or (committed and several) or len(keys) > KEYS_MAX:
            raise Refused
        to: dict[int, WorkerConnection] = {}
        size_bytes = self._room_bytes + sum(len(encoded) + _KEY_BYTES for encoded, _, _ in known)
        for _, _, owner in known:
            if owner.subtask not in to:
                connection = await self._connections.to(owner, self.owners.ticket)
                if size_bytes > connection.request_bytes_max:
                    raise Refused
                to[owner.subtask] = connection
        # No await in between: keys of one owner are read at one moment.
        waiting = self._ask(known, committed, to)
        found = [await waiter for waiter in waiting]
        checkpoints = {read.checkpoint for read in found}
        if len(checkpoints) > 1:
            raise Refused
        self.newest = max(self.newest, *checkpoints)
        return [
            ReadValue(owner, group, *read)
            for (_, group, owner), read in zip(known, found, strict=True)
        ]

    def _ask(
        self,
        known: Sequence[tuple[bytes, int, OwnerAnswer]],
        committed: bool,
        to: Mapping[int, WorkerConnection],
    ) -> list[asyncio.Future[_Read]]:
        """Add keys to the requests that are sent next."""
        loop = asyncio.get_running_loop()
        per_owner: dict[int, list[tuple[bytes, OwnerAnswer, asyncio.Future[_Read]]]] = {}
        waiting = []
        for encoded, _, owner in known:
            waiter: asyncio.Future[_Read] = loop.create_future()
            waiting.append(waiter)
            per_owner.setdefault(owner.subtask, []).append((encoded, owner, waiter))
        for subtask, some in per_owner.items():
            connection, owner, place = to[subtask], some[0][1], (subtask, committed)
            size = sum(len(encoded) + _KEY_BYTES for encoded, _, _ in some)
            pending = self._pending.get(place)
            room = min(_REQUEST_BYTES, connection.request_bytes_max - self._room_bytes)
            if pending is not None and (
                len(pending.keys) + len(some) > KEYS_MAX or pending.size_bytes + size > room
            ):
                self._send(place, connection, owner)
                pending = None
            if pending is None:
                pending = self._pending[place] = _Pending()
                loop.call_soon(partial(self._send, place, connection, owner, pending))
            pending.keys += [encoded for encoded, _, _ in some]
            pending.waiting += [waiter for _, _, waiter in some]
            pending.size_bytes += size
        return waiting

    def _send(
        self,
        place: tuple[int, bool],
        connection: WorkerConnection,
        owner: OwnerAnswer,
        which: _Pending | None = None,
    ) -> None:
        """Send the request that waits, if it is `which` or that is None."""
        pending = self._pending.get(place)
        if pending is None or (which is not None and pending is not which):
            return
        del self._pending[place]
        if connection.broken:
            _fail(pending.waiting, Moved("the connection to the worker broke"))
            return
        request = ReadRequest(
            number=0,
            attempt=owner.attempt,
            vertex=self.owners.vertex,
            index=owner.subtask,
            operator=self.owners.step,
            state=self.owners.stored_as,
            checkpoint=self.newest if place[1] else LIVE_NOW,
            keys=tuple(pending.keys),
        )
        connection.ask(request, pending.waiting, self._timeout_s)


class DirectReader:
    """Reads the states of one job at the workers that have them. Not thread-safe."""

    def __init__(self) -> None:
        self._connections = Connections()
        self._readers: dict[str, StateReader] = {}
        self._asking = asyncio.Lock()

    async def read(
        self, client: RestClient, known: QueryableAnswer, keys: Sequence[Any], level: Level
    ) -> tuple[OwnersAnswer, list[ReadValue]] | None:
        """Return the value of each key, and where they were read; None: the coordinator must be asked.

        Args:
            client: asks the coordinator who has the key groups, when that is not known.
            known: the state.
            keys: up to `KEYS_MAX`.
            level: `live` or `committed`.

        Raises:
            JobNotReady: there is no answer now.
            HungUp: the coordinator does not answer.
        """
        if level not in known.levels:
            return None
        moved: StateReader | None = None
        while True:
            try:
                reader = await self._reader(client, known, moved)
                return reader.owners, await reader.read(keys, level)
            except Refused:
                return None
            except Moved:
                if moved is not None:
                    raise
                moved = self._readers.get(known.name)

    async def _reader(
        self, client: RestClient, known: QueryableAnswer, moved: StateReader | None
    ) -> StateReader:
        """Return the reader of a state: another one than `moved`, whose key groups are elsewhere."""
        reader = self._readers.get(known.name)
        if reader is not None and reader is not moved:
            return reader
        async with self._asking:
            reader = self._readers.get(known.name)
            if reader is not None and reader is not moved:
                return reader
            try:
                owners = await client.owners(known.name)
            except (HungUp, JobNotReady):
                raise
            except HeadgateError as error:
                raise Refused from error
            made = self._readers[known.name] = StateReader(owners, known.key, self._connections)
            made.newest = 0 if reader is None else reader.newest
            return made

    def saw(self, state: str, checkpoint: int | None) -> None:
        """Note the checkpoint of an answer of the coordinator, which is never behind."""
        if checkpoint and state in self._readers:
            self._readers[state].newest = checkpoint

    async def close(self) -> None:
        """Close all connections to workers."""
        await self._connections.close()
