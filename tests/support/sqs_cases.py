"""The sink of SQS as a case of the conformance kit, and a client for tests of its source."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headgate.connectors import sqs_sink
from headgate.connectors.aws import AwsService
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.testing.connectors import Case, Feature, SinkCase
from headgate.tests.support.connector_cases import NOWHERE, Rows, in_thread
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


class SqsSinkCase(Rows, SinkCase):
    """JSON in a queue of its own for each check."""

    features = frozenset({Feature.AT_LEAST_ONCE, Feature.MISTAKES, Feature.CONNECTS})
    secrets = (ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],)

    def __init__(self, queues: Queues) -> None:
        self.queues = queues

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case-{next(_numbers)}"
        self.url = self.queues.create(name)
        self.seen: list[Any] = []
        yield name

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return sqs_sink(place, endpoint=self.queues.url, guarantee=guarantee)

    def visible(self, place: str) -> list[Any]:
        self.seen += [json.loads(each["Body"]) for each in self.queues.read(self.url)]
        return list(self.seen)

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        return {
            "a queue that does not exist": (sqs_sink("none", endpoint=self.queues.url), "none"),
            "no server": (sqs_sink(place, endpoint=f"http://{NOWHERE}"), NOWHERE),
        }


SQS: dict[str, type[Case]] = {"sqs_sink": SqsSinkCase}
