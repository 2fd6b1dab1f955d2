"""Checks of a whole job before anything starts.

They find packages that are not installed, steps that cannot run as a batch or apart from their source, and
sinks whose promise the checkpoint mode breaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..errors import PlanError
from ..operators.extras import missing_extra
from ..operators.graph import ByClock, Graph, Node
from ..operators.resources import sharing_groups
from ..operators.sink import Guarantee
from .options.execution import RUNTIME_MODE
from .options.monitoring import TRACES_ENDPOINT
from .options.registry import Options
from .options.state import CHECKPOINT_DIR, CHECKPOINT_MODE, SAVEPOINT_DIR
from .plan import beside_source

_INSTEAD: Final = {
    ByClock.WINDOWS: "use event-time windows, or ",
    ByClock.EARLY: "leave emit_every out (the results at the end are the same), or ",
    ByClock.TRIGGER: "use an event-time or count trigger, or ",
    ByClock.TIMERS: "set timers with ctx.event_time, or ",
}


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
