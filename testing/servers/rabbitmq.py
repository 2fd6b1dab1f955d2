"""RabbitMQ with its streams, from Debian's packages.

The broker needs Erlang, whose packages are unpacked together with it, once; nothing is installed or
started as a service. No client is needed: the broker is known by its answers in the stream protocol.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Final

from ...operators.clock import SystemClock
from .process import HeldPort, LocalServer, ServerProcess, runs
from .programs import debian_packages, made_once

_ERLANG: Final = (
    *("base", "asn1", "crypto", "eldap", "inets", "mnesia", "os-mon", "parsetools", "public-key"),
    *("runtime-tools", "ssl", "syntax-tools", "tools", "xmerl"),
)
_PACKAGES: Final = ("rabbitmq-server", *(f"erlang-{part}" for part in _ERLANG))
_ERLEXEC: Final = "usr/lib/erlang/erts-*/bin/erlexec"
_BROKER: Final = "usr/lib/rabbitmq/lib/rabbitmq_server-*"

_ANSWER_S_MAX: Final = 5
_DURABLE_S_MAX: Final = 60
_PEER_PROPERTIES: Final = 17
_MECHANISMS: Final = 18
_LOGIN: Final = 19
_TUNE: Final = 20
_OPEN: Final = 21
_OK: Final = 1
"""Commands of the stream protocol, and the code of a good answer."""
_ANSWER: Final = 0x8000
_USER: Final = b"guest"


class RabbitServer(LocalServer):
    """A broker on loopback that keeps its streams in its directory, also when it is killed.

    The node of Erlang that runs the broker is registered with a port mapper (epmd) of its own, which
    starts and ends with the broker: the default one would outlive it, and listens on a fixed port. The
    user is `guest`, with the password `guest`.

    A kill within about a second after the first stream was created makes the broker forget who
    coordinates its streams, and it cannot create any after that. `wait_until_durable` waits for the end
    of this time.

    Attributes:
        port: of the stream protocol, on 127.0.0.1.
    """

    def __init__(self, directory: Path, settings: str = "") -> None:
        """Prepare a broker; `start` starts it.

        Args:
            directory: for its configuration, its data and its logs; created.
            settings: further lines of its configuration, rabbitmq.conf.

        Raises:
            NotAvailableError: there is no way to get the broker.
        """
        tree = made_once("rabbitmq-debian", ["usr/lib/erlang/bin/erl"], _unpack)
        [erlexec] = tree.glob(_ERLEXEC)
        [broker] = tree.glob(_BROKER)
        directory.mkdir(parents=True, exist_ok=True)
        directory = directory.resolve()
        super().__init__()
        self._data = directory / "data"
        self._mapper_port = HeldPort()
        self._nodes_port = HeldPort()
        self._name = f"headgate-{self.port}"
        (directory / "rabbitmq.conf").write_text(
            f"cluster_name = {self._name}\nlisteners.tcp = none\n"
            f"stream.listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            f"stream.advertised_host = 127.0.0.1\nstream.advertised_port = {self.port}\n"
            f"{settings}\n"
        )
        (directory / "enabled_plugins").write_text("[rabbitmq_stream].\n")
        others = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RABBITMQ_", "ERL_"))
        }
        environment = {
            **others,
            # Erlang's own script `erl` expects to be installed in /usr/lib.
            "ROOTDIR": str(tree / "usr/lib/erlang"),
            "BINDIR": str(erlexec.parent),
            "EMU": "beam",
            "PROGNAME": "erl",
            "HOME": str(directory),  # for the cookie of the node
            "ERL_LIBS": str(broker / "plugins"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port.number),
            "RABBITMQ_HOME": str(broker),
            "RABBITMQ_PLUGINS_DIR": str(broker / "plugins"),
            "RABBITMQ_NODENAME": f"{self._name}@localhost",
            "RABBITMQ_DIST_PORT": str(self._nodes_port.number),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "none.conf"),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self._data),
            "RABBITMQ_LOG_BASE": str(directory / "logs"),
            "RABBITMQ_LOGS": "-",
        }
        mapper = [
            *(str(erlexec.parent / "epmd"), "-address", "127.0.0.1"),
            *("-port", str(self._mapper_port.number)),
        ]
        # As the script rabbitmq-server does it, but the process is the broker itself, not a shell.
        command = [
            *(str(erlexec), "-noinput", "-boot", "start_sasl", "-s", "rabbit", "boot", "+W", "w"),
            *("-syslog", "logger", "[]", "-syslog", "syslog_error_logger", "false"),
            *("-kernel", "prevent_overlapping_partitions", "false"),
            *("-kernel", "inet_dist_use_interface", "{127,0,0,1}"),
        ]
        self._mapper = ServerProcess(
            "epmd", mapper, directory / "epmd.log", self._mapper_answers, environment
        )
        self._process = ServerProcess(
            "RabbitMQ", command, directory / "rabbitmq.log", self._answers, environment
        )

    def start(self) -> None:
        """Start the port mapper and the broker, or start them again with the broker's data.

        Raises:
            RuntimeError: one of them did not come up; the text has the end of its log.
        """
        self._mapper.start()
        super().start()

    def kill(self) -> None:
        """End both processes at once, as a crash of the machine does."""
        super().kill()
        self._mapper.kill()

    def close(self) -> None:
        """Shut both down for good."""
        try:
            super().close()
        finally:
            self._mapper.stop()
            self._mapper_port.release()
            self._nodes_port.release()

    def wait_until_durable(self) -> None:
        """Wait until a kill leaves the streams usable; a stream must have been created before.

        Raises:
            TimeoutError: the broker has not written the name of its coordinator.
        """
        clock = SystemClock()
        deadline = clock.monotonic() + _DURABLE_S_MAX
        while clock.monotonic() < deadline:
            for file in self._data.glob("*/coordination/*/names.dets"):
                if b"rabbit_stream_coordinator" in file.read_bytes():
                    return
            time.sleep(0.05)
        raise TimeoutError(f"RabbitMQ keeps no coordinator of streams in {self._data}")

    def _mapper_answers(self) -> bool:
        """Return True if it tells its own port in answer to a request for the names it knows."""
        with _connected(self._mapper_port.number) as connection:
            connection.sendall(struct.pack(">H", 1) + b"n")
            return _exactly(connection, 4) == struct.pack(">I", self._mapper_port.number)

    def _answers(self) -> bool:
        """Return True if the broker that answers has the name of this one's cluster, and lets us in.

        It answers before it has loaded its users and what they may do, and refuses them until then.
        """
        with _connected(self.port) as connection:
            if self._name.encode() not in _asked(connection, _PEER_PROPERTIES, bytes(4)):
                return False
            _asked(connection, _MECHANISMS, b"")
            secret = b"\0" + _USER + b"\0" + _USER
            login = _short(b"PLAIN") + struct.pack(">I", len(secret)) + secret
            if _code(_asked(connection, _LOGIN, login)) != _OK:
                return False
            limits = _frame(connection)
            while limits[:2] != struct.pack(">H", _TUNE):
                limits = _frame(connection)
            _send(connection, limits)  # as the broker offers them
            return _code(_asked(connection, _OPEN, _short(b"/"))) == _OK


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S_MAX)


def _exactly(connection: socket.socket, length: int) -> bytes:
    """Return the next bytes of a connection.

    Raises:
        ConnectionError: it ended before.
    """
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            raise ConnectionError("the connection ended before the whole answer")
        received += part
    return received


def _send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(struct.pack(">I", len(frame)) + frame)


def _frame(connection: socket.socket) -> bytes:
    (length,) = struct.unpack(">I", _exactly(connection, 4))
    return _exactly(connection, length)


def _asked(connection: socket.socket, command: int, content: bytes) -> bytes:
    """Send a request, and return the answer to it; others that come in between are of no interest."""
    _send(connection, struct.pack(">HHI", command, 1, 1) + content)
    answer = _frame(connection)
    while answer[:2] != struct.pack(">H", command | _ANSWER):
        answer = _frame(connection)
    return answer


def _code(answer: bytes) -> int:
    """Return the code in an answer, behind its command, version and number."""
    (code,) = struct.unpack(">H", answer[8:10])
    return int(code)


def _short(text: bytes) -> bytes:
    """Return a text as the protocol writes it."""
    return struct.pack(">H", len(text)) + text


running = runs(RabbitServer)
"""Runs a broker for the time of a block; its arguments and errors are those of `RabbitServer`."""


def _unpack(directory: Path) -> None:
    debian_packages(directory, _PACKAGES, "RabbitMQ", "rabbitmq-server")
