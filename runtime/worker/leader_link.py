"""The link from a worker to the coordinator that leads, and the record that a next coordinator gets.

A worker obeys the coordinator of the newest generation that has reached it. When a coordinator takes over,
`AttemptRecord` has the commands that the worker obeyed, and what it reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ...operators.clock import Clock
from ..control.link import ControlLink
from ..control.messages import (
    CheckpointAborted,
    CheckpointAcked,
    CheckpointCompleted,
    Deploy,
    FinishSources,
    Hello,
    Messages,
    Start,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskTerminated,
    Superseded,
    Terminate,
    TriggerCheckpoint,
    Welcome,
)
from ..protocol.adoption import IN_PARTS, Subtask, WorkerReport
from ..task.subtask import Subtask as Task

GREETING_S = 10.0
"""A coordinator that has asked for this worker and does not answer within this time is ignored."""
_log = logging.getLogger("headgate.worker")


class LeaderLink:
    """The link to the coordinator in charge, and those that come after it.

    Messages of a coordinator count only while `link` is the one to it: from the moment at which a newer
    one has said Welcome, nothing of the old one is obeyed any more, not even what has arrived already.
    """

    def __init__(self, link: ControlLink, hello: Callable[[int], Hello], clock: Clock) -> None:
        """`hello` makes our first message, given the generation that we obey."""
        self.link = link
        self.generation = 0
        self._hello = hello
        self._clock = clock
        self._next: Welcome | None = None
        self._changed = asyncio.Event()
        self._greeting: set[asyncio.Task[None]] = set()

    def send(self, message: Messages) -> None:
        """Send a message to the coordinator in charge; without one it is dropped."""
        self.link.send(message)

    async def begin(self) -> Welcome | None:
        """Greet the coordinator that had this worker started; None: it does not want us."""
        self.link.send(self._hello(self.generation))
        welcome = await self.link.receive()
        if not isinstance(welcome, Welcome):
            return None
        self.generation = welcome.generation
        return welcome

    def offer(self, link: ControlLink) -> None:
        """A coordinator asks for this worker, over a new link. It must lead a newer generation."""
        task = asyncio.get_running_loop().create_task(self._greet(link), name="another coordinator")
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, link: ControlLink) -> None:
        link.send(self._hello(self.generation))
        try:
            async with asyncio.timeout(GREETING_S):
                welcome = await link.receive()
        except BaseException:
            link.close()
            raise
        if not isinstance(welcome, Welcome) or welcome.generation <= self.generation:
            _log.warning("refused a coordinator that does not lead any more")
            link.close()
            return
        self.generation = welcome.generation
        before, self.link = self.link, link
        before.send(Superseded(generation=welcome.generation))
        before.close()
        self._next = welcome
        self._changed.set()

    async def successor(self, within_ms: int) -> tuple[Welcome, int] | None:
        """Wait for the next coordinator; return it and the ms without one, or None if none came in time."""
        lost = self._clock.monotonic()
        if self._next is None:
            self._changed.clear()
        if self._next is None and within_ms:
            _log.warning("the coordinator is gone; working on for up to %s ms without", within_ms)
            try:
                async with asyncio.timeout(within_ms / 1000):
                    await self._changed.wait()
            except TimeoutError:
                _log.warning("no coordinator within %s ms", within_ms)
        welcome, self._next = self._next, None
        if welcome is None:
            return None
        return welcome, round(1000 * (self._clock.monotonic() - lost))

    def give_up(self) -> None:
        """Stop waiting: there is nothing left that a successor could go on with."""
        self._changed.set()

    async def close(self) -> None:
        """Hang up."""
        tasks = list(self._greeting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.link.close()


class AttemptRecord:
    """One attempt on one worker, by the messages that were obeyed and sent.

    What was sent may never have arrived: its coordinator was perhaps dead already.
    """

    def __init__(self, deploy: Deploy) -> None:
        self._deploy = deploy
        self._finished: set[Subtask] = set()
        self._uncommitted: set[int] = set()
        self._last = 0
        self._completed = 0
        self._running = False
        self._ending = ""
        self._failure = ""
        self._orphaned_ms = 0

    @property
    def attempt(self) -> int:
        """The number of the attempt."""
        return self._deploy.attempt

    @property
    def orphaned_ms(self) -> int:
        """The time that the attempt may go on without a coordinator; 0: there is nothing to wait for."""
        return 0 if self._ending or self._failure else self._orphaned_ms

    def broken_up(self) -> None:
        """Note that some of its regions end, here or elsewhere, and begin again as another attempt."""
        self._ending = self._ending or IN_PARTS

    def heard(self, message: Messages) -> None:
        """Take note of a message of the coordinator; those of other attempts do not count."""
        if not self._is_ours(message):
            return
        match message:
            case Start(orphaned_ms=orphaned_ms):
                self._running = True
                self._orphaned_ms = orphaned_ms
            case TriggerCheckpoint(checkpoint_id=id_, options=options):
                self._last = max(self._last, id_)
                if options.stop:
                    self._ending = f"its sources stopped at checkpoint {id_}"
            case CheckpointCompleted(checkpoint_id=id_):
                self._completed = max(self._completed, id_)
                self._uncommitted = {other for other in self._uncommitted if other > id_}
            case CheckpointAborted(checkpoint_id=id_):
                self._uncommitted.discard(id_)
            case FinishSources():
                self._ending = "its sources were drained"
            case Terminate():
                self._ending = "its subtasks were leaving"

    def said(self, message: Messages) -> None:
        """Take note of a report of a subtask; those of other attempts do not count."""
        if not self._is_ours(message):
            return
        match message:
            case CheckpointAcked(checkpoint_id=id_) if id_ > self._completed:
                self._uncommitted.add(id_)
            case SubtaskFinished(vertex=vertex, index=index):
                self._finished.add((vertex, index))
            case SubtaskFailed(task_name=task_name, text=text):
                self._failure = self._failure or f"{task_name}: {text}"
            case SubtaskTerminated():
                self._ending = "its subtasks were leaving"

    def _is_ours(self, message: Messages) -> bool:
        return getattr(message, "attempt", None) == self.attempt

    def report(self, subtasks: Sequence[Task], orphaned_ms: int) -> WorkerReport:
        """Return the report on `subtasks`, which were without a coordinator for `orphaned_ms`."""
        deploy = self._deploy
        return WorkerReport(
            attempt=deploy.attempt,
            plan=deploy.plan,
            restored_checkpoint=deploy.restored_checkpoint,
            running=self._running,
            subtasks=tuple((task.env.vertex.id, task.env.index) for task in subtasks),
            finished=tuple(sorted(self._finished)),
            failure=self._failure,
            ending=self._ending,
            last_checkpoint=self._last,
            completed_checkpoint=self._completed,
            uncommitted_checkpoints=tuple(sorted(self._uncommitted)),
            orphaned_ms=orphaned_ms,
        )


def adopt(subtasks: Sequence[Task], generation: int) -> None:
    """Another coordinator goes on with the attempt.

    Files of its checkpoints must bear its generation: those of older ones are swept away.
    """
    for task in subtasks:
        task.env.generation = generation
