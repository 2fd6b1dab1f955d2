"""NodeOutput: the output of a node of the job's graph, which the functions in `steps` take and return.

`Stream`, `KeyedStream` and the streams made of them are the public faces of such outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow as pa

from ..errors import PlanError
from ..operators.functions.dead_letters import FAILED
from ..operators.graph import Graph, Input, Node
from ..operators.origin import Origin
from ..operators.partitioning import (
    Forward,
    Global,
    HashColumns,
    HashFunction,
    KeyedBy,
    Partitioning,
)
from ..operators.suggestions import suggest
from ..operators.whole_numbers import check_whole_number


class JobBuilder(Protocol):
    """The job under construction, as its steps see it."""

    @property
    def graph(self) -> Graph:
        """The nodes that were added so far."""

    def add_node(self, node: Node) -> Node:
        """Add a node to the graph; an empty name is replaced by one made from its kind."""

    def derived_name(self, kind: str) -> str:
        """Return the name that the next node of this kind gets if the user gives none."""

    def check_group(self, name: object, origin: Origin) -> str:
        """Return the name of a slot sharing group, which the job must declare."""

    def show(self, output: NodeOutput, rows: int, within_ms: int, origin: Origin) -> None:
        """Print the first records of an output."""


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """The records that a node emits, and how they are distributed over the subtasks of the next step."""

    job: JobBuilder
    node: Node
    side: str | None = None
    """The side output of the node that this is; None for its main output."""
    partitioning: Partitioning = field(default_factory=Forward)
    """The distribution of the records; the output of `key_by` is partitioned by key."""
    has_event_time: bool = False
    label: str = ""
    """A name given by the user, which errors show instead of the name of the node."""
    aggregate: NodeOutput | None = None
    """The aggregate whose result the node only gives the columns of `into=`, if that is all it does.

    The side outputs are those of the aggregate, and a parallelism is for both.
    """

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of the records; None for Python objects."""
        return self.node.schema if self.side is None else self.node.sides[self.side]

    @property
    def row_type(self) -> type[Any] | None:
        """The class that records become in functions of a record, if the user gave one."""
        return self.node.row_type if self.side is None else None

    @property
    def name(self) -> str:
        """The name of the output in errors."""
        if self.label:
            return self.label
        return self.node.name if self.side is None else f"{self.node.name}.{self.side}"

    @property
    def keyed_by(self) -> KeyedBy | None:
        """The keys by which the records are partitioned; None without keys."""
        by = self.partitioning
        return by if isinstance(by, HashColumns | HashFunction) else None

    @property
    def key(self) -> tuple[str, ...] | Callable[[Any], Hashable] | None:
        """The key columns, or the function that gives the key; None without keys."""
        by = self.keyed_by
        return by.columns if isinstance(by, HashColumns) else None if by is None else by.function

    def columns(self, what: str, origin: Origin) -> pa.Schema:
        """Return the schema, which `what` needs.

        Raises:
            PlanError: the records are Python objects.
        """
        if self.schema is None:
            is_source = self.node.source is not None
            how, what_it_is = ("give schema=", "source") if is_source else ("add into=", "step")
            raise PlanError(
                f"{what} needs columns, but `{self.name}` is a stream of Python objects",
                where=str(origin),
                fix=f"{how} with a Struct, dataclass or schema to the {what_it_is} `{self.name}`",
            )
        return self.schema

    def key_fields(self, origin: Origin) -> list[pa.Field] | None:
        """Return the key columns; None if a function gives the key, or there is none."""
        if not isinstance(self.partitioning, HashColumns):
            return None
        schema = self.columns("key_by", origin)
        return [schema.field(column) for column in self.partitioning.columns]

    def as_input(self) -> Input:
        """Return the edge from the node into the next step."""
        return Input(self.node, self.partitioning, self.side)

    def distributed(self, partitioning: Partitioning) -> NodeOutput:
        """Return the same records with another distribution."""
        return replace(self, partitioning=partitioning)

    def add(self, node: Node, has_event_time: bool | None = None) -> NodeOutput:
        """Add the next node to the graph; its output keeps the event time unless specified otherwise."""
        keeps = self.has_event_time if has_event_time is None else has_event_time
        return NodeOutput(self.job, self.job.add_node(node), has_event_time=keeps)

    def own_node(self, method: str, origin: Origin) -> Node:
        """Return the node, for a method of streams that sets something of the step before it.

        Raises:
            PlanError: something came in between.
        """
        if self.side is not None or not isinstance(self.partitioning, Forward):
            raise PlanError(
                f"{method}() applies to a step, and must directly follow it", where=str(origin)
            )
        return self.node

    def set_parallelism(self, parallelism: int, origin: Origin) -> None:
        """Run the node in this many subtasks.

        Raises:
            PlanError: the node must run in one, or something came in between.
        """
        if self.aggregate is not None:
            self.aggregate.set_parallelism(parallelism, origin)
        node = self.own_node("parallel", origin)
        check_whole_number("parallelism", parallelism, origin)
        if parallelism > 1 and any(isinstance(i.partitioning, Global) for i in node.inputs):
            raise PlanError(
                f"`{node.name}` runs in one subtask, since it gets all records", where=str(origin)
            )
        node.parallelism = parallelism

    def side_output(self, tag: str, origin: Origin) -> NodeOutput:
        """Return a side output of the node.

        Raises:
            PlanError: the node has none of this name.
        """
        if self.aggregate is not None:
            return self.aggregate.side_output(tag, origin)
        if tag not in self.node.sides or self.side is not None:
            sides = [] if self.side is not None else list(self.node.sides)
            raise PlanError(
                f"`{self.name}` has no side output `{tag}`",
                where=str(origin),
                fix=suggest(tag, sides, "side outputs"),
            )
        # Records without event time are emitted by `event_time`, too.
        untimed = tag == FAILED and self.node.kind == "event_time"
        timed = self.has_event_time and not untimed
        return NodeOutput(self.job, self.node, tag, has_event_time=timed)
