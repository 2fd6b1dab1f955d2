"""The connection to servers of NATS: addresses, secrets, and errors that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from ...errors import SourceError, UsageError
from ..secrets import is_reference, read_secret
from ..tls import client_context
from ..unless import unless
from .frames import Message, MessageSplitter

ANSWER_S_MAX: Final = 5.0
"""The time in which a server has to answer a request."""
AWAY_S: Final = 30.0
"""Calls wait for at most this time for a server that is away."""
PAUSE_S: Final = 0.2
_NOT_FOUND: Final = 404
_log = logging.getLogger("headgate.connectors.nats")
T = TypeVar("T")


@dataclass(frozen=True)
class Servers:
    """The addresses of a cluster, and the credentials, as the user gives them.

    Attributes:
        url: `nats://host:4222`, `tls://...`, several with commas; or where it can be read.
        user: the name of the user; None: none is given.
        password: the password, or where it can be read.
        token: the token, or where it can be read.
        credentials: a file with a JWT and its key (`.creds`), on each machine.
        ca: the file of the authorities to trust; None: those of the system.
        certificate: the file with the certificate of the client.
        key: the file with its key.
    """

    url: str
    user: str | None = None
    password: str | None = None
    token: str | None = None
    credentials: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def check(self) -> None:
        """Check the form of the addresses.

        Raises:
            UsageError: they are not those of servers.
        """
        if not is_reference(self.url):
            _addresses(self.url)
        if (self.user is None) != (self.password is None):
            raise UsageError("user= and password= belong together", fix="give both, or neither")

    def __str__(self) -> str:
        """Return the addresses, which have no secrets."""
        if is_reference(self.url):
            return self.url
        try:
            return ",".join(_addresses(self.url))
        except UsageError:
            return "***"

    def __repr__(self) -> str:
        """Return the addresses without secrets."""
        return f"Servers({self})"


def _addresses(url: str) -> list[str]:
    found = [each.strip() for each in url.split(",")]
    for each in found:
        try:
            parts = urlsplit(each)
            fits = parts.scheme in ("nats", "tls") and bool(parts.hostname)
            fits = fits and "@" not in parts.netloc and not parts.path.strip("/")
            fits = fits and (parts.port is None or parts.port > 0)
        except ValueError:
            fits = False
        if not fits:
            raise UsageError(
                "not the addresses of NATS servers",
                fix='url="nats://host:4222", several with commas; credentials are given as user= and '
                "password=, token= or credentials=",
            )
    return found


def _options(servers: Servers, name: str) -> dict[str, Any]:
    """Return the options of the client, with secrets read on this machine."""
    made: dict[str, Any] = {
        "name": name,
        "connect_timeout": ANSWER_S_MAX,
        "allow_reconnect": False,
        "max_reconnect_attempts": 1,  # for the first connection as well
        "reconnect_time_wait": 0,
    }
    if servers.password is not None:
        made |= {"user": servers.user, "password": read_secret("password", servers.password)}
    if servers.token is not None:
        made["token"] = read_secret("token", servers.token)
    if servers.credentials is not None:
        made["user_credentials"] = servers.credentials
    if servers.ca is not None or servers.certificate is not None:
        made["tls"] = client_context(servers.ca, servers.certificate, servers.key)
    return made


class Inbox:
    """The messages that come to subjects below one of ours, in the batches in which they come.

    Attributes:
        subject: the one above.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._messages: list[Message] = []
        self._arrived = asyncio.Event()
        self._replies = 0

    def new_reply(self) -> str:
        """Return a subject for answers that no other request has."""
        self._replies += 1
        return f"{self.subject}.{self._replies}"

    def receive(self, messages: list[Message]) -> None:
        """Keep messages that have come."""
        self._messages += messages
        self._arrived.set()

    async def some(self, within_s: float) -> list[Message]:
        """Wait for messages, and take those that are there.

        Raises:
            TimeoutError: none has come for so long.
        """
        if not self._messages:
            self._arrived.clear()
            async with asyncio.timeout(within_s):
                await self._arrived.wait()
        found, self._messages = self._messages, []
        return found


class _Parser:
    """Stands before the parser of a client, which gets what is not for an inbox."""

    def __init__(self, parser: Any) -> None:
        self.splitter = MessageSplitter()
        self._parser = parser

    async def parse(self, received: bytes = b"") -> None:
        """Take bytes that have arrived."""
        from nats.errors import ProtocolError

        try:
            others = self.splitter.feed(received)
        except ValueError as error:
            raise ProtocolError from error
        if others:
            await self._parser.parse(others)

    def reset(self) -> None:
        """Forget what has begun to arrive."""
        self.splitter.reset()
        self._parser.reset()


class Connection:
    """A connection to a server. The client leaves requests unanswered when it is lost.

    Attributes:
        jetstream: the client's interface to JetStream.
        bytes_max: the most bytes that a message may have, with its headers.
    """

    def __init__(self, client: Any, lost: asyncio.Event) -> None:
        """Wrap a client, which has no subscription yet and sets `lost` when its connection is lost."""
        self.jetstream = client.jetstream(timeout=ANSWER_S_MAX)
        self.bytes_max = int(client.max_payload)
        self._client = client
        self._lost = lost
        self._answers: Inbox | None = None
        parser = client._ps
        begun = bytes(parser.buf)
        parser.reset()
        client._ps = _Parser(parser)
        self._splitter: MessageSplitter = client._ps.splitter
        self._splitter.feed(begun)

    async def inbox(self) -> Inbox:
        """Return an inbox that lives as long as the connection."""
        made = Inbox(self._client.new_inbox())
        subscription = await self._client.subscribe(f"{made.subject}.>")
        self._splitter.receivers[b"%d" % subscription._id] = made.receive
        return made

    async def answers(self) -> Inbox:
        """Return an inbox for the answers to what is published."""
        if self._answers is None:
            self._answers = await self.inbox()
        return self._answers

    async def send(self, commands: bytes) -> None:
        """Send commands, as `frames` makes them."""
        await self._client._send_command(commands)
        await self._client._flush_pending(force_flush=True)

    async def until_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something with the server, and stop as soon as the connection is lost.

        Raises:
            nats.errors.ConnectionClosedError: it was lost, so the server may have done any part of it.
        """
        from nats.errors import ConnectionClosedError

        return await unless(self._lost, work, ConnectionClosedError)


@contextlib.asynccontextmanager
async def connected(servers: Servers, name: str) -> AsyncIterator[Connection]:
    """Connect to the first server that answers, for the time of the block.

    The client does not connect again by itself, since what has to be repeated then is known to its user.

    Raises:
        nats.errors.Error, OSError: none answers, or it refuses us.
        UsageError: the addresses or a secret cannot be read.
    """
    import nats

    options = _options(servers, name)
    failure: BaseException = OSError("no address is given")
    client: Any = None

    lost = asyncio.Event()

    async def note_end() -> None:
        lost.set()

    async def note(error: Exception) -> None:
        nonlocal failure
        failure = error
        _log.debug("the NATS client met an error: %s", error)

    for address in _addresses(read_secret("url", servers.url)):
        try:
            client = await nats.connect(
                servers=[address], error_cb=note, closed_cb=note_end, **options
            )
            break
        except nats.errors.NoServersError:
            pass  # the reason was told to `note`
        except (nats.errors.Error, OSError) as error:
            failure = error
    if client is None:
        raise failure
    try:
        yield Connection(client, lost)
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(client.close(), ANSWER_S_MAX)


def failures() -> tuple[type[BaseException], ...]:
    """Return the errors of the client and of the servers."""
    import nats

    return (TimeoutError, nats.errors.Error, OSError)


def is_lost(error: BaseException) -> bool:
    """Return True if the connection broke or the server is away, so that trying again may help."""
    from nats import errors
    from nats.js.errors import APIError, ServiceUnavailableError

    if isinstance(error, APIError):
        return isinstance(error, ServiceUnavailableError)
    if isinstance(error, errors.MaxPayloadError | errors.BadSubjectError | errors.BadHeaderError):
        return False
    if isinstance(error, errors.Error):
        refused = ("authorization", "authentication", "permissions")
        return not any(word in str(error).lower() for word in refused)
    if isinstance(error, ssl.SSLError):
        return False
    return isinstance(error, OSError | asyncio.TimeoutError)


def is_missing(error: BaseException) -> bool:
    """Return True if a stream or a consumer does not exist."""
    from nats.js.errors import APIError

    return isinstance(error, APIError) and error.code == _NOT_FOUND


def reason_of(error: BaseException) -> str:
    """Return the text of the server or of the client, in one line."""
    described = getattr(error, "description", None)
    return " ".join(str(described or error).split()) or type(error).__name__


def cannot_use(servers: Servers, error: BaseException) -> SourceError:
    """Return the error for servers that do not answer, or refuse us."""
    return SourceError(
        f"the NATS servers cannot be used servers=`{servers}`: {reason_of(error)}",
        fix="check the addresses, the credentials, TLS, and that JetStream is on",
    )
