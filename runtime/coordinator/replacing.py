"""Deletes the output of earlier runs once the run that replaces it has committed its own.

What is to be deleted, and when, is in the job log (`protocol/old_output.py`). A job without checkpoints has
no log and commits nothing: a bounded one replaces the old output when it has finished, and an unbounded one
as soon as its sink takes records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ...errors import FencedError, HeadgateError
from ...operators.clock import Clock
from ...operators.sink import OutputFile
from ..control.messages import SubtaskStatistics
from ..job_spec import JobSpec
from ..plan import PhysicalPlan
from ..protocol.old_output import NO_OLD_OUTPUT, OldOutput
from ..storage.joblog_store import JobLog
from .output import begin_output, delete_output

RETRY_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Pauses between tries to delete, while the job runs; the last one holds for all further tries."""
LAST_TRIES: Final = 3
"""The number of tries at the end of the job."""


class OutputReplacer:
    """The old output of one job, under one coordinator."""

    def __init__(
        self,
        spec: JobSpec,
        log: JobLog | None,
        clock: Clock,
        announce: Callable[[str, str], None],
    ) -> None:
        """`announce` is given the kind of an event and a line for the user to read."""
        self._spec = spec
        self._log = log
        self._clock = clock
        self._announce = announce
        self._unlogged = NO_OLD_OUTPUT
        self._files: dict[str, list[OutputFile]] | None = None if log is not None else {}
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
            StorageError: the list cannot be made, or not be recorded.
        """
        found = await begin_output(
            self._spec, self._spec.graph, lambda text: self._announce("start", text)
        )
        if found is not None:
            await self._record(found)

    def look(
        self, plan: PhysicalPlan, statistics: Mapping[tuple[int, int], SubtaskStatistics]
    ) -> None:
        """Begin to delete what may be deleted, as far as the statistics of the subtasks show it."""
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
            ready = state.ready({name: _committed(subtasks.get(name, ())) for name in state.sinks})
        if ready:
            deleting = self._try_to_delete(ready)
            self._deleting = asyncio.get_running_loop().create_task(deleting, name="old output")

    def all_committed(self) -> None:
        """All subtasks have left in good order: they have committed what they were permitted to."""
        self._all_committed = True

    async def idle(self) -> None:
        """Wait for a deletion under way: files that are written from here on may have any name."""
        if self._deleting is not None:
            await asyncio.gather(self._deleting, return_exceptions=True)

    async def finish(self, *, finished: bool) -> None:
        """Delete what the run has replaced by its end.

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
                await asyncio.sleep(RETRY_S[0])

    async def close(self) -> None:
        """Give up what is under way."""
        if self._deleting is not None:
            self._deleting.cancel()
        await self.idle()

    @property
    def _busy(self) -> bool:
        return self._deleting is not None and not self._deleting.done()

    def _taking_records(
        self, subtasks: Mapping[str, list[SubtaskStatistics | None]]
    ) -> tuple[str, ...]:
        """Without checkpoints, and without an end: the sinks that take records."""
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
            )  # the next append says so too, and ends this coordinator
        except HeadgateError as error:
            pause_s = RETRY_S[min(self._failed, len(RETRY_S) - 1)]
            self._failed += 1
            self._not_before_s = self._clock.monotonic() + pause_s
            self._announce(
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
        self._announce("output", text)


def _committed(subtasks: Iterable[SubtaskStatistics | None]) -> int:
    """The newest checkpoint that all of them have committed."""
    return min((0 if each is None else each.committed for each in subtasks), default=0)
