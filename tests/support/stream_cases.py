"""Connectors of streams and queues as cases of the conformance kit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import nats

from headgate.connectors import (
    nats_sink,
    nats_source,
    redis_sink,
    redis_source,
)
from headgate.connectors.functions.loop_thread import in_thread
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import (
    Case,
    Feature,
    Server,
    SinkCase,
    SourceCase,
    read_all,
)
from headgate.testing.servers.nats import NatsServer
from headgate.testing.servers.rabbitmq import RabbitServer
from headgate.testing.servers.redis import RedisServer
from headgate.tests.support.connector_cases import (
    NOWHERE,
    PASSWORD,
    SCHEMA,
    Adjustable,
    Proxied,
    Rows,
)

C = TypeVar("C")
"""A source or a sink."""
_numbers = itertools.count()


class OwnStream(Proxied):
    """A stream of its own for each check, on a server that is killed now and then."""

    scheme: ClassVar[str]
    """The scheme of the server's addresses."""
    secrets = (PASSWORD,)

    def __init__(self, running: RedisServer | NatsServer | RabbitServer) -> None:
        self.server: Server | None = running
        self.port = running.port
        self.direct_url = self.url
        """The address without a proxy."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"


class RedisStream(OwnStream):
    """Fields in a stream."""

    scheme = "redis"

    def __init__(self, redis: RedisServer) -> None:
        super().__init__(redis)
        self.redis = redis

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case-{next(_numbers)}"
        yield name
        with self.redis.client() as client:
            client.delete(name)

    def add(self, place: str, records: Sequence[Any]) -> None:
        with self.redis.client() as client:
            for record in records:
                client.xadd(
                    place, {key: value for key, value in record.items() if value is not None}
                )

    def entries(self, place: str) -> list[Any]:
        with self.redis.client() as client:
            found = client.xrange(place)
        return [
            {name.decode(): value.decode() for name, value in each.items()} for _, each in found
        ]

    @property
    def wrong_user(self) -> dict[str, str]:
        """An address and a password that the server refuses."""
        with self.redis.client() as client:
            client.acl_setuser(
                "ann", enabled=True, passwords=["+right"], keys=["*"], commands=["+@all"]
            )
        return {"url": self.direct_url.replace("//", "//ann@"), "password": PASSWORD}


class RedisSource(Rows, RedisStream, Adjustable, SourceCase):
    """Fields in a stream."""

    features = frozenset(
        {
            *(Feature.LIVE, Feature.BAD_RECORDS, Feature.LAG),
            *(Feature.CONFIRMS, Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def streams(self, place: str) -> list[str]:
        return [place]

    def put(self, place: str, records: Sequence[Any]) -> None:
        streams = self.streams(place)
        for number, stream in enumerate(streams):
            self.add(stream, records[number :: len(streams)])

    def put_bad(self, place: str) -> None:
        self.add(place, [{"id": "none"}])

    def source(self, place: str, **options: Any) -> Source:
        given: dict[str, Any] = {
            "url": self.url,
            "schema": SCHEMA,
            "batch_rows": 1,
            "stop": "latest",
            "group": "headgate",
            "on_missing": "wait",
        }
        streams = options.pop("streams", self.streams(place))
        return redis_source(streams, **(given | options))

    def confirmed(self, place: str) -> int:
        with self.redis.client() as client:
            groups = [each for name in self.streams(place) for each in client.xinfo_groups(name)]
        return sum(each["entries-read"] for each in groups)

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        missing = self.source(place, streams="no-such-stream", on_missing="fail")
        return {
            "a stream that does not exist": (missing, "no-such-stream"),
            "no server": (self.source(place, url=f"redis://{NOWHERE}"), NOWHERE),
            "a wrong password": (self.source(place, **self.wrong_user), "password"),
        }


class RedisSinkCase(Rows, RedisStream, SinkCase):
    """Fields that are added, staged or at least once."""

    features = frozenset(
        {
            *(Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE, Feature.PENDING),
            *(Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return redis_sink(place, url=self.url, guarantee=guarantee)

    def visible(self, place: str) -> list[Any]:
        found = self.entries(place)
        return [{"id": int(each["id"]), "name": each.get("name")} for each in found]

    def pending(self, place: str) -> Sequence[Any]:
        with self.redis.client() as client:
            kept: list[bytes] = client.keys(f"hg:{{{place}}}:*")
        return [key for key in kept if b":marker:" not in key]

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        with self.redis.client() as client:
            client.set(f"{place}-text", "text")
        return {
            "another type": (
                redis_sink(f"{place}-text", url=self.direct_url),
                "not that of a stream",
            ),
            "no server": (redis_sink(place, url=f"redis://{NOWHERE}"), NOWHERE),
            "a wrong password": (redis_sink(place, **self.wrong_user), "password"),
        }


# -- JSON in NATS, and in RabbitMQ -----------------------------------------------------------------------


class JsonStream(Rows, OwnStream):
    """JSON in a stream, and its connectors."""

    make_source: ClassVar[Callable[..., Source]]
    make_sink: ClassVar[Callable[..., Sink]]
    user: ClassVar[str]
    """A user with another password than the one that is given."""
    refused: ClassVar[str]
    """A part of the message about the wrong password."""

    def publish_values(self, place: str, values: Sequence[bytes]) -> None:
        """Publish these texts to a stream."""
        raise NotImplementedError

    def target(self, place: str) -> str:
        """Return the argument of a sink that writes to a stream."""
        return place

    def connect_source(self, place: str, **options: Any) -> Source:
        given = {"url": self.url, "schema": SCHEMA, "batch_rows": 1, "stop": "latest"}
        return self.make_source(place, **(given | options))

    def connect_sink(self, place: str, **options: Any) -> Sink:
        return self.make_sink(self.target(place), **({"url": self.url} | options))

    def mistakes_of(self, connect: Callable[..., C], place: str) -> Mapping[str, tuple[C, str]]:
        """Return what a source and a sink have to refuse."""
        return {
            "a stream that does not exist": (connect("no-such"), "no-such"),
            "no server": (connect(place, url=f"{self.scheme}://{NOWHERE}"), NOWHERE),
            "a wrong password": (connect(place, user=self.user, password=PASSWORD), self.refused),
        }


class JsonSource(JsonStream, Adjustable, SourceCase):
    """A source of JSON in a stream."""

    features = frozenset(
        {
            *(Feature.LIVE, Feature.BAD_RECORDS, Feature.LAG),
            *(Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def put(self, place: str, records: Sequence[Any]) -> None:
        self.publish_values(place, [json.dumps(record).encode() for record in records])

    def put_bad(self, place: str) -> None:
        self.publish_values(place, [b"{no JSON}"])

    def source(self, place: str, **options: Any) -> Source:
        return self.connect_source(place, **options)

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        return self.mistakes_of(self.connect_source, place)


class JsonSink(JsonStream, SinkCase):
    """A sink of JSON whose messages have ids, staged or at least once."""

    features = frozenset(
        {
            *(Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE),
            *(Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return self.connect_sink(place, guarantee=guarantee)

    def visible(self, place: str) -> list[Any]:
        source = self.connect_source(place, url=self.direct_url)
        return list(in_thread(lambda: read_all(source)))

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        return self.mistakes_of(self.connect_sink, place)


NATS_USERS = """
accounts {
  ALL { jetstream: enabled, users: [{user: "ann", password: "right"}, {user: "all"}] }
}
no_auth_user: "all"
"""
"""Everybody may do everything, but who names a user must give the password."""


class NatsStream(JsonStream):
    """A stream whose subjects begin with its name."""

    scheme = "nats"
    make_source = staticmethod(nats_source)
    make_sink = staticmethod(nats_sink)
    user = "ann"
    refused = "uthorization"

    def target(self, place: str) -> str:
        return f"{place}.a"

    def do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do something with JetStream."""

        async def run() -> Any:
            client = await nats.connect(self.direct_url)
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return in_thread(run)

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case-{next(_numbers)}"
        self.do(lambda stream: stream.add_stream(name=name, subjects=[f"{name}.>"]))
        yield name
        self.do(lambda stream: stream.delete_stream(name))

    def publish_values(self, place: str, values: Sequence[bytes]) -> None:
        self.publish(self.target(place), values)

    def publish(self, subject: str, values: Sequence[bytes]) -> None:
        async def publish(stream: Any) -> None:
            for value in values:
                await stream.publish(subject, value)

        self.do(publish)


class NatsSource(NatsStream, JsonSource):
    """The source of NATS."""


class NatsSink(NatsStream, JsonSink):
    """The sink of NATS."""


NATS: dict[str, type[Case]] = {"nats_source": NatsSource, "nats_sink": NatsSink}
REDIS: dict[str, type[Case]] = {"redis_source": RedisSource, "redis_sink": RedisSinkCase}
