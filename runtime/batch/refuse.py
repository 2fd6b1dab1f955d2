"""Which jobs cannot run as a batch, said before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import PlanError
from ...operators.graph import Graph, Node
from ..batch_options import RUNTIME_MODE
from ..options import Options


def runs_as_batch(graph: Graph, options: Options) -> bool:
    """What `execution.runtime-mode` means for this job."""
    mode = options.get(RUNTIME_MODE)
    if mode == "AUTOMATIC":
        return all(node.source.bounded for node in graph.sources() if node.source is not None)
    return mode == "BATCH"


def batch_problems(graph: Graph) -> Iterator[PlanError]:
    """Every reason why a job cannot run as a batch."""
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
        elif node.by_clock:
            yield _refused(
                node,
                "windows by the machine's clock depend on when records come, and here all are there",
            )


def _refused(node: Node, why: str) -> PlanError:
    return PlanError(
        f"step `{node.name}` cannot run as a batch: {why}",
        where=str(node.origin),
        fix=f"run the job as a stream: {RUNTIME_MODE.key}=STREAMING",
    )
