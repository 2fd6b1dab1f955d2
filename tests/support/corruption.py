"""Random damage to stored bytes, and the judgement of the reader's result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from headgate.errors import StateError

FLIPS_MAX = 3


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Flip one to three bits."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, FLIPS_MAX)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncated(data: bytes, rng: random.Random) -> bytes:
    """Remove the end, or the beginning, or a piece in the middle."""
    start = rng.randrange(len(data))
    end = rng.randint(start + 1, len(data))
    return rng.choice([data[:start], data[end:], data[:start] + data[end:]])


def swapped(data: bytes, rng: random.Random) -> bytes:
    """Exchange two pieces of equal length, of 1 to 64 bytes."""
    length = rng.randint(1, min(64, max(1, len(data) // 2)))
    if len(data) < 2 * length:
        return data
    first = rng.randrange(len(data) - 2 * length + 1)
    second = rng.randint(first + length, len(data) - length)
    middle = data[first + length : second]
    return (
        data[:first]
        + data[second : second + length]
        + middle
        + data[first : first + length]
        + data[second + length :]
    )


def overwritten(data: bytes, rng: random.Random) -> bytes:
    """Replace a piece by zeros or noise, as after a lost write of a disk."""
    start = rng.randrange(len(data))
    length = rng.randint(1, min(4096, len(data) - start))
    noise = bytes(length) if rng.random() < 0.5 else rng.randbytes(length)
    return data[:start] + noise + data[start + length :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": flipped,
    "truncation": truncated,
    "swap": swapped,
    "overwrite": overwritten,
}


def damaged(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Return the kind of damage, and the damaged bytes, which always differ from `data`.

    Half of all damages are flips, because a single bit is the smallest change, and the hardest to find.
    """
    while True:
        kind = "flip" if rng.random() < 0.5 else rng.choice(list(DAMAGES))
        changed = DAMAGES[kind](data, rng)
        if changed != data:
            return kind, changed


def judge(read: Callable[[], Any], expected: Any, name: str, what: str) -> str:
    """Read storage in which the object called `name` is damaged, and judge the result.

    Args:
        read: reads the storage, and returns the result.
        expected: the result of undamaged storage.
        name: the name that a named error has in its text.
        what: the damage, for the error.

    Returns:
        `named error` or `right result`.

    Raises:
        AssertionError: a wrong result, an error of another type, or one that does not name the object.
    """
    try:
        found = read()
    except StateError as error:  # CorruptError, or "of a newer format": neither is retried
        if name in str(error):
            return "named error"
        raise AssertionError(f"{what}: the error does not name it: {error}") from error
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    if found != expected:
        raise AssertionError(f"{what}: a wrong result")
    return "right result"
