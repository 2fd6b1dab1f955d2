"""The distribution of records of one operator over the subtasks of the next.

These are descriptions that are part of the job; `runtime/exchange` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Forward:
    """Subtask i sends to subtask i; needs equal parallelism. The only one that can be chained."""


@dataclass(frozen=True, slots=True)
class HashColumns:
    """Partition by the key groups of the named columns of a ColumnBatch."""

    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HashFunction:
    """Partition by the key group of `function(record)`."""

    function: Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Round robin over all subtasks, batch by batch."""


@dataclass(frozen=True, slots=True)
class Rescale:
    """Round robin over the nearby subtasks only (pointwise; no all-to-all connections)."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """A random subtask for each batch."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every record to every subtask."""


@dataclass(frozen=True, slots=True)
class Global:
    """Every record to subtask 0."""


@dataclass(frozen=True, slots=True)
class Custom:
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
