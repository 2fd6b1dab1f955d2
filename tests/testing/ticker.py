"""A source over TCP whose records come once, and whose mistakes can be chosen.

The server is that of the basket. A record belongs to the reader that has taken it, and never comes again.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

from headgate.errors import StorageError
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.source import Source, SourceReader
from headgate.testing.connectors import Feature

from .basket import BasketCase, BasketSource


class TickerSource(BasketSource):
    needs_checkpoints = False

    def __init__(self, port: int, name: str, bug: str, *, bounded: bool) -> None:
        super().__init__(port, name, bug)
        self.bounded = bounded
        self.replays = bug == "says that it replays"

    def splits(self, parallelism: int) -> list[bytes]:
        return [b"null"]

    def reader(self) -> SourceReader:
        return TickerReader(self)


class TickerReader(SourceReader):
    def __init__(self, source: TickerSource) -> None:
        self.source, self.bug = source, source.bug
        self.connection: socket.socket | None = None
        self.is_mine = self.over = False
        self.last: Any = None
        self.again: list[Any] = []

    def add_splits(self, splits: Sequence[bytes]) -> None:
        for split in splits:
            self.is_mine = True
            self.last = json.loads(split)
            if self.bug == "one record behind" and self.last is not None:
                self.again.append(self.last)

    @property
    def finished(self) -> bool:
        return self.over or not self.is_mine

    def take(self) -> Any:
        """Return the answer to a request for a record; None: there is none now."""
        if self.connection is None:
            address = ("127.0.0.1", self.source.port)
            self.connection = socket.create_connection(address, timeout=60)
            self.answers = self.connection.makefile("rb")
        request = json.dumps(["take and acknowledge", self.source.name, []])
        self.connection.sendall(request.encode() + b"\n")
        line = self.answers.readline()
        if not line.endswith(b"\n"):
            if self.bug == "takes a part for all" and line:
                return [0, line]
            raise ConnectionError("the connection is broken")
        return json.loads(line)

    def poll(self) -> Batch | None:
        if self.finished:
            return None
        if self.again:
            return ObjectBatch([self.again.pop()])
        try:
            found = self.take()
        except OSError as error:
            self.close()
            if self.bug == "ends when the server is away":
                self.over = True
                return None
            if self.bug == "a raw error":
                raise
            raise StorageError("the ticker does not answer") from error
        if found is None:
            self.over = self.source.bounded
            return None
        self.last = found[1]
        return ObjectBatch([self.last] * (2 if self.bug == "each twice" else 1))

    def snapshot(self) -> list[bytes]:
        lost = self.finished or self.bug == "forgets its split"
        return [] if lost else [json.dumps(self.last).encode()]

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            self.answers.close()
            connection.close()


class TickerCase(BasketCase):
    """A queue of its own for each check, whose messages cannot be given back."""

    features = frozenset({Feature.UNREPEATED, Feature.LIVE, Feature.SERVER, Feature.CUTS})

    def source(self, place: str) -> Source:
        return TickerSource(self.port, place, self.bug, bounded=True)

    def live(self, place: str) -> Source:
        return TickerSource(self.port, place, self.bug, bounded=False)
