"""The shared buffer: the records that runs of one key have taken, each stored once, with who took them.

A *node* says that a stage took a record after another node; a run knows its last node, and the path
back from there is what it has taken. Runs with a common beginning share its nodes. The buffer of
SASE+ (Agrawal et al., Efficient Pattern Matching over Event Streams, SIGMOD 2008) has one node for
all runs in which a stage took a record, several edges back from it, and Dewey numbers that tell the
edges of one run from those of others. Here each such edge is a node of its own: the number of
entries is the same, and a path needs no comparison of numbers.

Nodes are reference-counted by runs and nodes; an unreferenced node is removed, and its record with
its last node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from ...state.keyed.base import ABSENT, EntryTable

NodeId: TypeAlias = tuple[int, int]
"""The number of the record, and of the node among those of this record."""
NO_NODE: Final[NodeId] = (-1, -1)


class Event(NamedTuple):
    """A record, numbered in the order in which its key's records are handled.

    Attributes:
        number: its place in this order.
        time: event time, ms.
        record: the record itself.
        answers: the bits of the expressions that are true for it.
    """

    number: int
    time: int
    record: Any
    answers: int


@dataclass(slots=True)
class _Node:
    stage: int
    before: NodeId
    needed: int


class SharedBuffer:
    """The nodes and records of the current key. Call `begin` before work on a key, and `flush` after.

    Args:
        events: the records: number -> (time, record, answers).
        nodes: number of the record -> (number of node, stage, node before, references) of each of
            its nodes.

    Attributes:
        held: the number of nodes of the key.
    """

    def __init__(self, events: EntryTable, nodes: EntryTable) -> None:
        self.held = 0
        self._event_table, self._node_table = events, nodes
        self._events: dict[int, Event] = {}
        self._nodes: dict[int, dict[int, _Node]] = {}
        self._changed: dict[int, bool] = {}
        """The records whose nodes were changed, and whether they were stored before."""

    def begin(self, held: int) -> None:
        """Begin work on a key that has `held` nodes."""
        self.held = held
        self._forget()

    def take(self, stage: int, event: Event, before: NodeId) -> NodeId:
        """Create an unreferenced node: a stage took a record after another node."""
        nodes = self._nodes.get(event.number)
        if nodes is None:
            nodes = self._nodes[event.number] = {}
            self._events[event.number] = event
        self._changed.setdefault(event.number, False)
        number = next(reversed(nodes), -1) + 1  # they are in order
        nodes[number] = _Node(stage, before, 0)
        self.held += 1
        self.need(before)
        return event.number, number

    def need(self, node: NodeId) -> None:
        """Add a reference to a node."""
        if node != NO_NODE:
            self._of(node[0])[node[1]].needed += 1
            self._changed.setdefault(node[0], True)

    def release(self, node: NodeId) -> None:
        """Remove a run's reference to a node."""
        while node != NO_NODE:
            nodes = self._of(node[0])
            found = nodes[node[1]]
            found.needed -= 1
            self._changed.setdefault(node[0], True)
            if found.needed:
                return
            del nodes[node[1]]
            self.held -= 1
            node = found.before

    def path(self, node: NodeId) -> list[tuple[int, int]]:
        """Return what a run has taken, in order: the stage and the number of the record."""
        path = []
        while node != NO_NODE:
            found = self._of(node[0])[node[1]]
            path.append((found.stage, node[0]))
            node = found.before
        path.reverse()
        return path

    def event(self, number: int) -> Event:
        """Return a record that was taken."""
        event = self._events.get(number)
        if event is None:
            event = self._events[number] = Event(number, *self._event_table.get(number))
        return event

    def flush(self) -> None:
        """Write the changes."""
        for number, stored in self._changed.items():
            nodes = self._nodes[number]
            if nodes:
                rows = [(n, node.stage, node.before, node.needed) for n, node in nodes.items()]
                self._node_table.put(number, rows)
                if not stored:
                    event = self._events[number]
                    self._event_table.put(number, (event.time, event.record, event.answers))
            elif stored:
                self._node_table.delete(number)
                self._event_table.delete(number)
        self._forget()

    def _forget(self) -> None:
        """Drop the cache of the key."""
        self._events.clear()
        self._nodes.clear()
        self._changed.clear()

    def _of(self, number: int) -> dict[int, _Node]:
        nodes = self._nodes.get(number)
        if nodes is None:
            rows = self._node_table.get(number)
            assert rows is not ABSENT, "a run refers to a node that was removed"
            nodes = {n: _Node(stage, before, needed) for n, stage, before, needed in rows}
            self._nodes[number] = nodes
        return nodes
