"""What a job needs that is not installed, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import PlanError
from ..operators.extras import missing_extra
from ..operators.graph import Graph
from .checkpoint_options import CHECKPOINT_DIR, SAVEPOINT_DIR
from .metrics_options import TRACES_ENDPOINT
from .options import Options


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
