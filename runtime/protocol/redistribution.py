"""Redistributes state, and records that were on their way, when the parallelism changes.

The rules for items of operator state are Flink's (`RoundRobinOperatorStateRepartitioner`): over all states
together, no subtask has more than one item more than another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from ...errors import check
from ...operators.partitioning import Custom, Global, HashColumns, HashFunction, Partitioning
from ...state.keygroups import key_group_range, owner_of

T = TypeVar("T")


def spread_splits(states: Mapping[str, Sequence[T]], parallelism: int) -> dict[str, list[list[T]]]:
    """Return the items of each new subtask, by state in the given order.

    Every subtask gets total div parallelism items of a state, in order; the remainder goes one each
    to the subtasks from `start` on, and `start` carries over to the next state.
    """
    check(parallelism >= 1, "no subtask to give items to", parallelism=parallelism)
    shares: dict[str, list[list[T]]] = {}
    start = 0
    for state, items in states.items():
        base, rest = divmod(len(items), parallelism)
        more = {(start + number) % parallelism for number in range(rest)}
        start = (start + rest) % parallelism
        position = 0
        shares[state] = []
        for index in range(parallelism):
            length = base + (index in more)
            shares[state].append(list(items[position : position + length]))
            position += length
    return shares


def broadcast(copies: Sequence[list[T]], parallelism: int) -> list[list[T]]:
    """Give new subtask i the copy of old subtask i mod the number of those that reported one."""
    check(copies, "no subtask reported a copy")
    return [copies[index % len(copies)] for index in range(parallelism)]


def heirs(subtask: int, before: int, now: int, max_parallelism: int) -> range:
    """Return the new subtasks, of `now`, that own key groups of an old one, of `before`."""
    old = key_group_range(subtask, before, max_parallelism)
    return range(
        owner_of(old.first, now, max_parallelism), owner_of(old.last, now, max_parallelism) + 1
    )


def receivers_after(
    partitioning: Partitioning, receiver: int, before: int, now: int, max_parallelism: int
) -> range:
    """Return the new subtasks, of `now`, that may receive records of the old one, of `before`."""
    if before == now:
        return range(receiver, receiver + 1)
    match partitioning:
        case HashColumns() | HashFunction():
            return heirs(receiver, before, now, max_parallelism)
        case Custom():
            return range(now)
        case Global():
            return range(1)
        case _:
            return range(receiver % now, receiver % now + 1)
