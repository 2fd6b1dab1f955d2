"""The connection to a cluster of Pulsar: addresses, secrets, and errors that say what to do."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from ...errors import SourceError, UsageError
from ..secrets import is_reference, read_secret
from ..tls import client_context
from .greeting import RefusedError, greet

ANSWER_S_MAX: Final = 15
"""The time in which a broker has to answer a request, tries of other connections included."""
AWAY_S: Final = 30.0
"""Brokers that are away are tried again for this time."""
_EXIT_S_MAX: Final = 2.0
"""The longest wait of a process that ends for the thread that closes a client."""
PAUSE_S: Final = 0.2
"""The pause before a request is made again."""
LOST: Final = frozenset(
    {
        *("Timeout", "ConnectError", "NotConnected", "AlreadyClosed", "LookupError", "ReadError"),
        *("UnknownError", "ServiceUnitNotReady", "TooManyLookupRequestException"),
        *("BrokerMetadataError", "BrokerPersistenceError", "ProducerNotInitialized"),
    }
)
"""The failures after which trying again may help, as the client calls them."""


@dataclass(frozen=True)
class Cluster:
    """The addresses of a cluster, and the credentials, as the user gives them.

    Attributes:
        url: `pulsar://host:6650` or `pulsar+ssl://host:6651`, several hosts with commas; or where it can be
            read.
        token: the token, or where it can be read; None: none is given.
        ca: the file of the authorities to trust; None: those of the package certifi.
        certificate: the file with the certificate of the client, which says who it is if there is no token.
        key: the file with its key.
    """

    url: str
    token: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def check(self) -> None:
        """Check the form of the addresses.

        Raises:
            UsageError: they are not those of a cluster.
        """
        if not is_reference(self.url):
            _check_url(self.url)
        if (self.certificate is None) != (self.key is None):
            raise UsageError("certificate= and key= belong together", fix="give both, or neither")

    def __str__(self) -> str:
        """Return the addresses, which have no secrets."""
        return self.url

    def __repr__(self) -> str:
        """Return the addresses without secrets."""
        return f"Cluster({self})"

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """Make a client, with secrets read on this machine, for the time of the block.

        It connects when it is used, and connects again by itself.
        """
        import pulsar

        login = None
        if self.token is not None:
            login = pulsar.AuthenticationToken(read_secret("token", self.token))
        elif self.certificate is not None:
            login = pulsar.AuthenticationTLS(self.certificate, self.key)
        made = pulsar.Client(
            self._read_url(),
            authentication=login,
            operation_timeout_seconds=ANSWER_S_MAX,
            connection_timeout_ms=ANSWER_S_MAX * 1000,
            stats_interval_in_seconds=0,
            tls_trust_certs_file_path=self.ca,
            tls_validate_hostname=True,
            tls_certificate_file_path=self.certificate,
            tls_private_key_file_path=self.key,
            # A logger of Python would be called for every message that is received.
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/stderr"),
        )
        ended = threading.Event()

        def end() -> None:
            if not ended.wait(_EXIT_S_MAX):
                made.shutdown()
                ended.wait(_EXIT_S_MAX)

        # Python ends threads where they are, which the client takes for a failure and ends the process.
        atexit.register(end)
        try:
            yield made
        finally:
            made.shutdown()
            ended.set()
            atexit.unregister(end)

    @contextlib.contextmanager
    def checked_client(self) -> Iterator[Any]:
        """Make a client of a cluster that lets it in, for the time of the block.

        Raises:
            SourceError: no broker can be reached, or it does not let the client in.
        """
        import certifi

        url, tls, login = self._read_url(), None, ("none", b"")
        if url.startswith("pulsar+ssl:"):
            tls = client_context(self.ca or certifi.where(), self.certificate, self.key)
        if self.token is not None:
            login = "token", read_secret("token", self.token).encode()
        elif self.certificate is not None:
            login = "tls", b""
        try:
            greet(_hosts_of(url), tls, login, ANSWER_S_MAX)
        except OSError as error:
            raise self._unusable(f"no broker can be reached: {error}") from error
        except RefusedError as error:
            raise self._unusable(f"a broker refuses the client: {error}") from error
        with self.client() as made:
            yield made

    def _read_url(self) -> str:
        url = read_secret("url", self.url)
        _check_url(url)
        return url

    def _unusable(self, reason: str) -> SourceError:
        return SourceError(
            f"the Pulsar cluster cannot be used cluster=`{self}`: {reason}",
            fix="check the address, the token, the certificates, and that the brokers run",
        )

    def cannot_use(self, error: BaseException) -> SourceError:
        """Return the error for a cluster that cannot be used."""
        return self._unusable(reason_of(error))

    def cannot_read(self, topic: str, error: BaseException) -> SourceError:
        """Return the error for a topic that cannot be read."""
        if is_lost(error):
            return self.cannot_use(error)
        return SourceError(
            f"a topic cannot be read topic=`{topic}` cluster=`{self}`: {reason_of(error)}",
            fix="check that the topic is there, and the right to consume it",
        )


def _hosts_of(url: str) -> list[tuple[str, int | None]]:
    """Return the hosts of an address, with their ports.

    Raises:
        ValueError: it is not the address of a cluster.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("pulsar", "pulsar+ssl"):
        raise ValueError(url)
    hosts = []
    for each in rest.rstrip("/").split(","):
        parts = urlsplit(f"//{each.removeprefix(f'{scheme}://')}")
        if not parts.hostname or parts.username or parts.path or parts.query:
            raise ValueError(url)
        hosts.append((parts.hostname, parts.port))
    return hosts


def _check_url(url: str) -> None:
    try:
        _hosts_of(url)
    except ValueError:
        raise UsageError(
            "not the address of a Pulsar cluster",
            fix='url="pulsar://host:6650" or "pulsar+ssl://host:6651", several hosts with commas; '
            "credentials are given as token=, or certificate= and key=",
        ) from None


def check_topic(topic: str) -> None:
    """Check the name of a topic, with or without its namespace.

    Raises:
        UsageError: no topic can have it.
    """
    short = topic.removeprefix("persistent://")
    if not all(short.split("/")) or short.count("/") not in ((2,) if short != topic else (0, 2)):
        raise UsageError(
            f"not the name of a topic that keeps its messages topic=`{topic}`",
            fix="orders, tenant/namespace/orders or persistent://tenant/namespace/orders",
        )


def failures() -> tuple[type[BaseException], ...]:
    """Return the errors of the client and of the brokers."""
    import pulsar

    return (pulsar.PulsarException,)


def is_lost(error: BaseException) -> bool:
    """Return True if trying again may help."""
    return type(error).__name__ in LOST


def reason_of(error: BaseException) -> str:
    """Return the text of an error, in one line."""
    import pulsar

    if isinstance(error, pulsar.Timeout | pulsar.ConnectError):
        return "no broker answers, or lets the client in"
    return " ".join(str(error).split())
