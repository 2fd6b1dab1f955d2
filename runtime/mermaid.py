"""The plan of a job as a Mermaid flowchart, which GitHub, notebooks and many editors draw."""

from __future__ import annotations

from .explain import describe_partitioning, in_group
from .job_spec import JobSpec
from .plan import PhysicalPlan, Vertex


def mermaid_plan(spec: JobSpec) -> str:
    """The job as a flowchart: a box per vertex with its steps in it, an arrow per exchange."""
    plan = spec.plan
    lines = ["flowchart LR"]
    for vertex in plan.vertices:
        lines += _vertex(vertex)
    for vertex in plan.vertices:
        lines += _edges(plan, vertex)
    return "\n".join(lines)


def _vertex(vertex: Vertex) -> list[str]:
    title = f"{_text(vertex.name)} x{vertex.parallelism}{in_group(vertex)}"
    lines = [f'  subgraph v{vertex.id}["{title}"]']
    ids = [f"v{vertex.id}n{number}" for number in range(len(vertex.nodes))]
    for id_, node in zip(ids, vertex.nodes, strict=True):
        left, right = ("[(", ")]") if node.stateful else ("[", "]")
        lines.append(f'    {id_}{left}"{_text(node.name)}<br>{node.kind}"{right}')
    numbers = {node.id: id_ for id_, node in zip(ids, vertex.nodes, strict=True)}
    for id_, node in zip(ids, vertex.nodes, strict=True):
        for input_ in node.inputs:
            if input_.node.id in numbers:
                lines.append(f"    {numbers[input_.node.id]} {_arrow(input_.side or '')} {id_}")
    return [*lines, "  end"]


def _edges(plan: PhysicalPlan, vertex: Vertex) -> list[str]:
    lines = []
    for edge in plan.outputs_of(vertex):
        side = f", {edge.side}" if edge.side else ""
        label = describe_partitioning(edge.partitioning) + side
        lines.append(f"  v{vertex.id} {_arrow(label)} v{edge.target}")
    for loop in plan.loops:
        if loop.tail == vertex.id:
            lines.append(f'  v{vertex.id} -. "begin of the loop" .-> v{loop.head}')
    return lines


def _arrow(label: str) -> str:
    return f'-- "{_text(label)}" -->' if label else "-->"


def _text(text: str) -> str:
    """Text as Mermaid takes it in quotes: quotes, angle brackets and `#` as entities."""
    for character, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(character, entity)
    return text
