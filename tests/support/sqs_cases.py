"""The connectors of SQS as cases of the conformance kit, and a client for tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headgate.connectors import sqs_sink, sqs_source
from headgate.connectors.aws import AwsService
from headgate.connectors.functions.loop_thread import in_thread
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import Case, Feature, Server, SinkCase, SourceCase
from headgate.testing.servers.elasticmq import ElasticMqServer
from headgate.tests.support.connector_cases import NOWHERE, SCHEMA, Proxied, Rows
from headgate.tests.support.kinesis_cases import ENVIRONMENT

_numbers = itertools.count()


class Queues:
    """The queues of a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do something with a client."""

        async def run() -> Any:
            async with AwsService("sqs", endpoint=self.url).client() as client:
                return await work(client)

        return in_thread(run)

    def create(self, name: str, **attributes: str) -> str:
        """Create a queue, and return its URL."""
        made = self.do(lambda client: client.create_queue(QueueName=name, Attributes=attributes))
        return str(made["QueueUrl"])

    def send(self, url: str, *bodies: str) -> None:
        async def send(client: Any) -> None:
            for body in bodies:
                await client.send_message(QueueUrl=url, MessageBody=body)

        self.do(send)

    def waiting(self, url: str) -> tuple[int, int]:
        """Return how many messages wait, and how many a consumer has."""
        names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
        found = self.do(
            lambda client: client.get_queue_attributes(QueueUrl=url, AttributeNames=list(names))
        )["Attributes"]
        return int(found[names[0]]), int(found[names[1]])

    def read(self, url: str) -> list[Any]:
        """Return the messages that wait, and hide them for an hour."""

        async def read(client: Any) -> list[Any]:
            found: list[Any] = []
            while True:
                answer = await client.receive_message(
                    QueueUrl=url,
                    MaxNumberOfMessages=10,
                    VisibilityTimeout=3600,
                    AttributeNames=["All"],
                )
                if not answer.get("Messages"):
                    return found
                found += answer["Messages"]

        return list(self.do(read))


class Queue(Proxied):
    """A queue of its own for each check, on a server that is killed now and then."""

    secrets = (ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],)

    def __init__(self, queues: Queues, server: ElasticMqServer | None = None) -> None:
        self.queues = queues
        self.server: Server | None = server
        self.port = int(queues.url.rpartition(":")[2])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case-{next(_numbers)}"
        self.url = self.queues.create(name)
        self.sent = 0
        self.seen: list[Any] = []
        yield name


class SqsSourceCase(Rows, Queue, SourceCase):
    """JSON in a queue, which gives messages again after a second."""

    features = frozenset(
        {
            *(Feature.ACKNOWLEDGES, Feature.CONFIRMS, Feature.LIVE, Feature.BAD_RECORDS),
            *(Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )
    unacknowledged_max = 13 + 9  # a request may bring nine more

    def put(self, place: str, records: Sequence[Any]) -> None:
        self.queues.send(self.url, *map(json.dumps, records))
        self.sent += len(records)

    def put_bad(self, place: str) -> None:
        self.queues.send(self.url, "{no JSON}")

    def source(self, place: str, **options: Any) -> Source:
        given: dict[str, Any] = {
            "endpoint": self.endpoint,
            "schema": SCHEMA,
            "visibility": "1s",
            "consumers": 1,
            "max_unacknowledged": 13,
        }
        return sqs_source(options.pop("queue", place), **(given | options))

    def live(self, place: str) -> Source:
        return self.source(place)

    def tolerant(self, place: str, on_bad_record: str) -> Source:
        return self.source(place, on_bad_record=on_bad_record)

    def confirmed(self, place: str) -> int:
        return self.sent - sum(self.queues.waiting(self.url))

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        return {
            "a queue that does not exist": (self.source(place, queue="none"), "none"),
            "no server": (self.source(place, endpoint=f"http://{NOWHERE}"), NOWHERE),
        }


class SqsSinkCase(Rows, Queue, SinkCase):
    """JSON in a queue of its own for each check."""

    features = frozenset(
        {
            *(Feature.AT_LEAST_ONCE, Feature.SERVER, Feature.CUTS),
            *(Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return sqs_sink(place, endpoint=self.endpoint, guarantee=guarantee)

    def visible(self, place: str) -> list[Any]:
        self.seen += [json.loads(each["Body"]) for each in self.queues.read(self.url)]
        return list(self.seen)

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        return {
            "a queue that does not exist": (sqs_sink("none", endpoint=self.endpoint), "none"),
            "no server": (sqs_sink(place, endpoint=f"http://{NOWHERE}"), NOWHERE),
        }


class SqsSourceOnMoto(SqsSourceCase):
    """The same on a server in the process of the tests, which cannot be killed."""

    features = SqsSourceCase.features - {Feature.SERVER, Feature.CUTS}


class SqsSinkOnMoto(SqsSinkCase):
    """The same on that server."""

    features = SqsSinkCase.features - {Feature.SERVER, Feature.CUTS}


SQS: dict[str, type[Case]] = {"sqs_source": SqsSourceCase, "sqs_sink": SqsSinkCase}
SQS_ON_MOTO: dict[str, type[Case]] = {"sqs_source": SqsSourceOnMoto, "sqs_sink": SqsSinkOnMoto}
