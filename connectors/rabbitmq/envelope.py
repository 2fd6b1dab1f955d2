"""Messages of AMQP 1.0, in which RabbitMQ's clients wrap the data of a stream's messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

EnvelopeName: TypeAlias = Literal["amqp", "none"]
ENVELOPES: Final[tuple[EnvelopeName, ...]] = ("amqp", "none")
_SHORT: Final = b"\x00\x53\x75\xa0"
"""The begin of a section of data of up to 255 bytes, and of a longer one."""
_LONG: Final = b"\x00\x53\x75\xb0"
_SHORT_MAX: Final = 255
_PROPERTIES: Final = 0x74
_DATA: Final = 0x75
_VALUE: Final = 0x77


@dataclass(frozen=True, slots=True)
class Content:
    """The contents of a message.

    Attributes:
        data: its data.
        properties: the application properties, as pairs.
    """

    data: bytes
    properties: list[tuple[str, str]] | None = None


class NotAMessageError(ValueError):
    """Bytes are not a message of AMQP 1.0 with data."""


def wrap(data: bytes) -> bytes:
    """Return a message with this data."""
    if len(data) <= _SHORT_MAX:
        return b"%b%c%b" % (_SHORT, len(data), data)
    return _LONG + len(data).to_bytes(4, "big") + data


def unwrap(message: bytes) -> Content:
    """Return what a message holds.

    Raises:
        NotAMessageError: it is not a message of AMQP 1.0 with data.
    """
    # Most clients write nothing but one section of data.
    if message[:4] == _SHORT and len(message) == 5 + message[4]:
        return Content(message[5:])
    if message[:4] == _LONG and len(message) == 8 + int.from_bytes(message[4:8], "big"):
        return Content(message[8:])
    try:
        sections = _sections(message)
    except Exception as error:  # the decoder raises whatever the bytes lead it to
        raise NotAMessageError("it is not a message of AMQP 1.0") from error
    parts = [value for kind, value in sections if kind == _DATA]
    if not parts:  # a single value, such as a text
        parts = [value for kind, value in sections if kind == _VALUE]
    if not parts or not all(isinstance(part, str | bytes | memoryview) for part in parts):
        raise NotAMessageError("it is not a message of AMQP 1.0 with data")
    data = b"".join(part.encode() if isinstance(part, str) else bytes(part) for part in parts)
    pairs = [
        (_text(name), _text(value))
        for kind, values in sections
        if kind == _PROPERTIES
        for name, value in values.items()
    ]
    return Content(data, pairs or None)


def _sections(message: bytes) -> list[tuple[int, Any]]:
    """Return the kinds and values of the sections of a message."""
    # The client's own decoder of messages keeps only the last one of several sections of data.
    from rstream._pyamqp import _decode

    decoders: Any = vars(_decode)["_DECODE_BY_CONSTRUCTOR"]
    sections = []
    rest = message
    while rest:
        if rest[:2] != b"\x00\x53":
            raise ValueError("no section begins here")
        kind, constructor = rest[2], rest[3]
        after, value = decoders[constructor](memoryview(rest)[4:])
        if kind == _DATA:
            length = rest[4] if constructor == _SHORT[3] else int.from_bytes(rest[4:8], "big")
            if len(value) != length:
                raise ValueError("the data is cut off")
        sections.append((kind, value))
        rest = bytes(after)
    return sections


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
