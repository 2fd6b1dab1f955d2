"""A connector over TCP whose mistakes can be chosen: checks that break its connections have to find them.

A counter is a server in a thread of the test. It speaks lines of JSON: a request, and its answer. `read`
answers with a line for each record, and a last one that says that these are all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headgate.errors import StorageError
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.sink import Guarantee, GuaranteeLike, Sink, SinkWriter, parse_guarantee
from headgate.operators.source import Source, SourceReader
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import Feature, SinkCase, SourceCase
from headgate.testing.proxy import CuttingProxy

_TIMEOUT_S = 60


class Counter:
    """The server: lists of records by name, and drafts of further ones."""

    def __init__(self) -> None:
        self.lists: dict[str, list[Any]] = {}
        self.drafts: dict[str, list[Any]] = {}
        self.lock = threading.Lock()
        counter = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    for line in self.rfile:
                        if not line.endswith(b"\n"):
                            return  # a request that was cut
                        for answer in counter.answers(json.loads(line)):
                            self.wfile.write(json.dumps(answer).encode() + b"\n")

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answers(self, request: list[Any]) -> list[Any]:
        kind, *arguments = request
        with self.lock:
            if kind == "read":
                name, begin = arguments
                return [*self.lists.get(name, [])[begin:], "these are all"]
            if kind == "stage":
                draft, records = arguments
                self.drafts[draft] = records
            elif kind == "publish":
                name, draft = arguments
                self.lists.setdefault(name, []).extend(self.drafts.pop(draft, []))
            else:
                name, records = arguments
                self.lists.setdefault(name, []).extend(records)
            return ["done"]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def ask(port: int, *request: Any) -> Iterator[Any]:
    """The answers to a request. Raises OSError if the connection breaks in front of the last one."""
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                yield json.loads(line)
                if line in (b'"these are all"\n', b'"done"\n'):
                    return
    raise ConnectionError("the counter has broken the connection")


class CounterSource(Source[Any]):
    bounded = True

    def __init__(self, port: int, name: str, bug: str) -> None:
        self.port, self.name, self.bug = port, name, bug

    def splits(self, parallelism: int) -> list[bytes]:
        return [b"0"]

    def reader(self) -> SourceReader:
        return CounterReader(self)


class CounterReader(SourceReader):
    finished = False

    def __init__(self, source: CounterSource) -> None:
        self.source, self.bug = source, source.bug
        self.at = 0
        self.answers: Iterator[Any] | None = None

    def add_splits(self, splits: Sequence[bytes]) -> None:
        for split in splits:
            self.at = json.loads(split)
        self.finished = not splits

    def poll(self) -> Batch | None:
        if self.answers is None:
            self.answers = ask(self.source.port, "read", self.source.name, self.at)
        try:
            record = next(self.answers)
        except OSError as error:
            if self.bug == "takes a part for all":
                self.finished = True
                return None
            if self.bug == "begins again":
                self.answers = ask(self.source.port, "read", self.source.name, 0)
                return None
            if self.bug == "a raw error":
                raise
            raise StorageError("the counter does not answer") from error
        if record == "these are all":
            self.finished = True
            return None
        self.at += 1
        return ObjectBatch([record])

    def snapshot(self) -> list[bytes]:
        return [] if self.finished else [json.dumps(self.at).encode()]


class CounterSink(Sink):
    guarantees = frozenset({Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE})

    def __init__(self, port: int, name: str, bug: str, guarantee: GuaranteeLike) -> None:
        self.port, self.name, self.bug = port, name, bug
        self.guarantee = parse_guarantee(guarantee)

    def writer(self) -> SinkWriter:
        return CounterWriter(self)


class CounterWriter(SinkWriter):
    def __init__(self, sink: CounterSink) -> None:
        self.sink = sink
        self.records: list[Any] = []

    def write(self, batch: Batch) -> None:
        self.records += batch.records if isinstance(batch, ObjectBatch) else []

    def ask(self, *request: Any) -> None:
        try:
            for _ in ask(self.sink.port, *request):
                pass
        except OSError as error:
            if self.sink.bug == "takes silence for success":
                return
            raise StorageError("the counter does not answer") from error

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        records, self.records = self.records, []
        draft = f"{self.sink.name}-{self.context.attempt}-{checkpoint_id}"

        def stage() -> list[bytes]:
            if self.sink.guarantee is Guarantee.AT_LEAST_ONCE:
                self.ask("append", self.sink.name, records)
                return []
            self.ask("stage", draft, records)
            return [json.dumps([draft, records]).encode()]

        return stage

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        for committable in committables:
            draft, records = json.loads(committable)
            if self.sink.bug == "sends it again":
                self.ask("append", self.sink.name, records)
            else:
                self.ask("publish", self.sink.name, draft)


class _Counted:
    features = frozenset({Feature.CUTS, Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE})

    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.counter: Counter | None = None
        self.port = 0
        self._numbers = itertools.count()

    @contextmanager
    def cutting(self) -> Iterator[CuttingProxy]:
        self.counter = Counter()
        try:
            with CuttingProxy(self.counter.port) as proxy:
                self.port = proxy.port
                yield proxy
        finally:
            self.counter.close()

    @contextmanager
    def place(self) -> Iterator[str]:
        yield f"list-{next(self._numbers)}"

    def records(self) -> list[Any]:
        return list(range(12))


class CounterSourceCase(_Counted, SourceCase):
    def put(self, place: str, records: Sequence[Any]) -> None:
        assert self.counter is not None
        self.counter.lists.setdefault(place, []).extend(records)

    def source(self, place: str) -> Source:
        return CounterSource(self.port, place, self.bug)


class CounterSinkCase(_Counted, SinkCase):
    def batches(self, records: Sequence[Any]) -> list[Batch]:
        return [ObjectBatch(list(records[at : at + 2])) for at in range(0, len(records), 2)]

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return CounterSink(self.port, place, self.bug, guarantee)

    def visible(self, place: str) -> list[Any]:
        assert self.counter is not None
        with self.counter.lock:
            return list(self.counter.lists.get(place, []))
