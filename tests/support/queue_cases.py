"""The connectors of MQTT as cases of the conformance kit, and clients for tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headgate.connectors import mqtt_sink, mqtt_source
from headgate.connectors.mqtt.client import Broker, Connection
from headgate.operators.clock import SystemClock
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import Case, Feature, Server, SinkCase, SourceCase
from headgate.testing.servers.mosquitto import MosquittoServer
from headgate.tests.support.connector_cases import NOWHERE, PASSWORD, SCHEMA, Proxied, Rows

MQTT_SETTINGS = "allow_anonymous true\npassword_file {passwords}"
_numbers = itertools.count()


@dataclass
class Topic:
    """A topic, and a subscriber whose session keeps its messages."""

    name: str
    url: str
    received: list[bytes] = field(default_factory=list)

    @property
    def session(self) -> str:
        """The name of the session."""
        return f"reads-{self.name}"

    def connected(self) -> Connection:
        connection = Connection(Broker(self.url), self.session, SessionExpiryInterval=600)
        client = connection.client

        def take(_client: Any, _data: Any, message: Any) -> None:
            self.received.append(message.payload)
            client.ack(message.mid, message.qos)

        client.on_message = take
        connection.connect(SystemClock(), clean=False)
        return connection

    def subscribe(self) -> None:
        connection = self.connected()
        answered: list[bool] = []
        connection.client.on_subscribe = lambda *_: answered.append(True)
        connection.client.subscribe(self.name, qos=1)
        while not answered:
            connection.turn(0.01)
        connection.close()

    def publish(self, *values: bytes, topic: str = "", **options: Any) -> None:
        """Publish messages; return when the broker has them."""
        connection = Connection(Broker(self.url), "")
        connection.connect(SystemClock(), clean=True)
        sent = [
            connection.client.publish(topic or self.name, value, qos=1, **options)
            for value in values
        ]
        while not all(each.is_published() for each in sent):
            connection.turn(0.01)
        connection.close()

    def read(self) -> list[bytes]:
        """Return all messages that there were."""
        mark = f"mark {next(_numbers)}".encode()
        self.publish(mark)
        connection = self.connected()
        while mark not in self.received:
            connection.turn(0.01)
        connection.close()
        return [each for each in self.received if not each.startswith(b"mark")]


class MqttSinkCase(Rows, Proxied, SinkCase):
    """JSON, with a subscriber that gets it."""

    # Mosquitto saves a message after it has acknowledged it, so one that is killed loses some (SERVER).
    features = frozenset({Feature.AT_LEAST_ONCE, Feature.CUTS, Feature.MISTAKES})
    secrets = (PASSWORD,)

    def __init__(self, server: MosquittoServer) -> None:
        self.broker = server
        self.port = server.port

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @contextmanager
    def place(self) -> Iterator[Topic]:
        topic = Topic(f"case/{next(_numbers)}", self.broker.url)
        topic.subscribe()
        yield topic

    def sink(self, place: Topic, guarantee: GuaranteeLike) -> Sink:
        return mqtt_sink(place.name, url=self.url, guarantee=guarantee)

    def visible(self, place: Topic) -> list[Any]:
        return [json.loads(each) for each in place.read()]

    def pending(self, place: Topic) -> Sequence[Any]:
        return []

    def mistakes(self, place: Topic) -> Mapping[str, tuple[Sink, str]]:
        wrong = {"user": "ann", "password": PASSWORD}
        return {
            "no broker": (mqtt_sink(place.name, url=f"mqtt://{NOWHERE}"), NOWHERE),
            "a wrong password": (mqtt_sink(place.name, url=self.url, **wrong), "authori"),
        }


class MqttSourceCase(Rows, Proxied, SourceCase):
    """JSON in a topic, with a session of its own for each check."""

    features = frozenset(
        {
            *(Feature.ACKNOWLEDGES, Feature.CONFIRMS, Feature.LIVE, Feature.BAD_RECORDS),
            *(Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )
    secrets = (PASSWORD,)
    unacknowledged_max = 20 + 1  # one more shows that the broker does not keep to the bound

    def __init__(self, server: MosquittoServer) -> None:
        self.broker = server
        self.server: Server | None = server
        self.port = server.port

    @contextmanager
    def place(self) -> Iterator[Topic]:
        topic = Topic(f"case/{next(_numbers)}", self.broker.url)
        topic.subscribe()
        yield topic

    def put(self, place: Topic, records: Sequence[Any]) -> None:
        place.publish(*(json.dumps(record).encode() for record in records))

    def put_bad(self, place: Topic) -> None:
        place.publish(b"{no JSON}")

    def source(self, place: Topic, **options: Any) -> Source:
        given: dict[str, Any] = {
            "url": f"mqtt://127.0.0.1:{self.port}",
            "schema": SCHEMA,
            "client_id": place.session,
            "max_unacknowledged": 20,
            "batch_rows": 1,
        }
        return mqtt_source(place.name, **(given | options))

    def live(self, place: Topic) -> Source:
        return self.source(place)

    def tolerant(self, place: Topic, on_bad_record: str) -> Source:
        return self.source(place, on_bad_record=on_bad_record)

    def confirmed(self, place: Topic) -> int:
        return self.broker.acknowledgements(place.session)

    def mistakes(self, place: Topic) -> Mapping[str, tuple[Source, str]]:
        wrong = self.source(place, user="ann", password=PASSWORD)
        return {
            "no broker": (self.source(place, url=f"mqtt://{NOWHERE}"), NOWHERE),
            "a wrong password": (wrong, "authori"),
        }


QUEUES: dict[str, type[Case]] = {"mqtt_source": MqttSourceCase, "mqtt_sink": MqttSinkCase}
