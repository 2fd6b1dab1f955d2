"""Commits the output of sinks that commit once per checkpoint for all their writers.

The committables are part of the snapshots, so the entry of a checkpoint in the job log leads to all of
them. Workers forget theirs as soon as the checkpoint is complete. So the newest entry of the log must
always have everything that may not be committed yet: the next checkpoint is not written to the log before
the output of the last one is committed. A restart, or another coordinator, goes on from that entry and
commits its output first. The output may have been committed already, so a commit must be idempotent.

A checkpoint therefore waits where the target of a sink does not answer. So does a savepoint, because it
has nothing of what workers have forgotten either. A commit that fails for good fails the attempt, and is
begun again with the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final

from ...errors import FencedError, HeadgateError, JobError, StorageError
from ...operators.graph import Node
from ...operators.sink import (
    COMMITTABLES,
    RETRY_PAUSES_S,
    EpochOutput,
    GlobalCommit,
    Sink,
    epochs_of,
)
from ...state.snapshot import CommitPermit
from ..observe.catalogue import LATENCIES
from ..observe.metrics import PlainHistogram
from ..options.monitoring import CANCELLATION_TIMEOUT
from ..options.registry import Options
from ..options.state import COMMITTER_RETRIES
from ..protocol.checkpoints.manifest import Manifest
from ..protocol.failures import as_headgate_error
from ..savepoint.store import opened
from .environment import AttemptFailed, JobEnvironment
from .failures import failure_from
from .restore import ReadHandle, Restored, reader_of, split_items

_log = logging.getLogger("headgate.checkpoint")


class CommitFigures:
    """The commits of one sink under this coordinator.

    Attributes:
        commits: those that succeeded.
        errors: those that failed, also if they were repeated.
        seconds: how long those that succeeded took.
    """

    def __init__(self) -> None:
        self.commits = 0
        self.errors = 0
        self.seconds = PlainHistogram(LATENCIES)


@final
class GlobalCommitter:
    """The commits of one job, under one coordinator; one checkpoint after the other."""

    def __init__(self, env: JobEnvironment) -> None:
        self._env = env
        self._sinks = {
            node.name: (node, node.sink)
            for node in env.spec.graph.nodes
            if node.sink is not None and node.sink.commits_globally
        }
        self.figures = {name: CommitFigures() for name in self._sinks}
        self._task: asyncio.Task[None] | None = None
        self._checkpoint: tuple[str, int] = ("", 0)
        """The root and the id of the checkpoint that `_task` commits."""
        self._restoring = False
        """Whether an attempt waits for the commit of what it restores, and fails if that fails."""
        self._given_up = asyncio.Event()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def before_entry(self) -> AsyncIterator[None]:
        """Wait until all output is committed, and keep other entries waiting for the time of this one.

        Raises:
            HeadgateError: it cannot be committed, or the attempt ended before it was.
        """
        async with self._turn:
            await self.all_committed()
            yield

    async def all_committed(self) -> None:
        """Wait until all output of checkpoints in the log is committed.

        Raises:
            HeadgateError: it cannot be committed, or the attempt ended before it was.
        """
        if not await self._settled():
            id_ = self._checkpoint[1]
            raise JobError(f"the attempt ended before the output of checkpoint {id_} was committed")
        if self._task is not None:
            self._task.result()

    @property
    def committed(self) -> dict[str, int]:
        """The newest checkpoint whose output is committed, by sink; empty if that of all is."""
        root, id_ = self._checkpoint
        due = self._task is not None and not _succeeded(self._task)
        return dict.fromkeys(self._sinks, 0 if root else id_ - 1) if due else {}

    def begin(self, manifest: Manifest) -> None:
        """Begin to commit the output of a checkpoint of this job, which is in the log."""
        if self._sinks:
            self._start("", manifest)

    async def before_end(self) -> None:
        """Wait until the output of the last checkpoint is committed, cannot be, or the attempt ends."""
        await self._settled()

    async def restored(self, restored: Restored | None) -> None:
        """Commit the output of what an attempt is about to restore.

        Raises:
            HeadgateError: it cannot be committed.
        """
        self._given_up.clear()
        if restored is None or not self._sinks:
            self._task = None
            return
        checkpoint = (restored.root, restored.manifest.checkpoint_id)
        self._restoring = True
        try:
            task = self._task
            failed = task is not None and task.done() and not _succeeded(task)
            if task is None or failed or checkpoint != self._checkpoint:
                if task is not None and not task.done():
                    await asyncio.wait({task})
                self._start(restored.root, restored.manifest)
            assert self._task is not None
            await asyncio.shield(self._task)
        finally:
            self._restoring = False

    def give_up(self) -> None:
        """Let nothing wait any longer: the attempt is over. A commit under way goes on."""
        self._given_up.set()

    async def finish(self) -> None:
        """Wait at the end of the job for a commit under way, for a bounded time."""
        task = self._task
        if task is None or task.done():
            return
        await asyncio.wait({task}, timeout=self._env.options.get(CANCELLATION_TIMEOUT) / 1000)
        if _succeeded(task):
            return
        task.cancel()
        why = "in time" if not task.done() or task.cancelled() else f": {task.exception()}"
        _log.warning(
            "the output of checkpoint %s was not committed %s; "
            "a run that resumes from that checkpoint commits it",
            self._checkpoint[1],
            why,
        )

    async def close(self) -> None:
        """Give up a commit under way."""
        self._given_up.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- one commit ---------------------------------------------------------------------------------

    async def _settled(self) -> bool:
        """Wait until no commit is under way; return False if the attempt ended before."""
        task = self._task
        if task is None or task.done():
            return True
        given_up = asyncio.get_running_loop().create_task(self._given_up.wait(), name="give up")
        try:
            await asyncio.wait({task, given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            given_up.cancel()
        return task.done()

    def _start(self, root: str, manifest: Manifest) -> None:
        self._checkpoint = (root, manifest.checkpoint_id)
        self._task = asyncio.get_running_loop().create_task(
            self._commit(root, manifest), name=f"commit {manifest.checkpoint_id}"
        )
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, HeadgateError) and not self._restoring:
            failure = failure_from(error, "commit")
            # No attempt may go on whose output cannot be committed. One that has ended ignores this.
            self._env.events.put_nowait(AttemptFailed(self._env.attempt, failure))

    async def _commit(self, root: str, manifest: Manifest) -> None:
        env = self._env
        try:
            if not root:
                await self._commit_all(manifest, reader_of(env.store))
                return
            async with opened(env.open_at, root, env.spec.options, writable=False) as store:
                await self._commit_all(manifest, reader_of(store))
        except Exception as error:
            raise as_headgate_error(
                error, f"the output of checkpoint {manifest.checkpoint_id} cannot be committed"
            ) from error

    async def _commit_all(self, manifest: Manifest, read: ReadHandle) -> None:
        for node, sink in self._sinks.values():
            items = await split_items(manifest, node.name, COMMITTABLES, read)
            epochs = epochs_of(node.name, sink, items)
            if epochs:
                await self._commit_one(node, sink, manifest.checkpoint_id, epochs)

    async def _commit_one(
        self, node: Node, sink: Sink, checkpoint_id: int, epochs: tuple[EpochOutput, ...]
    ) -> None:
        env = self._env
        permit = CommitPermit(env.spec.name, env.generation, checkpoint_id)
        options = Options(env.spec.options)
        commit = GlobalCommit(env.spec.name, node.name, options.effective(), permit, epochs)
        retries = options.get(COMMITTER_RETRIES)
        figures = self.figures[node.name]
        for tries in range(retries + 1):
            began = env.clock.monotonic()
            try:
                await asyncio.to_thread(sink.commit_globally, commit)
                figures.commits += 1
                figures.seconds.observe(env.clock.monotonic() - began)
                return
            except Exception as error:
                figures.errors += 1
                text = f"sink `{node.name}` cannot commit checkpoint {checkpoint_id}"
                failed = as_headgate_error(error, text, str(node.origin))
                if failed is error:
                    failed.args = (f"{text}: {failed.message}",)
                    failed.message = failed.args[0]
                temporary = isinstance(failed, StorageError) and not isinstance(failed, FencedError)
                if not temporary or tries == retries:
                    raise failed from error
                pause_s = RETRY_PAUSES_S[min(tries, len(RETRY_PAUSES_S) - 1)]
                env.publish("waiting", f"{failed.message}; trying again in {pause_s:g} s")
                await asyncio.sleep(pause_s)


def _succeeded(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
