"""Programs that connectors talk to, in a process of their own: `python benchmarks/connector_programs.py`.

The process writes the ports of its programs to standard output as JSON, and ends with its standard input:
services of HTTP and of WebSockets, a program that sends lines to each client, and one that takes lines.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from urllib.parse import parse_qs, urlsplit

from kafka_topics import message

from headgate.tests.support.http_stub import Asked, Given, HttpStub
from headgate.tests.support.websocket_stub import Connected, talking

PAGE = 1_000
"""Records of an answer to a request for rows, and of a part of a stream of events."""


@cache
def page(begin: int, end: int) -> bytes:
    """Return records as an array of JSON."""
    return b"[" + b",".join(map(message, range(begin, end))) + b"]"


@cache
def events(begin: int, end: int) -> bytes:
    """Return records as server-sent events."""
    return b"".join(b"id: %d\ndata: %s\n\n" % (n, message(n)) for n in range(begin, end))


@cache
def lines(rows: int) -> bytes:
    """Return records as lines of JSON."""
    return b"".join(message(number) + b"\n" for number in range(rows))


def answer(asked: Asked) -> Given:
    """Take what is sent; give the rows, or the events, that follow the one that was had last."""
    if asked.method == "POST":
        return 200, {}, b"{}"
    url = urlsplit(asked.path)
    kind, rows = url.path.split("/")[1:]
    if kind == "events":
        begin = int(asked.headers.get("last-event-id", "-1")) + 1
        if begin >= int(rows):
            return 204, {}, b""
        return 200, {"Content-Type": "text/event-stream"}, _streamed(begin, int(rows))
    begin = int(parse_qs(url.query).get("after", ["-1"])[0]) + 1
    return 200, {}, page(begin, min(begin + PAGE, int(rows)))


def _streamed(begin: int, rows: int) -> Iterable[bytes]:
    return (events(at, min(at + PAGE, rows)) for at in range(begin, rows, PAGE))


def _accept(listener: socket.socket, talk: Callable[[socket.socket], None]) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            talk(connection)


def _listen(talk: Callable[[socket.socket], None]) -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, talk), daemon=True).start()
    return int(listener.getsockname()[1])


def _take(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


async def _messages(connected: Connected) -> None:
    for number in range(int(connected.path.removeprefix("/"))):
        await connected.send_bytes(message(number))


def _ports(rows: Iterator[int]) -> dict[str, int]:
    """Start the programs, and return their ports; one port for each number of lines to send."""
    found = {"takes": _listen(_take)}
    for number in rows:
        text = lines(number)
        found[f"sends-{number}"] = _listen(lambda connection, text=text: connection.sendall(text))  # type: ignore[misc]
    return found


def main() -> None:
    """Serve until standard input ends."""
    ports = _ports(map(int, sys.argv[1:]))
    with HttpStub(answer) as stub, talking(_messages) as messages:
        print(json.dumps({"http": stub.port, "websocket": messages.port, **ports}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
