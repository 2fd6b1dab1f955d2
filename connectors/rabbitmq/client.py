"""The connection to a broker of RabbitMQ: addresses, secrets, and errors that say what to do.

The client is that of rstream for single requests: its consumers and producers connect again by themselves,
and what has to be repeated then is known to us only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from ...errors import SourceError, UsageError
from ..secrets import is_reference, read_secret
from ..tls import client_context
from ..unless import unless

ANSWER_S_MAX: Final = 10.0
"""The time in which a broker has to answer a request."""
AWAY_S: Final = 30.0
"""A broker that is away is tried again for this time."""
PAUSE_S: Final = 0.2
FRAME_BYTES: Final = 1 << 20
"""The largest frame that we offer to send and to receive; the broker may offer less."""
HEARTBEAT_S: Final = 10
_PORTS: Final = {"rabbitmq-stream": 5552, "rabbitmq-stream+tls": 5551}
_PROBE: Final = 1
"""The number of subscriptions that only look; that of the reader is another one."""
_NOT_READY: Final = (6, 15)
"""Codes of answers: the stream is not available at the moment, and an internal error."""
T = TypeVar("T")


@dataclass(frozen=True)
class Broker:
    """The addresses of a cluster, and the credentials, as the user gives them.

    Attributes:
        url: `rabbitmq-stream://host:5552`, `rabbitmq-stream+tls://host:5551`, several with commas; or where
            it can be read.
        user: the name of the user.
        password: the password, or where it can be read.
        virtual_host: the virtual host of the streams.
        ca: the file of the authorities to trust; None: those of the system.
        certificate: the file with the certificate of the client.
        key: the file with its key.
    """

    url: str
    user: str
    password: str
    virtual_host: str = "/"
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def check(self) -> None:
        """Check the form of the addresses.

        Raises:
            UsageError: they are not those of brokers.
        """
        if not is_reference(self.url):
            _addresses(self.url)

    def __str__(self) -> str:
        """Return the addresses, which have no secrets."""
        if is_reference(self.url):
            return self.url
        try:
            return ",".join(f"{host}:{port}" for host, port, _ in _addresses(self.url))
        except UsageError:
            return "***"

    def __repr__(self) -> str:
        """Return the addresses without secrets."""
        return f"Broker({self})"


def _addresses(url: str) -> list[tuple[str, int, bool]]:
    """Return host, port, and whether TLS is used, of each address."""
    found = []
    for each in url.split(","):
        try:
            parts = urlsplit(each.strip())
            fits = parts.scheme in _PORTS and bool(parts.hostname) and "@" not in parts.netloc
            fits = fits and not parts.path.strip("/") and not parts.query
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            fits, port = False, 0
        if not fits:
            raise UsageError(
                "not the addresses of RabbitMQ's streams",
                fix='url="rabbitmq-stream://host:5552", several with commas, or rabbitmq-stream+tls://; '
                "credentials are given as user= and password=",
            )
        found.append((str(parts.hostname), port, parts.scheme.endswith("tls")))
    return found


class LostError(ConnectionError):
    """The connection to a broker has ended, or the stream has moved to another one."""


class Connection:
    """A connection to the broker that leads a stream.

    Attributes:
        client: that of rstream.
        stream: the name of the stream.
    """

    def __init__(self, client: Any, stream: str, lost: asyncio.Event) -> None:
        """Wrap a client that sets `lost` when its connection is lost."""
        self.client = client
        self.stream = stream
        self._lost = lost

    async def until_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something with the broker, and stop as soon as the connection is lost.

        Raises:
            LostError: it was lost, so the broker may have done any part of it.
        """
        return await unless(self._lost, work, LostError)

    async def subscribe(self, number: int, where: Any, take: Any, credit: int) -> None:
        """Let `take` be called with the chunks of the stream from a place on, `credit` of them."""
        from rstream import schema

        async def taken(frame: Any) -> None:
            if frame.subscription_id == number:
                take(frame)

        self.client.add_handler(schema.Deliver, taken, name=str(number))
        await self.client.run_queue_listener_task(number, taken)
        await self.client.subscribe(self.stream, number, where, initial_credit=credit)

    async def chunk_at(self, where: Any) -> Any:
        """Return the first chunk from a place on; None: there is none now.

        A broker sends what is there before it answers the next request.
        """
        from rstream import schema

        found: list[Any] = []
        await self.subscribe(_PROBE, where, found.append, 1)
        await self.client.stream_exists(self.stream)
        await asyncio.sleep(0)
        await self.client.unsubscribe(_PROBE)
        self.client.remove_handler(schema.Deliver, str(_PROBE))
        await self.client.stop_queue_listener_task(_PROBE)
        return found[0] if found else None

    async def end(self) -> int:
        """Return the offset behind the last message of the stream."""
        from rstream import schema
        from rstream.constants import OffsetType

        last = await self.chunk_at(schema.OffsetSpec(OffsetType.LAST))
        return 0 if last is None else int(last.chunk_first_offset + last.num_records)

    async def first(self) -> int | None:
        """Return the offset of the first message of the stream; None: it has none."""
        from rstream import schema
        from rstream.constants import OffsetType

        found = await self.chunk_at(schema.OffsetSpec(OffsetType.FIRST))
        return None if found is None else int(found.chunk_first_offset)


@contextlib.asynccontextmanager
async def connected(broker: Broker, stream: str, name: str) -> AsyncIterator[Connection]:
    """Connect to the broker that leads a stream, for the time of the block.

    Raises:
        rstream.exceptions.ServerError, OSError, TimeoutError: no broker answers, or one refuses us.
        UsageError: the addresses or a secret cannot be read.
    """
    async with _any_broker(broker, name) as (client, lost, tls):
        leader = await unless(lost, _leader_elsewhere(client, stream), LostError)
        if leader is None:
            yield Connection(client, stream, lost)
            return
    async with logged_in(broker, (*leader, tls), name) as (client, lost):
        yield Connection(client, stream, lost)


async def partitions_of(broker: Broker, super_stream: str, name: str) -> list[str]:
    """Return the streams that are the partitions of a super stream, in order.

    Raises:
        SourceError: no broker answers, one refuses us, or there is no such super stream.
        UsageError: the addresses or a secret cannot be read.
    """
    try:
        found = await _partitions_of(broker, super_stream, name)
    except failures() as error:
        raise cannot_use(broker, error) from error
    if not found:
        raise no_super_stream(broker, super_stream)
    return found


async def _partitions_of(broker: Broker, super_stream: str, name: str) -> list[str]:
    from rstream import schema
    from rstream.constants import Key

    # RabbitMQ 3.10 answers without the mark of an answer. Brokers never send this as a request.
    schema.registry[False, Key.Partitions] = schema.SuperStreamPartitionsResponse
    async with _any_broker(broker, name) as (client, lost, _):
        return list(await unless(lost, client.partitions(super_stream), LostError))


@contextlib.asynccontextmanager
async def _any_broker(broker: Broker, name: str) -> AsyncIterator[tuple[Any, asyncio.Event, bool]]:
    """Connect to the first broker that answers; yield client, event of its end, and whether by TLS."""
    failure: BaseException = OSError("no address is given")
    for address in _addresses(read_secret("url", broker.url)):
        async with contextlib.AsyncExitStack() as opened:
            try:
                client, lost = await opened.enter_async_context(logged_in(broker, address, name))
            except UnreachableError as error:
                failure = error
                continue
            yield client, lost, address[2]
            return
    raise failure


class UnreachableError(OSError):
    """A broker cannot be connected to."""


@contextlib.asynccontextmanager
async def logged_in(
    broker: Broker, address: tuple[str, int, bool], name: str
) -> AsyncIterator[tuple[Any, asyncio.Event]]:
    """Connect to one broker and log in; yield the client, and an event that tells of its end."""
    from rstream import schema
    from rstream.client import Client

    host, port, tls = address
    password = read_secret("password", broker.password)
    context = client_context(broker.ca, broker.certificate, broker.key) if tls else None
    lost = asyncio.Event()

    def note_end(_: Any) -> None:
        lost.set()

    client = Client(
        host,
        port,
        ssl_context=context,
        frame_max=FRAME_BYTES,
        heartbeat=HEARTBEAT_S,
        connection_name=name,
        connection_closed_handler=note_end,
    )
    client.add_stream(name)  # otherwise the end of the connection is not told
    client.add_handler(schema.MetadataUpdate, note_end, name="headgate")
    client.add_handler(schema.Close, note_end, name="headgate")
    try:
        try:
            await client.start()
        except (OSError, TimeoutError) as error:
            raise UnreachableError(f"{host}:{port}: {reason_of(error)}") from error
        work = client.authenticate(broker.virtual_host, broker.user, password)
        await unless(lost, work, LostError)
        yield client, lost
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(_end(client), ANSWER_S_MAX)


async def _end(client: Any) -> None:
    """End a connection and its tasks.

    `close` of the client does the same, and pauses for 200 ms each time: a subtask would take that for each
    stream when it begins, and again when it ends.
    """
    for task in list(client._tasks):
        with contextlib.suppress(Exception):
            await client.stop_task(task)
    if client._conn is not None:
        await client._conn.close()


async def _leader_elsewhere(client: Any, stream: str) -> tuple[str, int] | None:
    """Return the address of the broker that leads a stream; None: it is the one that we have."""
    leader, _ = await client.query_leader_and_replicas(stream)
    own = client.server_properties
    if (own.get("advertised_host"), own.get("advertised_port")) == (leader.host, str(leader.port)):
        return None
    return leader.host, int(leader.port)


def is_lost(error: BaseException) -> bool:
    """Return True if the connection broke or a broker is away, so that trying again may help."""
    from rstream.exceptions import LeaderNotAvailable, ServerError

    if isinstance(error, LeaderNotAvailable):
        return True
    if isinstance(error, ServerError):
        return error.code in _NOT_READY
    if isinstance(error, UnreachableError):
        return not isinstance(error.__cause__, ssl.SSLError)
    return isinstance(error, OSError | TimeoutError) and not isinstance(error, ssl.SSLError)


def is_missing(error: BaseException) -> bool:
    """Return True if a stream does not exist."""
    from rstream.exceptions import StreamDoesNotExist

    return isinstance(error, StreamDoesNotExist)


def failures() -> tuple[type[BaseException], ...]:
    """Return the errors of the client and of the broker."""
    from rstream.exceptions import ClientError, ServerError

    return (ServerError, ClientError, OSError, TimeoutError)


_WORDS: Final = {
    "AuthenticationFailure": "the user or the password is wrong",
    "SASLAuthenticationFailureLoopback": "the user may connect from the broker's own machine only",
    "VirtualHostAccessFailure": "the user has no access to the virtual host",
    "AccessRefused": "the user has no right to do this",
    "StreamDoesNotExist": "there is no such stream",
    "LostError": "the connection has ended",
    "TimeoutError": "the broker does not answer",
}
"""The errors of the client have no text."""


def reason_of(error: BaseException) -> str:
    """Return the text of the broker or of the client, in one line."""
    name = type(error).__name__
    return " ".join(str(error).split()) or _WORDS.get(name, name)


def cannot_use(broker: Broker, error: BaseException) -> SourceError:
    """Return the error for brokers that do not answer, or refuse us."""
    return SourceError(
        f"the RabbitMQ broker cannot be used broker=`{broker}`: {reason_of(error)}",
        fix="check the address, the user, the password, the virtual host, TLS, and that the plugin "
        "rabbitmq_stream is on",
    )


def no_super_stream(broker: Broker, super_stream: str) -> SourceError:
    """Return the error for a super stream that does not exist."""
    return SourceError(
        f"there is no such super stream super_stream=`{super_stream}` broker=`{broker}`",
        fix="check the name and the virtual host; create it with `rabbitmq-streams add_super_stream ... "
        "--partitions 3`",
    )


def no_stream(broker: Broker, stream: str) -> SourceError:
    """Return the error for a stream that does not exist."""
    return SourceError(
        f"there is no such stream stream=`{stream}` broker=`{broker}`",
        fix="check the name and the virtual host; create it with `rabbitmqadmin declare queue name=... "
        'arguments=\'{"x-queue-type": "stream"}\'`',
    )
