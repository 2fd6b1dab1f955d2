"""The broker that tests start: what it has acknowledged outlives a crash, and nothing is left of it.

The tests speak the stream protocol themselves, with the few commands that they need.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import psutil
import pytest

from headgate.operators.clock import SystemClock
from headgate.testing.servers.programs import NotAvailableError
from headgate.testing.servers.rabbitmq import RabbitServer, running
from headgate.tests.support.rabbitmq_cases import definitions
from headgate.tests.support.skips import available, skip_or_fail

_ANSWER_S_MAX: Final = 60
_USERS: Final = 1000
"""A broker is still busy with this number of them when it answers."""

_CREATE: Final = 13
_PEER_PROPERTIES: Final = 17
_MECHANISMS: Final = 18
_LOGIN: Final = 19
_TUNE: Final = 20
_OPEN: Final = 21
_HEARTBEAT: Final = 23

_OK: Final = 1
_STREAM_EXISTS: Final = 5
_WRONG_CREDENTIALS: Final = 8
_INTERNAL_ERROR: Final = 15


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    with available(running(tmp_path_factory.mktemp("rabbitmq") / "server")) as running_server:
        yield running_server


def test_streams_outlive_a_crash(server: RabbitServer) -> None:
    assert created(server, "flights") == _OK
    server.wait_until_durable()
    server.kill()
    server.start()
    assert created(server, "flights") == _STREAM_EXISTS
    assert created(server, "trips") == _OK


def test_a_wrong_password_is_refused(server: RabbitServer) -> None:
    with closing(Session(server.port)) as session:
        assert session.logged_in("guest", "wrong") == _WRONG_CREDENTIALS


def test_a_broker_that_has_started_lets_its_user_in(tmp_path: Path) -> None:
    """It answers while it still loads its definitions, and refuses all users until then."""
    given = json.loads(definitions(2))
    (own,) = given["users"]
    given["users"] = [*(own | {"name": f"user-{number}"} for number in range(_USERS)), own]
    file = tmp_path / "definitions.json"
    file.write_text(json.dumps(given))
    with (
        available(running(tmp_path / "server", f"load_definitions = {file}")) as server,
        closing(Session(server.port)) as session,
    ):
        assert session.logged_in("guest", "guest") == _OK
        session.tune_as_offered()
        assert session.answer_to(_OPEN, text("/")) == _OK


def test_it_listens_on_loopback_alone_and_nothing_stays_behind(tmp_path: Path) -> None:
    try:
        server = RabbitServer(tmp_path / "server")
    except NotAvailableError as error:
        skip_or_fail(str(error))
    before = set(psutil.Process().children(recursive=True))
    try:
        server.start()
        processes = set(psutil.Process().children(recursive=True)) - before
        listening = {
            (connection.laddr.ip, connection.laddr.port)
            for process in processes
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert ("127.0.0.1", server.port) in listening
        assert {address for address, _ in listening} <= {"127.0.0.1", "::1"}
    finally:
        server.close()
    deadline = SystemClock().monotonic() + _ANSWER_S_MAX
    while any(map(runs, processes)) and SystemClock().monotonic() < deadline:
        time.sleep(0.05)
    assert not [process for process in processes if runs(process)]


def runs(process: psutil.Process) -> bool:
    """Return False also for one that has ended, and that its new parent has not asked about yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def created(server: RabbitServer, stream: str) -> int:
    """Create a stream, and return the code of the broker's answer.

    A broker that has just started may answer with an error, because it accepts connections before the
    part of it that places streams (the coordinator) has a leader; the request is then sent again.
    """
    deadline = SystemClock().monotonic() + _ANSWER_S_MAX
    with closing(Session(server.port)) as session:
        assert session.logged_in("guest", "guest") == _OK
        session.tune_as_offered()
        assert session.answer_to(_OPEN, text("/")) == _OK
        while True:
            code = session.answer_to(_CREATE, text(stream) + struct.pack(">I", 0))
            if code != _INTERNAL_ERROR or SystemClock().monotonic() > deadline:
                return code
            time.sleep(0.05)


class Session:
    """A connection of the stream protocol, whose answers come in the order of its requests."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S_MAX)
        self._received = self._socket.makefile("rb")

    def close(self) -> None:
        self._received.close()
        self._socket.close()

    def logged_in(self, user: str, password: str) -> int:
        """Log in, and return the code of the answer."""
        assert self.answer_to(_PEER_PROPERTIES, struct.pack(">I", 0)) == _OK
        assert self.answer_to(_MECHANISMS, b"") == _OK
        secret = f"\0{user}\0{password}".encode()
        return self.answer_to(_LOGIN, text("PLAIN") + struct.pack(">I", len(secret)) + secret)

    def tune_as_offered(self) -> None:
        """Accept the limits that the broker offers after a login."""
        self._send(self._frame(_TUNE))

    def answer_to(self, command: int, content: bytes) -> int:
        """Send a request, and return the code of the answer."""
        self._send(struct.pack(">HHI", command, 1, 7) + content)
        answer = self._frame(command | 0x8000)
        correlation, code = struct.unpack(">IH", answer[4:10])
        assert correlation == 7
        return int(code)

    def _send(self, frame: bytes) -> None:
        self._socket.sendall(struct.pack(">I", len(frame)) + frame)

    def _frame(self, command: int) -> bytes:
        frame = self._next_frame()
        while frame[:2] == struct.pack(">H", _HEARTBEAT):
            frame = self._next_frame()
        assert struct.unpack(">HH", frame[:4]) == (command, 1)
        return frame

    def _next_frame(self) -> bytes:
        (length,) = struct.unpack(">I", self._received.read(4))
        return self._received.read(length)


def text(value: str) -> bytes:
    """Return a string as the protocol writes it."""
    return struct.pack(">H", len(value.encode())) + value.encode()
