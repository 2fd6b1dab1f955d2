"""The events of a job as server-sent events: written by the server, and read by the client."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import JobError
from ..control.job_client import Event


class _Data(msgspec.Struct):
    text: str
    body: msgspec.Raw = msgspec.Raw(b"null")


def encode(event: Event) -> bytes:
    """An event as a server-sent event: its kind, and as data an object of its text and its body."""
    body: Any = msgspec.json.decode(event.body)  # a line break in it would end the data
    data = msgspec.json.encode({"text": event.text, "body": body})
    return b"event: %s\ndata: %s\n\n" % (event.kind.encode(), data)


def decode(kind: str, data: str) -> Event:
    """The event of this kind and data.

    Raises:
        JobError: the data is not one of ours.
    """
    try:
        found = msgspec.json.decode(data, type=_Data)
    except msgspec.DecodeError as error:
        raise JobError(f"this is no event of a REST API of headgate: {error}") from None
    return Event(kind=kind, text=found.text, body=bytes(found.body))
