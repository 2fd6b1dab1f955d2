"""The plan of a job as text and as a Mermaid flowchart, which GitHub, notebooks and many editors draw.

The text has the logical graph, chains, parallelism, key groups and guarantees.
"""

from __future__ import annotations

from ..api.resources import DEFAULT_GROUP
from ..api.settings import ExponentialDelay, FailureRate, FixedDelay, RestartSettings
from ..operators.durations import format_duration
from ..operators.graph import Node
from ..operators.partitioning import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashColumns,
    HashFunction,
    Partitioning,
    Rebalance,
    Rescale,
    Shuffle,
)
from ..operators.sink import Guarantee
from .job_checks import pickled_states, sources_without_replay
from .options.registry import Options
from .options.state import CHECKPOINT_MODE
from .plan import JobSpec, PhysicalPlan, Vertex


def explain_plan(spec: JobSpec) -> str:
    """The job as text, for `headgate explain` and `job.explain()`."""
    plan = spec.plan
    lines = [f"job {spec.name}: parallelism {spec.parallelism}, {plan.max_parallelism} key groups"]
    lines += ["", *_checkpoints(spec), "", "logical graph"]
    for vertex in plan.vertices:
        lines += [f"  {describe_node(node)}" for node in vertex.nodes]
    subtasks = sum(vertex.parallelism for vertex in plan.vertices)
    lines += ["", f"physical graph: {len(plan.vertices)} vertices, {subtasks} subtasks, "
              f"{plan.slots} slots"]  # fmt: skip
    for vertex in plan.vertices:
        lines += _physical(plan, vertex)
    lines += _groups(spec)
    lines += _event_time(plan)
    lines += _pickled(spec)
    lines += ["", "delivery guarantees"]
    sinks = [n for v in plan.vertices for n in v.nodes if n.sink is not None]
    lines += [f"  {node.name}: {_guarantee(spec, node)}" for node in sinks]
    lines += [f"  {text}" for text in sources_without_replay(spec.graph)]
    return "\n".join(lines)


def _checkpoints(spec: JobSpec) -> list[str]:
    settings = spec.checkpoint
    if settings is None:
        return ["checkpoints: none; a failed job starts over only if it is run again"]
    every = (
        "on demand" if settings.every_ms is None else f"every {format_duration(settings.every_ms)}"
    )
    restart = f"restart: {_restart(spec.restart)}"
    lines = [f"checkpoints: {every} to {settings.storage}, retain {settings.retain}"]
    if Options(spec.options).get(CHECKPOINT_MODE) != "EXACTLY_ONCE":
        lines.append(
            "state: at-least-once: after a failure records may count twice  "
            f"({CHECKPOINT_MODE.key}=AT_LEAST_ONCE)"
        )
    return [*lines, restart]


def _restart(settings: RestartSettings) -> str:
    match settings:
        case FixedDelay(0):
            return "never"
        case FixedDelay(attempts, delay_ms):
            return f"{attempts} attempts, {format_duration(delay_ms)} apart"
        case FailureRate(failures, interval_ms, delay_ms):
            return (
                f"{format_duration(delay_ms)} after a failure, "
                f"up to {failures} failures in {format_duration(interval_ms)}"
            )
        case ExponentialDelay(initial_ms, max_ms):
            most = "any number of" if settings.attempts is None else str(settings.attempts)
            return (
                f"{most} attempts, {format_duration(initial_ms)} to {format_duration(max_ms)} apart"
            )


def describe_node(node: Node) -> str:
    """One line: name, kind, inputs, and what it does."""
    inputs = ", ".join(
        input_.node.name + (f".{input_.side}" if input_.side else "") for input_ in node.inputs
    )
    detail = f"  {node.detail}" if node.detail else ""
    state = "  [state]" if node.stateful else ""
    source = f" <- {inputs}" if inputs else ""
    return f"{node.name} ({node.kind}){source}{detail}{state}"


def in_group(vertex: Vertex) -> str:
    """The slot sharing group of a vertex, behind its name; empty for the default one."""
    return "" if vertex.group == DEFAULT_GROUP else f" in {vertex.group}"


def _groups(spec: JobSpec) -> list[str]:
    """The slot sharing groups, if the job speaks of any."""
    slots = spec.plan.slots_by_group
    if list(slots) == [DEFAULT_GROUP] and not spec.resources:
        return []
    lines = []
    for group, count in slots.items():
        takes = str(spec.resources.get(group, ""))
        each = f", each with {takes}" if takes else ""
        lines.append(f"  {group}: {count} slot{'s' * (count > 1)}{each}")
    return ["", "slot sharing groups", *lines]


def _physical(plan: PhysicalPlan, vertex: Vertex) -> list[str]:
    lines = [f"  [{vertex.id}] {vertex.name}  x{vertex.parallelism}{in_group(vertex)}"]
    for edge in plan.outputs_of(vertex):
        side = f" (side output {edge.side})" if edge.side else ""
        lines.append(f"      -> [{edge.target}] {describe_partitioning(edge.partitioning)}{side}")
    for loop in plan.loops:
        if loop.tail == vertex.id:
            lines.append(f"      -> [{loop.head}] back to the begin of the loop, in the same slot")
    return lines


def _event_time(plan: PhysicalPlan) -> list[str]:
    """Describe how each step makes watermarks, and of which splits those of a subtask are the minimum."""
    lines = []
    for vertex in plan.vertices:
        for node in vertex.nodes:
            if node.watermarks is not None:
                by_split = vertex.head.source is not None and node.watermarks.per_split
                of = f"split of {vertex.head.name}" if by_split else "subtask"
                held = f"each {of} can hold it back"
                lines.append(f"  {node.name}: {node.watermarks.text}; {held}")
    return ["", "event time", *lines] if lines else []


def _pickled(spec: JobSpec) -> list[str]:
    """The states of no declared type, which cannot be looked into, or changed, or read without the code."""
    found = pickled_states(spec.graph)
    return ["", "pickled state", *(f"  {each}" for each in found)] if found else []


def describe_partitioning(partitioning: Partitioning) -> str:
    """A partitioning in a word or two."""
    match partitioning:
        case HashColumns(columns):
            return f"hash({', '.join(columns)})"
        case HashFunction():
            return "hash(function)"
        case Forward():
            return "forward"
        case Rebalance():
            return "rebalance"
        case Rescale():
            return "rescale"
        case Shuffle():
            return "shuffle"
        case Broadcast():
            return "broadcast"
        case Global():
            return "global"
        case Custom():
            return "custom"


def _guarantee(spec: JobSpec, node: Node) -> str:
    sink = node.sink
    if sink is None:
        return ""
    promised = sink.guarantee.value.replace("_", "-")
    if sink.guarantee is Guarantee.NONE:
        return f"{promised}: records may be lost or repeated after a failure  {sink.describe()}"
    if spec.checkpoint is None:
        return f"none: the job takes no checkpoints  {sink.describe()}"
    return f"{promised}  {sink.describe()}"


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
