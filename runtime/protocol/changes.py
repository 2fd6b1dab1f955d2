"""Decides which values a client that follows keys of a state has not been told yet.

The coordinator keeps nothing for such a client. All that the client has been told is in a *position*,
which travels as the id of each event: the checkpoint, and a digest of the value of each key. So a client
goes on at any coordinator and at any parallelism: the newest values are compared with its position, and
exactly those that differ are sent.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, Self

import msgspec

_DIGEST_BYTES: Final = 6
_DIGEST_CHARS: Final = 8
_encode: Final = msgspec.json.Encoder(order="sorted").encode


class Position(msgspec.Struct, frozen=True):
    """The values that a client knows.

    Attributes:
        run: the run of the job that they are from.
        checkpoint: the checkpoint that they are of; 0: of none.
        digests: of each key, as `digest_of` returns it; none: the client knows nothing.
    """

    run: str = ""
    checkpoint: int = 0
    digests: tuple[str, ...] = ()

    def encode(self) -> str:
        """Return the position as the id of an event; empty: the client knows nothing."""
        return f"{self.run}.{self.checkpoint}.{''.join(self.digests)}" if self.digests else ""

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the position of an id.

        Raises:
            ValueError: it is none of ours.
        """
        if not text:
            return cls()
        run, checkpoint, digests = text.rsplit(".", 2)
        if not (checkpoint.isascii() and checkpoint.isdigit() and len(checkpoint) <= 18):
            raise ValueError(text)
        if not digests or len(digests) % _DIGEST_CHARS:
            raise ValueError(text)
        each = range(0, len(digests), _DIGEST_CHARS)
        return cls(run, int(checkpoint), tuple(digests[n : n + _DIGEST_CHARS] for n in each))

    def is_as_of(self, run: str, checkpoint: int) -> bool:
        """Return True if the client knows the values as of this checkpoint."""
        return bool(self.digests) and (self.run, self.checkpoint) == (run, checkpoint)

    def changed(self, digests: Sequence[str]) -> list[int]:
        """Return the places of the keys whose values the client does not know."""
        if len(digests) != len(self.digests):
            return list(range(len(digests)))
        return [
            n for n, (old, new) in enumerate(zip(self.digests, digests, strict=True)) if old != new
        ]


def digest_of(key: Any, found: bool, value: Any, *, is_map: bool) -> str:
    """Return a short text that is another one for another key or value.

    Args:
        key: as plain data.
        found: False: the state has nothing for the key.
        value: as plain data.
        is_map: the value is that of a map state, whose entries may come in another order after a restore.
    """
    if is_map and found:
        value = sorted(map(_encode, value))
    data = _encode([key, value] if found else [key])
    return base64.urlsafe_b64encode(blake2b(data, digest_size=_DIGEST_BYTES).digest()).decode()
