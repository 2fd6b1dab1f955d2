"""The settings of a loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from ..elements import Batch

Matching = Callable[[Batch], int]
"""A function that counts the records of a batch that meet a condition."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The end of a loop in rounds.

    Attributes:
        most: the most rounds.
        matching: another round runs only while some of its records meet this; None: all do.
    """

    most: int
    matching: Matching | None = None


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The settings of a loop.

    Attributes:
        name: of its head: the address of its state.
        schema: columns of the records in it; None: Python objects.
        wait_ms: after its inputs have ended, it ends once it was empty for this long.
        rounds: None for a loop without rounds.
    """

    name: str
    schema: pa.Schema | None
    wait_ms: int = 0
    rounds: Rounds | None = None
