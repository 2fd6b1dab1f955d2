"""The totals of a window as it moves over panes: each cell is touched a few times, not once per window.

Counts and sums of integers are running totals (`running_totals.py`); everything else uses two
stacks (`two_stacks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import pyarrow as pa

from ....state.values import Index

Totalled: TypeAlias = tuple[Index, list[pa.Array]]
"""Slots of keys, and one column per aggregate."""
NOWHERE = -(2**63)


class Members(Protocol):
    """A pane as totals see it."""

    @property
    def number(self) -> int:
        """The number of the pane; panes are numbered in order of time."""
        ...

    def members(self) -> tuple[Index, Index]:
        """Return the slots of its keys, each once, and their cells."""
        ...


Between: TypeAlias = Callable[[int, int], Iterable[Members]]


class Totals(Protocol):
    """The aggregates of a run of panes, per key. The run only moves forward."""

    first: int
    last: int
    """The panes of the run."""

    def move(self, first: int, last: int, size: int) -> None:
        """Cover the panes from `first` to `last`; there are `size` slots of keys."""
        ...

    def results(self) -> Totalled:
        """Return the aggregates of the keys that have records in the run."""
        ...

    def before_add(self, keys: Index, cells: Index) -> None:
        """Prepare for a change of these cells of panes in the run (each once); `keys` are their keys."""
        ...

    def after_add(self, keys: Index, cells: Index) -> None:
        """Take in these cells of panes in the run (each once), which have changed or are new."""
        ...

    def clear(self) -> None:
        """Clear everything: keys and cells were renumbered."""
        ...
