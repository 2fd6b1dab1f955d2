"""A queue over TCP and its source, whose mistakes can be chosen: checks of acknowledgements find them.

A message belongs to the connection that has taken it, and goes back to the queue when that ends. A
connection speaks lines of JSON: a request, and its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headgate.errors import StorageError
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.source import Source, SourceReader
from headgate.testing.connectors import Feature, SourceCase
from headgate.testing.proxy import CuttingProxy
from headgate.testing.servers.process import HeldPort

_TIMEOUT_S = 60
MOST = 13
"""The most messages that a reader has and no checkpoint."""


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


class Basket:
    """The server. Its queues outlive a `kill`."""

    def __init__(self) -> None:
        self.queues: dict[str, dict[int, Any]] = {}
        self.held: dict[int, object] = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        self.port = HeldPort()
        self.connections: set[socket.socket] = set()
        self.listener: _Listener | None = None

    def start(self) -> None:
        basket = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                basket.serve(self.connection, self.rfile, self.wfile)

        self.listener = _Listener(("127.0.0.1", self.port.number), Handler)
        threading.Thread(target=self.listener.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.shutdown()
            listener.server_close()
        with self.lock:
            connections = list(self.connections)
        for each in connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve(self, connection: socket.socket, requests: Any, answers: Any) -> None:
        with self.lock:
            self.connections.add(connection)
        try:
            for line in requests:
                if not line.endswith(b"\n"):
                    return  # a request that was cut
                answer = self.answer(connection, json.loads(line))
                answers.write(json.dumps(answer).encode() + b"\n")
        except OSError:
            pass
        finally:
            with self.lock:
                self.connections.discard(connection)
                self.held = {id_: by for id_, by in self.held.items() if by is not connection}

    def answer(self, connection: object, request: list[Any]) -> Any:
        kind, name, ids = request
        with self.lock:
            queue = self.queues.setdefault(name, {})
            if kind == "acknowledge":
                for id_ in ids:
                    queue.pop(id_, None)
                return None
            for id_, record in queue.items():
                if id_ not in self.held:
                    self.held[id_] = connection
                    if kind == "take and acknowledge":
                        del queue[id_]
                    return [id_, record]
            return None


class BasketSource(Source[Any]):
    needs_checkpoints = True

    def __init__(self, port: int, name: str, bug: str) -> None:
        self.port, self.name, self.bug = port, name, bug

    def splits(self, parallelism: int) -> list[bytes]:
        return [b"0", b"1"]

    def reader(self) -> SourceReader:
        return BasketReader(self)


class BasketReader(SourceReader):
    def __init__(self, source: BasketSource) -> None:
        self.source, self.bug = source, source.bug
        self.connection: socket.socket | None = None
        self.mine: list[bytes] = []
        self.taken: list[int] = []
        self.cuts: dict[int, int] = {}
        self.over = False

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self.mine += splits

    @property
    def finished(self) -> bool:
        return self.over or not self.mine

    def ask(self, kind: str, ids: Sequence[int] = ()) -> Any:
        try:
            if self.connection is None:
                address = ("127.0.0.1", self.source.port)
                self.connection = socket.create_connection(address, timeout=_TIMEOUT_S)
                self.answers = self.connection.makefile("rb")
            request = json.dumps([kind, self.source.name, list(ids)])
            self.connection.sendall(request.encode() + b"\n")
            line = self.answers.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("the basket has broken the connection")
            return json.loads(line)
        except OSError as error:
            if self.bug == "a raw error":
                raise
            raise StorageError("the basket does not answer") from error

    def poll(self) -> Batch | None:
        if self.finished or (len(self.taken) >= MOST and self.bug != "takes any number"):
            return None
        early = self.bug == "acknowledges when it takes"
        try:
            found = self.ask("take and acknowledge" if early else "take")
        except StorageError:
            if self.bug == "ends when the server is away":
                self.over = True
                return None
            raise
        if found is None:
            return None
        id_, record = found
        self.taken.append(id_)
        return ObjectBatch([record])

    async def wait(self) -> None:
        await asyncio.sleep(0.001)

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        self.cuts[checkpoint_id] = len(self.taken)
        if self.bug == "acknowledges at the barrier":
            self.acknowledge(len(self.taken))

    def snapshot(self) -> list[bytes]:
        return list(self.mine)

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        if self.bug == "acknowledges nothing":
            return
        everything = self.bug == "acknowledges what it has taken"
        self.acknowledge(len(self.taken) if everything else self.cuts.pop(checkpoint_id))

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        if self.bug == "takes an abort for a completion":
            self.acknowledge(self.cuts[checkpoint_id])
        self.cuts.pop(checkpoint_id)

    def acknowledge(self, count: int) -> None:
        due, self.taken = self.taken[:count], self.taken[count:]
        self.cuts = {id_: max(0, cut - count) for id_, cut in self.cuts.items()}
        with contextlib.suppress(StorageError):  # they come again
            self.ask("acknowledge", due)

    def close(self) -> None:
        if self.bug == "acknowledges at the end":
            self.acknowledge(len(self.taken))
        if self.connection is not None:
            self.answers.close()
            self.connection.close()
            self.connection = None


class BasketCase(SourceCase):
    """A queue of its own for each check."""

    features = frozenset(
        {
            *(Feature.ACKNOWLEDGES, Feature.CONFIRMS, Feature.LIVE),
            *(Feature.SERVER, Feature.CUTS),
        }
    )
    unacknowledged_max = MOST

    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.basket = Basket()
        self.server = self.basket
        self.port = self.basket.port.number
        self.put_count = 0
        self._numbers = itertools.count()

    @contextmanager
    def place(self) -> Iterator[str]:
        self.basket.start()
        try:
            self.put_count = 0
            yield f"queue-{next(self._numbers)}"
        finally:
            self.basket.kill()

    @contextmanager
    def cutting(self) -> Iterator[CuttingProxy]:
        own = self.port
        with CuttingProxy(own) as proxy:
            self.port = proxy.port
            try:
                yield proxy
            finally:
                self.port = own

    def records(self) -> list[Any]:
        return list(range(12))

    def put(self, place: str, records: Sequence[Any]) -> None:
        with self.basket.lock:
            queue = self.basket.queues.setdefault(place, {})
            for record in records:
                queue[next(self.basket.numbers)] = record
        self.put_count += len(records)

    def source(self, place: str) -> Source:
        return BasketSource(self.port, place, self.bug)

    def live(self, place: str) -> Source:
        return self.source(place)

    def confirmed(self, place: str) -> int:
        with self.basket.lock:
            return self.put_count - len(self.basket.queues.get(place, {}))
