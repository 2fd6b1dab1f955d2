"""The keyed state of a pattern step: buffered records, runs, and the shared buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Final

from ...state.codecs import codec_of
from ...state.keyed.base import ABSENT, KeyedBackend
from ...state.keyed.canonical import Layout, TableSpec
from ...state.keyed.keys import token
from ..process.declared import DeclaredStates
from .matcher import Runs

WAITING: Final = "match_waiting"
RUNS: Final = "match_runs"
EVENTS: Final = "match_events"
NODES: Final = "match_nodes"


@dataclass(frozen=True)
class MatchStates(DeclaredStates):
    """The states of a pattern step; `shape` is the version of the runs, a number made of the pattern."""

    shape: int = 1

    def specs(self) -> dict[str, TableSpec]:
        anything, number, keys = codec_of(Any), codec_of(int), self.keys
        specs = (
            TableSpec(WAITING, Layout(keys, "map", anything, number)),
            TableSpec(RUNS, Layout(keys, "value", anything), version=self.shape),
            TableSpec(EVENTS, Layout(keys, "map", anything, number)),
            TableSpec(NODES, Layout(keys, "map", anything, number)),
        )
        return {spec.name: spec for spec in specs}


def match_states(declared: DeclaredStates, shape: int) -> MatchStates:
    """Return the states of a step whose keys are those of `declared`."""
    return MatchStates({}, {}, {}, {}, declared.keys, True, shape)


class Waiting:
    """Records that the watermark has not reached, per key in order of time, ties in order of arrival.

    The state has them by a number that grows with arrival. The order is kept in memory only; after
    a restore it is rebuilt from the records.
    """

    def __init__(self, backend: KeyedBackend) -> None:
        self._table = backend.entry_table(WAITING)
        self._orders: dict[Any, list[tuple[int, int]]] = {}
        self._arrived = 0

    def add(self, key: Any, time: int, record: Any, answers: int) -> None:
        """Add a record of the current key."""
        number = self._arrived
        self._arrived += 1
        self._table.put(number, (time, record, answers))
        heappush(self._orders.setdefault(token(key), []), (time, number))

    def next_time(self, key: Any) -> int | None:
        """Return the event time of the key's next record, ms; None if there is none."""
        order = self._orders.get(token(key))
        return order[0][0] if order else None

    def pop(self, key: Any) -> tuple[int, Any, int]:
        """Remove the next record of the current key: return its time, the record, and its answers."""
        order = self._orders[token(key)]
        _, number = heappop(order)
        if not order:
            del self._orders[token(key)]
        waited: tuple[int, Any, int] = self._table.get(number)
        self._table.delete(number)
        return waited

    def restored(self, keys: Iterator[Any]) -> None:
        """Rebuild the order; the caller sets the current key before it gives the next of `keys`."""
        for key in keys:
            order = [(waited[0], number) for number, waited in self._table.entries()]
            heapify(order)
            self._orders[token(key)] = order
            self._arrived = max(self._arrived, *(number + 1 for _, number in order))


def load_runs(table: Any) -> Runs:
    """Return the runs of the current key."""
    plain = table.get()
    return Runs() if plain is ABSENT else Runs.of_plain(plain)
