"""A service of HTTP in this process, which can be killed and started again at the same address."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

Given: TypeAlias = tuple[int, Mapping[str, str], bytes | Iterable[bytes]]


@dataclass(frozen=True)
class Asked:
    """A request: its headers have names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


class HttpStub:
    """Answers requests with what `answer` returns.

    Attributes:
        asked: all requests.
        answer: returns the status, the headers and the body; parts of a body are sent as they come.
    """

    def __init__(
        self, answer: Callable[[Asked], Given], context: ssl.SSLContext | None = None, port: int = 0
    ) -> None:
        self.asked: list[Asked] = []
        self.answer = answer
        self._context = context
        self._server: _Server | None = None
        self.port = port

    @property
    def url(self) -> str:
        """The address of the service."""
        return f"{'http' if self._context is None else 'https'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, at the port that it had before if there was one."""
        self._server = _Server(("127.0.0.1", self.port), _handler_of(self))
        self.port = self._server.server_port
        if self._context is not None:
            self._server.socket = self._context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        """End it, and reset all its connections."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            server.reset()

    def __enter__(self) -> HttpStub:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients leave, and the server is killed."""

    def reset(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _handler_of(stub: HttpStub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, self.path, headers, body)
            stub.asked.append(asked)
            status, more, answer = stub.answer(asked)
            self.send_response(status)
            for name, value in more.items():
                self.send_header(name, value)
            if isinstance(answer, bytes):
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
                return
            self.send_header("Connection", "close")
            self.end_headers()
            for part in answer:
                self.wfile.write(part)
                self.wfile.flush()
            self.close_connection = True

        do_GET = do_POST = do_PUT = do_PATCH = _do

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

    return Handler


class TakenRecords:
    """The records that a service has taken, each request with the same key once.

    Attributes:
        by_key: the records, by the key of idempotence.
        token: the header `Authorization` that requests must have; None: none.
        trouble: is called with each request; returns an answer to give instead.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, list[Any]] = {}
        self.token: str | None = None
        self.trouble: Callable[[Asked], Given | None] = lambda asked: None
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> Given:
        given = self.trouble(asked)
        if given is not None:
            return given
        if self.token is not None and asked.headers.get("authorization") != self.token:
            return 401, {}, b"not you: " + asked.headers.get("authorization", "").encode()
        if asked.headers["content-type"] == "application/x-ndjson":
            records = [json.loads(line) for line in asked.body.splitlines()]
        else:
            found = json.loads(asked.body)
            records = found if isinstance(found, list) else [found]
        with self._lock:
            self.by_key.setdefault(asked.headers["idempotency-key"], records)
        return 200, {}, b"{}"

    @property
    def records(self) -> list[Any]:
        """All records, in the order in which their requests came."""
        with self._lock:
            return [record for records in self.by_key.values() for record in records]


@contextlib.contextmanager
def taking(
    context: ssl.SSLContext | None = None, port: int = 0
) -> Iterator[tuple[HttpStub, TakenRecords]]:
    """Start a service that takes records, at a port that the operating system chooses or at this one."""
    taken = TakenRecords()
    with HttpStub(taken, context, port) as stub:
        yield stub, taken
