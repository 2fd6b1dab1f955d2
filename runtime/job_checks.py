"""Checks of a whole job before anything starts.

They find packages that are not installed, steps that cannot run as a batch or apart from their source, and
sinks whose promise the settings of checkpoints break.

They also find state that is pickled. Unpickling runs code that the bytes name, so with
`headgate.state.allow-pickle: false` nothing that lies in the storage of checkpoints and savepoints is
unpickled: a job that would pickle state is refused before it runs, and so is a checkpoint or savepoint that
holds pickled state, before any of it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from ..api.resources import sharing_groups
from ..errors import PlanError, StateError
from ..operators.durations import format_duration
from ..operators.extras import missing_extra
from ..operators.graph import ByClock, Graph, Node
from ..operators.sink import Guarantee
from .options.execution import RUNTIME_MODE
from .options.monitoring import TRACES_ENDPOINT
from .options.registry import Options
from .options.state import (
    ALLOW_PICKLE,
    CHECKPOINT_DIR,
    CHECKPOINT_INTERVAL,
    CHECKPOINT_MODE,
    CHECKPOINT_TIMEOUT,
    SAVEPOINT_DIR,
    STATE_BACKEND,
    UNALIGNED,
)
from .plan import PhysicalPlan, beside_source
from .protocol.checkpoints.manifest import Manifest
from .protocol.checkpoints.settings import CheckpointRules
from .savepoint.compare import stored_pickles

_INSTEAD: Final = {
    ByClock.WINDOWS: "use event-time windows, or ",
    ByClock.EARLY: "leave emit_every out (the results at the end are the same), or ",
    ByClock.TRIGGER: "use an event-time or count trigger, or ",
    ByClock.TIMERS: "set timers with ctx.event_time, or ",
}
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


_IN_ROCKSDB: Final = ("process", "reduce")
"""The kinds of steps whose state is in a RocksDB; others have sorted runs of their own on disk."""


def missing_packages(
    graph: Graph, options: Options, storage: str | None, as_batch: bool
) -> Iterator[PlanError]:
    """An error for each part of a job whose packages are not installed.

    Args:
        graph: the steps of the job.
        options: of the job.
        storage: where its checkpoints go, if it takes any.
        as_batch: it runs on Spark.
    """
    wanted: list[tuple[str, str, str]] = []
    for node in graph.nodes:
        connector = node.source or node.sink
        if connector is not None:
            who = f"`{node.name}` ({connector.describe()})"
            wanted += [(extra, who, str(node.origin)) for extra in connector.extras]
    if options.get(STATE_BACKEND) == "rocksdb":
        wanted += [
            ("rocksdb", f"`{node.name}` with {STATE_BACKEND.key}=`rocksdb`", str(node.origin))
            for node in graph.nodes
            if node.kind in _IN_ROCKSDB
        ]
    savepoints = options.get(SAVEPOINT_DIR)
    for what, option, address in (
        ("checkpoint", CHECKPOINT_DIR, storage),
        ("savepoint", SAVEPOINT_DIR, savepoints),
    ):
        if address and address.startswith(("s3://", "s3a://")):
            wanted.append(("s3", f"{what} storage on S3 {option.key}=`{address}`", ""))
    if as_batch:
        wanted.append(("spark", "batch execution", ""))
    if options.get(TRACES_ENDPOINT) is not None:
        wanted.append(("otel", f"the option {TRACES_ENDPOINT.key}", ""))
    for extra, who, where in wanted:
        error = missing_extra(extra, who, where)
        if error is not None:
            yield error


def runs_as_batch(graph: Graph, options: Options) -> bool:
    """Return whether `execution.runtime-mode` makes this job a batch."""
    mode = options.get(RUNTIME_MODE)
    if mode == "AUTOMATIC":
        return all(node.source.bounded for node in graph.sources() if node.source is not None)
    return mode == "BATCH"


def batch_problems(graph: Graph) -> Iterator[PlanError]:
    """Yield every reason why a job cannot run as a batch."""
    for node in graph.nodes:
        if node.source is not None and not node.source.bounded:
            yield PlanError(
                f"batch execution needs an end of the input, and source `{node.name}` has none",
                where=str(node.origin),
                fix=f"give the source an end, or leave out {RUNTIME_MODE.key}=BATCH",
            )
        elif node.feeds is not None:
            yield _refused(
                node, "a loop has no order in which its steps could run one after another"
            )
        elif node.by_clock is not None:
            why = (
                f"{node.by_clock.value} depend on when records arrive, and a batch has all at once"
            )
            yield _refused(node, why, _INSTEAD[node.by_clock])


def _refused(node: Node, why: str, instead: str = "") -> PlanError:
    return PlanError(
        f"step `{node.name}` cannot run as a batch: {why}",
        where=str(node.origin),
        fix=f"{instead}run the job as a stream: {RUNTIME_MODE.key}=STREAMING",
    )


def steps_apart_from_source(graph: Graph) -> Iterator[PlanError]:
    """The steps that would be in other slots than the source whose splits they watch."""
    groups = sharing_groups(graph)
    beside = beside_source(graph)
    for node in graph.nodes:
        before = [
            input_.node for input_ in node.inputs if groups[input_.node.id] != groups[node.id]
        ]
        if node.id in beside and before:
            yield PlanError(
                f"`{node.name}` has to share slots with the source before it, whose splits have their "
                f"event time there group=`{groups[node.id]}` group_before=`{groups[before[0].id]}`",
                where=str(node.origin),
                fix="name the slot sharing group at the source, and another one behind event_time",
            )


def sinks_without_alignment(graph: Graph) -> Iterator[PlanError]:
    """The sinks that promise more than checkpoints of mode AT_LEAST_ONCE can give."""
    for node in graph.sinks():
        if node.sink is not None and node.sink.guarantee is Guarantee.EXACTLY_ONCE:
            yield PlanError(
                f"sink `{node.name}` promises exactly_once, and {CHECKPOINT_MODE.key}=`AT_LEAST_ONCE` "
                "lets records count twice after a failure",
                where=str(node.origin),
                fix='say guarantee="at_least_once" at the sink, or leave out the option',
            )


def sinks_that_cannot_wait(graph: Graph, rules: CheckpointRules) -> Iterator[PlanError]:
    """The sinks whose output may be lost before it is committed, although nothing fails.

    Output of the time between two barriers is committed when the checkpoint of the second one is complete.
    """
    if rules.interval_ms is None:
        return
    interval_ms = max(rules.interval_ms, rules.interval_during_backlog_ms or 0)
    needed_ms = interval_ms + rules.timeout_ms
    for node in graph.sinks():
        limit_ms = None if node.sink is None else node.sink.uncommitted_ms_max
        if limit_ms is not None and limit_ms <= needed_ms:
            yield PlanError(
                f"sink `{node.name}` loses output that is not committed within "
                f"{format_duration(limit_ms)}, and a checkpoint may complete only after "
                f"{format_duration(needed_ms)}: {CHECKPOINT_INTERVAL.key}=`{format_duration(interval_ms)}` "
                f"+ {CHECKPOINT_TIMEOUT.key}=`{format_duration(rules.timeout_ms)}`",
                where=str(node.origin),
                fix="raise the limit of the sink (transaction_timeout= of kafka_sink), and if need be "
                f"transaction.max.timeout.ms of the brokers; or lower {CHECKPOINT_TIMEOUT.key}",
            )


def sources_without_checkpoints(graph: Graph, rules: CheckpointRules) -> Iterator[PlanError]:
    """The sources that acknowledge what they have read at checkpoints, in a job that takes none."""
    if rules.interval_ms is not None:
        return
    for node in graph.sources():
        if node.source is not None and node.source.needs_checkpoints:
            yield PlanError(
                f"source `{node.name}` acknowledges messages at checkpoints, and the job takes none",
                where=str(node.origin),
                fix='add job.checkpoint(every="10s", storage=...); in a manifest checkpoint: {every: 10s, '
                "storage: ...}",
            )


class PickledState(msgspec.Struct, frozen=True):
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


def sources_without_replay(graph: Graph) -> list[str]:
    """Return a sentence for each source whose records a failure loses."""
    return [
        f"`{node.name}` ({node.source.describe()}) cannot be read again: a failure of the job loses its "
        "records since the last checkpoint, whatever its sinks promise"
        for node in graph.sources()
        if node.source is not None and not node.source.replays
    ]


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
