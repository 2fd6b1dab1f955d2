"""Records of Kinesis that a job has not read in time are counted once, whatever the service answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import pytest

from headgate.connectors import kinesis_source
from headgate.connectors.aws import AwsService
from headgate.connectors.kinesis.model import ShardSplit
from headgate.operators.drops import DropKind
from headgate.testing.connectors import make_context, open_reader, read_batches
from headgate.tests.support.clocks import MovedClock

pytest.importorskip("aiobotocore")

HOUR_MS: Final = 3_600_000
NOW_MS: Final = 100 * HOUR_MS
STEP_MS: Final = 250
"""The time by the clock between two requests."""


class Service:
    """A stream of one shard that keeps records for 24 hours, with prepared answers.

    An answer is an error, or the ages of records in ms and how far the service says it is behind. When no
    answer is left, the shard has come to its end.
    """

    def __init__(self, clock: MovedClock, answers: Sequence[Any]) -> None:
        self._clock = clock
        self._answers = list(answers)
        self._numbers = iter(range(1000))

    async def describe_stream_summary(self, **_: Any) -> Any:
        return {"StreamDescriptionSummary": {"RetentionPeriodHours": 24}}

    async def get_shard_iterator(self, **_: Any) -> Any:
        return {"ShardIterator": "here"}

    async def get_records(self, **_: Any) -> Any:
        self._clock.now_s += STEP_MS / 1000
        if not self._answers:
            return {"Records": [], "MillisBehindLatest": 0}
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ages_ms, behind_ms = answer
        records = [self._record(age_ms) for age_ms in ages_ms]
        return {"Records": records, "MillisBehindLatest": behind_ms, "NextShardIterator": "next"}

    def _record(self, age_ms: int) -> dict[str, Any]:
        arrived_s = self._clock.now_s - age_ms / 1000
        return {
            "SequenceNumber": str(next(self._numbers)),
            "PartitionKey": "key",
            "Data": b'{"id": 1}',
            "ApproximateArrivalTimestamp": datetime.fromtimestamp(arrived_s, UTC),
        }


def refusal(code: str) -> Exception:
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": code, "Message": "no"}}, "GetRecords")


def behind(*hours: float) -> tuple[list[int], int]:
    """An answer without records, at a place in the shard that is this far behind its end."""
    return [], int(sum(hours) * HOUR_MS)


def at(*ages_h: float) -> tuple[list[int], int]:
    """An answer with records that arrived this long ago."""
    return [int(age * HOUR_MS) for age in ages_h], int(ages_h[-1] * HOUR_MS)


@pytest.mark.parametrize(
    ("age_h", "answers", "records", "lost"),
    [
        (1, [at(1)], 1, 0),
        (30, [at(2)], 1, 1),
        (30, [refusal("ExpiredIteratorException"), at(2)], 1, 1),
        (30, [behind(24), behind(24), behind(23), at(2)], 1, 1),
        (30, [at(24.1), at(24.05), at(2)], 3, 1),
        (30, [refusal("ResourceNotFoundException")], 0, 1),
        (1, [refusal("ResourceNotFoundException")], 0, 1),
        (30, [at(2), at(24.1), at(3)], 3, 2),
    ],
    ids=[
        "in time",
        "too late",
        "the iterator has expired",
        "empty answers on the way",
        "records at the edge",
        "the shard is gone",
        "only the shard is gone",
        "too late twice",
    ],
)
def test_a_loss_is_counted_once(
    age_h: int, answers: list[Any], records: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    clock.now_s = NOW_MS / 1000
    service = Service(clock, answers)

    @contextlib.asynccontextmanager
    async def client(_: AwsService) -> AsyncIterator[Service]:
        yield service

    monkeypatch.setattr(AwsService, "client", client)
    split = ShardSplit("stream", "shard-0", after="1", read_to_ms=NOW_MS - age_h * HOUR_MS)
    options: dict[str, Any] = {"region": "us-east-1", "every": "10ms", "on_lost": "skip"}
    source = kinesis_source("stream", schema={"id": "int64"}, **options)

    async def read() -> tuple[int, int]:
        context = make_context(clock=clock)
        reader = open_reader(source, [msgspec.msgpack.encode(split)], context)
        try:
            batches = await asyncio.wait_for(read_batches(reader), 60)
        finally:
            reader.close()
        return sum(map(len, batches)), context.drops.counts.get(DropKind.DELETED, 0)

    assert asyncio.run(read()) == (records, lost)
