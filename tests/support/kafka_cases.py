"""The connectors of Kafka as cases of the conformance kit."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headgate.connectors import kafka_sink, kafka_source
from headgate.connectors.functions.loop_thread import in_thread
from headgate.connectors.kafka.transactions import TransactionClient
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import Feature, Server, SinkCase, SourceCase, read_all
from headgate.testing.proxy import CuttingProxy
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.support.connector_cases import NOWHERE, SCHEMA, Adjustable, Rows

_numbers = itertools.count()


class Topic:
    """A topic of its own for each check, on a broker that is killed now and then."""

    partitions = 1

    def __init__(self, broker: KafkaServer) -> None:
        self.broker = broker
        self.server: Server | None = broker
        self.bootstrap = broker.bootstrap

    @contextmanager
    def cutting(self) -> Iterator[CuttingProxy]:
        with CuttingProxy(self.broker.proxied_port, port=self.broker.proxy_port) as proxy:
            self.bootstrap = f"127.0.0.1:{proxy.port}"
            try:
                yield proxy
            finally:
                self.bootstrap = self.broker.bootstrap

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case-{next(_numbers)}"
        self.broker.create_topic(name, self.partitions, {})
        yield name


class KafkaSource(Rows, Topic, Adjustable, SourceCase):
    """JSON in a topic of two partitions."""

    unseen = frozenset({"no broker"})  # a run finds it by the same call, which waits for 15 s
    partitions = 2
    features = frozenset(
        {
            *(Feature.LIVE, Feature.BAD_RECORDS, Feature.LAG),
            *(Feature.CONFIRMS, Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def put(self, place: str, records: Sequence[Any]) -> None:
        for partition in range(self.partitions):
            own = [json.dumps(record).encode() for record in records[partition :: self.partitions]]
            self.broker.produce(place, own, partition=partition)

    def put_bad(self, place: str) -> None:
        self.broker.produce(place, [b"{no JSON}"], partition=0)

    def source(self, place: str, **options: Any) -> Source:
        given = {
            "bootstrap": self.bootstrap,
            "schema": SCHEMA,
            "batch_rows": 1,
            "stop": "latest",
            "group": f"group-of-{place}",
        }
        return kafka_source(place, **(given | options))

    def confirmed(self, place: str) -> int:
        from confluent_kafka import Consumer, TopicPartition

        group = {"bootstrap.servers": self.broker.bootstrap, "group.id": f"group-of-{place}"}
        reporter = Consumer({**group, "log_level": 0})
        try:
            partitions = [TopicPartition(place, number) for number in range(self.partitions)]
            found = reporter.committed(partitions, timeout=30)
        finally:
            reporter.close()
        return sum(max(each.offset, 0) for each in found)

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        return {
            "a topic that does not exist": (self.source("no-such-topic"), "no-such-topic"),
            "no broker": (self.source(place, bootstrap=NOWHERE), NOWHERE),
        }


class KafkaSinkCase(Rows, Topic, SinkCase):
    """JSON in transactions, or at least once."""

    features = frozenset(
        {
            *(Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE, Feature.PENDING),
            *(Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return kafka_sink(place, bootstrap=self.bootstrap, guarantee=guarantee)

    def visible(self, place: str) -> list[Any]:
        source = kafka_source(place, bootstrap=self.broker.bootstrap, schema=SCHEMA, stop="latest")
        return list(in_thread(lambda: read_all(source)))

    def pending(self, place: str) -> Sequence[Any]:
        """Return open transactions; one that is being ended is given a while, for a busy broker."""
        client = TransactionClient(self.broker.bootstrap, {})
        found = client.open_ids("hg-")
        deadline = time.monotonic() + PENDING_S_MAX
        while found and time.monotonic() < deadline:
            time.sleep(0.1)
            found = client.open_ids("hg-")
        client.close()
        return found

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        wrong = kafka_sink(
            "no-such-topic", bootstrap=self.broker.bootstrap, guarantee="exactly_once"
        )
        return {"a topic that does not exist": (wrong, "no-such-topic")}


class StagedKafkaCase(KafkaSinkCase):
    """JSON that checkpoints stage."""

    features = KafkaSinkCase.features - {Feature.AT_LEAST_ONCE}

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return kafka_sink(
            place, bootstrap=self.bootstrap, guarantee=guarantee, transactions="staged"
        )


PENDING_S_MAX = 60.0
"""The longest time, in seconds, in which a transaction that is being ended should be over."""
KAFKA: dict[str, type[Topic]] = {
    "kafka_source": KafkaSource,
    "kafka_sink": KafkaSinkCase,
    "kafka_sink (staged)": StagedKafkaCase,
}
