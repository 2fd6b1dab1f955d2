"""What a user said of a loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from ..elements import Batch

Matching = Callable[[Batch], int]
"""How many records of a batch fulfil a condition."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of a loop in rounds: when it ends.

    Attributes:
        most: the body is run on so many rounds at most.
        matching: another round is only worth it while some of its records fulfil this; None: all do.
    """

    most: int
    matching: Matching | None = None


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """A loop.

    Attributes:
        name: of its head: the address of its state.
        schema: columns of the records in it; None: Python objects.
        wait_ms: it ends when nothing has been under way in it for so long after its inputs ended.
        rounds: it goes in rounds; None: every record goes its own way.
    """

    name: str
    schema: pa.Schema | None
    wait_ms: int = 0
    rounds: Rounds | None = None
