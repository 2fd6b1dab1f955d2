"""Messages of NATS as bytes: many are taken from what a server sends, or made for it, at a time.

The client nats-py makes an object, a future and a task of each message. That costs ten times what the
bytes themselves cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

_END: Final = b"\r\n"
_MESSAGES: Final = b"MH"
"""The first letters of the commands with messages: MSG, and HMSG for those with headers."""
_VERSION: Final = b"NATS/1.0"
_PLACE_TOKENS: Final = 9
"""The number of tokens of a place in a stream, in the older of its two forms."""


class Message(NamedTuple):
    """A message as a server sends it.

    Attributes:
        subject: its subject.
        reply: the subject for answers; of a message of a consumer, its place in the stream.
        headers: a line with the version, and perhaps a status, and the headers; empty: it has none.
        data: its data.
    """

    subject: bytes
    reply: bytes
    headers: bytes
    data: bytes


Receiver: TypeAlias = Callable[[list[Message]], None]


class MessageSplitter:
    """Takes the messages of some subscriptions out of what a server sends.

    Attributes:
        receivers: functions that get the messages, by the ids of the subscriptions.
    """

    def __init__(self) -> None:
        self.receivers: dict[bytes, Receiver] = {}
        self._begun = bytearray()
        """A command that has not arrived as a whole."""
        self._needed = 0
        """The size at which that may be the case."""

    def feed(self, received: bytes) -> bytes:
        """Take bytes that have arrived, and return what is not for a receiver, in whole commands.

        Raises:
            ValueError: that is not the protocol of NATS.
        """
        self._begun += received
        if len(self._begun) < self._needed:
            return b""
        text, at = bytes(self._begun), 0
        self._needed = 0
        others: list[bytes] = []
        found: dict[bytes, list[Message]] = {}
        while (end := text.find(_END, at)) >= 0:
            after = end + len(_END)
            if text[at] in _MESSAGES:
                words = text[at:end].split()
                if len(words) < 4:
                    raise ValueError("a message has no subscription or no size")
                begin, after = after, after + int(words[-1]) + len(_END)
                if after > len(text):
                    self._needed = after - at
                    break
                if words[2] in self.receivers:
                    message = _message(words, text[begin : after - len(_END)])
                    found.setdefault(words[2], []).append(message)
                    at = after
                    continue
            others.append(text[at:after])
            at = after
        self._begun = bytearray(text[at:])
        for subscription, messages in found.items():
            self.receivers[subscription](messages)
        return b"".join(others)

    def reset(self) -> None:
        """Forget what has begun to arrive."""
        self._begun.clear()
        self._needed = 0


def _message(words: Sequence[bytes], content: bytes) -> Message:
    """Return a message of its command, which has a reply subject or not, and its content."""
    if words[0] == b"MSG":
        return Message(words[1], words[3] if len(words) == 5 else b"", b"", content)
    size = int(words[-2])
    reply = words[3] if len(words) == 6 else b""
    return Message(words[1], reply, content[:size], content[size:])


def header(name: str, value: str) -> bytes:
    """Return the headers of a message that has one; neither of both may have line ends."""
    return f"NATS/1.0\r\n{name}: {value}\r\n\r\n".encode()


def publication(subject: str, reply: str, headers: bytes, data: bytes) -> bytes:
    """Return the command that publishes a message.

    Args:
        subject: of the message, without white space.
        reply: the subject for the answer.
        headers: of the message, as `header` makes them.
        data: of the message.
    """
    size = len(headers)
    command = f"HPUB {subject} {reply} {size} {size + len(data)}\r\n".encode()
    return b"".join((command, headers, data, _END))


def request(subject: str, reply: str, data: bytes) -> bytes:
    """Return the command that makes a request, without headers."""
    return f"PUB {subject} {reply} {len(data)}\r\n".encode() + data + _END


class Place(NamedTuple):
    """The place of a message in a stream and in a consumer.

    Attributes:
        sequence: its number in the stream.
        delivery: its number among the messages that the consumer has sent.
        time_ns: when it was stored, in ns since 1970.
        pending: how many messages the consumer had not sent then.
    """

    sequence: int
    delivery: int
    time_ns: int
    pending: int


def place_of(message: Message) -> Place:
    """Return the place of a message of a consumer.

    Raises:
        ValueError: it is not of a consumer.
    """
    tokens, first = _tokens_of(message)
    return Place(*map(int, tokens[first : first + 4]))


def sequence_of(message: Message) -> int:
    """Return the number of a message in its stream, as `place_of`."""
    tokens, first = _tokens_of(message)
    return int(tokens[first])


def _tokens_of(message: Message) -> tuple[list[bytes], int]:
    """Return the tokens of the place of a message, and the index of its number in the stream."""
    tokens = message.reply.split(b".")
    if len(tokens) < _PLACE_TOKENS or tokens[:2] != [b"$JS", b"ACK"]:
        raise ValueError(f"not a message of a consumer: {message.subject!r}")
    return tokens, 5 if len(tokens) == _PLACE_TOKENS else 7


def status_of(message: Message) -> tuple[int, str] | None:
    """Return the code and the text of a status of the server; None: the message is none."""
    if not message.headers or message.data:
        return None
    line = message.headers.partition(_END)[0].removeprefix(_VERSION)
    code, _, text = line.strip().partition(b" ")
    return (int(code), text.decode(errors="replace").strip()) if code.isdigit() else None


def headers_of(message: Message) -> list[dict[str, str]] | None:
    """Return the headers of a message, in order; None: it has none."""
    found = []
    for line in message.headers.split(_END)[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            texts = (name.strip().decode(errors="replace"), value.strip().decode(errors="replace"))
            found.append(dict(zip(("name", "value"), texts, strict=True)))
    return found or None
