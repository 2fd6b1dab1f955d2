"""The logical graph of a job, before chains and subtasks.

Nodes are added by the methods of streams, which the manifest calls too, and never removed. The graph is
sent to the coordinator by cloudpickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol, runtime_checkable

import pyarrow as pa

from .base import Operator, OperatorFactory
from .origin import Origin
from .partitioning import Partitioning
from .queries import QueryableState
from .sink import Sink
from .source import Source
from .watermarks.strategy import WatermarkSettings


class Chaining(Enum):
    """Whether an operator may run in the same subtask as the one before it."""

    ALWAYS = "always"
    HEAD = "head"  # only as the first of a chain (coroutine user code)
    NEVER = "never"


class ByClock(Enum):
    """The parts of a step that may follow the machine's clock."""

    WINDOWS = "windows by the machine's clock"
    EARLY = "results every so often before the end (emit_every)"
    TRIGGER = "triggers by the machine's clock"
    TIMERS = "timers by the machine's clock (ctx.processing_time)"


@dataclass(slots=True)
class Input:
    """An edge into a node: from `node`, or from its side output `side`."""

    node: Node
    partitioning: Partitioning
    side: str | None = None


@dataclass(slots=True, eq=False)
class Node:
    """One logical operator.

    `name` is unique in the job and the address of the node's state. Exactly one of `source` and
    `factory` is set. `schema` describes what the node emits (None: Python objects); `row_type` is the
    class its records become in per-record functions.
    """

    name: str
    kind: str
    origin: Origin
    id: int = -1
    """Its place in the graph, known when it has been added."""
    inputs: tuple[Input, ...] = ()
    source: Source | None = None
    factory: OperatorFactory | None = None
    sink: Sink | None = None
    schema: pa.Schema | None = None
    row_type: type[Any] | None = None
    parallelism: int | None = None
    max_parallelism: int | None = None
    slot_sharing_group: str | None = None
    """Which steps it shares slots with; None: those of its inputs (`resources.py`)."""
    chaining: Chaining = Chaining.ALWAYS
    stateful: bool = False
    sides: dict[str, pa.Schema | None] = field(default_factory=dict)
    """The side outputs of this node with their schemas."""
    detail: str = ""
    """A short text for `explain`: the expression, the window, the sink."""
    columns_read: frozenset[str] | None = None
    """The input columns this node needs beyond passing them on; None: all of them."""
    watermarks: WatermarkSettings | None = None
    """The watermark settings of this node, if it makes watermarks."""
    window_ends_ms: int = 0
    """All windows of this step end at multiples of this event time; 0: this is not so, or not known. Of a
    step that makes watermarks: the windows of the steps behind it, as the plan finds them.
    """
    by_clock: ByClock | None = None
    """The part of it that follows the machine's clock, so that output depends on when records arrive."""
    queryable: tuple[QueryableState, ...] = ()
    """The states that clients outside the job read by key."""
    feeds: int | None = None
    """The id of the head of the loop that this node closes: its output goes back there."""


PRE_AGGREGATE: Final = "pre-aggregate"
"""The kind of the steps that aggregate in front of an exchange; the step behind it has the state."""
PRE_AGGREGATION_OPTION: Final = "headgate.pre-aggregation.enabled"
"""The option that allows such steps."""


@runtime_checkable
class PreAggregating(Protocol):
    """The factory of an operator whose records may be aggregated on their way to it."""

    @property
    def takes_partials(self) -> bool:
        """True if no result can tell."""
        ...

    @property
    def takes_dense_partials(self) -> bool:
        """True if they may also be aggregated there without looking up their keys."""
        ...

    def pre_aggregate(self) -> Operator:
        """Return an operator that sends partial results to that of this factory."""
        ...


@dataclass(slots=True)
class Graph:
    """All nodes of a job, in the order they were added (so inputs come before their readers)."""

    nodes: list[Node] = field(default_factory=list)

    def sources(self) -> Iterator[Node]:
        """The nodes that read from outside."""
        return (node for node in self.nodes if node.source is not None)

    def sinks(self) -> Iterator[Node]:
        """The nodes that write to outside."""
        return (node for node in self.nodes if node.sink is not None)

    def consumers(self, node: Node) -> list[tuple[Node, int]]:
        """The readers of `node`, main and side outputs, with their input number."""
        return [
            (reader, index)
            for reader in self.nodes
            for index, input_ in enumerate(reader.inputs)
            if input_.node is node
        ]
