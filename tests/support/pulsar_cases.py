"""The connectors of Pulsar as cases of the conformance kit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from headgate.connectors import pulsar_sink, pulsar_source
from headgate.connectors.pulsar.client import Cluster
from headgate.testing.connectors import Case, Feature
from headgate.testing.proxy import CuttingProxy
from headgate.testing.servers.pulsar import PulsarServer
from headgate.tests.support.connector_cases import NOWHERE, PASSWORD
from headgate.tests.support.stream_cases import JsonSink, JsonSource, JsonStream

C = TypeVar("C")
"""A source or a sink."""
BATCH = 5
"""Messages that are put together are in entries of this many."""
_numbers = itertools.count()


def publish(url: str, topic: str, values: Sequence[bytes], **options: Any) -> None:
    """Publish messages, several in an entry."""
    with Cluster(url).client() as client:
        producer = client.create_producer(
            topic,
            batching_enabled=True,
            batching_max_messages=BATCH,
            block_if_queue_full=True,
            batching_max_publish_delay_ms=60_000,
        )
        results: list[Any] = []
        for value in values:
            producer.send_async(value, lambda result, _: results.append(result), **options)
        producer.flush()
        producer.close()
    assert [result.name for result in results] == ["Ok"] * len(values)


class PulsarTopic(JsonStream):
    """A topic without partitions."""

    scheme = "pulsar"
    make_source = staticmethod(pulsar_source)
    make_sink = staticmethod(pulsar_sink)

    def __init__(self, server: PulsarServer) -> None:
        super().__init__(server)
        self.pulsar = server

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case-{next(_numbers)}"
        self.pulsar.create(name)
        yield name
        self.pulsar.delete(name)

    @contextmanager
    def cutting(self) -> Iterator[CuttingProxy]:
        """The broker sends clients that come through the proxy to its port again."""
        with CuttingProxy(self.pulsar.proxied_port, port=self.pulsar.proxy_port) as proxy:
            self.port = proxy.port
            try:
                yield proxy
            finally:
                self.port = self.pulsar.port

    def publish_values(self, place: str, values: Sequence[bytes]) -> None:
        publish(self.direct_url, place, values)

    def mistakes_of(self, connect: Callable[..., C], place: str) -> Mapping[str, tuple[C, str]]:
        return {
            "a topic that does not exist": (connect("no-such"), "no-such"),
            "no server": (connect(place, url=f"pulsar://{NOWHERE}"), NOWHERE),
            "a wrong token": (connect(place, token=PASSWORD), "uthenticat"),
        }


class PulsarSource(PulsarTopic, JsonSource):
    """The source of Pulsar."""

    features = JsonSource.features - {Feature.LAG}


class PulsarSink(PulsarTopic, JsonSink):
    """The sink of Pulsar."""

    features = JsonSink.features - {Feature.EXACTLY_ONCE}


PULSAR: dict[str, type[Case]] = {"pulsar_source": PulsarSource, "pulsar_sink": PulsarSink}
