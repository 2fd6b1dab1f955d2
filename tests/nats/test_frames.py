"""Messages of NATS as bytes: what a server sends in any pieces, and what is sent to it."""

from __future__ import annotations

import asyncio
import random

import pyarrow as pa
import pytest

from headgate.connectors import nats_sink
from headgate.connectors.nats.frames import (
    Message,
    MessageSplitter,
    header,
    headers_of,
    place_of,
    publication,
    request,
    sequence_of,
    status_of,
)
from headgate.connectors.nats.sink import NatsPublisher
from headgate.errors import DataError

PLACE = b"$JS.ACK.orders.consumer.1.7.5.1700000000123456789.9"
LONG_PLACE = b"$JS.ACK.hub.hash.orders.consumer.1.7.5.1700000000123456789.9.token"


def sent(message: Message, subscription: bytes) -> bytes:
    """Return what a server sends for a message."""
    kind, sizes = b"MSG", b"%d" % len(message.data)
    if message.headers:
        kind = b"HMSG"
        sizes = b"%d %d" % (len(message.headers), len(message.headers) + len(message.data))
    words = [kind, message.subject, subscription, message.reply, sizes]
    line = b" ".join(word for word in words if word)
    return line + b"\r\n" + message.headers + message.data + b"\r\n"


def a_message(rng: random.Random) -> Message:
    headers = rng.choice([b"", b"NATS/1.0\r\nA: b\r\n\r\n"])
    data = b"".join(
        rng.choice([b"a", b"\r\n", b"MSG a 1 1\r\n", b"\0", b"PING\r\n"])
        for _ in range(rng.choice([0, 1, 3, 60]))
    )
    return Message(rng.choice([b"a.b", b"c"]), rng.choice([b"", PLACE]), headers, data)


@pytest.mark.parametrize("seed", range(20))
def test_messages_and_other_commands_arrive_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    stream, expected, others = b"", [], b""
    for _ in range(60):
        if rng.random() < 0.3:
            command = rng.choice([b"PING\r\n", b"+OK\r\n", b"-ERR 'no'\r\n", b'INFO {"a":1}\r\n'])
            others += command
        else:
            message, subscription = a_message(rng), rng.choice([b"3", b"33"])
            command = sent(message, subscription)
            if subscription == b"3":
                expected.append(message)
            else:
                others += command
        stream += command
    splitter, found, left = MessageSplitter(), [], b""
    splitter.receivers[b"3"] = found.extend
    at = 0
    while at < len(stream):
        size = rng.choice([1, 2, 7, 100, 5_000])
        left += splitter.feed(stream[at : at + size])
        at += size
    assert found == expected
    assert left == others


def test_what_is_left_of_a_lost_connection_is_forgotten() -> None:
    splitter, found = MessageSplitter(), []
    splitter.receivers[b"1"] = found.extend
    assert splitter.feed(b"MSG a 1 100\r\nabc") == b""
    splitter.reset()
    assert splitter.feed(b"PING\r\nMSG a 1 1\r\nb\r\n") == b"PING\r\n"
    assert found == [Message(b"a", b"", b"", b"b")]


@pytest.mark.parametrize(
    "line", [b"MSG\r\n", b"MSG a 1\r\n", b"MSG a 1 x\r\n", b"HMSG a 1 x y\r\nabc"]
)
def test_another_protocol_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError, match="message|literal"):
        MessageSplitter().feed(line)


def test_a_publication_is_what_a_server_reads() -> None:
    headers = header("Nats-Msg-Id", "ä")
    assert headers == "NATS/1.0\r\nNats-Msg-Id: ä\r\n\r\n".encode()
    made = publication("orders.eu", "inbox.1", headers, b"a\r\nb")
    sizes = b"%d %d" % (len(headers), len(headers) + 4)
    assert made == b"HPUB orders.eu inbox.1 " + sizes + b"\r\n" + headers + b"a\r\nb\r\n"
    assert request("next", "inbox.2", b"{}") == b"PUB next inbox.2 2\r\n{}\r\n"


@pytest.mark.parametrize("reply", [PLACE, LONG_PLACE, LONG_PLACE.removesuffix(b".token")])
def test_the_place_of_a_message(reply: bytes) -> None:
    message = Message(b"a", reply, b"", b"")
    assert place_of(message) == (7, 5, 1_700_000_000_123_456_789, 9)
    assert sequence_of(message) == 7


def test_a_message_without_a_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a message of a consumer"):
        place_of(Message(b"a", b"inbox.1", b"", b""))


def test_statuses_and_headers() -> None:
    def with_headers(text: bytes, data: bytes = b"") -> Message:
        return Message(b"a", b"", text, data)

    assert status_of(with_headers(b"NATS/1.0 404 No Messages\r\n\r\n")) == (404, "No Messages")
    assert status_of(with_headers(b"NATS/1.0 503\r\n\r\n")) == (503, "")
    assert status_of(with_headers(b"NATS/1.0 408 Request Timeout\r\nNats-Pending: 1\r\n\r\n")) == (
        *(408, "Request Timeout"),
    )
    assert status_of(with_headers(b"NATS/1.0\r\nA: b\r\n\r\n")) is None
    assert status_of(with_headers(b"")) is None
    assert headers_of(with_headers(b"")) is None
    found = headers_of(with_headers(b"NATS/1.0\r\nA:b\r\nC: d:e \r\nA: \xff\r\n\r\n", b"data"))
    assert found == [
        {"name": "A", "value": "b"},
        {"name": "C", "value": "d:e"},
        {"name": "A", "value": "\ufffd"},
    ]


@pytest.mark.parametrize(
    ("kind", "subject", "id_"),
    [
        ("subject", None, "1"),
        ("subject", "", "1"),
        ("subject", "a b", "1"),
        ("subject", "a\r\nPUB b 0", "1"),
        ("id", "a", None),
        ("id", "a", ""),
        ("id", "a", " \r\n "),
    ],
)
def test_subjects_and_ids_that_are_none_are_refused_before_anything_is_sent(
    kind: str, subject: str | None, id_: str | None
) -> None:
    """A subject with white space would be another command, and a blank id would not prevent repeats."""
    metadata = {"subject": "to", "id": "id"}
    sink = nats_sink(url="nats://127.0.0.1:1", metadata=metadata)
    schema = pa.schema([("to", pa.string()), ("id", pa.string()), ("n", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"to": subject, "id": id_, "n": 1}], schema=schema)
    with pytest.raises(DataError, match=f"no {kind} that NATS takes"):
        asyncio.run(NatsPublisher(sink.settings).publish(batch, "k"))
