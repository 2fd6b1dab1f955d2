"""Rewrites of the logical graph that keep its results.

They prune columns, merge expressions, and aggregate windows in front of exchanges.

Names, and so the addresses of state, stay as they are. The given graph is not changed.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from ..operators.expressions.expression_steps import (
    ExpressionFactory,
    ExpressionSteps,
    SelectStep,
    columns_read,
)
from ..operators.expressions.expressions import Column
from ..operators.functions.bytecode import used_columns
from ..operators.graph import PRE_AGGREGATE, Chaining, Graph, Input, Node, PreAggregating
from ..operators.lazy_modules import pl
from ..operators.partitioning import Custom, Forward, Global, HashColumns, HashFunction
from .resources import sharing_groups

_PASSING = frozenset({"filter", "event_time", "union"})
"""The kinds of steps that pass on all columns of their input."""


def optimize(graph: Graph, parallelism: int, *, pre_aggregates: bool = False) -> Graph:
    """Return a new graph with the same results.

    Args:
        graph: as the user wrote it.
        parallelism: of nodes without their own.
        pre_aggregates: whether windows are aggregated in front of exchanges, too.
    """
    copy = _copy(graph)
    _prune(copy, parallelism)
    _fuse(copy, parallelism)
    if pre_aggregates and not any(node.feeds is not None for node in graph.nodes):
        for node in list(copy.nodes):
            _pre_aggregate(copy, node, parallelism)
    return copy


def _copy(graph: Graph) -> Graph:
    nodes: dict[int, Node] = {}
    groups = sharing_groups(graph)  # settled first: what is inserted or joined has others before it
    for node in graph.nodes:
        inputs = tuple(replace(input_, node=nodes[input_.node.id]) for input_ in node.inputs)
        group = groups[node.id]
        nodes[node.id] = replace(
            node, inputs=inputs, sides=dict(node.sides), slot_sharing_group=group
        )
    return Graph(list(nodes.values()))


# columns


def _prune(graph: Graph, parallelism: int) -> None:
    """Read only the columns that are used, and send only those over the network."""
    needed: dict[int, frozenset[str] | None] = {}
    for node in reversed(graph.nodes):
        needed[node.id] = _needed_of(node, graph, needed)
    for node in list(graph.nodes):
        _narrow_source(node, needed[node.id])
        for index in range(len(node.inputs)):
            _select_before_shuffle(graph, node, index, needed, parallelism)
        if node.kind == "union":
            _narrow_union(graph, node, needed[node.id])
        elif node.kind in _PASSING:
            _pass_on(node)


def _needed_of(
    node: Node, graph: Graph, needed: dict[int, frozenset[str] | None]
) -> frozenset[str] | None:
    """Return the columns of the node's output that have a reader; None: all of them."""
    if node.schema is None:
        return None
    total: frozenset[str] = frozenset()
    for reader, index in graph.consumers(node):
        if reader.inputs[index].side is not None:
            continue
        wanted = _needed_by(reader, index, graph, needed)
        if wanted is None:
            return None
        total |= wanted
    # A batch needs a column for its rows to exist, even if they are only counted.
    return total or frozenset(node.schema.names[:1])


def _needed_by(
    reader: Node, index: int, graph: Graph, needed: dict[int, frozenset[str] | None]
) -> frozenset[str] | None:
    """Return the columns that one input of a node needs."""
    side_is_read = any(
        consumer.inputs[number].side is not None for consumer, number in graph.consumers(reader)
    )
    routing = _needed_to_route(reader.inputs[index])
    if reader.columns_read is None or routing is None or side_is_read:
        return None
    own = reader.columns_read | routing
    if reader.kind not in _PASSING:
        return own
    passed = needed[reader.id]
    return None if passed is None else own | passed


def _needed_to_route(input_: Input) -> frozenset[str] | None:
    """Return the columns that decide where a record goes."""
    match input_.partitioning:
        case HashColumns(columns):
            return frozenset(columns)
        case HashFunction(function):
            used = used_columns(function)
            schema = input_.node.schema
            # Other attributes are methods of the user's class, which may read any column.
            known = used is not None and schema is not None and used <= set(schema.names)
            return used if known else None
        case Custom():
            return None
        case _:
            return frozenset()


def _narrow_source(node: Node, needed: frozenset[str] | None) -> None:
    if node.source is None or node.schema is None or needed is None:
        return
    wanted = [name for name in node.schema.names if name in needed]
    if len(wanted) < len(node.schema.names):
        narrow = node.source.with_columns(wanted)
        node.source, node.schema = narrow, narrow.schema


def _pass_on(node: Node) -> None:
    """Set the schema of a node that adds nothing to that of its input."""
    (input_,) = node.inputs
    if node.schema is not None and input_.side is None and input_.node.schema is not None:
        node.schema = _subset(node.schema, frozenset(input_.node.schema.names))


def _narrow_union(graph: Graph, node: Node, needed: frozenset[str] | None) -> None:
    """Give all inputs of a union the same columns, in the same order."""
    if node.schema is None or needed is None:
        return
    node.schema = _subset(node.schema, needed)
    for index, input_ in enumerate(node.inputs):
        arriving = input_.node.schema if input_.side is None else None
        if arriving is not None and arriving.names != node.schema.names:
            _insert_select(graph, node, index, arriving, node.schema.names)


def _subset(schema: pa.Schema, names: set[str] | frozenset[str]) -> pa.Schema:
    return pa.schema([field for field in schema if field.name in names])


def _select_before_shuffle(
    graph: Graph,
    node: Node,
    index: int,
    needed: dict[int, frozenset[str] | None],
    parallelism: int,
) -> None:
    """Put a select on the sender's side of an exchange that would carry unused columns."""
    input_ = node.inputs[index]
    schema = input_.node.schema if input_.side is None else None
    if schema is None or node.kind == "union" or not _is_exchange(node, input_, parallelism):
        return
    wanted = _needed_by(node, index, graph, needed)
    if wanted is None:
        return
    names = [name for name in schema.names if name in wanted] or schema.names[:1]
    if len(names) < len(schema.names):
        _insert_select(graph, node, index, schema, names)


def _insert_select(
    graph: Graph, node: Node, index: int, schema: pa.Schema, names: list[str]
) -> None:
    """Put a select of `names` between `node` and its input; it runs at the sender."""
    input_ = node.inputs[index]
    columns = tuple(Column(name, pl.col(name), name, frozenset([name])) for name in names)
    steps = ExpressionSteps([SelectStep(columns, ", ".join(names))], schema)
    select = Node(
        id=max(each.id for each in graph.nodes) + 1,
        name=_new_name(graph, f"{node.name} columns"),
        kind="select",
        origin=node.origin,
        inputs=(Input(input_.node, Forward()),),
        factory=ExpressionFactory(steps),
        schema=steps.output_schema,
        parallelism=input_.node.parallelism,
        slot_sharing_group=input_.node.slot_sharing_group,
        columns_read=frozenset(names),
        detail=steps.describe(),
    )
    inputs = list(node.inputs)
    inputs[index] = Input(select, input_.partitioning)
    node.inputs = tuple(inputs)
    graph.nodes.insert(graph.nodes.index(node), select)


def _is_exchange(node: Node, input_: Input, parallelism: int) -> bool:
    before = input_.node
    widths = (before.parallelism or parallelism, node.parallelism or parallelism)
    apart = before.slot_sharing_group != node.slot_sharing_group
    return not isinstance(input_.partitioning, Forward) or widths[0] != widths[1] or apart


def _new_name(graph: Graph, wanted: str) -> str:
    taken = {node.name for node in graph.nodes}
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted} {count}"
    return name


# expressions


def _fuse(graph: Graph, parallelism: int) -> None:
    """Merge adjacent filters and selects, so that a batch is passed to Polars once."""
    for node in list(graph.nodes):
        before = _fusable(node, graph, parallelism)
        if before is None:
            continue
        assert isinstance(node.factory, ExpressionFactory)
        assert isinstance(before.factory, ExpressionFactory)
        first = before.factory.steps
        steps = ExpressionSteps([*first.steps, *node.factory.steps.steps], _input_schema(before))
        reads, passes = columns_read(steps.steps)
        node.factory = ExpressionFactory(steps)
        node.inputs = before.inputs
        node.chaining = before.chaining
        node.columns_read = reads
        node.detail = steps.describe()
        node.kind = "filter" if passes else "select"
        graph.nodes.remove(before)


def _fusable(node: Node, graph: Graph, parallelism: int) -> Node | None:
    """Return the node before, if both are expressions and it has no other reader."""
    if not isinstance(node.factory, ExpressionFactory) or node.chaining is not Chaining.ALWAYS:
        return None
    (input_,) = node.inputs
    before = input_.node
    if (
        not isinstance(before.factory, ExpressionFactory)
        or before.chaining is Chaining.NEVER
        or input_.side is not None
        or _is_exchange(node, input_, parallelism)
        or before.max_parallelism != node.max_parallelism
        or len(graph.consumers(before)) > 1
    ):
        return None
    return before


def _input_schema(node: Node) -> pa.Schema:
    """Return the schema that arrives at an expression node, after pruning."""
    (input_,) = node.inputs
    return input_.node.schema if input_.side is None else input_.node.sides[input_.side]


# aggregates


def _pre_aggregate(graph: Graph, node: Node, parallelism: int) -> None:
    """Put a step that aggregates in front of a window, if it is exact and pays.

    In front of an exchange it pays, because fewer rows cross. A single sender shares no work with others,
    so there it pays only if no keys have to be looked up.
    """
    factory: object = node.factory
    if not isinstance(factory, PreAggregating) or not factory.takes_partials:
        return
    (input_,) = node.inputs
    before = input_.node
    if (
        input_.side is not None
        or before.chaining is Chaining.NEVER
        or ((before.parallelism or parallelism) == 1 and not factory.takes_dense_partials)
        or not isinstance(input_.partitioning, HashColumns | Global)
        or _late_records_are_read(graph, node)
        or node.queryable  # clients would miss what is held here
    ):
        return
    step = Node(
        id=max(each.id for each in graph.nodes) + 1,
        name=_new_name(graph, f"{node.name} partials"),
        kind=PRE_AGGREGATE,
        origin=node.origin,
        inputs=(Input(before, Forward()),),
        factory=factory.pre_aggregate,
        schema=before.schema,
        parallelism=before.parallelism,
        slot_sharing_group=before.slot_sharing_group,
        columns_read=node.columns_read,
        detail=node.detail,
    )
    node.inputs = (Input(step, input_.partitioning),)
    graph.nodes.insert(graph.nodes.index(node), step)


def _late_records_are_read(graph: Graph, node: Node) -> bool:
    return any(reader.inputs[at].side is not None for reader, at in graph.consumers(node))
