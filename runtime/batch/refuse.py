"""Refuses jobs that cannot run as a batch, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...errors import PlanError
from ...operators.graph import ByClock, Graph, Node
from ..batch_options import RUNTIME_MODE
from ..options import Options

_INSTEAD: Final = {
    ByClock.WINDOWS: "use event-time windows, or ",
    ByClock.EARLY: "leave emit_every out (the results at the end are the same), or ",
    ByClock.TRIGGER: "use an event-time or count trigger, or ",
    ByClock.TIMERS: "set timers with ctx.event_time, or ",
}


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
