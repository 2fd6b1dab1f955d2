"""The output of earlier runs, when a run starts without state.

A job that runs again from the beginning writes all its records again. If a sink still holds those of an
earlier run, the policy of the run, or of the sink, decides: the run is refused before anything is changed,
or it writes beside them, or it replaces them.

Replaced output is deleted once the run has committed its own. The job log records what is to be deleted,
and when (`protocol/old_output.py`). A job without checkpoints has no log and commits nothing: a bounded one
replaces the old output when it has finished, and an unbounded one as soon as its sink takes records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, NoReturn, TypeVar

from ...errors import FencedError, HeadgateError, UsageError
from ...operators.graph import Graph, Node
from ...operators.sink import RETRY_PAUSES_S, IfExists, OutputFile, Sink, SinkRun
from ..control.messages import SubtaskStatistics
from ..options.execution import REPLACED_FILES_MAX
from ..options.registry import Options
from ..plan import JobSpec, PhysicalPlan
from ..protocol.failures import as_headgate_error
from ..protocol.joblog import LogView
from ..protocol.old_output import NO_OLD_OUTPUT, OldOutput
from .environment import JobEnvironment

T = TypeVar("T")


def starts_without_state(spec: JobSpec, before: LogView | None, *, fresh: bool) -> bool:
    """Return True if this coordinator begins a run that restores nothing.

    It is False for a coordinator that takes over within a run which has been deployed, has listed the
    output of earlier runs, or has ended: what else its sinks hold may then be the run's own.

    Args:
        spec: the job.
        before: the job log; None: the job has none.
        fresh: the checkpoints in the log are not restored.
    """
    if spec.restore_from:
        return False
    if before is None:
        return True
    # The entry of its end may be all that the log still has of a run: its checkpoints are deleted then.
    ended_run = "" if before.last_end is None else before.last_end.run
    begun = spec.run in (before.deployed_run, before.old_output.run, ended_run)
    return (fresh or before.newest is None) and not begun


async def check_output(spec: JobSpec, graph: Graph) -> None:
    """Check that no sink holds output of earlier runs that the user has not decided about.

    Raises:
        UsageError: a sink does.
        StorageError: the storage that a sink writes to does not answer.
    """
    for node, sink, run in _sinks(spec, graph, lambda text: None):

        def check(sink: Sink = sink, run: SinkRun = run) -> None:
            sink.check_output(run)
            _replaced(run, sink, sink.list_output(run) or [])

        await _in_thread(node, check, "cannot begin")


async def begin_output(
    spec: JobSpec, graph: Graph, announce: Callable[[str], None]
) -> dict[str, list[OutputFile]] | None:
    """Prepare all sinks, and list the files that the run replaces.

    Returns:
        The files to delete once the run has output of its own, by sink; None: no sink keeps any files.

    Raises:
        UsageError: output has appeared that the user has not decided about.
        StorageError: the storage that a sink writes to does not answer.
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
        files: the files that `begin_output` found, by sink.
        names: the names of the sinks.
        announce: publishes a line for the user to read.

    Raises:
        StorageError: a storage does not answer, or does not allow it.
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
    """Return the files that the run replaces, as the user asked."""
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


LAST_TRIES: Final = 3
"""The number of tries at the end of the job."""


class OutputReplacer:
    """Deletes the old output of one job, under one coordinator."""

    def __init__(self, env: JobEnvironment) -> None:
        self._env = env
        self._spec = env.spec
        self._log = env.log
        self._clock = env.clock
        self._unlogged = NO_OLD_OUTPUT
        self._files: dict[str, list[OutputFile]] | None = None if env.log is not None else {}
        self._deleting: asyncio.Task[None] | None = None
        self._failed = 0
        self._not_before_s = 0.0
        self._all_committed = False

    @property
    def state(self) -> OldOutput:
        """The old output that is still to be deleted."""
        return self._unlogged if self._log is None else self._log.view.old_output

    async def begin(self) -> None:
        """List what this run replaces, before it has written anything of its own.

        Raises:
            UsageError: output has appeared that the user has not decided about.
            StorageError: the list cannot be made or recorded.
        """
        found = await begin_output(
            self._spec, self._spec.graph, lambda text: self._env.publish("start", text)
        )
        if found is not None:
            await self._record(found)

    def look(
        self,
        plan: PhysicalPlan,
        statistics: Mapping[tuple[int, int], SubtaskStatistics],
        committed: Mapping[str, int],
    ) -> None:
        """Begin to delete the output that may be deleted, as far as the reports of subtasks show it.

        Args:
            plan: the plan that runs.
            statistics: the reports of its subtasks.
            committed: the newest checkpoint that is committed of sinks whose commits are behind what
                their subtasks report.
        """
        state = self.state
        if not state.sinks or self._busy or self._clock.monotonic() < self._not_before_s:
            return
        subtasks = {
            node.name: [statistics.get((v.id, index)) for index in range(v.parallelism)]
            for v in plan.vertices
            for node in v.nodes
            if node.sink is not None
        }
        if self._log is None:
            ready = self._taking_records(subtasks)
        else:
            reported = {name: _committed(subtasks.get(name, ())) for name in state.sinks}
            ready = state.ready(
                {name: min(id_, committed.get(name, id_)) for name, id_ in reported.items()}
            )
        if ready:
            deleting = self._try_to_delete(ready)
            self._deleting = asyncio.get_running_loop().create_task(deleting, name="old output")

    def all_committed(self) -> None:
        """Note that all subtasks have left in good order: they committed all they were permitted to."""
        self._all_committed = True

    async def idle(self) -> None:
        """Wait for a deletion under way: files that are written from now on may have any name."""
        if self._deleting is not None:
            await asyncio.gather(self._deleting, return_exceptions=True)

    async def finish(self, *, finished: bool) -> None:
        """Delete the output that the run has replaced by its end.

        Args:
            finished: the new output is complete.

        Raises:
            FencedError: a newer coordinator owns the job.
            StorageError: the old output cannot be deleted.
        """
        await self.idle()
        due = self.state.due if self._all_committed else ()
        names = self.state.sinks if finished else tuple(n for n in self.state.sinks if n in due)
        for tries_left in reversed(range(LAST_TRIES if names else 0)):
            try:
                await self._delete(names)
                return
            except FencedError:
                raise
            except HeadgateError:
                if not tries_left:
                    raise
                await asyncio.sleep(RETRY_PAUSES_S[0])

    async def close(self) -> None:
        """Give up a deletion under way."""
        if self._deleting is not None:
            self._deleting.cancel()
        await self.idle()

    @property
    def _busy(self) -> bool:
        return self._deleting is not None and not self._deleting.done()

    def _taking_records(
        self, subtasks: Mapping[str, list[SubtaskStatistics | None]]
    ) -> tuple[str, ...]:
        """Return the sinks that take records, in an unbounded job without checkpoints."""
        if all(node.source.bounded for node in self._spec.graph.sources() if node.source):
            return ()
        return tuple(
            name
            for name in self.state.sinks
            if any(each is not None and each.records_written for each in subtasks.get(name, ()))
        )

    async def _try_to_delete(self, names: tuple[str, ...]) -> None:
        try:
            await self._delete(names)
        except FencedError:
            self._not_before_s = float(
                "inf"
            )  # the next append fails too, and ends this coordinator
        except HeadgateError as error:
            pause_s = RETRY_PAUSES_S[min(self._failed, len(RETRY_PAUSES_S) - 1)]
            self._failed += 1
            self._not_before_s = self._clock.monotonic() + pause_s
            self._env.publish(
                "waiting",
                f"replaced output could not be deleted, trying again in {pause_s:g} s: {error}",
            )

    async def _delete(self, names: Iterable[str]) -> None:
        if self._files is None and self._log is not None:
            self._files = await self._log.old_output()
        files = self._files or {}
        gone = list(names)
        await delete_output(self._spec, self._spec.graph, files, gone, self._said)
        await self._record({name: found for name, found in files.items() if name not in gone})

    async def _record(self, files: dict[str, list[OutputFile]]) -> None:
        if self._log is None:
            self._unlogged = OldOutput(sinks=tuple(files))
        else:
            await self._log.list_output(files)
        self._files = files

    def _said(self, text: str) -> None:
        self._env.publish("output", text)


def _committed(subtasks: Iterable[SubtaskStatistics | None]) -> int:
    """Return the newest checkpoint that all of these subtasks have committed."""
    return min((0 if each is None else each.committed for each in subtasks), default=0)
