"""The connectors of RabbitMQ as cases of the conformance kit."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
from rstream.exceptions import StreamAlreadyExists, StreamDoesNotExist

from headgate.connectors import rabbitmq_sink, rabbitmq_source
from headgate.connectors.functions.loop_thread import in_thread
from headgate.connectors.rabbitmq.client import Broker, logged_in, partitions_of
from headgate.connectors.rabbitmq.envelope import wrap
from headgate.connectors.rabbitmq.publisher import RabbitPublisher
from headgate.connectors.rabbitmq.super_streams import RabbitSuperStreamSink as SuperStreamSink
from headgate.errors import SourceError
from headgate.operators.base import OperatorContext
from headgate.operators.origin import capture_origin
from headgate.operators.sink import Sink, SinkWriter
from headgate.testing.connectors import Case, make_context, read_all
from headgate.testing.servers.rabbitmq import RabbitServer
from headgate.tests.support.connector_cases import SCHEMA
from headgate.tests.support.stream_cases import JsonSink, JsonSource, JsonStream

SUPER_STREAM: Final = "rows"
"""The super stream of a broker that has begun with `definitions`."""
READY_S_MAX: Final = 60.0
_numbers = itertools.count()


def definitions(partitions: int, super_stream: str = SUPER_STREAM) -> str:
    """Return what a broker has when it begins: a super stream, as its own tool makes it, and the user."""
    salt = b"salt"
    password = base64.b64encode(salt + hashlib.sha256(salt + b"guest").digest()).decode()
    numbers, kept = range(partitions), {"vhost": "/", "durable": True, "auto_delete": False}
    every = dict.fromkeys(("configure", "write", "read"), ".*")
    bound = {"source": super_stream, "vhost": "/", "destination_type": "queue"}
    exchange = {"name": super_stream, "type": "direct", "internal": False, **kept}
    return json.dumps(
        {
            "users": [{"name": "guest", "password_hash": password, "tags": "administrator"}],
            "vhosts": [{"name": "/"}],
            "permissions": [{"user": "guest", "vhost": "/", **every}],
            "exchanges": [exchange | {"arguments": {"x-super-stream": True}}],
            "queues": [
                kept | {"name": f"{super_stream}-{n}", "arguments": {"x-queue-type": "stream"}}
                for n in numbers
            ],
            "bindings": [
                bound
                | {"destination": f"{super_stream}-{n}", "routing_key": str(n)}
                | {"arguments": {"x-stream-partition-order": n}}
                for n in numbers
            ],
        }
    )


def wait_for_partitions(url: str, super_stream: str, count: int) -> None:
    """Wait until a broker has made its streams, which it does after it answers."""
    broker = Broker(url, "guest", "guest")
    deadline = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline:
        with contextlib.suppress(SourceError):
            if len(in_thread(lambda: partitions_of(broker, super_stream, "tests"))) == count:
                return
        time.sleep(0.1)
    raise TimeoutError("the broker has not made its streams")


class RabbitStream(JsonStream):
    """A stream of a broker."""

    scheme = "rabbitmq-stream"
    make_source = staticmethod(rabbitmq_source)
    make_sink = staticmethod(rabbitmq_sink)
    user = "guest"
    refused = "password is wrong"

    def __init__(self, server: RabbitServer) -> None:
        super().__init__(server)
        self.rabbit = server

    def do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do something with a client of the broker."""

        async def run() -> Any:
            broker = Broker(self.direct_url, "guest", "guest")
            address = ("127.0.0.1", self.rabbit.port, False)
            async with logged_in(broker, address, "headgate-tests") as (client, _):
                return await work(client)

        return in_thread(run)

    def create(self, name: str, **arguments: Any) -> None:
        """Create a stream, which there is none of yet."""
        self._insist(lambda client: client.create_stream(name, arguments), StreamAlreadyExists)

    def delete(self, name: str) -> None:
        """Delete a stream."""
        self._insist(lambda client: client.delete_stream(name), StreamDoesNotExist)

    def _insist(self, work: Callable[[Any], Awaitable[Any]], is_done: type[BaseException]) -> None:
        """Do something, again if the client has given up to wait: a busy broker may do it later.

        Args:
            work: what is done with a client.
            is_done: the error of the broker if it has done that already.
        """
        deadline = time.monotonic() + READY_S_MAX
        expected: tuple[type[BaseException], ...] = ()
        while True:
            try:
                with contextlib.suppress(*expected):
                    self.do(work)
                return
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                expected = (is_done,)

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case-{next(_numbers)}"
        self.create(name)
        self.rabbit.wait_until_durable()
        yield name
        self.delete(name)

    def publish_values(self, place: str, values: Sequence[bytes]) -> None:
        self.publish(place, [wrap(value) for value in values])

    def publish(self, stream: str, messages: Sequence[bytes]) -> None:
        """Publish messages in this form; each is a chunk of its own."""
        sink = rabbitmq_sink(stream, url=self.direct_url, format="raw", envelope="none")
        for message in messages:
            publisher = RabbitPublisher(sink.settings, sink.settings.target)

            async def publish(
                publisher: RabbitPublisher = publisher, message: bytes = message
            ) -> None:
                await publisher.open(make_context())
                data = pa.RecordBatch.from_pylist([{"value": message}])
                await publisher.publish(data, f"put-{next(_numbers)}", 1)
                await publisher.close()

            in_thread(publish)


class RabbitSource(RabbitStream, JsonSource):
    """The source of RabbitMQ."""


class RabbitSink(RabbitStream, JsonSink):
    """The sink of RabbitMQ."""


class JobsOwnSink(SuperStreamSink):
    """A sink in a job of its own for each place: the broker drops messages that a job repeats."""

    def __init__(self, sink: SuperStreamSink, place: str) -> None:
        super().__init__(sink.settings, sink.guarantee, capture_origin())
        self._place = place

    def writer(self) -> SinkWriter:
        writer = super().writer()
        opened = writer.open

        def open_as(context: OperatorContext) -> None:
            job_name = f"{context.job_name} {self._place}"
            opened(dataclasses.replace(context, job_name=job_name))

        writer.open = open_as  # type: ignore[method-assign]
        return writer


class RabbitSuperStreamSink(RabbitStream, JsonSink):
    """The sink of RabbitMQ with a super stream.

    Clients of 3.10 cannot make super streams, so all places are in the one that the broker begins with.
    """

    @contextmanager
    def place(self) -> Iterator[Any]:
        """Yield the time from which on messages count."""
        wait_for_partitions(self.direct_url, SUPER_STREAM, 2)
        self.rabbit.wait_until_durable()
        time.sleep(0.01)
        yield datetime.now(UTC)

    def connect_sink(self, place: Any, **options: Any) -> Sink:
        name = place if isinstance(place, str) else SUPER_STREAM
        given: dict[str, Any] = {"url": self.url, "super_stream": name, "routing_key": "name"}
        made = rabbitmq_sink(**(given | options))
        assert isinstance(made, SuperStreamSink)
        return JobsOwnSink(made, str(place))

    def visible(self, place: Any) -> list[Any]:
        options: dict[str, Any] = {"url": self.direct_url, "schema": SCHEMA, "stop": "latest"}
        source = rabbitmq_source(super_stream=SUPER_STREAM, start=place, **options)
        return list(in_thread(lambda: read_all(source)))


RABBITMQ: dict[str, type[Case]] = {
    "rabbitmq_source": RabbitSource,
    "rabbitmq_sink": RabbitSink,
    "rabbitmq_sink (super stream)": RabbitSuperStreamSink,
}
