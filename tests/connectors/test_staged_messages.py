"""A record that no server takes is found before a checkpoint has it, which could never be committed."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors import nats_sink, rabbitmq_sink
from headgate.errors import DataError
from headgate.operators.elements import ColumnBatch
from headgate.testing.connectors import make_context

_BYTES_MAX = 1 << 20


def _rabbitmq() -> Any:
    url = "rabbitmq-stream://127.0.0.1:1"
    return rabbitmq_sink("s", url=url, guarantee="exactly_once").writer()


def _super_stream() -> Any:
    url, key = "rabbitmq-stream://127.0.0.1:1", "text"
    sink = rabbitmq_sink(super_stream="s", routing_key=key, url=url, guarantee="exactly_once")
    writer: Any = sink.writer()
    writer._partitions = ["s-0", "s-1"]
    return writer


def _nats() -> Any:
    writer: Any = nats_sink("s", url="nats://127.0.0.1:1", guarantee="exactly_once").writer()
    writer.function._context = make_context()
    writer.function._bytes_max = _BYTES_MAX
    return writer


def _stage(writer: Any, columns: dict[str, list[str]]) -> list[bytes]:
    """Write records, and return what a checkpoint has of them."""
    writer.write(ColumnBatch(pa.record_batch(columns)))
    staged: list[bytes] = writer.roll(1)()
    return staged


@pytest.mark.parametrize("make", [_rabbitmq, _super_stream, _nats])
def test_a_message_that_is_too_large_is_not_staged(make: Any) -> None:
    async def scenario() -> None:
        writer = make()
        writer.open(make_context())
        try:
            assert len(_stage(writer, {"text": ["fits", "x" * (_BYTES_MAX - 10_000)]})) == 1
            writer.write(ColumnBatch(pa.record_batch({"text": ["fits"]})))
            with pytest.raises(DataError, match="too large"):
                _stage(writer, {"text": ["x" * _BYTES_MAX]})
        finally:
            writer.close()

    asyncio.run(scenario())


def test_a_record_without_a_subject_is_not_staged() -> None:
    async def scenario() -> None:
        sink = nats_sink(
            url="nats://127.0.0.1:1", metadata={"subject": "to"}, guarantee="exactly_once"
        )
        writer: Any = sink.writer()
        writer.function._context = make_context()
        writer.open(make_context())
        try:
            with pytest.raises(DataError, match="no subject that NATS takes"):
                _stage(writer, {"text": ["a"], "to": [""]})
        finally:
            writer.close()

    asyncio.run(scenario())
