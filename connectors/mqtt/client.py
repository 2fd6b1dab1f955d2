"""The connection to a broker of MQTT: its address, secrets, and errors that say what to do."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from ...errors import SourceError, UsageError
from ...operators.clock import Clock
from ..secrets import is_reference, read_secret
from ..tls import client_context

ANSWER_S_MAX: Final = 15.0
"""The time in which a broker has to answer."""
AWAY_S: Final = 30.0
"""A broker that is away is tried again for this time."""
PAUSE_S: Final = 0.2
KEEP_ALIVE_S: Final = 30
_NO_TOPIC: Final = "headgate/to-which-nobody-subscribes"
_PORTS: Final = {"mqtt": 1883, "mqtts": 8883}


@dataclass(frozen=True)
class Broker:
    """The address of a broker, and the credentials, as the user gives them.

    Attributes:
        url: `mqtt://host:1883` or `mqtts://host:8883`; or where it can be read.
        user: the name of the user; None: none is given.
        password: the password, or where it can be read.
        ca: the file of the authorities to trust; None: those of the system.
        certificate: the file with the certificate of the client.
        key: the file with its key.
    """

    url: str
    user: str | None = None
    password: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def check(self) -> None:
        """Check the form of the address.

        Raises:
            UsageError: it is not that of a broker.
        """
        if not is_reference(self.url):
            _address(self.url)
        if self.password is not None and self.user is None:
            raise UsageError("a password needs a user", fix="give user= as well")

    def __str__(self) -> str:
        """Return the address, which has no secrets."""
        if is_reference(self.url):
            return self.url
        try:
            host, port, _ = _address(self.url)
        except UsageError:
            return "***"
        return f"{host}:{port}"

    def __repr__(self) -> str:
        """Return the address without secrets."""
        return f"Broker({self})"


class Refused(Exception):
    """The broker has refused a client."""


def _address(url: str) -> tuple[str, int, bool]:
    """Return host, port, and whether TLS is used."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in _PORTS and bool(parts.hostname) and "@" not in parts.netloc
        fits = fits and not parts.path.strip("/") and not parts.query
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        fits, port = False, 0
    if not fits:
        raise UsageError(
            "not the address of an MQTT broker",
            fix='url="mqtt://host:1883", or mqtts:// for TLS; credentials are given as user= and password=',
        )
    return str(parts.hostname), port, parts.scheme == "mqtts"


class Connection:
    """A client of MQTT 5, used by one thread."""

    def __init__(
        self, broker: Broker, client_id: str, keep_alive_s: int = KEEP_ALIVE_S, **options: Any
    ) -> None:
        """Make a client, which `connect` connects.

        Args:
            broker: to connect to.
            client_id: names the session; empty: the broker makes a name.
            keep_alive_s: the broker ends a connection that is silent for longer; 0: it does not.
            options: of the session, as properties of the packet CONNECT.

        Raises:
            UsageError: the address, a secret or a file of certificates cannot be read.
        """
        from paho.mqtt.client import Client, MQTTv5
        from paho.mqtt.enums import CallbackAPIVersion
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        self._keep_alive_s = keep_alive_s
        self._host, self._port, tls = _address(read_secret("url", broker.url))
        self._options = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        for name, value in options.items():
            setattr(self._options, name, value)
        self.client = Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=MQTTv5,
            manual_ack=True,
            reconnect_on_failure=False,
        )
        self.client.connect_timeout = ANSWER_S_MAX
        self.client.max_queued_messages_set(0)
        self.client.on_connect = self._connected
        self.client.on_disconnect = self._disconnected
        if broker.user is not None:
            password = None if broker.password is None else read_secret("password", broker.password)
            self.client.username_pw_set(broker.user, password)
        if tls:
            self.client.tls_set_context(client_context(broker.ca, broker.certificate, broker.key))
        self.session_present = False
        """The broker had a session of this name."""
        self.reason = ""
        """Why the last connection ended, in the words of the broker."""
        self._answer: Any = None

    def _connected(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.session_present = bool(flags.session_present)
        self._answer = reason

    def _disconnected(
        self, client: Any, data: Any, flags: Any, reason: Any, properties: Any
    ) -> None:
        # The word of the broker comes first, and then the end of the connection.
        if reason.is_failure and not self.reason:
            self.reason = str(reason)

    def connect(self, clock: Clock, *, clean: bool) -> None:
        """Connect, and wait for the answer of the broker.

        Args:
            clock: measures the wait.
            clean: whether to forget the session before.

        Raises:
            OSError: it does not answer.
            Refused: it refuses us.
        """
        self._answer, self.reason = None, ""
        self.client.connect(
            self._host,
            self._port,
            self._keep_alive_s,
            clean_start=clean,
            properties=self._options,
        )
        deadline_s = clock.monotonic() + ANSWER_S_MAX
        while self._answer is None:
            try:
                self.turn(PAUSE_S)
            except OSError:
                if self._answer is None:  # a refusal ends the connection as well
                    raise
            if clock.monotonic() > deadline_s:
                raise TimeoutError("the broker does not answer")
        if self._answer.is_failure:
            raise Refused(str(self._answer))

    def turn(self, seconds: float) -> None:
        """Receive what has come, or wait for something; send what waits.

        Raises:
            OSError: the connection has ended.
        """
        result = self.client.loop(seconds)
        if result != 0:
            from paho.mqtt.client import error_string

            raise ConnectionError(self.reason or error_string(result))

    def settle(self, clock: Clock) -> None:
        """Wait until the broker has read all that was sent, at most `ANSWER_S_MAX`.

        Brokers read one packet of a connection at a time. One that meets the next connection of the session
        before the acknowledgements of this one gives their messages again. It answers in order, so that its
        answer to a last question comes behind them.

        Raises:
            OSError: the connection has ended.
        """
        answered: list[Any] = []
        self.client.on_unsubscribe = lambda *given: answered.append(given)
        self.client.unsubscribe(_NO_TOPIC)
        deadline_s = clock.monotonic() + ANSWER_S_MAX
        while not answered and clock.monotonic() < deadline_s:
            self.turn(PAUSE_S)

    def close(self) -> None:
        """End the connection; the session stays as long as it was made for."""
        self.client.disconnect()


def cannot_use(broker: Broker, error: BaseException) -> SourceError:
    """Return the error for a broker that does not answer, or refuses us."""
    return SourceError(
        f"the MQTT broker cannot be used broker=`{broker}`: {reason_of(error)}",
        fix="check the address, the user and the password, TLS, and that the broker speaks MQTT 5",
    )


def reason_of(error: BaseException) -> str:
    """Return the text of the broker or of the client, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def is_lost(error: BaseException) -> bool:
    """Return True if the connection broke or the broker is away, so that trying again may help."""
    return isinstance(error, OSError) and not isinstance(error, ssl.SSLError)


def look(broker: Broker, clock: Clock) -> None:
    """Check that the broker answers, and takes the credentials.

    Raises:
        SourceError: it does not.
    """
    connection = Connection(broker, "")
    try:
        connection.connect(clock, clean=True)
    except (OSError, Refused) as error:
        raise cannot_use(broker, error) from error
    finally:
        connection.close()
