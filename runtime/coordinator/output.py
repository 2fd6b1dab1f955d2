"""The output of earlier runs, in front of a run that starts without state.

A job that runs again from the beginning writes all its records once more. If a sink still holds those of an
earlier run, the policy of the run, or of the sink, decides: the run is refused before anything is changed,
or it writes beside them, or it replaces them. `replacing.py` decides when to delete what is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NoReturn, TypeVar

from ...errors import HeadgateError, UsageError
from ...operators.graph import Graph, Node
from ...operators.sink import IfExists, OutputFile, Sink, SinkRun
from ..job_spec import JobSpec
from ..options.execution import REPLACED_FILES_MAX
from ..options.registry import Options
from ..protocol.failures import as_headgate_error
from ..protocol.joblog import LogView

T = TypeVar("T")


def starts_without_state(spec: JobSpec, before: LogView | None, *, fresh: bool) -> bool:
    """Does this coordinator begin a run that restores nothing?

    False for one that takes over within a run which has been deployed, or has listed the output of earlier
    runs: what else its sinks hold may then be the run's own.

    Args:
        spec: the job.
        before: what the job log says; None: the job has none.
        fresh: the checkpoints in the log are left behind.
    """
    if spec.restore_from:
        return False
    if before is None:
        return True
    begun = spec.run in (before.deployed_run, before.old_output.run)
    return (fresh or before.newest is None) and not begun


async def check_output(spec: JobSpec, graph: Graph) -> None:
    """Check that no sink holds output of earlier runs that the user has not decided about.

    Raises:
        UsageError: one does.
        StorageError: the place where a sink writes does not answer.
    """
    for node, sink, run in _sinks(spec, graph, lambda text: None):

        def check(sink: Sink = sink, run: SinkRun = run) -> None:
            sink.check_output(run)
            _replaced(run, sink, sink.list_output(run) or [])

        await _in_thread(node, check, "cannot begin")


async def begin_output(
    spec: JobSpec, graph: Graph, announce: Callable[[str], None]
) -> dict[str, list[OutputFile]] | None:
    """Get all sinks ready, and list what the run replaces.

    Returns:
        By sink, the files to delete once the run has output of its own; None: no sink keeps any files.

    Raises:
        UsageError: output has appeared that the user has not decided about.
        StorageError: the place where a sink writes does not answer.
    """
    found: dict[str, list[OutputFile]] | None = None
    for node, sink, run in _sinks(spec, graph, announce):

        def begin(sink: Sink = sink, run: SinkRun = run) -> list[OutputFile] | None:
            sink.begin_output(run)
            return sink.list_output(run)

        files = await _in_thread(node, begin, "cannot begin")
        if files is not None:
            found = found or {}
            if doomed := _replaced(run, sink, files):
                found[node.name] = doomed
    return found


async def delete_output(
    spec: JobSpec,
    graph: Graph,
    files: Mapping[str, list[OutputFile]],
    names: Collection[str],
    announce: Callable[[str], None],
) -> None:
    """Delete the output of earlier runs that some sinks have replaced. May be repeated.

    Args:
        spec: the job.
        graph: its steps.
        files: by sink, what `begin_output` had found.
        names: of the sinks.
        announce: publishes a line for the user to read.

    Raises:
        StorageError: a place does not answer, or does not allow it.
    """
    sinks = {node.name: (node, sink, run) for node, sink, run in _sinks(spec, graph, announce)}
    for name in names:
        doomed = files.get(name, [])
        if name not in sinks:
            announce(
                f"sink {name} is no more: {_files(len(doomed))} of earlier runs are left alone"
            )
            continue
        node, sink, run = sinks[name]

        def delete(sink: Sink = sink, run: SinkRun = run, all_: list[OutputFile] = doomed) -> int:
            return sink.delete_output(run, all_)

        count = await _in_thread(node, delete, "cannot delete what it has replaced")
        if count or not doomed:
            run.announce(f"deleted {_files(count)} of earlier runs in {sink.place}")


def _replaced(run: SinkRun, sink: Sink, found: list[OutputFile]) -> list[OutputFile]:
    """The files that the run replaces, as the user asked."""
    policy = run.if_exists or sink.if_exists
    if not found:
        return []
    files, where = _files(len(found)), sink.place
    if policy is IfExists.ERROR:
        raise UsageError(
            f"sink `{run.sink}` of job `{run.job}` has {files} of earlier runs in {where}, and this "
            "run starts from the beginning: its records would be there twice",
            fix="`headgate run --if-exists overwrite` deletes those files once it has committed new ones, "
            "and `--if-exists append` keeps them and writes beside them; in code, give job.run() or the "
            'sink if_exists="overwrite" or "append"',
        )
    if policy is IfExists.APPEND:
        run.announce(f"writes beside {files} of earlier runs in {where}")
        return []
    most = Options(run.options).get(REPLACED_FILES_MAX)
    if len(found) > most:
        raise UsageError(
            f"sink `{run.sink}` would replace {files} of earlier runs in {where}, more than "
            f"{REPLACED_FILES_MAX.key} allows, which is {most:,}",
            fix="delete them first, write into a new directory, or raise that option",
        )
    run.announce(f"keeps {files} of earlier runs in {where} until it has committed its own")
    return found


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


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


async def _in_thread(node: Node, call: Callable[[], T], cannot: str) -> T:
    try:
        return await asyncio.to_thread(call)
    except Exception as error:
        _refuse(node, error, cannot)


def _refuse(node: Node, error: Exception, cannot: str) -> NoReturn:
    if isinstance(error, HeadgateError):
        raise error
    raise as_headgate_error(error, f"sink `{node.name}` {cannot}", str(node.origin)) from error
