"""The output of earlier runs, in front of a run that starts without state.

A job that runs again from the beginning writes all its records once more. Sinks that still hold those of
an earlier run say so before anything is changed, or make room, as the user asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NoReturn

from ...errors import HeadgateError
from ...operators.graph import Graph, Node
from ...operators.sink import Sink, SinkRun
from ..job_spec import JobSpec
from ..options import Options
from ..protocol.foreign import as_headgate_error
from ..protocol.joblog import LogView


def starts_without_state(spec: JobSpec, before: LogView | None, *, fresh: bool) -> bool:
    """Does this coordinator begin a run that restores nothing?

    False for one that takes over within a run which has been deployed before: what its sinks hold is
    then the run's own.

    Args:
        spec: the job.
        before: what the job log says; None: the job has none.
        fresh: the checkpoints in the log are left behind.
    """
    if spec.restore_from:
        return False
    if before is None:
        return True
    return (fresh or before.newest is None) and before.deployed_run != spec.run


async def check_output(spec: JobSpec, graph: Graph) -> None:
    """Check that no sink holds output of earlier runs that the user has not decided about.

    Raises:
        UsageError: one does.
        StorageError: the place where a sink writes does not answer.
    """
    for node, sink, run in _sinks(spec, graph, lambda text: None):
        try:
            await asyncio.to_thread(sink.check_output, run)
        except Exception as error:
            _refuse(node, error)


async def begin_output(spec: JobSpec, graph: Graph, announce: Callable[[str], None]) -> None:
    """Have every sink make room for the run.

    Raises:
        StorageError: the place where a sink writes does not answer.
    """
    for node, sink, run in _sinks(spec, graph, announce):
        try:
            await asyncio.to_thread(sink.begin_output, run)
        except Exception as error:
            _refuse(node, error)


def _sinks(
    spec: JobSpec, graph: Graph, announce: Callable[[str], None]
) -> Iterator[tuple[Node, Sink, SinkRun]]:
    for node in graph.nodes:
        if node.sink is None:
            continue

        def said(text: str, name: str = node.name) -> None:
            announce(f"sink {name} {text}")

        options = Options(spec.options).effective()
        yield node, node.sink, SinkRun(spec.name, node.name, options, spec.if_exists, said)


def _refuse(node: Node, error: Exception) -> NoReturn:
    if isinstance(error, HeadgateError):
        raise error
    what = f"sink `{node.name}` cannot begin"
    raise as_headgate_error(error, what, str(node.origin)) from error
