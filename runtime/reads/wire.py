"""The messages of direct reads, between a client and the worker that has the state.

They travel in frames (`exchange/wire.py`) on the data port of the worker: READ_HELLO in both directions,
then READ to the worker, and READ_ANSWER back. A client may send requests before earlier ones are answered.
Those for one state of one subtask, at one level, are answered in their order, and others as they are ready.

A client shows a *ticket*, which the coordinator gives to clients that may read state. It is made of the
token of the job, so that a worker can check it, and it is of no use for anything else.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ...operators.queried_columns import SentColumn
from ..control.messages import StateOutcome

READS_VERSION: Final = 3
KEYS_MAX: Final = 250
"""The most keys of one request: a subtask reads all of them in one turn."""
LIVE_NOW: Final = -1
"""The `checkpoint` of a request at the level `live`."""
_PURPOSE: Final = b"headgate direct reads of state"


def ticket_of(token: str) -> str:
    """Return the ticket for direct reads of the job with this token."""
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest()


class ReadHello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of a client."""

    version: int
    ticket: str
    worker_id: str
    """The worker that the client means."""


class ReadWelcome(msgspec.Struct, frozen=True, array_like=True):
    """The worker's reply; `refusal` is empty if the client is welcome."""

    refusal: str
    request_bytes_max: int = 0
    """The largest request that the worker takes, in bytes."""


class ReadRequest(msgspec.Struct, frozen=True, array_like=True):
    """Read a state of some keys of one subtask, all at one moment."""

    number: int
    """For the answer."""
    attempt: int
    vertex: int
    index: int
    operator: str
    """The name of the step that has the state."""
    state: str
    """The name of the state in the step."""
    checkpoint: int
    """`LIVE_NOW`; or else the newest checkpoint that the client has seen, and 0 if it has seen none: the
    values are those of this one, or of a later one that the subtask knows to be complete.
    """
    keys: bytes | tuple[Any, ...]
    """The keys, as `ClientKeys`; at most `KEYS_MAX`."""


class ReadAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The values for one request."""

    number: int
    outcome: StateOutcome
    """ELSEWHERE: the key groups have moved, and the client must ask the coordinator who has them."""
    checkpoint: int = 0
    """The checkpoint that the values are of; 0: they are live."""
    values: bytes = b""
    """A JSON array of the value of each key; null where the state has none. Not beside `columns`."""
    absent: Sequence[int] = ()
    """The places of the keys for which the state has no value."""
    columns: Sequence[SentColumn] = ()
    """The members of the values of the other keys, which are objects."""
