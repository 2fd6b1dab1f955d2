"""Checks that a sink keeps its promises: `check_sink` for a single one, and those of the kit."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import cloudpickle
import msgspec

from ...operators.elements import Batch
from ...operators.sink import (
    COMMITTABLES,
    NAMES,
    GlobalCommit,
    GuaranteeLike,
    Sink,
    SinkOperator,
    SinkRun,
    epochs_of,
)
from ...state.snapshot import CommitPermit, RestoredState
from ..proxy import Direction
from .cases import Checks, Feature, SinkCase
from .context import (
    Items,
    expect,
    expect_same,
    finished,
    make_context,
    open_sink,
    pre_commit,
    records_of,
)
from .refusals import check_connections, expect_no_secrets, refused

CHECKS: Final[Checks[SinkCase]] = Checks()
_CALL_S_MAX: Final = 120.0
"""A call that has not returned after this many seconds is assumed to hang."""
_JOB: Final = "conformance"
_BATCHES: Final = 3
"""A sink is tried with this many batches, each of which is a checkpoint's."""


class CrashPoint(Enum):
    """The point in the life of a checkpoint at which an attempt dies."""

    WHILE_WRITING = "behind the records, before the barrier"
    BEFORE_PREPARE = "behind the barrier, before the pre-commit"
    AFTER_PREPARE = "behind the pre-commit, before the checkpoint is complete"
    BEFORE_COMMIT = "behind the completed checkpoint, before the commit"
    AFTER_COMMIT = "behind the commit"


@dataclass(slots=True)
class _Log:
    """The durable state: the last completed checkpoint."""

    checkpoint_id: int = 0
    epoch: int = 0
    """The first epoch that the checkpoint does not contain."""
    items: Items = field(default_factory=dict)
    attempt: int = 0
    next_id: int = 0


class _SinkJob:
    """Runs a sink through attempts and checkpoints. Checkpoint i closes epoch i, one batch each."""

    def __init__(
        self,
        sink: Sink,
        batches: Sequence[Batch],
        options: dict[str, str] | None,
    ) -> None:
        self._sink = sink
        self._batches = batches
        self._options = options
        self.log = _Log()

    async def start(self) -> SinkOperator:
        """Start a new attempt, restored from the last completed checkpoint."""
        self.log.attempt += 1
        if self.log.checkpoint_id:
            await self._commit_globally()
        context = make_context(
            attempt=self.log.attempt,
            restored_checkpoint=self.log.checkpoint_id,
            options=self._options,
        )
        sink: Sink = cloudpickle.loads(cloudpickle.dumps(self._sink))
        return await open_sink(sink, context, self.log.items if self.log.checkpoint_id else None)

    async def run(
        self, operator: SinkOperator, crash: tuple[int, CrashPoint] | None, *, close: bool = True
    ) -> bool:
        """Run from the last completed checkpoint to the end or to the crash; return True for the crash.

        Closes the operator, unless `close` is False.
        """
        try:
            for epoch in range(self.log.epoch, len(self._batches)):
                point = crash[1] if crash is not None and crash[0] == epoch else None
                operator.process(self._batches[epoch], 0)
                if point is CrashPoint.WHILE_WRITING:
                    return True
                if epoch + 1 == len(self._batches):
                    await finished(operator.finish())
                if await self.checkpoint(operator, epoch + 1, point):
                    return True
            return False
        finally:
            if close:
                operator.close()

    async def checkpoint(
        self, operator: SinkOperator, epoch: int, point: CrashPoint | None = None
    ) -> bool:
        """Take a checkpoint; return True if it reached the crash point."""
        if point is CrashPoint.BEFORE_PREPARE:
            self.log.next_id += 1
            operator.snapshot(self.log.next_id)
            return True
        items = await self.prepare(operator)
        if items is None or point is CrashPoint.AFTER_PREPARE:
            return True
        self.log.checkpoint_id, self.log.epoch, self.log.items = self.log.next_id, epoch, items
        if point is CrashPoint.BEFORE_COMMIT:
            return True
        await self.commit(operator)
        return point is CrashPoint.AFTER_COMMIT

    async def commit(self, operator: SinkOperator) -> None:
        """Notify the sink that the last checkpoint is complete, and wait until it has committed."""
        await self._commit_globally()
        await commit(operator, self.log.checkpoint_id)

    async def _commit_globally(self) -> None:
        """Do the coordinator's part of a commit."""
        await commit_globally(self._sink, [self.log.items], self.log.checkpoint_id)

    async def prepare(self, operator: SinkOperator) -> Items | None:
        """Return the sink's part of the next checkpoint, with the pre-commit done."""
        self.log.next_id += 1
        return await pre_commit(operator, self.log.next_id)


async def commit(operator: SinkOperator, checkpoint_id: int) -> None:
    """Notify a subtask of a sink that a checkpoint is complete, and wait until it has committed."""
    await finished(operator.on_checkpoint_complete(CommitPermit(_JOB, 1, checkpoint_id)))


async def commit_globally(
    sink: Sink, parts: Sequence[Items], checkpoint_id: int, job: str = _JOB
) -> None:
    """Commit a checkpoint for all writers of a sink, as the coordinator does, if the sink wants that.

    Args:
        sink: the sink.
        parts: the parts of its subtasks in the checkpoint.
        checkpoint_id: the number of the checkpoint.
        job: the name of the job.
    """
    if not sink.commits_globally:
        return
    sink = cloudpickle.loads(cloudpickle.dumps(sink))
    items = [item for part in parts for item in part.get(COMMITTABLES, [])]
    epochs = epochs_of("sink", sink, items)
    permit = CommitPermit(job, 1, checkpoint_id)
    if epochs:
        commit = GlobalCommit(job, "sink", {}, permit, epochs)
        await asyncio.to_thread(sink.commit_globally, commit)


ExpectEpochs = Callable[[int, str], None]
"""Checks that exactly the records of this many epochs are visible; the text says what had happened."""


async def check_sink(
    make: Callable[[], Sink],
    batches: Sequence[Batch],
    read: Callable[[], list[Any]],
    reset: Callable[[], None],
    options: dict[str, str] | None = None,
    crash_twice: bool = True,
) -> None:
    """Check that a sink is exactly-once.

    * Records appear when their checkpoint is complete and committed, and not before.
    * After a crash at any point of any checkpoint, and at any two, each record is there once.
    * An aborted checkpoint loses nothing. Committing twice changes nothing, even if an attempt does it
      that does not know that it is dead.

    Args:
        make: returns a new sink with guarantee `exactly_once` that always writes to the same place.
        batches: the batches to write, one per checkpoint; all records must be different.
        read: returns the records visible in that place, in any order, in the form of `records_of`.
        reset: empties the place; it is called before each scenario.
        options: the options of the job.
        crash_twice: also try all pairs of crash points; several hundred runs of the sink.
    """
    expected = [records_of(batch) for batch in batches]

    def new_job() -> _SinkJob:
        reset()
        return _SinkJob(make(), batches, options)

    def expect_epochs(epochs: int, situation: str) -> None:
        wanted = [record for records in expected[:epochs] for record in records]
        expect_same(read(), wanted, situation)

    await _without_crash(new_job(), expect_epochs, len(batches))
    await _aborted_checkpoint(new_job(), expect_epochs, batches)
    await _committed_twice(new_job(), expect_epochs, batches)
    crashes = [(epoch, point) for epoch in range(len(batches)) for point in CrashPoint]
    for first in crashes:
        await _with_crashes(new_job(), expect_epochs, len(batches), [first])
        for second in crashes if crash_twice else []:
            if second[0] >= first[0]:
                await _with_crashes(new_job(), expect_epochs, len(batches), [first, second])


async def _without_crash(job: _SinkJob, expect_epochs: ExpectEpochs, epochs: int) -> None:
    await job.run(await job.start(), None)
    expect_epochs(epochs, "without a crash")


async def _with_crashes(
    job: _SinkJob, expect_epochs: ExpectEpochs, epochs: int, crashes: list[tuple[int, CrashPoint]]
) -> None:
    situation = ""
    for epoch, point in crashes:
        situation += f"crash in epoch {epoch}, {point.value}; "
        committed_by_restore = job.log.epoch
        operator = await job.start()
        expect_epochs(committed_by_restore, f"{situation}at its start")
        crashed = await job.run(operator, (epoch, point))
        uncommitted = crashed and point is CrashPoint.BEFORE_COMMIT
        expect_epochs(job.log.epoch - uncommitted, f"{situation}before the restart")
    operator = await job.start()
    expect_epochs(job.log.epoch, f"{situation}after the restore")
    await job.run(operator, None)
    expect_epochs(epochs, f"{situation}at the end")


async def _aborted_checkpoint(
    job: _SinkJob, expect_epochs: ExpectEpochs, batches: Sequence[Batch]
) -> None:
    """Prepare checkpoint 1 but never complete it; the next one must contain its records."""
    operator = await job.start()
    operator.process(batches[0], 0)
    await job.prepare(operator)
    operator.on_checkpoint_aborted(job.log.next_id)
    expect_epochs(0, "a checkpoint was aborted")
    for batch in batches[1:]:
        operator.process(batch, 0)
    await job.checkpoint(operator, len(batches), CrashPoint.BEFORE_COMMIT)
    operator.close()
    (await job.start()).close()
    expect_epochs(len(batches), "a checkpoint was aborted, the next one completed and restored")


async def _committed_twice(
    job: _SinkJob, expect_epochs: ExpectEpochs, batches: Sequence[Batch]
) -> None:
    """Let an attempt that does not know that it is dead commit what its successors have committed
    already.
    """
    zombie = await job.start()
    zombie.process(batches[0], 0)
    await job.checkpoint(zombie, 1, CrashPoint.BEFORE_COMMIT)
    (await job.start()).close()
    expect_epochs(1, "committed by the restore")
    (await job.start()).close()
    expect_epochs(1, "committed by a second restore")
    await job.commit(zombie)
    zombie.close()
    expect_epochs(1, "committed again by a dead attempt")


class Places:
    """The place of the present scenario; each scenario has one of its own."""

    def __init__(self, case: SinkCase, guarantee: GuaranteeLike) -> None:
        self._case = case
        self._guarantee: GuaranteeLike = guarantee
        self._stack = ExitStack()
        self._place: Any = None

    def reset(self) -> None:
        self._stack.close()
        self._place = self._stack.enter_context(self._case.place())

    def close(self) -> None:
        self._stack.close()

    def sink(self) -> Sink:
        return self._case.sink(self._place, self._guarantee)

    def visible(self) -> list[Any]:
        return self._case.visible(self._place)

    def pending(self) -> list[Any]:
        return list(self._case.pending(self._place))


@contextmanager
def places_of(case: SinkCase, guarantee: GuaranteeLike = "exactly_once") -> Iterator[Places]:
    places = Places(case, guarantee)
    places.reset()
    try:
        yield places
    finally:
        places.close()


def batches_of(case: SinkCase) -> list[Batch]:
    return case.batches(case.records())[:_BATCHES]


def all_of(batches: Sequence[Batch]) -> list[Any]:
    return [record for batch in batches for record in records_of(batch)]


def bound(sink: Sink, batches: Sequence[Batch]) -> Sink:
    """Return the sink as a job's plan has it, for the columns of the batches."""
    data = getattr(batches[0], "data", None)
    sink.bind(None if data is None else data.schema)
    return sink


@CHECKS.check(Feature.EXACTLY_ONCE)
async def once_after_any_crash(case: SinkCase) -> None:
    """After a crash at any point of any checkpoint, each record is visible exactly once.

    A record appears when its checkpoint is committed, and not before. An aborted checkpoint loses
    nothing, and committing twice changes nothing, even if a dead attempt does it.
    """
    await _crashes(case, twice=False)


@CHECKS.check(Feature.EXACTLY_ONCE, thorough=True)
async def once_after_any_two_crashes(case: SinkCase) -> None:
    """After any two crashes, in the same attempt or in two, each record is visible exactly once."""
    await _crashes(case, twice=True)


async def _crashes(case: SinkCase, twice: bool) -> None:
    batches = batches_of(case)
    with places_of(case) as places:
        await check_sink(
            lambda: bound(places.sink(), batches),
            batches,
            places.visible,
            places.reset,
            crash_twice=twice,
        )


@CHECKS.check(Feature.EXACTLY_ONCE)
async def committed_by_two_at_once(case: SinkCase) -> None:
    """Two attempts that commit the same checkpoint at the same time make its records visible once.

    One of them may be refused, because it is the older one; then the other one commits.
    """
    batches = batches_of(case)
    with places_of(case) as places:
        job = _SinkJob(bound(places.sink(), batches), batches, None)
        first = await job.start()
        first.process(batches[0], 0)
        await job.checkpoint(first, 1, CrashPoint.BEFORE_COMMIT)
        outcomes = await asyncio.gather(job.commit(first), job.start(), return_exceptions=True)
        refusals = [each for each in outcomes if isinstance(each, BaseException)]
        expect(len(refusals) < 2, f"neither of two attempts can commit: {refusals}")
        for each in (first, *outcomes):
            if isinstance(each, SinkOperator):
                each.close()
        (await job.start()).close()
        expect_same(places.visible(), records_of(batches[0]), "committed by two at once")


@CHECKS.check(Feature.EXACTLY_ONCE)
async def several_checkpoints_under_way(case: SinkCase) -> None:
    """Three checkpoints may be prepared before one is complete, which commits those before it as well.

    After a crash the records of those that did not complete are not there, until they are written again.
    """
    batches = batches_of(case)
    with places_of(case) as places:
        for completed in (1, 2, 3):
            places.reset()
            job = _SinkJob(bound(places.sink(), batches), batches, None)
            operator = await job.start()
            prepared: list[Items] = []
            for batch in batches:
                operator.process(batch, 0)
                prepared.append(await job.prepare(operator) or {})
            job.log.checkpoint_id = job.log.epoch = completed
            job.log.items = prepared[completed - 1]
            await job.commit(operator)
            situation = f"three checkpoints were prepared, and the {completed}. is complete"
            expect_same(places.visible(), all_of(batches[:completed]), situation)
            operator.close()
            await job.run(await job.start(), None)
            expect_same(places.visible(), all_of(batches), f"{situation}; then a restart")


@CHECKS.check(Feature.EXACTLY_ONCE)
async def committables_move_to_other_subtasks(case: SinkCase) -> None:
    """What three subtasks have pre-committed is committed by one, or by two, after a rescale."""
    batches = batches_of(case)
    for parallelism in (1, 2):
        with places_of(case) as places:
            sink = bound(places.sink(), batches)
            items: list[Items] = []
            for subtask, batch in enumerate(batches):
                writer = await _opened(sink, subtask, len(batches))
                writer.process(batch, 0)
                items.append(await pre_commit(writer, 1) or {})
                # It is killed, so it is not closed.
            expect_same(places.visible(), [], "three subtasks have pre-committed")
            await _restored(sink, items, parallelism)
            situation = f"what three subtasks have pre-committed, committed by {parallelism}"
            expect_same(places.visible(), all_of(batches), situation)


async def _opened(
    sink: Sink, subtask: int, parallelism: int, attempt: int = 1, restored: int = 0
) -> SinkOperator:
    """Open a subtask of the sink as another process gets it."""
    context = make_context(
        attempt=attempt,
        subtask_index=subtask,
        parallelism=parallelism,
        restored_checkpoint=restored,
    )
    copy: Sink = cloudpickle.loads(cloudpickle.dumps(sink))
    return await open_sink(copy, context)


async def _restored(sink: Sink, items: Sequence[Items], parallelism: int) -> None:
    """Restore checkpoint 1 at this parallelism, item by item in turn, and close again."""
    for operator in await _rescaled(sink, items, parallelism, 2, 1):
        operator.close()


async def _rescaled(
    sink: Sink, items: Sequence[Items], parallelism: int, attempt: int, checkpoint_id: int
) -> list[SinkOperator]:
    """Restore a checkpoint at this parallelism, as the coordinator and the workers do.

    All subtasks are open before the first of them commits. The last one begins with the items of the first.
    """
    await commit_globally(sink, items, checkpoint_id)
    dealt: list[Items] = [{} for _ in range(parallelism)]
    for number, each in enumerate(items, parallelism - 1):
        for name, values in each.items():
            heirs = dealt if name == NAMES else [dealt[number % parallelism]]
            for heir in heirs:
                heir.setdefault(name, []).extend(values)
    operators = [
        await _opened(sink, subtask, parallelism, attempt, checkpoint_id)
        for subtask in range(parallelism)
    ]
    for operator, own in zip(operators, dealt, strict=True):
        await finished(operator.restore(RestoredState(items=own)))
    return operators


@CHECKS.check(Feature.EXACTLY_ONCE)
async def a_process_may_be_killed(case: SinkCase) -> None:
    """The records of a process that `kill -9` has ended are visible once, if their checkpoint completes.

    If it does not, the records are written again, and are visible once as well.
    """
    batches = batches_of(case)
    for completes in (True, False):
        with places_of(case) as places:
            sink = bound(places.sink(), batches)
            job = _SinkJob(sink, batches, None)
            items = await _killed_process(sink, batches[0])
            job.log.attempt = 1
            job.log.next_id = 1
            if completes:
                job.log.checkpoint_id = job.log.epoch = 1
                job.log.items = items
            await job.run(await job.start(), None)
            situation = f"killed behind the pre-commit; its checkpoint completes: {completes}"
            expect_same(places.visible(), all_of(batches), situation)


async def _killed_process(sink: Sink, batch: Batch) -> Items:
    """Write and pre-commit a batch in a process that kills itself; return what it pre-committed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headgate.testing.connectors.child"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told = cloudpickle.dumps(sys.path) + cloudpickle.dumps((sink, batch))
    answer, trouble = await asyncio.wait_for(process.communicate(told), _CALL_S_MAX)
    expect(process.returncode == -9, f"the process ended by itself: {trouble.decode()[-2000:]}")
    return msgspec.msgpack.decode(answer, type=Items)


@CHECKS.check(Feature.EXACTLY_ONCE, Feature.PENDING)
async def nothing_is_left_open(case: SinkCase) -> None:
    """At the end of a run nothing waits to be committed, also not what dead attempts have begun."""
    batches = batches_of(case)
    with places_of(case) as places:
        for point in (None, *CrashPoint):
            places.reset()
            job = _SinkJob(bound(places.sink(), batches), batches, None)
            if point is not None:
                await job.run(await job.start(), (1, point))
            await job.run(await job.start(), None)
            left = places.pending()
            situation = f"after a crash {point.value}" if point else "without a crash"
            expect(not left, f"{situation}: left open: {left[:5]}")


@CHECKS.check(Feature.EXACTLY_ONCE, Feature.PENDING)
async def a_rescale_leaves_nothing_open(case: SinkCase) -> None:
    """Killed and rescaled from 1 subtask to 3 and to 2, each record is visible once, and nothing is left.

    At each rescale the restored checkpoint has output that is not committed, and the killed subtasks have
    begun output that no checkpoint has.
    """
    first, second, third = batches_of(case)
    killed: list[SinkOperator] = []
    with places_of(case) as places:
        sink = bound(places.sink(), [first])
        operators = [await _opened(sink, 0, 1)]
        batches, visible = (first, second, third), 0
        for checkpoint_id, parallelism in ((1, 3), (2, 2)):
            last = operators[-1]
            last.process(batches[checkpoint_id - 1], 0)
            items = [await pre_commit(each, checkpoint_id) or {} for each in operators]
            for each in operators:
                each.process(third, 0)
                await pre_commit(each, checkpoint_id + 1)
            expect_same(places.visible(), all_of(batches[:visible]), "before the commit")
            killed += operators
            operators = await _rescaled(sink, items, parallelism, checkpoint_id + 1, checkpoint_id)
            visible = checkpoint_id
            situation = f"rescaled to {parallelism} subtasks"
            expect_same(places.visible(), all_of(batches[:visible]), situation)
        operators[-1].process(third, 0)
        parts = []
        for each in operators:
            await finished(each.finish())
            parts.append(await pre_commit(each, 3) or {})
        await commit_globally(sink, parts, 3)
        for each in operators:
            await commit(each, 3)
            each.close()
        expect_same(places.visible(), all_of(batches), "rescaled, and finished")
        left = places.pending()
        expect(not left, f"rescaled from 1 to 3 and to 2 subtasks: left open: {left[:5]}")
        for each in killed:  # only now, as a killed process closes nothing
            each.close()


_CUTS: Final[tuple[tuple[int, Direction], ...]] = (
    (0, "requests"),
    (20, "requests"),
    (0, "answers"),
    (20, "answers"),
)
"""The number of bytes that pass in a direction before connections break."""


class _Moment(Enum):
    """The call during which the server is away, or connections break."""

    WRITE = "while records are written"
    PREPARE = "during the pre-commit"
    COMMIT = "during the commit"


@CHECKS.check(Feature.EXACTLY_ONCE, Feature.SERVER)
async def once_if_the_server_dies(case: SinkCase) -> None:
    """When the server is killed while the sink writes, pre-commits or commits, each record is visible once.

    The call may fail, which restarts the job, or wait for the server.
    """
    await _server_dies(case, "exactly_once", tuple(_Moment))


@CHECKS.check(Feature.AT_LEAST_ONCE, Feature.SERVER)
async def nothing_is_lost_if_the_server_dies(case: SinkCase) -> None:
    """At least once: no record is lost when the server is killed while the sink writes or pre-commits."""
    await _server_dies(case, "at_least_once", (_Moment.WRITE, _Moment.PREPARE))


async def _server_dies(
    case: SinkCase, guarantee: GuaranteeLike, moments: Sequence[_Moment]
) -> None:
    batches = batches_of(case)
    with places_of(case, guarantee) as places:
        for moment in moments:
            places.reset()
            job = _SinkJob(bound(places.sink(), batches), batches, None)
            await _dies(case, job, batches, moment)
            await job.run(await job.start(), None)
            _expect_all(places, guarantee, batches, f"the server died {moment.value}")


def _expect_all(
    places: Places, guarantee: GuaranteeLike, batches: Sequence[Batch], situation: str
) -> None:
    """Check that all records are visible, and once if the guarantee says that."""
    if guarantee == "exactly_once":
        expect_same(places.visible(), all_of(batches), situation)
    else:
        _expect_there(places, batches, situation)


async def _dies(case: SinkCase, job: _SinkJob, batches: Sequence[Batch], moment: _Moment) -> None:
    """Take a checkpoint, and begin a second one during which the server dies."""
    server = case.server
    assert server is not None
    operator = await _second_checkpoint(job, batches, moment)
    server.kill()
    going = asyncio.ensure_future(_go_on(job, operator, batches, moment))
    await asyncio.sleep(0)
    await asyncio.to_thread(server.start)
    await _ends(operator, going, f"the server died {moment.value}")


async def _second_checkpoint(
    job: _SinkJob, batches: Sequence[Batch], moment: _Moment
) -> SinkOperator:
    """Return a sink that has taken a checkpoint, and that is in front of this moment of the second one."""
    operator = await job.start()
    operator.process(batches[0], 0)
    await job.checkpoint(operator, 1)
    if moment is not _Moment.WRITE:
        operator.process(batches[1], 0)
    if moment is _Moment.COMMIT:
        await job.checkpoint(operator, 2, CrashPoint.BEFORE_COMMIT)
    return operator


async def _go_on(
    job: _SinkJob, operator: SinkOperator, batches: Sequence[Batch], moment: _Moment
) -> None:
    """Finish the second checkpoint from this moment on."""
    if moment is _Moment.WRITE:
        operator.process(batches[1], 0)
    if moment is _Moment.COMMIT:
        await job.commit(operator)
    else:
        await job.checkpoint(operator, 2)


@CHECKS.check(Feature.EXACTLY_ONCE, Feature.CUTS)
async def once_if_a_connection_breaks(case: SinkCase) -> None:
    """When a connection breaks while the sink writes, pre-commits or commits, each record is visible once.

    What the sink has asked for may not have reached the server, in part, or as a whole, and the server may
    have done it although its answer is lost.
    """
    await _connection_breaks(case, "exactly_once", tuple(_Moment))


@CHECKS.check(Feature.AT_LEAST_ONCE, Feature.CUTS)
async def nothing_is_lost_if_a_connection_breaks(case: SinkCase) -> None:
    """At least once: no record is lost when a connection breaks while the sink writes or pre-commits."""
    await _connection_breaks(case, "at_least_once", (_Moment.WRITE, _Moment.PREPARE))


async def _connection_breaks(
    case: SinkCase, guarantee: GuaranteeLike, moments: Sequence[_Moment]
) -> None:
    batches = batches_of(case)
    with case.cutting() as proxy, places_of(case, guarantee) as places:
        for moment in moments:
            for behind, direction in _CUTS:
                places.reset()
                job = _SinkJob(bound(places.sink(), batches), batches, None)
                situation = f"connections broke behind {behind} bytes of {direction} {moment.value}"
                operator = await _second_checkpoint(job, batches, moment)
                proxy.cut_after(behind, direction)
                going = asyncio.ensure_future(_go_on(job, operator, batches, moment))
                await _ends(operator, going, situation)
                proxy.calm()
                await job.run(await job.start(), None)
                _expect_all(places, guarantee, batches, situation)
        expect(proxy.cuts > 0, "the sink does not connect through the proxy of `cutting`")


async def _ends(operator: SinkOperator, going: asyncio.Future[None], situation: str) -> None:
    """Wait until a call and the sink have ended, whether or not the call has succeeded."""
    try:
        await asyncio.wait_for(asyncio.gather(going, return_exceptions=True), _CALL_S_MAX)
        await asyncio.wait_for(asyncio.to_thread(operator.close), _CALL_S_MAX)
    except TimeoutError:
        raise AssertionError(f"{situation}: it hangs") from None


@CHECKS.check(Feature.AT_LEAST_ONCE)
async def nothing_is_lost(case: SinkCase) -> None:
    """At least once: the records of a completed checkpoint are visible, whenever a crash comes."""
    batches = batches_of(case)
    with places_of(case, "at_least_once") as places:
        for crash in [(epoch, point) for epoch in range(len(batches)) for point in CrashPoint]:
            places.reset()
            job = _SinkJob(bound(places.sink(), batches), batches, None)
            killed = await job.start()
            await job.run(killed, crash, close=False)  # nothing closes what a crash has ended
            situation = f"crash in epoch {crash[0]}, {crash[1].value}"
            (await job.start()).close()
            _expect_there(places, batches[: job.log.epoch], f"{situation}; restored")
            await job.run(await job.start(), None)
            _expect_there(places, batches, f"{situation}; at the end")
            killed.close()


def _expect_there(places: Places, batches: Sequence[Batch], situation: str) -> None:
    there = set(map(repr, places.visible()))
    lost = [record for record in all_of(batches) if repr(record) not in there]
    expect(not lost, f"{situation}: {len(lost)} records are lost: {lost[:5]}")


@CHECKS.check(Feature.MISTAKES)
async def says_what_is_wrong(case: SinkCase) -> None:
    """A wrong address, password or name is an error with the reason, and without the secret.

    It comes before the first checkpoint is complete.
    """
    batches = batches_of(case)
    with case.place() as place:
        for name, (sink, reason) in case.mistakes(place).items():
            tried = _first_checkpoint(bound(sink, batches), batches)
            error = await asyncio.wait_for(refused(tried, name), _CALL_S_MAX)
            expect(reason in str(error), f"{name}: the error does not say `{reason}`: {error}")
            expect_no_secrets(case, f"{name}: the error", str(error))


async def _first_checkpoint(sink: Sink, batches: Sequence[Batch]) -> None:
    """Do what a job does with a sink up to its first checkpoint."""
    await asyncio.to_thread(
        sink.check_output, SinkRun("conformance", "sink", {}, None, lambda _: None)
    )
    job = _SinkJob(sink, batches, None)
    operator: SinkOperator | None = None
    try:
        operator = await job.start()
        operator.process(batches[0], 0)
        await job.checkpoint(operator, 1)
    finally:
        if operator is not None:
            operator.close()


@CHECKS.check(Feature.CONNECTS)
async def its_connection_can_be_checked(case: SinkCase) -> None:
    """Before a run, wrong settings are found, no secret is shown, and nothing is written."""
    batches = batches_of(case)
    with case.place() as place:
        given = Feature.EXACTLY_ONCE in case.features
        sink = bound(case.sink(place, "exactly_once" if given else "at_least_once"), batches)
        mistakes = case.mistakes(place) if Feature.MISTAKES in case.features else {}
        wrong = {name: (bound(each, batches), reason) for name, (each, reason) in mistakes.items()}
        await check_connections(case, sink, wrong)
        expect(not case.visible(place), "the check has written records")
        if Feature.PENDING in case.features:
            expect(not case.pending(place), "the check has left something open")


@CHECKS.check()
async def tells_no_secrets(case: SinkCase) -> None:
    """Neither `repr` nor the description for `explain` shows a secret."""
    with case.place() as place:
        given = Feature.EXACTLY_ONCE in case.features
        sink = case.sink(place, "exactly_once" if given else "at_least_once")
        expect_no_secrets(case, "repr", repr(sink))
        expect_no_secrets(case, "describe", sink.describe())
