"""The client's side of direct reads: connections to workers, and who has which key.

Keys that callers of one event loop ask for in the same turn of it travel together, in one request per
subtask, state and level.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, TypeAlias, final

import msgspec

from ...errors import ExchangeError, HeadgateError, JobNotReady
from ...operators.durations import format_duration
from ...operators.queried_columns import received
from ...state.keyed.keys import ClientKeys, joined_keys
from ..control.job_client import HungUp
from ..control.messages import StateOutcome
from ..exchange.hub import this_host
from ..exchange.links import SCRATCH_BYTES, FrameConnection
from ..exchange.settings import ExchangeSettings
from ..exchange.wire import FrameKind, Header, frame
from ..rest.client import RestClient
from ..rest.state_answers import OwnerAnswer, OwnersAnswer, QueryableAnswer
from .places import KeyPlaces, KeysOfOwner, PlacedKeys
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
class ReadValues(NamedTuple):
    """The values of some keys, and where they were read."""

    types: Mapping[str, str] | None
    """The types of the key columns; None: they are not declared."""
    owners: OwnersAnswer
    checkpoint: int
    """0: the values are live."""
    values: list[Any]
    """Plain data; None for the keys that have no value."""
    absent: frozenset[int]
    """The places of those keys."""
    placed: PlacedKeys


class _Read(NamedTuple):
    """The answer for some keys of one subtask; see `ReadValues`."""

    checkpoint: int
    values: list[Any]
    absent: Collection[int]


_Waiting: TypeAlias = list[tuple[asyncio.Future[_Read], int]]
"""Those that wait for an answer, in the order of the keys, each with its number of keys."""


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
        self._asked: dict[int, tuple[_Waiting, asyncio.TimerHandle]] = {}

    def connected(self) -> None:
        self.write(frame(FrameKind.READ_HELLO, _encode(self._hello)))

    def ask(self, request: ReadRequest, waiting: _Waiting, timeout_s: float) -> None:
        """Send a request; its number is given here. Those that wait get the values of its keys."""
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

    def _settle(self, asked: _Waiting, answer: ReadAnswer) -> None:
        match answer.outcome:
            case StateOutcome.READ:
                _share(asked, answer, _values_of(answer, sum(keys for _, keys in asked)))
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


def _values_of(answer: ReadAnswer, keys: int) -> list[Any]:
    """Return the values for this many keys.

    Raises:
        ExchangeError: the answer has others.
    """
    if answer.columns:
        try:
            return received(answer.columns, answer.absent, keys)
        except ValueError as error:
            raise ExchangeError(f"the columns of an answer do not fit: {error}") from error
    values = _VALUES.decode(answer.values)
    if len(values) != keys:
        raise ExchangeError(
            f"an answer has other values than the request has keys values=`{len(values)}` "
            f"keys=`{keys}`"
        )
    return values


def _share(asked: _Waiting, answer: ReadAnswer, values: list[Any]) -> None:
    """Give each of those that wait its part of the values."""
    if len(asked) == 1:
        waiter, _ = asked[0]
        if not waiter.done():
            waiter.set_result(_Read(answer.checkpoint, values, answer.absent))
        return
    absent, first = set(answer.absent), 0
    for waiter, keys in asked:
        if not waiter.done():
            missing = [place for place in range(keys) if first + place in absent] if absent else ()
            part = values[first : first + keys]
            waiter.set_result(_Read(answer.checkpoint, part, missing))
        first += keys


def _fail(waiting: _Waiting, error: Exception) -> None:
    for waiter, _ in waiting:
        if not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # the caller may be gone, and then asyncio would report the error


class _Pending:
    """The keys that are read at one subtask with the next request."""

    def __init__(self) -> None:
        self.parts: list[ClientKeys] = []
        self.waiting: _Waiting = []
        self.keys = 0
        self.size_bytes = 0


class Connections:
    """The connections of a client to workers. Not thread-safe."""

    def __init__(self) -> None:
        self._scratch = bytearray(SCRATCH_BYTES)
        self._by_worker: dict[tuple[str, str, int], asyncio.Task[WorkerConnection]] = {}
        self._unreachable_until: dict[tuple[str, str, int], float] = {}

    def ready(self, owner: OwnerAnswer) -> WorkerConnection | None:
        """Return the connection to the worker of an owner, if it is open."""
        task = self._by_worker.get((owner.worker, owner.host, owner.port))
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return None if task.result().broken else task.result()

    async def to(self, owner: OwnerAnswer, ticket: str) -> WorkerConnection:
        """Return a connection to the worker of an owner.

        Raises:
            Refused: it cannot be reached from here, or does not want us.
        """
        connection = self.ready(owner)
        if connection is not None:
            return connection
        place = (owner.worker, owner.host, owner.port)
        loop = asyncio.get_running_loop()
        task = self._by_worker.get(place)
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
        self._places = KeyPlaces(types, len(owners.owners), owners.max_parallelism)

    async def read(self, keys: Sequence[Any], level: Level) -> ReadValues:
        """Return the value of each key. Those of level `committed` are all of one checkpoint.

        Raises:
            Moved: the key groups are elsewhere.
            JobNotReady: there is no answer now.
            Refused: the coordinator must be asked.
        """
        placed = None if len(keys) > KEYS_MAX else self._places.of(keys)
        committed = level == "committed"
        if placed is None or (committed and len(placed.parts) > 1):
            raise Refused
        to: list[WorkerConnection] = []
        for part in placed.parts:
            owner = self.owners.owners[part.owner]
            connection = self._connections.ready(owner)
            if connection is None:
                connection = await self._connections.to(owner, self.owners.ticket)
            if self._room_bytes + part.size_bytes > connection.request_bytes_max:
                raise Refused
            to.append(connection)
        # No await in between: keys of one owner are read at one moment.
        waiting = [
            self._ask(part, committed, at) for part, at in zip(placed.parts, to, strict=True)
        ]
        found = [await waiter for waiter in waiting]
        checkpoints = {read.checkpoint for read in found}
        if len(checkpoints) > 1:
            raise Refused
        self.newest = max(self.newest, *checkpoints)
        return ReadValues(self._types, self.owners, *_together(placed, found), placed)

    def _ask(
        self, part: KeysOfOwner, committed: bool, connection: WorkerConnection
    ) -> asyncio.Future[_Read]:
        """Add keys to the request that is sent next."""
        loop = asyncio.get_running_loop()
        place = (part.owner, committed)
        pending = self._pending.get(place)
        room = min(_REQUEST_BYTES, connection.request_bytes_max - self._room_bytes)
        if pending is not None and (
            pending.keys + part.number > KEYS_MAX or pending.size_bytes + part.size_bytes > room
        ):
            self._send(place, connection)
            pending = None
        if pending is None:
            pending = self._pending[place] = _Pending()
            loop.call_soon(partial(self._send, place, connection, pending))
        waiter: asyncio.Future[_Read] = loop.create_future()
        pending.parts.append(part.keys)
        pending.waiting.append((waiter, part.number))
        pending.keys += part.number
        pending.size_bytes += part.size_bytes
        return waiter

    def _send(
        self,
        place: tuple[int, bool],
        connection: WorkerConnection,
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
        owner = self.owners.owners[place[0]]
        request = ReadRequest(
            number=0,
            attempt=owner.attempt,
            vertex=self.owners.vertex,
            index=owner.subtask,
            operator=self.owners.step,
            state=self.owners.stored_as,
            checkpoint=self.newest if place[1] else LIVE_NOW,
            keys=joined_keys(pending.parts),
        )
        connection.ask(request, pending.waiting, self._timeout_s)


def _together(placed: PlacedKeys, found: Sequence[_Read]) -> tuple[int, list[Any], frozenset[int]]:
    """Return the checkpoint, the values in the order of all keys, and the places of those without."""
    checkpoint = found[0].checkpoint
    if len(found) == 1:
        return checkpoint, found[0].values, frozenset(found[0].absent)
    values: list[Any] = [None] * len(placed.groups)
    absent: list[int] = []
    for part, read in zip(placed.parts, found, strict=True):
        for place, value in zip(part.places, read.values, strict=True):
            values[place] = value
        absent += [part.places[place] for place in read.absent]
    return checkpoint, values, frozenset(absent)


class DirectReader:
    """Reads the states of one job at the workers that have them. Not thread-safe."""

    def __init__(self) -> None:
        self._connections = Connections()
        self._readers: dict[str, StateReader] = {}
        self._asking = asyncio.Lock()

    async def read(
        self, client: RestClient, known: QueryableAnswer, keys: Sequence[Any], level: Level
    ) -> ReadValues | None:
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
                reader = self._readers.get(known.name)
                if reader is None or reader is moved:
                    reader = await self._reader(client, known, moved)
                return await reader.read(keys, level)
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
