"""The connectors of Kinesis as cases of the conformance kit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headgate.connectors import kinesis_sink, kinesis_source
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import Case, Feature, Server, SinkCase, SourceCase
from headgate.testing.proxy import CuttingProxy
from headgate.testing.servers.kinesis import KinesisServer
from headgate.tests.support.connector_cases import NOWHERE, SCHEMA, Adjustable, Rows

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "a secret of the environment",
    "AWS_DEFAULT_REGION": "us-east-1",
}
SHARDS_END = 1 << 128
_numbers = itertools.count()


class Stream:
    """A stream of its own for each check, on a server that is killed now and then."""

    secrets = (ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],)

    def __init__(self, server: KinesisServer) -> None:
        self.kinesis = server
        self.server: Server | None = server
        self.url = server.url

    def do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do something with a client."""
        return self.kinesis.do(work)

    def wait_until_active(self, name: str) -> None:
        async def wait(client: Any) -> None:
            await client.get_waiter("stream_exists").wait(
                StreamName=name, WaiterConfig={"Delay": 0, "MaxAttempts": 100_000}
            )

        self.do(wait)

    @contextmanager
    def place(self, shards: int = 1) -> Iterator[str]:
        name = f"case-{next(_numbers)}"
        self.do(lambda client: client.create_stream(StreamName=name, ShardCount=shards))
        self.wait_until_active(name)
        yield name
        self.do(lambda client: client.delete_stream(StreamName=name))

    def shards(self, place: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.do(lambda client: client.list_shards(StreamName=place))[
            "Shards"
        ]
        return found

    @contextmanager
    def cutting(self) -> Iterator[CuttingProxy]:
        with CuttingProxy(self.kinesis.port) as proxy:
            self.url = f"http://127.0.0.1:{proxy.port}"
            yield proxy
        self.url = self.kinesis.url

    def split(self, place: str, shard: str) -> None:
        """Divide a shard in the middle."""
        (ends,) = [each["HashKeyRange"] for each in self.shards(place) if each["ShardId"] == shard]
        middle = (int(ends["StartingHashKey"]) + int(ends["EndingHashKey"])) // 2
        self.do(
            lambda client: client.split_shard(
                StreamName=place, ShardToSplit=shard, NewStartingHashKey=str(middle)
            )
        )
        self.wait_until_active(place)

    def merge(self, place: str, shard: str, other: str) -> None:
        self.do(
            lambda client: client.merge_shards(
                StreamName=place, ShardToMerge=shard, AdjacentShardToMerge=other
            )
        )
        self.wait_until_active(place)

    def add(self, place: str, values: Sequence[bytes], keys: Sequence[str] = ()) -> None:
        async def add(client: Any) -> None:
            for value, key in itertools.zip_longest(values, keys, fillvalue="key"):
                await client.put_record(StreamName=place, Data=value, PartitionKey=key)

        self.do(add)


class KinesisSourceCase(Rows, Stream, Adjustable, SourceCase):
    """JSON in a stream with two shards."""

    features = frozenset(
        {Feature.LIVE, Feature.BAD_RECORDS, Feature.SERVER, Feature.MISTAKES, Feature.CUTS}
    )

    def put(self, place: str, records: Sequence[Any]) -> None:
        self.add(place, [json.dumps(record).encode() for record in records])

    def put_bad(self, place: str) -> None:
        self.add(place, [b"{no JSON}"])

    def source(self, place: str, **options: Any) -> Source:
        given: dict[str, Any] = {
            "endpoint": self.url,
            "schema": SCHEMA,
            "batch_rows": 1,
            "stop": "latest",
            "every": "10ms",
        }
        return kinesis_source(options.pop("stream", place), **(given | options))

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        return {
            "a stream that does not exist": (self.source(place, stream="none"), "none"),
            "no server": (self.source(place, endpoint=f"http://{NOWHERE}"), NOWHERE),
        }


class KinesisSinkCase(Rows, Stream, SinkCase):
    """JSON whose partition keys are random."""

    features = frozenset({Feature.AT_LEAST_ONCE, Feature.SERVER, Feature.CUTS, Feature.MISTAKES})

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return kinesis_sink(place, endpoint=self.url, guarantee=guarantee)

    def visible(self, place: str) -> list[Any]:
        # A source that stops at the latest records waits for the next second of the server's clock.
        return [json.loads(each["Data"]) for each in self.do(lambda client: _read(client, place))]

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        return {
            "a stream that does not exist": (kinesis_sink("none", endpoint=self.url), "none"),
            "no server": (kinesis_sink(place, endpoint=f"http://{NOWHERE}"), NOWHERE),
        }


KINESIS: dict[str, type[Case]] = {
    "kinesis_source": KinesisSourceCase,
    "kinesis_sink": KinesisSinkCase,
}


async def _read(client: Any, stream: str) -> list[dict[str, Any]]:
    """Return all records of a stream."""
    found: list[dict[str, Any]] = []
    for shard in (await client.list_shards(StreamName=stream))["Shards"]:
        first = await client.get_shard_iterator(
            StreamName=stream, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )
        iterator, here = first["ShardIterator"], True
        while here and iterator:
            answer = await client.get_records(ShardIterator=iterator)
            found += answer["Records"]
            here = bool(answer["Records"]) or answer["MillisBehindLatest"] > 0
            iterator = answer.get("NextShardIterator")
    return found
