"""The connection to a server of Redis or Valkey: its address, secrets, and errors that say what to do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from ...errors import SourceError, UsageError
from ...operators.clock import Clock
from ..secrets import is_reference, read_secret

ANSWER_S_MAX: Final = 15
"""The time in which a server has to answer a request."""
AWAY_S: Final = 30.0
"""A call waits for at most this time for a server that is away."""
_PAUSE_S: Final = 0.2
_SCHEMES: Final = ("redis", "rediss", "unix")
_log = logging.getLogger("headgate.connectors.redis")
T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """The address of a server, as the user gives it.

    Attributes:
        url: `redis://user@host:port/database`, `rediss://` with TLS; or where it can be read.
        password: the password, or where it can be read; None: it is in the URL, or not needed.
        ca: the file of the authorities to trust; None: those of the system.
        certificate: the file with the certificate of the client.
        key: the file with its key.
        cluster: the server is a node of a cluster, which tells where the others are.
    """

    url: str
    password: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    cluster: bool = False

    def check(self) -> None:
        """Check the form of the URL.

        Raises:
            UsageError: it is not the address of a server.
        """
        if not is_reference(self.url):
            _check_url(self.url)

    def __str__(self) -> str:
        """Return host, port and database."""
        if is_reference(self.url):
            return self.url
        try:
            _check_url(self.url)
        except UsageError:
            return "***"
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return parts.path
        return f"{parts.hostname}:{parts.port or 6379}{parts.path.rstrip('/')}"

    def __repr__(self) -> str:
        """Return the address without secrets."""
        return f"Address({self})"


def _check_url(url: str) -> None:
    wrong = UsageError(
        "not the address of a Redis server",
        fix='url="redis://host:6379/0", or rediss:// for TLS; give a password with other '
        "characters than letters and digits as password=",
    )
    try:
        parts = urlsplit(url)
        database = parts.path.strip("/")
        fits = parts.scheme in _SCHEMES and not parts.query and not parts.fragment
        if parts.scheme == "unix":
            fits = fits and bool(database)
        else:
            fits = fits and bool(parts.hostname) and (not database or database.isdecimal())
            fits = fits and (parts.port is None or parts.port > 0)
    except ValueError:
        raise wrong from None  # the text of the error could have a part of a password
    if not fits:
        raise wrong


def connect(address: Address, name: str) -> Any:
    """Return a client of the server, which has answered.

    Args:
        address: of the server.
        name: the name that the server shows for the connection.

    Raises:
        SourceError: the server does not answer, or refuses us.
        UsageError: the URL or a secret cannot be read.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    url = read_secret("url", address.url)
    _check_url(url)
    options: dict[str, Any] = {
        "client_name": "".join(each if each.isalnum() else "-" for each in name),
        "protocol": 2,
        "socket_timeout": ANSWER_S_MAX,
        "socket_connect_timeout": ANSWER_S_MAX,
        "socket_keepalive": True,
    }
    if address.password is not None:
        options["password"] = read_secret("password", address.password)
    if url.startswith("rediss:"):
        files = {
            "ssl_ca_certs": address.ca,
            "ssl_certfile": address.certificate,
            "ssl_keyfile": address.key,
        }
        options |= {key: value for key, value in files.items() if value is not None}
    try:
        if address.cluster:
            client: Any = redis.RedisCluster.from_url(url, **options)
        else:
            # We try again ourselves: a request may have been carried out although its answer was lost.
            client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)
        try:
            client.ping()
        except BaseException:
            client.close()
            raise
    except (redis.RedisError, OSError) as error:
        raise cannot_use(address, error) from error
    return client


def cannot_use(address: Address, error: BaseException) -> SourceError:
    """Return the error for a server that does not answer, or refuses us."""
    return SourceError(
        f"the Redis server cannot be used server=`{address}`: {reason_of(error)}",
        fix="check the address, the user and the password, the rights of the user (ACL), and redis:// or "
        "rediss://",
    )


def too_old(address: Address) -> SourceError:
    """Return the error for a server whose streams do not count their entries."""
    return SourceError(
        f"the server is too old server=`{address}`: it does not count the entries of streams, so it cannot "
        "be known whether some were deleted before they were read",
        fix="use Redis 7.0 or newer, or Valkey",
    )


def reason_of(error: BaseException) -> str:
    """Return the text of the server or of the client, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def is_lost(error: BaseException) -> bool:
    """Return True if the connection broke or the server is away, so that trying again may help."""
    from redis import exceptions

    refused = (exceptions.AuthenticationError, exceptions.AuthorizationError)
    away = (
        *(exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError),
        *(exceptions.ClusterDownError, exceptions.TryAgainError, exceptions.MasterDownError),
    )
    return isinstance(error, away) and not isinstance(error, refused)


def persistently(work: Callable[[], T], clock: Clock, goes_on: Callable[[], bool]) -> T:
    """Do something with the server, and again if it is away for a moment.

    Args:
        work: must be repeatable, as the server may have carried it out before the connection broke.
        clock: measures for how long the server is away.
        goes_on: returns False when nothing should be tried again.
    """
    from redis import RedisError

    deadline = clock.monotonic() + AWAY_S
    while True:
        try:
            return work()
        except RedisError as error:
            if not is_lost(error) or not goes_on() or clock.monotonic() > deadline:
                raise
            _log.warning("the Redis server is tried again: %s", reason_of(error))
            time.sleep(_PAUSE_S)
