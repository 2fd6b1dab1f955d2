"""The distribution of records of one operator over the subtasks of the next.

These are descriptions that are part of the job; `runtime/exchange` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import msgspec


class Forward(msgspec.Struct, frozen=True):
    """Subtask i sends to subtask i; needs equal parallelism. The only one that can be chained."""


class HashColumns(msgspec.Struct, frozen=True):
    """Partition by the key groups of the named columns of a ColumnBatch."""

    columns: tuple[str, ...]


class HashFunction(msgspec.Struct, frozen=True):
    """Partition by the key group of `function(record)`."""

    function: Callable[[Any], Hashable]


class Rebalance(msgspec.Struct, frozen=True):
    """Round robin over all subtasks, batch by batch."""


class Rescale(msgspec.Struct, frozen=True):
    """Round robin over the nearby subtasks only (pointwise; no all-to-all connections)."""


class Shuffle(msgspec.Struct, frozen=True):
    """A random subtask for each batch."""


class Broadcast(msgspec.Struct, frozen=True):
    """Every record to every subtask."""


class Global(msgspec.Struct, frozen=True):
    """Every record to subtask 0."""


class Custom(msgspec.Struct, frozen=True):
    """`function(record, parallelism)` returns the subtask of each record."""

    function: Callable[[Any, int], int]


Partitioning: TypeAlias = (
    Forward
    | HashColumns
    | HashFunction
    | Rebalance
    | Rescale
    | Shuffle
    | Broadcast
    | Global
    | Custom
)

KeyedBy: TypeAlias = HashColumns | HashFunction
"""The partitionings by key."""
