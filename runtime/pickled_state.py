"""Which states of a job are pickled, and what `headgate.state.allow-pickle: false` refuses.

Unpickling runs code that the bytes name, so with the option nothing that lies in the storage of checkpoints
and savepoints is unpickled: a job that would pickle state is refused before it runs, and so is a checkpoint
or savepoint that holds pickled state, before any of it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..errors import PlanError, StateError
from ..operators.graph import Graph, Node
from .options.registry import Options
from .options.state import ALLOW_PICKLE, UNALIGNED
from .plan import PhysicalPlan
from .protocol.checkpoints.manifest import Manifest
from .savepoint.compare import stored_pickles

_DESCRIPTORS: Final = {
    "value": "hg.ValueState[int]()",
    "list": "hg.ListState[int]()",
    "map": "hg.MapState[str, int]()",
    "reducing": "hg.ReducingState[int](...)",
    "aggregating": "hg.AggregatingState[int, int, int](...)",
    "split": "hg.OperatorListState[int]()",
    "union": "hg.OperatorListState[int](...)",
    "broadcast": "hg.BroadcastState[str, int]()",
}
"""By the kind of a state, how its type is declared."""


@dataclass(frozen=True, slots=True)
class PickledState:
    """The pickled states of one step, and how they get a type.

    Attributes:
        step: its name.
        where: the user's line.
        states: their names.
        fix: what to do.
    """

    step: str
    where: str
    states: tuple[str, ...]
    fix: str

    def __str__(self) -> str:
        return f"{self.step}: {', '.join(self.states)}  ({self.fix})"


def pickled_states(graph: Graph) -> list[PickledState]:
    """The steps of a job whose state is pickled, in the order of the graph."""
    return [found for node in graph.nodes if (found := _of(node)) is not None]


def _of(node: Node) -> PickledState | None:
    if node.factory is None:
        return None
    operator = node.factory()
    names = tuple(operator.pickled_states())
    if not names:
        return None
    kinds = {info.name: info.kind for info in operator.states()}
    return PickledState(node.name, str(node.origin), names, _fix(node, names, kinds))


def _fix(node: Node, names: tuple[str, ...], kinds: dict[str, str]) -> str:
    for name in names:
        if kinds.get(name) in _DESCRIPTORS and not name.startswith("window_"):
            return f"declare its type, such as {name} = {_DESCRIPTORS[kinds[name]]}"
    if node.kind == "reduce":
        return "annotate the type that the function returns, such as -> Payment"
    if node.sink is not None:
        return "write to a sink of files, or ask for another guarantee"
    if node.kind in ("map_async", "iterate"):
        return "make columns of the records before it, with into="
    return "only aggregates of columns, .agg(...), have a declared type here"


def check_pickles(plan: PhysicalPlan, graph: Graph, options: Options) -> None:
    """Raise PlanError if the options forbid pickled state, and the job has some."""
    if options.get(ALLOW_PICKLE):
        return
    found = pickled_states(graph)
    if found:
        first = found[0]
        others = "".join(f"\n  {each.where}\n  {each}" for each in found[1:])
        raise PlanError(
            f"state of `{first.step}` would be pickled, and {ALLOW_PICKLE.key} is false "
            f"states=`{', '.join(first.states)}`",
            where=first.where,
            fix=f"{first.fix}{others}",
        )
    for step in _objects_on_their_way(plan) if options.get(UNALIGNED) else ():
        raise PlanError(
            f"records of `{step}` are Python objects, which unaligned checkpoints pickle when a barrier "
            f"overtakes them, and {ALLOW_PICKLE.key} is false",
            fix=f"make columns of them with into=, or set {UNALIGNED.key} to false",
        )


def _objects_on_their_way(plan: PhysicalPlan) -> Iterator[str]:
    """The steps that send Python objects to another subtask."""
    nodes = {node.id: node for vertex in plan.vertices for node in vertex.nodes}
    for edge in plan.edges:
        node = nodes[edge.source_node]
        schema = node.schema if edge.side is None else node.sides[edge.side]
        if schema is None:
            yield node.name


def check_restored_pickles(manifest: Manifest, options: Options) -> None:
    """Raise StateError if the options forbid pickled state, and a checkpoint holds some."""
    if options.get(ALLOW_PICKLE):
        return
    found = stored_pickles(manifest)
    if found:
        raise StateError(
            f"checkpoint {manifest.checkpoint_id} holds pickled state, and {ALLOW_PICKLE.key} is false: "
            f"nothing of it was read states=`{', '.join(found)}`",
            fix=f"if you trust who wrote it, restore it once with {ALLOW_PICKLE.key}=true in a job that "
            "declares types for these states: the next savepoint has them as columns",
        )
