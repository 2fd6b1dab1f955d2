"""Makes the physical plan of vertices, exchanges and slots from the logical graph.

A `JobSpec` has both of them, with the settings of the job: it is what travels to the coordinator.

Operators with a forward edge between them, equal parallelism and the same slot sharing group share a
*vertex*, unless the user says otherwise: one subtask runs them by direct calls. State stays addressed by
operator name, so chains may change between restores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from ..api.resources import DEFAULT_GROUP, Resources, sharing_groups
from ..api.settings import CheckpointSettings, RestartSettings
from ..errors import PlanError
from ..operators.graph import PRE_AGGREGATE, Chaining, Graph, Node
from ..operators.partitioning import (
    Broadcast,
    Custom,
    Forward,
    HashColumns,
    HashFunction,
    Partitioning,
    Rebalance,
    Rescale,
)
from ..operators.sink import IfExists
from ..state.keygroups import check_max_parallelism, default_max_parallelism
from ..state.snapshot import ChannelAddress


class ChainLink(msgspec.Struct, frozen=True):
    """A direct call inside a vertex: from `source` (or its side output) to `target`."""

    source: int
    side: str | None
    target: int
    input_index: int


@dataclass(slots=True)
class Vertex:
    """Operators that run in one subtask; `nodes[0]` is the head."""

    id: int
    nodes: list[Node]
    parallelism: int
    links: list[ChainLink] = field(default_factory=list)
    group: str = DEFAULT_GROUP
    """The slot sharing group of all its operators."""

    @property
    def head(self) -> Node:
        """The operator that meets the inputs."""
        return self.nodes[0]

    @property
    def name(self) -> str:
        """The operators' names, head to tail."""
        return " -> ".join(node.name for node in self.nodes)


class ExchangeEdge(msgspec.Struct, frozen=True):
    """Channels between two vertices."""

    id: int
    source: int
    source_node: int
    side: str | None
    target: int
    input_index: int
    partitioning: Partitioning

    @property
    def by_key(self) -> bool:
        """The key group of a record decides which subtask gets it."""
        return isinstance(self.partitioning, HashColumns | HashFunction)

    @property
    def by_content(self) -> bool:
        """A record alone decides which subtask gets it."""
        return self.by_key or isinstance(self.partitioning, Custom)


class Loop(msgspec.Struct, frozen=True):
    """An iteration in the plan: `tail_node` in vertex `tail` feeds vertex `head`, subtask by subtask.

    `vertices` are those on the way from head to tail. Subtask i of head and tail share slot i.
    """

    name: str
    head: int
    tail: int
    tail_node: int
    vertices: frozenset[int]


@dataclass(slots=True)
class PhysicalPlan:
    """All vertices and exchanges of a job. `edges` are in a stable order."""

    job_name: str
    max_parallelism: int
    vertices: list[Vertex]
    edges: list[ExchangeEdge]
    loops: list[Loop] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Slots the job needs: those of all slot sharing groups."""
        return sum(self.slots_by_group.values())

    @property
    def slots_by_group(self) -> dict[str, int]:
        """Slots that each slot sharing group needs: one hosts a subtask of each vertex of the group."""
        slots: dict[str, int] = {}
        for vertex in self.vertices:
            slots[vertex.group] = max(slots.get(vertex.group, 0), vertex.parallelism)
        return slots

    def fingerprint(self) -> str:
        """Equal for plans of the same shape: vertices with steps, width and group, and what joins them."""
        vertices = [
            (v.id, v.parallelism, [node.name for node in v.nodes], v.group) for v in self.vertices
        ]
        edges = [
            (e.id, e.source_node, e.side, e.target, e.input_index, type(e.partitioning).__name__)
            for e in self.edges
        ]
        shape = (self.job_name, self.max_parallelism, vertices, edges)
        return xxhash.xxh3_64_hexdigest(repr(shape).encode())

    def inputs_of(self, vertex: Vertex) -> list[ExchangeEdge]:
        """The exchanges into `vertex`."""
        return [edge for edge in self.edges if edge.target == vertex.id]

    def outputs_of(self, vertex: Vertex) -> list[ExchangeEdge]:
        """The exchanges out of `vertex`."""
        return [edge for edge in self.edges if edge.source == vertex.id]

    def loops_through(self, vertex: Vertex) -> frozenset[str]:
        """The names of the loops that `vertex` is part of."""
        return frozenset(loop.name for loop in self.loops if vertex.id in loop.vertices)

    def overtaken_inputs(self, vertex: Vertex, *, forced: bool = False) -> bool:
        """True if barriers may overtake records on their way into `vertex`.

        All of its inputs must be of a kind whose records can be given to other subtasks after a rescale:
        not pointwise, not broadcast, and no part of a loop. A custom partitioner is allowed only if
        `forced`, because it must then choose the subtask from the content of a record alone.
        """
        unsafe = (Forward, Rescale, Broadcast) if forced else (Forward, Rescale, Broadcast, Custom)
        inputs = self.inputs_of(vertex)
        return (
            bool(inputs)
            and not any(isinstance(edge.partitioning, unsafe) for edge in inputs)
            and not self.loops_through(vertex)
        )

    def sender(self, edge: ExchangeEdge) -> Node:
        """The step whose records travel over `edge`."""
        nodes = self.vertices[edge.source].nodes
        return next(node for node in nodes if node.id == edge.source_node)

    def addresses(self, edge: ExchangeEdge) -> Callable[[int, int], ChannelAddress]:
        """Return what names the channel from one sender of `edge` to one receiver in checkpoints."""
        source, side = self.sender(edge), edge.side
        if source.kind == PRE_AGGREGATE:
            # The channel has the same name as without this step, so that a job may be restored either way.
            before = source.inputs[0]
            source, side = before.node, before.side
        target = self.vertices[edge.target].head

        def address(sender: int, receiver: int) -> ChannelAddress:
            return ChannelAddress(
                source=source.name,
                side=side or "",
                target=target.name,
                input_index=edge.input_index,
                sender=sender,
                receiver=receiver,
            )

        return address

    def exchanges(self) -> dict[ChannelAddress, ExchangeEdge]:
        """All exchanges, by `ChannelAddress.exchange`. An input has one exchange, so these are unique."""
        return {self.addresses(edge)(0, 0): edge for edge in self.edges}

    def loop_from(self, vertex: Vertex) -> Loop | None:
        """The loop that begins in `vertex`."""
        return next((loop for loop in self.loops if loop.head == vertex.id), None)


def make_plan(
    graph: Graph,
    *,
    job_name: str,
    parallelism: int,
    max_parallelism: int | None = None,
    chaining: bool = True,
) -> PhysicalPlan:
    """Cut `graph` into vertices and exchanges.

    Raises:
        PlanError: the graph is empty, or a parallelism exceeds the number of key groups.
    """
    if not graph.nodes:
        raise PlanError(
            "the job has no source", fix="start with job.read(...) and end with .write(...)"
        )
    widths = {node.id: node.parallelism or parallelism for node in graph.nodes}
    sharing = sharing_groups(graph)
    widest = max(widths.values())
    groups = max_parallelism or default_max_parallelism(widest)
    for node in graph.nodes:
        check_max_parallelism(node.max_parallelism or groups, widths[node.id])
    vertex_of: dict[int, Vertex] = {}
    vertices: list[Vertex] = []
    beside = beside_source(graph)
    for node in graph.nodes:
        upstream = _chainable_input(node, widths, sharing, chaining or node.id in beside)
        if upstream is None:
            vertex = Vertex(len(vertices), [node], widths[node.id], group=sharing[node.id])
            vertices.append(vertex)
        else:
            vertex = vertex_of[upstream.id]
            vertex.nodes.append(node)
            vertex.links.append(ChainLink(upstream.id, node.inputs[0].side, node.id, 0))
        vertex_of[node.id] = vertex
    for node in graph.nodes:
        if node.watermarks is not None:
            node.window_ends_ms = _window_ends_behind(graph, node)
    edges = _exchanges(graph.nodes, vertex_of, widths)
    loops = [_loop(node, vertex_of, edges) for node in graph.nodes if node.feeds is not None]
    return PhysicalPlan(job_name, groups, vertices, edges, loops)


def _window_ends_behind(graph: Graph, node: Node) -> int:
    """The ends of the windows that watermarks of a step fire are multiples of this, ms; 0: not known."""
    found, front, seen = 0, [node], {node.id}
    while front:
        for reader, _ in graph.consumers(front.pop()):
            if reader.id in seen or reader.watermarks is not None:
                continue
            seen.add(reader.id)
            front.append(reader)
            found = math.gcd(found, reader.window_ends_ms)
    return found


def _loop(tail: Node, vertex_of: dict[int, Vertex], edges: Sequence[ExchangeEdge]) -> Loop:
    """The loop that `tail` closes. It is the only way to a cycle: edges go from older nodes to newer."""
    assert tail.feeds is not None  # as the caller has seen
    head, end = vertex_of[tail.feeds], vertex_of[tail.id]
    if head.parallelism != end.parallelism:
        raise PlanError(
            f"the ends of a loop run side by side, and have different parallelisms "
            f"iteration=`{head.name}` begin=`{head.parallelism}` end=`{end.parallelism}`",
            where=str(head.head.origin),
            fix="give it to iterate, as parallelism=",
        )
    behind = _reached(head.id, [(edge.source, edge.target) for edge in edges])
    before = _reached(end.id, [(edge.target, edge.source) for edge in edges])
    return Loop(head.head.name, head.id, end.id, tail.id, behind & before)


def _reached(start: int, steps: Sequence[tuple[int, int]]) -> frozenset[int]:
    found, front = {start}, [start]
    while front:
        here = front.pop()
        onward = {target for source, target in steps if source == here} - found
        found |= onward
        front += onward
    return frozenset(found)


def beside_source(graph: Graph) -> frozenset[int]:
    """The steps from sources to the event time of their splits: together also without chaining.

    Who reads which split is known in the subtask of the source alone. In another one, what a split holds
    would be late as soon as another split is ahead. (In Flink these watermarks are made in the source.)
    """
    found: set[int] = set()
    for node in graph.nodes:
        if node.watermarks is not None and node.watermarks.beside_source:
            while node.inputs:
                found.add(node.id)
                node = node.inputs[0].node
    return frozenset(found)


def _chainable_input(
    node: Node, widths: dict[int, int], sharing: dict[int, str], chaining: bool
) -> Node | None:
    """The operator `node` can be called from directly, or None if it must start a vertex."""
    if not chaining or len(node.inputs) != 1 or node.chaining is not Chaining.ALWAYS:
        return None
    upstream = node.inputs[0].node
    if upstream.chaining is Chaining.NEVER or widths[upstream.id] != widths[node.id]:
        return None
    if sharing[upstream.id] != sharing[node.id]:
        return None
    return upstream if isinstance(node.inputs[0].partitioning, Forward) else None


def _exchanges(
    nodes: Sequence[Node], vertex_of: dict[int, Vertex], widths: dict[int, int]
) -> list[ExchangeEdge]:
    edges: list[ExchangeEdge] = []
    for node in nodes:
        target = vertex_of[node.id]
        if target.head is not node:
            continue
        for index, input_ in enumerate(node.inputs):
            partitioning = input_.partitioning
            if isinstance(partitioning, Forward) and widths[input_.node.id] != widths[node.id]:
                # As in Flink: a plain edge between different parallelisms spreads evenly.
                partitioning = Rebalance()
            edges.append(
                ExchangeEdge(
                    len(edges),
                    vertex_of[input_.node.id].id,
                    input_.node.id,
                    input_.side,
                    target.id,
                    index,
                    partitioning,
                )
            )
    return edges


def is_pointwise(partitioning: Partitioning) -> bool:
    """True if a sender reaches only some receivers by rule (forward, rescale)."""
    return isinstance(partitioning, Forward | Rescale)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything a coordinator needs; shipped by value with cloudpickle."""

    name: str
    plan: PhysicalPlan
    parallelism: int
    checkpoint: CheckpointSettings | None
    restart: RestartSettings
    options: dict[str, str]
    graph: Graph
    """The graph that `plan` is made of, also at another parallelism or number of key groups."""
    max_parallelism: int | None = None
    """As the user set it; None: that of the restored checkpoint, else chosen."""
    chaining: bool = True
    slots_per_worker: int = 1
    group_slots: dict[str, int] = field(default_factory=dict)
    """Slots per worker of slot sharing groups whose workers have others than that."""
    resources: dict[str, Resources] = field(default_factory=dict)
    """The resources of a slot, by slot sharing group."""
    group_resources: dict[str, str] = field(default_factory=dict)
    """Custom resources of Ray, by group. A slot takes one of that of its group, instead of `resources`."""
    run: str = ""
    """Names this run of the job, so that a coordinator which takes over does not start another one."""
    outside_run: bool = False
    """True if the name comes from outside: a supervisor starts the run again if its process is gone."""
    fresh: bool = False
    """Do not resume from an existing checkpoint."""
    allow_non_restored_state: bool = False
    restore_from: str = ""
    """Address of a savepoint, or of a job's checkpoints, that this run begins with."""
    claim: bool = False
    """Delete that savepoint once the run has a checkpoint of its own."""
    take_over: bool = False
    """End another run of the job that still goes on."""
    labels: dict[str, str] = field(default_factory=dict)
    """For those who watch the job; `headgate_job_info` shows them."""
    if_exists: IfExists | None = None
    """What to do with output of earlier runs, at a start without state; None: what each sink says."""

    def slots_of(self, group: str) -> int:
        """Slots of a worker of a slot sharing group."""
        return self.group_slots.get(group, self.slots_per_worker)

    def replan(self, parallelism: int, max_parallelism: int | None) -> PhysicalPlan:
        """The plan at another parallelism; operators that set their own keep it.

        Raises:
            PlanError: a parallelism exceeds the number of key groups.
        """
        return make_plan(
            self.graph,
            job_name=self.name,
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            chaining=self.chaining,
        )
